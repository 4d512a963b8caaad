"""Tables and bars on the terminal; what the demo prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.cli.demo_rank import DemoResult

BAR_COLOURS = ("cyan", "yellow")
"""Neighbouring ranks take turns; told apart by every kind of colour vision."""

BAR_WIDTH, PIPED_WIDTH = 40, 150
MOST_BARS = 32
"""Experts shown; of more, the busiest."""


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


def plain_table(*columns: str) -> Table:
    """An empty table; columns whose name starts with ``<`` are set left, the others right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name.removeprefix("<"), justify="left" if name[:1] == "<" else "right")
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


def print_result(console: Console, result: DemoResult, limit: float) -> bool:
    """Everything that ``tokenyard demo`` has to say about a run; returns whether every error is
    within ``limit``.
    """
    errors = result.errors
    console.print(f"Engine {escape(result.why)}", highlight=False)
    sections = {
        "Ranks (bytes over the wire per step, forward and backward)": _ranks(result),
        f"Expert load ({_imbalance(result.load)})": _load(result),
        "Time (median over the steps, slowest rank)": _phases(result.seconds),
        "Relative error against the same layer on one process": _errors(errors, limit),
    }
    for title, table in sections.items():
        print_section(console, title, table)
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    console.print()
    for name in worst_of_each_kind(wrong):
        text = f"MISMATCH: {name}: relative error {wrong[name]:.1e}, but the limit is {limit:.0e}"
        print_line(console, f"[bold red]{escape(text)}[/bold red]")
    if not wrong:
        text = (
            f"The output and all {len(errors) - 1} gradients match; the largest relative error is"
        )
        console.print(f"[green]{text} {max(errors.values()):.1e}[/green]", highlight=False)
    return not wrong


def worst_of_each_kind(errors: Mapping[str, float]) -> list[str]:
    """Of ``gate[0] gradient``, ``gate[1] gradient``, ... only the one with the largest error."""
    worst: dict[str, str] = {}
    for name, error in errors.items():
        kind = name.partition("[")[0]
        if kind not in worst or error > errors[worst[kind]]:
            worst[kind] = name
    return list(worst.values())


def _ranks(result: DemoResult) -> Table:
    heads = ("Rank", "Experts", "Tokens", "Rows received", "Bytes sent", "Bytes received")
    table = plain_table(*heads)
    for rank, counts in enumerate(zip(result.experts, result.tokens, result.rows, strict=True)):
        moved = (sum(result.sent[rank]), sum(result.received[rank]))
        table.add_row(str(rank), *map(str, counts), *map(bytes_text, moved))
    return table


def _imbalance(load: Sequence[int]) -> str:
    mean = sum(load) / len(load)
    shown = f"{MOST_BARS} busiest of {len(load)}; " if len(load) > MOST_BARS else ""
    return f"{shown}the largest is {max(load) / mean:.2f} times the mean of {mean:.3g} tokens"


def _load(result: DemoResult) -> Table:
    owners = [rank for rank, held in enumerate(result.experts) for _ in range(held)]
    busiest = sorted(range(len(owners)), key=lambda expert: -result.load[expert])[:MOST_BARS]
    table, most = plain_table("Expert", "Rank", "Tokens", "<"), max(result.load)
    for expert in sorted(busiest):
        rank, load = owners[expert], result.load[expert]
        bar = Bar(most, 0, load, width=BAR_WIDTH, color=BAR_COLOURS[rank % len(BAR_COLOURS)])
        table.add_row(str(expert), str(rank), str(load), bar)
    return table


def _phases(seconds: Mapping[str, float]) -> Table:
    table, most = plain_table("<Phase", "Time", "<"), max(seconds.values())
    for phase, value in seconds.items():
        bar = Bar(most, 0, value, width=BAR_WIDTH, color=BAR_COLOURS[0])
        table.add_row(phase, seconds_text(value), bar)
    table.add_row("sum", seconds_text(sum(seconds.values())))
    return table


def _errors(errors: Mapping[str, float], limit: float) -> Table:
    table = plain_table("<Tensor (of its kind the worst)", "Error", "Limit", "<")
    for name in worst_of_each_kind(errors):
        verdict = "[green]ok[/green]" if errors[name] <= limit else "[red]mismatch[/red]"
        table.add_row(escape(name), f"{errors[name]:.1e}", f"{limit:.0e}", verdict)
    return table
