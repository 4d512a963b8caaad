"""Draws ``reference/protocols.svg``: what host and GPU of two ranks do in each kind of call.

Run it after changing a protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LANES = ("host 0", "GPU 0", "GPU 1", "host 1")
HOST_0, GPU_0, GPU_1, HOST_1 = 3.0, 2.0, 1.0, 0.0
SIGNAL, DATA, CREDIT = "#0072B2", "#D55E00", "#009E73"
KERNEL, HOST = "#dbe7f3", "#eeeeee"
HALF = 0.28
"""Half the height of a bar."""


class Bar(NamedTuple):
    """Something that takes time on one lane."""

    lane: float
    begin: float
    end: float
    text: str


class Arrow(NamedTuple):
    """Something that one lane sends to another."""

    begin: tuple[float, float]  # time, lane
    end: tuple[float, float]
    colour: str
    text: str = ""


class Panel(NamedTuple):
    """One kind of call."""

    title: str
    bars: list[Bar]
    arrows: list[Arrow]


def across(at: float, takes: float, colour: str, text: str = "") -> list[Arrow]:
    """The same in both directions; the text stands once."""
    return [
        Arrow((at, GPU_0), (at + takes, GPU_1), colour, text),
        Arrow((at, GPU_1), (at + takes, GPU_0), colour),
    ]


def both(begin: float, end: float, text: str) -> list[Bar]:
    """The same kernel on both GPUs."""
    return [Bar(GPU_0, begin, end, text), Bar(GPU_1, begin, end, text)]


def hosts(begin: float, end: float, text: str) -> list[Bar]:
    """The same work on both hosts."""
    return [Bar(HOST_0, begin, end, text), Bar(HOST_1, begin, end, text)]


def told(at: float) -> list[Arrow]:
    """Counts and nonce, from each GPU to its host."""
    return [
        Arrow((at, GPU_0), (at + 0.4, HOST_0), SIGNAL, "counts, nonce"),
        Arrow((at, GPU_1), (at + 0.4, HOST_1), SIGNAL),
    ]


def rings(begin: float) -> list[Arrow]:
    """Call barrier, chunks of rows with their tails, and credits coming back."""
    return [
        *across(begin + 0.2, 0.4, SIGNAL, "barrier"),
        *across(begin + 1.1, 0.4, DATA, "rows, tail"),
        *across(begin + 2.1, 0.4, CREDIT, "head"),
        *across(begin + 2.9, 0.4, DATA),
        *across(begin + 3.6, 0.4, CREDIT),
    ]


PLAN = "plan: merge, count      complete"
ROWS = "rows: send, receive, call barrier"
COUNTS = across(1.6, 0.4, SIGNAL, "counts, arrival")
PANELS = [
    Panel(
        "fresh dispatch, exact shapes",
        [
            *hosts(-0.3, 0.5, "launch"),
            *hosts(3.4, 4.1, "make, launch"),
            *both(0.5, 3.0, PLAN),
            *both(4.1, 8.4, ROWS),
        ],
        [*COUNTS, *told(3.0), *rings(4.1)],
    ),
    Panel(
        "fresh dispatch, static shapes; exact FLAT with room made by guess (the host learns the "
        "counts while rows fly)",
        [*hosts(-0.3, 0.5, "launch both"), *both(0.5, 3.0, PLAN), *both(3.0, 7.3, ROWS)],
        [*COUNTS, *rings(3.0)],
    ),
    Panel(
        "cached dispatch; combine (rows go back: senders where the experts are, reducers at the "
        "owners)",
        [
            *hosts(-0.3, 0.5, "launch"),
            *both(0.5, 4.8, "rows: send, receive or reduce, call barrier"),
        ],
        rings(0.5),
    ),
    Panel(
        "dispatch in place: behind the plan (exact: and the counts), or alone if cached",
        [
            *hosts(-0.3, 0.5, "launch both"),
            *both(0.5, 4.6, "in place: call barrier, write, done"),
            *both(4.6, 5.6, "unpack"),
        ],
        [
            *across(0.8, 0.4, SIGNAL, "barrier"),
            *across(1.9, 0.4, DATA, "rows"),
            *across(2.6, 0.4, DATA),
            *across(3.4, 0.4, SIGNAL, "done"),
        ],
    ),
]


def draw(axes: Axes, panel: Panel) -> None:
    """One panel: a lane per host and GPU, time to the right."""
    for lane in range(len(LANES)):
        axes.axhline(lane, color="#cccccc", linewidth=0.6, zorder=0)
    for bar in panel.bars:
        colour = KERNEL if bar.lane in (GPU_0, GPU_1) else HOST
        axes.barh(
            bar.lane,
            bar.end - bar.begin,
            2 * HALF,
            bar.begin,
            color=colour,
            edgecolor="#555555",
            linewidth=0.7,
        )
        axes.text(
            (bar.begin + bar.end) / 2, bar.lane, bar.text, ha="center", va="center", fontsize=6.5
        )
    for arrow in panel.arrows:
        _draw_arrow(axes, arrow)
    axes.set(xlim=(-0.4, 8.5), ylim=(-0.55, 3.55), xticks=[], yticks=range(len(LANES)))
    axes.set_yticklabels(reversed(LANES), fontsize=7)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_title(panel.title, fontsize=8.5, loc="left", pad=2)


def _draw_arrow(axes: Axes, arrow: Arrow) -> None:
    (begin, source), (end, destination) = arrow.begin, arrow.end
    way = HALF if destination > source else -HALF
    style = {
        "arrowstyle": "-|>",
        "color": arrow.colour,
        "linewidth": 1.1,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", (end, destination - way), (begin, source + way), arrowprops=style)
    if arrow.text:
        at = (source + destination) / 2
        axes.text(
            end + 0.1, at, arrow.text, fontsize=6.5, color=arrow.colour, va="center", ha="left"
        )


def main() -> None:
    """Write ``reference/protocols.svg``; the same bytes every time."""
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "tokenyard", "none"
    figure = Figure(figsize=(9, 8.2), layout="constrained")
    for axes, panel in zip(figure.subplots(len(PANELS), 1), PANELS, strict=True):
        draw(axes, panel)
    for colour, text in (
        (SIGNAL, "signals"),
        (DATA, "rows, with their counter"),
        (CREDIT, "credits"),
    ):
        figure.axes[-1].plot([], [], color=colour, label=text)
    figure.axes[-1].legend(loc="lower right", fontsize=7, frameon=False)
    figure.savefig(Path(__file__).parent / "reference" / "protocols.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
