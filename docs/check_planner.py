"""Makes the tables and the picture of ``planner.md`` anew: predictions beside what was measured, machines of up to 1024 GPUs.

Run it after a change of the planner, of what engines choose, or of a record; ``tests/test_plan_validation.py`` says when.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from tokenyard.planner.fit import rates_from
from tokenyard.planner.model import US, Terms, by_turns, predict
from tokenyard.planner.plan import COLLECTIVE, COMBINE, DISPATCH, FLAT, Plan, scaling
from tokenyard.planner.rates import H200, Rates
from tokenyard.planner.record import Point, read
from tokenyard.planner.workload import Dtype, Workload

PAGE = Path(__file__).parent / "planner.md"
RECORDS = Path(__file__).parent / "benchmarks"
TWO, FOUR = RECORDS / "nvlink-2xh200-20261121.json", RECORDS / "nvlink-4xh200-dev-20261121.md"
PORTABLE = RECORDS / "collective-4xh200-20261121.json"

SEEN_ON_FOUR: dict[str, tuple[str, Dtype, tuple[int, ...]]] = {
    "dispatch BF16, fresh tensors": ("dispatch", "bf16", (132,)),
    "dispatch FP8, fresh": ("dispatch", "fp8", (132,)),
    "combine from an ordinary tensor": ("combine", "bf16", (132,)),
    "dispatch BF16, view": ("in_place", "bf16", (132,)),
    "the same, 24 SMs / 8 SMs": ("in_place", "bf16", (24, 8)),
    "dispatch FP8, view": ("in_place", "fp8", (132,)),
}
"""Rows of that record's table that a plan speaks of: leg, dtype, SMs of each figure."""


class Line(NamedTuple):
    """A measured time (or its range) beside a prediction."""

    what: str
    leg: str
    work: Workload
    low: float
    high: float
    terms: Terms

    @property
    def error(self) -> float:
        """Relative, beside the middle of the range."""
        return self.terms.us / ((self.low + self.high) / 2) - 1


def fitted() -> Rates:
    """Rates as the two records with raw times give them; those built in are these, rounded."""
    return rates_from(PORTABLE, rates_from(TWO, H200))


def fitted_lines(rates: Rates) -> list[Line]:
    """Every point that the rates were fitted to."""
    return [_line(point, rates) for point in [*read(TWO), *read(PORTABLE)]]


def _line(point: Point, rates: Rates) -> Line:
    return Line(point.leg, point.leg, point.work, point.us, point.us, predict(point.leg, point.work, rates))


def unseen_lines(rates: Rates) -> list[Line]:
    """Four GPUs, to which nothing of the nvlink engine was fitted."""
    lines: list[Line] = []
    for row in FOUR.read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) > 2 and cells[1] in SEEN_ON_FOUR:
            lines += _seen(cells[1], cells[2], rates)
    return lines


def _seen(label: str, times: str, rates: Rates) -> list[Line]:
    leg, dtype, limits = SEEN_ON_FOUR[label]
    lines: list[Line] = []
    for sms, text in zip(limits, times.split("/"), strict=True):
        numbers = [float(number) for number in re.findall(r"\d+", text)]
        work = Workload(
            nodes=1, gpus_per_node=4, tokens=4096, hidden=7168, experts=256, topk=8, dtype=dtype, sms=sms
        )  # fmt: skip
        lines.append(Line(label, leg, work, numbers[0], numbers[-1], predict(leg, work, rates)))
    return lines


SEEN_BY_TURNS = [
    ("dispatch", 23, 5, "99-106"),
    ("dispatch", 128, 5, "205-210"),
    ("combine", 23, 4, "118"),
    ("combine", 128, 4, "188-203"),
    ("dispatch, own rows kept by the forwarder", 23, 4, "137-147"),
    ("dispatch, own rows kept by the forwarder", 128, 4, "244-262"),
]
"""Engine twolevel on two GPUs as two nodes (``performance.md``): workers, copies of each row that crosses, GB/s seen."""
CROSSING = 4082 * 14336
"""Bytes of the rows that cross there: 4096 tokens, all but a few to the other GPU."""


def turns_table(rates: Rates) -> str:
    """Puts between these two are copies by programs over NVLink, so there is one link, and no network."""
    rows = ["| call | workers | copies of a row | seen GB/s | planned GB/s |", "|---|---:|---:|---:|---:|"]
    for call, workers, copies, seen in SEEN_BY_TURNS:
        leg, gbs = (rates.combine, rates.turns_back_gbs) if call == "combine" else (rates.dispatch, rates.turns_gbs)
        busy = by_turns(copies * CROSSING, workers, gbs, rates)
        us = leg.fixed_us + math.hypot(CROSSING / (leg.link_gbs * US), busy)
        rows.append(f"| {call} | {workers} | {copies} | {seen} | {CROSSING / us / US:.0f} |")
    return "\n".join(rows)


def machines(rates: Rates) -> list[Plan]:
    """1 to 128 nodes of 8 GPUs, 1024 experts."""
    return scaling(Workload(nodes=1, gpus_per_node=8, tokens=4096, hidden=7168, experts=256, topk=8), rates, ("fp8",))


# As Markdown


def lines_table(lines: list[Line]) -> str:
    """Sorted by leg, dtype, SMs, tokens."""
    rows = [
        f"| {line.leg.replace('_', ' ')} {line.work.dtype} | {line.work.gpus_per_node} | {line.work.tokens} | {line.work.sms} "
        f"| {_range(line)} | {line.terms.us:,.1f} | {100 * line.error:+.1f} % | {line.terms.bound} |"
        for line in sorted(lines, key=_order)
    ]
    heads = ("call", "GPUs", "tokens", "SMs", "measured us", "planned us", "error", "bound by")
    return "\n".join([f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---:|---:|---|", *rows])


def _order(line: Line) -> tuple[str, str, int, int]:
    return line.leg, line.work.dtype, -line.work.sms, line.work.tokens


def _range(line: Line) -> str:
    return f"{line.low:,.1f}" if line.low == line.high else f"{line.low:,.0f}-{line.high:,.0f}"


def scaling_table(plans: list[Plan]) -> str:
    """FP8 dispatch and BF16 combine."""
    heads = ("GPUs", "nodes per token", "NIC MB, once per node", "once per rank", "dispatch us", "bound by", "flat us")
    heads += ("combine us", "bound by", "flat us", "channels")
    rows = [_machine(plan) for plan in plans]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads), *rows])


def _machine(plan: Plan) -> str:
    by = {(call.name, call.engine): call for call in plan.calls}
    there, back = by[DISPATCH, plan.engine], by[COMBINE, plan.engine]
    flat = FLAT if plan.workload.nodes > 1 else COLLECTIVE
    cells = [
        str(plan.workload.ranks),
        f"{plan.traffic['uniform'].nodes_reached:.2f}",
        f"{there.nic.busiest / 1e6:,.1f}",
        f"{by[DISPATCH, flat].nic.busiest / 1e6:,.1f}",
        f"{there.terms.us:,.0f}",
        there.terms.bound,
        f"{by[DISPATCH, flat].terms.us:,.0f}",
        f"{back.terms.us:,.0f}",
        back.terms.bound,
        f"{by[COMBINE, flat].terms.us:,.0f}",
        str(plan.sizes["fp8"].channels),
    ]
    return f"| {' | '.join(cells)} |"


def tables() -> dict[str, str]:
    """The tables of the page by the name that stands above each."""
    known = fitted()
    return {
        "unseen": lines_table(unseen_lines(known)),
        "fitted": lines_table(fitted_lines(known)),
        "turns": turns_table(H200),
        "machines": scaling_table(machines(H200)),
    }


def with_tables(page: str) -> str:
    """``page`` with its tables made anew."""
    for name, table in tables().items():
        mark = f"<!-- {name} -->\n"
        assert page.count(mark) == 1, mark
        page = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + table + "\n": new, page)
    return page


if __name__ == "__main__":
    from tokenyard.cli.plan_plot import draw

    PAGE.write_text(with_tables(PAGE.read_text()))
    draw(machines(H200), PAGE.with_suffix(".png"))
