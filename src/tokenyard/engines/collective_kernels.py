"""Engine ``collective`` on GPUs: Triton kernels plan, pack, place and sum. What they make is what
``TorchWork`` makes, which has all other devices, and grids of nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch

from tokenyard.config import Config
from tokenyard.engines.collective import CollectiveEngine
from tokenyard.engines.collective_torch import TorchWork
from tokenyard.engines.transport import Transport
from tokenyard.memory.kernel_launch import kernels_of, multiprocessors
from tokenyard.stats import Stats

ON_GPUS = True
"""Whether kernels are used where they can be; else torch does it all."""
PER_SM = 4
"""Programs of a launch on each multiprocessor."""


class Binder(NamedTuple):
    """``bind``: as ``Kernels.bind``. ``programs``: of a launch that moves rows."""

    bind: Callable[..., Callable[..., None]]
    programs: int


@cache
def _on_gpu(index: int) -> Binder:
    sms = multiprocessors(torch.device("cuda", index))
    bind = partial(kernels_of(index, sms).bind, together=False)  # nobody waits for another
    return Binder(bind, PER_SM * sms)


class CollectiveKernelsEngine(CollectiveEngine):
    """Dispatch and combine by all-to-all. ``obstacle_of``: why kernels cannot work on a GPU, empty
    if they can."""

    forced: Binder | None = None
    """For tests: kernels are launched so, on any device."""

    def __init__(
        self, config: Config, transport: Transport, obstacle_of: Callable[[torch.device], str],
        stats: Stats,
    ) -> None:  # fmt: skip
        super().__init__(config, transport, stats)
        self._obstacle_of = obstacle_of

    def _make_work(self, device: torch.device) -> TorchWork:
        binder = self.forced
        if binder is None and ON_GPUS and device.type == "cuda" and torch.version.hip is None:
            binder = None if self._obstacle_of(device) else _on_gpu(device.index)
        if binder is None or self._hierarchy is not None:
            return super()._make_work(device)
        from tokenyard.engines.collective_launches import Launches

        always = self._transport.counts_on_host
        launches = Launches(self.config, device, *binder, self._num_counts, headers=always)
        return cast("Any", launches)  # which has the same methods
