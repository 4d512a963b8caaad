"""Engine low_latency among far ranks as a small model (``kernels/low_latency_far.py``).

Each message has a process of its own, its *wire*, which copies cells at any later time, then sets
the message's signal. So messages overtake each other. Signals hold the number of their call; here
each call has its own, so that a late one turns none back: for that there are fences
(``low_latency_far.kept_back``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import NamedTuple

from model_machine import Look, Machine, Ops, Read, Release, Store, wait
from model_rings import Bug, Kernels, Routing

HEADER, ROWS, WEIGHTS = range(3)
"""What a message brings: counts (of a combine: nothing) and the tag; rows or sums; weights."""


class Call(NamedTuple):
    """One call of all ranks. A combine brings back the rows of the same ``routing``; ``weighted``:
    by weights of the owner.
    """

    routing: Routing
    combine: bool = False
    weighted: bool = False


class Message(NamedTuple):
    """From one rank to another in one call: where it waits, where it goes, and its counters. Of
    rows, or sums: a chunk."""

    source: Sequence[int]
    target: Sequence[int]
    packed: int
    posted: int
    signal: int
    rows: list[int]


Chunks = Sequence[Message]
"""Of the rows from one rank to another, or of their sums; one if there are none."""


def cut(rows: list[int], size: int) -> list[list[int]]:
    """The rows of each chunk of ``size`` rows."""
    return [rows[first : first + size] for first in range(0, len(rows), size)] or [[]]


class Far:
    """All calls. Halves by the parity of the call. A chunk has ``size`` rows."""

    def __init__(self, calls: Sequence[Call], size: int, *, bug: str = "") -> None:
        self.ranks, self._size, self._bug = len(calls[0].routing), size, Bug(bug)
        self._kernels = Kernels(self.ranks)
        self._cells: dict[tuple[object, ...], range] = {}
        self._most = max(len(tokens) for call in calls for tokens in call.routing)
        for number, call in enumerate(calls):
            (self._combine if call.combine else self._dispatch)(number, call)
        self.machine = self._kernels.built()

    def _place(self, name: str, rank: int, peer: int, half: int, kind: int) -> range:
        at = (name, rank, peer, half, kind)
        if at not in self._cells:
            count = 1 if kind == HEADER else self._most
            title = f"{name} {kind} of rank {rank} for {peer}, half {half}"
            self._cells[at] = self._kernels.machine.memory(title, count)
        return self._cells[at]

    def _messages(self, number: int, kind: int, a: int, b: int, rows: list[int]) -> Chunks:
        """``rows`` from ``a`` to ``b``, and the wires that bring them."""
        half = 0 if self._bug("one half only") else number % 2
        size = self._size if kind == ROWS else max(len(rows), 1)
        chunks: list[Message] = []
        for c, each in enumerate(cut(rows, size)):
            title = f"{kind}, chunk {c} of call {number}, {a} to {b}"
            names = (f"{what} {title}" for what in ("packed", "posted", ""))
            packed, posted, signal = map(self._kernels.machine.counter, names)
            if c and self._bug("chunks counted together"):
                packed = chunks[0].packed
            cells = slice(c * size, c * size + len(each))
            source, target = (
                self._place("staging", a, b, half, kind)[cells],
                self._place("slots", b, a, half, kind)[cells],
            )
            chunks.append(Message(source, target, packed, posted, signal, each))
        for c, message in enumerate(chunks):
            other = (c + self._bug("signal of another chunk")) % len(chunks)
            carried = partial(carry, message._replace(signal=chunks[other].signal), self._bug)
            self._kernels.wire(a, f"wire {kind}, chunk {c} of call {number} to {b}", carried)
        return chunks

    def _message(self, number: int, kind: int, a: int, b: int, rows: list[int]) -> Message:
        return self._messages(number, kind, a, b, rows)[0]

    def _rows(self, number: int, call: Call, owner: int, to: int) -> list[int]:
        """Numbers of rows: no two in a call are the same, nor in calls that follow each other."""
        first = 1 + (number % 4 * self.ranks + owner) * self._most
        return [first + t for t, picks in enumerate(call.routing[owner]) if to in picks]

    def _dispatch(self, number: int, call: Call) -> None:
        pairs = list(permutations(range(self.ranks), 2))
        rows = {(a, b): self._rows(number, call, a, b) for a, b in pairs}
        headers = {at: self._message(number, HEADER, *at, [1 + number % 4]) for at in pairs}
        sent = {at: self._messages(number, ROWS, *at, rows[at]) for at in pairs}
        for me in range(self.ranks):
            add, peers = partial(self._kernels.add, me, number), self._peers(me)
            for row in sorted({row for b in peers for row in rows[me, b]}):
                to = [message for b in peers for message in sent[me, b]]
                add(f"packs row {row}", partial(pack, row, to))
            ready = self._kernels.machine.counter(f"ready {number} of rank {me}")
            lead_all = partial(lead, [headers[a, me] for a in peers], self._bug, ready)
            add("leader", lead_all)
            for b in peers:
                add(f"tells {b}", partial(put, headers[me, b], [], self._bug))
                self._puts(me, number, b, sent[me, b])
                for c, message in enumerate(sent[b, me]):
                    take = partial(receive, sent[b, me], message, ready, self._bug)
                    add(f"receives chunk {c} from {b}", take)

    def _combine(self, number: int, call: Call) -> None:
        pairs = list(permutations(range(self.ranks), 2))
        back = {(b, a): self._rows(number, call, a, b) for a, b in pairs}
        tags = {at: self._message(number, HEADER, *at, []) for at in pairs}
        sums = {at: self._messages(number, ROWS, *at, back[at]) for at in pairs}
        weights = {
            (a, b): self._message(number, WEIGHTS, a, b, back[b, a])
            for a, b in pairs
            if call.weighted
        }
        for me in range(self.ranks):
            add, peers = partial(self._kernels.add, me, number), self._peers(me)
            add("leader", partial(lead, [tags[a, me] for a in peers], self._bug))
            mine = sorted({row for b in peers for row in back[b, me]})
            for row in mine:
                if call.weighted:
                    given = [weights[me, b] for b in peers]
                    add(f"packs weights of row {row}", partial(pack, row, given))
                adds = partial(add_row, row, [sums[b, me] for b in peers], self._bug)
                add(f"adds row {row}", adds)
            for b in peers:
                first = [weights[me, b]] if call.weighted else []
                add(f"puts to {b}", partial(put, tags[me, b], first, self._bug))
                self._puts(me, number, b, sums[me, b])
                for row in back[me, b]:
                    given = weights[b, me] if call.weighted else None
                    add(f"sums row {row}", partial(pack, row, sums[me, b], given))

    def _puts(self, me: int, number: int, to: int, chunks: Chunks) -> None:
        """A program for each chunk."""
        for c, message in enumerate(chunks):
            if message is not chunks[-1] or not self._bug("last chunk not put"):
                puts = partial(put, None, [message], self._bug)
                self._kernels.add(me, number, f"puts chunk {c} to {to}", puts)

    def _peers(self, me: int) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != me]


def pack(row: int, messages: Sequence[Message], weights: Message | None = None) -> Ops:
    """Store a row into staging of all messages that have it, then count it in each."""
    if weights is not None:
        yield from wait(weights.signal, 1)
        yield Read(weights.target[weights.rows.index(row)], row)
    here = [message for message in messages if row in message.rows]
    for message in here:
        yield Store(message.source[message.rows.index(row)], row)
    for message in here:
        yield Release(message.packed)


def put(header: Message | None, messages: Sequence[Message], bug: Bug) -> Ops:
    """The header at once, each other message when all its rows are packed."""
    if header is not None:
        for cell, row in zip(header.source, header.rows, strict=False):
            yield Store(cell, row)
        yield Release(header.posted)
    for message in messages:
        want = len(message.rows) - bug("last row not awaited")
        yield from wait(message.packed, want, stream=True)
        yield Release(message.posted)


def carry(message: Message, bug: Bug) -> Ops:
    """The network: bytes, then the signal."""
    yield from wait(message.posted, 1)
    if bug("signal before data"):
        yield Release(message.signal)
    for cell, row in zip(message.source, message.rows, strict=False):
        yield Read(cell, row)
    for cell, row in zip(message.target, message.rows, strict=False):
        yield Store(cell, row)
    if not bug("signal before data"):
        yield Release(message.signal)


def lead(headers: Sequence[Message], bug: Bug, ready: int | None = None) -> Ops:
    """Wait for all tags; read the counts."""
    for header in headers:
        if not bug("tags not awaited") or header.rows:
            yield from wait(header.signal, 1)
        for cell, row in zip(header.target, header.rows, strict=False):
            yield Read(cell, row)
    if ready is not None:
        yield Release(ready)


def until(chunks: Chunks, message: Message, bug: Bug) -> Ops:
    """Wait for the first chunk, which says how many rows there are, then for that of the row."""
    yield from wait(chunks[0].signal, 1)
    if message is not chunks[0] and not bug("own chunk not awaited"):
        yield from wait(message.signal, 1)


def receive(chunks: Chunks, message: Message, ready: int, bug: Bug) -> Ops:
    """A chunk of rows of a dispatch."""
    yield from wait(ready, 1, stream=True)
    yield from until(chunks, message, bug)
    for cell, row in zip(message.target, message.rows, strict=False):
        yield Read(cell, row)


def add_row(row: int, sums: Sequence[Chunks], bug: Bug) -> Ops:
    """What all ranks made of a row."""
    for chunks in sums:
        for message in chunks:
            if row in message.rows:
                yield from until(chunks, message, bug)
                yield Read(message.target[message.rows.index(row)], row)


# Ranks that are left out


class Apart:
    """Calls of ranks that wait no longer than they like: any wait may end in vain, and leaves its
    rank out. Each rank is one process; a message is a tag, or a row, which is a chunk.
    """

    def __init__(self, ranks: int, calls: int, chunks: int, *, bug: str = "") -> None:
        self.machine, self._calls, self._bug = Machine(ranks), calls, Bug(bug)
        self._kinds = HEADER, *range(ROWS, ROWS + chunks)
        self.machine.leaves_out = True
        self._peers = {me: [b for b in range(ranks) if b != me] for me in range(ranks)}
        pairs = list(permutations(range(ranks), 2))
        self._cells = {
            (name, kind, *at): self.machine.memory(f"{name} {kind} {at}", 2)
            for name in ("staging", "slots")
            for kind in self._kinds
            for at in pairs
        }
        self._counters = {
            (name, kind, n, *at): self.machine.counter(f"{name} {kind} of call {n}, {at}")
            for name in ("posted", "signal")
            for kind in self._kinds
            for n in range(calls)
            for at in pairs
        }
        for me in range(ranks):
            self.machine.add(me, f"rank {me}", partial(self._live, me))
        for (name, kind, n, a, b), posted in self._counters.items():
            if name == "posted":
                carried = partial(self._carry, kind, n, a, b, posted)
                self.machine.add(a, f"wire {kind} of call {n} to {b}", carried, wire=True)

    def _live(self, me: int) -> Ops:
        left = set[int]()
        for n in range(self._calls):
            for b in self._peers[me]:
                if b not in left or self._bug("sent to ranks left out"):
                    yield Release(self._counters["posted", HEADER, n, me, b])
                    for kind in self._kinds[1:]:
                        yield Store(self._cells["staging", kind, me, b][n % 2], 1 + n)
                        yield Release(self._counters["posted", kind, n, me, b])
            for kind in self._kinds:
                for a in self._peers[me]:
                    if a not in left:
                        seen = yield Look(self._counters["signal", kind, n, a, me], 0, 1)
                        if not seen:
                            left.add(a)
                        elif kind >= ROWS:
                            yield Read(self._cells["slots", kind, me, a][n % 2], 1 + n)

    def _carry(self, kind: int, n: int, a: int, b: int, posted: int) -> Ops:
        yield from wait(posted, 1)
        if kind >= ROWS:
            yield Read(self._cells["staging", kind, a, b][n % 2], 1 + n)
            yield Store(self._cells["slots", kind, b, a][n % 2], 1 + n)
        yield Release(self._counters["signal", kind, n, a, b])


# What is explored

_PAIR: Routing = (((1,), (1,)), ((0,),))
_ONE_WAY: Routing = (((1,),), ())
_THREE_ROWS: Routing = (((1,), (1,), (1,)), ())
_THREE: Routing = (((1, 2), (2,)), ((0,),), ())


Machines = Callable[[str], Iterator[Machine]]
"""With a bug, or "" without."""


def _there_and_back(
    routing: Routing, size: int, *, weighted: bool = True, again: bool = True
) -> Machines:
    """Dispatch, combine, dispatch (``again``): halves are used again. Chunks of ``size`` rows."""
    calls = [Call(routing), Call(routing, combine=True, weighted=weighted), Call(routing)]
    return lambda bug: iter([Far(calls[: 2 + again], size, bug=bug).machine])


def _apart(ranks: int, calls: int, chunks: int = 1) -> Machines:
    return lambda bug: iter([Apart(ranks, calls, chunks, bug=bug).machine])


_CHUNKS = _there_and_back(_PAIR, 1)
MORTALS = {
    "one chunk": _there_and_back(_PAIR, 2),
    "2 chunks, no call behind": _there_and_back(_PAIR, 1, again=False),
}
"""Two ranks, of which one may die."""
FAR = {
    "2 ranks": _CHUNKS,
    "2 ranks, one chunk": MORTALS["one chunk"],
    "2 ranks, one has no tokens": _there_and_back(_ONE_WAY, 1, weighted=False),
    "2 ranks, 3 rows in 2 chunks": _there_and_back(_THREE_ROWS, 2, weighted=False),
    "3 ranks, one has no tokens": _there_and_back(_THREE, 1, weighted=False),
}
APART = {
    "2 ranks, 3 calls": _apart(2, 3),
    "2 ranks, 3 calls, 2 chunks": _apart(2, 3, 2),
    "2 ranks, 4 calls": _apart(2, 4),
}
"""Ranks leave each other out at any time."""
LARGE = {"3 ranks, 3 calls": _apart(3, 3), "3 ranks, weights": _there_and_back(_THREE, 1)}
"""What ``make soak`` explores besides."""
BUGS = {
    "one half only": (_CHUNKS, "overwrites"),
    "signal before data": (_CHUNKS, "finds"),
    "last row not awaited": (_CHUNKS, "finds"),
    "tags not awaited": (FAR["2 ranks, one has no tokens"], "overwrites"),
    "chunks counted together": (_CHUNKS, "finds"),
    "signal of another chunk": (_CHUNKS, "finds"),
    "own chunk not awaited": (_CHUNKS, "finds"),
    "last chunk not put": (_CHUNKS, "nobody can go on"),
    "sent to ranks left out": (APART["2 ranks, 3 calls"], "overwrites"),
}
"""Each with machines that show it, and words of the failure."""
