"""Bugs planted in kernels, made from the text of the real ones.

A plant replaces lines of one kernel file. The text that it replaces must stand there as often as it
says, so a plant that no longer fits fails by itself. The changed file and copies of the others
become a package of their own, which an engine launches from instead. Most of what a plant costs are
seeds that do not find it, so each has a hint: a seed to begin with.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import tokenyard

PACKAGE = "tokenyard.kernels"
KERNELS = Path(tokenyard.__file__).parent / "kernels"


class Plant(NamedTuple):
    """One bug. ``changes``: old and new text; the old one stands ``times`` times in the file."""

    kind: str
    file: str
    changes: tuple[tuple[str, str], ...]
    times: int = 1
    part: str = "rings"
    """Which rehearsal shows it."""
    within: int = 10
    """Seeds in which it must be found."""
    hint: int = 0
    """One of them, tried first: the seed that found it when this was written. Only time depends on
    it.
    """

    def seeds(self) -> list[int]:
        """All seeds in which it must be found, the likeliest first."""
        return sorted(range(self.within), key=lambda seed: seed != self.hint)


def changed(plant: Plant) -> str:
    """The file's text with the bug in it.

    Raises:
        AssertionError: the text to replace does not stand there as often as it should.
    """
    text = (KERNELS / f"{plant.file}.py").read_text()
    for old, new in plant.changes:
        count = text.count(old)
        assert count == plant.times, (
            f"{plant.file}.py holds {count} times, not {plant.times}:\n{old}"
        )
        text = text.replace(old, new)
    return text


@contextmanager
def planted_in(home: Any, plant: Plant | None) -> Iterator[None]:
    """Inside, the engine that has its binders in ``home``, a class or the name of a module,
    launches kernels with a bug; None: copies without one.
    """
    package = f"planted_{abs(hash((home, plant)))}"
    with tempfile.TemporaryDirectory() as directory:
        copies = Path(directory, package)
        copies.mkdir()
        for path in KERNELS.glob("*.py"):
            text = (
                changed(plant)
                if plant is not None and path.stem == plant.file
                else path.read_text()
            )
            (copies / path.name).write_text(text.replace(PACKAGE, package))
        sys.path.insert(0, directory)
        try:
            with _launched_from(import_module(home) if isinstance(home, str) else home, package):
                yield
        finally:
            sys.path.remove(directory)
            for module in [module for module in sys.modules if module.split(".")[0] == package]:
                del sys.modules[module]


@contextmanager
def _launched_from(home: Any, package: str) -> Iterator[None]:
    """Functions that bind kernels, in the names of ``home`` and in tables there, are those of
    ``package``.
    """
    real = dict(vars(home))
    changed = {name: _from(value, package) for name, value in real.items()}
    changed = {name: value for name, value in changed.items() if value is not real[name]}
    assert changed
    try:
        for name, value in changed.items():
            setattr(home, name, value)
        yield
    finally:
        for name in changed:
            setattr(home, name, real[name])


def _from(value: Any, package: str) -> Any:
    """``value``, or what it is in ``package``: a function of a kernel file, or a table."""
    if hasattr(value, "_fields"):
        return type(value)(*(_from(each, package) for each in value))
    module = getattr(getattr(value, "fn", value), "__module__", None) or ""
    if not module.startswith(f"{PACKAGE}.") or isinstance(value, type):
        return value
    return getattr(import_module(module.replace(PACKAGE, package)), value.__name__)
