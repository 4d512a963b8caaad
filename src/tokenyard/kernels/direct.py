# pyright: basic
"""Dispatch in place: every row is written once, where it stays, in the destination's in-place
buffer.

That buffer is symmetric memory for a whole batch, ``[rows | scales | metadata]`` from three
offsets. Its metadata is read by :func:`unpack_kernel` afterwards, in stream order.

Grid ``writers``: each program reads its tokens once and writes them to all their ranks; program 0
is in the call barrier too. Example: 2 ranks, token 3 of rank 1 goes to both at places 0 and 2, rank
1's rows begin at 5 and 4: the row is written to row 5 of rank 0's buffer and row 6 of its own.

Who publishes what, and who may read it when:

* A rank that has come to the call barrier has its stream in this call, so whatever read its buffer
  before is done. A writer waits until all ranks have come (acquire), and all name the same call,
  before it writes the first row.
* A writer stores its rows, then adds 1 to ``dones[me]`` at every rank (release). Program 0 waits
  until all writers of every rank have done so in this call and all earlier ones (acquire). The
  kernel ends after it, so later kernels may read the buffer.

Program 0 counts the call when all writers of this rank are done, so they may read its number at any
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import all_in_call, announce_call, count_call
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import (
    as_words, cast, cast_of, load_groups, of_each, rows_sent, store_cast,
)  # fmt: skip
from tokenyard.kernels.place import Placing, experts_of, placing_of, unpack_flat
from tokenyard.kernels.region import (
    DIRECT_CALLS,
    done_of,
    first_in,
    first_out,
    in_bound,
    peer_base,
    place_of,
)
from tokenyard.kernels.stand_in import stand_in
from tokenyard.kernels.structs import (
    Batch,
    Cast,
    Payload,
    Result,
    Routing,
    RowConstants,
    Strides,
    row_constants,
    strides_in_memory,
)
from tokenyard.kernels.sync import ON_END, RANK, add_release, given_up, wait_for_all, words
from tokenyard.routing import power_of_two_at_least


class DirectConfig(NamedTuple):
    """What is known of a dispatch in place when its kernel is compiled."""

    ranks: int
    plan_ranks: int  # the same
    rank_bins: int  # the next power of two
    channels: int
    row: RowConstants
    in_memory: Strides  # of the payload that is sent
    cast: Cast
    rows_sent: int  # tokens in flight
    block: int  # words of each row in flight
    writers: int = 0  # programs of engine nvlink
    # of engine twolevel only
    in_slot: Any = None  # Strides of rows in a network ring
    grid: Any = None  # a Grid
    network_ring: Any = None  # a NetworkRing
    placing: Any = None  # a Placing
    rows_forwarded: int = 0  # rows in flight of a forwarder


class UnpackConfig(NamedTuple):
    """What is known of the unpacking of metadata when its kernel is compiled."""

    ranks: int
    plan_ranks: int  # destinations that plans know: ranks, then nodes if there are several
    channels: int
    placing: Placing
    metadata_words: int
    rows: int  # in flight


class Buffers(NamedTuple):
    """In-place buffers of several ranks, ``[bins]``: their addresses; and the bytes in each before
    scales and metadata."""

    rows: Any
    scales_at: Any
    metadata_at: Any


@triton.jit
def _load_words(
    source, index, here, w, stride: tl.constexpr, num_words: tl.constexpr, bits: tl.constexpr
):
    """Words ``w [block]`` of each row ``index [B]``."""
    mask = here[:, None] & (w < num_words)[None, :]
    rows = as_words(source, bits) + index.to(tl.int64)[:, None] * stride
    return tl.load(rows + w[None, :], mask=mask, cache_modifier=".cg")


@triton.jit
def _store_words(
    v, rows, w, parts, first, num_words: tl.constexpr, bits: tl.constexpr, count: tl.constexpr
):
    """Store words ``w [block]`` of each token to its ``rows [B, bins]`` (-1: none) behind the
    addresses ``parts [bins]``.

    ``count`` of the bins are ranks. Rank ``first`` comes first: if all began with the same, all
    would store to it at once, and its links be too narrow.
    """
    r = tl.arange(0, rows.shape[1])
    for i in tl.static_range(count):
        d = (first + i) % count
        row = tl.sum(tl.where((r == d)[None, :], rows, 0), axis=1)
        to = (
            as_words(tl.sum(tl.where(r == d, parts, 0)), bits)
            + row.to(tl.int64)[:, None] * num_words
            + w[None, :]
        )
        tl.store(to, v, mask=(row >= 0)[:, None] & (w < num_words)[None, :], cache_modifier=".cs")


@triton.jit
def _store_cast(
    values, scale, g, rows, buffers, first, count: tl.constexpr, row: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """The same for tokens that were cast, groups ``g [B * groups]``, with their scales."""
    r = tl.arange(0, rows.shape[1])
    for i in tl.static_range(count):
        d = (first + i) % count
        at = of_each(
            tl.sum(tl.where((r == d)[None, :], rows, 0), axis=1), rows.shape[0], how.groups
        )
        base = tl.sum(tl.where(r == d, buffers.rows, 0))
        store_cast(
            values, scale, base, row.hidden, base + buffers.scales_at, row.scale_words * 4, at, g,
            at >= 0, row.hidden, how, row.scale_words,
        )  # fmt: skip


@triton.jit
def write_rows(
    payload, index, here, rows, buffers, first, strides: tl.constexpr, count: tl.constexpr,
    casts: tl.constexpr, k: tl.constexpr,
):  # fmt: skip
    """Write each row ``index [B]`` of ``payload`` to its ``rows [B, bins]`` of the ``buffers``. All
    of it is read once.

    Args:
        strides: of the payload.
        count: of ranks among the bins; ``first`` of them comes first.
        casts: rows are cast on the way, as ``k.cast`` says.
    """
    row: tl.constexpr = k.row
    num_rows: tl.constexpr = here.shape[0]
    S: tl.constexpr = row.scale_words
    M: tl.constexpr = row.metadata_words
    scale_bins: tl.constexpr = triton.next_power_of_2(S if S > 0 else 1)
    metadata_bins: tl.constexpr = triton.next_power_of_2(M if M > 0 else 1)
    if M:
        metadata = _load_words(
            payload.metadata, index, here, tl.arange(0, metadata_bins), strides.metadata, M, 32
        )
    if casts:
        groups: tl.constexpr = k.cast.groups
        g = tl.arange(0, num_rows * groups) % groups
        floats = tl.multiple_of(payload.rows.to(tl.pointer_type(k.cast.dtype)), 16)
        index, here = of_each(index, num_rows, groups), of_each(here, num_rows, groups)
        values, scale = cast(
            load_groups(floats, index, g, here, row.hidden, k.cast), g, row.hidden, k.cast
        )
        _store_cast(values, scale, g, rows, buffers, first, count, row, k.cast)
    else:
        if S:
            scales = _load_words(
                payload.scales, index, here, tl.arange(0, scale_bins), strides.scales, S, 32
            )
        for k0 in range(0, row.words, k.block):
            w = k0 + tl.arange(0, k.block)
            v = _load_words(payload.rows, index, here, w, strides.payload, row.words, row.word_bits)
            _store_words(v, rows, w, buffers.rows, first, row.words, row.word_bits, count)
        if S:
            at = tl.arange(0, scale_bins)
            _store_words(scales, rows, at, buffers.rows + buffers.scales_at, first, S, 32, count)
    if M:
        at = tl.arange(0, metadata_bins)
        _store_words(metadata, rows, at, buffers.rows + buffers.metadata_at, first, M, 32, count)


@triton.jit(repr=shown_as("nvlink::dispatch_direct"))
def direct_kernel(
    regions, state, plan, buffers, payload: Payload, tag, num_tokens, scales_at, metadata_at,
    k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`DirectConfig`; ``buffers`` the table of in-place buffers.

    Rows begin at 0 of a buffer, scales and metadata at ``scales_at`` and ``metadata_at`` bytes.
    """
    pid = tl.program_id(0)
    num_tokens = num_tokens.to(tl.int32)
    r = tl.arange(0, k.rank_bins)
    if not given_up(state):
        me = tl.load(words(state) + RANK).to(tl.int32)
        calls = tl.load(words(state) + DIRECT_CALLS)
        mine = peer_base(regions, me)
        if pid == 0:
            announce_call(regions, state, tag, k)
        firsts = tl.load(first_out(plan, r, k), mask=r < k.ranks, other=0)
        parts = tl.load(words(buffers) + r, mask=r < k.ranks, other=0)
        bases = tl.load(words(regions) + r, mask=r < k.ranks, other=0)
        targets = Buffers(rows=parts, scales_at=scales_at, metadata_at=metadata_at)
        if all_in_call(regions, state, tag, k):
            for t0 in range(pid * k.rows_sent, num_tokens, k.writers * k.rows_sent):
                t = t0 + tl.arange(0, k.rows_sent)
                here = t < num_tokens
                table = place_of(plan, t, num_tokens, k)[:, None] + r[None, :]
                places = tl.load(table, mask=here[:, None] & (r < k.ranks)[None, :], other=-1)
                rows = tl.where(places >= 0, places + firsts[None, :], -1)
                write_rows(
                    payload, t, here, rows, targets, me + 1 + pid, k.in_memory, k.ranks,
                    k.cast.mode > 0, k,
                )  # fmt: skip
            dones = done_of(bases, me, k)
            one = tl.full((k.rank_bins,), 1, tl.int64)
            add_release(dones, one, r < k.ranks)
        if pid == 0:
            dones, want = done_of(mine, r, k), (calls + 1) * k.writers + (r * 0)
            wait_for_all(dones, want, r < k.ranks, state, ON_END, r, MORE=False)
            count_call(state)
            tl.store(words(state) + DIRECT_CALLS, calls + 1)


@triton.jit(repr=shown_as("nvlink::unpack"))
def unpack_kernel(
    state, plan, metadata, expert_ids, weights, source, slots, arrivals, num_experts,
    k: tl.constexpr,
):  # fmt: skip
    """Store ids, weights and sources of the rows of one (source, channel), out of this rank's
    in-place buffer. No waits.

    Grid ``ranks * channels``. ``k`` is an :class:`UnpackConfig`. Arguments between ``metadata`` and
    ``num_experts``: as in ``Result``.
    """
    pid, num_experts = tl.program_id(0), num_experts.to(tl.int32)
    if not given_up(state):
        s, c = pid // k.channels, pid % k.channels
        me = tl.load(words(state) + RANK).to(tl.int32)
        routing = Routing(plan=plan, rank=me, num_tokens=0, num_experts=num_experts, num_rows=0)
        experts = experts_of(routing, k)
        result = Result(
            rows=0, scales=0, expert_ids=expert_ids, picks=0, weights=weights, source=source,
            arrivals=arrivals, slots=slots,
        )  # fmt: skip
        a0 = tl.load(first_in(plan, s, k))
        end = tl.load(in_bound(plan, s, c + 1, k))
        for i0 in range(tl.load(in_bound(plan, s, c, k)), end, k.rows):
            i = i0 + tl.arange(0, k.rows)
            batch = Batch(index=a0 + i, arrival=a0 + i, here=i < end)
            unpack_flat(metadata, batch, s, experts, result, k.metadata_words, k.placing)


# The host's side


MOST_PICKS = 256
"""Picks that a program unpacks at once."""


def bind_direct(
    workspace: Any, _num_topk: int, row_layout: Any, mode: Any, dtype: Any
) -> Callable[..., None]:
    """Compile and load the kernel of a dispatch in place: see ``bind_dispatch``."""
    config, tuning, ranks = workspace.tuning.direct, workspace.tuning, workspace.memory.world_size
    row = row_constants(row_layout)
    block = min(power_of_two_at_least(row_layout.words), config.block)
    k = DirectConfig(
        ranks=ranks, plan_ranks=ranks, rank_bins=workspace.rank_bins, channels=tuning.channels,
        writers=tuning.writers, row=row, in_memory=strides_in_memory(row),
        cast=cast_of(row_layout, mode, dtype), block=block,
        rows_sent=rows_sent(config, row_layout, mode, block, 8),
    )  # fmt: skip
    return workspace.memory.bind(
        direct_kernel,
        tuning.writers,
        num_warps=config.num_warps,
        max_registers=config.max_registers,
        k=k,
    )


def write_in_place(
    launch: Callable[..., None], workspace: Any, *, plan: int, buffers: int, payload: Payload,
    tag: int, num_tokens: int, scales_at: int, metadata_at: int,
) -> None:  # fmt: skip
    """Launch what :func:`bind_direct`, or that of engine twolevel, made."""
    stand_in(workspace, tag)
    launch(
        workspace.peers, workspace.state_at, plan, buffers, payload, tag, num_tokens, scales_at,
        metadata_at,
    )  # fmt: skip


def bind_unpack(
    workspace: Any, num_topk: int, plan_ranks: int, metadata_words: int, *, weighted: bool,
    static: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel that unpacks the metadata of rows in place."""
    ranks, channels = workspace.memory.world_size, workspace.tuning.channels
    k = UnpackConfig(
        ranks=ranks,
        plan_ranks=plan_ranks,
        channels=channels,
        placing=placing_of(
            num_topk, 1, by_expert=False, fresh=True, weighted=weighted, static=static
        ),
        metadata_words=metadata_words,
        rows=max(1, MOST_PICKS // power_of_two_at_least(num_topk)),
    )
    return workspace.memory.bind(
        unpack_kernel, ranks * channels, num_warps=4, max_registers=None, k=k
    )


def unpack_in_place(
    launch: Callable[..., None], workspace: Any, *, plan: int, metadata: int, result: Result,
    num_experts: int,
) -> None:  # fmt: skip
    """Launch what :func:`bind_unpack` made. Of ``result`` it fills ids, weights, source, slots and
    arrivals."""
    launch(
        workspace.state_at, plan, metadata, result.expert_ids, result.weights, result.source,
        result.slots, result.arrivals, num_experts,
    )  # fmt: skip
