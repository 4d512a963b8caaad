"""What to do, and to say, when everybody waits."""

from __future__ import annotations

from typing import Any

from tokenyard.testing.simulator.hooks import roles
from tokenyard.testing.simulator.machine import Machine
from tokenyard.testing.simulator.pages import raw
from tokenyard.testing.simulator.program import Program
from tokenyard.testing.simulator.simulation_errors import Deadlock, RanksFailed

_PATIENCE = (16, 100, 3000)
_NOTED_ROUNDS = 4
_ALL_LOOK = 0.5
_SECOND = 1_000_000_000
_MOST_LINES = 40
_MOST_PLACES = 8


class Standstill:
    """Nobody is ready: wake pollers, in the order that :class:`Simulator` tells, and in between let
    hardware finish all that it has begun; then let the clock jump, or report a deadlock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._version, self._tries = -1, 0
        self._jumped = self._asked = -1  # versions of the last jump, and of when all took notes

    def resolve(self) -> None:
        """Wake somebody. RanksFailed, or Deadlock if no host code has raised: there is no way, or
        but by a timeout that is not to be."""
        self._tries = self._tries + 1 if self._version == self._machine.version else 0
        if self._tries == 0:
            self._wake_all(_PATIENCE[0])
        elif self._tries == 1:
            self._finish_stores()
            self._wake_all(_PATIENCE[1])
        elif self._tries > 2 or not self._wake_the_patient():
            self._jump()
            self._tries = -1
        self._version = self._machine.version

    def _wake_all(self, patience: int, notes: bool = False) -> None:
        for p in self._machine.live.values():
            p.patience, p.notes = patience, notes
        self._machine.wake_all()
        for host in self._machine.hosts:
            host.checked = -1

    def _wake_the_patient(self) -> bool:
        """Let programs that have no deadline, neither of their own nor another's, go on for long,
        once: they may count their rounds. False: there are none."""
        waiting = [p for p in self._machine.live.values() if p.asleep]
        polled = {p.serial: {(p.rank, address) for address, _ in p.polled()} for p in waiting}
        timed = {place for p in waiting if p.reads_clock for place in polled[p.serial]}
        patient = [
            p
            for p in waiting
            if not (p.waits or p.tried or p.reads_clock or polled[p.serial] & timed)
        ]
        for p in patient:
            p.patience, p.tried = _PATIENCE[2], True
            self._machine.wake(p)
        return bool(patient)

    def _finish_stores(self) -> None:
        """All stores reach everybody, and nobody sees the past."""
        machine, memory = self._machine, self._machine.memory
        for p in machine.live.values():
            memory.write(p.give_away(), p)
        for rank, queue in enumerate(machine.streams):
            memory.publish(rank)
            for p in queue[0].left_behind if queue and rank not in machine.dead else ():
                memory.write(p.give_away(), p)
        for p in machine.live.values():
            p.view = p.rank_view = memory.now

    def _jump(self) -> None:
        """To the next deadline, and wake those that it is of. Others poll beside them at times, and
        if nothing came of the last jump: not every comparison with the clock is known."""
        machine = self._machine
        still = {*machine.dead, *machine.frozen}
        waiting = [p for p in machine.live.values() if p.asleep and p.rank not in still]
        hosts = [host for host in machine.hosts if host.rank not in still]
        deadlines = [each.deadline for each in (*waiting, *hosts) if each.deadline is not None]
        if any(p.deadline is None and p.reads_clock for p in waiting):
            deadlines.append(machine.now_ns + _SECOND)
        if not deadlines or not machine.timeouts:
            self._give_up(bool(deadlines))
            return
        machine.now_ns = max(machine.now_ns, min(deadlines)) + 1
        all_look = self._jumped == machine.version or machine.rng.random() < _ALL_LOOK
        self._jumped = machine.version
        for p in waiting:
            due = p.deadline is None or p.deadline <= machine.now_ns or all_look
            p.waits = p.waits and not (p.reads_clock and due)
        self._wake_all(0)

    def _give_up(self, late: bool) -> None:
        """Report what all wait for (``late``: some with a deadline), once they have said it."""
        machine = self._machine
        if self._asked != machine.version:
            self._asked = machine.version
            for p in machine.live.values():
                p.waits = False
            self._wake_all(_NOTED_ROUNDS, notes=True)
            return
        raise_errors(machine, _waiters(machine))
        ways = (
            "they would time out; timeouts=True lets them" if late else "none of them has a timeout"
        )
        raise Deadlock(
            f"nobody can go on after step {machine.steps} (seed {machine.seed}); {ways}"
            + _waiters(machine)
        )


def raise_errors(machine: Machine, more: str = "") -> None:
    """Raise RanksFailed if host code raised, from the first error. ``more`` is said after it."""
    errors = machine.errors
    parts = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
    if errors:
        text = f"{'; '.join(parts)} (seed {machine.seed}){more}"
        raise RanksFailed(text, dict(errors)) from next(iter(errors.values()))


def _waiters(machine: Machine) -> str:
    """One line for each."""
    dead = machine.dead
    lines = [_program(machine, p) for p in machine.live.values()]
    lines += [f"rank {h.rank}, host: {h.waits_for}" for h in machine.hosts if h.rank not in dead]
    lines += _not_started(machine)
    lines += [f"rank {rank} is dead" for rank in sorted(dead)]
    lines += [f"rank {rank} is frozen" for rank in sorted(machine.frozen)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more"]
    return "".join(f"\n  {line}" for line in lines)


def _program(machine: Machine, p: Program) -> str:
    read = sorted(p.polled(), key=lambda place: place[0] not in p.compared)  # what it looks for
    places = [_place(machine, address, size, p.compared.get(address, [])) for address, size in read]
    if len(places) > _MOST_PLACES:
        places[_MOST_PLACES:] = [f"... {len(places) - _MOST_PLACES} more"]
    inside = " > ".join(roles(p))
    return f"{p.name}" + (f", in {inside}," if inside else "") + f" waits at {'; '.join(places)}"


def _place(machine: Machine, address: int, size: int, wants: list[Any]) -> str:
    value = int.from_bytes(raw(address, size).tobytes(), "little", signed=True)
    compared = f", compared with {', '.join(str(want) for want in wants)}" if wants else ""
    return f"{machine.addresses.describe(address)} saw {value}{compared}"


def _not_started(machine: Machine) -> list[str]:
    lines: list[str] = []
    for rank, queue in enumerate(machine.streams):
        for place, launch in enumerate(queue):
            left = launch.size - launch.started
            if place > 0:
                why = f"{launch.size} programs wait for the launch before them"
            elif left:
                why = (
                    f"{left} of its {launch.size} programs have not started, because "
                    f"{len(launch.running)} others fill the rank (resident={machine.resident})"
                )
            else:
                continue
            lines.append(f"rank {rank}, {launch.name}: {why}")
    return lines
