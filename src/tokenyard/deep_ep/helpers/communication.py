"""Functions of any buffer: DeepEP V2.5's ``deep_ep.comm``."""

from __future__ import annotations

from typing import Any


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """``buffer.barrier(...)``. A buffer has one context, so ``context_idx`` is None or 0."""
    if context_idx not in (None, 0):
        raise ValueError(f"context_idx ({context_idx!r}) must be None or 0: a buffer has one group")
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: Any) -> Any:
    """The stream of asynchronous calls of ``buffer``."""
    return buffer.get_comm_stream()
