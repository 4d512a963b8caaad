"""The record of the suite ``nvlink`` as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from benchmarks.calls import BACK, FRESH, NEW_ROUTING_BAR_US, PLAIN, rows_of
from benchmarks.nvlink import BOUNDED, MAIN, MAKING, SMS, TOKENS, ZIPF, Suite
from benchmarks.nvlink_plot import draw
from benchmarks.record import MB, NO_TIME, Line, Page, find, head, markdown_table, times
from tokenyard.cli.bench_report import number
from tokenyard.testing.checked_calls import COMBINE


def markdown(lines: list[Line], suite: Suite, facts: dict[str, Any]) -> str:
    """The record without its picture. ``facts`` are those of the JSON."""
    parts = [_head(suite, facts)]
    others = [line for line in lines if line.section == MAIN and not line.ours]
    builders = (
        (MAIN, _main),
        (SMS, partial(_sms, others=others)),
        (TOKENS, _tokens),
        (BOUNDED, _bounded),
    )
    for section, build in builders:
        mine = [line for line in lines if line.section == section]
        if section == MAIN:
            mine += [line for line in lines if line.section == ZIPF]
        if mine:
            parts.append(build(mine))
    if wrong := [
        f"- {line.section}, {line.case.tokens} tokens: {line.name}: {line.error}"
        for line in lines
        if line.error
    ]:
        parts.append("\n".join(["## No time", "", *wrong]))
    return "\n\n".join(parts) + "\n"


def _head(suite: Suite, facts: dict[str, Any]) -> str:
    text = [
        f"hidden {suite.hidden}, top-{suite.topk} of {suite.experts} experts, BF16. Microseconds "
        f"of the slowest rank per round: **median** (min, p99) of {suite.iterations} rounds for "
        f"batches over {suite.tokens} tokens per rank, {2 * suite.iterations} for others. All rows "
        "of a table (of a size) are timed in turn, in changing order, in one process group; inputs "
        "rotate; every result was checked bit for bit first.",
        "**Kernel**: CUDA events around the call, launches queued beforehand, ranks aligned on the "
        "GPU. **End to end**: the Python call until its results are complete. Dispatches are "
        "cached (routing known) unless a row says otherwise.",
        "**Wire**: busiest direction of the busiest rank, no self traffic. **Floor**: its bytes at "
        f"{suite.link_gbs or 'an unknown number of '} GB/s. **Bar**: a goal that this project has "
        "set itself for such calls on four H200, no limit of the hardware.",
    ]
    return "\n\n".join([*head(f"Engine `{suite.engine}` on {{devices}}", facts), "\n".join(text)])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _meets(line: Line) -> bool:
    """There is no bar, or the call takes at most what it says."""
    return line.bar_us is None or (line.best_us is not None and line.best_us <= line.bar_us)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _timed(lines: list[Line]) -> list[Line]:
    """Those about calls."""
    return [line for line in lines if line.phase != MAKING]


# Sections


def _main(lines: list[Line]) -> str:
    clocks, rest = ("kernel us", "end to end us"), ("% of floor", "bar us", "SMs", "symm. MB")
    headings = ("", *clocks, "wire GB/s", *rest)
    table = markdown_table(headings, map(_main_row, _timed(lines)))
    title = f"## {lines[0].case.tokens} tokens per rank"
    return "\n".join([title, "", table, "", *_bars(lines)])


def _main_row(line: Line) -> list[str]:
    name = line.name if line.section == MAIN else f"{line.name}, {line.case.skew}"
    met = "" if line.bar_us is None else " (met)" if _meets(line) else " (missed)"
    symmetric = line.symmetric_bytes if line.ours else None
    return [
        name if line.ours else f"*{name}*",
        NO_TIME if line.error else times(line.device),
        times(line.wall),
        number(line.wire_gbs),
        number(line.percent_of_floor),
        number(line.bar_us) + met,
        number(line.case.sms) if line.ours else "-",
        number(None if symmetric is None else symmetric / MB),
    ]


def _bars(lines: list[Line]) -> list[str]:
    """What a new routing adds, and which bars were missed."""
    said: list[str] = []
    fresh, cached = (find(lines, section=MAIN, kind=kind) for kind in (FRESH, PLAIN))
    if fresh and cached and fresh.wall and cached.wall:
        on_device = ""
        if fresh.device and cached.device:
            on_device = f"{fresh.device.median - cached.device.median:.1f} us on the GPU's clock, "
        end_to_end = fresh.wall.median - cached.wall.median
        said.append(
            f"A new routing adds {on_device}{end_to_end:.1f} us end to end (bar "
            f"{NEW_ROUTING_BAR_US:.0f}): layout, counts and the "
            "host's wait for them."
        )
    return [*said, *_missed(lines)]


def _missed(lines: list[Line]) -> list[str]:
    """The bars that lines do not meet, if there are any bars."""
    texts = [
        f"{line.name} {number(line.best_us)} ({number(line.bar_us)})"
        for line in lines
        if not _meets(line)
    ]
    return (
        [f"Bars missed: {'; '.join(texts) or 'none'}."]
        if any(line.bar_us for line in lines)
        else []
    )


def _sms(lines: list[Line], others: list[Line]) -> str:
    """Calls over SMs; of ``others``, collectives that were timed elsewhere, those with the same
    rows stand below.
    """
    timed = _timed(lines)
    names = _unique(line.name for line in timed)
    rows: list[list[str]] = []
    for sms in _unique(line.case.sms for line in timed):
        found = [find(timed, sms=sms, name=name) for name in names]
        rows.append([str(sms), *(_with_rate(line) for line in found)])
    title = (
        f"## Over SMs, {lines[0].case.tokens} tokens per rank (kernel us, wire GB/s, % of floor)"
    )
    bars = "; ".join(
        f"{line.name}, {line.case.sms} SMs: {number(line.bar_us)}" for line in timed if line.bar_us
    )
    said = [f"Bars: {bars}.", *_missed(timed)] if bars else []
    moved = {rows_of(line.case) for line in timed}
    beside = [
        f"- *{line.name}*: {_with_rate(line)}" for line in others if rows_of(line.case) in moved
    ]
    if beside:
        beside.insert(
            0, "NCCL (gloo on the CPU) with as many SMs as it takes, from the first table:\n"
        )
    parts = [title, markdown_table(["SMs", *names], rows), "\n".join(said), "\n".join(beside)]
    return "\n\n".join(filter(None, parts))


def _with_rate(line: Line | None) -> str:
    stats = None if line is None else line.best
    if line is None or stats is None:
        return "-"
    return f"{times(stats)}, {number(line.wire_gbs)}, {_percent(line.percent_of_floor)}"


def _tokens(lines: list[Line]) -> str:
    timed = _timed(lines)
    names = _unique(line.name for line in timed)
    sizes = _unique(line.case.tokens for line in timed)
    text = ["## Over tokens per rank"]
    clocks = (["device"] if any(line.device_us for line in timed) else []) + ["wall"]
    for clock in clocks:
        rows: list[list[str]] = []
        for name in names:
            found = [find(timed, name=name, tokens=size) for size in sizes]
            ours = any(line.ours for line in found if line)
            cells = [_with_floor(line, clock) for line in found]
            rows.append([name if ours else f"*{name}*", *cells])
        what = "Kernel" if clock == "device" else "End to end"
        table = markdown_table(["", *map(str, sizes)], rows)
        text += ["", f"{what}, median us (% of floor)", "", table]
        text += ["", *losses(timed, clock)]
    return "\n".join(text)


def _of(line: Line, clock: str) -> float | None:
    stats = line.device if clock == "device" else line.wall
    return None if stats is None else stats.median


def _with_floor(line: Line | None, clock: str) -> str:
    """The median on a clock and, where the floor is known, the percentage of it."""
    if line is None:
        return "-"
    time = _of(line, clock)
    of_floor = f" ({_percent(100 * line.floor_us / time)})" if time and line.floor_us else ""
    return number(time, ",.1f") + of_floor


def losses(lines: list[Line], clock: str) -> list[str]:
    """Where this library is slower than a baseline. ``clock``: "device" or "wall"."""
    said: list[str] = []
    for size in _unique(line.case.tokens for line in lines):
        mine = [line for line in lines if line.case.tokens == size]
        for ours in (line for line in mine if line.ours):
            time = _of(ours, clock)
            theirs = [
                line
                for line in mine
                if not line.ours and (line.phase == COMBINE) == (ours.phase == COMBINE)
            ]
            best = min((each for line in theirs if (each := _of(line, clock))), default=None)
            if time is None or best is None or time <= best:
                continue
            lost = [
                f"{line.name} ({time / other:.2f}x)"
                for line in theirs
                if (other := _of(line, clock)) and time > other
            ]
            said.append(f"- {size} tokens: {ours.name} ({time:.1f} us) loses to {', '.join(lost)}")
    return said or ["No call loses to a baseline."]


def _bounded(lines: list[Line]) -> str:
    timed, case = _timed(lines), lines[0].case
    rows: list[list[str]] = []
    for line in timed:
        last = [other for other in timed if other.kind == line.kind][-1]
        time, reference, rings = line.best_us, last.best_us, line.case.rings
        count = line.wire_bytes / (case.combined_row_bytes if line.kind == BACK else case.row_bytes)
        symmetric = line.symmetric_bytes
        rows.append(
            [
                line.name,
                number(None if rings is None else rings / MB),
                number(None if rings is None else line.wire_bytes / rings, ".2f"),
                times(line.best),
                number(time and count and 1e3 * time / count, ".2f"),
                number(time and reference and reference / time, ".2f"),
                number(None if symmetric is None else symmetric / MB),
            ]
        )
    headings = "|rings MB|bytes over the wire / rings|kernel us|ns per row|relative speed|symm. MB"
    title = f"## Bounded memory, {case.tokens} tokens per rank"
    return "\n".join([title, "", markdown_table(headings.split("|"), rows)])


PAGE = Page(markdown, draw)
