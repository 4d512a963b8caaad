# pyright: basic
"""Combine in place over two levels: a node's rows of a token are read where they lie and summed,
and one row per (token, node) crosses.

G nodes of P ranks. Grid ``W C``: W workers per channel (``kernels/two_scheduler.py``). Tasks of a
channel: a reducer, a combiner per other node, the announcement (of channel 0). Example: 2 nodes of
2 ranks, token 5 of rank 0 went to ranks 1, 2 and 3: rank 2 reads its own row and rank 3's out of
their in-place buffers, adds them in rank order, rounds and sends one row to rank 0, whose reducer
adds rank 1's row, out of its buffer, and this row.

The tree is that of ``kernels/two_combine.py``, bit for bit. Rows of an in-place buffer stand as a
dispatch in place leaves them: in arrival order. They begin at 0 of an in-place buffer.

Who publishes what, who may read when: of the network rings, as in ``kernels/two_combine.py``, but
reducers defer what they add to MAPPED heads, too, so a round has one release; of in-place buffers,
``kernels/two_in_place.py``. There are no rings inside a node.

Nobody waits in a circle: a combiner needs room in its network ring, so its reducer, which takes
rows in token order, as combiners send them: the argument of ``kernels/two_combine.py``, without
inner rings. Both need announcements, which wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tokenyard.kernels.combine import Sums, Tiles, sums_in
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.place import num_experts_of
from tokenyard.kernels.region import EPOCH, in_bound, out_bound, peer_base, place_of, plan_word
from tokenyard.kernels.structs import Hop, Peers, Routing, Turn, grid_of
from tokenyard.kernels.sync import (
    RANK, TIMED_OUT, add_release, give_up, give_up_on_one, given_up, lacking, load_acquire,
    look_at_all, now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_combine import bind_sums, token_bytes
from tokenyard.kernels.two_combine_reduce import (
    Tokens, add_nodes, in_place_sum, return_network_credits, share_of,
)  # fmt: skip
from tokenyard.kernels.two_far import put_chunk
from tokenyard.kernels.two_headers import all_are_here, announce_call_to_all
from tokenyard.kernels.two_in_place import end_in_place
from tokenyard.kernels.two_region import (
    ON_BOTH, ON_NET_ROOM, deferred_of, deferred_words, done_in, first_forwarded, moved_of, net_head,
    net_sent_to, net_tail, net_taken_from, other, ring_at, staging_at, table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import (
    ON_TIME, OVER, begin_tasks, dealt, next_step, place_in_round, reports, rows_of_turn,
    tasks_of_worker,
)  # fmt: skip
from tokenyard.routing import power_of_two_at_least


@triton.jit
def _sum_chunk(peers, routing, starts, link, b, n, channel, k: tl.constexpr):
    """Store sums of my node's rows ``link.done`` .. into slots of the owner's network ring, or of
    its staging: bytes of both are returned. ``starts [local_bins]``: of in-place buffers; ``b``:
    numbers of rows in flight."""
    P: tl.constexpr = k.grid.ranks_per_node
    hidden: tl.constexpr = k.row.hidden
    ROW: tl.constexpr = hidden * k.dtype.primitive_bitwidth // 8
    q = tl.arange(0, k.grid.local_bins)
    cap = tl.load(table_rows(routing.plan, k))
    local, number = num_experts_of(routing, k), other(link.node, link.home)
    table = table_of(routing, local, cap, number, k)
    first_rows = first_forwarded(routing.plan, routing.num_tokens, local, number, q, channel, k)
    rows_at = starts + tl.load(first_rows, mask=q < P, other=0).to(tl.int64) * ROW
    here = staging_at(number, channel, k)
    there = ring_at(0, other(link.home, link.node), channel, k)
    ring = peer_base(peers.regions, link.peer) + there if k.grid.mapped else link.mine + here
    # chunks begin at multiples of network_ring.chunk, and so does the end of the ring
    first = link.done % k.network_ring.slots
    for j in range(0, n, k.tiles.rows_summed):
        inside, row = j + b < n, link.begin + link.done + j + b
        entries = table + row.to(tl.int64)[:, None] * P + q[None, :]
        known = (inside & (row < cap))[:, None] & (q < P)[None, :]
        at = tl.load(entries, mask=known, other=-1)
        for k0 in tl.range(0, hidden, k.tiles.block_summed, num_stages=k.stages):
            w = k0 + tl.arange(0, k.tiles.block_summed)
            v = in_place_sum(rows_at, at, w, k)
            to = sums_in(ring, first + j + b, k)
            tl.store(to + w[None, :], v.to(k.dtype), mask=inside[:, None] & (w < hidden)[None, :])
    return there, here


@triton.jit
def _combine_turn(peers, routing, starts, node, turn, ready, k: tl.constexpr):
    """A chunk of sums of my node for owner (``node``, my local index) in this channel, into its
    network ring. ``starts [local_bins]``: of in-place buffers."""
    net: tl.constexpr = k.network_ring
    P: tl.constexpr = k.grid.ranks_per_node
    state, c, me = peers.state, turn.channel, peers.rank
    lo, hi, i0 = rows_of_turn(in_bound, routing.plan, k.ranks + node, turn, k)
    base = tl.load(net_sent_to(state, node, c, k))
    left = hi - lo - i0
    if left > 0:
        b = tl.arange(0, k.tiles.rows_summed)
        mine, home, owner = peer_base(peers.regions, me), me // P, node * P + me % P
        link = Hop(node, home, owner, mine, base, begin=lo, end=hi, done=i0)
        n = tl.minimum(left, net.chunk)
        # ring and staging are drained before the first row
        want = base + tl.maximum(i0 + n - net.slots, 0)
        room = load_acquire(words(mine + net_head(node, c, k)))
        tl.debug_barrier()
        if reports(turn.step, room < want, False):
            give_up(state, TIMED_OUT, ON_NET_ROOM, node, c, want, room)
        elif (room >= want) & ready & (turn.step == ON_TIME):
            there, here = _sum_chunk(peers, routing, starts, link, b, n, c, k)
            put_chunk(peers, node, home, mine, owner, there, here, i0 % net.slots, n, turn, k)
            left -= n
            tl.store(turn.done, (i0 + n).to(tl.int64))
            if left == 0:
                tl.store(net_sent_to(state, node, c, k), base + hi - lo)
    return left


@triton.jit
def _sum_tokens(starts, sums, tokens, at, mine, home, channel, k: tl.constexpr):
    """Store the sums of ``tokens``. ``at [B, local_bins]``: my node's rows, behind ``starts``."""
    for k0 in tl.range(0, k.row.hidden, k.tiles.block_summed, num_stages=k.stages):
        w = k0 + tl.arange(0, k.tiles.block_summed)
        v_home = in_place_sum(starts, at, w, k)
        add_nodes(v_home, tokens, sums, mine, home, channel, w, k)


@triton.jit
def _reduce(peers, routing, starts, sums, share, turn, k: tl.constexpr):
    """Sum the rows of ``k.turn`` of a channel's tokens, ``rows_summed`` tokens at a time: my node's
    where they lie, other nodes' as they come."""
    R: tl.constexpr = k.ranks
    P: tl.constexpr = k.grid.ranks_per_node
    D: tl.constexpr = k.plan_ranks
    ROW: tl.constexpr = k.row.hidden * k.dtype.primitive_bitwidth // 8
    plan, state, c, home = routing.plan, peers.state, turn.channel, peers.rank // P
    r, b = tl.arange(0, k.rank_bins), tl.arange(0, k.tiles.rows_summed)
    q, local = tl.arange(0, k.grid.local_bins), peers.rank % P
    far = (r >= R) & (r < D) & (r != R + home)
    mine = peer_base(peers.regions, peers.rank)
    node = tl.maximum(r - R, 0)
    taken_from = net_taken_from(state, node, c, k)
    taken_at, deferred_at = moved_of(state, 0, r, c, k), moved_of(state, 1, r, c, k)
    bases = tl.load(taken_from, mask=far, other=0)
    before = tl.load(taken_at, mask=far & (share.done > 0), other=0)
    taken = before
    deferred = tl.load(deferred_at, mask=far & (share.done > 0), other=0)
    lows = tl.load(out_bound(plan, r, c, k), mask=r < D, other=0)
    firsts = tl.load(plan_word(plan, "first_out", home * P + q, k), mask=q < P, other=0)
    rows_at = starts + firsts.to(tl.int64) * ROW
    found = look_at_all(words(mine + net_tail(node, c, k)), far)
    tl.debug_barrier()
    i, ok = share.done, True
    end = tl.minimum(share.done + k.turn, share.tokens)
    while (i < end) & ok:
        t = share.first + i + b
        here = t < share.end
        table = place_of(plan, t, routing.num_tokens, k)[:, None]
        places = tl.load(table + r[None, :], mask=here[:, None] & (r < D)[None, :], other=-1)
        inside = here[:, None] & (q < P)[None, :]
        at = tl.load(table + home * P + q[None, :], mask=inside, other=-1)
        upto = tl.maximum(tl.max(places - lows[None, :] + 1, axis=0).to(tl.int64), taken)
        upto = tl.where(far, upto, 0)
        ok = (lacking(found, bases + upto, far) == 0) & (turn.step == ON_TIME)
        if reports(turn.step, lacking(found, bases + upto, far) > 0, True):
            give_up_on_one(state, ON_BOTH, c + (r * 0), bases + upto, found, far)
        if ok:
            tokens = Tokens(index=t, here=here, places=places, lows=lows)
            _sum_tokens(rows_at, sums, tokens, at, mine, home, c, k)
            taken = upto
            i = tl.minimum(i + k.tiles.rows_summed, share.tokens)
    left = share.tokens - share.done
    if i > share.done:
        left = share.tokens - i
        deferred = taken - before if k.grid.mapped else deferred + tl.where(far, taken - before, 0)
        if not k.grid.mapped:
            deferred = return_network_credits(peers, mine, local, c, deferred, left == 0, k)
        tl.store(deferred_at, deferred, mask=far)
        tl.store(turn.done, i.to(tl.int64))
        tl.store(taken_at, taken, mask=far)
        if left == 0:
            tl.store(taken_from, bases + taken, mask=far)
    return left


@triton.jit
def _flush_signals(peers, worker, channel, tasks: tl.constexpr, k: tl.constexpr):
    """:func:`flush_signals`, and behind the same release what the reducer defers to heads of MAPPED
    network rings."""
    R: tl.constexpr = k.ranks
    P: tl.constexpr = k.grid.ranks_per_node
    EACH: tl.constexpr = deferred_words(P)
    ROUND: tl.constexpr = tasks_of_worker(tasks, R, k.grid.workers, 0, 1)
    N: tl.constexpr = max(triton.next_power_of_2(ROUND * EACH), k.rank_bins)
    state, home = peers.state, peers.rank // P
    e = tl.arange(0, 2 * N)  # tasks, then nodes, as N + R + node
    task, _ = dealt(worker, e // EACH, channel, tasks, k)
    r = e - N
    of_task = (e // EACH < ROUND) & (task < tasks) & (r < 0)
    of_node = (r >= R) & (r < R + k.grid.nodes) & (r != R + home) & (worker == 0) & k.grid.mapped
    deferred = deferred_of(state, task, channel, e % EACH, k)
    more, moved = (deferred + 1).to(tl.int64), moved_of(state, 1, r, channel, k).to(tl.int64)
    counts = words(tl.where(r < 0, more, moved))
    count = tl.load(counts, mask=of_task | of_node, other=0)
    if tl.max(count) > 0:
        tails = tl.load(deferred, mask=of_task & (count > 0), other=0)
        theirs = words(peers.regions) + (r - R) * P + peers.rank % P
        heads = tl.load(theirs, mask=of_node, other=0) + net_head(home, channel, k)
        add_release(words(tl.where(r < 0, tails, heads)), count, count > 0)
        tl.store(counts, tl.zeros_like(count), mask=count > 0)
        tl.debug_barrier()


@triton.jit
def _turn(peers, home, routing, starts, sums, tag, turn, ready, k: tl.constexpr):
    """A turn of any task: rows (tokens) left to do. ``home``: this rank's node."""
    G: tl.constexpr = k.grid.nodes
    task = turn.task
    rows = task * 0
    if task < 1:
        share = share_of(routing, turn, k)
        rows = share.tokens - share.done
        if (rows > 0) & ready:
            rows = _reduce(peers, routing, starts, sums, share, turn, k)
    elif task < G:
        if G > 1:
            rows = _combine_turn(peers, routing, starts, (home + task) % G, turn, ready, k)
    elif (task < G + 1) & (turn.channel == 0):
        if tl.load(turn.done) == 0:
            announce_call_to_all(peers.regions, peers.state, tag, k)
            tl.store(turn.done, tl.full((), 1, tl.int64))
    return rows


@triton.jit(repr=shown_as("twolevel::combine_pull"))
def two_pull_kernel(
    regions, state, plan, buffers, bias0, bias1, out, tag, num_tokens, num_experts, k: tl.constexpr
):
    """See the module. ``k`` is a ``CombineConfig``, ``buffers`` the table of in-place buffers;
    :func:`bind_two_pull` makes the launch."""
    P: tl.constexpr = k.grid.ranks_per_node
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    call = tl.load(words(state) + EPOCH)
    home = me // P
    peers = Peers(regions=regions, state=state, rank=me)
    routing = Routing(plan, me, num_tokens, num_experts, num_rows=0)
    sums = Sums(bias0=bias0, bias1=bias1, rows=out, weights=0)
    c, worker = pid % k.channels, pid // k.channels
    TASKS: tl.constexpr = k.grid.nodes + 1
    if pid >= 0:
        begin_tasks(state, worker, c, TASKS, k)
        q = tl.arange(0, k.grid.local_bins)
        starts = tl.load(words(buffers) + home * P + q, mask=q < P, other=0)
        step, idle, since, ready = worker * 0, worker * 0, now_ns(), worker < 0
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left, direct = worker * 0, worker * 0
            # the first thing to report: while somebody lacks it, others may lack room and rows
            if not ready:
                if before > 0:  # signals go out first
                    ready = all_are_here(regions, state, tag, call, step, pid == 0, k)
                short = tl.where(ready, 0, 1)  # as in two_direct.py
                left += short
                direct += short
            for i in range(tasks_of_worker(TASKS, k.ranks, k.grid.workers, 0, 1)):
                task, _ = dealt(worker, place_in_round(i, c, TASKS, k), c, TASKS, k)
                turn = Turn(channel=c, task=task, done=done_in(state, task, c, k), step=step)
                rows = _turn(peers, home, routing, starts, sums, tag, turn, ready, k)
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(task < 1, 0, rows)
            _flush_signals(peers, worker, c, TASKS, k)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
        if step < OVER:
            end_in_place(regions, state, k)


# The host's side


def bind_two_pull(
    workspace: Any, row_layout: Any, dtype: Any, bias: tuple[Any, ...]
) -> Callable[..., None]:
    """Compile and load the kernel for one call signature: see ``bind_two_combine``."""
    config, ring = workspace.tuning.pull, workspace.net_ring(row_layout)
    block = min(power_of_two_at_least(row_layout.hidden), config.block)
    most = config.rows_of(block, min(ring.chunk, ring.most_rows))
    row_bytes = block * token_bytes(workspace, dtype, bias)
    rows, stages = config.staged(most, row_bytes, workspace.shared_for(config))
    workers = workspace.tuning.workers(config, workspace.grid.num_nodes + 1)
    tiles = Tiles(rows, block, rows, block)
    return bind_sums(
        two_pull_kernel, grid_of(workspace, workers), config, workspace, row_layout, dtype, bias,
        tiles=tiles, stages=stages,
    )  # fmt: skip
