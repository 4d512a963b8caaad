"""What programs do to memory: every operation is a step, at which time passes, hardware works and
others may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from tokenyard.testing.simulator.pages import Addresses, Index, spans
from tokenyard.testing.simulator.program import Program
from tokenyard.testing.simulator.simulation_errors import AddressError, Livelock, Race
from tokenyard.testing.simulator.weak import Lanes, Values

if TYPE_CHECKING:
    from tokenyard.testing.simulator.scheduler import Simulator


class Operations:
    """Called in the programs' coroutines; ``sim.running`` is the caller.

    Args:
        tick_ns: how far the clock goes per operation.
        max_steps: operations after which the simulation is given up.
    """

    def __init__(self, sim: Simulator, tick_ns: int, max_steps: int) -> None:
        self._sim, self._tick, self._max_steps = sim, tick_ns, max_steps

    @property
    def caller(self) -> Program:
        """The program that runs."""
        p = self._sim.running
        assert p is not None
        return p

    def now_ns(self) -> int:
        """The clock, read by a kernel."""
        self.caller.reads_clock = True
        self._sim.now_ns += 1
        return self._sim.now_ns

    def compares_clock(self, distance: int) -> None:
        """A kernel compares the clock with a time that is so many ns away: it will wake up by
        itself then.
        """
        self.caller.deadline = self._sim.now_ns + distance

    def reads_anew(self, addresses: list[int]) -> None:
        """A kernel has read these places."""
        for address in addresses:
            self.caller.compared.pop(address, None)

    def compares(self, addresses: list[int], values: list[Any]) -> None:
        """A kernel compares what it has read at these places with these values."""
        compared = self.caller.compared
        for address, value in zip(addresses, values, strict=True):
            known = compared.setdefault(address, [])
            if value not in known:
                known.append(value)

    def barrier(self) -> None:
        """All threads of the program meet."""
        p = self.caller
        self.check_late_reads(p)
        self._sim.memory.barrier(p)

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
        p = self._step(addresses, values.itemsize)
        p.advances()
        self._sim.happened()
        where = spans(addresses, values.itemsize)
        again = self._sim.memory.rereads(
            p, where, values.itemsize, _lanes(p, addresses, shape, taking)
        )
        if again is not None:
            raise Race(
                f"{p.name} stores to {self._sim.addresses.describe(again)}, which it has read "
                f"without a barrier in between, so "
                f"that its other threads may still have to read it (seed {self._sim.seed})"
            )
        self._sim.memory.store(p, addresses, where, values)

    def load(
        self,
        addresses: Addresses,
        read: Callable[[], Values],
        size: int,
        shape: tuple[int, ...],
        taking: Index,
    ) -> Values:
        """A plain load of lanes as in :meth:`store`; ``read()`` gives what real memory holds."""
        p = self._step(addresses, size)
        where, lanes = spans(addresses, size), _lanes(p, addresses, shape, taking)
        values = read()
        if not self._sim.memory.load(p, where, values, lanes) and self._is_fruitless(
            p, addresses, size, values
        ):
            self._sleep(p)
            values = read()
            self._sim.memory.load(p, where, values, lanes)
            self._is_fruitless(p, addresses, size, values)
        return values

    def atomic(
        self,
        addresses: Addresses,
        size: int,
        read: Callable[[], Values],
        act: Callable[[], Values],
        order: tuple[bool, bool, bool],
    ) -> Values:
        """``act()`` on real memory. ``order``: acquires, releases, with sys scope."""
        acquires, releases, everywhere = order
        p = self._step(addresses, size)
        if releases:
            self._sim.memory.release(p, addresses, everywhere)
        result, changed = self._act(p, addresses, size, read, act)
        if not changed and self._is_fruitless(p, addresses, size, read()):
            self._sleep(p)
            result, changed = self._act(p, addresses, size, read, act)
            if not changed:
                self._is_fruitless(p, addresses, size, read())
        if acquires:
            self._sim.memory.acquire(p, addresses, everywhere)
        return result

    def network_step(self) -> Program:
        """The caller makes a call of the network."""
        sim, p = self._sim, self.caller
        sim.steps += 1
        sim.now_ns += self._tick
        p.advances()
        sim.happened()
        if sim.rng.random() < sim.hardware.switch or sim.kill_is_due:
            sim.give_way(p)
        return p

    def check_late_reads(self, p: Program) -> None:
        """At a barrier or the end of a program.

        Raises:
            Race: something that it read before an earlier release, without a barrier in between,
                was overwritten after it.
        """
        found = self._sim.memory.overwritten(p) if p.exposed else None
        if found is not None:
            address, writer = found
            by = writer.name if isinstance(writer, Program) else f"rank {writer.rank}"
            raise Race(
                f"{p.name} read {self._sim.addresses.describe(address)} and released without a "
                f"barrier in between, so that its "
                f"other threads may still be reading; {by} has overwritten it (seed "
                f"{self._sim.seed})"
            )

    def _step(self, addresses: Addresses, size: int) -> Program:
        """Check the addresses; then time passes, hardware works, and another program may go on."""
        sim, p = self._sim, self.caller
        try:
            sim.addresses.check(p.rank, addresses, size)
        except AddressError as error:
            raise AddressError(f"{p.name} touches {error} (seed {sim.seed})") from None
        sim.steps += 1
        sim.now_ns += self._tick
        if (
            sim.hardware.early
            and (p.fresh_log or p.fenced_log)
            and sim.rng.random() < sim.hardware.early
        ):
            sim.memory.leak(p)
        if sim.rng.random() < sim.hardware.switch or sim.kill_is_due:
            sim.give_way(p)
        if sim.steps > self._max_steps:
            raise Livelock(f"more than max_steps ({self._max_steps}) operations (seed {sim.seed})")
        return p

    def _act(
        self,
        p: Program,
        addresses: Addresses,
        size: int,
        read: Callable[[], Values],
        act: Callable[[], Values],
    ) -> tuple[Values, bool]:
        """The result, and whether memory has changed."""
        memory, where = self._sim.memory, spans(addresses, size)
        memory.before_atomic(p, where, size)
        before = read()
        result = act()
        changed = bool((read() != before).any())
        if changed:
            p.advances()
            self._sim.happened()
            memory.after_atomic(p, where, before)
            self._sim.alarms.ring_at(addresses)
        return result, changed

    def _is_fruitless(self, p: Program, addresses: Addresses, size: int, values: Values) -> bool:
        """Whether the program has come round to this read, and nothing it read has changed."""
        seen = p.observe(addresses, size, values.tobytes())
        if seen is False:
            self._sim.happened()
        return seen is True

    def _sleep(self, p: Program) -> None:
        self._sim.sleep(p)
        p.round.clear()


def _lanes(p: Program, addresses: Addresses, shape: tuple[int, ...], taking: Index) -> Lanes | None:
    """These lanes if the tensor has one for each thread of the program."""
    return Lanes(shape, taking, addresses) if prod(shape) >= p.launch.threads else None
