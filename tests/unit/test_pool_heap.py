"""A heap in a memory pool, with a stand-in for torch's allocator: what GPUs do is in
``test_heap_gpu.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenyard.memory import heap as heaps
from tokenyard.memory.heap import PoolHeap
from tokenyard.memory.symmetric import Region, storage_over
from tokenyard.testing.region_heap import RegionHeap

MIB = 1 << 20


class Allocator:
    """Places blocks as :class:`RegionHeap` does, in the pool only; ``elsewhere``: outside of the
    segment; ``short``: nowhere.
    """

    def __init__(self, num_bytes: int) -> None:
        self.segment = torch.zeros(num_bytes, dtype=torch.uint8)
        self.inside, self.elsewhere, self.short = False, False, False
        self.stream, self.outside, self.capturing = 7, 0, False
        self.places = RegionHeap(Region(self.segment, torch.zeros(1, dtype=torch.int64)))
        self.places.least, self.places.rest = PoolHeap.least, PoolHeap.rest
        self._real = torch.empty

    @contextmanager
    def pool(self, *_: object) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def empty(self, size: int, **options: Any) -> torch.Tensor:
        if not self.inside:
            self.outside += 1
            return self._real(size, **options)
        if self.short:
            raise RuntimeError("out of memory")
        start, gap = self.places._gap(size)
        if self.elsewhere or not gap:
            return self._real(size, **options)
        storage = storage_over(self.places.begin + start, size, self.segment.device)
        return self._real(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator(16 * MIB)
    monkeypatch.setattr(heaps.torch, "empty", made.empty)
    monkeypatch.setattr(heaps.torch.cuda, "use_mem_pool", made.pool)
    monkeypatch.setattr(heaps.torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(PoolHeap, "_current", lambda _: made.stream)
    return made


def heap_in(allocator: Allocator) -> PoolHeap:
    addresses = torch.zeros(1, dtype=torch.int64)
    return PoolHeap(allocator.places.begin, 16 * MIB, addresses, SimpleNamespace())


def test_blocks_are_the_allocators(allocator: Allocator) -> None:
    """In its segment, for the heap's stream; behind a look at what other streams have passed."""
    heap = heap_in(allocator)
    block = heap.take(3 * MIB)
    assert block is not None and block.data_ptr() == heap.begin
    assert block.numel() >= 3 * MIB and allocator.outside == 1
    held: Any = block.untyped_storage()
    held.tokenyard_block.keep_for(SimpleNamespace(cuda_stream=7))  # no event: it is the heap's own
    del block, held
    gc.collect()
    allocator.stream = 8
    assert heap.take(3 * MIB) is None
    allocator.stream = 7
    assert heap.take(15 * MIB) is not None


def test_no_block_in_a_capture(allocator: Allocator) -> None:
    """Nor a look at the events of blocks that have died: to ask for one ends the capture."""
    heap, asked = heap_in(allocator), list[bool]()
    event = SimpleNamespace(query=lambda: not asked.append(allocator.capturing))
    held: Any = heap.take(3 * MIB)
    held.untyped_storage().tokenyard_block.keep_for(
        SimpleNamespace(cuda_stream=8, record_event=lambda: event)
    )
    del held
    gc.collect()
    allocator.capturing = True
    assert heap.take(3 * MIB) is None and not asked
    allocator.capturing = False
    assert heap.take(15 * MIB) is not None and asked == [False]


@pytest.mark.parametrize("what", ["elsewhere", "short"])
def test_an_allocator_with_less_room_ends_the_heap(allocator: Allocator, what: str) -> None:
    """Nothing is raised on one rank alone; blocks that were taken stay."""
    heap = heap_in(allocator)
    first = heap.take(2 * MIB)
    setattr(allocator, what, True)
    assert heap.take(2 * MIB) is None
    setattr(allocator, what, False)
    assert heap.take(2 * MIB) is None
    assert first is not None and first.data_ptr() == heap.begin
    assert not PoolHeap._in_pool


def test_a_pool_is_not_let_go_while_another_is_used(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor within the capture of a graph: torch aborts. It goes when another heap is made."""
    heap = heap_in(allocator)
    monkeypatch.setattr(PoolHeap, "_in_pool", True)
    del heap
    gc.collect()
    assert len(heaps._HELD) == 1
    monkeypatch.setattr(PoolHeap, "_in_pool", False)
    allocator.capturing = True
    heap = heap_in(allocator)
    assert not heaps._HELD
    del heap
    gc.collect()
    assert len(heaps._HELD) == 1
    heaps._HELD.clear()
