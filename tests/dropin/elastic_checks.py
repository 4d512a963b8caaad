"""One dispatch of DeepEP's V2 buffers, cached dispatches and combines along it, all checked against
plain loops: for every engine.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from elastic_calls_of import Known, fresh, up


def picked(world: Known, rank: int) -> Tensor:
    """Weights of this rank's picks, 0 of those that are -1."""
    return torch.where(world.idx[rank] < 0, 0.0, world.weights[rank])


def biases(world: Known, rank: int) -> list[tuple[Any, int]]:
    """None, one and two terms of bias, and how many."""
    bias = world.x[rank].flip(0)
    return [(None, 0), (bias, 1), ((bias, bias), 2)]


def check_counts(handle: Any, world: Known, rank: int, alignment: int, exact: bool) -> None:
    """All that a handle says of counts and sources."""
    most: int = handle.num_max_tokens_per_rank
    counts, local = world.counts(rank), len(world.experts_of(rank))
    aligned = [up(count, alignment) for count in counts]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == world.prefix(rank)
    assert handle.psum_num_recv_tokens_per_scaleup_rank.dtype == torch.int32
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    psum = handle.psum_num_recv_tokens_per_expert
    ends = [sum(aligned[: expert + 1]) for expert in range(local)]
    if handle.do_expand:
        ends = [sum(aligned[:expert]) + counts[expert] for expert in range(local)]
    assert psum.dtype == torch.int32 and psum.tolist() == ends
    num_rows = len(world.rows[rank])
    sources = [source * most + token for source, token in world.rows[rank]]
    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32 and metadata[:num_rows, 0].tolist() == sources
    local_idx = world.local_idx(rank)
    first = (local_idx >= 0).int().argmax(1) if num_rows else local_idx[:, 0]
    come = [source for source, _ in world.rows[rank]]
    ranks = torch.tensor(come, dtype=torch.int64, device=first.device)
    assert torch.equal(metadata[:num_rows, 1].long(), ranks * world.num_topk + first)
    assert handle.num_experts == world.num_experts and handle.expert_alignment == alignment
    assert handle.num_sms > 0
    assert torch.equal(handle.topk_idx, world.idx[rank])
    if exact:
        assert len(metadata) == handle.num_recv_tokens == num_rows
        assert handle.num_recv_tokens_per_expert_list == aligned
        assert handle.num_expanded_tokens == sum(aligned)
    else:
        assert len(metadata) == handle.num_recv_tokens == most * world.size
        assert handle.num_recv_tokens_per_expert_list == []
        local = len(world.experts_of(0))  # no rank holds more
        rows = most * world.size * min(world.num_topk, local) + local * (alignment - 1)
        assert handle.num_expanded_tokens == up(rows, alignment)


def check_slots(handle: Any, world: Known, rank: int) -> None:
    """Places of tokens among those that go to the same rank."""
    places = handle.dst_buffer_slot_idx
    assert places.dtype == torch.int32 and places.shape == world.idx[rank].shape
    assert places.tolist() == world.once(("places", rank), lambda: world.places(rank))


def by_rank(buffer: Any, world: Known, exact: bool) -> None:
    """Fresh and cached dispatch and combine, rows per rank."""
    rank: int = buffer.rank_idx
    most: int = buffer.num_max_tokens_per_rank
    local = len(world.experts_of(rank))
    stats = torch.ones(local, dtype=torch.int32, device=world.device)
    shape = {"expert_alignment": 4, "do_cpu_sync": exact}
    many = {**shape, "cumulative_local_expert_recv_stats": stats}
    got: Any = fresh(buffer, world, **many)
    recv_x, idx, weights, handle, event = got
    num_rows, want = len(world.rows[rank]), world.take(rank, world.x)
    assert event.event is None and len(recv_x) == (num_rows if exact else most * world.size)
    assert torch.equal(recv_x[:num_rows], want) and idx.dtype == torch.int64
    assert torch.equal(idx[:num_rows], world.local_idx(rank))
    assert torch.equal(weights[:num_rows], world.local_weights(rank))
    assert stats.tolist() == [count + 1 for count in world.counts(rank)]
    check_counts(handle, world, rank, 4, exact)
    check_slots(handle, world, rank)
    again = fresh(buffer, world, **shape)
    assert torch.equal(again[0][:num_rows], recv_x[:num_rows])
    assert torch.equal(again[3].recv_src_metadata, handle.recv_src_metadata)
    cached = buffer.dispatch(world.x[rank], handle=handle)
    assert torch.equal(cached[0][:num_rows], want) and torch.equal(cached[1], idx)
    assert cached[2] is None and cached[3] is handle and cached[4].event is None
    cached = buffer.dispatch(world.x[rank], handle=handle, topk_weights=world.more[rank])
    local_new = torch.where(world.local_idx(rank) < 0, 0.0, world.take(rank, world.more))
    assert torch.equal(cached[2][:num_rows], local_new)
    worked = recv_x.clone()
    worked[:num_rows] = world.work(rank, want)
    for terms, number in biases(world, rank):
        total = world.combined(rank) + number * world.x[rank].flip(0).float()
        out, reduced, event = buffer.combine(worked, handle, topk_weights=weights, bias=terms)
        assert torch.equal(out, total.to(torch.bfloat16)) and event.event is None
        assert torch.equal(reduced, picked(world, rank))
    assert buffer.combine(worked, handle=handle)[1] is None


def by_expert(buffer: Any, world: Known, alignment: int, exact: bool) -> None:
    """The same, a row per token and local expert."""
    rank: int = buffer.rank_idx
    blocks = world.blocks(rank, alignment)
    shape = {"do_expand": True, "expert_alignment": alignment, "do_cpu_sync": exact}
    got: Any = fresh(buffer, world, **shape)
    recv_x, idx, weights, handle, _ = got
    num_rows = blocks.num_rows
    most: int = handle.num_expanded_tokens
    assert idx is None and len(recv_x) == len(weights) == (num_rows if exact else most)
    assert torch.equal(recv_x[:num_rows], blocks.x)
    assert torch.equal(weights[:num_rows], blocks.weights) and weights.dim() == 1
    check_counts(handle, world, rank, alignment, exact)
    check_slots(handle, world, rank)
    assert handle.recv_src_metadata[: len(blocks.slots), 2:].tolist() == blocks.slots
    again = fresh(buffer, world, **shape)
    assert torch.equal(again[0][:num_rows], recv_x[:num_rows])
    assert torch.equal(again[2], weights)
    known = {"handle": handle, "do_expand": True, "do_zero_padding": True}
    cached = buffer.dispatch(world.x[rank], topk_weights=world.more[rank], **known)
    assert torch.equal(cached[0][:num_rows], blocks.x) and cached[1] is None
    assert torch.equal(cached[2][:num_rows], blocks.more) and cached[3] is handle
    assert buffer.dispatch(world.x[rank], **known)[2] is None
    worked = recv_x.clone()
    worked[:num_rows] = blocks.work(recv_x[:num_rows])
    factors = torch.where(world.idx[rank] < 0, 0, world.idx[rank] % 3 + 1).sum(1, keepdim=True)
    unread = again[3]  # of the other, rows are found by the metadata that were read above
    for (terms, number), each in product(biases(world, rank), (handle, unread)):
        total = world.x[rank].float() * factors + number * world.x[rank].flip(0).float()
        out, reduced, _ = buffer.combine(worked, each, topk_weights=weights, bias=terms)
        assert torch.equal(out, total.to(torch.bfloat16))
        assert torch.equal(reduced, picked(world, rank))
    assert buffer.combine(worked, handle)[1] is None
