"""What to do when everybody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard.testing.simulator import failure_report
from tokenyard.testing.simulator.simulation_errors import Deadlock

if TYPE_CHECKING:
    from tokenyard.testing.simulator.program import Program
    from tokenyard.testing.simulator.scheduler import Simulator

_PATIENCE = (16, 100, 3000)
_SECOND = 1_000_000_000


class Standstill:
    """Nobody is ready. First believe that pollers go on by themselves after a few more rounds; then
    let hardware finish all that it has begun, and believe it again; then believe it of those that
    wait without a deadline, for long; then let the clock jump, or report a deadlock.
    """

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._version, self._tries = -1, 0

    def resolve(self) -> None:
        """Wake somebody.

        Raises:
            Deadlock: there is no way, or a timeout would be the only one and is not to be.
            RanksFailed: the same, after host code of other ranks has raised.
        """
        self._tries = self._tries + 1 if self._version == self._sim.version else 0
        if self._tries == 0:
            self._wake_all(_PATIENCE[0])
        elif self._tries == 1:
            self._finish_stores()
            self._wake_all(_PATIENCE[1], notes=True)
        elif self._tries > 2 or not self._wake_the_patient():
            self._jump()
            self._tries = -1
        self._version = self._sim.version

    def _wake_all(self, patience: int, notes: bool = False) -> None:
        for p in self._sim.live.values():
            p.patience, p.notes = patience, notes
        self._sim.wake_all()
        for host in self._sim.hosts:
            host.checked = -1

    def _wake_the_patient(self) -> bool:
        """Let programs that have no deadline, neither of their own nor another's, go on for long:
        they may count their rounds. False: there are none."""
        waiting = [p for p in self._sim.live.values() if p.asleep]
        timed = {(p.rank, address) for p in waiting if p.reads_clock for address in _polled(p)}
        patient = [
            p
            for p in waiting
            if not p.reads_clock and not any((p.rank, address) in timed for address in _polled(p))
        ]
        for p in patient:
            p.patience, p.notes = _PATIENCE[2], False
            self._sim.wake(p)
        return bool(patient)

    def _finish_stores(self) -> None:
        """All stores reach everybody, and nobody sees the past."""
        sim = self._sim
        for p in sim.live.values():
            sim.memory.flush(p)
        for rank, stream in enumerate(sim.streams):
            sim.memory.publish_rank(rank)
            for p in stream.queue[0].left_behind if stream.queue and rank not in sim.dead else ():
                sim.memory.flush(p)
        for p in sim.live.values():
            p.view = p.rank_view = sim.memory.now

    def _jump(self) -> None:
        sim = self._sim
        waiting = [p for p in sim.live.values() if p.asleep]
        deadlines = [p.deadline for p in waiting if p.deadline is not None]
        deadlines += [sim.now_ns + _SECOND for p in waiting if p.deadline is None and p.reads_clock]
        deadlines += [
            host.deadline
            for host in sim.hosts
            if host.deadline is not None and host.rank not in sim.dead
        ]
        if not deadlines or not sim.timeouts:
            programs = list(sim.live.values())
            sim.raise_errors(failure_report.waiters(sim, programs))
            raise Deadlock(failure_report.deadlock(sim, programs, bool(deadlines)))
        sim.now_ns = max(sim.now_ns, min(deadlines)) + 1
        self._wake_all(0)


def _polled(p: Program) -> Iterator[int]:
    """Addresses that it reads round after round."""
    return (address for addresses in p.round.values() for address in addresses.tolist())
