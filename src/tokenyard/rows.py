"""Rows on the wire, moved as whole words by torch: ``[payload | scales | token | ids | weights]``.

Everything behind the payload is made of 4-byte words, and scales and token begin at multiples of 16
bytes. Because rows from one peer follow those of another, the buffer that peers fill is already the
``FLAT`` result in another stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW_ALIGNMENT = 16
SUM_BLOCK_BYTES, SUM_BLOCK_BYTES_CPU = 64 << 20, 8 << 20
"""Float32 bytes of a block of rows to sum: bounded memory, and on a CPU in cache."""


def padded(num_bytes: int) -> int:
    """The next multiple of 16."""
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


class Payload(NamedTuple):
    """What moves with each token."""

    x: Tensor  # [rows, H]
    scales: Tensor | None  # [rows, S], 4-byte words


class Routing(NamedTuple):
    """Routing that moves with each row: all picks of its token, whoever holds them."""

    topk_idx: Tensor  # [T, K] global expert ids, -1 for none
    weights: Tensor | None  # [T, K] float32


def _word(num_bytes: int) -> torch.dtype:
    for size, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if num_bytes % size == 0:
            return dtype
    return torch.uint8


def as_bytes(rows: Tensor) -> Tensor:
    """``rows [n, m]`` as bytes. An empty tensor says it is contiguous, whatever its strides."""
    if rows.numel() == 0:
        shape = rows.shape[0], rows.shape[1] * rows.element_size()
        return torch.empty(shape, dtype=torch.uint8, device=rows.device)
    return rows.contiguous().view(-1).view(torch.uint8).view(rows.shape[0], -1)


def as_words(rows: Tensor) -> Tensor:
    """``rows [n, m]`` as the widest integers that divide a row: equally fast in every dtype."""
    if rows.numel() == 0:
        return as_bytes(rows)
    word = _word(rows.shape[1] * rows.element_size())
    flat = rows.contiguous().view(-1)  # a single row, or column, may have any stride
    if flat.storage_offset() * flat.element_size() % word.itemsize:  # views begin at whole words
        flat = flat.clone()
    return flat.view(word).view(rows.shape[0], -1)


def address(tensor: Any) -> int:
    """Where a tensor's data is; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the bytes from the first to the last element of two tensors overlap."""

    def end(tensor: Tensor) -> int:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        return tensor.data_ptr() + (last + 1) * tensor.itemsize

    if not one.numel() or not other.numel():
        return False
    return one.data_ptr() < end(other) and other.data_ptr() < end(one)


def overlaps_itself(matrix: Tensor) -> bool:
    """Whether two elements lie at the same place.

    >>> overlaps_itself(torch.zeros(9).as_strided((3, 4), (2, 1)))
    True
    >>> overlaps_itself(torch.zeros(8).as_strided((2, 3), (3, 2)))
    False
    """
    if matrix.is_contiguous():
        return False
    (rows, columns), down, right = matrix.shape, *map(int, matrix.stride())
    both = gcd(down, right) or 1
    # so many steps down lead as far as so many to the right
    return matrix.numel() > 1 and rows > right // both and columns > down // both


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Where the parts of one row lie.

    Attributes:
        hidden, dtype: the payload.
        scale_words, scale_dtype: scales behind it (0 words: none).
        picks: K if routing rides along, else 0.
        weighted: whether weights ride along.
    """

    hidden: int
    dtype: torch.dtype
    scale_words: int = 0
    scale_dtype: torch.dtype = torch.float32
    picks: int = 0
    routed: bool = False
    weighted: bool = False

    @property
    def payload_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def num_scales(self) -> int:
        """Scales of a row, and what makes their words whole."""
        return self.scale_words * 4 // self.scale_dtype.itemsize

    @property
    def scales_at(self) -> int:
        """4-byte word where scales begin."""
        return padded(self.payload_bytes) // 4

    @property
    def routing_at(self) -> int:
        return self.scales_at + padded(4 * self.scale_words) // 4

    @property
    def _weights_at(self) -> int:
        return self.routing_at + (1 + self.picks if self.routed else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row. A bare payload is not padded: contiguous rows are sent as they are."""
        if not self.scale_words and not self.routed and not self.weighted:
            return self.payload_bytes
        return padded(4 * (self._weights_at + (self.picks if self.weighted else 0)))

    def buffer(self, num_rows: int, device: torch.device) -> Tensor:
        """An uninitialised uint8 buffer ``[num_rows, row_bytes]``."""
        return torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=device)

    def _words(
        self, buffer: Tensor, at: int, count: int, dtype: torch.dtype = torch.int32
    ) -> Tensor:
        """``count`` 4-byte words from word ``at`` of each row, as ``dtype``."""
        return _columns(buffer, dtype, at * 4 // dtype.itemsize, count * 4 // dtype.itemsize)

    def payload(self, buffer: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The payload of ``buffer``, ``[n, H]`` or words of ``dtype``: a strided view."""
        dtype = dtype or self.dtype
        return _columns(buffer, dtype, 0, self.payload_bytes // dtype.itemsize)

    def scales(self, buffer: Tensor) -> Tensor:
        return self._words(buffer, self.scales_at, self.scale_words, self.scale_dtype)

    def token(self, buffer: Tensor) -> Tensor:
        return self._words(buffer, self.routing_at, 1)[:, 0]

    def topk_idx(self, buffer: Tensor) -> Tensor:
        return self._words(buffer, self.routing_at + 1, self.picks)

    def weights(self, buffer: Tensor) -> Tensor:
        return self._words(buffer, self._weights_at, self.picks, torch.float32)

    def routing(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copies of token ``[n]``, ids and weights ``[n, K]``, read in one pass."""
        end = 1 + self.picks
        words = self._words(buffer, self.routing_at, end + self.picks * self.weighted).clone()
        weights = words[:, end:].contiguous().view(torch.float32) if self.weighted else None
        return words[:, 0], words[:, 1:end], weights

    def vacate(self, buffer: Tensor, unused: Tensor | None = None) -> None:
        """Rows ``unused`` (bool ``[n]``; None: all) are nobody's: token and ids become -1."""
        words = self._words(buffer, self.routing_at, 1 + self.picks)
        if unused is None:
            words.fill_(-1)
        else:
            words.masked_fill_(unused.unsqueeze(1), -1)

    def pack(
        self, payload: Payload, order: Tensor, routing: Routing | None, buffer: Tensor
    ) -> None:
        """Fill ``buffer [n, row_bytes]`` with rows ``order [n]`` of ``payload`` (-1: any)."""
        if payload.x.shape[0] and order.numel():
            some = order.clamp(min=0)
            words = as_words(payload.x)
            torch.index_select(words, 0, some, out=self.payload(buffer, words.dtype))
            if payload.scales is not None:
                self.scales(buffer).copy_(payload.scales.index_select(0, some))
        if routing is not None:
            self.token(buffer).copy_(order)
            self.topk_idx(buffer).copy_(take_values(routing.topk_idx.to(torch.int32), order, -1))
            if routing.weights is not None:
                self.weights(buffer).copy_(take_values(routing.weights, order, 0.0))

    def take(self, buffer: Tensor, gather: Tensor | None) -> Payload:
        """Result rows out of ``buffer``: all in order, or those named by ``gather`` (-1: zeros)."""
        return self._moved(buffer, lambda part: _take(part, gather))

    def spread(self, buffer: Tensor, slots: Tensor, num_rows: int, *, zeros: bool) -> Payload:
        """``num_rows`` rows: ``slots [n, J]`` hold those of ``buffer``, others zeros or any."""
        return self._moved(buffer, lambda part: _spread(part, slots, num_rows, zeros))

    def _moved(self, buffer: Tensor, move: Callable[[Tensor], Tensor]) -> Payload:
        x = move(self.payload(buffer, _word(self.payload_bytes)))
        x = x.view(self.dtype).view(-1, self.hidden)
        if not self.scale_words:
            return Payload(x, None)
        scales = move(self._words(buffer, self.scales_at, self.scale_words))
        return Payload(x, scales.view(self.scale_dtype))


def _columns(buffer: Tensor, dtype: torch.dtype, at: int, count: int) -> Tensor:
    """``count`` elements of ``dtype`` from the one ``at`` of each row of bytes: a view."""
    if buffer.numel() == 0:
        return torch.empty(buffer.shape[0], count, dtype=dtype, device=buffer.device)
    return buffer.view(dtype)[:, at : at + count]


def _take(rows: Tensor, gather: Tensor | None) -> Tensor:
    if gather is None:
        return rows.clone(memory_format=torch.contiguous_format)
    if rows.shape[0] == 0:
        return torch.zeros(gather.numel(), rows.shape[1], dtype=rows.dtype, device=rows.device)
    taken = rows.index_select(0, gather.clamp(min=0))
    if rows.device.type != "cpu":
        return taken.masked_fill_((gather < 0).unsqueeze(1), 0)
    return taken.index_fill_(0, (gather < 0).nonzero().squeeze(1), 0)


def _spread(rows: Tensor, slots: Tensor, num_rows: int, zeros: bool) -> Tensor:
    make = torch.zeros if zeros else torch.empty
    out = make(num_rows + 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    for j in range(slots.shape[1]):
        at = slots[:, j]
        if rows.device.type == "cpu":
            which = (at >= 0).nonzero().squeeze(1)
            out.index_copy_(0, at[which], rows[which])
        else:
            out.index_copy_(0, torch.where(at < 0, num_rows, at), rows)
    return out[:num_rows]


def take_values(values: Tensor, index: Tensor, fill: float) -> Tensor:
    """``values[index]``, or rows of a matrix; ``fill`` where ``index`` is -1. Branch-free."""
    widened = torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])
    return widened[torch.where(index < 0, values.shape[0], index)]


def sum_rows(
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    *,
    weights: Tensor | None = None,
    bias: tuple[Tensor, ...] = (),
) -> None:
    """``out[i] = round(sum over j of weights[index[i, j]] * rows[index[i, j]] + bias[i])``, in
    float32 and in that order.

    Args:
        rows: ``[n, H]``, any float dtype, any row stride.
        index: ``[m, J]``, -1 where there is nothing to add.
        out: ``[m, H]``, rounded to its dtype once.
        weights: ``[n]`` float32, multiplied (and rounded) before the addition.
        bias: tensors ``[m, H]``, added last, in order.
    """
    room = SUM_BLOCK_BYTES_CPU if rows.device.type == "cpu" else SUM_BLOCK_BYTES
    block = max(1, room // (4 * rows.shape[1]))
    for start in range(0, index.shape[0], block):
        part = slice(start, start + block)
        total = _sum_block(rows, index[part], weights)
        for term in bias:
            total += term[part].float()
        out[part].copy_(total)


def _sum_block(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    total = torch.zeros(index.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0:
        return total
    for j in range(index.shape[1]):
        at = index[:, j]
        if rows.device.type == "cpu":
            which = (at >= 0).nonzero().squeeze(1)
            if which.numel() == 0:
                continue
            term = _terms(rows, at[which], weights)
            if which.numel() == at.numel():
                total += term
            else:
                total.index_add_(0, which, term)
        else:
            term = _terms(rows, at.clamp(min=0), weights)
            total += torch.where((at >= 0).unsqueeze(1), term, 0.0)
    return total


def _terms(rows: Tensor, at: Tensor, weights: Tensor | None) -> Tensor:
    term = rows.index_select(0, at).float()
    return term if weights is None else term.mul_(weights[at].unsqueeze(1))


def flat_rows(x: Tensor) -> Tensor:
    """``[rows, H]`` of rows to combine; no work of torch where they are so already."""
    return x if x.dim() == 2 else x.flatten(0, 1)
