# pyright: basic
"""Where things lie for the low-latency engine: the symmetric region, a rank's local state. Host and kernels use the same functions.

R ranks, M tokens of a rank at most, K picks, LC local experts at most, P programs. ``h`` is the half of a call: its number mod 2.
The symmetric region, in int64 words (``call`` numbers dispatches and combines together, from 1 on):

    notes    [2, R, LC + 1]  written by the source: ``call << 24 | tokens for my expert e``; last ``call << 24 | tag``
    flags    [2, R, M, 2]    written by the source: ``2 * call + 1`` when this piece of its row is here, ``2 * call`` if there is none
    weights  [2, R, M, K]    written by the token's owner: ``call << 32 | weight``, if it brings weights to a combine
    pulses   [R]             written by the peer: the last call in which it waited long for others

and then, from byte ``slots_at`` on, slots ``[2, R, M]`` of ``SLOT`` bytes: one row ``[payload | scales | meta]``. In a dispatch the slot
(source, token) has the source's token, in a combine the slot (rank, token) has what that rank's experts made of *my* token.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANK, READY, STATUS = (tl.constexpr(word) for word in range(3))
"""Words of the local state: this rank; the last dispatch whose table is complete; address of the status."""
FIXED_WORDS = 16
_FIXED = tl.constexpr(FIXED_WORDS)

COUNT_BITS = 24
"""Of a note; ``max_tokens_per_rank`` must fit."""
_COUNT_BITS, _VALUES = tl.constexpr(COUNT_BITS), tl.constexpr((1 << COUNT_BITS) - 1)

PIECES = 2
"""Of a row that a dispatch sends, at most: a program of its own may send each. Sums come in one."""
_PIECES = tl.constexpr(PIECES)

BAD_AT, BAD_VALUE, OTHER_RANK, SILENT_RANK = 0, 1, 2, 3
"""Words of the status (host memory): first pick out of range + 1 and its value; a rank that was in another call + 1; one that was left
out for its silence + 1."""


def slots_at(ranks: int, tokens: int, topk: int, experts: int) -> int:
    """Bytes before the slots, a multiple of 256. ``experts``: local ones at most."""
    words = 2 * ranks * (experts + 1 + tokens * PIECES + tokens * topk) + ranks
    return -(-8 * words // 256) * 256


@triton.constexpr_function
def _votes_at(ranks: int, programs: int, experts: int) -> int:
    """Word of the local state from which on votes stand."""
    return FIXED_WORDS + 2 * programs + -(-(experts * (2 * ranks + 3) + ranks) // 2)


def state_words(ranks: int, programs: int, experts: int, voters: int) -> int:
    """int64 words of a rank's local state: fixed words, epochs ``[P]``, late ``[P]``, the table as int32, votes ``[voters, R]``."""
    return _votes_at(ranks, programs, experts) + voters * ranks


# The symmetric region


@triton.jit
def note_of(base, half, rank, expert, R: tl.constexpr, LC: tl.constexpr):
    """What ``rank`` has for local ``expert``; its tag at ``LC``."""
    return base.to(tl.pointer_type(tl.int64)) + (half * R + rank) * (LC + 1) + expert


@triton.jit
def flag_of(base, half, rank, token, R: tl.constexpr, M: tl.constexpr, LC: tl.constexpr):
    """Whether the first piece of ``rank``'s row of ``token`` is here; those of its other pieces follow."""
    return base.to(tl.pointer_type(tl.int64)) + 2 * R * (LC + 1) + ((half * R + rank) * M + token) * _PIECES


@triton.jit
def weight_of(base, half, rank, token, R: tl.constexpr, M: tl.constexpr, K: tl.constexpr, LC: tl.constexpr):
    """The first of the K weights of ``rank``'s token."""
    return base.to(tl.pointer_type(tl.int64)) + 2 * R * (LC + 1 + M * _PIECES) + ((half * R + rank) * M + token) * K


@triton.jit
def pulse_of(base, rank, R: tl.constexpr, M: tl.constexpr, K: tl.constexpr, LC: tl.constexpr):
    """A sign of life of ``rank``."""
    return base.to(tl.pointer_type(tl.int64)) + 2 * R * (LC + 1 + M * _PIECES + M * K) + rank


@triton.jit
def slot_of(
    base, half, rank, token, R: tl.constexpr, M: tl.constexpr, K: tl.constexpr, LC: tl.constexpr, SLOT: tl.constexpr
):
    """Address of a slot."""
    START: tl.constexpr = (16 * R * (LC + 1 + M * _PIECES + M * K) + 8 * R + 255) // 256 * 256
    return base + START + ((half * R + rank) * M + token).to(tl.int64) * SLOT


@triton.jit
def note(call, value):
    """``value`` (not negative, small) of a call: good only in that call."""
    return (call << _COUNT_BITS) + value


@triton.jit
def call_in(word):
    """The call that a note is of."""
    return word >> _COUNT_BITS


@triton.jit
def value_in(word):
    """What a note says."""
    return word & _VALUES


# Local state


@triton.jit
def epoch_of(state, program):
    """Calls that ``program`` has made: every launch has P programs, each counts for itself."""
    return state.to(tl.pointer_type(tl.int64)) + _FIXED + program


@triton.jit
def late_of(state, program, P: tl.constexpr):
    """Deadlines that waits of ``program`` came past (see ``kernels/low_wait.py``)."""
    return state.to(tl.pointer_type(tl.int64)) + _FIXED + P + program


@triton.jit
def _table(state, P: tl.constexpr):
    """The table of the dispatch, int32."""
    return (state.to(tl.pointer_type(tl.int64)) + _FIXED + 2 * P).to(tl.pointer_type(tl.int32))


@triton.jit
def start_of(state, expert, rank, R: tl.constexpr, P: tl.constexpr):
    """Result row where rows of local ``expert`` from ``rank`` begin. ``[LC, R]``."""
    return _table(state, P) + expert * R + rank


@triton.jit
def pairs_of(state, expert, rank, R: tl.constexpr, P: tl.constexpr, LC: tl.constexpr):
    """How many they are. ``[LC, R]``."""
    return _table(state, P) + LC * R + expert * R + rank


@triton.jit
def block_of(state, expert, R: tl.constexpr, P: tl.constexpr, LC: tl.constexpr):
    """Of a local expert: end of its rows, of its block, and where the next one's rows begin (``[LC, 3]``)."""
    return _table(state, P) + 2 * LC * R + expert * 3


@triton.jit
def present_of(state, rank, R: tl.constexpr, P: tl.constexpr, LC: tl.constexpr):
    """Whether ``rank`` takes part in this dispatch. ``[R]``."""
    return _table(state, P) + 2 * LC * R + 3 * LC + rank


@triton.jit
def vote_of(state, voter, rank, R: tl.constexpr, P: tl.constexpr, LC: tl.constexpr):
    """Whether the program that adds up a share of a token has ``rank``'s sum: ``2 * call + 1``, or ``2 * call``. ``[T * SHARES, R]``."""
    return state.to(tl.pointer_type(tl.int64)) + _votes_at(R, P, LC) + voter * R + rank
