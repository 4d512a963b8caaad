"""Custom operators: dispatch and combine for ``torch.compile`` and dispatch modes (``autograd.py``
has the eager calls).

The backward of one is the other: a dispatch's gradient is a combine, a combine's a cached dispatch,
along the same plan. An operator knows its object by number (``registry.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.library import (
    custom_op,
    register_autograd,  # pyright: ignore[reportUnknownVariableType]
    register_fake,  # pyright: ignore[reportUnknownVariableType]
)

from tokenyard import gradients
from tokenyard.call_queue import NO_TICKET
from tokenyard.engines.receive_plan import num_result_rows
from tokenyard.errors import NotSupported
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.registry import Caller, owner_of
from tokenyard.rows import Payload, RowFormat
from tokenyard.transforms import forward_level
from tokenyard.types import Layout, Quantize

_PLAN, _ARRIVED = len(Plan._fields), len(Arrived._fields)
_NO_TANGENTS = (
    "compiled calls move no tangents (forward-mode AD): make those calls outside of torch.compile"
)


def _called(number: int, op: int, exact: bool = True) -> Caller:
    """The object of an operator that is called; one of a compiled graph gets tensors without their
    tangents.
    """
    calls = owner_of(number)
    if forward_level() >= 0:
        raise calls.refuse(op, exact, NotSupported(_NO_TANGENTS))
    return calls


def spec_numbers(spec: Spec, mode: Quantize | None = None) -> list[int]:
    """A ``Spec`` as an operator takes it: ``int[]``, and behind it how a cached dispatch casts, if
    it does.
    """
    capacity = -1 if spec.capacity is None else spec.capacity
    cast = [] if mode is None else [mode.value]
    return [spec.layout.value, int(spec.exact), spec.expert_alignment, capacity, *cast]


def _spec(numbers: Sequence[int]) -> Spec:
    layout, exact, alignment, capacity = numbers[:4]
    bound = None if capacity < 0 else capacity
    return Spec(
        layout=Layout(layout), exact=bool(exact), expert_alignment=alignment, capacity=bound
    )


def _new_size() -> Any:
    """A size that only the data decides."""
    return cast("Any", torch.library.get_ctx()).new_dynamic_size()


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty(0, device=like.device) if tensor is None else tensor


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Results of an operator must not share memory; those of engines do (what is empty, tables of
    static shapes).
    """
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]  # pyright: ignore[reportPrivateUsage]
    shared = [
        not tensor.numel() or storages[at] in storages[:at] for at, tensor in enumerate(tensors)
    ]
    return [
        tensor.clone() if again else tensor for tensor, again in zip(tensors, shared, strict=True)
    ]


class Moves(NamedTuple):
    """Calls along a plan as operators (:class:`gradients.Moves`)."""

    plan: Plan
    owner: int
    numbers: Sequence[int]

    @property
    def spec(self) -> Spec:
        return _spec(self.numbers)

    def combine(
        self, rows: Tensor, reduce_weights: Tensor | None = None, *, raw: bool
    ) -> tuple[Tensor, Tensor]:
        return combine_op(
            rows,
            None,
            reduce_weights,
            [],
            list(self.plan),
            self.owner,
            self.numbers,
            raw,
            NO_TICKET,
        )

    def redispatch(self, x: Tensor, *, raw: bool) -> Tensor:
        return redispatch_op(x, None, list(self.plan), self.owner, self.numbers, raw, NO_TICKET)[0]


# dispatch


@custom_op(
    "tokenyard::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor topk_idx, Tensor? weights, int owner, int[] spec, "
    "int quantize, int ticket) -> (" + ", ".join(["Tensor"] * (2 + _PLAN + _ARRIVED)) + ")",
)
def dispatch_op(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    owner: int,
    spec: Sequence[int],
    quantize: int,
    ticket: int,
) -> tuple[Tensor, ...]:
    mode = Quantize(quantize) if quantize else None
    calls, payload = _called(owner, DISPATCH, bool(spec[1])), Payload(x, scales)
    (rows, scales), plan, arrived = calls.run_dispatch(
        payload, topk_idx, weights, _spec(spec), mode, ticket
    )
    scales = _or_empty(scales, x) if scales is None else scales.flatten(0, -2)
    arrived = arrived._replace(source=arrived.source.flatten())
    # No view: it may be changed in place.
    return (
        rows.flatten(0, -2).data,
        scales,
        *_apart((*plan, *arrived)),
    )


@register_fake("tokenyard::dispatch")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    owner: int,
    spec: Sequence[int],
    quantize: int,
    ticket: int,
) -> tuple[Tensor, ...]:
    wanted, engine = _spec(spec), owner_of(owner).engine
    config = engine.config
    size, top, local = config.world_size, config.num_topk, config.num_local_experts
    route, route_dtype, arrived = engine.route_shapes(topk_idx.shape[0], wanted, _new_size)
    grows = wanted.exact and wanted.layout is Layout.EXPERT_MAJOR
    rows = _new_size() if grows else num_result_rows(wanted, config, None, arrived)
    flat, placed = wanted.layout is Layout.FLAT, wanted.placed
    width = min(top, local) if not flat else 1

    def ints(*shape: Any) -> Tensor:
        return x.new_empty(shape, dtype=torch.int64)

    def words(*shape: Any) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def table(*shape: Any) -> Tensor:
        return ints(*shape) if placed else ints(0)

    sent = row_of(Payload(x, scales), Quantize(quantize) if quantize else None)
    weight_shape = (0,) if weights is None else (rows, top) if flat else (rows,)
    return (
        *_rows_like(x, sent, rows),
        torch.empty(
            2 * size
            + 1
            + engine.hop_counts
            + (config.matrix_ranks**2 + local if wanted.exact else 0),
            dtype=torch.int64,
            device="cpu",
        ),
        x.new_empty(route, dtype=route_dtype),
        ints(topk_idx.shape[0] if engine.returns_width else 0, engine.returns_width),
        table(arrived, width),
        table(arrived, width),
        table(rows),
        ints(topk_idx.shape[0], top),
        ints(rows, top) if flat else words(0),
        x.new_empty(weight_shape, dtype=torch.float32),
        ints(rows),
        words(local),
        words(local + 1) if wanted.layout is Layout.EXPERT_MAJOR else words(0),
        words(local, size, 2) if wanted.layout is Layout.EXPERT_PADDED else words(0),
        words(1) if wanted.capacity is not None else words(0),
    )


def _rows_like(x: Tensor, sent: RowFormat, rows: Any) -> tuple[Tensor, Tensor]:
    """Data and scales of ``rows`` rows."""
    scales = (rows, sent.num_scales) if sent.scale_words else (0,)
    return (
        x.new_empty((rows, sent.hidden), dtype=sent.dtype),
        x.new_empty(scales, dtype=sent.scale_dtype),
    )


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, weights, ctx.owner, ctx.spec, quantize, _ = inputs
    ctx.plain, ctx.weighted = not quantize and x.dtype.is_floating_point, weights is not None
    # Not the weights: they may be changed in place.
    ctx.save_for_backward(*output[2 : 2 + _PLAN + 1])
    weights_at = 2 + _PLAN + 1
    fixed = [t for at, t in enumerate(output) if at != weights_at and (at or not ctx.plain)]
    ctx.mark_non_differentiable(*fixed)  # a second call would take the first one back


def _dispatch_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    # Once only: non-reentrant checkpointing allows no second look.
    *plan, topk_idx = ctx.saved_tensors
    rows = grads[0] if ctx.needs_input_grad[0] and ctx.plain else None
    weights = grads[2 + _PLAN + 1] if ctx.needs_input_grad[3] and ctx.weighted else None
    moves = Moves(Plan(*plan), ctx.owner, ctx.spec)
    grad_x, grad_weights = gradients.of_dispatch(moves, rows, weights, topk_idx)
    return (grad_x, None, None, grad_weights, *(None,) * 4)


register_autograd("tokenyard::dispatch", _dispatch_backward, setup_context=_dispatch_context)


# cached dispatch


@custom_op(
    "tokenyard::redispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor[] plan, int owner, int[] spec, bool raw, int ticket) "
    "-> (Tensor, Tensor)",
)
def redispatch_op(
    x: Tensor,
    scales: Tensor | None,
    plan: Sequence[Tensor],
    owner: int,
    spec: Sequence[int],
    raw: bool,
    ticket: int,
) -> tuple[Tensor, Tensor]:
    mode = Quantize(spec[4]) if spec[4:] else None
    payload = _called(owner, CACHED).run_redispatch(
        Payload(x, scales), Plan(*plan), _spec(spec), raw, ticket, mode
    )
    return payload.x.data, _or_empty(payload.scales, x)


@register_fake("tokenyard::redispatch")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(
    x: Tensor,
    scales: Tensor | None,
    plan: Sequence[Tensor],
    owner: int,
    spec: Sequence[int],
    raw: bool,
    ticket: int,
) -> tuple[Tensor, Tensor]:
    known, mode = Plan(*plan), Quantize(spec[4]) if spec[4:] else None
    rows = (known.slots if raw else known.gather).shape[0] if _spec(spec).placed else _new_size()
    return _rows_like(x, row_of(Payload(x, scales), mode), rows)


def _redispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, plan, ctx.owner, ctx.spec, ctx.raw, _ = inputs
    ctx.save_for_backward(*plan)
    ctx.mark_non_differentiable(*(output if ctx.spec[4:] else output[1:]))


def _redispatch_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    moves = Moves(Plan(*ctx.saved_tensors), ctx.owner, ctx.spec)
    return (moves.combine(grad, raw=ctx.raw)[0], None, [None] * _PLAN, *(None,) * 4)


register_autograd("tokenyard::redispatch", _redispatch_backward, setup_context=_redispatch_context)


# combine


@custom_op(
    "tokenyard::combine",
    mutates_args=(),
    schema="(Tensor rows, Tensor? weights, Tensor? reduce_weights, Tensor[] bias, Tensor[] plan, "
    "int owner, "
    "int[] spec, bool raw, int ticket) -> (Tensor, Tensor)",
)
def combine_op(
    rows: Tensor,
    weights: Tensor | None,
    reduce_weights: Tensor | None,
    bias: Sequence[Tensor],
    plan: Sequence[Tensor],
    owner: int,
    spec: Sequence[int],
    raw: bool,
    ticket: int,
) -> tuple[Tensor, Tensor]:
    x, reduced = _called(owner, COMBINE).run_combine(
        rows,
        Plan(*plan),
        _spec(spec),
        ticket,
        weights=weights,
        reduce_weights=reduce_weights,
        bias=tuple(bias),
        raw=raw,
    )
    return x, _or_empty(reduced, rows)


@register_fake("tokenyard::combine")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(
    rows: Tensor,
    weights: Tensor | None,
    reduce_weights: Tensor | None,
    bias: Sequence[Tensor],
    plan: Sequence[Tensor],
    owner: int,
    spec: Sequence[int],
    raw: bool,
    ticket: int,
) -> tuple[Tensor, Tensor]:
    num_tokens = Plan(*plan).first_pick.shape[0]
    reduced = (0,) if reduce_weights is None else (num_tokens, reduce_weights.shape[1])
    return rows.new_empty((num_tokens, rows.shape[1])), rows.new_empty(reduced, dtype=torch.float32)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weights, reduce, bias, plan, ctx.owner, ctx.spec, ctx.raw, _ = inputs
    ctx.weighted, ctx.reduces = weights is not None, reduce is not None
    ctx.bias_dtypes = [term.dtype for term in bias]
    ctx.save_for_backward(*plan, *((rows, weights) if weights is not None else ()))
    if reduce is None:
        ctx.mark_non_differentiable(output[1])


def _combine_backward(ctx: Any, grad: Tensor, grad_reduced: Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    moves, weighting = Moves(Plan(*saved[:_PLAN]), ctx.owner, ctx.spec), saved[_PLAN:]
    grad_rows = grad_weights = grad_reduce = None
    if ctx.needs_input_grad[0] or (ctx.weighted and ctx.needs_input_grad[1]):
        pair = (weighting[0], weighting[1]) if ctx.weighted else None
        grad_rows, grad_weights = gradients.of_combine(moves, grad, pair, ctx.raw)
    if ctx.reduces and ctx.needs_input_grad[2]:
        grad_reduce = moves.redispatch(grad_reduced, raw=True)
    bias = [grad.to(dtype) for dtype in ctx.bias_dtypes]
    return (grad_rows, grad_weights, grad_reduce, bias, [None] * _PLAN, *(None,) * 4)


register_autograd("tokenyard::combine", _combine_backward, setup_context=_combine_context)
