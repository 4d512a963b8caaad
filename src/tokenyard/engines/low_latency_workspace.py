"""Memory that an object of engine low_latency keeps between calls: slots, local state, the mask,
and the words that kernels and host share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from tokenyard.config import Config
from tokenyard.engines.rings import RowLayout, row_layout_of
from tokenyard.engines.tuning import crosses_once
from tokenyard.handle import Plan, Spec
from tokenyard.kernels import low_latency_memory as memory_map
from tokenyard.kernels.sync import WAIT_PHASES
from tokenyard.limits import check_symmetric
from tokenyard.memory.nvshmem import puts_are_forced
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.routing import host_ints, power_of_two_at_least
from tokenyard.rows import Payload
from tokenyard.types import Quantize

MOST_TOKENS = 1 << 20
"""``max_tokens_per_rank`` at most: counts travel in ``COUNT_BITS`` bits."""


@dataclass(frozen=True, slots=True)
class LowLatencyTuning:
    """How work is divided among programs; equal on all ranks."""

    programs: int  # of every launch, all resident together; at least one per rank
    num_warps: int = 8  # of each program
    words: int = 4096  # 4-byte words of a row that a dispatch has in flight at once
    sent_channels: int = 8192  # in flight where a combine sums the rows of a token
    added_channels: int = 8192  # and where it adds the sums of ranks
    pieces: int = 1  # of a row that a dispatch sends, each by a program of its own: 1 or 2
    # of a token's channels, each added by a program of its own: a power of two up to ``programs``
    shares: int = 1
    once_per_node: bool = False  # a token crosses to each node, not to each of its ranks there
    unrolled: int = 8  # see ``Sizes``; as many as there may be on one host
    put_bytes: int = 1 << 15  # of rows or sums for a far rank, which one program puts

    def chunk_rows(self, row_bytes: int, max_tokens: int) -> int:
        """How many these are: at least one, and more where CHUNKS would not be enough."""
        return max(1, self.put_bytes // row_bytes, -(-max_tokens // memory_map.CHUNKS))


def low_latency_tuning(num_sms: int, num_ranks: int, max_tokens: int) -> LowLatencyTuning:
    """Two programs of 8 warps on each multiprocessor; four of 4 warps if there are more slots than
    that, because a program takes one slot. Rows are divided into as many parts as there are
    programs for, besides those that count. ValueError: too few multiprocessors."""
    many = num_ranks * max_tokens > 2 * num_sms
    programs, num_warps = (4 * num_sms, 4) if many else (2 * num_sms, 8)
    if programs < num_ranks:
        raise ValueError(
            f"num_sms ({num_sms}) must be at least {-(-num_ranks // 4)} for {num_ranks} ranks"
        )
    parts = max(n for n in (1, 2, 4, 8) if n == 1 or n * max_tokens <= programs - num_ranks)
    pieces = min(parts, cast("int", memory_map.PIECES.value))
    return LowLatencyTuning(programs=programs, num_warps=num_warps, pieces=pieces, shares=parts)


def tuned_for(
    config: Config, num_sms: int, once: bool | None, memory: SymmetricMemory
) -> tuple[LowLatencyTuning, str]:
    """The tuning of an object, and what there is to say of how rows cross. ``once``: asked for, if
    at all."""
    tuning = low_latency_tuning(num_sms, config.world_size, config.max_tokens_per_rank)
    grid = config.topology
    if grid is None or not grid.has_levels or not (memory.ranks_per_node or puts_are_forced()):
        return tuning, ""
    tuning = replace(tuning, once_per_node=crosses_once(config) if once is None else once)
    per = "node: sums are by rank, then by node" if tuning.once_per_node else "rank"
    return tuning, f"; {grid} nodes and ranks: rows cross once per {per}"


def metadata_words(num_topk: int, far: bool) -> int:
    """int32 words of a row's metadata: ids, ranks of picks, weights; if ranks are ``far``, also its
    token's number."""
    return -(-(3 * num_topk + far) // 4) * 4


def kept_words(num_topk: int, spec: Spec, mixed: bool) -> int:
    """int32 words behind a sum that say which picks it has: with a capacity, some have no place;
    ``mixed`` ones are of several ranks."""
    return 0 if spec.capacity is None and not mixed else -(-num_topk // 4) * 4


def _default_slot(config: Config, far: bool) -> int:
    """Bytes of the largest row of 2 bytes per channel, or cast on the way."""
    plain = Payload(torch.empty(0, config.hidden, dtype=torch.bfloat16, device="cpu"), None)
    words = metadata_words(config.num_topk, far)
    slots = (row_layout_of(plain, mode, words).slot_bytes for mode in (None, *Quantize))
    return -(-max(slots) // 128) * 128


class Workspace:
    """What an object keeps between calls. Making one is collective.

    Attributes:
        far: whether some pair of ranks may do without mapped memory: those of two nodes. Kernels
            leave all of it out (``sizes.far``) if none of this rank's does.
        per_node: ranks of a node, if tokens cross once per node; else 0.

    Args:
        buffer_bytes: symmetric memory of this rank; None: what rows of 2 bytes per channel need.

    Raises:
        ValueError: ``buffer_bytes`` is too small, or ``max_tokens_per_rank`` too large.
    """

    def __init__(
        self,
        config: Config,
        memory: SymmetricMemory,
        tuning: LowLatencyTuning,
        buffer_bytes: int | None,
    ) -> None:
        if tuning.shares > tuning.programs:
            limit = f"must be at most programs ({tuning.programs})"
            raise ValueError(f"shares ({tuning.shares}) {limit}: a program would wait for itself")
        self.config, self.memory, self.tuning = config, memory, tuning
        ranks, tokens = config.world_size, config.max_tokens_per_rank
        if tokens > MOST_TOKENS:
            limit = f"must be at most {MOST_TOKENS} with engine 'low_latency'"
            raise ValueError(f"max_tokens_per_rank ({tokens}) {limit}")
        grid, forced = config.topology, puts_are_forced()
        several = grid is not None and grid.num_nodes > 1
        self.far = several and (forced or memory.ranks_per_node > 0)
        levels = grid is not None and grid.has_levels and self.far and tuning.once_per_node
        self.per_node = grid.ranks_per_node if grid is not None and levels else 0
        least = slot_bytes = _default_slot(config, self.far)
        if buffer_bytes is not None:
            free = buffer_bytes - self.bytes_for(0)
            slot_bytes = free // ((2 + 2 * self.far) * ranks * tokens) // 128 * 128
        if slot_bytes < least:
            raise ValueError(
                f"buffer_bytes ({buffer_bytes}) must be at least {self.bytes_for(least)} for "
                f"{tokens} tokens on each of {ranks} ranks with hidden={config.hidden}: make it "
                f"larger, or leave it out"
            )
        self.num_bytes = self.bytes_for(slot_bytes)
        cause = f"max_tokens_per_rank ({tokens}) x {ranks} ranks with hidden={config.hidden}"
        cause = f"buffer_bytes ({buffer_bytes})" if buffer_bytes else cause
        check_symmetric(self.num_bytes, memory.device, cause)
        self.region = memory.allocate(self.num_bytes)
        self.status = memory.host_words(8)
        far = self._far_ranks(forced)
        parts = memory_map.state_parts(config, tuning.programs, tuning.shares, self.far)
        state_at, state_bytes = memory_map.laid_out(parts)
        self.sizes = self._sizes(slot_bytes, state_at, any(far))
        state = self._first_state(far, state_bytes // 8)
        with memory.tensors():
            self.state = torch.empty_like(state, device=memory.device)
            self.active = torch.empty(ranks, dtype=torch.int32, device=memory.device)
        self.active.fill_(1)
        self.state.copy_(state)  # waits for both
        waited = self.state[self.sizes.state.waited :][: ranks * cast("int", WAIT_PHASES.value)]
        self.waited = waited.view(ranks, -1)
        held = self.region.addresses, self.state, self.active
        self.addresses = tuple(tensor.data_ptr() for tensor in held)

    def _sizes(self, slot_bytes: int, state_at: Any, far: bool) -> memory_map.Sizes:
        config, memory, ranks = self.config, self.memory, self.config.world_size
        return memory_map.Sizes(
            ranks=ranks, rank_bins=power_of_two_at_least(max(ranks, 2)),
            programs=self.tuning.programs, tokens=config.max_tokens_per_rank, topk=config.num_topk,
            topk_bins=power_of_two_at_least(config.num_topk), experts=config.num_experts,
            local_experts=config.most_local_experts, slot_bytes=slot_bytes,
            region=self._laid_out(slot_bytes)[0], state=state_at, far=far,
            network=far and memory.ranks_per_node > 0, per_node=self.per_node, early=memory.early,
            unrolled=self.tuning.unrolled,
        )  # fmt: skip

    def _first_state(self, far: list[bool], num_words: int) -> torch.Tensor:
        """Local words before the first call, on the host."""
        state = torch.zeros(num_words, dtype=torch.int64, device="cpu")
        state[0], state[2] = self.config.rank, self.status.data_ptr()
        if any(far):
            at = self.sizes.state.far
            state[at : at + len(far)] = torch.tensor(far)
        at = self.sizes.state.epochs  # the first call is 2: no heartbeat is of the one before
        state[at : at + self.tuning.programs] = 1
        return state

    def _far_ranks(self, forced: bool) -> list[bool]:
        """Which ranks get puts: of other nodes, those that are not mapped, or all."""
        grid, config, mapped = self.config.topology, self.config, host_ints(self.region.addresses)
        if grid is None or not self.far:
            return [False] * config.world_size
        home = grid.node_of(config.rank)
        return [
            grid.node_of(peer) != home and bool(forced or self.per_node or not at)
            for peer, at in enumerate(mapped)
        ]

    def bind(self, kernel: Any, k: Any) -> Callable[..., None]:
        """A launch of ``kernel`` with the constants ``k``. May wait for the device."""
        programs, num_warps = self.tuning.programs, self.tuning.num_warps
        return self.memory.bind(kernel, programs, num_warps=num_warps, max_registers=128, k=k)

    def slots_in(self, plan: Plan) -> int:
        """Address of the result rows of each slot: in ``route``, behind ids and weights."""
        return plan.route.data_ptr() + 8 * self.sizes.tokens * self.sizes.topk

    def bytes_for(self, slot_bytes: int) -> int:
        """Symmetric memory of a rank with slots of this size."""
        return self._laid_out(slot_bytes)[1]

    def _laid_out(self, slot_bytes: int) -> tuple[Any, int]:
        return memory_map.laid_out(memory_map.region_parts(self.config, slot_bytes, self.far))

    def check_fits(self, row: RowLayout, what: str) -> None:
        """Raise ValueError, with the ``buffer_bytes`` it takes, if a row fits into no slot."""
        if row.slot_bytes > self.sizes.slot_bytes:
            needed = self.bytes_for(-(-row.slot_bytes // 128) * 128)
            raise ValueError(
                f"{what} of {row.slot_bytes} bytes do not fit into slots of "
                f"{self.sizes.slot_bytes} bytes: make ExpertParallel with buffer_bytes of at least "
                f"{needed}"
            )
