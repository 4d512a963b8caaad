# pyright: basic
"""How programs of the two-level engine share work: by turns, none of which waits.

A channel's work is a row of *tasks*: to send to one rank, to forward from one node, and so on. W
programs of a *bundle* of channels (mostly of one), its workers, have their tasks dealt among them.
A worker goes round its tasks; in each turn a task does what is possible at once, a chunk at most,
and notes how far it is (``done_in``), then the next has its turn. So a worker is busy as long as
any of its tasks can go on, whatever tasks take, and the number of programs is free of the number of
ranks. Example: two ranks, so six tasks of a bundle of two channels in combine: the first worker
sums those of channel 0, the second those of channel 1, the third sends of both.

Who publishes what: a turn stores and reads, and notes what it *defers* to counters
(:func:`defer_signal`); the worker adds all of it once per round, and once behind the last one
(:func:`flush_signals`): one release, behind all that its tasks have stored and read. Who may read
when: whoever has acquired the counter. Reuse is safe as if each turn had released itself, later: a
task has no other turn in between.

Nobody waits in a circle: a turn never waits, so a round ends and is published, so each task goes on
as if it had a program of its own, and for those ``docs/reference/twolevel.md`` has the argument.
All workers are resident.

What a worker does of whose tasks none could go on: see A rank that dies in
``docs/reference/twolevel.md``. If what all lacked came at the last moment, it gives up on the first
task that is not done.

``k`` of functions here: see ``kernels/two_region.py``. ``tasks``: of a channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.sync import (
    RELAYED_NS, TIMEOUT_NS, WAITED, add_release, is_late, note_wait, now_ns, still_time, words,
)  # fmt: skip
from tokenyard.kernels.two_region import deferred_of, deferred_words, done_in, since_in

SPINS = tl.constexpr(16)
"""Rounds in vain between two looks at the clock."""
ON_TIME, DIRECT_REPORT, REPORT, ANY_REPORT, OVER = (tl.constexpr(step) for step in range(5))
"""What a worker is at: work; then tasks report what they lack, those first that wait for no relayed
rows; then any."""


@triton.constexpr_function
def tasks_of_worker(tasks: int, ranks: int, workers: int, senders: int, bundle: int) -> int:
    """Tasks of the worker that has most: a round. With ``senders``, sends and the call barrier are
    theirs (:func:`dealt`)."""
    if not senders:
        return -(-tasks * bundle // workers)
    sends, others = (ranks - 1) * bundle + 1, (tasks - ranks) * bundle
    return max(-(-sends // senders), -(-others // (workers - senders)))


@triton.jit
def place_in_round(turn, bundle, tasks: tl.constexpr, k: tl.constexpr):
    """Which of its tasks a worker comes to in a turn. Bundle 0 begins with the last place, where
    the call barrier is, unless there are more places than its worker has tasks. Each bundle begins
    a round elsewhere: if all were at the same kind of task at once, links would be idle while rows
    are copied inside ranks, and too narrow while they are stored to others."""
    grid: tl.constexpr = k.grid
    ROUND: tl.constexpr = tasks_of_worker(tasks, k.ranks, grid.workers, grid.senders, grid.bundle)
    return (turn + bundle + ROUND - 1) % ROUND


@triton.jit
def dealt(worker, i, bundle, tasks: tl.constexpr, k: tl.constexpr):
    """A worker's ``i``-th task, and its channel, of those of a bundle. Heavy tasks come first; who
    has the heaviest of one place has the lightest of the next. A task ``tasks`` is none.

    With ``senders``, inside one node, these workers have the sends and the call barrier, the others
    have the rows of this rank (or sums) and what is received. A store to another GPU
    waits while the link is full, and so does every other access of its multiprocessor: programs
    that do both take as long as both together.
    """
    W: tl.constexpr = k.grid.workers
    S: tl.constexpr = k.grid.senders
    B: tl.constexpr = k.grid.bundle
    at = i * W + tl.where(i % 2 == 0, worker, W - 1 - worker)
    if S:  # tasks of one node: own rows or sums, P - 1 sends, receives, the call barrier
        P: tl.constexpr = k.ranks
        SENDS: tl.constexpr = (P - 1) * B
        OTHERS: tl.constexpr = (tasks - P) * B
        LAST: tl.constexpr = (tasks - 1) * B
        sent, taken = worker + i * S, worker - S + i * (W - S)
        send = tl.where(sent < SENDS, sent + B, tl.where(sent == SENDS, LAST, LAST + B))
        take = tl.where(taken < B, taken, tl.where(taken < OTHERS, SENDS + taken, LAST + B))
        at = tl.where(worker < S, send, take)
    return at // B, bundle * B + at % B


@triton.jit
def rows_of_turn(bound: tl.constexpr, plan, rank, turn, k: tl.constexpr):
    """Rows of a turn's channel to ``rank``, or from it (``bound``: ``out_bound``, or ``in_bound``):
    the first, their end, and how many of them earlier turns are done with."""
    first = tl.load(bound(plan, rank, turn.channel, k))
    end = tl.load(bound(plan, rank, turn.channel + 1, k))
    return first, end, tl.load(turn.done).to(tl.int32)


@triton.jit
def defer_signal(state, turn, q, counter, count, mask, k: tl.constexpr):
    """Note that ``counter`` (an address), the ``q``-th of a turn's task, is to have ``count`` more:
    a task does so once between two of :func:`flush_signals`. What a turn stores to other GPUs is on
    its way for microseconds, and a release waits for it. Other tasks have their turns meanwhile."""
    at = deferred_of(state, turn.task, turn.channel, q, k)
    tl.store(at, counter, mask=mask)
    tl.store(at + 1, count, mask=mask)


@triton.jit
def flush_signals(state, worker, bundle, tasks: tl.constexpr, k: tl.constexpr):
    """Add what this worker's tasks defer (release): behind all that it has stored and read so
    far."""
    grid: tl.constexpr = k.grid
    EACH: tl.constexpr = deferred_words(grid.ranks_per_node)
    ROUND: tl.constexpr = tasks_of_worker(tasks, k.ranks, grid.workers, grid.senders, grid.bundle)
    e = tl.arange(0, triton.next_power_of_2(ROUND * EACH))
    task, channel = dealt(worker, e // EACH, bundle, tasks, k)
    at = deferred_of(state, task, channel, e % EACH, k)
    count = tl.load(at + 1, mask=(e // EACH < ROUND) & (task < tasks), other=0)
    if tl.max(count) > 0:
        counter = tl.load(at, mask=count > 0, other=0)
        add_release(words(counter), count, count > 0)
        tl.store(at + 1, tl.zeros_like(count), mask=count > 0)
        tl.debug_barrier()


@triton.jit
def note_lack(state, turn, phase, source, lacks, k: tl.constexpr):
    """At a look of a turn: whether its task ``lacks`` what it needs of ``source``, which
    ``stats().waits`` counts from the first look that finds it so to the first that does not. A look
    that changes nothing stores nothing (``note_look``)."""
    matrix = tl.load(words(state) + WAITED)
    since = since_in(state, turn.task, turn.channel, k)
    begin = tl.load(since)
    if lacks == (begin == 0):
        now = now_ns()
        note_wait(matrix, phase, source, now - begin, begin != 0)
        tl.debug_barrier()
        tl.store(since, tl.where(lacks, now, 0))


@triton.jit
def begin_tasks(state, worker, bundle, tasks: tl.constexpr, k: tl.constexpr):
    """This worker's tasks are at their beginning."""
    grid: tl.constexpr = k.grid
    ROUND: tl.constexpr = tasks_of_worker(tasks, k.ranks, grid.workers, grid.senders, grid.bundle)
    for turn in range(ROUND):
        task, channel = dealt(worker, turn + 0, bundle, tasks, k)
        if task < tasks:
            tl.store(done_in(state, task, channel, k), tl.full((), 0, tl.int64))
    tl.debug_barrier()


@triton.jit
def next_step(state, step, left, before, direct, idle, since):
    """After a round: the step of the next one, rounds in vain, and since when. ``left``: rows to
    do, ``before`` this round too; ``direct``: of tasks that wait for no relayed rows."""
    if step != ON_TIME:
        step += 1
    elif left < before:
        idle, since = idle * 0, now_ns()
    else:
        idle += 1
        if idle % SPINS == 0:
            grace_ns = tl.where(direct > 0, 0, RELAYED_NS)
            if not still_time(state, since + tl.load(words(state) + TIMEOUT_NS) + grace_ns):
                step = tl.where(is_late(state), DIRECT_REPORT, OVER)
    return step, idle, since


@triton.jit
def reports(step, lacks, relayed):
    """Whether an unfinished task says now what it waits for. ``lacks``: it has not got that."""
    return (step == ANY_REPORT) | (
        lacks & ((step == REPORT) | ((step == DIRECT_REPORT) & (not relayed)))
    )
