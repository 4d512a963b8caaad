"""Times of calls and kernels: DeepEP's ``deep_ep.utils.testing``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from tokenyard.errors import NotSupported

empty_suppress = nullcontext
"""A context that does nothing."""
_CACHE_BYTES = 256_000_000
_SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def flush_l2_cache(enabled: bool = True) -> None:
    """Write more memory than the caches of a GPU hold."""
    if enabled and torch.cuda.is_available():
        torch.zeros(_CACHE_BYTES // 4, dtype=torch.int32, device="cuda")


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Mean, least and most seconds, by CUDA events or the clock, without the first call."""
    for _ in range(num_warmups):
        fn()
    stamps: list[tuple[Any, Any]] = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        begin = _stamp()
        fn()
        stamps.append((begin, _stamp()))
        if post_fn is not None:
            post_fn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in stamps]
    else:
        seconds = [end - begin for begin, end in stamps]
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted), min(counted), max(counted)


def _stamp() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def suppress_stdout_stderr() -> Generator[None, None, None]:
    """A context in which nothing reaches the terminal, whoever writes it."""
    with open(os.devnull, "w") as nothing:
        kept = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in kept:
                os.dup2(nothing.fileno(), number)
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Mean seconds of the kernels whose names contain ``kernel_names``, by the profiler: one
    number, or one per name; with several kernels per call of a name, a list of numbers in its
    place. NotSupported: there is no GPU, or no such kernel ran (names of DeepEP's C++ are not those
    here)."""
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    if not torch.cuda.is_available():
        raise NotSupported("bench_kineto() measures kernels of a GPU, and there is none: use bench")
    fn()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with suppress_stdout_stderr() if suppress_kineto_output else nullcontext():
        with torch.profiler.profile(activities=kinds) as profiler:
            for _ in range(num_tests):
                flush_l2_cache(flush_l2)
                if barrier_comm_profiling and barrier is not None:
                    barrier()
                elif barrier_comm_profiling:
                    dist.all_reduce(torch.ones(1, device="cuda"))
                fn()
            torch.cuda.synchronize()
        if trace_path is not None:
            profiler.export_chrome_trace(trace_path)
    times = [_times(profiler.events(), name, num_kernels_per_period) for name in names]
    return times[0] if isinstance(kernel_names, str) else tuple(times)


def _times(events: Sequence[Any] | None, name: str, period: int) -> float | list[float]:
    """Mean seconds of the kernels called ``name``: of all, or of each place in a period."""
    ran = [each for each in events or () if each.device_type is DeviceType.CUDA]
    found = sorted((each for each in ran if name in each.name), key=lambda e: e.time_range.start)
    if not found or len(found) % period:
        others = ", ".join(sorted({each.name for each in ran})) or "none"
        raise NotSupported(
            f"{len(found)} kernels called {name!r} ran, not a multiple of {period}: there were "
            f"{others}"
        )
    seconds = [each.time_range.elapsed_us() / 1e6 for each in found]
    means = [sum(seconds[at::period]) * period / len(seconds) for at in range(period)]
    return means[0] if period == 1 else means


def parse_num_bytes(text: str) -> int:
    """Bytes, with a binary suffix or none: ``1G``, ``64 MiB``, ``512k``, ``1048576``. ValueError:
    it is no such number, or not positive."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    number = int(float(match[1]) * _SCALES[match[2].lower()]) if match else 0
    if number <= 0:
        raise ValueError(f"{text!r} must be a positive number of bytes, such as 1G, 64M or 512k")
    return number
