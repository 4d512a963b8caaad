"""Plain values that callers pass: whole numbers as ``operator.index`` knows them, and flags."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import LARGEST


def whole(name: str, value: Any, least: int = 0, most: int = LARGEST, remedy: str = "") -> int:
    """A whole number of any kind (NumPy's, too), but no bool.

    Raises:
        ValueError: it is none, or not in ``least .. most``.
    """
    if type(value) is int and least <= value <= most:  # nearly always
        return value
    try:
        number = None if _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or not least <= number <= most:
        raise ValueError(
            f"{name} ({_short(value)}) must be a whole number from {least} to {most}{remedy}"
        )
    return number


def likely(name: str, value: Any, error: Exception, most: int = LARGEST) -> int | None:
    """``value`` as other ranks are likely to have it, too: None if ``error`` complains of it, or it
    is no positive number.
    """
    try:
        return None if name in str(error) else whole(name, value, 1, most)
    except ValueError:
        return None


def flag(name: str, value: Any) -> bool:
    """What is on or off: a bool (NumPy's, too), 0 or 1; None is off, as DeepEP takes it.

    Raises:
        ValueError: it is anything else, which Python would mostly take for on.
    """
    if value is False or value is True:
        return value
    if value is None:
        return False
    if _is_bool(value) and not isinstance(value, Tensor) and getattr(value, "shape", ()) == ():
        return bool(value)
    try:
        return bool(whole(name, value, 0, 1))
    except ValueError:
        raise ValueError(f"{name} ({_short(value)}) must be True or False") from None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", str(torch.bool))


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
