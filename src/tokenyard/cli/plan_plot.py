"""Times over numbers of GPUs, as planned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from tokenyard.cli.plots import OURS, THEIRS, Look, Point, draw_curves, save_panels
from tokenyard.planner.prediction import COLLECTIVE, COMBINE, DISPATCH, FLAT, Plan

PLANNED = "nvlink, then twolevel"
COLOURS = {PLANNED: OURS[0], COLLECTIVE: THEIRS[0], FLAT: THEIRS[1]}
LINES = {"bf16": {"marker": "o"}, "fp8": {"marker": "s", "linestyle": "--"}}
LOOKS: dict[str, Look] = {
    f"{engine}, {dtype}": {"color": colour, **line}
    for engine, colour in COLOURS.items()
    for dtype, line in LINES.items()
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
    panels = [(name, partial(_panel, plans=plans, name=name)) for name in (DISPATCH, COMBINE)]
    save_panels(path, text, [panels], LOOKS, size=(12.5, 5), columns=len(COLOURS))


def _panel(axes: Axes, plans: Sequence[Plan], name: str) -> None:
    """One curve per (engine, dtype) of calls ``name``; nvlink goes on as twolevel."""
    curves: dict[str, list[Point]] = {}
    for plan in plans:
        for call in plan.calls:
            if call.name == name:
                engine = PLANNED if call.engine == plan.engine else call.engine
                point = Point(plan.workload.ranks, call.terms.us)
                curves.setdefault(f"{engine}, {call.dtype}", []).append(point)
    ticks = [plan.workload.ranks for plan in plans]
    draw_curves(axes, curves, LOOKS, x="GPUs", y="us", ticks=ticks)
