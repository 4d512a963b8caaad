# pyright: basic
"""Combine over two levels: a node's rows of a token are summed there, and one row per (token, node)
crosses the network.

G nodes of P ranks. W workers per bundle of channels (``kernels/two_scheduler.py``). Tasks of a
channel: a reducer, a combiner per other node, a sender per owner with another local index, the
call barrier (of channel 0). Example: 2 nodes of 2 ranks, token 5 of rank 0 went to ranks 2 and 3:
rank 3 sends its partial sum to rank 2, whose combiner adds its own in rank order, rounds and sends
one row to rank 0, whose reducer adds node 0's sum and this row.

The tree is the same whoever owns the token: ranks of a node in order, rounded to the wire dtype;
then nodes in order (``docs/reference/semantics.md``).

Rings inside a node are those of dispatch, the other way round: the row at place p among my rows to
rank d comes back as row ``p - out_bound(d, channel)`` of the ring (d, channel).

Who publishes what, who may read when: as in ``kernels/two_dispatch.py``, with reducers for
receivers. A combiner stores sums to staging slots, and puts a chunk with its number onto ``net
tail``; MAPPED: it stores them into the network ring itself, and defers the tail in every turn.
Senders defer tails, combiners heads of local senders: ``flush_signals`` adds them once per round
behind the reducer (release), and once behind the last round. A reducer adds to heads itself at the
end of a turn (release, behind its reads); MAPPED: also to those of network rings.

Nobody waits in a circle: rows of a ring are in token order, and so are combiners and reducers. If a
reducer waits for a row of a network ring, all earlier ones are taken but those of its step (at most
``rows_summed - 1``), and less than CREDIT are held back, so with
``NQ >= NCHUNK + rows_summed + CREDIT - 2`` its combiner has room for the chunk with the row, and
waits for senders only, which wait for it only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tokenyard.kernels.combine import (
    Chunk, CombineConfig, Partials, Sums, send_sums_chunk, sums_in, tiles_of, types_of,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import kernel_type
from tokenyard.kernels.place import floats, num_experts_of
from tokenyard.kernels.region import (
    head_of, in_bound, peer_base, plan_word, ring_of, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.structs import (
    Hop, Peers, RingLayout, Routing, Turn, grid_of, network_ring_of, row_constants,
)  # fmt: skip
from tokenyard.kernels.sync import (
    ON_ROOM, RANK, TIMED_OUT, give_up, give_up_on_one, given_up, lacking, load_acquire, look_at_all,
    now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_combine_reduce import NodeRows, node_sum, node_weights, reduce, share_of
from tokenyard.kernels.two_headers import call_barrier_turn
from tokenyard.kernels.two_net import put
from tokenyard.kernels.two_region import (
    ON_NET_ROOM, ON_PARTS, done_in, moved_of, net_bytes, net_head, net_sent_to, net_tail, other,
    ring_at, staging_at, table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import (
    ON_TIME, OVER, begin_tasks, dealt, defer_signal, flush_signals, next_step, place_in_round,
    reports, rows_of_turn, tasks_of_worker,
)  # fmt: skip

LEAST_CHUNK = tl.constexpr(8)
"""Rows that a sender publishes at once, at least: small batches are not one chunk."""


@triton.jit
def _combine_rows(parts, ring, i, inside, rows, k: tl.constexpr):
    """Store sums of my node's ``rows`` into slots ``i [B]`` of a network ring, or its staging."""
    slot = i % k.network_ring.slots
    for k0 in tl.range(0, k.row.hidden, k.tiles.block_summed, num_stages=k.stages):
        w = k0 + tl.arange(0, k.tiles.block_summed)
        v = node_sum(parts, rows, w, k)
        to = sums_in(ring, slot, k)
        tl.store(to + w[None, :], v.to(k.dtype), mask=inside[:, None] & (w < k.row.hidden)[None, :])
    if k.picks:
        pick = tl.arange(0, triton.next_power_of_2(k.picks))
        v = node_weights(parts, rows, k)
        to = ring + slot.to(tl.int64) * k.row.slot_bytes + k.row.scales_at
        to = floats(to)[:, None] + pick[None, :]
        tl.store(to, v, mask=inside[:, None] & (pick < k.picks)[None, :])


@triton.jit
def _end_combine(
    peers, link, turn, heads, bases, before, taken, i, end, here, there, k: tl.constexpr
):
    """Defer what a combiner's turn up to row ``i`` of the chunk that ends at ``end`` has moved, or
    put it, and note its progress. Returns the rows that are left. ``heads``, ``bases``, ``before``,
    ``taken``: of the rings ``[local_bins]``: their counters, and rows taken out in earlier calls,
    in this one before the turn, and by now. ``here``, ``there``: bytes of staging and ring."""
    net: tl.constexpr = k.network_ring
    P: tl.constexpr = k.grid.ranks_per_node
    state, c, q = peers.state, turn.channel, tl.arange(0, k.grid.local_bins)
    others, heads = (q < P) & (q != peers.rank % P), heads.to(tl.int64)
    defer_signal(state, turn, q, heads, taken - before, others & (taken > before), k)
    tail = net_tail(link.home, c, k)
    account = net_bytes(state, link.node, k)
    if k.grid.mapped:
        n = (i - link.done).to(tl.int64)
        tl.atomic_add(account, n * k.row.slot_bytes, sem="relaxed", scope="gpu")
        tail = peer_base(peers.regions, link.peer) + tail
        defer_signal(state, turn, peers.rank % P, tail, n, None, k)
    elif i == end:
        first = link.done // net.chunk * net.chunk
        at = (first % net.slots).to(tl.int64) * k.row.slot_bytes
        n = (end - first).to(tl.int64)
        put(
            peers.regions, account, link.mine, link.peer, there + at, here + at,
            n * k.row.slot_bytes, tail, n, 2, True,
        )  # fmt: skip
    left = link.end - link.begin - i
    tl.store(turn.done, i.to(tl.int64))
    tl.store(moved_of(state, 0, link.node * P + q, c, k), taken, mask=others)
    if left == 0:
        bases_at = taken_from(state, link.node * P + q, c, k)
        tl.store(bases_at, bases + taken, mask=others)
        tl.store(net_sent_to(state, link.node, c, k), link.base + link.end - link.begin)
    return left


@triton.jit
def _combine(peers, routing, parts, node, base, lo, hi, i0, turn, k: tl.constexpr):
    """Sum rows ``lo + i0`` .. of those for ``node`` up to the end of a chunk, as far as they are
    here. Returns the rows that are left, up to ``hi``."""
    net: tl.constexpr = k.network_ring
    P: tl.constexpr = k.grid.ranks_per_node
    plan, state, c, local = routing.plan, peers.state, turn.channel, peers.rank % P
    b, q = tl.arange(0, k.tiles.rows_summed), tl.arange(0, k.grid.local_bins)
    mine, home = peer_base(peers.regions, peers.rank), peers.rank // P
    link = Hop(node, home, node * P + local, mine, base, begin=lo, end=hi, done=i0)
    others = (q < P) & (q != local)
    a0 = tl.load(plan_word(plan, "first_in", link.peer, k))
    a0 = a0 + tl.load(in_bound(plan, link.peer, c, k))
    cap = tl.load(table_rows(plan, k))
    experts = num_experts_of(routing, k)
    table = table_of(routing, experts, cap, other(node, link.home), k)
    here = staging_at(other(node, link.home), c, k)
    there = ring_at(0, other(link.home, node), c, k)
    ring = peer_base(peers.regions, link.peer) + there if k.grid.mapped else mine + here
    regions = tl.load(words(peers.regions) + link.home * P + q, mask=others, other=0)
    heads = head_of(regions, link.peer, c, k)
    taken_at = moved_of(state, 0, node * P + q, c, k)
    bases_at = taken_from(state, node * P + q, c, k)
    bases = tl.load(bases_at, mask=others, other=0)
    before = tl.load(taken_at, mask=others & (i0 > 0), other=0)
    taken = before
    end = tl.minimum(i0 // net.chunk * net.chunk + net.chunk, hi - lo)
    # ring and staging are drained before the first row
    want = base + tl.maximum(end - net.slots, 0)
    room = load_acquire(words(mine + net_head(node, c, k)))
    tails = look_at_all(tail_of(mine, node * P + q, c, k), others)
    tl.debug_barrier()
    if reports(turn.step, room < want, False):
        give_up(state, TIMED_OUT, ON_NET_ROOM, node, c, want, room)
    i, ok = i0, room >= want
    while (i < end) & ok:
        inside, row = i + b < end, lo + i + b
        entries = table + row.to(tl.int64)[:, None] * P + q[None, :]
        known = (inside & (row < cap))[:, None] & (q < P)[None, :]
        at = tl.load(entries, mask=known, other=-1)
        upto = tl.where(others, tl.maximum(tl.max(at + 1, axis=0).to(tl.int64), taken), 0)
        ok = (lacking(tails, bases + upto, others) == 0) & (turn.step == ON_TIME)
        if reports(turn.step, lacking(tails, bases + upto, others) > 0, False):
            number = node * k.channels + c + (q * 0)
            give_up_on_one(state, ON_PARTS, number, bases + upto, tails, others)
        if ok:
            own = a0 + tl.sum(tl.where((q == local)[None, :], at, 0), axis=1)
            rows = NodeRows(mine=mine, node=node, local=local, channel=c, at=at, own=own)
            _combine_rows(parts, ring, i + b, inside, rows, k)
            taken = upto
            i = tl.minimum(i + k.tiles.rows_summed, end)
    left = hi - lo - i0
    if i > i0:
        left = _end_combine(peers, link, turn, heads, bases, before, taken, i, end, here, there, k)
    return left


@triton.jit
def _combine_turn(peers, routing, parts, node, turn, k: tl.constexpr):
    """Sums of my node for owner (``node``, my local index) in this channel, into its network ring.
    Returns the rows that are left, as all turns do."""
    c = turn.channel
    lo, hi, i0 = rows_of_turn(in_bound, routing.plan, k.ranks + node, turn, k)
    base = tl.load(net_sent_to(peers.state, node, c, k))
    left = hi - lo - i0
    if left > 0:
        left = _combine(peers, routing, parts, node, base, lo, hi, i0, turn, k)
    return left


@triton.jit
def _send_turn(peers, routing, parts, s, turn, k: tl.constexpr):
    """A chunk of partial sums of rows that came from ``s``, into the ring of the local rank that
    has ``s``'s local index."""
    P: tl.constexpr = k.grid.ranks_per_node
    plan, c, me = routing.plan, turn.channel, peers.rank
    lo, hi, i = rows_of_turn(in_bound, plan, s, turn, k)
    base = tl.load(sent_to(peers.state, s, c, k))
    left = hi - lo - i
    if left > 0:
        # few chunks, as a release waits for all stores; but the reducer begins with the first
        most = tl.minimum(tl.maximum((hi - lo + 7) // 8, LEAST_CHUNK), k.ring.chunk)
        n = tl.minimum(left, most)
        # the ring is drained before the first row
        want = base + tl.maximum(i + n - k.ring.slots, 0)
        mine = peer_base(peers.regions, me)
        seen = load_acquire(head_of(mine, s, c, k))
        tl.debug_barrier()
        if turn.step != ON_TIME:
            if reports(turn.step, seen < want, False):
                give_up(peers.state, TIMED_OUT, ON_ROOM, s, c, want, seen)
        elif seen >= want:
            there = peer_base(peers.regions, me // P * P + s % P)
            as_me = s // P * P + me % P
            ring = ring_of(there, as_me, c, k)
            begin, first = lo + i, tl.load(plan_word(plan, "first_in", s, k))
            chunk = Chunk(begin=begin, count=n, low=lo, first=first)
            send_sums_chunk(parts, ring, chunk, k)
            tail = tail_of(there, as_me, c, k).to(tl.int64)
            defer_signal(peers.state, turn, 0, tail, n.to(tl.int64), None, k)
            left -= n
            tl.store(turn.done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(sent_to(peers.state, s, c, k), base + hi - lo)
    return left


@triton.jit
def _turn(peers, home, local, routing, parts, sums, tag, turn, k: tl.constexpr):
    """A turn of any task: rows (tokens) left to do. ``home``, ``local``: where this rank is."""
    G: tl.constexpr = k.grid.nodes
    P: tl.constexpr = k.grid.ranks_per_node
    BESIDE: tl.constexpr = P - 1 if P > 1 else 1
    task = turn.task
    rows = task * 0
    if task < 1:
        share = share_of(routing, turn, k)
        rows = share.tokens - share.done
        if rows > 0:
            rows = reduce(peers, routing, parts, sums, share, turn, k)
    elif task < G:
        if G > 1:
            rows = _combine_turn(peers, routing, parts, (home + task) % G, turn, k)
    elif task < k.ranks:
        node, beside = (home + (task - G) // BESIDE) % G, (local + 1 + (task - G) % BESIDE) % P
        rows = _send_turn(peers, routing, parts, node * P + beside, turn, k)
    elif (task < k.ranks + 1) & (turn.channel == 0):
        rows = call_barrier_turn(peers.regions, peers.state, tag, turn, k)
    return rows


@triton.jit(repr=shown_as("twolevel::combine"))
def two_combine_kernel(
    regions, state, plan, parts: Partials, sums: Sums, tag, num_tokens, num_experts, k: tl.constexpr
):
    """See the module. ``k`` is a ``CombineConfig``; :func:`bind_two_combine` makes the launch."""
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    home, local = me // k.grid.ranks_per_node, me % k.grid.ranks_per_node
    peers = Peers(regions=regions, state=state, rank=me)
    routing = Routing(plan, me, num_tokens, num_experts, num_rows=0)
    grid: tl.constexpr = k.grid
    BUNDLES: tl.constexpr = k.channels // grid.bundle
    bundle, worker = pid % BUNDLES, pid // BUNDLES
    TASKS: tl.constexpr = k.ranks + 1
    ROUND: tl.constexpr = tasks_of_worker(TASKS, k.ranks, grid.workers, grid.senders, grid.bundle)
    if pid >= 0:
        begin_tasks(state, worker, bundle, TASKS, k)
        step, idle, since = worker * 0, worker * 0, now_ns()
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left, direct = worker * 0, worker * 0
            for i in range(ROUND):
                place = place_in_round(i, bundle, TASKS, k)
                task, c = dealt(worker, place, bundle, TASKS, k)
                turn = Turn(channel=c, task=task, done=done_in(state, task, c, k), step=step)
                rows = _turn(peers, home, local, routing, parts, sums, tag, turn, k)
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(task < 1, 0, rows)
                # behind the reducer, if it has one, which stores inside the rank only: meanwhile
                # what others stored arrives
                if place == 0:
                    flush_signals(state, worker, bundle, TASKS, k)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
        flush_signals(state, worker, bundle, TASKS, k)


# The host's side


def token_bytes(workspace: Any, dtype: Any, bias: tuple[Any, ...]) -> int:
    """Bytes that a reducer loads for a channel of a token, at most."""
    most = workspace.grid.ranks_per_node + workspace.grid.num_nodes - 1
    return most * dtype.itemsize + sum(each.itemsize for each in bias)


def bind_sums(
    kernel: Any, grid: Any, config: Any, workspace: Any, row_layout: Any, dtype: Any,
    bias: tuple[Any, ...], **constants: Any,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load a kernel that takes a ``CombineConfig``, and the number of experts behind
    the arguments of the launch."""
    ranks, (bias0, bias1) = grid.nodes * grid.ranks_per_node, types_of(bias)
    k = CombineConfig(
        ranks=ranks, rank_bins=workspace.rank_bins, plan_ranks=ranks + grid.nodes,
        channels=workspace.tuning.channels, grid=grid, row=row_constants(row_layout),
        network_ring=network_ring_of(workspace, row_layout), dtype=kernel_type(dtype), bias0=bias0,
        bias1=bias1, turn=workspace.tuning.turn, **constants,
    )  # fmt: skip
    launch = workspace.bind(kernel, grid.workers * k.channels // grid.bundle, config, k)
    return lambda *args: launch(*args, workspace.config.num_experts)


def bind_two_combine(
    workspace: Any, row_layout: Any, dtype: Any, slots_per_row: int, picks: int,
    bias: tuple[Any, ...], *, by_expert: bool, weighted: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature: see ``bind_two_dispatch``. Arguments: as
    in ``CombineConfig``, with torch dtypes."""
    tuning, slots = workspace.tuning, workspace.slots(row_layout)
    send, reduce, bundle = tuning.send, tuning.reduce, tuning.bundle
    workers = tuning.workers(reduce, workspace.memory.world_size + 1, bundle)
    senders = 0 if by_expert else tuning.combine_senders(workers, workspace.grid)
    grid = grid_of(workspace, workers, senders, bundle)
    chunk = send.chunk_of(slots)
    most, stages = min(chunk, workspace.net_ring(row_layout).most_rows), 1
    tiles = tiles_of(row_layout.hidden, send, reduce, chunk, most, placed=by_expert)
    if not by_expert:
        row_bytes = tiles.block_summed * token_bytes(workspace, dtype, bias)
        rows, stages = reduce.staged(tiles.rows_summed, row_bytes, workspace.shared_for(reduce))
        tiles = tiles._replace(rows_summed=rows)
    ring = RingLayout(workspace.rings_at, workspace.ring_bytes, slots, chunk)
    return bind_sums(
        two_combine_kernel, grid, reduce, workspace, row_layout, dtype, bias, tiles=tiles,
        stages=stages, ring=ring, slots_per_row=slots_per_row, by_expert=by_expert,
        weighted=weighted, picks=picks,
    )  # fmt: skip
