"""Calls that tests of ``tokenyard.deep_ep`` share."""

from __future__ import annotations

from typing import Any

from deep_ep_world import World
from tokenyard import deep_ep


def fresh(buffer: deep_ep.Buffer, world: World, **changes: Any) -> tuple[Any, ...]:
    """Layout (or the ``layout`` given) and dispatch of this rank's tokens, with weights."""
    rank = buffer.rank
    idx, layout = changes.pop("topk_idx", world.idx[rank]), changes.pop("layout", None)
    layout = layout or buffer.get_dispatch_layout(idx, world.num_experts)
    per_rank, per_node, per_expert, in_ranks, _ = layout
    arguments = {
        "x": world.x[rank],
        "topk_idx": idx,
        "topk_weights": world.weights[rank],
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_ranks,
        "num_tokens_per_expert": per_expert,
    }
    return buffer.dispatch(**{**arguments, **changes})
