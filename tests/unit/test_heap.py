"""Blocks of a heap: where they are, and when they are free again."""

from __future__ import annotations

import gc
from threading import Thread
from typing import Any

import torch

from tokenyard.memory.heap import ALIGNMENT, Heap
from tokenyard.memory.symmetric import Region
from tokenyard.testing.region_heap import RegionHeap


def heap_of(num_blocks: int) -> RegionHeap:
    """Of so many blocks of the least size."""
    local = torch.zeros(num_blocks * ALIGNMENT, dtype=torch.uint8)
    return RegionHeap(Region(local, torch.tensor([local.data_ptr()])))


def place(heap: Heap, block: torch.Tensor | None) -> int:
    """In blocks of the least size; -1: there is none."""
    return -1 if block is None else (block.data_ptr() - heap.begin) // ALIGNMENT


def test_a_block_returns_with_the_last_tensor_over_it() -> None:
    """Views and results of autograd hold it; then the next one takes its place."""
    heap = heap_of(2)
    first = heap.take(1)
    assert first is not None
    view = first.view(torch.float32)[3:].requires_grad_()
    product = (view * view).sum()
    del first, view
    gc.collect()
    assert [place(heap, heap.take(each)) for each in (2 * ALIGNMENT, 1)] == [-1, 1]
    product.backward()
    del product
    gc.collect()
    assert place(heap, heap.take(2 * ALIGNMENT)) == 0


def test_the_smallest_gap_is_taken() -> None:
    heap = heap_of(8)
    blocks = [heap.take(size * ALIGNMENT) for size in (3, 1, 2, 1)]
    assert [place(heap, block) for block in blocks] == [0, 3, 4, 6]
    blocks[0] = blocks[2] = None
    assert place(heap, heap.take(2 * ALIGNMENT)) == 4
    assert place(heap, heap.take(3 * ALIGNMENT)) == 0
    assert place(heap, heap.take(4 * ALIGNMENT)) == -1


def test_what_is_left_of_a_gap_may_belong_to_the_block() -> None:
    """As torch's allocator has it: no other block gets it meanwhile."""
    heap = heap_of(8)
    heap.rest = 2 * ALIGNMENT
    blocks = [heap.take(4 * ALIGNMENT), heap.take(2 * ALIGNMENT)]
    assert place(heap, heap.take(1)) == -1
    blocks[0] = None
    small = heap.take(2 * ALIGNMENT)
    assert (place(heap, small), place(heap, heap.take(2 * ALIGNMENT))) == (0, -1)
    del small
    assert place(heap, heap.take(4 * ALIGNMENT)) == 0


def test_sizes_are_few() -> None:
    """So a block that is a little larger than the one before fits into its gap."""
    heap = heap_of(120)
    first, second = heap.take(59 * ALIGNMENT), heap.take(59 * ALIGNMENT)
    assert first is not None and second is not None
    del first
    assert place(heap, heap.take(60 * ALIGNMENT)) == 0


def test_other_streams_hold_a_block_until_they_have_passed() -> None:
    class Event:
        passed = False

        def query(self) -> bool:
            return self.passed

    class Stream:
        def __init__(self) -> None:
            self.event = Event()

        def record_event(self) -> Event:
            return self.event

    heap, stream = heap_of(1), Stream()
    block = heap.take(1)
    assert block is not None
    held: Any = block[1:].untyped_storage()
    held.tokenyard_block.keep_for(stream)
    held.tokenyard_block.keep_for(stream)
    del block, held
    assert heap.take(1) is None
    stream.event.passed = True
    assert heap.take(1) is not None


def test_a_late_notice_frees_no_other_block() -> None:
    """Memory is freed, and taken again, before Python's own object dies."""
    heap = heap_of(2)
    first = heap.take(1)
    assert first is not None
    late: Any = first.untyped_storage()
    block = late.tokenyard_block
    heap.give_back(0, 0, [])
    second = heap.take(1)
    assert place(heap, second) == 0
    del first, late, block
    gc.collect()
    assert [place(heap, heap.take(each)) for each in (2 * ALIGNMENT, 1)] == [-1, 1]


def test_any_thread_may_drop_a_block() -> None:
    heap = heap_of(4)
    for _ in range(50):
        blocks = [heap.take(1) for _ in range(4)]
        assert heap.take(1) is None
        threads = [Thread(target=blocks.pop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        assert place(heap, heap.take(4 * ALIGNMENT)) == 0
