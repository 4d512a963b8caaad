"""What ``tokenyard demo`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.markup import escape

from tokenyard.cli.consoles import bytes_text, plain_table, print_line, print_section, seconds_text
from tokenyard.cli.demo_rank import DemoResult

RANKS = "Rank|Experts|Tokens|Rows received|Bytes sent|Bytes received"
LOAD, PHASES = "Expert|Rank|Tokens|<", "<Phase|Time|<"
ERRORS = "<Tensor (of its kind the worst)|Error|Limit|<"

BAR_COLOURS = ("cyan", "yellow")
"""Neighbouring ranks take turns; told apart by every kind of colour vision."""

BAR_WIDTH = 40
MOST_BARS = 32
"""Experts shown; of more, the busiest."""


def print_result(console: Console, result: DemoResult, limit: float) -> bool:
    """Everything that there is to say about a run; returns whether every error is within
    ``limit``.
    """
    errors, worst = result.errors, worst_of_each_kind(result.errors)
    console.print(f"Engine {escape(result.why)}", highlight=False)
    counts = (map(str, each) for each in (result.experts, result.tokens, result.rows))
    moved = (map(bytes_text, map(sum, each)) for each in (result.sent, result.received))
    ranks = zip(map(str, range(len(result.rows))), *counts, *moved, strict=True)
    verdicts = ("[red]mismatch[/red]", "[green]ok[/green]")
    compared = [
        (escape(name), f"{errors[name]:.1e}", f"{limit:.0e}", verdicts[errors[name] <= limit])
        for name in worst
    ]
    sections: dict[str, tuple[str, Iterable[Sequence[RenderableType]]]] = {
        "Ranks (bytes over the wire per step, forward and backward)": (RANKS, ranks),
        f"Expert load ({_imbalance(result.load)})": (LOAD, _load(result)),
        "Time (median over the steps, slowest rank)": (PHASES, _phases(result.seconds)),
        "Relative error against the same layer on one process": (ERRORS, compared),
    }
    for title, (heads, rows) in sections.items():
        print_section(console, title, plain_table(*heads.split("|"), rows=rows))
    console.print()
    wrong = [name for name in worst if not errors[name] <= limit]
    for name in wrong:
        text = f"MISMATCH: {name}: relative error {errors[name]:.1e}, but the limit is {limit:.0e}"
        print_line(console, f"[bold red]{escape(text)}[/bold red]")
    if not wrong:
        most = f"the largest relative error is {max(errors.values()):.1e}"
        text = f"The output and all {len(errors) - 1} gradients match; {most}"
        console.print(f"[green]{text}[/green]", highlight=False)
    return not wrong


def worst_of_each_kind(errors: Mapping[str, float]) -> list[str]:
    """Of ``gate[0] gradient``, ``gate[1] gradient``, ... only the one with the largest error."""
    worst: dict[str, str] = {}
    for name, error in errors.items():
        kind = name.partition("[")[0]
        if kind not in worst or error > errors[worst[kind]]:
            worst[kind] = name
    return list(worst.values())


def _imbalance(load: Sequence[int]) -> str:
    mean = sum(load) / len(load)
    shown = f"{MOST_BARS} busiest of {len(load)}; " if len(load) > MOST_BARS else ""
    return f"{shown}the largest is {max(load) / mean:.2f} times the mean of {mean:.3g} tokens"


def _bar(value: float, most: float, rank: int = 0) -> Bar:
    return Bar(most, 0, value, width=BAR_WIDTH, color=BAR_COLOURS[rank % len(BAR_COLOURS)])


def _load(result: DemoResult) -> list[Sequence[RenderableType]]:
    load, most = result.load, max(result.load)
    owners = [rank for rank, held in enumerate(result.experts) for _ in range(held)]
    busiest = sorted(range(len(owners)), key=lambda expert: -load[expert])[:MOST_BARS]
    return [
        (str(at), str(owners[at]), str(load[at]), _bar(load[at], most, owners[at]))
        for at in sorted(busiest)
    ]


def _phases(seconds: Mapping[str, float]) -> list[Sequence[RenderableType]]:
    most, total = max(seconds.values()), sum(seconds.values())
    bars = [(name, seconds_text(each), _bar(each, most)) for name, each in seconds.items()]
    return [*bars, ("sum", seconds_text(total))]
