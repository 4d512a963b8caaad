# pyright: basic
"""Sums of a low-latency combine: of a token's rows on one rank; of the ranks of a node, where rows
cross once per node. Who publishes what, and who may read it when: ``kernels/low_latency_rail.py``.
``k`` is a ``CombineConfig``."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import count_packed
from tokenyard.kernels.low_latency_far_combine import wait_far_weights
from tokenyard.kernels.low_latency_lost import kept_of
from tokenyard.kernels.low_latency_memory import ROWS, flag_of, slot_of, staged_of, weight_of
from tokenyard.kernels.low_latency_rail import neighbours, rail_of
from tokenyard.kernels.low_latency_waits import (
    are_active, is_active, look, wait_flags, wait_weights,
)  # fmt: skip
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import ints, peer_base


@triton.jit
def sum_rows(sent, slot, place, weight, k: tl.constexpr):
    """Store the sum of the rows at ``place [topk_bins]`` into ``slot``, and which picks it has."""
    topk: tl.constexpr = k.sizes.topk
    H: tl.constexpr = k.hidden
    pick = tl.arange(0, k.sizes.topk_bins)
    rows = tl.multiple_of(sent.rows.to(tl.pointer_type(k.dtype)), 16)
    to = slot.to(tl.pointer_type(k.dtype))
    for w0 in range(0, H, k.sent_block):
        w = w0 + tl.arange(0, k.sent_block)
        total = tl.zeros((k.sent_block,), tl.float32)
        for j in range(topk):
            at = tl.sum(tl.where(pick == j + 0, place + 1, 0)) - 1
            if at >= 0:
                row = rows + at.to(tl.int64) * H
                v = tl.load(row + w, mask=w < H, other=0.0, cache_modifier=".cg").to(tl.float32)
                if k.weighted:
                    v = v * tl.sum(tl.where(pick == j + 0, weight, 0.0))
                total = total + v
        tl.store(tl.multiple_of(to, 16) + w, total.to(k.dtype), mask=w < H)
    if k.kept_at:
        kept = kept_of(to.to(tl.int64), k.kept_at) + pick
        tl.store(kept, (place >= 0).to(tl.int32), mask=pick < topk)


@triton.jit
def _places_and_weights(sent, s, t, here, call, k: tl.constexpr):
    """Where rows of slot (s, t) are, ``[topk_bins]``; whether rank ``s`` is ``here`` and has
    brought their weights; and these."""
    sizes: tl.constexpr = k.sizes
    pick = tl.arange(0, sizes.topk_bins)
    table = ints(sent.slots) + (s * sizes.tokens + t).to(tl.int64) * sizes.topk
    place = tl.load(table + pick, mask=pick < sizes.topk, other=-1)
    ok, weight = here & is_active(call.active, s), place * 0.0
    if k.weighted == 2:
        if ok & (tl.max(place) >= 0):
            wait_far_weights(s, call, sizes)
            at = weight_of(peer_base(call.regions, call.rank), call.parity, s, t, sizes) + pick
            ok, weight = wait_weights(at, pick < sizes.topk, s, call, sizes)
    if k.weighted == 1:
        weight = tl.load(floats(sent.weights) + place, mask=place >= 0, other=0.0)
    return place, ok, weight


@triton.jit
def hand_back(sent, s, t, call, k: tl.constexpr):
    """Step 2 for row number ``t`` of far rank ``s``, which a neighbour has handed on."""
    sizes: tl.constexpr = k.sizes
    rail = rail_of(s, call.rank, sizes)
    at = rail_of(call.rank, s, sizes)  # of s's node, with my local index
    here = is_active(call.active, rail)
    place, ok, weight = _places_and_weights(sent, s, t, here, call, k)
    ok = ok & (tl.max(place) >= 0)
    base = peer_base(call.regions, rail)
    if ok:
        sum_rows(sent, slot_of(base, call.parity, at, t, sizes), place, weight, k)
    tl.debug_barrier()
    flag, told = flag_of(base, call.parity, at, t, sizes), 2 * call.number + ok.to(tl.int64)
    tl.atomic_max(flag, told, mask=here, sem="release", scope="sys")


@triton.jit
def _add_neighbours(slot, s, t, call, k: tl.constexpr):
    """Add to the own sum in ``slot`` those of the neighbours for row number ``t`` of far rank
    ``s``."""
    sizes: tl.constexpr = k.sizes
    P: tl.constexpr = sizes.per_node
    H: tl.constexpr = k.hidden
    me, mine = call.rank, peer_base(call.regions, call.rank)
    r, pick = tl.arange(0, sizes.rank_bins), tl.arange(0, sizes.topk_bins)
    here = are_active(call.active, r, neighbours(r, me, sizes))
    at = rail_of(r, s, sizes)
    flags, want = flag_of(mine, call.parity, at, t, sizes), 2 * call.number
    seen = wait_flags(flags, want, here, r, call, sizes)
    got = here & (seen > want)
    got = got & (look(flags, got) == want + 1)  # not LOST
    got = got | (r == me)
    slots = tl.where(r == me, slot, slot_of(mine, call.parity, at, t, sizes))
    for w0 in range(0, H, k.added_block):
        w = w0 + tl.arange(0, k.added_block)
        total = tl.zeros((k.added_block,), tl.float32)
        for i in tl.static_range(P):
            d = me // P * P + i
            there = tl.sum(tl.where(r == d, got.to(tl.int32), 0)) > 0
            row = tl.sum(tl.where(r == d, slots, 0)).to(tl.pointer_type(k.dtype))
            inside = there & (w < H)
            v = tl.load(tl.multiple_of(row, 16) + w, mask=inside, other=0.0, cache_modifier=".cg")
            total = total + tl.where(there, v.to(tl.float32), 0.0)
        to = tl.multiple_of(slot.to(tl.pointer_type(k.dtype)), 16)
        tl.debug_barrier()  # the own sum is read
        tl.store(to + w, total.to(k.dtype), mask=w < H)
    kept_at = kept_of(slots, k.kept_at)[:, None] + pick[None, :]
    there = got[:, None] & (pick < sizes.topk)[None, :]
    kept = tl.max(tl.load(kept_at, mask=there, other=0, cache_modifier=".cg"), axis=0)
    tl.debug_barrier()
    tl.store(kept_of(slot, k.kept_at) + pick, kept, mask=pick < sizes.topk)


@triton.jit
def sum_of_node(sent, s, t, call, k: tl.constexpr):
    """Step 3 for row number ``t`` of far rank ``s``, which is on my rail."""
    sizes: tl.constexpr = k.sizes
    pick = tl.arange(0, sizes.topk_bins)
    place, ok, weight = _places_and_weights(sent, s, t, s >= 0, call, k)
    came = tl.sum(tl.where(pick == 0, place, 0)) != -1
    if came:
        if ok:
            mine = peer_base(call.regions, call.rank)
            slot = staged_of(mine, call.parity, s, t, k.sum_bytes, sizes)
            sum_rows(sent, slot, place, weight, k)
            tl.debug_barrier()
            _add_neighbours(slot, s, t, call, k)
        count_packed(call.state, ROWS + t // k.chunk_rows, s, came, sizes)
