"""What the models take from the source of the kernels, and the order of operations there, as text
to compare with.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenyard

KERNELS = Path(tokenyard.__file__).parent / "kernels"
SHOWN = {"defer_signal": 3}
"""Which argument of a call its outline shows, if not the first: of what is deferred, the
counter."""


NAMES = {"k.ring.slots": "slots", "net.slots": "far_slots", "Q": "slots"}
"""What constants of kernels are called here."""


class _Named(ast.NodeTransformer):
    """Puts :data:`NAMES` for constants."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return (
            ast.Name(NAMES[ast.unparse(node)], ast.Load()) if ast.unparse(node) in NAMES else node
        )

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(NAMES.get(node.id, node.id), ast.Load())


class Expression:
    """An integer expression of a kernel; call it with the values of its names."""

    def __init__(self, node: ast.expr) -> None:
        self.text = ast.unparse(node)
        self._code = compile(ast.Expression(node), self.text, "eval")

    def __call__(self, **values: int) -> int:
        # Text of our own kernels.
        return int(eval(self._code, {"__builtins__": {}, "tl": _TL}, values))


def _where(condition: bool, one: int, other: int) -> int:
    return one if condition else other


_TL: Any = SimpleNamespace(maximum=max, where=_where)


def function(file: str, name: str) -> ast.FunctionDef:
    """A function of ``kernels/<file>.py``."""
    tree = ast.parse((KERNELS / f"{file}.py").read_text())
    return next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )


def assigned(file: str, name: str, variable: str, using: str) -> Expression:
    """The one expression that the function assigns to ``variable`` and that uses the name
    ``using``.
    """
    assignments = [
        ast.fix_missing_locations(_Named().visit(node.value))
        for node in ast.walk(function(file, name))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable
    ]
    found = [
        value
        for value in assignments
        if any(isinstance(part, ast.Name) and part.id == using for part in ast.walk(value))
    ]
    assert len(found) == 1, (
        f"{file}.py: {name} assigns {variable} {len(found)} times with {using}, not once"
    )
    return Expression(found[0])


def outline(file: str, name: str, verbs: tuple[str, ...]) -> list[str]:
    """Loops, conditions and calls of ``verbs`` in a function, in the order of its text, indented by
    loops and conditions.

    Loops and conditions without such a call in them are left out.
    """
    return list(_outlined(function(file, name).body, verbs, ""))


def _outlined(body: list[ast.stmt], verbs: tuple[str, ...], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.For | ast.While | ast.If):
            head = ast.unparse(node.iter if isinstance(node, ast.For) else node.test)
            word = type(node).__name__.lower()
            for part, title in ((node.body, f"{word} {head}"), (node.orelse, "else")):
                inside = list(_outlined(part, verbs, indent + "  "))
                if inside:
                    yield from (indent + title, *inside)
            continue
        for call in sorted(
            (part for part in ast.walk(node) if isinstance(part, ast.Call)),
            key=lambda c: c.col_offset,
        ):
            verb = ast.unparse(call.func)
            if verb in verbs:
                shown = ast.unparse(call.args[SHOWN.get(verb, 0)]) if call.args else ""
                yield f"{indent}{verb}({shown})"


ROOM_INSIDE = {
    False: assigned("two_dispatch", "_send_turn", "want", "slots"),
    True: assigned("two_combine", "_send_turn", "want", "slots"),
}
"""What a sender inside a node waits for before a chunk, in dispatch and in combine."""
ROOM_FAR_IN_DISPATCH = assigned("two_far", "far_turn", "want", "far_slots")
"""What a network sender waits for before a chunk."""
ROOM_FAR_IN_COMBINE = assigned("two_combine", "_combine", "want", "far_slots")
"""The same of a combiner."""
ROOM_AT_FORWARDER = assigned("two_forward", "_forward", "wants", "slots")
"""What a forwarder waits for before a batch of rows, for each other local rank."""
CREDIT_OF_FORWARDER = assigned("two_forward", "return_credits", "deferred", "CREDIT")
"""What a forwarder returns after a turn."""
