"""Asynchronous calls the DeepEP way: on a communication stream of the buffer, with an event at the
end. Results exist at once; a stream waits for the event. CPU calls return when they are over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _set_grad_enabled  # pyright: ignore[reportPrivateUsage]

from tokenyard.call_queue import keep_for
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.handles import KeptHandle

Result = TypeVar("Result")

WORDS = {
    "timeout= of ExpertParallel": "TOKENYARD_DEEP_EP_TIMEOUT",
    "ExpertParallel": "Buffer",
    "max_tokens_per_rank": "tokens per rank (num_max_dispatch_tokens_per_rank, or num_worst_tokens "
    "by ranks)",
    "num_topk": "columns of topk_idx",
}
"""Of native errors, and what a caller of ``Buffer`` calls them."""


def in_words_of_deep_ep(error: Exception, words: Mapping[str, str]) -> None:
    """Let an error of a native call speak of what its caller has given."""
    if error.args and isinstance(error.args[0], str):
        whole_words = rf"\b({'|'.join(words)})\b"
        text = re.sub(whole_words, lambda found: words[found[0]], error.args[0])
        error.args = (text, *error.args[1:])


class Streams:
    """Where the calls of one buffer run. ``words``: in which their errors speak."""

    def __init__(self, words: Mapping[str, str] = WORDS) -> None:
        self._words = words
        self._comm: torch.cuda.Stream | None = None
        self._ready: Any = None

    def comm(self) -> Any:
        """The communication stream, of the first current device; without CUDA a stand-in."""
        if self._comm is None:
            if not torch.cuda.is_available():
                return torch.cpu.Stream()
            self._comm = torch.cuda.Stream()
        return self._comm

    def run(
        self,
        call: Callable[..., Result],
        arguments: tuple[Any, ...],
        like: Tensor,
        after: EventOverlap | None,
        later: bool,
        handle: KeptHandle | None = None,
    ) -> tuple[Result, EventOverlap]:
        """``call(*arguments)`` on the device of ``like``, behind the event ``after`` (if any),
        without autograd, as DeepEP does. Modes of ``torch.overrides`` see nothing of it either:
        under that of ``torch.set_default_device`` even ``tensor.shape`` costs ten times as much.

        Args:
            call: returns a tensor, or a tuple of tensors, a handle and other things.
            arguments: among them, also in tuples, all tensors that the call reads, and the handle.
            later: on the communication stream, else on the current one.
            handle: that the call uses, if any; made on a stream of its own time.
        """
        tracks = torch.is_grad_enabled()
        if tracks:
            _set_grad_enabled(False)  # sooner than no_grad()
        try:
            with DisableTorchFunction():
                if not like.is_cuda:
                    return call(*arguments), EventOverlap(EventHandle() if later else None)
                index = like.get_device()
                if index != torch._C._cuda_getDevice():  # pyright: ignore[reportPrivateUsage]
                    with torch.cuda.device(index):
                        return self.run(call, arguments, like, after, later, handle)
                event = None if after is None else after.event
                if later:
                    return self._run_later(call, arguments, event)
                if event is not None:
                    event.current_stream_wait()
                if handle is not None and handle.made_on is not None:
                    handle.keep_for(torch.cuda.current_stream())
                return call(*arguments), EventOverlap()
        except (RuntimeError, ValueError) as error:
            in_words_of_deep_ep(error, self._words)
            raise
        finally:
            if tracks:
                _set_grad_enabled(True)

    def _run_later(
        self, call: Callable[..., Result], arguments: tuple[Any, ...], event: EventHandle | None
    ) -> tuple[Result, EventOverlap]:
        here, stream = torch.cuda.current_stream(), self.comm()
        if event is not None:
            event.wait_on(stream)
        else:
            # One event serves all calls: a wait is for what it was when the wait began.
            self._ready = here.record_event(self._ready)
            stream.wait_event(self._ready)
        torch.cuda.set_stream(stream)
        try:
            result = call(*arguments)
        finally:
            torch.cuda.set_stream(here)
        done = EventHandle.of(stream)
        for part in arguments:
            if isinstance(part, KeptHandle):
                part.keep_for(stream)
            else:
                keep_for(part, stream)
        # results are in memory of the communication stream, and this stream will use them
        made: Any = result
        for part in made if isinstance(made, tuple) else (made,):  # pyright: ignore[reportUnknownVariableType]
            if isinstance(part, KeptHandle):
                part.made_on = self._comm
            else:
                keep_for(part, here)
        return result, EventOverlap(done)
