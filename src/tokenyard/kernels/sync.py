# pyright: basic
"""Flags, waits and failures: the only file of kernels that speaks of memory order, clocks and
assembly.

A counter is an int64 that only grows. Its writer stores data, then :func:`add_release`; its reader
waits with :func:`wait_at_least` (an acquire), then loads the data. Nobody ever resets one.

A small tensor is loaded by several threads per element. So a program that stores to what it has
loaded has a barrier in between: a thread that lags behind would load what was stored, and its value
may be the one that is used next. (The simulator checks that.)

Every wait ends: after the object's timeout, or as soon as another program of this rank has given
up. The first to give up writes what it waited for into the status words, which the host can read at
any time, and in which data call: TAG_NOW is the tag of the last one that this rank has announced,
HELLOS how many those are.

A wait that does not end at its first look adds how long it took to a matrix ``[sources, phases]``
(:func:`note_wait`), which the host can read at any time: a source's time, until it had come. WAITED
is the matrix's address, or 0.

IN_HEAPS: where the scales are that came in the last cached dispatch to heaps (rows of none have
    such an address too); 0: no row moved there, as a rank had no block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# int64 words at the start of a rank's local state
RANK, TIMEOUT_NS, STATUS, GIVEN_UP = (tl.constexpr(word) for word in range(4))
EXPIRED = tl.constexpr(7)
TAG_NOW, HELLOS, WAITED, IN_HEAPS = (tl.constexpr(word) for word in range(9, 13))
STATE_WORDS = 16
"""Words reserved for the above."""

# int64 words of the status, in host memory
CODE, PHASE, PEER, COUNTER, EXPECTED, SEEN = range(6)
TAG, CALL = 8, 9
STATUS_WORDS = 16
TIMED_OUT, DISAGREED = (tl.constexpr(code) for code in (1, 2))

# what a wait is on, as the status names its phase
ON_PLAN, ON_COUNTS, ON_CALL_BARRIER, ON_ROWS, ON_ROOM, ON_END = map(tl.constexpr, range(6))
ON_RECEIVE_BUFFER = tl.constexpr(15)  # those between are engine twolevel's
WAIT_PHASES = tl.constexpr(16)

RELAYED_NS = tl.constexpr(500_000_000)
"""How much longer than others those wait who wait for one that waits itself; less than
``engines/failures.py`` waits for reports."""


@triton.jit
def now_ns():
    """Nanoseconds on this device's clock."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def words(address):
    """``address`` as a pointer to int64."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def load_acquire(counter):
    """The counter's value; data released before it was set may be read after a barrier. (An add of
    0 becomes a load.)"""
    return tl.atomic_add(counter, 0, sem="acquire", scope="sys")


@triton.jit
def add_release(counter, count, mask):
    """Publish every store of this program so far, then add. ``counter`` may be a small tensor of
    pointers with a mask. The barrier is not optional: the add is made by one thread, and Triton 3.6
    puts no barrier in front of it."""
    tl.debug_barrier()
    tl.atomic_add(counter, count, mask=mask, sem="release", scope="sys")


@triton.jit
def raise_release(counter, value):
    """The same, but raise the counter to ``value``."""
    tl.debug_barrier()
    tl.atomic_max(counter, value, sem="release", scope="sys")


@triton.jit
def follow(EARLY: tl.constexpr):
    """First of all in a kernel of which programs may be set up EARLY, while the launch before it
    still runs: wait until that is over and what it stored can be read; and let the launch behind be
    set up."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def given_up(state):
    """Whether a program of this rank has given up."""
    return tl.atomic_add(words(state) + GIVEN_UP, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def give_up(state, code, phase, peer, counter, expected, seen):
    """End all waits of this rank. The first caller's reason is kept."""
    if tl.atomic_xchg(words(state) + GIVEN_UP, 1, sem="relaxed", scope="gpu") == 0:
        status = words(tl.load(words(state) + STATUS))
        tl.store(status + 1, phase)
        tl.store(status + 2, peer)
        tl.store(status + 3, counter)
        tl.store(status + 4, expected)
        tl.store(status + 5, seen)
        tl.store(status + 8, tl.atomic_add(words(state) + TAG_NOW, 0, sem="relaxed", scope="gpu"))
        tl.store(status + 9, tl.atomic_add(words(state) + HELLOS, 0, sem="relaxed", scope="gpu"))
        tl.debug_barrier()
        tl.atomic_xchg(status, code, sem="release", scope="sys")


@triton.jit
def all_agree(state, phase, wrong, expected, seen):
    """Give up on the last rank that is ``wrong``, if one is: it says what was ``seen`` instead of
    what was ``expected``. Whether none is."""
    r = tl.arange(0, wrong.shape[0])
    peer = tl.max(tl.where(wrong, r, -1))
    if peer >= 0:
        give_up(state, DISAGREED, phase, peer, 0, expected, tl.sum(tl.where(r == peer, seen, 0)))
    return peer < 0


@triton.jit
def note_call(state, tag, earlier):
    """A data call begins, after so many ``earlier`` ones: what :func:`give_up` tells of it. Before
    the call's first release."""
    tl.store(words(state) + TAG_NOW, tag)
    tl.store(words(state) + HELLOS, earlier + 1)


@triton.jit
def still_time(state, deadline):
    """Whether waits of this rank may go on: none has passed its deadline, and nobody has given up.
    Every thread reads a clock of its own, so one thread's word counts, and all learn of it through
    memory: threads of a program that left a loop at different times would meet at the wrong
    barriers."""
    late = now_ns() >= deadline
    at = words(state) + EXPIRED
    tl.atomic_max(at, tl.program_id(0) + 1, mask=late, sem="relaxed", scope="gpu")
    expired = tl.atomic_add(at, 0, sem="relaxed", scope="gpu")
    return (expired == 0) & (not given_up(state))


@triton.jit
def is_late(state):
    """Whether this program's wait passed its deadline (the last one's, if several did)."""
    last = tl.atomic_add(words(state) + EXPIRED, 0, sem="relaxed", scope="gpu")
    return last == tl.program_id(0) + 1


@triton.jit
def note_wait(matrix, phase, source, ns, mask):
    """Add ``ns`` to what this rank has waited for a ``source``, or some of a small tensor of them.
    ``matrix``: word WAITED, loaded before the wait, as what comes next waits for its end."""
    to = words(matrix) + source * WAIT_PHASES + phase
    tl.atomic_add(to, ns, mask=mask & (matrix != 0), sem="relaxed", scope="gpu")


@triton.jit
def until_came(waited, came, begin):
    """Of a small tensor of sources, after a look: nanoseconds from ``begin`` until each ``came``;
    -1: not yet, as all are in the beginning."""
    return tl.where(came & (waited < 0), now_ns() - begin, waited)


@triton.jit
def note_look(matrix, phase, source, since, lacks, mask):
    """The same for a wait of many looks with other work between them, at each look: which of a
    small tensor of sources this program ``lacks``. Words ``since`` hold from when on it waits for
    each; 0: it does not. A look that finds what the last one found stores nothing: it costs a load,
    and the simulator takes no program to wait that stores."""
    begin = tl.load(since, mask=mask, other=0)
    changed = mask & (lacks == (begin == 0))
    if tl.max(changed.to(tl.int32)) > 0:
        now = now_ns()
        note_wait(matrix, phase, source, now - begin, changed & (begin != 0))
        tl.debug_barrier()
        tl.store(since, tl.where(lacks, now, 0), mask=changed)


@triton.jit
def wait_at_least(counter, want, state, phase, peer, number):
    """Wait until the counter is at least ``want`` and return it. Less than ``want`` comes back if
    that did not happen: give up then, touching nothing more. ``phase``, ``peer`` and ``number`` (of
    the counter) are for the status."""
    seen = load_acquire(counter)
    if seen < want:
        begin, matrix = now_ns(), tl.load(words(state) + WAITED)
        deadline = begin + tl.load(words(state) + TIMEOUT_NS)
        live = True
        while (seen < want) & live:
            seen = load_acquire(counter)
            if seen < want:  # who has seen it looks at nothing else: what comes next waits for it
                live = still_time(state, deadline)
        if not live:
            if is_late(state):
                give_up(state, TIMED_OUT, phase, peer, number, want, seen)
        note_wait(matrix, phase, peer, now_ns() - begin, True)
    tl.debug_barrier()
    return seen


@triton.jit
def lacking(seen, wants, mask):
    """How many counters have not got there."""
    return tl.sum(((seen < wants) & mask).to(tl.int32))


@triton.jit
def last_lacking(seen, wants, mask):
    """The last counter that has not got there; -1: all have."""
    return tl.max(tl.where((seen < wants) & mask, tl.arange(0, seen.shape[0]), -1))


@triton.jit
def look_at_all(counters, mask):
    """The values of a small tensor of counters (acquire)."""
    return tl.atomic_add(counters, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def give_up_on_one(state, phase, numbers, wants, seen, mask, EACH: tl.constexpr = 1):
    """Give up on the last of those counters that have not got there; on the last of all if they
    have by now. EACH: counters of a peer."""
    i, short = tl.arange(0, seen.shape[0]), last_lacking(seen, wants, mask)
    one = i == tl.where(short < 0, tl.max(tl.where(mask, i, -1)), short)
    number, want = tl.sum(tl.where(one, numbers, 0)), tl.sum(tl.where(one, wants, 0))
    peer = tl.sum(tl.where(one, i // EACH, 0))
    give_up(state, TIMED_OUT, phase, peer, number, want, tl.sum(tl.where(one, seen, 0)))


@triton.jit
def wait_for_all(counters, wants, mask, state, phase, numbers, EACH: tl.constexpr = 1, noted=True):
    """The same for a small tensor of counters, of which ``i`` belongs to peer ``i // EACH``; see
    :func:`lacking`. ``noted``: this program is the one whose wait counts, where several wait for
    the same."""
    seen = look_at_all(counters, mask)
    if lacking(seen, wants, mask) > 0:
        begin, matrix = now_ns(), tl.load(words(state) + WAITED)
        deadline = begin + tl.load(words(state) + TIMEOUT_NS)
        short, live = last_lacking(seen, wants, mask), True
        lacked, waited = (seen < wants) & mask, (wants * 0).to(tl.int64) - 1
        # carries no tensors that come from atomics: Triton 3.6 crashes on them
        while (short >= 0) & live:
            looked = look_at_all(counters, mask)
            short = last_lacking(looked, wants, mask)
            waited = until_came(waited, looked >= wants, begin)
            if short >= 0:
                live = still_time(state, deadline)
        if live:
            seen = tl.maximum(seen, wants)
        else:  # also if it has come since: others have been told to stop
            seen = look_at_all(counters, mask)
            if is_late(state):  # for the one that lacked then, not one that had long been there
                this = tl.arange(0, seen.shape[0]) == short
                give_up_on_one(state, phase, numbers, wants, seen, this, EACH)
            seen = tl.minimum(seen, wants - 1)
        PEERS: tl.constexpr = waited.shape[0] // EACH
        ns = tl.where(lacked, until_came(waited, True, begin), 0)
        ns = tl.max(tl.reshape(ns, [PEERS, EACH]), axis=1)  # the longest of a peer's counters
        note_wait(matrix, phase, tl.arange(0, PEERS), ns, (ns > 0) & noted)
    tl.debug_barrier()
    return seen


@triton.jit
def wait_beside(counters, wants, mask, state):
    """Wait for what another program of this rank waits for in :func:`wait_for_all`, without a
    deadline of its own: whether all is there. If the other is in time, so is this one; else it ends
    when the other has given up."""
    short, live = lacking(look_at_all(counters, mask), wants, mask), True
    while (short > 0) & live:
        short = lacking(look_at_all(counters, mask), wants, mask)
        if short > 0:
            live = not given_up(state)
    tl.debug_barrier()
    return short == 0
