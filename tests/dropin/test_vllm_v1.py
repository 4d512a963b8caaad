"""vLLM 0.33.0's own prepare/finalize classes and managers, over V1 ``Buffer``: layers of experts
equal to one process's, bit for bit.
"""

from __future__ import annotations

from itertools import product
from unittest import mock

import torch

from deep_ep_world import World
from frameworks import needs, own_ranks
from tokenyard.testing import Ranks, distributed_test
from vllm_runtime import FRAMEWORK, MOST, TOKENS, later_or_now, restored, settings, vllm

pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]


@distributed_test(world_size=3)
def test_high_throughput(ranks: Ranks) -> None:
    rank = ranks.rank
    with vllm(ranks, "1", "deepep_ht") as its:
        manager = its.all2all.DeepEPHTAll2AllManager(ranks.group)
        manager.set_num_sms(24)
        for tokens, later, cast in product(TOKENS, (False, True), ("", "fp8")):
            world = World.of(ranks, tokens, dropped=0.0, hidden=256)
            mine = world.experts_of(rank)
            buffer = manager.get_handle({})
            assert manager.get_handle({}) is buffer
            both = its.deepep_ht.DeepEPHTPrepareAndFinalize(
                buffer, ranks.world_size, ranks.world_size, mine.start
            )
            rows, scales, meta, ids, weights = later_or_now(
                both.prepare,
                later,
                *(world.x[rank], world.weights[rank], world.idx[rank], world.num_experts),
                *(None, False, settings(its, cast)),
            )
            assert meta.expert_num_tokens_cpu.tolist() == world.counts(rank)
            rows = restored(rows, scales, cast)
            local = (ids >= mine.start) & (ids < mine.stop)
            factors = torch.where(local, ids % 3 + 1, 0)
            work = rows[:, None, :] * factors[:, :, None].to(rows.dtype)
            output = torch.full_like(world.x[rank], float("nan"))
            arguments = (
                output,
                work,
                weights,
                ids,
                False,
                its.weighting.TopKWeightAndReduceDelegate(),
            )
            later_or_now(both.finalize, later, *arguments)
            want, where = world.layered(rank), (tokens, later, cast)
            if cast:  # scales are not powers of two
                assert torch.allclose(output.float(), want.float(), rtol=2**-4, atol=0.1), where
            else:
                assert torch.equal(output, want), where
            del both
        manager.destroy()


@distributed_test(world_size=3)
def test_low_latency(ranks: Ranks) -> None:
    rank = ranks.rank
    with vllm(ranks, "1", "deepep_ll") as its:
        manager = its.all2all.DeepEPLLAll2AllManager(ranks.group)
        for tokens, later, cast in product(TOKENS, (False, True), ("", "fp8")):
            world = World.of(ranks, tokens, dropped=0.0, hidden=2048)
            mine = world.experts_of(rank)
            buffer = manager.get_handle(
                {
                    "max_num_tokens_per_dp_rank": MOST,
                    "token_hidden_size": world.hidden,
                    "num_ep_ranks": ranks.world_size,
                    "num_global_experts": world.num_experts,
                    "num_local_experts": len(mine),
                }
            )
            both = its.deepep_ll.DeepEPLLPrepareAndFinalize(
                buffer, MOST, ranks.world_size, bool(cast)
            )
            both.post_init_setup(
                mock.MagicMock(supports_packed_ue8m0_act_scales=lambda cast=cast: cast)
            )
            rows, scales, meta, _, _ = later_or_now(
                both.prepare,
                later,
                *(world.x[rank], world.weights[rank], world.idx[rank], world.num_experts),
                *(None, False, settings(its, cast)),
            )
            counts = meta.expert_num_tokens
            assert counts.tolist() == world.counts(rank)
            rows = restored(rows, scales, cast)
            work = world.by_expert(rank, rows)
            for expert, count in enumerate(counts.tolist()):
                work[expert, count:] = float("nan")  # nobody may read them
            output = torch.full_like(world.x[rank], float("nan"))
            arguments = (
                output,
                work,
                world.weights[rank],
                world.idx[rank],
                False,
                its.weighting.TopKWeightAndReduceDelegate(),
            )
            later_or_now(both.finalize, later, *arguments)
            assert torch.equal(output, world.layered(rank)), (tokens, later, cast)
            status = torch.ones(ranks.world_size, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert not status.any()
            manager.clean_buffers()
        manager.destroy()
