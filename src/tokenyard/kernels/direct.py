# pyright: basic
"""Parts of a dispatch in place: rows to in-place buffers, and metadata out of them.

A buffer is symmetric memory for a whole batch: rows, scales and metadata from three offsets. Its
metadata is read by :func:`unpack_kernel` afterwards, in stream order. ``kernels/two_direct.py`` has
the kernel that writes, and who may do so when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import (
    AT_ONCE, as_words, cast, copy_words, elements, load_groups, of_each, store_cast,
)  # fmt: skip
from tokenyard.kernels.place import Placing, experts_of, placing_of, unpack_flat
from tokenyard.kernels.region import go_of, in_bound, plan_word
from tokenyard.kernels.structs import Batch, Result, Routing
from tokenyard.kernels.sync import RANK, given_up, words


class UnpackConfig(NamedTuple):
    """What is known of the unpacking of metadata when its kernel is compiled."""

    ranks: int
    plan_ranks: int
    channels: int
    placing: Placing
    metadata_words: int
    scale_words: int  # of a row whose scales are to be copied too; 0: none
    rows: int  # in flight
    heap: bool


class Buffers(NamedTuple):
    """In-place buffers of several ranks, ``[bins]``: addresses of their rows; and the bytes from
    there to scales and metadata."""

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
    addresses ``parts [bins]``. ``count`` of the bins are ranks. Rank ``first`` comes first: if all
    began with the same, all would store to it at once, and its links be too narrow."""
    r = tl.arange(0, rows.shape[1])
    for i in tl.static_range(count):
        d = (first + i) % count
        row = tl.sum(tl.where((r == d)[None, :], rows, 0), axis=1)
        to = as_words(tl.sum(tl.where(r == d, parts, 0)), bits)
        to = to + row.to(tl.int64)[:, None] * num_words + w[None, :]
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
        at = tl.sum(tl.where((r == d)[None, :], rows, 0), axis=1)
        at = of_each(at, rows.shape[0], how.groups)
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
    of it is read once. ``count`` of the bins are ranks; ``first`` of them comes first. ``casts``:
    rows are cast on the way, as ``k.cast`` says."""
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
        floats = elements(payload.rows, k.cast.dtype)
        index, here = of_each(index, num_rows, groups), of_each(here, num_rows, groups)
        floats = load_groups(floats, index, g, here, row.hidden, k.cast)
        values, scale = cast(floats, g, row.hidden, k.cast)
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


@triton.jit(repr=shown_as("nvlink::unpack"))
def unpack_kernel(
    state, plan, metadata, scales, result_scales, expert_ids, weights, source, slots, arrivals,
    num_experts, k: tl.constexpr,
):  # fmt: skip
    """Store ids, weights and sources of the rows of one (source, channel), out of this rank's
    in-place buffer. No waits. Of a block of a heap: if rows have moved there, and their ``scales``.

    Grid ``ranks * channels``. ``k`` is an :class:`UnpackConfig`. Arguments between ``scales`` and
    ``num_experts``: as in ``Result``.
    """
    pid, num_experts = tl.program_id(0), num_experts.to(tl.int32)
    there = not given_up(state)
    if k.heap:
        there = there & (tl.load(go_of(plan, k)) > 0)
    if there:
        s, c = pid // k.channels, pid % k.channels
        me = tl.load(words(state) + RANK).to(tl.int32)
        routing = Routing(plan, me, 0, num_experts, num_rows=0)
        experts = experts_of(routing, k)
        result = Result(
            rows=0, scales=0, expert_ids=expert_ids, picks=0, weights=weights, source=source,
            arrivals=arrivals, slots=slots,
        )  # fmt: skip
        a0 = tl.load(plan_word(plan, "first_in", s, k))
        begin, end = tl.load(in_bound(plan, s, c, k)), tl.load(in_bound(plan, s, c + 1, k))
        S: tl.constexpr = k.scale_words
        if S:
            to = as_words(result_scales, 32)
            copy_words(as_words(scales, 32), to, (a0 + begin) * S, (a0 + end) * S, AT_ONCE, 1)
        for i0 in range(begin, end, k.rows):
            i = i0 + tl.arange(0, k.rows)
            batch = Batch(index=a0 + i, arrival=a0 + i, here=i < end)
            unpack_flat(metadata, batch, s, experts, result, k.metadata_words, k.placing)


# The host's side


MOST_PICKS = 256
"""Picks that a program unpacks at once."""


def bind_unpack(
    workspace: Any, num_topk: int, row_layout: Any, *, weighted: bool, static: bool, heap: bool
) -> Callable[..., None]:
    """Compile and load the kernel that unpacks the metadata of rows in place."""
    ranks, channels = workspace.memory.world_size, workspace.tuning.channels
    placing = placing_of(num_topk, 1, by_expert=False, fresh=True, weighted=weighted, static=static)
    k = UnpackConfig(
        ranks=ranks, plan_ranks=workspace.plan_ranks, channels=channels, placing=placing,
        metadata_words=row_layout.meta_words, scale_words=row_layout.scale_words if heap else 0,
        rows=max(1, MOST_PICKS // placing.topk_bins), heap=heap,
    )  # fmt: skip
    return workspace.memory.bind(unpack_kernel, ranks * channels, num_warps=4, k=k)
