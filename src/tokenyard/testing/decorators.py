"""``@distributed_test``: a pytest item whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from itertools import product
from typing import Any, TypeVar

from tokenyard.engines.known import COLLECTIVE
from tokenyard.testing.job import Job
from tokenyard.testing.modules import BODY, code_of
from tokenyard.testing.one_process import BodyRun, run_in_simulator
from tokenyard.testing.pool import pools

DEVICE_VARIABLE = "TOKENYARD_TEST_DEVICE"
PROCESSES = ("cpu", "cuda")
"""Devices whose ranks are processes."""
SEED_VARIABLE = "TOKENYARD_TEST_SEED"
IN_PROCESS: dict[str, Callable[[BodyRun], None]] = {
    "simulated": lambda run: run_in_simulator(*run[:4], int(os.environ.get(SEED_VARIABLE, "0")))
}
"""What runs a body on ranks of this process, by its word. A ``conftest.py`` may add more."""

_RANKS = "ranks"
_WORLD_SIZE = "_world_size"
_ENGINE = "_engine"

_T = TypeVar("_T")


def distributed_test(
    *,
    world_size: int | tuple[int, ...] = 4,
    engine: str | tuple[str, ...] = COLLECTIVE,
    timeout: float = 1200.0,
    may_die: tuple[int, ...] = (),
    pool: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated function on ``world_size`` ranks, each a process, when pytest (or anyone)
    calls it.

    A tuple of world sizes or engines makes one test of each (ids like ``ranks4-collective``). The
    parameter ``ranks`` of the body, if it has one, is a :class:`Ranks`. Other arguments (fixtures,
    parameters, ``self``) are pickled for every rank. Ranks in ``may_die`` may exit or be killed
    without failing the test. After ``timeout`` seconds the ranks that still run are ended and their
    stacks shown. Worker processes serve one test after another; those of a ``pool`` serve only
    tests that name it, say because a library can be set up in one way only in a process.

    ``TOKENYARD_TEST_DEVICE=cuda`` runs on GPUs (``launch.backend_for`` picks the backend),
    ``simulated`` on coroutines under the schedule of seed ``TOKENYARD_TEST_SEED`` (engines that
    have kernels only); the default is ``cpu``.

    The call raises :class:`RankFailure` with the tracebacks of the ranks that failed, and skips if
    every rank skips.
    """
    sizes, engines = _as_tuple(world_size), _as_tuple(engine)
    if outside := [rank for rank in may_die if not 0 <= rank < max(sizes)]:
        raise ValueError(f"may_die has {outside}, but ranks go from 0 to {max(sizes) - 1}")

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        if "<locals>" in body.__qualname__:
            raise TypeError(
                f"{body.__qualname__} must be at module or class level, where other processes can "
                f"find it"
            )
        signature = inspect.signature(body)
        parameters = [p for p in signature.parameters.values() if p.name != _RANKS]
        visible = signature.replace(parameters=parameters)

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            picked_sizes = (kwargs.pop(_WORLD_SIZE),) if _WORLD_SIZE in kwargs else sizes
            picked_engines = (kwargs.pop(_ENGINE),) if _ENGINE in kwargs else engines
            arguments = visible.bind(*args, **kwargs).arguments
            for ranks, name in product(picked_sizes, picked_engines):
                if run := IN_PROCESS.get(_device()):
                    run(BodyRun(body, name, arguments, ranks, timeout))
                else:
                    job = _job(body, name, arguments)
                    pools().run(job, ranks, _device(), timeout, may_die, pool)

        setattr(test, BODY, body)
        return _parametrised(test, visible, world_size, engine)

    return decorate


def _as_tuple(value: _T | tuple[_T, ...]) -> tuple[_T, ...]:
    return value if isinstance(value, tuple) else (value,)  # pyright: ignore[reportUnknownVariableType]


def _device() -> str:
    device, known = os.environ.get(DEVICE_VARIABLE, PROCESSES[0]), (*PROCESSES, *IN_PROCESS)
    if device not in known:
        raise ValueError(f"{DEVICE_VARIABLE} is {device!r}; use one of {', '.join(known)}")
    return device


def _parametrised(
    test: Callable[..., None],
    visible: Signature,
    world_size: int | tuple[int, ...],
    engine: str | tuple[str, ...],
) -> Callable[..., None]:
    """Show pytest, if it is there, the signature without ``ranks``, a parameter for each tuple."""
    choices = [(_WORLD_SIZE, world_size, "ranks{}"), (_ENGINE, engine, "{}")]
    tuples = [(name, values, style) for name, values, style in choices if isinstance(values, tuple)]
    hidden = [Parameter(name, Parameter.KEYWORD_ONLY) for name, _, _ in tuples]
    parameters = sorted(
        [*visible.parameters.values(), *hidden], key=lambda parameter: parameter.kind
    )
    setattr(test, "__signature__", visible.replace(parameters=parameters))  # noqa: B010 (functions have no such attribute)
    pytest = sys.modules.get("pytest")
    if pytest is not None:
        for name, values, style in tuples:
            test = pytest.mark.parametrize(name, values, ids=style.format)(test)
    return test


def _job(body: Callable[..., Any], engine: str, arguments: dict[str, Any]) -> Job:
    __tracebackhide__ = True
    path = getattr(sys.modules.get(body.__module__), "__file__", None)
    if path is None:
        raise TypeError(f"{body.__qualname__} must be in a file, where other processes can find it")
    pickled: dict[str, bytes] = {}
    for name, value in arguments.items():
        try:
            pickled[name] = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"argument {name!r} of {body.__qualname__} cannot be pickled for the ranks "
                f"({error}); pass plain values"
            ) from None
    sys_path = [entry or os.getcwd() for entry in sys.path]
    path = os.path.abspath(path)
    code = b"" if body.__module__ == "__main__" else code_of(path)
    return Job(body.__module__, path, body.__qualname__, code, engine, pickled, sys_path)
