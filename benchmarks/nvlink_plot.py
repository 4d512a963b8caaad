"""The curves of the suite ``nvlink`` as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.nvlink import SMS, TOKENS
from tokenyard.cli.bench_cases import COMBINE
from tokenyard.cli.bench_plot import (
    INK,
    best,
    curve,
    floor_line,
    log_axes,
    new_figure,
    styles,
    title,
)
from tokenyard.cli.bench_report import Measurement


def draw(lines: list[Measurement], path: Path) -> None:
    """Write a PNG: time over tokens for dispatch and combine, time over SMs. Lines without times
    are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    timed = [line for line in lines if line.wall]
    over = [line for line in timed if line.section == TOKENS]
    over_sms = [line for line in timed if line.section == SMS]
    text = "median time of the slowest rank, us; whiskers from min to p99"
    figure, [panels] = new_figure(1, text, columns=3, size=(15, 5.2))
    drawn = [*over, *over_sms]
    looks = styles([line.name for line in drawn], [line.name for line in drawn if line.ours])
    there = [line for line in over if line.phase != COMBINE]
    back = [line for line in over if line.phase == COMBINE]
    _panel(panels[0], "dispatch", "tokens per rank", there, looks)
    _panel(panels[1], "combine", "tokens per rank", back, looks)
    _panel(panels[2], "over SMs", "SMs", over_sms, looks)
    figure.savefig(path, dpi=150)


def _panel(
    panel: Any, name: str, axis: str, lines: list[Measurement], looks: dict[str, dict[str, str]]
) -> None:
    title(panel, name)
    if not lines:
        return

    def at(line: Measurement) -> int:
        return (line.case.sms or 0) if axis == "SMs" else line.case.tokens

    for label in dict.fromkeys(line.name for line in lines):
        mine = [line for line in lines if line.name == label]
        look = {**looks[label], "label": label}
        curve(panel, [at(line) for line in mine], [best(line) for line in mine], 1.0, look)
    floor_line(panel, ((at(line), line.floor_us) for line in lines if line.floor_us))
    log_axes(panel, sorted({at(line) for line in lines}))
    panel.set_xlabel(axis, color=INK)
    panel.legend(frameon=False, fontsize=8.5)
