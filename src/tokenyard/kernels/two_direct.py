# pyright: basic
"""Dispatch in place over two levels: once per (token, node) through the network, then every row is
written once, where it stays.

G nodes of P ranks. Grid ``W C``: W workers per channel (``kernels/two_scheduler.py``). Tasks of a
channel: a network sender and a forwarder per other node, the rows for ranks of this node. Of one
node there are no others, and each program has an equal part of the tokens; the last worker of some
channels may be missing then, as any number of programs will do. Program 0 announces the call before
its tasks. Example: 2 nodes of 2 ranks, token 5 of rank 0 goes to all ranks: rank 0 writes it to its
own buffer and to rank 1's, and sends it once to rank 2, which writes it to its own buffer and to
rank 3's.

In-place buffers: ``kernels/direct.py``. Forwarders know from the plan where rows of a channel begin
at each rank of their node (``first_forwarded``).

HEAP, one node: each rank awaits its rows in a block of its heap, ``[meta | scales | rows]``. The
plan knows where the rows are and for how many there is room; there is meta for as many as any rank
may get, so that of all ranks begins as far before their rows (``metadata_at`` is negative), and
scales likewise. The launch may come before the host knows the counts: as one through rings it does
nothing if the plan says so. It gives up if a block is not inside of its heap.

Who may write to a block when: the rank takes it before it launches its plan, in the same stream, so
what used that memory before is over when its header comes. A worker writes behind all announcements
as always, which come behind the plans, that have seen all headers. The kernel ends when all workers
of all ranks have written; so the block is its rank's alone from then on, and may be given back.

TOLD: a cached dispatch to heaps has no plan that tells of blocks. Each rank stores the place of its
block to all (``blocks``) before it announces the call, so who has seen all announcements knows
all places. All read the same. If a rank has no block, no row moves, and the call ends as if there
were none. IN_HEAPS says which, to the launch through rings behind it in the same stream: that moves
rows if none have moved, and else copies the scales out of the block. It announces a call of its own
in any case, so that hosts know the number of the next one; if rows have moved it waits for nobody,
as no rank has anything to do. Words of half ``n % 2`` are written again in call n + 2, as tags are.
Example: rank 0 tells 3, its block begins at byte 512; rank 1 tells 0, it has none. All programs of
both ranks find that, nobody writes to byte 512, and rings take all.

Who publishes what, who may read when: of the network rings, as in ``kernels/two_dispatch.py`` (a
forwarder returns credits behind its reads); of in-place buffers, ``kernels/two_in_place.py``. There
are no rings inside a node.

Nobody waits in a circle: a forwarder needs its network sender only, a network sender the
forwarder's credits, of which less than CREDIT are held back, ``NQ >= NCHUNK + CREDIT - 1``; and all
need announcements, which wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tokenyard.kernels.direct import Buffers, write_rows
from tokenyard.kernels.dispatch import config_of, in_slots
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.place import num_experts_of, placing_of
from tokenyard.kernels.region import (
    EPOCH, go_of, in_bound, out_bound, peer_base, peer_word, place_of, plan_word,
)  # fmt: skip
from tokenyard.kernels.structs import Payload, Peers, Routing, Turn, grid_of, network_ring_of
from tokenyard.kernels.sync import (
    IN_HEAPS, ON_COUNTS, ON_ROWS, RANK, TIMED_OUT, all_agree, give_up, given_up, load_acquire,
    now_ns, words,
)  # fmt: skip
from tokenyard.kernels.two_dispatch import MOST_FORWARDED
from tokenyard.kernels.two_far import far_turn
from tokenyard.kernels.two_forward import destinations, return_credits
from tokenyard.kernels.two_headers import all_are_here, announce_call_to_all
from tokenyard.kernels.two_in_place import end_in_place
from tokenyard.kernels.two_region import (
    ON_NET_ROWS, done_in, first_forwarded, moved_of, net_tail, net_taken_from, other, ring_at,
    table_of, table_rows,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import (
    ON_TIME, OVER, begin_tasks, dealt, flush_signals, next_step, place_in_round, reports,
    rows_of_turn,
)  # fmt: skip
from tokenyard.routing import power_of_two_at_least


@triton.constexpr_function
def near_tasks(nodes, workers):
    """Tasks of a channel that write rows to ranks of this node: where there is no other node, one
    for each worker."""
    return workers if nodes == 1 else 1


@triton.jit
def _near_turn(peers, routing, payload, buffers, part, turn, ready, k: tl.constexpr):
    """A chunk of this channel's tokens, of one node of its worker ``part``, to those ranks of this
    node that need them. Returns the tokens that are left."""
    P: tl.constexpr = k.grid.ranks_per_node
    c, me = part * k.channels + turn.channel, peers.rank
    parts = tl.num_programs(0) if k.grid.nodes == 1 else k.channels
    share = (routing.num_tokens + parts - 1) // parts
    t1 = tl.minimum(c * share + share, routing.num_tokens)
    i0 = tl.load(turn.done).to(tl.int32)
    left = tl.maximum(t1 - c * share, 0) - i0
    tl.debug_barrier()
    if (left > 0) & ready:
        b, q = tl.arange(0, k.rows_sent), tl.arange(0, k.grid.local_bins)
        home, near = me // P, (q < P)[None, :]
        firsts = tl.load(plan_word(routing.plan, "first_out", home * P + q, k), mask=q < P, other=0)
        n = tl.minimum(left, k.network_ring.chunk)
        for j in range(0, n, k.rows_sent):
            t, here = c * share + i0 + j + b, j + b < n
            table = place_of(routing.plan, t, routing.num_tokens, k)[:, None]
            places = tl.load(table + home * P + q[None, :], mask=here[:, None] & near, other=-1)
            rows = tl.where(places >= 0, places + firsts[None, :], -1)
            write_rows(
                payload, t, here, rows, buffers, me + 1 + c, k.in_memory, P, k.cast.mode > 0, k
            )
        left -= n
        tl.store(turn.done, (i0 + n).to(tl.int64))
    return left


@triton.jit
def _place_turn(peers, routing, buffers, node, turn, ready, k: tl.constexpr):
    """A chunk of rows of this channel from ``node`` out of the network ring, to the buffers of the
    local ranks that need them."""
    net: tl.constexpr = k.network_ring
    P: tl.constexpr = k.grid.ranks_per_node
    plan, c, me = routing.plan, turn.channel, peers.rank
    lo, hi, i0 = rows_of_turn(in_bound, plan, k.ranks + node, turn, k)
    base = tl.load(net_taken_from(peers.state, node, c, k))
    left = hi - lo - i0
    if left > 0:
        mine, home, source = peer_base(peers.regions, me), me // P, node * P + me % P
        want = base + i0 + 1
        seen = load_acquire(words(mine + net_tail(node, c, k)))
        b, q = tl.arange(0, k.rows_forwarded), tl.arange(0, k.grid.local_bins)
        near = q < P
        moved_at = moved_of(peers.state, 0, node * P + q, c, k)
        counts = tl.load(moved_at, mask=near & (i0 > 0), other=0).to(tl.int32)
        tl.debug_barrier()
        if reports(turn.step, seen < want, False):
            give_up(peers.state, TIMED_OUT, ON_NET_ROWS, node, c, want, seen)
        elif (seen >= want) & ready & (turn.step == ON_TIME):
            cap = tl.load(table_rows(plan, k))
            local = num_experts_of(routing, k)
            number = other(node, home)
            table = table_of(routing, local, cap, number, k)
            first_rows = first_forwarded(plan, routing.num_tokens, local, number, q, c, k)
            first_rows = tl.load(first_rows, mask=near, other=0)
            ring = ring_at(mine, number, c, k)
            n = tl.minimum(tl.minimum((seen - base).to(tl.int32) - i0, left), net.chunk)
            for j in range(0, n, k.rows_forwarded):
                i, here = i0 + j + b, j + b < n
                entries = table + (lo + i).to(tl.int64)[:, None] * P + q[None, :]
                inside = here[:, None] & near[None, :] & (lo + i < cap)[:, None]
                hit, at = destinations(
                    ring, entries, i, here, inside, counts, home, routing.num_experts, k
                )
                if k.placing.fresh:
                    at = tl.where(hit > 0, at, -1)
                    tl.store(entries, at, mask=inside)
                    counts += tl.sum(hit, axis=0)
                rows = tl.where(at >= 0, at + first_rows[None, :], -1)
                slots = in_slots(ring, k.row)
                write_rows(
                    slots, i % net.slots, here, rows, buffers, me + 1 + c, k.in_slot, P, False, k
                )
            left, i1 = left - n, i0 + n
            tl.store(turn.done, i1.to(tl.int64))
            if k.placing.fresh:
                tl.store(moved_at, counts.to(tl.int64), mask=near)
            return_credits(peers, mine, home, source, node, turn, i0, i1, left == 0, k)
            if left == 0:
                tl.store(net_taken_from(peers.state, node, c, k), base + hi - lo)
    return left


@triton.jit
def _turn(peers, home, routing, payload, buffers, turn, ready, k: tl.constexpr):
    """A turn of any task: rows (tokens) left to do. ``home``: this rank's node."""
    NODES: tl.constexpr = k.grid.nodes
    FAR: tl.constexpr = 2 * (NODES - 1)  # tasks between nodes: the first ones
    task = turn.task
    rows = task * 0
    if task < NODES - 1:
        if FAR:
            rows = far_turn(peers, routing, payload, (home + 1 + task) % NODES, turn, k)
    elif task < FAR:
        if FAR:
            node = (home + FAR - task) % NODES
            rows = _place_turn(peers, routing, buffers, node, turn, ready, k)
    elif task < FAR + near_tasks(NODES, k.grid.workers):
        rows = _near_turn(peers, routing, payload, buffers, task - FAR, turn, ready, k)
    return rows


@triton.jit
def _announce(peers, call, awaited, tag, k: tl.constexpr):
    """Announce the call to all ranks; before, tell them where this one's block is, if they have to
    know."""
    if k.told:
        r = tl.arange(0, k.rank_bins)
        bases = tl.load(words(peers.regions) + r, mask=r < k.ranks, other=0)
        told = peer_word(bases, "blocks", peers.rank, k, (call % 2).to(tl.int32))
        tl.store(told, awaited + (r * 0), mask=r < k.ranks)
    announce_call_to_all(peers.regions, peers.state, tag, k)


@triton.jit
def _in_blocks(
    state, buffers, places, rows, metadata_at, heap_bytes, phase: tl.constexpr, k: tl.constexpr
):
    """Where rows begin in the blocks at ``places [local_bins]`` of all heaps, and whether so many
    ``rows`` are inside of each. Gives up on a rank whose are not, in ``phase``."""
    q = tl.arange(0, k.grid.local_bins)
    near, begin = q < k.ranks, places.to(tl.int64) * 256 - 256
    end = begin + rows.to(tl.int64) * (k.row.words * k.row.word_bits // 8)
    wrong = (begin + metadata_at < 0) | (rows < 0) | (places > heap_bytes) | (end > heap_bytes)
    ok = all_agree(state, phase, near & wrong, heap_bytes, end)
    return tl.load(words(buffers) + q, mask=near, other=0) + begin, ok


@triton.jit
def _near_rows(plan, state, buffers, home, metadata_at, heap_bytes, k: tl.constexpr):
    """Addresses of the rows in the buffers of this node's ranks ``[local_bins]``, and whether all
    are where they may be."""
    q = tl.arange(0, k.grid.local_bins)
    near, ok = q < k.grid.ranks_per_node, True
    if k.heap:
        places = tl.load(plan_word(plan, "places", q, k), mask=near, other=1)
        rooms = tl.load(plan_word(plan, "rooms", q, k), mask=near, other=0)
        rows, ok = _in_blocks(state, buffers, places, rooms, metadata_at, heap_bytes, ON_COUNTS, k)
    else:
        rows = tl.load(words(buffers) + home * k.grid.ranks_per_node + q, mask=near, other=0)
    return rows, ok


@triton.jit
def _told_rows(peers, plan, buffers, call, before, heap_bytes, k: tl.constexpr):
    """The same of a cached dispatch to heaps, whose blocks begin ``before`` (negative) their rows,
    behind all announcements; and whether every rank has a block: else no row moves."""
    q = tl.arange(0, k.grid.local_bins)
    near, mine = q < k.ranks, peer_base(peers.regions, peers.rank)
    places = tl.load(peer_word(mine, "blocks", q, k, (call % 2).to(tl.int32)), mask=near, other=1)
    last = tl.load(plan_word(plan, "first_out", q, k), mask=near, other=0)
    last += tl.load(out_bound(plan, q, k.channels, k), mask=near, other=0)
    moves = tl.min(places) > 0
    places, last = tl.where(moves, places, 1), tl.where(moves, last, 0)
    before = tl.where(moves, before, 0)
    rows, ok = _in_blocks(peers.state, buffers, places, last, before, heap_bytes, ON_ROWS, k)
    return rows, ok, moves


@triton.jit
def _note_where(peers, pid, moves, rows, scales_at, k: tl.constexpr):
    """Note IN_HEAPS of a call whose ranks' rows are at ``rows [local_bins]``, if they ``move``."""
    mine = tl.sum(tl.where(tl.arange(0, k.grid.local_bins) == peers.rank, rows, 0))
    if pid == 0:
        tl.store(words(peers.state) + IN_HEAPS, tl.where(moves, mine + scales_at, 0))


@triton.jit(repr=shown_as("twolevel::dispatch_direct"))
def two_direct_kernel(
    regions, state, plan, buffers, payload: Payload, tag, num_tokens, scales_at, metadata_at,
    heap_bytes, awaited, num_experts, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a ``DispatchConfig``; ``buffers`` the table of in-place buffers, or
    of heaps of ``heap_bytes``, ``awaited`` what this rank tells of its block; scales and metadata
    begin ``scales_at`` and ``metadata_at`` bytes behind rows."""
    grid: tl.constexpr = k.grid
    pid = tl.where(given_up(state), -1, tl.program_id(0))
    if k.heap:
        pid = tl.where(tl.load(go_of(plan, k)) == 0, -1, pid)
    num_tokens, num_experts = num_tokens.to(tl.int32), num_experts.to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    call = tl.load(words(state) + EPOCH)
    home = me // grid.ranks_per_node
    peers = Peers(regions=regions, state=state, rank=me)
    c, worker = pid % k.channels, pid // k.channels
    TASKS: tl.constexpr = 2 * grid.nodes - 2 + near_tasks(grid.nodes, grid.workers)
    if pid >= 0:
        begin_tasks(state, worker, c, TASKS, k)
        if pid == 0:
            _announce(peers, call, awaited, tag, k)
        rows, ok = _near_rows(plan, state, buffers, home, metadata_at, heap_bytes, k)
        step, idle, since, ready = worker * 0, worker * 0, now_ns(), worker < 0
        moves = worker >= 0
        step += tl.where(ok, 0, OVER)
        before, left = worker * 0, worker * 0 + 1
        while (left > 0) & (step < OVER):
            left = worker * 0
            # the first thing to report: while somebody lacks it, others may lack room and rows
            if not ready:
                if before > 0:  # who waits has come to the barrier itself before
                    ready = all_are_here(regions, state, tag, call, step, pid == 0, k)
                    if k.told:
                        if ready:
                            rows, ok, moves = _told_rows(
                                peers, plan, buffers, call, metadata_at, heap_bytes, k
                            )
                            num_tokens = tl.where(moves, num_tokens, 0)
                            step += tl.where(ok, 0, OVER)
                            ready = ok
                # it came in this round: the next one has nothing else to end for
                left += tl.where(ready, 0, 1)
            routing = Routing(plan, me, num_tokens, num_experts, num_rows=0)
            targets = Buffers(rows=rows, scales_at=scales_at, metadata_at=metadata_at)
            for i in range((TASKS + grid.workers - 1) // grid.workers):
                task, _ = dealt(worker, place_in_round(i, c, TASKS, k), c, TASKS, k)
                turn = Turn(channel=c, task=task, done=done_in(state, task, c, k), step=step)
                todo = _turn(peers, home, routing, payload, targets, turn, ready, k)
                tl.debug_barrier()  # what the turn has noted, it reads in the next
                left += todo
            flush_signals(state, worker, c, TASKS, k)
            step, idle, since = next_step(state, step, left, before, left, idle, since)
            before = left
        if step < OVER:
            if k.told:
                _note_where(peers, pid, moves, rows, scales_at, k)
            end_in_place(regions, state, k)


# The host's side


def bind_two_direct(
    workspace: Any, num_topk: int, row_layout: Any, mode: Any, dtype: Any, *, heap: bool = False
) -> Callable[..., None]:
    """Compile and load the kernel of a dispatch in place for one call signature: see
    ``bind_two_dispatch``. ``heap``: to blocks of heaps."""
    config, programs = workspace.tuning.direct, workspace.direct_programs
    grid = grid_of(workspace, -(-programs // workspace.tuning.channels))
    network, fresh = network_ring_of(workspace, row_layout), row_layout.meta_words > 0
    placing = placing_of(num_topk, 1, by_expert=False, fresh=fresh)
    block = min(power_of_two_at_least(row_layout.words), config.block)
    most = max(1, MOST_FORWARDED // power_of_two_at_least(grid.ranks_per_node))
    k = config_of(
        workspace, config, row_layout, mode, dtype, placing, network.chunk, grid=grid,
        network_ring=network, rows_forwarded=config.rows_of(block, min(network.chunk, most)),
        heap=heap and fresh, told=heap and not fresh,
    )  # fmt: skip
    return workspace.bind(two_direct_kernel, programs, config, k)
