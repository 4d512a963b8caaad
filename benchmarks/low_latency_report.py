"""The record of the suite ``low_latency`` as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.low_latency import (
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
)
from benchmarks.record import NO_TIME, Line, Page, find, head, markdown_table, times

ROWS = [*((who, what) for who in ENGINES for what in (PAIR, DISPATCH, COMBINE)), (NCCL, PAIR)]


def decode_markdown(lines: list[Line], suite: Decode, facts: dict[str, Any]) -> str:
    """``facts`` are those of the JSON."""
    parts = [
        *head("Engine `low_latency` on {devices}", facts),
        f"hidden {suite.hidden}, top-{suite.topk} of {suite.experts} experts, uniform routing. "
        "Dispatch casts BF16 to FP8 and leaves rows by expert; combine is weighted, BF16. Static "
        f"shapes, {suite.calls} calls in a CUDA graph (inputs rotate inside), its time divided by "
        "them: microseconds of the slowest rank per round, **median** (min, p99) of "
        f"{suite.iterations} rounds, all rows of a column timed in turn in one process group. "
        "Every result was compared bit for bit before and after.",
        _table(lines, suite),
        *_memory(lines),
        *_hooks(lines, suite),
        *_verdicts(lines, suite, len(facts["devices"])),
    ]
    return "\n\n".join(parts) + "\n"


def _find(lines: list[Line], who: str, what: str, tokens: int) -> Line | None:
    return find(lines, name=who, kind=what, tokens=tokens)


def _cell(line: Line | None) -> str:
    none = "-" if line is None or not line.error else NO_TIME
    return times(None if line is None else line.best, none=none)


def _table(lines: list[Line], suite: Decode) -> str:
    rows = [
        [
            f"`{who}`: {what}" if who in ENGINES else f"*{who}*",
            *(_cell(_find(lines, who, what, tokens)) for tokens in suite.tokens),
        ]
        for who, what in ROWS
    ]
    return markdown_table(["tokens per rank", *map(str, suite.tokens)], rows)


def _memory(lines: list[Line]) -> list[str]:
    ours = [line for line in lines if (line.name, line.kind) == (ENGINES[0], PAIR)]
    said = ", ".join(
        f"{line.case.tokens} tokens {line.symmetric_bytes / 1e6:.1f}"
        for line in ours
        if line.symmetric_bytes
    )
    return [f"Symmetric memory of a rank, MB: {said}."] if said else []


def _hooks(lines: list[Line], suite: Decode) -> list[str]:
    tokens = suite.parts_tokens
    cells = [f"{what} {_cell(_find(lines, ENGINES[0], what, tokens))}" for what in PARTS]
    when = "eager; receiving begins when all have sent"
    return [f"In two launches, {tokens} tokens ({when}): {'; '.join(cells)}."]


def _verdicts(lines: list[Line], suite: Decode, num_ranks: int) -> list[str]:
    said: list[str] = []
    for tokens in suite.tokens:
        ours, theirs = (_find(lines, who, PAIR, tokens) for who in (ENGINES[0], NCCL))
        mine, other = (line.best_us if line else None for line in (ours, theirs))
        if mine and other and mine > other:
            said.append(f"- {tokens} tokens: {mine:.1f} us loses to {NCCL}, {other:.1f} us")
    said = said or [f"No pair loses to {NCCL}."]
    bar = _find(lines, ENGINES[0], PAIR, BAR_TOKENS)
    if num_ranks == BAR_RANKS and bar and bar.best_us:
        met = "met" if bar.best_us <= BAR_US else "missed"
        goal = f"a pair of {BAR_TOKENS} tokens in {BAR_US:.0f} us on {BAR_RANKS} ranks"
        said.append(f"Bar, a goal that this project has set itself: {goal}: {met}.")
    wrong = [line for line in lines if line.error]
    errors = [f"- {line.name}, {line.case.tokens} tokens: {line.error}" for line in wrong]
    return ["\n".join(said), *(["\n".join(["No time:", "", *errors])] if errors else [])]


PAGE = Page(decode_markdown)
