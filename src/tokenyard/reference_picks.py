"""The oracle's picks: equal ones merged, and what those weigh that a sum lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor


def merge_picks(
    topk_idx: Tensor, topk_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Let the first of a token's equal picks (``[T, K]`` int64 or int32, -1: none) hold them all.

    Returns ``idx [T, K]`` (later equal picks are -1), ``weights [T, K]`` float32 (summed in pick
    order, 0 where ``idx`` is -1) or None, and ``first_pick [T, K]`` int64: the position that now
    holds this pick (its own, if unmerged).
    """
    idx = topk_idx.clone()
    weights = None if topk_weights is None else topk_weights.to(torch.float32, copy=True)
    first_pick = torch.arange(idx.shape[1]).repeat(idx.shape[0], 1)
    for token, experts in enumerate(lists(topk_idx)):
        seen: dict[int, int] = {}
        for position, expert in enumerate(experts):
            first = seen.setdefault(expert, position)
            if expert < 0 or first == position:
                continue
            idx[token, position] = -1
            first_pick[token, position] = first
            if weights is not None:
                weights[token, first] += weights[token, position]
    if weights is not None:
        weights[idx < 0] = 0.0
    return idx, weights, first_pick


def lost_weights(
    topk_idx: Tensor, topk_weights: Tensor | None, rows_of_picks: Sequence[Tensor]
) -> Tensor:
    """What the merged picks of an owner weigh (without weights: 1 each) that no rank has a row for
    (per rank ``[T, K]``, else -1), added in pick order: ``[T]`` float32."""
    idx, weights, _ = merge_picks(topk_idx, topk_weights)
    lacks = idx >= 0
    for rows in rows_of_picks:
        lacks &= rows < 0
    weights = torch.ones(idx.shape) if weights is None else weights
    total = torch.zeros(len(idx))
    for position in range(idx.shape[1]):
        total = total + torch.where(lacks[:, position], weights[:, position], 0.0)
    return total


def lists(matrix: Tensor) -> list[list[int]]:
    """Rows of a matrix as lists."""
    return cast("list[list[int]]", matrix.tolist())  # pyright: ignore[reportUnknownMemberType]


class Pick(NamedTuple):
    """A merged pick. They sort by source rank, then token, then position in the token."""

    source: int
    token: int
    position: int


def picks_per_expert(topk_idx: Sequence[Tensor], num_experts: int) -> list[list[Pick]]:
    """The picks of each global expert, by source rank, then token."""
    picks: list[list[Pick]] = [[] for _ in range(num_experts)]
    for source, idx in enumerate(topk_idx):
        for token, experts in enumerate(lists(idx)):
            for position, expert in enumerate(experts):
                if expert >= 0:
                    picks[expert].append(Pick(source, token, position))
    return picks


def source_ranges(local: list[list[Pick]], num_ranks: int) -> Tensor:
    """``[L, R, 2]`` int32: where a source's rows begin in an expert's block, and how many."""
    counts = torch.zeros(len(local), num_ranks, dtype=torch.int32)
    for expert, picks in enumerate(local):
        for pick in picks:
            counts[expert, pick.source] += 1
    begins = counts.cumsum(1).to(torch.int32) - counts
    return torch.stack([begins, counts], dim=-1)
