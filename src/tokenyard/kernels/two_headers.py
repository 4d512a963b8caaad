# pyright: basic
"""What a plan and an announcement send to other nodes: node headers and tags, one put to each rank.
Inside a node peers store (``plan``, ``call_barrier``).

A node header from s to d: header for d, s's row of the matrix, rows to d in channels before each
one, the same to d's node, rows to d's node; if d has s's local index, it forwards rows of s: then
also rows to each rank of its node in channels before each one.

Who publishes what, who may read when: the put that brings a node header adds C to ``arrivals[s]``
at d, as many as C programs of a near plan do; a tag comes with 1 onto ``entered[s]``. Program 0 has
waited for them (acquire) and copies node headers to where near ranks write theirs. The call barrier
reads tags when a look at all ``entered`` (acquire) has found those of this call.

Why reuse is safe: node headers, tags and what they are put from alternate by the parity of the
call. Half ``n % 2`` is written again in call n + 2, behind arrival (or signal) n + 1 of that rank,
which it sent behind its call n, for which it needed mine: it has read that, and the put is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import CallBarrierConfig, all_in_call, count_call, in_same_call
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.place import num_experts_of
from tokenyard.kernels.region import (
    EPOCH, TOKENS_AT, call_word, in_bound, peer_base, peer_word, plan_word,
)  # fmt: skip
from tokenyard.kernels.structs import grid_of
from tokenyard.kernels.sync import (
    DISAGREED, ON_CALL_BARRIER, ON_COUNTS, RANK, WAITED, add_release, give_up,
    give_up_on_one, given_up, lacking, look_at_all, note_call, note_look, words,
)  # fmt: skip
from tokenyard.kernels.two_net import put
from tokenyard.kernels.two_region import (
    first_forwarded, net_bytes, node_header_at, node_header_words, other, short_node_header_words,
    tag_at,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import ON_TIME, reports


@triton.jit
def to_node_header(to_header, to_matrix, peers, me, parity, to, k: tl.constexpr):
    """Where the header and the row of the matrix for rank ``to`` go: ``to_header`` and
    ``to_matrix`` there, or my outbox."""
    node_header = peer_base(peers, me) + node_header_at(1, parity, to, k)
    far = to // k.grid.ranks_per_node != me // k.grid.ranks_per_node
    header = tl.where(far, node_header, to_header.to(tl.int64))
    return words(header), words(
        tl.where(far, node_header + k.header_words * 8, to_matrix.to(tl.int64))
    )


@triton.jit
def put_node_headers(peers, state, me, parity, hist, k: tl.constexpr):
    """Complete the node headers whose headers are in the outbox, and put them."""
    R: tl.constexpr = k.ranks
    C: tl.constexpr = k.channels
    P: tl.constexpr = k.grid.ranks_per_node
    mine = peer_base(peers, me)
    HIST: tl.constexpr = k.columns
    c = tl.arange(0, k.channel_bins)
    for rank in range(R):
        to = rank + 0
        if to // P != me // P:
            here = node_header_at(1, parity, to, k)
            bounds = words(mine + here) + k.header_words + R + 2
            to_rank = tl.load(hist + c * HIST + to, mask=c < C, other=0)
            to_node = tl.load(hist + c * HIST + R + to // P, mask=c < C, other=0)
            tl.store(bounds + c, (tl.cumsum(to_rank, 0) - to_rank).to(tl.int64), mask=c < C)
            tl.store(bounds + C + c, (tl.cumsum(to_node, 0) - to_node).to(tl.int64), mask=c < C)
            tl.store(bounds + 2 * C, tl.sum(to_node).to(tl.int64))
            SHORT: tl.constexpr = short_node_header_words(R, C, k.header_words)
            LONG: tl.constexpr = node_header_words(R, P, C, k.header_words)
            rail = to % P == me % P
            for beside in range(0, tl.where(rail, P, 0)):
                q = beside + 0
                rows = tl.load(hist + c * HIST + to // P * P + q, mask=c < C, other=0)
                beside_at = words(mine + here) + SHORT + q * C + c
                tl.store(beside_at, (tl.cumsum(rows, 0) - rows).to(tl.int64), mask=c < C)
            num_bytes = tl.where(rail, 8 * LONG, 8 * SHORT).to(tl.int64)
            there = node_header_at(0, parity, me, k)
            counter = peer_word(mine, "arrivals", me, k).to(tl.int64) - mine
            account = net_bytes(state, to // P, k)
            count = tl.full((), C, tl.int64)
            put(peers, account, mine, to, there, here, num_bytes, counter, count, 1, k.grid.network)


@triton.jit
def unpack_node_headers(mine, me, parity, plan, k: tl.constexpr):
    """Bring what node headers say to where near ranks write it, and note what comes through the
    network."""
    R: tl.constexpr = k.ranks
    C: tl.constexpr = k.channels
    P: tl.constexpr = k.grid.ranks_per_node
    W: tl.constexpr = k.header_words
    c, w = tl.arange(0, k.channel_bins), tl.arange(0, k.header_bins)
    r = tl.arange(0, k.rank_bins)
    for rank in range(R):
        s = rank + 0
        if s // P != me // P:
            node_header = words(mine + node_header_at(0, parity, s, k))
            said = w < W
            header = call_word(mine, "headers", parity, s, k) + w
            tl.store(header, tl.load(node_header + w, mask=said, other=0), mask=said)
            row = tl.load(node_header + W + r, mask=r < R + 2, other=0)
            tl.store(call_word(mine, "matrix", parity, s, k) + r, row, mask=r < R + 2)
            bounds = tl.load(node_header + W + R + 2 + c, mask=c < C, other=0)
            tl.store(call_word(mine, "bounds", parity, s, k) + c, bounds, mask=c < C)
            if s % P == me % P:
                through = tl.load(node_header + W + R + 2 + C + c, mask=c < C, other=0)
                tl.store(in_bound(plan, R + s // P, 0, k) + c, through.to(tl.int32), mask=c < C)
                total = tl.load(node_header + W + R + 2 + 2 * C)
                tl.store(in_bound(plan, R + s // P, C, k), total.to(tl.int32))
    tl.debug_barrier()


@triton.jit
def note_first_forwarded(mine, parity, routing, k: tl.constexpr):
    """Where rows that this rank forwards begin at the ranks of its node, from node headers and the
    matrix."""
    C: tl.constexpr = k.channels
    P: tl.constexpr = k.grid.ranks_per_node
    SHORT: tl.constexpr = short_node_header_words(k.ranks, C, k.header_words)
    PP: tl.constexpr = triton.next_power_of_2(P)
    me = routing.rank
    c, s, q = tl.arange(0, k.channel_bins), tl.arange(0, k.rank_bins), tl.arange(0, PP)
    home, local = me // P, num_experts_of(routing, k)
    both = (q < P)[:, None] & (c < C)[None, :]
    for g in range(k.ranks // P):
        node = g + 0
        if node != home:
            source = node * P + me % P
            rows = call_word(mine, "matrix", parity, s, k)[:, None] + home * P + q[None, :]
            earlier = tl.load(rows, mask=(s < source)[:, None] & (q < P)[None, :], other=0)
            node_header = words(mine + node_header_at(0, parity, source, k)) + SHORT
            bounds = tl.load(node_header + q[:, None] * C + c[None, :], mask=both, other=0)
            number, tokens = other(node, home), routing.num_tokens
            at = first_forwarded(routing.plan, tokens, local, number, q[:, None], c[None, :], k)
            tl.store(at, (tl.sum(earlier, axis=0)[:, None] + bounds).to(tl.int32), mask=both)


@triton.jit
def lacks_table(mine, state, parity, plan, room, k: tl.constexpr):
    """Whether a rank has more tokens than another's forwarders have room for: the upper half of
    ``room``. Notes this rank's."""
    R: tl.constexpr = k.ranks
    r = tl.arange(0, k.rank_bins)
    tokens = tl.load(call_word(mine, "headers", parity, r, k) + TOKENS_AT, mask=r < R, other=0)
    rooms = tl.load(call_word(mine, "matrix", parity, r, k) + R, mask=r < R, other=2**62) >> 32
    most, least = tl.max(tokens), tl.min(rooms)
    tl.store(plan_word(plan, "first_out", R, k), (room >> 32).to(tl.int32))
    if not k.exact:  # otherwise the host sees to it
        if most > least:
            give_up(state, DISAGREED, ON_COUNTS, tl.argmax(tokens, 0), 0, least, most)
    return (most > least).to(tl.int32)


@triton.jit
def announce_call_to_all(regions, state, tag, k: tl.constexpr):
    """As ``announce_call``: near ranks by stores, the others by puts."""
    P: tl.constexpr = k.grid.ranks_per_node
    me, call = tl.load(words(state) + RANK).to(tl.int32), tl.load(words(state) + EPOCH)
    parity = (call % 2).to(tl.int32)
    note_call(state, tag, call)
    r = tl.arange(0, k.rank_bins)
    near = (r < k.ranks) & (r // P == me // P)
    bases = tl.load(words(regions) + r, mask=near, other=0)
    tl.store(peer_word(bases, "tags", me, k, parity), tag + (r * 0), mask=near)
    add_release(peer_word(bases, "entered", me, k), tl.full((k.rank_bins,), 1, tl.int64), near)
    mine = peer_base(regions, me)
    here = tag_at(parity, k)
    tl.store(words(mine + here), tag)
    there = peer_word(mine, "tags", me, k, parity).to(tl.int64) - mine
    counter = peer_word(mine, "entered", me, k).to(tl.int64) - mine
    for rank in range(k.ranks):
        to = rank + 0
        if to // P != me // P:
            account = net_bytes(state, to // P, k)
            num_bytes, count = tl.full((), 8, tl.int64), tl.full((), 1, tl.int64)
            network: tl.constexpr = k.grid.network
            put(regions, account, mine, to, there, here, num_bytes, counter, count, 1, network)


@triton.jit
def call_barrier_turn(regions, state, tag, turn, k: tl.constexpr):
    """``call_barrier`` as a task (``two_scheduler.py``): the first turn announces the call; a later
    one, when all have said so, compares tags and counts the call. Returns what is left of the two,
    as other turns return rows."""
    i = tl.load(turn.done).to(tl.int32)
    left = 2 - i
    if i == 0:
        announce_call_to_all(regions, state, tag, k)
        left -= 1
        tl.store(turn.done, tl.full((), 1, tl.int64))
    elif i == 1:
        if all_are_here(regions, state, tag, tl.load(words(state) + EPOCH), turn.step, True, k):
            count_call(state)
            left -= 1
            tl.store(turn.done, tl.full((), 2, tl.int64))
    return left


@triton.jit
def all_are_here(regions, state, tag, call, step, noted, k: tl.constexpr):
    """One look: whether all ranks have come to this ``call``. ``noted``: this program is the one
    whose wait counts; it has words before the matrix, -1 for rank 0, for ``note_look``. Gives up on
    one that is late, or in another: not before this rank has announced the call itself, as the
    worker that does so may begin after one that gave up, and the others would wait for it."""
    r, me = tl.arange(0, k.rank_bins), tl.load(words(state) + RANK).to(tl.int32)
    mine, others = peer_base(regions, me), (r < k.ranks) & (r != me)
    want = call + 1 + (r * 0)
    seen = look_at_all(peer_word(mine, "entered", r, k), r < k.ranks)
    tl.debug_barrier()
    matrix = tl.load(words(state) + WAITED)
    note_look(matrix, ON_CALL_BARRIER, r, words(matrix) - 1 - r, seen < want, others & noted)
    here = (lacking(seen, want, r < k.ranks) == 0) & (step == ON_TIME)
    if reports(step, lacking(seen, want, others) > 0, False):
        give_up_on_one(state, ON_CALL_BARRIER, r, want, seen, others)
    elif here:
        here = in_same_call(state, mine, call, tag, others, k)
    return here


@triton.jit(repr=shown_as("twolevel::call_barrier"))
def two_call_barrier_kernel(regions, state, tag, k: tl.constexpr):
    """Grid 1: a call without rows, to tell peers in a data call that this rank refuses it. ``k`` is
    a ``CallBarrierConfig``; :func:`bind_two_call_barrier` makes the launch."""
    if not given_up(state):
        announce_call_to_all(regions, state, tag, k)
        all_in_call(regions, state, tag, k, alone=True)
        count_call(state)


# The host's side


def bind_two_call_barrier(workspace: Any) -> Callable[..., None]:
    """Compile and load the kernel of a call without rows."""
    grid = grid_of(workspace)
    k = CallBarrierConfig(
        ranks=grid.nodes * grid.ranks_per_node, rank_bins=workspace.rank_bins,
        channels=workspace.tuning.channels, grid=grid,
    )  # fmt: skip
    return workspace.memory.bind(two_call_barrier_kernel, 1, num_warps=4, max_registers=None, k=k)
