"""The picture of the demo: a heat map of traffic between ranks, and bars. Needs matplotlib (the
extra ``plots``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tokenyard.cli.demo_rank import DemoResult

RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#666")
"""Okabe and Ito's palette, told apart by every kind of colour vision; further ranks start over."""

MOST_LABELS = 8
"""Ranks up to which cells carry their value and bars a legend."""


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


def bars_by_rank(
    axes: Axes, heights: Sequence[float], held: Sequence[int], *, title: str, label: str
) -> None:
    """Draw one bar per expert in its rank's colour, and their mean. ``held[r]``: experts of rank
    ``r``, in order.
    """
    first = 0
    for rank, count in enumerate(held):
        colour, end = RANK_COLOURS[rank % len(RANK_COLOURS)], first + count
        tops = heights[first:end]
        axes.bar(range(first, end), tops, width=0.85, color=colour, label=f"rank {rank}")
        first = end
    mean = sum(heights) / len(heights)
    axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean {mean:.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set(title=title, xlabel="expert", ylabel=label, xlim=(-0.7, len(heights) - 0.3))
    axes.spines[["top", "right"]].set_visible(False)
    if len(held) <= MOST_LABELS:
        columns = min(len(held) + 1, 5)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns, frameon=False)


def save_traffic(path: Path, result: DemoResult, title: str) -> None:
    """Write a figure of the bytes between ranks (per step) beside the tokens of each expert."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    scale, unit = (1e6, "MB") if max(map(max, result.sent)) >= 1e6 else (1e3, "kB")
    traffic = [[value / scale for value in row] for row in result.sent]
    per_step = f"{unit} per step, forward and backward"
    heat_map(left, traffic, title="Bytes between ranks", unit=per_step)
    bars_by_rank(right, result.load, result.experts, title="Expert load", label="tokens")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
