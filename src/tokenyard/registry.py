"""Objects by number: an operator, or a graph of autograd, knows its object by one, as arguments of
operators are tensors and numbers. The table holds no object alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from tokenyard.engines.base import Engine
from tokenyard.errors import NotSupported
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.rows import Payload
from tokenyard.types import Quantize

Moved = tuple[Payload, Plan, Arrived]
"""What a fresh dispatch brings."""


class Caller(Protocol):
    """Makes the calls of one object (``calls.py``), for autograd and for operators."""

    number: int

    @property
    def engine(self) -> Engine: ...

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        """Tell the other ranks of an error in this rank's arguments; returns the error to raise."""
        ...

    def run_dispatch(
        self, call: Request, payload: Payload, topk_idx: Tensor, weights: Tensor | None
    ) -> Moved: ...

    def run_redispatch(self, call: Request, payload: Payload) -> Payload: ...

    def run_combine(
        self,
        call: Request,
        rows: Tensor,
        weights: Tensor | None,
        reduce_weights: Tensor | None,
        bias: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(eq=False)
class Request:
    """What a call needs besides tensors that are differentiated.

    Attributes:
        ticket: of a call that was begun before, of which the result is wanted; 0 for none.
        plan: a :class:`Plan`; of a fresh dispatch once it is made.
        mode: how rows are cast in the send.
        raw: rows are in arrival order, whatever the layout.
    """

    calls: Caller
    spec: Spec
    ticket: int = 0
    plan: Any = None
    mode: Quantize | None = None
    raw: bool = False


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
