# pyright: basic
"""Dispatch over two levels: once per (token, node) through the network, then to the ranks of the node that need it.

G nodes of P ranks. Grid ``(P + 2 (G - 1) + R - 1) C + 1``: a sender per (local rank, channel), a network sender per (other node, channel), a
forwarder per (other node, channel), a receiver per (other source, channel), the greeter. Example: 2 nodes of 2 ranks, token 5 of rank 0
goes to ranks 2 and 3: rank 0 puts it once, to rank 2, whose forwarder stores it to the rings (0, c) of ranks 2 and 3.

Who publishes what, who may read when (``docs/twolevel.md``; inside a node as in ``kernels/dispatch.py``):

* A network sender packs a chunk of rows into staging slots, and puts them with their number onto ``net tail``. The forwarder waits for
  the tail (acquire), then reads the slots.
* A forwarder stores rows to the rings of local ranks, then adds to their tails (release); their receivers return heads to it. It returns
  network credits behind its reads, CREDIT rows at a time and at the end.
* Slot ``i % NQ`` of the network ring and of its staging ring belongs to the i-th row of the channel in this call.

Nobody waits in a circle: a receiver waits for its forwarder only, a forwarder for its receivers and its network sender, and a network
sender for its forwarder's credits, of which less than CREDIT are held back: ``NQ >= NCHUNK + CREDIT - 1``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.dispatch import pack_rows, put_own_rows, receive_rows, send_rows
from tokenyard.kernels.region import (
    first_expert, go_of, head_of, in_bound, order_of, out_bound, owner_of, peer_base, sent_to, tail_of,
)  # fmt: skip
from tokenyard.kernels.sync import RANK, add_release, given_up, lacking, wait_at_least, wait_for_all, words
from tokenyard.kernels.two_letters import greet_all
from tokenyard.kernels.two_net import credit, put
from tokenyard.kernels.two_region import (
    ON_NET_ROOM, ON_NET_ROWS, ON_ROOMS, net_bytes, net_head, net_sent_to, net_tail, net_taken_from, other, rest_at, table_of, table_rows,
)  # fmt: skip


@triton.jit
def _send_far(
    peers, state, plan, x, scales, meta, T, me, node, c,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr,
    NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr,
):  # fmt: skip
    """Rows of channel ``c`` for ``node`` into the network ring of its rank of my local index."""
    lo, hi = tl.load(out_bound(plan, R + node, c, D, C)), tl.load(out_bound(plan, R + node, c + 1, D, C))
    order = order_of(plan, R + node, T, D, C)
    b = tl.arange(0, B)
    mine, home = peer_base(peers, me), me // P
    here = STAGE + (other(node, home) * C + c).to(tl.int64) * NRING
    there = NETS + (other(home, node) * C + c).to(tl.int64) * NRING
    head = words(mine + net_head(node, c, R // P, C, FAR))
    base = tl.load(net_sent_to(state, node, c, R, R // P, C))
    want = base
    ok = wait_at_least(head, want, state, ON_NET_ROOM, node, c) >= want
    for i0 in range(lo, hi, NCHUNK):
        n = tl.minimum(NCHUNK, hi - i0)
        if ok:
            want = base + (i0 - lo) + n - NQ
            ok = wait_at_least(head, want, state, ON_NET_ROOM, node, c) >= want
        if ok:
            first = (i0 - lo) % NQ  # chunks begin at multiples of NCHUNK, and so does the end of the ring
            for j in range(0, n, B):
                token = tl.load(order + i0 + j + b, mask=j + b < n, other=0)
                pack_rows(
                    x, scales, meta, token, mine + here, first + j + b, j + b < n, H, N, BITS, S, MW, SLOT, PAY, BLOCK, B, MODE, GP,
                    DTYPE,
                )  # fmt: skip
            at = first.to(tl.int64) * SLOT
            put(
                peers, net_bytes(state, node, R, R // P, C), mine, node * P + me % P, there + at, here + at, n.to(tl.int64) * SLOT, net_tail(home, c, C, FAR),
                n.to(tl.int64), 2, NET,
            )  # fmt: skip
    tl.debug_barrier()
    tl.store(net_sent_to(state, node, c, R, R // P, C), base + hi - lo)


@triton.jit
def _hits(ring, slot, here, home, E, R: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
          SLOT: tl.constexpr, META: tl.constexpr):  # fmt: skip
    """Which local ranks ``[B, PP]`` the rows in ``slot [B]`` go to, from the ids that ride along."""
    k, q = tl.arange(0, KP), tl.arange(0, PP)
    ids = (ring + META + 4 + slot.to(tl.int64) * SLOT).to(tl.pointer_type(tl.int32))[:, None] + k[None, :]
    owner = owner_of(tl.load(ids, mask=here[:, None] & (k < K)[None, :], other=-1), E, R) - home * P
    return tl.max((owner[:, :, None] == q[None, None, :]).to(tl.int32), axis=1)


@triton.jit
def _forward(
    peers, state, plan, T, E, me, node, c,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, META: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr,
    NETS: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    FRESH: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr,
):  # fmt: skip
    """Rows of channel ``c`` from ``node`` out of the network ring, into the rings (source, c) of the local ranks that need them."""
    b, q = tl.arange(0, B), tl.arange(0, PP)
    near = q < P
    mine, home = peer_base(peers, me), me // P
    source = node * P + me % P
    lo, hi = tl.load(in_bound(plan, R + node, c, D, C)), tl.load(in_bound(plan, R + node, c + 1, D, C))
    cap = tl.load(table_rows(plan, R, D, C))
    local = first_expert(me + 1, E, R) - first_expert(me, E, R)
    table = table_of(plan, T, local, cap, other(node, home), D, P, C)
    ring = mine + NETS + (other(node, home) * C + c).to(tl.int64) * NRING
    rings = RINGS + (source * C + c).to(tl.int64) * RING
    bases = tl.load(words(peers) + home * P + q, mask=near, other=0)
    heads = head_of(mine, node * P + q, c, R, C)
    sent = tl.load(sent_to(state, node * P + q, c, R, C), mask=near, other=0)
    base = tl.load(net_taken_from(state, node, c, R, R // P, C))
    tail = words(mine + net_tail(node, c, C, FAR))
    number = node * C + c + (q * 0)
    ok = lacking(wait_for_all(heads, sent, near, state, ON_ROOMS, number), sent, near) == 0
    total = hi - lo
    taken, owed = total * 0, total * 0
    counts = q * 0
    while (taken < total) & ok:
        want = base + taken + 1
        seen = wait_at_least(tail, want, state, ON_NET_ROWS, node, c)
        ok = seen >= want
        n = tl.minimum(tl.minimum(seen - base, total).to(tl.int32) - taken, CHUNK)
        before = counts
        for j in range(0, n, B):
            i, here = taken + j + b, (j + b < n) & ok
            rows = table + (lo + i).to(tl.int64)[:, None] * P + q[None, :]
            inside = here[:, None] & near[None, :] & (lo + i < cap)[:, None]
            if FRESH:
                hit = tl.where(inside, _hits(ring, i % NQ, here, home, E, R, P, PP, K, KP, SLOT, META), 0)
                earlier = (b[None, :] < b[:, None])[:, :, None]  # Triton 3.6 crashes on a scan of so few rows
                at = counts[None, :] + tl.sum(tl.where(earlier, hit[None, :, :], 0), axis=1)
                tl.store(rows, tl.where(hit > 0, at, -1), mask=inside)
            else:
                at = tl.load(rows, mask=inside, other=-1)
                hit = (at >= 0).to(tl.int32)
            more = tl.sum(hit, axis=0)
            wants = sent + counts + more - Q
            if ok:
                ok = lacking(wait_for_all(heads, wants, near, state, ON_ROOMS, number), wants, near) == 0
            if ok:
                for k0 in range(0, SLOT // 4, BLOCK):
                    w = k0 + tl.arange(0, BLOCK)
                    mask = here[:, None] & (w < SLOT // 4)[None, :]
                    words_of = tl.multiple_of(ring.to(tl.pointer_type(tl.int32)), 16)
                    words_of = words_of + (i % NQ).to(tl.int64)[:, None] * (SLOT // 4) + w[None, :]
                    v = tl.load(words_of, mask=mask, cache_modifier=".cg")
                    for p in tl.static_range(P):
                        one = (q == p)[None, :]
                        goes = tl.sum(tl.where(one, hit, 0), axis=1) > 0
                        slot = (tl.sum(tl.where(one, at, 0), axis=1) % Q).to(tl.int64)
                        to = tl.multiple_of((peer_base(peers, home * P + p) + rings).to(tl.pointer_type(tl.int32)), 16)
                        to = to + slot[:, None] * (SLOT // 4) + w[None, :]
                        tl.store(to, v, mask=mask & goes[:, None], cache_modifier=".cs")
                counts += more
        if ok:
            put_here = (counts - before).to(tl.int64)
            add_release(tail_of(bases, source, c, R, C), put_here, near & (put_here > 0))
            taken += n
            owed += n
            if (owed >= CREDIT) | (taken == total):
                credit(
                    peers, net_bytes(state, node, R, R // P, C), mine, source, rest_at(R, P, C, W, FAR),
                    net_head(home, c, R // P, C, FAR), owed.to(tl.int64), NET,
                )  # fmt: skip
                owed = owed * 0
    tl.debug_barrier()
    tl.store(sent_to(state, node * P + q, c, R, C), sent + counts, mask=near)
    tl.store(net_taken_from(state, node, c, R, R // P, C), base + total)


@triton.jit
def two_dispatch_kernel(
    peers, state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, tag, T, E, num_rows, forced,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, J: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr,
    W: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr,
    CHUNK: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr,
    CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FB: tl.constexpr, FBLOCK: tl.constexpr, PLACED: tl.constexpr,
    FRESH: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr, PADDING: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr,
):  # fmt: skip
    """See the module, and ``dispatch_kernel``. A forwarder has FB rows of FBLOCK words in flight."""
    pid = tl.program_id(0)
    if FRESH:  # launched before the host knew the counts
        pid = tl.where((tl.load(go_of(plan, D, C)) == 0) & (forced == 0), -1, pid)
    pid = tl.where(given_up(state), -1, pid)  # the plan may be unfinished then
    T, E, num_rows = T.to(tl.int32), E.to(tl.int32), num_rows.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    home, local = me // P, me % P
    c, role = pid % C, pid // C
    G: tl.constexpr = R // P
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    if (pid >= 0) & (role < P):
        to = home * P + (local + 1 + role) % P
        ring = peer_base(peers, to) + RINGS + (me * C + c).to(tl.int64) * RING
        if to == me:
            put_own_rows(
                state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, c,
                ring, R, D, C, K, KP, J, H, N, BITS, S, MW, SLOT, PAY, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC, PADDING, MODE,
                GP, DTYPE,
            )  # fmt: skip
        else:
            send_rows(
                peers, state, plan, x, scales, meta, T, me, to, c, ring, R, D, C, H, N, BITS, S, MW, SLOT, PAY, Q, CHUNK, B, BLOCK,
                MODE, GP, DTYPE,
            )  # fmt: skip
    elif (pid >= 0) & (role < P + G - 1):
        _send_far(
            peers, state, plan, x, scales, meta, T, me, (home + 1 + role - P) % G, c, R, D, P, C, H, N, BITS, S, MW, SLOT, PAY,
            NETS, STAGE, NRING, NQ, NCHUNK, B, BLOCK, MODE, GP, DTYPE, FAR, NET,
        )  # fmt: skip
    elif (pid >= 0) & (role < P + 2 * (G - 1)):
        _forward(
            peers, state, plan, T, E, me, (home + 2 * G - 2 - (role - P)) % G, c, R, D, P, PP, C, K, KP, RINGS, RING, SLOT, META, Q,
            CHUNK, NETS, NRING, NQ, CREDIT, FB, FBLOCK, FRESH, W, FAR, NET,
        )  # fmt: skip
    elif (pid >= 0) & (role < P + 2 * (G - 1) + R - 1):
        s = (me + R - 1 - (role - P - 2 * (G - 1))) % R
        receive_rows(
            peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c,
            home * P + s % P, s // P * P + local, R, D, C, K, KP, J, N, BITS, S, RINGS, RING, SLOT, PAY, Q, CHUNK, B, BLOCK,
            PLACED, FRESH, WEIGHTED, STATIC,
        )  # fmt: skip
    elif role == P + 2 * (G - 1) + R - 1:
        greet_all(peers, state, tag, R, C, RP, P, W, FAR, NET)
