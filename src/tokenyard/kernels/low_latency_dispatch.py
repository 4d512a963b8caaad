# pyright: basic
"""Low-latency dispatch: one row per (token, rank) into a fixed slot, then to its place at each
local expert.

Grid ``programs`` in every launch. The stages, send and receive, are one launch or two. Example: 2
ranks, 2 experts each. Token 2 of rank 1 picks experts 3 and 0: rank 1 writes it to slot (1, 2) of
both ranks. Rank 0 finds 1 token of rank 0 for expert 0 in its counts, so the row goes to row 1 of
expert 0's block.

Who publishes what, and who may read it when:

1. One program per destination counts this rank's tokens for each expert there, and stores the
   counts. A count holds the number of its call, so it needs no order. The program also sets all
   flags of tokens that do not go there to ``2 * call``.
2. One program per piece of a token (one or two) casts it and stores it into the slots at all the
   token's ranks. The program of the first piece also finds the rank of each pick among this rank's
   tokens for that expert, and stores the metadata. Each sets its own flags there to ``2 * call +
   1`` (release).
3. The last program of a receiver (the *leader*) waits for the counts of all ranks, decides who is
   present, computes where rows begin, and publishes this table by ``READY`` (release, gpu). One
   program decides, so all agree, even if counts come as the time runs out.
4. One program per slot waits for READY, then for all the slot's flags (both acquire), and copies
   the row to its places.

Why a slot may be reused: call n + 2 writes the same half as call n. A rank makes it after it has
received call n + 1, so after it has seen a count of every active rank in call n + 1. That rank
writes the count in a kernel that runs after its kernel of call n has read the half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_memory import (
    BAD_AT, BAD_VALUE, READY, STATUS, Sizes, Stages, address, block_of, count_of, epoch_of, flag_of,
    ints, pairs_of, present_of, slot_of, slots_in, start_of, value_in, with_call,
)  # fmt: skip
from tokenyard.kernels.low_latency_picks import (
    columns_of, merged, merged_weights, picks_at, tokens_per_expert, tokens_with
)
from tokenyard.kernels.low_latency_waits import (
    Call, are_active, in_same_call, is_active, leave_out, tell, wait_counts, wait_flag, wait_ready
)
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import (
    as_words, cast, cast_of, load_groups, store_cast, zero_row
)
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import first_expert, owner_of, peer_base
from tokenyard.kernels.structs import Cast, RowLayout, row_layout
from tokenyard.kernels.sync import follow, words
from tokenyard.layout import power_of_two_at_least
from tokenyard.types import Layout

_BAD_AT, _BAD_VALUE = tl.constexpr(BAD_AT), tl.constexpr(BAD_VALUE)


class DispatchConfig(NamedTuple):
    """What is known of a dispatch when its kernel is compiled."""

    sizes: Sizes
    row: RowLayout
    cast: Cast  # its groups are those of a piece
    expert_bins: int  # a power of two, not less than local_experts, nor 2
    counted: int  # tokens looked at at once
    pieces: int  # of a row
    piece: int  # words of a piece
    block: int  # words of a row in flight
    wide: bool  # ids are int64
    weighted: bool
    padded: bool  # blocks of experts have one size
    padding: bool  # blocks of experts end in rows of zeros
    by_column: bool  # scales of a block are [words, rows]
    load_bytes: int  # of one load counter; 0: there are none
    timed: bool
    stages: Stages
    early: bool  # programs may be set up while the launch before still runs


class Tokens(NamedTuple):
    """Addresses of this rank's tokens. 0: there is none."""

    picks: Any
    weights: Any
    rows: Any
    scales: Any


class DispatchResult(NamedTuple):
    """Addresses of what a dispatch fills. 0: there is none."""

    rows: Any
    scales: Any
    weights: Any
    source: Any  # (rank << 32) | token
    slots: Any  # int32 [R * M, K]: result rows of each slot; -1: no row came, -2: it has no place
    merged: Any  # int32 [2, T, K]: ids of merged picks, bits of their weights
    first_pick: Any  # int64 [T, K]: the pick that each was merged into
    tokens_per_expert: Any
    blocks: Any  # source_ranges or expert_offsets
    overflow: Any
    loads: Any  # [L]: tokens of each expert are added
    waits: Any  # int64 [R]: nanoseconds waited are added


# Send


@triton.jit
def _send_counts(tokens, num_tokens, tag, to, call, k: tl.constexpr):
    """Step 1: counts for rank ``to``, and the flags of tokens that do not go there."""
    sizes: tl.constexpr = k.sizes
    M: tl.constexpr = sizes.tokens
    first = first_expert(to, sizes.experts, sizes.ranks)
    end = first_expert(to + 1, sizes.experts, sizes.ranks)
    base = peer_base(call.regions, to)
    e = tl.arange(0, k.expert_bins)
    counts = tl.zeros((k.expert_bins,), tl.int32)
    for t0 in range(0, M, k.counted):
        columns = columns_of(tokens.picks, t0, num_tokens, k.counted, sizes.topk, k.wide)
        more, goes = tokens_per_expert(columns, first, end, k.counted, k.expert_bins, sizes)
        counts += more
        t = t0 + tl.arange(0, k.counted)
        flags = flag_of(base, call.parity, call.rank, t, sizes)
        pieces = flags[:, None] + tl.arange(0, k.pieces)[None, :]
        none = tl.zeros((k.counted, k.pieces), tl.int64) + 2 * call.number
        tell(pieces, none, ((t < M) & (goes == 0))[:, None])
    counts_at = count_of(base, call.parity, call.rank, e, sizes)
    counts = with_call(call.number, counts.to(tl.int64))
    tell(counts_at, counts, e < sizes.local_experts)
    tag_at = count_of(base, call.parity, call.rank, sizes.local_experts, sizes)
    tell(tag_at, with_call(call.number, tag), to >= 0)


@triton.jit
def _note_bad_pick(state, raw, bad, t, sizes: tl.constexpr):
    """Tell the host the first ``bad`` one of the picks ``raw [topk_bins]``."""
    k = tl.arange(0, sizes.topk_bins)
    nth = tl.min(tl.where(bad, k, sizes.topk_bins))
    status = words(tl.load(words(state) + STATUS))
    number = t.to(tl.int64) * sizes.topk + nth + 1
    if tl.atomic_cas(status + _BAD_AT, (t * 0).to(tl.int64), number) == 0:
        tl.store(status + _BAD_VALUE, tl.sum(tl.where(k == nth, raw, 0)).to(tl.int64))


@triton.jit
def _send_metadata(
    tokens, result, raw, ids, columns, goes, slots, num_tokens, t, state, k: tl.constexpr
):
    """Store what stands behind the payload of token ``t`` into the ``slots [rank_bins]`` to which
    it ``goes``, and what this rank keeps of its picks.

    Args:
        raw, ids: its picks ``[topk_bins]``, as given and with -1 for those out of range.
        columns: picks of the first ``k.counted`` tokens before.
    """
    sizes: tl.constexpr = k.sizes
    S: tl.constexpr = k.row.scale_words
    topk: tl.constexpr = sizes.topk
    pick = tl.arange(0, sizes.topk_bins)
    at = t.to(tl.int64) * topk + pick
    ids, first = merged(ids, sizes.topk_bins)
    before = tokens_with(columns, ids, k.counted, sizes)
    for t0 in range(k.counted, t, k.counted):
        others = columns_of(tokens.picks, t0, t, k.counted, topk, k.wide)
        before += tokens_with(others, ids, k.counted, sizes)
    rank = tl.sum(before, axis=0)
    tl.store(ints(result.merged) + at, ids, mask=pick < topk)
    tl.store(words(result.first_pick) + at, first.to(tl.int64), mask=pick < topk)
    bad = (raw < -1) | (raw >= sizes.experts)
    if tl.max(bad.to(tl.int32)) > 0:
        _note_bad_pick(state, raw, bad, t, sizes)
    if S and not k.cast.mode:
        s = tl.arange(0, triton.next_power_of_2(S))[None, :]
        given = tl.load(as_words(tokens.scales, 32) + t.to(tl.int64) * S + s, mask=s < S)
        given = given + (goes * 0)[:, None]
        to = as_words(slots + k.row.scales_at, 32)[:, None] + s
        tl.store(to, given, mask=(goes > 0)[:, None] & (s < S))
    metadata = as_words(slots + k.row.metadata_at, 32)[:, None] + pick[None, :]
    there = (goes > 0)[:, None] & (pick < topk)[None, :]
    everywhere = tl.zeros((sizes.rank_bins, sizes.topk_bins), tl.int32)
    tl.store(metadata, everywhere + ids[None, :], mask=there)
    tl.store(metadata + topk, everywhere + rank[None, :], mask=there)
    if k.weighted:
        weights = merged_weights(tokens.weights, t, ids, first, sizes)
        kept = floats(result.merged) + num_tokens.to(tl.int64) * topk + at
        tl.store(kept, weights, mask=pick < topk)
        bits = weights.to(tl.int32, bitcast=True)
        tl.store(metadata + 2 * topk, everywhere + bits[None, :], mask=there)


@triton.jit
def _store_groups(values, scale, g, goes, slots, me, k: tl.constexpr):
    """Store cast groups ``g`` of a row, with their scales, to the ``slots [rank_bins]`` to which it
    ``goes``."""
    row: tl.constexpr = k.row
    r = tl.arange(0, k.sizes.rank_bins)
    for i in tl.static_range(k.sizes.ranks):
        d = (me + i) % k.sizes.ranks
        if tl.sum(tl.where(r == d, goes, 0)) > 0:
            slot = tl.sum(tl.where(r == d, slots, 0))
            store_cast(
                values, scale, slot, 0, slot + row.scales_at, 0, g * 0, g, g >= 0, row.hidden,
                k.cast.mode, row.scale_words,
            )  # fmt: skip


@triton.jit
def _store_words(v, first, w, goes, slots, me, k: tl.constexpr):
    """Store a piece of the row that begins at ``first`` to the ``slots [rank_bins]`` to which it
    ``goes``. Its words ``w`` are ``v``; further ones are still to be loaded."""
    N: tl.constexpr = k.row.words
    bits: tl.constexpr = k.row.word_bits
    block: tl.constexpr = w.shape[0]
    r = tl.arange(0, k.sizes.rank_bins)
    for i in tl.static_range(k.sizes.ranks):
        d = (me + i) % k.sizes.ranks
        if tl.sum(tl.where(r == d, goes, 0)) > 0:
            slot = tl.sum(tl.where(r == d, slots, 0))
            tl.store(as_words(slot, bits) + w, v, mask=w < N)
            for w0 in range(block, k.piece, block):
                more = tl.load(first + w0 + w, mask=w0 + w < N, cache_modifier=".cg")
                tl.store(as_words(slot, bits) + w0 + w, more, mask=w0 + w < N)


@triton.jit
def _send_piece(tokens, result, num_tokens, t, piece, call, k: tl.constexpr):
    """Step 2: a piece of token ``t``, ``k.piece`` words or ``k.cast.groups`` groups, to all the
    token's ranks. The first piece takes the metadata along."""
    sizes: tl.constexpr = k.sizes
    row: tl.constexpr = k.row
    pick, r = tl.arange(0, sizes.topk_bins), tl.arange(0, sizes.rank_bins)
    w = piece * k.piece + tl.arange(0, min(k.piece, k.block))
    picks = picks_at(tokens.picks, k.wide) + t.to(tl.int64) * sizes.topk
    raw = tl.load(picks + pick, mask=pick < sizes.topk, other=-1)
    bases = tl.load(words(call.regions) + r, mask=r < sizes.ranks, other=0)
    if k.cast.mode:
        g = piece * k.cast.groups + tl.arange(0, k.cast.groups)
        source = tl.multiple_of(tokens.rows.to(tl.pointer_type(k.cast.dtype)), 16)
        plain = load_groups(source + t.to(tl.int64) * row.hidden, g * 0, g, g >= 0, row.hidden)
    else:
        first = as_words(tokens.rows, row.word_bits) + t.to(tl.int64) * row.words
        v = tl.load(first + w, mask=w < row.words, cache_modifier=".cg")
    before = tl.where(piece == 0, t, 0)
    columns = columns_of(tokens.picks, t * 0, before, k.counted, sizes.topk, k.wide)
    # All loads are under way before the first is waited for, and before anything is stored: behind
    # stores they would wait for those.
    here = are_active(call.active, r, r < sizes.ranks)
    ids = tl.where((raw < 0) | (raw >= sizes.experts), -1, raw).to(tl.int32)
    owner = owner_of(ids, sizes.experts, sizes.ranks)
    goes = tl.where(here, tl.max((owner[None, :] == r[:, None]).to(tl.int32), axis=1), 0)
    slots = slot_of(bases, call.parity, call.rank, t, sizes)
    if k.cast.mode:  # first what is long, so that it is on its way meanwhile
        values, scale = cast(plain, g, row.hidden, k.cast.mode)
        _store_groups(values, scale, g, goes, slots, call.rank, k)
    else:
        _store_words(v, first, w, goes, slots, call.rank, k)
    if piece == 0:
        _send_metadata(
            tokens, result, raw, ids, columns, goes, slots, num_tokens, t, call.state, k
        )
    tl.debug_barrier()
    flags = flag_of(bases, call.parity, call.rank, t, sizes) + piece
    done = (r * 0).to(tl.int64) + 2 * call.number + 1
    tl.atomic_max(flags, done, mask=goes > 0, sem="release", scope="sys")


# Receive


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
    next_start = tl.where(e == local - 1, num_rows, start + (R * M) if k.padded else start + aligned)
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
def _lead(result, tag, num_rows, alignment, call, k: tl.constexpr):
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
        counts_at, inside, tags_at, here, r, result.waits, call, k.timed, sizes
    )
    present = in_same_call(call.state, tags, there, tag, r)
    leave_out(call.active, r, here & (present == 0))
    tl.store(present_of(call.state, r, sizes), present.to(tl.int32), mask=r < sizes.ranks)
    _make_table(result, present, counts, num_rows, alignment, call, k)


@triton.jit
def _empty_rows(result, begin, end, weighted: tl.constexpr):
    """Rows ``begin`` .. ``end - 1`` have no source."""
    for at in range(begin, end, 256):
        row = at + tl.arange(0, 256)
        tl.store(words(result.source) + row, (row * 0).to(tl.int64) - 1, mask=row < end)
        if weighted:
            tl.store(floats(result.weights) + row, row * 0.0, mask=row < end)


@triton.jit
def _finish_block(result, e, num_rows, state, k: tl.constexpr):
    """The rows behind those of expert ``e``."""
    row: tl.constexpr = k.row
    S: tl.constexpr = row.scale_words
    block = block_of(state, e, k.sizes)
    end, zeros_to, to = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    _empty_rows(result, tl.minimum(end, num_rows), tl.minimum(to, num_rows), k.weighted)
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
def _receive_slot(result, s, t, num_rows, call, k: tl.constexpr):
    """Step 4 for slot (s, t)."""
    sizes: tl.constexpr = k.sizes
    E: tl.constexpr = sizes.experts
    R: tl.constexpr = sizes.ranks
    state, me = call.state, call.rank
    pick = tl.arange(0, sizes.topk_bins)
    mine = peer_base(call.regions, me)
    place = pick * 0 - 2  # a source that is not here: combine tells the owner, if that is back
    if tl.load(present_of(state, s, sizes)) != 0:
        want = 2 * call.number
        flag = flag_of(mine, call.parity, s, t, sizes)
        seen = wait_flag(flag, want, s, call, k.pieces, sizes)
        if seen < want:  # silent in mid-call: its other rows may still say that they are there
            for e in range(0, first_expert(me + 1, E, R) - first_expert(me, E, R)):
                begin = tl.load(start_of(state, e + 0, s, sizes))
                end = begin + tl.load(pairs_of(state, e + 0, s, sizes))
                _empty_rows(
                    result, tl.minimum(begin, num_rows), tl.minimum(end, num_rows), k.weighted
                )
        if seen == want:
            place = pick * 0 - 1
        if seen == want + 1:
            slot = slot_of(mine, call.parity, s, t, sizes)
            place = _place_row(result, slot, s, t, num_rows, call, k)
    places = ints(result.slots) + (s * sizes.tokens + t).to(tl.int64) * sizes.topk
    tl.store(places + pick, place, mask=pick < sizes.topk)


@triton.jit(repr=shown_as("low_latency::dispatch"))
def low_dispatch_kernel(
    regions, state, active, tokens: Tokens, result: DispatchResult, timeout, tag, rank, num_tokens,
    num_rows, alignment, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`DispatchConfig`; ``timeout`` is in nanoseconds."""
    sizes: tl.constexpr = k.sizes
    R: tl.constexpr = sizes.ranks
    P: tl.constexpr = sizes.programs
    M: tl.constexpr = sizes.tokens
    pid = tl.program_id(0)
    me, num_tokens = rank.to(tl.int32), num_tokens.to(tl.int32)
    num_rows, alignment = num_rows.to(tl.int32), alignment.to(tl.int32)
    follow(k.early)
    number = tl.load(epoch_of(state, pid, sizes)) + 1
    parity = (number % 2).to(tl.int32)
    call = Call(
        regions=regions, state=state, active=active, number=number, parity=parity, rank=me,
        timeout=timeout,
    )  # fmt: skip
    if k.stages.send:
        if pid >= P - R:
            to = (me + P - 1 - pid) % R
            if is_active(active, to):
                _send_counts(tokens, num_tokens, tag, to, call, k)
        for u in range(pid, num_tokens * k.pieces, P):
            _send_piece(tokens, result, num_tokens, u // k.pieces, u % k.pieces, call, k)
    if k.stages.receive:
        if pid == P - 1:
            _lead(result, tag, num_rows, alignment, call, k)
        wait_ready(state, number)
        end, first = first_expert(me + 1, sizes.experts, R), first_expert(me, sizes.experts, R)
        if (end == first) & (pid == 0):
            _empty_rows(result, 0, num_rows, k.weighted)
        for e in range(pid, end - first, P):
            _finish_block(result, e + 0, num_rows, state, k)
        for u in range(pid, R * M, P):
            _receive_slot(result, u // M, u % M, num_rows, call, k)
        tl.debug_barrier()
        tl.store(epoch_of(state, pid, sizes), number)


# The host's side


def bind_dispatch(
    workspace: Any, form: Any, mode: Any, dtype: Any, spec: Any, by_column: bool, stages: Stages, *,
    wide: bool, weighted: bool, load_bytes: int, timed: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature. May wait for the device.

    Args:
        form: of a row on the wire.
        mode, dtype: how rows are cast on their way (None: not), and what the input holds.
    """
    shape, config, words_bins = workspace.shape, workspace.config, power_of_two_at_least(form.words)
    cast = cast_of(form, mode, dtype)
    k = DispatchConfig(
        sizes=workspace.sizes,
        row=row_layout(form),
        cast=cast._replace(groups=cast.groups // shape.pieces),
        expert_bins=power_of_two_at_least(max(config.most_local_experts, 2)),
        counted=min(power_of_two_at_least(config.max_tokens_per_rank), 32 * shape.num_warps),
        pieces=shape.pieces,
        piece=max(1, words_bins // shape.pieces),
        block=min(words_bins, shape.words),
        wide=wide,
        weighted=weighted,
        padded=spec.layout is Layout.EXPERT_PADDED,
        padding=spec.expert_alignment > 1,
        by_column=by_column and stages.receive,
        load_bytes=load_bytes,
        timed=timed,
        stages=stages,
        early=workspace.memory.early,
    )
    return workspace.memory.bind(
        low_dispatch_kernel, shape.programs, num_warps=shape.num_warps,
        max_registers=shape.max_registers, k=k,
    )  # fmt: skip


def dispatch_rows(
    launch: Callable[..., None], workspace: Any, *, payload: Any, topk_idx: Any, weights: Any,
    rows: tuple[Any, Any, Any], spec: Any, options: Any, timeout: int, tag: int, num_rows: int,
) -> None:  # fmt: skip
    """Launch what :func:`bind_dispatch` made. ``rows``: a ``Payload``, ``Plan`` and ``Arrived``, to
    be filled. ``timeout``: nanoseconds."""
    out, plan, arrived = rows
    padded, route = spec.layout is Layout.EXPERT_PADDED, plan.route.data_ptr()
    tokens = Tokens(
        picks=topk_idx.data_ptr(), weights=address(weights), rows=payload.x.data_ptr(),
        scales=address(payload.scales),
    )  # fmt: skip
    result = DispatchResult(
        rows=out.x.data_ptr(), scales=address(out.scales), weights=arrived.weights.data_ptr(),
        source=arrived.source.data_ptr(), slots=slots_in(route, workspace.sizes), merged=route,
        first_pick=plan.first_pick.data_ptr(),
        tokens_per_expert=arrived.tokens_per_expert.data_ptr(),
        blocks=(arrived.source_ranges if padded else arrived.expert_offsets).data_ptr(),
        overflow=arrived.overflow.data_ptr(), loads=address(options.loads),
        waits=address(options.waits),
    )  # fmt: skip
    launch(
        workspace.peers, workspace.state_at, workspace.active_at, tokens, result, timeout, tag,
        workspace.config.rank, topk_idx.shape[0], num_rows, spec.expert_alignment,
    )  # fmt: skip
