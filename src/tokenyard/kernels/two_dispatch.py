# pyright: basic
"""Dispatch over two levels: once per (token, node) through the network, then to the ranks of the
node that need it.

G nodes of P ranks; engine nvlink has one node. W workers per bundle of channels
(``kernels/two_scheduler.py``). Tasks of a channel: a network sender and a forwarder
(``kernels/two_forward.py``) per other node, the rows that stay, a sender per other local rank, a
receiver per source with another local index, the call barrier (of channel 0). Of one node some
workers may have sends and the call barrier only (``dealt``). Example: 2 nodes of 2
ranks, token 5 of rank 0 goes to ranks 2 and 3: rank 0 sends it once, to rank 2, whose forwarder
places it, and stores it to ring (0, c) of rank 3. Example of one node: 2 ranks, 1 channel, a ring
of 4 slots, 6 rows from 0 to 1 in chunks of 2: the sender puts rows 0-3 into slots 0-3, has no room
until 2 were taken, puts rows 4, 5 into slots 0, 1; row i becomes arrival row ``first_in[0] + i``.

Who publishes what, who may read when (``docs/reference/twolevel.md``):

* A sender stores a chunk of rows into slots of its ring at the destination, and defers their number
  to ``tails[me, channel]`` there. A receiver that sees the tail (acquire) reads the slots, and
  defers the rows it has read to ``heads[me, channel]`` at whoever put them there. A sender that
  sees the head (acquire) may write those slots again.
* A call begins with the ring drained: its sender waits until everything it ever sent was taken. So
  slots may change their size from call to call, and slot ``i % slots`` belongs to the i-th row of
  the channel in this call.
* A fresh dispatch may be launched before the host knew the counts. It does nothing if the plan says
  that ranks disagree, or that one lacks room for its rows. All ranks see the same, and launch again
  (``forced``) with room enough.
* BEHIND_HEAPS, cached: a launch before it may have moved the rows to heaps
  (``kernels/two_direct.py``). Then this one announces its call, copies the scales from where
  IN_HEAPS says they are in its rank's block, and that is all. A tag of half
  ``n % 2`` is written again two calls later as always, behind announcement n + 1 of all ranks.
* A network sender packs a chunk of rows into staging slots, and puts them with their number onto
  ``net tail``; MAPPED: it packs them into the network ring itself, and defers the tail. The
  forwarder sees the tail (acquire), then reads the slots.
* A forwarder takes rows out of the network ring: ``kernels/two_forward.py``. Receivers of other
  local ranks defer heads to it.
* What turns defer is added once per round (``flush_signals``, release), behind the last task:
  behind all that was stored and read. The kernel ends behind another ``flush_signals``, so nothing
  is deferred between calls.
* Slot ``i % NQ`` of the network ring and of its staging ring belongs to the i-th row of the channel
  in this call.

Nobody waits in a circle: a receiver needs its sender or forwarder only, a sender its receiver, a
forwarder its receivers and its network sender, and a network sender its forwarder's credits, of
which less than CREDIT are held back: ``NQ >= NCHUNK + CREDIT - 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import count_call
from tokenyard.kernels.dispatch import (
    config_of, put_own_rows, receive_chunk, send_chunk, zero_padding,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import AT_ONCE, as_words, copy_words
from tokenyard.kernels.place import num_experts_of, placing_of
from tokenyard.kernels.region import (
    go_of, head_of, in_bound, order_of, out_bound, peer_base, plan_word, ring_of, sent_to, tail_of,
    taken_from,
)  # fmt: skip
from tokenyard.kernels.structs import (
    Payload, Peers, Result, RingLayout, Routing, Turn, grid_of, network_ring_of,
)  # fmt: skip
from tokenyard.kernels.sync import (
    IN_HEAPS, ON_ROOM, ON_ROWS, RANK, TIMED_OUT, give_up, given_up, load_acquire, now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_far import far_turn
from tokenyard.kernels.two_forward import forward_turn
from tokenyard.kernels.two_headers import announce_call_to_all, call_barrier_turn
from tokenyard.kernels.two_region import done_in, num_tasks
from tokenyard.kernels.two_scheduler import (
    ON_TIME, OVER, begin_tasks, dealt, defer_signal, flush_signals, next_step, note_lack,
    place_in_round, reports, rows_of_turn, tasks_of_worker,
)  # fmt: skip
from tokenyard.routing import power_of_two_at_least

LEAST_CHUNK = tl.constexpr(16)
"""Rows that a sender publishes at once, at least: small batches are not one chunk."""
MOST_FORWARDED = 64
"""Rows times local ranks that a forwarder looks at at once: Triton 3.6 crashes on some tiles of
128."""


@triton.jit
def _own_turn(peers, routing, payload, result, turn, k: tl.constexpr):
    """Rows of this channel for this rank itself. Returns the rows left, as all turns do."""
    ring = ring_of(peer_base(peers.regions, peers.rank), peers.rank, turn.channel, k)
    lo, hi, i = rows_of_turn(out_bound, routing.plan, peers.rank, turn, k)
    left = hi - lo - i
    tl.debug_barrier()
    if left > 0:
        n = tl.minimum(left, k.ring.chunk)
        put_own_rows(payload, routing, result, ring, lo + i, lo + i + n, k)
        left -= n
        tl.store(turn.done, (i + n).to(tl.int64))
    return left


@triton.jit
def _send_turn(peers, routing, payload, to, turn, k: tl.constexpr):
    """A chunk of rows of this channel for rank ``to`` into its ring (me, channel)."""
    lo, hi, i = rows_of_turn(out_bound, routing.plan, to, turn, k)
    base = tl.load(sent_to(peers.state, to, turn.channel, k))
    left = hi - lo - i
    if left > 0:
        # few chunks, as a release waits for all stores; but receivers begin with the first
        chunk = tl.minimum(tl.maximum((hi - lo + 3) // 4, LEAST_CHUNK), k.ring.chunk)
        n = tl.minimum(left, chunk)
        # the ring is drained before the first row
        want = base + tl.maximum(i + n - k.ring.slots, 0)
        mine = peer_base(peers.regions, peers.rank)
        seen = load_acquire(head_of(mine, to, turn.channel, k))
        tl.debug_barrier()
        note_lack(peers.state, turn, ON_ROOM, to, seen < want, k)
        if turn.step != ON_TIME:
            if reports(turn.step, seen < want, False):
                give_up(peers.state, TIMED_OUT, ON_ROOM, to, turn.channel, want, seen)
        elif seen >= want:
            there = peer_base(peers.regions, to)
            ring = ring_of(there, peers.rank, turn.channel, k)
            order = order_of(routing.plan, to, routing.num_tokens, k)
            send_chunk(payload, order, ring, lo + i, n, lo, k)
            tail = tail_of(there, peers.rank, turn.channel, k).to(tl.int64)
            defer_signal(peers.state, turn, 0, tail, n.to(tl.int64), None, k)
            left -= n
            tl.store(turn.done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(sent_to(peers.state, to, turn.channel, k), base + hi - lo)
    return left


@triton.jit
def _receive_turn(peers, routing, result, source, turn, k: tl.constexpr):
    """A chunk of rows of ``source`` out of ring (source, channel), to their places. Credits go to
    the local rank that put them there."""
    P: tl.constexpr = k.grid.ranks_per_node
    lo, hi, i = rows_of_turn(in_bound, routing.plan, source, turn, k)
    base = tl.load(taken_from(peers.state, source, turn.channel, k))
    left = hi - lo - i
    if left > 0:
        mine, me = peer_base(peers.regions, peers.rank), peers.rank
        want = base + i + 1
        seen = load_acquire(tail_of(mine, source, turn.channel, k))
        tl.debug_barrier()
        note_lack(peers.state, turn, ON_ROWS, source, seen < want, k)
        if turn.step != ON_TIME:
            if reports(turn.step, seen < want, source // P != me // P):
                give_up(peers.state, TIMED_OUT, ON_ROWS, source, turn.channel, want, seen)
        elif seen >= want:
            n = tl.minimum(tl.minimum((seen - base).to(tl.int32) - i, left), k.ring.chunk)
            putter = peer_base(peers.regions, me // P * P + source % P)
            head = head_of(putter, source // P * P + me % P, turn.channel, k)
            ring = ring_of(mine, source, turn.channel, k)
            first = tl.load(plan_word(routing.plan, "first_in", source, k)) + lo
            receive_chunk(routing, result, source, ring, i, n, first, k)
            head = head.to(tl.int64)
            defer_signal(peers.state, turn, 0, head, n.to(tl.int64), None, k)
            left -= n
            tl.store(turn.done, (i + n).to(tl.int64))
            if left == 0:
                taken = taken_from(peers.state, source, turn.channel, k)
                tl.store(taken, base + hi - lo)
    return left


@triton.jit
def _turn(peers, home, local, routing, payload, result, tag, turn, k: tl.constexpr):
    """A turn of any task: rows left to do, and whether it waits for relayed rows. ``home``,
    ``local``: this rank's node, and its index there."""
    NODES: tl.constexpr = k.grid.nodes
    NEAR: tl.constexpr = k.grid.ranks_per_node
    BESIDE: tl.constexpr = NEAR - 1 if NEAR > 1 else 1
    FAR: tl.constexpr = 2 * (NODES - 1)  # tasks between nodes: the first ones
    task = turn.task
    rows, relayed = task * 0, task * 0
    if task < NODES - 1:
        if FAR:  # as in all kernels: what one node does not need is not compiled
            rows = far_turn(peers, routing, payload, (home + 1 + task) % NODES, turn, k)
    elif task < FAR:
        if FAR:
            rows = forward_turn(peers, routing, result, (home + FAR - task) % NODES, turn, k)
    elif task < FAR + 1:
        rows = _own_turn(peers, routing, payload, result, turn, k)
    elif task < FAR + NEAR:
        to = home * NEAR + (local + task - FAR) % NEAR
        rows = _send_turn(peers, routing, payload, to, turn, k)
    elif task < num_tasks(k.ranks, NODES) - 1:
        at = task - NEAR - FAR
        node = (home + NODES - at // BESIDE) % NODES
        source = node * NEAR + (local + NEAR - 1 - at % BESIDE) % NEAR
        relayed = (source // NEAR != home).to(tl.int32)
        rows = _receive_turn(peers, routing, result, source, turn, k)
    elif (task < num_tasks(k.ranks, NODES)) & (turn.channel == 0):
        rows = call_barrier_turn(peers.regions, peers.state, tag, turn, k)
    return rows, relayed


@triton.jit(repr=shown_as("twolevel::dispatch"))
def two_dispatch_kernel(
    regions, state, plan, payload: Payload, result: Result, tag, num_tokens, num_experts, num_rows,
    forced, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a ``DispatchConfig``; :func:`bind_two_dispatch` makes the launch."""
    grid: tl.constexpr = k.grid
    BUNDLES: tl.constexpr = k.channels // grid.bundle
    pid = tl.program_id(0)
    if k.placing.fresh:  # launched before the host knew the counts
        go = tl.load(go_of(plan, k))
        pid = tl.where((go == 0) & (forced == 0), -1, pid)
    pid = tl.where(given_up(state), -1, pid)  # the plan may be unfinished then
    if k.behind_heaps:
        scales_at = tl.load(words(state) + IN_HEAPS)
        moved = scales_at != 0
        if moved & (pid == 0):
            announce_call_to_all(regions, state, tag, k)
            count_call(state)
        S: tl.constexpr = k.row.scale_words
        if S:
            if moved & (pid >= 0):
                first, end = pid * AT_ONCE, num_rows.to(tl.int32) * S
                source, to = as_words(scales_at, 32), as_words(result.scales, 32)
                copy_words(source, to, first, end, AT_ONCE, grid.workers * BUNDLES)
        pid = tl.where(moved, -1, pid)
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    num_rows = num_rows.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    home, local = me // grid.ranks_per_node, me % grid.ranks_per_node
    peers = Peers(regions=regions, state=state, rank=me)
    routing = Routing(plan, me, num_tokens, num_experts, num_rows)
    bundle, worker = pid % BUNDLES, pid // BUNDLES
    TASKS: tl.constexpr = num_tasks(k.ranks, grid.nodes)
    ROUND: tl.constexpr = tasks_of_worker(TASKS, k.ranks, grid.workers, grid.senders, grid.bundle)
    if pid >= 0:
        begin_tasks(state, worker, bundle, TASKS, k)
        if k.padding:
            if worker == grid.workers - 1:
                zero_padding(routing, num_experts_of(routing, k), result, bundle, BUNDLES, k)
        step, idle, since = worker * 0, worker * 0, now_ns()
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left, direct = worker * 0, worker * 0
            for i in range(ROUND):
                place = place_in_round(i, bundle, TASKS, k)
                task, c = dealt(worker, place, bundle, TASKS, k)
                turn = Turn(channel=c, task=task, done=done_in(state, task, c, k), step=step)
                rows, relayed = _turn(peers, home, local, routing, payload, result, tag, turn, k)
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += rows
                direct += tl.where(relayed > 0, 0, rows)
                # behind tasks that copy inside the rank: meanwhile what others stored arrives
                if place == ROUND - 1:
                    flush_signals(state, worker, bundle, TASKS, k)
            step, idle, since = next_step(state, step, left, before, direct, idle, since)
            before = left
        flush_signals(state, worker, bundle, TASKS, k)


# The host's side


def bind_two_dispatch(
    workspace: Any, num_topk: int, row_layout: Any, mode: Any, dtype: Any, slots_per_row: int, *,
    padding: bool, behind_heaps: bool = False, **placed: bool,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature. May wait for the device.

    Args:
        workspace: an ``engines.workspace.PeerWorkspace``.
        row_layout: of a row on the wire.
        mode, dtype: how rows are cast on their way (None: not), and what the input holds.
        slots_per_row: columns of ``slots``.
        padding: blocks of experts end in rows of zeros.
        behind_heaps: a launch before may have moved the rows to heaps.
        placed: flags of a ``Placing``.
    """
    tuning, config, forward = workspace.tuning, workspace.tuning.dispatch, workspace.tuning.forward
    tasks = num_tasks(workspace.memory.world_size, workspace.grid.num_nodes)
    workers = tuning.workers(config, tasks, tuning.bundle)
    senders = tuning.senders(workers, workspace.grid) if mode is None else 0
    grid = grid_of(workspace, workers, senders, tuning.bundle)
    network, slots = network_ring_of(workspace, row_layout), workspace.slots(row_layout)
    ring = RingLayout(workspace.rings_at, workspace.ring_bytes, slots, config.chunk_of(slots))
    placing = placing_of(num_topk, slots_per_row, **placed)
    whole = min(power_of_two_at_least(row_layout.slot_bytes // 4), config.block)
    most = min(ring.chunk, network.chunk)
    if placing.by_expert and grid.nodes > 1:  # with the roles between nodes registers are few
        most = 1
    forwarded = min(most, max(1, MOST_FORWARDED // power_of_two_at_least(grid.ranks_per_node)))
    k = config_of(
        workspace, config, row_layout, mode, dtype, placing, most, padding=padding, grid=grid,
        ring=ring, network_ring=network, forward_block=whole,
        rows_forwarded=1 if placing.by_expert else forward.rows_of(whole, forwarded),
        at_once=grid.ranks_per_node > 1 and row_layout.bits == 32 and not placing.by_expert,
        behind_heaps=behind_heaps,
    )  # fmt: skip
    return workspace.bind(two_dispatch_kernel, workers * k.channels // grid.bundle, config, k)
