"""Engine low_latency between nodes: ranks of other nodes get puts though their memory is mapped.
Processes put through NVSHMEM (``make test-gpu``), virtual ranks through pointers (``make
test-virtual``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import low_latency_bodies as bodies
import test_low_latency_gpu as one_node
import tokenyard as ty
from cases import Case, check_received, dispatch, on_grid, rows_to_combine, skip_without_gpus
from low_latency_bodies import MAJOR, PADDED
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
Grid = tuple[int, int]
GRIDS: tuple[Grid, ...] = {"cuda": ((2, 1), (2, 2)), "simulated": ((2, 1),)}.get(
    DEVICE, ((2, 2), (2, 4), (4, 4))
)
NUM_SMS = {"simulated": 2}.get(DEVICE)
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
on_ranks = distributed_test(
    world_size=tuple(sorted({nodes * per_node for nodes, per_node in GRIDS})), engine="low_latency"
)


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """Ranks of this process see it, which are all but processes."""
    with mock.patch.dict(os.environ, {PUTS_VARIABLE: "1"}):
        yield


def case_on(ranks: Ranks, grid: Grid, **options: Any) -> Case:
    """A case on the grid, whose sums are by rank; a skip if it has another size."""
    if grid[0] * grid[1] != ranks.world_size:
        pytest.skip("another number of ranks")
    skip_without_gpus(ranks)
    if DEVICE == "cuda":
        os.environ[PUTS_VARIABLE] = "1"
    kind: Any = type("OnGrid", (Case,), {"topology": grid, "ranks_per_node": None})
    return kind(ranks.world_size, **{"num_tokens": 5, "layout": PADDED, "exact": False, **options})


def everything_on(grid: Grid) -> AbstractContextManager[Any]:
    """Cases of this process are on the grid."""
    stack = ExitStack()
    stack.enter_context(on_grid(*grid))
    stack.enter_context(mock.patch.object(Case, "ranks_per_node", None))
    return stack


@pytest.mark.parametrize("layout", [MAJOR, PADDED], ids=lambda layout: layout.name.lower())
@pytest.mark.parametrize("routing", ["uniform", "zipf", "dropped", "one_rank", "none", "local"])
@grids
@on_ranks
def test_matches_the_oracle(ranks: Ranks, grid: Grid, layout: ty.Layout, routing: str) -> None:
    bodies.shared_body(ranks, case_on(ranks, grid, layout=layout, routing=routing), NUM_SMS)


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


@pytest.mark.skipif(DEVICE == "simulated", reason="takes long there")
@pytest.mark.parametrize("mode", [None, ty.Quantize.FP8], ids=["bf16", "cast"])
@grids
@on_ranks
def test_a_decode_batch(ranks: Ranks, grid: Grid, mode: ty.Quantize | None) -> None:
    """128 tokens x 7168, top-8 of 256: programs have several rows, and messages many."""
    sizes = {"num_tokens": 128, "hidden": 7168, "num_topk": 8, "num_experts": 256}
    case = case_on(ranks, grid, quantize=mode, **sizes)
    *_, way = bodies.ways_of(case)
    [want] = reference.combine(case.expert_rows, case.expected, owners=[ranks.rank], **way)
    with case.make(ranks) as ep:
        for in_two in (False, True, False):
            check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
            rows = rows_to_combine(recv, case, ranks.rank)
            bodies.check_lost(ranks, ep, recv, rows, case, way, want, in_two=in_two)


@pytest.mark.parametrize("body", [bodies.hooks, bodies.left_out], ids=lambda body: body.__name__)
@grids
@on_ranks
def test_calls(ranks: Ranks, grid: Grid, body: Callable[..., None]) -> None:
    tokens = {"num_tokens": 20} if body is bodies.hooks else {"num_tokens": 20, "num_topk": 6}
    body(ranks, case_on(ranks, grid, **tokens), NUM_SMS)


@pytest.mark.parametrize("body", [bodies.capacity, bodies.refusals], ids=lambda body: body.__name__)
@distributed_test(world_size=2, engine="low_latency")
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
@distributed_test(world_size=2, engine="low_latency", may_die=(1,))
def test_the_other_goes_on_when_a_rank_is_killed(ranks: Ranks) -> None:
    case_on(ranks, (2, 1))
    with everything_on((2, 1)):
        killed: Any = one_node.test_the_others_go_on_when_a_rank_is_killed
        getattr(killed, BODY)(ranks)
