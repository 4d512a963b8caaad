# pyright: basic
"""Engine collective, what leaves this rank: one launch from picks to headers and places, one that
packs rows. NCCL moves both.

Example: 2 ranks, 4 experts, picks ``[[0, 3], [1, 1], [2, -1]]``: rank 0 gets tokens 0 and 1, rank 1
tokens 0 and 2. So ``route = [0, 1, 0, 2]`` (the token of each row sent), ``returns = [[0, 2], [1,
-1], [-1, 3]]`` (the rows of each token, by rank), and the headers announce 2 rows each. With room
for 3 tokens per rank (static shapes) ``route = [0, 1, -1, 0, 2, -1]``, ``returns = [[0, 3], [1,
-1], [-1, 4]]``.

Programs of the plan count a share of the tokens each, as those of ``kernels/plan.py``. Nobody
waits: the last to come, as ``tickets`` tell, adds the counts up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.exchange import experts_before, said_of
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import (
    as_words, cast, copy_row_to, elements, load_groups, rows_at, store_cast,
)  # fmt: skip
from tokenyard.kernels.plan import (
    MOST_COMPARED, MOST_MERGED, Picks, PlanConfig, PlanOutputs, count_channel,
)  # fmt: skip
from tokenyard.kernels.region import (
    CALL_AT, COUNTS_AT, ROWS_AT, first_expert, ints, out_bound, place_of, plan_word, plan_words,
)  # fmt: skip
from tokenyard.kernels.structs import Cast, Grid, Payload, Routing, RowConstants, Rows
from tokenyard.kernels.sync import words
from tokenyard.routing import power_of_two_at_least

CHANNELS, FEW_CHANNELS = 64, 8
"""Programs of a plan, and those for few tokens."""
MOST_COLUMNS = tl.constexpr(32)
STATE_WORDS = 16
"""int64 words that one object's launches keep: the tickets of plans and of arrivals, and, as
``kernels/exchange.py`` has them, the first pick out of range of calls without headers."""
PLANS, ARRIVALS = tl.constexpr(0), tl.constexpr(1)


class PackConfig(NamedTuple):
    """What is known of packing when its kernel is compiled."""

    plan_ranks: int  # ranks
    rank_bins: int  # a power of two, not less
    channels: int  # of the plan
    width: int  # most ranks that a token goes to
    width_bins: int
    row: RowConstants  # on the wire
    cast: Cast
    block: int  # words of a row at once
    fresh: bool  # places come from a plan's launch, and metadata goes with rows
    picks: int  # of a token, in its metadata


@triton.jit
def is_last(state, counter: tl.constexpr, programs: tl.constexpr):
    """Whether all other programs of this launch have come here: then it may read what they stored.
    Counters are never reset: each launch adds as many as it has programs."""
    tl.debug_barrier()
    ticket = tl.atomic_add(words(state) + counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return ticket % programs == programs - 1


@triton.jit
def _place_channels(hist, plan, stride, told, k: tl.constexpr):
    """The last program: where rows of each channel begin among those to each rank, where those of
    each rank begin (``stride`` rows apart, if given), and totals, for the host too."""
    C: tl.constexpr = k.channels
    COLUMNS: tl.constexpr = k.rank_bins if k.rank_bins < MOST_COLUMNS else MOST_COLUMNS
    c = tl.arange(0, k.channel_bins)
    before = tl.full((), 0, tl.int32)
    for r0 in range(0, k.ranks, COLUMNS):
        r = r0 + tl.arange(0, COLUMNS)
        known = r < k.ranks
        mask = (c < C)[:, None] & known[None, :]
        rows = tl.load(hist + c[:, None] * k.columns + r[None, :], mask=mask, other=0)
        begins = tl.cumsum(rows, 0) - rows
        tl.store(out_bound(plan, r[None, :], c[:, None], k), begins, mask=mask)
        totals = tl.sum(rows, axis=0)
        tl.store(out_bound(plan, r, C, k), totals, mask=known)
        tl.store(hist + C * k.columns + r, totals, mask=known)
        first = tl.where(stride > 0, r * stride, before + tl.cumsum(totals, 0) - totals)
        tl.store(plan_word(plan, "first_out", r, k), first, mask=known)
        if told != 0:
            tl.store(words(told) + r, totals.to(tl.int64), mask=known)
        before += tl.sum(totals)


@triton.jit
def _write_headers(headers, said, totals, num_experts, k: tl.constexpr):
    """One header for each rank, of ``header_words``: ``said`` to all, and how many rows."""
    R: tl.constexpr = k.ranks
    W: tl.constexpr = k.header_words
    AT_ONCE: tl.constexpr = k.rank_bins if k.rank_bins < 4 else 4
    w = tl.arange(0, k.header_bins)
    most_local = (num_experts + R - 1) // R
    rank = w - COUNTS_AT - most_local  # of the wire's matrix, if it has one
    row = tl.load(totals + rank, mask=(rank >= 0) & (w < W), other=0).to(tl.int64)
    for d0 in range(0, R, AT_ONCE):
        d = d0 + tl.arange(0, AT_ONCE)
        there = (d < R)[:, None]
        rows = tl.load(totals + d, mask=d < R, other=0).to(tl.int64)
        v = tl.where(w[None, :] == ROWS_AT, rows[:, None], said[None, :])
        v = tl.where((rank >= 0)[None, :], row[None, :], v)
        expert = first_expert(d, num_experts, R)[:, None] + w[None, :] - COUNTS_AT
        held = (w >= COUNTS_AT)[None, :] & (rank < 0)[None, :] & there
        mine = held & (expert < first_expert(d + 1, num_experts, R)[:, None])
        counts = tl.load(totals + k.rank_bins + expert, mask=mine, other=0).to(tl.int64)
        v = tl.where(held, counts, v)
        to = words(headers) + d.to(tl.int64)[:, None] * W + w[None, :]
        tl.store(to, v, mask=there & (w < W)[None, :])


@triton.jit(repr=shown_as("collective::plan"))
def collective_plan_kernel(
    picks: Picks, said_at, state, scratch, plan, outputs: PlanOutputs, headers, told, call,
    num_tokens, num_experts, stride, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`PlanConfig`; :func:`bind_plan` launches it. ``scratch``:
    int32 ``hist [channels + 1, columns]``, then int64 ``marks [channels, 2]``. ``said_at``: words
    of a header of any call, up to its rows. ``headers``: 0 if there are none; then ``said_at`` and
    ``told`` are 0 too."""
    C: tl.constexpr = k.channels
    c = tl.program_id(0)
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    stride = stride.to(tl.int32)
    hist = ints(scratch)
    marks = words(scratch + (C + 1) * k.columns * 4)
    none = num_tokens * 0
    routing = Routing(plan, none, num_tokens, num_experts, none)
    share = (num_tokens + C - 1) // C
    t0 = c * share
    t1 = tl.minimum(t0 + share, num_tokens)
    count_channel(picks, outputs, routing, hist + c * k.columns, marks, c, t0, t1, k)
    if is_last(state, PLANS, C):
        _place_channels(hist, plan, stride, told, k)
        totals = hist + C * k.columns
        experts_before(hist, totals + k.rank_bins, C, num_experts, k)
        tl.debug_barrier()
        w = tl.arange(0, k.header_bins)
        said = tl.load(words(said_at) + w, mask=(w < ROWS_AT) & (said_at != 0), other=0)
        said = tl.where(w == CALL_AT, call, said)
        said = said_of(picks, marks, said, words(state), num_tokens, k)
        if headers != 0:
            _write_headers(headers, said, totals, num_experts, k)


@triton.jit
def _places(plan, route, returns, t, share, num_tokens, k: tl.constexpr):
    """Rows of token ``t``, by rank, ``[width_bins]``, those there are first if ranks are more than
    that; stores what the handle keeps of them."""
    r, j = tl.arange(0, k.rank_bins), tl.arange(0, k.width_bins)
    known = r < k.plan_ranks
    place = tl.load(place_of(plan, t, num_tokens, k) + r, mask=known, other=-1)
    goes = place >= 0
    place += tl.load(out_bound(plan, r, t // share, k), mask=goes, other=0)
    place += tl.load(plan_word(plan, "first_out", r, k), mask=goes, other=0)
    nth = r if k.width == k.plan_ranks else tl.cumsum(goes.to(tl.int32), 0) - 1
    one = goes[:, None] & (nth[:, None] == j[None, :])
    to = tl.sum(tl.where(one, place[:, None] + 1, 0), axis=0) - 1
    tl.store(words(route) + place, t.to(tl.int64) + (r * 0), mask=goes)
    at = words(returns) + t.to(tl.int64) * k.width + j
    tl.store(at, to.to(tl.int64), mask=j < k.width)
    return to


@triton.jit
def _pack_row(payload, t, send, to, k: tl.constexpr):
    """Token ``t`` to the rows ``to [width_bins]`` of ``send``; -1 is none."""
    row: tl.constexpr = k.row
    SLOT: tl.constexpr = k.row.slot_bytes
    if k.cast.mode:
        g, j = tl.arange(0, k.cast.groups), tl.arange(0, k.width_bins)
        source = elements(payload.rows, k.cast.dtype)
        floats = load_groups(source, t + g * 0, g, g >= 0, row.hidden, k.cast)
        values, scale = cast(floats, g, row.hidden, k.cast)
        for i in tl.static_range(k.width_bins):
            place = tl.sum(tl.where(j == i, to, 0))
            store_cast(
                values, scale, send, SLOT, send + row.scales_at, SLOT, place + g * 0, g,
                (place + g * 0) >= 0, row.hidden, k.cast, row.scale_words,
            )  # fmt: skip
    else:
        x = rows_at(payload.rows, row.word_bits, t, row.words)
        slots = rows_at(send, row.word_bits, to, SLOT * 8 // row.word_bits)
        copy_row_to(x, slots, to >= 0, row.words, k.block)
        if row.scale_words:
            scales = rows_at(payload.scales, 32, t, row.scale_words)
            slots = rows_at(send + row.scales_at, 32, to, SLOT // 4)
            copy_row_to(scales, slots, to >= 0, row.scale_words)
    if row.metadata_words:
        metadata = Rows(words=ints(payload.metadata), index=t, stride=row.metadata_words)
        slots = rows_at(send + row.metadata_at, 32, to, SLOT // 4)
        copy_row_to(metadata, slots, to >= 0, row.metadata_words)


@triton.jit
def _vacate(plan, send, route, stride, k: tl.constexpr):
    """Rows of static shapes that no token takes are nobody's: token and ids -1, weights 0."""
    w = tl.arange(0, triton.next_power_of_2(k.row.metadata_words))
    i = tl.arange(0, 16)
    fill = tl.where(w <= k.picks, -1, 0)
    for s0 in range(tl.program_id(0) * 16, k.plan_ranks * stride, tl.num_programs(0) * 16):
        s = s0 + i
        rank = s // stride
        inside = s < k.plan_ranks * stride
        used = tl.load(out_bound(plan, rank, k.channels, k), mask=inside, other=0)
        vacant = inside & (s - rank * stride >= used)
        tl.store(words(route) + s, (s * 0 - 1).to(tl.int64), mask=vacant)
        to = as_words(send + k.row.metadata_at, 32)
        to = to + s.to(tl.int64)[:, None] * (k.row.slot_bytes // 4) + w[None, :]
        mask = vacant[:, None] & (w < k.row.metadata_words)[None, :]
        tl.store(to, fill[None, :] + (i * 0)[:, None], mask=mask)


@triton.jit(repr=shown_as("collective::pack"))
def collective_pack_kernel(
    payload: Payload, plan, route, returns, send, num_tokens, stride, k: tl.constexpr
):
    """Each token into its rows of ``send``, of ``stride`` rows for each rank if given. ``k`` is a
    :class:`PackConfig`; :func:`bind_pack` launches it."""
    num_tokens, stride = num_tokens.to(tl.int32), stride.to(tl.int32)
    share = tl.maximum((num_tokens + k.channels - 1) // k.channels, 1)
    j = tl.arange(0, k.width_bins)
    for t in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        if k.fresh:
            to = _places(plan, route, returns, t, share, num_tokens, k)
        else:
            at = words(returns) + t.to(tl.int64) * k.width + j
            to = tl.load(at, mask=j < k.width, other=-1).to(tl.int32)
        _pack_row(payload, t, send, to, k)
    if k.fresh:
        if stride > 0:
            _vacate(plan, send, route, stride, k)


# The host's side


def plan_config(
    config: Any, header_words: int, *, few: bool, weighted: bool, wide: bool, exact: bool
) -> PlanConfig:
    """Of a ``Config``, for calls of ``few`` tokens or more. ``wide``: ids are int64."""
    bins, ranks, topk = power_of_two_at_least, config.world_size, config.num_topk
    channels = FEW_CHANNELS if few else CHANNELS
    rank_bins, top, experts = bins(max(ranks, 2)), bins(topk), bins(max(config.num_experts, 2))
    compared = MOST_COMPARED // (top * max(top, rank_bins))
    return PlanConfig(
        ranks=ranks, plan_ranks=ranks, rank_bins=rank_bins, channels=channels,
        channel_bins=channels, topk=topk, topk_bins=top, expert_bins=experts,
        local_bins=bins(config.most_local_experts), columns=rank_bins + experts,
        header_words=header_words, header_bins=bins(header_words),
        metadata_words=1 + topk * (1 + weighted),
        tokens=max(1, min(32, compared, MOST_MERGED // top)), wide=wide, weighted=weighted,
        by_expert=False, padded=False, exact=exact, grid=Grid(1, ranks, 0, 0, 0, False, False, 0),
    )  # fmt: skip


def scratch_words(k: PlanConfig) -> int:
    """int32 words of the scratch memory of a plan; an even number, as columns are."""
    return (k.channels + 1) * k.columns + 4 * k.channels


def table_words(k: PlanConfig, num_tokens: int) -> int:
    """int32 words of a plan's tables."""
    return plan_words(k.ranks, k.channels, num_tokens, 0)


def bind_plan(bind: Callable[..., Any], k: PlanConfig) -> Callable[..., None]:
    """The plan's launch; arguments: those of the kernel. ``bind``: as ``Kernels.bind``."""
    return bind(collective_plan_kernel, k.channels, 8, None, {"k": k})


def bind_pack(
    bind: Callable[..., Any], programs: int, k: PlanConfig, row: RowConstants, how: Cast,
    width: int, *, fresh: bool,
) -> Callable[..., None]:  # fmt: skip
    """The launch that packs, of ``programs``: see :func:`bind_plan`."""
    config = PackConfig(
        plan_ranks=k.ranks, rank_bins=k.rank_bins, channels=k.channels, width=width,
        width_bins=power_of_two_at_least(width), row=row, cast=how,
        block=min(power_of_two_at_least(row.words), 4096), fresh=fresh, picks=k.topk,
    )  # fmt: skip
    return bind(collective_pack_kernel, programs, 8, None, {"k": config})
