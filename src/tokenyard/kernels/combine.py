# pyright: basic
"""Parts of a combine: partial sums of a rank's rows, rows into slots of a ring, and sums to their
places. ``kernels/two_combine.py`` has the kernel through rings, and who may read what when."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.payload import add_term, elements, kernel_type
from tokenyard.kernels.place import floats
from tokenyard.kernels.structs import Grid, NetworkRing, RingLayout, RowConstants
from tokenyard.kernels.sync import words
from tokenyard.routing import power_of_two_at_least


class Tiles(NamedTuple):
    """Rows, and channels of each, that programs have in flight."""

    rows_sent: int
    block_sent: int
    rows_summed: int
    block_summed: int


class CombineConfig(NamedTuple):
    """What is known of a combine when its kernel is compiled."""

    ranks: int
    plan_ranks: int  # destinations that plans know: ranks, then nodes
    rank_bins: int  # a power of two, not less than plan_ranks
    channels: int
    row: RowConstants  # of a sum on the wire: weights follow its payload
    dtype: Any  # of rows, also on the wire
    bias0: Any  # dtype of a term that is added to sums, None: none
    bias1: Any
    tiles: Tiles
    stages: int  # rounds of loads of a reducer that are under way at once
    # a combine in place has no rings inside nodes, and only rows in arrival order
    ring: RingLayout = RingLayout(0, 0, 0, 0)
    slots_per_row: int = 0  # result rows that one arrival row can have
    by_expert: bool = False  # rows are by expert: those of an arrival row are summed first
    weighted: bool = False  # and multiplied by weights before
    picks: int = 0  # weights per arrival row that are summed too; 0: none
    # of tasks, which engine collective has not
    grid: Grid | None = None
    network_ring: NetworkRing | None = None
    turn: int = 0  # tokens of a reducer's turn


class Partials(NamedTuple):
    """Addresses of what a combine reads: rows, the result rows of each arrival row, weights of
    result rows, and weights of arrival rows that are summed too. 0: there is none."""

    rows: Any
    slots: Any
    weights: Any
    picks: Any


class ResultRows(NamedTuple):
    """Result rows of some arrival rows, a ``[B]`` for each pick in their order, -1 behind the last,
    and their weights, if these are multiplied before sums."""

    index: Any
    weight: Any


class Sums(NamedTuple):
    """Addresses of the terms that a combine adds to its sums, of the sums, and of summed weights.
    0: there is none."""

    bias0: Any
    bias1: Any
    rows: Any
    weights: Any


class Chunk(NamedTuple):
    """Rows ``begin`` .. ``begin + count - 1`` of a source. Row ``low`` is the one in slot 0 of the
    ring, row 0 is arrival row ``first``."""

    begin: Any
    count: Any
    low: Any
    first: Any


@triton.jit
def result_rows(parts, a, here, k: tl.constexpr):
    """The result rows of arrival rows ``a [B]``, those ``here``. ``k``, also below: any struct with
    the fields that are read."""
    index, weight = (), ()
    slots = words(parts.slots) + a.to(tl.int64) * k.slots_per_row
    for j in tl.static_range(k.slots_per_row):
        row = tl.load(slots + j, mask=here, other=-1)
        index += (row,)
        if k.weighted:
            weight += (tl.load(floats(parts.weights) + row, mask=row >= 0, other=0.0),)
    return ResultRows(index=index, weight=weight)


@triton.jit
def partial_rows(parts, each, J: tl.constexpr, B: tl.constexpr, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of the sums of the result rows of ``each`` of B arrival rows, which
    have J at most, rounded to the wire dtype."""
    H: tl.constexpr = k.row.hidden
    rows = elements(parts.rows, k.dtype)
    total = tl.zeros((B, w.shape[0]), tl.float32)
    for j in tl.static_range(J):  # unrolled: all are on their way at once
        row = each.index[j]
        mask = (row >= 0)[:, None] & (w < H)[None, :]
        v = tl.load(rows + row[:, None] * H + w[None, :], mask=mask, other=0.0).to(tl.float32)
        if k.weighted:
            v = v * each.weight[j][:, None]
        total = total + v
    return total.to(k.dtype)


@triton.jit
def store_sums(sums, total, t, here, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of tokens ``t [B]``, those ``here``: ``total [B, BLOCK]`` (float32),
    then biases, rounded."""
    at = t.to(tl.int64)[:, None] * k.row.hidden + w[None, :]
    mask = here[:, None] & (w < k.row.hidden)[None, :]
    total = add_term(total, sums.bias0, k.bias0, at, mask)
    total = add_term(total, sums.bias1, k.bias1, at, mask)
    to = elements(sums.rows, k.dtype)
    tl.store(to + at, total.to(k.dtype), mask=mask, cache_modifier=".cs")


@triton.jit
def sums_in(ring, slot, k: tl.constexpr):
    """Pointers ``[B, 1]`` to the sums in slots ``[B]`` of a ring."""
    STRIDE: tl.constexpr = k.row.slot_bytes * 8 // k.dtype.primitive_bitwidth
    return elements(ring, k.dtype) + slot.to(tl.int64)[:, None] * STRIDE


@triton.jit
def send_sums_chunk(parts, ring, chunk, k: tl.constexpr):
    """Partial sums of a chunk of arrival rows into a ring. The caller publishes them."""
    H: tl.constexpr = k.row.hidden
    K: tl.constexpr = k.picks
    b = tl.arange(0, k.tiles.rows_sent)
    for j in range(0, chunk.count, k.tiles.rows_sent):
        i, here = chunk.begin + j + b, j + b < chunk.count
        at = ring + ((i - chunk.low) % k.ring.slots).to(tl.int64) * k.row.slot_bytes
        for k0 in range(0, H, k.tiles.block_sent):
            w = k0 + tl.arange(0, k.tiles.block_sent)
            mask = here[:, None] & (w < H)[None, :]
            if k.by_expert:
                each = result_rows(parts, chunk.first + i, here, k)
                v = partial_rows(parts, each, k.slots_per_row, k.tiles.rows_sent, w, k)
            else:
                rows = elements(parts.rows, k.dtype)
                rows = rows + (chunk.first + i).to(tl.int64)[:, None] * H + w[None, :]
                v = tl.load(rows, mask=mask, other=0.0, cache_modifier=".cg")
            to = sums_in(ring, (i - chunk.low) % k.ring.slots, k)
            tl.store(to + w[None, :], v, mask=mask, cache_modifier=".cs")
        if K:
            pick = tl.arange(0, triton.next_power_of_2(K))
            mask = here[:, None] & (pick < K)[None, :]
            weights = floats(parts.picks) + (chunk.first + i).to(tl.int64)[:, None] * K
            v = tl.load(weights + pick[None, :], mask=mask)
            tl.store(floats(at + k.row.scales_at)[:, None] + pick[None, :], v, mask=mask)


# The host's side


def types_of(bias: tuple[Any, ...]) -> tuple[Any, Any]:
    """Of up to two terms of these torch dtypes."""
    first, second, *_ = (*map(kernel_type, bias), None, None)
    return first, second


def tiles_of(hidden: int, send: Any, reduce: Any, chunk: int, most: int, *, placed: bool) -> Tiles:
    """Of senders and reducers (at most ``most`` rows) as the configs ``send`` and ``reduce`` say.
    With ``placed`` a row is the sum of several, all of which are loaded at once: one row, 16 bytes
    of it per lane."""
    whole = power_of_two_at_least(hidden)
    if placed:
        block = min(whole, 256 * reduce.num_warps)
        return Tiles(1, block, 1, block)
    sent, summed = min(whole, send.block), min(whole, reduce.block)
    return Tiles(send.rows_of(sent, chunk), sent, reduce.rows_of(summed, most), summed)


def rounds_of(
    config: Any, whole: int, rows: int, item_bytes: int, channel_bytes: int, shared: int
) -> tuple[int, int]:
    """Of ``rows``, each the sum of several: channels of each in a round of loads, and rounds under
    way at once. A lane has 16 bytes of one row. ``item_bytes``: of a channel; ``channel_bytes``:
    loaded for one. ``shared``: bytes for rounds on their way."""
    block = min(whole, 512 // item_bytes * config.num_warps // rows)
    return block, config.stages_for(rows * block * channel_bytes, shared)
