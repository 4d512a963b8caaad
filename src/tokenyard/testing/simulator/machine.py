"""What all parts of a simulation work on: the clock, memory, programs and hosts; and how programs
take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import greenlet

from tokenyard.testing.simulator.addresses import AddressBook
from tokenyard.testing.simulator.hardware import Hardware
from tokenyard.testing.simulator.host import Host
from tokenyard.testing.simulator.program import Alarms, Launch, Program
from tokenyard.testing.simulator.weak import WeakMemory


class Machine:
    """The state of a simulation. See :class:`Simulator` for arguments and attributes."""

    def __init__(
        self,
        world_size: int,
        seed: int,
        resident: int | None,
        strict: bool,
        kill: dict[int, int],
        hardware: dict[str, Any],
    ) -> None:
        self.world_size, self.seed, self.resident = world_size, seed, resident
        self.rng = Random(seed)
        self.hardware = Hardware.draw(self.rng)._replace(**hardware)
        self.speeds = self.hardware.speeds(self.rng, world_size)
        self.now_ns, self.steps, self.trace = 1_000_000, 0, list[int]()
        self.addresses = AddressBook(strict)
        self.alarms = Alarms(self.wake)
        self.memory = WeakMemory(world_size, self.rng, self.hardware.stale, self.alarms.ring)
        self.streams: list[deque[Launch]] = [deque() for _ in range(world_size)]
        self.hosts: list[Host] = []
        self.errors: dict[int, BaseException] = {}  # of host code, by rank
        self.live: dict[int, Program] = {}
        self.ready: list[Program] = []
        self.running: Program | None = None
        self.dead: set[int] = set()
        self.kills = sorted((step, rank) for rank, step in kill.items())
        self.counters: list[Callable[[], int]] = []  # of what else happens, see :attr:`version`
        self._events = 0
        self.hub = greenlet.getcurrent()

    @property
    def version(self) -> int:
        """Changes whenever something happened that somebody could wait for."""
        return self.memory.now + self._events + sum(count() for count in self.counters)

    def happened(self) -> None:
        """Something happened that somebody could wait for."""
        self._events += 1

    @property
    def kill_is_due(self) -> bool:
        """Whether a rank must die before anything else."""
        return bool(self.kills) and self.steps >= self.kills[0][0]

    # What programs call in their coroutines

    def give_way(self, p: Program) -> None:
        """Let somebody else go on, or the same program again."""
        self.ready.append(p)
        self.hub.switch()

    def sleep(self, p: Program) -> None:
        """Let others go on until something has changed that ``p`` has read."""
        p.asleep = True
        p.nap += 1
        self.alarms.set(p)
        self.hub.switch()
        p.round.clear()

    # What others call

    def wake(self, p: Program) -> None:
        """End a program's sleep."""
        p.asleep = False
        self.ready.append(p)

    def wake_all(self) -> None:
        """End all sleeps."""
        for p in self.live.values():
            if p.asleep:
                self.wake(p)
