"""What memory of ranks on GPUs has in common, whether ranks are processes or threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tokenyard.memory.kernel_launch import Kernels


class DeviceMemory:
    """The part of :class:`SymmetricMemory` that concerns one rank and its GPU alone.

    Args:
        device: a CUDA device with its index.
        kernels: those loaded on it. Launches go to its current stream.
    """

    ranks_per_node = 0
    early = False
    shared_gpu = False

    def __init__(self, device: torch.device, kernels: Kernels) -> None:
        self.device = device
        self._kernels = kernels
        self._kept: list[Any] = []

    def host_words(self, count: int) -> Tensor:
        """Zeroed int64 ``[count]`` in pinned memory; the GPU addresses it by the same
        ``data_ptr()``.

        Ask before the gate: it may wait for kernels that run.
        """
        with torch.cuda.device(self.device):
            words = torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)
        self._kept.append(words)
        return words

    def tensors(self) -> AbstractContextManager[Any]:
        """A context for tensors that kernels may write to: nothing to do on a GPU."""
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
        """See :class:`SymmetricMemory`. A must before a launch is captured in a CUDA graph."""
        return self._kernels.bind(kernel, grid, num_warps, max_registers, constants)

    def settle(self) -> None:
        """Nothing: streams order it."""
