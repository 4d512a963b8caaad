"""The tasks of engine twolevel as a small model (``docs/reference/twolevel.md``,
``kernels/two_dispatch.py``, ``two_combine.py``).

Each task is a process here, though a program of a kernel serves many of them by turns
(``kernels/two_scheduler.py``). That loses no failure. A turn does steps of its task that nothing
holds up, or none, so whatever workers do, these processes can do too, in the same order: no state
is left out. And a worker goes round until none of its tasks can go on; that hangs on counters
alone. So where workers are stuck, all these processes are, and if no order of their steps ends
there, neither does a worker's. ``model_turns.py`` explores workers as they are besides.

What a turn has done, the worker shows at the end of its round (``deferred``). That is what a
process does, too, that takes its time between its stores and its release: no task has another turn
before.

A turn of a forwarder, combiner or reducer may take several batches, and shows them all together;
here each batch is a turn. It makes no difference: batches behind the first wait for nothing that
the turn has not seen, and who sees more sooner is held up less.

A put is a number on ``posted``. A *wire* per network ring takes it from there, later: it copies
rows from staging, then adds to the tail. So puts of one ring arrive in order (a fence stands before
each), and those of different rings in any order. Where nodes map each other's memory, a writer
stores straight into the network ring, and adds to its tail itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from model_machine import Look, Ops, Read, Release, Store, wait
from model_rings import Bug, Call, Flow, Post, read, store
from model_source import (
    CREDIT_OF_FORWARDER,
    ROOM_AT_FORWARDER,
    ROOM_FAR_IN_COMBINE,
    ROOM_FAR_IN_DISPATCH,
    ROOM_INSIDE,
    Expression,
)


class Far(NamedTuple):
    """What goes through a network ring in a call.

    Attributes:
        flow: at the reader.
        staging: at the writer: the source of puts. Its counters are those of ``flow``; it is
            ``flow`` if the ring is mapped.
        posted: puts, in total; ``before`` of them in earlier calls.
    """

    flow: Flow
    staging: Flow
    posted: int
    before: int

    @property
    def mapped(self) -> bool:
        """Whether the writer stores into the ring."""
        return self.staging == self.flow

    def shown(self, count: int) -> Release:
        """Rows that are stored become the reader's, now or later."""
        return (
            Release(self.flow.ring.tail, count, deferred=True)
            if self.mapped
            else Release(self.posted)
        )


def chunks(rows: Sequence[int], size: int, bug: Bug) -> list[range]:
    """Rows by number, cut into puts."""
    end = len(rows) - bug("last chunk dropped")
    return [range(i0, min(i0 + size, len(rows))) for i0 in range(0, end, size)]


def send_near(flow: Flow, call: Call, bug: Bug) -> Ops:
    """A sender inside a node."""
    ring, base, rows = flow
    for chunk in chunks(rows, call.chunk, bug):
        want = ROOM_INSIDE[call.combine](
            base=base, i=chunk.start, n=len(chunk), slots=ring.slots(call.row)
        )
        yield from wait(ring.head, want - bug("one slot too many"))
        yield from store(flow, chunk, call.row)
        yield Release(ring.tail, len(chunk), deferred=True)


def room_far(far: Far, chunk: range, call: Call, room: Expression, bug: Bug) -> Ops:
    """Wait for room for a chunk, in the ring and in staging."""
    base, slots = far.flow.base, far.flow.ring.slots(call.row)
    want = room(base=base, i=chunk.start, n=len(chunk), end=chunk.stop, far_slots=slots)
    if bug("network ring not drained"):
        want = base + chunk.stop - slots
    yield from wait(far.flow.ring.head, want - bug("one network slot too many"))


def send_far(far: Far, call: Call, bug: Bug) -> Ops:
    """A network sender."""
    for chunk in chunks(far.flow.rows, call.far_chunk, bug):
        yield from room_far(far, chunk, call, ROOM_FAR_IN_DISPATCH, bug)
        yield from store(far.staging, chunk, call.row)
        yield far.shown(len(chunk))


def wire(far: Far, call: Call, bug: Bug, only: int | None = None) -> Ops:
    """What puts do on the network. ``only``: one of them, by number."""
    for number, chunk in enumerate(chunks(far.flow.rows, call.far_chunk, bug)):
        if only in (None, number):
            yield from wait(far.posted, far.before + number + 1)
            if bug("signal before data"):
                yield Release(far.flow.ring.tail, len(chunk))
            yield from read(far.staging, chunk, call.row)
            yield from store(far.flow, chunk, call.row)
            if not bug("signal before data"):
                yield Release(far.flow.ring.tail, len(chunk))


def forward(far: Far, near: Sequence[Flow], call: Call, bug: Bug) -> Ops:
    """A forwarder: ``near`` is what goes on to other local ranks; rows for its own it takes to
    their places.
    """
    if bug("one destination after the other"):
        yield from forward_in_turn(far, near, call, bug)
        return
    (ring, base, rows), total = far.flow, len(far.flow.rows)
    done, put, shown = 0, [0 for _ in near], [0 for _ in near]
    while done < total:
        seen = yield Look(ring.tail, base + done + 1, base + min(done + call.batch, total))
        batch = range(done, seen - base)
        if bug("network credit before read"):
            yield Release(ring.head, len(batch))
        after = [
            at + sum(rows[i] in flow.rows for i in batch)
            for at, flow in zip(put, near, strict=True)
        ]
        yield from forward_rows(far.flow, near, batch, (put, after), call, bug)
        put, done = after, batch.stop
        left = total - done
        last = not left and not bug("last credits kept")
        deferred = CREDIT_OF_FORWARDER(last=last, i0=batch.start, i1=done, CREDIT=call.credit)
        if deferred and not bug("network credit before read"):
            yield Release(ring.head, deferred, deferred=far.mapped)
        if not left or not bug("tails at the end only"):
            yield from add_all([flow.ring.tail for flow in near], shown, put, deferred=True)
            shown = put


def forward_rows(
    far: Flow,
    near: Sequence[Flow],
    batch: range,
    put: tuple[list[int], list[int]],
    call: Call,
    bug: Bug,
) -> Ops:
    """A batch of rows, read once and stored to all local ranks that need them: rows ``put[0]`` up
    to ``put[1]`` of their rings.
    """
    for flow, counts, upto in zip(near, *put, strict=True):
        want = ROOM_AT_FORWARDER(
            sent=flow.base, counts=counts, more=upto - counts, slots=flow.ring.slots(call.row)
        )
        yield from wait(flow.ring.head, want - bug("one slot too many"))
    yield from read(far, batch, call.row)
    for flow, counts, upto in zip(near, *put, strict=True):
        yield from store(flow, range(counts, upto), call.row)


def forward_in_turn(far: Far, near: Sequence[Flow], call: Call, bug: Bug) -> Ops:
    """A forwarder as it must not be: all rows for one local rank, then all for the next; so it can
    take no row before the last.
    """
    ring, base, rows = far.flow
    for flow in near:
        for i in range(len(flow.rows)):
            yield from wait(ring.tail, base + rows.index(flow.rows[i]) + 1)
            yield from wait(flow.ring.head, flow.base + i + 1 - flow.ring.slots(call.row))
            yield from store(flow, range(i, i + 1), call.row)
            yield Release(flow.ring.tail)
    yield from wait(ring.tail, base + len(rows))
    yield from read(far.flow, range(len(rows)), call.row)
    yield from add_all([ring.head], [0], [len(rows)])


def add_all(
    counters: Sequence[int], before: Sequence[int], after: Sequence[int], *, deferred: bool = False
) -> Ops:
    """Publish, and bring counters from ``before`` to ``after``: in any order, as nobody looks at
    two of them.
    """
    for counter, low, high in zip(counters, before, after, strict=True):
        if high > low:
            yield Release(counter, high - low, deferred=deferred)


def upto(flows: Sequence[Flow], taken: Sequence[int], rows: Sequence[int]) -> list[int]:
    """How many rows of each flow are taken once ``rows`` are."""
    last = [[i + 1 for i, row in enumerate(flow.rows) if row in rows] for flow in flows]
    return [max([low, *ends]) for low, ends in zip(taken, last, strict=True)]


def take(flows: Sequence[Flow], taken: Sequence[int], ends: Sequence[int], call: Call) -> Ops:
    """Wait for rows of several rings, then read them."""
    for flow, end in zip(flows, ends, strict=True):
        yield from wait(flow.ring.tail, flow.base + end)
    for flow, low, high in zip(flows, taken, ends, strict=True):
        yield from read(flow, range(low, high), call.row)


def combine_far(far: Far, near: Sequence[Flow], call: Call, bug: Bug) -> Ops:
    """A combiner: ``near``: partial sums of the other local ranks."""
    rows, taken, credited = far.flow.rows, [0 for _ in near], [0 for _ in near]
    heads = [flow.ring.head for flow in near]
    for chunk in chunks(rows, call.far_chunk, bug):
        yield from room_far(far, chunk, call, ROOM_FAR_IN_COMBINE, bug)
        for j in range(chunk.start, chunk.stop, call.batch):
            batch = range(j, min(j + call.batch, chunk.stop))
            ends = upto(near, taken, rows[batch.start : batch.stop])
            if bug("credit before read"):
                yield from add_all(heads, taken, ends)
            yield from take(near, taken, ends, call)
            yield from store(far.staging, batch, call.row)
            last = batch.stop == chunk.stop
            if far.mapped or last:
                yield far.shown(len(batch))
            if bug("credit before read"):
                credited = ends
            elif last or not bug("inner credits with the put"):
                yield from add_all(heads, credited, ends, deferred=True)
                credited = ends
            taken = ends


def reduce_both(
    near: Sequence[Flow], back: Sequence[Far], tokens: Sequence[int], call: Call, bug: Bug
) -> Ops:
    """A reducer: ``near``: partial sums of my node's other ranks; ``back``: sums of other nodes.

    Without inner rings it is that of ``kernels/two_pull.py``, which defers its credits where the
    network rings are mapped.
    """
    inner = bool(near)
    if all(each.mapped for each in back):  # one ring is as the other
        near, back = [*near, *(each.flow for each in back)], ()
    far = [each.flow for each in back]
    flows = [*near, *far]
    taken, deferred = [0 for _ in flows], [0 for _ in far]
    batch = max(1, len(tokens)) if bug("waits for all rows at once") else call.batch
    for t0 in range(0, len(tokens), batch):
        ends = upto(flows, taken, tokens[t0 : t0 + batch])
        if bug("network credit before read"):
            yield from add_all(
                [flow.ring.head for flow in far], taken[len(near) :], ends[len(near) :]
            )
        yield from take(flows, taken, ends, call)
        yield from add_all(
            [flow.ring.head for flow in near],
            taken[: len(near)],
            ends[: len(near)],
            deferred=not inner,
        )
        if not bug("network credit before read"):
            deferred = [
                more + high - low
                for more, low, high in zip(
                    deferred, taken[len(near) :], ends[len(near) :], strict=True
                )
            ]
        taken = ends
        last = t0 + batch >= len(tokens) and not bug("last credits kept")
        for i, flow in enumerate(far):
            if deferred[i] >= call.credit or (last and deferred[i]):
                yield Release(flow.ring.head, deferred[i])
                deferred[i] = 0


def wire_of_tags(calls: int, outbox: Post, post: Post, bug: Bug) -> Ops:
    """What announcements do on the network, from one rank to another."""
    for call in range(calls):
        yield from wait(outbox.counter, call + 1)
        parity = 0 if bug("one half only") else call % 2
        yield Read(outbox.halves[parity], 1 + call)
        yield Store(post.halves[parity], 1 + call)
        yield Release(post.counter)
