"""How torchtitan 0.3.0, vLLM 0.33 (``deepep_v2``) and SGLang 0.5.23 call ``ElasticBuffer``: their
calls, replayed on layers of experts, against one process that holds all tokens and experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from elastic_calls_of import Known, world_of
from nvlink_pool import SOAK
from tokenyard.deep_ep.elastic import ElasticBuffer, EPHandle
from tokenyard.testing import Ranks, distributed_test

# torchtitan 0.3.0


class Dispatch(torch.autograd.Function):
    """Its forward and backward, which keep the handle."""

    @staticmethod
    def forward(ctx: Any, buffer: Any, x: Tensor, idx: Tensor, scores: Tensor, how: Any) -> Any:
        rows, recv_idx, recv_scores, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=scores.float(), **how
        )
        ctx.buffer, ctx.handle, ctx.ids = buffer, handle, recv_idx
        how["handle"] = handle
        return rows, recv_idx, recv_scores

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, _, scores = grads
        grad_x, grad_scores, event = ctx.buffer.combine(
            rows, handle=ctx.handle, topk_weights=scores.float(), async_with_compute_stream=True
        )
        event.current_stream_wait()
        return None, grad_x, None, grad_scores, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, x: Tensor, handle: EPHandle) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        out, _, event = buffer.combine(
            x, handle=handle, topk_weights=None, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        handle = ctx.handle
        rows = ctx.buffer.dispatch(
            grads[0], handle=handle, num_sms=handle.num_sms, do_cpu_sync=False
        )[0]
        return None, rows, None


@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_torchtitan(ranks: Ranks) -> None:
    """Two layers; zero scores are masked by -1; both handles live until the backward."""
    rank, world = ranks.rank, world_of(ranks, "empty first")
    size = ElasticBuffer.get_buffer_size_hint(
        ranks.group, 64, 128, num_topk=3, use_fp8_dispatch=False
    )
    buffer: Any = ElasticBuffer(
        ranks.group,
        num_bytes=size,
        num_max_tokens_per_rank=64,
        hidden=128,
        num_topk=3,
        use_fp8_dispatch=False,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        explicitly_destroy=True,
    )
    assert (buffer.group, buffer.num_bytes, buffer.num_max_tokens_per_rank) == (
        ranks.group,
        size,
        64,
    )
    sms = buffer.get_theoretical_num_sms(world.num_experts, 3)
    x = world.x[rank].float().requires_grad_()
    scores = world.weights[rank].clone().requires_grad_()
    idx = torch.where(scores.detach() == 0, -1, world.idx[rank])
    hidden: Any = x
    for _ in range(2):
        how: Any = {"num_experts": world.num_experts, "num_max_tokens_per_rank": 64, "num_sms": sms}
        how |= {"do_expand": False, "do_cpu_sync": True}
        made = cast("Any", Dispatch.apply(buffer, hidden, idx, scores, how))
        rows, recv_idx, recv_scores = made
        handle: EPHandle = how["handle"]
        ends = handle.psum_num_recv_tokens_per_expert
        counts = cast("list[int]", torch.diff(ends, prepend=ends.new_zeros(1)).tolist())
        assert counts == handle.num_recv_tokens_per_expert_list and handle.num_sms == sms
        scale = world.coefficients(
            torch.where(recv_idx < 0, -1, recv_idx + world.experts_of(rank).start), recv_scores
        )
        hidden = cast("Any", Combine.apply(buffer, rows * scale, handle))
    grad = world.x[rank].flip(1).float()
    hidden.backward(grad)
    mine, weights = x.detach().requires_grad_(), scores.detach().requires_grad_()
    want = mine * world.coefficients(idx, weights) * world.coefficients(idx, weights)
    want.backward(grad)
    assert torch.allclose(hidden, want)
    for got, known in ((x.grad, mine.grad), (scores.grad, weights.grad)):
        assert got is not None and known is not None
        assert torch.allclose(got, known, rtol=1e-4, atol=1e-3)
    buffer.destroy()


# vLLM 0.33, deepep_v2


def vllm_buffer(ranks: Ranks) -> Any:
    return ElasticBuffer(
        group=ranks.group,
        num_max_tokens_per_rank=64,
        hidden=128,
        num_topk=3,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=True,
        allow_multiple_reduction=True,
        explicitly_destroy=True,
    )


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_vllm(ranks: Ranks) -> None:
    """Decoding: static rows, those past the count masked. Prefill: rows by expert, weighted before
    they come back. Scales travel as opaque packs of four bytes.
    """
    rank, world = ranks.rank, world_of(ranks, "uneven")
    buffer = vllm_buffer(ranks)
    want = world.layered(rank)
    for expands in (False, True):
        rows, idx, weights, handle, _ = buffer.dispatch(
            x=world.x[rank],
            topk_idx=world.idx[rank],
            topk_weights=world.weights[rank],
            num_experts=world.num_experts,
            num_max_tokens_per_rank=64 if not expands else None,
            do_expand=expands,
            do_cpu_sync=expands,
            async_with_compute_stream=False,
        )
        if expands:
            assert handle.num_recv_tokens_per_expert_list == world.counts(rank)
            worked = world.blocks(rank, 1).work(rows) * weights[:, None].to(rows.dtype)
        else:
            count = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            behind = torch.arange(len(rows), device=rows.device) >= count
            worked = world.layer(rank, rows, idx.masked_fill(behind[:, None], -1), weights)
        out, _, event = buffer.combine(
            x=worked,
            handle=handle,
            topk_weights=None,
            async_with_compute_stream=True,
            allocate_on_comm_stream=False,
        )
        event.current_stream_wait()
        assert torch.equal(out, want)
    data = [x.view(torch.uint8)[:, :128].contiguous() for x in world.x]
    packs = [part[:, :4].contiguous().view(torch.int32) for part in data]
    rows, *_ = buffer.dispatch(
        x=(data[rank].view(torch.float8_e4m3fn), packs[rank]),
        topk_idx=world.idx[rank],
        topk_weights=world.weights[rank],
        num_experts=world.num_experts,
        do_expand=True,
        do_cpu_sync=True,
    )
    blocks = world.blocks(rank, 1)
    assert torch.equal(rows[0].view(torch.uint8), blocks.rows(data))
    assert torch.equal(rows[1], blocks.rows(packs))
    buffer.destroy()


# SGLang 0.5.23


def sglang_rows(world: Known, rank: int, got: Any, expands: bool) -> Tensor:
    """What its experts make of the rows."""
    rows, idx, weights, handle = got
    if expands:
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        blocks = world.blocks(rank, 128)
        assert ends == blocks.psum
        worked = rows.clone()
        worked[: blocks.num_rows] = blocks.work(rows[: blocks.num_rows])
        return worked * weights[:, None].to(rows.dtype)
    count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
    return world.layer(rank, rows[:count], idx[:count], weights[:count])


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_sglang(ranks: Ranks) -> None:
    """Prefill and decode; an idle rank, without its dummy token."""
    rank = ranks.rank
    buffer: Any = ElasticBuffer(
        ranks.group,
        num_max_tokens_per_rank=64,
        hidden=128,
        num_topk=3,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    assert buffer.num_bytes > 0
    for tokens in ("uneven", "empty first"):
        world = world_of(ranks, tokens)
        for expands in (False, True):
            sms = buffer.get_theoretical_num_sms(world.num_experts, 3)
            sizes = {"num_sms": sms, "num_qps": buffer.get_theoretical_num_qps(sms)}
            rows, idx, weights, handle, event = buffer.dispatch(
                world.x[rank],
                topk_idx=world.idx[rank],
                topk_weights=world.weights[rank],
                num_experts=world.num_experts,
                num_max_tokens_per_rank=64,
                expert_alignment=128,
                **sizes,
                use_tma_aligned_col_major_sf=False,
                do_cpu_sync=not expands,
                do_expand=expands,
            )
            assert event.event is None
            worked = sglang_rows(world, rank, (rows, idx, weights, handle), expands)
            out, _, event = buffer.combine(worked, handle=handle, topk_weights=weights, **sizes)
            assert torch.equal(out, world.layered(rank)) and event.event is None
