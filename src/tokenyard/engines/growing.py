"""Symmetric memory for one use, which grows when a call needs more."""

from __future__ import annotations

import torch

from tokenyard.engines.status import StatusMonitor
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.errors import PeerTimeout
from tokenyard.kernels.stand_in import launch_call
from tokenyard.kernels.two_headers import bind_two_call_barrier
from tokenyard.memory.aside import wait_for
from tokenyard.memory.symmetric import Region


class GrowingRegion:
    """The last of ``regions`` is in use; a CUDA graph may still write to a smaller one."""

    def __init__(self, workspace: PeerWorkspace, monitor: StatusMonitor) -> None:
        self._workspace, self._monitor = workspace, monitor
        self._memory = workspace.memory
        self.regions: list[Region] = []

    @property
    def num_bytes(self) -> int:
        """Of the region in use; 0: there is none."""
        return self.regions[-1].local.numel() if self.regions else 0

    @property
    def all_bytes(self) -> int:
        """Of all regions."""
        return sum(each.local.numel() for each in self.regions)

    def room(self, num_bytes: int, tag: int | None = None) -> Region:
        """A region of at least ``num_bytes``; collective when it grows, for a call of ``tag`` if
        for one."""
        if self.num_bytes < num_bytes:
            if tag is not None:
                self._meet(tag)
            try:
                self.regions.append(self._memory.allocate(num_bytes))
            except PeerTimeout as lost:
                raise self._monitor.attributed(lost) from None
        return self.regions[-1]

    def _meet(self, tag: int) -> None:
        """Pass the call barrier. A rank in another call passes it too, but never allocates."""
        launch = bind_two_call_barrier(self._workspace)
        launch_call(launch, self._workspace, (), tag)
        self._monitor.meets()
        self._memory.settle()
        if self._memory.device.type == "cuda" and self._memory.shared_gpu:
            self._monitor.finish()
        elif self._memory.device.type == "cuda":
            wait_for(torch.cuda.current_stream(self._memory.device).synchronize)
        self._monitor.raise_if_failed()
