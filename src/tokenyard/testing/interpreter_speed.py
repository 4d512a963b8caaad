# pyright: basic
# (it shortens the ways of an interpreter that has no types)
"""Shortcuts for Triton 3.6's interpreter: the same results with a third of the Python. Installed by
:mod:`.interpreter`.

Most of the time went into making the same shapes, types and wrappers again for every operation.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

_BUILTIN_CODE = tl.core.debug_barrier.__code__


class Shape:
    """What a block of these dimensions needs again and again."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims
        self._blocks: dict[str, Any] = {}
        self._beside: dict[Shape, Shape | None] = {}
        self._expanded: dict[tuple[bool, ...], Shape | None] = {}
        self.numel = validate_block_shape(list(dims))
        self.constexpr_numel = tl.core.constexpr(math.prod(dims))
        self.of_type: Any = tl.core.tuple(dims)
        self.of_tensor = tl.core.tuple([tl.core.constexpr(dim) for dim in dims])
        self.of_type.__dict__["dims"] = self.of_tensor.__dict__["dims"] = dims
        self.text = str(self.of_type)
        self.of_tensor.__dict__["known"] = self

    def block(self, kind: Any) -> Any:
        """The type of a block of ``kind``. (Pointer types are not kept: they come and go.)"""
        if type(kind) is tl.pointer_type:
            return tl.core.block_type(kind, self.of_type)
        found = self._blocks.get(kind.name)
        if found is None:
            found = self._blocks[kind.name] = tl.core.block_type(kind, self.of_type)
        return found

    def beside(self, other: Shape) -> Shape | None:
        """What both are spread to; None if they do not fit."""
        if other is self:
            return self
        if other not in self._beside:
            self._beside[other] = _spread(self.dims, other.dims)
        return self._beside[other]

    def expanded(self, new: tuple[bool, ...]) -> Shape | None:
        """With a dimension of 1 wherever ``new``; None if that are too many others."""
        if new not in self._expanded:
            left = list(self.dims)
            fits = len(new) - sum(new) <= len(left)
            wider = [1 if each else left.pop(0) for each in new] if fits else []
            self._expanded[new] = _shapes[(*wider, *left)] if fits else None
        return self._expanded[new]


class _Shapes(dict[tuple[int, ...], Shape]):
    def __missing__(self, dims: tuple[int, ...]) -> Shape:
        made = self[dims] = Shape(dims)
        return made


_shapes = _Shapes()
SCALAR = _shapes[()]


def _spread(left: tuple[int, ...], right: tuple[int, ...]) -> Shape | None:
    try:
        return _shapes[np.broadcast_shapes(left, right)]
    except ValueError:
        return None


def shape_of(tensor: Any) -> Shape:
    """The shape of a tensor."""
    return tensor.shape.__dict__["known"]


def _dims(shape: Any) -> tuple[int, ...]:
    known: Any = shape.__dict__.get("dims") if isinstance(shape, tl.core.tuple) else None
    if known is None:
        known = tuple(tl.core._unwrap_shape(shape))
    return known


def _new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    dims = _dims(shape)
    if not dims:
        raise TypeError("0d block_type is forbidden")
    known = _shapes[dims]
    self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
    self.name = f"<{known.text}, {element_ty}>"


def _new_tensor(self: Any, handle: Any, kind: Any) -> None:
    known = _shapes[_dims(kind.shape)] if kind.is_block() else SCALAR
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = known.constexpr_numel, known.of_tensor


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        return original(self, left, right)

    return broadcast_impl_value


def _to_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.core.tensor else original(self, x, check_type)

    return to_tensor


def _np_dtype(original: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    known: dict[str, np.dtype] = {}

    def get_np_dtype(dtype: Any) -> np.dtype:
        if dtype.is_ptr() or dtype.is_block():
            return original(dtype)
        if dtype.name not in known:
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    return get_np_dtype


def with_semantic(member: Any, semantic: Any) -> Callable[..., Any]:
    """A function of the language as the interpreter calls it, without copies of its arguments."""
    # It would only check that there is a semantic.
    wrapped = getattr(member, "__code__", None) is _BUILTIN_CODE
    inner = member.__wrapped__ if wrapped else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return call


def _rewriting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def rewrite_ast(self: Any) -> Any:
        code, scope = self.fn.__code__, self.fn.__globals__
        if code.co_firstlineno not in _functions_of(code.co_filename):
            return original(self)
        scope.update({name: each for name, each in vars(upstream).items() if name not in scope})
        found = dict(self.kwargs)
        exec(_rewritten(code.co_filename, code.co_firstlineno, self.ast_transformer), scope, found)
        return found[self.fn.__name__]

    return rewrite_ast


@cache
def _rewritten(file: str, line: int, transformer: ast.NodeTransformer) -> CodeType:
    """The code that makes the function which begins there, without its decorators."""
    function = _functions_of(file)[line]
    function.decorator_list.clear()
    return compile(ast.Module([transformer.visit(function)], []), file, "exec")


@cache
def _functions_of(file: str) -> dict[int, ast.FunctionDef]:
    """The decorated functions of a module, by their first line. (Upstream tokenizes the file anew,
    from there on, for each of them, and more than once.)"""
    path = Path(file)
    tree = ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])
    return {
        node.decorator_list[0].lineno: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the shortcuts in place, by ``replace(owner, name, value)``."""
    rewriter = upstream.FunctionRewriter
    replace(rewriter, "rewrite_ast", _rewriting(rewriter.rewrite_ast))
    replace(upstream, "_get_np_dtype", _np_dtype(upstream._get_np_dtype))
    replace(TritonSemantic, "to_tensor", _to_tensor(TritonSemantic.to_tensor))
    replace(tl.core.block_type, "__init__", _new_block_type)
    replace(tl.core.tensor, "__init__", _new_tensor)
    replace(TritonSemantic, "broadcast_impl_value", _broadcast(TritonSemantic.broadcast_impl_value))
