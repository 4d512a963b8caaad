# pyright: basic
"""Dispatch in place over two levels: once per (token, node) through the network, then every row is written once, where it stays.

G nodes of P ranks. Grid ``W C``: W workers per channel (``kernels/two_turns.py``). Tasks of a channel: a network sender and a forwarder per
other node, the rows for ranks of this node, the hello (of channel 0). Example: 2 nodes of 2 ranks, token 5 of rank 0 goes to all ranks:
rank 0 writes it to its own view and to rank 1's, and sends it once to rank 2, which writes it to its own view and to rank 3's.

A view is ``[rows | scales | meta]`` from three offsets; meta is read by ``unpack_kernel`` (``kernels/direct.py``) afterwards, in stream order.
Forwarders know from the plan where rows of a channel begin at each rank of their node (``landing_of``).

Who publishes what, who may read when: of the network rings, as in ``kernels/two_dispatch.py`` (a forwarder returns credits behind its reads);
of views, ``kernels/two_views.py``. There are no rings inside a node.

Nobody waits in a circle: a forwarder needs its network sender only, a network sender the forwarder's credits, of which less than CREDIT are
held back, ``NQ >= NCHUNK + CREDIT - 1``; and all need greetings, which wait for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.direct import write_rows
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import EPOCH, first_expert, first_out, in_bound, peer_base, place_of
from tokenyard.kernels.sync import RANK, TIMED_OUT, give_up, given_up, load_acquire, now_ns, words
from tokenyard.kernels.two_dispatch import far_turn
from tokenyard.kernels.two_forward import hits_of, return_credits
from tokenyard.kernels.two_letters import all_are_here, say_hello_to_all
from tokenyard.kernels.two_region import (
    ON_NET_ROWS, done_in, landing_of, moved_of, net_tail, net_taken_from, other, table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_turns import ON_TIME, OVER, begin_tasks, dealt, next_step, place_in_round, publish, reports
from tokenyard.kernels.two_views import end_in_views


@triton.jit
def _near_turn(
    state, plan, x, scales, meta, parts, scales_at, meta_at, T, me, c, done, ready,
    D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """CHUNK of this channel's tokens to those ranks of this node that need them. Returns the tokens that are left."""
    share = (T + C - 1) // C
    t1 = tl.minimum(c * share + share, T)
    i0 = tl.load(done).to(tl.int32)
    left = tl.maximum(t1 - c * share, 0) - i0
    tl.debug_barrier()
    if (left > 0) & ready:
        b, q = tl.arange(0, B), tl.arange(0, PP)
        home, near = me // P, (q < P)[None, :]
        firsts = tl.load(first_out(plan, home * P + q, D, C), mask=q < P, other=0)
        n = tl.minimum(left, CHUNK)
        for j in range(0, n, B):
            t, here = c * share + i0 + j + b, j + b < n
            table = place_of(plan, t, T, D, C)[:, None] + home * P + q[None, :]
            places = tl.load(table, mask=here[:, None] & near, other=-1)
            rows = tl.where(places >= 0, places + firsts[None, :], -1)
            write_rows(
                x, scales, meta, t, here, rows, parts, scales_at, meta_at, me + 1 + c,
                N, S, MW, H, N, BITS, S, MW, P, PP, B, BLOCK, MODE, GP, DTYPE,
            )  # fmt: skip
        left -= n
        tl.store(done, (i0 + n).to(tl.int64))
    return left


@triton.jit
def _place_turn(
    peers, state, plan, parts, scales_at, meta_at, T, E, me, node, c, task, done, step, ready,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr,
    NETS: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr, CREDIT: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A chunk of rows of channel ``c`` from ``node`` out of the network ring, into the views of the local ranks that need them."""
    G: tl.constexpr = R // P
    META: tl.constexpr = PAY + (S * 4 + 15) // 16 * 16
    lo, hi = tl.load(in_bound(plan, R + node, c, D, C)), tl.load(in_bound(plan, R + node, c + 1, D, C))
    i0 = tl.load(done).to(tl.int32)
    base = tl.load(net_taken_from(state, node, c, R, G, C))
    left = hi - lo - i0
    if left > 0:
        mine, home, source = peer_base(peers, me), me // P, node * P + me % P
        want = base + i0 + 1
        seen = load_acquire(words(mine + net_tail(node, c, C, FAR)))
        b, q = tl.arange(0, B), tl.arange(0, PP)
        near = q < P
        moved_at = moved_of(state, 0, node * P + q, c, R, G, C)
        counts = tl.load(moved_at, mask=near & (i0 > 0), other=0).to(tl.int32)
        tl.debug_barrier()
        if reports(step, seen < want, False):
            give_up(state, TIMED_OUT, ON_NET_ROWS, node, c, want, seen)
        elif (seen >= want) & ready & (step == ON_TIME):
            cap = tl.load(table_rows(plan, R, D, C))
            local = first_expert(me + 1, E, R) - first_expert(me, E, R)
            table = table_of(plan, T, local, cap, other(node, home), D, P, C)
            landings = tl.load(landing_of(plan, T, local, other(node, home), q, c, D, P, C), mask=near, other=0)
            ring = mine + NETS + (other(node, home) * C + c).to(tl.int64) * NRING
            n = tl.minimum(tl.minimum((seen - base).to(tl.int32) - i0, left), NCHUNK)
            for j in range(0, n, B):
                i, here = i0 + j + b, j + b < n
                entries = table + (lo + i).to(tl.int64)[:, None] * P + q[None, :]
                inside = here[:, None] & near[None, :] & (lo + i < cap)[:, None]
                if MW:  # a fresh dispatch
                    hit = tl.where(inside, hits_of(ring, i % NQ, here, home, E, R, P, PP, K, KP, SLOT, META), 0)
                    earlier = (b[None, :] < b[:, None])[:, :, None]  # Triton 3.6 crashes on a scan of so few rows
                    at = counts[None, :] + tl.sum(tl.where(earlier, hit[None, :, :], 0), axis=1)
                    tl.store(entries, tl.where(hit > 0, at, -1), mask=inside)
                    counts += tl.sum(hit, axis=0)
                    at = tl.where(hit > 0, at, -1)
                else:
                    at = tl.load(entries, mask=inside, other=-1)
                rows = tl.where(at >= 0, at + landings[None, :], -1)
                write_rows(
                    ring, ring + PAY, ring + META, i % NQ, here, rows, parts, scales_at, meta_at, me + 1 + c,
                    SLOT * 8 // BITS, SLOT // 4, SLOT // 4, H, N, BITS, S, MW, P, PP, B, BLOCK, 0, 1, DTYPE,
                )  # fmt: skip
            left -= n
            i1 = i0 + n
            tl.store(done, i1.to(tl.int64))
            if MW:
                tl.store(moved_at, counts.to(tl.int64), mask=near)
            return_credits(peers, state, mine, me, home, source, node, c, task, i0, i1, left == 0, R, P, C, W, CREDIT, FAR, MAPPED)
            if left == 0:
                tl.store(net_taken_from(state, node, c, R, G, C), base + hi - lo)
    return left


@triton.jit(repr=shown_as("twolevel::dispatch_direct"))
def two_direct_kernel(
    peers, state, plan, views, x, scales, meta, tag, T, scales_at, meta_at, E,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, MW: tl.constexpr, W: tl.constexpr,
    SLOT: tl.constexpr, PAY: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr,
    NCHUNK: tl.constexpr, CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, FB: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr, MAPPED: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """See the module, and ``direct_kernel``. A forwarder has FB rows of BLOCK words in flight, others B."""
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    T, E = T.to(tl.int32), E.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    call = tl.load(words(state) + EPOCH)
    home = me // P
    c, worker = pid % C, pid // C
    G: tl.constexpr = R // P
    TASKS: tl.constexpr = 2 * G
    if pid >= 0:
        begin_tasks(state, worker, c, TASKS, WORKERS, R, G, C)
        q = tl.arange(0, PP)
        parts = tl.load(words(views) + home * P + q, mask=q < P, other=0)
        step, idle, since, ready = worker * 0, worker * 0, now_ns(), worker < 0
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left = worker * 0
            if not ready:  # the first thing to report: while somebody lacks it, others may lack room and rows
                if before > 0:  # hellos go out first
                    ready = all_are_here(peers, state, tag, call, step, R, C, RP)
                left += tl.where(ready, 0, 1)  # it came in this round: the next one has nothing else to end for
            for turn in range((TASKS + WORKERS - 1) // WORKERS):
                task = dealt(worker, place_in_round(turn, c, WORKERS, TASKS), WORKERS)
                done = done_in(state, task, c, R, G, C)
                rows = worker * 0
                if task < G - 1:
                    rows = far_turn(
                        peers, state, plan, x, scales, meta, T, me, (home + 1 + task) % G, c, task, done, step,
                        R, D, P, C, H, N, BITS, S, MW, SLOT, PAY, NETS, STAGE, NRING, NQ, NCHUNK, B, BLOCK, MODE, GP, DTYPE, FAR, MAPPED,
                    )  # fmt: skip
                elif task < 2 * (G - 1):
                    rows = _place_turn(
                        peers, state, plan, parts, scales_at, meta_at, T, E, me, (home + 2 * (G - 1) - task) % G, c, task, done, step,
                        ready, R, D, P, PP, C, K, KP, H, N, BITS, S, MW, SLOT, PAY, NETS, NRING, NQ, NCHUNK, CREDIT, FB, BLOCK, W, FAR, MAPPED,
                        DTYPE,
                    )  # fmt: skip
                elif task < TASKS - 1:
                    rows = _near_turn(
                        state, plan, x, scales, meta, parts, scales_at, meta_at, T, me, c, done, ready,
                        D, P, PP, C, H, N, BITS, S, MW, NCHUNK, B, BLOCK, MODE, GP, DTYPE,
                    )  # fmt: skip
                elif (task < TASKS) & (c == 0):
                    if tl.load(done) == 0:
                        say_hello_to_all(peers, state, tag, R, C, RP, P, W, FAR, NET)
                        tl.store(done, tl.full((), 1, tl.int64))
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
            publish(state, worker, c, TASKS, WORKERS, R, G, C)
            step, idle, since = next_step(state, step, left, before, left, idle, since)
            before = left
        if step < OVER:
            end_in_views(peers, state, C * WORKERS, R, P, C, RP)
