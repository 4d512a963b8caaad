# pyright: basic
"""The receiving stage of a low-latency dispatch. What it waits for, and who may read it when:
``kernels/low_latency_dispatch.py``. ``k`` is its ``DispatchConfig``."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import is_far, takes_rows
from tokenyard.kernels.low_latency_memory import (
    READY, TORN, block_of, count_of, flag_of, packed_of, pairs_of, present_of, slot_of, start_of,
    value_in,
)  # fmt: skip
from tokenyard.kernels.low_latency_rail import LOST, have_rails, is_handed_on, rail_of
from tokenyard.kernels.low_latency_waits import (
    are_active, in_same_call, leave_out, wait_counts, wait_flag, wait_row,
)  # fmt: skip
from tokenyard.kernels.payload import as_words, zero_row
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import first_expert, ints, peer_base
from tokenyard.kernels.sync import words


@triton.jit
def _make_table(result, present, counts, num_rows, alignment, call, k: tl.constexpr):
    """Where rows of each (expert, source) begin: publish it to this rank's programs, then store
    what the result tells of it."""
    sizes: tl.constexpr = k.sizes
    R: tl.constexpr = sizes.ranks
    M: tl.constexpr = sizes.tokens
    state, me = call.state, call.rank
    r, e = tl.arange(0, sizes.rank_bins), tl.arange(0, k.expert_bins)
    local = first_expert(me + 1, sizes.experts, R) - first_expert(me, sizes.experts, R)
    held = e < local
    pairs = tl.where(present[:, None] & held[None, :], tl.minimum(value_in(counts), M), 0)
    pairs = pairs.to(tl.int32)
    totals = tl.sum(pairs, axis=0)
    aligned = (totals + alignment - 1) // alignment * alignment
    start = tl.cumsum(aligned, 0) - aligned
    if k.padded:
        start = e * (R * M)
    block_end = start + (totals if k.padded else aligned)
    last = e == local - 1
    next_start = tl.where(last, num_rows, start + (R * M) if k.padded else start + aligned)
    begin = tl.cumsum(pairs, 0) - pairs
    both = (r < R)[:, None] & held[None, :]
    tl.store(start_of(state, e[None, :], r[:, None], sizes), start[None, :] + begin, mask=both)
    tl.store(pairs_of(state, e[None, :], r[:, None], sizes), pairs, mask=both)
    block = block_of(state, e, sizes)
    tl.store(block, start + totals, mask=held)
    tl.store(block + 1, block_end, mask=held)
    tl.store(block + 2, next_start, mask=held)
    tl.debug_barrier()
    tl.atomic_xchg(words(state) + READY, call.number, sem="release", scope="gpu")
    tl.store(ints(result.tokens_per_expert) + e, totals, mask=held)
    to = ints(result.blocks)
    if k.padded:
        at = to + (e[None, :] * R + r[:, None]) * 2
        tl.store(at, begin, mask=both)
        tl.store(at + 1, pairs, mask=both)
    else:
        tl.store(to + e, tl.minimum(start, num_rows), mask=held)
        tl.store(to + local, tl.minimum(tl.sum(tl.where(held, aligned, 0)), num_rows))
        if result.overflow != 0:
            room = tl.maximum(num_rows - start, 0)
            lost = tl.sum(tl.where(held, tl.maximum(totals - room, 0), 0))
            tl.store(ints(result.overflow), lost)
    if k.load_bytes:
        loads = result.loads.to(tl.pointer_type(tl.int64 if k.load_bytes == 8 else tl.int32)) + e
        sofar = tl.load(loads, mask=held, other=0)
        tl.debug_barrier()
        tl.store(loads, sofar + totals, mask=held)


@triton.jit
def lead(result, tag, num_rows, alignment, call, k: tl.constexpr):
    """Step 3: who is present, and where rows begin."""
    sizes: tl.constexpr = k.sizes
    experts: tl.constexpr = sizes.local_experts
    mine = peer_base(call.regions, call.rank)
    r, e = tl.arange(0, sizes.rank_bins), tl.arange(0, k.expert_bins)
    here = are_active(call.active, r, r < sizes.ranks)
    inside = here[:, None] & (e < experts)[None, :]
    counts_at = count_of(mine, call.parity, r[:, None], e[None, :], sizes)
    tags_at = count_of(mine, call.parity, r, experts, sizes)
    counts, tags, there = wait_counts(
        counts_at, inside, tags_at, here, r, result.waits, call, sizes
    )
    present = in_same_call(call.state, tags, there, tag, r)
    leave_out(call.active, r, here & (present == 0))
    if sizes.per_node:
        present = have_rails(r, present, call, sizes)
    tl.store(present_of(call.state, r, sizes), present.to(tl.int32), mask=r < sizes.ranks)
    _make_table(result, present, counts, num_rows, alignment, call, k)


@triton.jit
def empty_rows(result, begin, end, weighted: tl.constexpr):
    """Rows ``begin`` .. ``end - 1`` have no source."""
    for at in range(begin, end, 256):
        row = at + tl.arange(0, 256)
        tl.store(words(result.source) + row, (row * 0).to(tl.int64) - 1, mask=row < end)
        if weighted:
            tl.store(floats(result.weights) + row, row * 0.0, mask=row < end)


@triton.jit
def finish_block(result, e, num_rows, state, k: tl.constexpr):
    """The rows behind those of expert ``e``."""
    row: tl.constexpr = k.row
    S: tl.constexpr = row.scale_words
    block = block_of(state, e, k.sizes)
    end, zeros_to, to = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    empty_rows(result, tl.minimum(end, num_rows), tl.minimum(to, num_rows), k.weighted)
    if k.padding:
        for i in range(end, tl.minimum(zeros_to, num_rows)):
            at = (i + 0).to(tl.int64)
            zero_row(as_words(result.rows, row.word_bits) + at * row.words, row.words, k.block)
            if S:
                zero_row(as_words(result.scales, 32) + at * S, S, triton.next_power_of_2(S))


@triton.jit
def _place_row(result, slot, s, t, num_rows, call, k: tl.constexpr):
    """Copy the row in ``slot``, token ``t`` of rank ``s``, to its places. Returns these,
    ``[topk_bins]``; -2 where it has none."""
    sizes: tl.constexpr = k.sizes
    layout: tl.constexpr = k.row
    topk: tl.constexpr = sizes.topk
    N: tl.constexpr = layout.words
    S: tl.constexpr = layout.scale_words
    M: tl.constexpr = sizes.ranks * sizes.tokens
    bits: tl.constexpr = layout.word_bits
    scale_bins: tl.constexpr = triton.next_power_of_2(S) if S else 1
    pick, w, sw = tl.arange(0, sizes.topk_bins), tl.arange(0, k.block), tl.arange(0, scale_bins)
    row, metadata = as_words(slot, bits), as_words(slot + layout.metadata_at, 32)
    ids = tl.load(metadata + pick, mask=pick < topk, other=-1, cache_modifier=".cg")
    rank = tl.load(metadata + topk + pick, mask=pick < topk, other=0, cache_modifier=".cg")
    if k.weighted:
        weights_at = metadata + 2 * topk + pick
        weight = tl.load(weights_at, mask=pick < topk, other=0, cache_modifier=".cg")
    v = tl.load(row + w, mask=w < N, cache_modifier=".cg")
    if S:
        scales_at = as_words(slot + layout.scales_at, 32) + sw
        scale = tl.load(scales_at, mask=sw < S, cache_modifier=".cg")
    first = first_expert(call.rank, sizes.experts, sizes.ranks)
    here = (ids >= first) & (ids < first_expert(call.rank + 1, sizes.experts, sizes.ranks))
    starts_at = start_of(call.state, tl.where(here, ids - first, 0), s, sizes)
    start = tl.load(starts_at, mask=here, other=0)
    here = here & (rank >= 0) & (rank < sizes.tokens) & (start + rank < num_rows)
    if sizes.far:  # which may say any token
        here = here & (t >= 0) & (t < sizes.tokens)
    place = tl.where(here, start + rank, -2)
    source = (s.to(tl.int64) << 32) + t + (pick * 0).to(tl.int64)
    tl.store(words(result.source) + place, source, mask=here)
    if k.weighted:
        tl.store(ints(result.weights) + place, weight, mask=here)
    for j in range(topk):
        to = (tl.sum(tl.where(pick == j + 0, place + 1, 0)) - 1).to(tl.int64)
        if to >= 0:
            target = as_words(result.rows, bits) + to * N
            tl.store(target + w, v, mask=w < N)
            if S:
                at = to * S + sw
                if k.by_column:
                    at = to // M * (M * S) + to % M + sw * M
                tl.store(as_words(result.scales, 32) + at, scale, mask=sw < S)
            for w0 in range(k.block, N, k.block):
                more = tl.load(row + w0 + w, mask=w0 + w < N, cache_modifier=".cg")
                tl.store(target + w0 + w, more, mask=w0 + w < N)
    return place


@triton.jit
def receive_slot(result, s, t, num_rows, call, k: tl.constexpr):
    """Step 4 for slot (s, t), or row number ``t`` of far rank ``s``."""
    sizes: tl.constexpr = k.sizes
    E: tl.constexpr = sizes.experts
    R: tl.constexpr = sizes.ranks
    state, me = call.state, call.rank
    pick = tl.arange(0, sizes.topk_bins)
    mine = peer_base(call.regions, me)
    place = pick * 0 - 2  # a source that is not here: combine tells the owner, if that is back
    if sizes.far:  # a far one has sent no rows; combine tells so by their number
        place += is_far(state, s, sizes).to(tl.int32)
    if tl.load(present_of(state, s, sizes)) != 0:
        want = 2 * call.number
        flag = flag_of(mine, call.parity, s, t, sizes)
        if sizes.far:
            seen, through = want, s
            if sizes.per_node:
                through = tl.where(is_handed_on(s, call, sizes), rail_of(s, me, sizes), s)
            if takes_rows(s, call, sizes):
                seen = wait_row(s, t, call, k.chunk_rows, sizes)
            else:
                seen = wait_flag(flag, want, through, call, k.pieces, sizes)
            if sizes.per_node:
                seen = tl.where(seen == want + LOST, want - 1, seen)
        else:
            seen = wait_flag(flag, want, s, call, k.pieces, sizes)
        if seen < want:  # silent in mid-call: its other rows may still say that they are there
            for e in range(0, first_expert(me + 1, E, R) - first_expert(me, E, R)):
                begin = tl.load(start_of(state, e + 0, s, sizes))
                end = begin + tl.load(pairs_of(state, e + 0, s, sizes))
                begin, end = tl.minimum(begin, num_rows), tl.minimum(end, num_rows)
                empty_rows(result, begin, end, k.weighted)
            if sizes.far:
                place = tl.where(is_far(state, s, sizes), TORN, place)
        if seen == want:
            place = pick * 0 - 1
        if seen == want + 1:
            slot, token = slot_of(mine, call.parity, s, t, sizes), t
            if sizes.far:
                if is_far(state, s, sizes):
                    packed = packed_of(mine, call.parity, s, t, k.row.slot_bytes, sizes)
                    if sizes.per_node:
                        packed = tl.where(takes_rows(s, call, sizes), packed, slot)
                    slot = packed
                    token_at = as_words(slot + k.row.metadata_at, 32) + 3 * sizes.topk
                    token = tl.load(token_at, cache_modifier=".cg")
            place = _place_row(result, slot, s, token, num_rows, call, k)
    places = ints(result.slots) + (s * sizes.tokens + t).to(tl.int64) * sizes.topk
    tl.store(places + pick, place, mask=pick < sizes.topk)
