# pyright: basic
"""Where received rows go: into the result, in the order of its layout, with their metadata.

Arrival rows are numbered by source rank, then token. A flat result stands in that order. A result
by expert has one row per (arrival row, local expert), at ``start_of(expert, source)`` plus the rank
of the pick among its source's picks of that expert.

Example: arrival row 5 of source 1 has ids ``[9, 2, -1]`` and ranks ``[0, 4, 0]``; experts 8..15 are
here. With ``start_of(1, 1) = 30`` its one result row is 30, ``slots[5] = [30, -1]``, ``picks[5] =
[0, 0]``, ``arrivals[30] = 5``.

``k`` is the struct of constants of any kernel that dispatches: it has ``plan_ranks``, ``channels``
and :class:`Placing` as ``placing``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.payload import as_words, copy_rows, copy_rows_to, rows_at
from tokenyard.kernels.region import first_expert, ints, start_of
from tokenyard.kernels.structs import Experts
from tokenyard.kernels.sync import words
from tokenyard.routing import power_of_two_at_least


class Placing(NamedTuple):
    """What kernels need to know of a result and of what comes with its rows."""

    topk: int
    topk_bins: int  # the next power of two
    slots_per_row: int  # result rows that one arrival row can have
    by_expert: bool  # the result is in the order of experts, else of (source, token)
    fresh: bool  # metadata comes with rows, and the host may not know the counts yet
    weighted: bool
    static: bool  # shapes do not depend on the routing


@triton.jit
def floats(address):
    """``address`` as a pointer to float32."""
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def experts_of(routing, k: tl.constexpr):
    """The experts of this rank."""
    first = first_expert(routing.rank, routing.num_experts, k.ranks)
    return Experts(first=first, end=first_expert(routing.rank + 1, routing.num_experts, k.ranks))


@triton.jit
def num_experts_of(routing, k: tl.constexpr):
    """How many these are."""
    end = first_expert(routing.rank + 1, routing.num_experts, k.ranks)
    return end - first_expert(routing.rank, routing.num_experts, k.ranks)


@triton.jit
def unpack_flat(metadata, batch, source, experts, result, stride: tl.constexpr, how: tl.constexpr):
    """Store ids, weights and source of the rows of ``batch``, read from ``metadata``. ``how``: a
    :class:`Placing`."""
    pick = tl.arange(0, how.topk_bins)
    m = as_words(metadata, 32) + batch.index.to(tl.int64)[:, None] * stride
    inside = batch.here[:, None] & (pick < how.topk)[None, :]
    ids = tl.load(m + 1 + pick[None, :], mask=inside, other=-1)
    local = tl.where((ids >= experts.first) & (ids < experts.end), ids - experts.first, -1)
    to = batch.arrival.to(tl.int64)[:, None] * how.topk + pick[None, :]
    tl.store(words(result.expert_ids) + to, local.to(tl.int64), mask=inside)
    if how.weighted:
        weight = tl.load(floats(m) + 1 + how.topk + pick[None, :], mask=inside, other=0.0)
        tl.store(floats(result.weights) + to, tl.where(local < 0, 0.0, weight), mask=inside)
    at, here = batch.arrival, batch.here
    token = as_words(metadata, 32) + batch.index.to(tl.int64) * stride
    token = tl.load(token, mask=here, other=0).to(tl.int64)
    tl.store(words(result.source) + at, (source.to(tl.int64) << 32) | token, mask=here)
    if how.static:
        tl.store(words(result.slots) + at, at.to(tl.int64), mask=here)
        tl.store(words(result.arrivals) + at, at.to(tl.int64), mask=here)


@triton.jit
def unpack_by_expert(
    metadata, batch, source, experts, routing, result, stride: tl.constexpr, k: tl.constexpr
):
    """The same for rows of a result by expert, with the result rows of each, which
    ``result.slots`` holds then."""
    how: tl.constexpr = k.placing
    pick, here = tl.arange(0, how.topk_bins)[None, :], batch.here[:, None]
    index = tl.where(batch.here, batch.index, 0).to(tl.int64)[:, None]
    m = as_words(metadata, 32) + index * stride
    ids = tl.load(m + 1 + pick, mask=here & (pick < how.topk), other=-1)
    mine = (ids >= experts.first) & (ids < experts.end)
    rank = tl.load(m + 1 + how.topk + pick, mask=mine, other=0)
    local = tl.where(mine, ids - experts.first, 0)
    starts = start_of(routing.plan, local, source, routing.num_tokens, k)
    start = tl.load(starts, mask=mine, other=0)
    slot = tl.where(mine & (start + rank < routing.num_rows), start + rank, -1)
    pick = tl.where(here, pick, how.topk_bins)  # nothing is stored of rows that do not exist
    keep_slots(m, 1 + 2 * how.topk, pick, slot, batch.arrival[:, None], source, result, how)


@triton.jit
def keep_slots(m, weights_at: tl.constexpr, pick, slot, arrival, source, result, how: tl.constexpr):
    """Store the result rows ``slot`` of an arrival row, ``[topk_bins]`` by ``pick``, or of some,
    ``[B, topk_bins]``; and what comes with them: the token is in word 0 of ``m``, weights begin at
    ``weights_at``. Returns the result rows."""
    PICKS: tl.constexpr = len(slot.shape) - 1
    nth = tl.cumsum((slot >= 0).to(tl.int32), PICKS) - 1
    kept = (slot >= 0) & (nth < how.slots_per_row)  # a peer cannot send more
    at = arrival.to(tl.int64) * how.slots_per_row + nth
    tl.store(words(result.slots) + at, slot.to(tl.int64), mask=kept)
    tl.store(words(result.picks) + at, pick.to(tl.int64), mask=kept)
    count = tl.sum(kept.to(tl.int32), PICKS)
    if PICKS:
        count = count[:, None]
    rest = (pick >= count) & (pick < how.slots_per_row)
    before = arrival.to(tl.int64) * how.slots_per_row
    tl.store(words(result.slots) + before + pick, (pick * 0 - 1).to(tl.int64), mask=rest)
    tl.store(words(result.picks) + before + pick, (pick * 0).to(tl.int64), mask=rest)
    tl.store(words(result.arrivals) + slot, arrival.to(tl.int64) + (pick * 0), mask=kept)
    if how.weighted:
        weight = tl.load(floats(m) + weights_at + pick, mask=kept, other=0.0)
        tl.store(floats(result.weights) + slot, weight, mask=kept)
    token = tl.load(m).to(tl.int64)
    tl.store(
        words(result.source) + slot, ((source.to(tl.int64) << 32) | token) + (pick * 0), mask=kept
    )
    return tl.where(kept, slot, -1)


@triton.jit
def place_metadata(
    payload, batch, source, experts, result, strides: tl.constexpr, scale_words: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """Store what comes with rows of a flat result: scales, and in a fresh dispatch ids, weights and
    sources."""
    if scale_words:
        copy_rows(
            rows_at(payload.scales, 32, batch.index, strides.scales),
            rows_at(result.scales, 32, batch.arrival, scale_words), batch.here, scale_words,
        )  # fmt: skip
    if how.fresh:
        unpack_flat(payload.metadata, batch, source, experts, result, strides.metadata, how)


@triton.jit
def place_by_expert(
    payload, batch, source, experts, routing, result, strides: tl.constexpr, block: tl.constexpr,
    k: tl.constexpr,
):  # fmt: skip
    """Move rows to a result by expert, all at once: each is read once and written to all its
    result rows."""
    row: tl.constexpr = k.row
    MOST: tl.constexpr = k.placing.slots_per_row
    if k.placing.fresh:
        unpack_by_expert(
            payload.metadata, batch, source, experts, routing, result, strides.metadata, k
        )
        tl.debug_barrier()  # all threads read what some have stored
    slots = words(result.slots) + batch.arrival.to(tl.int64) * MOST
    n = tl.arange(0, triton.next_power_of_2(MOST))[None, :]
    table = tl.load(slots[:, None] + n, mask=batch.here[:, None] & (n < MOST), other=-1)
    copies = tl.max(tl.sum((table >= 0).to(tl.int32), axis=1))  # the most of any row
    sent = rows_at(payload.rows, row.word_bits, batch.index, strides.payload)
    copies_at = rows_at(result.rows, row.word_bits, slots, row.words)
    copy_rows_to(sent, copies_at, batch.here, copies, row.words, block)
    if row.scale_words:
        copy_rows_to(
            rows_at(payload.scales, 32, batch.index, strides.scales),
            rows_at(result.scales, 32, slots, row.scale_words), batch.here, copies, row.scale_words,
        )  # fmt: skip


@triton.jit
def place_rows(
    payload, batch, source, experts, routing, result, strides: tl.constexpr, block: tl.constexpr,
    k: tl.constexpr,
):  # fmt: skip
    """Move rows ``batch`` of ``payload`` to the result, with their metadata."""
    if k.placing.by_expert:
        place_by_expert(payload, batch, source, experts, routing, result, strides, block, k)
    else:
        row: tl.constexpr = k.row
        sent = rows_at(payload.rows, row.word_bits, batch.index, strides.payload)
        placed = rows_at(result.rows, row.word_bits, batch.arrival, row.words)
        copy_rows(sent, placed, batch.here, row.words, block)
        place_metadata(payload, batch, source, experts, result, strides, row.scale_words, k.placing)


@triton.jit
def tell_blocks(offsets, overflow, counts, start, aligned, local, num_rows, e):
    """Store what a result by expert tells of its blocks: where those of the ``local`` experts ``e``
    begin and the last one ends, cut to the ``num_rows`` there are; and how many rows are lost so,
    if ``overflow`` is not 0. ``counts`` of rows, ``aligned`` of rows with padding."""
    here, to = e < local, ints(offsets)
    tl.store(to + e, tl.minimum(start, num_rows), mask=here)
    tl.store(to + local, tl.minimum(tl.sum(tl.where(here, aligned, 0)), num_rows))
    if overflow != 0:
        room = tl.maximum(num_rows - start, 0)
        lost = tl.sum(tl.where(here, tl.maximum(counts - room, 0), 0))
        tl.store(ints(overflow), lost)


# The host's side


def placing_of(
    num_topk: int, slots_per_row: int, *, by_expert: bool, fresh: bool = False,
    weighted: bool = False, static: bool = False,
) -> Placing:  # fmt: skip
    """See :class:`Placing`."""
    return Placing(
        num_topk, power_of_two_at_least(num_topk), slots_per_row, by_expert, fresh, weighted, static
    )
