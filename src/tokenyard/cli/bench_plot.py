"""The figures of ``tokenyard bench`` as a picture: lines over whatever number was swept, bars if
none was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_cases import CACHED, COMBINE, DISPATCH
from tokenyard.cli.bench_inputs import Case
from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.timing import Stats

SWEPT = {"tokens": "tokens per rank", "hidden": "hidden", "topk": "top-k", "experts": "experts"}
PANELS = {DISPATCH: (DISPATCH, CACHED), COMBINE: (COMBINE,)}

OURS = ("#c8553d", "#e9a23b", "#8f2d56", "#f2c57c", "#7f4f24")
THEIRS = ("#1f4e79", "#4f93b8", "#7ba89c", "#6d6875", "#a3a0aa")
MARKERS = "osD^vPX*"
INK, GRID = "#2b2b2b", "#e3e3e3"
MILLISECOND = 1000.0
DODGE = 1.025
ROOM_FOR_TEXT = 1.75
FLOOR = "floor (bytes / link rate)"


def draw(rows: list[Measurement], path: Path) -> None:
    """Write a PNG with a line of panels per kind of case: dispatch (fresh and cached) to the left,
    combine to the right.

    Rows without times are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    timed = sorted((row for row in rows if row.wall), key=lambda row: not _is_ours(row.name))
    axis = next((name for name in SWEPT if len({_at(row, name) for row in timed}) > 1), None)
    kinds = list(dict.fromkeys(_kind(row.case, axis) for row in rows if row.wall))
    shared = [word for word in kinds[0] if all(word in kind for kind in kinds)] if kinds else []
    looks = styles([_label(row) for row in rows if row.wall])
    figure, panels = new_figure(max(len(kinds), 1), _title(timed, axis, shared))
    for line, kind in zip(panels, kinds, strict=False):
        for panel, (name, phases) in zip(line, PANELS.items(), strict=True):
            shown = [row for row in timed if _kind(row.case, axis) == kind and row.phase in phases]
            title(panel, ", ".join([name, *(word for word in kind if word not in shared)]))
            if axis is None:
                _bars(panel, shown, looks)
            else:
                _lines(panel, shown, axis, looks)
    if axis is not None:
        legend(figure, panels, [*looks, FLOOR])
    figure.savefig(path, dpi=150)


# Parts of pictures


def new_figure(
    lines: int, text: str, columns: int = 2, size: tuple[float, float] | None = None
) -> tuple[Any, Any]:
    """A figure of ``lines`` times ``columns`` panels under a title, and those panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=size or (12.5, 1.3 + 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(text, fontsize=12, color=INK)
    return figure, figure.subplots(lines, columns, squeeze=False)


def title(panel: Any, text: str) -> None:
    """Over a panel of two spines and small labels."""
    panel.set_title(text, loc="left", fontsize=11, fontweight="bold", color=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)
    panel.set_axisbelow(True)


def styles(labels: Iterable[str], ours: Iterable[str] | None = None) -> dict[str, dict[str, str]]:
    """Colour and marker per label, the same in all panels: warm for this library, cold for others.

    ``ours``: labels of this library, by default those that begin with its name.
    """
    every = list(dict.fromkeys(labels))
    mine = {*(ours if ours is not None else filter(_is_ours, every))}
    marks = dict(zip(every, cycle(MARKERS), strict=False))
    found: dict[str, dict[str, str]] = {}
    for colours, group in (
        (OURS, [each for each in every if each in mine]),
        (THEIRS, [each for each in every if each not in mine]),
    ):
        picked = zip(group, cycle(colours), strict=False)
        found |= {label: {"color": colour, "marker": marks[label]} for label, colour in picked}
    return found


def curve(
    panel: Any, places: Sequence[float], stats: Sequence[Stats], scale: float, look: dict[str, Any]
) -> None:
    """Medians as a line, with whiskers from the minimum to p99."""
    median, low, high = (
        [getattr(each, name) / scale for each in stats] for name in ("median", "min", "p99")
    )
    panel.plot(places, median, markersize=5, **look)
    panel.vlines(places, low, high, color=look["color"], linewidth=1, alpha=0.55)


def floor_line(panel: Any, floors: Iterable[tuple[int, float]]) -> None:
    """What the link allows, where that is known."""
    if points := sorted(set(floors)):
        look: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.2, "label": FLOOR}
        panel.plot(*zip(*points, strict=True), **look)


def _plain_number(value: float, _: int | None = None) -> str:
    return f"{value:,g}"


def log_axes(panel: Any, places: list[int]) -> None:
    """Logarithmic axes; ``places`` are named below, plain numbers beside."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:,}" for place in places])
    panel.minorticks_off()
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="y", color=GRID, linewidth=0.7)


def legend(figure: Any, panels: Any, order: Iterable[str], columns: int = 4) -> None:
    """One legend for all panels, below them: those labels of ``order`` that are drawn anywhere."""
    entries: dict[str, Any] = {}
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    shown = [label for label in order if label in entries]
    look: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9.5}
    figure.legend([entries[label] for label in shown], shown, ncols=columns, **look)


# The sweep


def _at(row: Measurement, axis: str) -> int:
    return getattr(row.case, axis)


def _kind(case: Case, axis: str | None) -> tuple[str, ...]:
    """What sets the lines of panels apart, in words: everything but the swept number."""
    words = {
        "tokens": f"{case.tokens} tokens/rank",
        "hidden": f"hidden {case.hidden}",
        "topk": f"top-{case.topk}",
        "experts": f"{case.experts} experts",
        "skew": f"{case.skew} routing",
        "dtype": case.dtype,
        "layout": case.layout,
        "quantize": "" if case.quantize == "none" else f"{case.quantize} on the wire",
    }
    return tuple(word for name, word in words.items() if word and name != axis)


def _title(rows: list[Measurement], axis: str | None, shared: list[str]) -> str:
    over = "" if axis is None else f" over {SWEPT[axis]}, whiskers from min to p99"
    clock = "device time" if any(row.device for row in rows) else "end-to-end time"
    return f"tokenyard bench: median {clock} of the slowest rank{over}\n{', '.join(shared)}"


def _label(row: Measurement) -> str:
    return f"{row.name}, cached" if row.phase == CACHED else row.name


def _is_ours(label: str) -> bool:
    return label.startswith("tokenyard")


def best(row: Measurement) -> Stats:
    """Of a row with times."""
    assert row.best, "rows without times are not drawn"
    return row.best


def _unit(rows: list[Measurement]) -> tuple[str, float]:
    """Milliseconds where a median has at least one, else microseconds."""
    if rows and max(best(row).median for row in rows) >= MILLISECOND:
        return "ms", MILLISECOND
    return "us", 1.0


def _bars(panel: Any, rows: list[Measurement], looks: dict[str, dict[str, str]]) -> None:
    unit, scale = _unit(rows)
    small: dict[str, Any] = {"textcoords": "offset points", "color": INK, "fontsize": 9}
    for place, row in enumerate(rows):
        median, least, most = (getattr(best(row), n) / scale for n in ("median", "min", "p99"))
        panel.barh(place, median, color=looks[_label(row)]["color"], height=0.62)
        text = f"{median:,.3g}   (min {least:,.3g}, p99 {most:,.3g})"
        panel.annotate(text, (median, place), (5, 0), va="center", **small)
    if rows and (floor := rows[0].floor_us):
        panel.axvline(floor / scale, color=INK, linestyle="--", linewidth=1)
        panel.annotate("floor", (floor / scale, -0.5), (4, 0), **small)
    panel.set_yticks(range(len(rows)), [_label(row).replace(" (", "\n(") for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.75)
    longest = max((best(row).median / scale for row in rows), default=1.0)
    panel.set_xlim(0, ROOM_FOR_TEXT * longest)
    panel.grid(axis="x", color=GRID)
    panel.set_xlabel(unit, color=INK)


def _lines(
    panel: Any, rows: list[Measurement], axis: str, looks: dict[str, dict[str, str]]
) -> None:
    unit, scale = _unit(rows)
    labels = list(dict.fromkeys(map(_label, rows)))
    for number, label in enumerate(labels):
        mine = sorted((r for r in rows if _label(r) == label), key=lambda row: _at(row, axis))
        where = [_at(row, axis) * DODGE ** (number - (len(labels) - 1) / 2) for row in mine]
        look = {**looks[label], "label": label, "linewidth": 2}
        curve(panel, where, [best(row) for row in mine], scale, look)
    floor_line(panel, ((_at(row, axis), row.floor_us / scale) for row in rows if row.floor_us))
    log_axes(panel, sorted({_at(row, axis) for row in rows}))
    panel.set_xlabel(SWEPT[axis], color=INK)
    panel.set_ylabel(unit, color=INK)
