# pyright: basic
"""Where things lie: the symmetric region, a rank's local state, a plan's tables. Host and kernels
use the same tables: parts in their order, from whose sizes all offsets follow.

R ranks, C channels, W words of a header, L local experts, T tokens. The symmetric region, in int64
words:

    tails    [R, C]  written by the source: rows put into my ring (source, channel), in total
    heads    [R, C]  written by the destination: rows of mine that it has taken out of its ring
                     (me, channel), in total
    hellos   [R]     written by the peer: data calls it has entered
    arrivals [R]     written by the peer: its channels that have sent me their counts, in total
    dones    [R]     written by the peer: its programs that have written all their rows of a
                     dispatch in place, in total
    tags     [2, R]  written by the peer: what its current data call is (by parity of the call)
    matrix   [2, R, R + 2]  written by the peer: how many rows it sends to each rank, for how many
                     it has room, and its tag
    bounds   [2, R, C]  written by the peer: rows to me in its channels before this one
    headers  [2, R, W]  written by the peer: its header for me

and then one ring per (source, channel).

The landing, a region of its own for combines in place, has room for rows that come back:

    landed   [R, CHUNKS]  written by the source: the last data call in which it has put this chunk
                     of its rows here
    rows             from byte :func:`landing_rows_at` on, by source, then by place among my rows to
                     it; none from myself
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.sync import STATE_WORDS, words

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
        "tails": ranks * channels, "heads": ranks * channels, "hellos": ranks, "arrivals": ranks,
        "dones": ranks, "tags": 2 * ranks, "matrix": 2 * ranks * (ranks + 2),
        "bounds": 2 * ranks * channels, "headers": 2 * ranks * header_words,
    }  # fmt: skip


@triton.constexpr_function
def plan_table(ranks: int, channels: int) -> dict[str, int]:
    """int32 words of each part of a plan before the tables of tokens."""
    return {
        "out_bound": ranks * (channels + 1), "in_bound": ranks * (channels + 1),
        "first_in": ranks, "first_out": ranks, "go": 1, "first_back": ranks,
    }  # fmt: skip


@triton.constexpr_function
def signal_at(part: str, ranks: int, channels: int) -> int:
    """Word of the symmetric region where ``part`` begins."""
    return before(part, signal_table(ranks, channels, 0))


@triton.constexpr_function
def plan_at(part: str, ranks: int, channels: int) -> int:
    """Word of a plan where ``part`` begins."""
    return before(part, plan_table(ranks, channels))


@triton.constexpr_function
def _head(ranks: int, channels: int) -> int:
    """int32 words before a plan's tables of tokens, a multiple of 32."""
    return -(-sum(plan_table(ranks, channels).values()) // 32) * 32


def signal_words(ranks: int, channels: int, header_words: int) -> int:
    """Words before the rings, a multiple of 32."""
    return -(-sum(signal_table(ranks, channels, header_words).values()) // 32) * 32


def state_words(ranks: int, channels: int) -> int:
    """Words of a rank's local state: fixed words, then rows sent and rows taken per (rank,
    channel)."""
    return STATE_WORDS + 2 * ranks * channels


def plan_words(ranks: int, channels: int, tokens: int, local_experts: int) -> int:
    """int32 words of a plan's tables."""
    return _head(ranks, channels) + 2 * ranks * tokens + local_experts * (ranks + 2)


@triton.constexpr_function
def landing_rows_at(ranks: int, chunks: int) -> int:
    """Bytes of a landing before its rows, a multiple of 256."""
    return -(-ranks * chunks // 32) * 256


@triton.jit
def peer_base(peers, rank):
    """Address of ``rank``'s symmetric region."""
    return tl.load(words(peers) + rank)


@triton.jit
def tail_of(base, source, channel, R: tl.constexpr, C: tl.constexpr):
    """Written by ``source``: rows it has put into my ring (source, channel), in total. ``base`` is
    my region."""
    return words(base) + source * C + channel


@triton.jit
def head_of(base, destination, channel, R: tl.constexpr, C: tl.constexpr):
    """Written by ``destination``: rows that it took out of its ring (me, channel), in total."""
    return words(base) + signal_at("heads", R, C) + destination * C + channel


@triton.jit
def hello_of(base, peer, R: tl.constexpr, C: tl.constexpr):
    """Written by ``peer``: data calls it has entered."""
    return words(base) + signal_at("hellos", R, C) + peer


@triton.jit
def arrival_of(base, peer, R: tl.constexpr, C: tl.constexpr):
    """Written by ``peer``: its channels that have sent me their counts, in total."""
    return words(base) + signal_at("arrivals", R, C) + peer


@triton.jit
def done_of(base, peer, R: tl.constexpr, C: tl.constexpr):
    """Written by ``peer``: its programs that have written all their rows of a dispatch in place, in
    total."""
    return words(base) + signal_at("dones", R, C) + peer


@triton.jit
def tag_of(base, half, peer, R: tl.constexpr, C: tl.constexpr):
    """Written by ``peer``: what its current data call is."""
    return words(base) + signal_at("tags", R, C) + half * R + peer


@triton.jit
def matrix_of(base, half, peer, R: tl.constexpr, C: tl.constexpr):
    """Written by ``peer``: rows it sends to each rank, or has room for, its tag. ``[R + 2]``."""
    return words(base) + signal_at("matrix", R, C) + (half * R + peer) * (R + 2)


@triton.jit
def bounds_of(base, half, peer, R: tl.constexpr, C: tl.constexpr):
    """Written by ``peer``: rows to me in its channels before each one. ``[C]``."""
    return words(base) + signal_at("bounds", R, C) + (half * R + peer) * C


@triton.jit
def header_of(base, half, peer, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Written by ``peer``: its header for me. ``[W]``."""
    return words(base) + signal_at("headers", R, C) + (half * R + peer) * W


@triton.jit
def landed_of(base, source, chunk, CHUNKS: tl.constexpr):
    """Written by ``source``: the last data call in which it has put this chunk here. ``base`` is my
    landing."""
    return words(base) + source * CHUNKS + chunk


@triton.jit
def sent_to(state, rank, channel, R: tl.constexpr, C: tl.constexpr):
    """Local: rows put into ``rank``'s ring (me, channel), in total. One program touches it per
    kernel."""
    return words(state) + _STATE + rank * C + channel


@triton.jit
def taken_from(state, rank, channel, R: tl.constexpr, C: tl.constexpr):
    """Local: rows taken out of my ring (rank, channel), in total. One program touches it per
    kernel."""
    return words(state) + _STATE + R * C + rank * C + channel


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


# A plan's tables: int32


@triton.jit
def out_bound(plan, rank, channel, R: tl.constexpr, C: tl.constexpr):
    """First place of ``channel`` among my rows to ``rank``; channel C: their number. ``[R, C +
    1]``."""
    return plan.to(tl.pointer_type(tl.int32)) + rank * (C + 1) + channel


@triton.jit
def in_bound(plan, rank, channel, R: tl.constexpr, C: tl.constexpr):
    """The same for rows from ``rank`` to me. ``[R, C + 1]``."""
    return plan.to(tl.pointer_type(tl.int32)) + (R + rank) * (C + 1) + channel


@triton.jit
def first_in(plan, rank, R: tl.constexpr, C: tl.constexpr):
    """The arrival row where rows from ``rank`` begin here. ``[R]``."""
    return plan.to(tl.pointer_type(tl.int32)) + plan_at("first_in", R, C) + rank


@triton.jit
def first_out(plan, rank, R: tl.constexpr, C: tl.constexpr):
    """The arrival row where my rows begin on ``rank``. ``[R]``."""
    return plan.to(tl.pointer_type(tl.int32)) + plan_at("first_out", R, C) + rank


@triton.jit
def go_of(plan, R: tl.constexpr, C: tl.constexpr):
    """1 if rows may move: all ranks agree on the call, and all have room for what they get. The
    same on every rank."""
    return plan.to(tl.pointer_type(tl.int32)) + plan_at("go", R, C)


@triton.jit
def first_back(plan, rank, R: tl.constexpr, C: tl.constexpr):
    """The row of ``rank``'s landing where rows from me begin. ``[R]``."""
    return plan.to(tl.pointer_type(tl.int32)) + plan_at("first_back", R, C) + rank


@triton.jit
def order_of(plan, rank, tokens, R: tl.constexpr, C: tl.constexpr):
    """Token behind each place among my rows to ``rank``. ``[R, T]``."""
    return plan.to(tl.pointer_type(tl.int32)) + _head(R, C) + rank.to(tl.int64) * tokens


@triton.jit
def place_of(plan, token, tokens, R: tl.constexpr, C: tl.constexpr):
    """Place of ``token`` among my rows to each rank, -1 where it does not go. ``[T, R]``."""
    return plan.to(tl.pointer_type(tl.int32)) + _head(R, C) + (token.to(tl.int64) + tokens) * R


@triton.jit
def start_of(plan, expert, rank, tokens, R: tl.constexpr, C: tl.constexpr):
    """Result row where rows of local ``expert`` from ``rank`` begin. ``[L, R]``."""
    tables = plan.to(tl.pointer_type(tl.int32)) + _head(R, C)
    return tables + 2 * R * tokens.to(tl.int64) + expert * R + rank


@triton.jit
def block_of(plan, expert, experts, tokens, R: tl.constexpr, C: tl.constexpr):
    """End of the rows of local ``expert``, and end of its block. ``[L, 2]``."""
    start = _head(R, C) + 2 * R * tokens.to(tl.int64) + experts * R
    return plan.to(tl.pointer_type(tl.int32)) + start + expert * 2
