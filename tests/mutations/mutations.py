"""Bugs planted in copies of the kernels: each is a few edits of a kernel's syntax tree, which
``edits.py`` makes.

What an edit looks for is what the code does, not how it is spelled. One that no longer fits, or
fits more often than it should, fails by itself. The changed file and copies of the others become a
package of their own, which engines launch from instead. Most of what a mutation costs are seeds
that do not find it, so each has a hint: a seed to begin with.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from edits import Edit
from syntax import KERNELS, Caught, Patterns, Source

PACKAGE = "tokenyard.kernels"


class Mutation(NamedTuple):
    """One bug: ``edits`` of one kernel file, whose name begins with ``file`` (``a|b``: or so)."""

    kind: str
    file: str
    edits: tuple[Edit, ...]
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


def mutation(
    kind: str, file: str, *edits: Edit, part: str = "rings", within: int = 10, hint: int = 0
) -> Mutation:
    """See :class:`Mutation`."""
    return Mutation(kind, file, edits, part, within, hint)


@cache
def changed(
    mutation: Mutation, prepared: Callable[[ast.Module], ast.Module] = lambda tree: tree
) -> tuple[str, str]:
    """The file that the bug fits, and its text with the bug in it. Files are ``prepared`` before.

    Raises:
        AssertionError: it fits none, or several.
    """
    found, complaints = list[tuple[str, str]](), list[str]()
    for path in _files(mutation):
        try:
            glance(mutation.edits, path)
            source = Source(path.stem, prepared(ast.parse(path.read_text())))
            for edit in mutation.edits:
                edit(source)
        except AssertionError as error:
            complaints.append(str(error))
            continue
        found.append((path.stem, ast.unparse(ast.fix_missing_locations(source.tree))))
    assert len(found) == 1, f"fits {[file for file, _ in found]}; " + "; ".join(complaints)
    assert found[0][1] != _unchanged(found[0][0])
    return found[0]


def file_of(mutation: Mutation) -> str:
    """The file that the bug fits; mostly told from the names of its functions, which is quick."""
    found = list[str]()
    for path in _files(mutation):
        with suppress(AssertionError):
            glance(mutation.edits, path)
            found.append(path.stem)
    return found[0] if len(found) == 1 else changed(mutation)[0]


def _files(mutation: Mutation) -> list[Path]:
    names = tuple(mutation.file.split("|"))
    return [path for path in sorted(KERNELS.glob("*.py")) if path.stem.startswith(names)]


@cache
def _unchanged(file: str) -> str:
    return ast.unparse(ast.parse((KERNELS / f"{file}.py").read_text()))


class Glance(Source):
    """A file of which no more is known than its functions."""

    def function(self, names: str) -> ast.FunctionDef:
        super().function(names)
        raise Worthwhile

    def places(
        self, pattern: str, inside: str, where: Patterns = ()
    ) -> list[tuple[ast.AST, Caught]]:
        if inside:
            self.function(inside)
        raise Worthwhile


class Worthwhile(Exception):
    """A file has what is looked for first."""


def glance(edits: Sequence[Edit], path: Path) -> None:
    """Raise AssertionError if the file lacks the first function of the ``edits``: most files do, so
    few are parsed.
    """
    try:
        for edit in edits:
            edit(Glance(path.stem, ast.Module([ast.Import([]), *_heads(path)], [])))
    except Worthwhile:
        pass


@cache
def _heads(path: Path) -> list[ast.stmt]:
    """The functions of a file, without their bodies."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    for node in found:
        node.body.clear()
    return [*found]


@contextmanager
def mutated(mutation: Mutation | None) -> Iterator[None]:
    """Inside, engines launch kernels with a bug; None: copies without one."""
    package = f"planted_{abs(hash(mutation))}"
    file, changed_text = changed(mutation) if mutation is not None else ("", "")
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory, package)
        home.mkdir()
        for path in KERNELS.glob("*.py"):
            text = changed_text if path.stem == file else path.read_text()
            (home / path.name).write_text(text.replace(PACKAGE, package))
        sys.path.insert(0, directory)
        try:
            with _launched_from(package):
                yield
        finally:
            sys.path.remove(directory)
            for module in [module for module in sys.modules if module.split(".")[0] == package]:
                del sys.modules[module]


@contextmanager
def _launched_from(package: str) -> Iterator[None]:
    """The kernels, and functions that bind and launch them, that modules of the engines have
    imported are those of ``package``.
    """
    with ExitStack() as stack:
        modules = [
            module for name, module in sys.modules.items() if name.startswith("tokenyard.engines.")
        ]
        count = sum(_exchange(module, package, stack) for module in modules)
        assert count >= 3
        yield


def _exchange(module: Any, package: str, stack: ExitStack) -> int:
    """How many names of ``module`` are exchanged until ``stack`` is closed."""
    real = {name: value for name, value in vars(module).items() if _home(value).startswith(PACKAGE)}
    for name, value in real.items():
        setattr(module, name, _copy(value, package))
        stack.callback(setattr, module, name, value)
    return len(real)


def _copy(value: Any, package: str) -> Any:
    """What is called so in ``package``."""
    copy = import_module(_home(value).replace(PACKAGE, package))
    return getattr(copy, getattr(value, "fn", value).__name__)


def _home(value: Any) -> str:
    """The module that a function, a kernel or a struct is from; "" for others."""
    if isinstance(value, tuple) or not (callable(value) or hasattr(value, "fn")):
        return ""
    return getattr(getattr(value, "fn", value), "__module__", None) or ""
