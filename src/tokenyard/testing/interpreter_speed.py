# pyright: basic
# (it shortens the ways of an interpreter that has no types)
"""Shortcuts for Triton 3.6's interpreter: the same results with a third of the Python. Installed by
:mod:`.interpreter`.

Most of the time went into making the same shapes, types and wrappers again for every operation, so
these are kept. An operator upstream casts both sides to one type, spreads them to one shape, and
wraps every step in new types; between plain tensors numpy does all of that at once, to the same
bits. What is not plain (narrow floats, unsigned numbers, constants of other types, the clock) takes
upstream's way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle

Operator = Callable[..., Any]

INTEGERS = {id(kind): kind for kind in (tl.int32, tl.int64)}
PLAIN = {id(kind): kind for kind in (tl.int32, tl.int64, tl.float32)}
NUMPY = {id(tl.int1): np.bool_, id(tl.int32): np.int32, id(tl.int64): np.int64}
_BOOL, _BITS64 = np.dtype(bool), (1 << 64) - 1
_BUILTIN_CODE = tl.core.debug_barrier.__code__


class Shape:
    """What a block of these dimensions needs again and again."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims
        self._blocks: dict[str, Any] = {}
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


_known = cache(Shape)
SCALAR = _known(())


@cache
def beside(left: Shape, right: Shape) -> Shape | None:
    """What both are spread to; None if they do not fit."""
    try:
        return _known(np.broadcast_shapes(left.dims, right.dims))
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
    known = _known(dims)
    self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
    self.name = f"<{known.text}, {element_ty}>"


def _new_tensor(self: Any, handle: Any, kind: Any) -> None:
    known = _known(_dims(kind.shape)) if kind.is_block() else SCALAR
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = known.constexpr_numel, known.of_tensor


def _np_dtype(original: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    known: dict[str, np.dtype] = {}

    def get_np_dtype(dtype: Any) -> np.dtype:
        if dtype.is_ptr() or dtype.is_block():
            return original(dtype)
        if dtype.name not in known:
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    return get_np_dtype


# Operators


def wrapped(data: Any, kind: Any, shape: Shape, stored: Any = None) -> Any:
    """A tensor of numbers that fit. ``stored``: what its handle says of them, if not ``kind``."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, stored or kind, {}
    tensor = object.__new__(tl.core.tensor)
    tensor.handle, tensor.dtype = handle, kind
    tensor.type = kind if shape is SCALAR else shape.block(kind)
    tensor.numel, tensor.shape = shape.constexpr_numel, shape.of_tensor
    return tensor


def number_of(operand: Any) -> int | None:
    """A Python number or constant that takes the type of the integers beside it; None if it is
    something else.
    """
    if type(operand) is tl.constexpr:
        operand = operand.value
    return operand if type(operand) is int and -(2**31) <= operand < 2**31 else None


def _binary(ufunc: Any, kinds: dict[int, Any], slow: Operator, compares: bool = False) -> Operator:
    """An operator among ``kinds``, of which two integers of different sizes become the
    larger one.
    """

    def operate(left: Any, right: Any, _semantic: Any = None) -> Any:
        kind, mine = left.dtype, left.handle
        if id(kind) not in kinds or mine.attr:
            return slow(left, right)
        shape = shape_of(left)
        if type(right) is tl.core.tensor:
            other, theirs = right.dtype, right.handle
            if theirs.attr:
                return slow(left, right)
            if other is not kind:
                if id(kind) not in INTEGERS or id(other) not in INTEGERS:
                    return slow(left, right)
                kind = tl.int64
            shape = beside(shape, shape_of(right))
            if shape is None:
                return slow(left, right)
            number = theirs.data
        else:
            number = number_of(right)
            if number is None or id(kind) not in INTEGERS:
                return slow(left, right)
        data = ufunc(mine.data, number)
        return wrapped(data, tl.int1, shape, kind) if compares else wrapped(data, kind, shape)

    return operate


def _bitwise(ufunc: Any, slow: Operator) -> Operator:
    """Also of two truths."""
    of_integers = _binary(ufunc, INTEGERS, slow)

    def operate(left: Any, right: Any, _semantic: Any = None) -> Any:
        if left.dtype is not tl.int1:
            return of_integers(left, right)
        if type(right) is tl.core.tensor and right.dtype is tl.int1:
            a, b = left.handle.data, right.handle.data
            shape = beside(shape_of(left), shape_of(right))
            if a.dtype is _BOOL and b.dtype is _BOOL and shape is not None:
                return wrapped(ufunc(a, b), tl.int1, shape, left.handle.dtype)
        return slow(left, right)

    return operate


def _add(slow: Operator) -> Operator:
    """Also of a pointer and an offset."""
    of_numbers = _binary(np.add, PLAIN, slow)

    def operate(left: Any, right: Any, _semantic: Any = None) -> Any:
        kind = left.dtype
        if type(kind) is not tl.pointer_type:
            return of_numbers(left, right)
        width = max(1, kind.element_ty.primitive_bitwidth // 8)
        shape = shape_of(left)
        number = number_of(right)
        if number is not None:
            return wrapped(left.handle.data + np.uint64(width * number & _BITS64), kind, shape)
        if type(right) is tl.core.tensor and id(right.dtype) in INTEGERS:
            shape = beside(shape, shape_of(right))
            if shape is not None:
                steps = np.uint64(width) * right.handle.data.astype(np.uint64)
                return wrapped(left.handle.data + steps, kind, shape)
        return slow(left, right)

    return operate


def _to(slow: Operator) -> Operator:
    """Between integers, and from them to a pointer."""

    def to(tensor: Any, kind: Any, *args: Any, _semantic: Any = None, **options: Any) -> Any:
        if args or options or id(tensor.dtype) not in NUMPY:
            return slow(tensor, kind, *args, **options)
        if kind is tensor.dtype:
            return tensor
        if id(kind) in INTEGERS:
            return wrapped(tensor.handle.data.astype(NUMPY[id(kind)]), kind, shape_of(tensor))
        if type(kind) is tl.pointer_type and tensor.dtype is not tl.int1:
            return wrapped(tensor.handle.data.astype(np.uint64), kind, shape_of(tensor))
        return slow(tensor, kind)

    return to


_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
OPERATORS: dict[str, Callable[[Operator], Operator]] = {
    "__add__": _add,
    "__sub__": partial(_binary, np.subtract, PLAIN),
    "__mul__": partial(_binary, np.multiply, PLAIN),
    "__and__": partial(_bitwise, np.bitwise_and),
    "__or__": partial(_bitwise, np.bitwise_or),
    "__xor__": partial(_bitwise, np.bitwise_xor),
    "to": _to,
    **{name: partial(_binary, ufunc, PLAIN, compares=True) for name, ufunc in _COMPARISONS.items()},
}
"""Makes the shortcut of an operator from its long way."""


# The language


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As upstream's, with one semantic for all, without copies of arguments, and with the
    shortcuts in front of tensors' operators.
    """
    semantic = TritonSemantic(builder)
    shortcuts = OPERATORS if package is tl.core.tensor else {}
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            call = _with_semantic(member, semantic)
            scope.set_attr(package, name, shortcuts[name](call) if name in shortcuts else call)


def _with_semantic(member: Any, semantic: Any) -> Callable[..., Any]:
    # It would only check that there is a semantic.
    wrapped = getattr(member, "__code__", None) is _BUILTIN_CODE
    inner = member.__wrapped__ if wrapped else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return call


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the shortcuts in place, by ``replace(owner, name, value)``."""
    replace(upstream, "_get_np_dtype", _np_dtype(upstream._get_np_dtype))
    replace(upstream, "_patch_builtin", _patch_builtin)
    replace(tl.core.block_type, "__init__", _new_block_type)
    replace(tl.core.tensor, "__init__", _new_tensor)
