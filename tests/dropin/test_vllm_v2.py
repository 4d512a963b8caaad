"""vLLM 0.33.0's own ``DeepEPV2PrepareAndFinalize`` and its manager, over V2 ``ElasticBuffer``:
layers of experts equal to one process's, bit for bit.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from unittest import mock

import torch

from deep_ep_world import World
from frameworks import needs, own_ranks
from tokenyard.testing import Ranks, distributed_test
from vllm_runtime import FRAMEWORK, MOST, TOKENS, later_or_now, restored, settings, vllm

pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]


@distributed_test(world_size=3)
def test_prefill_and_decoding(ranks: Ranks) -> None:
    """Expanded with exact counts, and static rows with the tail masked by vLLM's kernel
    (interpreted); every way to quantize.
    """
    rank = ranks.rank
    cases = product(("", "fp8", "mxfp8"), (False, True), (False, True), TOKENS)
    with vllm(ranks, "2", "deepep_v2") as its:
        manager = its.all2all.DeepEPV2All2AllManager(ranks.group)
        manager._gin_checked = True  # it asks a communicator on a GPU
        for cast, decoding, later, tokens in cases:
            world = World.of(ranks, tokens, dropped=0.0, hidden=256)
            mine = world.experts_of(rank)
            sizes = {"hidden": world.hidden, "num_topk": world.num_topk}
            more = {"num_max_tokens_per_rank": MOST, "use_fp8_dispatch": bool(cast)}
            buffer = manager.get_handle({**sizes, **more, "num_experts": world.num_experts})
            assert manager.max_sms_used() > 0
            both = its.deepep_v2.DeepEPV2PrepareAndFinalize(
                buffer,
                ranks.world_size,
                ranks.world_size,
                mine.start,
                world.num_experts,
                world.num_topk,
                bool(cast),
                decoding,
            )
            counts = torch.tensor([len(idx) for idx in world.idx])
            across = SimpleNamespace(num_tokens_across_dp_cpu=counts)
            context = SimpleNamespace(dp_metadata=across)
            with mock.patch.object(its.deepep_v2, "get_forward_context", return_value=context):
                rows, scales, meta, ids, weights = later_or_now(
                    both.prepare,
                    later,
                    *(world.x[rank], world.weights[rank], world.idx[rank], world.num_experts),
                    *(None, False, settings(its, cast)),
                )
            if not decoding:
                assert meta.expert_num_tokens_cpu.tolist() == world.counts(rank)
            rows = restored(rows, scales, cast)
            local = (ids >= mine.start) & (ids < mine.stop)
            factors = torch.where(local, ids % 3 + 1, 0)
            work = rows[:, None, :] * factors[:, :, None].to(rows.dtype)
            work[(ids < 0).all(1)] = float("nan")  # nobody may read them
            output = torch.full_like(world.x[rank], float("nan"))
            reduction = its.weighting.TopKWeightAndReduceDelegate()
            later_or_now(both.finalize, later, output, work, weights, ids, False, reduction)
            want, where = world.layered(rank), (cast, decoding, later, tokens)
            if cast == "fp8":  # scales are not powers of two
                assert torch.allclose(output.float(), want.float(), rtol=2**-4, atol=0.1), where
            else:
                assert torch.equal(output, want), where
        manager.destroy()
