# pyright: basic
"""Where things lie for the two-level engine, beside what ``kernels/region.py`` places. Host and kernels use the same functions.

R ranks in G nodes of P, C channels, W words of a header, LW words of a letter. In the symmetric region, from byte FAR on, int64:

    net tails [G, C]  written by the node's rank of my local index: rows put into my network ring (node, channel), in total
    net heads [G, C]  written by the same: rows of mine taken out of its ring (my node, channel), in total
    letters [2, R, LW]  written by ranks of other nodes: header, row of the matrix, bounds to me, bounds to my node, rows to my node;
                        from ranks of my local index also bounds to each rank of my node
    outbox  [2, R, LW]  mine: letters to be put
    tag     [2]  mine: tags to be put
    rest    [2]  written by everybody, read by nobody: what a credit carries

From byte NETS on: a network ring of NRING bytes per (other node, channel); from byte STAGE on: the source of its puts, likewise.

A plan's tables know D = R + G destinations: node g stands at R + g. Behind them stand the landings ``[G - 1, P, C]``: the arrival row at each
rank of my node where those of the other node's rank of my local index begin, by channel; and the forwarders' table ``[G - 1, cap, P]``: where
each row of a network ring went, by local rank: its number in the inner ring (-1: not there). ``cap`` stands at ``first_out(R)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.region import _head, first_out
from tokenyard.kernels.sync import STATE_WORDS

_STATE = tl.constexpr(STATE_WORDS)
# what a wait is on; the status has it as the phase, behind those of ``kernels/sync.py``
ON_NET_ROWS, ON_NET_ROOM, ON_ROOMS, ON_PARTS, ON_BOTH = (tl.constexpr(phase) for phase in range(6, 11))


@triton.constexpr_function
def short_letter_words(ranks: int, channels: int, header_words: int) -> int:
    """int64 words of a letter to a rank of another local index, even."""
    return -(-(header_words + ranks + 2 + 2 * channels + 1) // 2) * 2


@triton.constexpr_function
def letter_words(ranks: int, ranks_per_node: int, channels: int, header_words: int) -> int:
    """int64 words of a letter to a rank of the same local index, even."""
    return short_letter_words(ranks, channels, header_words) + -(-ranks_per_node * channels // 2) * 2


def far_words(ranks: int, nodes: int, channels: int, header_words: int) -> int:
    """int64 words from FAR on, a multiple of 32."""
    words = 2 * nodes * channels + 4 * ranks * letter_words(ranks, ranks // nodes, channels, header_words) + 4
    return -(-words // 32) * 32


def landing_words(ranks: int, nodes: int, channels: int) -> int:
    """int32 words of the landings in a plan."""
    return (nodes - 1) * ranks // nodes * channels


@triton.constexpr_function
def num_tasks(ranks: int, nodes: int) -> int:
    """Tasks of a channel in dispatch, the kernel that has more (``kernels/two_turns.py``); the last one greets."""
    return ranks + ranks // nodes + nodes - 1


def far_state_words(ranks: int, nodes: int, channels: int) -> int:
    """Words of local state behind those of ``region.state_words``."""
    tasks = num_tasks(ranks, nodes)
    return 2 * nodes * channels + nodes + (tasks + 2 * (ranks + nodes) + 2 * tasks * owed_words(ranks // nodes)) * channels


@triton.constexpr_function
def owed_words(ranks_per_node: int) -> int:
    """Counters that one turn of a task may add to: a power of two."""
    return max(2, 1 << (ranks_per_node - 1).bit_length())


def net_bytes_at(ranks: int, nodes: int, channels: int) -> int:
    """Word of the local state from which on :func:`net_bytes` stand."""
    return STATE_WORDS + 2 * ranks * channels + 2 * nodes * channels


def table_rows_at(ranks: int, nodes: int, channels: int) -> int:
    """int32 word of a plan at which :func:`table_rows` stands."""
    return 2 * (ranks + nodes) * (channels + 1) + (ranks + nodes) + ranks


@triton.jit
def net_tail(node, channel, C: tl.constexpr, FAR: tl.constexpr):
    """Byte of the region: written by ``node``'s rank: rows put into my network ring (node, channel), in total."""
    return FAR + (node * C + channel).to(tl.int64) * 8


@triton.jit
def net_head(node, channel, G: tl.constexpr, C: tl.constexpr, FAR: tl.constexpr):
    """Byte of the region: written by ``node``'s rank: rows of mine that it has taken out of its network ring, in total."""
    return FAR + ((G + node) * C + channel).to(tl.int64) * 8


@triton.jit
def letter_at(outbox: tl.constexpr, half, peer, R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr):
    """Byte of the region: the letter from ``peer``, or mine to it (``outbox``)."""
    LW: tl.constexpr = letter_words(R, P, C, W)
    return FAR + (2 * (R // P) * C + ((outbox * 2 + half) * R + peer) * LW).to(tl.int64) * 8


@triton.jit
def tag_at(half, R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr):
    """Byte of the region: my tag to be put."""
    LW: tl.constexpr = letter_words(R, P, C, W)
    return FAR + (2 * (R // P) * C + 4 * R * LW + half).to(tl.int64) * 8


@triton.jit
def net_sent_to(state, node, channel, R: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Local: rows put into the network ring of ``node``'s rank, in total. One program touches it per kernel."""
    return state.to(tl.pointer_type(tl.int64)) + _STATE + 2 * R * C + node * C + channel


@triton.jit
def net_taken_from(state, node, channel, R: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Local: rows taken out of my network ring (node, channel), in total. One program touches it per kernel."""
    return state.to(tl.pointer_type(tl.int64)) + _STATE + 2 * R * C + (G + node) * C + channel


@triton.jit
def net_bytes(state, node, R: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Local: bytes of all kinds that this rank has put to ``node``, in total."""
    return state.to(tl.pointer_type(tl.int64)) + _STATE + 2 * R * C + 2 * G * C + node


@triton.jit
def done_in(state, task, channel, R: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Local: rows (tokens) of this call that a task is done with. One program touches it per kernel."""
    return state.to(tl.pointer_type(tl.int64)) + _STATE + 2 * R * C + 2 * G * C + G + task * C + channel


@triton.jit
def moved_of(state, what: tl.constexpr, r, channel, R: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Local: rows of this call put into (0: or taken out of) the rings of destination r, or taken but not credited (1).

    A forwarder and a combiner have those of one node's ranks, a reducer those of its own node's ranks and of other nodes.
    """
    start: tl.constexpr = _STATE + 2 * R * C + 2 * G * C + G + (num_tasks(R, G) + what * (R + G)) * C
    return state.to(tl.pointer_type(tl.int64)) + start + r * C + channel


@triton.jit
def owed_of(state, task, channel, q, R: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Local: address of the ``q``-th counter that a task's last turn adds to, and behind it how much. 0: nothing, or it is published."""
    start: tl.constexpr = _STATE + 2 * R * C + 2 * G * C + G + (num_tasks(R, G) + 2 * (R + G)) * C
    return state.to(tl.pointer_type(tl.int64)) + start + ((task * C + channel) * owed_words(R // G) + q) * 2


@triton.jit
def other(node, mine):
    """Index of ``node`` among the nodes other than ``mine``."""
    return node - (node > mine).to(tl.int32)


@triton.jit
def table_rows(plan, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Rows of each node's part of the forwarders' table."""
    return first_out(plan, R, D, C)


@triton.jit
def table_of(plan, tokens, local, cap, number, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """The forwarders' table of the other node of this ``number``, ``[cap, P]``. ``local``: experts of this rank."""
    LANDINGS: tl.constexpr = (D // (P + 1) - 1) * P * C
    start = _head(D, C) + 2 * D * tokens.to(tl.int64) + local * (D + 2) + LANDINGS
    return plan.to(tl.pointer_type(tl.int32)) + start + number * cap.to(tl.int64) * P


@triton.jit
def landing_of(plan, tokens, local, number, q, channel, D: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """The arrival row at rank ``q`` of my node where rows of ``channel`` begin that come from the other node's rank of my local index."""
    start = _head(D, C) + 2 * D * tokens.to(tl.int64) + local * (D + 2)
    return plan.to(tl.pointer_type(tl.int32)) + start + (number * P + q) * C + channel


@triton.jit
def rest_at(R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, FAR: tl.constexpr):
    """Byte of the region: what nobody reads."""
    LW: tl.constexpr = letter_words(R, P, C, W)
    return tl.full((), FAR + (2 * (R // P) * C + 4 * R * LW + 2) * 8, tl.int64)
