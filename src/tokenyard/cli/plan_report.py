"""A plan as tables for a reader, or as JSON for a program."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard import __version__
from tokenyard.cli.report import bytes_text, plain_table, print_section
from tokenyard.engines.twolevel_ground import limit_of
from tokenyard.planner.plan import Call, Plan
from tokenyard.planner.rates import Rates
from tokenyard.planner.traffic import Traffic

IGNORED = (
    "Not in these times: the Python call (100-260 us in the records; CUDA graphs hide it), the "
    "plan of a new routing, congestion, "
    "rails that do not match, limits of NICs and their queues, GPUs that wait for slower ones. The "
    "network was never measured."
)


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that :func:`print_plan` shows, with bytes and microseconds as plain numbers."""
    return {
        "tokenyard": __version__,
        "workload": {
            name: value for name, value in asdict(plan.workload).items() if name != "dtype"
        },
        "rates": _named(plan.rates),
        "engine": plan.engine,
        "engine_runs": _when(plan),
        "sizes": {dtype: asdict(sizes) for dtype, sizes in plan.sizes.items()},
        "rows": {skew: _named(rows) for skew, rows in plan.traffic.items()},
        "calls": [_call(call) for call in plan.calls],
    }


def _named(values: Rates | Traffic) -> dict[str, Any]:
    """Fields, also those of tuples with names, which ``asdict`` leaves as they are and JSON writes
    without names.
    """
    return {
        name: value._asdict() if hasattr(value, "_asdict") else value
        for name, value in asdict(values).items()
    }


def _call(call: Call) -> dict[str, Any]:
    return {
        "name": call.name,
        "engine": call.engine,
        "dtype": call.dtype,
        "skew": call.skew,
        "us": call.terms.us,
        "bound": call.terms.bound,
        "terms_us": {
            name: value for name, value in asdict(call.terms).items() if name != "in_turn"
        },
        "links_in_turn": call.terms.in_turn,
        "nvlink_bytes": call.nvlink._asdict(),
        "nic_bytes": call.nic._asdict(),
    }


def print_plan(console: Console, plan: Plan) -> None:
    """Tables: times, bytes, sizes, rates."""
    work = plan.workload
    _line(
        console,
        f"[bold]{work.nodes} x {work.gpus_per_node} GPUs[/bold], {work.tokens} tokens per rank, "
        f"hidden {work.hidden}, "
        f"top-{work.topk} of {work.experts} experts. Engine [bold]{plan.engine}[/bold] "
        f"{_when(plan)}; "
        "the others are for comparison.",
    )
    print_section(console, "Time (us; each limit were it alone)", _times(plan))
    print_section(
        console,
        "Bytes per GPU and call (busier direction of the busiest GPU; mean over GPUs)",
        _bytes(plan),
    )
    print_section(
        console, f"Rows of engine {plan.engine} and what once per node saves", _rows(plan)
    )
    print_section(console, f"Sizes of engine {plan.engine}", _sizes(plan))
    _line(console, f"\n[bold]Rates[/bold] {escape(_rates(plan.rates))}")
    _line(console, IGNORED)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _when(plan: Plan) -> str:
    """When the engine that is planned runs."""
    if plan.engine == "nvlink":
        return "would run"
    if limit := limit_of(plan.workload.grid):
        return f"is on paper only (it takes at most {limit}; collective would run)"
    return 'would run if asked for, engine="twolevel" ("auto" takes collective there)'


def _times(plan: Plan) -> Table:
    table = plain_table(
        "<Call",
        "<Engine",
        "<Routing",
        "Time",
        "NVLink",
        "NIC",
        "Programs",
        "Latency",
        "Fill",
        "<Bound by",
    )
    for call in plan.calls:
        terms = call.terms
        parts = (terms.us, terms.nvlink, terms.nic, terms.programs, terms.latency, terms.fill)
        table.add_row(
            f"{call.name} {call.dtype}", call.engine, call.skew, *map(us_text, parts), terms.bound
        )
    return table


def us_text(us: float) -> str:
    """Three digits are more than the model knows."""
    return f"{us:,.1f}" if 0 < us < 99.95 else f"{us:,.0f}"


def _bytes(plan: Plan) -> Table:
    table = plain_table("<Call", "<Engine", "<Routing", "NVLink", "mean", "NIC", "mean")
    for call in plan.calls:
        sizes = (call.nvlink.busiest, call.nvlink.mean, call.nic.busiest, call.nic.mean)
        table.add_row(f"{call.name} {call.dtype}", call.engine, call.skew, *map(bytes_text, sizes))
    return table


def _rows(plan: Plan) -> Table:
    table = plain_table(
        "<Routing",
        "ranks per token",
        "nodes per token",
        "NIC, per (token, rank)",
        "per (token, node)",
        "saved",
    )
    for skew, rows in plan.traffic.items():
        flat, once = rows.flat_nic.mean, rows.nic.mean
        saved = f"{1 - once / flat:.0%}" if flat else "-"
        counts = (
            f"{rows.ranks_reached:.2f}",
            f"{rows.nodes_reached:.2f}",
            f"{flat:,.0f}",
            f"{once:,.0f}",
        )
        table.add_row(skew, *counts, saved)
    return table


def _sizes(plan: Plan) -> Table:
    table = plain_table(
        "<Rows",
        "Channels",
        "<Rings",
        "Number",
        "Each",
        "Slots",
        "Chunk",
        "Slots back",
        "Chunk back",
        "Symmetric memory",
    )
    for dtype, sizes in plan.sizes.items():
        total = bytes_text(sizes.symmetric_bytes)
        for ring in sizes.rings:
            counts = (ring.slots, ring.chunk, ring.back_slots, ring.back_chunk)
            each = bytes_text(ring.num_bytes)
            table.add_row(
                dtype,
                str(sizes.channels),
                ring.name,
                str(ring.count),
                each,
                *map(str, counts),
                total,
            )
    return table


def _rates(rates: Rates) -> str:
    return (
        f"{rates.source}. Dispatch {rates.dispatch.link_gbs:.0f} GB/s, in place "
        f"{rates.in_place.link_gbs:.0f}, combine "
        f"{rates.combine.link_gbs:.0f}, collective {rates.collective.link_gbs:.0f} and "
        f"{rates.collective_back.link_gbs:.0f}; NIC "
        f"{rates.nic_gbs:g} GB/s, {rates.latency_us:g} us, {rates.put_us:g} us per put."
    )
