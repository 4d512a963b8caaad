"""The record of ``tokenyard bench --suite nvlink``: Markdown for readers, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_cases import COMBINE
from tokenyard.cli.bench_nvlink import BOUNDED, MAIN, SMS, TOKENS, ZIPF, Line, Suite
from tokenyard.cli.bench_nvlink_cases import BACK, FRESH, NEW_ROUTING_BAR_US, PLAIN
from tokenyard.cli.bench_report import as_json, command_line, commit, device_names, versions
from tokenyard.cli.timing import Stats

MB = 1e6
NONE = "-"


def write_record(out: Path, lines: list[Line], suite: Suite, device: str) -> Path:
    """Write ``<engine>-<hardware>-<day>.md`` with ``.json`` and, where matplotlib is, ``.png``;
    returns the first's path.
    """
    out.mkdir(parents=True, exist_ok=True)
    now, names = datetime.now(timezone.utc), device_names(device)
    facts: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "versions": versions(),
        "devices": names,
        "suite": asdict(suite),
    }
    stem = f"{suite.engine}-{_hardware(names, device)}-{now:%Y%m%d}"
    path = out / f"{stem}.md"
    picture = _draw(lines, out / f"{stem}.png")
    path.write_text(markdown(lines, suite, facts) + (f"\n![]({stem}.png)\n" if picture else ""))
    content = {**facts, "rows": [as_json(line) for line in lines]}
    (out / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    return path


def _draw(lines: list[Line], path: Path) -> bool:
    """Draw the curves; False if that cannot be done: the figures are worth more than the
    picture.
    """
    try:
        from tokenyard.cli.bench_nvlink_plot import draw

        draw(lines, path)
    except Exception as error:
        print(f"no picture: {error}")
        return False
    return True


def _hardware(names: Sequence[str], device: str) -> str:
    """``4xh200`` or ``cpu``."""
    return f"{len(names)}x{names[0].split()[-1].lower()}" if device == "cuda" else "cpu"


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
        f"- {line.section}, {line.job.tokens} tokens: {line.name}: {line.error}"
        for line in lines
        if line.error
    ]:
        parts.append("\n".join(["## No time", "", *wrong]))
    return "\n\n".join(parts) + "\n"


def _head(suite: Suite, facts: dict[str, Any]) -> str:
    names: list[str] = facts["devices"]
    found: dict[str, str | None] = facts["versions"]
    devices = ", ".join(f"{count}x {name}" for name, count in Counter(names).items())
    known = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    return "\n".join(
        [
            f"# Engine `{suite.engine}` on {devices}",
            "",
            f"Commit {facts['commit'] or 'unknown'}, {known}, {facts['date'][:10]}. "
            f"`{facts['command']}`",
            "",
            f"hidden {suite.hidden}, top-{suite.topk} of {suite.experts} experts, BF16. "
            f"Microseconds of the slowest rank per "
            f"round: **median** (min, p99) of {suite.iterations} rounds for batches over "
            f"{suite.tokens} tokens per rank, "
            f"{2 * suite.iterations} for others. All rows of a table (of a size) are timed in "
            f"turn, in changing order, in one "
            "process group; inputs rotate; every result was checked bit for bit first.",
            "**Kernel**: CUDA events around the call, launches queued beforehand, ranks aligned on "
            "the GPU. **End to end**: the "
            "Python call until its results are complete. Dispatches are cached (routing known) "
            "unless a row says otherwise.",
            f"**Wire**: busiest direction of the busiest rank, no self traffic. **Floor**: its "
            f"bytes at "
            f"{suite.link_gbs or 'an unknown number of '} GB/s. **Bar**: a goal that this project "
            f"has set itself for such calls on "
            "four H200, no limit of the hardware.",
        ]
    )


# Cells


def _clock(line: Line) -> Stats | None:
    return line.device or line.wall


def _median(line: Line | None) -> float | None:
    stats = None if line is None else _clock(line)
    return None if stats is None else stats.median


def _number(value: float | None, form: str = ",.0f") -> str:
    return NONE if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f} %"


def _times(stats: Stats | None) -> str:
    if stats is None:
        return NONE
    return f"**{stats.median:,.1f}** ({stats.min:,.1f}, {stats.p99:,.1f})"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is set left, the others right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, marks, *rows))


def _find(lines: Iterable[Line], **wanted: Any) -> Line | None:
    return next(
        (
            line
            for line in lines
            if all(getattr(line, name) == value for name, value in wanted.items())
        ),
        None,
    )


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# Sections


def _main(lines: list[Line]) -> str:
    headings = (
        "",
        "kernel us",
        "end to end us",
        "wire GB/s",
        "% of floor",
        "bar us",
        "SMs",
        "symm. MB",
    )
    shown = [line for line in lines if line.phase != "making"]
    text = [
        f"## {lines[0].job.tokens} tokens per rank",
        "",
        _table(headings, map(_main_row, shown)),
        "",
    ]
    return "\n".join([*text, *_bars(lines)])


def _main_row(line: Line) -> list[str]:
    name = line.name if line.section == MAIN else f"{line.name}, {line.job.skew}"
    met = "" if line.bar_us is None else " (met)" if _meets(line) else " (missed)"
    symmetric = line.symmetric_bytes
    return [
        name if line.ours else f"*{name}*",
        "**no time**" if line.error else _times(line.device),
        _times(line.wall),
        _number(line.wire_gbs),
        _number(line.percent_of_floor),
        _number(line.bar_us) + met,
        _number(line.sms) if line.ours else NONE,
        _number(None if symmetric is None else symmetric / MB),
    ]


def _bars(lines: list[Line]) -> list[str]:
    """What a new routing adds, and which bars were missed."""
    said: list[str] = []
    fresh, cached = (_find(lines, section=MAIN, kind=kind) for kind in (FRESH, PLAIN))
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


def _meets(line: Line) -> bool:
    time = _median(line)
    return line.bar_us is None or (time is not None and time <= line.bar_us)


def _missed(lines: list[Line]) -> list[str]:
    """The bars that lines do not meet, if there are any bars."""
    texts = [
        f"{line.name} {_number(_median(line))} ({_number(line.bar_us)})"
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
    timed = [line for line in lines if line.phase != "making"]
    names = _unique(line.name for line in timed)
    rows: list[list[str]] = []
    for sms in _unique(line.sms for line in timed):
        found = [_find(timed, sms=sms, name=name) for name in names]
        rows.append([str(sms), *(_with_rate(line) for line in found)])
    title = f"## Over SMs, {lines[0].job.tokens} tokens per rank (kernel us, wire GB/s, % of floor)"
    bars = "; ".join(
        f"{line.name}, {line.sms} SMs: {_number(line.bar_us)}" for line in timed if line.bar_us
    )
    said = [f"Bars: {bars}.", *_missed(timed)] if bars else []
    jobs = [line.job for line in timed]
    beside = [f"- *{line.name}*: {_with_rate(line)}" for line in others if line.job in jobs]
    if beside:
        beside.insert(
            0, "NCCL (gloo on the CPU) with as many SMs as it takes, from the first table:\n"
        )
    return "\n\n".join(
        filter(None, [title, _table(["SMs", *names], rows), "\n".join(said), "\n".join(beside)])
    )


def _with_rate(line: Line | None) -> str:
    stats = None if line is None else _clock(line)
    if line is None or stats is None:
        return NONE
    return f"{_times(stats)}, {_number(line.wire_gbs)}, {_percent(line.percent_of_floor)}"


def _tokens(lines: list[Line]) -> str:
    timed = [line for line in lines if line.phase != "making"]
    names = _unique(line.name for line in timed)
    sizes = _unique(line.job.tokens for line in timed)
    text = ["## Over tokens per rank"]
    clocks = (["device"] if any(line.device_us for line in timed) else []) + ["wall"]
    for clock in clocks:
        rows: list[list[str]] = []
        for name in names:
            found = [
                _find(timed, name=name, job=job)
                for job in _unique(line.job for line in timed if line.name == name)
            ]
            cells = {line.job.tokens: _with_floor(line, clock) for line in found if line}
            ours = any(line.ours for line in found if line)
            rows.append([name if ours else f"*{name}*", *(cells.get(size, NONE) for size in sizes)])
        what = "Kernel" if clock == "device" else "End to end"
        text += ["", f"{what}, median us (% of floor)", "", _table(["", *map(str, sizes)], rows)]
        text += ["", *losses(timed, clock)]
    return "\n".join(text)


def _of(line: Line, clock: str) -> float | None:
    stats: Stats | None = getattr(line, clock)
    return None if stats is None else stats.median


def _with_floor(line: Line, clock: str) -> str:
    """The median on a clock and, where the floor is known, the percentage of it."""
    time = _of(line, clock)
    of_floor = f" ({_percent(100 * line.floor_us / time)})" if time and line.floor_us else ""
    return _number(time, ",.1f") + of_floor


def losses(lines: list[Line], clock: str) -> list[str]:
    """Where this library is slower than a baseline. ``clock``: "device" or "wall"."""
    said: list[str] = []
    for size in _unique(line.job.tokens for line in lines):
        mine = [line for line in lines if line.job.tokens == size]
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
    timed = [line for line in lines if line.phase != "making"]
    job = lines[0].job
    rows: list[list[str]] = []
    for line in timed:
        last = [other for other in timed if other.kind == line.kind][-1]
        time, reference = _median(line), _median(last)
        num_rows = line.wire_bytes / (
            job.row_bytes if line.kind != BACK else job.combined_row_bytes
        )
        rows.append(
            [
                line.name,
                _number(None if line.rings is None else line.rings / MB),
                _number(None if line.rings is None else line.wire_bytes / line.rings, ".2f"),
                _times(_clock(line)),
                _number(time and num_rows and 1e3 * time / num_rows, ".2f"),
                _number(time and reference and reference / time, ".2f"),
                _number(None if line.symmetric_bytes is None else line.symmetric_bytes / MB),
            ]
        )
    headings = (
        "",
        "rings MB",
        "bytes over the wire / rings",
        "kernel us",
        "ns per row",
        "relative speed",
        "symm. MB",
    )
    return "\n".join(
        [f"## Bounded memory, {job.tokens} tokens per rank", "", _table(headings, rows)]
    )
