"""Dequantised rows whose gradient goes straight through to the tensor that was dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tokenyard import ops, transforms
from tokenyard.autograd import Call, last_mark, recall, remember
from tokenyard.formats import dequantize as dequantized
from tokenyard.handle import Plan, Spec


class _Dequantize(Function):
    @staticmethod
    def forward(
        sent: Tensor, data: Tensor, scales: Tensor, call: Call, dtype: torch.dtype,
        anchor: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return dequantized(data, scales, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype
        remember(ctx, inputs[3])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, _ = recall(ctx)
        grad = call.combine(grads[0], raw=False)[0].to(ctx.dtype)
        return grad, None, None, None, None, last_mark(ctx, call, 5)


def _kernel(order: Tensor, anchor: Tensor | None, x: Tensor, *given: Any) -> Tensor:
    data, scales, *_, dtype = given
    return dequantized(data, scales, dtype)


def _shape(order: Tensor, anchor: Tensor | None, x: Tensor, *given: Any) -> Tensor:
    data, *_, dtype = given
    return data.new_empty(data.shape, dtype=dtype)


_dequantize_op = ops.define(
    "dequantize(Tensor order, Tensor? anchor, Tensor x, Tensor data, Tensor scales, Tensor[] plan, "
    "int owner, int[] spec, ScalarType dtype) -> Tensor",
    _kernel,
    _shape,
)


def _dequantize_operator(below: ops.Below, *given: Any) -> Tensor:
    order, anchor, *tensors, plan, owner, numbers, dtype = given
    call = Call(ops.Operators(owner, order), ops.spec_of(numbers), plan=Plan(*plan))
    return _Dequantize.apply(*tensors, call, dtype, anchor)  # pyright: ignore


ops.track(_dequantize_op, _dequantize_operator)


def dequantizer(
    calls: ops.Caller, sent: Tensor, plan: Plan, spec: Spec
) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Turns received data and scales into rows whose gradient goes to ``sent``."""
    call = Call(calls, spec, plan=plan)

    def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        shape = data.shape
        data, scales = data.reshape(-1, shape[-1]), scales.reshape(-1, scales.shape[-1])
        if not transforms.is_tracked(sent):
            return dequantized(data, scales, dtype).view(shape)
        if transforms.by_operator(sent):
            operators = call.as_operator(sent)
            marks, how = (operators.order, operators.anchor_of(sent)), operators.along(plan, spec)
            return _dequantize_op(*marks, sent, data, scales, *how, dtype).view(shape)
        return _Dequantize.apply(sent, data, scales, call, dtype, None).view(shape)  # pyright: ignore

    return dequantize
