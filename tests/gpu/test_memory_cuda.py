"""Symmetric memory of GPUs, a process each: regions, flags, launches, graphs, failures."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from memory_calls import launch
from tokenyard.memory.cuda import CudaMemory
from tokenyard.memory.preflight import unreachable_pairs
from tokenyard.rendezvous import agree, group_store
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get(DEVICE_VARIABLE) != "cuda", reason="needs a GPU per rank: make test-gpu"
    ),
]
WORLD_SIZES = tuple(size for size in (1, 2, 4) if size <= max(torch.cuda.device_count(), 1))
SEVERAL = tuple(size for size in WORLD_SIZES if size > 1) or (2,)
EPOCHS, LANES = 50, 16


def own_store(ranks: Ranks) -> dist.Store:
    """A part of the store for one more object."""
    return agree(group_store(ranks.group), ranks.rank, ranks.world_size, {}, "", 30.0)[0]


@contextmanager
def memory_of(ranks: Ranks) -> Iterator[CudaMemory]:
    if ranks.world_size > torch.cuda.device_count():
        pytest.skip("needs a GPU per rank")
    memory = CudaMemory(
        ranks.group,
        ranks.rank,
        ranks.world_size,
        ranks.device,
        timeout=30.0,
        store=own_store(ranks),
    )
    try:
        yield memory
    finally:
        memory.close()


def state_of(memory: CudaMemory, timeout: float = 10.0) -> tuple[Tensor, Tensor]:
    """Local state as ``kernels/sync.py`` wants it, and the status words."""
    from tokenyard.kernels.sync import RANK, STATE_WORDS, STATUS, STATUS_WORDS, TIMEOUT_NS

    status = memory.host_words(STATUS_WORDS)
    state = torch.zeros(STATE_WORDS, dtype=torch.int64)
    state[RANK.value], state[TIMEOUT_NS.value], state[STATUS.value] = (
        memory.rank,
        int(timeout * 1e9),
        status.data_ptr(),
    )
    return state.to(memory.device), status


@distributed_test(world_size=WORLD_SIZES)
def test_flags_and_numbers_reach_everybody(ranks: Ranks) -> None:
    from memory_kernels import REGION_BYTES, everybody, sums

    with memory_of(ranks) as memory:
        for _ in range(2):
            region = memory.allocate(REGION_BYTES)
            assert region.local.data_ptr() % 256 == 0
            assert region.local.shape == (REGION_BYTES,)
            assert not region.local.any()
            assert region.addresses.device == ranks.device
            assert int(region.addresses[ranks.rank]) == region.local.data_ptr()
            assert len(set(region.addresses.tolist())) == ranks.world_size
            dist.barrier()  # nobody writes before all have looked
            state, status = state_of(memory)
            out = torch.zeros(EPOCHS + 1, LANES, dtype=torch.int64, device=ranks.device)
            for epoch in range(1, EPOCHS + 1):
                where = (region.addresses.data_ptr(), state.data_ptr(), out.data_ptr())
                launch(
                    memory, everybody, 2, *where, epoch, num_warps=4, R=ranks.world_size, W=LANES
                )
            torch.cuda.synchronize()
            assert not status.any()
            assert out.tolist() == [
                [0] * LANES,
                *(sums(ranks.world_size, e, LANES) for e in range(1, EPOCHS + 1)),
            ]


@distributed_test(world_size=SEVERAL)
def test_a_silent_rank_is_named(ranks: Ranks) -> None:
    from memory_kernels import PHASE as WAITING
    from memory_kernels import REGION_BYTES, everybody
    from tokenyard.kernels.sync import CODE, EXPECTED, PEER, PHASE, SEEN, TIMED_OUT

    silent = ranks.world_size - 1
    with memory_of(ranks) as memory:
        region = memory.allocate(REGION_BYTES)
        state, status = state_of(memory, timeout=0.5)
        out = torch.zeros(2, LANES, dtype=torch.int64, device=ranks.device)
        if ranks.rank != silent:
            where = (region.addresses.data_ptr(), state.data_ptr(), out.data_ptr())
            launch(memory, everybody, 2, *where, 1, num_warps=4, R=ranks.world_size, W=LANES)
            assert memory.wait_until(lambda: int(status[CODE]) == TIMED_OUT.value, 30)
            assert [int(status[word]) for word in (PHASE, PEER, EXPECTED, SEEN)] == [
                WAITING,
                silent,
                1,
                0,
            ]
        torch.cuda.synchronize()
        dist.barrier()


@distributed_test(world_size=1)
def test_integers_are_int64_and_host_words_are_seen(ranks: Ranks) -> None:
    from memory_kernels import widths

    with memory_of(ranks) as memory:
        words = memory.host_words(2)
        assert words.tolist() == [0, 0]
        launch(memory, widths, 1, words.data_ptr(), 1, 1 << 50, num_warps=1)
        assert memory.wait_until(lambda: int(words[1]) != 0, 30)
        torch.cuda.synchronize()
        assert words.tolist() == [64, (1 << 40) + (1 << 50)]
        assert not memory.wait_until(lambda: False, 0.01)


@distributed_test(world_size=1)
def test_a_launch_in_a_graph(ranks: Ranks) -> None:
    from memory_kernels import double

    with memory_of(ranks) as memory:
        out = torch.zeros(4, LANES, dtype=torch.int64, device=ranks.device)
        memory.bind(double, 1, num_warps=4, W=LANES)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for row in range(3):
                launch(memory, double, 1, out.data_ptr(), LANES, row, num_warps=4, W=LANES)
        assert not out.any()  # captured, not run
        for first in (1, 5):
            out[0] = first
            graph.replay()
            torch.cuda.synchronize()
            assert out.tolist() == [[first * factor] * LANES for factor in (1, 2, 4, 8)]


@distributed_test(world_size=1)
def test_sums_have_torchs_bits(ranks: Ranks) -> None:
    from memory_kernels import multiply_add

    with memory_of(ranks) as memory:
        a, b, c, out = torch.randn(4, 256, device=ranks.device)
        launch(memory, multiply_add, 1, *(t.data_ptr() for t in (out, a, b, c)), num_warps=4, W=256)
        product = a * b
        assert torch.equal(out, product + c)
        # Fused would be this.
        assert not torch.equal(out, torch.addcmul(c.double(), a.double(), b.double()).float())


@distributed_test(world_size=1)
def test_launches_follow_the_current_stream_whatever_the_current_device(ranks: Ranks) -> None:
    from memory_kernels import double

    with memory_of(ranks) as memory:
        out = torch.ones(2, LANES, dtype=torch.int64, device=ranks.device)
        memory.bind(double, 1, num_warps=4, W=LANES)
        stream = torch.cuda.Stream(ranks.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            launch(memory, double, 1, out.data_ptr(), LANES, 0, num_warps=4, W=LANES)
            assert not stream.query()  # behind the sleep
        stream.synchronize()
        assert out[1].tolist() == [2] * LANES
        out[1] = 0
        with torch.cuda.device(torch.cuda.device_count() - 1):
            launch(memory, double, 1, out.data_ptr(), LANES // 2, 0, num_warps=4, W=LANES)
        torch.cuda.synchronize(ranks.device)
        assert out[1].tolist() == [2] * (LANES // 2) + [0] * (LANES // 2)


@distributed_test(world_size=1)
def test_a_grid_beyond_the_gpu_is_refused(ranks: Ranks) -> None:
    from memory_kernels import double

    with memory_of(ranks) as memory:
        out = torch.ones(2, LANES, dtype=torch.int64, device=ranks.device)
        most = memory.num_sms * 32
        with pytest.raises(ValueError, match=r"must be at most"):
            launch(memory, double, most + 1, out.data_ptr(), LANES, 0, num_warps=4, W=LANES)
        launch(memory, double, memory.num_sms, out.data_ptr(), LANES, 0, num_warps=32, W=LANES)
        torch.cuda.synchronize()
        assert out[1].tolist() == [2] * LANES


@distributed_test(world_size=SEVERAL)
def test_sizes_must_agree(ranks: Ranks) -> None:
    with memory_of(ranks) as memory:
        with pytest.raises(ValueError, match="ranks ask for regions of different sizes"):
            memory.allocate(16 + 16 * ranks.rank)
        assert not memory.allocate(16).local.any()


@distributed_test(world_size=WORLD_SIZES)
def test_closing_gives_the_memory_back(ranks: Ranks) -> None:
    size, slack = 1 << 30, 128 << 20
    with memory_of(ranks) as memory:
        memory.allocate(1 << 20)
        torch.cuda.synchronize()
        dist.barrier()
        free = torch.cuda.mem_get_info(ranks.device)[0]
        region = memory.allocate(size)
        assert torch.cuda.mem_get_info(ranks.device)[0] < free - size + slack
        del region
        memory.close()
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        assert torch.cuda.mem_get_info(ranks.device)[0] > free - slack


@distributed_test(world_size=SEVERAL)
def test_gpus_of_this_machine_reach_each_other(ranks: Ranks) -> None:
    if ranks.world_size > torch.cuda.device_count():
        pytest.skip("needs a GPU per rank")
    assert (
        unreachable_pairs(own_store(ranks), ranks.rank, ranks.world_size, ranks.device, 30.0) == []
    )
