"""What the first of a command's ranks tells: numbers, lines and tables on stdout, progress on
stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from tokenyard import launch

BEGIN = time.monotonic()
PIPED_WIDTH = 170

T = TypeVar("T")
Rows = Iterable[Sequence[RenderableType]]


def bytes_text(count: float) -> str:
    """``1234567`` to ``1.23 MB`` (powers of 1000)."""
    return _scaled(count, "B", "kB", "MB", "GB", "TB")


def seconds_text(seconds: float) -> str:
    """``0.00123`` to ``1.23 ms``."""
    return _scaled(seconds * 1e6, "us", "ms", "s")


def _scaled(value: float, unit: str, *larger: str) -> str:
    """In the first unit, each 1000 of the one before, that needs three digits or less."""
    if value < 999.5 or not larger:
        return f"{value:.3g} {unit}"
    return _scaled(value / 1000, *larger)


def leads() -> bool:
    """Whether this process is the one that prints and writes files."""
    return int(os.environ.get("RANK", 0)) == 0


def table_console(*, quiet: bool = False) -> Console:
    """The terminal; elsewhere wide enough for tables."""
    terminal = Console(quiet=quiet)
    return terminal if terminal.is_terminal else Console(width=PIPED_WIDTH, quiet=quiet)


def print_line(console: Console, text: str) -> None:
    """A line of markup, as long as it is."""
    console.print(text, highlight=False, soft_wrap=True)


def print_table(console: Console, title: str, columns: str, rows: Rows) -> None:
    """A blank line, a bold title and a table. ``columns``: heads with ``|`` between; those that
    begin with ``<`` are set left, the others right."""
    named = bool(columns.strip("<|"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=named)
    for head in columns.split("|"):
        table.add_column(head.removeprefix("<"), justify="left" if head[:1] == "<" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    console.print(table)


def say(text: str) -> None:
    """Print a line on stderr, once for all ranks, behind the seconds since the command began."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with suppress(OSError):  # nobody reads it any more: no reason to stop
            print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


def on_all_ranks(run: Callable[..., T], ranks: int, device: str, *arguments: object) -> T:
    """What rank 0 returns of ``run(device, *arguments)``: on a launcher's ranks, else our own."""
    if not launch.under_torchrun():
        say(f"starting {ranks} ranks")
        return launch.spawn(run, ranks, *arguments, device=device)[0]
    with launch.joined_by_launcher(device) as here:
        return run(here, *arguments)
