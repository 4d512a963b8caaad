"""``tokenyard doctor --waits``: who holds whom up, from what ranks wrote as ``Stats.prometheus()``.

``waits[part][rank][source]`` are the seconds that ``source`` held ``rank`` up in a part of a call
("dispatch, rows"), per call; None where it is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import Any

from rich.console import Console

from tokenyard.cli.consoles import plain_table, print_line, print_section, seconds_text
from tokenyard.cli.doctor_findings import WARNING

LEAST = 1e-4
"""Seconds per call that are worth a word."""
MANY = 3.0
"""Times the median pair of ranks."""
MOST_RANKS = 1024

_LINE = re.compile(r"tokenyard_(calls|wait_seconds)_total\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Waits = dict[str, list[list[float | None]]]


def read(texts: Mapping[str, str]) -> Waits:
    """Waits per call, from texts by the name of their file. Objects with the same rank are added.

    Raises:
        ValueError: a text holds no waits, or a rank that cannot be; it is named. There is no text.
    """
    if not texts:
        raise ValueError("no file that ends in .prom is there")
    calls: dict[tuple[int, str], float] = {}
    seconds: dict[str, dict[tuple[int, int], float]] = {}
    for name, text in texts.items():
        found = False
        for kind, labels, value in _LINE.findall(text):
            told, number = dict(_LABEL.findall(labels)), _number(name, value)
            rank = _rank(name, told.get("rank", ""))
            if kind == "calls":
                calls[rank, told.get("op", "")] = calls.get((rank, told.get("op", "")), 0) + number
                continue
            found, pair = True, (rank, _rank(name, told.get("source", "")))
            part = seconds.setdefault(told.get("for", ""), {})
            part[pair] = part.get(pair, 0.0) + number
        if not found:
            raise ValueError(
                f"{name} has no tokenyard_wait_seconds_total: write ep.stats().prometheus() there "
                f"on each rank (engine collective over gloo counts waits)"
            )
    size = 1 + max(max(pair) for part in seconds.values() for pair in part)
    waits: Waits = {}
    for what, pairs in sorted(seconds.items()):
        waits[what] = [[None] * size for _ in range(size)]
        for (rank, source), total in pairs.items():
            number = calls.get((rank, what.rsplit(", ", 1)[0]), 0)
            waits[what][rank][source] = total / max(number, 1)
    return waits


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no number") from None


def _rank(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < MOST_RANKS):
        raise ValueError(f"{name}: {text!r} is no rank (0 .. {MOST_RANKS - 1})")
    return int(text)


def slow(waits: Waits) -> list[dict[str, str]]:
    """A finding for each rank and each way that stands out in a part of a call."""
    found: list[dict[str, str]] = []
    for what, table in waits.items():
        for symptom, cause, remedy in _slow(what, table):
            texts = {"symptom": symptom, "cause": cause, "remedy": remedy}
            found.append({"id": "slow", "severity": WARNING, **texts})
    return found


def _slow(what: str, table: list[list[float | None]]) -> Iterator[tuple[str, str, str]]:
    known = {
        (rank, source): seconds
        for rank, row in enumerate(table)
        for source, seconds in enumerate(row)
        if seconds is not None and rank != source
    }
    if not known:
        return
    bar = max(LEAST, MANY * median_low(known.values()))
    for source in range(len(table)):
        waiting = {rank: seconds for (rank, of), seconds in known.items() if of == source}
        held = {rank: seconds for rank, seconds in waiting.items() if seconds >= bar}
        if not held:
            continue
        most = f"{seconds_text(max(held.values()))} per call"
        if len(held) == 1 and len(waiting) == 1:
            rank = next(iter(held))
            yield (
                f"{what}: rank {rank} waits for rank {source} ({most})",
                "no other rank's waits for it are known: it or the way between them is slow",
                "look at both" if len(table) == 2 else "give the files of all ranks",
            )
        elif 2 * len(held) > len(waiting):
            late = what.endswith(", counts")
            yield (
                f"{what}: {len(held)} of {len(waiting)} ranks wait for rank {source} ({most})",
                "it comes late to calls" if late else "it packs or sends slowly",
                "look at its work between calls" if late else "look at its processor and memory",
            )
        else:
            ranks = ", ".join(map(str, held))
            yield (
                f"{what}: rank {ranks} waits for rank {source}, others do not ({most})",
                f"the way from rank {source} to rank {ranks} is slow",
                "look at the link, cable or network card between them",
            )


def print_waits(console: Console, waits: Waits, findings: list[dict[str, str]]) -> None:
    """A table for each part, ranks down and sources across, and what stands out."""
    for what, table in waits.items():
        sources = map(str, range(len(table)))
        rows = [
            (str(rank), *("-" if each is None else seconds_text(each) for each in row))
            for rank, row in enumerate(table)
        ]
        title = f"{what}: waited per call by each rank (down) for each rank (across)"
        print_section(console, title, plain_table("<rank", *sources, rows=rows))
    print_line(console, "")
    if not findings:
        print_line(console, "[green]No rank and no way between two stands out.[/green]")
    for finding in findings:
        print_line(console, f"[yellow]SLOW: {finding['symptom']}[/yellow]")
        print_line(console, f"  cause:  {finding['cause']}")
        print_line(console, f"  remedy: {finding['remedy']}")


def document(waits: Waits, findings: list[dict[str, str]]) -> dict[str, Any]:
    """Of ``--json``."""
    return {"schema": 1, "waits": waits, "findings": findings}
