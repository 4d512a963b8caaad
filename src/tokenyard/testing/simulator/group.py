"""A simulated rank as ``ExpertParallel(group=...)`` takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from tokenyard.testing.simulator.memory import SimulatedMemory

if TYPE_CHECKING:
    from tokenyard.testing.simulator.ranks import SimulatedRank


class SimulatedGroup:
    """See :class:`tokenyard.memory.symmetric.MemoryGroup`.

    Args:
        here: the rank, inside its own body.
    """

    def __init__(self, here: SimulatedRank) -> None:
        self._here = here

    def rank(self) -> int:
        """This rank."""
        return self._here.rank

    def size(self) -> int:
        """Number of ranks."""
        return self._here.world_size

    def open_store(self) -> dist.Store:
        """The part of the store in which constructions meet."""
        return dist.PrefixStore("objects", self._here.store)

    def open_memory(self, timeout: float) -> SimulatedMemory:
        """Memory for one more object."""
        return SimulatedMemory(self._here, timeout)
