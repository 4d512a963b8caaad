"""What engines nvlink and twolevel keep on the device: rings, signals, words of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.rings import RowLayout
from tokenyard.engines.tuning import KernelConfig, Tuning, least_bytes
from tokenyard.errors import NotSupported
from tokenyard.limits import check_symmetric
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.routing import power_of_two_at_least
from tokenyard.topology import num_tasks

SHARED_BYTES, KEPT_BYTES = 200 << 10, 28 << 10
"""Shared memory of a multiprocessor for rows (an H200 has 228 KiB), and for sums and scans."""


def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor for rows on their way."""
    if device.type != "cuda":
        return SHARED_BYTES
    get: Any = torch.cuda.get_device_properties  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return int(get(device).shared_memory_per_multiprocessor) - KEPT_BYTES


@dataclass(frozen=True, slots=True)
class NetRing:
    """A network ring for rows of one layout: ``slots``, and rows per put and credit (``chunk``)."""

    slots: int
    chunk: int

    @property
    def most_rows(self) -> int:
        """Rows that a reducer may have in flight: ``slots >= chunk + chunk + rows - 2``
        (``docs/reference/twolevel.md``)."""
        return max(1, self.slots - 2 * self.chunk + 2)


class PeerWorkspace:
    """What an object keeps on the device between calls: rings, network rings and their staging,
    signals. Making one is collective. ``buffer_bytes`` is what all rings together were given,
    ``num_bytes`` the whole region. ``stand_ins``: launches that play ranks that are gone,
    ``absent``: which (``kernels/stand_in.py``). ``waited``: what this rank has waited for
    (``kernels/sync.py``, ``note_wait``). ``pulls``: whether a combine in place reads peers' rows.
    """

    stand_ins: tuple[Callable[..., None], ...] = ()

    def __init__(
        self,
        config: Config,
        memory: SymmetricMemory,
        tuning: Tuning,
        buffer_bytes: int,
        *,
        pulls: bool = False,
    ) -> None:
        from tokenyard.kernels import sync  # Triton, which sizes alone do not need

        ranks, channels = config.world_size, tuning.channels
        if config.topology is None:
            remedy = "pass topology=(num_nodes, ranks_per_node)"
            raise NotSupported(f"engine 'twolevel' needs a grid of ranks: {remedy}")
        self.grid = config.topology
        # whether node headers and announcements go to other nodes by NVSHMEM
        self.net = memory.ranks_per_node > 0
        self.config, self.memory, self.tuning, self.pulls = config, memory, tuning, pulls
        self.shared_bytes = shared_bytes(memory.device)
        self.header_words, self.buffer_bytes = head.COUNTS + config.most_local_experts, buffer_bytes
        self._lay_out(ranks, channels, buffer_bytes)
        check_symmetric(self.num_bytes, memory.device, f"buffer_bytes ({buffer_bytes})")
        self.region = memory.allocate(self.num_bytes)
        self.status = memory.host_words(sync.STATUS_WORDS)
        self.header_in = memory.host_words(self.header_words)
        self.header_out = memory.host_words(3 + ranks * (self.header_words + ranks))
        self.expert_bins = power_of_two_at_least(max(config.num_experts, 2))
        width = self.rank_bins + self.expert_bins
        scratch_words = (2 * channels + 1) * width + 4 * channels
        state = torch.zeros(self.state_words, dtype=torch.int64, device="cpu")
        known = [config.rank, int(config.timeout * 1e9), self.status.data_ptr()]
        state[:3] = torch.tensor(known, device="cpu")
        with memory.tensors():
            self.scratch = torch.zeros(scratch_words, dtype=torch.int32, device=memory.device)
            self.state = torch.empty_like(state, device=memory.device)
            phases = cast("int", sync.WAIT_PHASES.value)
            waits = torch.zeros((1 + phases) * ranks, dtype=torch.int64, device=memory.device)
            self.waited = waits[ranks:].view(ranks, phases)  # words before it: ``all_are_here``
            if config.absent:  # nobody reads the sink
                self.sink = torch.empty(self.rings_at, dtype=torch.uint8, device=memory.device)
                self.absent = torch.zeros(ranks, dtype=torch.int64, device=memory.device)
        for rank in config.absent:
            self.region.addresses[rank], self.absent[rank] = self.sink.data_ptr(), 1
        state[sync.WAITED.value] = self.waited.data_ptr()
        self.state.copy_(state)
        self.peers, self.state_at = self.region.addresses.data_ptr(), self.state.data_ptr()
        self.scratch_at, self.header_in_at = self.scratch.data_ptr(), self.header_in.data_ptr()
        self.header_out_at = self.header_out.data_ptr()
        # whether ranks of other nodes are mapped: rows are stored there, else put by NVSHMEM
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

    def bind(self, kernel: Any, programs: int, config: KernelConfig, k: Any) -> Callable[..., None]:
        """A launch of ``kernel`` with the constants ``k``. May wait for the device."""
        warps, most = config.num_warps, config.max_registers
        return self.memory.bind(kernel, programs, num_warps=warps, max_registers=most, k=k)

    @property
    def direct_programs(self) -> int:
        """Programs of a dispatch in place. Where combine in place pulls, as many as that has, as
        both end by one count of programs (``kernels/two_in_place.py``); else as many as may run,
        and find a word to note their progress."""
        tuning, channels = self.tuning, self.tuning.channels
        if self.pulls:
            return channels * tuning.workers(tuning.direct, self.grid.num_nodes + 1)
        words = num_tasks(self.config.world_size, 1) * channels
        return min(tuning.direct.per_sm * tuning.num_sms, words)

    def shared_for(self, config: KernelConfig) -> int:
        """Shared memory of a program of ``config``."""
        return self.shared_bytes // config.per_sm

    def slots(self, row_layout: RowLayout) -> int:
        """Rows of ``row_layout`` that one ring holds. ValueError: fewer than two."""
        rings = self.memory.world_size * self.tuning.channels
        return self._slots(row_layout, self.ring_bytes, f"{rings} rings")

    def net_ring(self, row_layout: RowLayout) -> NetRing:
        """How a network ring takes such rows. ValueError: it has room for less than two."""
        if self.grid.num_nodes == 1:  # there is none
            return NetRing(4 * self.tuning.net_chunk, self.tuning.net_chunk)
        rings = 2 * (self.grid.num_nodes - 1) * self.tuning.channels
        slots = self._slots(row_layout, self.net_ring_bytes, f"{rings} network rings")
        chunk = max(1, min(self.tuning.net_chunk, slots // 3))
        return NetRing(slots // chunk * chunk, chunk)

    def _slots(self, row_layout: RowLayout, ring_bytes: int, rings: str) -> int:
        """Rows of ``row_layout`` in ``ring_bytes``, of which there are as many ``rings``."""
        slots = ring_bytes // row_layout.slot_bytes
        if slots < 2:
            raise ValueError(
                f"buffer_bytes ({self.buffer_bytes}) holds {slots} rows of "
                f"{row_layout.slot_bytes} bytes "
                f"in each of {rings} of {ring_bytes} bytes, but 2 are needed: make ExpertParallel "
                f"with buffer_bytes of at least {self.least_bytes(row_layout)}"
            )
        return slots

    def least_bytes(self, row_layout: RowLayout) -> int:
        """As there, for rings between nodes too, whatever :func:`most_channels` chooses."""
        return least_bytes(
            self.grid, 2 * row_layout.hidden, row_layout.slot_bytes, self.tuning.channels
        )
