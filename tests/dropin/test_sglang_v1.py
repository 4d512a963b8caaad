"""SGLang 0.5.23's own ``DeepEPDispatcher`` over V1 ``Buffer``: layers of experts equal to one
process's, bit for bit.
"""

from __future__ import annotations

from itertools import product
from threading import Timer
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deep_ep_world import World, from_fp8
from frameworks import needs, own_ranks
from nvlink_pool import SOAK
from sglang_runtime import FRAMEWORK, is_prefill, sglang
from tokenyard.testing import Ranks, distributed_test

pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]

TOKENS = ("even", "uneven", "empty first", "only last")


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_both_modes_of_one_dispatcher(ranks: Ranks) -> None:
    """Prompts and decoding by turns, as a server does with one buffer: ``DeepEPMode.AUTO``."""
    rank = ranks.rank
    with sglang("1", "deepep") as its:
        for fp8, later in product((False, True), (False, True)):
            world = World.of(ranks, hidden=256)
            dispatcher = its.DeepEPDispatcher(
                ranks.group,
                router_topk=world.num_topk,
                num_experts=world.num_experts,
                num_local_experts=len(world.experts_of(rank)),
                hidden_size=world.hidden,
                params_dtype=torch.bfloat16,
                async_finish=later,
                return_recv_hook=later,
            )
            dispatcher.set_quant_config({"dispatcher_output_dtype": "fp8" if fp8 else "bf16"})
            for tokens, prefill in product(TOKENS, (True, False)):
                world = World.of(ranks, tokens, hidden=256)
                is_prefill(prefill)
                picks = SimpleNamespace(topk_weights=world.weights[rank], topk_ids=world.idx[rank])
                came = dispatcher.dispatch(world.x[rank], picks)
                rows = came.hidden_states
                if fp8:
                    rows = from_fp8(rows, came.hidden_states_scale)
                if prefill:
                    aligned = [-(-count // 128) * 128 for count in world.counts(rank)]
                    assert came.num_recv_tokens_per_expert == aligned
                    work = world.layer(rank, rows, came.topk_ids, came.topk_weights)
                    back = its.DeepEPNormalCombineInput(work, came.topk_ids, came.topk_weights)
                else:
                    assert came.masked_m.tolist() == world.counts(rank)
                    work = world.by_expert(rank, rows)
                    for expert, count in enumerate(world.counts(rank)):
                        work[expert, count:] = float("nan")  # nobody may read them
                    back = its.DeepEPLLCombineInput(work, came.topk_ids, came.topk_weights)
                out, want = dispatcher.combine(back), world.layered(rank)
                where = (fp8, later, tokens, prefill)
                if fp8:  # scales are not powers of two
                    assert torch.allclose(out.float(), want.float(), rtol=2**-4, atol=0.1), where
                else:
                    assert torch.equal(out, want), where


@pytest.mark.parametrize("blackwell", [False, True], ids=["hopper", "blackwell"])
@distributed_test(world_size=3)
def test_single_batch_overlap(ranks: Ranks, blackwell: bool) -> None:
    """Combine begins while the experts write, with as many signals as ``compute_overlap_args``
    makes.
    """
    rank, world = ranks.rank, World.of(ranks, hidden=256)
    mine = len(world.experts_of(rank))
    with (
        sglang("1", "deepep") as its,
        mock.patch.object(its, "is_blackwell", return_value=blackwell),
    ):
        dispatcher = its.DeepEPDispatcher(
            ranks.group,
            router_topk=world.num_topk,
            num_experts=world.num_experts,
            num_local_experts=mine,
            hidden_size=world.hidden,
            params_dtype=torch.bfloat16,
            deepep_mode=its.DeepEPMode.LOW_LATENCY,
            return_recv_hook=True,
        )
        dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
        picks = SimpleNamespace(topk_weights=world.weights[rank], topk_ids=world.idx[rank])
        came = dispatcher.dispatch(world.x[rank], picks)
        work = torch.full_like(came.hidden_states, float("nan"))
        blocks = 1 if blackwell else -(-came.hidden_states.shape[1] // 64)
        dtype = torch.uint32 if blackwell else torch.int32
        signal = torch.zeros(mine * blocks, dtype=dtype)

        def write() -> None:
            work.copy_(world.by_expert(rank, came.hidden_states))
            signal.fill_(4)

        stream = mock.MagicMock()  # CPUs have none
        arguments = SimpleNamespace(
            overlap=True, stream=stream, wait_event=None, num_sms=32, signal=signal, threshold=4
        )
        dispatcher.set_overlap_args(arguments, {"block_m": 64, "threshold": 4})
        experts = Timer(0.1, write)
        experts.start()
        back = its.DeepEPLLCombineInput(work, came.topk_ids, came.topk_weights)
        out = dispatcher.combine(back)
        experts.join()
        assert torch.equal(out, world.layered(rank))
