# pyright: basic
"""Combine over two levels: a node's rows of a token are summed there, and one row per (token, node) crosses the network.

G nodes of P ranks. Grid ``W C``: W workers per channel (``kernels/two_turns.py``). Tasks of a channel: a reducer, a combiner per other node,
a sender per owner with another local index, the greeting (of channel 0). Example: 2 nodes of 2 ranks, token 5 of rank 0 went to ranks 2
and 3: rank 3 sends its partial sum to rank 2, whose combiner adds its own in rank order, rounds and sends one row to rank 0, whose reducer
adds node 0's sum and this row.

The tree is the same whoever owns the token: ranks of a node in order, rounded to the wire dtype; then nodes in order (``docs/semantics.md``).

Who publishes what, who may read when: as in ``kernels/two_dispatch.py`` and ``kernels/combine.py``. A combiner stores sums to staging
slots, and puts a chunk with its number onto ``net tail``; MAPPED: it stores them into the network ring itself, and owes the tail in every turn.
Senders owe tails, combiners heads of local senders: ``publish`` adds them once per round behind the reducer (release), and once behind the
last round. A reducer adds to heads itself at the end of a turn (release, behind its reads); MAPPED: also to those of network rings.

Nobody waits in a circle: rows of a ring are in token order, and so are combiners and reducers. If a reducer waits for a row of a
network ring, all earlier ones are taken but those of its step (at most B - 1), and less than CREDIT are held back, so with
``NQ >= NCHUNK + B + CREDIT - 2`` its combiner has room for the chunk with the row, and waits for senders only, which wait for it only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.combine import Chunk, Partials, send_sums_chunk
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import (
    first_expert, first_in, head_of, in_bound, out_bound, peer_base, place_of, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.sync import (
    ON_ROOM, RANK, TIMED_OUT, add_release, give_up, give_up_on_one, given_up, lacking, load_acquire, look_at_all, now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_letters import greet_turn
from tokenyard.kernels.two_net import credit, put
from tokenyard.kernels.two_region import (
    ON_BOTH, ON_NET_ROOM, ON_PARTS, done_in, moved_of, net_bytes, net_head, net_sent_to, net_tail, net_taken_from, other, rest_at,
    table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_sums import add_nodes, node_sum, node_weights
from tokenyard.kernels.two_turns import ON_TIME, OVER, begin_tasks, dealt, next_step, owe, place_in_round, publish, reports


@triton.jit
def _combine_turn(
    peers, state, plan, x, slots, row_weights, reduce, T, E, me, node, c, task, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
    H: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr,
    NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr,
    FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Sums of my node for owner (``node``, my local index), channel ``c``, into its network ring, up to the end of a chunk.

    Returns the rows that are left, as all turns do.
    """
    G: tl.constexpr = R // P
    lo, hi = tl.load(in_bound(plan, R + node, c, D, C)), tl.load(in_bound(plan, R + node, c + 1, D, C))
    i0 = tl.load(done).to(tl.int32)
    base = tl.load(net_sent_to(state, node, c, R, G, C))
    left = hi - lo - i0
    if left > 0:
        b, q = tl.arange(0, B), tl.arange(0, PP)
        mine, home, owner = peer_base(peers, me), me // P, node * P + me % P
        others = (q < P) & (q != me % P)
        a0 = tl.load(first_in(plan, owner, D, C)) + tl.load(in_bound(plan, owner, c, D, C))
        cap = tl.load(table_rows(plan, R, D, C))
        local = first_expert(me + 1, E, R) - first_expert(me, E, R)
        table = table_of(plan, T, local, cap, other(node, home), D, P, C)
        here_ring = STAGE + (other(node, home) * C + c).to(tl.int64) * NRING
        there = NETS + (other(home, node) * C + c).to(tl.int64) * NRING
        ring = peer_base(peers, owner) + there if MAPPED else mine + here_ring
        heads = head_of(tl.load(words(peers) + home * P + q, mask=others, other=0), owner, c, R, C)
        taken_at, bases_at = moved_of(state, 0, node * P + q, c, R, G, C), taken_from(state, node * P + q, c, R, C)
        bases = tl.load(bases_at, mask=others, other=0)
        before = tl.load(taken_at, mask=others & (i0 > 0), other=0)
        taken = before
        first = i0 // NCHUNK * NCHUNK
        end = tl.minimum(first + NCHUNK, hi - lo)
        want = base + tl.maximum(end - NQ, 0)  # ring and staging are drained before the first row
        room = load_acquire(words(mine + net_head(node, c, G, C, FAR)))
        tails = look_at_all(tail_of(mine, node * P + q, c, R, C), others)
        tl.debug_barrier()
        if reports(step, room < want, False):
            give_up(state, TIMED_OUT, ON_NET_ROOM, node, c, want, room)
        i, ok = i0, room >= want
        while (i < end) & ok:
            inside = i + b < end
            row = lo + i + b
            rows = table + row.to(tl.int64)[:, None] * P + q[None, :]
            at = tl.load(rows, mask=(inside & (row < cap))[:, None] & (q < P)[None, :], other=-1)
            upto = tl.where(others, tl.maximum(tl.max(at + 1, axis=0).to(tl.int64), taken), 0)
            ok = (lacking(tails, bases + upto, others) == 0) & (step == ON_TIME)
            if reports(step, lacking(tails, bases + upto, others) > 0, False):
                give_up_on_one(state, ON_PARTS, node * C + c + (q * 0), bases + upto, tails, others)
            if ok:
                own = a0 + tl.sum(tl.where((q == me % P)[None, :], at, 0), axis=1)
                slot = (i + b) % NQ
                for k0 in tl.range(0, H, BLOCK, num_stages=STAGES):
                    w = k0 + tl.arange(0, BLOCK)
                    v = node_sum(
                        x, slots, row_weights, mine, at, own, node, me, c, w, H, J, P, PP, C, RINGS, RING, SLOT, Q, B, BLOCK, DTYPE,
                        PLACED, WEIGHTED,
                    )  # fmt: skip
                    to = tl.multiple_of(ring.to(tl.pointer_type(DTYPE)), 16)
                    to = to + slot.to(tl.int64)[:, None] * (SLOT * 8 // DTYPE.primitive_bitwidth)
                    tl.store(to + w[None, :], v.to(DTYPE), mask=inside[:, None] & (w < H)[None, :])
                if REDUCE:
                    k = tl.arange(0, triton.next_power_of_2(K))
                    v = node_weights(reduce, mine, at, own, node, me, c, K, P, PP, C, RINGS, RING, SLOT, PAY, Q, B)
                    to = (ring + slot.to(tl.int64) * SLOT + PAY).to(tl.pointer_type(tl.float32))[:, None] + k[None, :]
                    tl.store(to, v, mask=inside[:, None] & (k < K)[None, :])
                taken = upto
                i = tl.minimum(i + B, end)
        if i > i0:
            owe(state, task, c, q, heads.to(tl.int64), taken - before, others & (taken > before), R, G, C)
            tail, account = net_tail(home, c, C, FAR), net_bytes(state, node, R, G, C)
            if MAPPED:
                n = (i - i0).to(tl.int64)
                tl.atomic_add(account, n * SLOT, sem="relaxed", scope="gpu")
                owe(state, task, c, me % P, peer_base(peers, owner) + tail, n, None, R, G, C)
            elif i == end:
                offset = (first % NQ).to(tl.int64) * SLOT
                n = (end - first).to(tl.int64)
                put(peers, account, mine, owner, there + offset, here_ring + offset, n * SLOT, tail, n, 2, True)
            left = hi - lo - i
            tl.store(done, i.to(tl.int64))
            tl.store(taken_at, taken, mask=others)
            if left == 0:
                tl.store(bases_at, bases + taken, mask=others)
                tl.store(net_sent_to(state, node, c, R, G, C), base + hi - lo)
    return left


@triton.jit
def _send_turn(
    peers, state, plan, x, slots, row_weights, reduce, me, s, c, task, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, K: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr,
    B: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """A chunk of partial sums of rows that came from ``s``, into the ring of the local rank that has ``s``'s local index."""
    lo, hi = tl.load(in_bound(plan, s, c, D, C)), tl.load(in_bound(plan, s, c + 1, D, C))
    i = tl.load(done).to(tl.int32)
    base = tl.load(sent_to(state, s, c, R, C))
    left = hi - lo - i
    if left > 0:
        n = tl.minimum(left, CHUNK)
        want = base + tl.maximum(i + n - Q, 0)  # the ring is drained before the first row
        seen = load_acquire(head_of(peer_base(peers, me), s, c, R, C))
        tl.debug_barrier()
        if step != ON_TIME:
            if reports(step, seen < want, False):
                give_up(state, TIMED_OUT, ON_ROOM, s, c, want, seen)
        elif seen >= want:
            there = peer_base(peers, me // P * P + s % P)
            as_me = s // P * P + me % P
            parts = Partials(rows=x, slots=slots, weights=row_weights, picks=reduce)
            ring = there + RINGS + (as_me * C + c).to(tl.int64) * RING
            chunk = Chunk(begin=lo + i, count=n, low=lo, first=tl.load(first_in(plan, s, D, C)))
            send_sums_chunk(parts, ring, chunk, K, J, H, SLOT, PAY, Q, B, BLOCK, DTYPE, PLACED, WEIGHTED)
            owe(state, task, c, 0, tail_of(there, as_me, c, R, C).to(tl.int64), n.to(tl.int64), None, R, D - R, C)
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(sent_to(state, s, c, R, C), base + hi - lo)
    return left


@triton.jit
def return_network_credits(
    state, mine, home, local, c, owed, last, R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, RP: tl.constexpr,
    W: tl.constexpr, CREDIT: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Network credits ``owed [RP]`` (node g at R + g) that are due. Returns what is still owed."""
    r = tl.arange(0, RP)
    for node in tl.static_range(R // P):
        amount = tl.sum(tl.where(r == R + node, owed, 0))
        if (amount >= CREDIT) | (last & (amount > 0)):
            to = home * 0 + node * P + local
            account = net_bytes(state, node, R, R // P, C)
            credit(account, mine, to, rest_at(R, P, C, W, FAR), net_head(home, c, R // P, C, FAR), amount)
            owed = tl.where(r == R + node, 0, owed)
    return owed


@triton.jit
def _reduce_turn(
    peers, state, plan, x, slots, row_weights, reduce, bias0, bias1, out, reduced, T, me, c, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr,
    PAY: tl.constexpr, Q: tl.constexpr, NETS: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, TURN: tl.constexpr,
    CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr,
    WEIGHTED: tl.constexpr, REDUCE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Sum the rows of TURN of this channel's tokens, B tokens at a time: my node's here, other nodes' as they come."""
    share = (T + C - 1) // C
    t1 = tl.minimum(c * share + share, T)
    tokens = tl.maximum(t1 - c * share, 0)
    i0 = tl.load(done).to(tl.int32)
    left = tokens - i0
    if left > 0:
        r, b, q = tl.arange(0, RP), tl.arange(0, B), tl.arange(0, PP)
        home, local = me // P, me % P
        G: tl.constexpr = R // P
        near = (r < R) & (r // P == home) & (r != me)
        far = (r >= R) & (r < D) & (r != R + home)
        awaited = near | far
        mine = peer_base(peers, me)
        node = tl.maximum(r - R, 0)
        near_at, far_at = taken_from(state, r, c, R, C), net_taken_from(state, node, c, R, G, C)
        taken_at, owed_at = moved_of(state, 0, r, c, R, G, C), moved_of(state, 1, r, c, R, G, C)
        bases = tl.load(near_at, mask=near, other=0) + tl.load(far_at, mask=far, other=0)
        before = tl.load(taken_at, mask=awaited & (i0 > 0), other=0)
        taken = before
        owed = tl.load(owed_at, mask=far & (i0 > 0), other=0)
        lows = tl.load(out_bound(plan, r, c, D, C), mask=r < D, other=0)
        heads = head_of(tl.load(words(peers) + r, mask=near, other=0), me, c, R, C)
        if MAPPED:
            theirs = tl.load(words(peers) + node * P + local, mask=far, other=0)
            heads = words(tl.where(far, theirs + net_head(home, c, G, C, FAR), heads.to(tl.int64)))
        a0 = tl.load(first_in(plan, me, D, C))
        my_low = tl.sum(tl.where(r == me, lows, 0))
        low_near = tl.load(out_bound(plan, home * P + q, c, D, C), mask=q < P, other=0)
        tails = tl.where(far, mine + net_tail(node, c, C, FAR), tail_of(mine, r, c, R, C).to(tl.int64))
        found = look_at_all(words(tails), awaited)
        tl.debug_barrier()
        i, ok = i0, True
        end = tl.minimum(i0 + TURN, tokens)
        while (i < end) & ok:
            t = c * share + i + b
            here = t < t1
            table = place_of(plan, t, T, D, C)[:, None] + r[None, :]
            places = tl.load(table, mask=here[:, None] & (r < D)[None, :], other=-1)
            upto = tl.maximum(tl.max(places - lows[None, :] + 1, axis=0).to(tl.int64), taken)
            upto = tl.where(awaited, upto, 0)
            ok = (lacking(found, bases + upto, awaited) == 0) & (step == ON_TIME)
            if reports(step, lacking(found, bases + upto, awaited) > 0, True):
                give_up_on_one(state, ON_BOTH, c + (r * 0), bases + upto, found, awaited)
            if ok:
                beside = place_of(plan, t, T, D, C)[:, None] + home * P + q[None, :]
                at = tl.load(beside, mask=here[:, None] & (q < P)[None, :], other=-1)
                at = tl.where(at >= 0, at - low_near[None, :], -1)
                own = a0 + my_low + tl.sum(tl.where((q == local)[None, :], at, 0), axis=1)
                for k0 in tl.range(0, H, BLOCK, num_stages=STAGES):
                    w = k0 + tl.arange(0, BLOCK)
                    v_home = node_sum(
                        x, slots, row_weights, mine, at, own, home, me, c, w, H, J, P, PP, C, RINGS, RING, SLOT, Q, B, BLOCK, DTYPE,
                        PLACED, WEIGHTED,
                    )  # fmt: skip
                    add_nodes(
                        v_home, places, lows, t, here, mine, home, c, w, bias0, bias1, out,
                        R, P, C, RP, H, SLOT, NETS, NRING, NQ, B, BLOCK, DTYPE, BIAS0, BIAS1,
                    )  # fmt: skip
                if REDUCE:
                    k = tl.arange(0, triton.next_power_of_2(K))
                    weight = tl.zeros((B, triton.next_power_of_2(K)), tl.float32)
                    w_home = node_weights(reduce, mine, at, own, home, me, c, K, P, PP, C, RINGS, RING, SLOT, PAY, Q, B)
                    for g in tl.static_range(G):
                        place = tl.sum(tl.where((r == R + g)[None, :], places, 0), axis=1)
                        slot = (place - tl.sum(tl.where(r == R + g, lows, 0))) % NQ
                        ring = mine + NETS + (other((home * 0) + g, home) * C + c).to(tl.int64) * NRING + PAY
                        rows = (ring + slot.to(tl.int64) * SLOT).to(tl.pointer_type(tl.float32))
                        got = (place >= 0) & (home != g)
                        v = tl.load(rows[:, None] + k[None, :], mask=got[:, None] & (k < K)[None, :], other=0.0)
                        weight += tl.where(home == g, w_home, v)
                    to = reduced.to(tl.pointer_type(tl.float32)) + t.to(tl.int64)[:, None] * K + k[None, :]
                    tl.store(to, weight, mask=here[:, None] & (k < K)[None, :])
                taken = upto
                i = tl.minimum(i + B, tokens)
        if i > i0:
            left = tokens - i
            add_release(heads, taken - before, (awaited if MAPPED else near) & (taken > before))
            if not MAPPED:
                owed += tl.where(far, taken - before, 0)
                owed = return_network_credits(state, mine, home, local, c, owed, left == 0, R, P, C, RP, W, CREDIT, FAR)
                tl.store(owed_at, owed, mask=far)
            tl.store(done, i.to(tl.int64))
            tl.store(taken_at, taken, mask=awaited)
            if left == 0:
                tl.store(near_at, bases + taken, mask=near)
                tl.store(far_at, bases + taken, mask=far)
    return left


@triton.jit(repr=shown_as("twolevel::combine"))
def two_combine_kernel(
    peers, state, plan, x, slots, row_weights, reduce, bias0, bias1, out, reduced, tag, T, E,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr,
    PAY: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr,
    NQ: tl.constexpr, NCHUNK: tl.constexpr, CREDIT: tl.constexpr, SB: tl.constexpr, SBLOCK: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TURN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCE: tl.constexpr,
    BIAS0: tl.constexpr, BIAS1: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr, MAPPED: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """See the module, and ``combine_kernel``. Combiners and reducers have B rows of BLOCK channels in flight, in each of STAGES rounds."""
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    T, E = T.to(tl.int32), E.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    home, local = me // P, me % P
    c, worker = pid % C, pid // C
    G: tl.constexpr = R // P
    TASKS: tl.constexpr = R + 1
    BESIDE: tl.constexpr = P - 1 if P > 1 else 1
    if pid >= 0:
        begin_tasks(state, worker, c, TASKS, WORKERS, R, G, C)
        step, idle, since = worker * 0, worker * 0, now_ns()
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left, direct = worker * 0, worker * 0
            for turn in range((TASKS + WORKERS - 1) // WORKERS):
                place = place_in_round(turn, c, WORKERS, TASKS)
                task = dealt(worker, place, WORKERS)
                done = done_in(state, task, c, R, G, C)
                rows = worker * 0
                if task < 1:
                    rows = _reduce_turn(
                        peers, state, plan, x, slots, row_weights, reduce, bias0, bias1, out, reduced, T, me, c, done, step,
                        R, D, P, PP, C, RP, K, J, H, W, RINGS, RING, SLOT, PAY, Q, NETS, NRING, NQ, TURN, CREDIT, B, BLOCK, STAGES, DTYPE,
                        PLACED, WEIGHTED, REDUCE, BIAS0, BIAS1, FAR, MAPPED,
                    )  # fmt: skip
                elif task < G:
                    rows = _combine_turn(
                        peers, state, plan, x, slots, row_weights, reduce, T, E, me, (home + task) % G, c, task, done, step,
                        R, D, P, PP, C, K, J, H, RINGS, RING, SLOT, PAY, Q, NETS, STAGE, NRING, NQ, NCHUNK, B, BLOCK, STAGES, DTYPE, PLACED,
                        WEIGHTED, REDUCE, FAR, MAPPED,
                    )  # fmt: skip
                elif task < R:
                    node, beside = (home + (task - G) // BESIDE) % G, (local + 1 + (task - G) % BESIDE) % P
                    rows = _send_turn(
                        peers, state, plan, x, slots, row_weights, reduce, me, node * P + beside, c, task, done, step,
                        R, D, P, C, K, J, H, RINGS, RING, SLOT, PAY, Q, CHUNK, SB, SBLOCK, DTYPE, PLACED, WEIGHTED, REDUCE,
                    )  # fmt: skip
                elif (task < TASKS) & (c == 0):
                    rows = greet_turn(peers, state, tag, done, step, R, C, RP, P, W, FAR, NET)
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(task < 1, 0, rows)
                if place == 0:  # behind the reducer, which stores inside the rank only: meanwhile what others stored arrives
                    publish(state, worker, c, TASKS, WORKERS, R, G, C)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
        publish(state, worker, c, TASKS, WORKERS, R, G, C)
