"""Objects by number: an operator, or a graph of autograd, knows its object by one, as arguments of
operators are tensors and numbers. The table holds no object alive.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from tokenyard.engines.base import Engine
from tokenyard.errors import NotSupported
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.rows import Payload
from tokenyard.types import Quantize


class Caller(Protocol):
    """Makes the calls of one object (``calls.py``), for autograd and for operators.

    ``ticket``: of a call that was begun before, of which the result is wanted.
    """

    number: int

    @property
    def engine(self) -> Engine: ...

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        """Tell the other ranks of an error in this rank's arguments; returns the error to raise."""
        ...

    def run_dispatch(
        self,
        payload: Payload,
        topk_idx: Tensor,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        ticket: int,
    ) -> tuple[Payload, Plan, Arrived]: ...

    def run_redispatch(
        self,
        payload: Payload,
        plan: Plan,
        spec: Spec,
        raw: bool,
        ticket: int,
        mode: Quantize | None = None,
    ) -> Payload: ...

    def run_combine(
        self, rows: Tensor, plan: Plan, spec: Spec, ticket: int, **options: Any
    ) -> tuple[Tensor, Tensor | None]: ...


_objects: WeakValueDictionary[int, Caller] = WeakValueDictionary()
_numbers = count(1)


def enlist(calls: Caller) -> int:
    """A number by which ``calls`` is found while it lives."""
    number = next(_numbers)
    _objects[number] = calls
    return number


def owner_of(number: int) -> Caller:
    """The object behind ``number``; a graph may outlive it."""
    try:
        return _objects[number]
    except KeyError:
        raise RuntimeError(
            "the ExpertParallel of this graph is closed and gone: keep it until after the backward"
        ) from None
