"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

PIPED_WIDTH = 150


def bytes_text(count: float) -> str:
    """``1234567`` to ``1.23 MB`` (powers of 1000)."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def seconds_text(seconds: float) -> str:
    """``0.00123`` to ``1.23 ms``."""
    return _scaled(seconds * 1e6, ("us", "ms", "s"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """In the first of ``units``, each 1000 of the one before, that needs three digits or less."""
    *smaller, largest = units
    for unit in smaller:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {largest}"


def plain_table(*columns: str, rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """A table; columns whose name starts with ``<`` are set left, the others right."""
    named = any(name.strip("<") for name in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=named)
    for name in columns:
        table.add_column(name.removeprefix("<"), justify="left" if name[:1] == "<" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def table_console(*, quiet: bool = False) -> Console:
    """The terminal; elsewhere wide enough for tables."""
    terminal = Console(quiet=quiet)
    return terminal if terminal.is_terminal else Console(width=PIPED_WIDTH, quiet=quiet)


def print_line(console: Console, text: str) -> None:
    """A line of markup, as long as it is."""
    console.print(text, highlight=False, soft_wrap=True)


def print_section(console: Console, title: str, table: Table) -> None:
    """A blank line, a bold title and a table."""
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    console.print(table)
