# pyright: basic
"""Dispatch into ordinary memory: rows stream through rings of bounded size, and receivers place
them as they come.

Grid ``(2 * ranks - 1) * channels + 1``: a sender per (destination, channel), a receiver per (other
source, channel), the call barrier. Rows for this rank itself are placed by their sender. Example: 2
ranks, 1 channel, ring of 4 slots, 6 rows from 0 to 1 in chunks of 2: the sender puts rows 0-3 into
slots 0-3, waits until 2 were taken, puts rows 4, 5 into slots 0, 1; row i becomes arrival row
``first_in[0] + i``.

Who publishes what, and who may read it when:

* The sender stores a chunk of rows into slots of its ring at the destination, then adds their
  number to ``tails[me, channel]`` there (release). The receiver waits for the tail to grow
  (acquire), then reads the slots.
* A fresh dispatch may be launched before the host knows the counts. It does nothing if the plan
  says that ranks disagree, or that one lacks room for its rows. All ranks see the same, and launch
  again (``forced``) with room enough.
* The receiver adds the number of rows it has read to ``heads[me, channel]`` at the source (release,
  behind its reads). The sender waits (acquire) until a slot's last reader is done before it writes
  that slot again.
* A call begins with the ring drained: its sender waits until everything it ever sent was taken. So
  slots may change their size from call to call, and slot ``i % slots`` belongs to the i-th row of
  the channel in this call.

Nobody waits in a circle: a sender waits only for the receiver of its own ring, which waits only for
that sender. All stores to result rows are disjoint, so there is nothing to order between receivers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import call_barrier
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, cast_of, cast_rows, copy_rows, rows_sent, zero_row
from tokenyard.kernels.place import (
    Placing, experts_of, num_experts_of, place_metadata, place_rows, placing_of,
)  # fmt: skip
from tokenyard.kernels.region import (
    block_of, first_in, go_of, head_of, in_bound, order_of, out_bound, peer_base, sent_to, tail_of,
    taken_from,
)  # fmt: skip
from tokenyard.kernels.stand_in import stand_in
from tokenyard.kernels.structs import (
    Batch, Cast, Payload, Peers, Result, RingLayout, Routing, RowConstants, Rows, Strides,
    row_constants, strides_in_memory, strides_in_slots,
)  # fmt: skip
from tokenyard.kernels.sync import (
    ON_ROOM,
    ON_ROWS,
    RANK,
    add_release,
    given_up,
    wait_at_least,
    words,
)
from tokenyard.routing import power_of_two_at_least

TOGETHER = tl.constexpr(16)
"""Rows whose metadata moves at once: it is short, so it costs its latency only."""


class DispatchConfig(NamedTuple):
    """What is known of a dispatch when its kernel is compiled."""

    ranks: int
    rank_bins: int  # the next power of two
    plan_ranks: int  # destinations that plans know: ranks, then nodes if there are several
    channels: int
    row: RowConstants
    in_memory: Strides  # of the payload that is sent
    in_slot: Strides  # of rows in a ring
    ring: RingLayout
    cast: Cast
    placing: Placing
    rows_sent: int  # rows in flight of those who read the input, and may cast it
    rows_received: int
    block: int  # words of each row in flight
    padding: bool  # blocks of experts end in rows of zeros
    # of engine twolevel only
    grid: Any = None  # a Grid
    network_ring: Any = None  # a NetworkRing
    rows_forwarded: int = 0  # rows in flight of a forwarder
    forward_block: int = 0  # words of each
    at_once: bool = False  # it reads a row once for all its places, the result's among them


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
        source = Rows(words=as_words(x, row.word_bits), index=token, stride=row.words)
        target = Rows(words=as_words(ring, row.word_bits), index=slot, stride=k.in_slot.payload)
        copy_rows(source, target, here, row.words, k.block)


@triton.jit
def pack_metadata(payload, token, ring, slot, here, k: tl.constexpr):
    """Store what goes with rows: scales, unless a cast makes them, and metadata."""
    row: tl.constexpr = k.row
    if row.scale_words and not k.cast.mode:
        source = Rows(words=as_words(payload.scales, 32), index=token, stride=row.scale_words)
        target = Rows(words=as_words(ring + row.scales_at, 32), index=slot, stride=k.in_slot.scales)
        copy_rows(source, target, here, row.scale_words, triton.next_power_of_2(row.scale_words))
    if row.metadata_words:
        source = Rows(words=as_words(payload.metadata, 32), index=token, stride=row.metadata_words)
        target = Rows(
            words=as_words(ring + row.metadata_at, 32), index=slot, stride=k.in_slot.metadata
        )
        copy_rows(
            source, target, here, row.metadata_words, triton.next_power_of_2(row.metadata_words)
        )


@triton.jit
def zero_padding(routing, local, result, channel, k: tl.constexpr):
    """Zero the rows between the last row of an expert and the end of its block.

    This channel has experts ``channel``, ``channel + channels``, ... of this rank's ``local`` ones.
    """
    row: tl.constexpr = k.row
    for expert in range(channel, local, k.channels):
        block = block_of(routing.plan, expert + 0, local, routing.num_tokens, k)
        begin = tl.load(block)
        end = tl.minimum(tl.load(block + 1), routing.num_rows)
        for place in range(begin, end):
            r = (place + 0).to(tl.int64)
            zero_row(as_words(result.rows, row.word_bits) + r * row.words, row.words, k.block)
            if row.scale_words:
                to = as_words(result.scales, 32) + r * row.scale_words
                zero_row(to, row.scale_words, triton.next_power_of_2(row.scale_words))


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
        source = Rows(
            words=as_words(payload.rows, row.word_bits), index=batch.index, stride=row.words
        )
        target = Rows(
            words=as_words(result.rows, row.word_bits), index=batch.arrival, stride=row.words
        )
        copy_rows(source, target, batch.here, row.words, k.block)


@triton.jit
def put_own_rows(payload, routing, result, ring, begin, end, k: tl.constexpr):
    """Place rows ``begin`` .. ``end - 1`` for this rank itself."""
    experts = experts_of(routing, k)
    order = order_of(routing.plan, routing.rank, routing.num_tokens, k)
    b = tl.arange(0, k.rows_sent)
    first = tl.load(first_in(routing.plan, routing.rank, k))
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
    them.

    Row ``first`` is the one in slot 0.
    """
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
def send_rows(peers, routing, payload, ring, to, channel, k: tl.constexpr):
    """Send this channel's rows for rank ``to`` through ``ring``, their ring there."""
    begin = tl.load(out_bound(routing.plan, to, channel, k))
    end = tl.load(out_bound(routing.plan, to, channel + 1, k))
    order = order_of(routing.plan, to, routing.num_tokens, k)
    mine = peer_base(peers.regions, peers.rank)
    tail = tail_of(peer_base(peers.regions, to), peers.rank, channel, k)
    sent = tl.load(sent_to(peers.state, to, channel, k))
    head = head_of(mine, to, channel, k)
    want = sent
    ok = wait_at_least(head, want, peers.state, ON_ROOM, to, channel) >= want  # the ring is drained
    for i in range(begin, end, k.ring.chunk):
        count = tl.minimum(k.ring.chunk, end - i)
        if ok:
            want = sent + (i - begin) + count - k.ring.slots
            ok = wait_at_least(head, want, peers.state, ON_ROOM, to, channel) >= want
        if ok:
            send_chunk(payload, order, ring, i, count, begin, k)
            add_release(tail, count.to(tl.int64), None)
    tl.debug_barrier()
    tl.store(sent_to(peers.state, to, channel, k), sent + end - begin)


@triton.jit
def receive_chunk(routing, result, source, ring, begin, count, first, k: tl.constexpr):
    """Place rows ``begin`` .. ``begin + count - 1`` of a ring. The caller returns credits.

    Row 0 becomes arrival row ``first``.
    """
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
            slots = as_words(ring, row.word_bits)
            from_slot = Rows(words=slots, index=i % k.ring.slots, stride=k.in_slot.payload)
            to = Rows(words=as_words(result.rows, row.word_bits), index=first + i, stride=row.words)
            copy_rows(from_slot, to, here, row.words, k.block)
    if not k.placing.by_expert and (row.scale_words or k.placing.fresh):
        for j in range(0, count, TOGETHER):
            i = begin + j + several
            slots = in_slots(ring, row)
            batch = Batch(index=i % k.ring.slots, arrival=first + i, here=j + several < count)
            place_metadata(
                slots, batch, source, experts, result, k.in_slot, row.scale_words, k.placing
            )


@triton.jit
def receive_rows(peers, routing, result, source, channel, k: tl.constexpr):
    """Take this channel's rows of rank ``source`` out of their ring here, to their places."""
    begin = tl.load(in_bound(routing.plan, source, channel, k))
    end = tl.load(in_bound(routing.plan, source, channel + 1, k))
    first = tl.load(first_in(routing.plan, source, k)) + begin
    mine = peer_base(peers.regions, peers.rank)
    ring = (
        mine + k.ring.first_byte + (source * k.channels + channel).to(tl.int64) * k.ring.num_bytes
    )
    head = head_of(peer_base(peers.regions, source), peers.rank, channel, k)
    base = tl.load(taken_from(peers.state, source, channel, k))
    total = end - begin
    taken = total * 0
    ok = True
    while (taken < total) & ok:
        want = base + taken + 1
        tail = tail_of(mine, source, channel, k)
        seen = wait_at_least(tail, want, peers.state, ON_ROWS, source, channel)
        ok = seen >= want
        if ok:
            count = tl.minimum(tl.minimum(seen - base, total).to(tl.int32) - taken, k.ring.chunk)
            receive_chunk(routing, result, source, ring, taken, count, first, k)
            add_release(head, count.to(tl.int64), None)
            taken += count
    tl.debug_barrier()
    tl.store(taken_from(peers.state, source, channel, k), base + total)


@triton.jit(repr=shown_as("nvlink::dispatch"))
def dispatch_kernel(
    regions, state, plan, payload: Payload, result: Result, tag, num_tokens, num_experts, num_rows,
    forced, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`DispatchConfig`; :func:`dispatch_rows` launches it."""
    pid = tl.program_id(0)
    if k.placing.fresh:  # launched before the host knew the counts
        go = tl.load(go_of(plan, k))
        pid = tl.where((go == 0) & (forced == 0), -1, pid)
    pid = tl.where(given_up(state), -1, pid)  # the plan may be unfinished then
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    num_rows = num_rows.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    peers = Peers(regions=regions, state=state, rank=me)
    routing = Routing(
        plan=plan, rank=me, num_tokens=num_tokens, num_experts=num_experts, num_rows=num_rows
    )
    channel = pid % k.channels
    if (pid >= 0) & (pid < k.ranks * k.channels):
        to = (me + 1 + pid // k.channels) % k.ranks
        place = (me * k.channels + channel).to(tl.int64)
        ring = peer_base(regions, to) + k.ring.first_byte + place * k.ring.num_bytes
        if to == me:
            begin = tl.load(out_bound(plan, me, channel, k))
            end = tl.load(out_bound(plan, me, channel + 1, k))
            put_own_rows(payload, routing, result, ring, begin, end, k)
            if k.padding:
                zero_padding(routing, num_experts_of(routing, k), result, channel, k)
        else:
            send_rows(peers, routing, payload, ring, to, channel, k)
    elif (pid >= 0) & (pid < (2 * k.ranks - 1) * k.channels):
        source = (me + k.ranks - (pid - k.ranks * k.channels) // k.channels - 1) % k.ranks
        receive_rows(peers, routing, result, source, channel, k)
    elif pid == (2 * k.ranks - 1) * k.channels:
        call_barrier(regions, state, tag, k)


# The host's side


def config_of(
    workspace: Any, config: Any, row_layout: Any, mode: Any, dtype: Any, placing: Placing,
    most: int, **more: Any,
) -> DispatchConfig:  # fmt: skip
    """Constants of a dispatch through rings, with at most ``most`` rows in flight."""
    row, slots = row_constants(row_layout), workspace.slots(row_layout)
    block = min(power_of_two_at_least(row_layout.words), config.block)
    sent, received = rows_sent(config, row_layout, mode, block, most), config.rows_of(block, most)
    return DispatchConfig(
        ranks=workspace.memory.world_size, rank_bins=workspace.rank_bins,
        plan_ranks=workspace.plan_ranks, channels=workspace.tuning.channels, row=row,
        in_memory=strides_in_memory(row), in_slot=strides_in_slots(row),
        ring=RingLayout(workspace.rings_at, workspace.ring_bytes, slots, config.chunk_of(slots)),
        cast=cast_of(row_layout, mode, dtype), placing=placing,
        rows_sent=1 if placing.by_expert else sent,
        rows_received=1 if placing.by_expert else received, block=block, **more,
    )  # fmt: skip


def bind_dispatch(
    workspace: Any, num_topk: int, row_layout: Any, mode: Any, dtype: Any, slots_per_row: int, *,
    padding: bool, **placed: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature. May wait for the device.

    Args:
        workspace: an ``engines.rings.PeerWorkspace``.
        form: of a row on the wire.
        mode, dtype: how rows are cast on their way (None: not), and what the input holds.
        slots_per_row: columns of ``slots``.
        padding: blocks of experts end in rows of zeros.
        placed: flags of a :class:`Placing`.
    """
    config, ranks = workspace.tuning.dispatch, workspace.memory.world_size
    placing = placing_of(num_topk, slots_per_row, **placed)
    most = config.chunk_of(workspace.slots(row_layout))
    k = config_of(workspace, config, row_layout, mode, dtype, placing, most, padding=padding)
    return workspace.memory.bind(
        dispatch_kernel, (2 * ranks - 1) * k.channels + 1, num_warps=config.num_warps,
        max_registers=config.max_registers, k=k,
    )  # fmt: skip


def dispatch_rows(
    launch: Callable[..., None], workspace: Any, *, plan: int, payload: Payload, result: Result,
    tag: int, num_tokens: int, num_experts: int, num_rows: int, forced: bool = False,
) -> None:  # fmt: skip
    """Launch what :func:`bind_dispatch` made, or engine twolevel's. Structs hold addresses."""
    stand_in(workspace, tag)
    launch(
        workspace.peers, workspace.state_at, plan, payload, result, tag, num_tokens, num_experts,
        num_rows, int(forced),
    )  # fmt: skip
