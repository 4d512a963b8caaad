"""The record of ``tokenyard bench --suite low_latency``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_decode import (
    BAR_RANKS,
    BAR_TOKENS,
    BAR_US,
    COMBINE,
    DISPATCH,
    ENGINES,
    NCCL,
    PAIR,
    PARTS,
    Decode,
    Timed,
)
from tokenyard.cli.bench_report import command_line, commit, device_names, versions
from tokenyard.cli.timing import summarise

ROWS = [*((who, what) for who in ENGINES for what in (PAIR, DISPATCH, COMBINE)), (NCCL, PAIR)]


def write_decode_record(out: Path, lines: list[Timed], suite: Decode, device: str) -> Path:
    """Write ``low_latency-<hardware>-<day>.md`` with ``.json``; returns the first's path."""
    out.mkdir(parents=True, exist_ok=True)
    now, names = datetime.now(timezone.utc), device_names(device)
    stem = f"low_latency-{len(names)}x{names[0].split()[-1].lower()}-{now:%Y%m%d}"
    facts: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "versions": versions(),
        "devices": names,
        "suite": asdict(suite),
    }
    (out / f"{stem}.json").write_text(
        json.dumps({**facts, "rows": [asdict(line) for line in lines]}, indent=1) + "\n"
    )
    path = out / f"{stem}.md"
    path.write_text(decode_markdown(lines, suite, facts))
    return path


def decode_markdown(lines: list[Timed], suite: Decode, facts: dict[str, Any]) -> str:
    """``facts`` are those of the JSON."""
    names: list[str] = facts["devices"]
    devices = ", ".join(f"{count}x {name}" for name, count in Counter(names).items())
    known = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    parts = [
        f"# Engine `low_latency` on {devices}",
        f"Commit {facts['commit'] or 'unknown'}, {known}, {facts['date'][:10]}. "
        f"`{facts['command']}`",
        f"hidden {suite.hidden}, top-{suite.topk} of {suite.experts} experts, uniform routing. "
        f"Dispatch casts BF16 to FP8 and "
        f"leaves rows by expert; combine is weighted, BF16. Static shapes, {suite.calls} calls in "
        f"a CUDA graph (inputs rotate "
        f"inside), its time divided by them: microseconds of the slowest rank per round, "
        f"**median** (min, p99) of "
        f"{suite.iterations} rounds, all rows of a column timed in turn in one process group. "
        "Every result was compared bit for bit before and after.",
        _table(lines, suite),
        *_memory(lines),
        *_hooks(lines, suite),
        *_verdicts(lines, suite, len(names)),
    ]
    return "\n\n".join(parts) + "\n"


def _find(lines: list[Timed], who: str, what: str, tokens: int) -> Timed | None:
    return next(
        (line for line in lines if (line.who, line.what, line.tokens) == (who, what, tokens)), None
    )


def _cell(line: Timed | None) -> str:
    if line is None or not line.times:
        return "-" if line is None or not line.error else "**no time**"
    stats = summarise(line.times)
    return f"**{stats.median:.1f}** ({stats.min:.1f}, {stats.p99:.1f})"


def _table(lines: list[Timed], suite: Decode) -> str:
    head = ["tokens per rank", *map(str, suite.tokens)]
    rows = [
        [
            f"`{who}`: {what}" if who in ENGINES else f"*{who}*",
            *(_cell(_find(lines, who, what, n)) for n in suite.tokens),
        ]
        for who, what in ROWS
    ]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * len(suite.tokens)], *rows)
    )


def _memory(lines: list[Timed]) -> list[str]:
    held = [
        (line.tokens, line.symmetric_bytes)
        for line in lines
        if (line.who, line.what) == (ENGINES[0], PAIR)
    ]
    said = ", ".join(
        f"{tokens} tokens {num_bytes / 1e6:.1f}" for tokens, num_bytes in held if num_bytes
    )
    return [f"Symmetric memory of a rank, MB: {said}."] if said else []


def _hooks(lines: list[Timed], suite: Decode) -> list[str]:
    cells = [
        f"{what} {_cell(_find(lines, ENGINES[0], what, suite.parts_tokens))}" for what in PARTS
    ]
    return [
        f"In two launches, {suite.parts_tokens} tokens (eager; receiving begins when all have "
        f"sent): {'; '.join(cells)}."
    ]


def _verdicts(lines: list[Timed], suite: Decode, num_ranks: int) -> list[str]:
    said: list[str] = []
    for tokens in suite.tokens:
        ours, theirs = (_find(lines, who, PAIR, tokens) for who in (ENGINES[0], NCCL))
        if ours and theirs and ours.times and theirs.times:
            mine, other = summarise(ours.times).median, summarise(theirs.times).median
            if mine > other:
                said.append(f"- {tokens} tokens: {mine:.1f} us loses to {NCCL}, {other:.1f} us")
    said = said or [f"No pair loses to {NCCL}."]
    bar = _find(lines, ENGINES[0], PAIR, BAR_TOKENS)
    if num_ranks == BAR_RANKS and bar and bar.times:
        met = "met" if summarise(bar.times).median <= BAR_US else "missed"
        goal = f"a pair of {BAR_TOKENS} tokens in {BAR_US:.0f} us on {BAR_RANKS} ranks"
        said.append(f"Bar, a goal that this project has set itself: {goal}: {met}.")
    errors = [f"- {line.who}, {line.tokens} tokens: {line.error}" for line in lines if line.error]
    return ["\n".join(said), *(["\n".join(["No time:", "", *errors])] if errors else [])]
