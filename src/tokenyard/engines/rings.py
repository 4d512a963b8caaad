"""Sizes and memory of engine nvlink: channels, rings, slots, words shared with the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.formats import row_of
from tokenyard.limits import check_symmetric
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.routing import power_of_two_at_least
from tokenyard.rows import Payload, overlap, padded
from tokenyard.types import Quantize

MANY_REGISTERS = 128
"""Of a thread, where a program may have as many as the compiler likes."""

DEFAULT_BUFFER_BYTES = 128 << 20
LINE, LONG_ROW = 128, 4096
"""Bytes of a line of a GPU's memory, and of long rows: slots of whole lines are 3 % larger."""
SHARED_BYTES, KEPT_BYTES = 200 << 10, 28 << 10
"""Shared memory of a multiprocessor for rows (an H200 has 228 KiB), and for sums and scans."""


def _at_once(rows: int, most: int) -> int:
    """A power of two: not more than ``rows``, nor ``most``, but at least 1."""
    return 1 << (max(1, min(rows, most)).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How a role of a kernel works."""

    rows: int  # that a program has in flight
    block: int  # words (channels in combine) of each
    chunk: int = 8  # rows per release
    num_warps: int = 8  # per program; all roles of a kernel have the same
    max_registers: int | None = None  # per thread; None: as many as the compiler likes
    stages: int = 1  # of sums: rounds of loads at once, as shared memory has room for

    def chunk_of(self, slots: int) -> int:
        """Rows per release through a ring of ``slots``: two chunks must fit."""
        return min(self.chunk, slots // 2)

    def rows_of(self, block: int, most: int) -> int:
        """Rows in flight, a power of two up to ``most``: several if of few (``block``) words."""
        return _at_once(self.rows * self.block // block, most)

    def casts_of(self, channels: int, most: int) -> int:
        """Rows of ``channels`` cast at once, a power of two: they take half of the registers."""
        registers = (self.max_registers or MANY_REGISTERS) // 2 * self.num_warps * 32
        return _at_once(registers // channels, most)

    def stages_for(self, round_bytes: int, shared: int) -> int:
        """Of ``stages``, as many as a program has ``shared`` memory for; one less is kept there. 4
        stages of 64 KiB keep 3 rounds, 192 KiB; two programs on one multiprocessor one each.
        """
        return max(1, min(self.stages, 1 + shared // round_bytes))

    def staged(self, rows: int, row_bytes: int, shared: int) -> tuple[int, int]:
        """``rows`` of a round, and its stages. Fewer rows where no round of them fits into shared
        memory: nor do registers hold them. ``row_bytes``: of a row, with all that is added to it.
        """
        while rows > 1 and self.stages > 1 and self.stages_for(rows * row_bytes, shared) == 1:
            rows //= 2
        return rows, self.stages_for(rows * row_bytes, shared)


def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor for rows on their way."""
    if device.type != "cuda":
        return SHARED_BYTES
    get: Any = torch.cuda.get_device_properties  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return int(get(device).shared_memory_per_multiprocessor) - KEPT_BYTES


@dataclass(frozen=True, slots=True)
class Tuning:
    """How engines with rings cut work into programs: channels (as plans know them), and roles."""

    channels: int
    dispatch: KernelConfig
    send: KernelConfig  # these two: of combine
    reduce: KernelConfig
    direct: KernelConfig  # of a dispatch in place
    # of a combine without rings: ``rows`` x ``block`` words at once, wherever rows begin
    push: KernelConfig
    gather: KernelConfig  # of its sums: with ``stages`` of whole rows, else of ``block`` channels
    writers: int  # multiprocessors that calls may use; programs of a dispatch in place of nvlink
    pushers: int  # programs of a combine without rings, as the next
    gatherers: int


FEW_SUMS = KernelConfig(rows=16, block=512, num_warps=16, max_registers=128, stages=3)
FEW_PUSHES = KernelConfig(rows=4, block=4096, chunk=16, num_warps=16)
"""Of programs that have a multiprocessor each."""


def pushers_of(num_sms: int, num_ranks: int) -> int:
    """Programs of ``num_sms`` that push; the others sum. By what each moves, if 8 picks of a token
    fall on any experts: rows for other ranks are read and stored, all are read, a sum is stored.

    >>> [pushers_of(24, ranks) for ranks in (1, 2, 4, 8)]
    [1, 10, 13, 14]
    """
    reached = num_ranks * (1 - (1 - 1 / num_ranks) ** 8)
    pushed, summed = 2 * reached * (1 - 1 / num_ranks), reached + 1
    return max(1, min(num_sms - 1, round(num_sms * pushed / (pushed + summed))))


def nvlink_tuning(num_sms: int, num_ranks: int, *, all_sms: bool) -> Tuning:
    """The tuning for ``num_sms`` multiprocessors: several programs on each if they are all."""
    least = num_ranks if all_sms else 2 * num_ranks
    if num_sms < least:
        remedy = ": take fewer ranks per node, or engine collective" if all_sms else ""
        raise ValueError(
            f"num_sms ({num_sms}) must be at least {least} for {num_ranks} ranks{remedy}"
        )
    channels = (
        min(64, (2 * num_sms - 1) // num_ranks) if all_sms else (num_sms - 1) // (2 * num_ranks - 1)
    )
    if all_sms:
        sums = KernelConfig(rows=4, block=1024, max_registers=128, stages=3)
        return Tuning(
            channels=channels,
            dispatch=KernelConfig(rows=1, block=4096, chunk=16, max_registers=64),
            send=KernelConfig(rows=1, block=8192, chunk=4),
            reduce=sums,
            direct=KernelConfig(rows=1, block=4096),
            push=KernelConfig(rows=2, block=4096, chunk=4),
            gather=sums,
            writers=num_sms,
            pushers=num_sms,
            gatherers=num_sms,
        )
    return Tuning(
        channels=channels,
        dispatch=KernelConfig(rows=2, block=4096, chunk=16, num_warps=16, max_registers=128),
        send=KernelConfig(rows=4, block=8192, chunk=16, num_warps=16),
        reduce=FEW_SUMS,
        direct=KernelConfig(rows=2 if num_sms > 16 else 4, block=4096, num_warps=16),
        push=FEW_PUSHES,
        gather=FEW_SUMS,
        writers=num_sms,
        pushers=pushers_of(num_sms, num_ranks),
        gatherers=num_sms - pushers_of(num_sms, num_ranks),
    )


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One row in a slot of a ring: ``[payload | scales | meta]``, each padded to 16 bytes.

    Slots of long rows begin where lines of memory do: stores to a peer that begin inside of one
    cost two.
    """

    hidden: int  # channels of a row of ``x``
    words: int  # of the payload on the wire,
    bits: int  # of 32, 16 or 8 bits each
    scale_words: int  # of 4 bytes
    meta_words: int  # int32 words that ride along, a multiple of 4

    @property
    def payload_bytes(self) -> int:
        return padded(self.words * self.bits // 8)

    @property
    def row_bytes(self) -> int:
        """What a sender stores to a peer. (Forwarders of ``twolevel`` store whole slots.)"""
        return self.payload_bytes + padded(4 * self.scale_words) + 4 * self.meta_words

    @property
    def slot_bytes(self) -> int:
        """What a row takes in a ring, and what is put to another node."""
        return self.row_bytes if self.row_bytes < LONG_ROW else -(-self.row_bytes // LINE) * LINE


def row_layout_of(payload: Payload, mode: Quantize | None, meta_words: int) -> RowLayout:
    """How rows of ``payload`` travel, cast on the way if ``mode`` says so."""
    row = row_of(payload, mode)
    row_bytes = row.payload_bytes
    bits = 32 if row_bytes % 4 == 0 else 16 if row_bytes % 2 == 0 else 8
    return RowLayout(row.hidden, row_bytes * 8 // bits, bits, row.scale_words, meta_words)


def meta_words(num_topk: int, *, experts: bool, weighted: bool) -> int:
    """int32 words of token, ids, ranks of picks (``experts``) and weights (``weighted``)."""
    words = 1 + num_topk * (1 + experts + weighted)
    return -(-words // 4) * 4


class PeerWorkspace:
    """What an object keeps on the device between calls. Making one is collective. ``buffer_bytes``
    is what all rings together were given, ``num_bytes`` the whole region. ``stand_ins``: launches
    that play ranks that are gone, ``absent``: which (``kernels/stand_in.py``). ``waited``: what
    this rank has waited for (``kernels/sync.py``, ``note_wait``).
    """

    stand_ins: tuple[Callable[..., None], ...] = ()

    def __init__(
        self, config: Config, memory: SymmetricMemory, tuning: Tuning, buffer_bytes: int
    ) -> None:
        from tokenyard.kernels import sync  # Triton, which sizes alone do not need

        ranks, channels = config.world_size, tuning.channels
        self.config, self.memory, self.tuning = config, memory, tuning
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

    def _lay_out(self, ranks: int, channels: int, buffer_bytes: int) -> None:
        """Where things lie in the region, and how many there are."""
        from tokenyard.kernels import region

        self.rings_at = 8 * region.signal_words(ranks, channels, self.header_words)
        self.ring_bytes = buffer_bytes // (ranks * channels) // 256 * 256
        self.num_bytes = self.rings_at + ranks * channels * self.ring_bytes
        self.state_words = region.state_words(ranks, channels)
        self.plan_ranks, self.rank_bins = ranks, power_of_two_at_least(max(ranks, 2))

    @property
    def header_exchange(self) -> tuple[int, int, bool]:
        """Ranks of a node, where signals between nodes begin, and whether by NVSHMEM."""
        return self.memory.world_size, 0, False

    def slots(self, row_layout: RowLayout) -> int:
        """Rows of ``row_layout`` that one ring holds. ValueError: fewer than two."""
        rings = self.memory.world_size * self.tuning.channels
        return self._slots(row_layout, self.ring_bytes, f"{rings} rings")

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
        """``buffer_bytes`` with which all rings hold two rows of ``row_layout``."""
        return self.memory.world_size * self.tuning.channels * least_ring(row_layout.slot_bytes)


def least_ring(slot_bytes: int) -> int:
    """Bytes of the smallest ring for two rows, a multiple of 256 as all rings are."""
    return -(-2 * slot_bytes // 256) * 256


def as_aligned(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous and aligned to 16 bytes, which kernels read at a time."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned(payload: Payload) -> Payload:
    """Rows and scales as kernels read them; a copy lives as long as its call."""
    return Payload(
        as_aligned(payload.x), None if payload.scales is None else as_aligned(payload.scales)
    )


def sums_for(rows: Tensor, tokens: int, out: Tensor | None, *read: Tensor) -> Tensor:
    """Where kernels write sums: ``out`` if they can, and it is apart from what they ``read``."""
    # elsewhere than on a GPU kernels write only to tensors that were made in the memory's context
    fits = out is not None and out.is_cuda and out.is_contiguous() and out.data_ptr() % 16 == 0
    if out is not None and fits and not any(overlap(out, each) for each in read):
        return out
    return rows.new_empty(tokens, rows.shape[1])


def address(tensor: Any) -> int:
    """Where a tensor's data is; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(bias: tuple[Tensor, ...]) -> tuple[int, int]:
    """Of up to two terms; 0 for each that is not there."""
    first, second, *_ = (*map(address, bias), 0, 0)
    return first, second
