"""The figures of ``tokenyard bench`` as a picture: lines over whatever number was swept, bars if
none was.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from tokenyard.cli.bench_cases import CACHED, COMBINE, DISPATCH
from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.plots import FLOOR, GRID, INK, Look, Point, draw_curves, save_panels, styles

SWEPT = {"tokens": "tokens per rank", "hidden": "hidden", "topk": "top-k", "experts": "experts"}
WORDS = {
    "tokens": "{} tokens/rank",
    "hidden": "hidden {}",
    "topk": "top-{}",
    "experts": "{} experts",
    "skew": "{} routing",
    "dtype": "{}",
    "layout": "{}",
    "quantize": "{} on the wire",
}
"""What sets the lines of panels apart."""
PANELS = {DISPATCH: (DISPATCH, CACHED), COMBINE: (COMBINE,)}

MILLISECOND = 1000.0
DODGE = 1.025
"""Curves stand so much beside each other, so that whiskers do not hide each other."""
ROOM_FOR_TEXT = 1.75


def draw(rows: list[Measurement], path: Path) -> None:
    """Write a PNG with a line of panels per kind of case: dispatch (fresh and cached) to the left,
    combine to the right.

    Rows without times are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    looks = styles([_label(row) for row in rows if row.wall], _is_ours)
    looks = {label: {**look, "linewidth": 2} for label, look in looks.items()}
    rows = sorted((row for row in rows if row.wall), key=lambda row: not _is_ours(row.name))
    axis = next((name for name in SWEPT if len({_at(row, name) for row in rows}) > 1), None)
    kinds: dict[tuple[str, ...], list[Measurement]] = {}
    for row in rows:
        kinds.setdefault(_kind(row, axis), []).append(row)
    first = next(iter(kinds), ())
    shared = [word for word in first if all(word in kind for kind in kinds)]
    over = "" if axis is None else f" over {SWEPT[axis]}, whiskers from min to p99"
    clock = "device time" if any(row.device for row in rows) else "end-to-end time"
    text = f"tokenyard bench: median {clock} of the slowest rank{over}\n{', '.join(shared)}"
    panels: list[list[tuple[str, Any]]] = []
    for kind, mine in (kinds or {(): rows}).items():
        words = [word for word in kind if word not in shared]
        shown = {name: [row for row in mine if row.phase in PANELS[name]] for name in PANELS}
        panels.append(
            [
                (", ".join([name, *words]), partial(_panel, rows=found, axis=axis, looks=looks))
                for name, found in shown.items()
            ]
        )
    save_panels(path, text, panels, [*looks, FLOOR])


def _at(row: Measurement, axis: str) -> int:
    return getattr(row.case, axis)


def _kind(row: Measurement, axis: str | None) -> tuple[str, ...]:
    """Its case in words: everything but the swept number."""
    values = {name: getattr(row.case, name) for name in WORDS if name != axis}
    return tuple(WORDS[name].format(value) for name, value in values.items() if value != "none")


def _label(row: Measurement) -> str:
    return f"{row.name}, cached" if row.phase == CACHED else row.name


def _is_ours(label: str) -> bool:
    return label.startswith("tokenyard")


def point_of(row: Measurement, x: float, scale: float = 1.0) -> Point:
    assert row.best, "rows without times are not drawn"
    return Point(x, row.best.median / scale, row.best.min / scale, row.best.p99 / scale)


def _panel(axes: Axes, rows: list[Measurement], axis: str | None, looks: dict[str, Look]) -> None:
    """Milliseconds where a median has at least one, else microseconds."""
    slow = max((row.best_us or 0 for row in rows), default=0) >= MILLISECOND
    unit, scale = ("ms", MILLISECOND) if slow else ("us", 1.0)
    if axis is None:
        return _bars(axes, rows, looks, unit, scale)
    labels = list(dict.fromkeys(map(_label, rows)))
    curves: dict[str, list[Point]] = {label: [] for label in labels}
    for row in sorted(rows, key=lambda row: _at(row, axis)):
        aside = DODGE ** (labels.index(_label(row)) - (len(labels) - 1) / 2)
        curves[_label(row)].append(point_of(row, _at(row, axis) * aside, scale))
    floor = [(_at(row, axis), row.floor_us / scale) for row in rows if row.floor_us]
    ticks = [_at(row, axis) for row in rows]
    draw_curves(axes, curves, looks, floor, x=SWEPT[axis], y=unit, ticks=ticks)


def _bars(
    axes: Axes, rows: list[Measurement], looks: dict[str, Look], unit: str, scale: float
) -> None:
    points = [point_of(row, place, scale) for place, row in enumerate(rows)]
    small: Look = {"textcoords": "offset points", "color": INK, "fontsize": 9}
    for row, (place, median, least, most) in zip(rows, points, strict=True):
        axes.barh(place, median, color=looks[_label(row)]["color"], height=0.62)
        text = f"{median:,.3g}   (min {least:,.3g}, p99 {most:,.3g})"
        axes.annotate(text, (median, place), (5, 0), va="center", **small)
    if rows and (floor := rows[0].floor_us):
        axes.axvline(floor / scale, color=INK, linestyle="--", linewidth=1)
        axes.annotate("floor", (floor / scale, -0.5), (4, 0), **small)
    axes.set_yticks(range(len(rows)), [_label(row).replace(" (", "\n(") for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.75)
    axes.set_xlim(0, ROOM_FOR_TEXT * max((point.y for point in points), default=1.0))
    axes.grid(axis="x", color=GRID)
    axes.set_xlabel(unit, color=INK)
