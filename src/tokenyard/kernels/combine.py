# pyright: basic
"""Combine: experts' ranks send one row per (token, rank) back through the rings, and its owner adds
them in rank order.

Grid ``ranks * channels + 1``: a sender per (other owner, channel), a reducer per channel (tokens
``channel * share`` ..), the call barrier. The rings are those of dispatch, the other way round: the
row at place p among my rows to rank d comes back as row ``p - out_bound(d, channel)`` of the ring
(d, channel). Example: 2 ranks, token 7 of rank 0 went to both: rank 1 sends its partial sum through
ring (1, c) of rank 0, whose reducer c adds its own partial sum, then that row, rounds, and stores
token 7.

Who publishes what, and who may read it when: as in ``kernels/dispatch.py``, with reducers for
receivers. A reducer adds to ``heads`` at each source (release) after its reads of ``batches``
steps, because a release waits for all that was stored before.

Nobody waits in a circle: rows of a ring are in token order, and a reducer takes tokens in order. If
it waits for a row of ring (d, c), all earlier rows of that ring are returned but at most
``batches * rows_summed - 1``. So with ``slots >= chunk + batches * rows_summed - 1`` the sender has
room for the chunk that holds the row, and that sender waits for nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import call_barrier
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import add_term, load_rows
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import (
    first_in, head_of, in_bound, out_bound, peer_base, place_of, sent_to, tail_of, taken_from,
)  # fmt: skip
from tokenyard.kernels.stand_in import stand_in
from tokenyard.kernels.structs import Peers, RingLayout, RowConstants, row_constants
from tokenyard.kernels.sync import (
    ON_ROOM, ON_ROWS, RANK, add_release, given_up, lacking, wait_at_least, wait_for_all, words,
)  # fmt: skip
from tokenyard.kernels.triton_types import kernel_type
from tokenyard.routing import power_of_two_at_least


class Tiles(NamedTuple):
    """Rows, and channels of each, that programs have in flight."""

    rows_sent: int
    block_sent: int
    rows_summed: int
    block_summed: int


class CombineConfig(NamedTuple):
    """What is known of a combine when its kernel is compiled."""

    ranks: int
    plan_ranks: int  # destinations that plans know: ranks, then nodes if there are several
    rank_bins: int  # a power of two, not less than plan_ranks
    channels: int
    row: RowConstants  # of a sum on the wire: weights follow its payload
    dtype: Any  # of rows, also on the wire
    bias0: Any  # dtype of a term that is added to sums, None: none
    bias1: Any
    tiles: Tiles
    stages: int  # rounds of loads of a reducer that are under way at once
    # a combine in place has no rings inside nodes, and only rows in arrival order
    ring: RingLayout = RingLayout(0, 0, 0, 0)
    slots_per_row: int = 0  # result rows that one arrival row can have
    by_expert: bool = False  # rows are by expert: those of an arrival row are summed first
    weighted: bool = False  # and multiplied by weights before
    picks: int = 0  # weights per arrival row that are summed too; 0: none
    batches: int = 1  # steps of a reducer of engine nvlink between two returns of credits
    # of engine twolevel only
    grid: Any = None  # a Grid
    network_ring: Any = None  # a NetworkRing
    turn: int = 0  # tokens of a reducer's turn


class Partials(NamedTuple):
    """Addresses of what a combine reads: rows, the result rows of each arrival row, weights of
    result rows, and weights of arrival rows that are summed too. 0: there is none."""

    rows: Any
    slots: Any
    weights: Any
    picks: Any


class Sums(NamedTuple):
    """Addresses of the terms that a combine adds to its sums, of the sums, and of summed weights.
    0: there is none."""

    bias0: Any
    bias1: Any
    rows: Any
    weights: Any


class Chunk(NamedTuple):
    """Rows ``begin`` .. ``begin + count - 1`` of a source. Row ``low`` is the one in slot 0 of the
    ring, row 0 is arrival row ``first``."""

    begin: Any
    count: Any
    low: Any
    first: Any


@triton.jit
def partial_rows(parts, a, here, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of the sums of the result rows of arrival rows ``a [B]``, rounded to
    the wire dtype. ``k``, also below: any struct with the fields that are read."""
    H: tl.constexpr = k.row.hidden
    J: tl.constexpr = k.slots_per_row
    rows = tl.multiple_of(parts.rows.to(tl.pointer_type(k.dtype)), 16)
    if k.by_expert:
        j = tl.arange(0, triton.next_power_of_2(J if J > 0 else 1))  # 0: a rank without experts
        at = words(parts.slots) + a.to(tl.int64)[:, None] * J + j[None, :]
        slot = tl.load(at, mask=here[:, None] & (j < J)[None, :], other=-1)
        if k.weighted:
            weight = tl.load(floats(parts.weights) + slot, mask=slot >= 0, other=0.0)
        total = tl.zeros((a.shape[0], w.shape[0]), tl.float32)
        for i in tl.static_range(J):  # unrolled, so that all rows are on their way at once
            one = (j == i)[None, :]
            row = tl.sum(tl.where(one, slot, 0), axis=1)
            mask = (row >= 0)[:, None] & (w < H)[None, :]
            v = tl.load(rows + row[:, None] * H + w[None, :], mask=mask, other=0.0).to(tl.float32)
            if k.weighted:
                v = v * tl.sum(tl.where(one, weight, 0.0), axis=1)[:, None]
            total = total + tl.where(mask, v, 0.0)
        return total.to(k.dtype)
    else:
        mask = here[:, None] & (w < H)[None, :]
        at = rows + a.to(tl.int64)[:, None] * H + w[None, :]
        return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def store_sums(sums, total, t, here, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of tokens ``t [B]``, those ``here``: ``total [B, BLOCK]`` (float32),
    then biases, rounded."""
    at = t.to(tl.int64)[:, None] * k.row.hidden + w[None, :]
    mask = here[:, None] & (w < k.row.hidden)[None, :]
    total = add_term(total, sums.bias0, k.bias0, at, mask)
    total = add_term(total, sums.bias1, k.bias1, at, mask)
    to = tl.multiple_of(sums.rows.to(tl.pointer_type(k.dtype)), 16)
    tl.store(to + at, total.to(k.dtype), mask=mask, cache_modifier=".cs")


@triton.jit
def send_sums_chunk(parts, ring, chunk, k: tl.constexpr):
    """Partial sums of a chunk of arrival rows into a ring. The caller publishes them."""
    H: tl.constexpr = k.row.hidden
    K: tl.constexpr = k.picks
    Q: tl.constexpr = k.ring.slots
    SLOT: tl.constexpr = k.row.slot_bytes
    BLOCK: tl.constexpr = k.tiles.block_sent
    b = tl.arange(0, k.tiles.rows_sent)
    for j in range(0, chunk.count, k.tiles.rows_sent):
        i, here = chunk.begin + j + b, j + b < chunk.count
        at = ring + ((i - chunk.low) % Q).to(tl.int64) * SLOT
        for k0 in range(0, H, BLOCK):
            w = k0 + tl.arange(0, BLOCK)
            v = partial_rows(parts, chunk.first + i, here, w, k)
            to = tl.multiple_of(ring.to(tl.pointer_type(k.dtype)), 16)
            slot = ((i - chunk.low) % Q).to(tl.int64)[:, None]
            to = to + slot * (SLOT * 8 // k.dtype.primitive_bitwidth)
            mask = here[:, None] & (w < H)[None, :]
            tl.store(to + w[None, :], v, mask=mask, cache_modifier=".cs")
        if K:
            pick = tl.arange(0, triton.next_power_of_2(K))
            mask = here[:, None] & (pick < K)[None, :]
            weights = floats(parts.picks) + (chunk.first + i).to(tl.int64)[:, None] * K
            v = tl.load(weights + pick[None, :], mask=mask)
            tl.store(floats(at + k.row.scales_at)[:, None] + pick[None, :], v, mask=mask)


@triton.jit
def send_sums(peers, plan, parts, source, channel, k: tl.constexpr):
    """Partial sums of this channel's rows from ``source``, into its ring (me, channel)."""
    begin = tl.load(in_bound(plan, source, channel, k))
    end = tl.load(in_bound(plan, source, channel + 1, k))
    first = tl.load(first_in(plan, source, k))
    mine, there = peer_base(peers.regions, peers.rank), peer_base(peers.regions, source)
    ring = there + k.ring.first_byte
    ring = ring + (peers.rank * k.channels + channel).to(tl.int64) * k.ring.num_bytes
    tail = tail_of(there, peers.rank, channel, k)
    sent = tl.load(sent_to(peers.state, source, channel, k))
    head = head_of(mine, source, channel, k)
    want = sent
    ok = wait_at_least(head, want, peers.state, ON_ROOM, source, channel) >= want
    for i in range(begin, end, k.ring.chunk):
        count = tl.minimum(k.ring.chunk, end - i)
        if ok:
            want = sent + (i - begin) + count - k.ring.slots
            ok = wait_at_least(head, want, peers.state, ON_ROOM, source, channel) >= want
        if ok:
            chunk = Chunk(begin=i, count=count, low=begin, first=first)
            send_sums_chunk(parts, ring, chunk, k)
            add_release(tail, count.to(tl.int64), None)
    tl.debug_barrier()
    tl.store(sent_to(peers.state, source, channel, k), sent + end - begin)


@triton.jit
def _add_rows(parts, sums, t, here, places, lows, mine, first, me, channel, k: tl.constexpr):
    """Store the sums of tokens ``t [B]``, of ``places [B, bins]`` among my rows to each rank.
    ``lows [bins]``: places whose rows stand in slot 0. ``mine``, ``first``: my region, and my first
    own arrival row."""
    r = tl.arange(0, k.rank_bins)
    hidden: tl.constexpr = k.row.hidden
    B: tl.constexpr = k.tiles.rows_summed
    BLOCK: tl.constexpr = k.tiles.block_summed
    RING: tl.constexpr = k.ring.num_bytes
    ROW: tl.constexpr = hidden * k.dtype.primitive_bitwidth // 8
    own = tl.sum(tl.where(r[None, :] == me, places, 0), axis=1)
    for k0 in tl.range(0, hidden, BLOCK, num_stages=k.stages):
        w = k0 + tl.arange(0, BLOCK)
        if k.by_expert:
            v_own = partial_rows(parts, first + own, own >= 0, w, k)
        total = tl.zeros((B, BLOCK), tl.float32)
        for d in tl.static_range(k.ranks):
            place = tl.sum(tl.where(r[None, :] == d, places, 0), axis=1)
            slot = (place - tl.sum(tl.where(r == d, lows, 0))) % k.ring.slots
            row = mine + k.ring.first_byte + (d * k.channels + channel).to(tl.int64) * RING
            row = row + slot.to(tl.int64) * k.row.slot_bytes
            got = place >= 0
            if k.by_expert:
                got = got & (d != me)
            else:  # this rank's own rows are taken where they are
                row = tl.where(d == me, parts.rows + (first + place).to(tl.int64) * ROW, row)
            v = load_rows(row, got, w, k)
            if k.by_expert:
                v = tl.where(d == me, v_own, v)
            total = total + v.to(tl.float32)
        store_sums(sums, total, t, here, w, k)


@triton.jit
def _add_weights(plan, parts, sums, t, here, num_tokens, mine, first, me, channel, k: tl.constexpr):
    """Store the sums of the weights of tokens ``t [B]``: see :func:`_add_rows`."""
    K: tl.constexpr = k.picks
    RING: tl.constexpr = k.ring.num_bytes
    pick = tl.arange(0, triton.next_power_of_2(K))
    weight = tl.zeros((k.tiles.rows_summed, triton.next_power_of_2(K)), tl.float32)
    for d in tl.static_range(k.ranks):
        places = place_of(plan, t, num_tokens, k)
        place = tl.load(places + d, mask=here, other=-1)
        mask = (place >= 0)[:, None] & (pick < K)[None, :]
        low = tl.load(out_bound(plan, d, channel, k))
        slot = (place - low) % k.ring.slots
        row = mine + k.ring.first_byte + (d * k.channels + channel).to(tl.int64) * RING
        row = row + slot.to(tl.int64) * k.row.slot_bytes + k.row.scales_at
        row = tl.where(d == me, parts.picks + (first + place).to(tl.int64) * (K * 4), row)
        weight += tl.load(floats(row)[:, None] + pick[None, :], mask=mask, other=0.0)
    to = floats(sums.weights) + t.to(tl.int64)[:, None] * K + pick[None, :]
    tl.store(to, weight, mask=here[:, None] & (pick < K)[None, :])


@triton.jit
def _reduce(peers, plan, parts, sums, num_tokens, channel, k: tl.constexpr):
    """Sum the rows of this channel's tokens, ``rows_summed`` tokens at a time, and return credits
    for ``batches`` times as many at a time.

    ``stages`` rounds of channels are under way at once, all of rows that have been waited for: that
    loop begins behind the wait and ends with all of them read.
    """
    B: tl.constexpr = k.tiles.rows_summed
    me = peers.rank
    r, b = tl.arange(0, k.rank_bins), tl.arange(0, B)
    remote = (r < k.ranks) & (r != me)
    share = (num_tokens + k.channels - 1) // k.channels
    t1 = tl.minimum(channel * share + share, num_tokens)
    mine = peer_base(peers.regions, me)
    bases_at = taken_from(peers.state, r, channel, k)
    bases = tl.load(bases_at, mask=remote, other=0)
    lows_at = out_bound(plan, r, channel, k)
    lows = tl.load(lows_at, mask=r < k.ranks, other=0)
    regions = tl.load(words(peers.regions) + r, mask=r < k.ranks, other=0)
    heads = head_of(regions, me, channel, k)
    first = tl.load(first_in(plan, me, k))
    taken, seen = tl.zeros((k.rank_bins,), tl.int64), tl.zeros((k.rank_bins,), tl.int64)
    freed = tl.zeros((k.rank_bins,), tl.int64)
    ok = True
    for t0 in range(channel * share, t1, B):
        t = t0 + b
        here = t < t1
        table = place_of(plan, t, num_tokens, k)[:, None] + r[None, :]
        places = tl.load(table, mask=here[:, None] & (r < k.ranks)[None, :], other=-1)
        upto = tl.maximum(tl.max(places - lows[None, :] + 1, axis=0).to(tl.int64), taken)
        upto = tl.where(remote, upto, 0)
        if ok & (tl.max((upto > seen).to(tl.int32)) > 0):
            tails = tail_of(mine, r, channel, k)
            number = channel + (r * 0)
            tails = wait_for_all(tails, bases + upto, remote, peers.state, ON_ROWS, number)
            ok = lacking(tails, bases + upto, remote) == 0
            seen = tails - bases
        if ok:
            _add_rows(parts, sums, t, here, places, lows, mine, first, me, channel, k)
            if k.picks:
                _add_weights(plan, parts, sums, t, here, num_tokens, mine, first, me, channel, k)
            taken = upto
            if (t0 + B >= t1) | ((t0 - channel * share) // B % k.batches == k.batches - 1):
                add_release(heads, taken - freed, remote & (taken > freed))
                freed = taken
    tl.debug_barrier()
    tl.store(bases_at, bases + taken, mask=remote)


@triton.jit(repr=shown_as("nvlink::combine"))
def combine_kernel(
    regions, state, plan, parts: Partials, sums: Sums, tag, num_tokens, k: tl.constexpr
):
    """See the module. ``k`` is a :class:`CombineConfig`; :func:`combine_rows` launches it."""
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    num_tokens = num_tokens.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    peers = Peers(regions=regions, state=state, rank=me)
    channel = pid % k.channels
    if (pid >= 0) & (pid < k.channels):
        _reduce(peers, plan, parts, sums, num_tokens, channel, k)
    elif (pid >= 0) & (pid < k.ranks * k.channels):
        send_sums(peers, plan, parts, (me + pid // k.channels) % k.ranks, channel, k)
    elif pid == k.ranks * k.channels:
        call_barrier(regions, state, tag, k)


# The host's side


MOST_BATCHES = 4
"""Steps of a reducer between two returns of credits."""


def types_of(bias: tuple[Any, ...]) -> tuple[Any, Any]:
    """Of up to two terms of these torch dtypes."""
    first, second, *_ = (*map(kernel_type, bias), None, None)
    return first, second


def tiles_of(hidden: int, send: Any, reduce: Any, chunk: int, most: int, *, placed: bool) -> Tiles:
    """Of senders and reducers (at most ``most`` rows) as the configs ``send`` and ``reduce`` say.

    With ``placed`` a row is the sum of several, all of which are loaded at once: one row, 16 bytes
    of it per lane.
    """
    whole = power_of_two_at_least(hidden)
    if placed:
        block = min(whole, 256 * reduce.num_warps)
        return Tiles(1, block, 1, block)
    sent, summed = min(whole, send.block), min(whole, reduce.block)
    return Tiles(send.rows_of(sent, chunk), sent, reduce.rows_of(summed, most), summed)


def bind_combine(
    workspace: Any, row_layout: Any, dtype: Any, slots_per_row: int, picks: int,
    bias: tuple[Any, ...], *, by_expert: bool, weighted: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature: see ``bind_dispatch``. Arguments: as in
    :class:`CombineConfig`, with torch dtypes."""
    tuning, ranks = workspace.tuning, workspace.memory.world_size
    send, reduce, slots = tuning.send, tuning.reduce, workspace.slots(row_layout)
    chunk, grid = send.chunk_of(slots), ranks * tuning.channels + 1
    tiles = tiles_of(row_layout.hidden, send, reduce, chunk, chunk, placed=by_expert)
    token_bytes = ranks * dtype.itemsize + sum(each.itemsize for each in bias)  # per channel
    shared = workspace.shared_bytes // -(-grid // tuning.writers)
    round_bytes = tiles.rows_summed * tiles.block_summed * token_bytes
    bias0, bias1 = types_of(bias)
    k = CombineConfig(
        ranks=ranks, plan_ranks=ranks, rank_bins=workspace.rank_bins, channels=tuning.channels,
        row=row_constants(row_layout),
        ring=RingLayout(workspace.rings_at, workspace.ring_bytes, slots, chunk),
        dtype=kernel_type(dtype), slots_per_row=slots_per_row, by_expert=by_expert,
        weighted=weighted, picks=picks, bias0=bias0, bias1=bias1, tiles=tiles,
        batches=max(1, min(MOST_BATCHES, (slots + 1 - chunk) // tiles.rows_summed)),
        stages=1 if by_expert else reduce.stages_for(round_bytes, shared),
    )  # fmt: skip
    return workspace.memory.bind(
        combine_kernel, grid, num_warps=reduce.num_warps, max_registers=reduce.max_registers, k=k
    )


def combine_rows(
    launch: Callable[..., None], workspace: Any, *, plan: int, parts: Partials, sums: Sums,
    tag: int, num_tokens: int,
) -> None:  # fmt: skip
    """Launch what :func:`bind_combine`, or that of engine twolevel, made."""
    stand_in(workspace, tag)
    launch(workspace.peers, workspace.state_at, plan, parts, sums, tag, num_tokens)
