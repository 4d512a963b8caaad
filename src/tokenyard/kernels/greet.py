# pyright: basic
"""The greeter: one program of every data kernel tells all peers what call this is and waits until all have told the same.

Publishes ``tags[half][me]`` at every peer, then 1 on ``hellos[me]`` there (release). Reads ``tags[half][peer]`` of its own region
after ``hellos[peer]`` has reached the number of this call (acquire). A data kernel ends only after its greeter, so all peers have
entered call n when a rank enters n + 1, and have left it when it enters n + 2, which is when it writes the half again.

It is also what makes a silent peer a named one when no row was to come from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import EPOCH, hello_of, peer_base, tag_of
from tokenyard.kernels.sync import (
    DISAGREED, ON_GREETING, RANK, add_release, give_up, given_up, lacking, note_call, wait_for_all, words,
)  # fmt: skip


@triton.jit
def in_same_call(state, mine, call, tag, mask, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Whether peers that have greeted, those of ``mask [RP]``, are in this ``call``. Gives up on one that is not."""
    r = tl.arange(0, RP)
    theirs = tl.load(tag_of(mine, (call % 2).to(tl.int32), r, R, C), mask=mask, other=0)
    peer = tl.max(tl.where(mask & (theirs != tag), r, -1))
    if peer >= 0:
        give_up(state, DISAGREED, ON_GREETING, peer, 0, tag, tl.sum(tl.where(r == peer, theirs, 0)))
    return peer < 0


@triton.jit
def greeted(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Whether all peers have come to this same call. For programs that leave before the call is counted."""
    r = tl.arange(0, RP)
    mine = peer_base(peers, tl.load(words(state) + RANK).to(tl.int32))
    call = tl.load(words(state) + EPOCH)
    want = call + 1 + (r * 0)
    ok = lacking(wait_for_all(hello_of(mine, r, R, C), want, r < R, state, ON_GREETING, r, MORE=False), want, r < R) == 0
    if ok:
        ok = in_same_call(state, mine, call, tag, r < R, R, C, RP)
    return ok


@triton.jit
def say_hello(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Tell all peers that this rank has come to the call."""
    me, call = tl.load(words(state) + RANK).to(tl.int32), tl.load(words(state) + EPOCH)
    half = (call % 2).to(tl.int32)
    note_call(state, tag, call)
    r = tl.arange(0, RP)
    bases = tl.load(words(peers) + r, mask=r < R, other=0)
    tl.store(tag_of(bases, half, me, R, C), tag + (r * 0), mask=r < R)
    add_release(hello_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), r < R)


@triton.jit
def count_call(state):
    """The call is over for whoever reads its number."""
    calls = tl.load(words(state) + EPOCH)
    tl.debug_barrier()
    tl.store(words(state) + EPOCH, calls + 1)


@triton.jit
def greet(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Greet, wait for the others, compare tags, and count the call."""
    say_hello(peers, state, tag, R, C, RP)
    greeted(peers, state, tag, R, C, RP)
    count_call(state)


@triton.jit(repr=shown_as("nvlink::greet"))
def greet_kernel(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Grid 1: a call without rows, to tell peers in a data call that this rank refuses it."""
    if not given_up(state):
        greet(peers, state, tag, R, C, RP)
