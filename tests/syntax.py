"""Finds nodes in the syntax tree of a kernel file by what they do, and rewrites them.

Patterns are Python. A name that ends in ``_`` stands for any expression, the same one wherever it
stands again (``_``: any); ``...`` among arguments for any further ones, as a body for any
statements. An argument by keyword is found where it is given by position too. Underscores in front
of names do not count. So parameters and variables may be renamed, added or moved.

``where``: further patterns that must fit somewhere in the same function, for what their names
stand for.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
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

    def function(self, name: str) -> ast.FunctionDef:
        """The kernel's function of this name.

        Raises:
            AssertionError: there is none.
        """
        kernels = [
            node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef) and node.decorator_list  # by Triton
        ]
        found = [node for node in kernels if _bare(node.name) == _bare(name)]
        assert len(found) == 1, f"{self.name}.py has {len(found)} functions {name}"
        return found[0]

    def places(
        self, pattern: str, inside: str, where: Patterns = (), scope: ast.AST | None = None
    ) -> list[tuple[ast.AST, Caught]]:
        """Nodes that fit ``pattern`` in function ``inside`` ("": anywhere), in the order of the
        text.
        """
        scope = scope or (self.function(inside) if inside else self.tree)
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
    return _Filling(caught).visit(deepcopy(parsed(pattern)))


class _Filling(ast.NodeTransformer):
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
    function = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    known = _signatures().get(_bare(function), {})
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


# Edits

Edit = Callable[[Source], None]


def change(
    pattern: str, inside: str = "", *, where: Patterns = (), times: int = 1, nth: int | None = None,
    **caught: str,
) -> Edit:  # fmt: skip
    """Where ``pattern`` fits, put other expressions in the place of what its names stand for."""

    def edit(source: Source) -> None:
        for node, found in source.only(pattern, inside, where, times, nth):
            _change(source, node, found, caught)

    return edit


def _change(source: Source, node: ast.AST, found: Caught, caught: dict[str, str]) -> None:
    """Wherever they stand in ``node``."""
    for name, text in caught.items():
        old = ast.unparse(found[name])
        for part in list(ast.walk(node)):
            if isinstance(part, ast.expr) and ast.unparse(part) == old:
                source.exchange(part, filled(text, found))


def rewrite(
    pattern: str, by: str, inside: str = "", *, where: Patterns = (), times: int = 1,
    nth: int | None = None,
) -> Edit:  # fmt: skip
    """Put ``by`` in the place of what fits ``pattern``."""

    def edit(source: Source) -> None:
        for node, found in source.only(pattern, inside, where, times, nth):
            source.exchange(node, filled(by, found))

    return edit


def drop(pattern: str, inside: str = "", *, where: Patterns = (), nth: int | None = None) -> Edit:
    """Leave out the statement that holds what fits ``pattern``."""

    def edit(source: Source) -> None:
        ((node, _),) = source.only(pattern, inside, where, 1, nth)
        source.take_out(node)

    return edit


def drop_barrier(
    inside: str, *, before: str = "", behind: str = "", nth: int | None = None
) -> Edit:
    """Leave out the barrier ``inside``: the only one, the ``nth``, or the nearest one in the same
    block before, or behind, the statement that holds what fits.
    """
    pattern = "tl.debug_barrier()"
    if not before and not behind:
        return drop(pattern, inside, nth=nth)

    def edit(source: Source) -> None:
        ((node, _),) = source.only(before or behind, inside)
        body, at = source.way_to(node)[0]
        barriers = [
            each for each, statement in enumerate(body)
            if isinstance(statement, ast.Expr) and fits(parsed(pattern), statement.value, {}, "")
        ]  # fmt: skip
        near = [each for each in barriers if (each < at if before else each > at)]
        assert near, f"{source.name}.py, {inside} has no barrier there: {before or behind}"
        del body[near[-1] if before else near[0]]

    return edit


def shorten(around: str, inside: str) -> Edit:
    """Let the loop around what fits ``around`` end one earlier."""

    def edit(source: Source) -> None:
        ((node, _),) = source.only(around, inside)
        ways = [block[at] for block, at in source.way_to(node)]
        loop = next(each for each in ways if isinstance(each, ast.For))
        assert isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 3
        loop.iter.args[1] = filled("end_ - 1", {"end_": loop.iter.args[1]})

    return edit


def guard(pattern: str, condition: str, inside: str, *, where: Patterns = ()) -> Edit:
    """Let the statement that holds what fits ``pattern`` run if ``condition`` only."""

    def edit(source: Source) -> None:
        ((node, found),) = source.only(pattern, inside, where)
        body, at = source.way_to(node)[0]
        test = filled(condition, found)
        assert isinstance(test, ast.expr)
        body[at] = ast.If(test, [body[at]], [])

    return edit


def insert(statement: str, before: str, inside: str, *, where: Patterns = ()) -> Edit:
    """Put ``statement`` before the one that holds what fits ``before``."""

    def edit(source: Source) -> None:
        anchor, found = source.only(before, inside, where)[0]
        body, at = source.way_to(anchor)[0]
        new = filled(statement, found)
        body.insert(at, ast.Expr(new) if isinstance(new, ast.expr) else new)

    return edit


def move(
    pattern: str, before: str, inside: str, *, along: bool = False, keep: bool = False
) -> Edit:
    """Let the statement that holds what fits ``pattern`` stand before the one that holds what fits
    ``before``: in its own block, if that is there too.

    ``along``: with what it needs that is made in between. ``keep``: it is repeated, not moved.
    """

    def edit(source: Source) -> None:
        ((node, _),) = source.only(pattern, inside)
        ((anchor, _),) = source.only(before, inside)
        own = source.way_to(node)
        ways = source.way_to(anchor)
        shared = [way for way in ways if way[0] is own[0][0]]
        body, at = shared[0] if shared else ways[0]
        goal = body[at]
        needed = _needed(node, body, at, own) if along else []
        statement = deepcopy(own[0][0][own[0][1]]) if keep else source.take_out(node)
        for each in needed:
            body.remove(each)
        at = body.index(goal)
        body[at:at] = [*needed, statement]

    return edit


def _needed(
    node: ast.AST, body: list[ast.stmt], start: int, own: list[tuple[list[ast.stmt], int]]
) -> list[ast.stmt]:
    """Assignments in ``body`` from ``start`` to what holds ``node`` whose results it needs."""
    end = next(at for block, at in own if block is body)
    names, found = _names(node, ast.Load), list[ast.stmt]()
    for each in reversed(body[start:end]):
        if isinstance(each, ast.Assign) and _names(each, ast.Store) & names:
            names |= _names(each, ast.Load)
            found.insert(0, each)
    return found


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {each.id for each in names if isinstance(each.ctx, context)}


def move_into(pattern: str, inside: str, to: str, before: str) -> Edit:
    """Let the statement that holds what fits ``pattern`` stand in function ``to``, which ``inside``
    calls, before the outermost one that holds what fits ``before``. What it lacks there is passed.
    """

    def edit(source: Source) -> None:
        ((node, _),) = source.only(pattern, inside)
        ((anchor, _),) = source.only(before, to)
        callee = source.function(to)
        (call,) = (
            each
            for each in ast.walk(source.tree)
            if isinstance(each, ast.Call) and ast.unparse(each.func) == callee.name
        )
        names = [argument.arg for argument in callee.args.args]
        known = {ast.unparse(given): name for given, name in zip(call.args, names, strict=False)}
        statement, caller = source.take_out(node), source.function(inside)
        local = _names(caller, ast.Store) | {each.arg for each in caller.args.args}
        for name in sorted(_names(statement, ast.Load) & local - known.keys()):
            known[name] = name
            callee.args.args.insert(0, ast.arg(name))
            call.args.insert(0, ast.Name(name, ast.Load()))
        renamed = {old: ast.Name(new, ast.Load()) for old, new in known.items()}
        body, at = source.way_to(anchor)[-2]
        body.insert(at, _Filling(renamed).visit(statement))

    return edit


def importing(name: str, module: str) -> Edit:
    """Have ``name`` of another kernel file."""

    def edit(source: Source) -> None:
        (line,) = ast.parse(f"from tokenyard.kernels.{module} import {name}").body
        at = next(i for i, each in enumerate(source.tree.body) if isinstance(each, ast.Import))
        source.tree.body.insert(at, line)

    return edit
