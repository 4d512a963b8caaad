"""Tensors as memory of a simulated rank: programs may touch those that are alive, and no others.

Without it a program that writes where nothing is, or into a tensor that is gone, corrupts the
test's own process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenyard.testing.simulator import SimulatedRank


class OwnTensors(TorchDispatchMode):
    """Inside, every tensor that torch makes belongs to the rank until nobody holds it. Use it with
    ``strict=True``.

    Memory is kept until the end, so that a program that comes too late is reported and does no
    harm.
    """

    def __init__(self, ranks: SimulatedRank) -> None:
        super().__init__()
        self._rank, self._sim = ranks.rank, ranks.sim
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._kept: list[torch.UntypedStorage] = []
        settle, wait_until = ranks.memory.settle, ranks.memory.wait_until
        ranks.memory.settle = lambda: (self.sweep(), settle())[1]
        ranks.memory.wait_until = lambda *args: (self.sweep(), wait_until(*args))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sweep()
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and self._add(
                tensor, f"{func.overloadpacket.__name__} {list(tensor.shape)}"
            ):
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = storage
        return out

    def adopt(self, *values: Any) -> None:
        """Tensors that were made outside belong to the rank from now on."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and self._add(tensor, f"argument {list(tensor.shape)}"):
                self._kept.append(tensor.untyped_storage())

    def _add(self, tensor: Tensor, name: str) -> bool:
        """Let the rank's programs touch it. False if it is known, or part of what is known."""
        storage = tensor.untyped_storage()
        low, size = storage.data_ptr(), storage.nbytes()
        if not size or self._sim.addresses.zone(low) is not None:
            return False
        self._sim.addresses.add(low, size, self._rank, f"{name} of rank {self._rank}")
        return True

    def sweep(self) -> None:
        """Tensors that nobody holds any more are gone."""
        gone = [
            low
            for low, storage in self._alive.items()
            if torch._C._storage_Use_Count(storage._cdata) == 1
        ]
        for low in gone:
            self._kept.append(self._alive.pop(low))
            self._sim.addresses.close(low)
