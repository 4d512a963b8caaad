# ruff: noqa: N803 (constants of kernels are upper case)
"""Small kernels that the tests of memory launch, interpreted and compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.sync import RANK, add_release, follow, wait_at_least, words

REGION_BYTES = 16384
PHASE = 7
"""As :func:`everybody` names its wait in the status."""


class Pair(NamedTuple):
    """Two arguments."""

    first: Any
    second: Any


class Inner(NamedTuple):
    factor: int


class Outer(NamedTuple):
    """Constants."""

    width: int
    inner: Inner


@triton.jit
def in_structs(out, pair: Pair, more, k: tl.constexpr):
    """Arguments and constants in structs."""
    at = tl.arange(0, k.width)
    tl.store(words(out) + at, (pair.first - pair.second) * k.inner.factor + more + at)


@triton.jit
def everybody(peers, state, out, epoch, R: tl.constexpr, W: tl.constexpr):
    """Program 1 tells every rank W numbers; program 0, which runs first where programs take turns,
    waits for all and adds.

    The sum goes to row ``epoch`` of ``out``. A region holds R counters, then numbers by (parity of
    the epoch, source, lane).
    """
    me = tl.load(words(state) + RANK)
    lane = tl.arange(0, W)
    half = R + (epoch % 2) * R * W
    if tl.program_id(0) == 1:
        for peer in range(R):
            theirs = words(tl.load(words(peers) + peer))
            tl.store(theirs + half + me * W + lane, 1000 * me + 10 * epoch + lane)
            add_release(
                theirs + me + tl.arange(0, 1),
                tl.full((1,), 1, tl.int64),
                tl.full((1,), True, tl.int1),
            )
    else:
        mine = words(tl.load(words(peers) + me))
        total = tl.zeros((W,), tl.int64)
        for peer in range(R):
            if wait_at_least(mine + peer, epoch, state, 7, peer, peer):
                total += tl.load(mine + half + peer * W + lane)
        tl.store(words(out) + epoch * W + lane, total)


def sums(ranks: int, epoch: int, lanes: int) -> list[int]:
    """What :func:`everybody` puts into row ``epoch``."""
    return [sum(1000 * rank + 10 * epoch + lane for rank in range(ranks)) for lane in range(lanes)]


@triton.jit
def double(out, count, first, W: tl.constexpr):
    """Twice row ``first`` into the row behind it, ``count`` numbers of it."""
    lane = tl.arange(0, W)
    tl.store(
        words(out) + (first + 1) * W + lane,
        2 * tl.load(words(out) + first * W + lane),
        mask=lane < count,
    )


@triton.jit
def widths(out, small, huge):
    """An argument is an int64 whatever its value."""
    tl.store(words(out), small.dtype.primitive_bitwidth)
    tl.store(words(out) + 1, (small << 40) + huge)


@triton.jit
def multiply_add(out, a, b, c, W: tl.constexpr):
    """``a * b + c`` on W float32: two roundings, as in torch."""
    lane = tl.arange(0, W)
    ptr = tl.pointer_type(tl.float32)
    product = tl.load(a.to(ptr) + lane) * tl.load(b.to(ptr) + lane)
    tl.store(out.to(ptr) + lane, product + tl.load(c.to(ptr) + lane))


@triton.jit
def count_up(counter, times, W: tl.constexpr):
    """``times`` adds of one by every lane of every program to one counter."""
    for _ in range(times):
        same = words(counter) + tl.zeros((W,), tl.int64)
        tl.atomic_add(same, tl.full((W,), 1, tl.int64), sem="relaxed", scope="sys")


@triton.jit
def fail(address, odd):
    """Program ``odd`` writes where nothing is; -1: every program does what the interpreter
    cannot.
    """
    if odd == -1:
        tl.inline_asm_elementwise("trap;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if tl.program_id(0) == odd:
        tl.store(words(address), 1)


@triton.jit
def fail_beside_waiting(address, never):
    """Program 0 writes where nothing is, while the others wait for ever."""
    if tl.program_id(0) == 0:
        tl.store(words(address), 1)
    else:
        while tl.atomic_add(words(never), 0, sem="relaxed", scope="sys") == 0:
            pass


@triton.jit
def constant_in_front(W: tl.constexpr, out):
    """Not launchable: arguments must come first."""
    tl.store(words(out), W)


@triton.jit
def follower(out, a, b, c, d, e, EARLY: tl.constexpr):
    """May be set up before the launch ahead of it is over."""
    follow(EARLY)
    tl.store(words(out), a + b + c + d + e)
