# pyright: basic
"""Where things lie for the two-level engine, beside what ``kernels/region.py`` places. Host and
kernels use the same tables: parts in their order, from whose sizes all offsets follow.

R ranks in G nodes of P, C channels, W words of a header, LW words of a node header. In the
symmetric region, from ``grid.first_byte`` on, int64 (:func:`signal_table`):

    counters  net tails [G, C], net heads [G, C]; written by the node's rank of my local index: rows
              put into my network ring (node, channel), in total; rows of mine taken out of its ring
              (my node, channel), in total
    node headers   [2, R, LW]  written by ranks of other nodes: header, row of the matrix, bounds to
    me,
              bounds to my node, rows to my node; from ranks of my local index also bounds to each
              rank of my node
    outbox    [2, R, LW]  mine: node headers to be put
    tags      [2]  mine: tags to be put
    rest      [2]  written by everybody, read by nobody: what a credit carries

Behind all inner rings stand the network rings, one per (other node, channel), and behind these the
source of their puts, likewise. The local state is :func:`state_table`.

A plan's tables know R + G destinations: node g stands at R + g. Behind them stand the first
forwarded rows ``[G - 1, P, C]``: the arrival row at each rank of my node where those of the other
node's rank of my local index begin, by channel; and the forwarders' table ``[G - 1, cap, P]``:
where each row of a network ring went, by local rank: its number in the inner ring (-1: not there).
``cap`` stands at ``first_out(R)``.

``k`` of functions here is any struct of constants with ``ranks``, ``plan_ranks``, ``channels`` and
``grid``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard import topology
from tokenyard.kernels.region import _head, before, ints, plan_table, plan_word
from tokenyard.kernels.sync import STATE_WORDS, words

_STATE = tl.constexpr(STATE_WORDS)
# what a wait is on; the status has it as the phase, behind those of ``kernels/sync.py``
ON_NET_ROWS, ON_NET_ROOM, ON_ROOMS, ON_PARTS, ON_BOTH = (tl.constexpr(at) for at in range(6, 11))

# Sizes


@triton.constexpr_function
def short_node_header_words(ranks: int, channels: int, header_words: int) -> int:
    """int64 words of a node header to a rank of another local index, even."""
    return -(-(header_words + ranks + 2 + 2 * channels + 1) // 2) * 2


@triton.constexpr_function
def node_header_words(ranks: int, ranks_per_node: int, channels: int, header_words: int) -> int:
    """int64 words of a node header to a rank of the same local index, even."""
    short = short_node_header_words(ranks, channels, header_words)
    return short + -(-ranks_per_node * channels // 2) * 2


num_tasks = triton.constexpr_function(topology.num_tasks)


@triton.constexpr_function
def deferred_words(ranks_per_node: int) -> int:
    """Counters that one turn of a task may add to: a power of two."""
    return max(2, 1 << (ranks_per_node - 1).bit_length())


def first_forwarded_words(ranks: int, nodes: int, channels: int) -> int:
    """int32 words of the first forwarded rows in a plan."""
    return (nodes - 1) * ranks // nodes * channels


def table_rows_at(ranks: int, nodes: int, channels: int) -> int:
    """int32 word of a plan at which :func:`table_rows` stands."""
    return before("first_out", plan_table(ranks + nodes, channels)) + ranks


# Tables


@triton.constexpr_function
def signal_table(ranks: int, nodes: int, channels: int, header_words: int) -> dict[str, int]:
    """int64 words of each part of the region between nodes."""
    node_headers = 2 * ranks * node_header_words(ranks, ranks // nodes, channels, header_words)
    return {
        "counters": 2 * nodes * channels, "node_headers": node_headers, "outbox": node_headers,
        "tags": 2, "rest": 2,
    }  # fmt: skip


@triton.constexpr_function
def state_table(ranks: int, nodes: int, channels: int) -> dict[str, int]:
    """int64 words of each part of a rank's state behind that of ``region.state_words``."""
    tasks = num_tasks(ranks, nodes)
    return {
        "rows": 2 * nodes * channels,  # sent to each network ring, taken out of each of mine
        "bytes": nodes,
        "done": tasks * channels,
        "moved": 2 * (ranks + nodes) * channels,
        # a counter and how much each
        "deferred": 2 * tasks * deferred_words(ranks // nodes) * channels,
        "since": tasks * channels,
    }


@triton.constexpr_function
def state_at(part: str, ranks: int, nodes: int, channels: int) -> int:
    """Word of a rank's state where ``part`` begins."""
    return STATE_WORDS + 2 * ranks * channels + before(part, state_table(ranks, nodes, channels))


def far_bytes(ranks: int, nodes: int, channels: int, header_words: int) -> int:
    """Bytes of the region between nodes, a multiple of 256."""
    return -(-sum(signal_table(ranks, nodes, channels, header_words).values()) // 32) * 256


def state_words(ranks: int, nodes: int, channels: int) -> int:
    """Words of a rank's state."""
    return STATE_WORDS + 2 * ranks * channels + sum(state_table(ranks, nodes, channels).values())


# The symmetric region, in bytes


@triton.jit
def net_tail(node, channel, k: tl.constexpr):
    """Written by ``node``'s rank: rows put into my network ring (node, channel), in total."""
    return k.grid.first_byte + (node * k.channels + channel).to(tl.int64) * 8


@triton.jit
def net_head(node, channel, k: tl.constexpr):
    """Written by ``node``'s rank: rows of mine that it has taken out of its network ring, in
    total."""
    return k.grid.first_byte + ((k.grid.nodes + node) * k.channels + channel).to(tl.int64) * 8


@triton.jit
def node_header_at(outbox: tl.constexpr, parity, peer, k: tl.constexpr):
    """The node header from ``peer``, or mine to it (``outbox``)."""
    W: tl.constexpr = k.grid.header_words
    LW: tl.constexpr = node_header_words(k.ranks, k.grid.ranks_per_node, k.channels, W)
    first: tl.constexpr = before("node_headers", signal_table(k.ranks, k.grid.nodes, k.channels, W))
    at = first + ((outbox * 2 + parity) * k.ranks + peer) * LW
    return k.grid.first_byte + at.to(tl.int64) * 8


@triton.jit
def tag_at(parity, k: tl.constexpr):
    """My tag to be put."""
    W: tl.constexpr = k.grid.header_words
    first: tl.constexpr = before("tags", signal_table(k.ranks, k.grid.nodes, k.channels, W))
    return k.grid.first_byte + (first + parity).to(tl.int64) * 8


@triton.jit
def rest_at(k: tl.constexpr):
    """What nobody reads."""
    W: tl.constexpr = k.grid.header_words
    first: tl.constexpr = before("rest", signal_table(k.ranks, k.grid.nodes, k.channels, W))
    return tl.full((), k.grid.first_byte + first * 8, tl.int64)


@triton.jit
def ring_at(base, number, channel, k: tl.constexpr):
    """The network ring of the other node of this ``number``, behind ``base``."""
    net: tl.constexpr = k.network_ring
    return base + net.first_byte + (number * k.channels + channel).to(tl.int64) * net.num_bytes


@triton.jit
def staging_at(number, channel, k: tl.constexpr):
    """Where rows wait to be put to that node."""
    net: tl.constexpr = k.network_ring
    return net.staging + (number * k.channels + channel).to(tl.int64) * net.num_bytes


# A rank's state


@triton.jit
def net_sent_to(state, node, channel, k: tl.constexpr):
    """Rows put into the network ring of ``node``'s rank, in total. One program touches it per
    kernel."""
    first: tl.constexpr = state_at("rows", k.ranks, k.grid.nodes, k.channels)
    return words(state) + first + node * k.channels + channel


@triton.jit
def net_taken_from(state, node, channel, k: tl.constexpr):
    """Rows taken out of my network ring (node, channel), in total. One program touches it per
    kernel."""
    first: tl.constexpr = state_at("rows", k.ranks, k.grid.nodes, k.channels)
    return words(state) + first + (k.grid.nodes + node) * k.channels + channel


@triton.jit
def net_bytes(state, node, k: tl.constexpr):
    """Bytes of all kinds that this rank has put to ``node``, in total."""
    return words(state) + state_at("bytes", k.ranks, k.grid.nodes, k.channels) + node


@triton.jit
def done_in(state, task, channel, k: tl.constexpr):
    """Rows (tokens) of this call that a task is done with. One program touches it per kernel."""
    first: tl.constexpr = state_at("done", k.ranks, k.grid.nodes, k.channels)
    return words(state) + first + task * k.channels + channel


@triton.jit
def since_in(state, task, channel, k: tl.constexpr):
    """Since when a task lacks something, 0: it does not. One program touches it per kernel."""
    first: tl.constexpr = state_at("since", k.ranks, k.grid.nodes, k.channels)
    return words(state) + first + task * k.channels + channel


@triton.jit
def moved_of(state, what: tl.constexpr, r, channel, k: tl.constexpr):
    """Rows of this call put into (0: or taken out of) the rings of destination r, or taken but not
    credited (1). A forwarder and a combiner have those of one node's ranks, a reducer those of its
    own node's ranks and of other nodes."""
    first: tl.constexpr = state_at("moved", k.ranks, k.grid.nodes, k.channels)
    part: tl.constexpr = what * (k.ranks + k.grid.nodes) * k.channels
    return words(state) + (first + part) + r * k.channels + channel


@triton.jit
def deferred_of(state, task, channel, q, k: tl.constexpr):
    """Address of the ``q``-th counter that a task's last turn adds to, and behind it how much. 0:
    nothing, or it is published."""
    first: tl.constexpr = state_at("deferred", k.ranks, k.grid.nodes, k.channels)
    each: tl.constexpr = deferred_words(k.grid.ranks_per_node)
    return words(state) + first + ((task * k.channels + channel) * each + q) * 2


# A plan's tables: int32


@triton.jit
def other(node, mine):
    """Index of ``node`` among the nodes other than ``mine``."""
    return node - (node > mine).to(tl.int32)


@triton.jit
def table_rows(plan, k: tl.constexpr):
    """Rows of each node's part of the forwarders' table."""
    return plan_word(plan, "first_out", k.ranks, k)


@triton.jit
def _landings_at(tokens, local, k: tl.constexpr):
    """Words of a plan before the first forwarded rows. ``local``: experts of this rank."""
    D: tl.constexpr = k.plan_ranks
    return _head(D, k.channels) + 2 * D * tokens.to(tl.int64) + local * (D + 2)


@triton.jit
def table_of(routing, local, cap, number, k: tl.constexpr):
    """The forwarders' table of the other node of this ``number``, ``[cap, P]``."""
    P: tl.constexpr = k.grid.ranks_per_node
    FIRST_FORWARDED: tl.constexpr = (k.grid.nodes - 1) * P * k.channels
    start = _landings_at(routing.num_tokens, local, k)
    return ints(routing.plan) + (start + FIRST_FORWARDED) + number * cap.to(tl.int64) * P


@triton.jit
def first_forwarded(plan, tokens, local, number, q, channel, k: tl.constexpr):
    """The arrival row at rank ``q`` of my node where rows of ``channel`` begin that come from the
    other node's rank of my local index."""
    start = _landings_at(tokens, local, k)
    return ints(plan) + start + (number * k.grid.ranks_per_node + q) * k.channels + channel
