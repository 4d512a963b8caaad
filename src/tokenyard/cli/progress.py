"""A progress bar for work that other processes do."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

POLL_SECONDS = 0.1


class Counter(Protocol):
    """How many stages are done. One rank writes it, the process that draws reads it."""

    value: int


@contextmanager
def progress(stages: Sequence[str], console: Console) -> Generator[Counter, None, None]:
    """Yield a counter (which spawned ranks may be given) and draw a bar that names the stage after those counted.

    Draws nothing where ``console`` is no terminal.
    """
    counter = cast(Counter, multiprocessing.get_context("spawn").Value("i", 0, lock=False))
    if not console.is_terminal:
        yield counter
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    over = threading.Event()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(stages[0], total=len(stages))

        def follow() -> None:
            while not over.wait(POLL_SECONDS):
                done = min(counter.value, len(stages) - 1)
                bar.update(task, completed=done, description=stages[done])

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield counter
        finally:
            over.set()
            follower.join()
