"""Mutations are found by what code does: its variables may be called anything."""

from __future__ import annotations

import ast

import pytest

from low_latency_mutations import MUTATIONS as LOW_LATENCY
from mutations import Mutation, changed
from nvlink_mutations import MUTATIONS as NVLINK
from syntax import Caught, Source, fits, parsed
from twolevel_mutations import MUTATIONS as TWOLEVEL

KERNEL = """
@triton.jit
def send(counter, k: tl.constexpr):
    rows = k.rows - 1
    publish(counter, rows, mask=None)
    helper(rows)


@triton.jit
def helper(rows):
    tl.debug_barrier()
"""


def renamed(tree: ast.Module) -> ast.Module:
    """With other names for all that functions assign."""
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            for node in names:
                node.id += "_2" if node.id in local else ""
    return tree


@pytest.mark.parametrize("mutations", [NVLINK, TWOLEVEL, LOW_LATENCY], ids=len)
def test_mutations_fit_the_kernels(mutations: dict[str, Mutation]) -> None:
    """Each one place, whatever variables are called."""
    for name, mutation in mutations.items():
        assert changed(mutation)[0] == changed(mutation, renamed)[0], name


@pytest.mark.parametrize(
    ("pattern", "code", "caught"),
    [
        ("f(a_, ...)", "f(x + 1, y)", {"a_": "x + 1"}),
        ("f(..., last_)", "f(x, y)", {"last_": "y"}),
        ("f(..., sem=sem_)", "f(x, scope=1, sem=2)", {"sem_": "2"}),
        ("a_ - a_", "x - x", {"a_": "x"}),
        ("a_ - a_", "x - y", None),
        ("f(a_)", "f(x, y)", None),
        ("f(a_)", "f(x, mask=y)", None),
        ("copy(...)", "_copy(x)", {}),
        ("a_ = f(...)", "x = f(1)", {"a_": "x"}),
        ("for _ in range(...): ...", "for i in range(3): f(i)", {}),
        ("if a_: ...", "if x:\n    y\nelse:\n    z", {"a_": "x"}),
    ],
)
def test_patterns(pattern: str, code: str, caught: dict[str, str] | None) -> None:
    found: Caught = {}
    fit = fits(parsed(pattern), parsed(code), found, "none")
    assert fit == (caught is not None)
    if caught is not None:
        assert {name: ast.unparse(node) for name, node in found.items()} == caught


def test_what_a_function_lacks_is_looked_for_where_it_calls() -> None:
    source = Source("none", ast.parse(KERNEL))
    assert len(source.only("tl.debug_barrier()", "send")) == 1
    with pytest.raises(AssertionError, match=r"none.py, helper has 0 times, not 1: flush_signals"):
        source.only("flush_signals(...)", "helper")
    with pytest.raises(AssertionError, match=r"none.py has no function receive"):
        source.only("flush_signals(...)", "receive")
