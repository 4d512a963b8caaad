# pyright: basic
"""Waits of engine low_latency. A wait that fails does not end the call: the silent rank is left
out, and the call goes on without it.

``active`` is int32 ``[R]`` on the device, 0 for ranks that are left out. A rank is silent if one of
its words does not come within ``timeout`` (ns). A rank that has waited for half of that writes its
heartbeat to all peers, because it is late itself now. A rank with a heartbeat of this call or the
last gets three times as long. So a rank that waits for a dead one is not taken for dead itself.

Every thread reads a clock of its own. So the clock of thread 0 counts, and all threads learn of it
through memory (``late_of``, which only grows: by one for each of three deadlines that a wait has
passed). Threads that left a loop at different times would meet at the wrong barriers. A look at the
clock costs several atomics, so a program polls SPINS times between two.

For the same reason, words that others may change meanwhile are read by an atomic (:func:`look`,
:func:`are_active`), not by a load: one thread does it for all. A load of a small tensor is made by
several threads per element; they may see different values and take different branches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import tell_or_put
from tokenyard.kernels.low_latency_memory import (
    OTHER_RANK, RANK, READY, ROWS, SILENT_RANK, STATUS, arrival_of, call_in, count_of, epoch_of,
    value_in, waited_in, with_call,
)  # fmt: skip
from tokenyard.kernels.region import ints, peer_base
from tokenyard.kernels.sync import ON_COUNTS, ON_ROWS, note_wait, now_ns, until_came, words

SPINS = tl.constexpr(16)


class Call(NamedTuple):
    """A call as the programs of a launch know it. Addresses and integers."""

    regions: Any  # the table of all symmetric regions
    state: Any  # of this rank
    active: Any
    number: Any
    parity: Any
    rank: Any  # this one
    timeout: Any  # nanoseconds


@triton.jit
def next_call(regions, state, active, rank, timeout, sizes: tl.constexpr):
    """The call that this program makes next. ``rank``: this one; None: as the state has it."""
    number = tl.load(epoch_of(state, tl.program_id(0), sizes)) + 1
    parity = (number % 2).to(tl.int32)
    if rank is None:
        rank = tl.load(words(state) + RANK).to(tl.int32)
    return Call(
        regions=regions, state=state, active=active, number=number, parity=parity, rank=rank,
        timeout=timeout,
    )  # fmt: skip


@triton.jit
def tell(word, value, mask):
    """Raise words that are valid in one call only, so that nothing else needs to be seen first. It
    is an atomic, because that reaches peers soon and whole. Words only grow, so a rank that was
    left out long ago cannot turn them back."""
    tl.atomic_max(word, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def look(word, mask):
    """Words as they are now, the same for all threads."""
    return tl.atomic_add(word, 0, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def is_active(active, rank):
    """Whether ``rank`` is not left out, as of now."""
    return tl.atomic_add(ints(active) + rank, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def are_active(active, ranks, mask):
    """Which of a small tensor of ranks are not left out, as of now."""
    seen = tl.atomic_add(ints(active) + ranks, 0, mask=mask, sem="relaxed", scope="gpu")
    return mask & (seen != 0)


@triton.jit
def leave_out(active, rank, mask):
    """Mark a rank, or some of a small tensor of ranks, as silent."""
    tl.atomic_xchg(ints(active) + rank, rank * 0, mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def _late_of(state, sizes: tl.constexpr):
    """Deadlines that waits of this program have passed."""
    return words(state) + sizes.state.late + tl.program_id(0)


@triton.jit
def _stamp_of(state, sizes: tl.constexpr):
    """The stamp from which on one more wait counts its deadlines."""
    return tl.atomic_add(_late_of(state, sizes), 0, sem="relaxed", scope="gpu")


@triton.jit
def _is_past(word, stamp, deadline):
    """Whether this program's wait has passed a deadline."""
    late = now_ns() >= deadline
    tl.atomic_max(word, stamp, mask=late, sem="relaxed", scope="gpu")
    return tl.atomic_add(word, 0, sem="relaxed", scope="gpu") >= stamp


@triton.jit
def _heartbeat_of(rank, at, call, sizes: tl.constexpr):
    """The sign of life of ``rank`` that stands at rank ``at``."""
    return words(peer_base(call.regions, at)) + sizes.region.heartbeats + rank


@triton.jit
def _leave_out_silent(lack, ranks, call, stamp, begin, sizes: tl.constexpr):
    """Leave out those of ``ranks`` (one, or a small tensor) that ``lack`` something and have had
    their time since ``begin``."""
    word = _late_of(call.state, sizes)
    if _is_past(word, stamp + 1, begin + call.timeout // 2):
        me = tl.load(words(call.state) + RANK).to(tl.int32)
        if sizes.far:  # one message per call is enough
            mine = _heartbeat_of(me, me, call, sizes)
            told = tl.atomic_max(mine, call.number, sem="relaxed", scope="gpu") >= call.number
        for peer in range(sizes.ranks):
            if is_active(call.active, peer + 0):
                heartbeat = _heartbeat_of(me, peer + 0, call, sizes)
                if sizes.far:
                    if not told:
                        tell_or_put(heartbeat, me * 0 + peer, call.number, call, sizes)
                else:
                    tell(heartbeat, call.number, call.number > 0)
        if _is_past(word, stamp + 2, begin + call.timeout):
            silent = lack & (look(_heartbeat_of(ranks, me, call, sizes), lack) < call.number - 1)
            if _is_past(word, stamp + 3, begin + 3 * call.timeout):
                silent = lack
            leave_out(call.active, ranks, silent)
            status = words(tl.load(words(call.state) + STATUS))
            tl.store(status + SILENT_RANK + ranks * 0, (ranks + 1).to(tl.int64), mask=silent)


@triton.jit
def wait_ready(state, number):
    """Wait until this rank's leader has made the table of dispatch ``number``. The leader's own
    wait has an end."""
    ready = tl.atomic_add(words(state) + READY, 0, sem="acquire", scope="gpu")
    while ready < number:
        ready = tl.atomic_add(words(state) + READY, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def wait_flag(flag, want, rank, call, pieces: tl.constexpr, sizes: tl.constexpr):
    """Wait until ``rank`` has set all flags of a row to at least ``want`` (acquire). Returns the
    least; it is less than ``want`` if ``rank`` is left out."""
    flags = flag + tl.arange(0, pieces)
    seen = tl.min(tl.atomic_add(flags, 0, sem="acquire", scope="sys"))
    if seen < want:
        begin, stamp = now_ns(), _stamp_of(call.state, sizes)
        live = True
        while live:
            n = 0
            while (seen < want) & (n < SPINS):
                seen = tl.min(tl.atomic_add(flags, 0, sem="acquire", scope="sys"))
                n += 1
            live = seen < want
            if live:  # look at nothing once the flag is there: what comes next waits for it
                live = is_active(call.active, rank)
                if live:
                    _leave_out_silent(rank >= 0, rank, call, stamp, begin, sizes)
        note_wait(waited_in(call.state, sizes), ON_ROWS, rank, now_ns() - begin, True)
    tl.debug_barrier()
    return seen


@triton.jit
def wait_row(s, t, call, chunk_rows: tl.constexpr, sizes: tl.constexpr):
    """As a flag would tell it, whether row number ``t`` of far rank ``s`` is here (acquire)."""
    want, least = 2 * call.number, with_call(call.number, (t * 0).to(tl.int64))
    first = arrival_of(peer_base(call.regions, call.rank), call.parity, s, ROWS, sizes)
    own = t // chunk_rows
    chunk, seen, live = own * 0, least, True
    while live:
        seen = wait_flag(first + chunk, least, s, call, 1, sizes)
        live = (chunk < own) & (seen >= least) & (t < value_in(seen))
        chunk = own
    return tl.where(seen < least, want - 1, want + (t < value_in(seen)).to(tl.int64))


@triton.jit
def wait_flags(flags, want, mask, ranks, call, sizes: tl.constexpr):
    """The same for one flag of each of ``ranks``, a small tensor. Returns the flags as they were
    seen; ``want + 1`` if all are beyond ``want``."""
    seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    least = tl.min(tl.where(mask, seen, want + 1))
    if least < want:
        begin, stamp = now_ns(), _stamp_of(call.state, sizes)
        lacked, waited = mask & (seen < want), (ranks * 0).to(tl.int64) - 1
        live = True
        while live:  # carries no tensors that come from atomics: Triton 3.6 crashes on them
            n = 0
            while (least < want) & (n < SPINS):
                polled = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
                least = tl.min(tl.where(mask, polled, want + 1))
                waited = until_came(waited, polled >= want, begin)
                n += 1
            live = least < want
            if live:
                here = are_active(call.active, ranks, mask)
                polled = tl.atomic_add(flags, 0, mask=here, sem="acquire", scope="sys")
                lack = here & (polled < want)
                live = tl.sum(lack.to(tl.int32)) > 0
                if live:
                    _leave_out_silent(lack, ranks, call, stamp, begin, sizes)
        waited = until_came(waited, True, begin)
        note_wait(waited_in(call.state, sizes), ON_ROWS, ranks, waited, lacked)
        seen = tl.where(mask, want + 1, 0)
        if least <= want:  # they are not all alike: look again
            seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    tl.debug_barrier()
    return seen


@triton.jit
def agree(
    flags, got, doubted, token, share, ranks, call, shares: tl.constexpr, sizes: tl.constexpr
):
    """The ranks whose rows a token's sum takes: the same for all programs that sum a share of its
    channels.

    Each program votes for the ranks that it ``got``. A program that got all that there is to get
    goes on. A program that doubts a rank waits for all votes; they come, because every wait ends.
    It takes the ranks that any program got, so also those of programs that did not wait. It waits
    for their flags, which are there.

    No circle: programs vote on their tokens in order. For the first token that lacks a vote, all
    programs are at that token (``shares <= programs``: no program has two shares of one token).
    """
    want = 2 * call.number
    all_votes = words(call.state) + sizes.state.votes
    mine = all_votes + (token * shares + share) * sizes.ranks + ranks
    tl.atomic_max(mine, want + got, mask=ranks < sizes.ranks, sem="relaxed", scope="gpu")
    if tl.max(doubted.to(tl.int32)) > 0:
        q = tl.arange(0, shares)
        votes = all_votes + (token * shares + q[:, None]) * sizes.ranks + ranks[None, :]
        inside = (q < shares)[:, None] & (ranks < sizes.ranks)[None, :]
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
def _have_come(counts, inside, tags, here, number):
    """The ranks ``here`` whose counts and tag are all of call ``number``."""
    least = tl.min(tl.where(inside, call_in(counts), number), axis=1)
    return here & (least >= number) & (call_in(tags) >= number)


@triton.jit
def wait_counts(counts_at, inside, tags_at, here, ranks, waits, call, sizes: tl.constexpr):
    """Wait for counts ``[rank_bins, B]`` (``inside``) and tags ``[rank_bins]`` of the ranks
    ``here``. Returns both, and the ranks whose words are there. Words are valid in one call only,
    so nothing is acquired. ``waits``: int64 ``[R]``, to which the nanoseconds waited are added; 0:
    there is none."""
    number = call.number
    begin, stamp = now_ns(), _stamp_of(call.state, sizes)
    waited = (ranks * 0).to(tl.int64) - 1
    live = True
    while live:  # carries no tensors that come from atomics: see wait_flags
        n = 0
        short = 1
        while (short > 0) & (n < SPINS):
            there = _have_come(look(counts_at, inside), inside, look(tags_at, here), here, number)
            waited = until_came(waited, there, begin)
            short = tl.sum((here & (there == 0)).to(tl.int32))
            n += 1
        live = short > 0
        if live:
            come = _have_come(look(counts_at, inside), inside, look(tags_at, here), here, number)
            lack = are_active(call.active, ranks, here & (come == 0))
            live = tl.sum(lack.to(tl.int32)) > 0
            if live:
                _leave_out_silent(lack, ranks, call, stamp, begin, sizes)
    counts, tags = look(counts_at, inside), look(tags_at, here)
    there = _have_come(counts, inside, tags, here, number)
    waited = until_came(waited, True, begin)
    note_wait(waited_in(call.state, sizes), ON_COUNTS, ranks, waited, here)
    tl.atomic_add(
        words(waits) + ranks, waited, mask=here & (waits != 0), sem="relaxed", scope="gpu"
    )
    tl.debug_barrier()
    return counts, tags, there


@triton.jit
def in_same_call(state, tags, there, tag, ranks):
    """Which of the ranks ``there`` are in the same call as this one. Tells the host of one that is
    not. (Tag 0: it brings nothing.)"""
    other = there & (value_in(tags) != tag) & (value_in(tags) != 0)
    stranger = tl.max(tl.where(other, ranks, -1))
    if stranger >= 0:
        status = words(tl.load(words(state) + STATUS))
        tl.store(status + OTHER_RANK, stranger.to(tl.int64) + 1)
    return there & (other == 0)


@triton.jit
def wait_for_ranks(tag, waits, call, sizes: tl.constexpr):
    """Wait until all ranks have come to the call; leave out those that have not, or with a ``tag``
    that are in another call. ``waits``: as in :func:`wait_counts`."""
    r = tl.arange(0, sizes.rank_bins)
    here = are_active(call.active, r, r < sizes.ranks)
    mine = peer_base(call.regions, call.rank)
    tags_at = count_of(mine, call.parity, r, sizes.local_experts, sizes)
    _, tags, there = wait_counts(
        tags_at[:, None], here[:, None], tags_at, here, r, waits, call, sizes
    )
    if tag is not None:
        there = in_same_call(call.state, tags, there, tag, r)
    leave_out(call.active, r, here & (there == 0))


@triton.jit
def wait_weights(at, inside, rank, call, sizes: tl.constexpr):
    """Wait for weights of ``rank``, words ``[topk_bins]`` that hold the number of their call.
    Returns whether all are there, and the weights."""
    sign = call.number & 0x7FFFFFFF
    short = tl.sum((((look(at, inside) >> 32) != sign) & inside).to(tl.int32))
    if short > 0:
        begin, stamp = now_ns(), _stamp_of(call.state, sizes)
        live = True
        while live:
            n = 0
            while (short > 0) & (n < SPINS):
                short = tl.sum((((look(at, inside) >> 32) != sign) & inside).to(tl.int32))
                n += 1
            live = short > 0
            if live:
                live = is_active(call.active, rank)
                if live:
                    _leave_out_silent(rank >= 0, rank, call, stamp, begin, sizes)
        note_wait(waited_in(call.state, sizes), ON_ROWS, rank, now_ns() - begin, True)
    word = look(at, inside)
    tl.debug_barrier()
    return short == 0, word.to(tl.int32).to(tl.float32, bitcast=True)
