"""Native calls of tensors that were checked in DeepEP's words, and so no second time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from torch import Tensor

from tokenyard import autograd
from tokenyard.api import ExpertParallel
from tokenyard.autograd import Call
from tokenyard.checks import check_spec
from tokenyard.deep_ep.handles import KeptHandle
from tokenyard.errors import NotSupported
from tokenyard.formats import given
from tokenyard.gradients import by_arrival, weights_there
from tokenyard.handle import Handle, Spec
from tokenyard.header import CACHED, DISPATCH
from tokenyard.results import Received
from tokenyard.rows import Payload
from tokenyard.types import Layout

Rows = tuple[Tensor, Tensor | None]
"""Data and scales."""

Shape = tuple[Any, bool, int, int | None]
"""Layout, exact, expert_alignment and capacity, as of ``ExpertParallel.dispatch``."""


@lru_cache(maxsize=64)
def _spec(*shape: Any) -> Spec:
    return check_spec(*shape)


def dispatch(
    ep: ExpertParallel,
    rows: Rows,
    topk_idx: Tensor | None = None,
    weights: Tensor | None = None,
    shape: Shape = (None, True, 1, None),
    known: Handle | None = None,
) -> Received:
    """A fresh one, or along a ``known`` routing."""
    calls, check = ep._calls, ep._validation  # pyright: ignore[reportPrivateUsage]
    calls.check_open()
    weights = None if weights is None else weights.float()
    try:
        payload = Payload(rows[0], None) if rows[1] is None else given(rows[0], rows[1])
        spec = _spec(*shape) if known is None else known.spec
        request = check.checked_dispatch(payload, topk_idx, weights, spec, known)
    except (ValueError, NotSupported) as error:
        op = DISPATCH if known is None else CACHED
        raise calls.refuse(op, shape[1], error) from None
    return calls.dispatch(request) if known is None else calls.redispatch(request)


def redispatch(
    handle: KeptHandle, rows: Rows, weights: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Received, Tensor | None]:
    """Rows along a known routing, and ``weights [T, K]`` as they come there, if there are any.
    ``ids``: that came with rows per rank."""
    native = handle.native
    recv = dispatch(handle.ep, rows, known=native)
    if weights is None:
        return recv, None
    received = native.arrived.topk_idx if ids is None else ids
    return recv, weights_there(along(handle), weights.float(), received, native.num_rows)


def combine(
    x: Tensor, handle: KeptHandle, weights: Tensor | None = None, bias: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and of their weights if there are any, in whatever layout."""
    native, call = handle.native, cast("Any", handle.ep.combine)
    if weights is None:
        return call(x, native, bias=bias or None), None
    if native.layout is Layout.FLAT:
        combined = call(x, native, reduce_weights=weights, bias=bias)
        return combined.x, combined.topk_weights
    reduce = by_arrival(weights.float(), native.plan, native.spec, None)
    return autograd.combine(along(handle), x, None, reduce, bias)


def along(handle: KeptHandle) -> Call:
    """Its object's calls along its routing, in any order of rows, as backwards make them."""
    calls = handle.ep._calls  # pyright: ignore[reportPrivateUsage]
    return Call(calls, handle.native.spec, plan=handle.native.plan)
