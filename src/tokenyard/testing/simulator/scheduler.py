"""The simulator: what runs, and who runs next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import greenlet
import numpy as np
from numpy.typing import NDArray

from tokenyard.testing.interpreter import bind
from tokenyard.testing.simulator import hooks
from tokenyard.testing.simulator.addresses import GUARD
from tokenyard.testing.simulator.host import Host
from tokenyard.testing.simulator.machine import Machine
from tokenyard.testing.simulator.network import Network
from tokenyard.testing.simulator.program import Launch, Program
from tokenyard.testing.simulator.simulation_errors import ProgramError, SimulationError
from tokenyard.testing.simulator.standstill import Standstill, raise_errors

Grid: TypeAlias = "int | np.integer[Any] | Sequence[int]"

_MOST_SLEEP = 20_000
"""Steps after which sleepers look again: whether a poller has come round is a guess, and others may
never be at rest."""


class Simulator(Machine):
    """Runs programs and host code of all ranks, one step of one of them at a time, in an order that
    the seed decides.

    Args:
        world_size: number of ranks.
        seed: one seed is one schedule, and one kind of hardware.
        timeouts: when all wait, let the clock jump to the next deadline, so that waits time out;
            otherwise report a deadlock.
        resident: programs of a rank that may run at once; None: any number.
        strict: programs may touch registered memory only.
        kill: rank -> step at which it stops for ever.
        max_steps: operations of programs after which the simulation is given up.
        hardware: fields of :class:`Hardware` that are not to be drawn.

    Raises:
        ValueError: fewer than 1 rank or resident program, a rank to kill that is none, an unknown
            option.

    A program is taken to wait when it comes round to a read again, and nothing that it has read
    since its last store, or atomic that changed something, is different: it sleeps until one of
    these places is written. That is a guess (a loop may count its rounds), so before the clock
    jumps or a :class:`Deadlock` is reported, all go on for 100 more rounds, and then, once in a
    wait, for 3000 more those that read no clock, and poll nothing together with a program of their
    rank that does. Who counts further is taken to wait. It is no guess of a program that meanwhile
    is where it was before, with the same values in all variables: that one sleeps on until a place
    is written or the clock reaches what it compares it with (at every other jump all look).

    Attributes:
        now_ns: the clock. steps: operations of programs so far.
        trace: who ran, switch by switch: programs by serial number, host code as ``-1 - rank``.
    """

    _started = _woken_at = 0

    @cached_property
    def network(self) -> Network:
        """What nodes without common memory send each other."""
        return Network(self)

    @cached_property
    def _standstill(self) -> Standstill:
        return Standstill(self)

    # What there is

    def allocate(self, size: int, name: str = "region") -> NDArray[np.uint8]:
        """Zeroed bytes that programs of all ranks may touch, between zones that nobody may."""
        if size < 1:
            raise ValueError(f"size ({size}) must be at least 1: give the number of bytes")
        whole = np.zeros(size + 3 * GUARD, np.uint8)
        start = -(-(whole.ctypes.data + GUARD) // GUARD) * GUARD - whole.ctypes.data
        self.kept.append(whole)
        self.addresses.add(whole.ctypes.data + start, size, None, name, GUARD, shared=True)
        return whole[start : start + size]

    def register(
        self, buffer: Any, rank: int | None = None, name: str = "buffer", shared: bool = False
    ) -> int:
        """Let programs of ``rank`` (None, or ``shared``: of all) touch an array or CPU tensor and
        what lies between its elements, and keep it; parts again for further ranks. The address of
        its first element."""
        if rank is not None:
            self.check_rank(rank, "register()")
        first, low, size = _extent(buffer)
        self.kept.append(buffer)
        if size:
            self.addresses.add(low, size, rank, name, shared=shared or rank is None)
        return first

    def name(self, address: int, size: int, name: str) -> None:
        """What messages call ``size`` bytes from ``address`` on."""
        self.addresses.name(address, size, name)

    def launch(
        self, rank: int, kernel: Any, grid: Grid, *args: int, num_warps: int = 4, **constants: Any
    ) -> None:
        """Queue ``grid`` programs (up to three dimensions; 0: no work) of ``32 * num_warps``
        threads of a ``@triton.jit`` function behind the rank's earlier launches. Constants with
        defaults may be left out. ValueError: something does not fit the kernel, the ranks or
        Triton."""
        self.check_rank(rank, "launch()")
        if num_warps < 1 or num_warps & (num_warps - 1):
            raise ValueError(
                f"num_warps ({num_warps}) must be a power of two from 1 on, as Triton takes it"
            )
        dims = _grid_of(grid)
        bound, function = bind(kernel, args, constants), kernel.rewrite()
        launch = Launch(rank, kernel.__name__, dims, 32 * num_warps, partial(function, **bound))
        if launch.size:
            self.streams[rank].append(launch)
            if len(self.streams[rank]) == 1:
                self._start_programs(launch)

    def kill(self, rank: int, at_step: int) -> None:
        """Let a rank's programs and host code stop for ever at that step."""
        self.check_rank(rank, "kill()")
        self.stops = sorted([*self.stops, (at_step, rank, True)])

    def freeze(self, rank: int, at_step: int) -> None:
        """Let a rank's programs and host code stop at that step, until :meth:`thaw`."""
        self.check_rank(rank, "freeze()")
        self.stops = sorted([*self.stops, (at_step, rank, False)])

    def thaw(self, rank: int) -> None:
        """Let a frozen rank go on; one that would have frozen later does not."""
        self.stops = [each for each in self.stops if each[1:] != (rank, False)]
        self.ready += self.frozen.pop(rank, [])
        self.happened()

    # The run

    def run(self) -> None:
        """Until all programs and all host code have ended (those of dead ranks aside); then all
        stores are in real memory.

        Raises:
            ProgramError: a program raised.
            RanksFailed: host code did. Deadlock, Livelock, Race, AddressError: as they say.
        """
        self.hub = greenlet.getcurrent()
        with hooks.installed(self, self.network):
            try:
                while self._run_one():
                    while self.stop_is_due:
                        self._stop_one()
                for rank in set(range(self.world_size)) - self.dead:
                    self.memory.publish(rank)
            finally:
                self._end_all()
        raise_errors(self)

    def run_hosts(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """:meth:`run` with host code, one function per rank. Their results."""
        self.hosts = [Host(rank, body, self.speeds[rank]) for rank, body in enumerate(bodies)]
        everybody = list(self.hosts)
        self.run()
        return [host.result for host in everybody]

    def _run_one(self) -> bool:
        """Let somebody go on. False if all have ended."""
        self.network.pass_time()
        if self.steps >= self._woken_at + _MOST_SLEEP:
            self._woken_at = self.steps
            self.wake_all()
        if self.hardware.late and self.rng.random() < self.hardware.late:
            self._leak_late()
        for _ in range(8 if self.ready or self.hosts else 0):
            at = self.rng.randrange(len(self.ready) + len(self.hosts))
            if at >= len(self.ready):
                host = self.hosts[at - len(self.ready)]
                if self._may_run(host) and self.rng.random() < host.speed:
                    self._resume_host(host)
                    return True
            elif self.ready[at].speed >= 1.0 or self.rng.random() < self.ready[at].speed:
                self._resume(at)
                return True
        host = None if self.ready else next(filter(self._may_run, self.hosts), None)
        if self.ready:
            self._resume(self.rng.randrange(len(self.ready)))
        elif host is not None:
            self._resume_host(host)
        elif not self.live and all(host.rank in self.dead for host in self.hosts):
            return False
        elif self.network.on_way:
            self.network.deliver_one()
        else:
            self._standstill.resolve()
        return True

    def _resume(self, at: int) -> None:
        ready = self.ready
        p, ready[at] = ready[at], ready[-1]
        ready.pop()
        self.trace.append(p.serial)
        self.running = p
        hooks.place(p)
        if p.go_on():
            self._ended(p)
        self.running = None

    def _may_run(self, host: Host) -> bool:
        if host.rank in self.dead or host.rank in self.frozen:
            return False
        if host.ready is None or (host.deadline is not None and self.now_ns >= host.deadline):
            return True
        if host.checked == self.version:
            return False
        try:
            ready = host.ready()
        except Exception:
            return True  # it will raise in the host's own code
        if not ready:
            host.checked = self.version
        return ready

    def _resume_host(self, host: Host) -> None:
        self.trace.append(-1 - host.rank)
        self.now_ns += 1
        polls = host.polls
        host.resume()
        if not polls or host.over:
            self._events += 1
        if host.over:
            self.hosts.remove(host)
            if host.error is not None:
                self.errors[host.rank] = host.error

    # Launches

    def _start_programs(self, launch: Launch) -> None:
        while launch.started < launch.size and (
            self.resident is None or len(launch.running) < self.resident
        ):
            self._started += 1
            speed = self.hardware.speed(self.rng, "program") * self.speeds[launch.rank]
            p = Program(launch, launch.started, self._started, speed, self.memory.now)
            launch.started += 1
            launch.running.append(p)
            self.live[p.serial] = p
            self.ready.append(p)

    def _ended(self, p: Program) -> None:
        if isinstance(p.error, SimulationError):
            raise p.error
        if p.error is not None:
            raise ProgramError(f"{p.name} raised {p.error!r} (seed {self.seed})") from p.error
        self.check_late_reads(p)
        # What it never released need not arrive at once: a flag may, before the data that was
        # stored first
        leaks = (p.fresh.log or p.fenced.log) and (self.hardware.early or self.hardware.late)
        if leaks and self.rng.random() < 0.75:
            self.memory.leak(p)
        del self.live[p.serial]
        p.launch.running.remove(p)
        p.launch.left_behind.append(p)
        self._events += 1
        queue = self.streams[p.rank]
        if p.launch.started == p.launch.size and not p.launch.running:
            self._finish(p.launch)
            queue.popleft()
        if queue:
            self._start_programs(queue[0])
        if not self.live:
            self.memory.forget_past()

    def _finish(self, launch: Launch) -> None:
        """Publish a kernel's stores to later ones of its rank; to others where they look."""
        exposed = [p for p in launch.left_behind if p.exposed]
        for p in launch.left_behind:
            self.memory.bundle(p, p.give_away())
        self.memory.publish_private(launch.rank, self.addresses.shared)
        if exposed:
            self.memory.publish(launch.rank)
        for p in exposed:  # its threads may have lagged behind until now
            self.check_late_reads(p)
        launch.left_behind.clear()

    def _leak_late(self) -> None:
        rank = self.rng.randrange(self.world_size)
        self.memory.publish_one(rank)
        queue = self.streams[rank]
        if queue and queue[0].left_behind:
            self.memory.leak(self.rng.choice(queue[0].left_behind))

    def _stop_one(self) -> None:
        _, rank, dies = self.stops.pop(0)
        if dies:
            self.dead.add(rank)
            self.frozen.pop(rank, None)
            for p in [p for p in self.live.values() if p.rank == rank]:
                self.memory.leak(p)  # some of what it had under way still arrives
                del self.live[p.serial]
                self.alarms.forget(p)
        else:
            self.frozen.setdefault(rank, []).extend(p for p in self.ready if p.rank == rank)
        self.ready = [p for p in self.ready if p.rank != rank]

    def _end_all(self) -> None:
        for stream in self.streams:
            for launch in stream:
                for p in launch.running:
                    p.end()
        for host in list(self.hosts):
            host.end()


def _grid_of(grid: Grid) -> tuple[int, int, int]:
    """A grid of one to three dimensions as three. ValueError: more or none, or one is negative."""
    dims = [int(grid)] if isinstance(grid, int | np.integer) else [int(dim) for dim in grid]
    if not 1 <= len(dims) <= 3:
        raise ValueError(
            f"a grid ({grid}) must have 1 to 3 dimensions, not {len(dims)}: fold some into one"
        )
    if min(dims) < 0:
        raise ValueError(
            f"a grid ({grid}) must not be negative: give the number of programs, 0 for no work"
        )
    x, y, z = (*dims, 1, 1)[:3]
    return x, y, z


def _extent(buffer: Any) -> tuple[int, int, int]:
    """Of an array or CPU tensor: address of its first element, its lowest address, and bytes from
    there to the end of its highest element; strides may leave gaps between."""
    shape: list[int] = list(buffer.shape)
    if isinstance(buffer, np.ndarray):
        first, strides, size = int(buffer.ctypes.data), list(buffer.strides), buffer.itemsize
    else:
        first, size = int(buffer.data_ptr()), int(buffer.element_size())
        strides = [stride * size for stride in buffer.stride()]
    if 0 in shape:
        return first, first, 0
    reaches = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return first, first + low, high - low + size
