"""Times over numbers of GPUs, as planned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_plot import INK, OURS, THEIRS, legend, log_axes, new_figure, title
from tokenyard.planner.prediction import COLLECTIVE, COMBINE, DISPATCH, FLAT, Plan

PLANNED = "nvlink, then twolevel"
COLOURS = {PLANNED: OURS[0], COLLECTIVE: THEIRS[0], FLAT: THEIRS[1]}
LINES: dict[str, dict[str, str]] = {
    "bf16": {"marker": "o"},
    "fp8": {"marker": "s", "linestyle": "--"},
}


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Write a PNG: dispatch to the left, combine to the right; a colour per engine, warm for our
    kernels, a line per dtype.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    work = plans[0].workload
    text = (
        f"tokenyard plan: {work.tokens} tokens per rank, hidden {work.hidden}, top-{work.topk} of "
        f"{work.experts} experts, {work.gpus_per_node} GPUs per node (a model, not a measurement)"
    )
    figure, panels = new_figure(1, text, size=(12.5, 5))
    for panel, name in zip(panels.flat, (DISPATCH, COMBINE), strict=True):
        title(panel, name)
        _curves(panel, plans, name)
        log_axes(panel, [plan.workload.ranks for plan in plans])
        panel.set_xlabel("GPUs", color=INK)
        panel.set_ylabel("us", color=INK)
    names = [_label(engine, dtype) for engine in COLOURS for dtype in LINES]
    legend(figure, panels, names, len(COLOURS))
    figure.savefig(path, dpi=150)


def _curves(panel: Any, plans: Sequence[Plan], name: str) -> None:
    """One curve per (engine, dtype) of calls ``name``; nvlink goes on as twolevel."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for plan in plans:
        for call in plan.calls:
            if call.name == name:
                engine = PLANNED if call.engine == plan.engine else call.engine
                point = (plan.workload.ranks, call.terms.us)
                curves.setdefault((engine, call.dtype), []).append(point)
    for (engine, dtype), points in curves.items():
        look: dict[str, Any] = {"color": COLOURS[engine], "markersize": 5, **LINES[dtype]}
        panel.plot(*zip(*points, strict=True), label=_label(engine, dtype), **look)


def _label(engine: str, dtype: str) -> str:
    return f"{engine}, {dtype}"
