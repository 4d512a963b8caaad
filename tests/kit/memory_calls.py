"""What tests of every kind of memory do with it; imports no Triton."""

from __future__ import annotations

from typing import Any


def launch(
    memory: Any, kernel: Any, grid: int, *args: int, num_warps: int, **constants: Any
) -> None:
    """Bind and launch once. Loaded before, a kernel is not loaded again."""
    memory.bind(kernel, grid, num_warps=num_warps, **constants)(*args)
