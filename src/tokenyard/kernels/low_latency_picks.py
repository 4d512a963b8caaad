# pyright: basic
"""Picks of this rank's tokens: merge equal ones, count earlier tokens that have them, count tokens
per expert.

Ids out of range count as -1. Nothing here is published or waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import via_of
from tokenyard.kernels.region import owner_of


@triton.jit
def picks_at(topk_idx, wide: tl.constexpr):
    """``topk_idx`` as a pointer: to int64 if ``wide``, else to int32."""
    return topk_idx.to(tl.pointer_type(tl.int64 if wide else tl.int32))


@triton.jit
def merged(ids, bins: tl.constexpr):
    """Picks ``ids [bins]`` of a token with repeated ones as -1; and for each the pick that it was
    merged into."""
    k = tl.arange(0, bins)
    first = tl.min(tl.where(ids[:, None] == ids[None, :], k[None, :], bins), axis=1)
    first = tl.where(ids < 0, k, first)
    return tl.where(first == k, ids, -1), first


@triton.jit
def merged_weights(topk_weights, t, merged, first, sizes: tl.constexpr):
    """Weights ``[topk_bins]`` of token ``t``'s merged picks, added in pick order."""
    k = tl.arange(0, sizes.topk_bins)
    row = topk_weights.to(tl.pointer_type(tl.float32)) + t.to(tl.int64) * sizes.topk
    total = tl.where(merged < 0, 0.0, tl.load(row + k, mask=k < sizes.topk, other=0.0))
    if tl.max(((first != k) & (k < sizes.topk)).to(tl.int32)) > 0:
        for j in range(1, sizes.topk):
            here = j + 0
            into = tl.sum(tl.where(k == here, first, 0))
            total += tl.where((k == into) & (into != here), tl.load(row + here), 0.0)
    return total


@triton.jit
def columns_of(topk_idx, start, end, block: tl.constexpr, topk: tl.constexpr, wide: tl.constexpr):
    """Picks of the tokens from ``start`` on before ``end``: ``topk`` tensors ``[block]``. The loads
    are under way; none is waited for."""
    t = start + tl.arange(0, block)
    row = picks_at(topk_idx, wide) + t.to(tl.int64) * topk
    columns = ()
    for j in tl.static_range(topk):
        column = tl.load(row + j, mask=t < end, other=-1)
        columns = columns + (column,)  # noqa: RUF005 (kernels cannot unpack)
    return columns


@triton.jit
def _tokens_with(
    columns, wanted, me, block: tl.constexpr, BY_RANK: tl.constexpr, sizes: tl.constexpr
):
    """Which of those tokens picked each of ``wanted [topk_bins]``, experts or (BY_RANK) ranks to
    which rows go: int32 ``[block, topk_bins]``.

    Nothing is reduced: that would cost as much as many comparisons.
    """
    same = tl.zeros((block, sizes.topk_bins), tl.int1)
    for j in tl.static_range(sizes.topk):
        outside = (columns[j] < 0) | (columns[j] >= sizes.experts)
        theirs = tl.where(outside, -1, columns[j]).to(tl.int32)
        if BY_RANK:
            theirs = via_of(owner_of(theirs, sizes.experts, sizes.ranks), me, sizes)
        same = same | (theirs[:, None] == wanted[None, :])
    return same.to(tl.int32)


@triton.jit
def tokens_before(
    topk_idx, columns, wanted, t, me, block: tl.constexpr, wide: tl.constexpr,
    BY_RANK: tl.constexpr, sizes: tl.constexpr,
):  # fmt: skip
    """How many tokens of rank ``me`` before ``t`` picked each of ``wanted [topk_bins]``, experts or
    (BY_RANK) ranks to which rows go. ``columns``: picks of the first ``block`` of them."""
    before = _tokens_with(columns, wanted, me, block, BY_RANK, sizes)
    for t0 in range(block, t, block):
        others = columns_of(topk_idx, t0, t, block, sizes.topk, wide)
        before += _tokens_with(others, wanted, me, block, BY_RANK, sizes)
    return tl.sum(before, axis=0)


@triton.jit
def tokens_between(columns, first, end, block: tl.constexpr, sizes: tl.constexpr):
    """How many tokens picked an expert of ``first`` .. ``end - 1``."""
    goes = tl.zeros((block,), tl.int1)
    for j in tl.static_range(sizes.topk):
        goes = goes | ((columns[j] >= first) & (columns[j] < end))
    return tl.sum(goes.to(tl.int32))


@triton.jit
def _all_of(tensors, number: tl.constexpr):
    """``number`` tensors, a power of two, as one, in any order."""
    if number == 1:
        return tl.ravel(tensors[0])
    else:
        pairs = ()
        for i in tl.static_range(number // 2):
            pairs = pairs + (tl.join(tensors[2 * i], tensors[2 * i + 1]),)  # noqa: RUF005
        return _all_of(pairs, number // 2)


@triton.jit
def tokens_per_expert(
    columns, first, end, block: tl.constexpr, bins: tl.constexpr, sizes: tl.constexpr
):
    """Tokens for each expert of ``first`` .. ``end - 1``, ``[bins]``; and whether each token has
    one of them, ``[block]``."""
    goes, bins_of = tl.zeros((block,), tl.int1), ()
    for j in tl.static_range(sizes.topk_bins):
        if j < sizes.topk:
            there = (columns[j] >= first) & (columns[j] < end)
            goes = goes | there
            for i in tl.static_range(j):  # an expert that is picked again counts once
                there = there & (columns[i] != columns[j])
            chosen = tl.where(there, columns[j] - first, bins).to(tl.int32)
        else:
            chosen = tl.full((block,), bins, tl.int32)
        bins_of = bins_of + (chosen,)  # noqa: RUF005
    flat = _all_of(bins_of, sizes.topk_bins)
    return tl.histogram(flat, bins, mask=flat < bins), goes
