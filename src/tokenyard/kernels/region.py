# pyright: basic
"""Where things lie: the symmetric region, a rank's local state, a plan's tables. Host and kernels
use the same tables: parts in their order, from whose sizes all offsets follow. ``k`` of kernels'
functions is any struct of constants with ``ranks``, ``plan_ranks`` and ``channels``.

The symmetric region is :func:`signal_table`, then one ring per (source, channel). Who writes and
reads each part, and what it says: ``docs/reference/protocols.md``, Memory.

The receive buffer, a region of its own for combines in place, has room for rows that come back:

    landed   [R, CHUNKS]  written by the source: the last data call in which it has put this chunk
                     of its rows here
    rows             from byte :func:`receive_rows_at` on, by source, then by place among my rows to
                     it; none from myself
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.sync import STATE_WORDS, words

# words of a header
CALL_AT, STATUS_AT, ROUTING_AT, TOKENS_AT, ROWS_AT, COUNTS_AT = map(
    tl.constexpr,
    (head.CALL_AT, head.STATUS, head.ROUTING, head.NUM_TOKENS, head.NUM_ROWS, head.COUNTS),
)
# words of the local state
EPOCH, TICKETS, DIRECT_CALLS = (tl.constexpr(word) for word in range(4, 7))
LEFT = tl.constexpr(8)
_STATE = tl.constexpr(STATE_WORDS)


@triton.constexpr_function
def before(part: str, table: dict[str, int]) -> int:
    """Words of a table's parts before ``part``."""
    names = list(table)
    return sum([table[name] for name in names[: names.index(part)]])


@triton.constexpr_function
def signal_table(ranks: int, channels: int, header_words: int) -> dict[str, int]:
    """int64 words of each part of the symmetric region before the rings."""
    return {
        "tails": ranks * channels, "heads": ranks * channels, "entered": ranks, "arrivals": ranks,
        "dones": ranks, "tags": 2 * ranks, "blocks": 2 * ranks, "matrix": 2 * ranks * (ranks + 2),
        "bounds": 2 * ranks * channels, "headers": 2 * ranks * header_words,
    }  # fmt: skip


@triton.constexpr_function
def plan_table(ranks: int, channels: int) -> dict[str, int]:
    """int32 words of each part of a plan before the tables of tokens."""
    return {
        "out_bound": ranks * (channels + 1),
        "in_bound": ranks * (channels + 1),
        "first_in": ranks,  # the arrival row where rows from a rank begin here
        "first_out": ranks,  # the arrival row where my rows begin on a rank
        "go": 1,
        "first_back": ranks,  # the row of a rank's receive buffer where rows from me begin
        # where the block is in a rank's heap that awaits rows of this call: bytes / 256 + 1
        "places": ranks,
        "rooms": ranks,  # rows for which that block has room
    }


@triton.constexpr_function
def _head(ranks: int, channels: int) -> int:
    """int32 words before a plan's tables of tokens, a multiple of 32."""
    return -(-sum(plan_table(ranks, channels).values()) // 32) * 32


@triton.constexpr_function
def _of_a_peer(part: str, ranks: int, channels: int, header_words: int) -> int:
    """Words that a peer has in each of the two halves of ``part``."""
    return signal_table(ranks, channels, header_words)[part] // (2 * ranks)


def signal_words(ranks: int, channels: int, header_words: int) -> int:
    """Words before the rings, a multiple of 32."""
    return -(-sum(signal_table(ranks, channels, header_words).values()) // 32) * 32


def state_words(ranks: int, channels: int) -> int:
    """Words of a rank's local state: fixed words, then rows sent and rows taken per (rank,
    channel)."""
    return STATE_WORDS + 2 * ranks * channels


@cache
def _words_before(ranks: int, channels: int) -> int:
    """``_head`` for the host, where Triton's way to call it takes as long as a launch."""
    return _head(ranks, channels)


def plan_words(ranks: int, channels: int, tokens: int, local_experts: int) -> int:
    """int32 words of a plan's tables."""
    return _words_before(ranks, channels) + 2 * ranks * tokens + local_experts * (ranks + 2)


@triton.constexpr_function
def receive_rows_at(ranks: int, chunks: int) -> int:
    """Bytes of a receive buffer before its rows, a multiple of 256."""
    return -(-ranks * chunks // 32) * 256


@triton.jit
def ints(address):
    """``address`` as a pointer to int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def peer_base(peers, rank):
    """Address of ``rank``'s symmetric region."""
    return tl.load(words(peers) + rank)


# Words of the symmetric region (``base``), of the receive buffer, and of the local state


@triton.jit
def peer_word(base, part: tl.constexpr, peer, k: tl.constexpr, parity=0):
    """The word of ``peer`` in ``entered``, ``arrivals`` or ``dones``, or in the half ``parity`` of
    ``tags`` or ``blocks``."""
    first: tl.constexpr = before(part, signal_table(k.ranks, k.channels, 0))
    return words(base) + first + parity * k.ranks + peer


@triton.jit
def call_word(base, part: tl.constexpr, parity, peer, k: tl.constexpr):
    """The first word of ``peer`` in half ``parity`` of ``matrix``, ``bounds`` or ``headers``."""
    HEADER: tl.constexpr = k.header_words if part == "headers" else 0
    EACH: tl.constexpr = _of_a_peer(part, k.ranks, k.channels, HEADER)
    first: tl.constexpr = before(part, signal_table(k.ranks, k.channels, 0))
    return words(base) + first + (parity * k.ranks + peer) * EACH


@triton.jit
def tail_of(base, source, channel, k: tl.constexpr):
    """The tail of ring (source, channel): senders and forwarders add to it."""
    return words(base) + source * k.channels + channel


@triton.jit
def head_of(base, destination, channel, k: tl.constexpr):
    """The head of my ring (me, channel) at ``destination``: who takes rows out adds to it."""
    heads: tl.constexpr = before("heads", signal_table(k.ranks, k.channels, 0))
    return words(base) + heads + destination * k.channels + channel


@triton.jit
def ring_of(base, source, channel, k: tl.constexpr):
    """Address of ring (source, channel)."""
    place = (source * k.channels + channel).to(tl.int64)
    return base + k.ring.first_byte + place * k.ring.num_bytes


@triton.jit
def landed_of(base, source, chunk, k: tl.constexpr):
    """Of a receive buffer: a pusher of ``source`` raises it to the number of the call."""
    return words(base) + source * k.chunks + chunk


@triton.jit
def sent_to(state, rank, channel, k: tl.constexpr):
    """Rows put into ``rank``'s ring (me, channel), in total. One program touches it per kernel."""
    return words(state) + _STATE + rank * k.channels + channel


@triton.jit
def taken_from(state, rank, channel, k: tl.constexpr):
    """Rows taken out of my ring (rank, channel), in total. One program touches it per kernel."""
    return words(state) + _STATE + k.ranks * k.channels + rank * k.channels + channel


@triton.jit
def owner_of(expert, E, R: tl.constexpr):
    """Rank that holds ``expert``, -1 for -1."""
    share, extra = E // R, E % R
    larger = (share + 1) * extra
    rank = tl.where(
        expert < larger, expert // (share + 1), (expert - larger) // tl.maximum(share, 1) + extra
    )
    return tl.where(expert < 0, -1, rank)


@triton.jit
def first_expert(rank, E, R: tl.constexpr):
    """First expert of ``rank``."""
    return rank * (E // R) + tl.minimum(rank, E % R)


# A plan's tables: int32. ``k.plan_ranks`` destinations


@triton.jit
def out_bound(plan, rank, channel, k: tl.constexpr):
    """First place of ``channel`` among my rows to ``rank``; behind the last channel: their number.
    ``[ranks, channels + 1]``."""
    return ints(plan) + rank * (k.channels + 1) + channel


@triton.jit
def in_bound(plan, rank, channel, k: tl.constexpr):
    """The same for rows from ``rank`` to me."""
    return ints(plan) + (k.plan_ranks + rank) * (k.channels + 1) + channel


@triton.jit
def plan_word(plan, part: tl.constexpr, rank, k: tl.constexpr):
    """The word of ``rank`` in ``part`` (:func:`plan_table`)."""
    return ints(plan) + before(part, plan_table(k.plan_ranks, k.channels)) + rank


@triton.jit
def go_of(plan, k: tl.constexpr):
    """1 or 2 if rows may move: all ranks agree on the call, and all have room for what they get; 1
    through rings, 2 to blocks of peers' heaps. The same on every rank."""
    return plan_word(plan, "go", 0, k)


@triton.jit
def _tables(plan, k: tl.constexpr):
    """Where a plan's tables of tokens begin."""
    return ints(plan) + _head(k.plan_ranks, k.channels)


@triton.jit
def order_of(plan, rank, tokens, k: tl.constexpr):
    """Token behind each place among my rows to ``rank``. ``[ranks, tokens]``."""
    return _tables(plan, k) + rank.to(tl.int64) * tokens


@triton.jit
def place_of(plan, token, tokens, k: tl.constexpr):
    """Place of ``token`` among my rows to each rank; -1: it does not go. ``[tokens, ranks]``."""
    return _tables(plan, k) + (token.to(tl.int64) + tokens) * k.plan_ranks


@triton.jit
def start_of(plan, expert, rank, tokens, k: tl.constexpr):
    """Result row where rows of local ``expert`` from ``rank`` begin. ``[experts, ranks]``."""
    return _tables(plan, k) + 2 * k.plan_ranks * tokens.to(tl.int64) + expert * k.plan_ranks + rank


@triton.jit
def block_of(plan, expert, experts, tokens, k: tl.constexpr):
    """End of the rows of local ``expert``, and end of its block. ``[experts, 2]``."""
    R: tl.constexpr = k.plan_ranks
    start = _head(R, k.channels) + 2 * R * tokens.to(tl.int64) + experts * R
    return ints(plan) + start + expert * 2
