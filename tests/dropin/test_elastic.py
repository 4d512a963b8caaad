"""DeepEP's V2 buffers, both generations: what DeepEP documents, at any number of ranks, against
plain loops.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_ep_world import World, from_fp8, to_fp8
from elastic_calls_of import KINDS, MOST, Blocks, fresh, ids, made, up, world_of
from tokenyard.testing import Ranks, distributed_test

SIZES = (1, 2, 3, 4, 8)


def picked(world: World, rank: int) -> Tensor:
    """Weights of this rank's picks, 0 of those that are -1."""
    return torch.where(world.idx[rank] < 0, 0.0, world.weights[rank])


def biases(world: World, rank: int) -> list[tuple[Any, int]]:
    """None, one and two terms of bias, and how many."""
    bias = world.x[rank].flip(0)
    return [(None, 0), (bias, 1), ((bias, bias), 2)]


def check_counts(handle: Any, world: World, rank: int, alignment: int, exact: bool) -> None:
    """All that a handle says of counts and sources."""
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
    sources = [source * MOST + token for source, token in world.rows[rank]]
    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32 and metadata[:num_rows, 0].tolist() == sources
    local_idx = world.local_idx(rank)
    first = (local_idx >= 0).int().argmax(1) if num_rows else local_idx[:, 0]
    ranks = torch.tensor([source for source, _ in world.rows[rank]], dtype=torch.int64)
    assert torch.equal(metadata[:num_rows, 1].long(), ranks * 3 + first)
    assert handle.num_experts == world.num_experts and handle.expert_alignment == alignment
    assert handle.num_max_tokens_per_rank == MOST and handle.num_sms > 0
    assert torch.equal(handle.topk_idx, world.idx[rank])
    if exact:
        assert len(metadata) == handle.num_recv_tokens == num_rows
        assert handle.num_recv_tokens_per_expert_list == aligned
        assert handle.num_expanded_tokens == sum(aligned)
    else:
        assert len(metadata) == handle.num_recv_tokens == MOST * world.size
        assert handle.num_recv_tokens_per_expert_list == []
        local = len(world.experts_of(0))  # no rank holds more
        most = MOST * world.size * min(3, local) + local * (alignment - 1)
        assert handle.num_expanded_tokens == up(most, alignment)


def check_slots(handle: Any, world: World, rank: int) -> None:
    """Places of tokens among those that go to the same rank."""
    places = handle.dst_buffer_slot_idx
    assert places.dtype == torch.int32 and places.shape == world.idx[rank].shape
    sent = [0] * world.size
    for token, picks in enumerate(ids(world.idx[rank])):
        want, seen = list[int](), set[int]()
        for pick in picks:
            owner = next((p for p in range(world.size) if pick in world.experts_of(p)), None)
            want.append(-1 if owner is None or owner in seen else sent[owner])
            seen |= set() if owner is None else {owner}
        for owner in seen:
            sent[owner] += 1
        assert places[token].tolist() == want


def by_rank(buffer: Any, world: World, exact: bool) -> None:
    """Fresh and cached dispatch and combine, rows per rank."""
    rank: int = buffer.rank_idx
    stats = torch.ones(len(world.experts_of(rank)), dtype=torch.int32)
    shape = {"expert_alignment": 4, "do_cpu_sync": exact}
    many = {**shape, "cumulative_local_expert_recv_stats": stats}
    got: Any = fresh(buffer, world, **many)
    recv_x, idx, weights, handle, event = got
    num_rows, want = len(world.rows[rank]), world.take(rank, world.x)
    assert event.event is None and len(recv_x) == (num_rows if exact else MOST * world.size)
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
    new = [weights + 1 for weights in world.weights]
    cached = buffer.dispatch(world.x[rank], handle=handle, topk_weights=new[rank])
    local_new = torch.where(world.local_idx(rank) < 0, 0.0, world.take(rank, new))
    assert torch.equal(cached[2][:num_rows], local_new)
    worked = recv_x.clone()
    worked[:num_rows] = world.work(rank, want)
    for terms, number in biases(world, rank):
        total = world.combined(rank) + number * world.x[rank].flip(0).float()
        out, reduced, event = buffer.combine(worked, handle, topk_weights=weights, bias=terms)
        assert torch.equal(out, total.to(torch.bfloat16)) and event.event is None
        assert torch.equal(reduced, picked(world, rank))
    assert buffer.combine(worked, handle=handle)[1] is None


def by_expert(buffer: Any, world: World, alignment: int, exact: bool) -> None:
    """The same, a row per token and local expert."""
    rank: int = buffer.rank_idx
    blocks = Blocks(world, rank, alignment)
    shape = {"do_expand": True, "expert_alignment": alignment, "do_cpu_sync": exact}
    got: Any = fresh(buffer, world, **shape)
    recv_x, idx, weights, handle, _ = got
    num_rows = blocks.num_rows
    most = handle.num_expanded_tokens
    assert idx is None and len(recv_x) == len(weights) == (num_rows if exact else most)
    assert torch.equal(recv_x[:num_rows], blocks.rows(world.x))
    assert torch.equal(weights[:num_rows], blocks.weights(world.weights)) and weights.dim() == 1
    check_counts(handle, world, rank, alignment, exact)
    check_slots(handle, world, rank)
    slots: list[list[int]] = blocks.slots()
    assert handle.recv_src_metadata[: len(slots), 2:].tolist() == slots
    again = fresh(buffer, world, **shape)
    assert torch.equal(again[0][:num_rows], recv_x[:num_rows])
    assert torch.equal(again[2], weights)
    new = [weights + 1 for weights in world.weights]
    known = {"handle": handle, "do_expand": True, "do_zero_padding": True}
    cached = buffer.dispatch(world.x[rank], topk_weights=new[rank], **known)
    assert torch.equal(cached[0][:num_rows], blocks.rows(world.x)) and cached[1] is None
    assert torch.equal(cached[2][:num_rows], blocks.weights(new)) and cached[3] is handle
    assert buffer.dispatch(world.x[rank], **known)[2] is None
    worked = recv_x.clone()
    worked[:num_rows] = blocks.work(recv_x[:num_rows])
    factors = torch.where(world.idx[rank] < 0, 0, world.idx[rank] % 3 + 1).sum(1, keepdim=True)
    for terms, number in biases(world, rank):
        total = world.x[rank].float() * factors + number * world.x[rank].flip(0).float()
        out, reduced, _ = buffer.combine(worked, handle, topk_weights=weights, bias=terms)
        assert torch.equal(out, total.to(torch.bfloat16))
        assert torch.equal(reduced, picked(world, rank))
    assert buffer.combine(worked, handle)[1] is None


@pytest.mark.portable
@distributed_test(world_size=SIZES)
def test_rows_per_rank(ranks: Ranks) -> None:
    """Uneven and empty ranks; experts that do not divide by ranks; exact and static shapes."""
    for kind in KINDS:
        buffer = made(ranks, kind)
        for tokens in ("uneven", "empty first", "only last"):
            for exact in (True, False):
                by_rank(buffer, world_of(ranks, tokens), exact)
        by_rank(buffer, world_of(ranks, "few", num_experts=13), True)
        buffer.destroy()


@pytest.mark.portable
@distributed_test(world_size=SIZES)
def test_rows_per_expert(ranks: Ranks) -> None:
    for kind in KINDS:
        buffer = made(ranks, kind)
        for tokens in ("uneven", "empty first", "only last"):
            for alignment, exact in product((1, 128), (True, False)):
                by_expert(buffer, world_of(ranks, tokens), alignment, exact)
        by_expert(buffer, world_of(ranks, "few", num_experts=13), 8, True)
        buffer.destroy()


@distributed_test(world_size=(2, 3))
def test_handles_last(ranks: Ranks) -> None:
    """Cached and after many other dispatches, out of order, on another buffer of the group, and
    while ids that were dispatched change.
    """
    rank, buffer = ranks.rank, made(ranks, KINDS[0])
    worlds = [world_of(ranks, "uneven", seed=seed) for seed in range(4)]
    ids = [world.idx[rank].clone() for world in worlds]
    handles = [
        fresh(buffer, world, topk_idx=mine, do_expand=bool(number % 2))[3]
        for number, (world, mine) in enumerate(zip(worlds, ids, strict=True))
    ]
    for mine in ids:
        mine.fill_(-1)
    other = made(ranks, KINDS[0])
    for number in (3, 0, 2, 1, 3):
        world, handle, expands = worlds[number], handles[number], bool(number % 2)
        rows = buffer.dispatch(world.x[rank], handle=handle, do_expand=expands)[0]
        blocks = Blocks(world, rank, 1)
        assert torch.equal(rows, blocks.rows(world.x) if expands else world.take(rank, world.x))
        worked = blocks.work(rows) if expands else world.work(rank, rows)
        total = world.combined(rank)
        if expands:
            factors = torch.where(world.idx[rank] < 0, 0, world.idx[rank] % 3 + 1)
            total = world.x[rank].float() * factors.sum(1, keepdim=True)
        assert torch.equal(other.combine(worked, handle)[0].float(), total)
        assert torch.equal(handle.topk_idx, world.idx[rank])
    buffer.destroy()
    other.destroy()


def laid_out(scales: Tensor) -> list[Tensor]:
    """The same scales row by row, column by column, and with gaps."""
    return [scales, scales.t().contiguous().t(), scales.repeat_interleave(2, 1)[:, ::2]]


@distributed_test(world_size=(2, 3))
def test_quantised_rows(ranks: Ranks) -> None:
    """Data and scales (float32, or four exponents to an int32) come bit for bit, in either layout
    of scales, whatever layout they were given in.
    """
    rank = ranks.rank
    for kind in KINDS:
        buffer = made(ranks, kind, hidden=512, use_fp8_dispatch=True)
        world = world_of(ranks, "empty first", hidden=512, whole=False)
        blocks = Blocks(world, rank, 8)
        pairs = [to_fp8(x) for x in world.x]
        data = [pair[0].view(torch.uint8) for pair in pairs]
        for dtype in (torch.float32, torch.int32):
            scales = [pair[1].view(dtype) for pair in pairs]
            for mine in laid_out(scales[rank]):
                for expands, by_column in product((False, True), (False, True)):
                    how = {"do_expand": expands, "use_tma_aligned_col_major_sf": by_column}
                    x = pairs[rank][0], mine
                    recv, *_, handle, _ = fresh(buffer, world, x=x, expert_alignment=8, **how)
                    again = buffer.dispatch(x, handle=handle, **how)[0]
                    for got in (recv, again):
                        if expands:
                            want = blocks.rows(data), blocks.rows(scales)
                        else:
                            want = world.take(rank, data), world.take(rank, scales)
                        assert got[0].dtype == torch.float8_e4m3fn and got[1].dtype == dtype
                        assert torch.equal(got[0].view(torch.uint8), want[0])
                        assert torch.equal(got[1], want[1])
                        apart = up(len(want[1]), 4) if by_column else got[1].shape[1]
                        strides = (1, apart) if by_column else (apart, 1)
                        assert got[1].stride() == strides or not len(want[1])
        recv, *_, handle, _ = fresh(buffer, world, x=(pairs[rank][0], pairs[rank][1]))
        total = buffer.combine(from_fp8(*recv), handle)[0]
        copies = world.in_ranks(rank).sum(1, keepdim=True)
        want = from_fp8(*pairs[rank]).float() * copies
        assert torch.allclose(total.float(), want, rtol=2**-7)
        buffer.destroy()


@distributed_test(world_size=(2, 4))
def test_gradients_by_hand(ranks: Ranks) -> None:
    """The backward of dispatch is a combine of rows and weights, that of combine a cached dispatch:
    against torch's own gradients of the whole layer in one process.
    """
    rank, world = ranks.rank, world_of(ranks, "uneven")
    xs = [x.float().requires_grad_() for x in world.x]
    weights = [picked(world, source).requires_grad_() for source in range(world.size)]
    factors = [torch.where(idx < 0, 0, idx % 3 + 1) for idx in world.idx]
    grads = [x.detach().flip(1) for x in xs]
    for x, weight, factor, grad in zip(xs, weights, factors, grads, strict=True):
        (x * (weight * factor).sum(1, keepdim=True)).backward(grad)
    for kind, exact in product(KINDS, (True, False)):
        buffer = made(ranks, kind)
        sent, mine = world.x[rank].float(), picked(world, rank)
        how = {"topk_weights": mine, "do_cpu_sync": exact, "x": sent}
        rows, idx, scores, handle, _ = fresh(buffer, world, **how)
        first = world.experts_of(rank).start
        factor = torch.where(idx < 0, 0, (idx + first) % 3 + 1)
        worked = rows * (scores * factor).sum(1, keepdim=True)
        out = buffer.combine(worked, handle)[0]
        assert torch.allclose(out, sent * (mine * factors[rank]).sum(1, keepdim=True))
        known = {"handle": handle, "num_sms": handle.num_sms, "do_cpu_sync": False}
        grad_rows = buffer.dispatch(grads[rank], **known)[0]
        grad_scores = factor * (grad_rows * rows).sum(1, keepdim=True)
        grad_scores = torch.where(idx < 0, 0.0, grad_scores)
        there = grad_rows * (scores * factor).sum(1, keepdim=True)
        grad_x, grad_weights, event = buffer.combine(
            there, handle=handle, topk_weights=grad_scores.float(), async_with_compute_stream=True
        )
        event.current_stream_wait()
        alive, want_x, want_weights = world.idx[rank] >= 0, xs[rank].grad, weights[rank].grad
        assert want_x is not None and torch.allclose(grad_x, want_x)
        assert want_weights is not None
        assert torch.allclose(grad_weights[alive], want_weights[alive])
        buffer.destroy()
