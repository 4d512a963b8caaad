# pyright: basic
"""The forwarder of a dispatch over two levels: rows out of a network ring, to the ranks of its node that need them.

Example: 2 nodes of 2 ranks. Rank 2 forwards for rank 0: it takes token 5, for itself, to its place, and stores it to ring (0, c) of rank 3.

Who publishes what, who may read when (``kernels/two_dispatch.py``): it sees ``net tail`` (acquire), then reads the slots. It stores rows to
inner rings and owes their tails, network credits too where they are plain adds (MAPPED): all are added at the end of the round, behind
stores and reads (release). NVSHMEM's credits go at once, behind the reads of the turn. CREDIT rows are credited at a time, and the rest at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.payload import as_words
from tokenyard.kernels.place import place_riders, place_rows
from tokenyard.kernels.region import first_expert, first_in, head_of, in_bound, owner_of, peer_base, sent_to, tail_of
from tokenyard.kernels.sync import TIMED_OUT, give_up, give_up_on_one, lacking, load_acquire, look_at_all, words
from tokenyard.kernels.two_net import credit
from tokenyard.kernels.two_region import (
    ON_NET_ROWS, ON_ROOMS, moved_of, net_bytes, net_head, net_tail, net_taken_from, other, rest_at, table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_turns import ON_TIME, owe, reports


@triton.jit
def hits_of(ring, slot, here, home, E, R: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
          SLOT: tl.constexpr, META: tl.constexpr):  # fmt: skip
    """Which local ranks ``[B, PP]`` the rows in ``slot [B]`` go to, from the ids that ride along."""
    k, q = tl.arange(0, KP), tl.arange(0, PP)
    ids = (ring + META + 4 + slot.to(tl.int64) * SLOT).to(tl.pointer_type(tl.int32))[:, None] + k[None, :]
    owner = owner_of(tl.load(ids, mask=here[:, None] & (k < K)[None, :], other=-1), E, R) - home * P
    return tl.max((owner[:, :, None] == q[None, None, :]).to(tl.int32), axis=1)


@triton.jit
def return_credits(
    peers, state, mine, me, home, source, node, c, task, i0, i1, last,
    R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, CREDIT: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """To the network sender ``source``, for rows ``i0`` .. ``i1 - 1``, as far as they are due: CREDIT at a time, all behind the ``last``."""
    owed = tl.where(last, i1, i1 // CREDIT * CREDIT) - i0 // CREDIT * CREDIT
    if owed > 0:
        head = net_head(home, c, R // P, C, FAR)
        if MAPPED:
            owe(state, task, c, me % P, peer_base(peers, source) + head, owed.to(tl.int64), None, R, R // P, C)
        else:
            account = net_bytes(state, node, R, R // P, C)
            credit(account, mine, source, rest_at(R, P, C, W, FAR), head, owed.to(tl.int64))


@triton.jit
def forward_turn(
    peers, state, plan, out, out_scales, topk_idx, picks, weights, gather_source, gather, slots, T, E, num_rows, me, node, c, task, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    J: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr,
    SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, NETS: tl.constexpr, NRING: tl.constexpr,
    NQ: tl.constexpr, CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
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
                    hit = tl.where(inside, hits_of(ring, i % NQ, here, home, E, R, P, PP, K, KP, SLOT, META), 0)
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
                owe(state, task, c, q, tail_of(bases, source, c, R, C).to(tl.int64), put_here, beside & (put_here > 0), R, G, C)
                left -= moved
                i1 = i0 + moved
                tl.store(done, i1.to(tl.int64))
                tl.store(put_at, counts.to(tl.int64), mask=near)
                return_credits(peers, state, mine, me, home, source, node, c, task, i0, i1, left == 0, R, P, C, W, CREDIT, FAR, MAPPED)
                if left == 0:
                    tl.store(sent_at, sent + counts, mask=beside)
                    tl.store(net_taken_from(state, node, c, R, G, C), base + hi - lo)
    return left
