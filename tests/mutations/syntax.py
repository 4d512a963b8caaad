"""Finds nodes in the syntax tree of a kernel file by what they do. ``edits.py`` rewrites them.

Patterns are Python. A name that ends in ``_`` stands for any expression, the same one wherever it
stands again (``_``: any); ``...`` among arguments for any further ones, as a body for any
statements. An argument by keyword is found where it is given by position too. Underscores in front
of names do not count. So parameters and variables may be renamed, added or moved.

``where``: further patterns that must fit somewhere in the same function, for what their names
stand for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenyard

KERNELS = Path(tokenyard.__file__).parent / "kernels"

Caught = dict[str, ast.AST]
"""What names of a pattern stand for."""
Patterns = tuple[str, ...]


class Source(NamedTuple):
    """A kernel file that is being changed."""

    name: str
    tree: ast.Module

    def function(self, names: str) -> ast.FunctionDef:
        """The kernel function of this name; ``a|b``: the first of these that there is.

        Raises:
            AssertionError: there is none.
        """
        known = self._functions()
        found = [known[_bare(name)] for name in names.split("|") if _bare(name) in known]
        assert found, f"{self.name}.py has no function {names}"
        return found[0]

    def _functions(self) -> dict[str, ast.FunctionDef]:
        """Kernels and device functions by name."""
        return {
            _bare(node.name): node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef) and "jit" in map(named, node.decorator_list)
        }

    def _called(self, function: ast.FunctionDef) -> list[ast.AST]:
        """``function``, and those of this file that it calls."""
        known, found = self._functions(), list[ast.AST]([function])
        for each in found:
            for node in ast.walk(each):
                callee = known.get(_bare(named(node))) if isinstance(node, ast.Call) else None
                if callee is not None and callee not in found:
                    found.append(callee)
        return found

    def places(
        self, pattern: str, inside: str, where: Patterns = ()
    ) -> list[tuple[ast.AST, Caught]]:
        """Nodes that fit ``pattern`` in function ``inside`` ("": anywhere), in the order of the
        text; if there are none, in one that it calls.
        """
        scopes = self._called(self.function(inside)) if inside else [self.tree]
        for scope in scopes:
            if found := self._fitting(pattern, where, scope):
                return found
        return []

    def _fitting(
        self, pattern: str, where: Patterns, scope: ast.AST
    ) -> list[tuple[ast.AST, Caught]]:
        found: dict[int, tuple[ast.AST, Caught]] = {}
        for known in self._bound(scope, where, {}):
            for node in _in_order(scope):
                caught = dict(known)
                if id(node) not in found and fits(parsed(pattern), node, caught, self.name):
                    found[id(node)] = node, caught
        return list(found.values())

    def _bound(self, scope: ast.AST, where: Patterns, known: Caught) -> Iterator[Caught]:
        if not where:
            yield known
            return
        for node in _in_order(scope):
            caught = dict(known)
            if fits(parsed(where[0]), node, caught, self.name):
                yield from self._bound(scope, where[1:], caught)

    def only(
        self,
        pattern: str,
        inside: str,
        where: Patterns = (),
        times: int = 1,
        nth: int | None = None,
    ) -> list[tuple[ast.AST, Caught]]:
        """The ``nth`` of :meth:`places`, or all.

        Raises:
            AssertionError: there are not just ``times`` of them.
        """
        found = self.places(pattern, inside, where)
        if nth is not None and found:
            return [found[nth]]
        place = f"{self.name}.py" + (f", {inside}" if inside else "")
        assert len(found) == times, f"{place} has {len(found)} times, not {times}: {pattern}"
        return found

    def exchange(self, old: ast.AST, new: ast.AST) -> None:
        """Put ``new`` in the place of ``old``."""
        for parent in ast.walk(self.tree):
            for field, value in ast.iter_fields(parent):
                if value is old:
                    setattr(parent, field, new)
                    return
                if isinstance(value, list) and any(each is old for each in value):
                    value[:] = [new if each is old else each for each in value]
                    return
        raise AssertionError(f"no longer there: {ast.unparse(old)}")

    def way_to(self, node: ast.AST) -> list[tuple[list[ast.stmt], int]]:
        """The blocks of statements that hold ``node``, and where: the innermost first."""
        return _way(self.tree, node)[::-1]

    def take_out(self, node: ast.AST) -> ast.stmt:
        """Leave out the innermost statement that holds ``node``."""
        body, at = self.way_to(node)[0]
        taken = body.pop(at)
        if not body:
            body.append(ast.Pass())
        return taken


def _way(tree: ast.AST, node: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    for _, value in ast.iter_fields(tree):
        each: Any
        for at, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, ast.AST) and any(other is node for other in ast.walk(each)):
                here = [(value, at)] if isinstance(each, ast.stmt) else []
                return here + _way(each, node)
    return []


def _in_order(scope: ast.AST) -> Iterator[ast.AST]:
    yield scope
    for child in ast.iter_child_nodes(scope):
        yield from _in_order(child)


# Patterns


@cache
def parsed(pattern: str) -> ast.AST:
    """A pattern: an expression, or a statement."""
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def filled(pattern: str, caught: Caught) -> ast.AST:
    """``pattern`` with what its names stand for."""
    return Filling(caught).visit(deepcopy(parsed(pattern)))


class Filling(ast.NodeTransformer):
    """Puts what names stand for in their places."""

    def __init__(self, caught: Caught) -> None:
        self._caught = caught

    def visit_Name(self, node: ast.Name) -> ast.AST:
        found = self._caught.get(node.id)
        assert found is not None or not node.id.endswith("_"), f"nothing is caught as {node.id}"
        return node if found is None else deepcopy(found)


def fits(pattern: Any, node: Any, caught: Caught, file: str) -> bool:
    """Whether ``node`` is as ``pattern`` says; what its names stand for goes to ``caught``."""
    if isinstance(pattern, ast.Name) and pattern.id.endswith("_"):
        return isinstance(node, ast.expr) and _is_caught(pattern.id, node, caught)
    if isinstance(pattern, list):
        return _is_dots(pattern) or (
            len(pattern) == len(node)
            and all(fits(*both, caught, file) for both in zip(pattern, node, strict=True))
        )
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call):
        return fits(pattern.func, node.func, caught, file) and _arguments_fit(
            pattern, node, caught, file
        )
    if not isinstance(pattern, ast.AST):
        return _bare(pattern) == _bare(node)
    any_body = _is_dots(getattr(pattern, "body", None))
    return all(
        fits(getattr(pattern, field), getattr(node, field), caught, file)
        for field in pattern._fields
        if field not in ("ctx", "type_comment") and not (any_body and field == "orelse")
    )


def _is_caught(name: str, node: ast.AST, caught: Caught) -> bool:
    if name == "_":
        return True
    known = caught.setdefault(name, node)
    return known is node or ast.unparse(known) == ast.unparse(node)


def _bare(value: Any) -> Any:
    return value.lstrip("_") if isinstance(value, str) else value


def named(node: Any) -> str:
    """What a call, or a decorator, is of."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_dots(body: Any) -> bool:
    return (
        isinstance(body, list)
        and len(body) == 1
        and isinstance(body[0], ast.Expr)
        and _are_dots(body[0].value)
    )


def _are_dots(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _arguments_fit(pattern: ast.Call, node: ast.Call, caught: Caught, file: str) -> bool:
    dots = [at for at, each in enumerate(pattern.args) if _are_dots(each)]
    given = {each.arg: each.value for each in node.keywords}
    for each in pattern.keywords:
        value = given.get(each.arg) or _by_position(node, each.arg or "", file)
        if value is None or not fits(each.value, value, caught, file):
            return False
    if not dots:
        known = len(pattern.args) + len(pattern.keywords)
        if known != len(node.args) + len(node.keywords):
            return False
        return fits(pattern.args, node.args[: len(pattern.args)], caught, file)
    before, behind = pattern.args[: dots[0]], pattern.args[dots[0] + 1 :]
    middle = len(node.args) - len(behind)
    return (
        len(before) <= middle
        and fits(before, node.args[: len(before)], caught, file)
        and fits(behind, node.args[middle:], caught, file)
    )


def _by_position(node: ast.Call, parameter: str, file: str) -> ast.AST | None:
    known = _signatures().get(_bare(named(node)), {})
    names = known.get(file) or next(iter(known.values()), [])
    at = names.index(parameter) if parameter in names else len(node.args)
    return node.args[at] if at < len(node.args) else None


@cache
def _signatures() -> dict[str, dict[str, list[str]]]:
    """Names of parameters, by function and file."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                found.setdefault(_bare(node.name), {})[path.stem] = names
    return found
