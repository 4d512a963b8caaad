"""From bytes and rates to microseconds: what bounds a call, and for how long.

``us = latency + sqrt(NVLink^2 + NIC^2 + programs^2) + fill``. The three limits hold at once, and
one that is nearly reached slows the one that is: squares fit the measured curves over SMs
(docs/how-to/planner.md), a maximum is too low near the knee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from tokenyard.engines.known import COLLECTIVE
from tokenyard.planner.rates import Leg, Rates
from tokenyard.planner.sizes import Ring, Sizes, nvlink_sizes
from tokenyard.planner.traffic import Traffic, traffic
from tokenyard.planner.workload import Workload

US = 1e3
"""Bytes per microsecond at 1 GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Microseconds of each limit of a call, were it alone.

    Attributes:
        nvlink, nic: bytes of the busiest GPU over the rate; puts included.
        programs: bytes over what the programs that move rows can do.
        latency: launch, greetings, last signal, over the network and back.
        fill: chunks that move when the stage before or behind them has nothing to do: the last of
            every ring.
        in_turn: whether NVLink waits for the NIC, so that their times add up.
    """

    nvlink: float = 0.0
    nic: float = 0.0
    programs: float = 0.0
    latency: float = 0.0
    fill: float = 0.0
    in_turn: bool = False

    @property
    def us(self) -> float:
        links = self.nvlink + self.nic if self.in_turn else math.hypot(self.nvlink, self.nic)
        return self.latency + math.hypot(links, self.programs) + self.fill

    @property
    def bound(self) -> str:
        """Name of the largest."""
        named = {
            "NVLink": self.nvlink,
            "NIC": self.nic,
            "programs": self.programs,
            "latency/launch": self.latency,
            "pipeline fill": self.fill,
        }
        return max(named, key=lambda name: named[name])


def nvlink_dispatch(work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """A dispatch through rings inside a node, routing known."""
    sent = moved.nvlink.busiest * work.row_bytes
    left = _last_chunks(
        moved.nvlink.busiest, sizes.rings[-1], sizes.rings[-1].chunk, work.gpus_per_node
    )
    return Terms(
        nvlink=sent / (rates.dispatch.link_gbs * US),
        programs=_programs(sent, sizes.senders, rates.dispatch),
        latency=rates.dispatch.fixed_us,
        fill=left * work.row_bytes / (rates.copy_gbs * US),
    )


def nvlink_in_place(work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """A dispatch into views: every writer also writes the rows that stay here."""
    sent = moved.nvlink.busiest * work.row_bytes
    return Terms(
        nvlink=sent / (rates.in_place.link_gbs * US),
        programs=_programs(
            sent + moved.own.busiest * work.row_bytes, sizes.writers, rates.in_place
        ),
        latency=rates.in_place.fixed_us,
    )


def nvlink_combine(work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """A combine through rings inside a node.

    A reducer takes as long for a token of four ranks as of two, since it loads the rows of all
    ranks at once: its work is results.
    """
    sent = moved.nvlink.busiest * work.back_bytes
    left = _last_chunks(
        moved.nvlink.busiest, sizes.rings[-1], sizes.rings[-1].back_chunk, work.gpus_per_node
    )
    return Terms(
        nvlink=sent / (rates.combine.link_gbs * US),
        programs=_programs(work.tokens * work.back_bytes, sizes.reducers, rates.combine),
        latency=rates.combine.fixed_us,
        fill=left * work.back_bytes / (rates.copy_gbs * US),
    )


def collective_call(
    work: Workload, moved: Traffic, leg: Leg, row_bytes: int, rates: Rates
) -> Terms:
    """Engine ``collective``: across nodes first, then inside them; one hop if there is only one of
    the two.
    """
    if not work.grid.has_levels:
        return flat_call(work, moved, leg, row_bytes, rates)
    return Terms(
        nvlink=moved.nvlink.busiest * row_bytes / (leg.link_gbs * US),
        nic=moved.nic.busiest * row_bytes / (rates.nic_gbs * US) + (work.nodes - 1) * rates.put_us,
        latency=2 * leg.fixed_us + 2 * rates.latency_us,
        in_turn=True,
    )


def flat_call(work: Workload, moved: Traffic, leg: Leg, row_bytes: int, rates: Rates) -> Terms:
    """One exchange once per (token, rank), over whatever lies between."""
    across = work.ranks - work.gpus_per_node
    return Terms(
        nvlink=moved.flat_nvlink.busiest * row_bytes / (leg.link_gbs * US),
        nic=moved.flat_nic.busiest * row_bytes / (rates.nic_gbs * US) + across * rates.put_us,
        latency=leg.fixed_us + (2 * rates.latency_us if across else 0.0),
    )


def twolevel_dispatch(work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """Rows cross the network once per (token, node), then forwarders hand them on inside, or keep
    them.
    """
    network, inner = sizes.rings
    inside, across = moved.nvlink.busiest * work.row_bytes, moved.nic.busiest * work.row_bytes
    handed_on = inside * (work.nodes - 1) / work.nodes
    last = _last_puts(moved.nic.busiest, network, network.chunk) / moved.nic.busiest * handed_on
    drained = (
        _last_chunks(moved.nvlink.busiest, inner, inner.chunk, work.gpus_per_node) * work.row_bytes
    )
    return Terms(
        nvlink=inside / (rates.dispatch.link_gbs * US),
        nic=across / (rates.nic_gbs * US)
        + _puts(moved.nic.busiest, network, network.chunk) * rates.put_us,
        programs=by_turns(
            touched(moved, work) * work.row_bytes, sizes.senders, rates.turns_gbs, rates
        ),
        latency=rates.dispatch.fixed_us + 2 * rates.latency_us,
        fill=last / (rates.dispatch.link_gbs * US) + drained / (rates.copy_gbs * US),
    )


def twolevel_combine(work: Workload, moved: Traffic, sizes: Sizes, rates: Rates) -> Terms:
    """Rows are summed inside a node first, then cross the network once per (token, node)."""
    network, inner = sizes.rings
    inside, across = moved.nvlink.busiest * work.back_bytes, moved.nic.busiest * work.back_bytes
    last = _last_puts(moved.nic.busiest, network, network.back_chunk) * work.back_bytes
    drained = (
        _last_chunks(moved.nvlink.busiest, inner, inner.back_chunk, work.gpus_per_node)
        * work.back_bytes
    )
    return Terms(
        nvlink=inside / (rates.combine.link_gbs * US),
        nic=across / (rates.nic_gbs * US)
        + _puts(moved.nic.busiest, network, network.back_chunk) * rates.put_us,
        programs=by_turns(
            touched(moved, work) * work.back_bytes, sizes.reducers, rates.turns_back_gbs, rates
        ),
        latency=rates.combine.fixed_us + 2 * rates.latency_us,
        fill=(last + drained) / (rates.copy_gbs * US),
    )


def touched(moved: Traffic, work: Workload) -> float:
    """Rows that a GPU's programs of engine twolevel copy, each time they do.

    Dispatch: into staging, to local ranks, out of rings, and rows that stay, also those that
    forwarders keep. Combine: the same backwards. Puts are the NIC's work.
    """
    return moved.nic.busiest + 2 * moved.nvlink.busiest + work.nodes * moved.own.busiest


def by_turns(num_bytes: float, programs: int, program_gbs: float, rates: Rates) -> float:
    """How long programs take that share all copies (``num_bytes`` in total): what they do alone,
    then what memory does.

    Not the larger of the two, as it is the same threads that wait for both.
    """
    return num_bytes / (programs * program_gbs * US) + num_bytes / (rates.copy_gbs * US)


def _puts(rows: float, ring: Ring, chunk: int) -> float:
    """Puts of a GPU's network senders: full chunks, and at least one for each ring that
    has rows.
    """
    return max(rows / chunk, min(rows, ring.count))


def _last_puts(rows: float, ring: Ring, chunk: int) -> float:
    """Rows in the last chunks of all network rings."""
    return min(rows, ring.count * chunk)


def _programs(num_bytes: float, programs: int, leg: Leg) -> float:
    if leg.program_gbs is None or not num_bytes:
        return 0.0
    return num_bytes / (programs * leg.program_gbs * US)


def _last_chunks(rows: float, ring: Ring, chunk: int, ranks: int) -> float:
    """Rows in the last chunks of a GPU's rings from others, if ``rows`` come through all
    of them.
    """
    rings = ring.count * (ranks - 1) / ranks
    return min(rows, rings * chunk)


known_traffic = lru_cache(maxsize=256)(traffic)


def predict(leg: str, work: Workload, rates: Rates) -> Terms:
    """A call inside one node, with uniform routing. ``leg``: a name of
    :data:`~tokenyard.planner.rates.LEGS`.
    """
    moved = known_traffic(work, "uniform")
    if leg == COLLECTIVE:
        return collective_call(work, moved, rates.collective, work.row_bytes, rates)
    if leg == "collective_back":
        return collective_call(work, moved, rates.collective_back, work.back_bytes, rates)
    call = {"dispatch": nvlink_dispatch, "in_place": nvlink_in_place, "combine": nvlink_combine}[
        leg
    ]
    return call(work, moved, nvlink_sizes(work), rates)
