# pyright: basic
"""The validation of a plan: whether rows may move, told to the device and to the host. It is step 3
of ``plan``.

It reads what the other ranks have sent when all of it is there. Every rank reads the same, so all
come to the same result. Host memory gets ``[nonce, mismatches, lacks, headers [R, W], matrix [R,
R]]``, the nonce last (release); bit 0 of ``lacks``: rows have not moved, as a rank has no room for
them, or not where others have; bit 1: a rank has no block in its heap for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.region import (
    COUNTS_AT, ROWS_AT, STATUS_AT, TOKENS_AT, call_word, go_of, plan_word,
)  # fmt: skip
from tokenyard.kernels.sync import (
    DISAGREED, ON_CALL_BARRIER, ON_COUNTS, all_agree, give_up, words,
)  # fmt: skip
from tokenyard.kernels.two_headers import lacks_table

_MAGIC, MOST = tl.constexpr(head.MAGIC), tl.constexpr(head.MOST_ROWS)


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
    rooms = places & MOST
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
