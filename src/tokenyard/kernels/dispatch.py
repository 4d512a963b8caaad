# pyright: basic
"""Dispatch into ordinary memory: rows stream through rings of bounded size, and receivers place them as they come.

Grid ``(2R - 1) * C + 1``: a sender per (destination, channel), a receiver per (other source, channel), the greeter. Rows for this
rank itself are placed by their sender. Example: 2 ranks, 1 channel, ring of 4 slots, 6 rows from 0 to 1 in chunks of 2: the sender
puts rows 0-3 into slots 0-3, waits until 2 were taken, puts rows 4, 5 into slots 0, 1; row i becomes arrival row ``first_in[0] + i``.

Who publishes what, who may read when:

* The sender stores a chunk of rows into slots of its ring at the destination, then adds their number to ``tails[me, channel]``
  there (release). The receiver waits for the tail to grow (acquire), then reads the slots.
* A fresh dispatch may be launched before the host knows the counts. It does nothing if the plan says that ranks disagree, or that
  one lacks room for its rows; all ranks see the same, and launch again (``forced``) with room enough.
* The receiver adds the number of rows it has read to ``heads[me, channel]`` at the source (release, behind its reads). The
  sender waits (acquire) until a slot's last reader is done before it writes that slot again.
* A call begins with the ring drained: its sender waits until everything it ever sent was taken. So slots may change their size
  from call to call, and slot ``i % Q`` belongs to the i-th row of the channel in this call.

Nobody waits in a circle: a sender waits only for the receiver of its own ring, which waits only for that sender.
All stores to result rows are disjoint, so there is nothing to order between receivers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.greet import greet
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, cast_rows, copy_rows, zero_row
from tokenyard.kernels.place import place_riders, place_rows
from tokenyard.kernels.plan import first_expert
from tokenyard.kernels.region import (
    block_of, first_in, go_of, head_of, in_bound, order_of, out_bound, peer_base, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.sync import ON_ROOM, ON_ROWS, RANK, add_release, given_up, wait_at_least, words

TOGETHER = tl.constexpr(16)
"""Rows whose riders are moved at once: short, so that they cost their latency only."""


@triton.jit
def pack_payload(
    x, token, ring, slot, here, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, SLOT: tl.constexpr,
    PAY: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of ``token [B]`` into ``slot [B]`` of a ring: payload, with MODE cast on the way and with its scales."""
    if MODE:
        cast_rows(x, token, ring, SLOT, ring + PAY, SLOT, slot, here, H, MODE, S, B, GP, DTYPE)
    else:
        copy_rows(as_words(x, BITS), token, N, as_words(ring, BITS), slot, SLOT * 8 // BITS, here, N, BLOCK)


@triton.jit
def pack_riders(
    scales, meta, token, ring, slot, here, S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """What rides along: scales, unless they are made on the way, and meta."""
    if S and not MODE:
        copy_rows(
            as_words(scales, 32), token, S, as_words(ring + PAY, 32), slot, SLOT // 4, here, S,
            triton.next_power_of_2(S),
        )  # fmt: skip
    if MW:
        META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
        copy_rows(
            as_words(meta, 32), token, MW, as_words(ring + META, 32), slot, SLOT // 4, here, MW,
            triton.next_power_of_2(MW),
        )  # fmt: skip


@triton.jit
def zero_padding(plan, out, out_scales, T, local, num_rows, c, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
                 BITS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Rows between the end of an expert's rows and the end of its block; experts ``c``, ``c + C``, ..."""
    for expert in range(c, local, C):
        e = expert + 0
        begin = tl.load(block_of(plan, e, local, T, R, C))
        end = tl.minimum(tl.load(block_of(plan, e, local, T, R, C) + 1), num_rows)
        for row in range(begin, end):
            r = (row + 0).to(tl.int64)
            zero_row(as_words(out, BITS) + r * N, N, BLOCK)
            if S:
                zero_row(as_words(out_scales, 32) + r * S, S, triton.next_power_of_2(S))


@triton.jit
def put_own_rows(
    state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, ring, lo, hi,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr, WEIGHTED: tl.constexpr,
    STATIC: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows ``lo`` .. ``hi - 1`` for this rank itself go to their places; cast ones of expert layouts through ``ring``."""
    first, end = first_expert(me, E, R), first_expert(me + 1, E, R)
    order = order_of(plan, me, T, D, C)
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    ROW: tl.constexpr = SLOT * 8 // BITS
    b = tl.arange(0, B)
    a0 = tl.load(first_in(plan, me, D, C))
    for i0 in range(lo, hi, B):
        i = i0 + b
        here = i < hi
        token = tl.load(order + i, mask=here, other=0)
        if MODE and PLACED:
            pack_payload(x, token, ring, b, here, H, N, BITS, S, SLOT, PAY, BLOCK, B, MODE, GP, DTYPE)
            pack_riders(scales, meta, token, ring, b, here, S, MW, SLOT, PAY, MODE)
            tl.debug_barrier()
            place_rows(
                ring, ring + PAY, ring + META, b, a0 + i, here, me, first, end, plan, T, num_rows, out,
                out_scales, topk_idx, picks, weights, source, gather, slots, ROW, SLOT // 4, SLOT // 4,
                D, C, K, KP, J, B, N, BITS, S, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip
            tl.debug_barrier()
        elif MODE:
            cast_rows(x, token, out, H, out_scales, S * 4, a0 + i, here, H, MODE, S, B, GP, DTYPE)
        elif PLACED:
            place_rows(
                x, scales, meta, token, a0 + i, here, me, first, end, plan, T, num_rows, out,
                out_scales, topk_idx, picks, weights, source, gather, slots, N, S, MW,
                D, C, K, KP, J, B, N, BITS, S, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip
        else:
            copy_rows(as_words(x, BITS), token, N, as_words(out, BITS), a0 + i, N, here, N, BLOCK)
    if not PLACED:
        several = tl.arange(0, TOGETHER)
        for i0 in range(lo, hi, TOGETHER):
            i = i0 + several
            token = tl.load(order + i, mask=i < hi, other=0)
            place_riders(
                scales, meta, token, a0 + i, i < hi, me, first, end, out_scales, topk_idx, weights, source, slots, gather,
                S, MW, K, KP, 0 if MODE else S, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip


@triton.jit
def send_chunk(
    x, scales, meta, order, ring, i0, n, lo,
    H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr,
    Q: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows ``i0`` .. ``i0 + n - 1`` of ``order`` into a ring whose first row of the call is ``lo``. The caller publishes them."""
    b, several = tl.arange(0, B), tl.arange(0, TOGETHER)
    for j in range(0, n, B):
        i, here = i0 + j + b, j + b < n
        token = tl.load(order + i, mask=here, other=0)
        pack_payload(x, token, ring, (i - lo) % Q, here, H, N, BITS, S, SLOT, PAY, BLOCK, B, MODE, GP, DTYPE)
    if MW or (S and not MODE):
        for j in range(0, n, TOGETHER):
            i, here = i0 + j + several, j + several < n
            token = tl.load(order + i, mask=here, other=0)
            pack_riders(scales, meta, token, ring, (i - lo) % Q, here, S, MW, SLOT, PAY, MODE)


@triton.jit
def send_rows(
    peers, state, plan, x, scales, meta, T, me, to, c, ring,
    R: tl.constexpr, C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr,
    MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of channel ``c`` for rank ``to`` into its ring (me, c)."""
    lo, hi = tl.load(out_bound(plan, to, c, R, C)), tl.load(out_bound(plan, to, c + 1, R, C))
    order = order_of(plan, to, T, R, C)
    mine = peer_base(peers, me)
    tail = tail_of(peer_base(peers, to), me, c, R, C)
    base = tl.load(sent_to(state, to, c, R, C))
    want = base
    ok = wait_at_least(head_of(mine, to, c, R, C), want, state, ON_ROOM, to, c) >= want
    for i0 in range(lo, hi, CHUNK):
        n = tl.minimum(CHUNK, hi - i0)
        if ok:
            want = base + (i0 - lo) + n - Q
            ok = wait_at_least(head_of(mine, to, c, R, C), want, state, ON_ROOM, to, c) >= want
        if ok:
            send_chunk(
                x, scales, meta, order, ring, i0, n, lo, H, N, BITS, S, MW, SLOT, PAY, Q, B, BLOCK, MODE, GP, DTYPE
            )
            add_release(tail, n.to(tl.int64), None)
    tl.debug_barrier()
    tl.store(sent_to(state, to, c, R, C), base + hi - lo)


@triton.jit
def receive_chunk(
    plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, ring, taken, n, a0,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, N: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    PLACED: tl.constexpr, FRESH: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Rows ``taken`` .. ``taken + n - 1`` of source ``s`` out of a ring whose first row goes to arrival row ``a0``. The caller gives credit."""
    first, end = first_expert(me, E, R), first_expert(me + 1, E, R)
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    ROW: tl.constexpr = SLOT * 8 // BITS
    b, several = tl.arange(0, B), tl.arange(0, TOGETHER)
    for j in range(0, n, B):
        i, here = taken + j + b, j + b < n
        if PLACED:
            place_rows(
                ring, ring + PAY, ring + META, i % Q, a0 + i, here, s, first, end, plan, T, num_rows, out,
                out_scales, topk_idx, picks, weights, source, gather, slots, ROW, SLOT // 4, SLOT // 4,
                D, C, K, KP, J, B, N, BITS, S, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip
        else:
            copy_rows(as_words(ring, BITS), i % Q, ROW, as_words(out, BITS), a0 + i, N, here, N, BLOCK)
    if not PLACED and (S or FRESH):
        for j in range(0, n, TOGETHER):
            i = taken + j + several
            place_riders(
                ring + PAY, ring + META, i % Q, a0 + i, j + several < n, s, first, end, out_scales, topk_idx, weights, source,
                slots, gather, SLOT // 4, SLOT // 4, K, KP, S, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip


@triton.jit
def receive_rows(
    peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, N: tl.constexpr,
    BITS: tl.constexpr, S: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr,
    Q: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Rows of source ``s`` out of ring (s, c), to their places."""
    lo, hi = tl.load(in_bound(plan, s, c, R, C)), tl.load(in_bound(plan, s, c + 1, R, C))
    a0 = tl.load(first_in(plan, s, R, C)) + lo
    mine = peer_base(peers, me)
    ring = mine + RINGS + (s * C + c).to(tl.int64) * RING
    head = head_of(peer_base(peers, s), me, c, R, C)
    base = tl.load(taken_from(state, s, c, R, C))
    total = hi - lo
    taken = total * 0
    ok = True
    while (taken < total) & ok:
        want = base + taken + 1
        seen = wait_at_least(tail_of(mine, s, c, R, C), want, state, ON_ROWS, s, c)
        ok = seen >= want
        if ok:
            n = tl.minimum(tl.minimum(seen - base, total).to(tl.int32) - taken, CHUNK)
            receive_chunk(
                plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, ring, taken, n, a0,
                R, R, C, K, KP, J, N, BITS, S, SLOT, PAY, Q, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip
            add_release(head, n.to(tl.int64), None)
            taken += n
    tl.debug_barrier()
    tl.store(taken_from(state, s, c, R, C), base + total)


@triton.jit(repr=shown_as("nvlink::dispatch"))
def dispatch_kernel(
    peers, state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, tag, T, E, num_rows, forced,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr,
    SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr, PB: tl.constexpr,
    BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
    PADDING: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See the module. H, DTYPE: of ``x``. N, BITS: words of a row on the wire. Q: slots of a ring; CHUNK: rows per release.

    Rows in flight: PB of those who have ``x``, and may cast; B of receivers.
    """
    pid = tl.program_id(0)
    if FRESH:  # launched before the host knew the counts
        pid = tl.where((tl.load(go_of(plan, R, C)) == 0) & (forced == 0), -1, pid)
    pid = tl.where(given_up(state), -1, pid)  # the plan may be unfinished then
    T, E, num_rows = T.to(tl.int32), E.to(tl.int32), num_rows.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    c = pid % C
    if (pid >= 0) & (pid < R * C):
        to = (me + 1 + pid // C) % R
        ring = peer_base(peers, to) + RINGS + (me * C + c).to(tl.int64) * RING
        if to == me:
            put_own_rows(
                state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me,
                ring, tl.load(out_bound(plan, me, c, R, C)), tl.load(out_bound(plan, me, c + 1, R, C)),
                R, R, C, K, KP, J, H, N, BITS, S, MW, SLOT, PAY, PB, BLOCK, PLACED, FRESH, WEIGHTED, STATIC, MODE, GP, DTYPE,
            )  # fmt: skip
            if PADDING:
                local = first_expert(me + 1, E, R) - first_expert(me, E, R)
                zero_padding(plan, out, out_scales, T, local, num_rows, c, R, C, N, BITS, S, BLOCK)
        else:
            send_rows(
                peers, state, plan, x, scales, meta, T, me, to, c, ring, R, C, H, N, BITS, S, MW, SLOT, PAY, Q, CHUNK, PB, BLOCK,
                MODE, GP, DTYPE,
            )  # fmt: skip
    elif (pid >= 0) & (pid < (2 * R - 1) * C):
        s = (me + R - (pid - R * C) // C - 1) % R
        receive_rows(
            peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c,
            R, C, K, KP, J, N, BITS, S, RINGS, RING, SLOT, PAY, Q, CHUNK, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
        )  # fmt: skip
    elif pid == (2 * R - 1) * C:
        greet(peers, state, tag, R, C, RP)
