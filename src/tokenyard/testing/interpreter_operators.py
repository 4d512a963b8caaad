# pyright: basic
# (it shortens the ways of an interpreter that has no types)
"""Operators between plain tensors without the detour of Triton 3.6's interpreter. Installed by
:mod:`.interpreter`.

Upstream an operator casts both sides to one type, spreads them to one shape, and wraps every step
in new types; here numpy does all of that at once, to the same bits. What is not plain (narrow
floats, unsigned numbers, constants of other types, the clock) takes upstream's way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle

from tokenyard.testing.interpreter_speed import SCALAR, Shape, shape_of, with_semantic

Operator = Callable[..., Any]

INTEGERS = {id(kind): kind for kind in (tl.int32, tl.int64)}
PLAIN = {id(kind): kind for kind in (tl.int32, tl.int64, tl.float32)}
NUMPY = {id(tl.int1): np.bool_, id(tl.int32): np.int32, id(tl.int64): np.int64}
_BOOL, _BITS64 = np.dtype(bool), (1 << 64) - 1


def _tensor_of(handle: TensorHandle, kind: Any, shape: Shape) -> Any:
    """A tensor around a handle as it is."""
    tensor = object.__new__(tl.core.tensor)
    tensor.handle, tensor.dtype = handle, kind
    tensor.type = kind if shape is SCALAR else shape.block(kind)
    tensor.numel, tensor.shape = shape.constexpr_numel, shape.of_tensor
    return tensor


def wrapped(data: Any, kind: Any, shape: Shape, stored: Any = None) -> Any:
    """A tensor of numbers that fit. ``stored``: what its handle says of them, if not ``kind``."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, stored or kind, {}
    return _tensor_of(handle, kind, shape)


def number_of(operand: Any) -> int | None:
    """A Python number or constant that takes the type of the integers beside it; None if it is
    something else."""
    if type(operand) is tl.constexpr:
        operand = operand.value
    return operand if type(operand) is int and -(2**31) <= operand < 2**31 else None


@cache
def _array_of(number: int, wide: bool) -> Any:
    """As numpy would make it for every operation."""
    return np.array(number, np.int64 if wide else np.int32)


@cache
def _bytes_of(number: int) -> Any:
    return np.array(number & _BITS64, np.uint64)


def _divided(a: Any, b: Any) -> Any:
    """Rounded towards zero."""
    return (a - np.fmod(a, b)) // b


def _binary(
    ufunc: Any, slow: Operator, kinds: dict[int, Any], compares: bool = False, swapped: bool = False
) -> Operator:
    """An operator among ``kinds``, of which two integers of different sizes become the
    larger one."""

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
            shape = shape.beside(shape_of(right))
            if shape is None:
                return slow(left, right)
            number = theirs.data
        else:
            number = number_of(right)
            if number is None or id(kind) not in INTEGERS:
                return slow(left, right)
            number = _array_of(number, kind is tl.int64)
        data = ufunc(number, mine.data) if swapped else ufunc(mine.data, number)
        return wrapped(data, tl.int1, shape, kind) if compares else wrapped(data, kind, shape)

    return operate


def _bitwise(ufunc: Any, slow: Operator) -> Operator:
    """Also of two truths."""
    of_integers = _binary(ufunc, slow, INTEGERS)

    def operate(left: Any, right: Any, _semantic: Any = None) -> Any:
        if left.dtype is not tl.int1:
            return of_integers(left, right)
        if type(right) is tl.core.tensor and right.dtype is tl.int1:
            a, b = left.handle.data, right.handle.data
            shape = shape_of(left).beside(shape_of(right))
            if a.dtype is _BOOL and b.dtype is _BOOL and shape is not None:
                return wrapped(ufunc(a, b), tl.int1, shape, left.handle.dtype)
        return slow(left, right)

    return operate


def _add(slow: Operator) -> Operator:
    """Also of a pointer and an offset."""
    of_numbers = _binary(np.add, slow, PLAIN)

    def operate(left: Any, right: Any, _semantic: Any = None) -> Any:
        kind = left.dtype
        if type(kind) is not tl.pointer_type:
            return of_numbers(left, right)
        width = max(1, kind.element_ty.primitive_bitwidth // 8)
        shape = shape_of(left)
        number = number_of(right)
        if number is not None:
            return wrapped(left.handle.data + _bytes_of(width * number), kind, shape)
        if type(right) is tl.core.tensor and id(right.dtype) in INTEGERS:
            shape = shape.beside(shape_of(right))
            if shape is not None:
                offsets = _bytes_of(width) * right.handle.data.astype(np.uint64)
                return wrapped(left.handle.data + offsets, kind, shape)
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


def _index(slow: Operator) -> Operator:
    """``x[:, None]`` and the like."""

    def index(tensor: Any, slices: Any, _semantic: Any = None) -> Any:
        shape = shape_of(tensor)
        if type(slices) is tuple and shape is not SCALAR:
            wider = shape.expanded(tuple([each is None for each in slices]))
            if wider is not None and all(each is None or each == slice(None) for each in slices):
                return wrapped(tensor.handle.data[slices], tensor.dtype, wider, tensor.handle.dtype)
        return slow(tensor, slices)

    return index


def _is_plain_access(pointer: Any, mask: Any, *options: Any) -> bool:
    """Of numbers (truths are stored as bytes), with a mask of the same shape if any."""
    kind = pointer.dtype
    return (
        type(kind) is tl.pointer_type
        and type(kind.element_ty) is tl.dtype
        and kind.element_ty is not tl.int1
        and not kind.const
        and not any(options)
        and (mask is None or (mask.dtype is tl.int1 and mask.shape is pointer.shape))
    )


def _load(slow: Operator) -> Operator:
    def load(
        semantic: Any, pointer: Any, mask: Any, other: Any, bounds: Any, padding: Any, cache: Any,
        eviction: Any, volatile: Any,
    ) -> Any:  # fmt: skip
        if _is_plain_access(pointer, mask, bounds, padding, cache, eviction):
            kind, shape, build = pointer.dtype.element_ty, shape_of(pointer), semantic.builder
            where, how = pointer.handle, (cache, eviction, volatile)
            if mask is None and other is None:
                return _tensor_of(build.create_load(where, *how), kind, shape)
            if mask is not None and (rest := _rest(other, kind, pointer)) is not None:
                handle = build.create_masked_load(where, mask.handle, rest, *how)
                return _tensor_of(handle, kind, shape)
        return slow(semantic, pointer, mask, other, bounds, padding, cache, eviction, volatile)

    return load


def _rest(other: Any, kind: Any, pointer: Any) -> TensorHandle | None:
    """What lanes have that load nothing; None if it must be cast."""
    if other is None or id(kind) not in INTEGERS or id(other.dtype) not in INTEGERS:
        return None
    if other.dtype is kind and other.shape is pointer.shape:
        return other.handle
    if shape_of(other) is not SCALAR or (kind is tl.int32 and other.dtype is tl.int64):
        return None
    lanes = np.full(pointer.handle.data.shape, other.handle.data, NUMPY[id(kind)])
    return TensorHandle(lanes, kind)


def _store(slow: Operator) -> Operator:
    def store(
        semantic: Any, pointer: Any, value: Any, mask: Any, bounds: Any, cache: Any, eviction: Any
    ) -> Any:
        if (
            _is_plain_access(pointer, mask, bounds, cache, eviction)
            and value.dtype is pointer.dtype.element_ty
            and value.shape is pointer.shape
        ):
            build, where = semantic.builder, pointer.handle
            if mask is None:
                done = build.create_store(where, value.handle, cache, eviction)
            else:
                done = build.create_masked_store(where, value.handle, mask.handle, cache, eviction)
            return semantic.tensor(done, tl.void)
        return slow(semantic, pointer, value, mask, bounds, cache, eviction)

    return store


def _where(slow: Operator) -> Operator:
    def where(semantic: Any, condition: Any, left: Any, right: Any) -> Any:
        tensors = [each for each in (left, right) if type(each) is tl.core.tensor]
        kind = tensors[0].dtype if tensors else None
        if condition.dtype is not tl.int1 or id(kind) not in PLAIN:
            return slow(semantic, condition, left, right)
        shape, values = shape_of(condition), list[Any]()
        for each in (left, right):
            number = None if type(each) is tl.core.tensor else number_of(each)
            if number is not None and id(kind) in INTEGERS:
                values.append(_array_of(number, kind is tl.int64))
            elif type(each) is tl.core.tensor and each.dtype is kind:
                shape = shape and shape.beside(shape_of(each))
                values.append(each.handle.data)
        if shape is None or len(values) < 2:
            return slow(semantic, condition, left, right)
        return wrapped(np.where(condition.handle.data, *values), kind, shape)

    return where


OPERATORS: dict[str, Callable[[Operator], Operator]] = {
    "__add__": _add,
    "__radd__": lambda slow: _binary(np.add, slow, INTEGERS, swapped=True),
    "__sub__": lambda slow: _binary(np.subtract, slow, PLAIN),
    "__rsub__": lambda slow: _binary(np.subtract, slow, INTEGERS, swapped=True),
    "__mul__": lambda slow: _binary(np.multiply, slow, PLAIN),
    "__rmul__": lambda slow: _binary(np.multiply, slow, INTEGERS, swapped=True),
    "__mod__": lambda slow: _binary(np.fmod, slow, INTEGERS),
    "__floordiv__": lambda slow: _binary(_divided, slow, INTEGERS),
    "__lt__": lambda slow: _binary(np.less, slow, PLAIN, compares=True),
    "__le__": lambda slow: _binary(np.less_equal, slow, PLAIN, compares=True),
    "__gt__": lambda slow: _binary(np.greater, slow, PLAIN, compares=True),
    "__ge__": lambda slow: _binary(np.greater_equal, slow, PLAIN, compares=True),
    "__eq__": lambda slow: _binary(np.equal, slow, PLAIN, compares=True),
    "__ne__": lambda slow: _binary(np.not_equal, slow, PLAIN, compares=True),
    "__and__": lambda slow: _bitwise(np.bitwise_and, slow),
    "__or__": lambda slow: _bitwise(np.bitwise_or, slow),
    "__xor__": lambda slow: _bitwise(np.bitwise_xor, slow),
    "__getitem__": _index,
    "to": _to,
}


CALLS: dict[str, Callable[[Operator], Operator]] = {"load": _load, "store": _store, "where": _where}
"""What functions of the language ask of its semantic."""


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As upstream's, with one semantic for all, without copies of arguments, and with operators of
    tensors in front of the long way."""
    semantic = TritonSemantic(builder)
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            call = with_semantic(member, semantic)
            if package is tl.core.tensor and name in OPERATORS:
                call = OPERATORS[name](call)
            scope.set_attr(package, name, call)


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the operators in place, by ``replace(owner, name, value)``."""
    replace(upstream, "_patch_builtin", _patch_builtin)
    for name, shortened in CALLS.items():
        replace(TritonSemantic, name, shortened(getattr(TritonSemantic, name)))
