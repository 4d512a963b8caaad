# pyright: basic
"""What ranks tell each other in a plan, and what each makes of it: steps 2 and 3 of ``plan``. The
constants ``k`` are a ``PlanConfig``.

The validation says whether rows may move, to the device and to the host. It reads what the other
ranks have sent when all of it is there. Every rank reads the same, so all come to the same result.
Host memory gets ``[nonce, mismatches, lacks, headers [R, W], matrix [R, R]]``, the nonce last
(release); bit 0 of ``lacks``: rows have not moved, as a rank has no room for them, or not where
others have; bit 1: a rank has no block in its heap for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.place import tell_blocks
from tokenyard.kernels.region import (
    COUNTS_AT, ROUTING_AT, ROWS_AT, STATUS_AT, TOKENS_AT, block_of, call_word, first_expert, go_of,
    in_bound, ints, out_bound, peer_word, plan_word, start_of,
)  # fmt: skip
from tokenyard.kernels.sync import (
    DISAGREED, ON_CALL_BARRIER, ON_COUNTS, STATUS, add_release, all_agree, give_up, words,
)  # fmt: skip
from tokenyard.kernels.two_headers import lacks_table, put_node_headers, to_node_header

_MAGIC, _MOST = tl.constexpr(head.MAGIC), tl.constexpr(head.MOST_ROWS)
NO_PICK = tl.constexpr(2**62)
"""Instead of the place of the first bad pick: there is none."""
BAD_AT, BAD_VALUE = 6, 7
"""Words of the status where the first pick out of range of calls without a host wait is kept: index
+ 1, and its value."""


@triton.jit
def sum_before(hist, c, column, mask, k: tl.constexpr):
    """Sum over channels before ``c`` of the columns given."""
    row = tl.arange(0, k.channel_bins)
    mask = (row < c)[:, None] & mask[None, :]
    tile = tl.load(hist + row[:, None] * k.columns + column[None, :], mask=mask, other=0)
    return tl.sum(tile, axis=0)


@triton.jit
def experts_before(hist, to, c, num_experts, k: tl.constexpr):
    """Expert columns of :func:`sum_before`, stored to ``to [E]``."""
    for e0 in range(0, num_experts, 256):
        e = e0 + tl.arange(0, 256)
        mask, at = e < num_experts, to + e
        tl.store(at, sum_before(hist, c, k.rank_bins + e, mask, k), mask=mask)


@triton.jit
def said_of(picks, marks, said, status, num_tokens, k: tl.constexpr):
    """The words of my headers up to the number of rows, from ``said``, what the host says to all.
    Notes the first bad pick."""
    c, w = tl.arange(0, k.channel_bins), tl.arange(0, k.header_bins)
    bad = tl.min(tl.load(marks + 2 * c, mask=c < k.channels, other=NO_PICK))
    digest = tl.sum(tl.load(marks + 2 * c + 1, mask=c < k.channels, other=0))
    value = tl.full((), 0, tl.int64)
    if bad < NO_PICK:
        kind = tl.int64 if k.wide else tl.int32
        value = tl.load(picks.expert_ids.to(tl.pointer_type(kind)) + bad).to(tl.int64)
        if not k.exact:
            earlier = tl.load(status + 6)
            tl.debug_barrier()
            if earlier == 0:
                tl.store(status + 7, value)
                tl.store(status + 6, bad + 1)
    if k.exact:
        said = tl.where((w == STATUS_AT) & (bad < NO_PICK), 2, said)
        said = tl.where((w == STATUS_AT + 1) & (bad < NO_PICK), bad, said)
        said = tl.where(w == STATUS_AT + 2, value, said)
        said = tl.where((w == STATUS_AT + 3) & (bad < NO_PICK), k.topk, said)
    said = tl.where(w == ROUTING_AT, digest, said)
    return tl.where(w == TOKENS_AT, num_tokens.to(tl.int64), said)


@triton.jit
def _send_headers(regions, me, totals, said, parity, num_experts, room, tag, k: tl.constexpr):
    """The last program: one header to each rank, and this rank's row of the matrix to all; other
    nodes' into the outbox. ``totals``: the last row of ``before``. AT_ONCE headers are on their way
    at a time."""
    R: tl.constexpr = k.ranks
    P: tl.constexpr = k.grid.ranks_per_node
    W: tl.constexpr = k.header_words
    AT_ONCE: tl.constexpr = k.rank_bins if k.rank_bins < 4 else 4
    w, r = tl.arange(0, k.header_bins), tl.arange(0, k.rank_bins)
    row = tl.load(totals + r).to(tl.int64)
    for d0 in range(0, R, AT_ONCE):
        to = d0 + tl.arange(0, AT_ONCE)
        there = to < R
        base = tl.load(words(regions) + to, mask=there & (to // P == me // P), other=0)
        to_header = call_word(base, "headers", parity, me, k)
        to_matrix = call_word(base, "matrix", parity, me, k)
        if P < R:
            to_header, to_matrix = to_node_header(to_header, to_matrix, regions, me, parity, to, k)
        total = tl.load(totals + to, mask=there, other=0).to(tl.int64)
        v = tl.where(w[None, :] == ROWS_AT, total[:, None], said[None, :])
        expert = first_expert(to, num_experts, R)[:, None] + w[None, :] - COUNTS_AT
        held = (w >= COUNTS_AT)[None, :]
        held = held & (expert < first_expert(to + 1, num_experts, R)[:, None]) & there[:, None]
        held_rows = tl.load(totals + k.rank_bins + expert, mask=held, other=0).to(tl.int64)
        v = tl.where(held, held_rows, v)
        tl.store(to_header[:, None] + w[None, :], v, mask=there[:, None] & (w < W)[None, :])
        known = there[:, None] & (r < R)[None, :]
        tl.store(to_matrix[:, None] + r[None, :], row[None, :] + (to * 0)[:, None], mask=known)
        tl.store(to_matrix + R, room.to(tl.int64) + (to * 0), mask=there)
        tl.store(to_matrix + R + 1, tag + (to * 0), mask=there)


@triton.jit
def complete_experts(
    pairs, counts, local, routing, outputs, most_rows, alignment, s, e, k: tl.constexpr
):  # fmt: skip
    """Where rows of local experts ``e`` from sources ``s`` go in a result by expert: ``pairs
    [ranks, experts]`` of them."""
    known, here = s < k.ranks, e < local
    plan, tokens, num_rows = routing.plan, routing.num_tokens, routing.num_rows
    begin = tl.cumsum(pairs, 0) - pairs
    aligned = (counts + alignment - 1) // alignment * alignment
    start = tl.cumsum(aligned, 0) - aligned
    if k.padded:
        start = e * (k.ranks * most_rows)
        at = ints(outputs.ranges) + (e[None, :] * k.ranks + s[:, None]) * 2
        tl.store(at, begin, mask=known[:, None] & here[None, :])
        tl.store(at + 1, pairs, mask=known[:, None] & here[None, :])
    else:
        tell_blocks(outputs.offsets, outputs.overflow, counts, start, aligned, local, num_rows, e)
    mask = known[:, None] & here[None, :]
    starts = start_of(plan, e[None, :], s[:, None], tokens, k)
    tl.store(starts, start[None, :] + begin, mask=mask)
    block = block_of(plan, e, local, tokens, k)
    tl.store(block, start + counts, mask=here)
    tl.store(block + 1, start + (counts if k.padded else aligned), mask=here)


@triton.jit
def complete(mine, parity, routing, outputs, most_rows, alignment, k: tl.constexpr):
    """Program 0: what comes from the others, and where it goes. ``most_rows``: that a rank may
    announce."""
    R: tl.constexpr = k.ranks
    plan, me, num_experts = routing.plan, routing.rank, routing.num_experts
    s, c = tl.arange(0, k.rank_bins), tl.arange(0, k.channel_bins)
    e, d = tl.arange(0, k.local_bins), tl.arange(0, k.rank_bins)
    known = s < R
    both = known[:, None] & (c < k.channels)[None, :]
    local = first_expert(me + 1, num_experts, R) - first_expert(me, num_experts, R)
    here = e < local
    headers = call_word(mine, "headers", parity, s, k)
    matrix = call_word(mine, "matrix", parity, s, k)
    # all loads before a store
    bounds = call_word(mine, "bounds", parity, s, k)[:, None] + c[None, :]
    bounds = tl.load(bounds, mask=both, other=0)
    rows = tl.load(headers + ROWS_AT, mask=known, other=0)
    mask = known[:, None] & (d < R)[None, :]
    table = tl.load(matrix[:, None] + d[None, :], mask=mask, other=0)
    pairs = headers[:, None] + COUNTS_AT + e[None, :]
    pairs = tl.load(pairs, mask=known[:, None] & here[None, :], other=0).to(tl.int32)
    tl.store(in_bound(plan, s, 0, k)[:, None] + c[None, :], bounds.to(tl.int32), mask=both)
    tl.store(in_bound(plan, s, k.channels, k), rows.to(tl.int32), mask=known)
    first_in = plan_word(plan, "first_in", s, k)
    tl.store(first_in, (tl.cumsum(rows, 0) - rows).to(tl.int32), mask=known)
    earlier = tl.where((s < me)[:, None], table, 0)
    tl.store(plan_word(plan, "first_out", d, k), tl.sum(earlier, axis=0).to(tl.int32), mask=d < R)
    before = tl.where((d < me)[None, :] & (d[None, :] != s[:, None]), table, 0)
    tl.store(plan_word(plan, "first_back", s, k), tl.sum(before, axis=1).to(tl.int32), mask=known)
    counts = tl.sum(pairs, axis=0)
    tl.store(ints(outputs.tokens_per_expert) + e, counts, mask=here)
    if k.by_expert:
        complete_experts(pairs, counts, local, routing, outputs, most_rows, alignment, s, e, k)


@triton.jit
def exchange(
    picks, regions, state, routing, said, hist, marks, before, ranks, c, parity, room, tag,
    k: tl.constexpr,
):  # fmt: skip
    """Step 2: this channel's bounds to all peers, and by the last program the header and the row of
    the matrix."""
    C: tl.constexpr = k.channels
    P: tl.constexpr = k.grid.ranks_per_node
    plan, me = routing.plan, routing.rank
    r = tl.arange(0, k.rank_bins)
    tl.store(out_bound(plan, r, c, k), before, mask=r < k.plan_ranks)
    near = (r < k.ranks) & (r // P == me // P)
    bases = tl.load(words(regions) + r, mask=near, other=0)
    tl.store(call_word(bases, "bounds", parity, me, k) + c, before.to(tl.int64), mask=near)
    if c == C - 1:
        totals = hist + C * k.columns + C * k.columns
        tl.store(out_bound(plan, r, C, k), before + ranks, mask=r < k.plan_ranks)
        tl.store(totals + r, before + ranks)
        experts_before(hist, totals + k.rank_bins, C, routing.num_experts, k)
        tl.debug_barrier()
        status = words(tl.load(words(state) + STATUS))
        said = said_of(picks, marks, said, status, routing.num_tokens, k)
        _send_headers(regions, me, totals, said, parity, routing.num_experts, room, tag, k)
        if k.ranks > P:
            put_node_headers(regions, state, me, parity, hist, k)
    add_release(peer_word(bases, "arrivals", me, k), tl.full((k.rank_bins,), 1, tl.int64), near)


@triton.jit
def _tell_host(mine, me, parity, header_out, most_rows, k: tl.constexpr):
    """Headers ``[R, W]`` and matrix ``[R, R]`` to host memory, AT_ONCE rows at a time. Returns the
    mismatches: 0 if all headers carry the same call as mine, no refusal, and counts that can be."""
    R: tl.constexpr = k.ranks
    W: tl.constexpr = k.header_words
    AT_ONCE: tl.constexpr = k.rank_bins if k.rank_bins < 4 else 4
    w, r = tl.arange(0, k.header_bins), tl.arange(0, k.rank_bins)
    own = tl.load(call_word(mine, "headers", parity, me, k) + w, mask=w < W, other=0)
    mismatches = tl.full((), 0, tl.int64)
    for s0 in range(0, R, AT_ONCE):
        s = s0 + tl.arange(0, AT_ONCE)
        known = (s < R)[:, None]
        mask = known & (w < W)[None, :]
        from_header = call_word(mine, "headers", parity, s, k)[:, None] + w[None, :]
        v = tl.load(from_header, mask=mask, other=0)
        in_matrix = known & (r < R)[None, :]
        from_matrix = call_word(mine, "matrix", parity, s, k)[:, None] + r[None, :]
        row = tl.load(from_matrix, mask=in_matrix, other=0)
        tl.store(words(header_out) + 3 + s[:, None] * W + w[None, :], v, mask=mask)
        to_matrix = words(header_out) + 3 + R * W + s[:, None] * R + r[None, :]
        tl.store(to_matrix, row, mask=in_matrix)
        rows = tl.sum(tl.where((w == ROWS_AT)[None, :], v, 0), axis=1)
        tokens = tl.sum(tl.where((w == TOKENS_AT)[None, :], v, 0), axis=1)
        counts = tl.where((w >= COUNTS_AT)[None, :], v, 0)
        other_call = (w <= STATUS_AT)[None, :] & (v != own[None, :])
        wrong = other_call | (counts < 0) | (counts > rows[:, None])
        total = tl.sum(counts, axis=1)
        bad = (rows < 0) | (rows > tokens) | (rows > most_rows)
        bad = bad | (total < rows) | (total > rows * k.topk)
        mismatches += tl.sum((known & wrong).to(tl.int64)) + tl.sum(((s < R) & bad).to(tl.int64))
    return mismatches + tl.max(tl.where(w == STATUS_AT, own, 0))


@triton.jit
def _where_rows_go(plan, said, rooms, k: tl.constexpr):
    """Note the blocks in which ranks await rows. Of one node ``said [rank_bins]`` are above 32 bits
    the ``places`` of blocks, -1 of a block whose rank expects rows through rings, 0
    of a rank that has none. Returns what rows may do (``go_of``), 0 if ranks expect them in
    different ways; and whether a rank has no block."""
    s = tl.arange(0, k.rank_bins)
    known = s < k.ranks
    places = said >> 32
    tl.store(plan_word(plan, "places", s, k), places.to(tl.int32), mask=known)
    tl.store(plan_word(plan, "rooms", s, k), rooms.to(tl.int32), mask=known)
    most = tl.max(tl.where(known, places, 0))
    least = tl.min(tl.where(known, places, 1 << 31))
    lacks = tl.min(tl.where(known, places * places, 1)) == 0
    return tl.where(most <= 0, 1, tl.where(least > 0, 2, 0)), lacks


@triton.jit
def validate(
    mine, state, me, parity, plan, header_out, nonce, tag, room, most_rows, k: tl.constexpr
):
    """Store the result of the plan with constants ``k`` (``PlanConfig``). Without a host that
    decides, rows move: a rank that disagrees or announces more than ``most_rows`` has ended the
    object."""
    R: tl.constexpr = k.ranks
    s, d = tl.arange(0, k.rank_bins), tl.arange(0, k.rank_bins)
    headers = call_word(mine, "headers", parity, s, k)
    matrix = call_word(mine, "matrix", parity, s, k)
    # all loads before anybody waits for one
    tags = tl.load(matrix + R + 1, mask=s < R, other=0)
    places = tl.load(matrix + R, mask=s < R, other=0)
    rooms = places & _MOST
    mask = (s < R)[:, None] & (d < R)[None, :]
    table = tl.load(matrix[:, None] + d[None, :], mask=mask, other=0)
    said = tl.load(headers + (0 if k.exact else ROWS_AT), mask=s < R, other=0)
    if k.exact:
        mismatches = _tell_host(mine, me, parity, header_out, most_rows, k)
    else:
        most = tl.max(said)
        if (most > most_rows) | (tl.min(said) < 0):
            give_up(state, DISAGREED, ON_COUNTS, tl.argmax(said, 0), 0, most_rows, most)
    other = (s < R) & (tags != tag)
    if k.exact:  # headers tell more, but a rank with static shapes sends none
        other = other & (said != _MAGIC)
    all_agree(state, ON_CALL_BARRIER, other, tag, tags)
    crowded = tl.max(((s < R) & (tl.sum(table, axis=0) > rooms)).to(tl.int32))
    if k.grid.ranks_per_node < R:
        crowded |= lacks_table(mine, state, parity, plan, room, k)
    go = go_of(plan, k)
    if k.exact:
        ways, lacks = crowded * 0 + 1, crowded * 0
        if k.grid.ranks_per_node == R:
            ways, lacks = _where_rows_go(plan, places, rooms, k)
        crowded |= (ways == 0).to(tl.int32)
        tl.store(go, tl.where((mismatches == 0) & (crowded == 0), ways, 0).to(tl.int32))
        tl.store(words(header_out) + 1, mismatches)
        tl.store(words(header_out) + 2, (crowded | lacks.to(tl.int32) << 1).to(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(words(header_out), nonce, sem="release", scope="sys")
    else:
        tl.store(go, 1)
