"""Runs functions of test modules in processes whose kernels are interpreted, whatever Triton does
in this one.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest

from tokenyard.launch import forks

without_devices = pytest.mark.skipif(
    os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") != "cpu",
    reason="needs no device: make test runs it",
)
SOAK = max(1, int(os.environ.get("TOKENYARD_SOAK_SEEDS", "1")))
"""``make soak`` runs so many times as many seeds."""


def seeds(count: int) -> range:
    """``count`` of them in ``make test``; ``make soak`` multiplies twice as many."""
    return range(count if SOAK == 1 else 2 * count * SOAK)


def little_patience() -> AbstractContextManager[Any]:
    """Inside, the simulator believes sooner that a program waits until a deadline. The engines'
    kernels look at the clock every 16 polls; others may count their rounds for longer.
    """
    return mock.patch("tokenyard.testing.simulator.standstill._PATIENCE", (16, 32, 32))


Job = tuple[str, tuple[Any, ...]]
"""``module.function`` and its arguments."""


def _interpret(environment: dict[str, str]) -> None:
    os.nice(5)  # tests that wait for each other in real time go first
    gc.set_threshold(50_000, 20, 20)  # a sixth of the time went into looking for garbage
    os.environ.clear()  # it may be that of the fork server
    os.environ.update(environment, TRITON_INTERPRET="1")
    import_module("torch").set_num_threads(1)


@cache
def _pool() -> ProcessPoolExecutor:
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = max(1, min(4, (os.cpu_count() or 1) // beside))
    # forks have Triton as this process has it
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    context = forks() if interpreting else get_context("spawn")
    return ProcessPoolExecutor(workers, context, _interpret, (dict(os.environ),))


def _call(job: Job) -> tuple[Any, str]:
    """Result, traceback if it raised."""
    module, _, name = job[0].rpartition(".")
    try:
        return getattr(_imported(module), name)(*job[1]), ""
    except Exception as error:
        return None, "".join(traceback.format_exception(error, limit=-8, chain=False))


def _imported(module: str) -> Any:
    """A module, which stays: the garbage collector need not look at it a thousand times."""
    if module not in sys.modules:
        import_module(module)
        gc.collect()
        gc.freeze()
    return sys.modules[module]


def run_all(function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``function(*each)`` for all arguments, side by side; results in order.

    Raises:
        AssertionError: some raised; says which, with the first traceback.
    """
    __tracebackhide__ = True
    done = list(_pool().map(_call, [(function, each) for each in arguments]))
    failed = [(each, text) for each, (_, text) in zip(arguments, done, strict=True) if text]
    if failed:
        which = ", ".join(str(each) for each, _ in failed[:20])
        raise AssertionError(
            f"{len(failed)} of {len(done)} calls of {function} failed: {which}\n{failed[0][1]}"
        )
    return [result for result, _ in done]
