"""Custom operators: dispatch and combine for autograd, ``torch.compile`` and activation checkpointing.

The backward of one is the other: a dispatch's gradient is a combine, a combine's a cached dispatch, along the same plan. An
operator's arguments must be tensors and numbers, so it knows its object by number; the table below holds no object alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import (
    custom_op,
    register_autograd,  # pyright: ignore[reportUnknownVariableType]
    register_fake,  # pyright: ignore[reportUnknownVariableType]
)

from tokenyard.engines.arrival import num_result_rows
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.lane import NO_TICKET
from tokenyard.quant import dequantize, scale_words
from tokenyard.rows import Payload, take_values
from tokenyard.types import Layout, Quantize

if TYPE_CHECKING:
    from tokenyard.calls import Calls

_objects: WeakValueDictionary[int, Calls] = WeakValueDictionary()
_numbers = count(1)

_PLAN, _ARRIVED = len(Plan._fields), len(Arrived._fields)


def enlist(calls: Calls) -> int:
    """A number by which operators find ``calls`` while it lives."""
    number = next(_numbers)
    _objects[number] = calls
    return number


def _owner(number: int) -> Calls:
    """The object behind ``number``; a graph may outlive it."""
    try:
        return _objects[number]
    except KeyError:
        raise RuntimeError(
            "the ExpertParallel of this graph is closed and gone: keep it until after the backward"
        ) from None


def spec_numbers(spec: Spec) -> list[int]:
    """A ``Spec`` as an operator takes it: ``int[]``."""
    capacity = -1 if spec.capacity is None else spec.capacity
    return [spec.layout.value, int(spec.exact), spec.expert_alignment, capacity]


def _spec(numbers: Sequence[int]) -> Spec:
    layout, exact, alignment, capacity = numbers
    return Spec(
        layout=Layout(layout),
        exact=bool(exact),
        expert_alignment=alignment,
        capacity=None if capacity < 0 else capacity,
    )


def _new_size() -> Any:
    """A size that only the data decides."""
    return cast("Any", torch.library.get_ctx()).new_dynamic_size()


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty(0, device=like.device) if tensor is None else tensor


def _own(tensor: Tensor) -> Tensor:
    """Engines share what is empty; results of an operator must not alias."""
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# dispatch


@custom_op(
    "tokenyard::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor topk_idx, Tensor? weights, int owner, int[] spec, int quantize, int ticket) -> ("
    + ", ".join(["Tensor"] * (2 + _PLAN + _ARRIVED))
    + ")",
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
    calls, payload = _owner(owner), Payload(x, scales)
    (rows, scales), plan, arrived = calls.run_dispatch(payload, topk_idx, weights, _spec(spec), mode, ticket)
    scales = _or_empty(scales, x) if scales is None else scales.flatten(0, -2)
    arrived = arrived._replace(source=arrived.source.flatten())
    return (rows.flatten(0, -2), scales, *map(_own, (*plan, *arrived)))


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
    wanted, engine = _spec(spec), _owner(owner).engine
    config = engine.config
    size, top, local, hidden = config.world_size, config.num_topk, config.num_local_experts, x.shape[1]
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

    num_scales, scale_dtype = _scale_shape(scales, hidden, quantize)
    weight_shape = (0,) if weights is None else (rows, top) if flat else (rows,)
    return (
        x.new_empty((rows, hidden), dtype=torch.float8_e4m3fn if quantize else x.dtype),
        x.new_empty((rows, num_scales) if num_scales else (0,), dtype=scale_dtype),
        torch.empty(
            2 * size + 1 + engine.hop_counts + (config.matrix_ranks**2 + local if wanted.exact else 0),
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


def _scale_shape(scales: Tensor | None, hidden: int, quantize: int) -> tuple[int, torch.dtype]:
    if scales is not None:
        return scales.shape[1], scales.dtype
    if quantize == 0:
        return 0, torch.float32
    packed = Quantize(quantize) is Quantize.FP8_UE8M0
    return scale_words(hidden, packed=packed), torch.int32 if packed else torch.float32


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, weights, ctx.owner, ctx.spec, quantize, _ = inputs
    ctx.plain, ctx.weighted = not quantize and x.dtype.is_floating_point, weights is not None
    ctx.save_for_backward(*output[2:])
    weights_at = 2 + _PLAN + 1
    fixed = [t for at, t in enumerate(output) if at != weights_at and (at or not ctx.plain)]
    ctx.mark_non_differentiable(*fixed)  # a second call would take the first one back


def _dispatch_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    spec = _spec(ctx.spec)
    saved = ctx.saved_tensors  # once only: non-reentrant checkpointing allows no second look
    plan, arrived = Plan(*saved[:_PLAN]), Arrived(*saved[_PLAN:])
    to_x, to_weights = ctx.needs_input_grad[0] and ctx.plain, ctx.needs_input_grad[3] and ctx.weighted
    rest = (None,) * 4
    reduce = _in_arrival_order(grads[2 + _PLAN + 1], plan, arrived, spec) if to_weights else None
    if to_x:
        grad_x, reduced = combine_op(grads[0], None, reduce, [], list(plan), ctx.owner, ctx.spec, False, NO_TICKET)
    elif reduce is not None:
        grad_x, (reduced, _) = (
            None,
            combine_op(reduce, None, None, [], list(plan), ctx.owner, ctx.spec, True, NO_TICKET),
        )
    else:
        grad_x, reduced = None, None
    grad_weights = reduced.gather(1, plan.first_pick) if to_weights and reduced is not None else None
    return (grad_x, None, None, grad_weights, *rest)


def _in_arrival_order(grad: Tensor, plan: Plan, arrived: Arrived, spec: Spec) -> Tensor:
    """Gradients of the weights that a dispatch returned, as ``[Nb, K]`` of arrived rows, 0 where a pick is elsewhere."""
    if spec.layout is Layout.FLAT:
        here = torch.where(arrived.topk_idx < 0, 0.0, grad)
        return take_values(here, plan.slots[:, 0], 0.0) if spec.placed else here
    values = take_values(grad, plan.slots.reshape(-1), 0.0).view(plan.slots.shape)
    spread = torch.zeros(plan.slots.shape[0], plan.first_pick.shape[1], dtype=torch.float32, device=grad.device)
    return spread.scatter_add(1, plan.picks, values)


register_autograd("tokenyard::dispatch", _dispatch_backward, setup_context=_dispatch_context)


# cached dispatch


@custom_op(
    "tokenyard::redispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor[] plan, int owner, int[] spec, bool raw, int ticket) -> (Tensor, Tensor)",
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
    payload = _owner(owner).run_redispatch(Payload(x, scales), Plan(*plan), _spec(spec), raw, ticket)
    return payload.x, _or_empty(payload.scales, x)


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
    known = Plan(*plan)
    known_rows = known.slots.shape[0] if raw else known.gather.shape[0]
    rows = known_rows if _spec(spec).placed else _new_size()
    moved = x.new_empty((0,)) if scales is None else scales.new_empty((rows, scales.shape[1]))
    return x.new_empty((rows, x.shape[1])), moved


def _redispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, plan, ctx.owner, ctx.spec, ctx.raw, _ = inputs
    ctx.save_for_backward(*plan)
    ctx.mark_non_differentiable(output[1])


def _redispatch_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    plan = list(ctx.saved_tensors)
    grad_x, _none = combine_op(grad, None, None, [], plan, ctx.owner, ctx.spec, ctx.raw, NO_TICKET)
    return (grad_x, None, [None] * len(plan), *(None,) * 4)


register_autograd("tokenyard::redispatch", _redispatch_backward, setup_context=_redispatch_context)


# combine


@custom_op(
    "tokenyard::combine",
    mutates_args=(),
    schema="(Tensor rows, Tensor? weights, Tensor? reduce_weights, Tensor[] bias, Tensor[] plan, int owner, "
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
    x, reduced = _owner(owner).run_combine(
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
    plan, weighting = saved[:_PLAN], saved[_PLAN:]
    grad_rows = grad_weights = grad_reduce = None
    if ctx.needs_input_grad[0] or (ctx.weighted and ctx.needs_input_grad[1]):
        grad_rows, _ = redispatch_op(grad, None, plan, ctx.owner, ctx.spec, ctx.raw, NO_TICKET)
    if ctx.weighted and grad_rows is not None:
        rows, weights = weighting
        valid = (Plan(*plan).gather >= 0).unsqueeze(1)
        grad_weights = torch.where(valid, rows.float() * grad_rows.float(), 0.0).sum(1)
        grad_rows = (weights.unsqueeze(1) * grad_rows.float()).to(rows.dtype)
    if ctx.reduces and ctx.needs_input_grad[2]:
        grad_reduce, _ = redispatch_op(grad_reduced, None, plan, ctx.owner, ctx.spec, True, NO_TICKET)
    bias = [grad.to(dtype) for dtype in ctx.bias_dtypes]
    return (grad_rows, grad_weights, grad_reduce, bias, [None] * _PLAN, *(None,) * 4)


register_autograd("tokenyard::combine", _combine_backward, setup_context=_combine_context)


# dequantise, straight through


@custom_op(
    "tokenyard::dequantize",
    mutates_args=(),
    schema="(Tensor x, Tensor data, Tensor scales, Tensor[] plan, int owner, int[] spec, ScalarType dtype) -> Tensor",
)
def dequantize_op(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    plan: Sequence[Tensor],
    owner: int,
    spec: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return dequantize(data, scales, dtype)


@register_fake("tokenyard::dequantize")  # pyright: ignore[reportUntypedFunctionDecorator]
def _(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    plan: Sequence[Tensor],
    owner: int,
    spec: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return data.new_empty(data.shape, dtype=dtype)


def _dequantize_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, plan, ctx.owner, ctx.spec, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(*plan)


def _dequantize_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    plan = list(ctx.saved_tensors)
    grad_x, _ = combine_op(grad, None, None, [], plan, ctx.owner, ctx.spec, False, NO_TICKET)
    return (grad_x.to(ctx.dtype), None, None, [None] * len(plan), *(None,) * 3)


register_autograd("tokenyard::dequantize", _dequantize_backward, setup_context=_dequantize_context)
