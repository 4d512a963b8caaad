"""The suite ``collective``: sweeps of engine ``collective`` beside what it is made of. It has no
bars: nothing is judged.
"""

from __future__ import annotations

from typing import Any

from benchmarks.record import Page, find, head, markdown_table, times
from tokenyard.cli.bench import Plan
from tokenyard.cli.bench_report import Measurement, ratio
from tokenyard.cli.plots import save_bench
from tokenyard.testing.baselines import FRESH_COPIES, KEPT_COPIES
from tokenyard.testing.cases import sweep
from tokenyard.testing.checked_calls import COMBINE, DISPATCH

SKEWS = ["uniform", "zipf"]


def plan(sizes: dict[str, list[int]], iterations: int, warmup: int = 3) -> Plan:
    """All combinations of ``sizes`` under both routings, BF16, flat."""
    return Plan(sweep(**sizes, skew=SKEWS), ["auto"], iterations, warmup, link_gbs=None, seed=0)


COLLECTIVE = {
    "cuda": plan(
        {"tokens": [128, 1024, 4096], "hidden": [7168], "topk": [8], "experts": [256]}, 30
    ),
    "cpu": plan({"tokens": [2048], "hidden": [2048], "topk": [8], "experts": [64]}, 40),
}
"""The sweep of the record, by device."""


def collective_markdown(lines: list[Measurement], suite: Plan, facts: dict[str, Any]) -> str:
    """A table per routing. ``facts`` are those of the JSON."""
    parts = [
        *head("Engine `collective` on {devices}", facts),
        "Microseconds of the Python call until its results are complete, of the slowest rank per "
        f"round: **median** (min, p99) of {suite.iterations} rounds, all rows of a column timed in "
        "turn in one process group; BF16; every result was compared with the oracle first.",
    ]
    for skew in dict.fromkeys(line.case.skew for line in lines):
        mine = [line for line in lines if line.case.skew == skew]
        case, sizes = mine[0].case, list(dict.fromkeys(line.case.tokens for line in mine))
        names = dict.fromkeys((line.phase, line.name) for line in mine)
        rows = [
            [f"{phase}: {name}", *(_cell(mine, phase, name, tokens) for tokens in sizes)]
            for phase, name in names
        ]
        title = f"## {skew} routing, hidden {case.hidden}, top-{case.topk} of {case.experts}"
        columns = ["", *(f"{tokens} tokens/rank" for tokens in sizes)]
        said = [
            f"- {tokens} tokens: {text}"
            for tokens in sizes
            for text in verdicts([line for line in mine if line.case.tokens == tokens])
        ]
        parts += [title, markdown_table(columns, rows), "\n".join(said)]
    wrong = [f"- {line.phase} by {line.name}: {line.error}" for line in lines if line.error]
    return "\n\n".join([*parts, *(["\n".join(["No time:", "", *wrong])] if wrong else [])]) + "\n"


def verdicts(rows: list[Measurement]) -> list[str]:
    """Dispatch beside what copies around a plain exchange take, for each engine of one case."""
    lines: list[str] = []
    for row in rows:
        if row.phase == COMBINE or not row.ours or row.error:
            continue
        told = [
            (f"the time of {name}", "", ratio(row, rows, name, DISPATCH))
            for name in (FRESH_COPIES, KEPT_COPIES)
        ]
        if row.phase == DISPATCH:
            told.append(("bytes sent + received", "peak memory ", row.peak_per_moved))
        for of, what, value in told:
            text = f"{of}: n/a" if value is None else f"{value:.2f}x {of}"
            lines.append(f"{row.name}, {row.phase}: {what}{text}")
    return lines


def _cell(lines: list[Measurement], phase: str, name: str, tokens: int) -> str:
    line = find(lines, phase=phase, name=name, tokens=tokens)
    return times(None if line is None else line.wall)


PAGE = Page(collective_markdown, save_bench)
