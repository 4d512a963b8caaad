"""How frameworks call DeepEP, argument by argument, as layers of experts (written from descriptions
of their code).

Each takes a rank and a :class:`World` and returns what the layer gives for this rank's tokens.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch
from torch import Tensor

import tokenyard.deep_ep as deep_ep
from bad_input import gloo
from deep_ep_world import World, from_fp8, to_fp8
from tokenyard.testing import Ranks

MOST = 32


def wait_if_any(event: Any) -> None:
    if event.event is not None:
        event.current_stream_wait()


def by_expert(world: World, rank: int, rows: Tensor, counts: Tensor) -> Tensor:
    """The experts on padded blocks, unweighted; rows past the counts become nan, which nobody may
    read.
    """
    out = torch.full_like(rows, float("nan"))
    for local, expert in enumerate(world.experts_of(rank)):
        out[local, : counts[local]] = rows[local, : counts[local]] * (expert % 3 + 1)
    return out


# vLLM


class VllmCache:
    """Buffers by their arguments, held weakly: the layer holds the only strong reference."""

    def __init__(self) -> None:
        self.held: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    def get(self, **arguments: Any) -> Any:
        key = tuple(sorted(arguments.items(), key=lambda item: item[0]))
        buffer = self.held.get(key)
        if buffer is None:
            self.held[key] = buffer = deep_ep.Buffer(**arguments)
        return buffer


def vllm_high_throughput(ranks: Ranks, world: World, later: bool, fp8: bool) -> Tensor:
    rank, size, cache = ranks.rank, ranks.world_size, VllmCache()
    arguments = {
        "group": gloo(ranks),
        "num_nvl_bytes": 1024 << 20,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 1,
        "explicitly_destroy": True,
    }
    buffer = cache.get(**arguments)
    assert cache.get(**arguments) is buffer
    buffer.set_num_sms(20)
    known = size in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
    config = deep_ep.Buffer.get_dispatch_config(size) if known else None
    previous = buffer.capture() if later else None
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=world.idx[rank],
        num_experts=world.num_experts,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    recv, idx, weights, counts, handle, event = buffer.dispatch(
        x=to_fp8(world.x[rank]) if fp8 else world.x[rank],
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=world.idx[rank],
        topk_weights=world.weights[rank],
        expert_alignment=1,
        config=config,
        previous_event=previous,
        async_finish=later,
        allocate_on_comm_stream=False,
    )
    wait_if_any(event)
    rows = from_fp8(*recv) if fp8 else recv
    first = world.experts_of(rank).start
    elsewhere = world.num_experts - 1 if first == 0 else 0
    ids = torch.where(idx == -1, elsewhere, idx + first)
    assert torch.tensor(counts, dtype=torch.int32).tolist() == world.counts(rank)
    mine = (ids >= first) & (ids < world.experts_of(rank).stop) & (idx != -1)
    work = world.layer(rank, rows, torch.where(mine, ids - first, -1), weights)
    config = deep_ep.Buffer.get_combine_config(size) if known else None
    out, _, event = buffer.combine(
        x=work,
        handle=handle,
        topk_weights=None,
        config=config,
        previous_event=buffer.capture() if later else None,
        async_finish=later,
        allocate_on_comm_stream=False,
    )
    wait_if_any(event)
    buffer.destroy()
    return out


def vllm_low_latency(ranks: Ranks, world: World, hook: bool, fp8: bool) -> Tensor:
    rank, size, num_experts = ranks.rank, ranks.world_size, world.num_experts
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MOST,
        hidden=world.hidden,
        num_ranks=size,
        num_experts=num_experts,
    )
    buffer = VllmCache().get(
        group=gloo(ranks),
        num_nvl_bytes=1024 << 20,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_experts // size,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=True,
    )
    recv, counts, handle, _, receive = buffer.low_latency_dispatch(
        world.x[rank],
        world.idx[rank],
        MOST,
        num_experts,
        use_fp8=fp8,
        round_scale=fp8,
        use_ue8m0=fp8,
        async_finish=False,
        return_recv_hook=True,
    )
    receive()
    work = by_expert(world, rank, from_fp8(*recv) if fp8 else recv, counts)
    output = torch.full_like(world.x[rank], float("nan"))
    _, _, receive = buffer.low_latency_combine(
        work,
        world.idx[rank],
        world.weights[rank],
        handle,
        async_finish=False,
        zero_copy=False,
        return_recv_hook=hook,
        out=output,
    )
    if hook:
        receive()
    status = torch.ones(size, dtype=torch.int32, device=ranks.device)
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    buffer.low_latency_clean_mask_buffer()
    buffer.destroy()
    return output


# SGLang


def sglang_buffer(ranks: Ranks, world: World) -> Any:
    """One buffer for both modes, sized by the hints of configs that came as JSON."""
    text = (
        '{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 16, '
        '"num_max_nvl_chunked_recv_tokens": 512}'
    )
    nvl = rdma = 0
    for config in (
        deep_ep.Config(**json.loads(text)),
        deep_ep.Buffer.get_combine_config(ranks.world_size),
    ):
        nvl = max(config.get_nvl_buffer_size_hint(world.hidden * 2, ranks.world_size), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(world.hidden * 2, ranks.world_size), rdma)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        MOST, world.hidden, ranks.world_size, world.num_experts
    )
    buffer = deep_ep.Buffer(
        ranks.group,
        nvl,
        max(rdma, hint),
        low_latency_mode=True,
        num_qps_per_rank=max(24, world.num_experts // ranks.world_size),
        allow_mnnvl=True,
    )
    assert (
        buffer.low_latency_mode
        and buffer.group_size == ranks.world_size
        and deep_ep.Buffer.num_sms % 2 == 0
    )
    return buffer


def sglang_normal(ranks: Ranks, world: World, later: bool, fp8: bool) -> Tensor:
    rank, buffer = ranks.rank, sglang_buffer(ranks, world)
    x = to_fp8(world.x[rank]) if fp8 else world.x[rank]
    previous = deep_ep.Buffer.capture() if later else None
    per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
        world.idx[rank].to(torch.int64),
        world.num_experts,
        previous_event=previous,
        async_finish=later,
        allocate_on_comm_stream=previous is not None,
    )
    recv, idx, weights, counts, handle, event = buffer.dispatch(
        x,
        topk_idx=world.idx[rank],
        topk_weights=world.weights[rank],
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=previous,
        async_finish=later,
        allocate_on_comm_stream=(previous is not None) and later,
        expert_alignment=128,
        config=None,
    )
    if later:
        event.current_stream_wait()
    assert counts == [-(-count // 128) * 128 for count in world.counts(rank)]
    work = world.layer(rank, from_fp8(*recv) if fp8 else recv, idx, weights)
    previous = deep_ep.Buffer.capture() if later else None
    out, _, event = buffer.combine(
        work,
        handle,
        async_finish=later,
        previous_event=previous,
        allocate_on_comm_stream=previous is not None,
        config=None,
    )
    if later:
        event.current_stream_wait()
    return out


def sglang_low_latency(ranks: Ranks, world: World, hook: bool, fp8: bool) -> Tensor:
    """The buffer has served normal mode before, so it is cleaned."""
    rank, buffer = ranks.rank, sglang_buffer(ranks, world)
    buffer.clean_low_latency_buffer(MOST, world.hidden, world.num_experts)
    recv, counts, handle, event, receive = buffer.low_latency_dispatch(
        world.x[rank],
        world.idx[rank].to(torch.int64),
        MOST,
        world.num_experts,
        use_fp8=fp8,
        **({"round_scale": True, "use_ue8m0": True} if fp8 else {}),
        async_finish=not hook,
        return_recv_hook=hook,
    )
    receive() if hook else event.current_stream_wait()
    blocks = len(counts) * -(-ranks.world_size * MOST // 64)
    overlap = {
        "overlap": True,
        "packed_recv_count": counts,
        "comp_signal": torch.full((blocks,), 7, dtype=torch.int32, device=ranks.device),
        "block_m": 64,
        "threshold": 7,
        "num_sms": 3,
    }
    out, event, receive = buffer.low_latency_combine(
        x=by_expert(world, rank, from_fp8(*recv) if fp8 else recv, counts),
        topk_idx=world.idx[rank],
        topk_weights=world.weights[rank],
        handle=handle,
        async_finish=not hook,
        return_recv_hook=hook,
        **overlap,
    )
    receive() if hook else event.current_stream_wait()
    return out


# LMDeploy


def lmdeploy(ranks: Ranks, world: World, later: bool, fp8: bool) -> Tensor:
    """One buffer for both modes; the position of ``use_fp8`` is that of old versions. Both modes
    must agree.
    """
    rank, size = ranks.rank, ranks.world_size
    nvl = rdma = 0
    for config in (
        deep_ep.Buffer.get_dispatch_config(size),
        deep_ep.Buffer.get_combine_config(size),
    ):
        nvl = max(config.get_nvl_buffer_size_hint(world.hidden * 2, size), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(world.hidden * 2, size), rdma)
    rdma = max(
        deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, world.hidden, size, world.num_experts),
        rdma,
    )
    buffer = deep_ep.Buffer(
        ranks.group,
        num_nvl_bytes=nvl,
        num_rdma_bytes=rdma,
        low_latency_mode=True,
        num_qps_per_rank=world.num_experts // size,
    )
    previous = buffer.capture() if later else None
    options: dict[str, Any] = {
        "previous_event": previous,
        "async_finish": later,
        "allocate_on_comm_stream": previous is not None and later,
    }
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        world.idx[rank], world.num_experts, **options
    )
    rows, idx, weights, _, handle, event = buffer.dispatch(
        world.x[rank],
        topk_idx=world.idx[rank],
        topk_weights=world.weights[rank],
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **options,
    )
    wait_if_any(event)
    back = world.layer(rank, rows, idx, weights)
    options["previous_event"] = buffer.capture() if later else None
    normal, _, event = buffer.combine(back, handle, **options)
    wait_if_any(event)
    recv, counts, handle, event, receive = buffer.low_latency_dispatch(
        world.x[rank],
        world.idx[rank],
        MOST,
        world.num_experts,
        False,
        async_finish=later,
        return_recv_hook=not later,
    )
    event.current_stream_wait() if later else receive()
    out, event, receive = buffer.low_latency_combine(
        by_expert(world, rank, recv, counts),
        world.idx[rank],
        world.weights[rank],
        handle,
        async_finish=later,
        return_recv_hook=not later,
    )
    event.current_stream_wait() if later else receive()
    assert torch.equal(out, normal)
    return out
