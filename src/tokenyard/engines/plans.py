"""The send plan, from picks to rows that leave this rank, and the receive plan, from rows as they
arrive to rows as the layout wants them: integers only, on the picks' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.routing import (
    Placement,
    block_offsets,
    compact_rows,
    count_keys,
    first_experts,
    merge_picks,
    place_rows,
    return_places,
    send_order,
    send_order_static,
    source_ranges,
    tokens_in_ranks,
)
from tokenyard.rows import take_values
from tokenyard.types import Layout

# What leaves


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


# What arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Routing of arrived rows, by source rank and then token; unused rows have ids and token -1."""

    token: Tensor  # [Nb] int32
    local_idx: Tensor  # [Nb, K] int64
    weights: Tensor | None  # [Nb, K] float32
    source_rank: Tensor  # [Nb] int64


def localise(
    topk_idx: Tensor, weights: Tensor | None, config: Config
) -> tuple[Tensor, Tensor | None]:
    """Global ids (and weights) of arrived rows as this rank counts them: int64, -1 (and 0) where a
    pick is elsewhere.

    Ids become addresses: whatever a peer sent, no other value comes out.
    """
    first, end = config.bounds[config.rank], config.bounds[config.rank + 1]
    here = (topk_idx >= first) & (topk_idx < end)
    idx = torch.where(here, topk_idx - first, -1).long()
    return idx, None if weights is None else torch.where(here, weights, 0.0)


def count_arrivals(arrival: Arrival, config: Config) -> tuple[Tensor, Tensor]:
    """Rows from each rank ``[R]`` and of each (rank, local expert) ``[R, L]``, on the device."""
    size, local = config.world_size, config.num_local_experts
    rows = count_keys(torch.where(arrival.token < 0, -1, arrival.source_rank), size)
    key = arrival.source_rank.unsqueeze(1) * local + arrival.local_idx
    pairs = count_keys(torch.where(arrival.local_idx < 0, -1, key), size * local)
    return rows, pairs.view(size, local)


def num_result_rows(spec: Spec, config: Config, counts: list[int] | None, num_arrived: int) -> int:
    """Rows of the result; exact ``EXPERT_MAJOR`` needs ``counts`` (per local expert)."""
    local, top = config.num_local_experts, config.num_topk
    if spec.layout is Layout.EXPERT_PADDED:
        return local * config.padded_rows
    if spec.layout is Layout.FLAT:
        return num_arrived
    if spec.capacity is not None:
        return spec.capacity
    if spec.exact:
        assert counts is not None
        return sum(-(-count // spec.expert_alignment) * spec.expert_alignment for count in counts)
    return config.padded_rows * min(top, local) + local * (spec.expert_alignment - 1)


def settle(
    arrival: Arrival, spec: Spec, config: Config, rows: Tensor, pairs: Tensor, num_rows: int
) -> tuple[Placement, Arrived]:
    """Place arrived rows and describe the result. For counts see :func:`count_arrivals`."""
    counts, local = pairs.sum(0), config.num_local_experts
    flat, major = spec.layout is Layout.FLAT, spec.layout is Layout.EXPERT_MAJOR

    def none(dtype: torch.dtype = torch.int32) -> Tensor:
        """What a layout lacks. Always a new tensor: results of an operator must not alias."""
        return torch.empty(0, dtype=dtype, device=counts.device)

    def in_order(values: Tensor, fill: float) -> Tensor:
        return take_values(values, place.gather, fill) if spec.placed else values

    offsets, overflow = none(), none()
    if flat and spec.exact:
        place = Placement(none(torch.int64), none(torch.int64), none(torch.int64))
    elif flat:
        place = compact_rows(rows, config.max_tokens_per_rank)
    else:
        if major:
            starts = block_offsets(counts, spec.expert_alignment)
            offsets = starts.clamp(max=num_rows).to(torch.int32)
        else:
            starts = torch.arange(local + 1, device=counts.device) * config.padded_rows
        if spec.capacity is not None:  # rows whose place lies past the end
            kept = (num_rows - starts[:-1]).clamp(min=0)
            overflow = (counts - kept).clamp(min=0).sum().view(1).to(torch.int32)
        place = place_rows(arrival.local_idx, starts, local, num_rows, static=not spec.exact)
    if arrival.weights is None:
        weights = none(torch.float32)
    elif flat:
        weights = in_order(arrival.weights, 0.0)
    else:
        weights = weights_of_rows(arrival.weights, place.slots, place.picks, num_rows)
    source = torch.where(arrival.token < 0, -1, (arrival.source_rank << 32) | arrival.token.long())
    return place, Arrived(
        topk_idx=in_order(arrival.local_idx, -1) if flat else none(),
        weights=weights,
        source=in_order(source, -1),
        tokens_per_expert=counts.to(torch.int32),
        expert_offsets=offsets,
        source_ranges=none() if flat or major else source_ranges(pairs),
        overflow=overflow,
    )


def weights_of_rows(weights: Tensor, slots: Tensor, picks: Tensor, num_rows: int) -> Tensor:
    """``weights [Nb, K]`` by result row: float32 ``[rows]``, 0 on padding. Differentiable."""
    place = torch.where(slots < 0, num_rows, slots).reshape(-1)
    spread = torch.zeros(num_rows + 1, dtype=torch.float32, device=weights.device)
    return spread.scatter(0, place, weights.gather(1, picks).reshape(-1))[:num_rows]


def in_arrival_order(reduce_weights: Tensor, plan: Plan, spec: Spec) -> Tensor:
    """``reduce_weights [N, K]`` of ``FLAT`` rows as ``[Nb, K]`` of arrived rows."""
    if not spec.placed:
        return reduce_weights
    return take_values(reduce_weights, plan.slots[:, 0], 0.0)
