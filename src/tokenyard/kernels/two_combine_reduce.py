# pyright: basic
"""Reducers of a combine over two levels (``kernels/two_combine.py``), and sums as they and
combiners make them: over the ranks of this node, whose rows are in inner rings (this rank's own
where they are), or all in in-place buffers; and over nodes, whose rows are in network rings.

Who may read when: the caller of a sum has seen the tails of these rings, and gives credit behind
these reads; or all announcements, for in-place buffers (``kernels/two_in_place.py``).

``k`` of functions here: a ``CombineConfig``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.combine import partial_rows, result_rows, store_sums, sums_in
from tokenyard.kernels.payload import load_rows
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import (
    head_of, out_bound, peer_base, place_of, plan_word, ring_of, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.sync import add_release, give_up_on_one, lacking, look_at_all, words
from tokenyard.kernels.two_net import credit
from tokenyard.kernels.two_region import (
    ON_BOTH, moved_of, net_bytes, net_head, net_tail, net_taken_from, other, rest_at, ring_at,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import ON_TIME, reports


class Share(NamedTuple):
    """A reducer's turn: tokens of its channel, and how many there are, and were summed in earlier
    turns."""

    first: Any
    end: Any
    tokens: Any
    done: Any


class NodeRows(NamedTuple):
    """Rows of the ranks of this node for some tokens of the ranks of ``node``."""

    mine: Any  # address of this rank's region
    node: Any
    local: Any  # this rank's index in its node
    channel: Any
    at: Any  # [B, local_bins]: numbers of the rows in the inner rings of (node, rank), -1: none
    own: Any  # [B]: arrival rows of this rank's own


class Tokens(NamedTuple):
    """Some tokens, ``[B]``: numbers, whether they exist, places ``[B, rank_bins]`` among rows to
    each destination, and the first place of this channel for each destination."""

    index: Any
    here: Any
    places: Any
    lows: Any


@triton.jit
def _inner_slot(rows, rank, number, k: tl.constexpr):
    """Address of slots of the inner ring of local ``rank``."""
    source = rows.node * k.grid.ranks_per_node + rank
    ring = ring_of(rows.mine, source, rows.channel, k)
    return ring + (number % k.ring.slots).to(tl.int64) * k.row.slot_bytes


@triton.jit
def node_sum(parts, rows, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of sums over my node's ranks, in order, in float32."""
    q = tl.arange(0, k.grid.local_bins)
    ROW: tl.constexpr = k.row.hidden * k.dtype.primitive_bitwidth // 8
    if k.by_expert:
        mine_at = tl.sum(tl.where((q == rows.local)[None, :], rows.at, 0), axis=1)
        each = result_rows(parts, rows.own, mine_at >= 0, k)
        v_own = partial_rows(parts, each, k.slots_per_row, k.tiles.rows_summed, w, k)
    total = tl.zeros((k.tiles.rows_summed, k.tiles.block_summed), tl.float32)
    for p in tl.static_range(k.grid.ranks_per_node):
        number = tl.sum(tl.where((q == p)[None, :], rows.at, 0), axis=1)
        row = _inner_slot(rows, p, number, k)
        got = number >= 0
        if k.by_expert:
            got = got & (p != rows.local)
        else:  # this rank's own rows are taken where they are
            row = tl.where(p == rows.local, parts.rows + rows.own.to(tl.int64) * ROW, row)
        v = load_rows(row, got, w, k)
        if k.by_expert:
            v = tl.where(p == rows.local, v_own, v)
        total = total + v.to(tl.float32)
    return total


@triton.jit
def node_weights(parts, rows, k: tl.constexpr):
    """The same for reduced weights ``[B, picks]``, which are not rounded."""
    K: tl.constexpr = k.picks
    pick, q = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, k.grid.local_bins)
    total = tl.zeros((k.tiles.rows_summed, triton.next_power_of_2(K)), tl.float32)
    for p in tl.static_range(k.grid.ranks_per_node):
        number = tl.sum(tl.where((q == p)[None, :], rows.at, 0), axis=1)
        row = _inner_slot(rows, p, number, k) + k.row.scales_at
        row = tl.where(p == rows.local, parts.picks + rows.own.to(tl.int64) * (K * 4), row)
        mask = (number >= 0)[:, None] & (pick < K)[None, :]
        total += tl.load(floats(row)[:, None] + pick[None, :], mask=mask, other=0.0)
    return total


@triton.jit
def in_place_sum(starts, at, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of sums over my node's ranks, in order, in float32, of rows
    ``at [B, local_bins]`` (-1: none) behind ``starts [local_bins]``."""
    q = tl.arange(0, k.grid.local_bins)
    ROW: tl.constexpr = k.row.hidden * k.dtype.primitive_bitwidth // 8
    total = tl.zeros((k.tiles.rows_summed, k.tiles.block_summed), tl.float32)
    for p in tl.static_range(k.grid.ranks_per_node):
        number = tl.sum(tl.where((q == p)[None, :], at, 0), axis=1)
        row = tl.sum(tl.where(q == p, starts, 0)) + number.to(tl.int64) * ROW
        total = total + load_rows(row, number >= 0, w, k).to(tl.float32)
    return total


@triton.jit
def add_nodes(v_home, tokens, sums, mine, home, channel, w, k: tl.constexpr):
    """Store channels ``w [BLOCK]`` of ``tokens``: this node's sums ``v_home`` and other nodes', in
    order of nodes, then biases."""
    G: tl.constexpr = k.grid.nodes
    r = tl.arange(0, k.rank_bins)
    if G > 1:
        v_home = v_home.to(k.dtype).to(tl.float32)
    total = tl.zeros((k.tiles.rows_summed, k.tiles.block_summed), tl.float32)
    for o in tl.static_range(G - 1):
        g = tl.where(home > o, o, o + 1)
        place = tl.sum(tl.where((r == k.ranks + g)[None, :], tokens.places, 0), axis=1)
        slot = (place - tl.sum(tl.where(r == k.ranks + g, tokens.lows, 0))) % k.network_ring.slots
        ring = ring_at(mine, (home * 0) + o, channel, k)
        rows = sums_in(ring, slot, k)
        mask = (place >= 0)[:, None] & (w < k.row.hidden)[None, :]
        v = tl.load(rows + w[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        # no sum that begins with 0.0 is -0.0
        total = total + tl.where(home == o, v_home, 0.0) + v.to(tl.float32)
    total = total + tl.where(home == G - 1, v_home, 0.0)
    store_sums(sums, total, tokens.index, tokens.here, w, k)


@triton.jit
def add_node_weights(w_home, tokens, sums, mine, home, channel, k: tl.constexpr):
    """Store the sums of weights of ``tokens``: this node's ``w_home [B, picks]`` and other nodes',
    in order of nodes."""
    K: tl.constexpr = k.picks
    r, pick = tl.arange(0, k.rank_bins), tl.arange(0, triton.next_power_of_2(K))
    weight = tl.zeros((k.tiles.rows_summed, triton.next_power_of_2(K)), tl.float32)
    for g in tl.static_range(k.grid.nodes):
        place = tl.sum(tl.where((r == k.ranks + g)[None, :], tokens.places, 0), axis=1)
        low = tl.sum(tl.where(r == k.ranks + g, tokens.lows, 0))
        slot = (place - low) % k.network_ring.slots
        ring = ring_at(mine, other((home * 0) + g, home), channel, k) + k.row.scales_at
        rows = floats(ring + slot.to(tl.int64) * k.row.slot_bytes)
        mask = ((place >= 0) & (home != g))[:, None] & (pick < K)[None, :]
        v = tl.load(rows[:, None] + pick[None, :], mask=mask, other=0.0)
        weight += tl.where(home == g, w_home, v)
    to = floats(sums.weights) + tokens.index.to(tl.int64)[:, None] * K + pick[None, :]
    tl.store(to, weight, mask=tokens.here[:, None] & (pick < K)[None, :])


@triton.jit
def return_network_credits(peers, mine, local, channel, deferred, last, k: tl.constexpr):
    """Network credits ``deferred [rank_bins]`` (node g at ranks + g) that are due. Returns what is
    still deferred. ``mine``: this rank's region; ``local``: its index in its node."""
    r, home = tl.arange(0, k.rank_bins), peers.rank // k.grid.ranks_per_node
    for node in tl.static_range(k.grid.nodes):
        amount = tl.sum(tl.where(r == k.ranks + node, deferred, 0))
        if (amount >= k.network_ring.credit) | (last & (amount > 0)):
            to = home * 0 + node * k.grid.ranks_per_node + local
            account = net_bytes(peers.state, node, k)
            credit(account, mine, to, rest_at(k), net_head(home, channel, k), amount)
            deferred = tl.where(r == k.ranks + node, 0, deferred)
    return deferred


@triton.jit
def _heads(peers, near, far, channel, k: tl.constexpr):
    """Where those who put rows read how many a reducer has taken, ``[rank_bins]``: near ranks, and
    other nodes where their memory is mapped."""
    P: tl.constexpr = k.grid.ranks_per_node
    r, me = tl.arange(0, k.rank_bins), peers.rank
    regions = tl.load(words(peers.regions) + r, mask=near, other=0)
    heads = head_of(regions, me, channel, k)
    if k.grid.mapped:
        node = tl.maximum(r - k.ranks, 0)
        theirs = tl.load(words(peers.regions) + node * P + me % P, mask=far, other=0)
        head = net_head(me // P, channel, k)
        heads = words(tl.where(far, theirs + head, heads.to(tl.int64)))
    return heads


@triton.jit
def _sum_tokens(parts, sums, rows, tokens, k: tl.constexpr):
    """Store the sums of ``tokens``, of which ``rows`` are those of my node."""
    for k0 in tl.range(0, k.row.hidden, k.tiles.block_summed, num_stages=k.stages):
        w = k0 + tl.arange(0, k.tiles.block_summed)
        v_home = node_sum(parts, rows, w, k)
        add_nodes(v_home, tokens, sums, rows.mine, rows.node, rows.channel, w, k)
    if k.picks:
        w_home = node_weights(parts, rows, k)
        add_node_weights(w_home, tokens, sums, rows.mine, rows.node, rows.channel, k)


@triton.jit
def _end_reduce(
    peers, mine, share, turn, heads, bases, before, taken, deferred, near, far, i, k: tl.constexpr
):
    """Return credits for what a reducer's turn up to token ``i`` has taken, and note its progress.
    Returns the tokens that are left."""
    state, c, r = peers.state, turn.channel, tl.arange(0, k.rank_bins)
    left = share.tokens - i
    credited = (near | far) if k.grid.mapped else near
    add_release(heads, taken - before, credited & (taken > before))
    if not k.grid.mapped:
        deferred += tl.where(far, taken - before, 0)
        local = peers.rank % k.grid.ranks_per_node
        deferred = return_network_credits(peers, mine, local, c, deferred, left == 0, k)
        tl.store(moved_of(state, 1, r, c, k), deferred, mask=far)
    tl.store(turn.done, i.to(tl.int64))
    tl.store(moved_of(state, 0, r, c, k), taken, mask=near | far)
    if left == 0:
        near_at = taken_from(state, r, c, k)
        far_at = net_taken_from(state, tl.maximum(r - k.ranks, 0), c, k)
        tl.store(near_at, bases + taken, mask=near)
        tl.store(far_at, bases + taken, mask=far)
    return left


@triton.jit
def reduce(peers, routing, parts, sums, share, turn, k: tl.constexpr):
    """Sum the rows of ``k.turn`` tokens, ``rows_summed`` tokens at a time, as far as they are here.
    Returns the tokens that are left."""
    R: tl.constexpr = k.ranks
    P: tl.constexpr = k.grid.ranks_per_node
    D: tl.constexpr = k.plan_ranks
    plan, state, c, me = routing.plan, peers.state, turn.channel, peers.rank
    r, b = tl.arange(0, k.rank_bins), tl.arange(0, k.tiles.rows_summed)
    q, home, local = tl.arange(0, k.grid.local_bins), me // P, me % P
    near = (r < R) & (r // P == home) & (r != me)
    far = (r >= R) & (r < D) & (r != R + home)
    awaited = near | far
    mine, node = peer_base(peers.regions, me), tl.maximum(r - R, 0)
    near_at, far_at = taken_from(state, r, c, k), net_taken_from(state, node, c, k)
    taken_at, deferred_at = moved_of(state, 0, r, c, k), moved_of(state, 1, r, c, k)
    bases = tl.load(near_at, mask=near, other=0) + tl.load(far_at, mask=far, other=0)
    before = tl.load(taken_at, mask=awaited & (share.done > 0), other=0)
    taken = before
    deferred = tl.load(deferred_at, mask=far & (share.done > 0), other=0)
    lows = tl.load(out_bound(plan, r, c, k), mask=r < D, other=0)
    heads = _heads(peers, near, far, c, k)
    a0, my_low = tl.load(plan_word(plan, "first_in", me, k)), tl.sum(tl.where(r == me, lows, 0))
    low_near = tl.load(out_bound(plan, home * P + q, c, k), mask=q < P, other=0)
    tails = tl.where(far, mine + net_tail(node, c, k), tail_of(mine, r, c, k).to(tl.int64))
    found = look_at_all(words(tails), awaited)
    tl.debug_barrier()
    i, ok = share.done, True
    end = tl.minimum(share.done + k.turn, share.tokens)
    while (i < end) & ok:
        t = share.first + i + b
        here = t < share.end
        table = place_of(plan, t, routing.num_tokens, k)[:, None]
        places_at, known = table + r[None, :], here[:, None] & (r < D)[None, :]
        places = tl.load(places_at, mask=known, other=-1)
        upto = tl.maximum(tl.max(places - lows[None, :] + 1, axis=0).to(tl.int64), taken)
        upto = tl.where(awaited, upto, 0)
        ok = (lacking(found, bases + upto, awaited) == 0) & (turn.step == ON_TIME)
        if reports(turn.step, lacking(found, bases + upto, awaited) > 0, True):
            give_up_on_one(state, ON_BOTH, c + (r * 0), bases + upto, found, awaited)
        if ok:
            beside = table + home * P + q[None, :]
            at = tl.load(beside, mask=here[:, None] & (q < P)[None, :], other=-1)
            at = tl.where(at >= 0, at - low_near[None, :], -1)
            own = a0 + my_low + tl.sum(tl.where((q == local)[None, :], at, 0), axis=1)
            rows = NodeRows(mine=mine, node=home, local=local, channel=c, at=at, own=own)
            _sum_tokens(parts, sums, rows, Tokens(index=t, here=here, places=places, lows=lows), k)
            taken = upto
            i = tl.minimum(i + k.tiles.rows_summed, share.tokens)
    left = share.tokens - share.done
    if i > share.done:
        left = _end_reduce(
            peers, mine, share, turn, heads, bases, before, taken, deferred, near, far, i, k
        )
    return left


@triton.jit
def share_of(routing, turn, k: tl.constexpr):
    """A channel's tokens, and how far its task is with them."""
    share = (routing.num_tokens + k.channels - 1) // k.channels
    first = turn.channel * share
    end = tl.minimum(first + share, routing.num_tokens)
    tokens, done = tl.maximum(end - first, 0), tl.load(turn.done).to(tl.int32)
    return Share(first=first, end=end, tokens=tokens, done=done)
