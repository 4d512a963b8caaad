"""Ranks as threads of one process on one GPU: many ranks, two nodes even, where there is one GPU
only.

The GPU runs kernels of all ranks side by side, on one stream each. Loading a module and allocating
device memory wait for kernels that run, and a kernel that runs may wait for a peer whose thread
cannot launch meanwhile. So no rank may do either while a peer's kernel waits for its own:

- :func:`virtual_environment` makes CUDA load its own kernels at start and gives every stream a
  hardware queue;
- before :meth:`VirtualMemory.gate` a rank allocates all that its call needs and has its kernels
  loaded; after it, it only launches;
- :meth:`VirtualMemory.allocate` lets no rank go before all have their memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rank_threads import Gate, run_threads
from tokenyard.memory.cuda import DeviceMemory
from tokenyard.memory.heap import Heap
from tokenyard.memory.kernel_launch import Kernels, Loaded, multiprocessors, wait_until
from tokenyard.memory.meeting import check_sizes
from tokenyard.memory.symmetric import Region
from tokenyard.testing.one_process import BodyRun, Rank, run_in_process
from tokenyard.testing.region_heap import RegionHeap

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""What must be set before CUDA starts."""

MOST_RANKS = 32
"""Hardware queues of a GPU, and streams that torch has."""

CARVEOUT = 9
"""Of a kernel, in CUDA's header: the share of a multiprocessor's memory to prefer as shared, in
per cent."""

_T = TypeVar("_T")


def virtual_environment() -> None:
    """Set :data:`ENVIRONMENT` here. RuntimeError: CUDA has started without it."""
    wrong = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    if wrong and torch.cuda.is_initialized():
        settings = " ".join(f"{name}={value}" for name, value in wrong.items())
        raise RuntimeError(
            f"CUDA has started in this process without {settings}, so virtual ranks could block "
            "each other: call virtual_environment() before anything uses CUDA, or start the "
            "process with these variables"
        )
    os.environ.update(wrong)


class AlikeKernels(Kernels):
    """Kernels that all divide a multiprocessor's memory alike. One that divides it otherwise waits
    until a multiprocessor is idle, and none is where kernels of all ranks wait for that one
    (``docs/benchmarks/experiments-nvlink.md``, How a multiprocessor's memory is divided).
    """

    def _load(self, *what: Any) -> Loaded:
        loaded, driver = super()._load(*what), ctypes.CDLL("libcuda.so.1")
        failed = driver.cuFuncSetAttribute(ctypes.c_void_p(loaded.function), CARVEOUT, 100)
        if failed:
            raise RuntimeError(f"cuFuncSetAttribute of {what[0].__name__} returned {failed}")
        return loaded


class VirtualWorld:
    """What ranks of one :func:`run_virtual_ranks` share on ``device``, which has an index."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size, self.device = world_size, device
        self.store = dist.HashStore()
        self.num_sms = max(1, multiprocessors(device) // world_size)
        self.kernels = AlikeKernels(device, self.num_sms)
        self._gates: dict[str, Gate] = {}
        self._closed: dict[str, list[list[Tensor]]] = {}
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}

    def gate(self, name: str, members: Sequence[int] | None = None) -> Gate:
        """The gate called so; the first to ask makes it, for ``members`` (default: all ranks)."""
        with self._lock:
            if name not in self._gates:
                self._gates[name] = Gate(self.world_size, members)
                for rank, why in self._lost.items():
                    self._gates[name].lose(rank, why)
            return self._gates[name]

    def retire(self, name: str, kept: list[Tensor], members: Sequence[int]) -> None:
        """Keep what a rank no longer needs of the memory called so until all ``members`` say so."""
        with self._lock:
            closed = self._closed.setdefault(name, [])
            closed.append(kept)
            if len(closed) == len(members):
                del self._closed[name]

    def lose(self, rank: int, why: str) -> None:
        """``rank``'s thread has ended."""
        with self._lock:
            self._lost[rank] = why
            for gate in self._gates.values():
                gate.lose(rank, why)


class VirtualGroup:
    """One rank's process group, as far as ``tokenyard`` uses one; ranks are threads."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.world, self._rank = world, rank
        self.opened = 0

    def rank(self) -> int:
        """This thread's rank."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self.world.world_size

    @property
    def device(self) -> torch.device:
        """The GPU of all ranks."""
        return self.world.device

    def open_store(self) -> dist.Store:
        """The part of the store in which constructions meet."""
        return dist.PrefixStore("objects", self.world.store)

    def open_memory(self, timeout: float, members: Sequence[int] | None = None) -> VirtualMemory:
        """Memory for one more object, or for the ``members`` of one that recovers."""
        return VirtualMemory(self, timeout, members)


class VirtualMemory(DeviceMemory):
    """Symmetric memory of one virtual rank: every rank's part is a tensor of this process. Ranks
    wait ``timeout`` seconds for each other in :meth:`allocate` and :meth:`gate`.
    """

    shared_gpu = True

    def __init__(
        self, group: VirtualGroup, timeout: float, members: Sequence[int] | None = None
    ) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._members = range(self.world_size) if members is None else members
        super().__init__(group.device, group.world.kernels)
        self.num_sms = group.world.num_sms
        self._timeout = timeout
        group.opened += 1  # the n-th one, on every rank
        self._world, self._name = group.world, f"object/{group.opened}"
        self._gate = group.world.gate(self._name, members)

    def allocate(self, num_bytes: int) -> Region:
        """See :class:`SymmetricMemory`."""
        # Past this meeting all ranks have launched what they had to launch, so the allocator may
        # wait for the GPU.
        sizes = self._meet("allocating symmetric memory", num_bytes)
        check_sizes([sizes[rank] for rank in self._members], self._members)
        local = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        pointers = self._meet("the zeroing of symmetric memory", local.data_ptr())
        pointers = [pointer or 0 for pointer in pointers]
        addresses = torch.tensor(pointers, dtype=torch.int64, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        self._meet("the end of allocating symmetric memory")
        self._kept.append(local)
        return Region(local, addresses)

    def heap(self, num_bytes: int) -> Heap:
        """Collective. See :class:`SymmetricMemory`."""
        return RegionHeap(self.allocate(num_bytes))

    def _meet(self, what: str, value: Any = None) -> list[Any]:
        return self._gate.meet(self.rank, what, self._timeout, value)

    def gate(self) -> None:
        """Wait until all ranks have come. PeerTimeout: one did not; PeerLost: one has ended. (Never
        for this rank's stream: a kernel of it may wait for what another launches behind the gate.)
        """
        self._meet("the gate before launches that wait for each other")

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Poll until ``ready()``; False after ``timeout`` seconds. Other threads run meanwhile."""
        return wait_until(ready, timeout, brisk=1e-3)

    def close(self) -> None:
        """Wait for this thread's stream, then free this rank's regions and host words: when all
        ranks have closed theirs, as peers may still return credits to them."""
        kept, self._kept = self._kept, []
        if kept:
            torch.cuda.current_stream(self.device).synchronize()
            self._world.retire(self._name, kept, self._members)


def run_virtual_ranks(
    world_size: int,
    body: Callable[[VirtualGroup], _T],
    device: torch.device | str = "cuda",
    timeout: float = 120.0,
) -> list[_T]:
    """Run ``body(group)`` on ``world_size`` threads with a stream each, and return their results by
    rank.

    Backward passes run on the rank's own thread (torch's one thread per GPU would let only one rank
    through).

    Raises:
        ThreadsFailed: ranks raised, or did not end within ``timeout`` seconds (their stacks are in
            the message; a stuck thread is left behind, so end the process soon).
        RuntimeError, ValueError: see :func:`virtual_environment`; more than :data:`MOST_RANKS`
            ranks.
    """
    if not 0 < world_size <= MOST_RANKS:
        raise ValueError(
            f"world_size ({world_size}) must be in 1..{MOST_RANKS}: a GPU runs that many streams "
            f"side by side"
        )
    virtual_environment()
    where = torch.device(device)
    with torch.cuda.device(where):
        world = VirtualWorld(world_size, torch.device("cuda", torch.cuda.current_device()))
        streams = [torch.cuda.Stream(world.device) for _ in range(world_size)]

    def run(rank: int) -> _T:
        torch.cuda.set_device(world.device)
        with torch.cuda.stream(streams[rank]), torch.autograd.set_multithreading_enabled(False):
            result = body(VirtualGroup(world, rank))
            streams[rank].synchronize()
        return result

    return run_threads(world_size, run, world.lose, timeout)


def run_on_virtual_ranks(run: BodyRun) -> None:
    """Run the body of a ``distributed_test`` (``TOKENYARD_TEST_DEVICE=virtual``)."""

    def start(be: Rank) -> None:
        def rank(group: VirtualGroup) -> None:
            be(group.rank(), group.device, group)

        run_virtual_ranks(run.world_size, rank, "cuda", run.timeout)

    run_in_process(run, start)
