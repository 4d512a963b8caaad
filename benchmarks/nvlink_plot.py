"""The curves of the suite ``nvlink`` as one picture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.nvlink import SMS, TOKENS
from tokenyard.cli.bench_cases import COMBINE
from tokenyard.cli.bench_plot import point_of
from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.plots import FLOOR, Look, Point, draw_curves, save_panels, styles


def draw(lines: list[Measurement], path: Path) -> None:
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
    panels = {
        "dispatch": ("tokens per rank", [line for line in over if line.phase != COMBINE]),
        "combine": ("tokens per rank", [line for line in over if line.phase == COMBINE]),
        "over SMs": ("SMs", over_sms),
    }
    draws = [
        (title, partial(_panel, axis=axis, lines=mine, looks=looks))
        for title, (axis, mine) in panels.items()
    ]
    text = "median time of the slowest rank, us; whiskers from min to p99"
    save_panels(path, text, [draws], [*looks, FLOOR], size=(15, 5.2))


def _panel(axes: Axes, axis: str, lines: list[Measurement], looks: dict[str, Look]) -> None:
    def at(line: Measurement) -> int:
        return (line.case.sms or 0) if axis == "SMs" else line.case.tokens

    curves: dict[str, list[Point]] = {}
    for line in lines:
        curves.setdefault(line.name, []).append(point_of(line, at(line)))
    floor = [(at(line), line.floor_us) for line in lines if line.floor_us]
    draw_curves(axes, curves, looks, floor, x=axis, y="us", ticks=map(at, lines))
