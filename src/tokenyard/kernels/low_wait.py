# pyright: basic
"""Waits of the low-latency engine. A wait that fails does not end the call: it marks the silent rank, and the call goes on without it.

``active`` is int32 ``[R]`` on the device: 0 for ranks that are left out. A rank is silent if a word of it does not come within ``timeout``
(ns). Whoever waits for half of that gives a sign of life (``pulses``), as it is late itself now: ranks with a pulse of this call or the
last get three times as long. So who waits for a dead rank is not taken for dead by those who wait for it.

Every thread reads a clock of its own, so thread 0's word counts, and all learn of it through memory (``late_of``, which only grows: by
one for each of three deadlines that a wait comes past): threads that left a loop at different times would meet at the wrong barriers.
As a look costs several atomics, a program polls SPINS times between two.

For the same reason what others may change meanwhile is never loaded, but looked at by an atomic (:func:`look`, :func:`are_active`): one
thread does it for all. A load of a small tensor is made by several threads per element, which may see different values and go on
different ways.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_region import (
    OTHER_RANK, READY, RANK, SILENT_RANK, STATUS, call_in, late_of, pulse_of, value_in, vote_of,
)  # fmt: skip
from tokenyard.kernels.region import peer_base
from tokenyard.kernels.sync import now_ns, words

SPINS = tl.constexpr(16)
_OTHER_RANK, _SILENT_RANK = tl.constexpr(OTHER_RANK), tl.constexpr(SILENT_RANK)


@triton.jit
def flags_of(active):
    """The mask as a pointer to int32."""
    return active.to(tl.pointer_type(tl.int32))


@triton.jit
def tell(word, value, mask):
    """Write words that tell their call themselves, so that nothing else needs to be seen first. An atomic, as it reaches peers soon
    and whole; and words only grow, so a rank that is long left out cannot turn them back."""
    tl.atomic_max(word, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def look(word, mask):
    """Words as they are now, the same for all threads."""
    return tl.atomic_add(word, 0, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def is_active(active, rank):
    """Whether ``rank`` is not left out, as of now."""
    return tl.atomic_add(flags_of(active) + rank, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def are_active(active, ranks, mask):
    """Which of a small tensor of ranks are not left out, as of now."""
    return mask & (tl.atomic_add(flags_of(active) + ranks, 0, mask=mask, sem="relaxed", scope="gpu") != 0)


@triton.jit
def leave_out(active, rank, mask):
    """Mark a rank (or some of a small tensor of ranks) as silent."""
    tl.atomic_xchg(flags_of(active) + rank, rank * 0, mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def _is_past(word, stamp, deadline):
    """Whether a deadline of this program's wait is over."""
    late = now_ns() >= deadline
    tl.atomic_max(word, stamp, mask=late, sem="relaxed", scope="gpu")
    return tl.atomic_add(word, 0, sem="relaxed", scope="gpu") >= stamp


@triton.jit
def stamp_of(state, P: tl.constexpr):
    """Where the stamps of one more wait begin."""
    return tl.atomic_add(late_of(state, tl.program_id(0), P), 0, sem="relaxed", scope="gpu")


@triton.jit
def judge(
    lack, ranks, peers, active, state, call, stamp, begin, timeout, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, LC: tl.constexpr,
):  # fmt: skip
    """Leave out those of ``ranks`` (one, or a small tensor of them) that ``lack`` something and have had their time."""
    word = late_of(state, tl.program_id(0), P)
    if _is_past(word, stamp + 1, begin + timeout // 2):
        me = tl.load(words(state) + RANK).to(tl.int32)
        for peer in range(R):
            if is_active(active, peer + 0):
                tell(pulse_of(peer_base(peers, peer + 0), me, R, M, K, LC), call, call > 0)
        if _is_past(word, stamp + 2, begin + timeout):
            pulse = look(pulse_of(peer_base(peers, me), ranks, R, M, K, LC), lack)
            silent = lack & (pulse < call - 1)
            if _is_past(word, stamp + 3, begin + 3 * timeout):
                silent = lack
            leave_out(active, ranks, silent)
            status = words(tl.load(words(state) + STATUS))
            tl.store(status + _SILENT_RANK + ranks * 0, (ranks + 1).to(tl.int64), mask=silent)


@triton.jit
def wait_ready(state, call):
    """Wait until this rank's leader has made the table of this dispatch: its own wait has an end."""
    ready = tl.atomic_add(words(state) + READY, 0, sem="acquire", scope="gpu")
    while ready < call:
        ready = tl.atomic_add(words(state) + READY, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def wait_flag(
    flag, want, peers, active, rank, state, call, timeout, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    LC: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Wait until ``rank`` has set all flags of a row to at least ``want`` (acquire) and return the least; less than ``want`` comes back
    if ``rank`` is left out."""
    flags = flag + tl.arange(0, PIECES)
    seen = tl.min(tl.atomic_add(flags, 0, sem="acquire", scope="sys"))
    if seen < want:
        begin, stamp = now_ns(), stamp_of(state, P)
        live = True
        while live:
            n = 0
            while (seen < want) & (n < SPINS):
                seen = tl.min(tl.atomic_add(flags, 0, sem="acquire", scope="sys"))
                n += 1
            live = seen < want
            if live:  # nothing is looked at once the flag is there: what comes next waits for it
                live = is_active(active, rank)
                if live:
                    judge(rank >= 0, rank, peers, active, state, call, stamp, begin, timeout, R, P, M, K, LC)
    tl.debug_barrier()
    return seen


@triton.jit
def wait_flags(
    flags, want, mask, peers, active, ranks, state, call, timeout, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, LC: tl.constexpr,
):  # fmt: skip
    """The same for one flag of each of ``ranks``, a small tensor: flags as they were seen; if all are beyond ``want``, ``want + 1``."""
    seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    least = tl.min(tl.where(mask, seen, want + 1))
    if least < want:
        begin, stamp = now_ns(), stamp_of(state, P)
        live = True
        while live:  # carries scalars only: Triton 3.6 crashes on tensors that come from atomics
            n = 0
            while (least < want) & (n < SPINS):
                polled = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
                least = tl.min(tl.where(mask, polled, want + 1))
                n += 1
            live = least < want
            if live:
                here = are_active(active, ranks, mask)
                lack = here & (tl.atomic_add(flags, 0, mask=here, sem="acquire", scope="sys") < want)
                live = tl.sum(lack.to(tl.int32)) > 0
                if live:
                    judge(lack, ranks, peers, active, state, call, stamp, begin, timeout, R, P, M, K, LC)
        seen = tl.where(mask, want + 1, 0)
        if least <= want:  # they are not all alike: look again
            seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    tl.debug_barrier()
    return seen


@triton.jit
def agree(
    state, flags, want, got, doubted, token, share, ranks, R: tl.constexpr, P: tl.constexpr, LC: tl.constexpr, SHARES: tl.constexpr
):  # fmt: skip
    """From which ranks a token's sum takes rows, the same for the programs that each add up a share of its channels.

    Each votes for what it ``got``. Who got all that there is to get goes on. Who doubts waits for all votes, which come as every wait ends,
    and takes what anybody got: so also what those have who did not wait, and it waits for these flags, as they are there. No circle: a
    program votes on its tokens in order, and of the first token that lacks a vote all programs are at that token (``SHARES <= P``: no
    program has two shares of one).
    """
    tl.atomic_max(vote_of(state, token * SHARES + share, ranks, R, P, LC), want + got, mask=ranks < R, sem="relaxed", scope="gpu")
    if tl.max(doubted.to(tl.int32)) > 0:
        q = tl.arange(0, SHARES)
        votes = vote_of(state, token * SHARES + q[:, None], ranks[None, :], R, P, LC)
        inside = (q < SHARES)[:, None] & (ranks < R)[None, :]
        missing = 1
        while missing > 0:
            missing = tl.sum(((look(votes, inside) < want) & inside).to(tl.int32))
        cast = look(votes, inside)
        got = tl.max(((cast == want + 1) & inside).to(tl.int32), axis=0)
        missing = 1
        while missing > 0:
            seen = tl.atomic_add(flags, 0, mask=got > 0, sem="acquire", scope="sys")
            missing = tl.sum(((seen < want) & (got > 0)).to(tl.int32))
        tl.debug_barrier()
    return got


@triton.jit
def _have_come(counts, inside, tags, here, call):
    """Of which of the ranks ``here`` all notes are of this call."""
    least = tl.min(tl.where(inside, call_in(counts), call), axis=1)
    return here & (least >= call) & (call_in(tags) >= call)


@triton.jit
def wait_notes(
    notes, inside, tags, peers, call, here, active, ranks, waits, state, timeout,
    R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, LC: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait for notes ``[RP, B]`` (``inside``) and tags ``[RP]`` of the ranks ``here``; returns both, and which ranks' are there.

    Words tell their call themselves, so what is loaded is good by itself and nothing is acquired. ``waits``: int64 ``[R]``, to which
    ns waited are added, if TIMED.
    """
    begin, stamp = now_ns(), stamp_of(state, P)
    waited = (ranks * 0).to(tl.int64) - 1
    live = True
    while live:  # carries no tensors that come from atomics: see wait_flags
        n = 0
        short = 1
        while (short > 0) & (n < SPINS):
            there = _have_come(look(notes, inside), inside, look(tags, here), here, call)
            if TIMED:
                waited = tl.where(there & (waited < 0), now_ns() - begin, waited)
            short = tl.sum((here & (there == 0)).to(tl.int32))
            n += 1
        live = short > 0
        if live:
            lack = are_active(
                active, ranks, here & (_have_come(look(notes, inside), inside, look(tags, here), here, call) == 0)
            )
            live = tl.sum(lack.to(tl.int32)) > 0
            if live:
                judge(lack, ranks, peers, active, state, call, stamp, begin, timeout, R, P, M, K, LC)
    counts, last = look(notes, inside), look(tags, here)
    there = _have_come(counts, inside, last, here, call)
    if TIMED:
        to = waits.to(tl.pointer_type(tl.int64)) + ranks
        waited = tl.where(waited < 0, now_ns() - begin, waited)
        sofar = tl.load(to, mask=here, other=0)
        tl.debug_barrier()
        tl.store(to, sofar + waited, mask=here)
    tl.debug_barrier()
    return counts, last, there


@triton.jit
def in_same_call(state, tags, there, tag, ranks):
    """Which of the ranks ``there`` mean the same call as this one; tells the host of one that does not. (0: it brings nothing.)"""
    other = there & (value_in(tags) != tag) & (value_in(tags) != 0)
    stranger = tl.max(tl.where(other, ranks, -1))
    if stranger >= 0:
        tl.store(words(tl.load(words(state) + STATUS)) + _OTHER_RANK, stranger.to(tl.int64) + 1)
    return there & (other == 0)


@triton.jit
def wait_weights(
    at, inside, peers, active, rank, state, call, timeout, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    LC: tl.constexpr,
):  # fmt: skip
    """Wait for weights that ``rank`` brings, words ``[KP]`` that tell their call themselves: whether all are there, and the weights."""
    sign = call & 0x7FFFFFFF
    short = tl.sum((((look(at, inside) >> 32) != sign) & inside).to(tl.int32))
    if short > 0:
        begin, stamp = now_ns(), stamp_of(state, P)
        live = True
        while live:
            n = 0
            while (short > 0) & (n < SPINS):
                short = tl.sum((((look(at, inside) >> 32) != sign) & inside).to(tl.int32))
                n += 1
            live = short > 0
            if live:
                live = is_active(active, rank)
                if live:
                    judge(rank >= 0, rank, peers, active, state, call, stamp, begin, timeout, R, P, M, K, LC)
    word = look(at, inside)
    tl.debug_barrier()
    return short == 0, word.to(tl.int32).to(tl.float32, bitcast=True)
