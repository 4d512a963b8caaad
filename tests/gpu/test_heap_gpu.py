"""Results in a heap on GPUs: kept, read by other streams, and outliving their object. See
``make test-gpu``.
"""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

import tokenyard as ty
from cases import Case, check_received, dispatch, to
from test_nvlink import SIZES, processes, pytestmark
from tokenyard.engines.result_heap import ResultHeap
from tokenyard.formats import quantize
from tokenyard.kernels.sync import IN_HEAPS
from tokenyard.testing import Ranks, distributed_test

__all__ = ["pytestmark"]
FEW = 8  # multiprocessors
CALLS = 6


def cases_of(ranks: Ranks, dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    return [
        Case(ranks.world_size, num_tokens=300, hidden=512, num_experts=16, seed=seed, dtype=dtype)
        for seed in range(CALLS)
    ]


def rows_of(case: Case, source: torch.Tensor) -> torch.Tensor:
    """The rows that ``source`` says: of which rank, and which token there."""
    rows = [each for each in case.x if isinstance(each, torch.Tensor)]
    sizes = torch.tensor([0, *map(len, rows)])  # ranks have different numbers of tokens
    return torch.cat(rows)[sizes.cumsum(0)[source >> 32] + source % 2**32]


@processes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@distributed_test(world_size=SIZES, engine="nvlink")
def test_results_in_a_heap(ranks: Ranks, dtype: torch.dtype) -> None:
    """Dropped ones give their memory back, kept ones keep it: until the heap is full, and rings
    take over. The last ones are good when their object is closed. Scales are apart from rows.
    """
    cases = cases_of(ranks, dtype)
    with mock.patch.object(ResultHeap, "least", 0):
        ep = cases[0].make(ranks, num_sms=FEW)
        for case in (*cases, *cases):
            check_received(dispatch(ranks, ep, case), case, ranks.rank)
        assert ep.stats().in_heap >= CALLS
        kept = [(case, dispatch(ranks, ep, case)) for case in (*cases, *cases)]
        assert ep.stats().through_rings > 2
        for case, recv in kept:
            check_received(recv, case, ranks.rank)
        del kept[:-1]
        before = ep.stats().in_heap
        for case in cases:
            check_received(dispatch(ranks, ep, case), case, ranks.rank)
        assert ep.stats().in_heap > before
        ep.close()
    gc.collect()
    for case, recv in kept:
        check_received(recv, case, ranks.rank)
        if recv.scales is not None:
            assert recv.scales.untyped_storage().data_ptr() != recv.x.untyped_storage().data_ptr()


@processes
@distributed_test(world_size=SIZES, engine="nvlink")
def test_cached_results_in_a_heap(ranks: Ranks) -> None:
    """Along routings whose fresh result was there, until the heap is full and rings take over; and
    replayed from a CUDA graph, which takes no block.
    """
    cases = cases_of(ranks)
    with mock.patch.object(ResultHeap, "least", 0), cases[0].make(ranks, num_sms=FEW) as ep:
        for case in cases[:3]:
            recv = dispatch(ranks, ep, case)
        moved = ep._calls.engine._workspace.state[IN_HEAPS.value : IN_HEAPS.value + 1]
        rows = [to(each.x[ranks.rank], ranks.device) for each in (cases[2], cases[3])]
        kept: list[torch.Tensor] = []
        seen: list[int] = []
        for call in range(4 * CALLS):
            kept.append(ep.dispatch(rows[call % 2] * (1 + call // 2), handle=recv.handle).x)
            seen.append(int(moved))
        assert seen[0] != 0 == seen[-1], seen
        source = recv.source.cpu()
        for call, got in enumerate(kept):
            sent = rows_of(cases[2 + call % 2], source) * (1 + call // 2)
            assert torch.equal(got.cpu(), sent), call
        kept.clear()
        for call in range(2 * CALLS):  # of scales, which are copied out of the block
            cast = quantize(rows[call % 2] * (1 + call), ty.Quantize.FP8)
            got = ep.dispatch(cast, handle=recv.handle)
            assert int(moved) and got.scales is not None, call
            sent = quantize(rows_of(cases[2 + call % 2], source) * (1 + call), ty.Quantize.FP8)
            assert torch.equal(got.x.cpu().view(torch.uint8), sent.data.view(torch.uint8)), call
            assert torch.equal(got.scales.cpu(), sent.scales), call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = ep.dispatch(rows[0], handle=recv.handle)
        for replay in range(3):
            rows[0].mul_(2)
            graph.replay()
            torch.cuda.synchronize()
            sent = rows_of(cases[2], source) * 2 ** (replay + 1)
            assert torch.equal(again.x.cpu(), sent) and int(moved) == 0
            assert ep.dispatch(rows[0], handle=recv.handle).x.shape == again.x.shape
            assert int(moved) != 0
        ep.check()


@processes
@distributed_test(world_size=SIZES, engine="nvlink")
def test_streams_that_read_a_result_in_a_heap(ranks: Ranks) -> None:
    """A result that has died lasts until a stream has read it that was told of, by us or by
    ``record_stream``, though calls go on.
    """
    cases, side = cases_of(ranks), torch.cuda.Stream()
    with mock.patch.object(ResultHeap, "least", 0), cases[0].make(ranks, num_sms=FEW) as ep:
        for told_by_us in (True, False):
            copies: list[tuple[Case, torch.Tensor]] = []
            for case in (*cases, *cases):
                recv = dispatch(ranks, ep, case, async_op=told_by_us)
                recv.wait()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(5_000_000)
                    copies.append((case, recv.x.clone()))
                recv.x.record_stream(side)
                del recv
            torch.cuda.synchronize()
            for case, copy in copies:
                assert torch.equal(copy.cpu(), case.expected[ranks.rank].x), told_by_us
