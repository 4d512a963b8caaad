"""Native dispatches of tensors that were checked in DeepEP's words, and so no second time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.autograd import Call
from tokenyard.checks import check_spec
from tokenyard.deep_ep.handles import LazyTuple
from tokenyard.errors import NotSupported
from tokenyard.formats import given
from tokenyard.handle import Handle, Spec
from tokenyard.header import CACHED, DISPATCH
from tokenyard.results import Received
from tokenyard.rows import Payload

Shape = tuple[Any, bool, int, int | None]
"""Layout, exact, expert_alignment and capacity, as of ``ExpertParallel.dispatch``."""


@lru_cache(maxsize=64)
def _spec(*shape: Any) -> Spec:
    return check_spec(*shape)


def dispatch(
    ep: ExpertParallel,
    rows: tuple[Tensor, Tensor | None],
    topk_idx: Tensor,
    weights: Tensor | None,
    shape: Shape,
) -> Received:
    """A fresh one. ``rows``: data and scales."""
    calls, check = ep._calls, ep._validation  # pyright: ignore[reportPrivateUsage]
    calls.check_open()
    weights = None if weights is None else weights.float()
    try:
        payload, spec = _payload(*rows), _spec(*shape)
        request = check.checked_dispatch(payload, topk_idx, weights, spec, None)
    except (ValueError, NotSupported) as error:
        raise calls.refuse(DISPATCH, shape[1], error) from None
    return calls.dispatch(request)


def redispatch(ep: ExpertParallel, rows: tuple[Tensor, Tensor | None], native: Handle) -> Received:
    calls, check = ep._calls, ep._validation  # pyright: ignore[reportPrivateUsage]
    calls.check_open()
    try:
        request = check.checked_dispatch(_payload(*rows), None, None, native.spec, native)
    except (ValueError, NotSupported) as error:
        raise calls.refuse(CACHED, True, error) from None
    return calls.redispatch(request)


def along(handle: LazyTuple) -> Call:
    """Its object's calls along its routing, in any order of rows, as backwards make them."""
    calls = handle.ep._calls  # pyright: ignore[reportPrivateUsage]
    return Call(calls, handle.native.spec, plan=handle.native.plan)


def _payload(data: Tensor, scales: Tensor | None) -> Payload:
    return Payload(data, None) if scales is None else given(data, scales)
