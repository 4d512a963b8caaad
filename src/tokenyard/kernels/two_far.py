# pyright: basic
"""The network sender of a dispatch over two levels: rows go once per (token, node), to the rank of
its local index.

Who publishes what, and who may read it when: ``kernels/two_dispatch.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.dispatch import TOGETHER, pack_metadata, pack_rows
from tokenyard.kernels.region import order_of, out_bound, peer_base
from tokenyard.kernels.sync import TIMED_OUT, give_up, load_acquire, words
from tokenyard.kernels.two_net import put
from tokenyard.kernels.two_region import (
    ON_NET_ROOM, net_bytes, net_head, net_sent_to, net_tail, other, ring_at, staging_at,
)  # fmt: skip
from tokenyard.kernels.two_scheduler import ON_TIME, defer_signal, reports, rows_of_turn


@triton.jit
def _pack_chunk(payload, order, ring, first, lo, i, n, k: tl.constexpr):
    """Pack rows ``lo + i`` .. of ``order`` into the slots of a ring from ``first`` on."""
    b = tl.arange(0, k.rows_sent)
    several = tl.arange(0, TOGETHER)
    for j in range(0, n, k.rows_sent):
        token = tl.load(order + lo + i + j + b, mask=j + b < n, other=0)
        pack_rows(payload.rows, token, ring, first + j + b, j + b < n, k)
    if k.row.metadata_words or (k.row.scale_words and not k.cast.mode):
        for j in range(0, n, TOGETHER):
            token = tl.load(order + lo + i + j + several, mask=j + several < n, other=0)
            pack_metadata(payload, token, ring, first + j + several, j + several < n, k)


@triton.jit
def put_chunk(peers, node, home, mine, to, there, here, first, n, turn, k: tl.constexpr):
    """Put ``n`` rows to rank ``to`` of ``node``, with their number: from slot ``first`` of the ring
    at byte ``here`` to that of the ring at byte ``there``. Mapped memory holds them already."""
    state, c = peers.state, turn.channel
    at, count = first.to(tl.int64) * k.row.slot_bytes, n.to(tl.int64)
    num_bytes = count * k.row.slot_bytes
    account = net_bytes(state, node, k)
    tail = net_tail(home, c, k)
    if k.grid.mapped:
        tl.atomic_add(account, num_bytes, sem="relaxed", scope="gpu")
        tail = peer_base(peers.regions, to) + tail
        defer_signal(state, turn, 0, tail, count, None, k)
    else:
        target, source = there + at, here + at
        put(peers.regions, account, mine, to, target, source, num_bytes, tail, count, 2, True)


@triton.jit
def far_turn(peers, routing, payload, node, turn, k: tl.constexpr):
    """A chunk of rows of this channel for ``node`` into the network ring of its rank of my local
    index. ``k``: a ``DispatchConfig``."""
    grid: tl.constexpr = k.grid
    net: tl.constexpr = k.network_ring
    state, c = peers.state, turn.channel
    lo, hi, i = rows_of_turn(out_bound, routing.plan, k.ranks + node, turn, k)
    base = tl.load(net_sent_to(state, node, c, k))
    left = hi - lo - i
    if left > 0:
        mine, home = peer_base(peers.regions, peers.rank), peers.rank // grid.ranks_per_node
        to = node * grid.ranks_per_node + peers.rank % grid.ranks_per_node
        n = tl.minimum(left, net.chunk)
        # ring and staging are drained before the first row
        want = base + tl.maximum(i + n - net.slots, 0)
        seen = load_acquire(words(mine + net_head(node, c, k)))
        tl.debug_barrier()
        if turn.step != ON_TIME:
            if reports(turn.step, seen < want, False):
                give_up(state, TIMED_OUT, ON_NET_ROOM, node, c, want, seen)
        elif seen >= want:
            here = staging_at(other(node, home), c, k)
            there = ring_at(0, other(home, node), c, k)
            ring = peer_base(peers.regions, to) + there if grid.mapped else mine + here
            order = order_of(routing.plan, k.ranks + node, routing.num_tokens, k)
            first = i % net.slots  # chunks begin at multiples of net.chunk, and so the ring ends
            _pack_chunk(payload, order, ring, first, lo, i, n, k)
            put_chunk(peers, node, home, mine, to, there, here, first, n, turn, k)
            left -= n
            tl.store(turn.done, (i + n).to(tl.int64))
            if left == 0:
                tl.store(net_sent_to(state, node, c, k), base + hi - lo)
    return left
