"""A plan: for each engine in question what its calls take, what bounds them, and what they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenyard.engines.known import COLLECTIVE, LOW_LATENCY, NVLINK, TWOLEVEL
from tokenyard.planner import model
from tokenyard.planner.model import Terms
from tokenyard.planner.rates import Rates
from tokenyard.planner.sizes import Sizes, nvlink_sizes, twolevel_sizes
from tokenyard.planner.traffic import Flow, Traffic
from tokenyard.planner.workload import DTYPES, Dtype, Workload

DISPATCH, IN_PLACE, COMBINE = ("dispatch", "dispatch in place", "combine")
FLAT = "flat exchange"
ONCE = f"{LOW_LATENCY}, once per node"
PRICES = {
    NVLINK: {
        DISPATCH: model.nvlink_dispatch,
        IN_PLACE: model.nvlink_in_place,
        COMBINE: model.nvlink_combine,
    },
    TWOLEVEL: {DISPATCH: model.twolevel_dispatch, COMBINE: model.twolevel_combine},
}
MOST_GPUS = 1024
"""How far :func:`scaling` goes."""
MOST_DECODED = 256
"""Tokens per rank up to which engine low_latency is planned: beyond, senders take time that grows
with the square, to compare picks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kind of call under one routing, its routing known to all (cached).

    Attributes:
        name: of :data:`PRICES`. dtype, skew: what it runs with.
        engine: or :data:`FLAT`, a single exchange once per (token, rank), at the rates of engine
            collective. low_latency is there up to :data:`MOST_DECODED` tokens; between nodes that
            is once per rank, with :data:`ONCE` beside it (``Workload.crosses_once``: which it is).
        terms: its limits; ``terms.us`` is what it takes.
        nvlink, nic: bytes per GPU.
    """

    name: str
    engine: str
    dtype: Dtype
    skew: str
    terms: Terms
    nvlink: Flow
    nic: Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What :func:`plan` found: sizes by dtype, rows by routing, and calls of the ``engine`` that is
    planned (``nvlink``, which "auto" takes, in one node; ``twolevel``, which must be asked for), of
    collective, flat ones, and of low_latency."""

    workload: Workload
    rates: Rates
    engine: str
    sizes: dict[Dtype, Sizes]
    traffic: dict[str, Traffic]
    calls: list[Call]


def plan(
    workload: Workload,
    rates: Rates,
    dtypes: Sequence[Dtype] = DTYPES,
    skews: Sequence[str] = ("uniform",),
    seed: int = 0,
) -> Plan:
    """Price a workload. Its own dtype does not count, ``dtypes`` do; combine is always bf16.
    ``seed``: which experts are popular. ValueError: too few SMs for the engine, or rings hold no
    two rows."""
    engine = NVLINK if workload.nodes == 1 else TWOLEVEL
    works: dict[Dtype, Workload] = {dtype: replace(workload, dtype=dtype) for dtype in dtypes}
    sizes: dict[Dtype, Sizes] = {dtype: sizes_of(engine, work) for dtype, work in works.items()}
    bf16, any_sizes = replace(workload, dtype="bf16"), next(iter(sizes.values()))
    moved = {skew: model.known_traffic(bf16, skew, seed) for skew in skews}
    calls: list[Call] = []
    for rows in moved.values():
        for dtype, work in works.items():
            calls += _calls(engine, False, work, rows, sizes[dtype], rates)
        calls += _calls(engine, True, bf16, rows, any_sizes, rates)
    return Plan(
        workload=workload, rates=rates, engine=engine, sizes=sizes, traffic=moved, calls=calls
    )


def _calls(
    engine: str, back: bool, work: Workload, rows: Traffic, sizes: Sizes, rates: Rates
) -> list[Call]:
    """Combines if ``back``, else dispatches: the engine's, collective's, a flat one's."""
    terms = {
        (name, engine): price(work, rows, sizes, rates)
        for name, price in PRICES[engine].items()
        if (name == COMBINE) == back
    }
    call, row_bytes = rates.collective, work.row_bytes
    if back:
        call, row_bytes = rates.collective_back, work.back_bytes
    name = COMBINE if back else DISPATCH
    terms[name, COLLECTIVE] = model.collective_call(work, rows, call, row_bytes, rates)
    if work.grid.has_levels:
        terms[name, FLAT] = model.flat_call(work, rows, call, row_bytes, rates)
    if work.tokens <= MOST_DECODED:
        terms[name, LOW_LATENCY] = model.low_latency_call(name, work, rows, rates)
        if work.grid.has_levels:
            terms[name, ONCE] = model.low_latency_call(name, work, rows, rates, once=True)
    straight = (FLAT, LOW_LATENCY)

    def moved(flow: Flow) -> Flow:
        return Flow(flow.mean * row_bytes, flow.busiest * row_bytes)

    return [
        Call(
            name=name,
            engine=who,
            dtype=work.dtype,
            skew=rows.skew,
            terms=found,
            nvlink=moved(rows.flat_nvlink if who in straight else rows.nvlink),
            nic=moved(rows.flat_nic if who in straight else rows.nic),
        )
        for (name, who), found in terms.items()
    ]


def sizes_of(engine: str, work: Workload) -> Sizes:
    return nvlink_sizes(work) if engine == NVLINK else twolevel_sizes(work)


def scaling(
    workload: Workload, rates: Rates, dtypes: Sequence[Dtype] = DTYPES
) -> tuple[list[Plan], dict[int, ValueError]]:
    """Plans of machines of 1, 2, 4, ... nodes like these, up to 1024 GPUs, with as many tokens on
    each GPU and the same number of experts (at least one per GPU of the largest); and, by number of
    GPUs, why others have none (see :func:`plan`). ValueError: none of them has one."""
    most = max(1, MOST_GPUS // workload.gpus_per_node)
    counts = [1 << power for power in range(most.bit_length())]
    experts = max(workload.experts, counts[-1] * workload.gpus_per_node)
    plans: list[Plan] = []
    refused: dict[int, ValueError] = {}
    for nodes in counts:
        machine = replace(workload, nodes=nodes, experts=experts)
        try:
            plans.append(plan(machine, rates, dtypes))
        except ValueError as wrong:
            refused[machine.ranks] = wrong
    if not plans:
        raise next(iter(refused.values()))
    return plans, refused
