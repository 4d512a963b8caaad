"""Dequantised rows whose gradient goes straight through to the tensor that was dispatched: as an
operator for compilers, and eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import (
    custom_op,
    register_autograd,  # pyright: ignore[reportUnknownVariableType]
    register_fake,  # pyright: ignore[reportUnknownVariableType]
)

from tokenyard import transforms
from tokenyard.autograd import Call, recall, remember
from tokenyard.formats import dequantize as dequantized
from tokenyard.handle import Plan, Spec
from tokenyard.ops import Moves, spec_numbers
from tokenyard.registry import Caller


@custom_op(
    "tokenyard::dequantize",
    mutates_args=(),
    schema="(Tensor x, Tensor data, Tensor scales, Tensor[] plan, int owner, int[] spec, "
    "ScalarType dtype) -> Tensor",
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
    return dequantized(data, scales, dtype)


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
    moves = Moves(Plan(*ctx.saved_tensors), ctx.owner, ctx.spec)
    return (
        moves.combine(grad, raw=False)[0].to(ctx.dtype),
        None,
        None,
        [None] * len(Plan._fields),
        *(None,) * 3,
    )


register_autograd("tokenyard::dequantize", _dequantize_backward, setup_context=_dequantize_context)


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


def dequantize(
    calls: Caller,
    sent: Tensor,
    data: Tensor,
    scales: Tensor,
    plan: Plan,
    spec: Spec,
    dtype: torch.dtype,
) -> Tensor:
    """Received data times its scales; its gradient goes to ``sent``, straight through."""
    if not transforms.is_tracked(sent):
        return dequantized(data, scales, dtype)
    if transforms.by_operator(sent):
        return dequantize_op(
            sent, data, scales, list(plan), calls.number, spec_numbers(spec), dtype
        )
    return _Dequantize.apply(sent, data, scales, Call(calls, spec, plan=plan), dtype)  # pyright: ignore


def dequantizer(
    calls: Caller, sent: Tensor, plan: Plan, spec: Spec
) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Turns received data and scales into rows whose gradient goes to ``sent``."""

    def plain(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        rows, spread = data.reshape(-1, data.shape[-1]), scales.reshape(-1, scales.shape[-1])
        return dequantize(calls, sent, rows, spread, plan, spec, dtype).view(data.shape)

    return plain
