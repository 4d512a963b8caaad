"""Last arguments of long functions: they come by keyword, and their defaults stand in a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def with_rest(defaults: Mapping[str, Any]) -> Callable[[Function], Function]:
    """``inspect.signature``, which frameworks ask, shows ``defaults`` instead of ``**rest``."""

    def show(function: Function) -> Function:
        known = inspect.signature(function)
        named = [each for each in known.parameters.values() if each.kind is not each.VAR_KEYWORD]
        rest = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=value)
            for name, value in defaults.items()
        ]
        shown: Any = function
        shown.__signature__ = known.replace(parameters=[*named, *rest])
        return function

    return show


def rest_of(call: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The rest as ``given``, else by ``defaults``. TypeError: one is none of them.

    >>> rest_of("f", {"b": 3}, {"a": 1, "b": 2})
    {'a': 1, 'b': 3}
    """
    every = {**defaults, **given}
    if len(every) != len(defaults):
        name = next(name for name in given if name not in defaults)
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    return every
