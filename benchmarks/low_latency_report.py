"""The record of the suite ``low_latency`` as Markdown."""

from __future__ import annotations

from itertools import product
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
    PUTS_BAR_GRID,
    PUTS_BAR_US,
    Decode,
)
from benchmarks.record import NO_TIME, Line, Page, find, head, markdown_table, times


def decode_markdown(lines: list[Line], suite: Decode, facts: dict[str, Any]) -> str:
    """``facts`` are those of the JSON."""
    parts = [
        *head("Engine `low_latency` on {devices}", facts),
        f"hidden {suite.hidden}, top-{suite.topk} of {suite.experts} experts, uniform routing. "
        "Dispatch casts BF16 to FP8 and leaves rows by expert; combine is weighted, BF16. Static "
        f"shapes, {suite.calls} calls in a CUDA graph (inputs rotate inside), its time divided by "
        "them: microseconds of the slowest rank per round, **median** (min, p99) of "
        f"{suite.iterations} rounds, all rows of a column timed in turn in one process group. "
        f"Every result was compared bit for bit before and after.{_grid(suite)}",
        _table(lines, suite),
        *_memory(lines),
        *_hooks(lines, suite),
        *_replays(lines, suite),
        *_verdicts(lines, suite, len(facts["devices"])),
    ]
    return "\n\n".join(parts) + "\n"


def _grid(suite: Decode) -> str:
    if suite.topology is None:
        return ""
    return (
        f" Ranks stand for {suite.topology[0]} nodes of {suite.topology[1]}: `puts` reach those of "
        "other nodes through NVSHMEM as if no GPU mapped another's memory; without, as it is."
    )


def _find(lines: list[Line], who: str, what: str, tokens: int) -> Line | None:
    return find(lines, name=who, kind=what, tokens=tokens)


def _cell(line: Line | None) -> str:
    none = "-" if line is None or not line.error else NO_TIME
    return times(None if line is None else line.best, none=none)


def _table(lines: list[Line], suite: Decode) -> str:
    calls = [(way.name, what) for way in suite.ways for what in (PAIR, DISPATCH, COMBINE)]
    rows = [
        [
            f"*{who}*" if who == NCCL else f"`{who}`: {what}",
            *(_cell(_find(lines, who, what, tokens)) for tokens in suite.tokens),
        ]
        for who, what in (*calls, (NCCL, PAIR))
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
    if tokens not in suite.tokens:
        return []
    cells = [f"{what} {_cell(_find(lines, ENGINES[0], what, tokens))}" for what in PARTS]
    when = "eager; receiving begins when all have sent"
    return [f"In two launches, {tokens} tokens ({when}): {'; '.join(cells)}."]


def _replays(lines: list[Line], suite: Decode) -> list[str]:
    if not suite.replays:
        return []
    right = {
        way.name: [
            n for n in suite.tokens if (line := _find(lines, way.name, PAIR, n)) and line.best
        ]
        for way in suite.ways
    }
    said = "; ".join(
        f"`{who}` {', '.join(map(str, sizes)) or 'no size'}" for who, sizes in right.items()
    )
    return [
        f"Then {suite.replays:,} replays of one captured pair, each of other inputs than the one "
        f"before, and each compared bit for bit. Tokens with which all were right: {said}."
    ]


def _puts(lines: list[Line], suite: Decode) -> list[str]:
    """What puts take more than stores, of each way, and whether that is within the bar."""
    said: list[str] = []
    stores = _find(lines, ENGINES[0], PAIR, BAR_TOKENS)
    for way in suite.ways:
        line = _find(lines, way.name, PAIR, BAR_TOKENS)
        if not (way.puts and line and stores and line.best_us and stores.best_us):
            continue
        more = line.best_us - stores.best_us
        text = f"- {BAR_TOKENS} tokens: `{way.name}` takes {more:.1f} us more than `{ENGINES[0]}`"
        if suite.topology == PUTS_BAR_GRID:
            met = "met" if more <= PUTS_BAR_US else "missed"
            text += f"; bar, a goal that this project has set itself: {PUTS_BAR_US:.0f} us: {met}"
        said.append(text)
    return said


def _verdicts(lines: list[Line], suite: Decode, num_ranks: int) -> list[str]:
    said: list[str] = []
    for tokens, who in product(suite.tokens, [way.name for way in suite.ways]):
        ours, theirs = (_find(lines, name, PAIR, tokens) for name in (who, NCCL))
        mine, other = (line.best_us if line else None for line in (ours, theirs))
        if mine and other and mine > other:
            said.append(f"- {tokens} tokens: `{who}`, {mine:.1f} us, loses to {NCCL}, {other:.1f}")
    said = said or [f"No pair loses to {NCCL}."]
    bar = _find(lines, ENGINES[0], PAIR, BAR_TOKENS)
    if suite.topology is None and num_ranks == BAR_RANKS and bar and bar.best_us:
        met = "met" if bar.best_us <= BAR_US else "missed"
        goal = f"a pair of {BAR_TOKENS} tokens in {BAR_US:.0f} us on {BAR_RANKS} ranks"
        said.append(f"Bar, a goal that this project has set itself: {goal}: {met}.")
    said += _puts(lines, suite)
    wrong = [line for line in lines if line.error]
    errors = [f"- {line.name}, {line.case.tokens} tokens: {line.error}" for line in wrong]
    return ["\n".join(said), *(["\n".join(["No time:", "", *errors])] if errors else [])]


PAGE = Page(decode_markdown)
