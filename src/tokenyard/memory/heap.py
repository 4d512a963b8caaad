"""A heap in symmetric memory: blocks that a rank takes for itself and peers write to.

A block is the storage of a tensor, and returns when the last tensor over it has died. Ranks take
blocks as they need them, so a rank tells its peers where its block is.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes of which sizes and places of blocks are multiples."""


class Block:
    """Held by a block's storage, as ``tokenyard_block``, and dies with it. ``streams``: others than
    the heap's that the block is kept for, which may still use it then."""

    __slots__ = ("_heap", "_start", "streams")

    def __init__(self, heap: Heap, start: int) -> None:
        self._heap, self._start = heap, start
        self.streams: list[Any] = []

    def __del__(self) -> None:
        self._heap.give_back(self._start, [stream.record_event() for stream in self.streams])


class Heap:
    """One rank's part of ``num_bytes``, from address ``begin`` on.

    Attributes:
        addresses: int64 ``[R]`` on the device: where each rank's part begins.
    """

    least, rest = ALIGNMENT, 0
    """Bytes of the smallest block, and of what is left of a gap that a block takes besides."""

    def __init__(self, begin: int, num_bytes: int, addresses: Tensor) -> None:
        self.begin, self.num_bytes, self.addresses = begin, num_bytes, addresses
        self._taken: dict[int, int] = {}  # bytes of each block by its place
        self._leaving: list[tuple[int, list[Any]]] = []  # places, and events that free them

    def take(self, num_bytes: int) -> Tensor | None:
        """uint8 ``[num_bytes or more]`` over a block of its own, for the current stream; None:
        there is no room for it."""
        size = _rounded(max(self.least, num_bytes))
        if self._leaving:
            self._look()
        start, gap = self._gap(size)
        made = self._make(start, size) if gap else None
        if made is None:
            return None
        start = made.data_ptr() - self.begin
        self._taken[start] = gap if gap - size <= self.rest else size
        storage: Any = made.untyped_storage()
        storage.tokenyard_block = Block(self, start)
        return made

    def give_back(self, start: int, events: list[Any]) -> None:
        """The block at ``start`` is free once ``events`` have passed."""
        if events:
            self._leaving.append((start, events))
        else:
            self._taken.pop(start, None)

    def _look(self) -> None:
        """Free what no stream uses any more."""
        for each in self._leaving[:]:
            with suppress(RuntimeError):  # an event of a graph's capture says nothing, for ever
                if all(event.query() for event in each[1]):
                    self._leaving.remove(each)
                    self._taken.pop(each[0], None)

    def _gap(self, size: int) -> tuple[int, int]:
        """Where the smallest gap of at least ``size`` bytes begins, and its bytes; 0: there is
        none."""
        best, most, end = 0, 0, 0
        for start, taken in [*sorted(self._taken.copy().items()), (self.num_bytes, 0)]:
            if size <= start - end and (not most or start - end < most):
                best, most = end, start - end
            end = start + taken
        return best, most

    def _make(self, start: int, size: int) -> Tensor | None:
        """A tensor over ``size`` bytes of this rank's part: at ``start``, if nobody else decides.
        None: it cannot be made here and now."""
        raise NotImplementedError


def _rounded(num_bytes: int) -> int:
    """To few different sizes, at most a 16th more: a block of about the same size fits into the gap
    that another has left."""
    step = max(ALIGNMENT, 1 << max(0, num_bytes.bit_length() - 5))
    return -(-num_bytes // step) * step


class PoolHeap(Heap):
    """In a memory pool of torch's allocator, which holds one segment of symmetric memory. So blocks
    are freed as any tensor is: in the order of their stream, and behind ``record_stream``. The
    allocator takes the smallest gap, as this class does.

    ``pool``: a ``torch.cuda.MemPool`` whose one segment is free. Blocks belong to the stream that
    is current now, as the segment does.
    """

    least, rest = (1 << 20) + 1, 1 << 20
    """Of the allocator: smaller ones come from other segments."""

    def __init__(self, begin: int, num_bytes: int, addresses: Tensor, pool: Any) -> None:
        super().__init__(begin, num_bytes, addresses)
        self._pool, self._device = pool, addresses.device
        self._stream = self._current()

    def _current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device.index)  # pyright: ignore

    def _make(self, start: int, size: int) -> Tensor | None:
        if self._pool is None or self._current() != self._stream:
            return None
        with torch.cuda.use_mem_pool(self._pool, self._device):
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
        if 0 <= made.data_ptr() - self.begin <= self.num_bytes - size:
            return made
        # ``record_stream`` by others keeps a block in use that has died, and the pool has grown.
        # It would grow again.
        self._pool = None
        return None
