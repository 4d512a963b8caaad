"""GPUs of several nodes: symmetric memory that torch (2.13: ``_symmetric_memory``,
``_nvshmem_triton``) gets from NVSHMEM. Near ranks map it, others are reached by device calls."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import NotSupported
from tokenyard.memory.cuda import CudaMemory, torch_symmetric

PUTS_VARIABLE = "TOKENYARD_PUTS"
"""Environment: if set, and not 0, rows are put to other nodes also where NVSHMEM maps their memory,
as inside a host. Engine low_latency then puts, through pointers, where there is no NVSHMEM too."""


def is_available() -> bool:
    """Whether this torch has NVSHMEM, and can use it here."""
    return bool(torch.cuda.is_available() and torch_symmetric().is_nvshmem_available())


def puts_are_forced() -> bool:
    """Whether :data:`PUTS_VARIABLE` is set."""
    return os.environ.get(PUTS_VARIABLE, "0") not in ("", "0")


class NvshmemMemory(CudaMemory):
    """Like :class:`CudaMemory`, for ranks that form nodes of ``ranks_per_node``; those that NVSHMEM
    does not map have address 0. The group's n-th rank must be NVSHMEM's n-th, so it is the world.
    NotSupported: it is not; or this process has symmetric memory of another kind."""

    def __init__(self, *args: Any, ranks_per_node: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks_per_node = ranks_per_node
        if self.world_size != dist.get_world_size():
            raise NotSupported(
                f"NVSHMEM knows all {dist.get_world_size()} ranks of the world, but the group has "
                f"{self.world_size}: make ExpertParallel on the default group, or use engine "
                "'collective'"
            )
        try:
            torch_symmetric().set_backend("NVSHMEM")
        except RuntimeError as error:
            raise NotSupported(
                "torch cannot take symmetric memory from NVSHMEM after it has taken some from "
                "elsewhere in this process: make the object with engine 'twolevel' first, or call "
                f"torch's set_backend('NVSHMEM') at the start ({error})"
            ) from error

    def _map(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        symmetric = torch_symmetric()
        local: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        handle: Any = symmetric.rendezvous(local, self._group)
        node = self.rank // self.ranks_per_node
        near = range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        pointers = [int(pointer) for pointer in handle.buffer_ptrs]  # 0: not mapped
        if puts_are_forced():
            pointers = [at if peer in near else 0 for peer, at in enumerate(pointers)]
        missing = [peer for peer in near if not pointers[peer]]
        if missing:
            which = f"which are on node {node} as this rank is"
            raise RuntimeError(f"NVSHMEM maps no memory of ranks {missing}, {which}")
        self._kept += [local, handle]
        return local, pointers
