# pyright: basic
"""Combine without rings: rows are pushed from where they lie to the receive buffer of their tokens'
owner, who adds them in rank order.

Grid ``pushers + reducers``, in this order. A pusher moves a chunk of arrival rows at a time to one
owner; those of one owner lie one behind the other, here and there. Where results are by expert, an
arrival row is the sum of its result rows, made on the way. Weights of picks that are summed too lie
in a part of the receive buffer of their own, one row of K behind the other. A reducer sums some
tokens x ``span`` channels at a time; rows for its own tokens it reads where they lie. Program 0 is
in the call barrier too. Example: 3 ranks, rank 2 sent 5 rows to rank 0 and 4 to rank 1; the third
of these, row ``first_in(2) + 2`` of rank 1's ``x``, comes back to row 5 + 2 of rank 2's receive
buffer.

Who publishes what, and who may read it when:

* A rank that has come to the call barrier has its stream in this call, so its reducers of earlier
  calls have read its receive buffer. A program waits until all ranks have come (acquire), and all
  name the same call, before it stores the first row to a peer. (So do reducers, else those of two
  ranks would report each other's pushers, which wait for a third rank.)
* A pusher stores a chunk, then raises ``landed[me, chunk]`` at the owner to the number of this call
  (release). A reducer waits until the chunks in which its rows lie show that number (acquire), then
  reads them. Nobody but ``me`` writes that word, once in a call.
* Every program adds 1 to ``LEFT`` (local) when it is done. The last one counts the call, so all may
  read its number at any time.

Why reuse is safe: the owner of a row has a token for it, whose reducer waits for its chunk. So when
the kernel of a rank ends, nobody stores to its receive buffer any more, before it comes to the
barrier again; rows that are sent are read by the rank's own programs only. Numbers of calls grow,
so a chunk of an earlier call, of more or of fewer rows, is never taken for one of this call; a new
buffer begins with zeros, an old one (that a CUDA graph knows) with smaller numbers. Rows begin
behind all flags, and weights behind as many rows as the buffer holds of a call's layout.

Nobody waits in a circle: all wait for the barrier, which program 0 enters before it waits, and then
only reducers for pushers, which come before them in the grid: these need no reducer to be resident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import all_in_call, announce_call, count_call
from tokenyard.kernels.combine import (
    Partials, Sums, partial_rows, result_rows, rounds_of, store_sums, types_of,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, copy_words, elements, kernel_type, load_rows
from tokenyard.kernels.place import floats
from tokenyard.kernels.region import (
    EPOCH, LEFT, in_bound, landed_of, out_bound, place_of, plan_word, receive_rows_at,
)  # fmt: skip
from tokenyard.kernels.structs import Peers, RowConstants, row_constants
from tokenyard.kernels.sync import (
    ON_RECEIVE_BUFFER, RANK, given_up, lacking, raise_release, wait_for_all, words,
)  # fmt: skip
from tokenyard.routing import power_of_two_at_least


class PushConfig(NamedTuple):
    """What is known of a combine without rings when its kernel is compiled. Numbers of programs are
    the same in all calls of an object."""

    ranks: int
    plan_ranks: int  # destinations that plans know: ranks, then nodes if plans know of any
    rank_bins: int  # a power of two, not less
    channels: int
    pushers: int  # programs
    reducers: int
    row: RowConstants
    chunk: int  # rows that a pusher copies at a time
    chunks: int  # of the most rows that one rank can send back to another
    copied: int  # words that a pusher has in flight
    tokens: int  # that a reducer sums at a time
    block: int  # channels of each in a round of loads
    span: int  # channels of each, in all rounds
    stages: int  # rounds that are under way at once
    dtype: Any  # of rows
    bias0: Any  # dtype of a term that is added to sums, None: none
    bias1: Any
    slots_per_row: int = 0  # result rows that one arrival row can have
    by_expert: bool = False  # rows are by expert: those of an arrival row are summed first
    weighted: bool = False  # and multiplied by weights before
    summed: int = 0  # channels of each row of a chunk in a round of loads, if by_expert
    rounds: int = 0  # that are under way at once
    few: int = 0  # sums are unrolled for so many result rows where no row of a round has more
    few_stages: int = 0  # the same as ``stages`` for these
    picks: int = 0  # weights per arrival row that are summed too; 0: none
    weights_at: int = 0  # bytes of a receive buffer before these


@triton.jit
def _are_few(each, k: tl.constexpr):
    """Whether no arrival row has more than ``k.few`` result rows."""
    if k.few:
        return tl.max(each.index[k.few], axis=0) < 0
    else:
        return False


@triton.jit
def _store_chunk(parts, each, to, here, J: tl.constexpr, block: tl.constexpr, k: tl.constexpr):
    """Store ``block`` channels at a time of the sums of the rows of a chunk, those ``here``, which
    have J result rows at most."""
    H: tl.constexpr = k.row.hidden
    for k0 in tl.range(0, H, block, num_stages=k.rounds):
        w = k0 + tl.arange(0, block)
        v = partial_rows(parts, each, J, here.shape[0], w, k)
        tl.store(to + w[None, :], v, mask=here[:, None] & (w < H)[None, :], cache_modifier=".cs")


@triton.jit
def _sum_chunk(parts, first, to, count, k: tl.constexpr):
    """Sums of the result rows of ``count`` arrival rows from ``first`` on, one behind the other.
    Channels that few result rows leave room for are summed too."""
    MORE: tl.constexpr = 2 * k.summed if k.summed < k.row.hidden else k.summed
    j = tl.arange(0, triton.next_power_of_2(k.chunk))
    here = j < count
    each = result_rows(parts, first + j, here, k)
    to = elements(to, k.dtype) + j.to(tl.int64)[:, None] * k.row.hidden
    if _are_few(each, k):
        _store_chunk(parts, each, to, here, k.few, MORE, k)
    else:
        _store_chunk(parts, each, to, here, k.slots_per_row, k.summed, k)


@triton.jit
def _push_rows(plan, receive_buffers, parts, me, call, k: tl.constexpr):
    """Every ``pushers``-th chunk, so that owners get theirs in order, and neighbours' to different
    owners. A pusher mostly stays with an owner, which is faster."""
    R: tl.constexpr = k.ranks
    CHUNK: tl.constexpr = k.chunk
    OTHERS: tl.constexpr = R - 1 if R > 1 else 1
    STAY: tl.constexpr = OTHERS - k.pushers % OTHERS
    r = tl.arange(0, k.rank_bins)
    others = (r < R) & (r != me)
    counts = tl.load(in_bound(plan, r, k.channels, k), mask=others, other=0)
    firsts = tl.load(plan_word(plan, "first_in", r, k), mask=others, other=0)
    backs = tl.load(plan_word(plan, "first_back", r, k), mask=others, other=0)
    bases = tl.load(words(receive_buffers) + r, mask=others, other=0)
    chunks = (tl.max(counts) + CHUNK - 1) // CHUNK
    for unit in range(tl.program_id(0), chunks * OTHERS, k.pushers):
        i = unit // OTHERS
        owner = (me + 1 + (unit + i * OTHERS // k.pushers * STAY) % OTHERS) % R
        count = tl.minimum(tl.sum(tl.where(r == owner, counts, 0)) - i * CHUNK, CHUNK)
        if count > 0:
            base = tl.sum(tl.where(r == owner, bases, 0))
            row = (tl.sum(tl.where(r == owner, firsts, 0)) + i * CHUNK).to(tl.int64)
            back = (tl.sum(tl.where(r == owner, backs, 0)) + i * CHUNK).to(tl.int64)
            to = as_words(base + receive_rows_at(R, k.chunks), k.row.word_bits) + back * k.row.words
            if k.by_expert:
                _sum_chunk(parts, row, to, count, k)
            else:
                source = as_words(parts.rows, k.row.word_bits) + row * k.row.words
                copy_words(source, to, 0, count * k.row.words, k.copied, 1)
            if k.picks:
                to = floats(base + k.weights_at) + back * k.picks
                copy_words(floats(parts.picks) + row * k.picks, to, 0, count * k.picks, k.copied, 1)
            raise_release(landed_of(base, me, i, k), call)


@triton.jit
def _places(plan, t, num_tokens, k: tl.constexpr):
    """Places of tokens ``t [B]`` among this rank's rows to each rank: ``[B, rank_bins]``, -1 where
    one does not go."""
    r = tl.arange(0, k.rank_bins)
    table = place_of(plan, t, num_tokens, k)[:, None] + r[None, :]
    mask = (t < num_tokens)[:, None] & (r < k.ranks)[None, :]
    return tl.load(table, mask=mask, other=-1)


@triton.jit
def _landed(state, receive_buffer, places, me, call, k: tl.constexpr):
    """Wait for the rows of other ranks at ``places [B, rank_bins]``, which are consecutive by rank:
    whether they have landed."""
    CHUNK: tl.constexpr = k.chunk
    EACH: tl.constexpr = triton.next_power_of_2((k.tokens + CHUNK - 2) // CHUNK + 1)
    r = tl.arange(0, k.rank_bins)
    far = (places >= 0) & (r != me)[None, :]
    low = tl.min(tl.where(far, places, 1 << 30), axis=0) // CHUNK
    high = tl.max(tl.where(far, places, -CHUNK), axis=0) // CHUNK
    chunk = low[:, None] + tl.arange(0, EACH)[None, :]
    needed = tl.reshape(chunk <= high[:, None], [k.rank_bins * EACH])
    flags = tl.reshape(landed_of(receive_buffer, r[:, None], chunk, k), [k.rank_bins * EACH])
    chunk = tl.reshape(chunk, [k.rank_bins * EACH])
    want = call + chunk * 0
    seen = wait_for_all(flags, want, needed, state, ON_RECEIVE_BUFFER, chunk, EACH=EACH)
    return lacking(seen, want, needed) == 0


@triton.jit
def _add_weights(sums, t, here, places, starts, k: tl.constexpr):
    """Store the sums of the weights of tokens ``t [B]``, of which those ``here``. ``starts
    [rank_bins]``: where weights of each rank's rows begin."""
    K: tl.constexpr = k.picks
    r, pick = tl.arange(0, k.rank_bins), tl.arange(0, triton.next_power_of_2(K))
    weight = tl.zeros((k.tokens, triton.next_power_of_2(K)), tl.float32)
    for d in tl.static_range(k.ranks):
        place = tl.sum(tl.where((r == d)[None, :], places, 0), axis=1)
        row = tl.sum(tl.where(r == d, starts, 0)) + place.to(tl.int64) * (K * 4)
        mask = (place >= 0)[:, None] & (pick < K)[None, :]
        weight += tl.load(floats(row)[:, None] + pick[None, :], mask=mask, other=0.0)
    to = floats(sums.weights) + t.to(tl.int64)[:, None] * K + pick[None, :]
    tl.store(to, weight, mask=here[:, None] & (pick < K)[None, :])


@triton.jit
def _add_span(
    parts, sums, each, J: tl.constexpr, stages: tl.constexpr, t, here, places, starts, me, begin,
    k: tl.constexpr,
):  # fmt: skip
    """See :func:`_add_rows`. ``each``: the result rows of my own arrival rows, J at most, if rows
    are by expert."""
    ROW: tl.constexpr = k.row.hidden * k.dtype.primitive_bitwidth // 8
    r = tl.arange(0, k.rank_bins)
    end = tl.minimum(begin + k.span, k.row.hidden)
    for k0 in tl.range(begin, end, k.block, num_stages=stages):
        w = k0 + tl.arange(0, k.block)
        if k.by_expert:
            v_own = partial_rows(parts, each, J, k.tokens, w, k)
        total = tl.zeros((k.tokens, k.block), tl.float32)
        for d in tl.static_range(k.ranks):
            place = tl.sum(tl.where((r == d)[None, :], places, 0), axis=1)
            row = tl.sum(tl.where(r == d, starts, 0)) + place.to(tl.int64) * ROW
            if k.by_expert:
                v = load_rows(row, (place >= 0) & (d != me), w, k)
                v = tl.where(d == me, v_own, v)
            else:
                v = load_rows(row, place >= 0, w, k)
            total = total + v.to(tl.float32)
        store_sums(sums, total, t, here, w, k)


@triton.jit
def _add_rows(parts, sums, t, here, places, starts, first, me, begin, k: tl.constexpr):
    """Store ``span`` channels from ``begin`` on of the sums of tokens ``t [B]``, of which those
    ``here``. ``starts [rank_bins]``: where rows of each rank begin; ``first``: my first own arrival
    row."""
    if k.by_expert:
        r = tl.arange(0, k.rank_bins)
        own = tl.sum(tl.where((r == me)[None, :], places, 0), axis=1)
        each = result_rows(parts, first + own, own >= 0, k)
        J: tl.constexpr = k.slots_per_row
        if _are_few(each, k):
            _add_span(parts, sums, each, k.few, k.few_stages, t, here, places, starts, me, begin, k)
        else:
            _add_span(parts, sums, each, J, k.stages, t, here, places, starts, me, begin, k)
    else:
        _add_span(parts, sums, 0, 0, k.stages, t, here, places, starts, me, begin, k)


@triton.jit
def _sum_rows(peers, plan, receive_buffer, parts, sums, num_tokens, call, k: tl.constexpr):
    """Every ``reducers``-th piece of tokens x ``span`` channels, as rows land in the order of
    tokens; of ``block`` channels in each of ``stages`` rounds. Places are loaded one piece ahead,
    so that neither flags nor rows need to wait for them."""
    ROW: tl.constexpr = k.row.hidden * k.dtype.primitive_bitwidth // 8
    PARTS: tl.constexpr = (k.row.hidden + k.span - 1) // k.span
    me = peers.rank
    r, b = tl.arange(0, k.rank_bins), tl.arange(0, k.tokens)
    sent = tl.load(out_bound(plan, r, k.channels, k), mask=(r < k.ranks) & (r != me), other=0)
    backs = (tl.cumsum(sent, 0) - sent).to(tl.int64)
    starts = receive_buffer + receive_rows_at(k.ranks, k.chunks) + backs * ROW
    first_own = tl.load(plan_word(plan, "first_in", me, k))
    starts = tl.where(r == me, parts.rows + first_own.to(tl.int64) * ROW, starts)
    pieces = (num_tokens + k.tokens - 1) // k.tokens * PARTS
    first = tl.program_id(0) - k.pushers
    places = _places(plan, first // PARTS * k.tokens + b, num_tokens, k)
    ok = True
    for i in range(first, pieces, k.reducers):
        t, begin = i // PARTS * k.tokens + b, i % PARTS * k.span
        if ok:
            ok = _landed(peers.state, receive_buffer, places, me, call, k)
        if ok:
            here = t < num_tokens
            _add_rows(parts, sums, t, here, places, starts, first_own, me, begin, k)
            if k.picks:
                if begin == 0:
                    at = receive_buffer + k.weights_at + backs * (k.picks * 4)
                    own = parts.picks + first_own.to(tl.int64) * (k.picks * 4)
                    at = tl.where(r == me, own, at)
                    _add_weights(sums, t, here, places, at, k)
        places = _places(plan, (i + k.reducers) // PARTS * k.tokens + b, num_tokens, k)


@triton.jit
def _leave(state, programs: tl.constexpr):
    """The last of ``programs`` to come here counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(words(state) + LEFT, 1, sem="acq_rel", scope="gpu") % programs == programs - 1:
        count_call(state)


@triton.jit(repr=shown_as("nvlink::combine_push"))
def push_kernel(
    regions, state, plan, receive_buffers, parts: Partials, sums: Sums, tag, num_tokens,
    k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`PushConfig`; :func:`bind_push` makes the launch.
    ``receive_buffers``: the table of receive buffers."""
    pid = tl.program_id(0)
    num_tokens = num_tokens.to(tl.int32)
    if not given_up(state):
        me = tl.load(words(state) + RANK).to(tl.int32)
        call = tl.load(words(state) + EPOCH) + 1
        if pid == 0:
            announce_call(regions, state, tag, k)
        if all_in_call(regions, state, tag, k):
            if pid < k.pushers:
                _push_rows(plan, receive_buffers, parts, me, call, k)
            else:
                receive_buffer = tl.load(words(receive_buffers) + me)
                peers = Peers(regions=regions, state=state, rank=me)
                _sum_rows(peers, plan, receive_buffer, parts, sums, num_tokens, call, k)
        _leave(state, k.pushers + k.reducers)


# The host's side


MOST_GATHERED = 16
"""Tokens that a program sums at once, however short their rows are."""


def chunks_of(workspace: Any) -> int:
    """Chunks of the most rows that one rank can send back to another."""
    return -(-workspace.config.max_tokens_per_rank // workspace.tuning.push.chunk)


def bind_push(
    workspace: Any, row_layout: Any, dtype: Any, slots_per_row: int, picks: int,
    bias: tuple[Any, ...], *, by_expert: bool, weighted: bool, weights_at: int,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature: see ``bind_two_combine``.
    ``weights_at``: see :class:`PushConfig`."""
    tuning, push, gather = workspace.tuning, workspace.tuning.push, workspace.tuning.gather
    ranks, whole = workspace.memory.world_size, power_of_two_at_least(row_layout.hidden)
    grid, block = tuning.pushers + tuning.gatherers, min(whole, gather.block)
    token_bytes = ranks * dtype.itemsize + sum(each.itemsize for each in bias)  # per channel
    shared = workspace.shared_bytes // -(-grid // tuning.num_sms)
    tokens, stages = gather.staged(
        gather.rows_of(block, MOST_GATHERED), block * token_bytes, shared
    )
    few, few_stages, summed, rounds = slots_per_row // 2 if by_expert else 0, 0, 0, 0
    if by_expert:
        rows, item = power_of_two_at_least(push.chunk), dtype.itemsize
        summed, rounds = rounds_of(push, whole, rows, item, slots_per_row * item, shared)
        few_bytes, most_bytes = (token_bytes + count * item for count in (few, slots_per_row))
        block, few_stages = rounds_of(gather, whole, tokens, item, few_bytes, shared)
        block, stages = rounds_of(gather, whole, tokens, item, most_bytes, shared)
    bias0, bias1 = types_of(bias)
    k = PushConfig(
        ranks=ranks, plan_ranks=workspace.plan_ranks, rank_bins=workspace.rank_bins,
        channels=tuning.channels, pushers=tuning.pushers, reducers=tuning.gatherers,
        row=row_constants(row_layout), chunk=push.chunk, chunks=chunks_of(workspace),
        copied=min(power_of_two_at_least(push.chunk * row_layout.words), push.rows * push.block),
        tokens=tokens, block=block, span=whole if by_expert or gather.stages > 1 else block,
        stages=stages, dtype=kernel_type(dtype), bias0=bias0, bias1=bias1,
        slots_per_row=slots_per_row if by_expert else 0, by_expert=by_expert, weighted=weighted,
        summed=summed, rounds=rounds, few=few, few_stages=few_stages, picks=picks,
        weights_at=weights_at if picks else 0,
    )  # fmt: skip
    return workspace.bind(push_kernel, grid, gather, k)
