"""DeepEP's ``deep_ep.utils.semantic``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar
from weakref import ref

Value = TypeVar("Value")


def value_or(value: Value | None, default: Value) -> Value:
    """``default`` for None."""
    return default if value is None else value


def weak_lru(
    maxsize: int | None = 128, typed: bool = False
) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """``functools.lru_cache`` for methods, which does not keep their objects alive."""

    def decorate(method: Callable[..., Value]) -> Callable[..., Value]:
        @lru_cache(maxsize, typed)
        def remembered(weak: Any, *arguments: Any, **options: Any) -> Value:
            return method(weak(), *arguments, **options)

        @wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Value:
            return remembered(ref(self), *arguments, **options)

        return call

    return decorate
