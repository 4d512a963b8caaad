"""Frameworks that speak DeepEP, beside each other in one environment, without what they need.

``frameworks.txt`` says where each lies. A framework's modules stay in the processes that import
them, so a test file has ranks of its own (:func:`own_ranks`) and one framework.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tokenyard.deep_ep.generations import known
from tokenyard.testing import decorators
from tokenyard.testing.pool import Pools

FOLDER = Path(os.environ.get("TOKENYARD_FRAMEWORKS", Path(sys.prefix) / "frameworks"))


def needs(framework: str) -> pytest.MarkDecorator:
    """Skip, and say why, unless ``NAME-VERSION`` is installed under :data:`FOLDER` and ranks are
    on CPUs.
    """
    if not (FOLDER / framework / f"{framework}.dist-info").exists():
        why = f"{framework} is not installed in {FOLDER}: tests/dropin/frameworks.txt"
    elif os.environ.get(decorators.DEVICE_VARIABLE, "cpu") != "cpu":
        why = f"{framework} is tested on CPUs, with stand-ins for what it does on GPUs"
    else:
        why = ""
    return pytest.mark.skipif(bool(why), reason=why)


@pytest.fixture(scope="module", autouse=True)
def own_ranks() -> Generator[None]:
    """Ranks that no other test file shares: they end with this one."""
    pools = Pools()
    with mock.patch.object(decorators, "pools", return_value=pools):
        yield
    pools.close()


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for modules that a framework imports and the classes under test never use: names
    that begin with a capital are empty classes, others are mocks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if any(f"{fullname}.".startswith(f"{name}.") for name in self._names):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: _made(module, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def _made(module: ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = type(name, (), {}) if name[0].isupper() else mock.MagicMock(name=name)
    setattr(module, name, made)
    return made


def lend(framework: str, *, bare: Sequence[str] = (), absent: Sequence[str] = ()) -> None:
    """Make a framework importable in this process. Each test calls it again, as each has the path
    of the process that started it.

    Args:
        framework: ``NAME-VERSION``.
        bare: packages whose ``__init__`` is left out, as it imports all the framework has.
        absent: modules for :class:`Absent`.
    """
    folder = FOLDER / framework
    sys.path.insert(0, str(folder))
    if framework in _lent:
        return
    _lent.add(framework)
    sys.meta_path.insert(0, Absent(absent))
    for name in bare:
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module


_lent: set[str] = set()


def lend_deep_ep(generation: str) -> None:
    """Have ``import deep_ep`` find tokenyard's, of this generation; as :func:`lend`."""
    sys.path.insert(0, str(known(generation).path))
