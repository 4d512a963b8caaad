"""Edits of the syntax tree of a kernel file: what mutations are made of. ``syntax.py`` has the
language of their patterns.

``inside``: a function, with those of its file that it calls; ``a|b``: whichever there is; "": all.
``where``: further patterns that must fit in the same function, for what their names stand for.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from copy import deepcopy

from syntax import Caught, Filling, Patterns, Source, filled, fits, parsed

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


def first_of(*edits: Edit) -> Edit:
    """The first of ``edits`` that fits: for what a kernel may do in one of two ways."""

    def edit(source: Source) -> None:
        complaints: list[str] = []
        for each in edits:
            try:
                return each(source)
            except AssertionError as error:
                complaints.append(str(error))
        raise AssertionError("; ".join(complaints))

    return edit


def both(*edits: Edit) -> Edit:
    """One after the other."""

    def edit(source: Source) -> None:
        for each in edits:
            each(source)

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


def insert(
    statement: str, before: str, inside: str, *, where: Patterns = (), first: bool = False
) -> Edit:
    """Put ``statement`` before the one that holds what fits ``before``; ``first``: as the first of
    its block.
    """

    def edit(source: Source) -> None:
        anchor, found = source.only(before, inside, where)[0]
        body, at = source.way_to(anchor)[0]
        at = 0 if first else at
        new = filled(statement, found)
        body.insert(at, ast.Expr(new) if isinstance(new, ast.expr) else new)

    return edit


def move(
    pattern: str, before: str, inside: str, *, where: Patterns = (), along: bool = False,
    keep: bool = False, first: bool = False,
) -> Edit:  # fmt: skip
    """Let the statement that holds what fits ``pattern`` stand before the one that holds what fits
    ``before``: in its own block, if that is there too.

    ``along``: with what it needs that is made in between. ``keep``: it is repeated, not moved.
    ``first``: as in :func:`insert`.
    """

    def edit(source: Source) -> None:
        ((node, _),) = source.only(pattern, inside)
        ((anchor, _),) = source.only(before, inside, where)
        own = source.way_to(node)
        ways = source.way_to(anchor)
        shared = [way for way in ways if way[0] is own[0][0]]
        body, at = shared[0] if shared else ways[0]
        goal = body[at]
        needed = _needed(node, body, at, own) if along else []
        assert goal not in needed, f"{source.name}.py: it needs what it is to go before"
        statement = deepcopy(own[0][0][own[0][1]]) if keep else source.take_out(node)
        for each in needed:
            block, at = source.way_to(each)[0]
            del block[at]
        at = 0 if first else body.index(goal)
        body[at:at] = [*needed, statement]

    return edit


def _needed(
    node: ast.AST, body: list[ast.stmt], start: int, own: list[tuple[list[ast.stmt], int]]
) -> list[ast.stmt]:
    """Assignments from ``start`` of ``body`` to ``node`` whose results it needs."""
    names, found = _names(node, ast.Load), list[ast.stmt]()
    for block, end in own:
        for each in reversed(block[start if block is body else 0 : end]):
            if isinstance(each, ast.Assign) and _names(each, ast.Store) & names:
                names |= _names(each, ast.Load)
                found.insert(0, each)
        if block is body:
            return found
    raise AssertionError("it does not stand behind its goal")


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
        body.insert(at, Filling(renamed).visit(statement))

    return edit


def importing(name: str, module: str) -> Edit:
    """Have ``name`` of another kernel file."""

    def edit(source: Source) -> None:
        (line,) = ast.parse(f"from tokenyard.kernels.{module} import {name}").body
        at = next(i for i, each in enumerate(source.tree.body) if isinstance(each, ast.Import))
        source.tree.body.insert(at, line)

    return edit
