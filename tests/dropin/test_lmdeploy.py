"""LMDeploy 0.18.0's own dispatchers over V1 ``Buffer``: one buffer for both modes, layers equal to
one process's.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from deep_ep_world import World, from_fp8, to_fp8
from frameworks import lend, lend_deep_ep, needs, own_ranks
from tokenyard.testing import Ranks, distributed_test

FRAMEWORK = "lmdeploy-0.18.0"
pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]

TOKENS = ("even", "uneven", "empty first", "only last")
BACKENDS = "lmdeploy.pytorch.backends"


def permuted(world: World, rank: int, its: Any) -> Tensor:
    """Prompts: rows by expert; weights and sums in its ``combine``."""
    rows, _, _, counts = its.dispatch(world.x[rank], world.idx[rank], world.weights[rank])
    assert counts.tolist() == world.counts(rank)
    factors = torch.tensor([expert % 3 + 1.0 for expert in world.experts_of(rank)])
    return its.combine(rows * factors.repeat_interleave(counts)[:, None].to(rows.dtype))


def normal(world: World, rank: int, its: Any, later: bool, fp8: bool) -> Tensor:
    """Prompts: rows by source, with counts that are multiples of 128."""
    x = to_fp8(world.x[rank]) if fp8 else world.x[rank]
    picks = world.idx[rank], world.weights[rank]
    handle: Any = None
    if later:
        rows, ids, weights, counts, handle, event = its.dispatch_normal_async(x, *picks)
        event.current_stream_wait()
    else:
        rows, ids, weights, counts = its.dispatch(x, *picks)
    assert counts == [-(-count // 128) * 128 for count in world.counts(rank)]
    work = world.layer(rank, from_fp8(*rows) if fp8 else rows, ids, weights)
    if not later:
        return its.combine(work)
    out, event = its.combine_normal_async(work, handle)
    event.current_stream_wait()
    return out


def low_latency(world: World, rank: int, its: Any, later: bool) -> Tensor:
    """Decoding, in FP8."""
    picks = world.idx[rank], world.weights[rank]
    if later:
        rows, counts, handle, event, _ = its.dispatch_async(world.x[rank], world.idx[rank])
        event.current_stream_wait()
    else:
        rows, _, _, counts, _ = its.dispatch(world.x[rank], *picks, world.num_experts)
        handle = its.handle
    assert counts.tolist() == world.counts(rank)
    work = world.by_expert(rank, from_fp8(*(each.value for each in rows)))
    for expert, count in enumerate(counts.tolist()):
        work[expert, count:] = float("nan")  # nobody may read them
    if not later:
        return its.combine(work, *picks)
    out, event, _ = its.combine_async(work, *picks, handle, True)
    event.current_stream_wait()
    return out


@distributed_test(world_size=3)
def test_dispatchers(ranks: Ranks) -> None:
    """Both modes by turns, synchronous or not."""
    lend_deep_ep("1")
    bare = ("lmdeploy", "lmdeploy.pytorch", BACKENDS, f"{BACKENDS}.cuda", f"{BACKENDS}.default")
    lend(FRAMEWORK, bare=bare)
    module = import_module(f"{BACKENDS}.cuda.token_dispatcher")
    world = World.of(ranks, hidden=256)
    sizes = world.num_experts, len(world.experts_of(ranks.rank)), world.hidden, torch.bfloat16
    assert module.DeepEPBuffer.set_explicitly_destroy()
    made = module.TokenDispatcherBuilder.build(ranks.group, *sizes)
    prompts = module.DeepEPTokenDispatcherNormal(ranks.group, *sizes)
    decoding = module.DeepEPTokenDispatcherLowLatency(ranks.group, *sizes)
    for tokens, later in product(TOKENS, (False, True)):
        world, rank = World.of(ranks, tokens, hidden=256), ranks.rank
        want = world.layered(rank)
        assert torch.equal(normal(world, rank, prompts, later, False), want), tokens
        assert torch.equal(permuted(world, rank, made), want), tokens
        module.DeepEPBuffer.set_deepep_mode(module.DeepEPMode.NORMAL)
        assert module.DeepEPBuffer.set_deepep_mode(module.DeepEPMode.LOW_LATENCY)[1]
        for got in (
            normal(world, rank, prompts, later, True),
            low_latency(world, rank, decoding, later),
        ):
            # Scales are not powers of two.
            assert torch.allclose(got.float(), want.float(), rtol=2**-4, atol=0.1), tokens
    assert module.DeepEPBuffer.destroy()
