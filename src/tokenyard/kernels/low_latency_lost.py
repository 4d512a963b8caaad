# pyright: basic
"""What the owner of a token knows of it in a low-latency combine: its picks and their weights,
where its ranks' sums are, and what these lack. ``k`` is a ``CombineConfig``. Nothing here is
published or waited for."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import is_far, numbers, of_ranks, via_of
from tokenyard.kernels.low_latency_memory import packed_of, slot_of
from tokenyard.kernels.low_latency_picks import merged_weights
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import ints, owner_of, peer_base
from tokenyard.kernels.sync import words


@triton.jit
def merged_ids(sent, t, pick, sizes: tl.constexpr):
    """Ids of token ``t``'s merged picks, ``pick`` ``[topk_bins]``."""
    at = t.to(tl.int64) * sizes.topk + pick
    return tl.load(ints(sent.merged) + at, mask=pick < sizes.topk, other=-1)


@triton.jit
def owner_weights(sent, t, pick, ids, sizes: tl.constexpr):
    """The weights that the owner of token ``t`` gives these picks."""
    at = t.to(tl.int64) * sizes.topk + pick
    first = tl.load(words(sent.first_pick) + at, mask=pick < sizes.topk, other=0).to(tl.int32)
    return merged_weights(sent.weights, t, ids, tl.where(pick < sizes.topk, first, pick), sizes)


@triton.jit
def kept_of(slot, kept_at: tl.constexpr):
    """Behind the sum in a slot, int32 ``[K]``: which of the token's picks are in it."""
    return ints(slot + kept_at)


@triton.jit
def sums_of(sent, mine, t, owner, call, k: tl.constexpr):
    """Addresses ``[rank_bins]`` of the sums of all ranks for token ``t``, whose picks went to
    ``owner [topk_bins]``."""
    r = tl.arange(0, k.sizes.rank_bins)
    slots = slot_of(mine, call.parity, r, t, k.sizes)
    if k.sizes.far:
        number = of_ranks(numbers(sent.slots, t, k.sizes), owner, r)
        packed = packed_of(mine, call.parity, r, number, k.sum_bytes, k.sizes)
        slots = tl.where(is_far(call.state, r, k.sizes), packed, slots)
    return slots


@triton.jit
def tell_lost(sent, lost, got, t, num_tokens, call, k: tl.constexpr):
    """Store what those merged picks of token ``t`` weigh that are not in the sums that it ``got
    [rank_bins]``, added in pick order; without weights, how many they are."""
    sizes: tl.constexpr = k.sizes
    topk: tl.constexpr = sizes.topk
    pick, r = tl.arange(0, sizes.topk_bins), tl.arange(0, sizes.rank_bins)
    at = t.to(tl.int64) * topk + pick
    ids = merged_ids(sent, t, pick, sizes)
    owner = via_of(owner_of(ids, sizes.experts, sizes.ranks), call.rank, sizes)
    came = (owner[None, :] == r[:, None]) & (got > 0)[:, None]
    if k.kept_at:
        slots = sums_of(sent, peer_base(call.regions, call.rank), t, owner, call, k)
        kept_at = kept_of(slots, k.kept_at)[:, None] + pick[None, :]
        there = came & (pick < topk)[None, :]
        came = came & (tl.load(kept_at, mask=there, other=0, cache_modifier=".cg") != 0)
    lacks = (ids >= 0) & (tl.max(came.to(tl.int32), axis=0) == 0)
    total = tl.sum(pick * 0.0)
    if tl.max(lacks.to(tl.int32)) > 0:
        weight = pick * 0.0 + 1.0
        if k.weighted == 1:
            weights = floats(sent.merged) + num_tokens.to(tl.int64) * topk + at
            weight = tl.load(weights, mask=pick < topk, other=0.0)
        if k.weighted == 2:
            weight = owner_weights(sent, t, pick, ids, sizes)
        for j in range(topk):
            total += tl.sum(tl.where(lacks & (pick == j + 0), weight, 0.0))
    tl.store(floats(lost) + t, total)
