# pyright: basic
"""The sending stage of a low-latency dispatch. What it publishes, and who may read it when:
``kernels/low_latency_dispatch.py``. ``k`` is its ``DispatchConfig``.

Picks out of range count as -1. A repeated pick of a token is merged into the first."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import (
    count_packed, is_far, next_of, of_ranks, put_far, takes_rows, via_of, wait_packed,
)  # fmt: skip
from tokenyard.kernels.low_latency_memory import (
    BAD_AT, BAD_VALUE, ROWS, STATUS, arrival_of, count_of, counts_out_of, flag_of, numbers_of,
    packed_of, slot_of, staged_of, with_call,
)  # fmt: skip
from tokenyard.kernels.low_latency_waits import are_active, is_active, tell
from tokenyard.kernels.payload import as_words, cast, elements, load_groups, store_cast
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import first_expert, ints, owner_of, peer_base
from tokenyard.kernels.sync import words


# Picks of this rank's tokens


@triton.jit
def _picks_at(tokens, k: tl.constexpr):
    """Picks as the caller gave them."""
    return tokens.picks.to(tl.pointer_type(tl.int64 if k.wide else tl.int32))


@triton.jit
def merged_weights(topk_weights, t, merged, first, sizes: tl.constexpr):
    """Weights ``[topk_bins]`` of token ``t``'s merged picks, added in pick order."""
    k = tl.arange(0, sizes.topk_bins)
    row = floats(topk_weights) + t.to(tl.int64) * sizes.topk
    total = tl.where(merged < 0, 0.0, tl.load(row + k, mask=k < sizes.topk, other=0.0))
    if tl.max(((first != k) & (k < sizes.topk)).to(tl.int32)) > 0:
        for j in range(1, sizes.topk):
            here = j + 0
            into = tl.sum(tl.where(k == here, first, 0))
            total += tl.where((k == into) & (into != here), tl.load(row + here), 0.0)
    return total


@triton.jit
def _columns_of(tokens, start, end, k: tl.constexpr):
    """Picks of the tokens from ``start`` on before ``end``: ``topk`` tensors ``[k.counted]``. The
    loads are under way; none is waited for."""
    t = start + tl.arange(0, k.counted)
    row = _picks_at(tokens, k) + t.to(tl.int64) * k.sizes.topk
    columns = ()
    for j in tl.static_range(k.sizes.topk):
        column = tl.load(row + j, mask=t < end, other=-1)
        columns = columns + (column,)  # noqa: RUF005 (kernels cannot unpack)
    return columns


@triton.jit
def _tokens_with(columns, wanted, me, BY_RANK: tl.constexpr, k: tl.constexpr):
    """Which of those tokens picked each of ``wanted [topk_bins]``, experts or (BY_RANK) ranks to
    which rows go: int32 ``[k.counted, topk_bins]``. Nothing is reduced: that would cost as much as
    many comparisons."""
    sizes: tl.constexpr = k.sizes
    same = tl.zeros((k.counted, sizes.topk_bins), tl.int1)
    for j in tl.static_range(sizes.topk):
        outside = (columns[j] < 0) | (columns[j] >= sizes.experts)
        theirs = tl.where(outside, -1, columns[j]).to(tl.int32)
        if BY_RANK:
            theirs = via_of(owner_of(theirs, sizes.experts, sizes.ranks), me, sizes)
        same = same | (theirs[:, None] == wanted[None, :])
    return same.to(tl.int32)


@triton.jit
def _tokens_before(tokens, columns, wanted, t, me, BY_RANK: tl.constexpr, k: tl.constexpr):
    """The same of all tokens before ``t``: how many. ``columns``: picks of the first ones."""
    before = _tokens_with(columns, wanted, me, BY_RANK, k)
    for t0 in range(k.counted, t, k.counted):
        before += _tokens_with(_columns_of(tokens, t0, t, k), wanted, me, BY_RANK, k)
    return tl.sum(before, axis=0)


@triton.jit
def _all_of(tensors, number: tl.constexpr):
    """``number`` tensors, a power of two, as one, in any order."""
    if number == 1:
        return tl.ravel(tensors[0])
    else:
        pairs = ()
        for i in tl.static_range(number // 2):
            pairs = pairs + (tl.join(tensors[2 * i], tensors[2 * i + 1]),)  # noqa: RUF005
        return _all_of(pairs, number // 2)


@triton.jit
def _tokens_per_expert(columns, first, end, k: tl.constexpr):
    """Tokens for each expert of ``first`` .. ``end - 1``, ``[expert_bins]``; and whether each token
    has one of them, ``[k.counted]``."""
    bins: tl.constexpr = k.expert_bins
    goes, bins_of = tl.zeros((k.counted,), tl.int1), ()
    for j in tl.static_range(k.sizes.topk_bins):
        if j < k.sizes.topk:
            there = (columns[j] >= first) & (columns[j] < end)
            goes = goes | there
            for i in tl.static_range(j):  # an expert that is picked again counts once
                there = there & (columns[i] != columns[j])
            chosen = tl.where(there, columns[j] - first, bins).to(tl.int32)
        else:
            chosen = tl.full((k.counted,), bins, tl.int32)
        bins_of = bins_of + (chosen,)  # noqa: RUF005
    flat = _all_of(bins_of, k.sizes.topk_bins)
    return tl.histogram(flat, bins, mask=flat < bins), goes


# Send


@triton.jit
def send_counts(tokens, num_tokens, tag, to, call, k: tl.constexpr):
    """Step 1: counts for rank ``to``, and the flags of tokens that do not go there, if it is
    mapped."""
    sizes: tl.constexpr = k.sizes
    first = first_expert(to, sizes.experts, sizes.ranks)
    end = first_expert(to + 1, sizes.experts, sizes.ranks)
    base = peer_base(call.regions, to)
    e = tl.arange(0, k.expert_bins)
    counts = tl.zeros((k.expert_bins,), tl.int32)
    far = is_far(call.state, to, sizes) if sizes.far else False
    near = far == 0
    for t0 in range(0, sizes.tokens, k.counted):
        columns = _columns_of(tokens, t0, num_tokens, k)
        more, goes = _tokens_per_expert(columns, first, end, k)
        counts += more
        t = t0 + tl.arange(0, k.counted)
        flags = flag_of(base, call.parity, call.rank, t, sizes)
        pieces = flags[:, None] + tl.arange(0, k.pieces)[None, :]
        none = tl.zeros((k.counted, k.pieces), tl.int64) + 2 * call.number
        tell(pieces, none, (near & (t < sizes.tokens) & (goes == 0))[:, None])
    counts_at = count_of(base, call.parity, call.rank, e, sizes)
    counts = with_call(call.number, counts.to(tl.int64))
    tag_at = count_of(base, call.parity, call.rank, sizes.local_experts, sizes)
    tell(counts_at, counts, near & (e < sizes.local_experts))
    tell(tag_at, with_call(call.number, tag), near if sizes.far else to >= 0)
    if sizes.far and far:  # the tag is the signal of the counts
        L: tl.constexpr = sizes.local_experts
        mine = peer_base(call.regions, call.rank)
        here = counts_out_of(mine, call.parity, to, 0, sizes)
        tl.store(here + e, counts, mask=e < L)
        there = count_of(mine, call.parity, call.rank, 0, sizes)
        value = with_call(call.number, tag)
        put_far(call, to, there, here, to * 0 + 8 * L, there + L, value, sizes)


@triton.jit
def _rows_for(tokens, num_tokens, to, k: tl.constexpr):
    """How many tokens go to rank ``to``, or to its node, if that takes rows for all of it."""
    P: tl.constexpr = max(k.sizes.per_node, 1)
    first = first_expert(to // P * P, k.sizes.experts, k.sizes.ranks)
    end = first_expert(to // P * P + P, k.sizes.experts, k.sizes.ranks)
    rows = to * 0
    for t0 in range(0, num_tokens, k.counted):
        columns = _columns_of(tokens, t0, num_tokens, k)
        goes = tl.zeros((k.counted,), tl.int1)
        for j in tl.static_range(k.sizes.topk):
            goes = goes | ((columns[j] >= first) & (columns[j] < end))
        rows += tl.sum(goes.to(tl.int32))
    return rows


@triton.jit
def put_rows(tokens, num_tokens, to, chunk, call, k: tl.constexpr):
    """A chunk of this call's rows to rank ``to``, if it is far, once all of it are packed."""
    sizes: tl.constexpr = k.sizes
    row_bytes: tl.constexpr = k.row.slot_bytes
    if takes_rows(to, call, sizes):
        rows, first = _rows_for(tokens, num_tokens, to, k), chunk * k.chunk_rows
        count = tl.minimum(tl.maximum(rows - first, 0), k.chunk_rows)
        if (count > 0) | (chunk == 0):
            wait_packed(call.state, ROWS + chunk, to, count * k.pieces, sizes)
            if is_active(call.active, to):
                mine = peer_base(call.regions, call.rank)
                there = packed_of(mine, call.parity, call.rank, first, row_bytes, sizes)
                here = staged_of(mine, call.parity, to, first, row_bytes, sizes)
                arrival = arrival_of(mine, call.parity, call.rank, ROWS + chunk, sizes)
                num_bytes = count.to(tl.int64) * row_bytes
                value = with_call(call.number, rows.to(tl.int64))
                put_far(call, to, there, here, num_bytes, arrival, value, sizes)


@triton.jit
def _note_bad_pick(state, raw, bad, t, sizes: tl.constexpr):
    """Tell the host the first ``bad`` one of the picks ``raw [topk_bins]``."""
    k = tl.arange(0, sizes.topk_bins)
    nth = tl.min(tl.where(bad, k, sizes.topk_bins))
    status = words(tl.load(words(state) + STATUS))
    number = t.to(tl.int64) * sizes.topk + nth + 1
    if tl.atomic_cas(status + BAD_AT, (t * 0).to(tl.int64), number) == 0:
        tl.store(status + BAD_VALUE, tl.sum(tl.where(k == nth, raw, 0)).to(tl.int64))


@triton.jit
def _send_metadata(
    tokens, result, raw, ids, columns, goes, slots, num_tokens, t, call, k: tl.constexpr
):
    """Store what stands behind the payload of token ``t`` into the ``slots [rank_bins]`` to which
    it ``goes``, and what this rank keeps of its picks: ``raw [topk_bins]``, ``ids`` with -1 for
    those out of range. ``columns``: picks of the first ``k.counted`` tokens before."""
    sizes: tl.constexpr = k.sizes
    S: tl.constexpr = k.row.scale_words
    topk: tl.constexpr = sizes.topk
    pick = tl.arange(0, sizes.topk_bins)
    at = t.to(tl.int64) * topk + pick
    first = tl.where(ids[:, None] == ids[None, :], pick[None, :], sizes.topk_bins)
    first = tl.where(ids < 0, pick, tl.min(first, axis=1))  # the pick that each is merged into
    ids = tl.where(first == pick, ids, -1)
    rank = _tokens_before(tokens, columns, ids, t, call.rank, False, k)
    tl.store(ints(result.merged) + at, ids, mask=pick < topk)
    tl.store(words(result.first_pick) + at, first.to(tl.int64), mask=pick < topk)
    bad = (raw < -1) | (raw >= sizes.experts)
    if tl.max(bad.to(tl.int32)) > 0:
        _note_bad_pick(call.state, raw, bad, t, sizes)
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
    if sizes.far:  # a far rank cannot tell it from the slot
        token_at = as_words(slots + k.row.metadata_at, 32) + 3 * topk
        tl.store(token_at, goes * 0 + t, mask=goes > 0)
    if k.weighted:
        weights = merged_weights(tokens.weights, t, ids, first, sizes)
        kept = floats(result.merged) + num_tokens.to(tl.int64) * topk + at
        tl.store(kept, weights, mask=pick < topk)
        bits = weights.to(tl.int32, bitcast=True)
        tl.store(metadata + 2 * topk, everywhere + bits[None, :], mask=there)


@triton.jit
def _store_part(v, scale, first, at, goes, slots, me, k: tl.constexpr):
    """Store a piece of a row to the ``slots [rank_bins]`` to which it ``goes``: cast groups ``at``,
    ``v``, with their scales; or of the row that begins at ``first`` the words ``at``, ``v``, and
    further ones, which are still to be loaded."""
    row: tl.constexpr = k.row
    N: tl.constexpr = row.words
    block: tl.constexpr = at.shape[0]
    R: tl.constexpr = k.sizes.ranks
    FEW: tl.constexpr = k.sizes.unrolled >= R
    r, turn = tl.arange(0, k.sizes.rank_bins), -1
    for i in tl.static_range(R if FEW else min(R, k.sizes.topk)):
        if FEW:
            d = (me + i) % R
            there = tl.sum(tl.where(r == d, goes, 0)) > 0
        else:
            turn = next_of((r + R - me) % R, goes > 0, turn, R)
            d, there = (me + turn) % R, turn < R
        if there:
            slot = tl.sum(tl.where(r == d, slots, 0))
            if k.cast.mode:
                store_cast(
                    v, scale, slot, 0, slot + row.scales_at, 0, at * 0, at, at >= 0, row.hidden,
                    k.cast, row.scale_words,
                )  # fmt: skip
            else:
                tl.store(as_words(slot, row.word_bits) + at, v, mask=at < N)
                for w0 in range(block, k.piece, block):
                    more = tl.load(first + w0 + at, mask=w0 + at < N, cache_modifier=".cg")
                    tl.store(as_words(slot, row.word_bits) + w0 + at, more, mask=w0 + at < N)


@triton.jit
def send_piece(tokens, result, num_tokens, t, piece, call, k: tl.constexpr):
    """Step 2: a piece of token ``t``, ``k.piece`` words or ``k.cast.groups`` groups, to all the
    token's ranks. The first piece takes the metadata along."""
    sizes: tl.constexpr = k.sizes
    row: tl.constexpr = k.row
    pick, r = tl.arange(0, sizes.topk_bins), tl.arange(0, sizes.rank_bins)
    at = piece * k.piece + tl.arange(0, min(k.piece, k.block))  # words; or groups
    picks = _picks_at(tokens, k) + t.to(tl.int64) * sizes.topk
    raw = tl.load(picks + pick, mask=pick < sizes.topk, other=-1)
    bases = tl.load(words(call.regions) + r, mask=r < sizes.ranks, other=0)
    if k.cast.mode:
        at = piece * k.cast.groups + tl.arange(0, k.cast.groups)
        source = elements(tokens.rows, k.cast.dtype)
        first = source + t.to(tl.int64) * row.hidden
        v = load_groups(first, at * 0, at, at >= 0, row.hidden, k.cast)
    else:
        first = as_words(tokens.rows, row.word_bits) + t.to(tl.int64) * row.words
        v = tl.load(first + at, mask=at < row.words, cache_modifier=".cg")
    before = t if sizes.far else tl.where(piece == 0, t, 0)
    columns = _columns_of(tokens, t * 0, before, k)
    # All loads are under way before the first is waited for, and before anything is stored: behind
    # stores they would wait for those.
    here = are_active(call.active, r, r < sizes.ranks)
    ids = tl.where((raw < 0) | (raw >= sizes.experts), -1, raw).to(tl.int32)
    owner = via_of(owner_of(ids, sizes.experts, sizes.ranks), call.rank, sizes)
    goes = tl.where(here, tl.max((owner[None, :] == r[:, None]).to(tl.int32), axis=1), 0)
    slots = slot_of(bases, call.parity, call.rank, t, sizes)
    if sizes.far:
        far = is_far(call.state, r, sizes)
        number = _tokens_before(tokens, columns, owner, t, call.rank, True, k)
        mine, row_bytes = peer_base(call.regions, call.rank), row.slot_bytes
        row_number = of_ranks(number, owner, r)
        staged = staged_of(mine, call.parity, r, row_number, row_bytes, sizes)
        slots = tl.where(far, staged, slots)
        if piece == 0:
            tl.store(numbers_of(result.slots, t, sizes) + pick, number, mask=pick < sizes.topk)
    scale = 0
    if k.cast.mode:
        v, scale = cast(v, at, row.hidden, k.cast)
    # first what is long, so that it is on its way meanwhile
    _store_part(v, scale, first, at, goes, slots, call.rank, k)
    if piece == 0:
        _send_metadata(tokens, result, raw, ids, columns, goes, slots, num_tokens, t, call, k)
    tl.debug_barrier()
    flags = flag_of(bases, call.parity, call.rank, t, sizes) + piece
    done = (r * 0).to(tl.int64) + 2 * call.number + 1
    near = (goes > 0) & (far == 0) if sizes.far else goes > 0
    tl.atomic_max(flags, done, mask=near, sem="release", scope="sys")
    if sizes.far:
        chosen = tl.max((owner[None, :] == r[:, None]).to(tl.int32), axis=1) > 0
        count_packed(call.state, ROWS + row_number // k.chunk_rows, r, far & chosen, sizes)
