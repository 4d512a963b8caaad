"""Ranks with host code: :func:`simulate` runs one function per rank, as ``@distributed_test`` does,
in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenyard.memory.store import CooperativeStore
from tokenyard.testing.simulator.host import Host
from tokenyard.testing.simulator.memory import SimulatedMemory
from tokenyard.testing.simulator.scheduler import Simulator

_T = TypeVar("_T")
_NANOSECONDS = 1_000_000_000


class SimulatedStore(CooperativeStore):
    """The ranks' store, with waits on the simulated clock."""

    def __init__(self, sim: Simulator) -> None:
        super().__init__(lambda: None, lambda: sim.now_ns / _NANOSECONDS)
        self._sim = sim
        sim.counters.append(lambda: self.changes)

    def _wait_for(self, ready: Callable[[], bool], what: str, deadline: float) -> None:
        when = int(deadline * _NANOSECONDS)
        current_host(self._sim).pause(f"waits {what} in the store", ready, when)


class World:
    """What the ranks of one simulation share."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.store = SimulatedStore(sim)
        self._gathered: dict[Any, dict[int, int]] = {}
        self._regions: dict[Any, list[Tensor]] = {}
        self._closed: dict[Any, list[list[int]]] = {}

    def gathered(self, key: Any) -> dict[int, int]:
        """One number per rank."""
        return self._gathered.setdefault(key, {})

    def regions(self, key: Any, num_bytes: int) -> list[Tensor]:
        """All ranks' parts of a region; whoever comes first makes them."""
        if key not in self._regions:
            self._regions[key] = [
                torch.from_numpy(self.sim.allocate(num_bytes, f"region {key[1]} of rank {rank}"))
                for rank in range(self.sim.world_size)
            ]
            self.sim.network.add_region([part.data_ptr() for part in self._regions[key]], num_bytes)
        return self._regions[key]

    def retired(self, key: Any, addresses: list[int]) -> list[int]:
        """Addresses of regions that a rank has closed: all ranks' once the last has, none
        before.
        """
        closed = self._closed.setdefault(key, [])
        closed.append(addresses)
        return (
            [each for part in closed for each in part] if len(closed) == self.sim.world_size else []
        )


class SimulatedRank:
    """What the body of a simulation gets.

    Attributes:
        rank, world_size, device: this rank's place.
        memory: its :class:`SimulatedMemory`.
        store: seen by all ranks.
        sim: the simulator.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.sim, self.store = world.sim, world.store
        self.world_size, self.device = world.sim.world_size, torch.device("cpu")
        self._memories = 0
        self.memory = SimulatedMemory(self)

    def next_memory(self) -> int:
        """The number of one more memory of this rank; the n-th ones of all ranks belong
        together.
        """
        self._memories += 1
        return self._memories

    def launch(self, kernel: Any, grid: int, *args: int, **constants: Any) -> None:
        """Queue programs on this rank's stream; others may go on before this returns."""
        self.sim.launch(self.rank, kernel, grid, *args, **constants)
        self.pause()

    def pause(self) -> None:
        """Let others go on, or not."""
        if self.sim.rng.random() < self.sim.hardware.switch:
            current_host(self.sim).pause("goes on")

    def yield_(self) -> None:
        """Let others go on until anything has happened. For loops that wait for something by asking
        again and again.
        """
        before = self.sim.version
        current_host(self.sim).pause("polls", lambda: self.sim.version != before, polls=True)

    def wait_until(self, ready: Callable[[], bool], timeout: float, what: str) -> bool:
        """Let others run until ``ready()``; False after ``timeout`` simulated seconds."""
        current_host(self.sim).pause(what, ready, self.sim.now_ns + int(timeout * _NANOSECONDS))
        return ready()

    def settle(self) -> None:
        """Let others run until this rank's stream is empty."""
        queue = self.sim.streams[self.rank].queue
        current_host(self.sim).pause("waits for its stream in settle()", lambda: not queue)
        self.sim.memory.publish_rank(self.rank)


def current_host(sim: Simulator) -> Host:
    """The host whose code calls this."""
    for host in sim.hosts:
        if host.is_current():
            return host
    raise RuntimeError("only the host code of a simulated rank can wait here")


def simulate(
    world_size: int, body: Callable[[SimulatedRank], _T], *, seed: int = 0, **options: Any
) -> list[_T | None]:
    """Run ``body(ranks)`` for every rank, and all that it launches, in the order that ``seed``
    decides.

    ``options`` are those of :class:`Simulator`. Returns the bodies' results by rank; None of a rank
    that was killed.

    Raises:
        RanksFailed: bodies raised; the first exception is the cause. ProgramError, Deadlock,
            Livelock, AddressError: of kernels.
    """
    sim = Simulator(world_size, seed=seed, **options)
    world = World(sim)
    return sim.run_hosts(
        [lambda rank=rank: body(SimulatedRank(world, rank)) for rank in range(world_size)]
    )
