"""``tokenyard plan``: what dispatch and combine would take on a machine that is not at hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tokenyard import __version__
from tokenyard.cli.consoles import Rows, bytes_text, leads, print_line, print_table, table_console
from tokenyard.cli.options import command, file, list_of, option, word_of
from tokenyard.engines.known import NVLINK
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.engines.tuning import limit_of
from tokenyard.planner.prediction import ONCE, Call, Plan, scaling
from tokenyard.planner.prediction import plan as make_plan
from tokenyard.planner.rates import CALLS, HOPPER
from tokenyard.planner.record import rates_from
from tokenyard.planner.traffic import SKEWS, Traffic
from tokenyard.planner.workload import DTYPES, H200_SMS, Dtype, Workload

WORK = ("nodes", "gpus_per_node", "tokens", "hidden", "experts", "topk", "sms", "buffer_bytes")
IGNORED = (
    "Not in these times: the Python call (100-450 us in the records; CUDA graphs hide it), the "
    "plan of a new routing, congestion, rails that do not match, limits of NICs and their queues, "
    "GPUs that wait for slower ones. The network was never measured."
)

CALL = "<Call|<Engine|<Routing"
COLUMNS = (
    f"{CALL}|Time|NVLink|NIC|Programs|Latency|Fill|<Bound by",
    f"{CALL}|NVLink|mean|NIC|mean",
    "<Routing|ranks per token|nodes per token|NIC, per (token, rank)|per (token, node)|saved",
    "<Rows|Channels|<Rings|Number|Each|Slots|Chunk|Slots back|Chunk back|Symmetric memory",
)
"""Of the tables: times, bytes, rows, sizes."""

PLOT = "Draw times over numbers of GPUs, as a PNG."
FILE, MEASURED = (
    "JSON of tokenyard bench --json or of the suite nvlink.",
    "recorded on 2x and 4x H200",
)
Rate = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    nodes: Annotated[int, option("Machines.")] = 1
    gpus_per_node: Annotated[int, option("GPUs that map each other's memory, a rank each.")] = 8
    tokens: Annotated[int, option("Tokens per rank.")] = 4096
    hidden: Annotated[int, option("Channels of a token.")] = 7168
    experts: Annotated[int, option("Experts over all ranks.")] = 256
    topk: Annotated[int, option("Experts per token.")] = 8
    dtype: Annotated[Any, list_of(word_of(DTYPES), "bf16, fp8: of dispatched rows.")] = "bf16,fp8"
    sms: Annotated[int, option(f"Multiprocessors for calls, of {H200_SMS}.")] = H200_SMS
    buffer_bytes: Annotated[int, option("Bytes of all rings of a GPU.")] = DEFAULT_BUFFER_BYTES
    nvlink: Annotated[Rate, option("GB/s that leave a GPU inside its node.", "as measured")] = None
    nic: Annotated[Rate, option("GB/s of network per GPU, one way.", "45")] = None
    latency: Annotated[Rate, option("us of a put over the network.", "5")] = None
    rates: Annotated[Path | None, option(FILE, MEASURED, dir_okay=False)] = None
    seed: Annotated[int, option("Which experts are popular under zipf.", min=0)] = 0
    json: Annotated[bool, option("Print one JSON document, and nothing else.")] = False
    plot: Annotated[Path | None, file(PLOT, "--plot")] = None


@command(Options)
def plan(options: Options) -> None:
    """Predict time, bytes per link, memory and ring sizes of dispatch and combine, for a machine of
    any size. Needs no GPU.

    Bytes are expected values under uniform and zipf routing. Times come from a small model;
    docs/how-to/planner.md says how far it is off. Under torchrun the first process plans.
    """
    if not leads():
        return
    given = asdict(options)
    dtypes: list[Dtype] = [dtype for dtype in DTYPES if dtype in options.dtype]
    try:
        workload = Workload(**{name: given[name] for name in WORK})
        measured = HOPPER if options.rates is None else rates_from(options.rates, HOPPER)
        rates = measured.with_links(nvlink=options.nvlink, nic=options.nic, latency=options.latency)
        found = make_plan(workload, rates, dtypes, SKEWS, options.seed)
        shown, refused = ([], {}) if options.plot is None else scaling(workload, rates, dtypes)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if options.json:
        typer.echo(json.dumps(as_json(found), indent=1))
    else:
        print_plan(table_console(), found)
    if options.plot is not None:
        from tokenyard.cli.plots import save_plans  # matplotlib is an extra

        save_plans(options.plot, shown)
        if refused:
            gpus, why = ", ".join(map(str, refused)), next(iter(refused.values()))
            typer.echo(f"Not in the picture: machines of {gpus} GPUs: {why}", err=True)


# What is printed


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that :func:`print_plan` shows, with bytes and microseconds as plain numbers."""
    known = asdict(plan)
    del known["workload"]["dtype"]

    def of(call: Call) -> dict[str, Any]:
        terms = asdict(call.terms)
        return {
            **{name: getattr(call, name) for name in ("name", "engine", "dtype", "skew")},
            "us": call.terms.us,
            "bound": call.terms.bound,
            "links_in_turn": terms.pop("in_turn"),
            "in_heap": terms.pop("in_heap"),
            "power": terms.pop("power"),
            "terms_us": terms,
            "nvlink_bytes": asdict(call.nvlink),
            "nic_bytes": asdict(call.nic),
        }

    return {
        "tokenyard": __version__,
        "rows": known.pop("traffic"),
        **known,
        "calls": [of(call) for call in plan.calls],
        "engine_runs": _when(plan),
        "low_latency_once_per_node": plan.workload.crosses_once,
    }


def print_plan(console: Console, plan: Plan) -> None:
    """Tables: times, bytes, sizes, rates."""
    work, engine, rates = plan.workload, plan.engine, plan.rates
    print_line(
        console,
        f"[bold]{work.nodes} x {work.gpus_per_node} GPUs[/bold], {work.tokens} tokens per rank, "
        f"hidden {work.hidden}, top-{work.topk} of {work.experts} experts. Engine "
        f"[bold]{engine}[/bold] {_when(plan)}; the others are for comparison.",
    )
    if any(call.engine == ONCE for call in plan.calls):
        way = "node" if work.crosses_once else "rank"
        print_line(console, f"Engine low_latency would let rows cross once per {way}.")
    if heaped := [f"{call.dtype} {call.skew}" for call in plan.calls if call.terms.in_heap]:
        print_line(console, f"Dispatches to results in a heap: {', '.join(heaped)}.")
    times: list[tuple[str, ...]] = []
    moved: list[tuple[str, ...]] = []
    for call in plan.calls:
        names, terms = (f"{call.name} {call.dtype}", call.engine, call.skew), call.terms
        limits = (terms.us, terms.nvlink, terms.nic, terms.programs, terms.latency, terms.fill)
        times.append((*names, *map(us_text, limits), terms.bound))
        flows = (call.nvlink.busiest, call.nvlink.mean, call.nic.busiest, call.nic.mean)
        moved.append((*names, *map(bytes_text, flows)))
    of_times, of_moved, of_rows, of_sizes = COLUMNS
    print_table(console, "Time (us; each limit were it alone)", of_times, times)
    title = "Bytes per GPU and call (busier direction of the busiest GPU; mean over GPUs)"
    print_table(console, title, of_moved, moved)
    title = f"Rows of engine {engine} and what once per node saves"
    print_table(console, title, of_rows, map(_rows, plan.traffic.values()))
    print_table(console, f"Sizes of engine {engine}", of_sizes, _sizes(plan))
    there, in_place, back, *exchange = (f"{getattr(rates, call).link_gbs:.0f}" for call in CALLS)
    print_line(
        console,
        f"\n[bold]Rates[/bold] {escape(rates.source)}. Dispatch {there} GB/s, in place {in_place}, "
        f"combine {back}, collective {' and '.join(exchange)}; NIC {rates.nic_gbs:g} GB/s, "
        f"{rates.latency_us:g} us, {rates.put_us:g} us per put.\n{IGNORED}",
    )


def _when(plan: Plan) -> str:
    """When the engine that is planned runs."""
    if plan.engine == NVLINK:
        return "would run"
    if limit := limit_of(plan.workload.grid):
        return f"is on paper only (it takes at most {limit}; collective would run)"
    return 'would run if asked for, engine="twolevel" ("auto" takes collective there)'


def us_text(us: float) -> str:
    """Three digits are more than the model knows."""
    return f"{us:,.1f}" if 0 < us < 99.95 else f"{us:,.0f}"


def _rows(rows: Traffic) -> tuple[str, ...]:
    flat, once = rows.flat_nic.mean, rows.nic.mean
    saved = f"{1 - once / flat:.0%}" if flat else "-"
    reached = (f"{rows.ranks_reached:.2f}", f"{rows.nodes_reached:.2f}")
    return (rows.skew, *reached, f"{flat:,.0f}", f"{once:,.0f}", saved)


def _sizes(plan: Plan) -> Rows:
    for dtype, sizes in plan.sizes.items():
        for ring in sizes.rings:
            counts = (ring.slots, ring.chunk, ring.back_slots, ring.back_chunk)
            each = (ring.name, str(ring.count), bytes_text(ring.num_bytes), *map(str, counts))
            yield dtype, str(sizes.channels), *each, bytes_text(sizes.symmetric_bytes)
