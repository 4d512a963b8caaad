"""How Megatron-core, NeMo Automodel and torchtitan (before it moved on) train with DeepEP, argument
by argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tokenyard.deep_ep as deep_ep
from deep_ep_world import World
from tokenyard.deep_ep.utils import EventHandle, EventOverlap
from tokenyard.testing import Ranks


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        idx: Tensor,
        probs: Tensor,
        num_experts: int,
        buffer: Any,
        event: Callable[[], Any],
    ) -> Any:
        later = event() is not None
        per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
            idx,
            num_experts,
            previous_event=event(),
            async_finish=later,
            allocate_on_comm_stream=later,
        )
        recv, recv_idx, recv_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=previous,
            async_finish=later,
            allocate_on_comm_stream=later,
        )
        if later:
            after.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.event = buffer, handle, event
        return recv, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _idx: Any, grad_probs: Tensor, _counts: Any, _handle: Any
    ) -> Any:
        later = ctx.event() is not None
        grad_x, grad_weights, after = ctx.buffer.combine(
            grad.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            previous_event=ctx.event(),
            async_finish=later,
            allocate_on_comm_stream=later,
        )
        if later:
            after.current_stream_wait()
        return grad_x, None, grad_weights, None, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any, buffer: Any, event: Callable[[], Any]) -> Tensor:
        later = event() is not None
        out, _, after = buffer.combine(
            x,
            handle=handle,
            async_finish=later,
            previous_event=event(),
            allocate_on_comm_stream=later,
        )
        if later:
            after.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.event = buffer, handle, event
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        later = ctx.event() is not None
        grad_x, _, _, _, _, after = ctx.buffer.dispatch(
            grad.contiguous(),
            handle=ctx.handle,
            previous_event=ctx.event(),
            async_finish=later,
            allocate_on_comm_stream=later,
        )
        if later:
            after.current_stream_wait()
        return grad_x, None, None, None


def training_buffer(ranks: Ranks, world: World, **options: Any) -> Any:
    nvl = rdma = 0
    for config in (
        deep_ep.Buffer.get_dispatch_config(ranks.group.size()),
        deep_ep.Buffer.get_combine_config(ranks.group.size()),
    ):
        nvl = max(config.get_nvl_buffer_size_hint(world.hidden * 2, ranks.group.size()), nvl)
        if deep_ep.Buffer.is_sm90_compiled():
            rdma = max(config.get_rdma_buffer_size_hint(world.hidden * 2, ranks.group.size()), rdma)
    buffer = deep_ep.Buffer(ranks.group, nvl, rdma, **options)
    assert (
        buffer.group == ranks.group
        and buffer.num_nvl_bytes >= nvl
        and buffer.num_rdma_bytes >= rdma
    )
    return buffer


def training(
    ranks: Ranks, world: World, later: bool, explicitly_destroy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Two layers forward, then backward: output, and gradients of the sum of ``output * x`` in
    input and weights.
    """
    rank = ranks.rank
    buffer = training_buffer(
        ranks, world, **({"explicitly_destroy": True} if explicitly_destroy else {})
    )
    deep_ep.Buffer.set_num_sms(20)

    def event() -> EventOverlap | None:
        return EventOverlap(EventHandle()) if later else None

    first = world.experts_of(rank).start

    def layer(x: Tensor, probs: Tensor) -> Tensor:
        recv, idx, recv_probs, counts, handle = FusedDispatch.apply(
            x, world.idx[rank], probs, world.num_experts, buffer, event
        )
        assert int(counts.sum()) == int((idx >= 0).sum()) and recv_probs.dtype == torch.float32
        scale = torch.where(idx < 0, 0.0, recv_probs * ((idx + first) % 3 + 1)).sum(1, keepdim=True)
        return FusedCombine.apply((recv.float() * scale).to(recv.dtype), handle, buffer, event)

    x = world.x[rank].clone().requires_grad_()
    probs = world.weights[rank].clone().requires_grad_()
    out, second = layer(x, probs), layer(x, probs)
    ((out.float() + second.float()) / 2 * world.x[rank].float()).sum().backward()
    assert torch.equal(out, second)
    if explicitly_destroy:
        buffer.destroy()
    return out.detach(), x.grad, probs.grad
