# pyright: basic
"""Where received rows go: into the result, in the order of the layout, with what rode along.

``a`` is the arrival row: by source rank, then token. ``FLAT`` results stand in that order; expert layouts have one result row
per (arrival row, local expert), whose place is ``start_of(expert, source)`` plus the rank of the pick at its source.

Example: arrival row 5 of source 1 has ids ``[9, 2, -1]`` and ranks ``[0, 4, 0]``; experts 8..15 are here. With
``start_of(1, 1) = 30`` its one result row is 30, ``slots[5] = [30, -1]``, ``picks[5] = [0, 0]``, ``gather[30] = 5``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.payload import as_words, copy_row_to, copy_rows
from tokenyard.kernels.region import start_of


@triton.jit
def unpack_flat(
    meta, row, a, here, source_rank, first, end, topk_idx, weights, source, slots, gather,
    K: tl.constexpr, KP: tl.constexpr, STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Ids, weights and source of rows ``a [B]``, read from meta ``row [B]``. ``first``, ``end``: experts of this rank."""
    k = tl.arange(0, KP)
    m = as_words(meta, 32) + row.to(tl.int64)[:, None] * STRIDE
    inside = here[:, None] & (k < K)[None, :]
    ids = tl.load(m + 1 + k[None, :], mask=inside, other=-1)
    local = tl.where((ids >= first) & (ids < end), ids - first, -1)
    to = a.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(topk_idx.to(tl.pointer_type(tl.int64)) + to, local.to(tl.int64), mask=inside)
    if WEIGHTED:
        w = tl.load(m.to(tl.pointer_type(tl.float32)) + 1 + K + k[None, :], mask=inside, other=0.0)
        tl.store(weights.to(tl.pointer_type(tl.float32)) + to, tl.where(local < 0, 0.0, w), mask=inside)
    token = tl.load(as_words(meta, 32) + row.to(tl.int64) * STRIDE, mask=here, other=0).to(tl.int64)
    tl.store(source.to(tl.pointer_type(tl.int64)) + a, (source_rank.to(tl.int64) << 32) | token, mask=here)
    if STATIC:
        tl.store(slots.to(tl.pointer_type(tl.int64)) + a, a.to(tl.int64), mask=here)
        tl.store(gather.to(tl.pointer_type(tl.int64)) + a, a.to(tl.int64), mask=here)


@triton.jit
def unpack_placed(
    meta, a, source_rank, first, end, plan, T, num_rows, slots, picks, weights, source, gather,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The same for one arrival row of an expert layout. Returns its result rows ``[KP]``, -1 where there is none."""
    k = tl.arange(0, KP)
    m = as_words(meta, 32)
    ids = tl.load(m + 1 + k, mask=k < K, other=-1)
    mine = (ids >= first) & (ids < end)
    rank = tl.load(m + 1 + K + k, mask=mine, other=0)
    start = tl.load(start_of(plan, tl.where(mine, ids - first, 0), source_rank, T, R, C), mask=mine, other=0)
    slot = tl.where(mine & (start + rank < num_rows), start + rank, -1)
    nth = tl.cumsum((slot >= 0).to(tl.int32), 0) - 1
    kept = (slot >= 0) & (nth < J)  # a peer cannot send more
    at = a.to(tl.int64) * J + nth
    tl.store(slots.to(tl.pointer_type(tl.int64)) + at, slot.to(tl.int64), mask=kept)
    tl.store(picks.to(tl.pointer_type(tl.int64)) + at, k.to(tl.int64), mask=kept)
    count = tl.sum(kept.to(tl.int32))
    rest = (k >= count) & (k < J)
    tl.store(slots.to(tl.pointer_type(tl.int64)) + a.to(tl.int64) * J + k, (k * 0 - 1).to(tl.int64), mask=rest)
    tl.store(picks.to(tl.pointer_type(tl.int64)) + a.to(tl.int64) * J + k, (k * 0).to(tl.int64), mask=rest)
    tl.store(gather.to(tl.pointer_type(tl.int64)) + slot, a.to(tl.int64) + (k * 0), mask=kept)
    if WEIGHTED:
        w = tl.load(m.to(tl.pointer_type(tl.float32)) + 1 + 2 * K + k, mask=kept, other=0.0)
        tl.store(weights.to(tl.pointer_type(tl.float32)) + slot, w, mask=kept)
    token = tl.load(m).to(tl.int64)
    tl.store(
        source.to(tl.pointer_type(tl.int64)) + slot, ((source_rank.to(tl.int64) << 32) | token) + (k * 0), mask=kept
    )
    return tl.where(kept, slot, -1)


@triton.jit
def place_riders(
    scales, meta, row, a, here, source_rank, first, end, out_scales, topk_idx, weights, source, slots, gather,
    SCALE: tl.constexpr, META: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, FRESH: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """What comes with rows of a ``FLAT`` result: scales, and in a fresh dispatch ids, weights and sources."""
    if S:
        copy_rows(as_words(scales, 32), row, SCALE, as_words(out_scales, 32), a, S, here, S, triton.next_power_of_2(S))
    if FRESH:
        unpack_flat(
            meta, row, a, here, source_rank, first, end, topk_idx, weights, source, slots, gather, K, KP, META,
            WEIGHTED, STATIC,
        )  # fmt: skip


@triton.jit
def place_rows(
    rows, scales, meta, row, a, here, source_rank, first, end, plan, T, num_rows, out, out_scales,
    topk_idx, picks, weights, source, gather, slots,
    ROW: tl.constexpr, SCALE: tl.constexpr, META: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr, FRESH: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Place rows ``row [B]`` of ``rows``, ``scales`` and ``meta`` (addresses; strides ROW, SCALE, META words) as ``a [B]``."""
    if PLACED:
        for i in tl.static_range(B):
            one = tl.arange(0, B) == i
            if tl.max((one & here).to(tl.int32)) > 0:
                b, this = tl.sum(tl.where(one, a, 0)), tl.sum(tl.where(one, row, 0)).to(tl.int64)
                if FRESH:
                    to = unpack_placed(
                        meta + this * (META * 4), b, source_rank, first, end, plan, T, num_rows, slots, picks, weights,
                        source, gather, R, C, K, KP, J, WEIGHTED,
                    )  # fmt: skip
                else:
                    k = tl.arange(0, KP)
                    to = tl.load(slots.to(tl.pointer_type(tl.int64)) + b.to(tl.int64) * J + k, mask=k < J, other=-1).to(
                        tl.int32
                    )
                copy_row_to(as_words(rows, BITS) + this * ROW, as_words(out, BITS), to, to >= 0, N, BLOCK)
                if S:
                    copy_row_to(
                        as_words(scales, 32) + this * SCALE, as_words(out_scales, 32), to, to >= 0, S,
                        triton.next_power_of_2(S),
                    )  # fmt: skip
    else:
        copy_rows(as_words(rows, BITS), row, ROW, as_words(out, BITS), a, N, here, N, BLOCK)
        place_riders(
            scales, meta, row, a, here, source_rank, first, end, out_scales, topk_idx, weights, source, slots, gather,
            SCALE, META, K, KP, S, FRESH, WEIGHTED, STATIC,
        )  # fmt: skip
