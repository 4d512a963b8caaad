"""DeepEP's V2 buffers where only GPUs can show it: CUDA graphs, memory that streams share. See
``make test-gpu``.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch

from elastic_calls_of import KINDS, Known, fresh, made, world_of
from elastic_checks import picked
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get(DEVICE_VARIABLE) != "cuda", reason="needs a GPU per rank: make test-gpu"
    ),
]
WORLD_SIZES = tuple(size for size in (1, 2, 4) if size <= max(torch.cuda.device_count(), 1))
MOST, ALIGNMENT = 16, 4


def check_replay(world: Known, rank: int, rows: Any, handle: Any, sums: Any) -> None:
    """Rows, prefix sums and sums of the replay, whose experts answer with the rows themselves."""
    blocks = world.blocks(rank, ALIGNMENT)
    want, times = world.take(rank, world.x), world.in_ranks(rank).sum(1, keepdim=True)
    if handle.do_expand:
        want, times = blocks.x, (world.idx[rank] >= 0).sum(1, keepdim=True)
        assert handle.psum_num_recv_tokens_per_expert.tolist() == blocks.psum
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == world.prefix(rank)
    assert torch.equal(rows[: len(want)], want)
    assert torch.equal(sums[0].float(), world.x[rank].float() * times)
    assert torch.equal(sums[1], picked(world, rank))


@distributed_test(world_size=WORLD_SIZES)
def test_replays_of_decoding(ranks: Ranks) -> None:
    """Captured once, replayed with new rows and routing: also what the handle tells follows."""
    rank = ranks.rank
    worlds = [world_of(ranks, "even", seed=seed) for seed in range(3)]
    mine = worlds[0].x[rank], worlds[0].idx[rank], worlds[0].weights[rank]
    x, idx, weights = (each.clone() for each in mine)
    for kind, expands in product(KINDS, (False, True)):
        buffer = made(ranks, kind)
        how = {"num_experts": worlds[0].num_experts, "num_max_tokens_per_rank": MOST}
        how |= {"do_expand": expands, "expert_alignment": ALIGNMENT, "do_cpu_sync": False}

        def step(buffer: Any = buffer, how: Any = how) -> tuple[Any, Any, Any]:
            rows, _, scores, handle, _ = buffer.dispatch(x, idx, weights, **how)
            return rows, handle, buffer.combine(rows, handle, topk_weights=scores)[:2]

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, handle, sums = step()
        for world in worlds * 3:
            x.copy_(world.x[rank])
            idx.copy_(world.idx[rank])
            weights.copy_(world.weights[rank])
            graph.replay()
            torch.cuda.synchronize()
            check_replay(world, rank, rows, handle, sums)
        buffer.destroy()


@distributed_test(world_size=WORLD_SIZES)
def test_handles_read_late(ranks: Ranks) -> None:
    """On a stream that sleeps while the next calls of the communication stream take memory."""
    rank = ranks.rank
    worlds = [world_of(ranks, "even", seed=seed) for seed in range(4)]
    for kind, expands in product(KINDS, (False, True)):
        buffer = made(ranks, kind)
        early, how = buffer.capture(), {"do_expand": expands, "async_with_compute_stream": True}
        for world in worlds:
            *_, handle, event = fresh(buffer, world, **how)
            event.current_stream_wait()
            torch.cuda._sleep(100_000_000)
            metadata, slots = handle.recv_src_metadata, handle.dst_buffer_slot_idx
            del handle
            for other in worlds:
                fresh(buffer, other, **how, previous_event=early)
            sources = [source * 64 + token for source, token in world.rows[rank]]
            assert metadata[:, 0].tolist() == sources
            assert slots.tolist() == world.places(rank)
        torch.cuda.synchronize()
        buffer.destroy()
