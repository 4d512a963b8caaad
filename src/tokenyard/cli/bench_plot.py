"""The figures of ``tokenyard bench`` as a picture: lines over whatever number was swept, bars if
none was.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from tokenyard.cli.bench_cases import CACHED, COMBINE, DISPATCH
from tokenyard.cli.bench_inputs import Job
from tokenyard.cli.bench_report import Row
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


def draw(rows: list[Row], path: Path) -> None:
    """Write a PNG with a line of panels per kind of job: dispatch (fresh and cached) to the left,
    combine to the right.

    Rows without times are left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.wall]
    axis = _swept(timed)
    kinds = list(dict.fromkeys(_kind(row.job, axis) for row in timed))
    shared = [word for word in kinds[0] if all(word in kind for kind in kinds)] if kinds else []
    colours = _colours(timed)
    figure: Any = Figure(figsize=(12.5, 1.3 + 3.4 * max(len(kinds), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(timed, axis, shared), fontsize=12, color=INK)
    panels = figure.subplots(max(len(kinds), 1), len(PANELS), squeeze=False)
    for line, kind in zip(panels, kinds, strict=False):
        for panel, (name, phases) in zip(line, PANELS.items(), strict=True):
            shown = [row for row in timed if _kind(row.job, axis) == kind and row.phase in phases]
            shown.sort(key=lambda row: not _is_ours(row.name))
            own = [word for word in kind if word not in shared]
            panel.set_title(
                ", ".join([name, *own]), loc="left", fontsize=11, fontweight="bold", color=INK
            )
            style(panel)
            if axis is None:
                _bars(panel, shown, colours)
            else:
                _lines(panel, shown, axis, colours)
    if axis is not None:
        legend(figure, panels, [*colours, FLOOR])
    figure.savefig(path, dpi=150)


def _swept(rows: list[Row]) -> str | None:
    """The first numeric field of the jobs with more than one value."""
    return next((name for name in SWEPT if len({getattr(row.job, name) for row in rows}) > 1), None)


def _kind(job: Job, axis: str | None) -> tuple[str, ...]:
    """What sets the lines of panels apart, in words: everything but the swept number."""
    words = {
        "tokens": f"{job.tokens} tokens/rank",
        "hidden": f"hidden {job.hidden}",
        "topk": f"top-{job.topk}",
        "experts": f"{job.experts} experts",
        "skew": f"{job.skew} routing",
        "dtype": job.dtype,
        "layout": job.layout,
        "quantize": "" if job.quantize == "none" else f"{job.quantize} on the wire",
    }
    return tuple(word for name, word in words.items() if word and name != axis)


def _title(rows: list[Row], axis: str | None, shared: list[str]) -> str:
    over = "" if axis is None else f" over {SWEPT[axis]}, whiskers from min to p99"
    clock = "device time" if any(row.device for row in rows) else "end-to-end time"
    return f"tokenyard bench: median {clock} of the slowest rank{over}\n{', '.join(shared)}"


def _label(row: Row) -> str:
    return f"{row.name}, cached" if row.phase == CACHED else row.name


def _is_ours(label: str) -> bool:
    return label.startswith("tokenyard")


def _colours(rows: list[Row]) -> dict[str, str]:
    """A colour per label: warm for this library, cold for baselines."""
    labels = list(dict.fromkeys(map(_label, rows)))
    ours = [label for label in labels if _is_ours(label)]
    theirs = [label for label in labels if label not in ours]
    picked = {label: OURS[at % len(OURS)] for at, label in enumerate(ours)}
    return picked | {label: THEIRS[at % len(THEIRS)] for at, label in enumerate(theirs)}


def style(panel: Any) -> None:
    """Two spines, small labels."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)
    panel.set_axisbelow(True)


def _stats(row: Row) -> Stats:
    stats = row.device or row.wall
    assert stats, "rows without times are not drawn"
    return stats


def _unit(rows: list[Row]) -> tuple[str, float]:
    """Milliseconds where a median has at least one, else microseconds."""
    if rows and max(_stats(row).median for row in rows) >= MILLISECOND:
        return "ms", MILLISECOND
    return "us", 1.0


def _bars(panel: Any, rows: list[Row], colours: dict[str, str]) -> None:
    unit, scale = _unit(rows)
    for place, row in enumerate(rows):
        stats = _stats(row)
        panel.barh(place, stats.median / scale, color=colours[_label(row)], height=0.62)
        text = (
            f"{stats.median / scale:,.3g}   (min {stats.min / scale:,.3g}, p99 "
            f"{stats.p99 / scale:,.3g})"
        )
        at = (stats.median / scale, place)
        panel.annotate(
            text, at, (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
    if rows and (floor := rows[0].floor_us):
        panel.axvline(floor / scale, color=INK, linestyle="--", linewidth=1)
        panel.annotate(
            "floor",
            (floor / scale, -0.5),
            (4, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
        )
    panel.set_yticks(range(len(rows)), [_label(row).replace(" (", "\n(") for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.75)
    panel.set_xlim(
        0, ROOM_FOR_TEXT * max((_stats(row).median / scale for row in rows), default=1.0)
    )
    panel.grid(axis="x", color=GRID)
    panel.set_xlabel(unit, color=INK)


def _lines(panel: Any, rows: list[Row], axis: str, colours: dict[str, str]) -> None:
    unit, scale = _unit(rows)
    labels = list(dict.fromkeys(map(_label, rows)))
    markers = dict(zip(colours, cycle(MARKERS), strict=False))
    for number, label in enumerate(labels):
        points = sorted(
            ((_place(r, axis), _stats(r)) for r in rows if _label(r) == label),
            key=lambda point: point[0],
        )
        where = [place * DODGE ** (number - (len(labels) - 1) / 2) for place, _ in points]
        median, low, high = (
            [getattr(s, name) / scale for _, s in points] for name in ("median", "min", "p99")
        )
        style: dict[str, Any] = {"color": colours[label], "marker": markers[label], "label": label}
        panel.plot(where, median, linewidth=2, markersize=5, **style)
        panel.vlines(where, low, high, color=colours[label], linewidth=1, alpha=0.55)
    floors = sorted({(_place(row, axis), row.floor_us / scale) for row in rows if row.floor_us})
    if floors:
        panel.plot(
            *zip(*floors, strict=True), color=INK, linestyle="--", linewidth=1.2, label=FLOOR
        )
    log_axes(panel, sorted({_place(row, axis) for row in rows}))
    panel.set_xlabel(SWEPT[axis], color=INK)
    panel.set_ylabel(unit, color=INK)


def _place(row: Row, axis: str) -> int:
    return getattr(row.job, axis)


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


def legend(figure: Any, panels: Any, order: list[str], columns: int = 4) -> None:
    """One legend for all panels, below them: those labels of ``order`` that are drawn anywhere."""
    entries: dict[str, Any] = {}
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    shown = [label for label in order if label in entries]
    handles = [entries[label] for label in shown]
    figure.legend(
        handles, shown, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5
    )
