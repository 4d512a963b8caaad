"""GPUs that map each other's memory, one process per GPU, through torch's symmetric memory."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import PeerTimeout
from tokenyard.memory.aside import synchronize
from tokenyard.memory.heap import Heap, PoolHeap
from tokenyard.memory.kernel_launch import Kernels, kernels_of, multiprocessors
from tokenyard.memory.meeting import Meeting, wait_for
from tokenyard.memory.symmetric import Region, SymmetricMemory

_GROUPS = count()
_HELD: list[Any] = []
"""What was closed while a graph was captured or kernels could run; kept for ever."""


def torch_symmetric() -> Any:
    """torch's module of symmetric memory."""
    return importlib.import_module("torch.distributed._symmetric_memory")


class DeviceMemory(SymmetricMemory):
    """The part of :class:`SymmetricMemory` that concerns one rank and its GPU alone, whether ranks
    are processes or threads. ``kernels`` are loaded on ``device``, which has an index."""

    def __init__(self, device: torch.device, kernels: Kernels) -> None:
        self.device = device
        self._kernels = kernels
        self._kept: list[Any] = []

    def host_words(self, count: int) -> Tensor:
        """See :class:`SymmetricMemory`. Ask before the gate: it may wait for kernels that run."""
        with torch.cuda.device(self.device):
            words = torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)
        self._kept.append(words)
        return words

    def bind(
        self,
        kernel: Any,
        grid: int,
        *,
        num_warps: int,
        max_registers: int | None = None,
        **constants: Any,
    ) -> Callable[..., None]:
        """See :class:`SymmetricMemory`. A must before a launch is captured in a CUDA graph."""
        return self._kernels.bind(kernel, grid, num_warps, max_registers, constants)


class CudaMemory(DeviceMemory):
    """Symmetric memory of GPUs in one NVLink (or PCIe peer-to-peer) domain. Making one is not
    collective. Regions live until :meth:`close`. Launches go to the current stream of ``device``.

    Args:
        group: the ranks; every one with a CUDA device of its own on one host
            (``memory/preflight.py`` tells beforehand). None: ``store`` is the members' alone.
        device: a CUDA device with its index.
        timeout: seconds that ranks wait for each other in :meth:`allocate`.
        num_sms: multiprocessors that kernels may fill (default: all of the device).
        store: part of a store for this object alone; may be None if this process is alone.
        members: the ranks that there are (default: all).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: float,
        num_sms: int | None = None,
        store: dist.Store | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._members = range(world_size) if members is None else members
        everything, capability = multiprocessors(device), torch.cuda.get_device_capability(device)
        self.num_sms: int = num_sms or everything
        self.early = self.num_sms == everything and capability >= (9, 0)
        super().__init__(device, kernels_of(device.index, self.num_sms))
        self._group, self._store = group, store or dist.HashStore()
        self._timeout, self._mapped = timeout, count()
        self._meeting = Meeting(self._store, rank, self._members, timeout)

    def allocate(self, num_bytes: int) -> Region:
        """See :class:`SymmetricMemory`. RuntimeError: a GPU cannot map a peer's memory, or memory
        is short on a rank, which is named on the others; the message is the driver's."""
        self._meeting.same_size(num_bytes)
        with torch.cuda.device(self.device):
            local, pointers = self._map(num_bytes)
            local.zero_()
            addresses = torch.tensor(pointers, dtype=torch.int64, device=self.device)
            torch.cuda.current_stream(self.device).synchronize()
        self._meeting.exchange("the zeroing of symmetric memory")
        return Region(local, addresses)

    def heap(self, num_bytes: int) -> Heap:
        """See :class:`SymmetricMemory`. RuntimeError: as in :meth:`allocate`, or torch is too old:
        its memory pools hold symmetric memory from 2.11 on."""
        self._meeting.same_size(num_bytes)
        with torch.cuda.device(self.device):
            pool, local = self._meeting.attempt(
                f"allocating {num_bytes} bytes of symmetric memory in a pool",
                partial(self._pool, num_bytes),
            )
            pointers = self._meeting.attempt("mapping a heap", partial(self._pointers, local))
            addresses = torch.tensor(pointers, dtype=torch.int64, device=self.device)
            return PoolHeap(local.data_ptr(), num_bytes, addresses, pool)

    def _pool(self, num_bytes: int) -> tuple[Any, Tensor]:
        """A pool of symmetric memory, or of any if this rank is alone, and all that is in it."""
        allocator = None
        if len(self._members) > 1:
            get: Any = getattr(torch_symmetric(), "get_mempool_allocator", None)
            if get is None:
                raise RuntimeError("this torch has no pools of symmetric memory")
            allocator = get(self.device)
        pool = torch.cuda.MemPool(allocator)
        with torch.cuda.use_mem_pool(pool):
            return pool, torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _map(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """This rank's part and where every rank's part is."""
        alone = len(self._members) == 1
        # Not symm.empty: its pool would keep the memory after close, and may place a region
        # differently on each rank.
        make: Any = torch.empty if alone else torch_symmetric()._SymmetricMemory.empty_strided_p2p
        shape = ((num_bytes,),) if alone else ((num_bytes,), (1,))
        local: Tensor = self._meeting.attempt(
            f"allocating {num_bytes} bytes of symmetric memory",
            partial(make, *shape, dtype=torch.uint8, device=self.device),
        )
        pointers = self._pointers(local)
        self._kept.append(local)
        return local, pointers

    def _pointers(self, local: Tensor) -> list[int]:
        """Where every rank's part is, of which ``local`` is this rank's. Collective."""
        pointers, num_bytes = [0] * self.world_size, local.numel()
        pointers[self.rank] = local.data_ptr()
        if len(self._members) == 1:
            return pointers
        if self._group is not None:
            handle: Any = torch_symmetric().rendezvous(local, self._group)
        else:
            handle = self._rendezvous(torch_symmetric()._SymmetricMemory.rendezvous, local)
        views: list[Tensor] = [
            handle.get_buffer(place, (num_bytes,), torch.uint8)
            for place in range(len(self._members))
        ]
        for rank, view in zip(self._members, views, strict=True):
            pointers[rank] = view.data_ptr()
        if pointers[self.rank] != local.data_ptr():
            where = "this rank's region where the tensor is"
            raise RuntimeError(f"torch's symmetric memory does not map {where}")
        self._kept += [handle, views]
        return pointers

    def _rendezvous(self, meet: Callable[[Tensor, str], Any], local: Tensor) -> Any:
        """Map the memory of the members, who have no process group of their own: torch asks one
        for ranks and store only, or (older versions) what it was told of the group's name."""
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        rank, size = list(self._members).index(self.rank), len(self._members)
        part = dist.PrefixStore(f"members/{next(self._mapped)}", self._store)
        store = RendezvousStore(part, self.rank, self._members, self._timeout)
        name = f"tokenyard/{next(_GROUPS)}"  # torch takes no second group of a name
        group = c10d.ProcessGroup(store, rank, size)
        c10d._register_process_group(name, group)
        try:
            try:
                return meet(local, name)
            except RuntimeError as error:
                if "no group info" not in str(error):
                    raise
                c10d._SymmetricMemory.set_group_info(name, rank, size, store)
                return meet(local, name)
        finally:
            c10d._unregister_process_group(name)

    def close(self) -> None:
        """Wait for this rank's GPU, then free its regions and host words."""
        kept, self._kept = self._kept, []
        if kept and torch.cuda.is_current_stream_capturing():
            _HELD.append(kept)  # collected as garbage, say: to wait would end the capture
        elif kept:
            try:
                synchronize(self.device)
            except BaseException:  # Ctrl-C, and kernels still run there
                _HELD.append(kept)
                raise


class RendezvousStore(dist.Store):
    """The store that torch gets while ranks map each other's memory once: ``part``, for this
    exchange of these ``ranks``, in torch's order, alone.

    torch (``StoreExchange``, C++) names what ranks tell each other by how many exchanges its
    process has made: ``CUDASymmetricMemory/17/RANK``. Processes of different age would wait for
    each other's names for ever. Here the first exchange is 0, the next one 1, on every rank. torch
    calls these methods alone, from C++; its barrier adds. It gets :class:`PeerTimeout` through.
    """

    def __init__(self, part: dist.Store, rank: int, ranks: Sequence[int], timeout: float) -> None:
        super().__init__()
        self._part, self._rank, self._ranks, self._seconds = part, rank, ranks, timeout
        self._places: dict[str, int] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._part.set(self._here(key), value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """What was said, once it is all there."""
        self.wait(keys)
        return [self._part.get(self._here(key)) for key in keys]

    def add(self, key: str, value: int) -> int:
        return self._part.add(self._here(key), value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all, for the seconds of this object, whatever torch's are."""
        deadline = time.monotonic() + self._seconds
        for key in keys:
            if not wait_for(self._part, self._here(key), deadline - time.monotonic()):
                raise self._lost(key.rsplit("/", 1)[1])

    def _lost(self, place: str) -> PeerTimeout:
        """``place``: of the rank that did not come, or what a barrier writes last."""
        peer = self._ranks[int(place)] if place.isdigit() else -1
        who = f"rank {peer}" if place.isdigit() else "all ranks"
        text = f"rank {self._rank} waited {self._seconds} s for {who} to map symmetric memory"
        return PeerTimeout(f"{text}: every rank must come (is one slow or dead?)", peer)

    def _here(self, key: str) -> str:
        """``exchange 17/RANK`` as ``0/RANK``."""
        exchange, last = key.rsplit("/", 1)
        return f"{self._places.setdefault(exchange, len(self._places))}/{last}"
