"""DeepEP's calls inside of functions that ``torch.compile`` sees: the results of eager calls, with
breaks of the graph or, for V1, in one graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenyard.deep_ep.buffer import Buffer
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.testing import Ranks, distributed_test

TOKENS, HIDDEN, TOP, EXPERTS = 6, 128, 2, 8
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def check(layer: Layer, ranks: Ranks, *, fullgraph: bool) -> None:
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(TOKENS + ranks.rank, HIDDEN, generator=random).bfloat16().to(ranks.device)
    idx = torch.randint(EXPERTS, (len(x), TOP), generator=random).to(ranks.device)
    given = x, idx, torch.rand(idx.shape, generator=random).to(ranks.device)
    want, compiled = layer(*given), torch.compile(layer, backend="eager", fullgraph=fullgraph)
    for _ in range(2):  # the second time guards are asked
        assert torch.equal(compiled(*given), want)


@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
@distributed_test(world_size=2)
def test_v1(ranks: Ranks, fullgraph: bool) -> None:
    """Its handle goes from one graph to the next."""
    buffer = Buffer(ranks.group)

    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        rows, *_, handle, _ = buffer.dispatch(
            2 * x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_ranks,
            num_tokens_per_expert=per_expert,
        )
        return 3 * buffer.combine(rows + 1, handle)[0]

    check(layer, ranks, fullgraph=fullgraph)
    buffer.destroy()


@distributed_test(world_size=2)
def test_v2(ranks: Ranks) -> None:
    sizes = {"num_max_tokens_per_rank": 2 * TOKENS, "hidden": HIDDEN, "num_topk": TOP}
    buffer = ElasticBuffer(ranks.group, **sizes)

    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        moved = buffer.dispatch(2 * x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS)
        return 3 * buffer.combine(moved[0] + 1, moved[3])[0]

    check(layer, ranks, fullgraph=False)
    buffer.destroy()


@distributed_test(world_size=2)
def test_low_latency(ranks: Ranks) -> None:
    buffer = Buffer(ranks.group, low_latency_mode=True)

    def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        rows, _, handle, *_ = buffer.low_latency_dispatch(
            2 * x, idx, 2 * TOKENS, EXPERTS, use_fp8=False
        )
        return 3 * buffer.low_latency_combine(2 * rows, idx, weights, handle)[0]

    check(layer, ranks, fullgraph=False)
    buffer.destroy()
