"""Numbers as callers give them: Python's, numpy's, or of any other type that says what it is."""

from __future__ import annotations

import operator
from math import inf, nan
from numbers import Real
from typing import Any

from torch import Tensor

LARGEST = 2**31 - 1
"""Of the whole numbers that an option may be: rows are counted in int32."""


def whole(value: Any) -> int | None:
    """``value`` as an int, or None if it is no whole number. A bool is none, nor is a tensor: it
    may be on a device.
    """
    if type(value) is int:
        return value
    if (
        isinstance(value, (bool, Tensor))
        or getattr(getattr(value, "dtype", None), "kind", "") == "b"
    ):
        return None  # numpy before 2.3 gives its bools an index
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_whole(name: str, value: Any, least: int, most: int, more: str = "") -> int:
    """``value`` as an int.

    Raises: ValueError: it is no whole number, or not from ``least`` to ``most``. ``more`` is said
    behind.
    """
    number = whole(value)
    if number is None or not least <= number <= most:
        raise ValueError(
            f"{name} ({value!r}) must be a whole number of at least {least} (at most {most}){more}"
        )
    return number


def real(value: Any) -> float:
    """``value`` as a float, nan if it is no real number. A bool is none, nor is a tensor."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        return nan
    try:
        return float(value)
    except OverflowError:
        return inf
