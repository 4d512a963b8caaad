"""SGLang 0.5.23's own ``DeepEPv2Dispatcher`` over V2 ``ElasticBuffer``, with its own kernels around
the experts (interpreted): layers equal to one process's, bit for bit.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deep_ep_world import World, from_fp8
from frameworks import needs, own_ranks
from nvlink_pool import SOAK
from sglang_runtime import FRAMEWORK, is_prefill, sglang
from tokenyard.testing import Ranks, distributed_test

pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]

TOKENS = ("uneven", "empty first", "only last")
WAYS = ("expanded", "masked", "contiguous")
"""Of prompts, of decoding, and of prompts where expansion is off."""


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """As ``post_permute_deep_gemm_to_deepep_v2`` does it."""
    return rows.mul_(weights.unsqueeze(-1))


def run_experts(world: World, rank: int, came: Any) -> tuple[Tensor, Tensor | None]:
    """What SGLang does between dispatch and combine, with DeepGEMM's product replaced by a factor
    for each expert: the arguments of combine.
    """
    from sglang.kernels.ops.moe import ep_moe_kernels as kernels

    rows, psum = came.hidden_states, came.psum_num_recv_tokens_per_expert
    if came.hidden_states_scale is not None:
        rows = from_fp8(rows, came.hidden_states_scale)
    factors = torch.tensor([expert % 3 + 1.0 for expert in world.experts_of(rank)])
    if came.use_masked_gemm:
        slab, _, counts = kernels.expand_to_masked_slab(
            rows, None, psum, len(psum), came.masked_max_m, came.expert_alignment
        )
        assert counts.tolist() == world.counts(rank)
        slab = world.by_expert(rank, slab)
        weights = came.topk_weights
        sizes = came.total_expanded, came.expert_alignment
        return kernels.masked_slab_to_expand(slab, psum, *sizes, topk_weights=weights), None
    if came.is_expanded:
        expert_of = kernels.fill_m_indices_from_psum(
            psum, len(psum), len(rows), came.expert_alignment
        )
        assert (expert_of >= 0).all()
        rows = rows * factors[expert_of][:, None].to(rows.dtype)
        return weighted(rows, came.topk_weights), None
    # The kernel that scatters rows in front of each expert's end cannot be interpreted.
    assert psum.diff(prepend=psum.new_zeros(1)).tolist() == [
        -(-count // came.expert_alignment) * came.expert_alignment for count in world.counts(rank)
    ]
    return world.layer(rank, rows, came.topk_ids, came.topk_weights), came.topk_weights


@distributed_test(world_size=2 if SOAK == 1 else 3)
def test_dispatcher(ranks: Ranks) -> None:
    rank = ranks.rank
    parallel = SimpleNamespace(
        attn_dp_size=1,
        attn_cp_size=1,
        tp_size=ranks.world_size,
        tp_group=SimpleNamespace(device_group=ranks.group),
    )
    with (
        sglang("2", "deepep_v2") as its,
        mock.patch.object(its, "_get_allow_hybrid_mode", return_value=False),
        mock.patch.object(its, "get_parallel", return_value=parallel),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        for fp8, way in product((False, True), WAYS):
            world = World.of(ranks, hidden=256)
            with its.envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.override(way != "contiguous"):
                dispatcher = its.DeepEPv2Dispatcher(
                    ranks.group,
                    router_topk=world.num_topk,
                    num_experts=world.num_experts,
                    num_local_experts=len(world.experts_of(rank)),
                    hidden_size=world.hidden,
                    params_dtype=torch.bfloat16,
                    use_fp8_dispatch=fp8,
                )
            dispatcher.prebuild()
            is_prefill(way != "masked")
            for tokens in TOKENS:
                world = World.of(ranks, tokens, hidden=256)
                picks = SimpleNamespace(topk_weights=world.weights[rank], topk_ids=world.idx[rank])
                came = dispatcher.dispatch(world.x[rank], picks)
                assert (came.is_expanded, came.use_masked_gemm) == (
                    way != "contiguous",
                    way == "masked",
                )
                back = its.DeepEPv2CombineInput(*run_experts(world, rank, came))
                out, want, where = dispatcher.combine(back), world.layered(rank), (fp8, way, tokens)
                if fp8:  # scales are not powers of two
                    assert torch.allclose(out.float(), want.float(), rtol=2**-4, atol=0.1), where
                else:
                    assert torch.equal(out, want), where
