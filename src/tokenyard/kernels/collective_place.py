# pyright: basic
"""Engine collective, what has come to this rank: one launch that counts and ranks picks, one that
places rows. A cached dispatch has one that gathers.

Example: rank 0 of 2 has experts 0 and 1; from rank 0 come tokens 0 and 1 with ids ``[0, 3]`` and
``[1, -1]``, from rank 1 token 0 with ``[1, 0]``. ``FLAT``: the rows as they came, ids ``[0, -1],
[1, -1], [1, 0]``. ``EXPERT_MAJOR``: expert 0 has rows 0 and 1, expert 1 rows 2 and 3; ``slots =
[[0, -1], [2, -1], [3, 1]]``, ``picks = [[0, 0], [0, 0], [0, 1]]``, ``gather = [0, 2, 1, 2]``.

Rows of each rank are cut into ``parts``, one for each program that counts. The rank of a pick among
its source's picks of that expert is that within its part, and what parts before it have.

Ids come from peers: only those of local experts become addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.collective_send import ARRIVALS, is_last
from tokenyard.kernels.dispatch import in_slots
from tokenyard.kernels.exchange import complete_experts
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, copy_row_to, copy_rows, rows_at, zero_row
from tokenyard.kernels.place import (
    Placing, experts_of, floats, keep_slots, num_experts_of, place_metadata, placing_of
)  # fmt: skip
from tokenyard.kernels.plan import PlanOutputs, ranks_among_picks
from tokenyard.kernels.region import COUNTS_AT, ROWS_AT, block_of, ints, plan_words, start_of
from tokenyard.kernels.structs import (
    Batch, Result, Routing, RowConstants, Strides, strides_in_slots
)  # fmt: skip
from tokenyard.kernels.sync import words
from tokenyard.routing import power_of_two_at_least

MOST_PARTS, MOST_PLACED, MOST_SUMMED = 128, 128, tl.constexpr(4096)
"""Parts of all ranks' rows, picks that a program compares at once, and counts that one adds up."""


class ArrivalConfig(NamedTuple):
    """What is known of rows that come when their kernels are compiled."""

    ranks: int
    plan_ranks: int  # as tables have them: ranks
    channels: int  # as tables have them: 1
    rank_bins: int  # a power of two, not less than ranks
    parts: int  # of each rank's rows, a power of two
    local_bins: int  # experts of this rank, to a power of two
    columns: int  # of a part's counts: local_bins + 1
    topk: int
    topk_bins: int
    tokens: int  # rows that a program counts at once
    header_words: int
    row: RowConstants  # on the wire
    strides: Strides
    placing: Placing
    by_expert: bool
    padded: bool
    exact: bool  # headers tell how many rows come; else most_rows of each rank
    counted: bool  # there was a launch that counts
    block: int


class Counts(NamedTuple):
    """Addresses of what counting leaves: int32 counts of each part before it ``[ranks * parts,
    columns]`` with totals behind them, ranks of picks ``[Nb, K]``, and the plan's tables."""

    parts: Any
    ranks: Any
    plan: Any


@triton.jit
def _sources(headers, most_rows, k: tl.constexpr):
    """Where rows of each rank begin, and how many places they have, ``[rank_bins]``."""
    s = tl.arange(0, k.rank_bins)
    if k.exact:
        rows = tl.load(words(headers) + s * k.header_words + ROWS_AT, mask=s < k.ranks, other=0)
        rows = rows.to(tl.int32)
        return tl.cumsum(rows, 0) - rows, rows
    else:
        return s * most_rows, tl.where(s < k.ranks, most_rows, 0)


@triton.jit
def _of(values, at, k: tl.constexpr):
    """``values[at]``."""
    return tl.sum(tl.where(tl.arange(0, k.rank_bins) == at, values, 0))


@triton.jit
def _totals(parts, k: tl.constexpr):
    """Behind the counts of parts: totals ``[rank_bins, local_bins]``, then rows ``[rank_bins]``."""
    return ints(parts) + k.ranks * k.parts * k.columns


@triton.jit
def _count_part(recv, experts, row, ranks, a0, a1, k: tl.constexpr):
    """Counts of the rows ``a0 .. a1 - 1`` per expert, and of those that are somebody's."""
    pick, e = tl.arange(0, k.topk_bins), tl.arange(0, k.local_bins)
    held, used = tl.zeros((k.local_bins,), tl.int32), tl.full((), 0, tl.int32)
    tl.store(row + e, held)
    tl.debug_barrier()
    for ab in range(a0, a1, k.tokens):
        a = ab + tl.arange(0, k.tokens)
        inside = (a < a1)[:, None] & (pick < k.topk)[None, :]
        m = as_words(recv + k.row.metadata_at, 32) + a.to(tl.int64) * k.strides.metadata
        ids = tl.load(m[:, None] + 1 + pick[None, :], mask=inside, other=-1)
        local = tl.where((ids >= experts.first) & (ids < experts.end), ids - experts.first, -1)
        flat = tl.reshape(local, [k.tokens * k.topk_bins])
        if k.by_expert:
            to = ints(ranks) + a.to(tl.int64)[:, None] * k.topk + pick[None, :]
            ranks_among_picks(to, flat, row, inside, k)
            tl.debug_barrier()
        held += tl.histogram(flat, k.local_bins, mask=flat >= 0)
        tl.store(row + e, held)
        tl.debug_barrier()
        used += tl.sum((tl.load(m, mask=a < a1, other=-1) >= 0).to(tl.int32))
    tl.store(row + k.local_bins, used)


@triton.jit
def _add_parts(parts, local, k: tl.constexpr):
    """The last program: counts of each part become those of the parts before it."""
    P: tl.constexpr = k.parts
    COLUMNS: tl.constexpr = MOST_SUMMED // k.parts
    hist, totals = ints(parts), _totals(parts, k)
    p, s = tl.arange(0, P), tl.arange(0, k.rank_bins)
    for c0 in range(0, k.ranks * local, COLUMNS):
        column = c0 + tl.arange(0, COLUMNS)
        source = column // tl.maximum(local, 1)
        expert = column - source * local
        known = column < k.ranks * local
        mask = (p >= 0)[:, None] & known[None, :]
        at = hist + (source[None, :] * P + p[:, None]) * k.columns + expert[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.debug_barrier()
        tl.store(at, tl.cumsum(counts, 0) - counts, mask=mask)
        tl.store(totals + source * k.local_bins + expert, tl.sum(counts, axis=0), mask=known)
    at = hist + (s[:, None] * P + p[None, :]) * k.columns + k.local_bins
    used = tl.load(at, mask=(s < k.ranks)[:, None] & (p >= 0)[None, :], other=0)
    tl.store(totals + k.rank_bins * k.local_bins + s, tl.sum(used, axis=1), mask=s < k.ranks)
    tl.debug_barrier()


@triton.jit(repr=shown_as("collective::count"))
def collective_count_kernel(
    recv, headers, state, counts: Counts, outputs: PlanOutputs, rank, num_experts, most_rows,
    num_rows, alignment, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is an :class:`ArrivalConfig`; :func:`bind_count` launches it. The
    result has room for ``num_rows``."""
    P: tl.constexpr = k.parts
    c = tl.program_id(0)
    rank, num_experts = rank.to(tl.int32), num_experts.to(tl.int32)
    most_rows = most_rows.to(tl.int32)
    routing = Routing(counts.plan, rank, rank * 0, num_experts, num_rows.to(tl.int32))
    begins, rows = _sources(headers, most_rows, k)
    begin, count = _of(begins, c // P, k), _of(rows, c // P, k)
    share = (count + P - 1) // P
    a0 = begin + c % P * share
    a1 = tl.minimum(a0 + share, begin + count)
    experts, local = experts_of(routing, k), num_experts_of(routing, k)
    _count_part(recv, experts, ints(counts.parts) + c * k.columns, counts.ranks, a0, a1, k)
    if is_last(state, ARRIVALS, k.ranks * P):
        _add_parts(counts.parts, local, k)
        s, e = tl.arange(0, k.rank_bins), tl.arange(0, k.local_bins)
        mask = (s < k.ranks)[:, None] & (e < local)[None, :]
        at = _totals(counts.parts, k) + s[:, None] * k.local_bins + e[None, :]
        pairs = tl.load(at, mask=mask, other=0)
        per_expert = tl.sum(pairs, axis=0)
        tl.store(ints(outputs.tokens_per_expert) + e, per_expert, mask=e < local)
        if k.by_expert:
            complete_experts(
                pairs, per_expert, local, routing, outputs, most_rows, alignment.to(tl.int32), s, e,
                k,
            )  # fmt: skip


@triton.jit
def _copy_scales(payload, a, result, to, here, k: tl.constexpr):
    """Those of row ``a`` to the result rows ``to``, where ``here``."""
    S: tl.constexpr = k.row.scale_words
    if S:
        scales = rows_at(payload.scales, 32, a, k.strides.scales)
        copy_row_to(scales, rows_at(result.scales, 32, to, S), here, S)


@triton.jit
def _copy_row(payload, a, result, to, here, k: tl.constexpr):
    """Row ``a``, with its scales, to the result rows ``to``, where ``here``."""
    row: tl.constexpr = k.row
    source = rows_at(payload.rows, row.word_bits, a, k.strides.payload)
    target = rows_at(result.rows, row.word_bits, to, row.words)
    copy_row_to(source, target, here, row.words, k.block)
    _copy_scales(payload, a, result, to, here, k)


@triton.jit
def _place_flat(payload, a, source, begin, used, experts, result, k: tl.constexpr):
    """Row ``a`` of a flat result. With static shapes rows that are somebody's come first, ``used
    [rank_bins]`` of each rank, and the others, of zeros, behind all of them."""
    row: tl.constexpr = k.row
    one, to, here = tl.arange(0, 1), a, a >= 0
    if k.counted:
        s = tl.arange(0, k.rank_bins)
        before = tl.sum(tl.where(s < source, used, 0))
        mine, i = _of(used, source, k), a - begin
        here = i < mine
        to = tl.where(here, before + i, tl.sum(used) + begin - before + i - mine)
        tl.store(words(result.slots) + a, tl.where(here, to, -1).to(tl.int64))
        tl.store(words(result.picks) + a, (a * 0).to(tl.int64))
        tl.store(words(result.arrivals) + to, tl.where(here, a, -1).to(tl.int64))
    if here:
        copy_rows(
            rows_at(payload.rows, row.word_bits, a + one, k.strides.payload),
            rows_at(result.rows, row.word_bits, to + one, row.words), one == 0, row.words, k.block,
        )  # fmt: skip
    else:
        zero_row(result, to, row, k.block)
        tl.debug_barrier()
    batch = Batch(index=a + one, arrival=to + one, here=one == 0)
    SCALES: tl.constexpr = 0 if k.counted else row.scale_words
    place_metadata(payload, batch, source, experts, result, k.strides, SCALES, k.placing)
    if k.counted and row.scale_words:
        if here:
            _copy_scales(payload, a, result, to + one, one == 0, k)


@triton.jit
def _place_by_expert(payload, counts, a, source, begin, count, routing, result, k: tl.constexpr):
    """Row ``a``, number ``a - begin`` of the ``count`` of its source, to all its result rows."""
    pick = tl.arange(0, k.topk_bins)
    experts = experts_of(routing, k)
    m = as_words(payload.metadata, 32) + a.to(tl.int64) * k.strides.metadata
    ids = tl.load(m + 1 + pick, mask=pick < k.topk, other=-1)
    mine = (ids >= experts.first) & (ids < experts.end)
    local = tl.where(mine, ids - experts.first, 0)
    share = tl.maximum((count + k.parts - 1) // k.parts, 1)
    part = source * k.parts + (a - begin) // share
    rank = tl.load(ints(counts.ranks) + a.to(tl.int64) * k.topk + pick, mask=mine, other=0)
    rank += tl.load(ints(counts.parts) + part * k.columns + local, mask=mine, other=0)
    start = start_of(routing.plan, local, source, routing.num_tokens, k)
    slot = tl.load(start, mask=mine, other=0) + rank
    slot = tl.where(mine & (slot < routing.num_rows), slot, -1)
    to = keep_slots(m, 1 + k.topk, pick, slot, a, source, result, k.placing)
    _copy_row(payload, a, result, to, to >= 0, k)


@triton.jit
def _fill(result, begin, end, step, k: tl.constexpr):
    """Result rows ``begin .. end - 1`` are nobody's, ``step`` of 256 apart."""
    for b in range(begin, end, step * 256):
        q = b + tl.arange(0, 256)
        mask, nobody = q < end, (q * 0 - 1).to(tl.int64)
        tl.store(words(result.arrivals) + q, nobody, mask=mask)
        tl.store(words(result.source) + q, nobody, mask=mask)
        if k.placing.weighted:
            tl.store(floats(result.weights) + q, (q * 0).to(tl.float32), mask=mask)
    if not k.padded:  # else nobody looks at them
        for b in range(begin, end, step * 256):
            for q in range(b, tl.minimum(b + 256, end)):
                zero_row(result, q, k.row, k.block)


@triton.jit
def _fill_blocks(routing, local, most_rows, result, k: tl.constexpr):
    """What is behind the rows of each expert, and behind all blocks."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    for e in range(programs - 1 - pid, local, programs):
        block = block_of(routing.plan, e, local, routing.num_tokens, k)
        begin = tl.load(block)
        if k.padded:
            _fill(result, begin, (e + 1) * (k.ranks * most_rows), 1, k)
        else:
            end = tl.minimum(tl.load(block + 1), routing.num_rows)
            _fill(result, begin, end, 1, k)
    if not k.padded:
        end = tl.full((), 0, tl.int32)
        if local > 0:
            end = tl.load(block_of(routing.plan, local - 1, local, routing.num_tokens, k) + 1)
        _fill(result, end + pid * 256, routing.num_rows, programs, k)


@triton.jit(repr=shown_as("collective::place"))
def collective_place_kernel(
    recv, headers, counts: Counts, result: Result, tokens_per_expert, rank, num_experts,
    arrived_rows, most_rows, num_rows, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is an :class:`ArrivalConfig`; :func:`bind_place` launches it."""
    pid, most_rows = tl.program_id(0), most_rows.to(tl.int32)
    rank, num_experts, num_rows = rank.to(tl.int32), num_experts.to(tl.int32), num_rows.to(tl.int32)
    routing = Routing(counts.plan, rank, most_rows * 0, num_experts, num_rows)
    payload = in_slots(recv, k.row)
    experts, local = experts_of(routing, k), num_experts_of(routing, k)
    s, e = tl.arange(0, k.rank_bins), tl.arange(0, k.local_bins)
    begins, rows = _sources(headers, most_rows, k)
    used = rows
    if k.counted:
        at = _totals(counts.parts, k) + k.rank_bins * k.local_bins + s
        used = tl.load(at, mask=s < k.ranks, other=0)
    elif pid == 0:
        at = words(headers) + s[:, None] * k.header_words + COUNTS_AT + e[None, :]
        mask = (s < k.ranks)[:, None] & (e < local)[None, :]
        per_expert = tl.sum(tl.load(at, mask=mask, other=0), axis=0).to(tl.int32)
        tl.store(ints(tokens_per_expert) + e, per_expert, mask=e < local)
    for a in range(pid, arrived_rows.to(tl.int32), tl.num_programs(0)):
        source = tl.sum(((begins + rows <= a) & (s < k.ranks)).to(tl.int32))
        begin = _of(begins, source, k)
        if k.by_expert:
            count = _of(rows, source, k)
            _place_by_expert(payload, counts, a, source, begin, count, routing, result, k)
        else:
            _place_flat(payload, a, source, begin, used, experts, result, k)
    if k.by_expert:
        _fill_blocks(routing, local, most_rows, result, k)


@triton.jit(repr=shown_as("collective::gather"))
def collective_gather_kernel(recv, gather, result: Result, num_rows, k: tl.constexpr):
    """Result rows of a cached dispatch: row ``gather[i]`` of what came, or zeros; all in order if
    there is no ``gather``. ``k`` is an :class:`ArrivalConfig`; :func:`bind_gather` launches it."""
    one = tl.arange(0, 1)
    for i in range(tl.program_id(0), num_rows.to(tl.int32), tl.num_programs(0)):
        a = i.to(tl.int64)
        if k.by_expert:
            a = tl.load(words(gather) + i)
        if a >= 0:
            _copy_row(in_slots(recv, k.row), a, result, i + one, one == 0, k)
        else:
            zero_row(result, i, k.row, k.block)


# The host's side


def arrival_config(
    config: Any, row: RowConstants, header_words: int, *, by_expert: bool, padded: bool,
    exact: bool, weighted: bool = False,
) -> ArrivalConfig:  # fmt: skip
    """Of a ``Config``. In a cached dispatch ``by_expert`` says whether rows are gathered."""
    bins, ranks, topk = power_of_two_at_least, config.world_size, config.num_topk
    local, top, rank_bins = bins(max(config.num_local_experts, 2)), bins(topk), bins(ranks)
    slots = min(topk, config.num_local_experts)
    return ArrivalConfig(
        ranks=ranks, plan_ranks=ranks, channels=1, rank_bins=rank_bins,
        parts=max(1, MOST_PARTS // rank_bins), local_bins=local, columns=local + 1,
        topk=topk, topk_bins=top, tokens=max(1, MOST_PLACED // top), header_words=header_words,
        row=row, strides=strides_in_slots(row), by_expert=by_expert, padded=padded, exact=exact,
        placing=placing_of(topk, slots, by_expert=by_expert, fresh=True, weighted=weighted),
        counted=by_expert or not exact, block=min(bins(row.words), 4096),
    )  # fmt: skip


def count_words(k: ArrivalConfig, num_local: int) -> tuple[int, int]:
    """int32 words of the counts of parts, and of the plan's tables."""
    parts = k.ranks * k.parts * k.columns + k.rank_bins * (k.local_bins + 1)
    return parts, plan_words(k.ranks, 1, 0, num_local)


def bind_count(bind: Callable[..., Any], k: ArrivalConfig) -> Callable[..., None]:
    """The launch that counts; arguments: those of its kernel. ``bind``: as ``Kernels.bind``."""
    return bind(collective_count_kernel, k.ranks * k.parts, 8, None, {"k": k})


def bind_place(bind: Callable[..., Any], programs: int, k: ArrivalConfig) -> Callable[..., None]:
    """The launch that places rows: see :func:`bind_count`."""
    return bind(collective_place_kernel, programs, 8, None, {"k": k})


def bind_gather(bind: Callable[..., Any], programs: int, k: ArrivalConfig) -> Callable[..., None]:
    """The launch that gathers rows: see :func:`bind_count`."""
    return bind(collective_gather_kernel, programs, 8, None, {"k": k})
