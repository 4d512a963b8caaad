"""What all parts of a simulation work on, and what programs do to it, and how they take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod
from random import Random
from typing import Any, NamedTuple

import greenlet

from tokenyard.testing.simulator.addresses import AddressBook
from tokenyard.testing.simulator.host import Host
from tokenyard.testing.simulator.pages import Addresses, Index, Values, gather, spans
from tokenyard.testing.simulator.program import Alarms, Launch, Program
from tokenyard.testing.simulator.simulation_errors import AddressError, Livelock, Race
from tokenyard.testing.simulator.weak import Lanes, WeakMemory

_TICK_NS = 10
"""How far the clock goes per operation of a program."""


class Hardware(NamedTuple):
    """How the simulated hardware behaves: likelihoods per operation of a program, and how unequal
    programs are. Drawn from the seed, so that seeds differ in kind and not in detail only."""

    switch: float
    """Another program goes on."""
    early: float
    """Some of the program's pending stores reach everybody."""
    late: float
    """Stores that ended programs left behind reach somebody (per switch)."""
    stale: float
    """A plain load looks into the past."""
    skew: str
    """Speeds: ``even``, or drawn per ``program`` or per ``rank``."""

    @classmethod
    def draw(cls, rng: Random) -> Hardware:
        return cls(
            switch=rng.choice((0.1, 0.3, 0.6, 0.9)),
            early=rng.choice((0.0, 0.02, 0.1, 0.3)),
            late=rng.choice((0.0, 0.02, 0.1)),
            stale=rng.choice((0.1, 0.3, 0.6)),
            skew=rng.choice(("even", "program", "rank")),
        )

    def speed(self, rng: Random, of: str) -> float:
        """Of one ``program`` or ``rank``, in (0, 1]."""
        return rng.choice((1.0, 0.3, 0.1, 0.02)) if self.skew == of else 1.0


class Machine:
    """The state of a simulation. See :class:`Simulator` for arguments and attributes."""

    def __init__(
        self,
        world_size: int = 1,
        *,
        seed: int = 0,
        timeouts: bool = False,
        resident: int | None = None,
        strict: bool = False,
        kill: dict[int, int] | None = None,
        max_steps: int = 20_000_000,
        **hardware: Any,
    ) -> None:
        if world_size < 1:
            raise ValueError(
                f"world_size ({world_size}) must be at least 1: give the number of ranks"
            )
        if resident is not None and resident < 1:
            raise ValueError(
                f"resident ({resident}) must be at least 1, or None for any number of programs"
            )
        unknown = sorted(set(hardware) - set(Hardware._fields))
        if unknown:
            raise ValueError(
                f"unknown option(s) {', '.join(unknown)}: besides its own arguments a Simulator "
                f"takes {', '.join(Hardware._fields)}"
            )
        self.world_size, self.seed, self.resident = world_size, seed, resident
        for rank in kill or ():
            self.check_rank(rank, "kill")
        self.timeouts, self._max_steps = timeouts, max_steps
        self.rng = Random(seed)
        self.hardware = Hardware.draw(self.rng)._replace(**hardware)
        self.speeds = [self.hardware.speed(self.rng, "rank") for _ in range(world_size)]
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
        self.frozen: dict[int, list[Program]] = {}  # by rank: its programs that could go on
        # steps at which ranks stop, and whether for ever
        self.stops = sorted((step, rank, True) for rank, step in (kill or {}).items())
        self.counters: list[Callable[[], int]] = []  # of what else happens, see :attr:`version`
        self._events = 0
        self.kept: list[Any] = []  # buffers that programs may touch
        self.hub = greenlet.getcurrent()

    def check_rank(self, rank: int, what: str) -> None:
        """Raise ValueError unless there is such a rank. ``what`` asks for it."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{what}: rank ({rank}) must be from 0 to {self.world_size - 1}: give one of "
                f"these, or more ranks by world_size"
            )

    @property
    def version(self) -> int:
        """Changes whenever something happened that somebody could wait for."""
        return sum([count() for count in self.counters], self.memory.now + self._events)

    def happened(self) -> None:
        self._events += 1

    @property
    def stop_is_due(self) -> bool:
        """Whether a rank must die, or freeze, before anything else."""
        return bool(self.stops) and self.steps >= self.stops[0][0]

    def wake(self, p: Program) -> None:
        p.asleep = p.waits = False
        self.alarms.forget(p)
        self.frozen.get(p.rank, self.ready).append(p)

    def wake_all(self) -> None:
        """But those that are proved to wait."""
        for p in self.live.values():
            if p.asleep and not p.waits:
                self.wake(p)

    # What programs do, in their coroutines. Every operation is a step, at which time passes,
    # hardware works and others may go on.

    @property
    def caller(self) -> Program:
        assert self.running is not None
        return self.running

    def read_clock(self) -> int:
        self.caller.reads_clock = True
        self.now_ns += 1
        return self.now_ns

    def compares_clock(self, ahead: int) -> None:
        """A kernel compares the clock with a time so many ns ahead, at which it will wake up."""
        self.caller.compares_clock(self.now_ns, self.now_ns + ahead)

    def barrier(self) -> None:
        """All threads of the program meet."""
        p = self.caller
        self.check_late_reads(p)
        self.memory.barrier(p)

    def store(
        self, addresses: Addresses, values: Values, shape: tuple[int, ...], taking: Index
    ) -> None:
        """A plain store to lanes of a tensor of this shape; ``taking``: which of its flat elements
        take part.

        Race: the program has read one of them since its last barrier. Several threads load the
        same lane of a small tensor; of one with as many lanes as threads, each may store to
        exactly what it has loaded.
        """
        size = values.itemsize
        p = self._step(addresses, size)
        p.advances()
        self.happened()
        where = spans(addresses, size)
        again = self.memory.rereads(p, where, size, _lanes(p, addresses, shape, taking))
        if again is not None:
            raise Race(
                f"{p.name} stores to {self.addresses.describe(again)}, which it has read "
                f"without a barrier in between, so "
                f"that its other threads may still have to read it (seed {self.seed})"
            )
        self.memory.store(p, addresses, where, values)

    def load(
        self, addresses: Addresses, size: int, shape: tuple[int, ...], taking: Index
    ) -> Values:
        """A plain load of lanes as in :meth:`store`."""
        memory, p = self.memory, self._step(addresses, size)
        where, lanes = spans(addresses, size), _lanes(p, addresses, shape, taking)
        values = gather(addresses, size)
        stale = memory.load(p, where, values, lanes)
        if stale:
            p.states.clear()
        elif self._is_fruitless(p, addresses, values):
            self.sleep(p)
            values = gather(addresses, size)
            memory.load(p, where, values, lanes)
            self._is_fruitless(p, addresses, values)
        return values

    def atomic(
        self,
        addresses: Addresses,
        size: int,
        act: Callable[[], Values],
        order: tuple[bool, bool, bool],
    ) -> Values:
        """``act()`` on real memory. ``order``: acquires, releases, with sys scope."""
        acquires, releases, everywhere = order
        memory, p = self.memory, self._step(addresses, size)
        if releases:
            memory.release(p, addresses, everywhere)
        result, changed = self._act(p, addresses, size, act)
        if not changed and self._is_fruitless(p, addresses, gather(addresses, size)):
            self.sleep(p)
            result, changed = self._act(p, addresses, size, act)
            if not changed:
                self._is_fruitless(p, addresses, gather(addresses, size))
        if acquires:
            memory.acquire(p, addresses, everywhere)
        return result

    def network_call(self) -> Program:
        """The caller, which makes a call of the network."""
        p = self.caller
        p.advances()
        self.happened()
        self._pass_time(p)
        return p

    def check_late_reads(self, p: Program) -> None:
        """At a barrier or the end of a program. Race: something that it read before an earlier
        release, without a barrier in between, was overwritten after it."""
        found = self.memory.overwritten(p) if p.exposed else None
        if found is not None:
            address, writer = found
            by = writer.name if isinstance(writer, Program) else f"rank {writer.rank}"
            raise Race(
                f"{p.name} read {self.addresses.describe(address)} and released without a "
                f"barrier in between, so that its other threads may still be reading; {by} has "
                f"overwritten it (seed {self.seed})"
            )

    def _step(self, addresses: Addresses, size: int) -> Program:
        """Check the addresses; then time passes, hardware works, and another program may go on."""
        p = self.caller
        try:
            self.addresses.check(p.rank, addresses, size)
        except AddressError as error:
            raise AddressError(f"{p.name} touches {error} (seed {self.seed})") from None
        early = self.hardware.early
        if early and (p.fresh.log or p.fenced.log) and self.rng.random() < early:
            self.memory.leak(p)
        self._pass_time(p)
        return p

    def _pass_time(self, p: Program) -> None:
        self.steps += 1
        self.now_ns += _TICK_NS
        if self.rng.random() < self.hardware.switch or self.stop_is_due:
            self.ready.append(p)  # somebody else goes on, or the same program again
            self.hub.switch()
        if self.steps > self._max_steps:
            raise Livelock(f"more than max_steps ({self._max_steps}) operations (seed {self.seed})")

    def _act(
        self, p: Program, addresses: Addresses, size: int, act: Callable[[], Values]
    ) -> tuple[Values, bool]:
        """The result, and whether memory has changed."""
        memory, where = self.memory, spans(addresses, size)
        memory.before_atomic(p, where, size)
        before = gather(addresses, size)
        result = act()
        changed = gather(addresses, size).tobytes() != before.tobytes()
        if changed:
            p.advances()
            self.happened()
            memory.after_atomic(p, where, before)
        return result, changed

    def _is_fruitless(self, p: Program, addresses: Addresses, values: Values) -> bool:
        """Whether the program has come round to this read, and nothing it read has changed."""
        seen = p.observe(addresses, values.itemsize, values.tobytes())
        if seen is False:
            self.happened()
        return seen is True

    def sleep(self, p: Program) -> None:
        """Let others go on until something has changed that ``p`` has read."""
        p.asleep = True
        self.alarms.set(p)
        self.hub.switch()
        p.begin_round()


def _lanes(p: Program, addresses: Addresses, shape: tuple[int, ...], taking: Index) -> Lanes | None:
    """These lanes if the tensor has one for each thread of the program."""
    return Lanes(shape, taking, addresses) if prod(shape) >= p.launch.threads else None
