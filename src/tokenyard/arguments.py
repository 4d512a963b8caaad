"""Plain arguments as callers give them: numbers of whatever type, flags, timeouts, devices."""

from __future__ import annotations

import operator
from math import inf, nan
from numbers import Real
from typing import Any

import torch
from torch import Tensor

LONGEST = 1e9
"""Seconds that a timeout may be; clocks count nanoseconds in 64 bits."""

MOST_EXPERTS = 2**16
"""``num_experts``: every call exchanges counts per expert."""

MOST_PICKS = 2**12
"""``num_topk``: merging compares every pick of a token with every other."""

MOST_BYTES = 2**47
"""Of a region of symmetric memory, and of what an option may count: an address space."""

LARGEST = 2**31 - 1
"""Of the whole numbers that an option may be: rows are counted in int32."""


def whole(value: Any) -> int | None:
    """``value`` as an int; None of a bool, a tensor (it may be on a device) or a fraction."""
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
    """``value`` as an int. ValueError, ``more`` behind: it is none from ``least`` to ``most``."""
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


def check_flag(name: str, value: Any) -> None:
    """What is on or off: a word or a number would be taken for on, whatever it says."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} ({value!r}) must be True or False")


def check_timeout(timeout: Any) -> float:
    """A timeout in seconds."""
    seconds = real(timeout)
    if not 0 < seconds <= LONGEST:
        raise ValueError(
            f"timeout ({timeout!r}) must be a positive number of seconds, at most {LONGEST:.0f}"
        )
    return seconds


def check_device(device: torch.device | str) -> torch.device:
    """A device with its index, as tensors carry it."""
    try:
        known = torch.device(device)
        if known.type not in ("cpu", "cuda"):
            raise ValueError
        if known.type == "cuda" and ":" not in str(known):
            known = torch.device("cuda", torch.accelerator.current_device_index())
        if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
            raise ValueError
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"device ({device!r}) must be cpu or a CUDA device that this process sees"
        ) from None
    return known


def check_after(after: Any) -> None:
    """What a call may have to wait for."""
    if after is not None and not callable(getattr(after, "wait", None)):
        raise ValueError(f"after ({after!r}) must be an event or something else with wait()")


_MOST = {"num_experts": MOST_EXPERTS, "num_topk": MOST_PICKS}


def check_sizes(sizes: dict[str, Any]) -> dict[str, int]:
    """Construction arguments, positive whole numbers, as ints."""
    return {
        name: check_whole(name, value, 1, _MOST.get(name, LARGEST)) for name, value in sizes.items()
    }


def check_optional(sizes: dict[str, Any]) -> dict[str, int | None]:
    """Sizes that have a default: whole numbers from 1, as ints, or None. Bytes may be many."""
    given = {name: value for name, value in sizes.items() if value is not None}
    return sizes | {
        name: check_whole(name, value, 1, MOST_BYTES, ", or None") for name, value in given.items()
    }


def check_once(once_per_node: Any, engine: str, only: str) -> None:
    """ValueError: ``once_per_node`` is neither None nor a bool, or not of the ``only`` engine."""
    if once_per_node is not None and not isinstance(once_per_node, bool):
        raise ValueError(f"once_per_node ({once_per_node!r}) must be True, False or None")
    if once_per_node is not None and engine != only:
        raise ValueError(
            f"once_per_node ({once_per_node}) belongs to engine {only!r}, not {engine!r}: leave it "
            "out"
        )
