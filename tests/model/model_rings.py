"""The rings of engine nvlink as a small model: its dispatch, combine and call barriers
(``kernels/``).

A row is a number: its token among all tokens of its rank and of all calls. What senders wait for
stands here as the kernels' own source text (``model_source.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from model_machine import Look, Machine, Ops, Read, Release, Store, wait
from model_source import ROOM_INSIDE

Routing = tuple[tuple[tuple[int, ...], ...], ...]
"""For each rank, for each of its tokens: the ranks that it goes to, ascending."""


class Call(NamedTuple):
    """One data call of all ranks.

    Attributes:
        combine: else a dispatch.
        chunk: rows per release of a sender, and the most per credit of a receiver.
        batch: tokens that a reducer takes at once, and rows that a combiner or a forwarder does.
        row: cells that a row takes.
        far_chunk, credit: rows per put, and per network credit, of engine twolevel.
    """

    routing: Routing
    combine: bool = False
    chunk: int = 1
    batch: int = 1
    row: int = 1
    far_chunk: int = 1
    credit: int = 1


class Ring(NamedTuple):
    """A ring and its counters."""

    tail: int
    head: int
    cells: range

    def slots(self, row: int) -> int:
        return len(self.cells) // row

    def slot(self, i: int, row: int) -> range:
        """Cells of row ``i`` of a call."""
        first = i % self.slots(row) * row
        return self.cells[first : first + row]


class Flow(NamedTuple):
    """What goes through a ring in a call: ``base`` rows went before, then ``rows``."""

    ring: Ring
    base: int
    rows: Sequence[int]


class Bug(NamedTuple):
    """What is wrong with a model, by name; ``""``: nothing."""

    name: str = ""

    def __call__(self, name: str) -> bool:
        return self.name == name


def share(tokens: int, channels: int, c: int) -> range:
    """Tokens of a channel."""
    size = -(-tokens // channels)
    return range(min(c * size, tokens), min((c + 1) * size, tokens))


class Kernels:
    """Rings of an object, and programs of kernels: a rank's kernel of a call begins when all
    programs of that before have ended.
    """

    def __init__(self, ranks: int) -> None:
        self.machine = Machine(ranks)
        self._sent: dict[Ring, int] = {}
        self._ended = [
            self.machine.counter(f"programs of rank {rank} that ended") for rank in range(ranks)
        ]
        self._programs: list[tuple[int, int, str, Callable[[], Ops]]] = []

    def ring(self, name: str, cells: int) -> Ring:
        """A new ring."""
        tail, head = (self.machine.counter(f"{counter} {name}") for counter in ("tail", "head"))
        ring = Ring(tail, head, self.machine.memory(f"ring {name}", cells))
        self._sent[ring] = 0
        return ring

    def flow(self, ring: Ring, rows: Sequence[int]) -> Flow:
        """What goes through the ring next."""
        flow = Flow(ring, self._sent[ring], rows)
        self._sent[ring] += len(rows)
        return flow

    def add(self, rank: int, call: int, name: str, program: Callable[[], Ops]) -> None:
        """A program of ``rank`` in its kernel number ``call``."""
        self._programs.append((rank, call, name, program))

    def wire(self, rank: int, name: str, program: Callable[[], Ops]) -> None:
        """What the network does for puts of ``rank``."""
        self.machine.add(rank, f"rank {rank} {name}", program, wire=True)

    def built(self) -> Machine:
        """The machine with all of them."""
        for rank, call, name, program in self._programs:
            before = sum(other[0] == rank and other[1] < call for other in self._programs)
            self.machine.add(
                rank, f"rank {rank} call {call} {name}", self._in_turn(rank, before, program)
            )
        return self.machine

    def _in_turn(self, rank: int, before: int, program: Callable[[], Ops]) -> Callable[[], Ops]:
        def run() -> Ops:
            yield from wait(self._ended[rank], before, stream=True)
            yield from program()
            yield Release(self._ended[rank])

        return run


def send(flow: Flow, call: Call, bug: Bug) -> Ops:
    """A sender."""
    ring, base, rows = flow
    base = 0 if bug("rows sent not counted") else base
    for i0 in range(0, len(rows) - bug("last chunk dropped"), call.chunk):
        n = min(call.chunk, len(rows) - i0)
        want = ROOM_INSIDE[call.combine](base=base, i=i0, n=n, slots=ring.slots(call.row))
        if bug("ring not drained"):
            want = base + i0 + n - ring.slots(call.row)
        if not bug("goes on without room"):
            yield from wait(ring.head, want - bug("one slot too many"))
        if bug("tail before data"):
            yield Release(ring.tail, n)
        yield from store(flow, range(i0, i0 + n), call.row)
        if not bug("tail before data"):
            yield Release(ring.tail, n)


def receive(flow: Flow, call: Call, bug: Bug) -> Ops:
    """A receiver: takes what is there, at most a chunk at once. (Credits are deferred in engine
    twolevel only.)
    """
    ring, base, rows = flow
    taken = 0
    while taken < len(rows):
        seen = yield Look(ring.tail, base + taken + 1, base + min(taken + call.chunk, len(rows)))
        n = seen - base - taken
        if bug("credit before read"):
            yield Release(ring.head, n)
        yield from read(flow, range(taken, taken + n), call.row)
        if not bug("credit before read"):
            yield Release(ring.head, n, deferred=True)
        taken += n


def reduce(flows: Sequence[Flow], tokens: Sequence[int], call: Call, bug: Bug) -> Ops:
    """A reducer: takes its tokens in order, ``batch`` at once, whatever rings their rows come
    through.
    """
    taken = [0] * len(flows)
    batch = max(1, len(tokens)) if bug("waits for all rows at once") else call.batch
    tokens = tokens[::-1] if bug("tokens in another order") else tokens
    for t0 in range(0, len(tokens), batch):
        step = set(tokens[t0 : t0 + batch])
        upto = [
            max([taken[d], *(i + 1 for i, row in enumerate(flow.rows) if row in step)])
            for d, flow in enumerate(flows)
        ]
        for flow, end in zip(flows, upto, strict=True):
            yield from wait(flow.ring.tail, flow.base + end - bug("last row not awaited"))
        for early in (True, False):
            for d, flow in enumerate(flows):
                if early != bug("credit before read"):
                    yield from read(flow, range(taken[d], upto[d]), call.row)
                elif upto[d] > taken[d]:
                    yield Release(flow.ring.head, upto[d] - taken[d])
        taken = upto


def store(flow: Flow, rows: range, size: int) -> Ops:
    """Rows into their slots."""
    for i in rows:
        for cell in flow.ring.slot(i, size):
            yield Store(cell, flow.rows[i])


def read(flow: Flow, rows: range, size: int) -> Ops:
    """Rows out of their slots."""
    for i in rows:
        for cell in flow.ring.slot(i, size):
            yield Read(cell, flow.rows[i])


class Post(NamedTuple):
    """Where tags of one rank to another lie, by half, and the counter that says so."""

    halves: tuple[int, int]
    counter: int


def post(machine: Machine, name: str) -> Post:
    """A new one."""
    first, second = machine.memory(f"tags {name}", 2)
    return Post((first, second), machine.counter(f"entered {name}"))


def call_barrier(call: int, to: Sequence[Post], of: Sequence[Post], bug: Bug) -> Ops:
    """A call barrier: ``to`` and ``of`` all others."""
    parity = 0 if bug("one half only") else call % 2
    for early in (True, False):
        for post in to:
            if early != bug("signal before tag"):
                yield Store(post.halves[parity], 1 + call)
        for post in to:
            if early == bug("signal before tag"):
                yield Release(post.counter)
    for post in of:
        yield from wait(post.counter, call + (not bug("entered of the last call")))
    for post in of:
        yield Read(post.halves[parity], 1 + call)


class Rings:
    """All ranks of an object of engine nvlink, which make ``calls`` one behind the other.

    Args:
        cells: of a ring.
        channels: of all calls.
        barriers: whether they run.
        bug: what is wrong.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        *,
        cells: int,
        channels: int = 1,
        barriers: bool = False,
        bug: str = "",
    ) -> None:
        self._ranks, self._channels, self._bug = (
            range(len(calls[0].routing)),
            range(channels),
            Bug(bug),
        )
        self._kernels = Kernels(len(self._ranks))
        self._rings = {
            (a, b, c): self._kernels.ring(f"({a} to {b}, channel {c})", cells)
            for a in self._ranks
            for b in self._ranks
            for c in self._channels
            if a != b
        }
        self._begun = [0 for _ in self._ranks]
        for number, call in enumerate(calls):
            self._data_call(number, call)
            self._begun = [
                begun + len(tokens) for begun, tokens in zip(self._begun, call.routing, strict=True)
            ]
        if barriers:
            self._barriers(len(calls))
        self.machine = self._kernels.built()

    def _tokens(self, call: Call, source: int, c: int, to: int | None = None) -> list[int]:
        """Rows of tokens of ``source`` in channel ``c``, those that go ``to`` a rank and back; in
        token order.
        """
        tokens = call.routing[source]
        mine = share(len(tokens), len(self._channels), c)
        return [1 + self._begun[source] + t for t in mine if to is None or to in tokens[t]]

    def _data_call(self, number: int, call: Call) -> None:
        for owner in self._ranks:
            for c in self._channels:
                others = [rank for rank in self._ranks if rank != owner]
                rows = [self._tokens(call, owner, c, rank) for rank in others]
                if call.combine:
                    flows = [
                        self._kernels.flow(self._rings[rank, owner, c], some)
                        for rank, some in zip(others, rows, strict=True)
                    ]
                    for rank, flow in zip(others, flows, strict=True):
                        name = f"sender to {owner}, channel {c}"
                        self._kernels.add(
                            rank,
                            number,
                            name,
                            partial(send, flow, call, self._bug),
                        )
                    program = partial(reduce, flows, self._tokens(call, owner, c), call, self._bug)
                    self._kernels.add(owner, number, f"reducer, channel {c}", program)
                else:
                    for rank, some in zip(others, rows, strict=True):
                        flow = self._kernels.flow(self._rings[owner, rank, c], some)
                        program = partial(send, flow, call, self._bug)
                        self._kernels.add(owner, number, f"sender to {rank}, channel {c}", program)
                        program = partial(receive, flow, call, self._bug)
                        self._kernels.add(
                            rank, number, f"receiver from {owner}, channel {c}", program
                        )

    def _barriers(self, calls: int) -> None:
        machine, pairs = (
            self._kernels.machine,
            [(a, b) for a in self._ranks for b in self._ranks if a != b],
        )
        posts = {(a, b): post(machine, f"of {a} to {b}") for a, b in pairs}
        for call, rank in product(range(calls), self._ranks):
            to, of = (
                [posts[a, b] for a, b in pairs if a == rank],
                [posts[a, b] for a, b in pairs if b == rank],
            )
            self._kernels.add(rank, call, "barrier", partial(call_barrier, call, to, of, self._bug))
