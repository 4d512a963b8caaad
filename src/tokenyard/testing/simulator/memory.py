"""``SymmetricMemory`` of one simulated rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.errors import PeerTimeout
from tokenyard.memory.symmetric import Region

if TYPE_CHECKING:
    from tokenyard.testing.simulator.ranks import SimulatedRank


class SimulatedMemory:
    """Regions of all ranks in this process; launches go to the rank's simulated stream. See
    :class:`SymmetricMemory`.

    Args:
        here: the rank.
        timeout: seconds on the simulated clock that ranks wait for each other in :meth:`allocate`.
        num_sms: programs that a kernel of this rank may have.

    Attributes:
        ranks_per_node: if not 0, only ranks of a node map each other's memory; others reach it by
            NVSHMEM's calls.
        maps_all: they map that of all ranks besides, as NVSHMEM does inside a host.
    """

    def __init__(self, here: SimulatedRank, timeout: float = 30.0, num_sms: int = 8) -> None:
        self.rank, self.world_size, self.device = here.rank, here.world_size, torch.device("cpu")
        self.num_sms = num_sms
        self.ranks_per_node, self.maps_all, self.early, self.shared_gpu = 0, False, False, False
        self._here, self._timeout = here, timeout
        self._number = here.next_memory()
        self._regions: list[int] = []
        self._allocated = 0

    def allocate(self, num_bytes: int) -> Region:
        """Collective: a zeroed region on every rank, with zones around it that no program may
        touch.

        Raises:
            PeerTimeout: a rank did not come.
            ValueError: sizes differ, or are no positive multiple of 16.
        """
        self._allocated += 1
        sizes = self._here.world.gathered((self._number, self._allocated))
        sizes[self.rank] = num_bytes
        self._here.sim.happened()
        if not self.wait_until(
            lambda: len(sizes) == self.world_size, self._timeout, "waits for peers in allocate()"
        ):
            missing = [rank for rank in range(self.world_size) if rank not in sizes]
            raise PeerTimeout(
                f"rank {self.rank} waited {self._timeout} s in allocate() for rank(s) {missing}",
                missing[0],
            )
        for peer in range(self.world_size):
            if sizes[peer] != sizes[0]:
                raise ValueError(
                    f"ranks ask for regions of different sizes: rank 0 {sizes[0]} bytes, rank "
                    f"{peer} {sizes[peer]}"
                )
        if num_bytes <= 0 or num_bytes % 16:
            raise ValueError(f"num_bytes ({num_bytes}) must be a positive multiple of 16")
        parts = self._here.world.regions((self._number, self._allocated), num_bytes)
        self._regions.append(parts[self.rank].data_ptr())
        each = self.world_size if self.maps_all else self.ranks_per_node or self.world_size
        near = [
            part.data_ptr() if peer // each == self.rank // each else 0
            for peer, part in enumerate(parts)
        ]
        return Region(parts[self.rank], torch.tensor(near, dtype=torch.int64))

    def host_words(self, count: int) -> Tensor:
        """Zeroed int64 ``[count]`` that this rank's programs may touch."""
        words = torch.zeros(count, dtype=torch.int64)
        self._here.sim.register(words, self.rank, f"host words of rank {self.rank}", shared=True)
        return words

    def tensors(self) -> AbstractContextManager[Any]:
        """Nothing to do: programs run in this process."""
        return nullcontext()

    def bind(
        self,
        kernel: Any,
        grid: int,
        *,
        num_warps: int,
        max_registers: int | None = None,
        **constants: Any,
    ) -> Callable[..., None]:
        """``kernel``, to be queued with integers.

        Raises:
            ValueError: more programs than the simulation's ``resident``.
        """
        del max_registers
        resident = self._here.sim.resident
        if resident is not None and grid > resident:
            raise ValueError(
                f"grid ({grid}) of {kernel.__name__} must be at most {resident}: that many fit "
                f"together"
            )

        def launch(*args: int) -> None:
            self._here.launch(kernel, grid, *args, num_warps=num_warps, **constants)

        return launch

    def gate(self) -> None:
        """Nothing: launching never blocks here."""

    def wait_until(
        self, ready: Callable[[], bool], timeout: float, what: str = "waits in wait_until()"
    ) -> bool:
        """Let others run until ``ready()``; False after ``timeout`` seconds of the
        simulated clock.
        """
        return self._here.wait_until(ready, timeout, what)

    def settle(self) -> None:
        """Wait until all launches of this rank have run. All that they have stored is then seen by
        everybody.
        """
        self._here.settle()

    def close(self) -> None:
        """This rank is done with its regions. As with mapped memory, peers may still return credits
        to them; once all ranks have closed theirs, no program may touch them any more."""
        regions, self._regions = self._regions, []
        if regions:
            for address in self._here.world.retired(self._number, regions):
                self._here.sim.addresses.close(address)
