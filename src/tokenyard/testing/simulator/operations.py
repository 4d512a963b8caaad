"""What programs do to memory: every operation is a step, at which time passes, hardware works and
others may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tokenyard.testing.simulator.machine import Machine
from tokenyard.testing.simulator.pages import Addresses, Index, Values, gather, spans
from tokenyard.testing.simulator.program import Program
from tokenyard.testing.simulator.simulation_errors import AddressError, Livelock, Race
from tokenyard.testing.simulator.weak import Lanes


class Operations:
    """Called in the programs' coroutines; ``machine.running`` is the caller.

    Args:
        tick_ns: how far the clock goes per operation.
        max_steps: operations after which the simulation is given up.
    """

    def __init__(self, machine: Machine, tick_ns: int, max_steps: int) -> None:
        self._machine, self._tick, self._max_steps = machine, tick_ns, max_steps

    @property
    def caller(self) -> Program:
        """The program that runs."""
        p = self._machine.running
        assert p is not None
        return p

    def now_ns(self) -> int:
        """The clock, read by a kernel."""
        self.caller.reads_clock = True
        self._machine.now_ns += 1
        return self._machine.now_ns

    def compares_clock(self, distance: int) -> None:
        """A kernel compares the clock with a time that is so many ns away: it will wake up by
        itself then.
        """
        self.caller.deadline = self._machine.now_ns + distance

    def barrier(self) -> None:
        """All threads of the program meet."""
        p = self.caller
        self.check_late_reads(p)
        self._machine.memory.barrier(p)

    def store(
        self, addresses: Addresses, values: Values, shape: tuple[int, ...], taking: Index
    ) -> None:
        """A plain store to lanes of a tensor of this shape; ``taking``: which of its flat elements
        take part.

        Raises:
            Race: the program has read one of them since its last barrier. Several threads load the
                same lane of a small tensor; of one with at least as many lanes as the program has
                threads, each may store to exactly what it has loaded.
        """
        machine, size = self._machine, values.itemsize
        p = self._step(addresses, size)
        p.advances()
        machine.happened()
        where = spans(addresses, size)
        again = machine.memory.rereads(p, where, size, _lanes(p, addresses, shape, taking))
        if again is not None:
            raise Race(
                f"{p.name} stores to {machine.addresses.describe(again)}, which it has read "
                f"without a barrier in between, so "
                f"that its other threads may still have to read it (seed {machine.seed})"
            )
        machine.memory.store(p, addresses, where, values)

    def load(
        self, addresses: Addresses, size: int, shape: tuple[int, ...], taking: Index
    ) -> Values:
        """A plain load of lanes as in :meth:`store`."""
        memory, p = self._machine.memory, self._step(addresses, size)
        where, lanes = spans(addresses, size), _lanes(p, addresses, shape, taking)
        values = gather(addresses, size)
        stale = memory.load(p, where, values, lanes)
        if not stale and self._is_fruitless(p, addresses, values):
            self._machine.sleep(p)
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
        memory, p = self._machine.memory, self._step(addresses, size)
        if releases:
            memory.release(p, addresses, everywhere)
        result, changed = self._act(p, addresses, size, act)
        if not changed and self._is_fruitless(p, addresses, gather(addresses, size)):
            self._machine.sleep(p)
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
        self._machine.happened()
        self._pass_time(p)
        return p

    def check_late_reads(self, p: Program) -> None:
        """At a barrier or the end of a program.

        Raises:
            Race: something that it read before an earlier release, without a barrier in between,
                was overwritten after it.
        """
        machine = self._machine
        found = machine.memory.overwritten(p) if p.exposed else None
        if found is not None:
            address, writer = found
            by = writer.name if isinstance(writer, Program) else f"rank {writer.rank}"
            raise Race(
                f"{p.name} read {machine.addresses.describe(address)} and released without a "
                f"barrier in between, so that its other threads may still be reading; {by} has "
                f"overwritten it (seed {machine.seed})"
            )

    def _step(self, addresses: Addresses, size: int) -> Program:
        """Check the addresses; then time passes, hardware works, and another program may go on."""
        machine, p = self._machine, self.caller
        try:
            machine.addresses.check(p.rank, addresses, size)
        except AddressError as error:
            raise AddressError(f"{p.name} touches {error} (seed {machine.seed})") from None
        early = machine.hardware.early
        if early and (p.fresh.log or p.fenced.log) and machine.rng.random() < early:
            machine.memory.leak(p)
        self._pass_time(p)
        return p

    def _pass_time(self, p: Program) -> None:
        machine = self._machine
        machine.steps += 1
        machine.now_ns += self._tick
        if machine.rng.random() < machine.hardware.switch or machine.kill_is_due:
            machine.give_way(p)
        if machine.steps > self._max_steps:
            raise Livelock(
                f"more than max_steps ({self._max_steps}) operations (seed {machine.seed})"
            )

    def _act(
        self, p: Program, addresses: Addresses, size: int, act: Callable[[], Values]
    ) -> tuple[Values, bool]:
        """The result, and whether memory has changed."""
        memory, where = self._machine.memory, spans(addresses, size)
        memory.before_atomic(p, where, size)
        before = gather(addresses, size)
        result = act()
        changed = bool((gather(addresses, size) != before).any())
        if changed:
            p.advances()
            self._machine.happened()
            memory.after_atomic(p, where, before)
        return result, changed

    def _is_fruitless(self, p: Program, addresses: Addresses, values: Values) -> bool:
        """Whether the program has come round to this read, and nothing it read has changed."""
        seen = p.observe(addresses, values.itemsize, values.tobytes())
        if seen is False:
            self._machine.happened()
        return seen is True


def _lanes(p: Program, addresses: Addresses, shape: tuple[int, ...], taking: Index) -> Lanes | None:
    """These lanes if the tensor has one for each thread of the program."""
    return Lanes(shape, taking, addresses) if prod(shape) >= p.launch.threads else None
