"""Engine low_latency on GPUs: what the simulator shows, real graphs, and ranks that are killed. See
``make test-gpu``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import low_latency_bodies as bodies
import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, skip_without_gpus
from low_latency_bodies import MAJOR, PADDED, static
from tokenyard import reference
from tokenyard.testing import ROUTINGS, Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu",
        reason="needs GPUs (make test-gpu); the simulator runs these kernels elsewhere",
    ),
]
processes = pytest.mark.skipif(
    DEVICE != "cuda", reason="needs ranks that are processes: make test-gpu"
)
layouts = pytest.mark.parametrize("layout", [MAJOR, PADDED], ids=lambda layout: layout.name.lower())
SIZES = {"cuda": (2, 3, 4), "simulated": (2,)}.get(DEVICE, (8,))
NUM_SMS = {"simulated": 2}.get(DEVICE)
REPLAYS = 10_000
FULL = ("uniform", "zipf", "dropped", "one_rank", "duplicates", "none", "local")
"""Routings that leave every rank its tokens: a graph's shapes are its own."""
TIMEOUT = 2.0
on_ranks = distributed_test(world_size=SIZES, engine="low_latency")


@pytest.mark.parametrize("routing", ROUTINGS)
@layouts
@on_ranks
def test_matches_the_oracle(ranks: Ranks, layout: ty.Layout, routing: str) -> None:
    bodies.shared_body(ranks, static(ranks.world_size, layout=layout, routing=routing), NUM_SMS)


@layouts
@on_ranks
def test_any_size(ranks: Ranks, layout: ty.Layout) -> None:
    for sizes in (
        {"hidden": 1},
        {"hidden": 7, "dtype": torch.float32},
        {"hidden": 33, "dtype": torch.int8},
        {"num_experts": 30},
        {"num_topk": 12, "num_experts": 20, "num_tokens": 3},
        {"num_topk": 6, "num_experts": 2},
        {"num_tokens": 1},
        {"num_tokens": 40, "hidden": 768},
    ):
        bodies.shared_body(ranks, static(ranks.world_size, layout=layout, **sizes), NUM_SMS)


@layouts
@on_ranks
def test_quantised_in_the_send(ranks: Ranks, layout: ty.Layout) -> None:
    for mode in ty.Quantize:
        bodies.shared_body(
            ranks, static(ranks.world_size, hidden=300, quantize=mode, layout=layout), NUM_SMS
        )


@on_ranks
def test_scales_by_column(ranks: Ranks) -> None:
    for sizes in (
        {"quantize": ty.Quantize.FP8, "hidden": 1100},
        {"quantize": ty.Quantize.FP8_UE8M0, "hidden": 1100},
        {"dtype": torch.int8, "hidden": 33},
        {"quantize": ty.Quantize.FP8_POW2, "hidden": 40, "num_tokens": 1},
    ):
        bodies.by_column(ranks, static(ranks.world_size, **sizes), NUM_SMS)


@on_ranks
def test_hooks(ranks: Ranks) -> None:
    bodies.hooks(ranks, static(ranks.world_size, num_tokens=20), NUM_SMS)


@layouts
@on_ranks
def test_what_sums_lack(ranks: Ranks, layout: ty.Layout) -> None:
    for routing in ("uniform", "duplicates", "dropped"):
        case = static(ranks.world_size, num_tokens=20, num_topk=6, layout=layout, routing=routing)
        bodies.left_out(ranks, case, NUM_SMS)


@pytest.mark.parametrize("body", [bodies.capacity, bodies.refusals], ids=lambda body: body.__name__)
@distributed_test(world_size=2, engine="low_latency")
def test_calls_of_two_ranks(ranks: Ranks, body: Callable[[Ranks, Case, int | None], None]) -> None:
    case = (
        static(2, layout=MAJOR, expert_alignment=4, num_tokens=8)
        if body is bodies.capacity
        else static(2)
    )
    body(ranks, case, NUM_SMS)


@processes
@pytest.mark.parametrize("in_two", [False, True], ids=["one launch", "two launches"])
@layouts
@distributed_test(world_size=SIZES, engine="low_latency")
def test_replays_follow_new_rows_and_routing(ranks: Ranks, layout: ty.Layout, in_two: bool) -> None:
    """10,000 replays of one graph; the routing, rows and weights of each are new, and every row of
    each is compared.
    """
    skip_without_gpus(ranks)
    sizes = {"num_tokens": 24, "hidden": 512, "num_experts": 16, "num_topk": 4}
    if layout is MAJOR:
        sizes = {"num_tokens": 256, "hidden": 1024, "num_experts": 64, "num_topk": 8}
    cases = [
        static(
            ranks.world_size,
            routing=name,
            seed=seed,
            layout=layout,
            quantize=ty.Quantize.FP8,
            **sizes,
        )
        for seed, name in enumerate(FULL)
    ]
    rank, here = ranks.rank, ranks.device
    with cases[0].make(ranks) as ep:
        sent = [tuple(t.to(here) for t in (case.x[rank], *case.picks[rank])) for case in cases]
        inputs = tuple(torch.empty_like(t) for t in sent[0])
        cast, options = ty.Quantize.FP8, ty.CallOptions(scales_by_column=layout is PADDED)

        def step() -> tuple[ty.Received, torch.Tensor]:
            recv = ep.dispatch(
                *inputs,
                layout=layout,
                exact=False,
                quantize=cast,
                return_hook=in_two,
                options=options,
            )
            if in_two:
                recv.hook()
            rows = recv.x.view(torch.float8_e4m3fn).bfloat16()
            y = ep.combine(rows, recv.handle, weighted=True, return_hook=in_two)
            if in_two:
                y.hook()
            return recv, y.x if in_two else y

        for part, new in zip(inputs, sent[0], strict=True):
            part.copy_(new)
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv, y = step()
        wanted = [_wanted(case, rank, here) for case in cases]
        wrong = torch.zeros((), dtype=torch.int64, device=here)
        for replay in range(REPLAYS):
            at = (replay * 7 + replay // 50) % len(cases)
            for part, new in zip(inputs, sent[at], strict=True):
                part.copy_(new)
            graph.replay()
            rows, *right = wanted[at]
            got = (
                recv.x.view(torch.uint8).flatten(0, -2)[rows],
                recv.scales.flatten(0, -2)[rows],
                recv.source.flatten()[rows],
                recv.tokens_per_expert,
                y,
            )
            for mine, expected in zip(got, right, strict=True):
                wrong += (mine != expected).sum()
        assert wrong.item() == 0
        assert all(ep.active_ranks)
        ep.check()


def _wanted(case: Case, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Which places are rows; payload, scales and source of these; counts; what a weighted combine
    of the payload gives.
    """
    mine = case.expected[rank]
    back = reference.combine(
        [each.x.bfloat16() for each in case.expected], case.expected, weighted=True
    )[rank].x
    rows = (mine.source.flatten() >= 0).nonzero().flatten()
    assert mine.scales is not None
    x, scales = mine.x.view(torch.uint8).flatten(0, -2)[rows], mine.scales.flatten(0, -2)[rows]
    right = (rows, x, scales, mine.source.flatten()[rows], mine.tokens_per_expert, back)
    return tuple(t.to(device) for t in right)


@processes
@distributed_test(
    world_size=tuple(size for size in SIZES if size > 1), engine="low_latency", may_die=(1,)
)
def test_the_others_go_on_when_a_rank_is_killed(ranks: Ranks) -> None:
    skip_without_gpus(ranks)
    case = static(ranks.world_size, num_tokens=20)
    ep = case.make(ranks, timeout=TIMEOUT)
    check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
    ep.combine(recv.x, recv.handle)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if ranks.rank == 1:
        for _ in range(20):
            dispatch(ranks, ep, case)
        os.kill(os.getpid(), signal.SIGKILL)
    while all(ep.active_ranks):
        dispatch(ranks, ep, case)
    assert ep.active_ranks == [rank != 1 for rank in range(ranks.world_size)]
    there = case.expected[ranks.rank].source.flatten()
    there = there[(there >= 0) & (there >> 32 != 1)].to(ranks.device)
    start = time.monotonic()
    for _ in range(100):
        recv = dispatch(ranks, ep, case)
        valid = recv.source >= 0
        assert torch.equal(recv.source[valid], there)
        y = ep.combine(
            torch.where(valid.view(recv.x.shape[:-1]).unsqueeze(-1), recv.x, 0), recv.handle
        )
        assert y.isfinite().all()
    # nobody waits for the dead rank any more: each call would have waited for so long
    assert time.monotonic() - start < 100 * TIMEOUT
    low = ep._calls.low
    assert low is not None and low.silent_rank() == 1
    ep.close()


@processes
@distributed_test(
    world_size=tuple(size for size in SIZES if size > 1), engine="low_latency", may_die=(1,)
)
def test_replays_tell_what_sums_lack_without_a_rank(ranks: Ranks) -> None:
    """One graph: with all ranks, with rank 1 left out by hand, with all again, and after rank 1 was
    killed.
    """
    skip_without_gpus(ranks)
    rank, here, size = ranks.rank, ranks.device, ranks.world_size
    case = static(size, num_tokens=20, num_topk=6)
    rows = [each.x for each in case.expected]
    gone = [{1} if owner != 1 else set(range(size)) - {1} for owner in range(size)]
    whole, part = (
        reference.combine(rows, case.expected, weighted=True, absent=each)
        for each in ([()] * size, gone)
    )
    ep = case.make(ranks, timeout=TIMEOUT)
    x, idx, weights = (each.to(here) for each in (case.x[rank], *case.picks[rank]))
    lost = torch.full((len(idx),), torch.nan, device=here)

    def step() -> torch.Tensor:
        recv = ep.dispatch(x, idx, weights, **case.options)
        return ep.combine(
            recv.x, recv.handle, weighted=True, options=ty.CallOptions(lost_weights=lost)
        )

    def meet() -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def check(want: list[reference.ReferenceCombined]) -> None:
        check_combined(y, case, rank, want[rank].x)
        check_combined(lost, case, rank, want[rank].lost_weights, "lost weights")

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    meet()
    for absent, want in (([], whole), (sorted(gone[rank]), part), ([], whole)):
        lost.fill_(torch.nan)
        for peer in absent:
            ep.mask(peer)
        graph.replay()
        check(want)
        meet()
        for peer in absent:
            ep.unmask(peer)
        meet()
    if rank == 1:
        for _ in range(20):
            graph.replay()
        os.kill(os.getpid(), signal.SIGKILL)
    while all(ep.active_ranks):
        graph.replay()
    for _ in range(3):
        lost.fill_(torch.nan)
        graph.replay()
        check(part)
    ep.close()
