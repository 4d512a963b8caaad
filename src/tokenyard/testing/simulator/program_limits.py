"""What may be asked of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tokenyard.testing.simulator.hardware import Hardware

Grid: TypeAlias = "int | np.integer[Any] | Sequence[int]"


def check_options(world_size: int, resident: int | None, hardware: dict[str, Any]) -> None:
    """Raise unless a simulation can have these options.

    Raises:
        ValueError: ``world_size`` or ``resident`` is less than 1, or an option is unknown.
    """
    if world_size < 1:
        raise ValueError(f"world_size ({world_size}) must be at least 1: give the number of ranks")
    if resident is not None and resident < 1:
        raise ValueError(
            f"resident ({resident}) must be at least 1, or None for any number of programs"
        )
    unknown = sorted(set(hardware) - set(Hardware._fields))
    if unknown:
        raise ValueError(
            f"unknown option(s) {', '.join(unknown)}: besides its own arguments a Simulator takes "
            f"{', '.join(Hardware._fields)}"
        )


def check_rank(rank: int, world_size: int, what: str) -> None:
    """Raise unless there is such a rank.

    Raises:
        ValueError: there is not.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{what}: rank ({rank}) must be from 0 to {world_size - 1}: give one of these, or more "
            f"ranks by world_size"
        )


def grid_of(grid: Grid) -> tuple[int, int, int]:
    """A grid of one to three dimensions as three.

    Raises:
        ValueError: there are more or none, or one is negative.
    """
    dims = [int(grid)] if isinstance(grid, int | np.integer) else [int(dim) for dim in grid]
    if not 1 <= len(dims) <= 3:
        raise ValueError(
            f"a grid ({grid}) must have 1 to 3 dimensions, not {len(dims)}: fold some into one"
        )
    if min(dims) < 0:
        raise ValueError(
            f"a grid ({grid}) must not be negative: give the number of programs, 0 for no work"
        )
    x, y, z = (*dims, 1, 1)[:3]
    return x, y, z


def extent(buffer: Any) -> tuple[int, int, int]:
    """Of an array or CPU tensor: address of its first element, its lowest address, and bytes from
    there to the end of its highest element; strides may leave gaps between."""
    shape: list[int] = list(buffer.shape)
    if isinstance(buffer, np.ndarray):
        first, strides, size = int(buffer.ctypes.data), list(buffer.strides), buffer.itemsize
    else:
        first, size = int(buffer.data_ptr()), int(buffer.element_size())
        strides = [stride * size for stride in buffer.stride()]
    if 0 in shape:
        return first, first, 0
    reaches = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return first, first + low, high - low + size
