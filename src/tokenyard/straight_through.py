"""Dequantised rows whose gradient goes straight through to the tensor that was dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tokenyard import ops, transforms
from tokenyard.autograd import Call, recall, remember
from tokenyard.formats import dequantize as dequantized
from tokenyard.handle import Plan, Spec


class _Dequantize(Function):
    @staticmethod
    def forward(
        sent: Tensor, data: Tensor, scales: Tensor, call: Call, dtype: torch.dtype
    ) -> Tensor:
        return dequantized(data, scales, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype
        remember(ctx, inputs[3])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, _ = recall(ctx)
        return call.combine(grads[0], raw=False)[0].to(ctx.dtype), None, None, None, None


def _kernel(order: Tensor, x: Tensor, data: Tensor, scales: Tensor, *how: Any) -> Tensor:
    return dequantized(data, scales, how[-1])


def _shape(order: Tensor, x: Tensor, data: Tensor, scales: Tensor, *how: Any) -> Tensor:
    return data.new_empty(data.shape, dtype=how[-1])


_dequantize_op = ops.define(
    "dequantize(Tensor order, Tensor x, Tensor data, Tensor scales, Tensor[] plan, int owner, "
    "int[] spec, ScalarType dtype) -> Tensor",
    _kernel,
    _shape,
)


def _dequantize_operator(below: ops.Below, *given: Any) -> Tensor:
    order, *tensors, plan, owner, numbers, dtype = given
    call = Call(ops.Operators(owner, order), ops.spec_of(numbers), plan=Plan(*plan))
    return _Dequantize.apply(*tensors, call, dtype)  # pyright: ignore


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
            how = call.as_operator().along(plan, spec)
            return _dequantize_op(calls.order, sent, data, scales, *how, dtype).view(shape)
        return _Dequantize.apply(sent, data, scales, call, dtype).view(shape)  # pyright: ignore

    return dequantize
