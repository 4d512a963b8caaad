# pyright: basic
"""The call barrier: one program of every data kernel tells all peers what call this is, and waits
until all have told the same.

It publishes ``tags[parity][me]`` at every peer, then adds 1 to ``entered[me]`` there (release). It
reads ``tags[parity][peer]`` of its own region after ``entered[peer]`` has reached the number of
this call (acquire). A data kernel ends only after its barrier. So all peers have entered call n
when a rank enters n + 1, and have left it when it enters n + 2, which is when it writes that parity
again.

It also names a silent peer from which no row was to come.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.region import EPOCH, peer_base, peer_word
from tokenyard.kernels.sync import (
    ON_CALL_BARRIER, RANK, add_release, all_agree, lacking, note_call, wait_for_all, words,
)  # fmt: skip


class CallBarrierConfig(NamedTuple):
    """What is known of a launch without rows when its kernel is compiled."""

    ranks: int
    rank_bins: int  # a power of two, not less than the ranks, and nodes if there are several
    channels: int
    grid: Any = None  # a Grid, unless it is a stand-in
    header_words: int = 0  # of a stand-in, as is
    writers: int = 0  # programs of a dispatch in place


@triton.jit
def in_same_call(state, mine, call, tag, mask, k: tl.constexpr):
    """Whether the peers of ``mask [rank_bins]``, who have announced it, are in this ``call``. Gives
    up on one that is not."""
    r = tl.arange(0, k.rank_bins)
    theirs = peer_word(mine, "tags", r, k, (call % 2).to(tl.int32))
    theirs = tl.load(theirs, mask=mask, other=0)
    return all_agree(state, ON_CALL_BARRIER, mask & (theirs != tag), tag, theirs)


@triton.jit
def all_in_call(regions, state, tag, k: tl.constexpr, alone=False):
    """Whether all peers have come to this same call. For programs that leave before the call is
    counted. ``alone``: only one program asks; else the wait of program 0 counts."""
    r = tl.arange(0, k.rank_bins)
    mine = peer_base(regions, tl.load(words(state) + RANK).to(tl.int32))
    call = tl.load(words(state) + EPOCH)
    want = call + 1 + (r * 0)
    entered = peer_word(mine, "entered", r, k)
    noted = alone | (tl.program_id(0) == 0)
    seen = wait_for_all(entered, want, r < k.ranks, state, ON_CALL_BARRIER, r, noted=noted)
    ok = lacking(seen, want, r < k.ranks) == 0
    if ok:
        ok = in_same_call(state, mine, call, tag, r < k.ranks, k)
    return ok


@triton.jit
def announce_call(regions, state, tag, k: tl.constexpr):
    """Tell all peers that this rank has come to the call."""
    me, call = tl.load(words(state) + RANK).to(tl.int32), tl.load(words(state) + EPOCH)
    parity = (call % 2).to(tl.int32)
    note_call(state, tag, call)
    r = tl.arange(0, k.rank_bins)
    bases = tl.load(words(regions) + r, mask=r < k.ranks, other=0)
    tl.store(peer_word(bases, "tags", me, k, parity), tag + (r * 0), mask=r < k.ranks)
    entered = peer_word(bases, "entered", me, k)
    add_release(entered, tl.full((k.rank_bins,), 1, tl.int64), r < k.ranks)


@triton.jit
def count_call(state):
    """The call is over for whoever reads its number."""
    calls = tl.load(words(state) + EPOCH)
    tl.debug_barrier()
    tl.store(words(state) + EPOCH, calls + 1)
