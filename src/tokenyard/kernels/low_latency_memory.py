# pyright: basic
"""Memory map of engine low_latency: a rank's symmetric region, and its local state.

:func:`region_parts` and :func:`state_parts` are the tables. The host allocates what they say;
kernels know the offsets as constants (:class:`Sizes`).

Every array for calls has two halves. A call uses the half of its parity, its number modulo 2. Calls
are numbered from 1 on; dispatches and combines share the numbers.

A slot holds one row, ``[payload | scales | metadata]``. In a dispatch, slot (source, token) holds
the source's token. In a combine, slot (rank, token) holds the sum that ``rank`` has made of this
rank's token.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tokenyard.kernels.region import ints
from tokenyard.kernels.sync import WAIT_PHASES, words

RANK, READY, STATUS = (tl.constexpr(word) for word in range(3))
"""Words of the local state: this rank; the last dispatch whose table is complete; address of the
status."""

COUNT_BITS, _VALUES = tl.constexpr(24), tl.constexpr((1 << 24) - 1)
"""Of a count on the wire. ``max_tokens_per_rank`` must fit."""

PIECES = tl.constexpr(2)
"""Most pieces of a row in a dispatch. A program of its own may send each. Sums come in one."""

BAD_AT, BAD_VALUE, OTHER_RANK, SILENT_RANK = (tl.constexpr(word) for word in range(4))
"""Words of the status, in host memory: 1 + the first pick out of range, and its value; 1 + a rank
that was in another call; 1 + a rank that was left out for its silence."""


# The tables


class Part(NamedTuple):
    """An array in a memory map. It begins at a multiple of ``alignment`` bytes."""

    name: str
    count: int
    dtype: torch.dtype
    alignment: int = 8


CHUNKS = 64
"""Most chunks in which rows or sums for a far rank are put."""
ROWS, WEIGHTS = tl.constexpr(0), tl.constexpr(CHUNKS)
"""What a far rank puts: the first chunk of rows or sums, the others follow; weights of a combine.
"""
_MESSAGES = tl.constexpr(CHUNKS + 1)

TORN = tl.constexpr(-3)
"""Instead of the places of a far rank's row that was waited for in vain: other rows of it may have
come since, but no sums go back in a combine."""


class Sizes(NamedTuple):
    """Constants that all kernels of an object share."""

    ranks: int
    rank_bins: int  # a power of two, not less than ranks, nor 2
    programs: int  # of every launch
    tokens: int  # of a rank at most
    topk: int
    topk_bins: int  # the next power of two
    experts: int
    local_experts: int  # of any rank at most
    slot_bytes: int
    region: Any  # where its parts begin (``laid_out``)
    state: Any  # the same
    far: bool  # some ranks are reached by puts
    network: bool  # which NVSHMEM makes; else they go through pointers
    per_node: int  # ranks of a node, where rows cross once per node (``low_latency_rail.py``); or 0
    unrolled: int  # of more ranks or nodes, programs go through those that a token goes to
    early: bool  # programs may be set up while the launch before still runs


class Stages(NamedTuple):
    """Which stages of a call a launch makes. A call is one launch, or one for each stage. Every
    launch has as many programs."""

    send: bool
    receive: bool


BOTH, SEND, RECEIVE = Stages(True, True), Stages(True, False), Stages(False, True)


def region_parts(config: Any, slot_bytes: int, far: bool) -> tuple[Part, ...]:
    """The symmetric region. "Peer" is the rank that writes. ``far``: some ranks may be far."""
    ranks, tokens = config.world_size, config.max_tokens_per_rank
    parts = (
        # [2, ranks, experts + 1], written by the source: call << 24 | tokens for my expert;
        # the last one: call << 24 | tag
        Part("counts", 2 * ranks * (config.most_local_experts + 1), torch.int64),
        # [2, ranks, tokens, PIECES], written by the source: 2 * call + 1 if this piece of its row
        # is here, 2 * call if it does not come
        Part("flags", 2 * ranks * tokens * PIECES.value, torch.int64),
        # [2, ranks, tokens, topk], written by the token's owner if it brings weights to a combine:
        # call << 32 | weight
        Part("weights", 2 * ranks * tokens * config.num_topk, torch.int64),
        # [ranks], written by the peer: the last call in which it waited long
        Part("heartbeats", ranks, torch.int64),
        # [2, ranks, tokens] slots
        Part("slots", 2 * ranks * tokens * slot_bytes, torch.int8, 256),
    )
    far_parts = (
        # [2, ranks, CHUNKS + 1], set by the far source: call << 24 | its rows, once this message is
        # here: a chunk of them (ROWS + chunk), or their weights (WEIGHTS)
        Part("arrivals", 2 * ranks * (CHUNKS + 1), torch.int64),
        # 16 bytes that nobody reads, put where only a signal is to come
        Part("rest", 2, torch.int64, 16),
        # what waits to be put, by destination: counts [2, ranks, experts], weights [2, ranks,
        # tokens, topk], rows and sums
        Part("counts_out", 2 * ranks * config.most_local_experts, torch.int64, 16),
        Part("weights_out", 2 * ranks * tokens * config.num_topk, torch.int64, 16),
        Part("staging", 2 * ranks * tokens * slot_bytes, torch.int8, 256),
    )
    return parts + far_parts if far else parts


def state_parts(config: Any, programs: int, shares: int, far: bool) -> tuple[Part, ...]:
    """The local state. ``shares``: of a token's channels, each summed by a program of its own."""
    ranks, experts = config.world_size, config.most_local_experts
    parts = (
        Part("fixed", 16, torch.int64),  # RANK, READY, STATUS
        # calls that a program has made: each counts for itself
        Part("epochs", programs, torch.int64),
        # deadlines that waits of a program have passed (``kernels/low_latency_waits.py``)
        Part("late", programs, torch.int64),
        Part("waited", ranks * WAIT_PHASES.value, torch.int64),  # see ``note_wait``
        # the table of a dispatch, of each local expert: [experts, ranks], the result row where its
        # rows from a rank begin, and how many these are;
        Part("starts", experts * ranks, torch.int32),
        Part("pairs", experts * ranks, torch.int32, 4),
        # [experts, 3], end of its rows, end of its block, first row of the next;
        Part("blocks", experts * 3, torch.int32, 4),
        # [ranks]: whether a rank takes part
        Part("present", ranks, torch.int32, 4),
        # [tokens * shares, ranks]: whether the program that sums a share of a token has a rank's
        # sum: 2 * call + 1, or 2 * call
        Part("votes", config.max_tokens_per_rank * shares * ranks, torch.int64),
    )
    far_parts = (
        # [ranks, CHUNKS + 1], for far ranks: pieces of a chunk's rows in staging; the last one:
        # weights; 0 between calls
        Part("packed", ranks * (CHUNKS + 1), torch.int64),
        # bytes put
        Part("account", 1, torch.int64),
        # [ranks]: 1 if it is far
        Part("far", ranks, torch.int64),
    )
    return parts + far_parts if far else parts


def laid_out(parts: tuple[Part, ...]) -> tuple[Any, int]:
    """Where each part begins, in its elements; and bytes in all.

    >>> laid_out((Part("a", 3, torch.int32), Part("b", 2, torch.int64)))
    (Offsets(a=0, b=2), 32)
    """
    offsets: dict[str, int] = {}
    end = 0
    for part in parts:
        begin = -(-end // part.alignment) * part.alignment
        offsets[part.name] = begin // part.dtype.itemsize
        end = begin + part.count * part.dtype.itemsize
    return namedtuple("Offsets", offsets)(**offsets), end


# The symmetric region at ``base``: words of its parts, as the table has them; addresses of slots


@triton.jit
def count_of(base, parity, rank, expert, sizes: tl.constexpr):
    """A dispatch of ``rank`` stores its count for local ``expert`` here; behind them: its tag."""
    row = (parity * sizes.ranks + rank) * (sizes.local_experts + 1)
    return words(base) + sizes.region.counts + row + expert


@triton.jit
def flag_of(base, parity, rank, token, sizes: tl.constexpr):
    """Flags of slot (``rank``, ``token``), one per piece: set by who stores its row or sum."""
    slot = (parity * sizes.ranks + rank) * sizes.tokens + token
    return words(base) + sizes.region.flags + slot * PIECES


@triton.jit
def weight_of(base, parity, rank, token, sizes: tl.constexpr):
    """Weights of slot (``rank``, ``token``): the token's owner stores them in a combine."""
    slot = (parity * sizes.ranks + rank) * sizes.tokens + token
    return words(base) + sizes.region.weights + slot * sizes.topk


@triton.jit
def slot_of(base, parity, rank, token, sizes: tl.constexpr):
    """Address of slot (``rank``, ``token``): ``rank`` stores a row or a sum there."""
    slot = (parity * sizes.ranks + rank) * sizes.tokens + token
    return base + sizes.region.slots + slot.to(tl.int64) * sizes.slot_bytes


@triton.jit
def packed_of(base, parity, rank, row, row_bytes, sizes: tl.constexpr):
    """Address of far ``rank``'s row number ``row``, of ``row_bytes``."""
    return slot_of(base, parity, rank, 0, sizes) + row.to(tl.int64) * row_bytes


@triton.jit
def staged_of(base, parity, rank, row, row_bytes, sizes: tl.constexpr):
    """The same where rows for far ``rank`` wait to be put."""
    moved: tl.constexpr = sizes.region.staging - sizes.region.slots
    return packed_of(base, parity, rank, row, row_bytes, sizes) + moved


@triton.jit
def arrival_of(base, parity, rank, message, sizes: tl.constexpr):
    """The signal of a ``message`` of far ``rank``, which its put sets."""
    at = (parity * sizes.ranks + rank) * _MESSAGES + message
    return words(base) + sizes.region.arrivals + at


@triton.jit
def counts_out_of(base, parity, rank, expert, sizes: tl.constexpr):
    """Counts for far ``rank``: who sends stores them, and puts them."""
    row = (parity * sizes.ranks + rank) * sizes.local_experts
    return words(base) + sizes.region.counts_out + row + expert


@triton.jit
def weights_out_of(base, parity, rank, row, sizes: tl.constexpr):
    """Weights of row number ``row`` for far ``rank``: packed in a combine, then put."""
    at = ((parity * sizes.ranks + rank) * sizes.tokens + row) * sizes.topk
    return words(base) + sizes.region.weights_out + at


@triton.jit
def with_call(call, value):
    """A word that is valid only in this call (its number): ``value`` is small, and not negative."""
    return (call << COUNT_BITS) + value


@triton.jit
def call_in(word):
    """The call in which such a word is valid."""
    return word >> COUNT_BITS


@triton.jit
def value_in(word):
    """The value in such a word."""
    return word & _VALUES


# Local state, and what stands behind a plan's result rows


@triton.jit
def epoch_of(state, program, sizes: tl.constexpr):
    """Calls that ``program`` has made: it stores them at its end."""
    return words(state) + sizes.state.epochs + program


@triton.jit
def waited_in(state, sizes: tl.constexpr):
    """Address of the matrix of ``note_wait``. Of its phases, counts are tags too, rows are sums
    and weights."""
    return state + sizes.state.waited * 8


@triton.jit
def pair_of(state, part: tl.constexpr, expert, rank, sizes: tl.constexpr):
    """Of local ``expert`` and ``rank``: a word of ``part``, ``starts`` or ``pairs``."""
    return ints(state) + part + expert * sizes.ranks + rank


@triton.jit
def packed_count_of(state, message, rank, sizes: tl.constexpr):
    """Pieces of a ``message`` to far ``rank`` in staging: who packs adds, who puts sets 0."""
    return words(state) + sizes.state.packed + rank * _MESSAGES + message


@triton.jit
def numbers_of(slots, t, sizes: tl.constexpr):
    """``[topk]`` behind the result rows of all ``slots``: the number of token ``t`` among those
    that go to the rank of each pick, or to its rail."""
    at = sizes.ranks * sizes.tokens + t
    return ints(slots) + at.to(tl.int64) * sizes.topk
