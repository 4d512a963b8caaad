# pyright: basic
"""Low-latency dispatch: one row per (token, rank) into a fixed slot, then into its place at each local expert.

Grid P in every launch. Parts SEND and RECEIVE are one launch, or two. Example: 2 ranks, 2 experts each, M = 4. Token 2 of rank 1 picks
experts 3 and 0: rank 1 writes it to slot (1, 2) of both ranks; rank 0 finds 1 token of rank 0 for expert 0 in its notes, so the row goes
to row 1 of expert 0's block.

Who publishes what, who may read when:

1. A program per destination counts this rank's tokens for each expert there and stores the notes. A note tells its own call, so it needs no
   order: whoever sees the call sees the count. It also sets all flags of tokens that do not go there to ``2 * call``.
2. A program per piece of a token (one or two) casts it and stores it into the slots at all the token's ranks; that of the first piece also
   finds the rank of each pick among this rank's tokens for that expert, and stores the meta. Each sets its own flags there to
   ``2 * call + 1`` (release).
3. The last program of a receiver (its *leader*) waits for the notes of all ranks, decides who is present, computes where rows begin, and
   publishes this table by ``READY`` (release, gpu). One program decides, so all agree, even if notes come as the time runs out.
4. A program per slot waits for READY, then for all the slot's flags (both acquire), and copies the row to its places.

Why a slot may be reused: call n + 2 writes the same half as call n. A rank makes it after it has received call n + 1, so after it has seen
a note of every active rank's call n + 1, which that rank writes in a kernel that runs after its kernel of call n has read the half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_picks import columns_of, count, merged, merged_weights, picks_at, tokens_with
from tokenyard.kernels.low_region import (
    BAD_AT, BAD_VALUE, READY, STATUS, block_of, epoch_of, flag_of, note, note_of, pairs_of, present_of,
    slot_of, start_of, value_in,
)  # fmt: skip
from tokenyard.kernels.low_wait import (
    are_active,
    in_same_call,
    is_active,
    leave_out,
    tell,
    wait_flag,
    wait_notes,
    wait_ready,
)
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, cast, load_groups, store_cast, zero_row
from tokenyard.kernels.region import first_expert, owner_of, peer_base
from tokenyard.kernels.sync import follow, words

_BAD_AT, _BAD_VALUE = tl.constexpr(BAD_AT), tl.constexpr(BAD_VALUE)


@triton.jit
def _announce(
    topk_idx, peers, active, tag, T, call, half, me, to, R: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, LC: tl.constexpr, HB: tl.constexpr, TB: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Notes for ``to``, and the flags of tokens that do not go there."""
    first, end = first_expert(to, E, R), first_expert(to + 1, E, R)
    base = peer_base(peers, to)
    e = tl.arange(0, HB)
    counts = tl.zeros((HB,), tl.int32)
    for tb in range(0, M, TB):
        more, goes = count(columns_of(topk_idx, tb, T, K, TB, WIDE), first, end, K, KP, HB, TB)
        counts += more
        t = tb + tl.arange(0, TB)
        pieces = flag_of(base, half, me, t, R, M, LC)[:, None] + tl.arange(0, PIECES)[None, :]
        none = tl.zeros((TB, PIECES), tl.int64) + 2 * call
        tell(pieces, none, ((t < M) & (goes == 0))[:, None])
    tell(note_of(base, half, me, e, R, LC), note(call, counts.to(tl.int64)), e < LC)
    tell(note_of(base, half, me, LC, R, LC), note(call, tag), to >= 0)


@triton.jit
def _send_meta(
    state, topk_idx, topk_weights, scales, route, first_pick, raw, ids, columns, goes, slots, T, t,
    K: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, E: tl.constexpr, TB: tl.constexpr, S: tl.constexpr, PAY: tl.constexpr,
    MODE: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """What rides behind the payload of token ``t`` in ``slots [RP]``, as far as it ``goes`` there; and what this rank keeps of its picks.
    ``columns``: of the first TB tokens before."""
    k = tl.arange(0, KP)
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    at = t.to(tl.int64) * K + k
    ids, first = merged(ids, KP)
    before = tokens_with(columns, ids, E, K, KP, TB)
    for tb in range(TB, t, TB):
        before += tokens_with(columns_of(topk_idx, tb, t, K, TB, WIDE), ids, E, K, KP, TB)
    rank = tl.sum(before, axis=0)
    tl.store(route.to(tl.pointer_type(tl.int32)) + at, ids, mask=k < K)
    tl.store(words(first_pick) + at, first.to(tl.int64), mask=k < K)
    bad = (raw < -1) | (raw >= E)
    if tl.max(bad.to(tl.int32)) > 0:
        nth = tl.min(tl.where(bad, k, KP))
        status = words(tl.load(words(state) + STATUS))
        if tl.atomic_cas(status + _BAD_AT, (t * 0).to(tl.int64), t.to(tl.int64) * K + nth + 1) == 0:
            tl.store(status + _BAD_VALUE, tl.sum(tl.where(k == nth, raw, 0)).to(tl.int64))
    if S and not MODE:
        s = tl.arange(0, triton.next_power_of_2(S))[None, :]
        given = tl.load(as_words(scales, 32) + t.to(tl.int64) * S + s, mask=s < S) + (goes * 0)[:, None]
        tl.store(as_words(slots + PAY, 32)[:, None] + s, given, mask=(goes > 0)[:, None] & (s < S))
    meta = as_words(slots + META, 32)[:, None] + k[None, :]
    there = (goes > 0)[:, None] & (k < K)[None, :]
    everywhere = tl.zeros((RP, KP), tl.int32)
    tl.store(meta, everywhere + ids[None, :], mask=there)
    tl.store(meta + K, everywhere + rank[None, :], mask=there)
    if WEIGHTED:
        weights = merged_weights(topk_weights, t, ids, first, K, KP)
        tl.store(route.to(tl.pointer_type(tl.float32)) + T.to(tl.int64) * K + at, weights, mask=k < K)
        tl.store(meta + 2 * K, everywhere + weights.to(tl.int32, bitcast=True)[None, :], mask=there)


@triton.jit
def _send_piece(
    peers, state, active, topk_idx, topk_weights, x, scales, route, first_pick, T, call, half, me, t, piece,
    R: tl.constexpr, RP: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr,
    LC: tl.constexpr, TB: tl.constexpr, SLOT: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, PAY: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """A piece of token ``t``, PART words or GP groups, to all the token's ranks; with the first go ids and weights."""
    k, r, w = tl.arange(0, KP), tl.arange(0, RP), piece * PART + tl.arange(0, BLOCK)
    raw = tl.load(picks_at(topk_idx, WIDE) + t.to(tl.int64) * K + k, mask=k < K, other=-1)
    bases = tl.load(words(peers) + r, mask=r < R, other=0)
    if MODE:
        g = piece * GP + tl.arange(0, GP)
        floats = load_groups(tl.multiple_of(x.to(tl.pointer_type(DTYPE)), 16) + t.to(tl.int64) * H, g * 0, g, g >= 0, H)
    else:
        row = as_words(x, BITS) + t.to(tl.int64) * N
        v = tl.load(row + w, mask=w < N, cache_modifier=".cg")
    columns = columns_of(topk_idx, t * 0, tl.where(piece == 0, t, 0), K, TB, WIDE)
    # all loads are under way before the first is waited for, and before anything is stored: behind stores they would wait for those
    here = are_active(active, r, r < R)
    ids = tl.where((raw < 0) | (raw >= E), -1, raw).to(tl.int32)
    goes = tl.where(here, tl.max((owner_of(ids, E, R)[None, :] == r[:, None]).to(tl.int32), axis=1), 0)
    slots = slot_of(bases, half, me, t, R, M, K, LC, SLOT)
    if MODE:
        values, scale = cast(floats, g, H, MODE)
    for i in tl.static_range(R):  # first what is long, so that it is on its way meanwhile
        d = (me + i) % R
        if tl.sum(tl.where(r == d, goes, 0)) > 0:
            slot = tl.sum(tl.where(r == d, slots, 0))
            if MODE:
                store_cast(values, scale, slot, 0, slot + PAY, 0, g * 0, g, g >= 0, H, MODE, S)
            else:
                tl.store(as_words(slot, BITS) + w, v, mask=w < N)
                for w0 in range(BLOCK, PART, BLOCK):
                    more = tl.load(row + w0 + w, mask=w0 + w < N, cache_modifier=".cg")
                    tl.store(as_words(slot, BITS) + w0 + w, more, mask=w0 + w < N)
    if piece == 0:
        _send_meta(
            state, topk_idx, topk_weights, scales, route, first_pick, raw, ids, columns, goes, slots, T, t, K, KP, RP, E, TB, S, PAY, MODE,
            WIDE, WEIGHTED,
        )  # fmt: skip
    tl.debug_barrier()
    flags = flag_of(bases, half, me, t, R, M, LC) + piece
    tl.atomic_max(flags, (r * 0).to(tl.int64) + 2 * call + 1, mask=goes > 0, sem="release", scope="sys")


@triton.jit
def _lead(
    peers, state, active, tokens_per_expert, blocks, overflow, loads, waits, tag, call, half, me, num_rows, alignment, timeout,
    R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, E: tl.constexpr, LC: tl.constexpr,
    HB: tl.constexpr, PADDED: tl.constexpr, LOADS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Step 3: who is present, and where rows begin."""
    mine = peer_base(peers, me)
    r, e = tl.arange(0, RP), tl.arange(0, HB)
    here = are_active(active, r, r < R)
    inside = here[:, None] & (e < LC)[None, :]
    notes = note_of(mine, half, r[:, None], e[None, :], R, LC)
    counts, tags, there = wait_notes(
        notes, inside, note_of(mine, half, r, LC, R, LC), peers, call, here, active, r, waits, state,
        timeout, R, P, M, K, LC, TIMED,
    )  # fmt: skip
    present = in_same_call(state, tags, there, tag, r)
    leave_out(active, r, here & (present == 0))
    tl.store(present_of(state, r, R, P, LC), present.to(tl.int32), mask=r < R)
    local = first_expert(me + 1, E, R) - first_expert(me, E, R)
    held = e < local
    pairs = tl.where(present[:, None] & held[None, :], tl.minimum(value_in(counts), M), 0).to(tl.int32)
    totals = tl.sum(pairs, axis=0)
    aligned = (totals + alignment - 1) // alignment * alignment
    start = tl.cumsum(aligned, 0) - aligned
    if PADDED:
        start = e * (R * M)
    block_end = start + (totals if PADDED else aligned)
    next_start = tl.where(e == local - 1, num_rows, start + (R * M) if PADDED else start + aligned)
    begin = tl.cumsum(pairs, 0) - pairs
    both = (r < R)[:, None] & held[None, :]
    tl.store(start_of(state, e[None, :], r[:, None], R, P), start[None, :] + begin, mask=both)
    tl.store(pairs_of(state, e[None, :], r[:, None], R, P, LC), pairs, mask=both)
    block = block_of(state, e, R, P, LC)
    tl.store(block, start + totals, mask=held)
    tl.store(block + 1, block_end, mask=held)
    tl.store(block + 2, next_start, mask=held)
    tl.debug_barrier()
    tl.atomic_xchg(words(state) + READY, call, sem="release", scope="gpu")
    tl.store(tokens_per_expert.to(tl.pointer_type(tl.int32)) + e, totals, mask=held)
    to = blocks.to(tl.pointer_type(tl.int32))
    if PADDED:
        at = to + (e[None, :] * R + r[:, None]) * 2
        tl.store(at, begin, mask=both)
        tl.store(at + 1, pairs, mask=both)
    else:
        tl.store(to + e, tl.minimum(start, num_rows), mask=held)
        tl.store(to + local, tl.minimum(tl.sum(tl.where(held, aligned, 0)), num_rows))
        if overflow != 0:
            kept = tl.maximum(num_rows - start, 0)
            lost = tl.sum(tl.where(held, tl.maximum(totals - kept, 0), 0))
            tl.store(overflow.to(tl.pointer_type(tl.int32)), lost)
    if LOADS:
        sums = loads.to(tl.pointer_type(tl.int64 if LOADS == 8 else tl.int32)) + e
        sofar = tl.load(sums, mask=held, other=0)
        tl.debug_barrier()
        tl.store(sums, sofar + totals, mask=held)


@triton.jit
def _empty_rows(source, row_weights, lo, hi, WEIGHTED: tl.constexpr):
    """Rows ``lo`` .. ``hi`` have no source."""
    for at in range(lo, hi, 256):
        row = at + tl.arange(0, 256)
        tl.store(words(source) + row, (row * 0).to(tl.int64) - 1, mask=row < hi)
        if WEIGHTED:
            tl.store(row_weights.to(tl.pointer_type(tl.float32)) + row, row * 0.0, mask=row < hi)


@triton.jit
def _finish_block(
    state, e, out, out_scales, source, row_weights, num_rows, R: tl.constexpr, P: tl.constexpr, LC: tl.constexpr, N: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Rows behind those of expert ``e``."""
    block = block_of(state, e, R, P, LC)
    end, zeros_to, to = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    _empty_rows(source, row_weights, tl.minimum(end, num_rows), tl.minimum(to, num_rows), WEIGHTED)
    if PADDING:
        for row in range(end, tl.minimum(zeros_to, num_rows)):
            at = (row + 0).to(tl.int64)
            zero_row(as_words(out, BITS) + at * N, N, BLOCK)
            if S:
                zero_row(as_words(out_scales, 32) + at * S, S, triton.next_power_of_2(S))


@triton.jit
def _receive_slot(
    peers, state, active, out, out_scales, row_weights, source, slots, call, half, me, s, t, num_rows, timeout,
    R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr,
    LC: tl.constexpr, SLOT: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, PAY: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Step 4 for slot (s, t)."""
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    SB: tl.constexpr = triton.next_power_of_2(S) if S else 1
    k, w, sw = tl.arange(0, KP), tl.arange(0, BLOCK), tl.arange(0, SB)
    mine = peer_base(peers, me)
    place = k * 0 - 2  # of a source that is not here: a combine tells the owner, if that is back by then
    if tl.load(present_of(state, s, R, P, LC)) != 0:
        want = 2 * call
        seen = wait_flag(
            flag_of(mine, half, s, t, R, M, LC), want, peers, active, s, state, call, timeout, R, P, M, K, LC, PIECES
        )
        if seen < want:  # silent in mid-call: its other rows may still say that they are there
            for e in range(0, first_expert(me + 1, E, R) - first_expert(me, E, R)):
                lo = tl.load(start_of(state, e + 0, s, R, P))
                hi = lo + tl.load(pairs_of(state, e + 0, s, R, P, LC))
                _empty_rows(source, row_weights, tl.minimum(lo, num_rows), tl.minimum(hi, num_rows), WEIGHTED)
        if seen == want:
            place = k * 0 - 1
        if seen == want + 1:
            slot = slot_of(mine, half, s, t, R, M, K, LC, SLOT)
            row, meta = as_words(slot, BITS), as_words(slot + META, 32)
            ids = tl.load(meta + k, mask=k < K, other=-1, cache_modifier=".cg")
            rank = tl.load(meta + K + k, mask=k < K, other=0, cache_modifier=".cg")
            if WEIGHTED:
                weight = tl.load(meta + 2 * K + k, mask=k < K, other=0, cache_modifier=".cg")
            v = tl.load(row + w, mask=w < N, cache_modifier=".cg")
            if S:
                scale = tl.load(as_words(slot + PAY, 32) + sw, mask=sw < S, cache_modifier=".cg")
            first = first_expert(me, E, R)
            here = (ids >= first) & (ids < first_expert(me + 1, E, R))
            start = tl.load(start_of(state, tl.where(here, ids - first, 0), s, R, P), mask=here, other=0)
            here = here & (rank >= 0) & (rank < M) & (start + rank < num_rows)
            place = tl.where(here, start + rank, -2)  # the row came, but has no place
            tl.store(words(source) + place, (s.to(tl.int64) << 32) + t + (k * 0).to(tl.int64), mask=here)
            if WEIGHTED:
                tl.store(row_weights.to(tl.pointer_type(tl.int32)) + place, weight, mask=here)
            for j in range(K):
                to = (tl.sum(tl.where(k == j + 0, place + 1, 0)) - 1).to(tl.int64)
                if to >= 0:
                    tl.store(as_words(out, BITS) + to * N + w, v, mask=w < N)
                    if S:
                        at = to * S + sw
                        if COLUMNS:
                            at = to // (R * M) * (R * M * S) + to % (R * M) + sw * (R * M)
                        tl.store(as_words(out_scales, 32) + at, scale, mask=sw < S)
                    for w0 in range(BLOCK, N, BLOCK):
                        more = tl.load(row + w0 + w, mask=w0 + w < N, cache_modifier=".cg")
                        tl.store(as_words(out, BITS) + to * N + w0 + w, more, mask=w0 + w < N)
    tl.store(slots.to(tl.pointer_type(tl.int32)) + (s * M + t).to(tl.int64) * K + k, place, mask=k < K)


@triton.jit(repr=shown_as("low_latency::dispatch"))
def low_dispatch_kernel(
    peers, state, active, topk_idx, topk_weights, x, scales, out, out_scales, row_weights, source, slots, route, first_pick,
    tokens_per_expert, blocks, overflow, loads, waits, timeout, tag, me, T, num_rows, alignment,
    R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E: tl.constexpr, LC: tl.constexpr, HB: tl.constexpr, TB: tl.constexpr, SLOT: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, PAY: tl.constexpr, PIECES: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, PADDED: tl.constexpr,
    PADDING: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr, TIMED: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See the module. ``timeout``: ns. H, DTYPE: of ``x``. N, BITS: words of a row on the wire; S: of its scales. HB: bins for LC. TB: tokens looked at at once.
    COLUMNS: scales lie by column in each block, ``[L, S, R * M]`` (with PADDED). LOADS: bytes of each; 0: there are none.

    ``route``: int32 ``[2, T, K]``, ids of merged picks and the bits of their weights.
    """
    pid = tl.program_id(0)
    me, T, num_rows, alignment = me.to(tl.int32), T.to(tl.int32), num_rows.to(tl.int32), alignment.to(tl.int32)
    follow(EARLY)
    call = tl.load(epoch_of(state, pid)) + 1
    half = (call % 2).to(tl.int32)
    if SEND:
        if pid >= P - R:
            to = (me + P - 1 - pid) % R
            if is_active(active, to):
                _announce(topk_idx, peers, active, tag, T, call, half, me, to, R, M, K, KP, E, LC, HB, TB, WIDE, PIECES)
        for u in range(pid, T * PIECES, P):
            _send_piece(
                peers, state, active, topk_idx, topk_weights, x, scales, route, first_pick, T, call, half, me, u // PIECES,
                u % PIECES, R, RP, M, K, KP, E, LC, TB, SLOT, H, N, BITS, S, PAY, PART, min(PART, BLOCK), MODE, GP, DTYPE, WIDE, WEIGHTED,
            )  # fmt: skip
    if RECEIVE:
        if pid == P - 1:
            _lead(
                peers, state, active, tokens_per_expert, blocks, overflow, loads, waits, tag, call, half, me, num_rows,
                alignment, timeout, R, RP, P, M, K, E, LC, HB, PADDED, LOADS, TIMED,
            )  # fmt: skip
        wait_ready(state, call)
        if (first_expert(me + 1, E, R) == first_expert(me, E, R)) & (pid == 0):
            _empty_rows(source, row_weights, 0, num_rows, WEIGHTED)
        for e in range(pid, first_expert(me + 1, E, R) - first_expert(me, E, R), P):
            _finish_block(
                state,
                e + 0,
                out,
                out_scales,
                source,
                row_weights,
                num_rows,
                R,
                P,
                LC,
                N,
                BITS,
                S,
                BLOCK,
                PADDING,
                WEIGHTED,
            )
        for u in range(pid, R * M, P):
            _receive_slot(
                peers, state, active, out, out_scales, row_weights, source, slots, call, half, me, u // M, u % M, num_rows,
                timeout, R, P, M, K, KP, E, LC, SLOT, N, BITS, S, PAY, BLOCK, WEIGHTED, COLUMNS, PIECES,
            )  # fmt: skip
        tl.debug_barrier()
        tl.store(epoch_of(state, pid), call)
