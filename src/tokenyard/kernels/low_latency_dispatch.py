# pyright: basic
"""Low-latency dispatch: one row per (token, rank) into a fixed slot, then to its place at each
local expert.

Example: 2 ranks, 2 experts each. Token 2 of rank 1 picks experts 3 and 0: rank 1 writes it to slot
(1, 2) of both ranks. Rank 0 finds 1 token of rank 0 for expert 0 in its counts, so the row goes to
row 1 of expert 0's block.

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

from tokenyard.kernels.low_latency_far import first_put, is_far, takes_rows
from tokenyard.kernels.low_latency_memory import (
    READY, TORN, Sizes, Stages, count_of, epoch_of, flag_of, packed_of, pair_of, slot_of, value_in,
)  # fmt: skip
from tokenyard.kernels.low_latency_rail import LOST, hand_on, is_handed_on, rail_of, source_of
from tokenyard.kernels.low_latency_send import put_rows, send_counts, send_piece
from tokenyard.kernels.low_latency_waits import (
    are_active, in_same_call, is_active, leave_out, next_call, wait_counts, wait_flag, wait_ready,
    wait_row,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, cast_of, zero_row
from tokenyard.kernels.place import floats, tell_blocks
from tokenyard.kernels.region import first_expert, ints, peer_base
from tokenyard.kernels.structs import Cast, RowConstants, row_constants
from tokenyard.kernels.sync import follow, words
from tokenyard.routing import power_of_two_at_least
from tokenyard.types import Layout


class DispatchConfig(NamedTuple):
    """What is known of a dispatch when its kernel is compiled."""

    sizes: Sizes
    row: RowConstants
    cast: Cast  # its groups are those of a piece
    expert_bins: int  # a power of two, not less than local_experts, nor 2
    counted: int  # tokens looked at at once
    pieces: int  # of a row
    piece: int  # words of a piece
    block: int  # words of a row in flight
    chunk_rows: int  # rows for a far rank that one program puts
    wide: bool  # ids are int64
    weighted: bool
    padded: bool  # blocks of experts have one size
    padding: bool  # blocks of experts end in rows of zeros
    by_column: bool  # scales of a block are [words, rows]
    load_bytes: int  # of one load counter; 0: there are none
    stages: Stages


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
    slots: Any  # int32 [R * M, K]: result rows of each slot; -1: no row, -2: no place, TORN
    merged: Any  # int32 [2, T, K]: ids of merged picks, bits of their weights
    first_pick: Any  # int64 [T, K]: the pick that each was merged into
    tokens_per_expert: Any
    blocks: Any  # source_ranges or expert_offsets
    overflow: Any
    loads: Any  # [L]: tokens of each expert are added
    waits: Any  # int64 [R]: nanoseconds waited are added


# The receiving stage


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
    starts_at = pair_of(state, sizes.state.starts, e[None, :], r[:, None], sizes)
    tl.store(starts_at, start[None, :] + begin, mask=both)
    tl.store(pair_of(state, sizes.state.pairs, e[None, :], r[:, None], sizes), pairs, mask=both)
    block = ints(state) + sizes.state.blocks + e * 3
    tl.store(block, start + totals, mask=held)
    tl.store(block + 1, block_end, mask=held)
    tl.store(block + 2, next_start, mask=held)
    tl.debug_barrier()
    tl.atomic_xchg(words(state) + READY, call.number, sem="release", scope="gpu")
    tl.store(ints(result.tokens_per_expert) + e, totals, mask=held)
    if k.padded:
        at = ints(result.blocks) + (e[None, :] * R + r[:, None]) * 2
        tl.store(at, begin, mask=both)
        tl.store(at + 1, pairs, mask=both)
    else:
        tell_blocks(result.blocks, result.overflow, totals, start, aligned, local, num_rows, e)
    if k.load_bytes:
        loads = result.loads.to(tl.pointer_type(tl.int64 if k.load_bytes == 8 else tl.int32)) + e
        sofar = tl.load(loads, mask=held, other=0)
        tl.debug_barrier()
        tl.store(loads, sofar + totals, mask=held)


@triton.jit
def _lead(result, tag, num_rows, alignment, call, k: tl.constexpr):
    """Step 3: who is present, and where rows begin."""
    sizes: tl.constexpr = k.sizes
    mine = peer_base(call.regions, call.rank)
    r, e = tl.arange(0, sizes.rank_bins), tl.arange(0, k.expert_bins)
    here = are_active(call.active, r, r < sizes.ranks)
    inside = here[:, None] & (e < sizes.local_experts)[None, :]
    counts_at = count_of(mine, call.parity, r[:, None], e[None, :], sizes)
    tags_at = count_of(mine, call.parity, r, sizes.local_experts, sizes)
    counts, tags, there = wait_counts(
        counts_at, inside, tags_at, here, r, result.waits, call, sizes
    )
    present = in_same_call(call.state, tags, there, tag, r)
    leave_out(call.active, r, here & (present == 0))
    if sizes.per_node:
        rail = tl.where(is_far(call.state, r, sizes), rail_of(r, call.rank, sizes), r)
        present = are_active(call.active, rail, present)
    present_at = ints(call.state) + sizes.state.present + r
    tl.store(present_at, present.to(tl.int32), mask=r < sizes.ranks)
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
    block = ints(state) + k.sizes.state.blocks + e * 3
    end, zeros_to, to = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    _empty_rows(result, tl.minimum(end, num_rows), tl.minimum(to, num_rows), k.weighted)
    if k.padding:
        for i in range(end, tl.minimum(zeros_to, num_rows)):
            zero_row(result, i + 0, k.row, k.block)


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
    scale_bins: tl.constexpr = triton.next_power_of_2(S) if S else 1
    pick, w, sw = tl.arange(0, sizes.topk_bins), tl.arange(0, k.block), tl.arange(0, scale_bins)
    row, metadata = as_words(slot, layout.word_bits), as_words(slot + layout.metadata_at, 32)
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
    expert = tl.where(here, ids - first, 0)
    starts_at = pair_of(call.state, sizes.state.starts, expert, s, sizes)
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
            target = as_words(result.rows, layout.word_bits) + to * N
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
    if tl.load(ints(state) + sizes.state.present + s) != 0:
        want = 2 * call.number
        flag = flag_of(mine, call.parity, s, t, sizes)
        through = s
        if sizes.per_node:
            through = tl.where(is_handed_on(s, call, sizes), rail_of(s, me, sizes), s)
        if sizes.far and takes_rows(s, call, sizes):
            seen = wait_row(s, t, call, k.chunk_rows, sizes)
        else:
            seen = wait_flag(flag, want, through, call, k.pieces, sizes)
        if sizes.per_node:
            seen = tl.where(seen == want + LOST, want - 1, seen)
        if seen < want:  # silent in mid-call: its other rows may still say that they are there
            for e in range(0, first_expert(me + 1, E, R) - first_expert(me, E, R)):
                begin = tl.load(pair_of(state, sizes.state.starts, e + 0, s, sizes))
                end = begin + tl.load(pair_of(state, sizes.state.pairs, e + 0, s, sizes))
                begin, end = tl.minimum(begin, num_rows), tl.minimum(end, num_rows)
                _empty_rows(result, begin, end, k.weighted)
            if sizes.far:
                place = tl.where(is_far(state, s, sizes), TORN, place)
        if seen == want:
            place = pick * 0 - 1
        if seen == want + 1:
            slot, token = slot_of(mine, call.parity, s, t, sizes), t
            if sizes.far and is_far(state, s, sizes):
                packed = packed_of(mine, call.parity, s, t, k.row.slot_bytes, sizes)
                if sizes.per_node:
                    packed = tl.where(takes_rows(s, call, sizes), packed, slot)
                slot = packed
                token_at = as_words(slot + k.row.metadata_at, 32) + 3 * sizes.topk
                token = tl.load(token_at, cache_modifier=".cg")
            place = _place_row(result, slot, s, token, num_rows, call, k)
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
    follow(sizes.early)
    call = next_call(regions, state, active, me, timeout, sizes)
    if k.stages.send:
        if pid >= P - R:
            to = (me + P - 1 - pid) % R
            if is_active(active, to):
                send_counts(tokens, num_tokens, tag, to, call, k)
        for u in range(pid, num_tokens * k.pieces, P):
            send_piece(tokens, result, num_tokens, u // k.pieces, u % k.pieces, call, k)
        if sizes.far:
            for u in range(first_put(pid, sizes), R * tl.cdiv(M, k.chunk_rows), P):
                put_rows(tokens, num_tokens, (me + 1 + u) % R, u // R, call, k)
    if k.stages.receive:
        if sizes.per_node and pid < P - 1:  # but for the leader, which waits for other ranks too
            for u in range(pid, (R // sizes.per_node - 1) * M, P - 1):
                hand_on(source_of(u // M, me, sizes), u % M, call, k)
        if pid == P - 1:
            _lead(result, tag, num_rows, alignment, call, k)
        wait_ready(state, call.number)
        end, first = first_expert(me + 1, sizes.experts, R), first_expert(me, sizes.experts, R)
        if (end == first) & (pid == 0):
            _empty_rows(result, 0, num_rows, k.weighted)
        for e in range(pid, end - first, P):
            _finish_block(result, e + 0, num_rows, state, k)
        for u in range(pid, R * M, P):
            _receive_slot(result, u // M, u % M, num_rows, call, k)
        tl.debug_barrier()
        tl.store(epoch_of(state, pid, sizes), call.number)


# The host's side


def bind_dispatch(
    workspace: Any, row_layout: Any, mode: Any, dtype: Any, spec: Any, by_column: bool, wide: bool,
    weighted: bool, load_bytes: int, stages: Stages,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature. May wait for the device. ``row_layout``:
    on the wire. ``mode``, ``dtype``: how rows are cast on their way (None: not), and from what."""
    tuning, config = workspace.tuning, workspace.config
    words_bins, cast = power_of_two_at_least(row_layout.words), cast_of(row_layout, mode, dtype)
    k = DispatchConfig(
        sizes=workspace.sizes, row=row_constants(row_layout),
        cast=cast._replace(groups=cast.groups // tuning.pieces),
        expert_bins=power_of_two_at_least(max(config.most_local_experts, 2)),
        counted=min(power_of_two_at_least(config.max_tokens_per_rank), 32 * tuning.num_warps),
        pieces=tuning.pieces, piece=max(1, words_bins // tuning.pieces),
        block=min(words_bins, tuning.words),
        chunk_rows=tuning.chunk_rows(row_layout.slot_bytes, config.max_tokens_per_rank), wide=wide,
        weighted=weighted, padded=spec.layout is Layout.EXPERT_PADDED,
        padding=spec.expert_alignment > 1, by_column=by_column and stages.receive,
        load_bytes=load_bytes, stages=stages,
    )  # fmt: skip
    return workspace.bind(low_dispatch_kernel, k)
