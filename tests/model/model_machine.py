"""Small models of protocols: processes on ranks that share counters and cells of memory.

A process is a generator of operations, written like the kernel that it stands for. It may depend on
nothing but its arguments and what its ``Look`` operations return, so it is compiled once into
steps: a step waits, then acts, all at once.

What is put together into one step, and why no failure is lost by that. Counters only grow, so a
wait that is over stays over, and passing it changes nothing: it belongs to what follows. Reads,
then stores, that follow each other without a wait are one step: a store fails if its cell holds an
unread row, and cells that are unread later are unread now, as only this process writes them; a read
fails if its row is not published, and what breaks a published row before it is read is a store,
which fails itself. A release is a step of its own, so everybody can come between data and counter.

A cell is free, or holds a row that is stored but not published, or published and unread. Reading a
row frees its cell. A store destroys at once what the cell held, yet its row can be read only after
the process's next release: as weak memory may have it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

PENDING = 128
"""Added to a row that is stored but not published. Rows are numbers below."""
END = 0
"""The step of a process that is done."""


class Wait(NamedTuple):
    """Go on once the counter is at least ``at_least``. ``stream``: the order of kernels on a rank,
    which never times out.
    """

    counter: int
    at_least: int
    stream: bool = False


class Look(NamedTuple):
    """Wait until the counter is at least ``at_least``; the process gets its value, at most
    ``at_most``.
    """

    counter: int
    at_least: int
    at_most: int


class Read(NamedTuple):
    """Take ``row`` out of the cell: anything else there, or nothing, is a failure."""

    cell: int
    row: int


class Store(NamedTuple):
    """Put ``row`` into the cell: an unread row there is a failure."""

    cell: int
    row: int


class Release(NamedTuple):
    """Publish all that the process has stored, and add to the counter. (``publishes`` is filled
    in.)

    ``deferred``: of a process that is a task: its worker does it at the end of the round
    (``model_turns.py``).
    """

    counter: int
    amount: int = 1
    publishes: tuple[int, ...] = ()
    deferred: bool = False


Act = Read | Store | Release
Ops = Generator[Wait | Look | Act, int, None]


class Branch(NamedTuple):
    """What is done in a step, and the step after it."""

    acts: tuple[Act, ...]
    after: int


class Step(NamedTuple):
    """``waits``, in this order, then ``look``; one branch for each value that it may return, from
    ``at_least`` on.
    """

    waits: tuple[Wait, ...]
    look: Look | None
    branches: tuple[Branch, ...]


class Process:
    """One process. ``steps[0]`` is nobody's: who is there has ended. ``wire``: carries puts, and
    waits for nobody else's sake.
    """

    def __init__(
        self, rank: int, name: str, program: Callable[[], Ops], *, wire: bool = False
    ) -> None:
        self.rank, self.name, self.wire = rank, name, wire
        self.steps: list[Step] = [Step((), None, ())]
        self._numbers: dict[Step, int] = {}
        self.start = self._compiled(program, ()).after

    def _compiled(self, program: Callable[[], Ops], seen: tuple[int, ...]) -> Branch:
        """What the process does after its looks returned ``seen``: what it need not wait for, and
        the step behind that.

        Every sequence of looks is followed to its end; equal steps with equal futures become one.
        """
        ops, look = _run(program, seen)
        groups = _groups(ops)
        if look is None:
            after = END
        else:
            waits = groups.pop()[0] if groups and not groups[-1][1] else ()
            values = range(look.at_least, look.at_most + 1)
            after = self._number(
                Step(
                    waits, look, tuple(self._compiled(program, (*seen, value)) for value in values)
                )
            )
        first = groups.pop(0)[1] if seen and groups and not groups[0][0] else ()
        for waits, acts in reversed(groups):
            after = self._number(Step(waits, None, (Branch(acts, after),)))
        return Branch(first, after)

    def _number(self, step: Step) -> int:
        if step not in self._numbers:
            self._numbers[step] = len(self.steps)
            self.steps.append(step)
        return self._numbers[step]


def _run(program: Callable[[], Ops], seen: tuple[int, ...]) -> tuple[list[Wait | Act], Look | None]:
    """Operations behind the last of the looks that returned ``seen``, up to the next look."""
    process, answers = program(), iter(seen)
    ops: list[Wait | Act] = []
    stored: list[int] = []
    try:
        op = next(process)
        while True:
            if isinstance(op, Look):
                answer = next(answers, None)
                if answer is None:
                    return ops, op
                ops = []
                op = process.send(answer)
                continue
            if isinstance(op, Store):
                stored.append(op.cell)
            if isinstance(op, Release):
                op, stored = op._replace(publishes=tuple(stored)), []
            ops.append(op)
            op = next(process)
    except StopIteration:
        return ops, None


_KINDS: dict[type, int] = {Wait: 0, Read: 1, Store: 2, Release: 3}


def _groups(ops: Iterable[Wait | Act]) -> list[tuple[tuple[Wait, ...], tuple[Act, ...]]]:
    """Cut into steps: waits, then reads, then stores; or waits, then a release."""
    groups: list[tuple[tuple[Wait, ...], tuple[Act, ...]]] = []
    last = 3
    for op in ops:
        kind = _KINDS[type(op)]
        if kind < last or last == 3 or (kind == 3 and last > 0):
            groups.append(((), ()))
        waits, acts = groups[-1]
        groups[-1] = (waits, (*acts, op)) if not isinstance(op, Wait) else ((*waits, op), acts)
        last = kind
    return groups


class Machine:
    """Counters, cells and processes of all ranks, with their names.

    A counter that shall wait for nothing (``at_least <= 0``) needs no operation: :meth:`wait`
    leaves it out.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.counters: list[str] = []
        self.cells: list[str] = []
        self.processes: list[Process] = []
        self.leaves_out = False
        """Whether ranks may be left out: rows may stay unread, wires wait for what nobody puts."""

    def counter(self, name: str) -> int:
        """A new counter, at 0."""
        self.counters.append(name)
        return len(self.counters) - 1

    def memory(self, name: str, count: int) -> range:
        """``count`` new free cells."""
        self.cells += [f"{name}[{i}]" for i in range(count)]
        return range(len(self.cells) - count, len(self.cells))

    def add(self, rank: int, name: str, program: Callable[[], Ops], *, wire: bool = False) -> None:
        """A process of ``rank``."""
        self.processes.append(Process(rank, name, program, wire=wire))


def wait(counter: int, at_least: int, *, stream: bool = False) -> Ops:
    """A wait, unless it is over from the beginning."""
    if at_least > 0:
        yield Wait(counter, at_least, stream)
