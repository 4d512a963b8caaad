"""Runs the low-latency engine on simulated ranks, and checks every result bit for bit.

Kernels are interpreted here, so tests reach this module through ``nvlink_pool.py``. ``python
tests/run.py low_latency_ranks 4 17`` runs the scenario of 4 ranks and seed 17.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

import tokenyard as ty
from cases import QUANTIZED, Case, check_combined, check_received, rows_to_combine
from low_latency_cases import PADDED, Round, Scenario, between_nodes, draw, rehearsal
from low_latency_mutations import MUTATIONS, planted
from nvlink_cases import payload_of, spec_of
from simulated_tensors import OwnTensors
from tokenyard import reference
from tokenyard.engines.base import CallOptions, CombineArguments, DispatchArguments
from tokenyard.engines.low_latency import LowLatencyEngine
from tokenyard.handle import Handle
from tokenyard.memory.nvshmem import PUTS_VARIABLE
from tokenyard.results import received_fields
from tokenyard.stats import Stats
from tokenyard.testing import poisoned
from tokenyard.testing.simulator import SimulatedRank, SimulationError, simulate

MOST_STEPS = 400_000
"""A scenario takes some thousands."""
SKEWS = ("rank", "program")
"""Whose speeds differ in a rehearsal, by parity of the seed."""


@lru_cache(maxsize=64)
def known(case: Case) -> Case:
    """The first of equal cases: the oracle is asked once for all ranks."""
    return case


def terms_of(case: Case, rank: int, way: str) -> tuple[Tensor, ...]:
    """One bias in the dtype of the rows, or another one in float32 too."""
    random = torch.Generator().manual_seed(rank)
    shape = len(case.picks[rank][0]), case.hidden
    first = torch.randn(*shape, generator=random).to(case.expert_rows[rank].dtype)
    return (first,) if way == "bias" else (first, torch.randn(*shape, generator=random))


@lru_cache(maxsize=64)
def combined(
    case: Case, way: str, per_node: int | None = None
) -> list[reference.ReferenceCombined]:
    """What the oracle combines, one way of :data:`low_latency_cases.WAYS`."""
    options: dict[str, Any] = {"ranks_per_node": per_node}
    if way in ("bias", "two biases"):
        terms = [terms_of(case, rank, way) for rank in range(case.world_size)]
        options["bias"] = [term if len(term) > 1 else term[0] for term in terms]
    elif way != "plain":
        options["weighted"] = True
        if way == "weighted by the owner":
            options["topk_weights"] = [2 * weights for _, weights in case.picks]
    return reference.combine(case.expert_rows, case.expected, **options)


class RankRun:
    """One rank's side of a scenario. Calls of the engine run on tensors that belong to the rank;
    all else is the test's.
    """

    def __init__(self, ranks: SimulatedRank, scenario: Scenario, timeout: float = 5.0) -> None:
        self.ranks, self.rank, self.own = ranks, ranks.rank, OwnTensors(ranks)
        self.tree = scenario.tree
        self.between: Callable[[], object] = ranks.pause  # the two launches of a call
        self.config = scenario.config(ranks.rank, timeout)
        stats = Stats.zeros(ranks.rank, ranks.world_size)
        ranks.memory.ranks_per_node = scenario.per_node if scenario.network else 0
        with self.own:
            self.engine = LowLatencyEngine(
                self.config, ranks.memory, stats, scenario.tuning, scenario.buffer_bytes
            )

    def call(self, in_two: bool, method: Callable[..., Any], given: Any) -> Any:
        """Call the engine, in one launch or in two, then see that nothing went wrong on
        the device.
        """
        self.own.adopt(given)
        with self.own:
            result = method(given._replace(in_two=in_two))
            if in_two:
                self.between()
                result = result()
            self.engine.check()
        return result

    def round(self, each: Round) -> None:
        """All calls of a round, checked."""
        case = known(each.case)
        by_column = self.by_column(case)
        recv = self.dispatch(case, each.in_two, **({"scales_by_column": True} if by_column else {}))
        self.check(recv, case)
        if recv.scales is not None:
            scales = recv.scales.transpose(-1, -2) if by_column else recv.scales
            if scales.dtype == torch.float8_e8m0fnu:  # rows begin at whole words
                assert scales.stride(-1) == 1 and scales.stride(-2) % 4 == 0
            else:
                assert scales.is_contiguous()
        for way in each.ways:
            self.combine(recv, case, way, each.in_two)

    def by_column(self, case: Case) -> bool:
        """Whether this rank asks for scales by column: half of the ranks, where there may
        be some.
        """
        scaled = case.quantize is not None or case.dtype in QUANTIZED
        scaled = scaled and case.quantize is not ty.Quantize.MXFP8  # its scales are no words
        return scaled and case.layout is PADDED and (case.seed // 2 + self.rank) % 2 == 0

    def check(self, recv: ty.Received, case: Case) -> None:
        """Against the oracle, rows without a source too."""
        check_received(recv, case, self.rank)
        if case.layout is PADDED:
            empty = case.expected[self.rank].source < 0
            assert (recv.source[empty] == -1).all()
            assert recv.row_weights is None or not recv.row_weights[empty].any()

    def dispatch(self, case: Case, in_two: bool = False, **options: Any) -> ty.Received:
        idx, weights = case.picks[self.rank]
        idx = idx.int() if case.seed % 2 else idx
        payload, spec = payload_of(case, self.rank), spec_of(case)
        given = {"options": CallOptions(**options)} if options else {}
        rows, plan, arrived = self.call(
            in_two,
            self.engine.dispatch,
            DispatchArguments(
                payload, idx, weights if case.weighted else None, spec, case.quantize, **given
            ),
        )
        handle = Handle(
            owner=0,
            rank=self.rank,
            spec=spec,
            num_tokens=len(idx),
            num_rows=rows.x.shape[0],
            has_weights=case.weighted,
            num_ranks=case.world_size,
            index_dtype=idx.dtype,
            plan=plan,
            arrived=arrived,
        )
        shape = (
            (self.config.num_local_experts, self.config.padded_rows)
            if case.layout is PADDED
            else (handle.num_rows,)
        )
        recv = ty.Received(lambda: received_fields(rows.x, rows.scales, handle, shape))
        recv.wait()
        return recv

    def sums(
        self, recv: ty.Received, case: Case, way: str, in_two: bool = False, **options: Any
    ) -> Tensor:
        """What combine gives this rank."""
        rows = rows_to_combine(recv, case, self.rank).flatten(0, -2)
        given: dict[str, Any] = {"options": CallOptions(**options)} if options else {}
        if way in ("bias", "two biases"):
            given["bias"] = terms_of(case, self.rank, way)
        elif way == "weighted":
            given["weights"] = recv.handle.arrived.weights
        elif way == "weighted by the owner":
            given["weights"] = 2 * case.picks[self.rank][1]
        if case.seed % 2:
            given["out"] = torch.empty(len(case.picks[self.rank][0]), case.hidden, dtype=rows.dtype)
        plan, spec = recv.handle.plan, recv.handle.spec
        got, _ = self.call(in_two, self.engine.combine, CombineArguments(rows, plan, spec, **given))
        assert "out" not in given or got is given["out"]
        return got

    def combine(self, recv: ty.Received, case: Case, way: str, in_two: bool = False) -> None:
        """One combine, checked."""
        want = combined(case, way, self.tree)[self.rank]
        lost = torch.full((recv.handle.num_tokens,), float("nan"))
        told = (case.seed + self.rank) % 2 == 1
        got = self.sums(recv, case, way, in_two, **({"lost_weights": lost} if told else {}))
        check_combined(got, case, self.rank, want.x, way)
        if told:
            check_combined(lost, case, self.rank, want.lost_weights, "lost weights")


def reached(scenario: Scenario) -> AbstractContextManager[Any]:
    """Inside, objects of the scenario put to ranks of other nodes."""
    puts = "1" if scenario.per_node and not scenario.network else ""
    return mock.patch.dict(os.environ, {PUTS_VARIABLE: puts})


def run(scenario: Scenario, seed: int, **options: Any) -> None:
    """All rounds on all ranks, under the schedule of ``seed``."""

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        for each in scenario.rounds:
            mine.round(each)
        assert mine.engine.active_ranks() == [True] * scenario.world_size
        mine.engine.close()

    with poisoned(), reached(scenario):
        simulate(
            scenario.world_size,
            body,
            seed=seed,
            **{"max_steps": MOST_STEPS, "strict": True, **options},
        )


def check_seed(world_size: int, seed: int) -> None:
    """The scenario of ``seed`` passes."""
    run(draw(world_size, seed), seed)


def check_between_nodes(nodes: int, per_node: int, seed: int, once: bool = False) -> None:
    """The scenario of ``seed`` passes on a grid."""
    run(between_nodes(nodes, per_node, seed, once), seed)


def first_seed_that_finds(mutation: str, seeds: Sequence[int]) -> tuple[int, str]:
    """The first of ``seeds`` whose rehearsal fails with a bug planted, and how; -1 if all pass."""
    fits = False
    try:
        with planted(mutation):
            fits = True
            for seed in seeds:
                part = MUTATIONS[mutation].part
                run(rehearsal(seed, part), seed, max_steps=50_000, skew=SKEWS[seed % 2])
    except (SimulationError, AssertionError) as error:
        return seed if fits else -1, f"{type(error).__name__}: {error}"
    return -1, "not found"


def passes_unchanged(seed: int, part: str) -> None:
    """A rehearsal passes with copies of the kernels in which nothing was changed."""
    with planted(""):
        run(rehearsal(seed, part), seed, max_steps=50_000, skew=SKEWS[seed % 2])


def counts_and_waits(seed: int) -> None:
    """Counts of rows and waits are added up over calls; a call has a timeout of its own."""
    scenario = rehearsal(seed)

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        loads = torch.zeros(2, dtype=torch.int32 if seed % 2 else torch.int64)
        waits = torch.zeros(2, dtype=torch.int64)
        want = torch.zeros(2, dtype=torch.int64)
        mine.own.adopt(loads, waits)
        for each in scenario.rounds:
            case, before = known(each.case), waits.clone()
            recv = mine.dispatch(case, loads=loads, waits=waits, timeout=1.0)
            mine.check(recv, case)
            want += case.expected[mine.rank].tokens_per_expert
            assert torch.equal(loads.long(), want)
            assert (waits > before).all()
            before = waits.clone()
            check_combined(
                mine.sums(recv, case, "plain", waits=waits),
                case,
                mine.rank,
                combined(case, "plain")[mine.rank].x,
            )
            assert (waits > before).all()

    simulate(2, body, seed=seed, strict=True)


if __name__ == "__main__":
    print(draw(int(sys.argv[1]), int(sys.argv[2])))
    check_seed(int(sys.argv[1]), int(sys.argv[2]))
