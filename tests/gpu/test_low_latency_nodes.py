"""Engine low_latency between nodes: ranks of other nodes get puts though their memory is mapped.
Processes put through NVSHMEM (``make test-gpu``), virtual ranks through pointers (``make
test-virtual``). Each size and kind of call takes seconds to compile, so virtual ranks live one life
per grid; ``TOKENYARD_SOAK_SEEDS=2`` gives them all tests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partialmethod
from typing import Any
from unittest import mock

import pytest
import torch

import low_latency_bodies as bodies
import test_low_latency_gpu as one_node
import tokenyard as ty
from cases import Case, check_received, dispatch, on_grid, skip_without_gpus
from low_latency_bodies import MAJOR, PADDED
from nvlink_pool import SOAK
from tokenyard import reference
from tokenyard.memory.nvshmem import PUTS_VARIABLE
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE
from tokenyard.testing.modules import BODY

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
many_kernels = pytest.mark.skipif(
    DEVICE == "virtual" and SOAK == 1, reason="compiles for minutes: TOKENYARD_SOAK_SEEDS=2 runs it"
)
Grid = tuple[int, int]
GRIDS: tuple[Grid, ...] = {"cuda": ((2, 1), (2, 2)), "simulated": ((2, 1),)}.get(
    DEVICE, ((2, 4), (4, 4))
)
NUM_SMS = {"simulated": 2}.get(DEVICE)
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
on_ranks = distributed_test(
    world_size=tuple(sorted({nodes * per_node for nodes, per_node in GRIDS})),
    engine="low_latency",
    pool="NVSHMEM",  # torch takes symmetric memory from one source in a process
)


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """Ranks of this process see it. (A worker would inherit it for good, see :func:`of_grid`.)"""
    with nullcontext() if DEVICE == "cuda" else _forced():
        yield


def _forced() -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {PUTS_VARIABLE: "1"})


def of_grid(grid: Grid, once: bool = False) -> Any:
    """Makes cases on the grid, whose sums are by rank, or (``once`` per node) by node too."""

    def make(case: Case, ranks: Ranks, **options: object) -> ty.ExpertParallel:
        with _forced() if DEVICE == "cuda" else nullcontext():  # threads share the environment
            return Case.make(case, ranks, once_per_node=once, **options)

    tree = grid[1] if once else None
    return type("OnGrid", (Case,), {"topology": grid, "ranks_per_node": tree, "make": make})


def case_on(ranks: Ranks, grid: Grid, **options: Any) -> Case:
    """A case on the grid; a skip if it has another size."""
    if grid[0] * grid[1] != ranks.world_size:
        pytest.skip("another number of ranks")
    skip_without_gpus(ranks)
    sizes = {"num_tokens": 5, "layout": PADDED, "exact": False, **options}
    return of_grid(grid)(ranks.world_size, **sizes)


def everything_on(grid: Grid) -> AbstractContextManager[Any]:
    """All cases of this process are on the grid, and puts are forced."""
    stack = ExitStack()
    stack.enter_context(_forced())
    stack.enter_context(on_grid(*grid))
    stack.enter_context(mock.patch.object(Case, "ranks_per_node", None))
    make = partialmethod(Case.make, once_per_node=False)
    stack.enter_context(mock.patch.object(Case, "make", make))
    return stack


@many_kernels
@pytest.mark.parametrize("layout", [MAJOR, PADDED], ids=lambda layout: layout.name.lower())
@pytest.mark.parametrize("routing", ["uniform", "zipf", "dropped", "one_rank", "none", "local"])
@grids
@on_ranks
def test_matches_the_oracle(ranks: Ranks, grid: Grid, layout: ty.Layout, routing: str) -> None:
    bodies.shared_body(ranks, case_on(ranks, grid, layout=layout, routing=routing), NUM_SMS)


@many_kernels
@grids
@on_ranks
def test_any_size(ranks: Ranks, grid: Grid) -> None:
    for sizes in (
        {"hidden": 1},
        {"hidden": 7, "dtype": torch.float32},
        {"hidden": 33, "dtype": torch.int8},
        {"num_topk": 12, "num_experts": 20, "num_tokens": 3},
        {"num_tokens": 1},
        {"hidden": 300, "quantize": ty.Quantize.FP8},
        {"hidden": 300, "quantize": ty.Quantize.MXFP8, "layout": MAJOR},
    ):
        bodies.shared_body(ranks, case_on(ranks, grid, **sizes), NUM_SMS)


DECODE: dict[str, Any] = {
    "num_tokens": 128,
    "hidden": 7168,
    "num_topk": 8,
    "num_experts": 256,
    "layout": MAJOR,
    "quantize": ty.Quantize.FP8,
}
"""Programs have several rows, and messages many. (Padded blocks of all ranks, as the oracle has
them, would fill the host's memory.)"""
SMALL: dict[str, Any] = {"num_tokens": 20, "hidden": 300, "num_topk": 6, "num_experts": 50}
DECODED = ((2, 1), (2, 2), (2, 4))
"""Grids that decode, but in the simulator, where it takes long."""
ROUTINGS = {"uniform": False, "one_rank": True, "dropped": False}
"""Of the calls of a life, and whether they are in two launches."""
KNOWN = threading.Lock()


@lru_cache(maxsize=len(ROUTINGS))
def known(grid: Grid, routing: str, once: bool) -> tuple[Case, list[torch.Tensor]]:
    """A case, and what experts return that change nothing."""
    sizes = DECODE if grid in DECODED and DEVICE != "simulated" else SMALL
    options = {"layout": PADDED, "exact": False, "routing": routing, **sizes}
    case = of_grid(grid, once)(grid[0] * grid[1], **options)
    return case, [each.x.bfloat16() for each in case.expected]


@pytest.mark.parametrize("once", [False, True], ids=["per rank", "per node"])
@grids
@on_ranks
def test_a_life(ranks: Ranks, grid: Grid, once: bool) -> None:
    """Calls in one launch and in two, casts, weights of the owner, lost weights, and ranks left out
    by hand, near ones and far ones. Rows cross ``once`` per node, or per rank.
    """
    case_on(ranks, grid)
    rank, size, per_node = ranks.rank, ranks.world_size, grid[1]
    nobody = [set[int]()] * size
    gone = [{size - 1} if owner < size - 1 else set(range(size - 1)) for owner in range(size)]
    last = set(range(size - per_node, size))  # the node without a rail for those on it
    railed = {peer for peer in set(range(size)) - last if once and (peer + 1) % per_node == 0}
    silent = [last if owner in railed else gone[owner] for owner in range(size)]
    with KNOWN:  # threads share what takes time and memory
        cases = [known(grid, routing, once) for routing in ROUTINGS]
    with cases[0][0].make(ranks, num_sms=NUM_SMS) as ep:

        def back(recv: ty.Received, at: int, absent: list[set[int]], in_two: bool) -> None:
            case, rows = cases[at]
            valid = (recv.source >= 0).unsqueeze(-1)
            mine = torch.where(valid, recv.x.bfloat16(), torch.nan)
            for way in bodies.ways_of(case)[2 if in_two else 0 :: 2]:
                tree = {"ranks_per_node": case.ranks_per_node, "owners": [rank], "absent": absent}
                sums = reference.combine(rows, case.expected, **tree, **way)
                bodies.check_lost(ranks, ep, recv, mine, case, way, sums[0], in_two=in_two)

        for at, two in enumerate(ROUTINGS.values()):
            in_two = two and grid != (4, 4)  # fewer kernels
            recv = dispatch(ranks, ep, cases[at][0], return_hook=in_two)
            if in_two:
                recv.hook()
            check_received(recv, cases[at][0], rank)
            back(recv, at, nobody, in_two)
        for peer in gone[rank]:
            ep.mask(peer)
        back(recv, at, silent, False)
        recv = dispatch(ranks, ep, cases[0][0])
        got, want = (
            {source >> 32 for source in each.source.flatten().tolist() if source >= 0}
            for each in (recv, cases[0][0].expected[rank])
        )
        assert got == want - gone[rank] - (railed if rank in last else set())
        back(recv, 0, silent, False)
        assert ep.active_ranks == [peer not in gone[rank] for peer in range(size)]
        ep.check()


@many_kernels
@pytest.mark.parametrize("body", [bodies.hooks, bodies.left_out], ids=lambda body: body.__name__)
@grids
@on_ranks
def test_calls(ranks: Ranks, grid: Grid, body: Callable[..., None]) -> None:
    tokens = {"num_tokens": 20} if body is bodies.hooks else {"num_tokens": 20, "num_topk": 6}
    body(ranks, case_on(ranks, grid, **tokens), NUM_SMS)


@many_kernels
@pytest.mark.parametrize("body", [bodies.capacity, bodies.refusals], ids=lambda body: body.__name__)
@distributed_test(world_size=2, engine="low_latency", pool="NVSHMEM")
def test_calls_of_two_ranks(ranks: Ranks, body: Callable[..., None]) -> None:
    blocks = {"layout": MAJOR, "expert_alignment": 4, "num_tokens": 8}
    case = case_on(ranks, (2, 1), **(blocks if body is bodies.capacity else {}))
    body(ranks, case, NUM_SMS)


@processes
@pytest.mark.parametrize("in_two", [False, True], ids=["one launch", "two launches"])
@grids
@on_ranks
def test_replays_follow_new_rows_and_routing(ranks: Ranks, grid: Grid, in_two: bool) -> None:
    """10,000 replays of a graph."""
    case_on(ranks, grid)
    with everything_on(grid):
        replays: Any = one_node.test_replays_follow_new_rows_and_routing
        getattr(replays, BODY)(ranks, PADDED, in_two)


@processes
@distributed_test(world_size=2, engine="low_latency", may_die=(1,), pool="NVSHMEM")
def test_the_other_goes_on_when_a_rank_is_killed(ranks: Ranks) -> None:
    case_on(ranks, (2, 1))
    with everything_on((2, 1)):
        killed: Any = one_node.test_the_others_go_on_when_a_rank_is_killed
        getattr(killed, BODY)(ranks)
