"""Work that ranks do for a command, and how far they are."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Protocol, TypeVar, cast

import torch.distributed as dist
from rich.console import Console

from tokenyard import launch

POLL_SECONDS, LINE_SECONDS = 0.1, 5.0
T = TypeVar("T")


class Counter(Protocol):
    """How many stages are done. One rank writes it, the process that prints reads it."""

    value: int


def advance(counter: Counter | None) -> None:
    """Count one more stage as done, once for all ranks. Without a counter nothing happens."""
    if counter is not None:
        counter.value += dist.get_rank() == 0


def on_all_ranks(run: Callable[..., T], ranks: int, device: str, *arguments: object) -> T:
    """What rank 0 returns of ``run(device, *arguments)``: on a launcher's ranks, else our own."""
    if not launch.under_torchrun():
        return launch.spawn(run, ranks, *arguments, device=device)[0]
    with launch.joined_by_launcher(device) as here:
        return run(here, *arguments)


@contextmanager
def progress(
    stages: Sequence[str], console: Console, *, live: bool = True
) -> Generator[Counter, None, None]:
    """Yield a counter (which spawned ranks may be given) and say which stage of ``stages`` follows
    those counted.

    On a terminal a line says so. Elsewhere, and without ``live`` (ranks that print would tear it),
    lines on stderr do: at once, then every :data:`LINE_SECONDS`. A quiet console says nothing.
    """
    counter = cast(Counter, multiprocessing.get_context("spawn").Value("i", 0, lock=False))
    if console.quiet:
        yield counter
        return
    start, over = time.monotonic(), threading.Event()
    line = console.status("") if live and console.is_terminal else None

    def tell() -> None:
        done = min(counter.value, len(stages) - 1)
        told = f"{stages[done]} ({done} of {len(stages)} stages done)"
        if line is not None:
            line.update(told)
            return
        with suppress(OSError):  # nobody reads it any more: no reason to stop
            print(f"{time.monotonic() - start:6.0f} s  {told}", file=sys.stderr, flush=True)

    def follow() -> None:
        while not over.wait(POLL_SECONDS if line else LINE_SECONDS):
            tell()

    follower = threading.Thread(target=follow, daemon=True)
    with line or nullcontext():
        tell()
        follower.start()
        try:
            yield counter
        finally:
            over.set()
            follower.join()
