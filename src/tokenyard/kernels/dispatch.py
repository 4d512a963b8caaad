# pyright: basic
"""Parts of a dispatch through rings: rows into slots of a ring, out of them, and a rank's own rows
to their places. ``kernels/two_dispatch.py`` has the kernel, and who may read what when. A kernel
that casts rows ahead of it stands here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import cast_of, cast_rows, copy_rows, rows_at, rows_sent, zero_row
from tokenyard.kernels.place import Placing, experts_of, place_metadata, place_rows
from tokenyard.kernels.region import block_of, order_of, plan_word
from tokenyard.kernels.structs import (
    Batch, Cast, Grid, NetworkRing, Payload, RingLayout, RowConstants, Rows, Strides, row_constants,
    strides_in_slots,
)  # fmt: skip
from tokenyard.routing import power_of_two_at_least

MOST_CAST = 4
"""Rows that a program casts at once."""
TOGETHER = tl.constexpr(16)
"""Rows whose metadata moves at once: it is short, so it costs its latency only."""


class DispatchConfig(NamedTuple):
    """What is known of a dispatch when its kernel is compiled."""

    ranks: int
    rank_bins: int  # a power of two, not less than plan_ranks
    plan_ranks: int  # destinations that plans know: ranks, then nodes
    channels: int
    row: RowConstants
    in_memory: Strides  # of the payload that is sent: rows one behind the other
    in_slot: Strides  # of rows in a ring
    cast: Cast
    placing: Placing
    rows_sent: int  # rows in flight of those who read the input, and may cast it
    rows_received: int
    block: int  # words of each row in flight
    grid: Grid
    network_ring: NetworkRing
    rows_forwarded: int  # rows in flight of a forwarder
    # through rings
    ring: RingLayout = RingLayout(0, 0, 0, 0)
    padding: bool = False  # blocks of experts end in rows of zeros
    forward_block: int = 0  # words of each row of a forwarder
    at_once: bool = False  # it reads a row once for all its places, the result's among them
    behind_heaps: bool = False  # a launch before may have moved the rows to heaps
    # in place
    heap: bool = False  # buffers are blocks of heaps, which the plan knows;
    told: bool = False  # or of which ranks tell each other as they announce the call


@triton.jit
def in_slots(ring, row: tl.constexpr):
    """The parts of the slots of a ring."""
    return Payload(rows=ring, scales=ring + row.scales_at, metadata=ring + row.metadata_at)


@triton.jit
def pack_rows(x, token, ring, slot, here, k: tl.constexpr):
    """Store rows ``token`` of ``x`` into slots of a ring; with a cast, their scales too."""
    row: tl.constexpr = k.row
    if k.cast.mode:
        target = Rows(words=ring, index=slot, stride=row.slot_bytes)
        scales = Rows(words=ring + row.scales_at, index=slot, stride=row.slot_bytes)
        cast_rows(x, token, target, scales, here, row, k.cast)
    else:
        source = rows_at(x, row.word_bits, token, row.words)
        target = rows_at(ring, row.word_bits, slot, k.in_slot.payload)
        copy_rows(source, target, here, row.words, k.block)


@triton.jit
def pack_metadata(payload, token, ring, slot, here, k: tl.constexpr):
    """Store what goes with rows: scales, unless a cast makes them, and metadata."""
    row: tl.constexpr = k.row
    if row.scale_words and not k.cast.mode:
        source = rows_at(payload.scales, 32, token, row.scale_words)
        target = rows_at(ring + row.scales_at, 32, slot, k.in_slot.scales)
        copy_rows(source, target, here, row.scale_words)
    if row.metadata_words:
        source = rows_at(payload.metadata, 32, token, row.metadata_words)
        target = rows_at(ring + row.metadata_at, 32, slot, k.in_slot.metadata)
        copy_rows(source, target, here, row.metadata_words)


@triton.jit
def zero_padding(routing, local, result, part, parts: tl.constexpr, k: tl.constexpr):
    """Zero the rows between the last row of an expert and the end of its block. This ``part`` has
    experts ``part``, ``part + parts``, ... of this rank's ``local`` ones."""
    for expert in range(part, local, parts):
        block = block_of(routing.plan, expert + 0, local, routing.num_tokens, k)
        begin = tl.load(block)
        end = tl.minimum(tl.load(block + 1), routing.num_rows)
        for place in range(begin, end):
            zero_row(result, place + 0, k.row, k.block)


@triton.jit
def put_own_batch(payload, batch, experts, routing, result, ring, slot, k: tl.constexpr):
    """Place rows for this rank itself. Rows of a result by expert that are cast go through ``slot``
    of ``ring``."""
    row: tl.constexpr = k.row
    if k.cast.mode and k.placing.by_expert:
        pack_rows(payload.rows, batch.index, ring, slot, batch.here, k)
        pack_metadata(payload, batch.index, ring, slot, batch.here, k)
        tl.debug_barrier()
        slots = in_slots(ring, row)
        packed = Batch(index=slot, arrival=batch.arrival, here=batch.here)
        place_rows(slots, packed, routing.rank, experts, routing, result, k.in_slot, k.block, k)
        tl.debug_barrier()
    elif k.cast.mode:
        target = Rows(words=result.rows, index=batch.arrival, stride=row.hidden)
        scales = Rows(words=result.scales, index=batch.arrival, stride=row.scale_words * 4)
        cast_rows(payload.rows, batch.index, target, scales, batch.here, row, k.cast)
    elif k.placing.by_expert:
        place_rows(payload, batch, routing.rank, experts, routing, result, k.in_memory, k.block, k)
    else:
        source = rows_at(payload.rows, row.word_bits, batch.index, row.words)
        target = rows_at(result.rows, row.word_bits, batch.arrival, row.words)
        copy_rows(source, target, batch.here, row.words, k.block)


@triton.jit
def put_own_rows(payload, routing, result, ring, begin, end, k: tl.constexpr):
    """Place rows ``begin`` .. ``end - 1`` for this rank itself."""
    experts = experts_of(routing, k)
    order = order_of(routing.plan, routing.rank, routing.num_tokens, k)
    b = tl.arange(0, k.rows_sent)
    first = tl.load(plan_word(routing.plan, "first_in", routing.rank, k))
    for i0 in range(begin, end, k.rows_sent):
        i = i0 + b
        here = i < end
        token = tl.load(order + i, mask=here, other=0)
        batch = Batch(index=token, arrival=first + i, here=here)
        put_own_batch(payload, batch, experts, routing, result, ring, b, k)
    if not k.placing.by_expert:
        scale_words: tl.constexpr = 0 if k.cast.mode else k.row.scale_words
        several = tl.arange(0, TOGETHER)
        for i0 in range(begin, end, TOGETHER):
            i = i0 + several
            token = tl.load(order + i, mask=i < end, other=0)
            batch = Batch(index=token, arrival=first + i, here=i < end)
            place_metadata(
                payload, batch, routing.rank, experts, result, k.in_memory, scale_words, k.placing
            )


@triton.jit
def send_chunk(payload, order, ring, begin, count, first, k: tl.constexpr):
    """Pack rows ``begin`` .. ``begin + count - 1`` of ``order`` into a ring. The caller publishes
    them. Row ``first`` is the one in slot 0."""
    b, several = tl.arange(0, k.rows_sent), tl.arange(0, TOGETHER)
    for j in range(0, count, k.rows_sent):
        i, here = begin + j + b, j + b < count
        token = tl.load(order + i, mask=here, other=0)
        pack_rows(payload.rows, token, ring, (i - first) % k.ring.slots, here, k)
    if k.row.metadata_words or (k.row.scale_words and not k.cast.mode):
        for j in range(0, count, TOGETHER):
            i, here = begin + j + several, j + several < count
            token = tl.load(order + i, mask=here, other=0)
            pack_metadata(payload, token, ring, (i - first) % k.ring.slots, here, k)


@triton.jit
def receive_chunk(routing, result, source, ring, begin, count, first, k: tl.constexpr):
    """Place rows ``begin`` .. ``begin + count - 1`` of a ring. The caller returns credits. Row 0
    becomes arrival row ``first``."""
    row: tl.constexpr = k.row
    experts = experts_of(routing, k)
    b, several = tl.arange(0, k.rows_received), tl.arange(0, TOGETHER)
    for j in range(0, count, k.rows_received):
        i, here = begin + j + b, j + b < count
        if k.placing.by_expert:
            slots = in_slots(ring, row)
            batch = Batch(index=i % k.ring.slots, arrival=first + i, here=here)
            place_rows(slots, batch, source, experts, routing, result, k.in_slot, k.block, k)
        else:
            from_slot = rows_at(ring, row.word_bits, i % k.ring.slots, k.in_slot.payload)
            to = rows_at(result.rows, row.word_bits, first + i, row.words)
            copy_rows(from_slot, to, here, row.words, k.block)
    if not k.placing.by_expert and (row.scale_words or k.placing.fresh):
        for j in range(0, count, TOGETHER):
            i = begin + j + several
            slots = in_slots(ring, row)
            batch = Batch(index=i % k.ring.slots, arrival=first + i, here=j + several < count)
            place_metadata(
                slots, batch, source, experts, result, k.in_slot, row.scale_words, k.placing
            )


class CastConfig(NamedTuple):
    """What is known of rows that are cast ahead when their kernel is compiled."""

    programs: int
    row: RowConstants
    cast: Cast
    rows: int  # in flight


@triton.jit(repr=shown_as("nvlink::cast"))
def cast_kernel(x, data, scales, num_rows, k: tl.constexpr):
    """Cast the rows of ``x`` to ``data`` and ``scales``. No waits. ``k``: a :class:`CastConfig`."""
    num_rows = num_rows.to(tl.int32)
    for begin in range(tl.program_id(0) * k.rows, num_rows, k.programs * k.rows):
        row = begin + tl.arange(0, k.rows)
        target = Rows(words=data, index=row, stride=k.row.hidden)
        below = Rows(words=scales, index=row, stride=k.row.scale_words * 4)
        cast_rows(x, row, target, below, row < num_rows, k.row, k.cast)


# The host's side


def bind_cast(workspace: Any, row_layout: Any, mode: Any, dtype: Any) -> Callable[..., None]:
    """Compile and load the kernel that casts rows ahead, on the multiprocessors of a call."""
    config, programs = workspace.tuning.dispatch, workspace.tuning.num_sms
    k = CastConfig(
        programs=programs, row=row_constants(row_layout), cast=cast_of(row_layout, mode, dtype),
        rows=rows_sent(config, row_layout, mode, config.block, MOST_CAST),
    )  # fmt: skip
    return workspace.bind(cast_kernel, programs, config, k)


def config_of(
    workspace: Any, config: Any, row_layout: Any, mode: Any, dtype: Any, placing: Placing,
    most: int, **more: Any,
) -> DispatchConfig:  # fmt: skip
    """Constants of a dispatch, with at most ``most`` rows in flight."""
    row = row_constants(row_layout)
    block = min(power_of_two_at_least(row_layout.words), config.block)
    sent, received = rows_sent(config, row_layout, mode, block, most), config.rows_of(block, most)
    return DispatchConfig(
        ranks=workspace.memory.world_size, rank_bins=workspace.rank_bins,
        plan_ranks=workspace.plan_ranks, channels=workspace.tuning.channels, row=row,
        in_memory=Strides(row.words, row.scale_words, row.metadata_words),
        in_slot=strides_in_slots(row), cast=cast_of(row_layout, mode, dtype), placing=placing,
        rows_sent=sent, rows_received=received, block=block, **more,
    )  # fmt: skip
