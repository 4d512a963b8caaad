# pyright: basic
"""Dispatch over two levels: once per (token, node) through the network, then to the ranks of the node that need it.

G nodes of P ranks. Grid ``W C + 1``: W workers per channel (``kernels/two_turns.py``), the greeter. Tasks of a channel: a network sender and
a forwarder per other node, the rows that stay, a sender per other local rank, a receiver per source with
another local index. Example: 2 nodes of
2 ranks, token 5 of rank 0 goes to ranks 2 and 3: rank 0 puts it once, to rank 2, whose forwarder places it, and stores it to ring (0, c)
of rank 3.

Who publishes what, who may read when (``docs/twolevel.md``; inside a node as in ``kernels/dispatch.py``):

* A network sender packs a chunk of rows into staging slots, and puts them with their number onto ``net tail``. The forwarder sees
  the tail (acquire), then reads the slots.
* A forwarder stores rows to the rings of other local ranks, then adds to their tails (release); their receivers return heads to it. Rows
  for its own rank it takes to their places. It returns network credits behind its reads, CREDIT rows at a time and at the end.
* Slot ``i % NQ`` of the network ring and of its staging ring belongs to the i-th row of the channel in this call.

Nobody waits in a circle: a receiver needs its forwarder only, a forwarder its receivers and its network sender, and a network
sender its forwarder's credits, of which less than CREDIT are held back: ``NQ >= NCHUNK + CREDIT - 1``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.dispatch import TOGETHER, pack_payload, pack_riders, put_own_rows, receive_chunk, send_chunk, zero_padding
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words
from tokenyard.kernels.place import place_riders, place_rows
from tokenyard.kernels.region import (
    first_expert, first_in, go_of, head_of, in_bound, order_of, out_bound, owner_of, peer_base, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.sync import (
    ON_ROOM, ON_ROWS, RANK, TIMED_OUT, add_release, give_up, give_up_on_one, given_up, lacking, load_acquire, look_at_all, now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_letters import greet_all
from tokenyard.kernels.two_net import credit, put
from tokenyard.kernels.two_region import (
    ON_NET_ROOM, ON_NET_ROWS, ON_ROOMS, done_in, moved_of, net_bytes, net_head, net_sent_to, net_tail, net_taken_from, num_tasks, other, rest_at,
    table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_turns import ON_TIME, OVER, begin_tasks, dealt, next_step, reports


@triton.jit
def _own_turn(
    state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, c, ring, done,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, CHUNK: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr, WEIGHTED: tl.constexpr,
    STATIC: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of channel ``c`` for this rank itself. Returns the rows that are left, as all turns do."""
    lo, hi = tl.load(out_bound(plan, me, c, D, C)), tl.load(out_bound(plan, me, c + 1, D, C))
    i = tl.load(done).to(tl.int32)
    left = hi - lo - i
    tl.debug_barrier()
    if left > 0:
        n = tl.minimum(left, CHUNK)
        put_own_rows(
            state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, ring,
            lo + i, lo + i + n, R, D, C, K, KP, J, H, N, BITS, S, MW, SLOT, PAY, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC, MODE, GP,
            DTYPE,
        )  # fmt: skip
        left -= n
        tl.store(done, (i + n).to(tl.int64))
    return left


@triton.jit
def _send_turn(
    peers, state, plan, x, scales, meta, T, me, to, c, done, step,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr,
    MW: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr,
    CHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A chunk of rows of channel ``c`` for rank ``to`` into its ring (me, c)."""
    lo, hi = tl.load(out_bound(plan, to, c, D, C)), tl.load(out_bound(plan, to, c + 1, D, C))
    i = tl.load(done).to(tl.int32)
    base = tl.load(sent_to(state, to, c, R, C))
    left = hi - lo - i
    if left > 0:
        n = tl.minimum(left, CHUNK)
        want = base + tl.maximum(i + n - Q, 0)  # the ring is drained before the first row
        seen = load_acquire(head_of(peer_base(peers, me), to, c, R, C))
        tl.debug_barrier()
        if step != ON_TIME:
            if reports(step, seen < want, False):
                give_up(state, TIMED_OUT, ON_ROOM, to, c, want, seen)
        elif seen >= want:
            there = peer_base(peers, to)
            ring = there + RINGS + (me * C + c).to(tl.int64) * RING
            send_chunk(
                x, scales, meta, order_of(plan, to, T, D, C), ring, tail_of(there, me, c, R, C), lo + i, n, lo,
                H, N, BITS, S, MW, SLOT, PAY, Q, B, BLOCK, MODE, GP, DTYPE,
            )  # fmt: skip
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(sent_to(state, to, c, R, C), base + hi - lo)
    return left


@triton.jit
def _receive_turn(
    peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr,
    PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr,
    FRESH: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """A chunk of rows of source ``s`` out of ring (s, c), to their places. Credits go to the local rank that put them there."""
    lo, hi = tl.load(in_bound(plan, s, c, D, C)), tl.load(in_bound(plan, s, c + 1, D, C))
    i = tl.load(done).to(tl.int32)
    base = tl.load(taken_from(state, s, c, R, C))
    left = hi - lo - i
    if left > 0:
        mine = peer_base(peers, me)
        want = base + i + 1
        seen = load_acquire(tail_of(mine, s, c, R, C))
        tl.debug_barrier()
        if step != ON_TIME:
            if reports(step, seen < want, s // P != me // P):
                give_up(state, TIMED_OUT, ON_ROWS, s, c, want, seen)
        elif seen >= want:
            n = tl.minimum(tl.minimum((seen - base).to(tl.int32) - i, left), CHUNK)
            head = head_of(peer_base(peers, me // P * P + s % P), s // P * P + me % P, c, R, C)
            receive_chunk(
                plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s,
                mine + RINGS + (s * C + c).to(tl.int64) * RING, head, i, n, tl.load(first_in(plan, s, D, C)) + lo,
                R, D, C, K, KP, J, N, BITS, S, SLOT, PAY, Q, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(taken_from(state, s, c, R, C), base + hi - lo)
    return left


@triton.jit
def _far_turn(
    peers, state, plan, x, scales, meta, T, me, node, c, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr,
    NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr,
):  # fmt: skip
    """A chunk of rows of channel ``c`` for ``node`` into the network ring of its rank of my local index."""
    G: tl.constexpr = R // P
    lo, hi = tl.load(out_bound(plan, R + node, c, D, C)), tl.load(out_bound(plan, R + node, c + 1, D, C))
    i = tl.load(done).to(tl.int32)
    base = tl.load(net_sent_to(state, node, c, R, G, C))
    left = hi - lo - i
    if left > 0:
        mine, home = peer_base(peers, me), me // P
        n = tl.minimum(left, NCHUNK)
        want = base + tl.maximum(i + n - NQ, 0)  # ring and staging are drained before the first row
        seen = load_acquire(words(mine + net_head(node, c, G, C, FAR)))
        tl.debug_barrier()
        if step != ON_TIME:
            if reports(step, seen < want, False):
                give_up(state, TIMED_OUT, ON_NET_ROOM, node, c, want, seen)
        elif seen >= want:
            here = STAGE + (other(node, home) * C + c).to(tl.int64) * NRING
            there = NETS + (other(home, node) * C + c).to(tl.int64) * NRING
            order = order_of(plan, R + node, T, D, C)
            first = i % NQ  # chunks begin at multiples of NCHUNK, and so does the end of the ring
            b = tl.arange(0, B)
            several = tl.arange(0, TOGETHER)
            for j in range(0, n, B):
                token = tl.load(order + lo + i + j + b, mask=j + b < n, other=0)
                pack_payload(
                    x, token, mine + here, first + j + b, j + b < n, H, N, BITS, S, SLOT, PAY, BLOCK, B, MODE, GP, DTYPE
                )
            if MW or (S and not MODE):
                for j in range(0, n, TOGETHER):
                    token = tl.load(order + lo + i + j + several, mask=j + several < n, other=0)
                    pack_riders(scales, meta, token, mine + here, first + j + several, j + several < n, S, MW, SLOT, PAY, MODE)
            at = first.to(tl.int64) * SLOT
            put(
                peers, net_bytes(state, node, R, G, C), mine, node * P + me % P, there + at, here + at, n.to(tl.int64) * SLOT,
                net_tail(home, c, C, FAR), n.to(tl.int64), 2, NET,
            )  # fmt: skip
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(net_sent_to(state, node, c, R, G, C), base + hi - lo)
    return left


@triton.jit
def _hits(ring, slot, here, home, E, R: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
          SLOT: tl.constexpr, META: tl.constexpr):  # fmt: skip
    """Which local ranks ``[B, PP]`` the rows in ``slot [B]`` go to, from the ids that ride along."""
    k, q = tl.arange(0, KP), tl.arange(0, PP)
    ids = (ring + META + 4 + slot.to(tl.int64) * SLOT).to(tl.pointer_type(tl.int32))[:, None] + k[None, :]
    owner = owner_of(tl.load(ids, mask=here[:, None] & (k < K)[None, :], other=-1), E, R) - home * P
    return tl.max((owner[:, :, None] == q[None, None, :]).to(tl.int32), axis=1)


@triton.jit
def _forward_turn(
    peers, state, plan, out, out_scales, topk_idx, picks, weights, gather_source, gather, slots, T, E, num_rows, me, node, c, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    J: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr,
    SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, NETS: tl.constexpr, NRING: tl.constexpr,
    NQ: tl.constexpr, CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr,
):  # fmt: skip
    """A chunk of rows of channel ``c`` from ``node`` out of the network ring: to their places, and into the rings (source, c) of the other
    local ranks that need them."""
    G: tl.constexpr = R // P
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    AT_ONCE: tl.constexpr = P > 1 and BITS == 32 and not PLACED  # a row is read once for all its places
    lo, hi = tl.load(in_bound(plan, R + node, c, D, C)), tl.load(in_bound(plan, R + node, c + 1, D, C))
    i0 = tl.load(done).to(tl.int32)
    base = tl.load(net_taken_from(state, node, c, R, G, C))
    left = hi - lo - i0
    if left > 0:
        mine, home, source = peer_base(peers, me), me // P, node * P + me % P
        want = base + i0 + 1
        seen = load_acquire(words(mine + net_tail(node, c, C, FAR)))
        if reports(step, seen < want, False):
            give_up(state, TIMED_OUT, ON_NET_ROWS, node, c, want, seen)
        elif seen >= want:
            b, q = tl.arange(0, B), tl.arange(0, PP)
            near, beside, my = q < P, (q < P) & (q != me % P), (q == me % P)[None, :]
            cap = tl.load(table_rows(plan, R, D, C))
            begin, end = first_expert(me, E, R), first_expert(me + 1, E, R)
            table = table_of(plan, T, end - begin, cap, other(node, home), D, P, C)
            from_source = tl.load(in_bound(plan, source, c, D, C))
            a0, most = tl.load(first_in(plan, source, D, C)) + from_source, tl.load(in_bound(plan, source, c + 1, D, C)) - from_source
            ring = mine + NETS + (other(node, home) * C + c).to(tl.int64) * NRING
            rings = RINGS + (source * C + c).to(tl.int64) * RING
            bases = tl.load(words(peers) + home * P + q, mask=beside, other=0)
            heads = head_of(mine, node * P + q, c, R, C)
            put_at, sent_at = moved_of(state, 0, node * P + q, c, R, G, C), sent_to(state, node * P + q, c, R, C)
            sent = tl.load(sent_at, mask=beside, other=0)
            before = tl.load(put_at, mask=near & (i0 > 0), other=0).to(tl.int32)
            counts = before
            n = tl.minimum(tl.minimum((seen - base).to(tl.int32) - i0, left), CHUNK)
            rooms = look_at_all(heads, beside)
            tl.debug_barrier()
            moved, ok = n * 0, True
            while (moved < n) & ok:
                i, here = i0 + moved + b, moved + b < n
                rows = table + (lo + i).to(tl.int64)[:, None] * P + q[None, :]
                inside = here[:, None] & near[None, :] & (lo + i < cap)[:, None]
                if FRESH:
                    hit = tl.where(inside, _hits(ring, i % NQ, here, home, E, R, P, PP, K, KP, SLOT, META), 0)
                    earlier = (b[None, :] < b[:, None])[:, :, None]  # Triton 3.6 crashes on a scan of so few rows
                    at = counts[None, :] + tl.sum(tl.where(earlier, hit[None, :, :], 0), axis=1)
                else:
                    at = tl.load(rows, mask=inside, other=-1)
                    hit = (at >= 0).to(tl.int32)
                more = tl.sum(hit, axis=0)
                wants = sent + tl.maximum(counts + more - Q, 0)  # rings are drained before the first row
                ok = (lacking(rooms, wants, beside) == 0) & (step == ON_TIME)
                if reports(step, lacking(rooms, wants, beside) > 0, False):
                    give_up_on_one(state, ON_ROOMS, node * C + c + (q * 0), wants, rooms, beside)
                if ok:
                    if FRESH:
                        tl.store(rows, tl.where(hit > 0, at, -1), mask=inside)
                    mine_at = tl.sum(tl.where(my, at, 0), axis=1)
                    stays = (tl.sum(tl.where(my, hit, 0), axis=1) > 0) & (mine_at < most)
                    place = a0 + mine_at
                    if AT_ONCE:
                        place_riders(
                            ring + PAY, ring + META, i % NQ, place, stays, source, begin, end, out_scales, topk_idx, weights,
                            gather_source, slots, gather, SLOT // 4, SLOT // 4, K, KP, S, FRESH, WEIGHTED, STATIC,
                        )  # fmt: skip
                    else:
                        place_rows(
                            ring, ring + PAY, ring + META, i % NQ, place, stays, source, begin, end, plan, T, num_rows, out,
                            out_scales, topk_idx, picks, weights, gather_source, gather, slots, SLOT * 8 // BITS, SLOT // 4, SLOT // 4,
                            D, C, K, KP, J, B, N, BITS, S, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
                        )  # fmt: skip
                    for k0 in range(0, SLOT // 4 if P > 1 else 0, BLOCK):
                        w = k0 + tl.arange(0, BLOCK)
                        mask = here[:, None] & (w < SLOT // 4)[None, :]
                        words_of = tl.multiple_of(ring.to(tl.pointer_type(tl.int32)), 16)
                        words_of = words_of + (i % NQ).to(tl.int64)[:, None] * (SLOT // 4) + w[None, :]
                        v = tl.load(words_of, mask=mask, cache_modifier=".cg")
                        if AT_ONCE:
                            to = as_words(out, 32) + place.to(tl.int64)[:, None] * N + w[None, :]
                            tl.store(to, v, mask=stays[:, None] & (w < N)[None, :], cache_modifier=".cs")
                        for p in tl.static_range(P):
                            one = ((q == p) & beside)[None, :]
                            goes = tl.sum(tl.where(one, hit, 0), axis=1) > 0
                            slot = (tl.sum(tl.where(one, at, 0), axis=1) % Q).to(tl.int64)
                            to = tl.multiple_of((peer_base(peers, home * P + p) + rings).to(tl.pointer_type(tl.int32)), 16)
                            to = to + slot[:, None] * (SLOT // 4) + w[None, :]
                            tl.store(to, v, mask=mask & goes[:, None], cache_modifier=".cs")
                    counts += more
                    moved = tl.minimum(moved + B, n)
            if moved > 0:
                put_here = (counts - before).to(tl.int64)
                add_release(tail_of(bases, source, c, R, C), put_here, beside & (put_here > 0))
                left -= moved
                i1 = i0 + moved
                tl.store(done, i1.to(tl.int64))
                tl.store(put_at, counts.to(tl.int64), mask=near)
                owed = tl.where(left == 0, i1, i1 // CREDIT * CREDIT) - i0 // CREDIT * CREDIT
                if owed > 0:
                    credit(
                        peers, net_bytes(state, node, R, G, C), mine, source, rest_at(R, P, C, W, FAR),
                        net_head(home, c, G, C, FAR), owed.to(tl.int64), NET,
                    )  # fmt: skip
                if left == 0:
                    tl.store(sent_at, sent + counts, mask=beside)
                    tl.store(net_taken_from(state, node, c, R, G, C), base + hi - lo)
    return left


@triton.jit(repr=shown_as("twolevel::dispatch"))
def two_dispatch_kernel(
    peers, state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, tag, T, E, num_rows, forced,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, J: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr,
    W: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr,
    CHUNK: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr,
    CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FB: tl.constexpr, FBLOCK: tl.constexpr, PLACED: tl.constexpr,
    FRESH: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr, PADDING: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """See the module, and ``dispatch_kernel``. A forwarder has FB rows of FBLOCK words in flight."""
    pid = tl.program_id(0)
    if FRESH:  # launched before the host knew the counts
        pid = tl.where((tl.load(go_of(plan, D, C)) == 0) & (forced == 0), -1, pid)
    pid = tl.where(given_up(state), -1, pid)  # the plan may be unfinished then
    T, E, num_rows = T.to(tl.int32), E.to(tl.int32), num_rows.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    home, local = me // P, me % P
    c, worker = pid % C, pid // C
    G: tl.constexpr = R // P
    TASKS: tl.constexpr = num_tasks(R, G)
    BESIDE: tl.constexpr = P - 1 if P > 1 else 1
    if (pid >= 0) & (pid < WORKERS * C):
        begin_tasks(state, worker, c, TASKS, WORKERS, R, G, C)
        if PADDING:
            if worker == WORKERS - 1:
                mine = first_expert(me + 1, E, R) - first_expert(me, E, R)
                zero_padding(plan, out, out_scales, T, mine, num_rows, c, D, C, N, BITS, S, BLOCK)
        step, idle, since = worker * 0, worker * 0, now_ns()
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left, direct = worker * 0, worker * 0
            for turn in range((TASKS + WORKERS - 1) // WORKERS):
                task = dealt(worker, turn, c, WORKERS, TASKS)
                done = done_in(state, task, c, R, G, C)
                rows, relayed = worker * 0, worker * 0
                if task < G - 1:
                    rows = _far_turn(
                        peers, state, plan, x, scales, meta, T, me, (home + 1 + task) % G, c, done, step,
                        R, D, P, C, H, N, BITS, S, MW, SLOT, PAY, NETS, STAGE, NRING, NQ, NCHUNK, B, BLOCK, MODE, GP, DTYPE, FAR, NET,
                    )  # fmt: skip
                elif task < 2 * (G - 1):
                    rows = _forward_turn(
                        peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me,
                        (home + 2 * (G - 1) - task) % G, c, done, step, R, D, P, PP, C, K, KP, J, N, BITS, S, RINGS, RING, SLOT, PAY, Q,
                        CHUNK, NETS, NRING, NQ, CREDIT, FB, FBLOCK, PLACED, FRESH, WEIGHTED, STATIC, W, FAR, NET,
                    )  # fmt: skip
                elif task < 2 * (G - 1) + 1:
                    rows = _own_turn(
                        state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows,
                        me, c, peer_base(peers, me) + RINGS + (me * C + c).to(tl.int64) * RING, done,
                        R, D, C, K, KP, J, H, N, BITS, S, MW, SLOT, PAY, CHUNK, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC, MODE,
                        GP, DTYPE,
                    )  # fmt: skip
                elif task < 2 * (G - 1) + P:
                    to = home * P + (local + task - 2 * (G - 1)) % P
                    rows = _send_turn(
                        peers, state, plan, x, scales, meta, T, me, to, c, done, step,
                        R, D, C, H, N, BITS, S, MW, RINGS, RING, SLOT, PAY, Q, CHUNK, B, BLOCK, MODE, GP, DTYPE,
                    )  # fmt: skip
                elif task < TASKS:
                    at = task - P - 2 * (G - 1)
                    s = (home + G - at // BESIDE) % G * P + (local + P - 1 - at % BESIDE) % P
                    relayed = (s // P != home).to(tl.int32)
                    rows = _receive_turn(
                        peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c,
                        done, step, R, D, P, C, K, KP, J, N, BITS, S, RINGS, RING, SLOT, PAY, Q, CHUNK, B, BLOCK, PLACED, FRESH,
                        WEIGHTED, STATIC,
                    )  # fmt: skip
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(relayed > 0, 0, rows)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
    elif pid == WORKERS * C:
        greet_all(peers, state, tag, R, C, RP, P, W, FAR, NET)
