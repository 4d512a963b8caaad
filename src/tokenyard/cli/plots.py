"""Pictures of ``bench``, ``plan`` and ``demo``. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from tokenyard.cli.bench_report import Measurement
from tokenyard.planner import prediction
from tokenyard.testing.cases import NUMBERS, WORDS, Case
from tokenyard.testing.checked_calls import COMBINE, DISPATCH

MARKERS = "osD^vPX*"
FLOOR = "floor (bytes / link rate)"
DODGE = 1.05
"""Points of a single place stand so much beside each other, so that whiskers show."""

MOST_LABELS = 8
"""Ranks up to which cells carry their value."""

Look = dict[str, Any]


class Point(NamedTuple):
    """Of a curve; ``high`` and ``low`` are the ends of its whisker."""

    x: float
    y: float
    high: float
    low: float


class Panel(NamedTuple):
    """Curves by label, microseconds over ``x``, both axes logarithmic; of label :data:`FLOOR`: what
    the link allows."""

    title: str
    x: str
    curves: dict[str, list[Point]]


def styles(labels: Iterable[str], ours: Callable[[str], bool]) -> dict[str, Look]:
    """Colour and marker per label, the same in all panels; ``ours`` come first."""
    names = sorted(dict.fromkeys(labels), key=lambda name: not ours(name))
    looks: dict[str, Look] = {
        name: {"color": f"C{at % 10}", "marker": MARKERS[at % len(MARKERS)]}
        for at, name in enumerate(names)
    }
    return {**looks, FLOOR: {"color": "black", "linestyle": "--", "marker": "_"}}


def save_panels(
    path: Path, text: str, panels: Sequence[Panel], looks: Mapping[str, Look], lines: int = 1
) -> None:
    """Write lines of panels under a title, and one legend below, in the order of ``looks``."""
    across = -(-len(panels) // lines)
    figure = Figure(figsize=(1 + 5 * across, 1.6 + 3.4 * lines), layout="constrained")
    figure.suptitle(text, fontsize=12)
    grid: Any = figure.subplots(lines, across, squeeze=False)
    drawn: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=True):
        _draw(axes, panel, looks)
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    shown = [label for label in looks if label in drawn]
    place: Look = {"loc": "outside lower center", "frameon": False, "ncols": 4}
    figure.legend([drawn[label] for label in shown], shown, **place)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    places = sorted({point.x for points in panel.curves.values() for point in points})
    for at, (label, points) in enumerate(panel.curves.items()):
        aside = 1.0 if len(places) > 1 else DODGE**at
        xs = [point.x * aside for point in points]
        axes.plot(xs, [point.y for point in points], label=label, markersize=5, **looks[label])
        lows, highs = [point.low for point in points], [point.high for point in points]
        axes.vlines(xs, lows, highs, color=looks[label]["color"], linewidth=1, alpha=0.55)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.3)
    axes.set(xlabel=panel.x, ylabel="us")


# tokenyard bench


def curves_of(
    rows: Iterable[Measurement], axis: str, label: Callable[[Any], str]
) -> dict[str, list[Point]]:
    """Timed rows as points over a field of their case, from min to p99; and what the link allows,
    where that is known."""
    curves, floor = defaultdict[str, list[Point]](list), dict[float, Point]()
    for row in sorted(rows, key=lambda row: getattr(row.case, axis) or 0):
        assert row.best, "rows without times are not drawn"
        x = getattr(row.case, axis) or 0
        curves[label(row)].append(Point(x, *row.best))
        if row.floor_us:
            floor[x] = Point(x, row.floor_us, row.floor_us, row.floor_us)
    return {**curves, FLOOR: [*floor.values()]} if floor else curves


def save_bench(path: Path, rows: Iterable[Measurement]) -> None:
    """Write a PNG over the first number that was swept, a line of panels per kind of case:
    dispatch, fresh and cached, and combine."""
    rows = [row for row in rows if row.wall]
    values = {name: {getattr(row.case, name) for row in rows} for name in (*NUMBERS, *WORDS)}
    axis = next((name for name in NUMBERS if len(values[name]) > 1), NUMBERS[0])
    apart = [name for name, found in values.items() if len(found) > 1 and name != axis]
    same = [f"{name} {each}" for name, found in values.items() for each in found if len(found) == 1]

    def kind(case: Case) -> str:
        return "".join(f", {name} {getattr(case, name)}" for name in apart)

    def label(row: Measurement) -> str:
        return row.name if row.phase in (DISPATCH, COMBINE) else f"{row.name}, cached"

    kinds = list(dict.fromkeys(kind(row.case) for row in rows)) or [""]
    panels: list[Panel] = []
    for each in kinds:
        for phase in (DISPATCH, COMBINE):
            part = [row for row in rows if kind(row.case) == each]
            part = [row for row in part if (row.phase == COMBINE) == (phase == COMBINE)]
            panels.append(Panel(phase + each, axis, curves_of(part, axis, label)))
    clock = "device time" if any(row.device for row in rows) else "end-to-end time"
    text = f"tokenyard bench: median {clock} of the slowest rank, whiskers from min to p99"
    looks = styles(map(label, rows), lambda name: name.startswith("tokenyard"))
    save_panels(path, f"{text}\n{', '.join(same)}", panels, looks, lines=len(kinds))


# tokenyard plan

PLANNED = "nvlink, then twolevel"
DRAWN = (PLANNED, prediction.LOW_LATENCY, prediction.ONCE, prediction.COLLECTIVE, prediction.FLAT)
DTYPES: dict[str, Look] = {"bf16": {"marker": "o"}, "fp8": {"marker": "s", "linestyle": "--"}}


def save_plans(path: Path, plans: Sequence[prediction.Plan]) -> None:
    """Write a PNG over numbers of GPUs: a panel per call, colour per engine, line per dtype."""
    work = plans[0].workload
    text = (
        f"tokenyard plan: {work.tokens} tokens per rank, hidden {work.hidden}, top-{work.topk} of "
        f"{work.experts} experts, {work.gpus_per_node} GPUs per node (a model, not a measurement)"
    )
    looks = {
        f"{engine}, {dtype}": {"color": f"C{at}", **line}
        for at, engine in enumerate(DRAWN)
        for dtype, line in DTYPES.items()
    }
    panels = {name: Panel(name, "GPUs", defaultdict(list)) for name in (DISPATCH, COMBINE)}
    for plan in plans:
        for call in plan.calls:
            if panel := panels.get(call.name):
                engine = PLANNED if call.engine == plan.engine else call.engine
                point = Point(plan.workload.ranks, *[call.terms.us] * 3)
                panel.curves[f"{engine}, {call.dtype}"].append(point)
    save_panels(path, text, [*panels.values()], looks)


# tokenyard demo


def heat_map(axes: Axes, matrix: Sequence[Sequence[float]], *, title: str, unit: str) -> None:
    """Draw ``matrix[source][destination]``; the diagonal, which crosses no wire, is left blank."""
    size = range(len(matrix))
    pairs = list(permutations(size, 2))
    for i, j in pairs if len(matrix) <= MOST_LABELS else ():
        axes.text(j, i, f"{matrix[i][j]:.3g}", ha="center", va="center")
    wire = [[float("nan") if i == j else matrix[i][j] for j in size] for i in size]
    peak = max((matrix[i][j] for i, j in pairs), default=0.0)
    image = axes.imshow(wire, cmap="Wistia", vmin=0, vmax=peak or 1)
    axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.85)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set(title=title, xlabel="destination rank", ylabel="source rank")


def save_traffic(
    path: Path, sent: Sequence[Sequence[int]], load: Sequence[Sequence[int]], title: str
) -> None:
    """Write a figure of the bytes ``sent[source][destination]`` beside the tokens of each rank's
    experts."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    scale, unit = (1e6, "MB") if max(map(max, sent)) >= 1e6 else (1e3, "kB")
    traffic = [[value / scale for value in row] for row in sent]
    heat_map(left, traffic, title="Bytes between ranks", unit=f"{unit}, forward and backward")
    first, mean = 0, sum(map(sum, load)) / sum(map(len, load))
    for rank, counts in enumerate(load):
        right.bar(range(first, first + len(counts)), counts, color=f"C{rank % 10}")
        first += len(counts)
    right.axhline(mean, color="black", linestyle="--", label=f"mean {mean:.0f}")
    right.set(title="Expert load, a colour per rank", xlabel="expert", ylabel="tokens")
    right.set_xlim(-0.7, first - 0.3)
    right.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    right.legend()
    figure.savefig(path, dpi=150)
