"""The curves of ``tokenyard bench --suite nvlink`` as one picture."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_cases import COMBINE
from tokenyard.cli.bench_nvlink import SMS, TOKENS, Line
from tokenyard.cli.bench_plot import FLOOR, INK, MARKERS, OURS, THEIRS, log_axes, style


def draw(lines: list[Line], path: Path) -> None:
    """Write a PNG: time over tokens for dispatch and combine, time over SMs. Lines without times
    are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [line for line in lines if line.wall]
    curve = [line for line in timed if line.section == TOKENS]
    figure: Any = Figure(figsize=(15, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "median time of the slowest rank, us; whiskers from min to p99", fontsize=12, color=INK
    )
    panels: Any = figure.subplots(1, 3)
    over_sms = [line for line in timed if line.section == SMS]
    styles = _styles([*curve, *over_sms])
    _panel(
        panels[0],
        "dispatch",
        "tokens per rank",
        [line for line in curve if line.phase != COMBINE],
        styles,
    )
    _panel(
        panels[1],
        "combine",
        "tokens per rank",
        [line for line in curve if line.phase == COMBINE],
        styles,
    )
    _panel(panels[2], "over SMs", "SMs", over_sms, styles)
    figure.savefig(path, dpi=150)


def _styles(lines: list[Line]) -> dict[str, dict[str, str]]:
    """Colour and marker of each name, the same in all panels: warm for this library, cold for
    baselines.
    """
    names: dict[str, bool] = {line.name: line.ours for line in lines}
    found: dict[str, dict[str, str]] = {}
    for ours, colours in ((True, OURS), (False, THEIRS)):
        mine = [name for name in names if names[name] == ours]
        looks = zip(mine, cycle(colours), cycle(MARKERS), strict=False)
        found |= {name: {"color": colour, "marker": marker} for name, colour, marker in looks}
    return found


def _panel(
    panel: Any, title: str, axis: str, lines: list[Line], styles: dict[str, dict[str, str]]
) -> None:
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    style(panel)
    if not lines:
        return
    for name in dict.fromkeys(line.name for line in lines):
        mine = [line for line in lines if line.name == name]
        places = [_place(line, axis) for line in mine]
        stats = [line.device or line.wall for line in mine]
        median, low, high = (
            [getattr(each, part) for each in stats] for part in ("median", "min", "p99")
        )
        panel.plot(places, median, markersize=5, label=name, **styles[name])
        panel.vlines(places, low, high, color=styles[name]["color"], linewidth=1, alpha=0.55)
    floors = sorted({(_place(line, axis), line.floor_us) for line in lines if line.floor_us})
    if floors:
        panel.plot(
            *zip(*floors, strict=True), color=INK, linestyle="--", linewidth=1.2, label=FLOOR
        )
    log_axes(panel, sorted({_place(line, axis) for line in lines}))
    panel.set_xlabel(axis, color=INK)
    panel.legend(frameon=False, fontsize=8.5)


def _place(line: Line, axis: str) -> int:
    return (line.sms or 0) if axis == "SMs" else line.job.tokens
