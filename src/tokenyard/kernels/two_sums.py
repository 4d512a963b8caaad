# pyright: basic
"""Sums as combiners and reducers make them: over the ranks of this node, whose rows are in inner
rings (this rank's own where they are), or all in in-place buffers; and over nodes, whose rows are
in network rings.

Who may read when: the caller has seen the tails of these rings (``kernels/two_combine.py``), and
gives credit behind these reads; or all announcements, for in-place buffers
(``kernels/two_in_place.py``).

``k`` of functions here: a ``CombineConfig``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.combine import partial_rows, result_rows, store_sums, sums_in
from tokenyard.kernels.payload import load_rows
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import ring_of
from tokenyard.kernels.two_region import other, ring_at


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
    R: tl.constexpr = k.ranks
    net: tl.constexpr = k.network_ring
    r = tl.arange(0, k.rank_bins)
    if G > 1:
        v_home = v_home.to(k.dtype).to(tl.float32)
    total = tl.zeros((k.tiles.rows_summed, k.tiles.block_summed), tl.float32)
    for o in tl.static_range(G - 1):
        g = tl.where(home > o, o, o + 1)
        place = tl.sum(tl.where((r == R + g)[None, :], tokens.places, 0), axis=1)
        slot = (place - tl.sum(tl.where(r == R + g, tokens.lows, 0))) % net.slots
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
