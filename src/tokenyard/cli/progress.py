"""Progress of work that other processes do: a bar on a terminal, lines on stderr elsewhere."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, cast

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

POLL_SECONDS = 0.1
LINE_SECONDS = 5.0


class Counter(Protocol):
    """How many stages are done. One rank writes it, the process that draws reads it."""

    value: int


def advance(counter: Counter | None) -> None:
    """Count one more stage as done, once for all ranks. Without a counter nothing happens."""
    if counter is not None:
        counter.value += dist.get_rank() == 0


@contextmanager
def progress(
    stages: Sequence[str], console: Console, *, bar: bool = True
) -> Generator[Counter, None, None]:
    """Yield a counter (which spawned ranks may be given) and say which stage of ``stages`` follows
    those counted.

    On a terminal a bar says so. Elsewhere, and without ``bar`` (ranks that print would tear it), a
    line on stderr does: at once, then every :data:`LINE_SECONDS`. A quiet console says nothing.
    """
    counter = cast(Counter, multiprocessing.get_context("spawn").Value("i", 0, lock=False))
    if console.quiet:
        yield counter
        return
    say = _bar if bar and console.is_terminal else _lines
    with say(stages, counter, console):
        yield counter


def _lines(stages: Sequence[str], counter: Counter, _: Console) -> AbstractContextManager[None]:
    start = time.monotonic()

    def tell() -> None:
        done = min(counter.value, len(stages) - 1)
        told = f"{stages[done]} ({done} of {len(stages)} stages done)"
        with suppress(OSError):  # nobody reads it any more: no reason to stop
            print(f"{time.monotonic() - start:6.0f} s  {told}", file=sys.stderr, flush=True)

    tell()
    return _every(LINE_SECONDS, tell)


@contextmanager
def _bar(stages: Sequence[str], counter: Counter, console: Console) -> Generator[None, None, None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(stages[0], total=len(stages))

        def update() -> None:
            done = min(counter.value, len(stages) - 1)
            drawn.update(task, completed=done, description=stages[done])

        with _every(POLL_SECONDS, update):
            yield


@contextmanager
def _every(seconds: float, call: Callable[[], object]) -> Generator[None, None, None]:
    """Make ``call`` again and again meanwhile, on a thread."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(seconds):
            call()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
