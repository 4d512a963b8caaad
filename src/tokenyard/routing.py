"""The plan: who sends which row where. Integers on any device; no communication, no payload.

``docs/reference/semantics.md`` defines the terms. Functions marked *static* never ask the host for
a value, so that a CUDA graph can hold them; the others may (``nonzero``). All index tensors are
int64 unless said otherwise, and "no row" is -1.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor


def host_ints(values: Tensor) -> list[int]:
    """A vector of integers as the host has them; waits for the device."""
    return cast("list[int]", values.tolist())


def expert_share(num_experts: int, num_ranks: int) -> tuple[int, int]:
    """Experts of each rank, and how many ranks have one more. (No divmod: ``torch.compile`` may
    take them for symbols.)"""
    return num_experts // num_ranks, num_experts % num_ranks


def expert_bounds(num_experts: int, num_ranks: int) -> list[int]:
    """First expert of each rank, and the end: ``[R + 1]``.

    >>> expert_bounds(5, 3)
    [0, 2, 4, 5]
    """
    share, extra = expert_share(num_experts, num_ranks)
    return [rank * share + min(rank, extra) for rank in range(num_ranks + 1)]


def first_experts(ranks: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """:func:`expert_bounds` at ``ranks`` (0 .. R), on their device. Static.

    >>> first_experts(torch.tensor([3, 1]), 5, 3)
    tensor([5, 2])
    """
    share, extra = expert_share(num_experts, num_ranks)
    return ranks * share + ranks.clamp(max=extra)


def pick_owners(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Rank that holds each picked expert, -1 where the pick is -1: ``[T, K]``. Static.

    >>> pick_owners(torch.tensor([[0, 4], [-1, 2]]), 5, 3)
    tensor([[ 0,  2],
            [-1,  1]])
    """
    share, extra = expert_share(num_experts, num_ranks)
    if not extra:
        return torch.where(topk_idx < 0, -1, topk_idx.div(share, rounding_mode="floor"))
    larger = (share + 1) * extra
    beyond = (topk_idx - larger).div(max(share, 1), rounding_mode="floor") + extra
    owner = torch.where(topk_idx < larger, topk_idx.div(share + 1, rounding_mode="floor"), beyond)
    return torch.where(topk_idx < 0, -1, owner)


def power_of_two_at_least(value: int) -> int:
    """The smallest power of two that is at least ``value``, and at least 1.

    >>> [power_of_two_at_least(n) for n in (0, 1, 5, 8)]
    [1, 1, 8, 8]
    """
    return 1 << max(value - 1, 0).bit_length()


class Merged(NamedTuple):
    """Picks after duplicates within a token were merged."""

    topk_idx: Tensor  # [T, K] int64, later duplicates are -1
    topk_weights: Tensor | None  # [T, K] float32, later duplicates are 0
    first_pick: Tensor  # [T, K] the pick that now holds pick k; k itself if it was not merged


def merge_picks(topk_idx: Tensor, topk_weights: Tensor | None, *, static: bool = False) -> Merged:
    """Let the first pick of an expert in a token stand for all of them; weights add in pick order.
    Static if asked; else the host looks whether there is anything to merge, as usually is not.

    >>> merge_picks(torch.tensor([[7, 3, 7]]), torch.tensor([[0.5, 0.25, 1.0]]))[:2]
    (tensor([[ 7,  3, -1]]), tensor([[1.5000, 0.2500, 0.0000]]))
    """
    idx, num_picks = topk_idx.long(), topk_idx.shape[1]
    place = torch.arange(num_picks, device=idx.device).expand_as(idx)
    if not static and not _repeats(idx):
        weights = None if topk_weights is None else torch.where(idx < 0, 0.0, topk_weights)
        return Merged(idx.clone(), weights, place.clone())
    same = (idx.unsqueeze(2) == idx.unsqueeze(1)).to(torch.uint8)
    first = torch.where(idx < 0, place, same.argmax(dim=2))
    merged = torch.where(first == place, idx, -1)
    if topk_weights is None:
        return Merged(merged, None, first)
    return Merged(merged, torch.where(merged < 0, 0.0, merge_weights(topk_weights, first)), first)


def _repeats(idx: Tensor) -> bool:
    """Whether any row of ``idx [T, K]`` has an expert twice."""
    ordered = idx.sort(dim=1).values
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def merge_weights(topk_weights: Tensor, first_pick: Tensor) -> Tensor:
    """Add the weight of each merged pick to that of the pick it was merged into, in pick order.
    Static, differentiable.

    >>> merge_weights(torch.tensor([[0.5, 0.25, 1.0]]), torch.tensor([[0, 1, 0]]))
    tensor([[1.5000, 0.2500, 0.0000]])
    """
    place = torch.arange(topk_weights.shape[1], device=topk_weights.device)
    merged = torch.where(first_pick == place, topk_weights, 0.0)
    for k in range(1, topk_weights.shape[1]):
        into = (place == first_pick[:, k : k + 1]) & (first_pick[:, k : k + 1] != k)
        merged = torch.where(into, merged + topk_weights[:, k : k + 1], merged)
    return merged


def tokens_in_ranks(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Which ranks each token goes to: bool ``[T, R]``. Static.

    >>> tokens_in_ranks(torch.tensor([[0, 4], [-1, 2]]), 5, 3).int().tolist()
    [[1, 0, 1], [0, 1, 0]]
    """
    owner = pick_owners(topk_idx, num_experts, num_ranks)
    hit = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    hit.scatter_(1, torch.where(owner < 0, num_ranks, owner), True)
    return hit[:, :num_ranks]


def count_keys(keys: Tensor, num_keys: int) -> Tensor:
    """How often each of ``0 .. num_keys - 1`` occurs; other values are ignored: ``[num_keys]``.
    Static.

    >>> count_keys(torch.tensor([2, 0, -1, 2, 3, 9, -7]), 3)
    tensor([1, 0, 2])
    """
    flat = keys.reshape(-1)
    inside = (flat >= 0) & (flat < num_keys)
    bins = torch.zeros(num_keys + 1, dtype=torch.int64, device=keys.device)
    bins.scatter_add_(0, torch.where(inside, flat, num_keys).long(), inside.long())
    return bins[:num_keys]


def send_order(in_ranks: Tensor) -> Tensor:
    """Tokens of the rows to send, by destination and then token: ``[S]``.

    >>> send_order(torch.tensor([[True, True], [False, True]]))
    tensor([0, 0, 1])
    """
    return in_ranks.t().nonzero()[:, 1].clone()


def send_order_static(in_ranks: Tensor, max_tokens: int) -> Tensor:
    """The same with ``max_tokens`` places per destination, unused ones holding token -1: ``[R *
    M]``. Static.

    >>> send_order_static(torch.tensor([[True, True], [False, True]]), 3)
    tensor([ 0, -1, -1,  0,  1, -1])
    """
    num_tokens, num_ranks = in_ranks.shape
    places = num_ranks * max_tokens
    place = return_places(in_ranks, max_tokens, num_ranks)
    token = torch.arange(num_tokens, device=in_ranks.device).unsqueeze(1).expand_as(place)
    order = torch.full((places + 1,), -1, dtype=torch.int64, device=in_ranks.device)
    order.scatter_(0, torch.where(place < 0, places, place).reshape(-1), token.reshape(-1))
    return order[:places]


def return_places(in_ranks: Tensor, stride: int | None, width: int) -> Tensor:
    """Places in send order of each token's rows, by rank, -1 for none: ``[T, width]``. Static.

    Blocks of destinations follow each other, or begin ``stride`` rows apart. No token goes to more
    than ``width`` ranks.

    >>> return_places(torch.tensor([[True, True], [False, True]]), None, 2)
    tensor([[ 0,  1],
            [-1,  2]])
    >>> return_places(torch.tensor([[True, True], [False, True]]), 3, 2)
    tensor([[ 0,  3],
            [-1,  4]])
    """
    counts = in_ranks.sum(0)
    ranks = torch.arange(in_ranks.shape[1], device=in_ranks.device)
    starts = counts.cumsum(0) - counts if stride is None else ranks * stride
    place = torch.where(in_ranks, in_ranks.cumsum(0) - 1 + starts, -1)
    if width == in_ranks.shape[1]:
        return place
    order = torch.sort((place < 0).to(torch.uint8), dim=1, stable=True).indices
    return place.gather(1, order[:, :width])


def block_offsets(counts: Tensor, alignment: int) -> Tensor:
    """Where each expert's block starts when blocks are padded to ``alignment``, and the end: ``[L +
    1]``. Static.

    >>> block_offsets(torch.tensor([3, 0, 5]), 4)
    tensor([ 0,  4,  4, 12])
    """
    aligned = (counts + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    return torch.nn.functional.pad(aligned.long().cumsum(0), (1, 0))


class Placement(NamedTuple):
    """Where arrived rows stand in the result, and back."""

    slots: Tensor  # [Nb, J] result rows of an arrived row, in pick order, then -1; J = min(K, L)
    picks: Tensor  # [Nb, J] the pick behind each slot (0 where there is none)
    gather: Tensor  # [rows] the arrived row behind each result row; -1 on padding


def place_rows(
    local_idx: Tensor, starts: Tensor, num_local: int, num_rows: int, *, static: bool
) -> Placement:
    """Place one result row per (arrived row, local expert) in expert blocks that begin at ``starts
    [L + 1]``.

    Inside a block the order is that of arrival. Places ``>= num_rows`` are dropped.

    Args:
        local_idx: ``[Nb, K]`` local expert ids or -1, no expert twice in one row.
        static: use shapes that do not depend on the ids.

    >>> ids, offsets = torch.tensor([[1, 0], [-1, 1]]), torch.tensor([0, 2, 4])
    >>> place_rows(ids, offsets, 2, 4, static=False).gather
    tensor([ 0, -1,  0,  1])
    """
    arrived, num_picks = local_idx.shape
    flat = torch.where(local_idx < 0, num_local, local_idx).reshape(-1).long()
    every = torch.arange(flat.numel(), device=flat.device)
    pairs = every if static else (flat < num_local).nonzero().squeeze(1)
    ordered, order = torch.sort(flat[pairs], stable=True)
    pairs = pairs[order]
    first = torch.nn.functional.pad(count_keys(flat, num_local).cumsum(0), (1, 0))
    place = starts[ordered] + every[: pairs.numel()] - first[ordered]
    place = torch.where((ordered < num_local) & (place < num_rows), place, num_rows)
    gather = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=flat.device)
    gather.scatter_(0, place, pairs.div(max(num_picks, 1), rounding_mode="floor"))
    slots = torch.full_like(flat, -1)
    slots.scatter_(0, pairs, torch.where(place < num_rows, place, -1))
    slots = slots.view(arrived, num_picks)
    absent, picks = torch.sort((slots < 0).to(torch.uint8), dim=1, stable=True)
    width = min(num_picks, num_local)
    slots, absent, picks = slots.gather(1, picks)[:, :width], absent[:, :width], picks[:, :width]
    return Placement(slots.contiguous(), picks.masked_fill(absent > 0, 0), gather[:num_rows])


def compact_rows(counts: Tensor, stride: int) -> Placement:
    """Bring blocks of ``stride`` arrived rows, ``counts [R]`` of them valid, to the front of ``R *
    stride`` rows. Static.

    >>> compact_rows(torch.tensor([1, 2]), 2).gather
    tensor([ 0,  2,  3, -1])
    """
    num_rows = counts.numel() * stride
    row = torch.arange(num_rows, device=counts.device)
    end = counts.long().cumsum(0)
    begin = end - counts
    block = row.div(max(stride, 1), rounding_mode="floor")
    inside = row - block * stride
    slots = torch.where(inside < counts[block], begin[block] + inside, -1)
    source = torch.searchsorted(end, row, right=True).clamp(max=counts.numel() - 1)
    gather = torch.where(row < end[-1:], source * stride + row - begin[source], -1)
    return Placement(slots.unsqueeze(1), torch.zeros_like(slots).unsqueeze(1), gather)


def source_ranges(counts: Tensor) -> Tensor:
    """(begin, count) of every source inside each expert's block, from ``counts [R, L]``: int32
    ``[L, R, 2]``. Static.

    >>> source_ranges(torch.tensor([[2, 0], [1, 3]])).tolist()
    [[[0, 2], [2, 1]], [[0, 0], [0, 3]]]
    """
    begin = counts.cumsum(0) - counts
    return torch.stack([begin.t(), counts.t()], dim=-1).to(torch.int32)
