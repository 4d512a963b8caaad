"""CPU processes over POSIX shared memory; kernels are interpreted, one process per program
(``forked_programs.py``).

Nothing outlives the ranks: the name of a region exists only while it is being mapped, and whoever
survives removes it.

Kernels run in children of the rank, so what they write to must be shared: regions, host words, and
tensors made by :meth:`SharedMemory.empty` or inside :meth:`SharedMemory.tensors`. What they only
read may be any memory of the rank, as it was at the launch.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forked_programs import Language, Programs
from shared_tensors import SharedTensors, shared_empty
from tokenyard.memory.heap import Heap
from tokenyard.memory.kernel_launch import wait_until
from tokenyard.memory.meeting import Meeting
from tokenyard.memory.symmetric import Region
from tokenyard.testing.region_heap import RegionHeap

PREFIX = "tokenyard-"
"""How names of regions begin."""
_REMEDY = (
    ". All ranks must be on one host and see one /dev/shm of sufficient size (containers: "
    "--shm-size)"
)


class SharedMemory:
    """Symmetric memory of CPU processes on one host. Making one is not collective.

    Args:
        store: part of a store for this object alone, on all ranks.
        rank, world_size: this rank's place.
        timeout: seconds that ranks wait for each other in :meth:`allocate`.
        language: ``tokenyard.testing.interpreter.patched_language`` (whose import mends the
            interpreter).
        num_sms: programs that a launch should have at most; each is a process.
    """

    ranks_per_node = 0
    early = False
    shared_gpu = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: float,
        language: Language,
        num_sms: int = 2,
    ) -> None:
        self.rank, self.world_size, self.num_sms = rank, world_size, num_sms
        self.device = torch.device("cpu")
        self._meeting = Meeting(store, rank, world_size, timeout)
        self._programs = Programs(language)
        self._kept: list[Tensor] = []

    def allocate(self, num_bytes: int) -> Region:
        """Collective: a zeroed region on every rank. See :class:`SymmetricMemory`.

        Raises:
            PeerTimeout: a rank did not come.
            ValueError: sizes differ, or are no multiple of 16.
            RuntimeError: memory is short, or the ranks do not share a file system in memory.
        """
        path = self._meeting.same_size(num_bytes, self._new_path() if self.rank == 0 else "")[0]
        stride = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            size = stride * self.world_size
            hint = f" ({size} bytes at {path}){_REMEDY}"
            self._meeting.attempt(
                "making shared memory",
                partial(_make if self.rank == 0 else _leave, path, size),
                hint,
            )
            mapping = self._meeting.attempt(
                "mapping shared memory", partial(_map, path, size), hint
            )
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)
        parts = torch.frombuffer(mapping, dtype=torch.uint8).view(self.world_size, stride)
        addresses = torch.arange(self.world_size) * stride + parts.data_ptr()
        self._kept.append(parts)
        return Region(parts[self.rank, :num_bytes], addresses)

    def _new_path(self) -> str:
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        return os.path.join(directory, f"{PREFIX}{secrets.token_hex(8)}")

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that kernels of this rank may write to. Zeroed; its memory goes when the tensor
        does.
        """
        return shared_empty(*shape, dtype=dtype)

    def tensors(self) -> AbstractContextManager[Any]:
        """A context in which every tensor that torch makes is one that kernels of this rank may
        write to.
        """
        return SharedTensors()

    def heap(self, num_bytes: int) -> Heap:
        """Collective. See :class:`SymmetricMemory`."""
        return RegionHeap(self.allocate(num_bytes))

    def host_words(self, count: int) -> Tensor:
        """Zeroed int64 ``[count]`` that kernels of later launches may read and write."""
        words = shared_empty(count, dtype=torch.int64)
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
        """See :class:`SymmetricMemory`. There is nothing to compile.

        The result raises RuntimeError if an earlier program failed, and names it.
        """

        def launch(*args: int) -> None:
            self._programs.launch(kernel, grid, args, constants)

        return launch

    def gate(self) -> None:
        """Nothing: ranks are processes."""

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Poll until ``ready()``; False after ``timeout`` seconds.

        Raises:
            RuntimeError: a program failed; names it.
        """

        def ready_or_failed() -> bool:
            self._programs.check()
            return ready()

        return wait_until(ready_or_failed, timeout, brisk=0.0)

    def settle(self) -> None:
        """Return when all programs have ended.

        Raises:
            RuntimeError: one failed; names it.
        """
        self._programs.settle()

    def close(self) -> None:
        """End programs that still run, and let go of regions and host words (memory goes with the
        last tensor on it).
        """
        self._programs.kill()
        self._kept.clear()


def _leave(path: str, num_bytes: int) -> None:
    """What other ranks do while one makes it."""


def _make(path: str, num_bytes: int) -> None:
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Zeroed; fails now rather than by SIGBUS at the first touch.
        os.posix_fallocate(file, 0, num_bytes)
    finally:
        os.close(file)


def _map(path: str, num_bytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(file).st_size
        if size != num_bytes:
            raise OSError(f"{path} has {size} bytes, not {num_bytes}")
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
