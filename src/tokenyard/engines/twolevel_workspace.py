"""Sizes and memory of the two-level engine: rings inside nodes and between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from tokenyard.config import Config
from tokenyard.engines.rings import (
    FEW_PUSHES,
    FEW_SUMS,
    KernelConfig,
    PeerWorkspace,
    RowLayout,
    Tuning,
    least_ring,
    pushers_of,
)
from tokenyard.errors import NotSupported
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.routing import power_of_two_at_least
from tokenyard.topology import Topology

NET_SHARE = 0.5
MOST_CHANNELS = 64
LEAST_SLOTS = 8
"""Rows in a ring below which fewer channels, with more workers each, are better."""


MOST_DESTINATIONS = 512
"""Ranks and nodes together. Kernels of plans hold tables of so many rows and columns in registers:
32 x 8 compiles, 64 x 8 had not after 200 s, and of 128 x 8 Triton refuses the table."""
MOST_NODES = 64
"""Sums over nodes are unrolled: those of 64 nodes compile in a minute, of 128 not within 100 s."""


def limit_of(grid: Topology) -> str:
    """What engine twolevel takes at most, where ``grid`` has more; "" if it takes the grid."""
    if grid.world_size + grid.num_nodes > MOST_DESTINATIONS:
        return f"{MOST_DESTINATIONS} ranks and nodes together"
    return f"{MOST_NODES} nodes" if grid.num_nodes > MOST_NODES else ""


@dataclass(frozen=True, slots=True)
class TwolevelTuning(Tuning):
    """How work of engine twolevel is divided into programs. Equal on all ranks.

    ``workers`` are the programs of a channel, which share its tasks (``kernels/two_scheduler.py``):
    one per role and peer, and the call barrier. With as many workers as tasks each has a program of
    its own; with one, each program does everything for its channel.
    """

    pull: KernelConfig  # of a combine in place
    workers: int
    forward: (
        KernelConfig  # of forwarders, without ``chunk``: rings inside have one (``dispatch.chunk``)
    )
    net_chunk: int  # rows per put and per network credit, at most
    turn: int  # tokens that a reducer sums in one turn
    net_share: float = NET_SHARE  # part of rings' memory for network rings and their staging


def most_channels(grid: Topology, row_bytes: int, buffer_bytes: int) -> int:
    """Channels (1 at least) whose rings all hold ``LEAST_SLOTS`` rows of ``row_bytes``."""
    near, far = grid.world_size, 2 * (grid.num_nodes - 1)
    share = NET_SHARE if far else 0.0
    far_bytes = share * buffer_bytes / far if far else buffer_bytes
    rows = min((1 - share) * buffer_bytes / near, far_bytes) / row_bytes
    return max(1, min(MOST_CHANNELS, int(rows / LEAST_SLOTS)))


def least_bytes(grid: Topology, row_bytes: int, slot_bytes: int, channels: int) -> int:
    """The buffer from which on every ring holds two rows of ``slot_bytes``, though larger buffers
    have more than ``channels``.

    :func:`most_channels` gives rings ``LEAST_SLOTS`` rows of ``row_bytes``. Where two slots are
    more than that, as those of short rows with many picks are, any number of channels must do.
    """
    ring = least_ring(slot_bytes)
    channels = channels if ring <= LEAST_SLOTS * row_bytes else MOST_CHANNELS
    near, far = grid.world_size, 2 * (grid.num_nodes - 1)
    if not far:
        return near * channels * ring
    return math.ceil(channels * ring * max(near / (1 - NET_SHARE), far / NET_SHARE))


def twolevel_tuning(
    num_sms: int, grid: Topology, *, all_sms: bool, channels: int = MOST_CHANNELS
) -> TwolevelTuning:
    """The tuning for ``num_sms`` multiprocessors: a program on each, of 16 warps, and ``channels``
    at most. ValueError: there is none for a worker.
    """
    if num_sms < 1:
        raise ValueError(f"num_sms ({num_sms}) must be at least 1")
    tasks = grid.world_size + grid.ranks_per_node + grid.num_nodes - 1
    channels = min(channels, num_sms)
    dispatch = KernelConfig(rows=4, block=4096, chunk=16, num_warps=16, max_registers=128)
    few = KernelConfig(rows=16, block=512, num_warps=16, max_registers=128, stages=4)
    return TwolevelTuning(
        channels=channels,
        dispatch=dispatch,
        send=KernelConfig(rows=4, block=8192, chunk=4 if all_sms else 16, num_warps=16),
        reduce=KernelConfig(rows=8, block=1024, num_warps=16, max_registers=128)
        if all_sms
        else few,
        direct=dispatch,
        pull=few,
        workers=max(1, min(tasks, num_sms // channels)),
        forward=KernelConfig(rows=4, block=4096, num_warps=16),
        net_chunk=16,
        turn=16,
        push=FEW_PUSHES,
        gather=FEW_SUMS,
        writers=num_sms,
        pushers=pushers_of(num_sms, grid.world_size),
        gatherers=max(1, num_sms - pushers_of(num_sms, grid.world_size)),
    )


@dataclass(frozen=True, slots=True)
class NetRing:
    """A network ring for rows of one layout: ``slots``, and rows per put and credit (``chunk``)."""

    slots: int
    chunk: int

    @property
    def most_rows(self) -> int:
        """Rows that a reducer may have in flight: ``slots >= chunk + chunk + rows - 2``
        (``docs/reference/twolevel.md``).
        """
        return max(1, self.slots - 2 * self.chunk + 2)


class TwolevelWorkspace(PeerWorkspace):
    """Besides what :class:`PeerWorkspace` keeps: network rings, staging, signals between nodes."""

    net: bool
    """Whether node headers and announcements go to other nodes by NVSHMEM."""
    mapped: bool
    """Whether ranks of other nodes are mapped: rows are stored there, else put by NVSHMEM."""

    def __init__(
        self, config: Config, memory: SymmetricMemory, tuning: TwolevelTuning, buffer_bytes: int
    ) -> None:
        if config.topology is None:
            remedy = "pass topology=(num_nodes, ranks_per_node)"
            raise NotSupported(f"engine 'twolevel' needs a grid of ranks: {remedy}")
        self.grid, self.tuning = config.topology, tuning
        self.net = memory.ranks_per_node > 0
        super().__init__(config, memory, tuning, buffer_bytes)
        self.mapped = not self.net or bool((self.region.addresses != 0).all())

    def _lay_out(self, ranks: int, channels: int, buffer_bytes: int) -> None:
        from tokenyard.kernels import region, two_region

        nodes, words = self.grid.num_nodes, self.header_words
        links = (nodes - 1) * channels
        far_bytes = int(buffer_bytes * self.tuning.net_share) if links else 0
        self.ring_bytes = (buffer_bytes - far_bytes) // (ranks * channels) // 256 * 256
        self.net_ring_bytes = far_bytes // (2 * links) // 256 * 256 if links else 0
        parts = (
            8 * region.signal_words(ranks, channels, words),
            two_region.far_bytes(ranks, nodes, channels, words),
            ranks * channels * self.ring_bytes,
            links * self.net_ring_bytes,
            links * self.net_ring_bytes,
        )
        self.far_at, self.rings_at, self.nets_at, self.stage_at, self.num_bytes = accumulate(parts)
        self.state_words = two_region.state_words(ranks, nodes, channels)
        self.plan_ranks = ranks + nodes
        self.rank_bins = power_of_two_at_least(max(ranks + nodes, ranks + 2))

    @property
    def header_exchange(self) -> tuple[int, int, bool]:
        return self.grid.ranks_per_node, self.far_at, self.net

    @property
    def num_programs(self) -> int:
        """Of a kernel that moves rows."""
        return self.tuning.workers * self.tuning.channels

    def net_ring(self, row_layout: RowLayout) -> NetRing:
        """How a network ring takes rows of ``row_layout``. ValueError: it has room for less than
        two."""
        if self.grid.num_nodes == 1:  # there is none
            return NetRing(4 * self.tuning.net_chunk, self.tuning.net_chunk)
        rings = 2 * (self.grid.num_nodes - 1) * self.tuning.channels
        slots = self._slots(row_layout, self.net_ring_bytes, f"{rings} network rings")
        chunk = max(1, min(self.tuning.net_chunk, slots // 3))
        return NetRing(slots // chunk * chunk, chunk)

    def least_bytes(self, row_layout: RowLayout) -> int:
        """As there, for rings between nodes too, whatever :func:`most_channels` chooses."""
        return least_bytes(
            self.grid, 2 * row_layout.hidden, row_layout.slot_bytes, self.tuning.channels
        )
