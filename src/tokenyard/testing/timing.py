"""How to time collective calls, so that the figures of several systems can be compared.

Each round times each call once, in a shuffled order (the same on every rank), so that no call
always inherits heap and caches from the same one. Ranks meet before each call, outside its time.
What counts is the slowest rank of each round.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Timed = Callable[[int], object]
"""A timed call, given the number of its input; its result goes after the clock has stopped."""

_untyped: Any = dist

MICROSECONDS, EVENT_MICROSECONDS = 1e6, 1e3


class Stats(NamedTuple):
    """Statistics of one series, in its unit."""

    median: float
    p99: float
    min: float


class Series(NamedTuple):
    """Microseconds of the slowest rank, one entry per round: the Python call until its results are
    complete; and between two events on the current stream around it, None without a GPU."""

    wall: list[float]
    device: list[float] | None


def summarise(times: Sequence[float]) -> Stats:
    """Median, minimum and p99: the smallest time that at least 99 % of the times do not exceed.

    >>> summarise([4.0, 1.0, 3.0, 2.0])
    Stats(median=2.5, p99=4.0, min=1.0)
    """
    ordered = sorted(times)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Stats(statistics.median(ordered), p99, ordered[0])


class Clock:
    """Times one call on one rank: wall clock everywhere, CUDA events where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.meeting = torch.zeros(1, device=device)

    def events(self) -> list[Any]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else []

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def wait_for_ranks(self) -> None:
        """Return when every rank is here and idle: none has an all-reduce's sum before."""
        self.synchronize()
        _untyped.all_reduce(self.meeting)
        self.synchronize()

    def time(self, call: Timed, number: int) -> tuple[float, float]:
        """(wall, device) microseconds of ``call(number)``; device is 0 without a GPU."""
        events = self.events()
        self.wait_for_ranks()
        begin = time.perf_counter()
        for event in events[:1]:
            event.record()
        result = call(number)
        for event in events[1:]:
            event.record()
        self.synchronize()
        wall = (time.perf_counter() - begin) * MICROSECONDS
        del result
        return wall, events[0].elapsed_time(events[1]) * EVENT_MICROSECONDS if events else 0.0


def time_interleaved(
    calls: Sequence[Timed | None],
    *,
    iterations: int,
    warmup: int,
    num_inputs: int,
    device: torch.device,
    seed: int = 0,
    clock: Clock | None = None,
) -> list[Series | None]:
    """Time ``calls``, the same on every rank of the default process group, in turn; None stands for
    a call that is not timed. Collective.

    ``warmup`` rounds come before the ``iterations`` that count; round ``i`` uses input ``i %
    num_inputs``. ``seed``: of the order inside the rounds, the same on every rank. ``clock``: what
    takes a time. Returns one series per call, equal on every rank.
    """
    clock, shuffled = clock or Clock(device), random.Random(seed)
    order = [(at, call) for at, call in enumerate(calls) if call is not None]
    times = torch.zeros(2, len(calls), iterations, dtype=torch.float64)
    for turn in range(-warmup, iterations):
        shuffled.shuffle(order)
        for at, call in order:
            taken = clock.time(call, turn % num_inputs)
            if turn >= 0:
                times[:, at, turn] = torch.tensor(taken, dtype=torch.float64)
    walls, on_device = slowest_rank(times, device).unbind(0)
    return [
        None if call is None else Series(wall.tolist(), taken.tolist() if clock.cuda else None)
        for call, wall, taken in zip(calls, walls, on_device, strict=True)
    ]


def slowest_rank(times: Tensor, device: torch.device) -> Tensor:
    """The largest of each entry over all ranks, on the CPU. Collective."""
    largest = times.to(device, copy=True)
    _untyped.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.cpu()


def on_ranks(value: int, device: torch.device) -> list[int]:
    """``value`` of every rank. Collective."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    mine[dist.get_rank()] = value
    return [int(each) for each in slowest_rank(mine, device)]


def peak_extra_bytes(call: Timed, number: int, device: torch.device) -> int:
    """Most bytes that tensors held at once during ``call(number)`` beyond those that lived before.

    Counts what torch's allocators hand out, on all threads that work for this call, not what a
    communication library or a driver keeps for itself. (Resident memory would, but it depends on
    what the C heap kept from earlier calls, by up to half of what is measured here.)
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call(number)
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    # Some builds of torch log every start of the profiler to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = call(number)
    del result
    recorded: Any = prof.profiler
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in changes), initial=0))
