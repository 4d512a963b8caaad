"""Engine twolevel on GPUs: grids of virtual ranks on one (``make test-virtual``), and processes
with NVSHMEM between nodes.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

import test_cuda_graph
import tokenyard as ty
from cases import (
    Case,
    check_combined,
    check_received,
    dispatch,
    rows_to_combine,
    skip_without_gpus,
    to,
)
from cases import on_grid as cases_on_grid
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


class On2x1(Case):
    topology = (2, 1)


class On2x2(Case):
    topology = (2, 2)


class On2x4(Case):
    topology = (2, 4)


class On2x8(Case):
    topology = (2, 8)


class On4x4(Case):
    topology = (4, 4)


GRIDS = {"cuda": (On2x1, On2x2), "simulated": (On2x1,)}.get(DEVICE, (On2x4, On2x8, On4x4))
CALLS = {
    "flat": {},
    "major": {"layout": ty.Layout.EXPERT_MAJOR, "expert_alignment": 4},
    "padded, static, FP8": {
        "layout": ty.Layout.EXPERT_PADDED,
        "exact": False,
        "quantize": ty.Quantize.FP8,
    },
    "major, MXFP8": {"layout": ty.Layout.EXPERT_MAJOR, "quantize": ty.Quantize.MXFP8},
}


GRAPHS = (
    ("test_replays_follow_new_rows_and_routing", (ty.Layout.FLAT,)),
    ("test_replays_follow_new_rows_and_routing", (ty.Layout.EXPERT_PADDED,)),
    ("test_replays_leave_rows_in_place_and_read_them_there", ()),
)


def on_grid(ranks: Ranks, grid: type[Case], **options: object) -> Case:
    """A case on the grid, or a skip: the tests are made for all sizes."""
    nodes, per_node = grid.topology or (0, 0)
    if nodes * per_node != ranks.world_size:
        pytest.skip("another number of ranks")
    skip_without_gpus(ranks)
    return grid(ranks.world_size, **{"num_tokens": 40, "num_experts": 32, "hidden": 256, **options})


reaches = pytest.mark.parametrize(
    "reach",
    [{}, {PUTS_VARIABLE: "1"}] if DEVICE == "cuda" else [{}],
    ids=["mapped", "puts"][: 1 + (DEVICE == "cuda")],
)
"""How rows reach other nodes: NVSHMEM maps all GPUs of a host, so there they are put only if told
to.
"""
sizes = distributed_test(
    world_size=tuple(
        sorted({grid.topology[0] * grid.topology[1] for grid in GRIDS if grid.topology})
    ),
    engine="twolevel",
    pool="NVSHMEM",  # torch takes symmetric memory from one source in a process
)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.__name__)
@pytest.mark.parametrize("call", CALLS)
@reaches
@sizes
def test_matches_the_oracle(
    ranks: Ranks, grid: type[Case], call: str, reach: dict[str, str]
) -> None:
    """Two calls of each kind, a cached one, and sums by the tree of the grid; what crossed is once
    per (token, node).
    """
    case = on_grid(ranks, grid, **CALLS[call])
    with mock.patch.dict(os.environ, reach), case.make(ranks) as ep:
        if DEVICE == "cuda":
            assert "NVSHMEM between nodes" in ep.why
        for _ in range(2):
            check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
            got = ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle)
            check_combined(got, case, ranks.rank, case.combined(ranks.rank).x)
        if case.quantize is None:
            again = ep.dispatch(to(case.x[ranks.rank], ranks.device), handle=recv.handle)
            rows = len(case.expected[ranks.rank].source)
            assert torch.equal(again.x[:rows].cpu(), case.expected[ranks.rank].x)
        ep.check()


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.__name__)
@pytest.mark.parametrize(
    "mode", [None, ty.Quantize.FP8, ty.Quantize.MXFP8], ids=["bf16", "cast", "MXFP8"]
)
@reaches
@sizes
def test_rows_left_and_summed_in_place(
    ranks: Ranks, grid: type[Case], mode: ty.Quantize | None, reach: dict[str, str]
) -> None:
    """Fresh and cached; sums of rows in the view, of rows that are copied there, and with a bias;
    beside calls through rings.
    """
    case, rank = on_grid(ranks, grid, quantize=mode), ranks.rank
    want = case.combined(rank).x
    terms = [
        torch.full((case.tokens_of(r), case.hidden), 0.5, dtype=torch.bfloat16)
        for r in range(ranks.world_size)
    ]
    biased = case.combined(rank, bias=terms).x
    with mock.patch.dict(os.environ, reach), case.make(ranks) as ep:
        for _ in range(2):
            check_received(recv := dispatch(ranks, ep, case, in_place=True), case, rank)
            again = ep.dispatch(
                to(case.x[rank], ranks.device), handle=recv.handle, quantize=mode, in_place=True
            )
            expected = case.expected[rank].x
            assert torch.equal(
                again.x[: len(expected)].view(torch.uint8).cpu(), expected.view(torch.uint8)
            )
            rows = rows_to_combine(recv, case, rank)
            view = again.x if mode is None else ep.empty_for_combine(recv.handle, in_place=True)
            for call in range(3):
                got = ep.combine(view.copy_(rows), recv.handle, in_place=True)
                view.fill_(float("nan"))  # nobody reads it any more
                check_combined(got, case, rank, want, f"call {call}")
            check_combined(ep.combine(rows, recv.handle), case, rank, want, "through rings")
            got = ep.combine(rows, recv.handle, in_place=True, bias=terms[rank].to(ranks.device))
            check_combined(got, case, rank, biased, "rows elsewhere, with a bias")
        ep.check()


@pytest.mark.skipif(DEVICE != "cuda", reason="needs ranks that are processes: make test-gpu")
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.__name__)
@sizes
def test_few_multiprocessors(ranks: Ranks, grid: type[Case]) -> None:
    """Programs in clusters: in place and through rings."""
    case = on_grid(ranks, grid, num_tokens=700)
    with case.make(ranks, num_sms=24) as ep:
        for call in range(4):
            check_received(
                recv := dispatch(ranks, ep, case, in_place=call % 2 == 0), case, ranks.rank
            )
            got = ep.combine(
                rows_to_combine(recv, case, ranks.rank), recv.handle, in_place=call % 2 == 0
            )
            check_combined(got, case, ranks.rank, case.combined(ranks.rank).x, f"call {call}")


@pytest.mark.skipif(
    DEVICE != "cuda", reason="threads of one process cannot capture side by side: make test-gpu"
)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.__name__)
@pytest.mark.parametrize("body", GRAPHS, ids=["flat", "padded", "in place"])
@sizes
def test_replays_of_a_cuda_graph(
    ranks: Ranks, grid: type[Case], body: tuple[str, tuple[ty.Layout, ...]]
) -> None:
    """Those of ``test_cuda_graph.py``."""
    case, (name, layout) = on_grid(ranks, grid), body
    assert case.topology is not None
    with cases_on_grid(*case.topology):
        getattr(getattr(test_cuda_graph, name), BODY)(ranks, *layout)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.__name__)
@reaches
@sizes
def test_a_batch_of_32_times_the_rings(
    ranks: Ranks, grid: type[Case], reach: dict[str, str]
) -> None:
    """There and back; symmetric memory stays as it was."""
    case, rings = on_grid(ranks, grid, num_tokens=4000), 56 << 10
    with mock.patch.dict(os.environ, reach), case.make(ranks, buffer_bytes=rings) as ep:
        before = ep.buffer_bytes
        check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
        ep.check()
        assert ep.stats().across.bytes_sent >= 32 * rings
        got = ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle)
        check_combined(got, case, ranks.rank, case.combined(ranks.rank).x)
        assert ep.buffer_bytes == before
