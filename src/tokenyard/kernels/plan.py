# pyright: basic
"""One launch from picks to a plan: merge picks, place rows, exchange counts, tell the host.

C programs, one per channel (a contiguous share of the tokens). Example: 2 ranks, 4 experts, picks ``[[0, 3], [1, 1], [2, -1]]``,
one channel: rank 0 gets tokens 0 and 1 (places 0, 1), rank 1 tokens 0 and 2 (places 0, 1); ``place = [[0, 0], [1, -1], [-1, 1]]``,
``order = [[0, 1], [0, 2]]``; the second pick of expert 1 is merged into the first.

Who publishes what, who may read when:

1. Every program counts its tokens and stores its row of ``hist`` and ``marks`` (local memory), then adds to ``TICKETS`` (release) and
   waits for all C of this call (acquire): then all rows may be read. A row is written again in the next call only, a later kernel.
2. Every program sends its bounds to all peers, the last one also the header and its row of the matrix; then each adds 1 to
   ``arrivals[me]`` there (release). Peers wait for that, so what stays here comes behind it: places within the rank.
3. Program 0 and the judge, program 1 if there is one and no letters, wait until ``arrivals[source]`` has grown by C for every source
   (acquire), then read what step 2 wrote. Program 0 completes the plan; the judge stores the verdict, and the headers and then the
   call's nonce (release) to host memory. Neither reads what the other writes. Only the judge has a deadline: program 0 waits until all
   is there, or the judge has given up, so what the host is told of is completed.

Why reuse is safe: what peers write alternates between two halves by the parity of the call. A peer writes half ``n % 2`` again in
its call n + 2, which it enters only after its call n + 1 was complete, for which it needed my arrival n + 1, which I send from a
kernel that runs after my kernel n has read the half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import (
    TICKETS, arrival_of, block_of, bounds_of, first_back, first_expert, first_in, first_out, header_of, in_bound, matrix_of, order_of,
    out_bound, owner_of, peer_base, place_of, start_of,
)  # fmt: skip
from tokenyard.kernels.two_letters import note_landings, open_letters, post_letters, to_letter
from tokenyard.kernels.sync import (
    ON_COUNTS, ON_PLAN, RANK, STATUS, add_release, given_up, lacking, wait_at_least, wait_beside, wait_for_all, words,
)  # fmt: skip
from tokenyard.kernels.verdict import judge

_STATUS_AT, _ROUTING_AT, _TOKENS_AT, _ROWS_AT, _COUNTS_AT = (
    tl.constexpr(at) for at in (head.STATUS, head.ROUTING, head.NUM_TOKENS, head.NUM_ROWS, head.COUNTS)
)
_NONE = tl.constexpr(2**62)
BAD_AT, BAD_VALUE = 6, 7
"""Words of the status where the first pick out of range of calls without a host wait is kept: index + 1, and its value."""


@triton.jit
def _mixed(expert, at):
    """One term of the digest of a routing; see ``header.digest``."""
    m = ((expert.to(tl.int64) + 2) * 0x9E3779B97F4A7C1 + (at + 1)) * 0x2545F4914F6CDD1
    return (m ^ (m >> 29)) * 0x1B873593


@triton.jit
def _merge(topk_idx, t, k, inside, E, K: tl.constexpr, KP: tl.constexpr, WIDE: tl.constexpr):
    """Picks ``[TB, KP]`` with repeated experts -1, the pick each was merged into, and the place of the first bad id."""
    at = t[:, None].to(tl.int64) * K + k[None, :]
    kind = tl.int64 if WIDE else tl.int32
    raw = tl.load(topk_idx.to(tl.pointer_type(kind)) + at, mask=inside, other=-1)
    bad = (raw < -1) | (raw >= E)
    ids = tl.where(bad, -1, raw).to(tl.int32)
    same = ids[:, :, None] == ids[:, None, :]
    first = tl.min(tl.where(same, k[None, None, :], KP), axis=2)
    first = tl.where(ids < 0, k[None, :], first)
    return tl.where(first == k[None, :], ids, -1), first, tl.min(tl.where(bad, at, _NONE))


@triton.jit
def _merged_weights(topk_weights, t, k, first, merged, inside, t1, K: tl.constexpr):
    """Weights of merged picks, added in pick order."""
    row = topk_weights.to(tl.pointer_type(tl.float32)) + t[:, None].to(tl.int64) * K
    total = tl.where(merged < 0, 0.0, tl.load(row + k[None, :], mask=inside, other=0.0))
    if tl.max((inside & (first != k[None, :])).to(tl.int32)) > 0:
        for j in range(1, K):
            here = j + 0
            into = tl.sum(tl.where(k[None, :] == here, first, 0), axis=1)[:, None]
            weight = tl.load(row + here, mask=(t < t1)[:, None] & (into < K), other=0.0)
            total = tl.where((k[None, :] == into) & (into != here), total + weight, total)
    return total


@triton.jit
def _count_tile(
    topk_idx, topk_weights, hist_row, plan, meta, first_pick, tb, t1, T, E, ranks, held, bad, digest,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, EP: tl.constexpr,
    TB: tl.constexpr, MW: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Step 1 for TB tokens: merge, place within the channel, count. Returns the running counts."""
    t, k, r = tb + tl.arange(0, TB), tl.arange(0, KP), tl.arange(0, RP)
    inside = (t < t1)[:, None] & (k < K)[None, :]
    merged, first, at = _merge(topk_idx, t, k, inside, E, K, KP, WIDE)
    row = t[:, None].to(tl.int64)
    tl.store(first_pick.to(tl.pointer_type(tl.int64)) + row * K + k[None, :], first.to(tl.int64), mask=inside)
    out = meta.to(tl.pointer_type(tl.int32)) + row * MW
    tl.store(out + k[None, :] + 1, merged, mask=inside)
    tl.store(out + (k * 0)[None, :], row.to(tl.int32) + (k * 0)[None, :], mask=inside & (k == 0)[None, :])
    if WEIGHTED:
        total = _merged_weights(topk_weights, t, k, first, merged, inside, t1, K)
        at_weights = 1 + (2 * K if EXPERTS else K)
        tl.store(out + at_weights + k[None, :], total.to(tl.int32, bitcast=True), mask=inside)
    owner = owner_of(merged, E, R)[:, :, None]
    hit = owner == r[None, None, :]
    if D > R:  # nodes stand behind the ranks
        hit = hit | ((owner >= 0) & (owner // P + R == r[None, None, :]))
    hit = tl.max(hit.to(tl.int32), axis=1)
    place = tl.cumsum(hit, 0) - hit + ranks[None, :]
    goes = (t < t1)[:, None] & (r < D)[None, :]
    tl.store(place_of(plan, t, T, D, C)[:, None] + r[None, :], tl.where(hit > 0, place, -1), mask=goes)
    flat = tl.reshape(merged, [TB * KP])
    counts = hist_row + RP
    tl.debug_barrier()
    if EXPERTS:
        i = tl.arange(0, TB * KP)
        before = (flat[:, None] == flat[None, :]) & (i[None, :] < i[:, None])
        rank = tl.sum(before.to(tl.int32), axis=1) + tl.load(counts + flat, mask=flat >= 0, other=0)
        tl.store(out + 1 + K + k[None, :], tl.reshape(rank, [TB, KP]), mask=inside)
        tl.debug_barrier()
    held += tl.histogram(flat, EP, mask=flat >= 0)
    tl.store(counts + tl.arange(0, EP), held)
    tl.debug_barrier()
    digest += tl.sum(tl.where(inside, _mixed(merged, row * K + k[None, :]), 0))
    return ranks + tl.sum(hit, axis=0), held, tl.minimum(bad, at), digest


@triton.jit
def _settle_tile(
    plan, meta, before_row, before, tb, t1, T, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RP: tl.constexpr, TB: tl.constexpr, MW: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Step 2 for TB tokens: places within the channel become places within the rank."""
    t, k, r = tb + tl.arange(0, TB), tl.arange(0, KP), tl.arange(0, RP)
    goes = (t < t1)[:, None] & (r < D)[None, :]
    at = place_of(plan, t, T, D, C)[:, None] + r[None, :]
    place = tl.load(at, mask=goes, other=-1)
    tl.debug_barrier()  # several threads load one place of a small tile: all of them before one stores it
    goes = goes & (place >= 0)
    place += before[None, :]
    tl.store(at, place, mask=goes)
    tl.store(order_of(plan, r, T, D, C)[None, :] + place, t[:, None] + (r * 0)[None, :], mask=goes)
    if EXPERTS:
        inside = (t < t1)[:, None] & (k < K)[None, :]
        out = meta.to(tl.pointer_type(tl.int32)) + t[:, None].to(tl.int64) * MW + 1 + k[None, :]
        expert = tl.load(out, mask=inside, other=-1)
        rank = tl.load(out + K, mask=inside & (expert >= 0), other=0)
        tl.debug_barrier()
        tl.store(out + K, rank + tl.load(before_row + expert, mask=expert >= 0, other=0), mask=inside)


@triton.jit
def _sum_before(hist, c, column, mask, C: tl.constexpr, CP: tl.constexpr, HIST: tl.constexpr):
    """Sum over channels before ``c`` of the columns given."""
    row = tl.arange(0, CP)
    tile = tl.load(hist + row[:, None] * HIST + column[None, :], mask=(row < c)[:, None] & mask[None, :], other=0)
    return tl.sum(tile, axis=0)


@triton.jit
def _experts_before(hist, to, c, E, C: tl.constexpr, CP: tl.constexpr, HIST: tl.constexpr, RP: tl.constexpr):
    """Expert columns of :func:`_sum_before`, stored to ``to [E]``."""
    for e0 in range(0, E, 256):
        e = e0 + tl.arange(0, 256)
        tl.store(to + e, _sum_before(hist, c, RP + e, e < E, C, CP, HIST), mask=e < E)


@triton.jit
def _send_headers(
    topk_idx, peers, me, hist_total, marks, said, status, half, T, E, room, tag,
    R: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, RP: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    WIDE: tl.constexpr, HOST: tl.constexpr, K: tl.constexpr, P: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """The last program: one header to each rank, and this rank's row of the matrix to all; other nodes' into the outbox.

    ``said``: what the host says to all, up to its counts; AT_ONCE headers are on their way at a time.
    """
    AT_ONCE: tl.constexpr = RP if RP < 4 else 4
    c, w, r = tl.arange(0, CP), tl.arange(0, WP), tl.arange(0, RP)
    bad = tl.min(tl.load(marks + 2 * c, mask=c < C, other=_NONE))
    digest = tl.sum(tl.load(marks + 2 * c + 1, mask=c < C, other=0))
    value = tl.full((), 0, tl.int64)
    if bad < _NONE:
        kind = tl.int64 if WIDE else tl.int32
        value = tl.load(topk_idx.to(tl.pointer_type(kind)) + bad).to(tl.int64)
        if not HOST:
            earlier = tl.load(status + 6)
            tl.debug_barrier()
            if earlier == 0:
                tl.store(status + 7, value)
                tl.store(status + 6, bad + 1)
    if HOST:
        said = tl.where((w == _STATUS_AT) & (bad < _NONE), 2, said)
        said = tl.where((w == _STATUS_AT + 1) & (bad < _NONE), bad, said)
        said = tl.where(w == _STATUS_AT + 2, value, said)
        said = tl.where((w == _STATUS_AT + 3) & (bad < _NONE), K, said)
    said = tl.where(w == _ROUTING_AT, digest, said)
    said = tl.where(w == _TOKENS_AT, T.to(tl.int64), said)
    row = tl.load(hist_total + r).to(tl.int64)
    for d0 in range(0, R, AT_ONCE):
        to = d0 + tl.arange(0, AT_ONCE)
        there = to < R
        base = tl.load(words(peers) + to, mask=there & (to // P == me // P), other=0)
        to_header, to_matrix = header_of(base, half, me, R, C, W), matrix_of(base, half, me, R, C)
        if P < R:
            to_header, to_matrix = to_letter(to_header, to_matrix, peers, me, half, to, R, C, P, W, FAR)
        total = tl.load(hist_total + to, mask=there, other=0).to(tl.int64)
        v = tl.where(w[None, :] == _ROWS_AT, total[:, None], said[None, :])
        expert = first_expert(to, E, R)[:, None] + w[None, :] - _COUNTS_AT
        held = (w >= _COUNTS_AT)[None, :] & (expert < first_expert(to + 1, E, R)[:, None]) & there[:, None]
        v = tl.where(held, tl.load(hist_total + RP + expert, mask=held, other=0).to(tl.int64), v)
        tl.store(to_header[:, None] + w[None, :], v, mask=there[:, None] & (w < W)[None, :])
        known = there[:, None] & (r < R)[None, :]
        tl.store(to_matrix[:, None] + r[None, :], row[None, :] + (to * 0)[:, None], mask=known)
        tl.store(to_matrix + R, room.to(tl.int64) + (to * 0), mask=there)
        tl.store(to_matrix + R + 1, tag + (to * 0), mask=there)


@triton.jit
def _complete(
    mine, me, half, plan, tokens_per_expert, offsets, ranges, overflow, T, E, M, num_rows, alignment,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, W: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program 0: what comes from the others, and where it goes.

    ``M``: most rows that a rank may announce.
    """
    s, c, e, d = tl.arange(0, RP), tl.arange(0, CP), tl.arange(0, LP), tl.arange(0, RP)
    known = s < R
    both = known[:, None] & (c < C)[None, :]
    local = first_expert(me + 1, E, R) - first_expert(me, E, R)
    here = e < local
    headers, matrix = header_of(mine, half, s, R, C, W), matrix_of(mine, half, s, R, C)
    # all loads before a store
    bounds = tl.load(bounds_of(mine, half, s, R, C)[:, None] + c[None, :], mask=both, other=0)
    rows = tl.load(headers + _ROWS_AT, mask=known, other=0)
    table = tl.load(matrix[:, None] + d[None, :], mask=known[:, None] & (d < R)[None, :], other=0)
    pairs = headers[:, None] + _COUNTS_AT + e[None, :]
    pairs = tl.load(pairs, mask=known[:, None] & here[None, :], other=0).to(tl.int32)
    tl.store(in_bound(plan, s, 0, D, C)[:, None] + c[None, :], bounds.to(tl.int32), mask=both)
    tl.store(in_bound(plan, s, C, D, C), rows.to(tl.int32), mask=known)
    tl.store(first_in(plan, s, D, C), (tl.cumsum(rows, 0) - rows).to(tl.int32), mask=known)
    earlier = tl.where((s < me)[:, None], table, 0)
    tl.store(first_out(plan, d, D, C), tl.sum(earlier, axis=0).to(tl.int32), mask=d < R)
    before = tl.where((d < me)[None, :] & (d[None, :] != s[:, None]), table, 0)
    tl.store(first_back(plan, s, D, C), tl.sum(before, axis=1).to(tl.int32), mask=known)
    counts = tl.sum(pairs, axis=0)
    tl.store(tokens_per_expert.to(tl.pointer_type(tl.int32)) + e, counts, mask=here)
    if EXPERTS:
        begin = tl.cumsum(pairs, 0) - pairs
        aligned = (counts + alignment - 1) // alignment * alignment
        start = tl.cumsum(aligned, 0) - aligned
        if PADDED:
            start = e * (R * M)
            at = ranges.to(tl.pointer_type(tl.int32)) + (e[None, :] * R + s[:, None]) * 2
            tl.store(at, begin, mask=known[:, None] & here[None, :])
            tl.store(at + 1, pairs, mask=known[:, None] & here[None, :])
        else:
            to = offsets.to(tl.pointer_type(tl.int32))
            tl.store(to + e, tl.minimum(start, num_rows), mask=here)
            tl.store(to + local, tl.minimum(tl.sum(tl.where(here, aligned, 0)), num_rows))
            if overflow != 0:
                kept = tl.maximum(num_rows - start, 0)
                lost = tl.sum(tl.where(here, tl.maximum(counts - kept, 0), 0))
                tl.store(overflow.to(tl.pointer_type(tl.int32)), lost)
        tl.store(
            start_of(plan, e[None, :], s[:, None], T, D, C), start[None, :] + begin, mask=known[:, None] & here[None, :]
        )
        tl.store(block_of(plan, e, local, T, D, C), start + counts, mask=here)
        tl.store(block_of(plan, e, local, T, D, C) + 1, start + (counts if PADDED else aligned), mask=here)


@triton.jit(repr=shown_as("plan"))
def plan_kernel(
    topk_idx, topk_weights, peers, state, scratch, plan, meta, first_pick, tokens_per_expert, offsets, ranges, overflow,
    header_in, header_out, nonce, tag, T, E, M, num_rows, alignment,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, W: tl.constexpr, MW: tl.constexpr, TB: tl.constexpr,
    KP: tl.constexpr, RP: tl.constexpr, EP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, WP: tl.constexpr,
    WIDE: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, HOST: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, FAR: tl.constexpr, NET: tl.constexpr,
):  # fmt: skip
    """Grid: C. ``scratch``: int32 ``hist [C, RP + EP]`` and ``before [C + 1, RP + EP]``, then int64 ``marks [C, 2]``.

    D: ranks, and nodes of P ranks each if there are several, which tokens go to. FAR, NET: see ``kernels/two_letters.py``.
    """
    HIST: tl.constexpr = RP + EP
    JUDGE: tl.constexpr = 1 if P == R and C > 1 else 0  # letters are opened by one program
    c = tl.program_id(0)
    if given_up(state):
        return  # peers may be in other calls
    T, E, M = T.to(tl.int32), E.to(tl.int32), M.to(tl.int32)
    room, num_rows, alignment = num_rows, num_rows.to(tl.int32), alignment.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    hist = scratch.to(tl.pointer_type(tl.int32))
    before_all = hist + C * HIST
    marks = words(scratch + (2 * C + 1) * HIST * 4)
    share = (T + C - 1) // C
    t0 = c * share
    t1 = tl.minimum(t0 + share, T)
    r, e, w = tl.arange(0, RP), tl.arange(0, EP), tl.arange(0, WP)
    said = tl.zeros((WP,), tl.int64)
    if HOST:  # far away, and not needed before all have counted
        said = tl.load(words(header_in) + w, mask=(w < _COUNTS_AT) & (c == C - 1), other=0)
    row = hist + c * HIST
    ranks, held = tl.zeros((RP,), tl.int32), tl.zeros((EP,), tl.int32)
    tl.store(row + RP + e, held)
    tl.debug_barrier()
    bad, digest = tl.full((), _NONE, tl.int64), tl.full((), 0, tl.int64)
    for tb in range(t0, t1, TB):
        ranks, held, bad, digest = _count_tile(
            topk_idx, topk_weights, row, plan, meta, first_pick, tb, t1, T, E, ranks, held, bad, digest, R, D, P, C, K, KP, RP,
            EP, TB, MW, WIDE, WEIGHTED, EXPERTS,
        )  # fmt: skip
    tl.store(row + r, ranks)
    tl.store(marks + 2 * c, bad)
    tl.store(marks + 2 * c + 1, digest)
    tl.debug_barrier()
    ticket = tl.atomic_add(words(state) + TICKETS, 1, sem="release", scope="gpu")
    call = ticket // C
    half = (call % 2).to(tl.int32)
    if wait_at_least(words(state) + TICKETS, (call + 1) * C, state, ON_PLAN, me, TICKETS) >= (call + 1) * C:
        before = _sum_before(hist, c, r, r < D, C, CP, HIST)
        tl.store(out_bound(plan, r, c, D, C), before, mask=r < D)
        near = (r < R) & (r // P == me // P)
        bases = tl.load(words(peers) + r, mask=near, other=0)
        tl.store(bounds_of(bases, half, me, R, C) + c, before.to(tl.int64), mask=near)
        if c == C - 1:
            total = before_all + C * HIST
            tl.store(out_bound(plan, r, C, D, C), before + ranks, mask=r < D)
            tl.store(total + r, before + ranks)
            _experts_before(hist, total + RP, C, E, C, CP, HIST, RP)
            tl.debug_barrier()
            status = words(tl.load(words(state) + STATUS))
            _send_headers(
                topk_idx, peers, me, total, marks, said, status, half, T, E, room, tag, R, C, CP, RP, W, WP, WIDE, HOST, K, P, FAR,
            )  # fmt: skip
            if P < R:
                post_letters(peers, state, me, half, hist, R, C, CP, P, W, HIST, FAR, NET)
        add_release(arrival_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), near)
        before_row = before_all + c * HIST + RP
        if EXPERTS:
            _experts_before(hist, before_row, c, E, C, CP, HIST, RP)
            tl.debug_barrier()
        for tb in range(t0, t1, TB):
            _settle_tile(plan, meta, before_row, before, tb, t1, T, D, C, K, KP, RP, TB, MW, EXPERTS)
        if (c == 0) | (c == JUDGE):
            mine = peer_base(peers, me)
            arrivals, want = arrival_of(mine, r, R, C), (call + 1) * C + (r * 0)
            if c == JUDGE:
                there = lacking(wait_for_all(arrivals, want, r < R, state, ON_COUNTS, r, MORE=False), want, r < R) == 0
            else:  # the host must not be told of a plan that is not completed
                there = wait_beside(arrivals, want, r < R, state)
            if there:
                if P < R:
                    open_letters(mine, me, half, plan, R, D, C, CP, RP, P, W, WP, FAR)
                if c == JUDGE:
                    judge(mine, state, me, half, plan, header_out, nonce, tag, room, M, R, D, C, K, RP, P, W, WP, HOST)
                if c == 0:
                    _complete(
                        mine, me, half, plan, tokens_per_expert, offsets, ranges, overflow, T, E, M, num_rows, alignment,
                        R, D, C, CP, RP, LP, W, EXPERTS, PADDED,
                    )  # fmt: skip
                    if P < R:
                        note_landings(mine, me, half, plan, T, E, R, D, C, CP, RP, P, W, FAR)
