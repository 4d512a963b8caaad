"""Asynchronous calls the DeepEP way: on a communication stream of the buffer, with an event at their end.

The results exist at once and are good for a stream that waited for the event. On the CPU a call is over when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.handles import LazyTuple
from tokenyard.lane import keep_for

Result = TypeVar("Result")


class Streams:
    """Where the calls of one buffer run."""

    def __init__(self) -> None:
        self._comm: torch.cuda.Stream | None = None
        self._ready: Any = None

    def comm(self, device: torch.device | None = None) -> Any:
        """The communication stream; without CUDA one that stands for nothing."""
        if self._comm is None:
            if not torch.cuda.is_available():
                return torch.cpu.Stream()
            self._comm = torch.cuda.Stream(device)
        return self._comm

    def run(
        self,
        call: Callable[..., Result],
        arguments: tuple[Any, ...],
        like: Tensor,
        after: EventOverlap | None,
        later: bool,
        reads: tuple[Any, ...],
        handle: LazyTuple | None = None,
    ) -> tuple[Result, EventOverlap]:
        """``call(*arguments)`` on the device of ``like``, behind the event ``after`` (if any), without autograd, as DeepEP does.

        Modes of ``torch.overrides`` see nothing of it either: ``torch.set_default_device``, which DeepEP's own programs call,
        sets one, under which even ``tensor.shape`` costs ten times as much.

        Args:
            call: returns a tensor, or a tuple of tensors, a handle and other things.
            later: on the communication stream, else on the current one.
            reads: tensors that the call reads, also in tuples.
            handle: that the call uses; made on a stream of its own time.
        """
        tracks = torch.is_grad_enabled()
        if tracks:
            torch.set_grad_enabled(False)  # sooner than no_grad()
        try:
            with DisableTorchFunction():
                if not like.is_cuda:
                    return call(*arguments), EventOverlap(EventHandle() if later else None)
                device = like.device
                if device.index != torch.cuda.current_device():
                    with torch.cuda.device(device):
                        return self._on_gpu(call, arguments, device, after, later, reads, handle)
                if later or after is not None or handle is not None:
                    return self._on_gpu(call, arguments, device, after, later, reads, handle)
                return call(*arguments), EventOverlap()  # as there: sooner
        finally:
            if tracks:
                torch.set_grad_enabled(True)

    def _on_gpu(
        self,
        call: Callable[..., Result],
        arguments: tuple[Any, ...],
        device: torch.device,
        after: EventOverlap | None,
        later: bool,
        reads: tuple[Any, ...],
        handle: LazyTuple | None,
    ) -> tuple[Result, EventOverlap]:
        event = None if after is None else after.event
        if not later:
            if event is not None:
                event.current_stream_wait()
            if handle is not None and handle.made_on is not None:
                handle.keep_for(torch.cuda.current_stream())
            return call(*arguments), EventOverlap(None)
        here, stream = torch.cuda.current_stream(), self.comm(device)
        if event is not None:
            event.wait_on(stream)
        else:  # one event serves all calls: to wait means to wait for what it was when the wait began
            self._ready = here.record_event(self._ready)
            stream.wait_event(self._ready)
        torch.cuda.set_stream(stream)
        try:
            result = call(*arguments)
        finally:
            torch.cuda.set_stream(here)
        done = EventHandle.of(stream)
        keep_for(reads, stream)
        if handle is not None:
            handle.keep_for(stream)
        self._hand_over(result, here)
        return result, EventOverlap(done)

    def _hand_over(self, result: Any, here: Any) -> None:
        """Results are in memory of the communication stream, and ``here`` will use them."""
        for part in result if isinstance(result, tuple) else (result,):  # pyright: ignore[reportUnknownVariableType]
            if isinstance(part, LazyTuple):
                part.made_on = self._comm
            else:
                keep_for(part, here)
