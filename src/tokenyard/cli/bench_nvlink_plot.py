"""The curves of ``tokenyard bench --suite nvlink`` as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.cli.bench_cases import COMBINE
from tokenyard.cli.bench_nvlink import SMS, TOKENS, Line
from tokenyard.cli.bench_plot import FLOOR, INK, MARKERS, OURS, THEIRS, log_axes, style


def draw(lines: list[Line], path: Path) -> None:
    """Write a PNG: time over tokens for dispatch and combine, time over SMs. Lines without times are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [line for line in lines if line.wall]
    curve = [line for line in timed if line.section == TOKENS]
    figure: Any = Figure(figsize=(15, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("median time of the slowest rank, us; whiskers from min to p99", fontsize=12, color=INK)
    panels: Any = figure.subplots(1, 3)
    _panel(panels[0], "dispatch", "tokens per rank", [line for line in curve if line.phase != COMBINE])
    _panel(panels[1], "combine", "tokens per rank", [line for line in curve if line.phase == COMBINE])
    _panel(panels[2], "over SMs", "SMs", [line for line in timed if line.section == SMS])
    figure.savefig(path, dpi=150)


def _panel(panel: Any, title: str, axis: str, lines: list[Line]) -> None:
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    style(panel)
    if not lines:
        return
    names = list(dict.fromkeys(line.name for line in lines))
    for number, name in enumerate(names):
        mine = [line for line in lines if line.name == name]
        colour = (OURS if mine[0].ours else THEIRS)[number % 4]
        places = [_place(line, axis) for line in mine]
        stats = [line.device or line.wall for line in mine]
        median, low, high = ([getattr(each, part) for each in stats] for part in ("median", "min", "p99"))
        panel.plot(places, median, color=colour, marker=MARKERS[number % len(MARKERS)], markersize=5, label=name)
        panel.vlines(places, low, high, color=colour, linewidth=1, alpha=0.55)
    floors = sorted({(_place(line, axis), line.floor_us) for line in lines if line.floor_us})
    if floors:
        panel.plot(*zip(*floors, strict=True), color=INK, linestyle="--", linewidth=1.2, label=FLOOR)
    log_axes(panel, sorted({_place(line, axis) for line in lines}))
    panel.set_xlabel(axis, color=INK)
    panel.legend(frameon=False, fontsize=8.5)


def _place(line: Line, axis: str) -> int:
    return (line.sms or 0) if axis == "SMs" else line.job.tokens
