"""Static shapes in a CUDA graph: captured once, replayed with new rows and new routing."""

from __future__ import annotations

import os

import pytest
import torch

import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, on_grid
from test_dispatch_combine import ENGINES, layouts
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE
from tokenyard.testing.modules import BODY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get(DEVICE_VARIABLE) != "cuda", reason="needs a GPU per rank: make test-gpu"
    ),
]
WORLD_SIZES = tuple(size for size in (1, 2, 4) if size <= max(torch.cuda.device_count(), 1))
REPLAYS = 25


@layouts
@distributed_test(world_size=WORLD_SIZES, engine=ENGINES)
def test_replays_follow_new_rows_and_routing(ranks: Ranks, layout: ty.Layout) -> None:
    names = ("uniform", "zipf", "dropped", "one_rank", "duplicates", "none", "local")
    cases = [
        Case(ranks.world_size, routing=name, num_tokens=16, layout=layout, exact=False, seed=seed)
        for seed, name in enumerate(names)
    ]
    with cases[0].make(ranks) as ep:
        x = cases[0].x[ranks.rank].to(ranks.device)
        idx, weights = (t.to(ranks.device) for t in cases[0].picks[ranks.rank])
        weighted = layout is not ty.Layout.FLAT

        def step() -> tuple[ty.Received, torch.Tensor]:
            recv = ep.dispatch(x, idx, weights, layout=layout, exact=False)
            return recv, ep.combine(recv.x, recv.handle, weighted=weighted)

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv, combined = step()
        for replay in range(REPLAYS):
            case = cases[replay % len(cases)]
            x.copy_(case.x[ranks.rank])
            idx.copy_(case.picks[ranks.rank][0])
            weights.copy_(case.picks[ranks.rank][1])
            graph.replay()
            torch.cuda.synchronize()
            check_received(recv, case, ranks.rank)
            rows = [each.x for each in case.expected]
            want = case.combined(ranks.rank, rows, weighted=weighted)
            check_combined(combined, case, ranks.rank, want.x)
        ep.check()


@distributed_test(world_size=WORLD_SIZES, engine="nvlink")
def test_replays_leave_rows_in_place_and_read_them_there(ranks: Ranks) -> None:
    cases = [
        Case(ranks.world_size, routing=name, num_tokens=16, exact=False)
        for name in ("uniform", "zipf", "local")
    ]
    with cases[0].make(ranks) as ep:
        x = cases[0].x[ranks.rank].to(ranks.device)
        idx, weights = (t.to(ranks.device) for t in cases[0].picks[ranks.rank])

        def step() -> tuple[ty.Received, torch.Tensor]:
            recv = ep.dispatch(x, idx, weights, exact=False, in_place=True)
            return recv, ep.combine(recv.x.neg_(), recv.handle, in_place=True)

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, combined = step()
        for replay in range(REPLAYS):
            case = cases[replay % len(cases)]
            x.copy_(case.x[ranks.rank])
            idx.copy_(case.picks[ranks.rank][0])
            weights.copy_(case.picks[ranks.rank][1])
            graph.replay()
            torch.cuda.synchronize()
            want = case.combined(ranks.rank, [-each.x for each in case.expected])
            check_combined(combined, case, ranks.rank, want.x)
        ep.check()


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@layouts
@distributed_test(world_size=4)
def test_replays_relay_rows(ranks: Ranks, layout: ty.Layout) -> None:
    """On a grid of nodes, over NCCL."""
    with on_grid(2, 2):
        getattr(test_replays_follow_new_rows_and_routing, BODY)(ranks, layout)


@distributed_test(world_size=WORLD_SIZES, engine=ENGINES)
def test_check_names_a_bad_id_of_a_call_without_host_wait(ranks: Ranks) -> None:
    case = Case(ranks.world_size, exact=False)
    with case.make(ranks) as ep:
        idx, weights = (t.to(ranks.device) for t in case.picks[ranks.rank])
        idx[2, 1] = 77
        ep.dispatch(case.x[ranks.rank].to(ranks.device), idx, weights, exact=False)
        with pytest.raises(ValueError, match=r"topk_idx\[2, 1\] is 77, but there are 8 experts"):
            ep.check()
        check_received(dispatch(ranks, ep, case), case, ranks.rank)
        ep.check()
