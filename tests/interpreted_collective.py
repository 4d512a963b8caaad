"""Engine collective whose kernels are interpreted, on ranks whose tensors are the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from tokenyard.engines.collective import Binder, CollectiveEngine

PROGRAMS = 3
"""Of a launch that moves rows."""


def bind(
    kernel: Any, grid: int, num_warps: int, max_registers: int | None, constants: dict[str, Any]
) -> Callable[..., None]:
    """As ``Kernels.bind``: programs run one after the other."""
    from triton.runtime.interpreter import interpreter_builder

    from tokenyard.testing.interpreter import bind as bound
    from tokenyard.testing.interpreter import patched_language

    def launch(*args: Any) -> None:
        named = bound(kernel, args, constants)
        body = kernel.rewrite()
        with patched_language(), np.errstate(all="ignore"):
            interpreter_builder.set_grid_dim(grid, 1, 1)
            for program in range(grid):
                interpreter_builder.set_grid_idx(program, 0, 0)
                body(**named)

    return launch


@contextmanager
def on_kernels() -> Iterator[None]:
    """Objects made meanwhile use kernels; the language is patched once for all their launches."""
    from tokenyard.testing.interpreter import patched_language

    forced = mock.patch.object(CollectiveEngine, "forced", Binder(bind, PROGRAMS))
    with forced, patched_language():
        yield
