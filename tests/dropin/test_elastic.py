"""DeepEP's V2 buffers, both generations: what DeepEP documents, at any number of ranks, against
plain loops.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from deep_ep_world import from_fp8, to_fp8
from elastic_calls_of import KINDS, fresh, made, up, world_of
from elastic_checks import by_expert, by_rank, picked
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, distributed_test

SIZES = (1, 3) if SOAK == 1 else (1, 2, 3, 4, 8)
UNEVEN = ("uneven", "empty first", "only last")


def kinds(ranks: Ranks, number: int) -> tuple[Any, ...]:
    """Generations to run a case on: both, or, where ranks are many, one in turn."""
    return KINDS if ranks.world_size <= 2 else (KINDS[(number + number // 2 + number // 4) % 2],)


@pytest.mark.portable
@distributed_test(world_size=SIZES)
def test_rows_per_rank(ranks: Ranks) -> None:
    """Uneven and empty ranks; experts that do not divide by ranks; exact and static shapes."""
    buffers = {kind: made(ranks, kind) for kind in KINDS}
    for number, (tokens, exact) in enumerate(product(UNEVEN, (True, False))):
        for kind in kinds(ranks, number):
            by_rank(buffers[kind], world_of(ranks, tokens), exact)
    by_rank(buffers[KINDS[0]], world_of(ranks, "few", num_experts=13), True)
    for buffer in buffers.values():
        buffer.destroy()


@pytest.mark.portable
@distributed_test(world_size=SIZES)
def test_rows_per_expert(ranks: Ranks) -> None:
    buffers = {kind: made(ranks, kind) for kind in KINDS}
    for number, (tokens, alignment, exact) in enumerate(product(UNEVEN, (1, 128), (True, False))):
        for kind in kinds(ranks, number):
            by_expert(buffers[kind], world_of(ranks, tokens), alignment, exact)
    by_expert(buffers[KINDS[1]], world_of(ranks, "few", num_experts=13), 8, True)
    for buffer in buffers.values():
        buffer.destroy()


@distributed_test(world_size=3)
def test_fewer_experts_than_ranks(ranks: Ranks) -> None:
    """The last rank holds none."""
    buffer = made(ranks, KINDS[0])
    world = world_of(ranks, "few", num_experts=2, num_topk=2)
    for exact in (True, False):
        by_rank(buffer, world, exact)
        by_expert(buffer, world, 8, exact)
    buffer.destroy()


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
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
        blocks = world.blocks(rank, 1)
        assert torch.equal(rows, blocks.x if expands else world.take(rank, world.x))
        worked = blocks.work(rows) if expands else world.work(rank, rows)
        total = world.combined(rank)
        if expands:
            factors = torch.where(world.idx[rank] < 0, 0, world.idx[rank] % 3 + 1)
            total = world.x[rank].float() * factors.sum(1, keepdim=True)
        assert torch.equal(other.combine(worked, handle)[0].float(), total)
        assert torch.equal(handle.topk_idx, world.idx[rank])
    buffer.destroy()
    other.destroy()


@distributed_test(world_size=2)
def test_ids_that_a_caller_changes(ranks: Ranks) -> None:
    """A cached dispatch brings those that came, whatever became of the ones it brought before."""
    rank, world = ranks.rank, world_of(ranks, "uneven")
    for kind, inference in product(KINDS, (False, True)):
        buffer = made(ranks, kind)
        with torch.inference_mode(inference):
            *_, ids, _, handle, _ = fresh(buffer, world)
            for _ in range(3):
                ids += 7
                again = buffer.dispatch(
                    world.x[rank], handle=handle, topk_weights=world.weights[rank]
                )
                ids = again[1]
                assert torch.equal(ids, world.local_idx(rank))
                assert torch.equal(again[2], world.local_weights(rank))
            first = (world.local_idx(rank) >= 0).int().argmax(1)
            assert torch.equal(handle.recv_src_metadata[:, 1].long() % 3, first)
        buffer.destroy()


def laid_out(scales: Tensor) -> list[Tensor]:
    """The same scales row by row, column by column, and with gaps."""
    return [scales, scales.t().contiguous().t(), scales.repeat_interleave(2, 1)[:, ::2]]


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_quantised_rows(ranks: Ranks) -> None:
    """Data and scales (float32, or four exponents to an int32) come bit for bit, in either layout
    of scales, whatever layout they were given in.
    """
    rank = ranks.rank
    for kind in KINDS:
        buffer = made(ranks, kind, hidden=512, use_fp8_dispatch=True)
        world = world_of(ranks, "empty first", hidden=512, whole=False)
        blocks = world.blocks(rank, 8)
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


@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
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
