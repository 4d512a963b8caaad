# pyright: basic
"""Combine: experts' ranks send one row per (token, rank) back through the rings, owners add them in rank order.

Grid ``R * C + 1``: a sender per (other owner, channel), a reducer per channel (tokens ``c * share`` .. ), the greeter. The rings are
those of dispatch, the other way round: the row at place p among my rows to rank d comes back as row ``p - out_bound(d, c)`` of
the ring (d, c). Example: 2 ranks, token 7 of rank 0 went to both: rank 1 sends its partial sum through ring (1, c) of rank 0, whose
reducer c adds its own partial sum, then that row, rounds, and stores token 7.

Who publishes what, who may read when: as in ``kernels/dispatch.py``, with reducers for receivers; a reducer adds to ``heads`` at each
source (release) after its reads of BATCHES steps: a release waits for all that was stored before.

Nobody waits in a circle: rows of a ring are in token order, and a reducer takes tokens in order. If it waits for a row of
ring (d, c), all earlier rows of that ring are returned but at most ``BATCHES * B - 1``, so with ``Q >= CHUNK + BATCHES * B - 1`` the sender has room
for the chunk that holds the row; and that sender waits for nobody else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.greet import greet
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import (
    first_in, head_of, in_bound, out_bound, peer_base, place_of, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.sync import (
    ON_ROOM, ON_ROWS, RANK, add_release, given_up, lacking, wait_at_least, wait_for_all, words,
)  # fmt: skip


@triton.jit
def partial_rows(
    x, slots, row_weights, a, here, w, H: tl.constexpr, J: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr,
    WEIGHTED: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels ``w [BLOCK]`` of the sums of the result rows of arrival rows ``a [B]``, rounded to the wire dtype."""
    rows = tl.multiple_of(x.to(tl.pointer_type(DTYPE)), 16)
    if PLACED:
        j = tl.arange(0, triton.next_power_of_2(J if J > 0 else 1))  # 0: a rank without experts
        at = slots.to(tl.pointer_type(tl.int64)) + a.to(tl.int64)[:, None] * J + j[None, :]
        slot = tl.load(at, mask=here[:, None] & (j < J)[None, :], other=-1)
        if WEIGHTED:
            weight = tl.load(row_weights.to(tl.pointer_type(tl.float32)) + slot, mask=slot >= 0, other=0.0)
        total = tl.zeros((B, BLOCK), tl.float32)
        for i in tl.static_range(J):  # unrolled, so that all rows are on their way at once
            one = (j == i)[None, :]
            row = tl.sum(tl.where(one, slot, 0), axis=1)
            mask = (row >= 0)[:, None] & (w < H)[None, :]
            v = tl.load(rows + row[:, None] * H + w[None, :], mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                v = v * tl.sum(tl.where(one, weight, 0.0), axis=1)[:, None]
            total = total + tl.where(mask, v, 0.0)
        return total.to(DTYPE)
    else:
        mask = here[:, None] & (w < H)[None, :]
        return tl.load(rows + a.to(tl.int64)[:, None] * H + w[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def store_sums(out, total, t, here, w, bias0, bias1, H: tl.constexpr, DTYPE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr):
    """Channels ``w [BLOCK]`` of tokens ``t [B]``, those ``here``: ``total [B, BLOCK]`` (float32), then biases, rounded."""
    at = t.to(tl.int64)[:, None] * H + w[None, :]
    mask = here[:, None] & (w < H)[None, :]
    if BIAS0 is not None:
        total = total + tl.load(bias0.to(tl.pointer_type(BIAS0)) + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS1 is not None:
        total = total + tl.load(bias1.to(tl.pointer_type(BIAS1)) + at, mask=mask, other=0.0).to(tl.float32)
    to = tl.multiple_of(out.to(tl.pointer_type(DTYPE)), 16)
    tl.store(to + at, total.to(DTYPE), mask=mask, cache_modifier=".cs")


@triton.jit
def send_sums_chunk(
    x, slots, row_weights, reduce, ring, i0, n, lo, a0,
    K: tl.constexpr, J: tl.constexpr, H: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Partial sums of arrival rows ``a0 + i0`` .. into a ring whose first row of the call is ``lo``. The caller publishes them."""
    b = tl.arange(0, B)
    for j in range(0, n, B):
        i, here = i0 + j + b, j + b < n
        at = ring + ((i - lo) % Q).to(tl.int64) * SLOT
        for k0 in range(0, H, BLOCK):
            w = k0 + tl.arange(0, BLOCK)
            v = partial_rows(x, slots, row_weights, a0 + i, here, w, H, J, DTYPE, PLACED, WEIGHTED, B, BLOCK)
            to = tl.multiple_of(ring.to(tl.pointer_type(DTYPE)), 16)
            to = to + ((i - lo) % Q).to(tl.int64)[:, None] * (SLOT * 8 // DTYPE.primitive_bitwidth)
            tl.store(to + w[None, :], v, mask=here[:, None] & (w < H)[None, :], cache_modifier=".cs")
        if REDUCE:
            k = tl.arange(0, triton.next_power_of_2(K))
            mask = here[:, None] & (k < K)[None, :]
            v = tl.load(
                reduce.to(tl.pointer_type(tl.float32)) + (a0 + i).to(tl.int64)[:, None] * K + k[None, :],
                mask=mask,
            )
            tl.store((at + PAY).to(tl.pointer_type(tl.float32))[:, None] + k[None, :], v, mask=mask)


@triton.jit
def send_sums(
    peers, state, plan, x, slots, row_weights, reduce, me, s, c,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, J: tl.constexpr, H: tl.constexpr, RINGS: tl.constexpr,
    RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Partial sums of rows that came from ``s`` in channel ``c``, into its ring (me, c)."""
    lo, hi = tl.load(in_bound(plan, s, c, R, C)), tl.load(in_bound(plan, s, c + 1, R, C))
    a0 = tl.load(first_in(plan, s, R, C))
    mine, there = peer_base(peers, me), peer_base(peers, s)
    ring = there + RINGS + (me * C + c).to(tl.int64) * RING
    tail = tail_of(there, me, c, R, C)
    base = tl.load(sent_to(state, s, c, R, C))
    want = base
    ok = wait_at_least(head_of(mine, s, c, R, C), want, state, ON_ROOM, s, c) >= want
    for i0 in range(lo, hi, CHUNK):
        n = tl.minimum(CHUNK, hi - i0)
        if ok:
            want = base + (i0 - lo) + n - Q
            ok = wait_at_least(head_of(mine, s, c, R, C), want, state, ON_ROOM, s, c) >= want
        if ok:
            send_sums_chunk(
                x, slots, row_weights, reduce, ring, i0, n, lo, a0, K, J, H, SLOT, PAY, Q, B, BLOCK, DTYPE, PLACED, WEIGHTED,
                REDUCE,
            )  # fmt: skip
            add_release(tail, n.to(tl.int64), None)
    tl.debug_barrier()
    tl.store(sent_to(state, s, c, R, C), base + hi - lo)


@triton.jit
def _reduce(
    peers, state, plan, x, slots, row_weights, reduce, bias0, bias1, out, reduced, T, me, c,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr,
    BIAS0: tl.constexpr, BIAS1: tl.constexpr, BATCHES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the rows of this channel's tokens, B tokens at a time, and return credits BATCHES times as many at a time.

    STAGES rounds of BLOCK channels are under way at once, all of rows that have been waited for: that loop begins behind the wait
    and ends with all of them read.
    """
    r, b = tl.arange(0, RP), tl.arange(0, B)
    remote = (r < R) & (r != me)
    share = (T + C - 1) // C
    t1 = tl.minimum(c * share + share, T)
    mine = peer_base(peers, me)
    bases = tl.load(taken_from(state, r, c, R, C), mask=remote, other=0)
    lows = tl.load(out_bound(plan, r, c, R, C), mask=r < R, other=0)
    heads = head_of(tl.load(words(peers) + r, mask=r < R, other=0), me, c, R, C)
    a0 = tl.load(first_in(plan, me, R, C))
    taken, seen, freed = tl.zeros((RP,), tl.int64), tl.zeros((RP,), tl.int64), tl.zeros((RP,), tl.int64)
    ok = True
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 if ROW % 16 == 0 else DTYPE.primitive_bitwidth // 8
    for t0 in range(c * share, t1, B):
        t = t0 + b
        here = t < t1
        table = place_of(plan, t, T, R, C)[:, None] + r[None, :]
        places = tl.load(table, mask=here[:, None] & (r < R)[None, :], other=-1)
        upto = tl.maximum(tl.max(places - lows[None, :] + 1, axis=0).to(tl.int64), taken)
        upto = tl.where(remote, upto, 0)
        if ok & (tl.max((upto > seen).to(tl.int32)) > 0):
            tails = wait_for_all(tail_of(mine, r, c, R, C), bases + upto, remote, state, ON_ROWS, c + (r * 0))
            ok = lacking(tails, bases + upto, remote) == 0
            seen = tails - bases
        if ok:
            own = tl.sum(tl.where(r[None, :] == me, places, 0), axis=1)
            for k0 in tl.range(0, H, BLOCK, num_stages=STAGES):
                w = k0 + tl.arange(0, BLOCK)
                if PLACED:
                    v_own = partial_rows(
                        x, slots, row_weights, a0 + own, own >= 0, w, H, J, DTYPE, PLACED, WEIGHTED, B, BLOCK
                    )
                total = tl.zeros((B, BLOCK), tl.float32)
                for d in tl.static_range(R):
                    place = tl.sum(tl.where(r[None, :] == d, places, 0), axis=1)
                    slot = (place - tl.sum(tl.where(r == d, lows, 0))) % Q
                    row = mine + RINGS + (d * C + c).to(tl.int64) * RING + slot.to(tl.int64) * SLOT
                    got = place >= 0
                    if PLACED:
                        got = got & (d != me)
                    else:  # this rank's own rows are taken where they are
                        row = tl.where(d == me, x + (a0 + place).to(tl.int64) * ROW, row)
                    rows = tl.multiple_of(row.to(tl.pointer_type(DTYPE))[:, None], (ALIGNED, ALIGNED))
                    v = tl.load(
                        rows + w[None, :], mask=got[:, None] & (w < H)[None, :], other=0.0, cache_modifier=".cg"
                    )
                    if PLACED:
                        v = tl.where(d == me, v_own, v)
                    total = total + v.to(tl.float32)
                store_sums(out, total, t, here, w, bias0, bias1, H, DTYPE, BIAS0, BIAS1)
            if REDUCE:
                k = tl.arange(0, triton.next_power_of_2(K))
                weight = tl.zeros((B, triton.next_power_of_2(K)), tl.float32)
                for d in tl.static_range(R):
                    place = tl.load(place_of(plan, t, T, R, C) + d, mask=here, other=-1)
                    mask = (place >= 0)[:, None] & (k < K)[None, :]
                    slot = (place - tl.load(out_bound(plan, d, c, R, C))) % Q
                    row = mine + RINGS + (d * C + c).to(tl.int64) * RING + slot.to(tl.int64) * SLOT + PAY
                    row = tl.where(d == me, reduce + (a0 + place).to(tl.int64) * (K * 4), row)
                    weight += tl.load(row.to(tl.pointer_type(tl.float32))[:, None] + k[None, :], mask=mask, other=0.0)
                to = reduced.to(tl.pointer_type(tl.float32)) + t.to(tl.int64)[:, None] * K + k[None, :]
                tl.store(to, weight, mask=here[:, None] & (k < K)[None, :])
            taken = upto
            if (t0 + B >= t1) | ((t0 - c * share) // B % BATCHES == BATCHES - 1):
                add_release(heads, taken - freed, remote & (taken > freed))
                freed = taken
    tl.debug_barrier()
    tl.store(taken_from(state, r, c, R, C), bases + taken, mask=remote)


@triton.jit(repr=shown_as("nvlink::combine"))
def combine_kernel(
    peers, state, plan, x, slots, row_weights, reduce, bias0, bias1, out, reduced, tag, T,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr,
    SB: tl.constexpr, SBLOCK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
    BATCHES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. ``bias0``, ``bias1``: dtype BIAS0, BIAS1 or none. ``reduce``: ``[Nb, K]`` float32 if REDUCE.

    A sender has SB rows of SBLOCK channels in flight, a reducer B tokens of BLOCK channels in each of STAGES rounds.
    """
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    T = T.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    c = pid % C
    if (pid >= 0) & (pid < C):
        _reduce(
            peers, state, plan, x, slots, row_weights, reduce, bias0, bias1, out, reduced, T, me, c,
            R, C, RP, K, J, H, RINGS, RING, SLOT, PAY, Q, B, BLOCK, DTYPE, PLACED, WEIGHTED, REDUCE, BIAS0, BIAS1, BATCHES, STAGES,
        )  # fmt: skip
    elif (pid >= 0) & (pid < R * C):
        s = (me + pid // C) % R
        send_sums(
            peers, state, plan, x, slots, row_weights, reduce, me, s, c,
            R, C, K, J, H, RINGS, RING, SLOT, PAY, Q, CHUNK, SB, SBLOCK, DTYPE, PLACED, WEIGHTED, REDUCE,
        )  # fmt: skip
    elif pid == R * C:
        greet(peers, state, tag, R, C, RP)
