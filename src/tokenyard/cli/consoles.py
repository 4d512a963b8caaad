"""Numbers, lines and tables on the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

PIPED_WIDTH = 170

Rows = Iterable[Sequence[RenderableType]]


def bytes_text(count: float) -> str:
    """``1234567`` to ``1.23 MB`` (powers of 1000)."""
    return _scaled(count, "B", "kB", "MB", "GB", "TB")


def seconds_text(seconds: float) -> str:
    """``0.00123`` to ``1.23 ms``."""
    return _scaled(seconds * 1e6, "us", "ms", "s")


def _scaled(value: float, *units: str) -> str:
    """In the first unit, each 1000 of the one before, that needs three digits or less."""
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {units[-1]}"


def table_console(*, quiet: bool = False) -> Console:
    """The terminal; elsewhere wide enough for tables."""
    terminal = Console(quiet=quiet)
    return terminal if terminal.is_terminal else Console(width=PIPED_WIDTH, quiet=quiet)


def leading_console() -> tuple[bool, Console]:
    """Whether this process prints and writes, and where to; other ranks' consoles are quiet."""
    leads = int(os.environ.get("RANK", 0)) == 0
    return leads, table_console(quiet=not leads)


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
