# pyright: basic
"""One launch from picks to a plan: merge picks, place rows, exchange counts, tell the host.

Grid ``channels``: one program per channel, a contiguous share of the tokens. Example: 2 ranks, 4
experts, picks ``[[0, 3], [1, 1], [2, -1]]``, one channel: rank 0 gets tokens 0 and 1 (places 0, 1),
rank 1 tokens 0 and 2 (places 0, 1); ``place = [[0, 0], [1, -1], [-1, 1]]``, ``order = [[0, 1], [0,
2]]``; the second pick of expert 1 is merged into the first.

Who publishes what, and who may read it when:

1. Every program counts its tokens and stores its row of ``hist`` and ``marks`` (local memory), then
   adds to ``TICKETS`` (release) and waits for all programs of this call (acquire): then all rows
   may be read. A row is written again in the next call only, a later kernel.
2. Every program sends its bounds to all peers, the last one also the header and its row of the
   matrix; then each adds 1 to ``arrivals[me]`` there (release). Peers wait for that, so what stays
   here comes behind it: places within the rank.
3. Program 0 and the validator, program 1 if there is one and no node headers, wait until
   ``arrivals[source]`` has grown by ``channels`` for every source (acquire), then read what step 2
   wrote. Program 0 completes the plan. The validator stores the result, and the headers and then
   the call's nonce (release) to host memory. Neither reads what the other writes. Only the
   validator has a deadline: program 0 waits until all is there, or the validator has given up, so
   what the host is told of is completed.

Why reuse is safe: what peers write alternates between two halves by the parity of the call. A peer
writes half ``n % 2`` again in its call n + 2, which it enters only after its call n + 1 was
complete. For that it needed my arrival n + 1, which I send from a kernel that runs after my kernel
n has read the half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.exchange import (
    NO_PICK, complete, exchange, experts_before, sum_before, validate,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import (
    COUNTS_AT, TICKETS, ints, order_of, owner_of, peer_base, peer_word, place_of,
)  # fmt: skip
from tokenyard.kernels.structs import Grid, Routing, grid_of
from tokenyard.kernels.sync import (
    ON_COUNTS, ON_PLAN, RANK, given_up, lacking, wait_at_least, wait_beside, wait_for_all, words,
)  # fmt: skip
from tokenyard.kernels.two_headers import note_first_forwarded, unpack_node_headers
from tokenyard.routing import power_of_two_at_least


class PlanConfig(NamedTuple):
    """What is known of a plan when its kernel is compiled. Each ``..._bins`` is a power of two, not
    less than what it counts."""

    ranks: int
    plan_ranks: int  # destinations: ranks, then nodes if there are several
    rank_bins: int  # of these
    channels: int
    channel_bins: int
    topk: int
    topk_bins: int
    expert_bins: int
    local_bins: int  # experts of one rank
    columns: int  # of ``hist``: rank_bins + expert_bins
    header_words: int
    header_bins: int
    metadata_words: int  # of a row
    tokens: int  # that a program works on at once
    wide: bool  # ids are int64, else int32
    weighted: bool  # weights ride along
    by_expert: bool  # results are in the order of experts
    padded: bool  # with room for all rows of every rank in each expert's block
    exact: bool  # the host learns the counts, and decides
    grid: Grid  # of nodes, for node headers: one node of all ranks in engine nvlink


class Picks(NamedTuple):
    """Addresses of ids and weights ``[T, K]``. 0: there are no weights."""

    expert_ids: Any
    weights: Any


class PlanOutputs(NamedTuple):
    """Addresses of what a plan fills, besides itself. 0: not needed."""

    metadata: Any
    first_pick: Any
    tokens_per_expert: Any
    offsets: Any
    ranges: Any
    overflow: Any


@triton.jit
def _mixed(expert, at):
    """One term of the digest of a routing; see ``header.digest``."""
    m = ((expert.to(tl.int64) + 2) * 0x9E3779B97F4A7C1 + (at + 1)) * 0x2545F4914F6CDD1
    return (m ^ (m >> 29)) * 0x1B873593


@triton.jit
def _merge(expert_ids, t, pick, inside, num_experts, k: tl.constexpr):
    """Picks ``[tokens, topk_bins]`` with repeated experts -1, the pick each was merged into, and
    the place of the first bad id."""
    at = t[:, None].to(tl.int64) * k.topk + pick[None, :]
    kind = tl.int64 if k.wide else tl.int32
    raw = tl.load(expert_ids.to(tl.pointer_type(kind)) + at, mask=inside, other=-1)
    bad = (raw < -1) | (raw >= num_experts)
    ids = tl.where(bad, -1, raw).to(tl.int32)
    same = ids[:, :, None] == ids[:, None, :]
    first = tl.min(tl.where(same, pick[None, None, :], k.topk_bins), axis=2)
    first = tl.where(ids < 0, pick[None, :], first)
    merged = tl.where(first == pick[None, :], ids, -1)
    return merged, first, tl.min(tl.where(bad, at, NO_PICK))


@triton.jit
def _merged_weights(weights, t, pick, first, merged, inside, t1, topk: tl.constexpr):
    """Weights of merged picks, added in pick order."""
    row = floats(weights) + t[:, None].to(tl.int64) * topk
    total = tl.where(merged < 0, 0.0, tl.load(row + pick[None, :], mask=inside, other=0.0))
    if tl.max((inside & (first != pick[None, :])).to(tl.int32)) > 0:
        for j in range(1, topk):
            here = j + 0
            into = tl.sum(tl.where(pick[None, :] == here, first, 0), axis=1)[:, None]
            weight = tl.load(row + here, mask=(t < t1)[:, None] & (into < topk), other=0.0)
            total = tl.where((pick[None, :] == into) & (into != here), total + weight, total)
    return total


@triton.jit
def ranks_among_picks(to, flat, counts, inside, k: tl.constexpr):
    """Store the rank of each pick among the channel's picks of its expert; ``counts``: of those
    before this tile."""
    i = tl.arange(0, k.tokens * k.topk_bins)
    before = (flat[:, None] == flat[None, :]) & (i[None, :] < i[:, None])
    rank = tl.sum(before.to(tl.int32), axis=1) + tl.load(counts + flat, mask=flat >= 0, other=0)
    tl.store(to, tl.reshape(rank, [k.tokens, k.topk_bins]), mask=inside)


@triton.jit
def _count_tile(
    picks, outputs, routing, hist_row, tb, t1, ranks, held, bad, digest, k: tl.constexpr
):  # fmt: skip
    """Step 1 for some tokens: merge, place within the channel, count. Returns running counts."""
    t, pick, r = tb + tl.arange(0, k.tokens), tl.arange(0, k.topk_bins), tl.arange(0, k.rank_bins)
    inside = (t < t1)[:, None] & (pick < k.topk)[None, :]
    merged, first, at = _merge(picks.expert_ids, t, pick, inside, routing.num_experts, k)
    row = t[:, None].to(tl.int64)
    tl.store(
        words(outputs.first_pick) + row * k.topk + pick[None, :], first.to(tl.int64), mask=inside
    )
    out = ints(outputs.metadata) + row * k.metadata_words
    tl.store(out + pick[None, :] + 1, merged, mask=inside)
    begins = inside & (pick == 0)[None, :]
    tl.store(out + (pick * 0)[None, :], row.to(tl.int32) + (pick * 0)[None, :], mask=begins)
    if k.weighted:
        total = _merged_weights(picks.weights, t, pick, first, merged, inside, t1, k.topk)
        at_weights = 1 + (2 * k.topk if k.by_expert else k.topk)
        tl.store(out + at_weights + pick[None, :], total.to(tl.int32, bitcast=True), mask=inside)
    owner = owner_of(merged, routing.num_experts, k.ranks)[:, :, None]
    hit = owner == r[None, None, :]
    if k.plan_ranks > k.ranks:  # nodes stand behind the ranks
        hit = hit | ((owner >= 0) & (owner // k.grid.ranks_per_node + k.ranks == r[None, None, :]))
    hit = tl.max(hit.to(tl.int32), axis=1)
    place = tl.cumsum(hit, 0) - hit + ranks[None, :]
    goes = (t < t1)[:, None] & (r < k.plan_ranks)[None, :]
    places = place_of(routing.plan, t, routing.num_tokens, k)[:, None]
    tl.store(places + r[None, :], tl.where(hit > 0, place, -1), mask=goes)
    flat = tl.reshape(merged, [k.tokens * k.topk_bins])
    counts = hist_row + k.rank_bins
    tl.debug_barrier()
    if k.by_expert:
        ranks_among_picks(out + 1 + k.topk + pick[None, :], flat, counts, inside, k)
        tl.debug_barrier()
    held += tl.histogram(flat, k.expert_bins, mask=flat >= 0)
    tl.store(counts + tl.arange(0, k.expert_bins), held)
    tl.debug_barrier()
    digest += tl.sum(tl.where(inside, _mixed(merged, row * k.topk + pick[None, :]), 0))
    return ranks + tl.sum(hit, axis=0), held, tl.minimum(bad, at), digest


@triton.jit
def count_channel(picks, outputs, routing, row, marks, c, t0, t1, k: tl.constexpr):
    """Step 1: this channel's row of ``hist`` and its ``marks``. Returns the rows to each rank."""
    ranks, held = tl.zeros((k.rank_bins,), tl.int32), tl.zeros((k.expert_bins,), tl.int32)
    tl.store(row + k.rank_bins + tl.arange(0, k.expert_bins), held)
    tl.debug_barrier()
    bad, digest = tl.full((), NO_PICK, tl.int64), tl.full((), 0, tl.int64)
    for tb in range(t0, t1, k.tokens):
        ranks, held, bad, digest = _count_tile(
            picks, outputs, routing, row, tb, t1, ranks, held, bad, digest, k
        )
    tl.store(row + tl.arange(0, k.rank_bins), ranks)
    tl.store(marks + 2 * c, bad)
    tl.store(marks + 2 * c + 1, digest)
    tl.debug_barrier()
    return ranks


@triton.jit
def _settle_tile(outputs, routing, before_row, before, tb, t1, k: tl.constexpr):
    """Step 2 for some tokens: places within the channel become places within the rank."""
    t, pick, r = tb + tl.arange(0, k.tokens), tl.arange(0, k.topk_bins), tl.arange(0, k.rank_bins)
    goes = (t < t1)[:, None] & (r < k.plan_ranks)[None, :]
    tokens = routing.num_tokens
    at = place_of(routing.plan, t, tokens, k)[:, None] + r[None, :]
    place = tl.load(at, mask=goes, other=-1)
    # several threads load one place of a small tile: all of them before one stores it
    tl.debug_barrier()
    goes = goes & (place >= 0)
    place += before[None, :]
    tl.store(at, place, mask=goes)
    order = order_of(routing.plan, r, tokens, k)[None, :]
    tl.store(order + place, t[:, None] + (r * 0)[None, :], mask=goes)
    if k.by_expert:
        inside = (t < t1)[:, None] & (pick < k.topk)[None, :]
        row = ints(outputs.metadata) + t[:, None].to(tl.int64) * k.metadata_words
        out = row + 1 + pick[None, :]
        expert = tl.load(out, mask=inside, other=-1)
        rank = tl.load(out + k.topk, mask=inside & (expert >= 0), other=0)
        tl.debug_barrier()
        rank = rank + tl.load(before_row + expert, mask=expert >= 0, other=0)
        tl.store(out + k.topk, rank, mask=inside)


@triton.jit
def _conclude(
    mine, state, parity, routing, outputs, header_out, nonce, tag, room, most_rows, alignment, c,
    VALIDATOR: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Step 3, when all is there, by program 0 and the validator."""
    plan, me = routing.plan, routing.rank
    if k.grid.ranks_per_node < k.ranks:
        unpack_node_headers(mine, me, parity, plan, k)
    if c == VALIDATOR:
        validate(mine, state, me, parity, plan, header_out, nonce, tag, room, most_rows, k)
    if c == 0:
        complete(mine, parity, routing, outputs, most_rows, alignment, k)
        if k.grid.ranks_per_node < k.ranks:
            note_first_forwarded(mine, parity, routing, k)


@triton.jit(repr=shown_as("plan"))
def plan_kernel(
    picks: Picks, regions, state, scratch, plan, outputs: PlanOutputs, header_in, header_out, nonce,
    tag, num_tokens, num_experts, most_rows, num_rows, alignment, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`PlanConfig`; :func:`bind_plan` makes the launch.
    ``scratch``: int32 ``hist [channels, columns]`` and ``before [channels + 1, columns]``, then
    int64 ``marks [channels, 2]``."""
    C: tl.constexpr = k.channels
    # node headers are opened by one program
    VALIDATOR: tl.constexpr = 1 if k.grid.ranks_per_node == k.ranks and C > 1 else 0
    c = tl.program_id(0)
    if given_up(state):
        return  # peers may be in other calls
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    most_rows, room, num_rows = most_rows.to(tl.int32), num_rows, num_rows.to(tl.int32)
    alignment, me = alignment.to(tl.int32), tl.load(words(state) + RANK).to(tl.int32)
    routing = Routing(plan, me, num_tokens, num_experts, num_rows)
    hist = ints(scratch)
    before_all = hist + C * k.columns
    marks = words(scratch + (2 * C + 1) * k.columns * 4)
    share = (num_tokens + C - 1) // C
    t0 = c * share
    t1 = tl.minimum(t0 + share, num_tokens)
    r, w = tl.arange(0, k.rank_bins), tl.arange(0, k.header_bins)
    said = tl.zeros((k.header_bins,), tl.int64)
    if k.exact:  # far away, and not needed before all have counted
        said = tl.load(words(header_in) + w, mask=(w < COUNTS_AT) & (c == C - 1), other=0)
    ranks = count_channel(picks, outputs, routing, hist + c * k.columns, marks, c, t0, t1, k)
    call = tl.atomic_add(words(state) + TICKETS, 1, sem="release", scope="gpu") // C
    parity = (call % 2).to(tl.int32)
    want = (call + 1) * C
    if wait_at_least(words(state) + TICKETS, want, state, ON_PLAN, me, TICKETS) >= want:
        before = sum_before(hist, c, r, r < k.plan_ranks, k)
        exchange(
            picks, regions, state, routing, said, hist, marks, before, ranks, c, parity, room, tag,
            k,
        )  # fmt: skip
        before_row = before_all + c * k.columns + k.rank_bins
        if k.by_expert:
            experts_before(hist, before_row, c, num_experts, k)
            tl.debug_barrier()
        for tb in range(t0, t1, k.tokens):
            _settle_tile(outputs, routing, before_row, before, tb, t1, k)
        if (c == 0) | (c == VALIDATOR):
            mine = peer_base(regions, me)
            arrivals, wants = peer_word(mine, "arrivals", r, k), want + (r * 0)
            if c == VALIDATOR:
                seen = wait_for_all(arrivals, wants, r < k.ranks, state, ON_COUNTS, r)
                there = lacking(seen, wants, r < k.ranks) == 0
            else:  # the host must not be told of a plan that is not completed
                there = wait_beside(arrivals, wants, r < k.ranks, state)
            if there:
                _conclude(
                    mine, state, parity, routing, outputs, header_out, nonce, tag, room, most_rows,
                    alignment, c, VALIDATOR, k,
                )  # fmt: skip


# The host's side


MOST_COMPARED, MOST_PLACED, MOST_MERGED = 16384, 64, 256
"""Pairs of picks of a token that a program compares at once; picks if it compares all with each
other, and if it does not."""


def bind_plan(
    workspace: Any, num_topk: int, metadata_words: int, *, by_expert: bool, padded: bool,
    exact: bool, weighted: bool, wide: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature: see ``bind_two_dispatch``. Flags are as
    in :class:`PlanConfig`. Of a launch: ``nonce`` is what the host waits for, ``most_rows`` that a
    rank may announce, ``num_rows`` that the result has room for, as ``matrix`` of
    ``docs/reference/protocols.md`` tells it."""
    bins, channels = power_of_two_at_least, workspace.tuning.channels
    top, ranks = bins(num_topk), workspace.memory.world_size
    together = (MOST_PLACED if by_expert else MOST_MERGED) // top
    k = PlanConfig(
        ranks=ranks, plan_ranks=workspace.plan_ranks, rank_bins=workspace.rank_bins,
        channels=channels, channel_bins=bins(channels), topk=num_topk, topk_bins=top,
        expert_bins=workspace.expert_bins, local_bins=bins(workspace.header_words - head.COUNTS),
        columns=workspace.rank_bins + workspace.expert_bins, header_words=workspace.header_words,
        header_bins=bins(workspace.header_words), metadata_words=metadata_words,
        tokens=max(1, min(32, MOST_COMPARED // top**2, together)), wide=wide, weighted=weighted,
        by_expert=by_expert, padded=padded, exact=exact,
        grid=grid_of(workspace, 0)._replace(local_bins=0, mapped=False),
    )  # fmt: skip
    return workspace.memory.bind(plan_kernel, channels, num_warps=8, max_registers=None, k=k)
