# pyright: basic
"""The judge of a plan: whether rows may move, told to the device and to the host. See ``plan``, whose step 3 it is.

It reads what the other ranks have sent, when all of it is there; every rank's judge reads the same, so all come to the same verdict. Host
memory gets ``[nonce, doubts, crowded, headers [R, W], matrix [R, R]]``: the nonce last (release).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.region import go_of, header_of, matrix_of
from tokenyard.kernels.sync import DISAGREED, ON_COUNTS, ON_GREETING, give_up, words
from tokenyard.kernels.two_letters import lacks_table

_STATUS_AT, _TOKENS_AT, _ROWS_AT, _COUNTS_AT = (
    tl.constexpr(at) for at in (head.STATUS, head.NUM_TOKENS, head.NUM_ROWS, head.COUNTS)
)
_MAGIC, MOST = tl.constexpr(head.MAGIC), tl.constexpr(head.MOST_ROWS)


@triton.jit
def _disagree(state, tag, tags, said, R: tl.constexpr, RP: tl.constexpr, HOST: tl.constexpr):
    """Give up if a rank is in another call. ``tags``, ``said [RP]``: its tag, and (HOST) the first word of its header."""
    s = tl.arange(0, RP)
    other = (s < R) & (tags != tag)
    if HOST:  # headers tell more, but a rank with static shapes sends none
        other = other & (said != _MAGIC)
    peer = tl.max(tl.where(other, s, -1))
    if peer >= 0:
        give_up(state, DISAGREED, ON_GREETING, peer, 0, tag, tl.sum(tl.where(s == peer, tags, 0)))


@triton.jit
def _tell_host(
    mine, me, half, header_out, M, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr,
):  # fmt: skip
    """Headers ``[R, W]`` and matrix ``[R, R]`` to host memory, AT_ONCE rows at a time. Returns the doubts: 0 if all headers
    carry the same call as mine, no refusal, and counts that can be.
    """
    AT_ONCE: tl.constexpr = RP if RP < 4 else 4
    w, r = tl.arange(0, WP), tl.arange(0, RP)
    own = tl.load(header_of(mine, half, me, R, C, W) + w, mask=w < W, other=0)
    doubts = tl.full((), 0, tl.int64)
    for s0 in range(0, R, AT_ONCE):
        s = s0 + tl.arange(0, AT_ONCE)
        known = (s < R)[:, None]
        v = tl.load(header_of(mine, half, s, R, C, W)[:, None] + w[None, :], mask=known & (w < W)[None, :], other=0)
        row = tl.load(matrix_of(mine, half, s, R, C)[:, None] + r[None, :], mask=known & (r < R)[None, :], other=0)
        tl.store(words(header_out) + 3 + s[:, None] * W + w[None, :], v, mask=known & (w < W)[None, :])
        tl.store(words(header_out) + 3 + R * W + s[:, None] * R + r[None, :], row, mask=known & (r < R)[None, :])
        rows = tl.sum(tl.where((w == _ROWS_AT)[None, :], v, 0), axis=1)
        tokens = tl.sum(tl.where((w == _TOKENS_AT)[None, :], v, 0), axis=1)
        counts = tl.where((w >= _COUNTS_AT)[None, :], v, 0)
        wrong = ((w <= _STATUS_AT)[None, :] & (v != own[None, :])) | (counts < 0) | (counts > rows[:, None])
        total = tl.sum(counts, axis=1)
        bad = (rows < 0) | (rows > tokens) | (rows > M) | (total < rows) | (total > rows * K)
        doubts += tl.sum((known & wrong).to(tl.int64)) + tl.sum(((s < R) & bad).to(tl.int64))
    return doubts + tl.max(tl.where(w == _STATUS_AT, own, 0))


@triton.jit
def judge(
    mine, state, me, half, plan, header_out, nonce, tag, room, M,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, HOST: tl.constexpr,
):  # fmt: skip
    """Store the verdict. Without a host that decides, rows move: a rank that disagrees or announces more than M has ended the object."""
    s, d = tl.arange(0, RP), tl.arange(0, RP)
    headers, matrix = header_of(mine, half, s, R, C, W), matrix_of(mine, half, s, R, C)
    tags = tl.load(matrix + R + 1, mask=s < R, other=0)  # all loads before anybody waits for one
    rooms = tl.load(matrix + R, mask=s < R, other=0) & MOST
    table = tl.load(matrix[:, None] + d[None, :], mask=(s < R)[:, None] & (d < R)[None, :], other=0)
    said = tl.load(headers + (0 if HOST else _ROWS_AT), mask=s < R, other=0)
    if HOST:
        doubts = _tell_host(mine, me, half, header_out, M, K, R, C, RP, W, WP)
    else:
        most = tl.max(said)
        if (most > M) | (tl.min(said) < 0):
            give_up(state, DISAGREED, ON_COUNTS, tl.argmax(said, 0), 0, M, most)
    _disagree(state, tag, tags, said, R, RP, HOST)
    crowded = tl.max(((s < R) & (tl.sum(table, axis=0) > rooms)).to(tl.int32))
    if P < R:
        crowded |= lacks_table(mine, state, half, plan, room, R, D, C, RP, W, HOST)
    if HOST:
        tl.store(go_of(plan, D, C), ((doubts == 0) & (crowded == 0)).to(tl.int32))
        tl.store(words(header_out) + 1, doubts)
        tl.store(words(header_out) + 2, crowded.to(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(words(header_out), nonce, sem="release", scope="sys")
    else:
        tl.store(go_of(plan, D, C), 1)
