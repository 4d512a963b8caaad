# pyright: basic
"""Dispatch over two levels: once per (token, node) through the network, then to the ranks of the node that need it.

G nodes of P ranks. Grid ``W C``: W workers per channel (``kernels/two_turns.py``). Tasks of a channel: a network sender and a forwarder
(``kernels/two_forward.py``) per other node, the rows that stay, a sender per other local rank, a receiver per source with another local
index, the greeting (of channel 0). Example: 2 nodes of 2 ranks, token 5 of rank 0 goes to ranks 2 and 3: rank 0 sends it once, to rank 2,
whose forwarder places it, and stores it to ring (0, c) of rank 3.

Who publishes what, who may read when (``docs/twolevel.md``; inside a node as in ``kernels/dispatch.py``):

* A network sender packs a chunk of rows into staging slots, and puts them with their number onto ``net tail``; MAPPED: it packs them into
  the network ring itself, and owes the tail. The forwarder sees the tail (acquire), then reads the slots.
* A forwarder stores rows to the rings of other local ranks, and owes their tails; their receivers owe heads to it. Rows
  for its own rank it takes to their places. It returns network credits behind its reads, CREDIT rows at a time and at the end.
* What turns owe is added once per round (``publish``, release), behind the last task: behind all that was stored and read. The kernel ends behind
  another ``publish``, so nothing is owed between calls.
* Slot ``i % NQ`` of the network ring and of its staging ring belongs to the i-th row of the channel in this call.

Nobody waits in a circle: a receiver needs its forwarder only, a forwarder its receivers and its network sender, and a network
sender its forwarder's credits, of which less than CREDIT are held back: ``NQ >= NCHUNK + CREDIT - 1``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.dispatch import TOGETHER, pack_payload, pack_riders, put_own_rows, receive_chunk, send_chunk, zero_padding
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import (
    first_expert, first_in, go_of, head_of, in_bound, order_of, out_bound, peer_base, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.sync import ON_ROOM, ON_ROWS, RANK, TIMED_OUT, give_up, given_up, load_acquire, now_ns, words
from tokenyard.kernels.two_forward import forward_turn
from tokenyard.kernels.two_letters import greet_turn
from tokenyard.kernels.two_net import put
from tokenyard.kernels.two_region import ON_NET_ROOM, done_in, net_bytes, net_head, net_sent_to, net_tail, num_tasks, other
from tokenyard.kernels.two_turns import ON_TIME, OVER, begin_tasks, dealt, next_step, owe, place_in_round, publish, reports


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
    peers, state, plan, x, scales, meta, T, me, to, c, task, done, step,
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
                x, scales, meta, order_of(plan, to, T, D, C), ring, lo + i, n, lo,
                H, N, BITS, S, MW, SLOT, PAY, Q, B, BLOCK, MODE, GP, DTYPE,
            )  # fmt: skip
            owe(state, task, c, 0, tail_of(there, me, c, R, C).to(tl.int64), n.to(tl.int64), None, R, D - R, C)
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(sent_to(state, to, c, R, C), base + hi - lo)
    return left


@triton.jit
def _receive_turn(
    peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c, task, done, step,
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
                mine + RINGS + (s * C + c).to(tl.int64) * RING, i, n, tl.load(first_in(plan, s, D, C)) + lo,
                R, D, C, K, KP, J, N, BITS, S, SLOT, PAY, Q, B, BLOCK, PLACED, FRESH, WEIGHTED, STATIC,
            )  # fmt: skip
            owe(state, task, c, 0, head.to(tl.int64), n.to(tl.int64), None, R, D - R, C)
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(taken_from(state, s, c, R, C), base + hi - lo)
    return left


@triton.jit
def far_turn(
    peers, state, plan, x, scales, meta, T, me, node, c, task, done, step,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr,
    NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """A chunk of rows of channel ``c`` for ``node`` into the network ring of its rank of my local index."""
    G: tl.constexpr = R // P
    lo, hi = tl.load(out_bound(plan, R + node, c, D, C)), tl.load(out_bound(plan, R + node, c + 1, D, C))
    i = tl.load(done).to(tl.int32)
    base = tl.load(net_sent_to(state, node, c, R, G, C))
    left = hi - lo - i
    if left > 0:
        mine, home, to = peer_base(peers, me), me // P, node * P + me % P
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
            ring = peer_base(peers, to) + there if MAPPED else mine + here
            order = order_of(plan, R + node, T, D, C)
            first = i % NQ  # chunks begin at multiples of NCHUNK, and so does the end of the ring
            b = tl.arange(0, B)
            several = tl.arange(0, TOGETHER)
            for j in range(0, n, B):
                token = tl.load(order + lo + i + j + b, mask=j + b < n, other=0)
                pack_payload(
                    x, token, ring, first + j + b, j + b < n, H, N, BITS, S, SLOT, PAY, BLOCK, B, MODE, GP, DTYPE
                )
            if MW or (S and not MODE):
                for j in range(0, n, TOGETHER):
                    token = tl.load(order + lo + i + j + several, mask=j + several < n, other=0)
                    pack_riders(scales, meta, token, ring, first + j + several, j + several < n, S, MW, SLOT, PAY, MODE)
            at, num_bytes, account = first.to(tl.int64) * SLOT, n.to(tl.int64) * SLOT, net_bytes(state, node, R, G, C)
            tail = net_tail(home, c, C, FAR)
            if MAPPED:
                tl.atomic_add(account, num_bytes, sem="relaxed", scope="gpu")
                owe(state, task, c, 0, peer_base(peers, to) + tail, n.to(tl.int64), None, R, G, C)
            else:
                put(peers, account, mine, to, there + at, here + at, num_bytes, tail, n.to(tl.int64), 2, True)
            left -= n
            tl.store(done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(net_sent_to(state, node, c, R, G, C), base + hi - lo)
    return left


@triton.jit(repr=shown_as("twolevel::dispatch"))
def two_dispatch_kernel(
    peers, state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, tag, T, E, num_rows, forced,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, J: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr,
    W: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr,
    CHUNK: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr,
    CREDIT: tl.constexpr, B: tl.constexpr, PB: tl.constexpr, BLOCK: tl.constexpr, FB: tl.constexpr, FBLOCK: tl.constexpr, PLACED: tl.constexpr,
    FRESH: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr, PADDING: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr, MAPPED: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """See the module, and ``dispatch_kernel``, for PB too. A forwarder has FB rows of FBLOCK words in flight."""
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
    LAST: tl.constexpr = (TASKS + WORKERS - 1) // WORKERS - 1
    BESIDE: tl.constexpr = P - 1 if P > 1 else 1
    if pid >= 0:
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
                place = place_in_round(turn, c, WORKERS, TASKS)
                task = dealt(worker, place, WORKERS)
                done = done_in(state, task, c, R, G, C)
                rows, relayed = worker * 0, worker * 0
                if task < G - 1:
                    rows = far_turn(
                        peers, state, plan, x, scales, meta, T, me, (home + 1 + task) % G, c, task, done, step,
                        R, D, P, C, H, N, BITS, S, MW, SLOT, PAY, NETS, STAGE, NRING, NQ, NCHUNK, PB, BLOCK, MODE, GP, DTYPE, FAR, MAPPED,
                    )  # fmt: skip
                elif task < 2 * (G - 1):
                    rows = forward_turn(
                        peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me,
                        (home + 2 * (G - 1) - task) % G, c, task, done, step, R, D, P, PP, C, K, KP, J, N, BITS, S, RINGS, RING, SLOT, PAY, Q,
                        CHUNK, NETS, NRING, NQ, CREDIT, FB, FBLOCK, PLACED, FRESH, WEIGHTED, STATIC, W, FAR, MAPPED,
                    )  # fmt: skip
                elif task < 2 * (G - 1) + 1:
                    rows = _own_turn(
                        state, plan, x, scales, meta, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows,
                        me, c, peer_base(peers, me) + RINGS + (me * C + c).to(tl.int64) * RING, done,
                        R, D, C, K, KP, J, H, N, BITS, S, MW, SLOT, PAY, CHUNK, PB, BLOCK, PLACED, FRESH, WEIGHTED, STATIC, MODE,
                        GP, DTYPE,
                    )  # fmt: skip
                elif task < 2 * (G - 1) + P:
                    to = home * P + (local + task - 2 * (G - 1)) % P
                    rows = _send_turn(
                        peers, state, plan, x, scales, meta, T, me, to, c, task, done, step,
                        R, D, C, H, N, BITS, S, MW, RINGS, RING, SLOT, PAY, Q, CHUNK, PB, BLOCK, MODE, GP, DTYPE,
                    )  # fmt: skip
                elif task < TASKS - 1:
                    at = task - P - 2 * (G - 1)
                    s = (home + G - at // BESIDE) % G * P + (local + P - 1 - at % BESIDE) % P
                    relayed = (s // P != home).to(tl.int32)
                    rows = _receive_turn(
                        peers, state, plan, out, out_scales, topk_idx, picks, weights, source, gather, slots, T, E, num_rows, me, s, c,
                        task, done, step, R, D, P, C, K, KP, J, N, BITS, S, RINGS, RING, SLOT, PAY, Q, CHUNK, B, BLOCK, PLACED, FRESH,
                        WEIGHTED, STATIC,
                    )  # fmt: skip
                elif (task < TASKS) & (c == 0):
                    rows = greet_turn(peers, state, tag, done, step, R, C, RP, P, W, FAR, NET)
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(relayed > 0, 0, rows)
                if place == LAST:  # behind tasks that copy inside the rank: meanwhile what others stored arrives
                    publish(state, worker, c, TASKS, WORKERS, R, G, C)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
        publish(state, worker, c, TASKS, WORKERS, R, G, C)
