"""Workers that serve several processes of a rank by turns, as ``kernels/two_scheduler.py`` does,
explored to the end.

Why models have a process for each task instead, and lose nothing by it, is said in
``model_twolevel.py``. Here it is tried: whatever workers do is compared with what their processes
do.

What a turn did is shown at the end of the round (``flush_signals``): a task that comes to a release
that it *defers* ends its turn there, and its worker does all such releases, one by one, when it has
been at all its tasks. A kernel that ends does so behind its last round: here its worker just goes
on to the end of the round, which is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from model_explorer import Search
from model_machine import END, Machine, Release

Turns = tuple[tuple[int, bool], ...]
"""Of each worker: whose turn it is among its tasks, behind which the round ends, and whether that
has begun.
"""
State = tuple[bytes, Turns]
"""Of the machine, and of its workers."""

WAITS, FORGETS, ENDS, TWICE = (
    "waits in its turn", "the round's end forgets what is owed", "the kernel ends without "
                                                                 "publishing", "published twice",
)  # fmt: skip
"""What may be wrong with workers."""


class Found(NamedTuple):
    """``states``: of the machine, in all orders of turns. ``failure``: "" if there is none."""

    states: frozenset[bytes]
    failure: str = ""


class Workers:
    """Explores a machine whose processes are dealt to workers; a wire has one of its own.

    Args:
        per_rank: workers of each rank. Each begins its rounds at another task, but publishes behind
            its last one.
        bug: what is wrong with them; "": nothing.
    """

    def __init__(self, machine: Machine, per_rank: int, bug: str = "") -> None:
        self._machine, self._bug, self._steps = machine, bug, Search(machine)
        tasks: dict[tuple[int, int], list[int]] = {}
        for number, process in enumerate(machine.processes):
            mine = [key for key in tasks if key[0] == process.rank]
            key = (
                (~number, 0)
                if process.wire
                else (process.rank, sum(len(tasks[each]) for each in mine) % per_rank)
            )
            tasks.setdefault(key, []).append(number)
        self._tasks = list(tasks.values())
        self._begin = [worker % len(mine) for worker, mine in enumerate(self._tasks)]

    def run(self) -> Found:
        """All states, up to the first failure."""
        first: State = (self._steps.start, tuple((begin, False) for begin in self._begin))
        for worker in range(len(self._tasks)):
            first = self._settled(first, worker)
        came: set[State] = {first}
        queue = deque(came)
        while queue:
            state = queue.popleft()
            for after, failure in self._moves(state):
                if failure:
                    return Found(frozenset(at for at, _ in came), failure)
                if after not in came:
                    came.add(after)
                    queue.append(after)
            if self._stuck(state):
                return Found(frozenset(at for at, _ in came), "no worker can go on")
        return Found(frozenset(at for at, _ in came))

    def _moves(self, state: State) -> Iterator[tuple[State, str]]:
        """What each worker may do next: a step of its turn, or give the turn to the next task; or a
        release at the round's end.
        """
        at, turns = state
        for worker, (turn, begun) in enumerate(turns):
            if turn == len(self._tasks[worker]):
                yield from self._published(state, worker)
                continue
            task = self._tasks[worker][turn]
            if self._steps.able(at, task):
                after, failure = self._steps.stepped(at, task)
                yield self._settled((after, _with(turns, worker, (turn, True))), worker), failure
            elif begun or self._bug != WAITS:
                yield self._settled(self._next(state, worker), worker), ""

    def _published(self, state: State, worker: int) -> Iterator[tuple[State, str]]:
        """Behind a worker's last task: one of the releases that are deferred."""
        at, turns = state
        for task in self._tasks[worker]:
            release = self._deferred(at, task)
            if release is None:
                continue
            after, failure = (
                (self._passed(at, task), "")
                if self._bug == FORGETS
                else self._steps.stepped(at, task)
            )
            if self._bug == TWICE:
                counter = len(self._machine.processes) + release.counter
                after = (
                    after[:counter]
                    + bytes([after[counter] + release.amount])
                    + after[counter + 1 :]
                )
            yield self._settled((after, turns), worker), failure

    def _settled(self, state: State, worker: int) -> State:
        """What a worker does by itself, whatever others do, it does at once: end a turn, pass over
        tasks that have ended or defer, and begin the next round when it defers nothing."""
        tasks = self._tasks[worker]
        for _ in range(2 * len(tasks) + 2):
            at, turns = state
            turn, begun = turns[worker]
            if turn == len(tasks):
                over = all(self._deferred(at, task) is None for task in tasks)
            else:
                step = self._machine.processes[tasks[turn]].steps[at[tasks[turn]]]
                waits = bool(step.waits) or step.look is not None
                over = (
                    at[tasks[turn]] == END
                    or self._deferred(at, tasks[turn]) is not None
                    or (begun and waits)
                )
            if not over:
                break
            state = self._next(state, worker)
        return state

    def _next(self, state: State, worker: int) -> State:
        """The worker comes to the next task, or, behind the last one, to the end of the round."""
        at, turns = state
        tasks = self._tasks[worker]
        turn = (turns[worker][0] + 1) % (len(tasks) + 1)
        if (
            self._bug == ENDS
            and turn == self._begin[worker]
            and all(self._is_over(at, task) for task in tasks)
        ):
            for task in tasks:
                while self._deferred(at, task) is not None:
                    at = self._passed(at, task)
        return at, _with(turns, worker, (turn, False))

    def _deferred(self, at: bytes, task: int) -> Release | None:
        """The release that a task defers, if it has come to one."""
        branches = self._machine.processes[task].steps[at[task]].branches
        acts = branches[0].acts if len(branches) == 1 else ()
        return (
            acts[0]
            if len(acts) == 1 and isinstance(acts[0], Release) and acts[0].deferred
            else None
        )

    def _passed(self, at: bytes, task: int) -> bytes:
        """The state in which a task's release is forgotten."""
        [branch] = self._machine.processes[task].steps[at[task]].branches
        return at[:task] + bytes([branch.after]) + at[task + 1 :]

    def _is_over(self, at: bytes, task: int) -> bool:
        """Whether a task has nothing to do but what it defers, and to end."""
        while self._deferred(at, task) is not None:
            at = self._passed(at, task)
        step = self._machine.processes[task].steps[at[task]]
        return at[task] == END or (
            not step.waits and step.look is None and step.branches[0].after == END
        )

    def _stuck(self, state: State) -> bool:
        """Whether somebody has not ended, and nobody can go on; workers that wait: in the turns
        that they are in.
        """
        at, _ = state
        left = [
            number
            for number, place in enumerate(at[: len(self._machine.processes)])
            if place != END
        ]
        if self._bug == WAITS:
            return bool(left) and all(after == state for after, _ in self._moves(state))
        return bool(left) and not any(self._steps.able(at, number) for number in left)


def _with(turns: Turns, worker: int, turn: tuple[int, bool]) -> Turns:
    return (*turns[:worker], turn, *turns[worker + 1 :])
