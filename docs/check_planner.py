"""Fits the planner's rates anew, into ``planner/rates.py``, and makes the tables and the picture of
its pages: predictions beside what was measured, machines of up to 1024 GPUs.

Run it after a change of the planner, of what engines choose, or of a record;
``tests/cli/test_plan_validation.py`` says when.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.planner import rates as built_in
from tokenyard.planner.model import (
    US,
    Terms,
    by_turns,
    known_traffic,
    predict,
    touched,
    twolevel_combine,
    twolevel_dispatch,
)
from tokenyard.planner.prediction import COLLECTIVE, COMBINE, DISPATCH, FLAT, Plan, scaling
from tokenyard.planner.rates import CALLS, HOPPER, CallRates, Rates
from tokenyard.planner.record import rates_from, read
from tokenyard.planner.sizes import twolevel_sizes
from tokenyard.planner.workload import Dtype, Workload

PAGE = Path(__file__).parent / "how-to" / "planner.md"
RECORDS = Path(__file__).parent / "benchmarks"
LINES = RECORDS / "planner-validation.md"
"""The tables, and how far off the plans are in words; ``PAGE`` has the picture."""
TWO, FOUR = RECORDS / "nvlink-2xh200-20261127.json", RECORDS / "nvlink-4xh200-20261127.json"
PORTABLE = RECORDS / "collective-4xh200-20261121.json"
AS_TWO_BY_ONE = RECORDS / "twolevel-2xh200-dev-20261122.json"
AS_TWO_BY_TWO = RECORDS / "twolevel-4xh200-dev-20261122.json"


class Line(NamedTuple):
    """A measured time beside a prediction."""

    call: str
    work: Workload
    us: float
    terms: Terms

    @property
    def error(self) -> float:
        return self.terms.us / self.us - 1

    @property
    def group(self) -> str:
        """Where the model has the same thing to get right."""
        if self.work.sms < self.work.most_sms:
            return "fewer SMs"
        return (
            "all SMs, 1024 tokens or more" if self.work.tokens >= 1024 else "all SMs, fewer tokens"
        )


def fitted() -> Rates:
    """Rates as the two records with raw times give them; those built in are these, rounded."""
    return rates_from(PORTABLE, rates_from(TWO, HOPPER))


def rounded(known: Rates) -> Rates:
    """Rates as they are built in: three digits of what is fitted."""
    calls: dict[str, CallRates] = {call: getattr(known, call) for call in CALLS}
    return replace(HOPPER, **{
        call: CallRates(*[float(f"{rate:.3g}") for rate in astuple(rates) if rate is not None])
        for call, rates in calls.items()
    })  # fmt: skip


def with_rates(text: str, known: Rates) -> str:
    """``text`` of ``planner/rates.py`` with these rates built in."""
    for call in CALLS:
        rates: CallRates = getattr(known, call)
        new = ", ".join(str(rate) for rate in astuple(rates) if rate is not None)
        text = re.sub(rf"(    {call}=CallRates)\(.*\)", rf"\1({new})", text)
    return re.sub(r"nvlink-2x\w+-\d+(?= and)", TWO.stem, text)


def fitted_lines(rates: Rates) -> list[Line]:
    """Every point that the rates were fitted to."""
    return [*_lines(TWO, rates), *_lines(PORTABLE, rates)]


def unseen_lines(rates: Rates) -> list[Line]:
    """Engine nvlink on four GPUs: nothing of it was fitted."""
    return _lines(FOUR, rates)


def _lines(record: Path, rates: Rates) -> list[Line]:
    return [
        Line(point.call, point.work, point.us, predict(point.call, point.work, rates))
        for point in read(record)
    ]


# Engine twolevel where puts are copies by programs over NVLink too, as NVSHMEM does them inside a
# machine

TURNS: dict[str, tuple[str, Dtype]] = {
    "dispatch BF16": ("dispatch", "bf16"),
    "dispatch FP8": ("dispatch", "fp8"),
    "combine BF16": ("combine", "bf16"),
}
"""Calls in the record of four GPUs that a plan speaks of: call, dtype."""
LAST_SHAPES = {24: "24, as it is now but", 132: "all 132, by turns, 2 workers"}
"""SMs, and how the runs of that shape begin in the record of two GPUs."""


def turns_lines(rates: Rates) -> list[Line]:
    """Four GPUs as 2x2, none of which any rate knows, then two as 2x1, where the rates were chosen
    with earlier shapes.
    """
    return [*_two_by_two(rates), *_two_by_one(rates)]


def _two_by_two(rates: Rates) -> list[Line]:
    record: dict[str, Any] = json.loads(AS_TWO_BY_TWO.read_text())
    nodes, gpus = record["topology"]
    lines: list[Line] = []
    for row in record["rows"]:
        if row["what"] in TURNS:
            call, dtype = TURNS[row["what"]]
            rings = (
                {} if row["rings_mb"] is None else {"buffer_bytes": round(row["rings_mb"] * 1e6)}
            )
            work = _as_nodes(nodes, gpus, row["tokens"], dtype, row["num_sms"], **rings)
            lines.append(Line(call, work, row["us"], over_nvlink(call, work, rates)))
    return sorted(lines, key=_order)


def _two_by_one(rates: Rates) -> list[Line]:
    record: dict[str, Any] = json.loads(AS_TWO_BY_ONE.read_text())
    lines: list[Line] = []
    for call in ("combine", "dispatch"):
        for sms, beginning in LAST_SHAPES.items():
            [run] = [run for run in record["runs"] if run["what"].startswith(beginning)]
            work = _as_nodes(2, 1, record["tokens"], "bf16", sms)
            lines.append(Line(call, work, run[f"{call}_us"], over_nvlink(call, work, rates)))
    return sorted(lines, key=_order)


def _as_nodes(
    nodes: int, gpus: int, tokens: int, dtype: Dtype, sms: int | None, **rings: int
) -> Workload:
    limits = rings if sms is None else {**rings, "sms": sms}
    return Workload(
        nodes=nodes,
        gpus_per_node=gpus,
        tokens=tokens,
        hidden=7168,
        experts=256,
        topk=8,
        dtype=dtype,
        **limits,
    )


def over_nvlink(call: str, work: Workload, rates: Rates) -> Terms:
    """A call of engine twolevel without a network: one more copy of each row that crosses, and one
    link for both levels.
    """
    moved, sizes = known_traffic(work, "uniform"), twolevel_sizes(work)
    if call == "combine":
        terms, row_bytes = twolevel_combine(work, moved, sizes, rates), work.back_bytes
        link, gbs, programs = rates.combine, rates.turns_back_gbs, sizes.reducers
    else:
        terms, row_bytes = twolevel_dispatch(work, moved, sizes, rates), work.row_bytes
        link, gbs, programs = rates.dispatch, rates.turns_gbs, sizes.senders
    return replace(
        terms,
        nvlink=(moved.nic.busiest + moved.nvlink.busiest) * row_bytes / (link.link_gbs * US),
        nic=0.0,
        programs=by_turns(
            (touched(moved, work) + moved.nic.busiest) * row_bytes, programs, gbs, rates
        ),
        latency=link.fixed_us,
    )


def machines(rates: Rates) -> list[Plan]:
    """1 to 128 nodes of 8 GPUs, 1024 experts."""
    one = Workload(nodes=1, gpus_per_node=8, tokens=4096, hidden=7168, experts=256, topk=8)
    return scaling(one, rates, ("fp8",))[0]


# As Markdown


def lines_table(lines: list[Line]) -> str:
    """Sorted by call, dtype, SMs, tokens, rings."""
    rows = [
        f"| {_call(line)} | {line.work.gpus_per_node} | {line.work.tokens} | {line.work.sms} | "
        f"{_times(line)} |"
        for line in sorted(lines, key=_order)
    ]
    return _table("call", ["GPUs", "tokens", "SMs", "measured us", "planned us", "error"], rows)


def errors_table(lines: list[Line]) -> str:
    """Of each call: how many lines, mean size of errors, and the least and the largest error."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in sorted(lines, key=_order):
        found.setdefault((_name(line), line.group), []).append(100 * line.error)
    rows = [
        f"| {name} | {group} | {len(errors)} | {sum(map(abs, errors)) / len(errors):.1f} % "
        f"| {min(errors):+.1f} to {max(errors):+.1f} % |"
        for (name, group), errors in found.items()
    ]
    return "\n".join(["| call | | lines | mean size | errors |", "|---|---|---:|---:|---:|", *rows])


def turns_table(lines: Iterable[Line]) -> str:
    """With the copies of each row that crosses, its put among them, and the bytes that cross over
    the time.
    """
    rows: list[str] = []
    for line in lines:
        work, moved = line.work, known_traffic(line.work, "uniform")
        crossing = moved.nic.busiest * (
            work.back_bytes if line.call == "combine" else work.row_bytes
        )
        cells = [
            _call(line),
            f"{work.nodes}x{work.gpus_per_node}",
            str(work.tokens),
            str(work.sms),
            str(twolevel_sizes(work).senders),
            f"{touched(moved, work) / moved.nic.busiest + 1:.1f}",
            f"{crossing / line.us / US:.1f}",
            f"{crossing / line.terms.us / US:.1f}",
            _times(line),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    heads = [
        "grid",
        "tokens",
        "SMs",
        "workers",
        "copies",
        "seen GB/s",
        "planned GB/s",
        "seen us",
        "planned us",
        "error",
    ]
    return _table("call", heads, rows)


def _table(first: str, heads: list[str], rows: list[str]) -> str:
    return "\n".join(
        [
            f"| {' | '.join([first, *heads, 'bound by'])} |",
            f"|---|{'---:|' * len(heads)}---|",
            *rows,
        ]
    )


def _order(line: Line) -> tuple[str, str, int, int, int]:
    return line.call, line.work.dtype, -line.work.sms, line.work.tokens, -line.work.buffer_bytes


def _name(line: Line) -> str:
    return f"{line.call.replace('_', ' ')} {line.work.dtype}{' to heaps' * line.terms.in_heap}"


def _call(line: Line) -> str:
    size = line.work.buffer_bytes
    return (
        _name(line)
        if size == DEFAULT_BUFFER_BYTES
        else f"{_name(line)}, rings of {size / 1e6:,.1f} MB"
    )


def _times(line: Line) -> str:
    return f"{line.us:,.1f} | {line.terms.us:,.1f} | {100 * line.error:+.1f} % | {line.terms.bound}"


def scaling_table(plans: list[Plan]) -> str:
    """FP8 dispatch and BF16 combine."""
    heads = (
        "GPUs",
        "nodes per token",
        "NIC MB, once per node",
        "once per rank",
        "dispatch us",
        "bound by",
        "flat us",
    )
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
    """The tables of the record by the name that stands above each."""
    known = fitted()
    built = rounded(known)
    return {
        "unseen errors": errors_table(unseen_lines(known)),
        "unseen": lines_table(unseen_lines(known)),
        "fitted": lines_table(fitted_lines(known)),
        "turns": turns_table(turns_lines(built)),
        "machines": scaling_table(machines(built)),
    }


def with_tables(page: str) -> str:
    """``page`` with those of the tables anew that it has."""
    for name, table in tables().items():
        mark = f"<!-- {name} -->\n"
        page = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + table + "\n": new, page)
    return page


if __name__ == "__main__":
    from tokenyard.cli.plots import save_plans

    built, code = rounded(fitted()), Path(built_in.__file__)
    code.write_text(with_rates(code.read_text(), built))
    LINES.write_text(with_tables(LINES.read_text()))
    save_plans(PAGE.with_suffix(".png"), machines(built))
