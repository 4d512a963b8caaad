# pyright: basic
# (it shortens the ways of an interpreter that has no types)
"""Loads, stores and other functions of the language with fewer steps, as
:mod:`.interpreter_operators` has operators.

What the builder is asked to do in the end (which the simulator watches) is the same. The language
calls some of these itself, with its ``_semantic``; there is only one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle

from tokenyard.testing.interpreter_operators import (
    INTEGERS,
    NUMPY,
    OPERATORS,
    PLAIN,
    Operator,
    number_of,
    tensor_of,
    wrapped,
)
from tokenyard.testing.interpreter_speed import shape_of, with_semantic

_builder: Any = upstream.interpreter_builder
_NARROW = {
    kind.name: kind for kind in (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.float16, tl.bfloat16)
}
_ALWAYS = TensorHandle(np.ones(1, bool), tl.int1)


def _element(pointer: Any) -> Any:
    """What a tensor of pointers points to; None if that is nothing plain, or it is no such
    tensor.
    """
    if type(pointer) is not tl.core.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    kind = pointer.dtype.element_ty
    return kind if id(kind) in PLAIN else _NARROW.get(kind.name)


def _spread(tensor: Any, pointer: Any) -> Any:
    """The handle of ``tensor`` in the shape of ``pointer``; None if it does not fit."""
    shape, handle = shape_of(pointer), tensor.handle
    if shape_of(tensor) is shape:
        return handle
    if shape.beside(shape_of(tensor)) is not shape:
        return None
    return TensorHandle(np.broadcast_to(handle.data, pointer.handle.data.shape), handle.dtype)


def _has_rank_of(pointer: Any, value: Any) -> bool:
    """Whether an atomic takes ``value``: it adds no dimensions."""
    return type(value) is not tl.core.tensor or len(shape_of(value).dims) in (
        0,
        len(shape_of(pointer).dims),
    )


def _mask(mask: Any, pointer: Any) -> Any:
    return (
        _spread(mask, pointer) if type(mask) is tl.core.tensor and mask.dtype is tl.int1 else None
    )


def _value(value: Any, kind: Any, pointer: Any) -> Any:
    """The handle of a value for memory that holds ``kind``; None if it needs more than a step."""
    if type(value) is not tl.core.tensor:
        number = number_of(value)
        if number is None or (number and id(kind) not in INTEGERS):
            return None
        return TensorHandle(
            np.full(pointer.handle.data.shape, number, upstream._get_np_dtype(kind)), kind
        )
    if value.dtype is kind:
        return _spread(value, pointer)
    if id(kind) not in INTEGERS or id(value.dtype) not in INTEGERS:
        return None
    handle = _spread(value, pointer)
    return handle and TensorHandle(handle.data.astype(upstream._get_np_dtype(kind)), kind)


def _load(slow: Operator) -> Operator:
    def load(
        pointer: Any,
        mask: Any = None,
        other: Any = None,
        *more: Any,
        _semantic: Any = None,
        **options: Any,
    ) -> Any:
        kind = None if more or options not in ({}, {"cache_modifier": ".cg"}) else _element(pointer)
        if kind is not None and mask is None and other is None:
            handle = _builder.create_load(pointer.handle, None, None, False)
            return tensor_of(handle, kind, shape_of(pointer))
        lanes = None if kind is None else _mask(mask, pointer)
        filled = None if lanes is None or other is None else _value(other, kind, pointer)
        if lanes is None or (other is not None and filled is None):
            return slow(pointer, mask, other, *more, **options)
        handle = _builder.create_masked_load(pointer.handle, lanes, filled, None, None, False)
        return tensor_of(handle, kind, shape_of(pointer))

    return load


def _store(slow: Operator) -> Operator:
    def store(
        pointer: Any,
        value: Any,
        mask: Any = None,
        *more: Any,
        _semantic: Any = None,
        **options: Any,
    ) -> Any:
        kind = None if more or options not in ({}, {"cache_modifier": ".cs"}) else _element(pointer)
        handle = None if kind is None else _value(value, kind, pointer)
        lanes = None if handle is None or mask is None else _mask(mask, pointer)
        if handle is None or (mask is not None and lanes is None):
            return slow(pointer, value, mask, *more, **options)
        if lanes is None:
            _builder.create_store(pointer.handle, handle, None, None)
        else:
            _builder.create_masked_store(pointer.handle, handle, lanes, None, None)
        return None

    return store


def _atomic_add(slow: Operator) -> Operator:
    def atomic_add(
        pointer: Any,
        value: Any,
        mask: Any = None,
        sem: Any = None,
        scope: Any = None,
        _semantic: Any = None,
    ) -> Any:
        kind = _element(pointer) if type(sem) is str and type(scope) is str else None
        fits = id(kind) in INTEGERS and _has_rank_of(pointer, value) and _has_rank_of(pointer, mask)
        handle = _value(value, kind, pointer) if fits else None
        lanes = _ALWAYS if mask is None else _mask(mask, pointer)
        if handle is None or lanes is None:
            return slow(pointer, value, mask, sem, scope)
        semantic = upstream.interpreter_semantic
        order = semantic._str_to_sem(sem), semantic._str_to_scope(scope)
        old = _builder.create_atomic_rmw(ir.ATOMIC_OP.ADD, pointer.handle, handle, lanes, *order)
        return tensor_of(old, kind, shape_of(pointer))

    return atomic_add


def _arange(slow: Operator) -> Operator:
    known: dict[tuple[int, int], Any] = {}

    def arange(start: Any, end: Any, _semantic: Any = None) -> Any:
        if type(start) is not int or type(end) is not int:
            return slow(start, end)
        found = known.get((start, end))
        if found is None:
            found = known[start, end] = slow(start, end)
            found.handle.data.flags.writeable = False
        return tensor_of(TensorHandle(found.handle.data, tl.int32), tl.int32, shape_of(found))

    return arange


def _where(slow: Operator) -> Operator:
    """Among numbers of one type."""

    def where(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        kind = next((each.dtype for each in (x, y) if type(each) is tl.core.tensor), None)
        if (
            type(condition) is not tl.core.tensor
            or condition.dtype is not tl.int1
            or id(kind) not in PLAIN
        ):
            return slow(condition, x, y)
        shape, parts = shape_of(condition), []
        for each in (x, y):
            if type(each) is tl.core.tensor:
                shape = shape and shape.beside(shape_of(each))
                parts.append(each.handle.data if each.dtype is kind else None)
            else:
                number = number_of(each)
                parts.append(
                    None if number is None or id(kind) not in INTEGERS else NUMPY[id(kind)](number)
                )
        if shape is None or parts[0] is None or parts[1] is None:
            return slow(condition, x, y)
        return wrapped(np.where(condition.handle.data, *parts), kind, shape)

    return where


FUNCTIONS: dict[str, Callable[[Operator], Operator]] = {
    "load": _load,
    "store": _store,
    "atomic_add": _atomic_add,
    "arange": _arange,
    "where": _where,
}


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As upstream's, with one semantic for all and the shortcuts in front of what they shorten."""
    semantic = TritonSemantic(builder)
    of_language = FUNCTIONS if package in (tl, tl.core) else {}
    shortcuts = OPERATORS if package is tl.core.tensor else of_language
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            call = with_semantic(member, semantic)
            scope.set_attr(package, name, shortcuts[name](call) if name in shortcuts else call)


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Put functions and operators in place, by ``replace(owner, name, value)``."""
    replace(upstream, "_patch_builtin", _patch_builtin)
