"""Pictures: panels of curves, and the demo's. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from tokenyard.cli.demo_rank import DemoResult

OURS = ("#c8553d", "#e9a23b", "#8f2d56", "#f2c57c", "#7f4f24")
THEIRS = ("#1f4e79", "#4f93b8", "#7ba89c", "#6d6875", "#a3a0aa")
MARKERS = "osD^vPX*"
INK, GRID = "#2b2b2b", "#e3e3e3"
FLOOR = "floor (bytes / link rate)"

RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#666")
"""Okabe and Ito's palette, told apart by every kind of colour vision; further ranks start over."""

MOST_LABELS = 8
"""Ranks up to which cells carry their value and bars a legend."""

Look = dict[str, Any]


class Point(NamedTuple):
    """Of a curve; ``low`` and ``high`` are the ends of its whisker."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


def styles(labels: Iterable[str], ours: Callable[[str], bool]) -> dict[str, Look]:
    """Colour and marker per label, the same in all panels: warm where ``ours``, which come first,
    else cold.
    """
    colours = {True: cycle(OURS), False: cycle(THEIRS)}
    marked = zip(dict.fromkeys(labels), cycle(MARKERS), strict=False)
    looks = {name: {"color": next(colours[ours(name)]), "marker": mark} for name, mark in marked}
    return {name: looks[name] for name in sorted(looks, key=lambda name: not ours(name))}


def save_panels(
    path: Path,
    text: str,
    panels: Sequence[Sequence[tuple[str, Callable[[Axes], None]]]],
    legend: Iterable[str],
    *,
    size: tuple[float, float] | None = None,
    columns: int = 4,
) -> None:
    """Write a figure under a title: lines of panels, each with a title and what draws it, and one
    legend below, of those labels of ``legend`` that are drawn anywhere.
    """
    figure = Figure(figsize=size or (12.5, 1.3 + 3.4 * len(panels)), layout="constrained")
    figure.suptitle(text, fontsize=12, color=INK)
    grid: Any = figure.subplots(len(panels), len(panels[0]), squeeze=False)
    drawn: dict[str, Any] = {}
    for axes, (title, draw) in zip(grid.flat, chain(*panels), strict=True):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_axisbelow(True)
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    shown = [label for label in legend if label in drawn]
    if shown:
        look: Look = {"loc": "outside lower center", "frameon": False, "fontsize": 9.5}
        figure.legend([drawn[label] for label in shown], shown, ncols=columns, **look)
    figure.savefig(path, dpi=150)


def draw_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[Point]],
    looks: Mapping[str, Look],
    floor: Iterable[tuple[float, float]] = (),
    *,
    x: str,
    y: str,
    ticks: Iterable[int],
) -> None:
    """Lines with whiskers over logarithmic axes that have plain numbers; ``x``, ``y`` name them.

    ``floor``: what the link allows, where that is known. ``ticks``: places that are named below.
    """
    for label, points in curves.items():
        xs, ys = [point.x for point in points], [point.y for point in points]
        axes.plot(xs, ys, label=label, markersize=5, **looks[label])
        for point in points:
            if point.low is not None and point.high is not None:
                colour = looks[label]["color"]
                axes.vlines(point.x, point.low, point.high, color=colour, linewidth=1, alpha=0.55)
    if known := sorted(set(floor)):
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, label=FLOOR, color=INK, linestyle="--", linewidth=1.2)
    axes.set_xscale("log", base=2)
    places = sorted(set(ticks))
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)


# The demo


def heat_map(axes: Axes, matrix: Sequence[Sequence[float]], *, title: str, unit: str) -> None:
    """Draw ``matrix[source][destination]``; the diagonal is left blank, since those rows cross no
    wire.
    """
    places = [(i, j) for i in range(len(matrix)) for j in range(len(matrix))]
    wire = [
        [float("nan") if i == j else v for j, v in enumerate(row)] for i, row in enumerate(matrix)
    ]
    peak = max((matrix[i][j] for i, j in places if i != j), default=0.0)
    axes.set_facecolor("#eeeeee")
    image = axes.imshow(wire, cmap="cividis", vmin=0, vmax=peak or 1)
    axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.85)
    decimals = 2 if peak < 10 else 1 if peak < 100 else 0
    for i, j in places if len(matrix) <= MOST_LABELS else []:
        shade = "#777777" if i == j else "black" if matrix[i][j] > 0.6 * peak else "white"
        text = "own" if i == j else f"{matrix[i][j]:.{decimals}f}"
        axes.text(j, i, text, ha="center", va="center", color=shade)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set(title=title, xlabel="destination rank", ylabel="source rank")


def _bars_by_rank(axes: Axes, result: DemoResult) -> None:
    """One bar per expert in its rank's colour, and their mean."""
    load, owners = result.load, zip(result.experts, cycle(RANK_COLOURS), strict=False)
    first, mean = 0, sum(load) / len(load)
    for rank, (count, colour) in enumerate(owners):
        places = range(first, first + count)
        tops = load[first : first + count]
        axes.bar(places, tops, width=0.85, color=colour, label=f"rank {rank}")
        first += count
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set(title="Expert load", xlabel="expert", ylabel="tokens", xlim=(-0.7, len(load) - 0.3))
    axes.spines[["top", "right"]].set_visible(False)
    if (ranks := len(result.experts)) <= MOST_LABELS:
        below: Look = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "frameon": False}
        axes.legend(ncols=min(ranks + 1, 5), **below)


def save_traffic(path: Path, result: DemoResult, title: str) -> None:
    """Write a figure of the bytes between ranks (per step) beside the tokens of each expert."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    scale, unit = (1e6, "MB") if max(map(max, result.sent)) >= 1e6 else (1e3, "kB")
    traffic = [[value / scale for value in row] for row in result.sent]
    per_step = f"{unit} per step, forward and backward"
    heat_map(left, traffic, title="Bytes between ranks", unit=per_step)
    _bars_by_rank(right, result)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
