"""From bytes and rates to microseconds: what bounds a call, and for how long.

``us = latency + sqrt(NVLink^2 + NIC^2 + programs^2) + fill``. The three limits hold at once, and
one that is nearly reached slows the one that is: a maximum is too low near the knee. Calls of
engine nvlink without rings have sixth powers in place of squares (``Terms.power``), which are
nearer to the measured curve over SMs of two GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tokenyard.engines.known import COLLECTIVE
from tokenyard.engines.tuning import HOP_US, LEAST_BYTES, most_rows_there
from tokenyard.planner.rates import CallRates, Rates
from tokenyard.planner.sizes import Ring, Sizes, nvlink_sizes
from tokenyard.planner.traffic import Traffic, traffic
from tokenyard.planner.workload import Workload

US = 1e3
"""Bytes per microsecond at 1 GB/s."""
LAUNCH_US = 5.9
"""A launch that finds nothing to do, behind a cached dispatch to heaps: the median of what those
took longer than in place over SMs (docs/benchmarks/nvlink-2xh200-20261127.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Microseconds of each limit of a call, were it alone.

    Attributes:
        nvlink, nic: bytes of the busiest GPU over the rate; puts included.
        programs: bytes over what the programs that move rows can do.
        latency: launch, announcements, last signal, over the network and back.
        fill: chunks that move when the stage before or behind them has nothing to do: the last of
            every ring.
        in_turn: whether NVLink waits for the NIC, so that their times add up.
        in_heap: whether a dispatch of nvlink is one to heaps.
        power: of links and programs in their sum: the higher, the sharper the knee between them.
    """

    nvlink: float = 0.0
    nic: float = 0.0
    programs: float = 0.0
    latency: float = 0.0
    fill: float = 0.0
    in_turn: bool = False
    in_heap: bool = False
    power: int = 2

    @property
    def us(self) -> float:
        links = self.nvlink + self.nic if self.in_turn else math.hypot(self.nvlink, self.nic)
        limits = (links**self.power + self.programs**self.power) ** (1 / self.power)
        return self.latency + limits + self.fill

    @property
    def bound(self) -> str:
        named = {
            "NVLink": self.nvlink,
            "NIC": self.nic,
            "programs": self.programs,
            "latency/launch": self.latency,
            "pipeline fill": self.fill,
        }
        return max(named, key=lambda name: named[name])


def nvlink_call(call: str, work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """A call inside a node: ``dispatch`` (routing known) and ``combine``, or a dispatch
    ``in_place``, in symmetric memory; one to heaps is such, and a launch.

    A combine without rings: its programs read and store rows that go back, read all rows of a
    token, and store results. In place, every writer also writes the rows that stay here. Nothing
    fills a pipeline. Through rings a reducer's work is results, as it loads the rows of all ranks
    at once; senders store as those of a dispatch do, and each side waits for the other at times.
    """
    if call == "dispatch" and goes_to_heap(work, moved, sizes):
        terms = nvlink_call("in_place", work, moved, sizes, rates)
        return replace(terms, latency=terms.latency + LAUNCH_US, in_heap=True)
    rate: CallRates = getattr(rates, call)
    row_bytes, ring = work.back_bytes if call == "combine" else work.row_bytes, sizes.rings[-1]
    sent = moved.nvlink.busiest * row_bytes
    results, own = work.tokens * row_bytes, moved.own.busiest * row_bytes
    programs, num_bytes, chunk = {
        "dispatch": (sizes.senders, sent, ring.chunk),
        "in_place": (sizes.writers, sent + own, 0),
        "combine": (sizes.writers, 3 * sent + own + results, 0),
    }[call]
    busy = _busy(num_bytes, programs, rate.program_gbs)
    if call == "combine" and sent > sizes.receive_bytes:
        summing = _busy(results, sizes.reducers, rates.results_gbs)
        sending = _busy(sent, sizes.senders, rates.dispatch.program_gbs)
        busy, chunk = math.hypot(summing, sending), ring.back_chunk
    left = _last_chunks(moved.nvlink.busiest, ring, chunk, work.gpus_per_node)
    return Terms(
        nvlink=sent / (rate.link_gbs * US),
        programs=busy,
        latency=rate.fixed_us,
        fill=left * row_bytes / (rates.copy_gbs * US),
        power=2 if chunk else 6,
    )


def _busy(num_bytes: float, programs: int, program_gbs: float | None) -> float:
    """How long programs take (us); 0 where they are not known to take any time."""
    return 0.0 if program_gbs is None else num_bytes / (programs * program_gbs * US)


def goes_to_heap(work: Workload, moved: Traffic, sizes: Sizes) -> bool:
    """Whether an exact ``FLAT`` dispatch of engine nvlink writes to heaps, as the engine decides:
    rows that are large enough, and the busiest GPU has a block for them."""
    most = most_rows_there(work.ranks * work.tokens) * work.payload_bytes
    came = (moved.nvlink.busiest + moved.own.busiest) * work.row_bytes
    return min(most, sizes.heap_bytes) >= LEAST_BYTES and came <= sizes.heap_bytes


nvlink_dispatch = partial(nvlink_call, "dispatch")
nvlink_in_place = partial(nvlink_call, "in_place")
nvlink_combine = partial(nvlink_call, "combine")


def collective_call(
    work: Workload, moved: Traffic, call: CallRates, row_bytes: int, rates: Rates
) -> Terms:
    """Engine ``collective``: across nodes first, then inside; one hop if there is only one."""
    if not work.grid.has_levels:
        return flat_call(work, moved, call, row_bytes, rates)
    return Terms(
        nvlink=moved.nvlink.busiest * row_bytes / (call.link_gbs * US),
        nic=moved.nic.busiest * row_bytes / (rates.nic_gbs * US) + (work.nodes - 1) * rates.put_us,
        latency=2 * call.fixed_us + 2 * rates.latency_us,
        in_turn=True,
    )


def flat_call(
    work: Workload, moved: Traffic, call: CallRates, row_bytes: int, rates: Rates
) -> Terms:
    """One exchange once per (token, rank), over whatever lies between."""
    across = work.ranks - work.gpus_per_node
    return Terms(
        nvlink=moved.flat_nvlink.busiest * row_bytes / (call.link_gbs * US),
        nic=moved.flat_nic.busiest * row_bytes / (rates.nic_gbs * US) + across * rates.put_us,
        latency=call.fixed_us + (2 * rates.latency_us if across else 0.0),
    )


def twolevel_call(call: str, work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """A ``dispatch``: rows cross the network once per (token, node), then forwarders hand them on
    inside, or keep them. A ``combine``: rows are summed inside a node first, then cross."""
    rate: CallRates = getattr(rates, call)
    (network, inner), rows = sizes.rings, moved.nic.busiest
    if call == "combine":
        row_bytes, programs, gbs = work.back_bytes, sizes.reducers, rates.turns_back_gbs
        chunk, inner_chunk = network.back_chunk, inner.back_chunk
    else:
        row_bytes, programs, gbs = work.row_bytes, sizes.senders, rates.turns_gbs
        chunk, inner_chunk = network.chunk, inner.chunk
    inside = moved.nvlink.busiest * row_bytes
    # Full chunks, and at least one put for each ring that has rows.
    puts = max(rows / chunk, min(rows, network.count))
    last = min(rows, network.count * chunk)
    drained = _last_chunks(moved.nvlink.busiest, inner, inner_chunk, work.gpus_per_node) * row_bytes
    if call == "combine":
        fill = (last * row_bytes + drained) / (rates.copy_gbs * US)
    else:
        handed_on = inside * (work.nodes - 1) / work.nodes
        fill = last / rows * handed_on / (rate.link_gbs * US) + drained / (rates.copy_gbs * US)
    return Terms(
        nvlink=inside / (rate.link_gbs * US),
        nic=rows * row_bytes / (rates.nic_gbs * US) + puts * rates.put_us,
        programs=by_turns(touched(moved, work) * row_bytes, programs, gbs, rates),
        latency=rate.fixed_us + 2 * rates.latency_us,
        fill=fill,
    )


twolevel_dispatch = partial(twolevel_call, "dispatch")
twolevel_combine = partial(twolevel_call, "combine")


def touched(moved: Traffic, work: Workload) -> float:
    """Rows that a GPU's programs of engine twolevel copy, each time they do. Dispatch: into
    staging, to local ranks, out of rings, and rows that stay, also those that forwarders keep.
    Combine: the same backwards. Puts are the NIC's work."""
    return moved.nic.busiest + 2 * moved.nvlink.busiest + work.nodes * moved.own.busiest


def by_turns(num_bytes: float, programs: int, program_gbs: float, rates: Rates) -> float:
    """How long programs take that share all copies (``num_bytes`` in all): what they do alone, and
    what memory does; no maximum, as the same threads wait for both."""
    return num_bytes / (programs * program_gbs * US) + num_bytes / (rates.copy_gbs * US)


def _last_chunks(rows: float, ring: Ring, chunk: int, ranks: int) -> float:
    """Rows in the last chunks of a GPU's rings from others, if ``rows`` come through all."""
    return min(rows, ring.count * (ranks - 1) / ranks * chunk)


def low_latency_call(
    call: str, work: Workload, moved: Traffic, rates: Rates, *, once: bool = False
) -> Terms:
    """Engine low_latency: a row per (token, rank), stored to ranks of the node, put to others. Two
    puts for each of these: counts, or tags, go ahead of rows.

    ``once``: rows cross once per (token, node), to a rail. It hands them on when all are there, and
    gets sums in the same way: a hop more, and NVLink waits for the NIC. Only rails get rows.
    """
    rate: CallRates = getattr(rates, f"low_{call}")
    row_bytes = work.back_bytes if call == "combine" else work.row_bytes
    far = work.ranks - work.gpus_per_node
    inside, across = (moved.nvlink, moved.nic) if once else (moved.flat_nvlink, moved.flat_nic)
    puts = far + (work.nodes - 1 if once else far)
    return Terms(
        nvlink=inside.busiest * row_bytes / (rate.link_gbs * US),
        nic=across.busiest * row_bytes / (rates.nic_gbs * US) + puts * rates.put_us,
        latency=rate.fixed_us + (rates.latency_us if far else 0.0) + (HOP_US if once else 0.0),
        in_turn=once,
    )


known_traffic = lru_cache(maxsize=256)(traffic)


def predict(call: str, work: Workload, rates: Rates) -> Terms:
    """A call (of :data:`~tokenyard.planner.rates.CALLS`) inside one node, routing uniform."""
    moved = known_traffic(work, "uniform")
    if call.startswith(COLLECTIVE):
        row_bytes = work.row_bytes if call == COLLECTIVE else work.back_bytes
        return collective_call(work, moved, getattr(rates, call), row_bytes, rates)
    return nvlink_call(call, work, moved, nvlink_sizes(work), rates)
