# pyright: basic
"""Picks of this rank's tokens in a low-latency call: equal ones merged, how many earlier tokens have them, how many there are by expert.

Bad ids count as -1. Nothing here is published or waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def picks_at(topk_idx, WIDE: tl.constexpr):
    """``topk_idx`` as a pointer."""
    return topk_idx.to(tl.pointer_type(tl.int64 if WIDE else tl.int32))


@triton.jit
def merged(ids, KP: tl.constexpr):
    """Picks ``ids [KP]`` of a token, those again of an earlier one as -1; and the pick that each was merged into."""
    k = tl.arange(0, KP)
    first = tl.min(tl.where(ids[:, None] == ids[None, :], k[None, :], KP), axis=1)
    first = tl.where(ids < 0, k, first)
    return tl.where(first == k, ids, -1), first


@triton.jit
def merged_weights(topk_weights, t, merged, first, K: tl.constexpr, KP: tl.constexpr):
    """Weights ``[KP]`` of one token's merged picks, added in pick order."""
    k = tl.arange(0, KP)
    row = topk_weights.to(tl.pointer_type(tl.float32)) + t.to(tl.int64) * K
    total = tl.where(merged < 0, 0.0, tl.load(row + k, mask=k < K, other=0.0))
    if tl.max(((first != k) & (k < K)).to(tl.int32)) > 0:
        for j in range(1, K):
            here = j + 0
            into = tl.sum(tl.where(k == here, first, 0))
            total += tl.where((k == into) & (into != here), tl.load(row + here), 0.0)
    return total


@triton.jit
def columns_of(topk_idx, start, end, K: tl.constexpr, TB: tl.constexpr, WIDE: tl.constexpr):
    """Picks of the tokens from ``start`` on before ``end``: K tensors ``[TB]``, none of which is waited for."""
    t = start + tl.arange(0, TB)
    row = picks_at(topk_idx, WIDE) + t.to(tl.int64) * K
    columns = ()
    for j in tl.static_range(K):
        columns = columns + (tl.load(row + j, mask=t < end, other=-1),)  # noqa: RUF005 (kernels cannot unpack)
    return columns


@triton.jit
def tokens_with(columns, ids, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TB: tl.constexpr):
    """Which of those tokens picked each of ``ids [KP]``: int32 ``[TB, KP]``. Nothing is reduced, as that would cost as much as many
    comparisons."""
    same = tl.zeros((TB, KP), tl.int1)
    for j in tl.static_range(K):
        theirs = tl.where((columns[j] < 0) | (columns[j] >= E), -1, columns[j]).to(tl.int32)
        same = same | (theirs[:, None] == ids[None, :])
    return same.to(tl.int32)


@triton.jit
def _all_of(tensors, N: tl.constexpr):
    """N tensors, a power of two, as one, in any order."""
    if N == 1:
        return tl.ravel(tensors[0])
    else:
        pairs = ()
        for i in tl.static_range(N // 2):
            pairs = pairs + (tl.join(tensors[2 * i], tensors[2 * i + 1]),)  # noqa: RUF005 (kernels cannot unpack)
        return _all_of(pairs, N // 2)


@triton.jit
def count(columns, first, end, K: tl.constexpr, KP: tl.constexpr, HB: tl.constexpr, TB: tl.constexpr):
    """Tokens for each expert of ``first`` .. ``end``, ``[HB]``, and whether each token has one of them, ``[TB]``."""
    goes, bins = tl.zeros((TB,), tl.int1), ()
    for j in tl.static_range(KP):
        if j < K:
            there = (columns[j] >= first) & (columns[j] < end)
            goes = goes | there
            for i in tl.static_range(j):  # an expert picked again counts once
                there = there & (columns[i] != columns[j])
            bins = bins + (tl.where(there, columns[j] - first, HB).to(tl.int32),)  # noqa: RUF005
        else:
            bins = bins + (tl.full((TB,), HB, tl.int32),)  # noqa: RUF005
    flat = _all_of(bins, KP)
    return tl.histogram(flat, HB, mask=flat < HB), goes
