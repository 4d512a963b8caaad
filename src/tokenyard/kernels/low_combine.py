# pyright: basic
"""Low-latency combine: the experts' rows of one token are summed where they are, one row goes back per (token, rank), owners add by rank.

Grid P in every launch. Parts SEND and RECEIVE are one launch, or two. Example: token 2 of rank 1 went to ranks 0 and 1: rank 0 writes its
sum to slot (0, 2) of rank 1, rank 1 its own to slot (1, 2); rank 1 adds slots (0, 2) and (1, 2) and rounds.

Who publishes what, who may read when:

1. A program per peer stores a note there, ``call`` and a tag: this rank has come to the call. It tells its call itself.
2. With weights of the owner: a program per token stores them at all its ranks, each word with its call, so they need no order either.
3. A program per (owner, token) that has rows here sums them, stores the sum into slot (me, token) of the owner, and sets its flag there
   to ``2 * call + 1`` (release).
4. A program per share of an own token's channels waits for the flags of the ranks that the token went to (acquire), then reads the slots. If
   it has to go on without one, it first agrees with the programs of the other shares. The last program waits for the notes of all ranks, so
   that a launch ends only when all have come to the call. If asked, the first share's program also tells what the sum lacks.

Why a slot may be reused: as in ``kernels/low_dispatch.py``; calls of both kinds are numbered together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_picks import merged_weights
from tokenyard.kernels.low_region import (
    epoch_of, flag_of, note, note_of, slot_of, weight_of,
)  # fmt: skip
from tokenyard.kernels.low_wait import agree, are_active, in_same_call, is_active, leave_out, tell, wait_flags, wait_notes, wait_weights
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import owner_of, peer_base
from tokenyard.kernels.sync import follow, words


@triton.jit
def _bring_weights(
    peers, active, route, first_pick, owner_weights, call, half, me, t, R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, LC: tl.constexpr,
):  # fmt: skip
    """Step 2 for token ``t``."""
    k, r = tl.arange(0, KP), tl.arange(0, RP)
    at = t.to(tl.int64) * K + k
    ids = tl.load(route.to(tl.pointer_type(tl.int32)) + at, mask=k < K, other=-1)
    first = tl.load(words(first_pick) + at, mask=k < K, other=0).to(tl.int32)
    weights = merged_weights(owner_weights, t, ids, tl.where(k < K, first, k), K, KP)
    word = ((call & 0x7FFFFFFF) << 32) | (weights.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    goes = tl.max((owner_of(ids, E, R)[None, :] == r[:, None]).to(tl.int32), axis=1)
    goes = are_active(active, r, goes > 0)
    bases = tl.load(words(peers) + r, mask=goes, other=0)
    to = weight_of(bases, half, me, t, R, M, K, LC)[:, None] + k[None, :]
    everywhere = word[None, :] + (r * 0).to(tl.int64)[:, None]
    tl.atomic_xchg(to, everywhere, mask=goes[:, None] & (k < K)[None, :], sem="relaxed", scope="sys")


@triton.jit
def _kept_of(slot, KEPT: tl.constexpr):
    """Behind the sum in a slot, int32 ``[K]``: which of the token's picks are in it, if there is a capacity."""
    return (slot + KEPT).to(tl.pointer_type(tl.int32))


@triton.jit
def _send_sum(
    peers, state, active, x, slots, weights, call, half, me, s, t, timeout,
    R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LC: tl.constexpr,
    SLOT: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    WEIGHTED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Step 3 for token ``t`` of rank ``s``, unless that is left out. WEIGHTED: 0 no, 1 by ``weights [rows]``, 2 by the owner's."""
    k = tl.arange(0, KP)
    table = slots.to(tl.pointer_type(tl.int32)) + (s * M + t).to(tl.int64) * K
    place = tl.load(table + k, mask=k < K, other=-1)
    base = peer_base(peers, s)
    here = is_active(active, s)  # meanwhile
    ok = here & (tl.max(place) >= 0)
    if here & (tl.max(place) < 0) & (tl.min(place) == -2):  # dropped for want of capacity: the owner waits
        tell(flag_of(base, half, me, t, R, M, LC), 2 * call, s >= 0)
    weight = place * 0.0
    if WEIGHTED == 2:
        if ok:
            at = weight_of(peer_base(peers, me), half, s, t, R, M, K, LC) + k
            ok, weight = wait_weights(at, k < K, peers, active, s, state, call, timeout, R, P, M, K, LC)
    if WEIGHTED == 1:
        weight = tl.load(weights.to(tl.pointer_type(tl.float32)) + place, mask=place >= 0, other=0.0)
    if ok:
        rows = tl.multiple_of(x.to(tl.pointer_type(DTYPE)), 16)
        to = slot_of(base, half, me, t, R, M, K, LC, SLOT).to(tl.pointer_type(DTYPE))
        for w0 in range(0, H, BLOCK):
            w = w0 + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for j in range(K):
                at = tl.sum(tl.where(k == j + 0, place + 1, 0)) - 1
                if at >= 0:
                    v = tl.load(rows + at.to(tl.int64) * H + w, mask=w < H, other=0.0, cache_modifier=".cg").to(tl.float32)
                    if WEIGHTED:
                        v = v * tl.sum(tl.where(k == j + 0, weight, 0.0))
                    total = total + v
            tl.store(tl.multiple_of(to, 16) + w, total.to(DTYPE), mask=w < H)
        if KEPT:
            tl.store(_kept_of(to.to(tl.int64), KEPT) + k, (place >= 0).to(tl.int32), mask=k < K)
        tl.debug_barrier()
        tl.atomic_max(flag_of(base, half, me, t, R, M, LC), 2 * call + 1, sem="release", scope="sys")


@triton.jit
def _tell_lost(
    peers, weights, route, first_pick, lost, got, half, me, t, T, R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, E: tl.constexpr, LC: tl.constexpr, SLOT: tl.constexpr, WEIGHTED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What those merged picks of token ``t`` weigh that are not in the sums that it ``got [RP]``, added in pick order; without weights
    how many they are."""
    k, r = tl.arange(0, KP), tl.arange(0, RP)
    at = t.to(tl.int64) * K + k
    ids = tl.load(route.to(tl.pointer_type(tl.int32)) + at, mask=k < K, other=-1)
    came = (owner_of(ids, E, R)[None, :] == r[:, None]) & (got > 0)[:, None]
    if KEPT:
        kept = _kept_of(slot_of(peer_base(peers, me), half, r, t, R, M, K, LC, SLOT), KEPT)[:, None] + k[None, :]
        came = came & (tl.load(kept, mask=came & (k < K)[None, :], other=0, cache_modifier=".cg") != 0)
    lacks = (ids >= 0) & (tl.max(came.to(tl.int32), axis=0) == 0)
    total = tl.sum(k * 0.0)
    if tl.max(lacks.to(tl.int32)) > 0:
        weight = k * 0.0 + 1.0
        if WEIGHTED == 1:
            weight = tl.load(route.to(tl.pointer_type(tl.float32)) + T.to(tl.int64) * K + at, mask=k < K, other=0.0)
        if WEIGHTED == 2:
            first = tl.load(words(first_pick) + at, mask=k < K, other=0).to(tl.int32)
            weight = merged_weights(weights, t, ids, tl.where(k < K, first, k), K, KP)
        for j in range(K):
            total += tl.sum(tl.where(lacks & (k == j + 0), weight, 0.0))
    tl.store(lost.to(tl.pointer_type(tl.float32)) + t, total)


@triton.jit
def _add_rows(
    peers, state, active, weights, route, first_pick, bias0, bias1, out, lost, call, half, me, t, share, T, timeout,
    R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, LC: tl.constexpr, SLOT: tl.constexpr, H: tl.constexpr, SHARES: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
    KEPT: tl.constexpr, LOST: tl.constexpr,
):  # fmt: skip
    """Step 4 for a share of my token ``t``, PART channels."""
    k, r = tl.arange(0, KP), tl.arange(0, RP)
    mine = peer_base(peers, me)
    ids = tl.load(route.to(tl.pointer_type(tl.int32)) + t.to(tl.int64) * K + k, mask=k < K, other=-1)
    owner = owner_of(ids, E, R)
    goes = tl.max((owner[None, :] == r[:, None]).to(tl.int32), axis=1) > 0
    here = are_active(active, r, goes)
    flags = flag_of(mine, half, r, t, R, M, LC)
    seen = wait_flags(flags, 2 * call, here, peers, active, r, state, call, timeout, R, P, M, K, LC)
    got = (here & (seen == 2 * call + 1)).to(tl.int32)
    if SHARES > 1:
        doubted = goes & ((here == 0) | (seen < 2 * call))
        got = agree(state, flags, 2 * call, got, doubted, t, share, r, R, P, LC, SHARES)
    for w0 in range(share * PART, tl.minimum(share * PART + PART, H), BLOCK):
        w = w0 + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for d in tl.static_range(R):
            there = tl.sum(tl.where(r == d, got, 0)) > 0
            row = slot_of(mine, half, d, t, R, M, K, LC, SLOT).to(tl.pointer_type(DTYPE))
            v = tl.load(tl.multiple_of(row, 16) + w, mask=there & (w < H), other=0.0, cache_modifier=".cg").to(
                tl.float32
            )
            total = total + tl.where(there, v, 0.0)
        at = t.to(tl.int64) * H + w
        if BIAS0 is not None:
            total = total + tl.load(bias0.to(tl.pointer_type(BIAS0)) + at, mask=w < H, other=0.0).to(tl.float32)
        if BIAS1 is not None:
            total = total + tl.load(bias1.to(tl.pointer_type(BIAS1)) + at, mask=w < H, other=0.0).to(tl.float32)
        tl.store(tl.multiple_of(out.to(tl.pointer_type(DTYPE)), 16) + at, total.to(DTYPE), mask=w < H)
    if LOST:
        if share == 0:
            _tell_lost(
                peers, weights, route, first_pick, lost, got, half, me, t, T, R, RP, M, K, KP, E, LC, SLOT, WEIGHTED, KEPT
            )


@triton.jit
def _lead(
    peers, state, active, waits, tag, call, half, me, timeout, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, LC: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks have come to the call."""
    r = tl.arange(0, RP)
    here = are_active(active, r, r < R)
    tags = note_of(peer_base(peers, me), half, r, LC, R, LC)
    _, last, there = wait_notes(
        tags[:, None], here[:, None], tags, peers, call, here, active, r, waits, state,
        timeout, R, P, M, K, LC, TIMED,
    )  # fmt: skip
    leave_out(active, r, here & (in_same_call(state, last, there, tag, r) == 0))


@triton.jit(repr=shown_as("low_latency::combine"))
def low_combine_kernel(
    peers, state, active, x, slots, weights, route, first_pick, bias0, bias1, out, waits, lost, timeout, tag, me, T,
    R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, LC: tl.constexpr, SLOT: tl.constexpr, H: tl.constexpr, SHARES: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
    KEPT: tl.constexpr, TIMED: tl.constexpr, LOST: tl.constexpr, SEND: tl.constexpr, RECEIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See the module. ``weights``: ``[rows]`` or the owner's ``[T, K]``. A sender has BLOCK channels in flight, a receiver WHOLE.

    KEPT: bytes in a slot before what :func:`_kept_of` says, 0 without a capacity.
    """
    pid = tl.program_id(0)
    me, T = me.to(tl.int32), T.to(tl.int32)
    follow(EARLY)
    call = tl.load(epoch_of(state, pid)) + 1
    half = (call % 2).to(tl.int32)
    if SEND:
        if pid >= P - R:
            to = (me + P - 1 - pid) % R
            if is_active(active, to):
                tell(note_of(peer_base(peers, to), half, me, LC, R, LC), note(call, tag), to >= 0)
        if WEIGHTED == 2:
            for token in range(pid, T, P):
                _bring_weights(
                    peers, active, route, first_pick, weights, call, half, me, token + 0, R, RP, M, K, KP, E, LC
                )
        for u in range(pid, R * M, P):
            _send_sum(
                peers, state, active, x, slots, weights, call, half, me, (u // M + me) % R, u % M, timeout,
                R, P, M, K, KP, LC, SLOT, H, BLOCK, DTYPE, WEIGHTED, KEPT,
            )  # fmt: skip
    if RECEIVE:
        if pid == P - 1:
            _lead(peers, state, active, waits, tag, call, half, me, timeout, R, RP, P, M, K, LC, TIMED)
        for u in range(pid, T * SHARES, P):
            _add_rows(
                peers, state, active, weights, route, first_pick, bias0, bias1, out, lost, call, half, me, u // SHARES, u % SHARES, T,
                timeout, R, RP, P, M, K, KP, E, LC, SLOT, H, SHARES, PART, WHOLE, DTYPE, WEIGHTED, BIAS0, BIAS1, KEPT, LOST,
            )  # fmt: skip
        tl.debug_barrier()
        tl.store(epoch_of(state, pid), call)
