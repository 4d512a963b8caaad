"""From picks to rows that leave this rank: integers only, on the picks' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.handle import Spec
from tokenyard.routing import (
    count_keys,
    first_experts,
    merge_picks,
    return_places,
    send_order,
    send_order_static,
    tokens_in_ranks,
)
from tokenyard.rows import take_values


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Rows that leave this rank, by destination (a rank or a node, D of them), then token."""

    token: Tensor  # [S], -1 on unused places
    hits: Tensor  # [T, D] bool, which destinations each token goes to
    leaving: Tensor  # [D] rows to each destination
    counts: Tensor  # [R] rows to each rank in the end
    topk_idx: Tensor  # [T, K] merged
    weights: Tensor | None  # [T, K] merged
    first_pick: Tensor  # [T, K]


def plan_send(
    topk_idx: Tensor, weights: Tensor | None, spec: Spec, config: Config, ranks_each: int = 1
) -> SendPlan:
    """Plan what leaves to destinations of ``ranks_each`` ranks. Ids out of range count as -1."""
    inside = torch.where((topk_idx < 0) | (topk_idx >= config.num_experts), -1, topk_idx)
    merged = merge_picks(inside, weights, static=not spec.exact)
    in_ranks = tokens_in_ranks(merged.topk_idx, config.num_experts, config.world_size)
    hits = in_ranks.view(in_ranks.shape[0], config.world_size // ranks_each, ranks_each).any(2)
    token = send_order(hits) if spec.exact else send_order_static(hits, config.max_tokens_per_rank)
    counts = hits.sum(0), in_ranks.sum(0)
    return SendPlan(token, hits, *counts, merged.topk_idx, merged.topk_weights, merged.first_pick)


def ways_back(send_plan: SendPlan, spec: Spec, config: Config) -> Tensor:
    """Where each token's rows will come back: ``Plan.returns``."""
    stride = None if spec.exact else config.max_tokens_per_rank
    return return_places(send_plan.hits, stride, min(config.num_topk, send_plan.hits.shape[1]))


def counts_by_rank(topk_idx: Tensor, config: Config) -> Tensor:
    """How often each rank's experts are picked here: ``[R, most local experts]``, 0 for none."""
    experts, size = config.num_experts, config.world_size
    ranks = torch.arange(size, device=topk_idx.device)
    expert = first_experts(ranks, experts, size).unsqueeze(1)
    expert = expert + torch.arange(config.most_local_experts, device=topk_idx.device)
    held = expert < first_experts(ranks + 1, experts, size).unsqueeze(1)
    return take_values(count_keys(topk_idx, experts), torch.where(held, expert, -1), 0)


def note_bad_index(seen: Tensor, topk_idx: Tensor, num_experts: int) -> None:
    """Keep in ``seen [2]`` place and value of the first id out of range; asks no host."""
    if topk_idx.numel() == 0:
        return
    flat = topk_idx.reshape(-1)
    bad = (flat < -1) | (flat >= num_experts)
    at = bad.to(torch.uint8).argmax().view(1)
    found = torch.cat([at, flat.gather(0, at).long()])
    seen.copy_(torch.where(bad.any() & (seen[:1] < 0), found, seen))
