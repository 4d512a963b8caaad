# pyright: basic
"""Rows, weights and sums of a low-latency combine. Of one token: where its rows are and what they
weigh, on the rank that sums them; where its ranks' sums are and what they lack, at its owner. And
what is put to far ranks: weights of the owner, and sums. Who publishes what, and who may read it
when: ``kernels/low_latency_far.py``. ``k`` is a ``CombineConfig``."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import (
    is_far, numbers, of_ranks, put_far, takes_rows, via_of, wait_packed,
)  # fmt: skip
from tokenyard.kernels.low_latency_memory import (
    ROWS, TORN, WEIGHTS, arrival_of, flag_of, packed_of, slot_of, staged_of, weight_of,
    weights_out_of, with_call,
)  # fmt: skip
from tokenyard.kernels.low_latency_send import merged_weights
from tokenyard.kernels.low_latency_waits import (
    are_active, is_active, wait_flag, wait_flags, wait_weights,
)  # fmt: skip
from tokenyard.kernels.payload import elements
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import ints, owner_of, peer_base
from tokenyard.kernels.sync import words

_BLOCK = tl.constexpr(64)
"""Tokens looked at at once."""


# Of one token


@triton.jit
def places_of(sent, s, t, sizes: tl.constexpr):
    """Where the rows of slot (s, t) are, ``[topk_bins]``."""
    pick = tl.arange(0, sizes.topk_bins)
    table = ints(sent.slots) + (s * sizes.tokens + t).to(tl.int64) * sizes.topk
    return tl.load(table + pick, mask=pick < sizes.topk, other=-1)


@triton.jit
def weigh(sent, s, t, place, ok, call, EMPTY: tl.constexpr, k: tl.constexpr):
    """Whether all is ``ok``, and rank ``s`` has brought the weights of the rows at ``place``; and
    these. EMPTY: they are waited for also if there are no such rows."""
    sizes: tl.constexpr = k.sizes
    pick, weight = tl.arange(0, sizes.topk_bins), place * 0.0
    if k.weighted == 2:
        wait = ok if EMPTY else ok & (tl.max(place) >= 0)
        if wait:
            if sizes.far and is_far(call.state, s, sizes):
                mine = peer_base(call.regions, call.rank)
                arrival = arrival_of(mine, call.parity, s, WEIGHTS, sizes)
                least = with_call(call.number, (s * 0).to(tl.int64))
                wait_flag(arrival, least, s, call, 1, sizes)
            at = weight_of(peer_base(call.regions, call.rank), call.parity, s, t, sizes) + pick
            ok, weight = wait_weights(at, pick < sizes.topk, s, call, sizes)
    if k.weighted == 1:
        weight = tl.load(floats(sent.weights) + place, mask=place >= 0, other=0.0)
    return ok, weight


@triton.jit
def sum_rows(sent, slot, place, weight, k: tl.constexpr):
    """Store the sum of the rows at ``place [topk_bins]`` into ``slot``, and which picks it has."""
    H: tl.constexpr = k.hidden
    pick = tl.arange(0, k.sizes.topk_bins)
    rows = elements(sent.rows, k.dtype)
    to = slot.to(tl.pointer_type(k.dtype))
    for w0 in range(0, H, k.sent_block):
        w = w0 + tl.arange(0, k.sent_block)
        total = tl.zeros((k.sent_block,), tl.float32)
        for j in range(k.sizes.topk):
            at = tl.sum(tl.where(pick == j + 0, place + 1, 0)) - 1
            if at >= 0:
                row = rows + at.to(tl.int64) * H
                v = tl.load(row + w, mask=w < H, other=0.0, cache_modifier=".cg").to(tl.float32)
                if k.weighted:
                    v = v * tl.sum(tl.where(pick == j + 0, weight, 0.0))
                total = total + v
        tl.store(tl.multiple_of(to, 16) + w, total.to(k.dtype), mask=w < H)
    if k.kept_at:
        kept_at = ints(to.to(tl.int64) + k.kept_at) + pick
        tl.store(kept_at, (place >= 0).to(tl.int32), mask=pick < k.sizes.topk)


@triton.jit
def load_sum(slot, there, w, k: tl.constexpr):
    """Channels ``w`` of the sum in ``slot``, if it is ``there``; zeros if not."""
    row = elements(slot, k.dtype)
    v = tl.load(row + w, mask=there & (w < k.hidden), other=0.0, cache_modifier=".cg")
    return tl.where(there, v.to(tl.float32), 0.0)


@triton.jit
def load_sum_of(rank, sums, got, w, k: tl.constexpr):
    """The same of what the ``rank`` (a mask) has put at ``sums``, if it is among the ``got``."""
    there = tl.sum(tl.where(rank, got, 0)) > 0
    return load_sum(tl.sum(tl.where(rank, sums, 0)), there, w, k)


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
        kept_at = ints(slots + k.kept_at)[:, None] + pick[None, :]
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


# What is put to far ranks


@triton.jit
def stage_weights(sent, t, word, owner, via, chosen, call, sizes: tl.constexpr):
    """Pack the weights of this rank's token ``t``, the words ``word [topk_bins]``, for the far
    ranks of its picks ``owner [topk_bins]``; or for all ``chosen`` ranks of their nodes, by the
    numbers of the rails ``via``."""
    pick = tl.arange(0, sizes.topk_bins)
    to = tl.arange(0, sizes.rank_bins) if sizes.per_node else owner
    goes = is_far(call.state, to, sizes) & (chosen if sizes.per_node else owner >= 0)
    goes = are_active(call.active, to, goes)
    mine, number = peer_base(call.regions, call.rank), numbers(sent.slots, t, sizes)
    if sizes.per_node:
        number = of_ranks(number, via, via_of(to, call.rank, sizes))
    here = weights_out_of(mine, call.parity, to, number, sizes)[:, None] + pick[None, :]
    everywhere = word[None, :] + (to * 0).to(tl.int64)[:, None]
    tl.store(here, everywhere, mask=goes[:, None] & (pick < sizes.topk)[None, :])


@triton.jit
def put_weights(sent, num_tokens, to, call, sizes: tl.constexpr):
    """The weights for rank ``to``, if it is far, once all are packed."""
    if is_far(call.state, to, sizes):
        pick = tl.arange(0, sizes.topk_bins)
        rows = to * 0
        for t0 in range(0, num_tokens, _BLOCK):
            t = t0 + tl.arange(0, _BLOCK)
            at = t[:, None] * sizes.topk + pick[None, :]
            inside = (t < num_tokens)[:, None] & (pick < sizes.topk)[None, :]
            ids = tl.load(ints(sent.merged) + at, mask=inside, other=-1)
            owner = owner_of(ids, sizes.experts, sizes.ranks)
            goes = via_of(owner, call.rank, sizes) == via_of(to, call.rank, sizes)
            rows += tl.sum(tl.max(goes.to(tl.int32), axis=1))
        wait_packed(call.state, WEIGHTS, to, rows, sizes)
        if is_active(call.active, to):
            mine = peer_base(call.regions, call.rank)
            there = weight_of(mine, call.parity, call.rank, 0, sizes)
            here = weights_out_of(mine, call.parity, to, 0, sizes)
            arrival = arrival_of(mine, call.parity, call.rank, WEIGHTS, sizes)
            value = with_call(call.number, rows.to(tl.int64))
            put_far(call, to, there, here, rows * (8 * sizes.topk), arrival, value, sizes)


@triton.jit
def put_sums(sent, to, chunk, call, k: tl.constexpr):
    """A chunk of the sums for rank ``to``, if it is far, once all of it are packed."""
    sizes: tl.constexpr = k.sizes
    M: tl.constexpr = sizes.tokens
    if takes_rows(to, call, sizes):
        first, count, torn = chunk * k.chunk_rows, to * 0, to * 0
        for j0 in range(0, M, _BLOCK):
            j = j0 + tl.arange(0, _BLOCK)
            first_pick = ints(sent.slots) + (to * M + j).to(tl.int64) * sizes.topk
            place = tl.load(first_pick, mask=j < M, other=-1)
            inside = (j >= first) & (j < first + k.chunk_rows)
            count += tl.sum((inside & (place != -1)).to(tl.int32))
            torn += tl.sum((place == TORN).to(tl.int32))
        if count > 0:
            wait_packed(call.state, ROWS + chunk, to, count, sizes)
        count = tl.where(torn > 0, 0, count)
        if ((count > 0) | (chunk == 0)) & is_active(call.active, to):
            mine = peer_base(call.regions, call.rank)
            there = packed_of(mine, call.parity, call.rank, first, k.sum_bytes, sizes)
            here = staged_of(mine, call.parity, to, first, k.sum_bytes, sizes)
            flag = flag_of(mine, call.parity, call.rank, first, sizes)
            value = 2 * call.number + (count > 0).to(tl.int64)
            put_far(call, to, there, here, count.to(tl.int64) * k.sum_bytes, flag, value, sizes)


@triton.jit
def wait_chunks(sent, seen, t, owner, here, ranks, call, k: tl.constexpr):
    """Wait for the chunks that bring the sums of token ``t``, whose picks went to ``owner
    [topk_bins]``: those of the ``ranks`` that are ``here``, whose first chunk was ``seen``, and
    says that there are sums. Returns the flags of all ranks' sums, and both as :func:`wait_flags`
    tells it."""
    sizes: tl.constexpr = k.sizes
    mine, want = peer_base(call.regions, call.rank), 2 * call.number
    far = is_far(call.state, ranks, sizes)
    first = of_ranks(numbers(sent.slots, t, sizes), owner, ranks) // k.chunk_rows * k.chunk_rows
    flags = flag_of(mine, call.parity, ranks, tl.where(far, first, t), sizes)
    more = here & (seen == want + 1) & far & (first > 0)
    return flags, tl.where(more, wait_flags(flags, want, more, ranks, call, sizes), seen)
