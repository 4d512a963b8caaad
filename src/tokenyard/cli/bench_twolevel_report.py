"""The record of ``tokenyard bench --suite twolevel``: Markdown for readers, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_inputs import NUM_INPUTS
from tokenyard.cli.bench_nvlink_cases import BACK_IN_PLACE_NAME, COMBINE_NAME, KINDS, PLAIN, VIEW
from tokenyard.cli.bench_report import command_line, commit, device_names, versions
from tokenyard.cli.bench_twolevel import BAR_GBS, BAR_GRID, BAR_SMS, NCCL, Crossing, TwoLevel
from tokenyard.cli.timing import summarise

MB, NONE = 1e6, "-"
WAYS = {
    "in fresh tensors": (KINDS[PLAIN].name, COMBINE_NAME),
    "in place": (KINDS[VIEW].name, BACK_IN_PLACE_NAME),
}
"""Dispatch and combine that the bar is for, together."""
_NVSHMEM_PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")


def write_twolevel_record(out: Path, lines: list[Crossing], suite: TwoLevel, device: str) -> Path:
    """Write ``twolevel-<hardware>-<day>.md`` with ``.json``; returns the first's path."""
    out.mkdir(parents=True, exist_ok=True)
    now, names = datetime.now(timezone.utc), device_names(device)[: suite.grid.world_size]
    stem = f"{suite.engine}-{len(names)}x{names[0].split()[-1].lower()}-{now:%Y%m%d}"
    facts: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "versions": {**versions(), "nvshmem": _nvshmem_version()},
        "devices": names,
        "suite": asdict(suite),
    }
    rows = [
        {**asdict(line), "network_gbs": line.network_gbs, "bar": judged(line, suite)}
        for line in lines
    ]
    (out / f"{stem}.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    path = out / f"{stem}.md"
    path.write_text(twolevel_markdown(lines, suite, facts))
    return path


def _nvshmem_version() -> str | None:
    for name in _NVSHMEM_PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def judged(line: Crossing, suite: TwoLevel) -> str:
    """ "reached" or "missed"; "" for a line that the bar is not for."""
    rate = line.network_gbs
    if (
        line.engine != suite.engine
        or rate is None
        or line.num_sms is None
        or line.num_sms > BAR_SMS
    ):
        return ""
    return "reached" if rate >= BAR_GBS else "missed"


def twolevel_markdown(lines: list[Crossing], suite: TwoLevel, facts: dict[str, Any]) -> str:
    """The record. ``facts`` are those of the JSON."""
    plain = [line for line in lines if line.rings is None and line.planned]
    small = [line for line in lines if line.rings is not None and line.planned]
    curve = [line for line in plain if line.engine == suite.engine and line.num_sms == BAR_SMS]
    parts = [
        *_head(suite, facts),
        f"## Over multiprocessors, {suite.tokens} tokens per rank",
        _table(
            sorted((line for line in plain if line.tokens == suite.tokens), key=_order_of(suite)),
            suite,
        ),
        f"## Over tokens per rank, {BAR_SMS} multiprocessors",
        _table(sorted(curve, key=lambda line: (_what(line), line.tokens)), suite),
    ]
    if small:
        parts += [f"## A batch of {suite.overfull} times all rings", _bounded(small, curve)]
    wrong = [f"- {_where(line)}: {line.error}" for line in lines if line.error]
    parts += [
        "## The bar",
        *_verdict(plain, suite),
        *(["\n".join(["## No time", "", *wrong])] if wrong else []),
    ]
    return "\n\n".join(parts) + "\n"


def _head(suite: TwoLevel, facts: dict[str, Any]) -> list[str]:
    names: list[str] = facts["devices"]
    devices = ", ".join(f"{count}x {name}" for name, count in Counter(names).items())
    known = ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
    return [
        f"# Engine `{suite.engine}` on {devices} as {suite.grid}",
        f"Commit {facts['commit'] or 'unknown'}, {known}, {facts['date'][:10]}. "
        f"`{facts['command']}`",
        f"{suite.grid} nodes and ranks per node, hidden {suite.hidden}, top-{suite.topk} of "
        f"{suite.experts} experts, uniform "
        f"routing, seed {suite.seed}. Dispatches are cached (routing known); {suite.calls} calls "
        f"behind each other between CUDA "
        "events, launches queued beforehand, ranks aligned on the GPU, inputs rotating; the time "
        "divided by the calls. "
        f"Microseconds of the slowest rank per round: **median** (min, p99) of {suite.iterations} "
        f"rounds; all calls of one object "
        "and size in turn, in changing order, in one process group "
        f"(`{suite.reference}` in one of its own). **End to end** is the same on the host's clock, "
        f"launches included. Every "
        "result was compared bit for bit before and after.",
        "**In place**: a dispatch leaves its rows in symmetric memory, and a combine takes them "
        "from there "
        f"(`empty_for_combine`; `{suite.reference}` pushes them from ordinary memory), where they "
        f"were written before its time "
        "began. Each has an object of its own for so many tokens; symmetric memory, that of the "
        "rank with most, "
        "then includes what it needs.",
        "**Network GB/s**: bytes of rows (payload and scales) that a rank puts to other nodes, of "
        "the rank with fewest, over the "
        "time; every rank sends and receives as much at once. **Rows**: put to other nodes in a "
        "call, all ranks together, mean of "
        f"{NUM_INPUTS} inputs, as the engine has counted them, and as the picks say: (token, node) "
        f"pairs, or (token, rank) for "
        f"`{suite.reference}` and {NCCL}; a call in which they differ on any rank has no time. "
        f"**More bytes**: what the "
        "engine has put besides rows, in % of them.",
    ]


# Tables


def _what(line: Crossing) -> int:
    """Place of a kind of call in tables."""
    names = [*(kind.name for kind in KINDS.values()), COMBINE_NAME, BACK_IN_PLACE_NAME]
    return names.index(line.what) if line.what in names else len(names)


def _order_of(suite: TwoLevel) -> Callable[[Crossing], tuple[int, int, float]]:
    engines = [suite.engine, suite.reference, NCCL]
    return lambda line: (engines.index(line.engine), _what(line), line.num_sms or float("inf"))


def _grid(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is set left, the others right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, marks, *rows))


def _table(lines: Sequence[Crossing], suite: TwoLevel) -> str:
    headings = (
        "",
        "SMs",
        "tokens",
        "us",
        "end to end us",
        "network GB/s",
        f"bar {BAR_GBS:.0f}",
        "rows counted",
        "rows planned",
        "more bytes %",
        "NVSHMEM",
        "symm. MB",
    )
    return _grid(headings, [_row(line, judged(line, suite)) for line in lines])


def _row(line: Crossing, verdict: str) -> list[str]:
    rows = sum(line.rows)
    more = sum(line.put_bytes) / (rows * line.row_bytes) - 1 if rows else None
    return [
        f"*{line.what}*" if line.engine == NCCL else f"`{line.engine}`: {line.what}",
        NONE if line.engine == NCCL else str(line.num_sms or "all"),
        str(line.tokens),
        _times(line.times),
        _times(line.wall),
        _number(line.network_gbs, ".1f"),
        verdict or NONE,
        _number(rows if line.rows else None, ",.1f"),
        _number(sum(line.planned), ",.1f"),
        _number(None if more is None else 100 * more, ".2f"),
        NONE if line.nvshmem is None else "yes" if line.nvshmem else "no",
        _number(line.symmetric_bytes[1] / MB if line.symmetric_bytes else None, ".1f"),
    ]


def _times(times: list[float]) -> str:
    if not times:
        return "**no time**"
    stats = summarise(times)
    return f"**{stats.median:,.1f}** ({stats.min:,.1f}, {stats.p99:,.1f})"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _bounded(lines: Sequence[Crossing], curve: Sequence[Crossing]) -> str:
    headings = (
        "",
        "SMs",
        "tokens",
        "rings MB",
        "bytes put / rings",
        "symm. MB before",
        "after",
        "other tensors MB",
        "us",
        "network GB/s",
        "speed beside default rings",
        "rows counted",
        "rows planned",
    )
    said = (
        "Symmetric memory (rings, staging, signals) before the first call and after the last; "
        "**other tensors**: the most bytes "
        "that a call of the worst rank held besides its result."
    )
    return f"{_grid(headings, [_bounded_row(line, curve) for line in lines])}\n\n{said}"


def _bounded_row(line: Crossing, curve: Sequence[Crossing]) -> list[str]:
    beside = next(
        (each for each in curve if (each.what, each.tokens) == (line.what, line.tokens)), None
    )
    rings, held = line.rings or 0, [size / MB for size in line.symmetric_bytes] or [None, None]
    return [
        f"`{line.engine}`: {line.what}",
        str(line.num_sms or "all"),
        str(line.tokens),
        _number(rings / MB, ".3f"),
        _number(line.payload_bytes / rings if rings and line.rows else None, ".2f"),
        *(_number(size, ".3f") for size in held),
        _number(None if line.other_bytes is None else line.other_bytes / MB, ".3f"),
        _times(line.times),
        _number(line.network_gbs, ".1f"),
        _number(
            beside.stats.median / line.stats.median
            if line.stats and beside and beside.stats
            else None,
            ".2f",
        ),
        _number(sum(line.rows) if line.rows else None, ",.1f"),
        _number(sum(line.planned), ",.1f"),
    ]


# The bar


def _where(line: Crossing) -> str:
    sms = "" if line.engine == NCCL else f", {line.num_sms or 'all'} SMs"
    rings = "" if line.rings is None else f", rings {line.rings / MB:.3f} MB"
    return f"{line.engine}: {line.what}{sms}, {line.tokens} tokens{rings}"


def _verdict(lines: Sequence[Crossing], suite: TwoLevel) -> list[str]:
    """For dispatch and combine with the same multiprocessors together, by :data:`WAYS`; then per
    line by its figure.
    """
    under = [line for line in lines if judged(line, suite)]
    sizes = sorted({line.num_sms for line in under if line.num_sms is not None}) or [BAR_SMS]
    other = (
        ""
        if str(suite.grid) == BAR_GRID
        else f" The project's bar is for {BAR_GRID}; this is {suite.grid}."
    )
    both = [
        f"- {way}, {sms} SMs: {_both(under, suite, sms, WAYS[way])}"
        for way in WAYS
        for sms in sizes
    ]
    each = [
        f"- {_where(line)}: {line.network_gbs:.1f} GB/s: {judged(line, suite)}" for line in under
    ]
    return [
        "A goal that this project has set itself: "
        f"{BAR_GBS:.0f} GB/s per GPU between nodes with at most {BAR_SMS} SMs, dispatch and "
        f"combine of BF16, {suite.tokens} tokens "
        f"per rank.{other}",
        "\n".join(both),
        *(["All calls with so few:", "\n".join(each)] if each else []),
    ]


def _both(under: Sequence[Crossing], suite: TwoLevel, sms: int, names: Sequence[str]) -> str:
    """Whether both calls reach the bar; missed by one, it is missed. Behind that each with its
    rate.
    """
    found = {
        line.what: line for line in under if (line.num_sms, line.tokens) == (sms, suite.tokens)
    }
    verdicts = {
        name: judged(found[name], suite) if name in found else "not measured" for name in names
    }
    told = [
        f"{name} {found[name].network_gbs:.1f} GB/s {verdict}"
        if name in found
        else f"{name} {verdict}"
        for name, verdict in verdicts.items()
    ]
    worst = next(
        each for each in ("missed", "not measured", "reached") if each in verdicts.values()
    )
    return f"**{worst}** ({'; '.join(told)})"
