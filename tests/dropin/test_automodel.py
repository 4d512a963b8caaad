"""NeMo Automodel 0.7.0's own ``MoEFlexTokenDispatcher`` over V1 ``Buffer`` and ``HybridEPBuffer``:
as one process, forward and backward, bit for bit.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deep_ep_world import World
from frameworks import lend, lend_deep_ep, needs, own_ranks
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, distributed_test

FRAMEWORK = "nemo_automodel-0.7.0"
pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]

ROOT = "nemo_automodel"
TOKENS = ("even", "uneven", "empty first", "only last")
WAYS: dict[str, dict[str, Any]] = {
    "deepep": {"moe_flex_dispatcher_backend": "deepep"},
    "deepep, asynchronous": {
        "moe_flex_dispatcher_backend": "deepep",
        "moe_deepep_async_dispatch": True,
    },
    "hybridep": {"moe_flex_dispatcher_backend": "hybridep"},
    "hybridep, compact": {
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_hybridep_compact_routing": True,
    },
    "hybridep, fused": {
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_hybridep_compact_routing": True,
        "moe_hybridep_permute_fusion": True,
    },
}


def check_layer(ranks: Ranks, world: World, dispatcher: Any, fused_a2a: Any, hybrid: bool) -> None:
    """Bits of output and gradients: kept, recomputed in backward, and recomputed with the recorded
    layouts.
    """
    rank = ranks.rank
    factors = torch.tensor([expert % 3 + 1.0 for expert in world.experts_of(rank)])

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        rows, counts, probs = dispatcher.token_permutation2(x, len(x), weights, world.idx[rank])
        assert counts.tolist() == world.counts(rank)
        scale = factors.repeat_interleave(counts) * probs
        return dispatcher.token_unpermutation((rows.float() * scale[:, None]).to(rows.dtype))

    kind = "HybridEPDispatchReplayRecorder" if hybrid else "DispatchReplayRecorder"
    scope = fused_a2a.hybridep_dispatch_replay_scope if hybrid else fused_a2a.dispatch_replay_scope
    recorder = getattr(fused_a2a, kind)()
    replayed = {"context_fn": lambda: (scope(recorder, "record"), scope(recorder, "replay"))}
    for options in (None, {}, replayed):
        x = world.x[rank].clone().requires_grad_()
        weights = world.weights[rank].clone().requires_grad_()
        if options is None:
            out = layer(x, weights)
        else:
            out = checkpoint(layer, x, weights, use_reentrant=False, **options)
        assert torch.equal(out, world.layered(rank))
        if options and hybrid:
            recorder.finalize()
        out.sum().backward()
        idx = world.idx[rank]
        scale = world.coefficients(idx, weights.detach())
        assert torch.equal(x.grad.float(), scale.expand_as(x))
        sums = x.detach().float().sum(1, keepdim=True)
        assert torch.equal(weights.grad, torch.where(idx < 0, 0.0, (idx % 3 + 1) * sums))
    assert len(recorder._records) == recorder._cursor == 1 and not recorder.replay_misses


@distributed_test(world_size=2 if SOAK == 1 else 3)
def test_dispatcher(ranks: Ranks) -> None:
    lend_deep_ep("hybrid")
    bare = (ROOT, f"{ROOT}.components", f"{ROOT}.components.moe")
    lend(FRAMEWORK, bare=bare)
    from nemo_automodel.components.moe.megatron import fused_a2a
    from nemo_automodel.components.moe.megatron import token_dispatcher as its

    with mock.patch.object(torch.cuda, "synchronize"):
        for (way, options), tokens in product(WAYS.items(), TOKENS):
            world = World.of(ranks, tokens, dropped=0.0)
            config = its.TokenDispatcherConfig(
                moe_router_topk=world.num_topk,
                num_moe_experts=world.num_experts,
                moe_share_token_dispatcher=False,
                **options,
            )
            mine = world.experts_of(ranks.rank)
            dispatcher = its.MoEFlexTokenDispatcher(len(mine), [*mine], config, ranks.group)
            check_layer(ranks, world, dispatcher, fused_a2a, "hybrid" in way)
            fused_a2a.reset_hybrid_ep_buffer()
        fused_a2a.free_buffer()
