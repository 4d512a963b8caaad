"""A clock that also times calls on the GPU alone, their launches queued beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenyard.testing.timing import EVENT_MICROSECONDS, Clock, Timed

_untyped: Any = dist
_untyped_cuda: Any = torch.cuda

CYCLES_PER_MICROSECOND = 2000


class QueuedClock(Clock):
    """Makes each call a second time, for device time without launches.

    Args:
        head_start_us: the GPU begins with that call so much later than the host.
        barrier: by which ranks meet on the GPU besides.
    """

    def __init__(
        self,
        device: torch.device,
        head_start_us: float,
        barrier: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(device)
        self.head_start_us, self.barrier = head_start_us, barrier

    def time(self, call: Timed, number: int) -> tuple[float, float]:
        """(wall, device) microseconds of ``call(number)``; device is 0 without a GPU."""
        wall, _ = super().time(call, number)
        return wall, self.time_queued(call, number)

    def time_queued(self, call: Timed, number: int) -> float:
        """Microseconds on the GPU of ``call(number)``, whose launches the host has queued before
        the GPU gets to them.

        The GPU is kept busy meanwhile; then ranks meet on it, and what follows is timed. 0 without
        a GPU.
        """
        if not self.cuda:
            return 0.0
        events = self.events()
        self.wait_for_ranks()
        _untyped_cuda._sleep(int(self.head_start_us * CYCLES_PER_MICROSECOND))
        _untyped.all_reduce(self.meeting)
        if self.barrier is not None:
            self.barrier()
        events[0].record()
        result = call(number)
        events[1].record()
        self.synchronize()
        del result
        return events[0].elapsed_time(events[1]) * EVENT_MICROSECONDS
