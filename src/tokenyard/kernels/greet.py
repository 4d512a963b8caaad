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

from tokenyard.kernels.region import EPOCH, hello_of, peer_base, tag_of
from tokenyard.kernels.sync import RANK, add_release, give_up, given_up, lacking, wait_for_all, words


@triton.jit
def wait_for_greetings(peers, state, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Whether all peers have come to this call. Only where the greeter leaves last: it counts the calls."""
    r = tl.arange(0, RP)
    mine = peer_base(peers, tl.load(words(state) + RANK).to(tl.int32))
    want = tl.load(words(state) + EPOCH) + 1 + (r * 0)
    return lacking(wait_for_all(hello_of(mine, r, R, C), want, r < R, state, 2, r), want, r < R) == 0


@triton.jit
def greet(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Greet, compare tags, and count the call."""
    say_hello(peers, state, tag, R, C, RP)
    hear_hellos(peers, state, tag, R, C, RP)


@triton.jit
def say_hello(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    me = tl.load(words(state) + RANK).to(tl.int32)
    half = (tl.load(words(state) + EPOCH) % 2).to(tl.int32)
    r = tl.arange(0, RP)
    bases = tl.load(words(peers) + r, mask=r < R, other=0)
    tl.store(tag_of(bases, half, me, R, C), tag + (r * 0), mask=r < R)
    add_release(hello_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), r < R)


@triton.jit
def hear_hellos(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    me = tl.load(words(state) + RANK).to(tl.int32)
    call = tl.load(words(state) + EPOCH)
    r = tl.arange(0, RP)
    mine = peer_base(peers, me)
    if wait_for_greetings(peers, state, R, C, RP):
        theirs = tl.load(tag_of(mine, (call % 2).to(tl.int32), r, R, C), mask=r < R, other=0)
        other = (r < R) & (theirs != tag)
        if tl.max(other.to(tl.int32)) > 0:
            peer = tl.max(tl.where(other, r, -1))
            give_up(state, 2, 2, peer, 0, tag, tl.sum(tl.where(r == peer, theirs, 0)))
    tl.debug_barrier()
    tl.store(words(state) + EPOCH, call + 1)


@triton.jit
def greet_kernel(peers, state, tag, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Grid 1: a call without rows, to tell peers in a data call that this rank refuses it."""
    if not given_up(state):
        greet(peers, state, tag, R, C, RP)
