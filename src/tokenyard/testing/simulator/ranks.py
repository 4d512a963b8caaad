"""Ranks with host code: :func:`simulate` runs one function per rank, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import PeerTimeout
from tokenyard.memory.heap import Heap
from tokenyard.memory.meeting import check_sizes
from tokenyard.memory.store import CooperativeStore
from tokenyard.memory.symmetric import MemoryGroup, Region, SymmetricMemory
from tokenyard.testing.region_heap import RegionHeap
from tokenyard.testing.simulator.host import Host
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
        self._gathered: dict[Any, dict[int, Any]] = {}

    def gathered(self, key: Any) -> dict[int, Any]:
        """Something of each rank that has come."""
        return self._gathered.setdefault(key, {})


class SimulatedRank:
    """What the body of a simulation gets: ``rank``, ``world_size`` and ``device``; its ``memory``;
    the ``store`` of all ranks; the simulator ``sim``."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.sim, self.store = world.sim, world.store
        self.world_size, self.device = world.sim.world_size, torch.device("cpu")
        self.memories = 0  # the n-th ones of all ranks belong together
        self.memory = SimulatedMemory(self)

    def pause(self) -> None:
        """Let others go on, or not."""
        if self.sim.rng.random() < self.sim.hardware.switch:
            current_host(self.sim).pause("goes on")

    def yield_(self) -> None:
        """Let others go on until anything has happened. For loops that ask again and again."""
        before = self.sim.version
        current_host(self.sim).pause("polls", lambda: self.sim.version != before, polls=True)

    def wait_until(
        self, ready: Callable[[], bool], timeout: float, what: str = "waits in wait_until()"
    ) -> bool:
        """Let others run until ``ready()``; False after ``timeout`` simulated seconds."""
        current_host(self.sim).pause(what, ready, self.sim.now_ns + int(timeout * _NANOSECONDS))
        return ready()


class SimulatedMemory(SymmetricMemory):
    """Regions of all ranks in this process; launches go to the rank's simulated stream. See
    :class:`SymmetricMemory`.

    Args:
        timeout: simulated seconds that ranks wait for each other in :meth:`allocate`.
        num_sms: programs that a kernel of this rank may have.
        members: the ranks that there are (default: all).

    Attributes:
        ranks_per_node: if not 0, ranks of a node map each other's memory, others use NVSHMEM.
        maps_all: they map that of all ranks besides, as NVSHMEM does inside a host.
    """

    def __init__(
        self,
        here: SimulatedRank,
        timeout: float = 30.0,
        num_sms: int = 8,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.world_size, self.device = here.rank, here.world_size, here.device
        self._members = range(here.world_size) if members is None else members
        self.num_sms, self.maps_all = num_sms, False
        self._here, self._sim, self._timeout = here, here.sim, timeout
        self.wait_until = here.wait_until
        here.memories += 1
        self._number = here.memories
        self._regions: list[int] = []
        self._allocated = 0
        self._gate: object | None = None  # the last one that this call has passed

    def allocate(self, num_bytes: int) -> Region:
        """See :class:`SymmetricMemory`. Between zones that no program may touch."""
        self._allocated += 1
        sizes = self._here.world.gathered((self._number, self._allocated))
        sizes[self.rank] = num_bytes
        self._sim.happened()
        if not self._here.wait_until(
            lambda: len(sizes) == len(self._members), self._timeout, "waits for peers in allocate()"
        ):
            missing = [rank for rank in self._members if rank not in sizes]
            raise PeerTimeout(
                f"rank {self.rank} waited {self._timeout} s in allocate() for rank(s) {missing}",
                missing[0],
            )
        check_sizes([sizes[rank] for rank in self._members], self._members)
        parts = self._here.world.gathered(("parts", self._number, self._allocated))
        if not parts:  # whoever comes first makes them
            for peer in self._members:
                name = f"region {self._allocated} of rank {peer}"
                parts[peer] = torch.from_numpy(self._sim.allocate(num_bytes, name))
            lows = [part.data_ptr() for part in parts.values()]
            self._sim.network.regions.append((lows, num_bytes))
        self._regions.append(parts[self.rank].data_ptr())
        each = self.world_size if self.maps_all else self.ranks_per_node or self.world_size
        near = [
            parts[peer].data_ptr() if peer in parts and peer // each == self.rank // each else 0
            for peer in range(self.world_size)
        ]
        return Region(parts[self.rank], torch.tensor(near, dtype=torch.int64))

    def heap(self, num_bytes: int) -> Heap:
        """Collective. See :class:`SymmetricMemory`."""
        return RegionHeap(self.allocate(num_bytes))

    def host_words(self, count: int) -> Tensor:
        """Zeroed int64 ``[count]`` that this rank's programs may touch."""
        words = torch.zeros(count, dtype=torch.int64)
        self._sim.register(words, self.rank, f"host words of rank {self.rank}", shared=True)
        return words

    def tensors(self) -> AbstractContextManager[Any]:
        """A call begins, before any gate."""
        self._gate = None
        return super().tensors()

    def bind(
        self,
        kernel: Any,
        grid: int,
        *,
        num_warps: int,
        max_registers: int | None = None,
        **constants: Any,
    ) -> Callable[..., None]:
        """``kernel``, to be queued with integers. ValueError: more programs than ``resident``. A
        launch behind the gate that was loaded behind it is an AssertionError: on a GPU, loading
        would wait for peers that wait for this rank."""
        resident = self._sim.resident
        if resident is not None and grid > resident:
            raise ValueError(
                f"grid ({grid}) of {kernel.__name__} must be at most {resident}: that many fit "
                f"together"
            )

        behind = self._gate

        def launch(*args: int) -> None:
            loaded_before = behind is None or behind is not self._gate
            assert loaded_before, f"{kernel.__name__} was loaded behind the gate"
            self._sim.launch(self.rank, kernel, grid, *args, num_warps=num_warps, **constants)
            self._here.pause()

        return launch

    def gate(self) -> None:
        """Launching never blocks here, so nobody waits."""
        self._gate = object()

    def settle(self) -> None:
        """Wait until all launches of this rank have run. Everybody then sees what they stored."""
        queue = self._sim.streams[self.rank]
        current_host(self._sim).pause("waits for its stream in settle()", lambda: not queue)
        self._sim.memory.publish(self.rank)

    def close(self) -> None:
        """This rank is done with its regions. As with mapped memory, peers may still return credits
        to them; once all ranks have closed theirs, no program may touch them any more."""
        regions, self._regions = self._regions, []
        if regions:
            closed = self._here.world.gathered(("closed", self._number))
            closed[self.rank] = regions
            if len(closed) == len(self._members):
                for address in (each for part in closed.values() for each in part):
                    self._sim.addresses.close(address)


class SimulatedGroup(MemoryGroup):
    """A :class:`MemoryGroup`. ``here``: the rank, in its own body."""

    def __init__(self, here: SimulatedRank) -> None:
        self._here = here

    def rank(self) -> int:
        return self._here.rank

    def size(self) -> int:
        return self._here.world_size

    def open_store(self) -> dist.Store:
        return dist.PrefixStore("objects", self._here.store)

    def open_memory(self, timeout: float, members: Sequence[int] | None = None) -> SimulatedMemory:
        """See :class:`MemoryGroup`. Its kernels have few programs, which wait for each other as
        many do: two, or one for every two ranks, which engine low_latency needs."""
        num_sms = max(2, -(-self.size() // 2))
        return SimulatedMemory(self._here, timeout, num_sms=num_sms, members=members)


def current_host(sim: Simulator) -> Host:
    for host in sim.hosts:
        if host.is_current():
            return host
    raise RuntimeError("only the host code of a simulated rank can wait here")


def simulate(
    world_size: int, body: Callable[[SimulatedRank], _T], *, seed: int = 0, **options: Any
) -> list[_T | None]:
    """Run ``body(ranks)`` for every rank, and all that it launches, in the order that ``seed``
    decides. ``options`` are those of :class:`Simulator`. Returns the bodies' results by rank; None
    of a rank that was killed. Raises as :meth:`Simulator.run` does."""
    sim = Simulator(world_size, seed=seed, **options)
    world = World(sim)
    return sim.run_hosts(
        [lambda rank=rank: body(SimulatedRank(world, rank)) for rank in range(world_size)]
    )
