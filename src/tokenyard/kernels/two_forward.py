# pyright: basic
"""The forwarder of a dispatch over two levels: rows out of a network ring, to the ranks of its node
that need them.

Example: 2 nodes of 2 ranks. Rank 2 forwards for rank 0: it takes token 5, for itself, to its place,
and stores it to ring (0, c) of rank 3.

Who publishes what, who may read when (``kernels/two_dispatch.py``): it sees ``net tail`` (acquire),
then reads the slots. It stores rows to inner rings and defers their tails, network credits too
where they are plain adds (MAPPED): all are added at the end of the round, behind stores and reads
(release). NVSHMEM's credits go at once, behind the reads of the turn. CREDIT rows are credited at a
time, and the rest at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.dispatch import in_slots
from tokenyard.kernels.payload import as_words
from tokenyard.kernels.place import experts_of, place_metadata, place_rows
from tokenyard.kernels.region import (
    head_of, in_bound, owner_of, peer_base, plan_word, sent_to, tail_of,
)  # fmt: skip
from tokenyard.kernels.structs import Batch, Hop
from tokenyard.kernels.sync import (
    TIMED_OUT, give_up, give_up_on_one, lacking, load_acquire, look_at_all, words,
)  # fmt: skip
from tokenyard.kernels.two_net import credit
from tokenyard.kernels.two_region import (
    ON_NET_ROWS, ON_ROOMS, moved_of, net_bytes, net_head, net_tail, net_taken_from, other, rest_at,
    ring_at, table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import ON_TIME, defer_signal, reports, rows_of_turn


@triton.jit
def return_credits(peers, mine, home, source, node, turn, i0, i1, last, k: tl.constexpr):
    """Return credits for rows ``i0`` .. ``i1 - 1`` to the network sender ``source``, of ``node``,
    as far as they are due. They are due ``credit`` at a time, and all of them behind the ``last``
    row. ``mine``: this rank's region."""
    grid: tl.constexpr = k.grid
    CREDIT: tl.constexpr = k.network_ring.credit
    deferred = tl.where(last, i1, i1 // CREDIT * CREDIT) - i0 // CREDIT * CREDIT
    if deferred > 0:
        head = net_head(home, turn.channel, k)
        if grid.mapped:
            counter, to = peers.rank % grid.ranks_per_node, peer_base(peers.regions, source) + head
            defer_signal(peers.state, turn, counter, to, deferred.to(tl.int64), None, k)
        else:
            account = net_bytes(peers.state, node, k)
            credit(account, mine, source, rest_at(k), head, deferred.to(tl.int64))


@triton.jit
def _copy_slots(peers, result, ring, batch, here, hit, at, home, rings, beside, k: tl.constexpr):
    """Copy whole slots ``batch`` of the network ring into the rings, at byte ``rings``, of the
    local ranks that need them. ``hit``, ``at [B, local_bins]``: which ranks these are, and the
    row's number in each one's ring. Rows of ``batch`` that stay are stored to the result too, if
    ``at_once``."""
    SLOT: tl.constexpr = k.row.slot_bytes // 4
    q = tl.arange(0, k.grid.local_bins)
    for k0 in range(0, SLOT if k.grid.ranks_per_node > 1 else 0, k.forward_block):
        w = k0 + tl.arange(0, k.forward_block)
        mask = here[:, None] & (w < SLOT)[None, :]
        x = as_words(ring, 32) + batch.index.to(tl.int64)[:, None] * SLOT + w[None, :]
        v = tl.load(x, mask=mask, cache_modifier=".cg")
        if k.at_once:
            to = as_words(result.rows, 32) + batch.arrival.to(tl.int64)[:, None] * k.row.words
            to = to + w[None, :]
            stays = batch.here[:, None] & (w < k.row.words)[None, :]
            tl.store(to, v, mask=stays, cache_modifier=".cs")
        for p in tl.static_range(k.grid.ranks_per_node):
            one = ((q == p) & beside)[None, :]
            goes = tl.sum(tl.where(one, hit, 0), axis=1) > 0
            slot = (tl.sum(tl.where(one, at, 0), axis=1) % k.ring.slots).to(tl.int64)
            to = peer_base(peers.regions, home * k.grid.ranks_per_node + p) + rings
            to = as_words(to, 32) + slot[:, None] * SLOT + w[None, :]
            tl.store(to, v, mask=mask & goes[:, None], cache_modifier=".cs")


@triton.jit
def destinations(ring, rows, i, here, inside, counts, home, num_experts, k: tl.constexpr):
    """Which local ranks rows ``i [B]`` of a network ring go to, and their number in each one's
    ring: ``[B, local_bins]`` each. In a cached dispatch ``rows`` of the forwarders' table say
    so."""
    if k.placing.fresh:
        b = tl.arange(0, k.rows_forwarded)
        slot = i % k.network_ring.slots
        pick, q = tl.arange(0, k.placing.topk_bins), tl.arange(0, k.grid.local_bins)
        ids = ring + k.row.metadata_at + 4 + slot.to(tl.int64) * k.row.slot_bytes
        ids = ids.to(tl.pointer_type(tl.int32))[:, None] + pick[None, :]
        ids = tl.load(ids, mask=here[:, None] & (pick < k.placing.topk)[None, :], other=-1)
        owner = owner_of(ids, num_experts, k.ranks) - home * k.grid.ranks_per_node
        hit = tl.max((owner[:, :, None] == q[None, None, :]).to(tl.int32), axis=1)
        hit = tl.where(inside, hit, 0)
        # Triton 3.6 crashes on a scan of so few rows
        earlier = (b[None, :] < b[:, None])[:, :, None]
        at = counts[None, :] + tl.sum(tl.where(earlier, hit[None, :, :], 0), axis=1)
    else:
        at = tl.load(rows, mask=inside, other=-1)
        hit = (at >= 0).to(tl.int32)
    return hit, at


@triton.jit
def _place_batch(routing, result, ring, hop, batch, experts, k: tl.constexpr):
    """Move rows of the network ring to their places; with ``at_once`` their metadata only."""
    slots = in_slots(ring, k.row)
    if k.at_once:
        place_metadata(
            slots, batch, hop.peer, experts, result, k.in_slot, k.row.scale_words, k.placing
        )
    else:
        place_rows(slots, batch, hop.peer, experts, routing, result, k.in_slot, k.forward_block, k)


@triton.jit
def _end_turn(peers, hop, turn, bases, counts, before, moved, left, sent, beside, k: tl.constexpr):
    """Defer tails and credits for the rows that a turn has ``moved``, and note its progress.
    Returns the rows that are left. ``counts``, ``before``: rows put into each local rank's ring in
    this call so far, and before this turn."""
    grid: tl.constexpr = k.grid
    state, c, q = peers.state, turn.channel, tl.arange(0, grid.local_bins)
    put_at = moved_of(state, 0, hop.node * grid.ranks_per_node + q, c, k)
    sent_at = sent_to(state, hop.node * grid.ranks_per_node + q, c, k)
    put_here = (counts - before).to(tl.int64)
    tails = tail_of(bases, hop.peer, c, k).to(tl.int64)
    defer_signal(state, turn, q, tails, put_here, beside & (put_here > 0), k)
    left -= moved
    done = hop.done + moved
    tl.store(turn.done, done.to(tl.int64))
    tl.store(put_at, counts.to(tl.int64), mask=q < grid.ranks_per_node)
    return_credits(
        peers, hop.mine, hop.home, hop.peer, hop.node, turn, hop.done, done, left == 0, k
    )
    if left == 0:
        tl.store(sent_at, sent + counts, mask=beside)
        tl.store(net_taken_from(state, hop.node, c, k), hop.base + hop.end - hop.begin)
    return left


@triton.jit
def _forward(peers, routing, result, hop, turn, seen, left, k: tl.constexpr):
    """Forward a chunk of the rows that have come, ``seen`` in total, as far as rings have room.
    Returns the rows that are left."""
    P: tl.constexpr = k.grid.ranks_per_node
    plan, state, c, me = routing.plan, peers.state, turn.channel, peers.rank
    b, q = tl.arange(0, k.rows_forwarded), tl.arange(0, k.grid.local_bins)
    near, beside, my = q < P, (q < P) & (q != me % P), (q == me % P)[None, :]
    cap = tl.load(table_rows(plan, k))
    experts = experts_of(routing, k)
    local, number = experts.end - experts.first, other(hop.node, hop.home)
    table = table_of(routing, local, cap, number, k)
    from_source = tl.load(in_bound(plan, hop.peer, c, k))
    a0 = tl.load(plan_word(plan, "first_in", hop.peer, k)) + from_source
    most = tl.load(in_bound(plan, hop.peer, c + 1, k)) - from_source
    ring = ring_at(hop.mine, number, c, k)
    rings = k.ring.first_byte + (hop.peer * k.channels + c).to(tl.int64) * k.ring.num_bytes
    bases = tl.load(words(peers.regions) + hop.home * P + q, mask=beside, other=0)
    heads = head_of(hop.mine, hop.node * P + q, c, k)
    put_at = moved_of(state, 0, hop.node * P + q, c, k)
    sent = tl.load(sent_to(state, hop.node * P + q, c, k), mask=beside, other=0)
    before = tl.load(put_at, mask=near & (hop.done > 0), other=0).to(tl.int32)
    counts = before
    n = tl.minimum(tl.minimum((seen - hop.base).to(tl.int32) - hop.done, left), k.ring.chunk)
    rooms = look_at_all(heads, beside)
    tl.debug_barrier()
    moved, ok = n * 0, True
    while (moved < n) & ok:
        i, here = hop.done + moved + b, moved + b < n
        rows = table + (hop.begin + i).to(tl.int64)[:, None] * P + q[None, :]
        inside = here[:, None] & near[None, :] & (hop.begin + i < cap)[:, None]
        hit, at = destinations(
            ring, rows, i, here, inside, counts, hop.home, routing.num_experts, k
        )
        more = tl.sum(hit, axis=0)
        # rings are drained before the first row
        wants = sent + tl.maximum(counts + more - k.ring.slots, 0)
        ok = (lacking(rooms, wants, beside) == 0) & (turn.step == ON_TIME)
        if reports(turn.step, lacking(rooms, wants, beside) > 0, False):
            give_up_on_one(
                state, ON_ROOMS, hop.node * k.channels + c + (q * 0), wants, rooms, beside
            )
        if ok:
            if k.placing.fresh:
                tl.store(rows, tl.where(hit > 0, at, -1), mask=inside)
            mine_at = tl.sum(tl.where(my, at, 0), axis=1)
            stays = (tl.sum(tl.where(my, hit, 0), axis=1) > 0) & (mine_at < most)
            batch = Batch(index=i % k.network_ring.slots, arrival=a0 + mine_at, here=stays)
            _place_batch(routing, result, ring, hop, batch, experts, k)
            _copy_slots(peers, result, ring, batch, here, hit, at, hop.home, rings, beside, k)
            counts += more
            moved = tl.minimum(moved + k.rows_forwarded, n)
    if moved > 0:
        left = _end_turn(peers, hop, turn, bases, counts, before, moved, left, sent, beside, k)
    return left


@triton.jit
def forward_turn(peers, routing, result, node, turn, k: tl.constexpr):
    """A chunk of rows of this channel from ``node`` out of the network ring: to their places, and
    into the rings (source, channel) of the other local ranks that need them."""
    grid: tl.constexpr = k.grid
    c = turn.channel
    lo, hi, i0 = rows_of_turn(in_bound, routing.plan, k.ranks + node, turn, k)
    base = tl.load(net_taken_from(peers.state, node, c, k))
    left = hi - lo - i0
    if left > 0:
        mine, home = peer_base(peers.regions, peers.rank), peers.rank // grid.ranks_per_node
        source = node * grid.ranks_per_node + peers.rank % grid.ranks_per_node
        want = base + i0 + 1
        seen = load_acquire(words(mine + net_tail(node, c, k)))
        if reports(turn.step, seen < want, False):
            give_up(peers.state, TIMED_OUT, ON_NET_ROWS, node, c, want, seen)
        elif seen >= want:
            hop = Hop(node, home, source, mine, base, begin=lo, end=hi, done=i0)
            left = _forward(peers, routing, result, hop, turn, seen, left, k)
    return left
