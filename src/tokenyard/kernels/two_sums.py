# pyright: basic
"""Sums as combiners and reducers make them: over the ranks of this node, whose rows are in inner rings (this rank's own where they are), or
all in views; and over nodes, whose rows are in network rings.

Who may read when: the caller has seen the tails of these rings (``kernels/two_combine.py``), and gives credit behind these reads; or all
greetings, for views (``kernels/two_views.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.combine import partial_rows, store_sums


@triton.jit
def node_sum(
    x, slots, row_weights, mine, at, own_row, node, me, c, w, H: tl.constexpr, J: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    C: tl.constexpr, RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, Q: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, PLACED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Channels ``w [BLOCK]`` of sums over my node's ranks, in order, in float32.

    ``at [B, PP]``: numbers of the rows in the inner rings (node, rank, c), -1 for none; ``own_row [B]``: arrival rows of my own.
    """
    q = tl.arange(0, PP)
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 if ROW % 16 == 0 else DTYPE.primitive_bitwidth // 8
    if PLACED:
        mine_at = tl.sum(tl.where((q == me % P)[None, :], at, 0), axis=1)
        v_own = partial_rows(x, slots, row_weights, own_row, mine_at >= 0, w, H, J, DTYPE, PLACED, WEIGHTED, B, BLOCK)
    total = tl.zeros((B, BLOCK), tl.float32)
    for p in tl.static_range(P):
        number = tl.sum(tl.where((q == p)[None, :], at, 0), axis=1)
        row = mine + RINGS + ((node * P + p) * C + c).to(tl.int64) * RING + (number % Q).to(tl.int64) * SLOT
        got = number >= 0
        if PLACED:
            got = got & (p != me % P)
        else:  # this rank's own rows are taken where they are
            row = tl.where(p == me % P, x + own_row.to(tl.int64) * ROW, row)
        rows = tl.multiple_of(row.to(tl.pointer_type(DTYPE))[:, None], (ALIGNED, ALIGNED))
        v = tl.load(rows + w[None, :], mask=got[:, None] & (w < H)[None, :], other=0.0, cache_modifier=".cg")
        if PLACED:
            v = tl.where(p == me % P, v_own, v)
        total = total + v.to(tl.float32)
    return total


@triton.jit
def node_weights(reduce, mine, at, own_row, node, me, c, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, C: tl.constexpr,
                  RINGS: tl.constexpr, RING: tl.constexpr, SLOT: tl.constexpr, PAY: tl.constexpr, Q: tl.constexpr,
                  B: tl.constexpr):  # fmt: skip
    """The same for reduced weights ``[B, K]``, which are not rounded."""
    k, q = tl.arange(0, triton.next_power_of_2(K)), tl.arange(0, PP)
    total = tl.zeros((B, triton.next_power_of_2(K)), tl.float32)
    for p in tl.static_range(P):
        number = tl.sum(tl.where((q == p)[None, :], at, 0), axis=1)
        row = mine + RINGS + ((node * P + p) * C + c).to(tl.int64) * RING + (number % Q).to(tl.int64) * SLOT + PAY
        row = tl.where(p == me % P, reduce + own_row.to(tl.int64) * (K * 4), row)
        mask = (number >= 0)[:, None] & (k < K)[None, :]
        total += tl.load(row.to(tl.pointer_type(tl.float32))[:, None] + k[None, :], mask=mask, other=0.0)
    return total


@triton.jit
def view_sum(starts, at, w, H: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Channels ``w [BLOCK]`` of sums over my node's ranks, in order, in float32, of rows ``at [B, PP]`` (-1: none) behind ``starts [PP]``."""
    q = tl.arange(0, PP)
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 if ROW % 16 == 0 else DTYPE.primitive_bitwidth // 8
    total = tl.zeros((B, BLOCK), tl.float32)
    for p in tl.static_range(P):
        number = tl.sum(tl.where((q == p)[None, :], at, 0), axis=1)
        row = tl.sum(tl.where(q == p, starts, 0)) + number.to(tl.int64) * ROW
        rows = tl.multiple_of(row.to(tl.pointer_type(DTYPE))[:, None], (ALIGNED, ALIGNED))
        mask = (number >= 0)[:, None] & (w < H)[None, :]
        total = total + tl.load(rows + w[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def add_nodes(
    v_home, places, lows, t, here, mine, home, c, w, bias0, bias1, out,
    R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, H: tl.constexpr, SLOT: tl.constexpr, NETS: tl.constexpr,
    NRING: tl.constexpr, NQ: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, BIAS0: tl.constexpr,
    BIAS1: tl.constexpr,
):  # fmt: skip
    """Store channels ``w [BLOCK]`` of tokens ``t [B]``: this node's sums ``v_home`` and other nodes', in order of nodes, then biases.

    ``places [B, RP]``: of these tokens among rows to each destination; those to node g begin at ``lows[R + g]`` in this channel.
    """
    G: tl.constexpr = R // P
    r = tl.arange(0, RP)
    if G > 1:
        v_home = v_home.to(DTYPE).to(tl.float32)
    total = tl.zeros((B, BLOCK), tl.float32)
    for o in tl.static_range(G - 1):
        g = tl.where(home > o, o, o + 1)
        place = tl.sum(tl.where((r == R + g)[None, :], places, 0), axis=1)
        slot = (place - tl.sum(tl.where(r == R + g, lows, 0))) % NQ
        ring = mine + NETS + ((home * 0 + o) * C + c).to(tl.int64) * NRING
        rows = tl.multiple_of(ring.to(tl.pointer_type(DTYPE)), 16)
        rows = rows + slot.to(tl.int64)[:, None] * (SLOT * 8 // DTYPE.primitive_bitwidth)
        v = tl.load(rows + w[None, :], mask=(place >= 0)[:, None] & (w < H)[None, :], other=0.0, cache_modifier=".cg")
        total = total + tl.where(home == o, v_home, 0.0) + v.to(tl.float32)  # no sum that begins with 0.0 is -0.0
    total = total + tl.where(home == G - 1, v_home, 0.0)
    store_sums(out, total, t, here, w, bias0, bias1, H, DTYPE, BIAS0, BIAS1)
