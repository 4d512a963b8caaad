"""From rows as they arrive to rows as the layout wants them: integers only, on the rows' device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.routing import (
    Placement,
    block_offsets,
    compact_rows,
    count_keys,
    place_rows,
    source_ranges,
)
from tokenyard.rows import take_values
from tokenyard.types import Layout


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
    counts = pairs.sum(0)
    flat = spec.layout is Layout.FLAT
    starts = _none(rows, torch.int64) if flat else _starts(counts, spec, config)
    place = _place(arrival, spec, config, rows, starts, num_rows)
    source = torch.where(arrival.token < 0, -1, (arrival.source_rank << 32) | arrival.token.long())
    major, none = spec.layout is Layout.EXPERT_MAJOR, partial(_none, rows, torch.int32)
    return place, Arrived(
        topk_idx=_arrange(arrival.local_idx, place, spec, -1) if flat else none(),
        weights=_weights(arrival, place, spec, num_rows),
        source=_arrange(source, place, spec, -1),
        tokens_per_expert=counts.to(torch.int32),
        expert_offsets=starts.clamp(max=num_rows).to(torch.int32) if major else none(),
        source_ranges=none() if flat or major else source_ranges(pairs),
        overflow=none() if spec.capacity is None else _overflow(counts, starts, num_rows),
    )


def _starts(counts: Tensor, spec: Spec, config: Config) -> Tensor:
    if spec.layout is Layout.EXPERT_PADDED:
        return torch.arange(config.num_local_experts + 1, device=counts.device) * config.padded_rows
    return block_offsets(counts, spec.expert_alignment)


def _place(
    arrival: Arrival, spec: Spec, config: Config, rows: Tensor, starts: Tensor, num_rows: int
) -> Placement:
    if spec.layout is not Layout.FLAT:
        return place_rows(
            arrival.local_idx, starts, config.num_local_experts, num_rows, static=not spec.exact
        )
    if not spec.exact:
        return compact_rows(rows, config.max_tokens_per_rank)
    return Placement(*(_none(rows, torch.int64) for _ in range(3)))


def _none(like: Tensor, dtype: torch.dtype) -> Tensor:
    """What a layout lacks. Always a new tensor: results of an operator must not alias."""
    return torch.empty(0, dtype=dtype, device=like.device)


def _overflow(counts: Tensor, starts: Tensor, num_rows: int) -> Tensor:
    """Rows whose place lies past the end."""
    kept = (num_rows - starts[:-1]).clamp(min=0)
    return (counts - kept).clamp(min=0).sum().view(1).to(torch.int32)


def _arrange(values: Tensor, place: Placement, spec: Spec, fill: float) -> Tensor:
    return take_values(values, place.gather, fill) if spec.placed else values


def _weights(arrival: Arrival, place: Placement, spec: Spec, num_rows: int) -> Tensor:
    if arrival.weights is None:
        return _none(arrival.token, torch.float32)
    if spec.layout is Layout.FLAT:
        return _arrange(arrival.weights, place, spec, 0.0)
    return weights_of_rows(arrival.weights, place.slots, place.picks, num_rows)


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
