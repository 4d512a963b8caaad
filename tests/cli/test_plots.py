"""Pictures of ``bench`` and ``plan``: a name has one colour and one marker in all panels, and what
the legend says is so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks import nvlink_plot
from benchmarks.record import Line
from tokenyard.cli.plots import save_bench, save_plans
from tokenyard.planner.prediction import scaling
from tokenyard.planner.rates import HOPPER
from tokenyard.planner.workload import DTYPES, Workload
from tokenyard.testing.cases import Case

RECORDS = Path(__file__).parents[2] / "docs" / "benchmarks"
Look = tuple[str, Any, Any]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were to be saved."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    return found


def rows_of(record: str) -> list[Line]:
    """Of a record of before the schema had a number."""
    known = {each.name for each in fields(Line)}
    rows = json.loads((RECORDS / record).read_text())["rows"]
    return [
        Line(
            case=Case(**row["job"], sms=row["sms"], rings=row.get("rings")),
            **{name: value for name, value in row.items() if name in known},
        )
        for row in rows
    ]


def look(line: Line2D) -> Look:
    return to_hex(line.get_color()), line.get_marker(), line.get_linestyle()


def looks(panels: list[Axes]) -> dict[str, set[Look]]:
    """What curves look like, by name, over all panels."""
    found: defaultdict[str, set[Look]] = defaultdict(set)
    for panel in panels:
        for line in panel.get_lines():
            found[str(line.get_label())].add(look(line))
    return found


def check_legend(figure: Figure) -> None:
    """There is one, for all panels; it names what is drawn as it is drawn."""
    [legend] = figure.legends
    assert all(panel.get_legend() is None for panel in figure.axes)
    shown = {
        text.get_text(): look(line)
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }
    assert {name: {each} for name, each in shown.items()} == looks(figure.axes)


def test_a_plan_has_a_colour_per_engine(drawn: list[Figure]) -> None:
    plans, _ = scaling(
        Workload(nodes=2, gpus_per_node=8, tokens=128, hidden=7168, experts=64, topk=8),
        HOPPER,
        DTYPES,
    )
    save_plans(Path("plan.png"), plans)
    [figure] = drawn
    assert [panel.get_title("left") for panel in figure.axes] == ["dispatch", "combine"]
    engines = [
        "nvlink, then twolevel",
        "low_latency",
        "low_latency, once per node",
        "collective",
        "flat exchange",
    ]
    assert [len(panel.get_lines()) for panel in figure.axes] == [2 * len(engines), len(engines)]
    found = looks(figure.axes)
    assert set(found) == {f"{engine}, {dtype}" for engine in engines for dtype in DTYPES}
    colours = [
        {colour for dtype in DTYPES for colour, _, _ in found[f"{engine}, {dtype}"]}
        for engine in engines
    ]
    assert [len(each) for each in colours] == [1] * len(engines)
    assert len(set.union(*colours)) == len(engines)
    assert all(
        len({look for engine in engines for look in found[f"{engine}, {dtype}"]}) == len(engines)
        for dtype in DTYPES
    )
    check_legend(figure)


def test_curves_of_a_plan_are_its_calls(drawn: list[Figure]) -> None:
    plans, _ = scaling(
        Workload(nodes=1, gpus_per_node=8, tokens=128, hidden=7168, experts=64, topk=8),
        HOPPER,
        DTYPES,
    )
    save_plans(Path("plan.png"), plans)
    for panel, name in zip(drawn[0].axes, ("dispatch", "combine"), strict=True):
        curves = {str(line.get_label()): line for line in panel.get_lines()}
        for dtype in DTYPES if name == "dispatch" else ("bf16",):
            wanted = [
                (plan.workload.ranks, call.terms.us)
                for plan in plans
                for call in plan.calls
                if (call.name, call.engine, call.dtype) == (name, "collective", dtype)
            ]
            curve = curves[f"collective, {dtype}"]
            assert list(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == wanted  # pyright: ignore


def test_a_sweep_has_a_look_per_system(drawn: list[Figure]) -> None:
    save_bench(Path("sweep.png"), rows_of("collective-4xh200-20261121.json"))
    [figure] = drawn
    assert len(figure.axes) == 4
    found = looks(figure.axes)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(found, 1)
    assert len(set.union(*found.values())) == len(found) == 8
    check_legend(figure)


def test_the_picture_of_a_record_has_a_look_per_call(drawn: list[Figure]) -> None:
    nvlink_plot.draw(Path("record.png"), rows_of("nvlink-4xh200-20261122.json"))
    [figure] = drawn
    assert [panel.get_title("left") for panel in figure.axes] == ["dispatch", "combine", "over SMs"]
    found = looks(figure.axes)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(found, 1)
    assert len(set.union(*found.values())) == len(found) == 10
