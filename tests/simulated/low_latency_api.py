"""``ExpertParallel(engine="low_latency")`` on simulated ranks. Reached through ``nvlink_pool.py``:
kernels are interpreted here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import low_latency_bodies as bodies
import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, on_grid, rows_to_combine
from low_latency_bodies import ENGINE, MAJOR, static
from low_latency_failures import meet
from tokenyard import reference
from tokenyard.engines import low_latency_workspace
from tokenyard.memory.nvshmem import PUTS_VARIABLE
from tokenyard.testing import Ranks, poisoned
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

NUM_SMS = 2
"""Few programs: each is a coroutine. A launch has two on each, and one for each rank."""


def _on_ranks(body: Callable[[Ranks, Case, int], None], case: Case, seed: int) -> None:
    def rank(here: SimulatedRank) -> None:
        body(
            Ranks(here.rank, case.world_size, here.device, ENGINE, SimulatedGroup(here)),
            case,
            max(NUM_SMS, case.world_size // 2),
        )

    simulate(case.world_size, rank, seed=seed)


def between_nodes(grid: tuple[int, int], name: str, *arguments: Any) -> None:
    """``name`` where ranks of other nodes get puts, through pointers. Sums are by rank as ever."""
    flat = mock.patch.object(Case, "ranks_per_node", None)
    with on_grid(*grid), flat, mock.patch.dict(os.environ, {PUTS_VARIABLE: "1"}):
        globals()[name](*arguments)


def once_per_node(grid: tuple[int, int], network: bool, name: str, *arguments: Any) -> None:
    """``name`` where rows cross once per node, through the simulated ``network`` or through
    pointers. Sums are by the tree of the topology."""
    memory, per_node = SimulatedGroup.open_memory, grid[1] if network else 0

    def open_memory(group: SimulatedGroup, *given: Any, **more: Any) -> Any:
        opened = memory(group, *given, **more)
        opened.ranks_per_node = per_node
        return opened

    with (
        on_grid(*grid),
        mock.patch.object(SimulatedGroup, "open_memory", open_memory),
        mock.patch.object(low_latency_workspace, "crosses_once", return_value=True) as asked,
        mock.patch.dict(os.environ, {PUTS_VARIABLE: "" if network else "1"}),
    ):
        globals()[name](*arguments)
    assert asked.called


def shared_body(world_size: int, seed: int, options: dict[str, Any]) -> None:
    _on_ranks(bodies.shared_body, static(world_size, seed=seed, **options), seed)


def microscaled(world_size: int, options: dict[str, Any]) -> None:
    """Rows that the caller has cast, of blocks of 32."""
    case = static(world_size, **options)
    case.__dict__["x"] = [reference.quantize(x, ty.Quantize.MXFP8) for x in case.x]
    _on_ranks(bodies.shared_body, case, world_size)


def hooks(seed: int, world_size: int = 2) -> None:
    _on_ranks(bodies.hooks, static(world_size, seed=seed), seed)


def capacity(seed: int, world_size: int = 2) -> None:
    case = static(world_size, seed=seed, layout=MAJOR, expert_alignment=4, num_tokens=8)
    _on_ranks(bodies.capacity, case, seed)


def by_column(world_size: int, options: dict[str, Any]) -> None:
    _on_ranks(bodies.by_column, static(world_size, **options), world_size)


def left_out(world_size: int, options: dict[str, Any]) -> None:
    _on_ranks(bodies.left_out, static(world_size, **options), world_size)


def refusals(seed: int) -> None:
    _on_ranks(bodies.refusals, static(2, seed=seed), seed)


def back_before_the_combine(seed: int) -> None:
    """A rank that was left out in the dispatch is back: it adds nothing to the sums, says so at
    once, and is not left out again.
    """

    def body(here: SimulatedRank) -> None:
        other = 1 - here.rank

        ep = ty.ExpertParallel(
            SimulatedGroup(here),
            num_experts=2,
            hidden=8,
            num_topk=2,
            max_tokens_per_rank=3,
            engine=ENGINE,
            num_sms=NUM_SMS,
            timeout=5.0,
        )
        ep.mask(other)
        x, idx = torch.full((2, 8), 3.0).bfloat16(), torch.tensor([[0, 1], [other, -1]])
        recv = ep.dispatch(x, idx, layout=ty.Layout.EXPERT_PADDED, exact=False)
        ep.check()
        meet(here, "all have sent")
        ep.unmask(other)
        ep.check()
        meet(here, "all are back")
        lost = torch.full((2,), 9.0)
        y = ep.combine(recv.x, recv.handle, options=ty.CallOptions(lost_weights=lost))
        assert (y[:, 0].tolist(), lost.tolist()) == ([3.0, 0.0], [1.0, 1.0])
        assert ep.active_ranks == [True, True]

    simulate(2, body, seed=seed)


def chosen(once: bool | None, hidden: int) -> str:
    """What an object on 2 nodes of 2 ranks says of how rows cross; a dispatch and its combine are
    as it says."""
    case = static(4, hidden=hidden, num_tokens=3)
    said: set[str] = set()

    def body(here: SimulatedRank) -> None:
        ranks = Ranks(here.rank, 4, here.device, ENGINE, SimulatedGroup(here))
        with case.make(ranks, num_sms=NUM_SMS, once_per_node=once) as ep:
            said.add(ep.why.split("; ")[-1])
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, here.rank)
            tree = 2 if "node:" in ep.why else None
            want = reference.combine(case.expert_rows, case.expected, ranks_per_node=tree)
            got = ep.combine(rows_to_combine(recv, case, here.rank), recv.handle)
            check_combined(got, case, here.rank, want[here.rank].x)

    with on_grid(2, 2), mock.patch.dict(os.environ, {PUTS_VARIABLE: "1"}):
        simulate(4, body, seed=1)
    [one] = said
    return one


def no_experts(seed: int) -> None:
    """A rank without experts has rows that nobody fills: they say so."""

    def body(here: SimulatedRank) -> None:
        ep = ty.ExpertParallel(
            SimulatedGroup(here),
            num_experts=1,
            hidden=8,
            num_topk=1,
            max_tokens_per_rank=1,
            engine=ENGINE,
            num_sms=NUM_SMS,
        )
        idx, ones = torch.tensor([[0]]), torch.ones(1, 1)
        recv = ep.dispatch(
            torch.ones(1, 8).bfloat16(), idx, ones, layout=MAJOR, exact=False, capacity=3
        )
        if here.rank == 1:
            assert (recv.source.tolist(), recv.row_weights.tolist()) == ([-1] * 3, [0.0] * 3)

    with poisoned():
        simulate(2, body, seed=seed)
