"""What kernels have waited for, in the statistics: seconds by source and by what was waited for.

Kernels add nanoseconds to a matrix ``[sources, phases]`` of the rank's own memory (``note_wait`` in
``kernels/sync.py``). The host copies it when it likes, beside kernels that run: each number is
whole, as it has 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.stats import Stats


class Source(NamedTuple):
    """What a number of the matrix tells: ``what`` was waited for, of which rank, by how many
    programs of a kernel at once."""

    what: str
    rank: int
    programs: int


class DeviceWaits:
    """The matrix ``waited`` of one engine. ``stats`` keep what earlier engines of the object have
    waited.

    Args:
        named: of (phase, source).
    """

    def __init__(
        self,
        stats: Stats,
        memory: SymmetricMemory,
        waited: Tensor,
        named: Callable[[int, int], Source],
    ) -> None:
        self._stats, self._waited, self._named = stats, waited, named
        self._before = {what: seconds[:] for what, seconds in stats.waits.items()}
        self._on_gpu, self._open = waited.is_cuda, True
        if self._on_gpu:  # a stream that is first used beside a kernel may wait for it
            self._beside = torch.cuda.Stream(waited.device)
            self._copy = memory.host_words(waited.numel()).view(waited.shape)
            self._beside.wait_stream(torch.cuda.current_stream(waited.device))
            self.count()

    def count(self) -> None:
        """Bring the statistics up to date, but in a CUDA graph's capture and once closed."""
        if not self._open or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        found = {what: seconds[:] for what, seconds in self._before.items()}
        for source, row in enumerate(self._read()):
            for phase, nanoseconds in enumerate(row):
                if nanoseconds:
                    each = self._named(phase, source)
                    none = [0.0] * len(self._stats.rows_sent)
                    waits = found.setdefault(each.what, none)
                    waits[each.rank] += nanoseconds / each.programs * 1e-9
        self._stats.waits.update(found)

    def _read(self) -> list[list[int]]:
        if not self._on_gpu:
            return cast("list[list[int]]", self._waited.tolist())
        with torch.cuda.stream(self._beside):
            self._copy.copy_(self._waited, non_blocking=True)
        self._beside.synchronize()
        return cast("list[list[int]]", self._copy.tolist())

    def close(self) -> None:
        """For the last time."""
        self.count()
        self._open = False
