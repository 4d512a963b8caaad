"""Workers that serve several processes of a rank by turns, as ``kernels/two_turns.py`` does, explored to the end.

Why models have a process for each task instead, and lose nothing by it, is said in ``model_twolevel.py``. Here it is tried:
whatever workers do is compared with what their processes do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from model_explorer import Search
from model_machine import END, Machine

Turns = tuple[tuple[int, bool], ...]
"""Of each worker: whose turn it is among its tasks, and whether that has begun."""
State = tuple[bytes, Turns]
"""Of the machine, and of its workers."""


class Found(NamedTuple):
    """``states``: of the machine, in all orders of turns. ``failure``: "" if there is none."""

    states: frozenset[bytes]
    failure: str = ""


class Workers:
    """Explores a machine whose processes are dealt to workers; a wire has one of its own.

    Args:
        per_rank: workers of each rank.
        patient: wrong: a worker waits where it should give the turn to the next task.
    """

    def __init__(self, machine: Machine, per_rank: int, *, patient: bool = False) -> None:
        self._machine, self._patient, self._steps = machine, patient, Search(machine)
        tasks: dict[tuple[int, int], list[int]] = {}
        for number, process in enumerate(machine.processes):
            mine = [key for key in tasks if key[0] == process.rank]
            key = (~number, 0) if process.wire else (process.rank, sum(len(tasks[each]) for each in mine) % per_rank)
            tasks.setdefault(key, []).append(number)
        self._tasks = list(tasks.values())

    def run(self) -> Found:
        """All states, up to the first failure."""
        first = self._steps.start
        turns: Turns = tuple((0, False) for _ in self._tasks)
        came: set[State] = {(first, turns)}
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
        """What each worker may do next: a step of its turn, or give the turn to the next task."""
        at, turns = state
        for worker, (turn, begun) in enumerate(turns):
            task = self._tasks[worker][turn]
            step = self._machine.processes[task].steps[at[task]]
            done = at[task] == END
            waits = done or bool(step.waits) or step.look is not None
            if not (begun and waits) and not done and self._steps.able(at, task):
                after, failure = self._steps.stepped(at, task)
                yield (after, _with(turns, worker, (turn, True))), failure
            elif done or begun or not self._patient:
                yield (at, _with(turns, worker, ((turn + 1) % len(self._tasks[worker]), False))), ""

    def _stuck(self, state: State) -> bool:
        """Whether somebody has not ended, and nobody can go on; patient workers: in the turns that they are in."""
        at, _ = state
        left = [number for number, place in enumerate(at[: len(self._machine.processes)]) if place != END]
        if self._patient:
            return bool(left) and all(after == state for after, _ in self._moves(state))
        return bool(left) and not any(self._steps.able(at, number) for number in left)


def _with(turns: Turns, worker: int, turn: tuple[int, bool]) -> Turns:
    return (*turns[:worker], turn, *turns[worker + 1 :])
