# pyright: basic
"""Combine in place over two levels: a node's rows of a token are read where they lie and summed, and one row per (token, node) crosses.

G nodes of P ranks. Grid ``W C``: W workers per channel (``kernels/two_turns.py``). Tasks of a channel: a reducer, a combiner per other node, the
hello (of channel 0). Example: 2 nodes of 2 ranks, token 5 of rank 0 went to ranks 1, 2 and 3: rank 2 reads its own row and rank 3's out of
their views, adds them in rank order, rounds and sends one row to rank 0, whose reducer adds rank 1's row, out of its view, and this row.

The tree is that of ``kernels/two_combine.py``, bit for bit. Rows of a view stand as a dispatch in place leaves them: in arrival order.

Who publishes what, who may read when: of the network rings, as in ``kernels/two_combine.py``, but reducers owe what they add to MAPPED heads,
too, so a round has one release; of views, ``kernels/two_views.py``. There are no rings inside a node.

Nobody waits in a circle: a combiner needs room in its network ring, so its reducer, which takes rows in token order, as combiners send them:
the argument of ``kernels/two_combine.py``, without inner rings. Both need greetings, which wait for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import EPOCH, first_expert, first_out, in_bound, out_bound, peer_base, place_of
from tokenyard.kernels.sync import (
    RANK, TIMED_OUT, add_release, give_up, give_up_on_one, given_up, lacking, load_acquire, look_at_all, now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_combine import return_network_credits
from tokenyard.kernels.two_letters import all_are_here, say_hello_to_all
from tokenyard.kernels.two_net import put
from tokenyard.kernels.two_region import (
    ON_BOTH, ON_NET_ROOM, done_in, landing_of, moved_of, net_bytes, net_head, net_sent_to, net_tail, net_taken_from, other, owed_of,
    owed_words, table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_sums import add_nodes, view_sum
from tokenyard.kernels.two_turns import ON_TIME, OVER, begin_tasks, dealt, next_step, owe, place_in_round, reports
from tokenyard.kernels.two_views import end_in_views


@triton.jit
def _combine_turn(
    peers, state, plan, starts, T, E, me, node, c, task, done, step, ready,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, H: tl.constexpr, SLOT: tl.constexpr,
    NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, NCHUNK: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """A chunk of sums of my node for owner (``node``, my local index), channel ``c``, into its network ring. ``starts [PP]``: of views."""
    G: tl.constexpr = R // P
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
    lo, hi = tl.load(in_bound(plan, R + node, c, D, C)), tl.load(in_bound(plan, R + node, c + 1, D, C))
    i0 = tl.load(done).to(tl.int32)
    base = tl.load(net_sent_to(state, node, c, R, G, C))
    left = hi - lo - i0
    if left > 0:
        b, q = tl.arange(0, B), tl.arange(0, PP)
        mine, home, owner = peer_base(peers, me), me // P, node * P + me % P
        n = tl.minimum(left, NCHUNK)
        want = base + tl.maximum(i0 + n - NQ, 0)  # ring and staging are drained before the first row
        room = load_acquire(words(mine + net_head(node, c, G, C, FAR)))
        tl.debug_barrier()
        if reports(step, room < want, False):
            give_up(state, TIMED_OUT, ON_NET_ROOM, node, c, want, room)
        elif (room >= want) & ready & (step == ON_TIME):
            cap = tl.load(table_rows(plan, R, D, C))
            local = first_expert(me + 1, E, R) - first_expert(me, E, R)
            table = table_of(plan, T, local, cap, other(node, home), D, P, C)
            landings = tl.load(landing_of(plan, T, local, other(node, home), q, c, D, P, C), mask=q < P, other=0)
            rows_at = starts + landings.to(tl.int64) * ROW
            here_ring = STAGE + (other(node, home) * C + c).to(tl.int64) * NRING
            there = NETS + (other(home, node) * C + c).to(tl.int64) * NRING
            ring = peer_base(peers, owner) + there if MAPPED else mine + here_ring
            first = i0 % NQ  # chunks begin at multiples of NCHUNK, and so does the end of the ring
            for j in range(0, n, B):
                inside, row = j + b < n, lo + i0 + j + b
                entries = table + row.to(tl.int64)[:, None] * P + q[None, :]
                at = tl.load(entries, mask=(inside & (row < cap))[:, None] & (q < P)[None, :], other=-1)
                for k0 in tl.range(0, H, BLOCK, num_stages=STAGES):
                    w = k0 + tl.arange(0, BLOCK)
                    v = view_sum(rows_at, at, w, H, P, PP, B, BLOCK, DTYPE)
                    to = tl.multiple_of(ring.to(tl.pointer_type(DTYPE)), 16)
                    to = to + (first + j + b).to(tl.int64)[:, None] * (SLOT * 8 // DTYPE.primitive_bitwidth)
                    tl.store(to + w[None, :], v.to(DTYPE), mask=inside[:, None] & (w < H)[None, :])
            at, num_bytes, account = first.to(tl.int64) * SLOT, n.to(tl.int64) * SLOT, net_bytes(state, node, R, G, C)
            tail = net_tail(home, c, C, FAR)
            if MAPPED:
                tl.atomic_add(account, num_bytes, sem="relaxed", scope="gpu")
                owe(state, task, c, 0, peer_base(peers, owner) + tail, n.to(tl.int64), None, R, G, C)
            else:
                put(peers, account, mine, owner, there + at, here_ring + at, num_bytes, tail, n.to(tl.int64), 2, True)
            left -= n
            tl.store(done, (i0 + n).to(tl.int64))
            if left == 0:
                tl.store(net_sent_to(state, node, c, R, G, C), base + hi - lo)
    return left


@triton.jit
def _reduce_turn(
    peers, state, plan, starts, bias0, bias1, out, T, me, c, done, step, ready,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, SLOT: tl.constexpr, NETS: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr, TURN: tl.constexpr,
    CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
    STAGES: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Sum the rows of TURN of this channel's tokens, B tokens at a time: my node's where they lie, other nodes' as they come."""
    share = (T + C - 1) // C
    t1 = tl.minimum(c * share + share, T)
    tokens = tl.maximum(t1 - c * share, 0)
    i0 = tl.load(done).to(tl.int32)
    left = tokens - i0
    if (left > 0) & ready:
        r, b, q = tl.arange(0, RP), tl.arange(0, B), tl.arange(0, PP)
        home, local = me // P, me % P
        G: tl.constexpr = R // P
        ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
        far = (r >= R) & (r < D) & (r != R + home)
        mine = peer_base(peers, me)
        node = tl.maximum(r - R, 0)
        taken_from = net_taken_from(state, node, c, R, G, C)
        taken_at, owed_at = moved_of(state, 0, r, c, R, G, C), moved_of(state, 1, r, c, R, G, C)
        bases = tl.load(taken_from, mask=far, other=0)
        before = tl.load(taken_at, mask=far & (i0 > 0), other=0)
        taken = before
        owed = tl.load(owed_at, mask=far & (i0 > 0), other=0)
        lows = tl.load(out_bound(plan, r, c, D, C), mask=r < D, other=0)
        firsts = tl.load(first_out(plan, home * P + q, D, C), mask=q < P, other=0)
        rows_at = starts + firsts.to(tl.int64) * ROW
        found = look_at_all(words(mine + net_tail(node, c, C, FAR)), far)
        tl.debug_barrier()
        i, ok = i0, True
        end = tl.minimum(i0 + TURN, tokens)
        while (i < end) & ok:
            t = c * share + i + b
            here = t < t1
            table = place_of(plan, t, T, D, C)[:, None]
            places = tl.load(table + r[None, :], mask=here[:, None] & (r < D)[None, :], other=-1)
            at = tl.load(table + home * P + q[None, :], mask=here[:, None] & (q < P)[None, :], other=-1)
            upto = tl.maximum(tl.max(places - lows[None, :] + 1, axis=0).to(tl.int64), taken)
            upto = tl.where(far, upto, 0)
            ok = (lacking(found, bases + upto, far) == 0) & (step == ON_TIME)
            if reports(step, lacking(found, bases + upto, far) > 0, True):
                give_up_on_one(state, ON_BOTH, c + (r * 0), bases + upto, found, far)
            if ok:
                for k0 in tl.range(0, H, BLOCK, num_stages=STAGES):
                    w = k0 + tl.arange(0, BLOCK)
                    v_home = view_sum(rows_at, at, w, H, P, PP, B, BLOCK, DTYPE)
                    add_nodes(
                        v_home, places, lows, t, here, mine, home, c, w, bias0, bias1, out,
                        R, P, C, RP, H, SLOT, NETS, NRING, NQ, B, BLOCK, DTYPE, BIAS0, BIAS1,
                    )  # fmt: skip
                taken = upto
                i = tl.minimum(i + B, tokens)
        if i > i0:
            left = tokens - i
            if MAPPED:
                tl.store(owed_at, taken - before, mask=far)
            else:
                owed += tl.where(far, taken - before, 0)
                owed = return_network_credits(state, mine, home, local, c, owed, left == 0, R, P, C, RP, W, CREDIT, FAR)
                tl.store(owed_at, owed, mask=far)
            tl.store(done, i.to(tl.int64))
            tl.store(taken_at, taken, mask=far)
            if left == 0:
                tl.store(taken_from, bases + taken, mask=far)
    return left


@triton.jit
def _publish(
    peers, state, worker, c, me, TASKS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    RP: tl.constexpr, FAR: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """:func:`publish`, and behind the same release what the reducer owes to heads of MAPPED network rings."""
    G: tl.constexpr = R // P
    EACH: tl.constexpr = owed_words(P)
    ROUND: tl.constexpr = (TASKS + W - 1) // W
    N: tl.constexpr = max(triton.next_power_of_2(ROUND * EACH), RP)
    e = tl.arange(0, 2 * N)  # tasks, then nodes, as N + R + node
    task, r = dealt(worker, e // EACH, W), e - N
    of_task = (e // EACH < ROUND) & (task < TASKS) & (r < 0)
    of_node = (r >= R) & (r < R + G) & (r != R + me // P) & (worker == 0) & MAPPED
    owed = owed_of(state, task, c, e % EACH, R, G, C)
    counts = words(tl.where(r < 0, (owed + 1).to(tl.int64), moved_of(state, 1, r, c, R, G, C).to(tl.int64)))
    count = tl.load(counts, mask=of_task | of_node, other=0)
    if tl.max(count) > 0:
        tails = tl.load(owed, mask=of_task & (count > 0), other=0)
        heads = tl.load(words(peers) + (r - R) * P + me % P, mask=of_node, other=0) + net_head(me // P, c, G, C, FAR)
        add_release(words(tl.where(r < 0, tails, heads)), count, count > 0)
        tl.store(counts, tl.zeros_like(count), mask=count > 0)
        tl.debug_barrier()


@triton.jit(repr=shown_as("twolevel::combine_pull"))
def two_pull_kernel(
    peers, state, plan, views, bias0, bias1, out, tag, T, E,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, SLOT: tl.constexpr, NETS: tl.constexpr, STAGE: tl.constexpr, NRING: tl.constexpr, NQ: tl.constexpr,
    NCHUNK: tl.constexpr, CREDIT: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr, DTYPE: tl.constexpr,
    BIAS0: tl.constexpr, BIAS1: tl.constexpr, STAGES: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr, MAPPED: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """See the module. Rows ``[H]`` begin at 0 of a view. Combiners and reducers have B rows of BLOCK channels in flight, in each of STAGES rounds."""
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    T, E = T.to(tl.int32), E.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    call = tl.load(words(state) + EPOCH)
    home = me // P
    c, worker = pid % C, pid // C
    G: tl.constexpr = R // P
    TASKS: tl.constexpr = G + 1
    if pid >= 0:
        begin_tasks(state, worker, c, TASKS, WORKERS, R, G, C)
        q = tl.arange(0, PP)
        starts = tl.load(words(views) + home * P + q, mask=q < P, other=0)
        step, idle, since, ready = worker * 0, worker * 0, now_ns(), worker < 0
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left, direct = worker * 0, worker * 0
            if not ready:  # the first thing to report: while somebody lacks it, others may lack room and rows
                if before > 0:  # hellos go out first
                    ready = all_are_here(peers, state, tag, call, step, R, C, RP)
                short = tl.where(ready, 0, 1)  # as in two_direct.py
                left += short
                direct += short
            for turn in range((TASKS + WORKERS - 1) // WORKERS):
                task = dealt(worker, place_in_round(turn, c, WORKERS, TASKS), WORKERS)
                done = done_in(state, task, c, R, G, C)
                rows = worker * 0
                if task < 1:
                    rows = _reduce_turn(
                        peers, state, plan, starts, bias0, bias1, out, T, me, c, done, step, ready,
                        R, D, P, PP, C, RP, H, W, SLOT, NETS, NRING, NQ, TURN, CREDIT, B, BLOCK, DTYPE, BIAS0, BIAS1, STAGES, FAR, MAPPED,
                    )  # fmt: skip
                elif task < G:
                    rows = _combine_turn(
                        peers, state, plan, starts, T, E, me, (home + task) % G, c, task, done, step, ready,
                        R, D, P, PP, C, H, SLOT, NETS, STAGE, NRING, NQ, NCHUNK, B, BLOCK, STAGES, DTYPE, FAR, MAPPED,
                    )  # fmt: skip
                elif (task < TASKS) & (c == 0):
                    if tl.load(done) == 0:
                        say_hello_to_all(peers, state, tag, R, C, RP, P, W, FAR, NET)
                        tl.store(done, tl.full((), 1, tl.int64))
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(task < 1, 0, rows)
            _publish(peers, state, worker, c, me, TASKS, WORKERS, R, P, C, RP, FAR, MAPPED)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
        if step < OVER:
            end_in_views(peers, state, C * WORKERS, R, P, C, RP)
