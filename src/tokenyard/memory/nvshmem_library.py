"""The library that kernels with NVSHMEM's device calls are linked with, and their modules."""

from __future__ import annotations

import importlib
from typing import Any


def device_library() -> str:
    """Path of the library that kernels with NVSHMEM's calls are linked with.

    Raises:
        RuntimeError: it was not found; torch says where it looked.
    """
    found: Any = importlib.import_module("torch.distributed._symmetric_memory._nvshmem_triton")
    return str(found.NvshmemLibFinder.find_device_library())


def prepare_module(module: int) -> None:
    """Tell NVSHMEM of a loaded module (a ``CUmodule``), before its kernels run."""
    from torch._C._distributed_c10d import _nvshmemx_cumodule_init  # pyright: ignore

    _nvshmemx_cumodule_init(module)
