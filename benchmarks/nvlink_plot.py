"""The curves of the suite ``nvlink`` as one picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.nvlink import SMS, TOKENS
from benchmarks.record import Line
from tokenyard.cli.plots import Panel, curves_of, save_panels, styles
from tokenyard.testing.checked_calls import COMBINE


def draw(path: Path, lines: list[Line]) -> None:
    """Write a PNG: time over tokens for dispatch and combine, time over SMs. Lines without times
    are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    timed = [line for line in lines if line.wall]
    over = [line for line in timed if line.section == TOKENS]
    over_sms = [line for line in timed if line.section == SMS]
    ours = {line.name for line in timed if line.ours}
    looks = styles([line.name for line in [*over, *over_sms]], ours.__contains__)
    panels = [
        _panel("dispatch", "tokens", [line for line in over if line.phase != COMBINE]),
        _panel("combine", "tokens", [line for line in over if line.phase == COMBINE]),
        _panel("over SMs", "sms", over_sms),
    ]
    text = "median time of the slowest rank, us; whiskers from min to p99"
    save_panels(path, text, panels, looks)


def _panel(title: str, axis: str, lines: list[Line]) -> Panel:
    x = {"tokens": "tokens per rank", "sms": "SMs"}[axis]
    return Panel(title, x, curves_of(lines, axis, lambda line: line.name))
