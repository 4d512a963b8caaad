"""Make reads of uninitialised memory loud."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils import deterministic


@contextmanager
def poisoned() -> Generator[None, None, None]:
    """Inside, fresh memory (``torch.empty`` and its like, ``resize_``) holds NaN, or the largest
    integer, or ``True``.

    This is torch's own filling, which belongs to its deterministic mode: unlike a function or
    dispatch mode it also reaches custom operators, backward passes, other threads and C++, on every
    device. It holds for the whole process. Operations without a deterministic form still run.
    """
    switch = cast("Any", deterministic)
    filled = switch.fill_uninitialized_memory
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        # not use_deterministic_algorithms(), which imports a compiler: seconds in every process
        torch.set_deterministic_debug_mode("warn")
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            switch.fill_uninitialized_memory = filled
            torch.set_deterministic_debug_mode(before)
