"""The record of the suite ``twolevel`` as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.calls import BACK, BACK_IN_PLACE, DIRECT, KINDS, PLAIN
from benchmarks.record import (
    MB,
    NO_TIME,
    Line,
    Network,
    Page,
    find,
    head,
    markdown_table,
    network_gbs,
    times,
)
from benchmarks.twolevel_calls import BAR_GBS, BAR_GRID, BAR_SMS, NCCL, TwoLevel
from tokenyard.cli.bench_report import number
from tokenyard.testing.cases import NUM_INPUTS

WAYS = {"in fresh tensors": (PLAIN, BACK), "in place": (DIRECT, BACK_IN_PLACE)}
"""Kinds of dispatch and combine that the bar is for, together."""


def judged(line: Line, suite: TwoLevel) -> str:
    """ "reached" or "missed"; "" for a line that the bar is not for."""
    rate, sms = network_gbs(line), line.case.sms
    if line.case.engine != suite.engine or rate is None or sms is None or sms > BAR_SMS:
        return ""
    return "reached" if rate >= BAR_GBS else "missed"


def twolevel_markdown(lines: list[Line], suite: TwoLevel, facts: dict[str, Any]) -> str:
    """The record. ``facts`` are those of the JSON."""
    plain = [line for line in lines if line.case.rings is None and line.network]
    small = [line for line in lines if line.case.rings is not None and line.network]
    main = [line for line in plain if line.case.tokens == suite.tokens]
    few = (suite.engine, BAR_SMS)
    curve = [line for line in plain if (line.case.engine, line.case.sms) == few]
    parts = [
        *_head(suite, facts),
        f"## Over multiprocessors, {suite.tokens} tokens per rank",
        _table(sorted(main, key=_order_of(suite)), suite),
        f"## Over tokens per rank, {BAR_SMS} multiprocessors",
        _table(sorted(curve, key=lambda line: (_place(line), line.case.tokens)), suite),
    ]
    if small:
        parts += [f"## A batch of {suite.overfull} times all rings", _bounded(small, curve)]
    wrong = [f"- {_where(line)}: {line.error}" for line in lines if line.error]
    parts += ["## The bar", *_verdict(plain, suite)]
    if wrong:
        parts.append("\n".join(["## No time", "", *wrong]))
    return "\n\n".join(parts) + "\n"


def _head(suite: TwoLevel, facts: dict[str, Any]) -> list[str]:
    return [
        *head(f"Engine `{suite.engine}` on {{devices}} as {suite.grid}", facts),
        f"{suite.grid} nodes and ranks per node, hidden {suite.hidden}, top-{suite.topk} of "
        f"{suite.experts} experts, uniform routing, seed {suite.seed}. Dispatches are cached "
        f"(routing known); {suite.calls} calls behind each other between CUDA events, launches "
        "queued beforehand, ranks aligned on the GPU, inputs rotating; the time divided by the "
        "calls. Microseconds of the slowest rank per round: **median** (min, p99) of "
        f"{suite.iterations} rounds; all calls of one object and size in turn, in changing order, "
        f"in one process group (`{suite.reference}` in one of its own). **End to end** is the same "
        "on the host's clock, launches included. Every result was compared bit for bit before and "
        "after.",
        "**In place**: a dispatch leaves its rows in symmetric memory, and a combine takes them "
        f"from there (`empty_for_combine`; `{suite.reference}` pushes them from ordinary memory), "
        "where they were written before its time began. Each has an object of its own for so many "
        "tokens; symmetric memory, that of the rank with most, then includes what it needs.",
        "**Network GB/s**: bytes of rows (payload and scales) that a rank puts to other nodes, of "
        "the rank with fewest, over the time; every rank sends and receives as much at once. "
        "**Rows**: put to other nodes in a call, all ranks together, mean of "
        f"{NUM_INPUTS} inputs, as the engine has counted them, and as the picks say: (token, node) "
        f"pairs, or (token, rank) for `{suite.reference}` and {NCCL}; a call in which they differ "
        "on any rank has no time. **More bytes**: what the engine has put besides rows, in % of "
        "them.",
    ]


# Tables


def _place(line: Line) -> int:
    """Of a kind of call in tables."""
    return list(KINDS).index(line.kind) if line.kind in KINDS else len(KINDS)


def _order_of(suite: TwoLevel) -> Callable[[Line], tuple[int, int, float]]:
    engines = [suite.engine, suite.reference, ""]
    return lambda line: (
        engines.index(line.case.engine),
        _place(line),
        line.case.sms or float("inf"),
    )


def _network(line: Line) -> Network:
    assert line.network is not None, "only calls are in tables"
    return line.network


def _table(lines: Sequence[Line], suite: TwoLevel) -> str:
    headings = (
        f"|SMs|tokens|us|end to end us|network GB/s|bar {BAR_GBS:.0f}|rows counted|rows planned|"
        "more bytes %|NVSHMEM|symm. MB"
    )
    return markdown_table(headings.split("|"), [_row(line, judged(line, suite)) for line in lines])


def _row(line: Line, verdict: str) -> list[str]:
    case, network = line.case, _network(line)
    rows = sum(network.rows)
    more = sum(network.put_bytes) / (rows * network.row_bytes) - 1 if rows else None
    symmetric = line.symmetric_bytes if case.engine else None
    return [
        f"`{case.engine}`: {line.name}" if case.engine else f"*{line.name}*",
        str(case.sms or "all") if case.engine else "-",
        str(case.tokens),
        times(line.best, none=NO_TIME),
        times(line.wall, none=NO_TIME),
        number(network_gbs(line), ".1f"),
        verdict or "-",
        number(rows if network.rows else None, ",.1f"),
        number(sum(network.planned), ",.1f"),
        number(None if more is None else 100 * more, ".2f"),
        "-" if network.nvshmem is None else "yes" if network.nvshmem else "no",
        number(None if symmetric is None else symmetric / MB, ".1f"),
    ]


def _bounded(lines: Sequence[Line], curve: Sequence[Line]) -> str:
    headings = (
        "|SMs|tokens|rings MB|bytes put / rings|symm. MB before|after|other tensors MB|us|"
        "network GB/s|speed beside default rings|rows counted|rows planned"
    )
    said = (
        "Symmetric memory (rings, staging, signals) before the first call and after the last; "
        "**other tensors**: the most bytes that a call of the worst rank held besides its result."
    )
    table = markdown_table(headings.split("|"), [_bounded_row(line, curve) for line in lines])
    return f"{table}\n\n{said}"


def _bounded_row(line: Line, curve: Sequence[Line]) -> list[str]:
    case, network = line.case, _network(line)
    beside = find(curve, name=line.name, tokens=case.tokens)
    rings, faster = case.rings or 0, None
    if line.best_us and beside and beside.best_us:
        faster = beside.best_us / line.best_us
    sizes = (network.held_bytes, line.symmetric_bytes, network.other_bytes)
    return [
        f"`{case.engine}`: {line.name}",
        str(case.sms or "all"),
        str(case.tokens),
        number(rings / MB, ".3f"),
        number(network.payload_bytes / rings if rings and network.rows else None, ".2f"),
        *(number(None if size is None else size / MB, ".3f") for size in sizes),
        times(line.best, none=NO_TIME),
        number(network_gbs(line), ".1f"),
        number(faster, ".2f"),
        number(sum(network.rows) if network.rows else None, ",.1f"),
        number(sum(network.planned), ",.1f"),
    ]


# The bar


def _where(line: Line) -> str:
    case = line.case
    sms = f", {case.sms or 'all'} SMs" if case.engine else ""
    rings = "" if case.rings is None else f", rings {case.rings / MB:.3f} MB"
    return f"{case.engine or NCCL}: {line.name}{sms}, {case.tokens} tokens{rings}"


def _verdict(lines: Sequence[Line], suite: TwoLevel) -> list[str]:
    """For dispatch and combine with the same multiprocessors together, by :data:`WAYS`; then per
    line by its figure.
    """
    under = [line for line in lines if judged(line, suite)]
    sizes = sorted({line.case.sms for line in under if line.case.sms is not None}) or [BAR_SMS]
    grid = str(suite.grid)
    other = "" if grid == BAR_GRID else f" The project's bar is for {BAR_GRID}; this is {grid}."
    both = [f"- {way}, {sms} SMs: {_both(under, suite, sms, way)}" for way in WAYS for sms in sizes]
    each = [
        f"- {_where(line)}: {network_gbs(line):.1f} GB/s: {judged(line, suite)}" for line in under
    ]
    return [
        f"A goal that this project has set itself: {BAR_GBS:.0f} GB/s per GPU between nodes with "
        f"at most {BAR_SMS} SMs, dispatch and combine of BF16, {suite.tokens} tokens per rank."
        f"{other}",
        "\n".join(both),
        *(["All calls with so few:", "\n".join(each)] if each else []),
    ]


def _both(under: Sequence[Line], suite: TwoLevel, sms: int, way: str) -> str:
    """Whether both calls reach the bar; missed by one, it is missed. Behind that each with its
    rate.
    """
    verdicts: list[str] = []
    told: list[str] = []
    for kind in WAYS[way]:
        line = find(under, kind=kind, sms=sms, tokens=suite.tokens)
        verdicts.append("not measured" if line is None else judged(line, suite))
        rate = "" if line is None else f" {network_gbs(line):.1f} GB/s"
        told.append(f"{KINDS[kind].name}{rate} {verdicts[-1]}")
    worst = next(each for each in ("missed", "not measured", "reached") if each in verdicts)
    return f"**{worst}** ({'; '.join(told)})"


PAGE = Page(twolevel_markdown)
