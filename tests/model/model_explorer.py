"""Explores everything that a small model can do, and tells the shortest way to a failure.

Failures: a store into an unread row; a read of anything but its row; processes that wait for each
other in a circle; rows that nobody read at the end. Every run ends: a process has finitely many
steps and never goes back, so the states are a graph without circles.

**Reduction.** In each state it is enough to follow the steps of a *persistent* set of processes
(Godefroid, "Partial-order methods for the verification of concurrent systems", 1996): one such that
whatever the others do while the set stands still, it neither enables, disables nor changes a step
of the set. Then every final state of the full graph is a final state of the reduced one.
:meth:`Search._persistent` closes a set under two rules:

* Of a process of the set that can go on: everybody who may ever access a cell that its step
  accesses, or look at a counter that its step adds to, or add to a counter that its step looks at.
  (Waits need no rule: counters grow, so a wait that is over stays over; and adds commute.)
* Of a process of the set that must wait for a counter: so many of those who may yet add to it that
  the others cannot bring it there. So it does not wake while the set stands still.

Failures of steps are not lost either: think of a failing step as leaving a mark in its cell that
stays for good, while its process goes on. No run is endless, so a marked state leads to a marked
final state, which the reduced graph holds; on a way to it the mark is set, and that is where the
search reports it.

**Halting.** Processes of ``mortal`` ranks may halt before any of their steps, each for itself: that
is more than a rank that dies can do. It is also what a rank can do that gives up early, as a wait
that has timed out lets its process touch nothing more. To halt while waiting has no other effect
than to halt on waking, so it is a second choice wherever a step is possible, and the reduction
holds. When nobody can go on, whoever has not ended must wait, in the end, for one that halted: its
wait times out and names the rank of those who would have added to its counter. That must be one
other rank, and one that has not ended either: it is dead, or will itself name somebody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from model_machine import END, PENDING, Machine, Read, Release, Step

HALTED = 255
"""Where a process stands that has halted."""
MOST_STATES = 3_000_000


@dataclass(frozen=True)
class Outcome:
    """What was found. ``failure``: none if "". ``trace``: who did what on a shortest way there."""

    states: int
    finals: int
    failure: str = ""
    trace: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        if not self.failure:
            return f"{self.states} states, {self.finals} final: no failure"
        steps = (f"  {i:3}. {line}" for i, line in enumerate(self.trace, 1))
        return "\n".join(
            [f"{self.failure}, after {len(self.trace)} steps ({self.states} states):", *steps]
        )


def explore(machine: Machine, *, mortal: Iterable[int] = (), reduced: bool = True) -> Outcome:
    """Everything that ``machine`` can do, breadth first, up to the first failure.

    Args:
        mortal: ranks whose processes may halt.
        reduced: False: every order of steps that do not touch each other, so that no trace is
            shorter.

    Raises:
        AssertionError: more than :data:`MOST_STATES` states.
    """
    return Search(machine, frozenset(mortal), reduced).run()


class _Masks(NamedTuple):
    """Bits of what a step touches (``now``), of what that meets in others (``meets``), and of all
    steps from there on.
    """

    now: int
    meets: int
    future: int
    adds: dict[int, int]
    """What all steps from there on add to each counter, at most."""
    first: tuple[tuple[int, int], ...]
    """How far counters must get before the step."""
    waits: dict[int, int]
    """How far they must get before the process ends."""


class Search:
    """States of a machine: a byte for where each process is, then for each counter, then for each
    cell.
    """

    def __init__(
        self, machine: Machine, mortal: frozenset[int] = frozenset(), reduced: bool = False
    ) -> None:
        self._machine, self._reduced = machine, reduced
        self.reached: dict[bytes, tuple[bytes, int]] = {}
        """All states, each with one that it follows and whose step led there."""
        self._processes = machine.processes
        self._counters = len(self._processes)
        self._cells = self._counters + len(machine.counters)
        self._mortal = [process.rank in mortal for process in self._processes]
        for process in self._processes:
            assert len(process.steps) < HALTED, (
                f"{process.name} has too many steps: {len(process.steps)}"
            )
        self._masks = [self._masks_of(process.steps) for process in self._processes]
        futures = [
            masks[process.start]
            for masks, process in zip(self._masks, self._processes, strict=True)
        ]
        self._adders = [
            [p for p in self._everybody() if c in futures[p].adds]
            for c in range(len(machine.counters))
        ]
        """For each counter: processes that ever add to it."""
        self._last_adds = [_last_add(process.steps) for process in self._processes]
        self._neighbours = [
            [q for q in self._everybody() if q != p and self._may_meet(p, q)]
            for p in self._everybody()
        ]

    @property
    def start(self) -> bytes:
        """The first state."""
        places = bytes(process.start for process in self._processes)
        return places + bytes(len(self._machine.counters) + len(self._machine.cells))

    def run(self) -> Outcome:
        came = self.reached = {self.start: (b"", 0)}
        queue, finals = deque([self.start]), 0
        while queue:
            state = queue.popleft()
            able = [p for p in self._everybody() if self.able(state, p)]
            if not able:
                finals += 1
                failure = self._wrong_at_the_end(state)
                if failure:
                    return Outcome(len(came), finals, failure, tuple(self._told(came, state)))
            for p in self._persistent(state, able) if self._reduced else able:
                after, failure = self.stepped(state, p)
                if failure:
                    told = (*self._told(came, state), self._step_told(state, p))
                    return Outcome(len(came), finals, failure, told)
                if after not in came:
                    came[after] = (state, p)
                    queue.append(after)
                if self._mortal[p]:
                    after = state[:p] + bytes([HALTED]) + state[p + 1 :]
                    if after not in came:
                        came[after] = (state, p)
                        queue.append(after)
            assert len(came) <= MOST_STATES, "too many states: make the model smaller"
        return Outcome(len(came), finals)

    def _everybody(self) -> range:
        return range(len(self._processes))

    # What one process does

    def able(self, state: bytes, p: int) -> bool:
        """Whether process ``p`` can go on."""
        return state[p] not in (END, HALTED) and self.lacks(state, p) is None

    def lacks(self, state: bytes, p: int) -> tuple[int, int] | None:
        """The counter that process ``p`` waits for, and how far it must get."""
        if state[p] in (END, HALTED):
            return None
        step = self._processes[p].steps[state[p]]
        for waiting in step.waits:
            if state[self._counters + waiting.counter] < waiting.at_least:
                return waiting.counter, waiting.at_least
        if step.look is not None and state[self._counters + step.look.counter] < step.look.at_least:
            return step.look.counter, step.look.at_least
        return None

    def stepped(self, state: bytes, p: int) -> tuple[bytes, str]:
        """The state after ``p``'s step, and what is wrong with it."""
        step = self._processes[p].steps[state[p]]
        after = bytearray(state)
        seen = 0
        if step.look is not None:
            seen = (
                min(state[self._counters + step.look.counter], step.look.at_most)
                - step.look.at_least
            )
        acts, after[p] = step.branches[seen]
        for act in acts:
            if isinstance(act, Release):
                after[self._counters + act.counter] += act.amount
                for cell in act.publishes:
                    after[self._cells + cell] -= PENDING
                continue
            at, name = self._cells + act.cell, self._machine.cells[act.cell]
            if isinstance(act, Read):
                if after[at] != act.row:
                    return (
                        state,
                        f"{self._processes[p].name} wants row {act.row} of {name} and finds "
                        f"{_content(after[at])}",
                    )
                after[at] = 0
            else:
                if after[at]:
                    return (
                        state,
                        f"{self._processes[p].name} overwrites {_content(after[at])} of {name}, "
                        f"which nobody has read",
                    )
                after[at] = act.row + PENDING
        return bytes(after), ""

    # When nobody can go on

    def _wrong_at_the_end(self, state: bytes) -> str:
        left = [p for p in self._everybody() if state[p] != END]
        if self._machine.leaves_out and all(self._processes[p].wire for p in left):
            return ""
        if not left:
            unread = [i for i in range(len(self._machine.cells)) if state[self._cells + i]]
            names = (
                f"{_content(state[self._cells + i])} of {self._machine.cells[i]}" for i in unread
            )
            return "all have ended, and nobody has read " + ", ".join(names) if unread else ""
        innocent = [
            p for p in left if state[p] != HALTED and not self._waits_for_a_halted(state, p, set())
        ]
        if innocent:
            return "nobody can go on: " + "; ".join(self._waiting(state, p) for p in innocent)
        nameless = [p for p in left if state[p] != HALTED and not self._names_one(state, p)]
        return (
            "waits name the wrong rank: " + "; ".join(self._waiting(state, p) for p in nameless)
            if nameless
            else ""
        )

    def _waits_for_a_halted(self, state: bytes, p: int, passed: set[int]) -> bool:
        """Whether what ``p`` waits for hangs on a process that halted."""
        lack = self.lacks(state, p)
        assert lack is not None
        passed.add(p)
        who = [q for q in self._adders[lack[0]] if state[q] != END]
        return any(state[q] == HALTED for q in who) or any(
            self._waits_for_a_halted(state, q, passed) for q in who if q not in passed
        )

    def _names_one(self, state: bytes, p: int) -> bool:
        """Whether ``p``, if a living kernel waits there, names one other rank, which has not ended
        either.
        """
        lack, process = self.lacks(state, p), self._processes[p]
        assert lack is not None
        step = process.steps[state[p]]
        if (
            process.wire
            or self._mortal[p]
            or any(wait.stream and wait.counter == lack[0] for wait in step.waits)
        ):
            return True
        ranks = {self._processes[q].rank for q in self._adders[lack[0]]}
        there = [
            q for q in self._everybody() if self._processes[q].rank in ranks and state[q] != END
        ]
        return len(ranks) == 1 and process.rank not in ranks and bool(there)

    def _waiting(self, state: bytes, p: int) -> str:
        lack = self.lacks(state, p)
        assert lack is not None
        counter, want = lack
        seen = state[self._counters + counter]
        return (
            f"{self._processes[p].name} waits for {self._machine.counters[counter]} >= {want}, "
            f"which is {seen}"
        )

    # Reduction

    def _masks_of(self, steps: list[Step]) -> list[_Masks]:
        counters, cells = len(self._machine.counters), 2 * len(self._machine.counters)
        masks = [_Masks(0, 0, 0, {}, (), {})]
        for step in steps[1:]:
            now = meets = future = 0
            adds: dict[int, int] = {}
            waits: dict[int, int] = {}
            for waiting in (*step.waits, *([] if step.look is None else [step.look])):
                waits[waiting.counter] = max(waiting.at_least, waits.get(waiting.counter, 0))
            first = tuple(waits.items())
            always: list[dict[int, int]] = []
            if step.look is not None:
                now, meets = 1 << counters + step.look.counter, 1 << step.look.counter
            for branch in step.branches:
                own: dict[int, int] = {}
                for act in branch.acts:
                    if isinstance(act, Release):
                        now, meets = now | 1 << act.counter, meets | 1 << counters + act.counter
                        own[act.counter] = own.get(act.counter, 0) + act.amount
                    for cell in act.publishes if isinstance(act, Release) else (act.cell,):
                        now, meets = now | 1 << cells + cell, meets | 1 << cells + cell
                assert branch.after < len(masks), "steps are numbered behind those that follow them"
                later = masks[branch.after]
                future |= later.future
                for counter in {*own, *later.adds}:
                    count = own.get(counter, 0) + later.adds.get(counter, 0)
                    adds[counter] = max(adds.get(counter, 0), count)
                always.append(later.waits)
            for counter in set(always[0]).intersection(*always):
                waits[counter] = max(waits.get(counter, 0), min(later[counter] for later in always))
            masks.append(_Masks(now, meets, future | now, adds, first, waits))
        return masks

    def _may_meet(self, p: int, q: int) -> bool:
        theirs = self._masks[q][self._processes[q].start].future
        return any(masks.meets & theirs for masks in self._masks[p])

    def _persistent(self, state: bytes, able: list[int]) -> list[int]:
        """Those who can go on in a small persistent set."""
        best = able
        tried: set[int] = set()
        for seed in able:
            if seed in tried or len(best) <= 1:
                continue
            found = self._closed(state, seed, set(able))
            tried |= found
            here = [p for p in able if p in found]
            best = here if len(here) < len(best) else best
        return best

    def _closed(self, state: bytes, seed: int, able: set[int]) -> set[int]:
        found, new = {seed}, [seed]
        waiting: list[int] = []
        doubtful: set[int] = set()
        while new or waiting or doubtful:
            if new:
                p = new.pop()
                if p not in able:
                    waiting.append(p)
                    continue
                meets = self._masks[p][state[p]].meets
                met = [
                    q
                    for q in self._neighbours[p]
                    if meets & self._masks[q][state[q] % HALTED].future
                ]
                new += [q for q in met if q in able and q not in found]
                doubtful |= {q for q in met if q not in able}
            elif waiting:
                new = self._wakers(state, waiting.pop(), found)
            else:  # those who wait as long as the set stands still do not meet it
                doubtful -= found | self._without(state, found)[1]
                new = [min(doubtful)] if doubtful else []
            found.update(new)
        return found

    def _without(self, state: bytes, found: set[int]) -> tuple[list[int], set[int]]:
        """How far others may bring each counter while ``found`` stands still, and who never wakes
        then.

        Whoever wakes is taken to do all that it ever may, but for the last step, which waits for
        all that the process waits for.
        """
        reach = list(state[self._counters : self._cells])
        asleep = [q for q in self._everybody() if state[q] not in (END, HALTED) and q not in found]
        at_work: list[int] = []
        while True:
            masks = {q: self._masks[q][state[q]] for q in (*asleep, *at_work)}
            awake = [
                q for q in asleep if all(reach[counter] >= want for counter, want in masks[q].first)
            ]
            done = [
                q
                for q in at_work
                if all(reach[counter] >= want for counter, want in masks[q].waits.items())
            ]
            if not awake and not done:
                return reach, set(asleep)
            for q in awake:
                for counter, amount in masks[q].adds.items():
                    reach[counter] += amount if counter != self._last_adds[q] else 0
            for q in done:
                last = self._last_adds[q]
                if last is not None:
                    reach[last] += masks[q].adds[last]
            asleep = [q for q in asleep if q not in awake]
            at_work = [q for q in at_work if q not in done] + awake

    def _wakers(self, state: bytes, p: int, found: set[int]) -> list[int]:
        """Whom to take in so that ``p`` does not wake while the set stands still."""
        lack, more = self.lacks(state, p), list[int]()
        assert lack is not None
        counter, want = lack
        adders = [
            q for q in self._adders[counter] if state[q] not in (END, HALTED) and q not in found
        ]
        reach = state[self._counters + counter] + sum(
            self._masks[q][state[q]].adds.get(counter, 0) for q in adders
        )
        while reach >= want and self._without(state, found.union(more))[0][counter] >= want:
            more.append(adders.pop(0))
        return more

    # Traces

    def _told(self, came: dict[bytes, tuple[bytes, int]], state: bytes) -> Iterator[str]:
        lines: list[str] = []
        while True:
            before, p = came[state]
            if not before:
                return reversed(lines)
            lines.append(
                f"{self._processes[p].name} halts"
                if state[p] == HALTED
                else self._step_told(before, p)
            )
            state = before

    def _step_told(self, state: bytes, p: int) -> str:
        """What ``p`` does in ``state``, in words."""
        step, words = self._processes[p].steps[state[p]], list[str]()
        seen = 0
        for waiting in step.waits:
            words.append(f"sees {self._machine.counters[waiting.counter]} >= {waiting.at_least}")
        if step.look is not None:
            value = state[self._counters + step.look.counter]
            seen = min(value, step.look.at_most) - step.look.at_least
            words.append(f"sees {self._machine.counters[step.look.counter]} = {value}")
        for act in step.branches[seen].acts:
            if isinstance(act, Release):
                words.append(f"adds {act.amount} to {self._machine.counters[act.counter]}")
            else:
                verb = "reads" if isinstance(act, Read) else "stores"
                words.append(
                    f"{verb} row {act.row} {'of' if verb == 'reads' else 'into'} "
                    f"{self._machine.cells[act.cell]}"
                )
        return f"{self._processes[p].name}: {', '.join(words)}"


def _last_add(steps: list[Step]) -> int | None:
    """The counter to which the process adds when it ends, and only then; if there is one."""
    adds = [
        (act.counter, branch.after)
        for step in steps
        for branch in step.branches
        for act in branch.acts
        if isinstance(act, Release)
    ]
    last = {counter for counter, after in adds if after == END}
    counter = last.pop() if len(last) == 1 else None
    return counter if all(after == END for other, after in adds if other == counter) else None


def _content(value: int) -> str:
    if not value:
        return "nothing unread"
    return f"row {value}" if value < PENDING else f"row {value - PENDING} (not published)"
