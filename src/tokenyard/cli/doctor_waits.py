"""``tokenyard doctor --waits``: what ranks waited for, and what is slow, from files that hold what
``ep.stats().prometheus()`` gave on each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console

from tokenyard.cli.consoles import print_line, print_table, seconds_text

METRIC = "tokenyard_wait_seconds_total"
_LINE = re.compile(rf"^{METRIC}\{{(.*)\}} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

MUCH, LEAST = 3.0, 1e-3
"""A wait is long if it is so many times the median of all pairs of ranks, and so many seconds."""

MEANS = {
    "counts": "it comes late to calls",
    "call": "it comes late to calls",
    "rows": "it packs or sends slowly",
    "room": "it takes rows slowly",
}

Pairs = dict[tuple[int, int], float]
"""Seconds by (who waited, for whom)."""
Waits = dict[str, Pairs]
"""By what was waited for: "counts", "call", "rows", "room"."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow rank (``to`` is None), a slow way into rank ``to`` (``source`` is None), or from one
    rank to another. ``seconds``: the longest wait."""

    what: str
    source: int | None
    to: int | None
    seconds: float
    text: str


def waits_in(texts: Iterable[str]) -> Waits:
    """Totals of all ranks, objects and kinds of calls. ValueError: there are none, or labels are
    missing."""
    found: Waits = {}
    for labels, seconds in (each.groups() for text in texts for each in _LINE.finditer(text)):
        named = dict(_LABEL.findall(labels))
        try:
            pair, what = (int(named["rank"]), int(named["source"])), named["for"]
            waited = float(seconds)
        except (KeyError, ValueError):
            raise ValueError(
                f"{METRIC}{{{labels}}} {seconds}: a line needs the labels rank, for and source, "
                f"and seconds: give what ep.stats().prometheus() returned"
            ) from None
        if pair[0] != pair[1]:
            waits = found.setdefault(what.rpartition(", ")[2], {})
            waits[pair] = waits.get(pair, 0.0) + waited
    if not found:
        raise ValueError(
            f"there is no {METRIC} of another rank: write ep.stats().prometheus() of each rank to "
            f"a file; engine 'collective' over NCCL has none"
        )
    return found


def slow_in(waits: Waits) -> list[Slow]:
    """What is slow, the longest wait first."""
    late = waits.get("call", {})
    found = [each for what, pairs in waits.items() for each in _slow(what, pairs, late)]
    return sorted(found, key=lambda each: -each.seconds)


def _slow(what: str, pairs: Pairs, late: Pairs) -> Iterator[Slow]:
    """``late``: waits for calls. Kernels wait for a rank's rows, and room, and its call at the same
    time: if it comes late, its rows do, and only the rest is slow."""
    usual = median_low(pairs.values())
    if what in ("rows", "room"):
        pairs = {pair: s - late.get(pair, 0.0) for pair, s in pairs.items()}
    long = {pair: s for pair, s in pairs.items() if s >= LEAST and s > MUCH * usual}
    for source in sorted({source for _, source in long}):
        waited = [s for (_, each), s in long.items() if each == source]
        others = sum(each == source for _, each in pairs)
        if 1 < others < 2 * len(waited):
            text = f"rank {source} is slow: {len(waited)} of {others} ranks wait for its {what}; "
            yield Slow(what, source, None, max(waited), text + MEANS.get(what, "it is late"))
            long = {pair: s for pair, s in long.items() if pair[1] != source}
    for to in sorted({to for to, _ in long}):
        waits = {source: s for (each, source), s in long.items() if each == to}
        others = sum(each == to for each, _ in pairs)
        if 1 < others < 2 * len(waits):
            text = f"ways into rank {to} are slow: it alone waits, for {what} of {len(waits)} of "
            yield Slow(what, None, to, max(waits.values()), f"{text}{others} ranks")
            continue
        for source, seconds in waits.items():
            text = f"the way from rank {source} to rank {to} is slow: no other waits so"
            if sum(each == source for _, each in pairs) == 1:
                text = f"rank {source} is slow, or the way to rank {to}: no other rank can tell"
            yield Slow(what, source, to, seconds, f"{text} for its {what}")


def document_of(paths: Iterable[Path]) -> dict[str, Any]:
    """What files, and those in folders, tell: the document of ``--json``. OSError: one cannot be
    read. ValueError: see :func:`waits_in`."""
    files = (sorted(path.glob("*.prom")) if path.is_dir() else [path] for path in paths)
    waits = waits_in(file.read_text() for each in files for file in each)
    shown = {
        what: [{"rank": to, "source": source, "seconds": s} for (to, source), s in pairs.items()]
        for what, pairs in waits.items()
    }
    return {"waits": shown, "slow": [asdict(each) for each in slow_in(waits)]}


def print_document(console: Console, document: dict[str, Any]) -> None:
    """A table of the ranks that are waited for; then what is slow."""
    for what, waits in document["waits"].items():
        rows: list[tuple[str, ...]] = []
        for source in sorted({each["source"] for each in waits}):
            waited = {each["rank"]: each["seconds"] for each in waits if each["source"] == source}
            longest = max(waited, key=lambda to: waited[to])
            numbers = (min(waited.values()), sum(waited.values()) / len(waited), waited[longest])
            rows.append((str(source), *map(seconds_text, numbers), str(longest)))
        title = f"Waits for {what} of a rank, by the others"
        print_table(console, title, "rank|least|mean|most|by rank", rows)
    print_line(console, "")
    for each in document["slow"]:
        print_line(console, f"[yellow]{seconds_text(each['seconds'])}: {each['text']}[/yellow]")
    if not document["slow"]:
        print_line(console, f"Nothing is slow: no wait is {MUCH:g} times the median.")
