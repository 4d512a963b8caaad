"""Pictures of ``bench``, ``plan`` and ``demo``. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.demo_rank import Part
from tokenyard.planner import prediction
from tokenyard.testing.checked_calls import COMBINE, DISPATCH

OURS = ("#c8553d", "#e9a23b", "#8f2d56", "#f2c57c", "#7f4f24")
THEIRS = ("#1f4e79", "#4f93b8", "#7ba89c", "#6d6875", "#a3a0aa")
MARKERS = "osD^vPX*"
INK, GRID = "#2b2b2b", "#e3e3e3"
FLOOR = "floor (bytes / link rate)"
DODGE = 1.05
"""Points of a single place stand so much beside each other, so that whiskers show."""

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


class Panel(NamedTuple):
    """Curves by label, both axes logarithmic; of label :data:`FLOOR`: what the link allows."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[Point]]


def styles(labels: Iterable[str], ours: Callable[[str], bool]) -> dict[str, Look]:
    """Colour and marker per label, the same in all panels: ``ours`` first and warm, others cold."""
    colours = {True: cycle(OURS), False: cycle(THEIRS)}
    marked = zip(dict.fromkeys(labels), cycle(MARKERS), strict=False)
    looks = {name: {"color": next(colours[ours(name)]), "marker": mark} for name, mark in marked}
    found = {name: looks[name] for name in sorted(looks, key=lambda name: not ours(name))}
    return {**found, FLOOR: {"color": INK, "linestyle": "--", "marker": "_"}}


def save_panels(
    path: Path,
    text: str,
    panels: Sequence[Panel],
    looks: Mapping[str, Look],
    *,
    lines: int = 1,
    columns: int = 4,
) -> None:
    """Write lines of panels under a title, and one legend below, in the order of ``looks``."""
    across = -(-len(panels) // lines)
    size = (12.5 if across < 3 else 15, 1.6 + 3.4 * lines)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(text, fontsize=12, color=INK)
    grid: Any = figure.subplots(lines, across, squeeze=False)
    drawn: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=True):
        _draw(axes, panel, looks)
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    if shown := [label for label in looks if label in drawn]:
        look: Look = {"loc": "outside lower center", "frameon": False, "fontsize": 9.5}
        figure.legend([drawn[label] for label in shown], shown, ncols=columns, **look)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    places = sorted({point.x for points in panel.curves.values() for point in points})
    for at, (label, points) in enumerate(panel.curves.items()):
        aside = 1.0 if len(places) > 1 else DODGE**at
        xs, ys = [point.x * aside for point in points], [point.y for point in points]
        axes.plot(xs, ys, label=label, markersize=5, **looks[label])
        for x, (_, _, low, high) in zip(xs, points, strict=True):
            if low is not None and high is not None:
                colour = looks[label]["color"]
                axes.vlines(x, low, high, color=colour, linewidth=1, alpha=0.55)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_xlabel(panel.x, color=INK)
    axes.set_ylabel(panel.y, color=INK)


# tokenyard bench

SWEPT = ("tokens", "hidden", "topk", "experts")
"""Numbers of a case: curves run over the first that was swept."""
WORDS = (*SWEPT, "skew", "dtype", "layout", "quantize")


def curves_of(
    rows: Iterable[Measurement], x: Callable[[Measurement], float], label: Callable[[Any], str]
) -> dict[str, list[Point]]:
    """Timed rows as points, microseconds from min to p99, and what the link allows where known."""
    curves, floor = dict[str, list[Point]](), dict[float, Point]()
    for row in sorted(rows, key=x):
        assert row.best, "rows without times are not drawn"
        point = Point(x(row), row.best.median, row.best.min, row.best.p99)
        curves.setdefault(label(row), []).append(point)
        if row.floor_us:
            floor[x(row)] = Point(x(row), row.floor_us)
    return {**curves, FLOOR: [*floor.values()]} if floor else curves


def save_bench(path: Path, rows: Iterable[Measurement]) -> None:
    """Write a PNG, a line of panels per kind of case: dispatch, fresh and cached, and combine."""
    rows = [row for row in rows if row.wall]
    values = {name: {getattr(row.case, name) for row in rows} for name in WORDS}
    axis = next((name for name in SWEPT if len(values[name]) > 1), SWEPT[0])
    apart = [name for name in WORDS if len(values[name]) > 1 and name != axis]
    kinds: dict[str, dict[str, list[Measurement]]] = {}
    for row in rows:
        told = "".join(f", {name} {getattr(row.case, name)}" for name in apart)
        both = kinds.setdefault(told, {DISPATCH: [], COMBINE: []})
        both[COMBINE if row.phase == COMBINE else DISPATCH].append(row)
    same = [f"{name} {each}" for name in WORDS for each in values[name] if len(values[name]) == 1]
    clock = "device time" if any(row.device for row in rows) else "end-to-end time"
    text = f"tokenyard bench: median {clock} of the slowest rank, whiskers from min to p99"

    def label(row: Measurement) -> str:
        return row.name if row.phase in (DISPATCH, COMBINE) else f"{row.name}, cached"

    panels = [
        Panel(phase + kind, axis, "us", curves_of(mine, lambda e: getattr(e.case, axis), label))
        for kind, both in (kinds or {"": {DISPATCH: []}}).items()
        for phase, mine in both.items()
    ]
    looks = styles(map(label, rows), lambda name: name.startswith("tokenyard"))
    save_panels(path, f"{text}\n{', '.join(same)}", panels, looks, lines=len(kinds) or 1)


# tokenyard plan

PLANNED = "nvlink, then twolevel"
COLOURS = {
    PLANNED: OURS[0],
    prediction.LOW_LATENCY: OURS[1],
    prediction.ONCE: OURS[2],
    prediction.COLLECTIVE: THEIRS[0],
    prediction.FLAT: THEIRS[1],
}
DTYPES: dict[str, Look] = {"bf16": {"marker": "o"}, "fp8": {"marker": "s", "linestyle": "--"}}


def save_plans(path: Path, plans: Sequence[prediction.Plan]) -> None:
    """Write a PNG over numbers of GPUs: a panel per call, colour per engine, line per dtype."""
    work = plans[0].workload
    text = (
        f"tokenyard plan: {work.tokens} tokens per rank, hidden {work.hidden}, top-{work.topk} of "
        f"{work.experts} experts, {work.gpus_per_node} GPUs per node (a model, not a measurement)"
    )
    looks = {
        f"{engine}, {dtype}": {"color": colour, **line}
        for engine, colour in COLOURS.items()
        for dtype, line in DTYPES.items()
    }
    curves: dict[str, dict[str, list[Point]]] = {prediction.DISPATCH: {}, prediction.COMBINE: {}}
    for plan in plans:
        for call in plan.calls:
            if call.name in curves:
                engine = PLANNED if call.engine == plan.engine else call.engine
                point = Point(plan.workload.ranks, call.terms.us)
                curves[call.name].setdefault(f"{engine}, {call.dtype}", []).append(point)
    panels = [Panel(name, "GPUs", "us", each) for name, each in curves.items()]
    save_panels(path, text, panels, looks, columns=3)


# tokenyard demo


def heat_map(axes: Axes, matrix: Sequence[Sequence[float]], *, title: str, unit: str) -> None:
    """Draw ``matrix[source][destination]``; the diagonal, which crosses no wire, is left blank."""
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


def _bars_by_rank(axes: Axes, loads: Sequence[Sequence[int]]) -> None:
    """One bar per expert in its rank's colour, and their mean."""
    first, mean = 0, sum(map(sum, loads)) / sum(map(len, loads))
    for rank, (load, colour) in enumerate(zip(loads, cycle(RANK_COLOURS), strict=False)):
        places = range(first, first + len(load))
        axes.bar(places, load, width=0.85, color=colour, label=f"rank {rank}")
        first += len(load)
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set(title="Expert load", xlabel="expert", ylabel="tokens", xlim=(-0.7, first - 0.3))
    axes.spines[["top", "right"]].set_visible(False)
    if len(loads) <= MOST_LABELS:
        below: Look = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "frameon": False}
        axes.legend(ncols=min(len(loads) + 1, 5), **below)


def save_traffic(path: Path, parts: Sequence[Part], title: str) -> None:
    """Write a figure of the bytes between ranks (per step) beside the tokens of each expert."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    scale, unit = (1e6, "MB") if max(max(part.sent) for part in parts) >= 1e6 else (1e3, "kB")
    traffic = [[value / scale for value in part.sent] for part in parts]
    per_step = f"{unit} per step, forward and backward"
    heat_map(left, traffic, title="Bytes between ranks", unit=per_step)
    _bars_by_rank(right, [part.load for part in parts])
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
