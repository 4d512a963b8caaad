"""Calls that autograd, a compiler or a transform of ``torch.func`` must see.

Each is a ``torch.autograd.Function``: backward, forward mode and ``torch.func`` in one. Eager calls
apply it themselves, so that nothing is imported in a call (torch's custom operators import
``torch._dynamo`` when they are first called). Compilers and dispatch modes see the operators of
``ops.py``; the same functions are their derivatives. Results are no views, so that the caller may
change them in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from tokenyard import gradients, ops, transforms
from tokenyard.dense import is_wrapper
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.errors import Mismatch, NotSupported, PeerTimeout, afresh
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE
from tokenyard.ops import Caller, Moved, owner_of
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

_PLAN = len(Plan._fields)
_TANGENTS = (
    " (this call moves tangents: inside forward_ad.dual_level() all calls do, of ranks whose "
    "tensors have none too, so every rank has to enter it)"
)
_BACKWARD = (
    " (this is a backward: all ranks run the same ones in the same order, so requires_grad of x, "
    "rows and weights must be equal on all of them, of empty batches too)"
)


@dataclass(eq=False)
class Call:
    """One call on its way through a ``Function``: what it needs besides tensors that are
    differentiated, and, once it is made, what it returns besides them. Also
    :class:`gradients.Moves`, the calls along its plan that derivatives need.

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
    arrived: Arrived = field(init=False)
    scales: Tensor | None = field(init=False)
    num_rows: int = field(init=False)

    def combine(
        self, rows: Tensor, reduce_weights: Tensor | None = None, *, raw: bool
    ) -> tuple[Tensor, Tensor | None]:
        return combine(self._along(COMBINE, rows, raw), rows, None, reduce_weights)

    def redispatch(self, x: Tensor, *, raw: bool) -> Tensor:
        return redispatch(self._along(CACHED, x, raw), Payload(x, None)).x

    def run_dispatch(
        self, calls: Caller, payload: Payload, topk_idx: Tensor, weights: Tensor | None
    ) -> Moved:
        """Make it by ``calls``, as the next two: the object's or its operators."""
        given = DispatchArguments(payload, topk_idx, weights, self.spec, self.mode)
        return calls.run_dispatch(given, self.ticket)

    def run_redispatch(self, calls: Caller, payload: Payload) -> Payload:
        given = CachedArguments(payload, self.plan, self.spec, self.mode, self.raw)
        return calls.run_redispatch(given, self.ticket)

    def run_combine(self, calls: Caller, rows: Tensor, *terms: Any) -> tuple[Tensor, Tensor | None]:
        """``terms``: weights, reduce_weights and bias."""
        given = CombineArguments(rows, self.plan, self.spec, *terms, raw=self.raw)
        return calls.run_combine(given, self.ticket)

    def as_operator(self, x: Tensor) -> ops.Operators:
        """The object's operators, for ``x``; tensors without data take no others beside them."""
        order = self.calls.order
        if is_wrapper(x) and not torch.compiler.is_compiling():
            order = x.new_zeros(1, dtype=torch.float32)
        return ops.Operators(self.calls.number, order, self.calls.anchor)

    def _along(self, op: int, moved: Tensor, raw: bool) -> Call:
        """A call along the plan. A backward may be batched where the call was not."""
        if transforms.in_vmap(moved):
            raise self.calls.refuse(op, True, NotSupported(transforms.NO_VMAP))
        return Call(self.calls, self.spec, plan=self.plan, raw=raw)


def _lasting(tensor: Tensor) -> Tensor:
    """Autograd does not keep what was made in inference mode."""
    inference = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return tensor.clone() if inference else tensor


def lasting(plan: Plan) -> Plan:
    """``plan``, of tensors that autograd keeps."""
    return plan if torch.compiler.is_compiling() else Plan(*map(_lasting, plan))


def remember(ctx: Any, call: Call, *more: Tensor) -> None:
    """Keep what derivatives need; the object by its number, so that no graph keeps it alive."""
    ctx.owner, ctx.spec, ctx.raw = call.calls.number, call.spec, call.raw
    ctx.order = call.calls.order if isinstance(call.calls, ops.Operators) else None
    ctx.save_for_backward(*map(_lasting, (*call.plan, *more)))
    # Else the graph would hold all of it.
    ctx.call = call if transforms.forward_level() >= 0 else None
    ctx.set_materialize_grads(True)


def recall(ctx: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """What :func:`remember` kept. Once only: non-reentrant checkpointing allows no second look."""
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    as_operator = ctx.order is not None
    calls = ops.Operators(ctx.owner, ctx.order) if as_operator else owner_of(ctx.owner)
    return Call(calls, ctx.spec, plan=Plan(*saved[:_PLAN]), raw=ctx.raw), saved[_PLAN:]


def last_mark(ctx: Any, call: Call, at: int) -> Tensor | None:
    """The gradient of the anchor, a function's input ``at``: the mark of its backward."""
    return getattr(call.calls, "mark", None) if ctx.needs_input_grad[at] else None


def _solid(tangent: Any) -> Any:
    """``tangent`` (or None), or a gradient of one, with memory: torch has zeros without any."""
    if tangent is None or torch.compiler.is_compiling() or not tangent._is_zerotensor():
        return tangent
    return torch.zeros_like(tangent)


def _joining(moved: Tensor, *others: Tensor | None) -> Tensor:
    """``moved``, with a tangent of zeros if tangents are followed and neither it nor ``others``
    have one: other ranks' may, and then all take part."""
    if transforms.in_functorch() or not transforms.in_forward_mode():
        return moved
    if transforms.has_tangent(moved, *others):
        return moved
    make_dual: Any = torch._VF._make_dual  # pyright: ignore  (forward_ad.make_dual imports torch's decompositions)
    return make_dual(moved, torch.zeros_like(moved), level=transforms.forward_level())


def _is_tracked(call: Call, *tensors: Tensor | None) -> bool:
    """Whether a call must be seen; operators are by themselves."""
    return not isinstance(call.calls, ops.Operators) and transforms.is_tracked(*tensors)


class _Hinted:
    """Adds to the error of a lost or disagreeing peer what kind of call it was."""

    def __init__(self, hint: str) -> None:
        self._hint = hint

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, (Mismatch, PeerTimeout)):
            hinted = afresh(error)
            hinted.args = (f"{error}{self._hint}",)
            raise hinted from None


def _is_plain(x: Tensor, scales: Tensor | None, call: Call) -> bool:
    """Whether rows have gradients: neither cast nor quantised by the caller."""
    return call.mode is None and scales is None and x.dtype.is_floating_point


class _Dispatch(Function):
    @staticmethod
    def forward(
        x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None, call: Call,
        anchor: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        made = call.run_dispatch(call.calls, Payload(x, scales), topk_idx, weights)
        moved, call.plan, call.arrived = made
        call.scales, call.num_rows = moved.scales, moved.x.shape[0]
        return moved.x, None if weights is None else call.arrived.weights

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        x, scales, _, _, call, _ = inputs
        ctx.plain = _is_plain(x, scales, call)
        ids = call.spec.layout is Layout.FLAT and ctx.needs_input_grad[3]
        remember(ctx, call, *((call.arrived.topk_idx,) if ids else ()))
        if not ctx.plain:
            ctx.mark_non_differentiable(output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, ids = recall(ctx)
        rows, weights = map(_solid, grads)
        rows = rows if ctx.needs_input_grad[0] and ctx.plain else None
        weights = weights if ctx.needs_input_grad[3] else None
        with _Hinted(_BACKWARD):
            found = gradients.of_dispatch(call, rows, weights, ids[0] if ids else None)
        grad_x, grad_weights = found
        return grad_x, None, None, grad_weights, None, last_mark(ctx, call, 5)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, Tensor | None]:
        x, _, _, weights, *_ = tangents
        call: Call = ctx.call
        with _Hinted(_TANGENTS):
            rows = call.redispatch(_solid(x), raw=False) if ctx.plain else None
            if weights is None:
                return rows, None
            return rows, gradients.weights_there(
                call, _solid(weights), call.arrived.topk_idx, call.num_rows
            )


def _dispatched(
    call: Call, x: Tensor, scales: Tensor | None, topk_idx: Tensor, weights: Tensor | None,
    anchor: Tensor | None = None,
) -> Moved:  # fmt: skip
    rows, brought = _Dispatch.apply(x, scales, topk_idx, weights, call, anchor)  # pyright: ignore
    arrived = call.arrived if brought is None else call.arrived._replace(weights=brought)
    return Payload(rows, call.scales), call.plan, arrived


def dispatch(call: Call, payload: Payload, topk_idx: Tensor, weights: Tensor | None) -> Moved:
    """A fresh dispatch that is tracked. Rows, scales and source are flat."""
    x, scales = payload
    if transforms.by_operator(x):
        return call.run_dispatch(call.as_operator(x), payload, topk_idx, weights)
    if call.mode is None and scales is None:
        x = _joining(x, weights)
    elif weights is not None:
        weights = _joining(weights)
    return _dispatched(call, x, scales, topk_idx, weights)


def _dispatch_operator(below: ops.Below, *given: Any) -> tuple[Tensor, ...]:
    order, anchor, *tensors, owner, numbers, mode, ticket = given
    calls, spec = ops.Operators(owner, order, below=below), ops.spec_of(numbers)
    x, scales, idx, weights = tensors
    call = Call(calls, spec, ticket, mode=ops.mode_of(mode))
    moved = _dispatched(call, x, scales, idx, weights, anchor)
    return *ops.joined(*moved), calls.mark


ops.track(ops.dispatch_op, _dispatch_operator)


class _Redispatch(Function):
    @staticmethod
    def forward(x: Tensor, scales: Tensor | None, call: Call, anchor: Tensor | None) -> Tensor:
        rows, call.scales = call.run_redispatch(call.calls, Payload(x, scales))
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scales, call, _ = inputs
        remember(ctx, call)
        if not _is_plain(x, scales, call):
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, _ = recall(ctx)
        with _Hinted(_BACKWARD):
            grad_x, _ = call.combine(_solid(grads[0]), raw=call.raw)
        return grad_x, None, None, last_mark(ctx, call, 3)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        with _Hinted(_TANGENTS):
            return ctx.call.redispatch(_solid(tangents[0]), raw=ctx.call.raw)


def redispatch(call: Call, payload: Payload) -> Payload:
    """A cached dispatch, tracked if need be."""
    x, scales = payload
    if not _is_tracked(call, x):
        return call.run_redispatch(call.calls, payload)
    if transforms.by_operator(x):
        return call.run_redispatch(call.as_operator(x), payload)
    if call.mode is None and scales is None:
        x = _joining(x)
    return Payload(_Redispatch.apply(x, scales, call, None), call.scales)  # pyright: ignore


def _redispatch_operator(below: ops.Below, *given: Any) -> tuple[Tensor, ...]:
    order, anchor, x, scales, plan, owner, numbers, raw, ticket = given
    calls, spec = ops.Operators(owner, order, below=below), ops.spec_of(numbers)
    call = Call(calls, spec, ticket, Plan(*plan), ops.mode_of(*numbers[4:]), raw)
    rows = cast("Tensor", _Redispatch.apply(x, scales, call, anchor))  # pyright: ignore
    return rows, ops.or_empty(call.scales, x), calls.mark


ops.track(ops.redispatch_op, _redispatch_operator)


class _Combine(Function):
    @staticmethod
    def forward(
        rows: Tensor,
        weights: Tensor | None,
        reduce_weights: Tensor | None,
        call: Call,
        anchor: Tensor | None,
        *bias: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        return call.run_combine(call.calls, rows, weights, reduce_weights, bias)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        rows, weights, _, call, _, *bias = inputs
        ctx.bias_dtypes = [term.dtype for term in bias]
        weighting = () if weights is None else (rows, weights)
        remember(ctx, call, *weighting)
        if ctx.call is not None:
            ctx.save_for_forward(*weighting)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, weighting = recall(ctx)
        grad, grad_reduced = map(_solid, grads)
        needs = ctx.needs_input_grad
        grad_rows = grad_weights = grad_reduce = None
        with _Hinted(_BACKWARD):
            if needs[0] or needs[1]:
                pair = (weighting[0], weighting[1]) if weighting else None
                grad_rows, grad_weights = gradients.of_combine(call, grad, pair, call.raw)
            if needs[2]:
                grad_reduce = call.redispatch(grad_reduced, raw=True)
        bias = [grad.to(dtype) for dtype in ctx.bias_dtypes]
        return (grad_rows, grad_weights, grad_reduce, None, last_mark(ctx, call, 4), *bias)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor | None]:
        """One combine, as sums are linear: of ``d(weight * row)``."""
        _, weights, reduce_weights, _, _, *bias = tangents
        call: Call = ctx.call
        rows = _solid(tangents[0])
        if weights is not None:
            rows_at, weights_at = ctx.saved_tensors
            rows = gradients.weighted_tangent(
                rows, rows_at, weights_at, weights, call.plan.gather >= 0
            )
        reduce, terms = _solid(reduce_weights), tuple(map(_solid, bias))
        again = Call(call.calls, call.spec, plan=call.plan, raw=call.raw)
        with _Hinted(_TANGENTS):
            return combine(again, rows, None, reduce, terms)


def combine(
    call: Call,
    rows: Tensor,
    weights: Tensor | None = None,
    reduce_weights: Tensor | None = None,
    bias: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """A combine, tracked if need be."""
    if not _is_tracked(call, rows, weights, reduce_weights, *bias):
        return call.run_combine(call.calls, rows, weights, reduce_weights, bias)
    if transforms.by_operator(rows):
        return call.run_combine(call.as_operator(rows), rows, weights, reduce_weights, bias)
    rows = _joining(rows, weights, reduce_weights, *bias)
    return _Combine.apply(rows, weights, reduce_weights, call, None, *bias)  # pyright: ignore


def _combine_operator(below: ops.Below, *given: Any) -> tuple[Tensor, ...]:
    order, anchor, rows, weights, reduce, bias, plan, owner, numbers, raw, ticket = given
    calls = ops.Operators(owner, order, below=below)
    call = Call(calls, ops.spec_of(numbers), ticket, Plan(*plan), raw=raw)
    made = _Combine.apply(rows, weights, reduce, call, anchor, *bias)  # pyright: ignore
    x, reduced = cast("tuple[Tensor, Tensor | None]", made)
    return x, ops.or_empty(reduced, rows), calls.mark


ops.track(ops.combine_op, _combine_operator)
