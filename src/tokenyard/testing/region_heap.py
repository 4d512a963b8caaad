"""A heap over a region, for ranks that share a process or a CPU: this module places its blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.memory.heap import Heap
from tokenyard.memory.symmetric import Region, storage_over

POISON = 0xFF
"""Each byte of a block that is taken where fresh memory is ``poisoned``: NaN."""


class RegionHeap(Heap):
    """Blocks of ``region``. Of streams that use a block beside the heap's, only those count that
    ``Block.keep_for`` names."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.local.data_ptr(), region.local.numel(), region.addresses)
        self._local = region.local

    def _make(self, start: int, size: int) -> Tensor:
        storage = storage_over(self.begin + start, size, self._local.device)
        block = torch.empty(0, dtype=torch.uint8, device=self._local.device)
        block.set_(storage, 0, (size,), (1,))  # pyright: ignore
        return block.fill_(POISON) if torch.get_deterministic_debug_mode() else block
