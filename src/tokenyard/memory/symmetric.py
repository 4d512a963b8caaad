"""What engines with one-sided kernels need from a machine. Providers: ``memory/cuda.py`` (GPUs that
map each other's memory), ``memory/nvshmem.py`` (GPUs of several nodes), ``testing/simulator``
(ranks as coroutines on the CPU, every schedule by seed), and ``tests/kit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.memory.heap import Heap
from tokenyard.memory.kernel_launch import wait_until


class Region(NamedTuple):
    """A region that exists once per rank, at the same offsets everywhere."""

    local: Tensor  # uint8 [num_bytes], this rank's part, zeroed before any rank can write to it
    # int64 [R] on the device: where each rank's part begins, as this rank's kernels address it;
    # 0 of ranks that are gone
    addresses: Tensor


def storage_over(address: int, num_bytes: int, device: torch.device) -> Any:
    """A torch storage over memory that is there, which it neither frees nor keeps alive."""
    make: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore
    return make(address, device, num_bytes)


_ANYWHERE = nullcontext()


class SymmetricMemory(Protocol):
    """Memory that all ranks of one object share, and the machine of its kernels; one per rank."""

    rank: int
    world_size: int
    device: torch.device
    num_sms: int
    """Multiprocessors that the kernels of this rank may fill."""
    ranks_per_node: int = 0
    """Ranks of other nodes are reached by NVSHMEM only, without address in a Region. 0: none."""
    early: bool = False
    """Programs of a kernel that waits for it itself may be set up before the launch ahead is over:
    the GPU can, no other rank has it, and this object may fill it, so no call of another object
    could have run beside."""
    shared_gpu: bool = False
    """Other ranks' kernels run on this rank's GPU: allocate before :meth:`gate` only."""

    def allocate(self, num_bytes: int) -> Region:
        """Collective: make a region of ``num_bytes`` (a multiple of 16; aligned to 256 bytes) on
        every rank. PeerTimeout: a rank did not come. ValueError: they asked for different sizes."""
        ...

    def heap(self, num_bytes: int) -> Heap:
        """Collective: a heap of ``num_bytes`` on every rank. Memory of several nodes has none.
        RuntimeError, on all: some rank cannot have it. Else as :meth:`allocate`."""
        ...

    def host_words(self, count: int) -> Tensor:
        """Zeroed int64 ``[count]`` on the CPU; kernels may use its ``data_ptr()`` at any time."""
        ...

    def tensors(self) -> AbstractContextManager[Any]:
        """A context in which torch makes tensors that kernels of this rank may write to."""
        return _ANYWHERE

    def bind(
        self,
        kernel: Any,
        grid: int,
        *,
        num_warps: int,
        max_registers: int | None = None,
        **constants: Any,
    ) -> Callable[..., None]:
        """Compile and load ``kernel`` (may wait for the device), to be launched with integers:
        that queues ``grid`` programs, all resident together, behind this rank's earlier launches.
        No argument is specialised on; ``constants`` are the kernel's constexprs. ValueError:
        ``grid`` programs do not fit on the device together."""
        ...

    def gate(self) -> None:
        """Called before launches that wait for peers: all ranks pass once none would block.
        Nothing where ranks are processes: no launch of one blocks another's."""

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``ready()``, without the interpreter; False after ``timeout`` seconds."""
        return wait_until(ready, timeout)

    def settle(self) -> None:
        """Return when everything launched has run; nothing on a GPU, where streams order it."""

    def close(self) -> None:
        """Free this rank's regions. Not collective; peers must not use them any more."""
        ...


@runtime_checkable
class MemoryGroup(Protocol):
    """Ranks of one process instead of a ``torch.distributed`` group; one object per rank."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def open_store(self) -> dist.Store:
        """A store that exactly these ranks see, always the same: constructions meet in it."""
        ...

    def open_memory(self, timeout: float, members: Sequence[int] | None = None) -> SymmetricMemory:
        """Memory for one more ``ExpertParallel``, or for the ``members`` of one that recovers."""
        ...
