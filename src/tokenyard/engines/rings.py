"""Rows as they lie in rings of engines nvlink and twolevel, and tensors as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.formats import row_of
from tokenyard.rows import Payload, address, overlap, padded
from tokenyard.types import Quantize

DEFAULT_BUFFER_BYTES = 128 << 20
LINE, LONG_ROW = 128, 4096
"""Bytes of a line of a GPU's memory, and of long rows: slots of whole lines are 3 % larger."""


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


def addresses(bias: tuple[Tensor, ...]) -> tuple[int, int]:
    """Of up to two terms; 0 for each that is not there."""
    first, second, *_ = (*map(address, bias), 0, 0)
    return first, second
