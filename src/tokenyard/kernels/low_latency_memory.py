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
from tokenyard.routing import power_of_two_at_least

RANK, READY, STATUS = (tl.constexpr(word) for word in range(3))
"""Words of the local state: this rank; the last dispatch whose table is complete; address of the
status."""
FIXED_WORDS = 16

COUNT_BITS = 24
"""Of a count on the wire. ``max_tokens_per_rank`` must fit."""
_COUNT_BITS, _VALUES = tl.constexpr(COUNT_BITS), tl.constexpr((1 << COUNT_BITS) - 1)

PIECES = 2
"""Most pieces of a row in a dispatch. A program of its own may send each. Sums come in one."""
_PIECES = tl.constexpr(PIECES)

BAD_AT, BAD_VALUE, OTHER_RANK, SILENT_RANK = 0, 1, 2, 3
"""Words of the status, in host memory: 1 + the first pick out of range, and its value; 1 + a rank
that was in another call; 1 + a rank that was left out for its silence."""


# The tables


class Part(NamedTuple):
    """An array in a memory map. It begins at a multiple of ``alignment`` bytes."""

    name: str
    count: int
    dtype: torch.dtype
    alignment: int = 8


RegionOffsets = namedtuple(
    "RegionOffsets",
    "counts flags weights heartbeats slots arrivals rest counts_out weights_out staging",
    defaults=[0] * 5,
)
StateOffsets = namedtuple(
    "StateOffsets",
    "fixed epochs late waited starts pairs blocks present votes packed account far",
    defaults=[0] * 3,
)
"""Where each part begins, in its elements; 0 for parts that are not there."""

CHUNKS = 64
"""Most chunks in which rows or sums for a far rank are put."""
ROWS, WEIGHTS = tl.constexpr(0), tl.constexpr(CHUNKS)
"""What a far rank puts: the first chunk of rows or sums, the others follow; weights of a combine.
"""
_MESSAGES = tl.constexpr(CHUNKS + 1)

TORN = tl.constexpr(-3)
"""Instead of the places of a far rank's row: that rank was left out meanwhile, and its other rows
may have come since. None goes back in a combine, should it be back."""


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
    region: Any  # RegionOffsets
    state: Any  # StateOffsets
    far: bool  # some ranks are reached by puts
    network: bool  # which NVSHMEM makes; else they go through pointers
    per_node: int  # ranks of a node, where rows cross once per node (``low_latency_rail.py``); or 0


class Stages(NamedTuple):
    """Which stages of a call a launch makes. A call is one launch, or one for each stage."""

    send: bool
    receive: bool


BOTH, SEND, RECEIVE = Stages(True, True), Stages(True, False), Stages(False, True)


def region_parts(config: Any, slot_bytes: int, far: bool = False) -> tuple[Part, ...]:
    """The symmetric region. "Peer" is the rank that writes. ``far``: some ranks may be far."""
    ranks, tokens = config.world_size, config.max_tokens_per_rank
    parts = (
        # [2, ranks, experts + 1], written by the source: call << 24 | tokens for my expert;
        # the last one: call << 24 | tag
        Part("counts", 2 * ranks * (config.most_local_experts + 1), torch.int64),
        # [2, ranks, tokens, PIECES], written by the source: 2 * call + 1 if this piece of its row
        # is here, 2 * call if it does not come
        Part("flags", 2 * ranks * tokens * PIECES, torch.int64),
        # [2, ranks, tokens, topk], written by the token's owner if it brings weights to a combine:
        # call << 32 | weight
        Part("weights", 2 * ranks * tokens * config.num_topk, torch.int64),
        # [ranks], written by the peer: the last call in which it waited long
        Part("heartbeats", ranks, torch.int64),
        # [2, ranks, tokens] slots
        Part("slots", 2 * ranks * tokens * slot_bytes, torch.int8, 256),
    )
    far_parts = (
        # [2, ranks, CHUNKS + 1], set by the far source: call << 24 | its rows, once this chunk of
        # them is here; the last one: once their weights are
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


def state_parts(config: Any, programs: int, shares: int, far: bool = False) -> tuple[Part, ...]:
    """The local state. ``shares``: of a token's channels, each summed by a program of its own."""
    ranks, experts = config.world_size, config.most_local_experts
    parts = (
        Part("fixed", FIXED_WORDS, torch.int64),
        Part("epochs", programs, torch.int64),
        Part("late", programs, torch.int64),
        Part("waited", ranks * WAIT_PHASES.value, torch.int64),  # see ``note_wait``
        # the table of a dispatch
        Part("starts", experts * ranks, torch.int32),
        Part("pairs", experts * ranks, torch.int32, 4),
        Part("blocks", experts * 3, torch.int32, 4),
        Part("present", ranks, torch.int32, 4),
        # [tokens * shares, ranks]
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


def laid_out(parts: tuple[Part, ...]) -> tuple[dict[str, int], int]:
    """Where each part begins, in its elements; and bytes in all.

    >>> laid_out((Part("a", 3, torch.int32), Part("b", 2, torch.int64)))
    ({'a': 0, 'b': 2}, 32)
    """
    offsets: dict[str, int] = {}
    end = 0
    for part in parts:
        begin = -(-end // part.alignment) * part.alignment
        offsets[part.name] = begin // part.dtype.itemsize
        end = begin + part.count * part.dtype.itemsize
    return offsets, end


def sizes_of(
    config: Any, programs: int, shares: int, slot_bytes: int, far: bool, network: bool,
    per_node: int = 0,
) -> Sizes:  # fmt: skip
    """The constants for a ``Config``."""
    return Sizes(
        ranks=config.world_size, rank_bins=power_of_two_at_least(max(config.world_size, 2)),
        programs=programs, tokens=config.max_tokens_per_rank, topk=config.num_topk,
        topk_bins=power_of_two_at_least(config.num_topk), experts=config.num_experts,
        local_experts=config.most_local_experts, slot_bytes=slot_bytes,
        region=RegionOffsets(**laid_out(region_parts(config, slot_bytes, far))[0]),
        state=StateOffsets(**laid_out(state_parts(config, programs, shares, far))[0]), far=far,
        network=network, per_node=per_node,
    )  # fmt: skip


def slots_in(route: int, sizes: Sizes) -> int:
    """Address of the result rows of each slot: in ``Plan.route``, behind ids and weights."""
    return route + 8 * sizes.tokens * sizes.topk


# The symmetric region


@triton.jit
def count_of(base, parity, rank, expert, sizes: tl.constexpr):
    """Tokens of ``rank`` for local ``expert``. Its tag stands at ``sizes.local_experts``."""
    row = (parity * sizes.ranks + rank) * (sizes.local_experts + 1)
    return words(base) + sizes.region.counts + row + expert


@triton.jit
def flag_of(base, parity, rank, token, sizes: tl.constexpr):
    """The flag of the first piece of ``rank``'s row of ``token``. Those of other pieces follow."""
    slot = (parity * sizes.ranks + rank) * sizes.tokens + token
    return words(base) + sizes.region.flags + slot * _PIECES


@triton.jit
def weight_of(base, parity, rank, token, sizes: tl.constexpr):
    """The first of the weights of ``rank``'s token."""
    slot = (parity * sizes.ranks + rank) * sizes.tokens + token
    return words(base) + sizes.region.weights + slot * sizes.topk


@triton.jit
def heartbeat_of(base, rank, sizes: tl.constexpr):
    """A sign of life of ``rank``."""
    return words(base) + sizes.region.heartbeats + rank


@triton.jit
def slot_of(base, parity, rank, token, sizes: tl.constexpr):
    """Address of a slot."""
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
    """``with_call(call, rows)`` once this ``message`` (ROWS + chunk, WEIGHTS) of far ``rank``, who
    has so many rows, is here."""
    at = (parity * sizes.ranks + rank) * _MESSAGES + message
    return words(base) + sizes.region.arrivals + at


@triton.jit
def counts_out_of(base, parity, rank, expert, sizes: tl.constexpr):
    """Where the count for ``expert`` of far ``rank`` waits to be put."""
    row = (parity * sizes.ranks + rank) * sizes.local_experts
    return words(base) + sizes.region.counts_out + row + expert


@triton.jit
def weights_out_of(base, parity, rank, row, sizes: tl.constexpr):
    """Where the weights of row number ``row`` wait to be put to far ``rank``."""
    at = ((parity * sizes.ranks + rank) * sizes.tokens + row) * sizes.topk
    return words(base) + sizes.region.weights_out + at


@triton.jit
def with_call(call, value):
    """A word that is valid only in this call (its number): ``value`` is small, and not negative."""
    return (call << _COUNT_BITS) + value


@triton.jit
def call_in(word):
    """The call in which such a word is valid."""
    return word >> _COUNT_BITS


@triton.jit
def value_in(word):
    """The value in such a word."""
    return word & _VALUES


# Local state


@triton.jit
def epoch_of(state, program, sizes: tl.constexpr):
    """Calls that ``program`` has made. Each program of a launch counts for itself."""
    return words(state) + sizes.state.epochs + program


@triton.jit
def late_of(state, program, sizes: tl.constexpr):
    """Deadlines that waits of ``program`` have passed (``kernels/low_latency_waits.py``)."""
    return words(state) + sizes.state.late + program


@triton.jit
def waited_in(state, sizes: tl.constexpr):
    """Address of the matrix of ``note_wait``. Of its phases, counts are tags too, rows are sums
    and weights."""
    return state + sizes.state.waited * 8


@triton.jit
def start_of(state, expert, rank, sizes: tl.constexpr):
    """Result row where rows of local ``expert`` from ``rank`` begin."""
    return ints(state) + sizes.state.starts + expert * sizes.ranks + rank


@triton.jit
def pairs_of(state, expert, rank, sizes: tl.constexpr):
    """How many rows these are."""
    return ints(state) + sizes.state.pairs + expert * sizes.ranks + rank


@triton.jit
def block_of(state, expert, sizes: tl.constexpr):
    """Three words of a local expert: end of its rows, end of its block, first row of the next."""
    return ints(state) + sizes.state.blocks + expert * 3


@triton.jit
def present_of(state, rank, sizes: tl.constexpr):
    """Whether ``rank`` takes part in this dispatch."""
    return ints(state) + sizes.state.present + rank


@triton.jit
def vote_of(state, voter, rank, sizes: tl.constexpr):
    """Whether the program that sums a share of a token has ``rank``'s sum: ``2 * call + 1``, or
    ``2 * call``."""
    return words(state) + sizes.state.votes + voter * sizes.ranks + rank


@triton.jit
def packed_count_of(state, message, rank, sizes: tl.constexpr):
    """Pieces of rows, or weights, that are in staging for this ``message`` to far ``rank``."""
    return words(state) + sizes.state.packed + rank * _MESSAGES + message


@triton.jit
def numbers_of(slots, t, sizes: tl.constexpr):
    """``[topk]`` behind the result rows of all ``slots``: the number of token ``t`` among those
    that go to the rank of each pick, or to its rail."""
    at = sizes.ranks * sizes.tokens + t
    return ints(slots) + at.to(tl.int64) * sizes.topk
