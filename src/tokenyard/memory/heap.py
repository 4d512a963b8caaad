"""A heap in symmetric memory: blocks that a rank takes for itself and peers write to.

A block is the storage of a tensor, and returns when the last tensor over it has died. Ranks take
blocks as they need them, so a rank tells its peers where its block is.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes of which sizes and places of blocks are multiples."""


class Block:
    """Held by a block's storage, as ``tokenyard_block``, and dies with it."""

    __slots__ = ("_heap", "_number", "_start", "_streams")

    def __init__(self, heap: Heap, start: int, number: int) -> None:
        self._heap, self._start, self._number = heap, start, number
        self._streams: list[Any] = []

    def keep_for(self, stream: Any) -> None:
        """``stream`` may still use the block when it dies, as ``Tensor.record_stream`` says."""
        if not self._heap.runs_on(stream) and stream not in self._streams:
            self._streams.append(stream)

    def __del__(self) -> None:
        events: list[Any] = []
        with suppress(RuntimeError):  # the device is gone, say
            events = [stream.record_event() for stream in self._streams]
        self._heap.give_back(self._start, self._number, events)


class Heap:
    """One rank's part of ``num_bytes``, from address ``begin`` on. ``addresses``: int64 ``[R]`` on
    the device, where each rank's part begins."""

    least, rest = ALIGNMENT, 0
    """Bytes of the smallest block, and of what is left of a gap that a block takes besides."""

    def __init__(self, begin: int, num_bytes: int, addresses: Tensor) -> None:
        self.begin, self.num_bytes, self.addresses = begin, num_bytes, addresses
        self._numbers = count()
        self._taken: dict[int, tuple[int, int]] = {}  # bytes and number of each block by its place
        # places and numbers of blocks that have died, and events that free them
        self._leaving: list[tuple[int, int, list[Any]]] = []

    def take(self, num_bytes: int) -> Tensor | None:
        """uint8 ``[num_bytes or more]``, a block for the current stream; None: there is no room."""
        size = _rounded(max(self.least, num_bytes))
        if self._leaving:
            self._look()
        start, gap = self._gap(size)
        made = self._make(start, size) if gap else None
        if made is None:
            return None
        start, number = made.data_ptr() - self.begin, next(self._numbers)
        self._taken[start] = (gap if gap - size <= self.rest else size), number
        storage: Any = made.untyped_storage()
        storage.tokenyard_block = Block(self, start, number)
        return made

    def give_back(self, start: int, number: int, events: list[Any]) -> None:
        """Block ``number`` at ``start`` is free once ``events`` have passed. Any thread may say so,
        also after the place was taken again: memory is freed before Python learns it."""
        if events:
            self._leaving.append((start, number, events))
        elif self._taken.get(start, (0, -1))[1] == number:
            self._taken.pop(start, None)

    def runs_on(self, stream: Any) -> bool:
        """Whether blocks are for ``stream`` in any case."""
        return False

    def _look(self) -> None:
        """Free what no stream uses any more."""
        for each in self._leaving[:]:
            start, number, events = each
            with suppress(RuntimeError):  # an event of a graph's capture says nothing, for ever
                if all(event.query() for event in events):
                    self._leaving.remove(each)
                    self.give_back(start, number, [])

    def _gap(self, size: int) -> tuple[int, int]:
        """Where the smallest gap of at least ``size`` bytes begins, and its bytes; 0 of none."""
        best, most, end = 0, 0, 0
        taken = sorted((start, each[0]) for start, each in self._taken.copy().items())
        for start, num_bytes in [*taken, (self.num_bytes, 0)]:
            if size <= start - end and (not most or start - end < most):
                best, most = end, start - end
            end = start + num_bytes
        return best, most

    def _make(self, start: int, size: int) -> Tensor | None:
        """A tensor over ``size`` bytes of this rank's part: at ``start``, if nobody else decides.
        None: it cannot be made here and now."""
        raise NotImplementedError


def _rounded(num_bytes: int) -> int:
    """To few sizes, at most a 16th more: blocks of about one size fit into each other's gaps."""
    step = max(ALIGNMENT, 1 << max(0, num_bytes.bit_length() - 5))
    return -(-num_bytes // step) * step


_HELD: list[Any] = []
"""Pools that torch would not let go when their heap died; until another heap is made."""


class PoolHeap(Heap):
    """In a memory pool of torch's allocator, which holds one segment of symmetric memory. So blocks
    are freed as any tensor is: in the order of their stream, and behind ``record_stream``. The
    allocator takes the smallest gap, as this class does. ``pool``: a ``torch.cuda.MemPool`` whose
    one segment, of a multiple of 2 MiB, is free. Blocks belong to the stream that is current now,
    as the segment does."""

    least, rest = (1 << 20) + 1, 1 << 20
    """Of the allocator: smaller ones come from other segments."""
    _in_pool = False  # of any heap of this process

    def __init__(self, begin: int, num_bytes: int, addresses: Tensor, pool: Any) -> None:
        super().__init__(begin, num_bytes, addresses)
        self._pool, self._device, self._lost = pool, addresses.device, False
        self._stream = self._current()
        _HELD.clear()

    def __del__(self) -> None:
        # Within a capture, or while allocations go to a pool, torch aborts if one goes.
        with suppress(Exception):  # the interpreter ends, say
            if PoolHeap._in_pool or torch.cuda.is_current_stream_capturing():
                _HELD.append(self._pool)

    def runs_on(self, stream: Any) -> bool:
        """Whether it is the stream of the blocks."""
        return stream.cuda_stream == self._stream

    def _current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device.index)  # pyright: ignore

    def take(self, num_bytes: int) -> Tensor | None:
        # A graph's allocations go elsewhere, and to ask for an event would end its capture.
        return None if torch.cuda.is_current_stream_capturing() else super().take(num_bytes)

    def _make(self, start: int, size: int) -> Tensor | None:
        if self._lost or self._current() != self._stream:
            return None
        # Outside of the pool, where the allocator looks whether other streams have passed.
        torch.empty(1, dtype=torch.uint8, device=self._device)
        PoolHeap._in_pool, made = True, None
        try:
            with suppress(RuntimeError), torch.cuda.use_mem_pool(self._pool, self._device):
                made = torch.empty(size, dtype=torch.uint8, device=self._device)
        finally:
            PoolHeap._in_pool = False
        if made is not None and 0 <= made.data_ptr() - self.begin <= self.num_bytes - size:
            return made
        # The allocator has less room than this heap believes: others' ``record_stream`` keeps a
        # block that has died. The pool has grown, or was to grow; it would again.
        self._lost = True
        return None
