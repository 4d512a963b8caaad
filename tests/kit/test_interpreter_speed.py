# ruff: noqa: E402 (Triton is imported after the check)
"""The interpreter's shortcuts give what the long way gives: types, shapes and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest

from interpreted import need_interpreter

need_interpreter()

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

from tokenyard.testing import interpreter, interpreter_operators

KINDS = (tl.int1, tl.int32, tl.int64, tl.uint32, tl.float32, tl.float16, tl.bfloat16)
SHAPES = ((), (4,), (4, 1), (1, 4), (2, 1, 4), (8,))
PAIRS = [
    ((), ()),
    ((), (4,)),
    ((4, 1), ()),
    ((4,), (4,)),
    ((4, 1), (1, 4)),
    ((1, 4), (4,)),
    ((4,), (8,)),
    ((4, 1), (2, 1, 4)),
]
NUMBERS = (
    0,
    3,
    -2,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**40,
    1.5,
    True,
    tl.constexpr(3),
    tl.constexpr(0.5),
)
CAST = (tl.int1, tl.int32, tl.int64, tl.uint64, tl.float32, tl.bfloat16, tl.pointer_type(tl.int64))


def tensor(kind: Any, shape: tuple[int, ...], seed: int = 1) -> Any:
    """Small numbers, one of them not so small, none of them 0 but for truths; with a type as
    compiled code has it.
    """
    random = np.random.default_rng(seed)
    data = random.integers(1, 9, shape or (1,)) * random.choice([-1, 1, 2**20], shape or (1,))
    data = abs(data) if kind is tl.uint32 else data > 0 if kind is tl.int1 else data
    bits = data.astype(np.float32).view(np.uint32) >> 16
    with np.errstate(over="ignore"):
        data = bits.astype(np.uint16) if kind is tl.bfloat16 else data.astype(_get_np_dtype(kind))
    return tl.core.tensor(
        TensorHandle(data, kind), tl.core.block_type(kind, list(shape)) if shape else kind
    )


def pointer(memory: np.ndarray, kind: Any, shape: tuple[int, ...]) -> Any:
    count = int(np.prod(shape))
    addresses = memory.ctypes.data + memory.itemsize * np.arange(count, dtype=np.uint64).reshape(
        shape or (1,)
    )
    to = tl.pointer_type(kind)
    return tl.core.tensor(
        TensorHandle(addresses, to), tl.core.block_type(to, list(shape)) if shape else to
    )


def outcome(call: Callable[[], Any]) -> Any:
    """Of an operation: what is seen of its result, or which error it raises."""
    try:
        with np.errstate(all="ignore"):
            found = call()
    except Exception as error:
        return type(error).__name__
    shape = [int(dim) for dim in found.shape]
    assert found.handle.data.shape == tuple(shape or [1])
    return (
        str(found.type),
        str(found.dtype),
        shape,
        int(found.numel),
        str(found.handle.data.tolist()),
    )


@contextmanager
def long_way() -> Iterator[None]:
    upstream = {name: interpreter._upstream[name] for name in interpreter_operators.CALLS}
    with (
        mock.patch.dict(interpreter_operators.OPERATORS, clear=True),
        mock.patch.multiple(TritonSemantic, **upstream),
    ):
        yield


def compare(calls: Callable[[], Iterator[tuple[Any, Callable[[], Any]]]]) -> int:
    """Every call, both ways. How many gave results."""
    with interpreter.patched_language():
        short = [(what, outcome(call)) for what, call in calls()]
    with long_way(), interpreter.patched_language():
        long = [(what, outcome(call)) for what, call in calls()]
    for one, other in zip(short, long, strict=True):
        assert one == other
    return sum(not isinstance(seen, str) for _, seen in short)


def test_shortcuts_are_in_place() -> None:
    with interpreter.patched_language():
        assert tl.core.tensor.__add__.__module__ == interpreter_operators.__name__
        assert TritonSemantic.load.__module__ == interpreter_operators.__name__
    with long_way(), interpreter.patched_language():
        assert tl.core.tensor.__add__.__module__ != interpreter_operators.__name__
        assert TritonSemantic.load.__module__ != interpreter_operators.__name__


BINARY = sorted(interpreter_operators.OPERATORS.keys() - {"to", "__getitem__"})


@pytest.mark.parametrize("name", BINARY)
def test_operators_between_tensors(name: str) -> None:
    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for left, right in product(KINDS, KINDS):
            for shapes in PAIRS:
                a, b = tensor(left, shapes[0], 1), tensor(right, shapes[1], 2)
                yield (left, right, shapes), lambda a=a, b=b: getattr(tl.core.tensor, name)(a, b)

    assert compare(calls) > 50


@pytest.mark.parametrize("name", BINARY)
def test_operators_with_numbers(name: str) -> None:
    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for kind, shape, number in product(KINDS, SHAPES[:3], NUMBERS):
            a = tensor(kind, shape)
            yield (
                (kind, shape, number),
                lambda a=a, number=number: getattr(tl.core.tensor, name)(a, number),
            )

    assert compare(calls) > 40


def test_pointers_move() -> None:
    memory = np.zeros(8, np.int32)

    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for to, shape in product((tl.int32, tl.int64, tl.int1, tl.bfloat16), SHAPES):
            p = pointer(memory, to, shape)
            for number in NUMBERS:
                yield (to, shape, number), lambda p=p, number=number: p + number
            for kind, other in product(KINDS, SHAPES):
                by = tensor(kind, other)
                yield (to, shape, kind, other), lambda p=p, by=by: p + by

    assert compare(calls) > 200


MASKS = (None, (), (4,), (4, 1), (1, 4))
"""Shapes of masks."""


def test_loads() -> None:
    memory = np.arange(1, 9, dtype=np.int64)
    kinds = (tl.int32, tl.int64, tl.int1, tl.float32, tl.bfloat16)

    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for kind, shape, masked in product(kinds, SHAPES[:4], MASKS):
            mask = None if masked is None else tensor(tl.int1, masked)
            others = [None, *NUMBERS, *(tensor(each, shape) for each in KINDS)]
            for at, other in enumerate([*others, tensor(tl.int64, ())]):
                p = pointer(memory, kind, shape)
                yield (kind, shape, masked, at), lambda p=p, m=mask, o=other: tl.load(p, m, o)
            for cache in (".cg", ".no"):
                yield (
                    (kind, shape, masked, cache),
                    lambda p=p, m=mask, c=cache: tl.load(p, m, cache_modifier=c),
                )

    assert compare(calls) > 300


def test_stores() -> None:
    memory = np.zeros(8, np.int64)

    def stored(p: Any, value: Any, mask: Any) -> Any:
        memory[:] = 0
        assert tl.store(p, value, mask).type is tl.void
        return tl.load(p)

    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for kind, shape, masked in product(KINDS, SHAPES[:4], MASKS):
            mask = None if masked is None else tensor(tl.int1, masked)
            values = [*NUMBERS, *(tensor(each, at) for each in KINDS for at in (shape, ()))]
            for at, value in enumerate(values):
                p = pointer(memory, kind, shape)
                yield (kind, shape, masked, at), lambda p=p, v=value, m=mask: stored(p, v, m)

    assert compare(calls) > 300


def test_choices() -> None:
    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for truths, (one, other) in product(SHAPES[:3:2], PAIRS):
            c = tensor(tl.int1, truths)
            for left, right in product(KINDS, KINDS):
                a, b = tensor(left, one, 1), tensor(right, other, 2)
                yield (truths, one, other, left, right), lambda c=c, a=a, b=b: tl.where(c, a, b)
            for kind, number in product(KINDS, NUMBERS):
                a = tensor(kind, one)
                yield (truths, one, kind, number), lambda c=c, a=a, n=number: tl.where(c, a, n)
                yield (truths, one, number, kind), lambda c=c, a=a, n=number: tl.where(c, n, a)

    assert compare(calls) > 300


def test_casts() -> None:
    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for kind, to, shape in product(KINDS, CAST, SHAPES):
            a = tensor(kind, shape)
            yield (kind, to, shape), lambda a=a, to=to: a.to(to)

    assert compare(calls) > 200


def test_new_dimensions() -> None:
    slices = [
        (None,),
        (None, slice(None)),
        (slice(None), None),
        (slice(None), None, None),
        (None, slice(None), None),
    ]
    slices += [
        (slice(None), None, slice(None)),
        (slice(None), slice(None)),
        (slice(0, 2), None),
        (0,),
    ]

    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for kind, shape, at in product((tl.int32, tl.bfloat16), SHAPES, slices):
            # upstream takes any number of `:`
            if sum(each is not None for each in at) <= len(shape):
                a = tensor(kind, shape)
                yield (kind, shape, at), lambda a=a, at=at: a[at]

    assert compare(calls) > 40


def test_what_the_language_calls_itself() -> None:
    def calls() -> Iterator[tuple[Any, Callable[[], Any]]]:
        for kind, shape, axis in product(
            (tl.int32, tl.int64, tl.float32, tl.bfloat16), SHAPES[1:], (0, -1)
        ):
            x = tensor(kind, shape)
            for reduce in (tl.max, tl.min, tl.sum, tl.cumsum):
                yield (
                    (kind, shape, axis, reduce.__name__),
                    lambda x=x, axis=axis, reduce=reduce: reduce(x, axis),
                )
            for reduce in (tl.argmax, tl.argmin):
                yield (
                    (kind, shape, axis, reduce.__name__),
                    lambda x=x, axis=axis, reduce=reduce: reduce(x, axis),
                )

    assert compare(calls) > 100
