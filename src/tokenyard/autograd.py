"""Calls that autograd, a compiler or a transform of ``torch.func`` must see.

Eager ones are ``torch.autograd.Function``: backward, forward mode and ``torch.func`` in one, and
nothing is imported in a call (torch's custom operators import ``torch._dynamo`` when they are first
called). Compilers and dispatch modes (selective checkpointing, say) see the operators of
``ops.py``. What a call returns belongs to the caller: results are no views, so that they may be
changed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tokenyard import gradients, ops, transforms
from tokenyard.call_queue import NO_TICKET
from tokenyard.errors import Mismatch, NotSupported, PeerTimeout, afresh
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE
from tokenyard.registry import Caller, owner_of
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

_PLAN = len(Plan._fields)
_HINT = (
    " (this call moves tangents: inside forward_ad.dual_level() all calls do, of ranks whose "
    "tensors have none too, so every rank "
    "has to enter it)"
)


class Call:
    """One call on its way through a ``Function``: what it needs besides tensors, and what it
    returns besides them.

    It also is how the object's calls along the plan are made that derivatives need
    (:class:`gradients.Moves`).
    """

    def __init__(
        self,
        calls: Caller,
        spec: Spec,
        ticket: int = NO_TICKET,
        *,
        plan: Plan | None = None,
        mode: Quantize | None = None,
        raw: bool = False,
    ) -> None:
        self.calls, self.spec, self.ticket, self.mode, self.raw = calls, spec, ticket, mode, raw
        self.scales: Tensor | None = None
        if plan is not None:
            self.plan = plan
        self.arrived: Arrived
        self.num_rows = 0

    def combine(
        self, rows: Tensor, reduce_weights: Tensor | None = None, *, raw: bool
    ) -> tuple[Tensor, Tensor]:
        self._refuse_vmap(COMBINE, rows)
        x, reduced = combine(
            self.calls, rows, self.plan, self.spec, reduce_weights=reduce_weights, raw=raw
        )
        return x, rows.new_empty(0) if reduced is None else reduced

    def redispatch(self, x: Tensor, *, raw: bool) -> Tensor:
        self._refuse_vmap(CACHED, x)
        return redispatch(self.calls, Payload(x, None), self.plan, self.spec, raw=raw).x

    def _refuse_vmap(self, op: int, moved: Tensor) -> None:
        """A backward may be batched where the call was not."""
        if transforms.in_vmap(moved):
            raise self.calls.refuse(op, True, NotSupported(transforms.NO_VMAP))


def remember(ctx: Any, call: Call, *more: Tensor) -> None:
    """Keep what derivatives need; the object itself only by its number, so that a graph does not
    keep it alive.
    """
    ctx.owner, ctx.spec, ctx.raw = call.calls.number, call.spec, call.raw
    ctx.save_for_backward(*(_lasting(tensor) for tensor in (*call.plan, *more)))
    # Else the graph would hold all of it.
    ctx.call = call if transforms.forward_level() >= 0 else None
    ctx.set_materialize_grads(True)


def _lasting(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy of one made in inference mode, which autograd does not keep."""
    return tensor.clone() if tensor.is_inference() else tensor


def recall(ctx: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """What :func:`remember` kept. Once only: non-reentrant checkpointing allows no second look."""
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return Call(owner_of(ctx.owner), ctx.spec, plan=Plan(*saved[:_PLAN]), raw=ctx.raw), saved[
        _PLAN:
    ]


def _solid(tangent: Tensor) -> Tensor:
    """``tangent`` with memory: torch has zeros without any."""
    return torch.zeros_like(tangent) if tangent._is_zerotensor() else tangent  # pyright: ignore


def _joining(moved: Tensor, *others: Tensor | None) -> Tensor:
    """``moved``, with a tangent of zeros if tangents are followed and neither it nor ``others``
    have one.

    Other ranks' may have one: then theirs come here, and all take part.
    """
    if (
        transforms.in_functorch()
        or not transforms.in_forward_mode()
        or transforms.has_tangent(moved, *others)
    ):
        return moved
    make_dual: Any = torch._VF._make_dual  # pyright: ignore  (forward_ad.make_dual imports torch's decompositions)
    return make_dual(moved, torch.zeros_like(moved), level=transforms.forward_level())


class _Hinted:
    """Says in the error of a lost or disagreeing peer that tangents were moved."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, (Mismatch, PeerTimeout)):
            hinted = afresh(error)
            hinted.args = (f"{error}{_HINT}",)
            raise hinted from None


# dispatch


class _Dispatch(Function):
    @staticmethod
    def forward(
        x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        moved, call.plan, arrived = call.calls.run_dispatch(
            Payload(x, scales), topk_idx, weights, call.spec, call.mode, call.ticket
        )
        call.scales = None if moved.scales is None else moved.scales.flatten(0, -2)
        call.arrived = arrived._replace(source=arrived.source.flatten())
        rows = moved.x.flatten(0, -2)
        call.num_rows = rows.shape[0]
        return rows.data, None if weights is None else arrived.weights.data

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        x, scales, _, _, call = inputs
        ctx.plain = call.mode is None and scales is None and x.dtype.is_floating_point
        ids = call.spec.layout is Layout.FLAT and ctx.needs_input_grad[3]
        remember(ctx, call, *((call.arrived.topk_idx,) if ids else ()))
        if not ctx.plain:
            ctx.mark_non_differentiable(output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, ids = recall(ctx)
        rows, weights = grads
        rows = rows if ctx.needs_input_grad[0] and ctx.plain else None
        weights = weights if ctx.needs_input_grad[3] else None
        grad_x, grad_weights = gradients.of_dispatch(call, rows, weights, ids[0] if ids else None)
        return grad_x, None, None, grad_weights, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, Tensor | None]:
        x, _, _, weights, _ = tangents
        call: Call = ctx.call
        with _Hinted():
            rows = call.redispatch(_solid(x), raw=False) if ctx.plain else None
            if weights is None:
                return rows, None
            return rows, gradients.weights_there(
                call, _solid(weights), call.arrived.topk_idx, call.num_rows
            )


def dispatch(
    calls: Caller,
    payload: Payload,
    topk_idx: Tensor,
    weights: Tensor | None,
    spec: Spec,
    mode: Quantize | None,
    ticket: int,
) -> tuple[Payload, Plan, Arrived]:
    """A fresh dispatch that is tracked. Rows, scales and source are flat."""
    if transforms.by_operator(payload.x):
        quantize, numbers = 0 if mode is None else mode.value, ops.spec_numbers(spec)
        flat = ops.dispatch_op(
            payload.x, payload.scales, topk_idx, weights, calls.number, numbers, quantize, ticket
        )
        plan, arrived = Plan(*flat[2 : 2 + _PLAN]), Arrived(*flat[2 + _PLAN :])
        return Payload(flat[0], flat[1] if flat[1].dim() == 2 else None), plan, arrived
    call, x = Call(calls, spec, ticket, mode=mode), payload.x
    if mode is None and payload.scales is None:
        x = _joining(x, weights)
    elif weights is not None:
        weights = _joining(weights)
    rows, brought = _Dispatch.apply(x, payload.scales, topk_idx, weights, call)  # pyright: ignore
    arrived = call.arrived if brought is None else call.arrived._replace(weights=brought)
    return Payload(rows, call.scales), call.plan, arrived


# cached dispatch


class _Redispatch(Function):
    @staticmethod
    def forward(x: Tensor, scales: Tensor | None, call: Call) -> Tensor:
        moved = call.calls.run_redispatch(
            Payload(x, scales), call.plan, call.spec, call.raw, call.ticket, call.mode
        )
        call.scales = moved.scales
        return moved.x.data

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scales, call = inputs
        remember(ctx, call)
        if call.mode is not None or scales is not None or not x.dtype.is_floating_point:
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, _ = recall(ctx)
        return call.combine(grads[0], raw=ctx.raw)[0], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        with _Hinted():
            return ctx.call.redispatch(_solid(tangents[0]), raw=ctx.raw)


def redispatch(
    calls: Caller,
    payload: Payload,
    plan: Plan,
    spec: Spec,
    ticket: int = NO_TICKET,
    *,
    mode: Quantize | None = None,
    raw: bool = False,
) -> Payload:
    """A cached dispatch, tracked if need be."""
    if not transforms.is_tracked(payload.x):
        return calls.run_redispatch(payload, plan, spec, raw, ticket, mode)
    if transforms.by_operator(payload.x):
        numbers = ops.spec_numbers(spec, mode)
        x, scales = ops.redispatch_op(
            payload.x, payload.scales, list(plan), calls.number, numbers, raw, ticket
        )
        return Payload(x, scales if scales.dim() == 2 else None)
    call = Call(calls, spec, ticket, plan=plan, mode=mode, raw=raw)
    x = payload.x
    if mode is None and payload.scales is None:
        x = _joining(x)
    x = _Redispatch.apply(x, payload.scales, call)  # pyright: ignore
    return Payload(x, call.scales)


# combine


class _Combine(Function):
    @staticmethod
    def forward(
        rows: Tensor,
        weights: Tensor | None,
        reduce_weights: Tensor | None,
        call: Call,
        *bias: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        x, reduced = call.calls.run_combine(
            rows,
            call.plan,
            call.spec,
            call.ticket,
            weights=weights,
            reduce_weights=reduce_weights,
            bias=bias,
            raw=call.raw,
        )
        return x.data, None if reduced is None else reduced.data

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        rows, weights, _, call, *bias = inputs
        ctx.bias_dtypes = [term.dtype for term in bias]
        weighting = () if weights is None else (rows, weights)
        remember(ctx, call, *weighting)
        if ctx.call is not None:
            ctx.save_for_forward(*weighting)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, weighting = recall(ctx)
        grad, grad_reduced = grads
        needs = ctx.needs_input_grad
        grad_rows = grad_weights = grad_reduce = None
        if needs[0] or needs[1]:
            pair = (weighting[0], weighting[1]) if weighting else None
            grad_rows, grad_weights = gradients.of_combine(call, grad, pair, ctx.raw)
        if needs[2]:
            grad_reduce = call.redispatch(grad_reduced, raw=True)
        return (
            grad_rows,
            grad_weights,
            grad_reduce,
            None,
            *(grad.to(dtype) for dtype in ctx.bias_dtypes),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor | None]:
        """One combine, as sums are linear: of ``d(weight * row)``."""
        _, weights, reduce_weights, _, *bias = tangents
        call: Call = ctx.call
        rows = _solid(tangents[0])
        if weights is not None:
            rows_at, weights_at = ctx.saved_tensors
            rows = gradients.weighted_tangent(
                rows, rows_at, weights_at, weights, call.plan.gather >= 0
            )
        reduce = None if reduce_weights is None else _solid(reduce_weights)
        terms = tuple(_solid(term) for term in bias)
        with _Hinted():
            return combine(
                call.calls,
                rows,
                call.plan,
                call.spec,
                reduce_weights=reduce,
                bias=terms,
                raw=call.raw,
            )


def combine(
    calls: Caller,
    rows: Tensor,
    plan: Plan,
    spec: Spec,
    ticket: int = NO_TICKET,
    *,
    weights: Tensor | None = None,
    reduce_weights: Tensor | None = None,
    bias: tuple[Tensor, ...] = (),
    raw: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A combine, tracked if need be."""
    given: dict[str, Any] = {
        "weights": weights,
        "reduce_weights": reduce_weights,
        "bias": bias,
        "raw": raw,
    }
    if not transforms.is_tracked(rows, weights, reduce_weights, *bias):
        return calls.run_combine(rows, plan, spec, ticket, **given)
    if transforms.by_operator(rows):
        numbers = ops.spec_numbers(spec)
        x, reduced = ops.combine_op(
            rows,
            weights,
            reduce_weights,
            list(bias),
            list(plan),
            calls.number,
            numbers,
            raw,
            ticket,
        )
        return x, None if reduce_weights is None else reduced
    call = Call(calls, spec, ticket, plan=plan, raw=raw)
    rows = _joining(rows, weights, reduce_weights, *bias)
    return _Combine.apply(rows, weights, reduce_weights, call, *bias)  # pyright: ignore
