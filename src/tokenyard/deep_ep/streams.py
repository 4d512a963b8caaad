"""Asynchronous calls the DeepEP way: on a communication stream of the buffer, with an event at their end.

The results exist at once and are good for a stream that waited for the event. On the CPU a call is over when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.handles import LazyTuple

Result = TypeVar("Result")


class Streams:
    """Where the calls of one buffer run."""

    def __init__(self) -> None:
        self._comm: torch.cuda.Stream | None = None

    def comm(self, device: torch.device | None = None) -> Any:
        """The communication stream; without CUDA one that stands for nothing."""
        if not torch.cuda.is_available():
            return torch.cpu.Stream()
        if self._comm is None:
            self._comm = torch.cuda.Stream(device)
        return self._comm

    def run(
        self,
        call: Callable[[], Result],
        device: torch.device,
        after: EventOverlap | None,
        later: bool,
        *reads: Any,
        handle: LazyTuple | None = None,
    ) -> tuple[Result, EventOverlap]:
        """Make a call on tensors of ``device``, behind the event ``after`` (if any), without autograd, as DeepEP does.

        Args:
            later: on the communication stream, else on the current one.
            reads: tensors that the call reads, and may be pairs of them.
            handle: that the call uses; made on a stream of its own time.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(call, device, after, later, *reads, handle=handle)
        event = None if after is None else after.event
        if device.type != "cuda":
            return call(), EventOverlap(EventHandle() if later else None)
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run(call, device, after, later, *reads, handle=handle)
        if not later:
            if event is not None:
                event.current_stream_wait()
            if handle is not None and handle.on_comm:
                keep_for(tuple(handle.native.plan), torch.cuda.current_stream(device))
            return call(), EventOverlap(None)
        here, stream = torch.cuda.current_stream(device), self.comm(device)
        event = event or EventHandle()
        with torch.cuda.stream(stream):
            event.current_stream_wait()
            result = call()
            done = EventHandle()
        keep_for(reads, stream)
        keep_for(result, here)
        if handle is not None:  # made on another stream, which may be that of another buffer
            keep_for(tuple(handle.native.plan), stream)
        return result, EventOverlap(done)


def keep_for(tensors: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that ``stream`` uses these tensors, which are in memory of another stream."""
    if isinstance(tensors, Tensor):
        if tensors.is_cuda:
            tensors.record_stream(stream)
    elif isinstance(tensors, LazyTuple):
        tensors.on_comm = True
    elif isinstance(tensors, (tuple, list)):
        for each in tensors:  # pyright: ignore[reportUnknownVariableType]
            keep_for(each, stream)
