"""Runs scenarios of ``nvlink_cases.py`` on simulated ranks, and checks every result bit for bit.

Kernels are interpreted here, so tests reach this module through ``nvlink_pool.py``. ``python
tests/run.py nvlink_ranks 4 17`` runs the scenario of 4 ranks and seed 17.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from cases import Case, check_combined, check_received, rows_to_combine
from nvlink_cases import (
    FLAT,
    IN_PLACE,
    PADDED,
    SKEWS,
    Round,
    Scenario,
    draw,
    draw_in_place,
    draw_pushed,
    payload_of,
    rehearsal,
    spec_of,
)
from nvlink_mutations import MUTATIONS, planted
from simulated_tensors import OwnTensors
from tokenyard import reference
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.engines.failures import FailureReports
from tokenyard.engines.plans import in_arrival_order, weights_of_rows
from tokenyard.engines.ring_engine import NvlinkEngine, TwolevelEngine
from tokenyard.engines.rings import meta_words, row_layout_of
from tokenyard.errors import PeerError
from tokenyard.handle import Arrived, Handle, Plan
from tokenyard.header import DISPATCH
from tokenyard.kernels.region import EPOCH
from tokenyard.results import received_fields
from tokenyard.routing import merge_weights
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.testing import assert_same_bits, poisoned
from tokenyard.testing.modules import BODY
from tokenyard.testing.one_process import run_in_simulator
from tokenyard.testing.simulator import SimulatedRank, SimulationError, simulate

MOST_STEPS = 400_000
"""A scenario takes some thousands."""


@lru_cache(maxsize=64)
def known(case: Case) -> Case:
    """The first of equal cases: the oracle is asked once for all ranks."""
    return case


@lru_cache(maxsize=64)
def combined(
    case: Case, way: str, ranks_per_node: int | None = None
) -> list[reference.ReferenceCombined]:
    """What the oracle combines, one way of :data:`nvlink_cases.WAYS` or
    :data:`nvlink_cases.IN_PLACE`.
    """
    expected: dict[str, Any] = {"ranks_per_node": ranks_per_node}
    if way.endswith(("bias", "biases")):
        terms = [terms_of(case, rank, way) for rank in range(case.world_size)]
        expected["bias"] = [term if len(term) > 1 else term[0] for term in terms]
    elif way == "reduce":
        expected["reduce_weights"] = reduced_of(case)
    elif way.startswith("weighted"):
        expected["weighted"] = True
        if way == "weighted by the owner":
            expected["topk_weights"] = [2 * weights for _, weights in case.picks]
    rows = [factor_of(way) * rows for rows in case.expert_rows]
    return reference.combine(rows, case.expected, **expected)


def factor_of(way: str) -> int:
    """Of the experts' rows."""
    return 2 if way.endswith("doubled") else 1


def terms_of(case: Case, rank: int, way: str) -> tuple[Tensor, ...]:
    """One bias in the dtype of the rows, or another one in float32 too."""
    random = torch.Generator().manual_seed(rank)
    shape = len(case.picks[rank][0]), case.hidden
    first = torch.randn(*shape, generator=random).to(case.expert_rows[rank].dtype)
    return (first,) if way == "bias" else (first, torch.randn(*shape, generator=random))


def reduced_of(case: Case) -> list[Tensor]:
    """Weights to reduce, of all ranks."""
    return [row.topk_weights + 0.5 for row in case.expected]


class RankRun:
    """One rank's side of a scenario. Calls of the engine run on tensors that belong to the rank;
    all else is the test's.
    """

    def __init__(self, ranks: SimulatedRank, scenario: Scenario, timeout: float = 5.0) -> None:
        self.rank, self.own = ranks.rank, OwnTensors(ranks)
        self.config, self.per_node = scenario.config(ranks.rank, timeout), scenario.ranks_per_node
        ranks.memory.ranks_per_node = (scenario.ranks_per_node or 0) if scenario.net else 0
        ranks.memory.maps_all = scenario.mapped
        stats, num_bytes = Stats.zeros(ranks.rank, ranks.world_size), scenario.buffer_bytes
        with self.own:
            failures = FailureReports(ranks.store, self.rank, timeout)
            make = NvlinkEngine if scenario.ranks_per_node is None else TwolevelEngine
            self.engine = make(
                self.config,
                ranks.memory,
                stats,
                scenario.tuning,
                num_bytes,
                failures,
                scenario.receive_bytes,
                scenario.heap_bytes,
            )
            self.engine._heap.least = 0

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the engine, then see that nothing went wrong on the device."""
        self.own.adopt(args, options)
        with self.own:
            result = method(*args, **options)
            self.engine.check()
        return result

    def round(self, each: Round) -> None:
        """All calls of a round, checked."""
        case = known(each.case)
        for refuser in each.refusers:
            self.refuse(case, refuser)
        recv = self.dispatch(case, each.in_place)
        check_received(recv, case, self.rank)
        self._guess_closely(recv)
        for way in each.ways:
            self.follow(recv, each, way)
        self._check_call_barriers()

    def _check_call_barriers(self) -> None:
        """The host knows how often this rank has entered a call: by it, messages name the call in
        which a kernel gave up.
        """
        assert self.engine._monitor._entered == int(self.engine._workspace.state[EPOCH.value])

    def dispatch(self, case: Case, in_place: bool = False) -> ty.Received:
        idx, weights = case.picks[self.rank]
        idx = idx.int() if (case.seed + self.rank) % 3 == 1 else idx
        payload, spec = payload_of(case, self.rank), spec_of(case)
        weights = weights if case.weighted else None
        found = self.call(
            self.engine.dispatch,
            DispatchArguments(payload, idx, weights, spec, case.quantize, in_place=in_place),
        )
        return self._received(case, idx.dtype, *found)

    def _guess_closely(self, recv: ty.Received) -> None:
        """Let the next call of this kind guess just as many rows as came: small batches would never
        exceed the usual guess.
        """
        for signature in self.engine._signatures.values():
            tokens, room = signature.room
            signature.room = (tokens, min(room, recv.x.shape[0]))

    def redispatch(self, case: Case, recv: ty.Received, in_place: bool = False) -> ty.Received:
        plan, arrived = recv.handle.plan, recv.handle.arrived
        payload, spec = payload_of(case, self.rank), spec_of(case)
        rows = self.call(
            self.engine.redispatch,
            CachedArguments(payload, plan, spec, mode=case.quantize, in_place=in_place),
        )
        return self._received(case, recv.handle.index_dtype, rows, plan, arrived)

    def _received(
        self, case: Case, index: torch.dtype, rows: Payload, plan: Plan, arrived: Arrived
    ) -> ty.Received:
        handle = Handle(
            owner=0,
            rank=self.rank,
            spec=spec_of(case),
            num_tokens=len(case.picks[self.rank][0]),
            num_rows=rows.x.shape[0],
            has_weights=case.weighted,
            num_ranks=case.world_size,
            index_dtype=index,
            plan=plan,
            arrived=arrived,
        )
        config = self.config
        shape = (
            (config.num_local_experts, config.padded_rows)
            if case.layout is PADDED
            else (handle.num_rows,)
        )
        recv = ty.Received(lambda: received_fields(rows.x, rows.scales, handle, shape))
        recv.wait()
        return recv

    def combine(
        self, rows: Tensor, recv: ty.Received, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        return self.call(
            self.engine.combine,
            CombineArguments(rows, recv.handle.plan, recv.handle.spec, **options),
        )

    def refuse(self, case: Case, refuser: int) -> None:
        """One rank refuses an exact dispatch: everybody learns it, and the object goes on."""
        if self.rank == refuser:
            assert self.call(self.engine.refuse, DISPATCH, True, "x is wrong")
            return
        plain = replace(case, layout=FLAT, exact=True, expert_alignment=1, capacity=None)
        with pytest.raises(
            PeerError, match=f"rank {refuser} refused its side of this call: x is wrong"
        ):
            self.dispatch(known(plain))

    def follow(self, recv: ty.Received, each: Round, way: str) -> None:
        """One call along the routing of ``recv``."""
        case, rank = known(each.case), self.rank
        if way == "cached":
            again = self.redispatch(known(each.cached), recv, each.in_place)
            check_received(again, known(each.cached), rank)
            unused = (again.source < 0).flatten()
            assert each.in_place or not again.x.flatten(0, -2)[unused].float().any(), (
                "rows without a source are zeros"
            )
        elif way == "raw":
            self._raw(recv, case)
        else:
            self._combine(recv, case, way)

    def _combine(self, recv: ty.Received, case: Case, way: str) -> None:
        want, rows = (
            combined(case, way, self.per_node)[self.rank],
            factor_of(way) * rows_to_combine(recv, case, self.rank).flatten(0, -2),
        )
        given: dict[str, Any] = {"out": torch.empty_like(want.x) if case.seed % 2 else None}
        if way.endswith(("bias", "biases")):
            given["bias"] = terms_of(case, self.rank, way)
        elif way == "reduce":
            mine = torch.full(recv.topk_weights.shape, float("nan"))
            reduced = reduced_of(case)[self.rank]
            mine[: len(reduced)] = reduced
            given["reduce_weights"] = in_arrival_order(mine, recv.handle.plan, recv.handle.spec)
        elif way == "weighted":
            given["weights"] = recv.handle.arrived.weights
        elif way == "weighted by the owner":
            given["weights"] = self._weights_of_rows(2 * case.picks[self.rank][1], recv)
        if in_place := way in IN_PLACE:
            rows, given["in_place"] = self._rows_in_place(recv, case, rows), True
        got, weights = self.combine(rows, recv, **given)
        if in_place:
            rows.fill_(float("nan"))  # nobody reads them any more
        assert given["out"] is None or got is given["out"]
        check_combined(got, case, self.rank, want.x, way)
        assert (weights is None) == (want.topk_weights is None)
        if weights is not None:
            check_combined(weights, case, self.rank, want.topk_weights, "reduced weights")

    def _rows_in_place(self, recv: ty.Received, case: Case, rows: Tensor) -> Tensor:
        """``rows`` elsewhere, in the in-place buffer of the dispatch (if it is one), or where the
        engine says: by seed and rank.
        """
        if case.seed % 3 == 2 and recv.x.dtype == rows.dtype:
            return recv.x.copy_(rows)
        if case.seed % 3 == 1 and case.seed % 2:  # the call itself makes room
            return rows
        with self.own:  # collective
            there = self.engine.rows_in_place(len(rows), rows.shape[1], rows.dtype)
        return rows if case.seed % 3 == 1 and self.rank % 2 else there.copy_(rows)

    def _weights_of_rows(self, weights: Tensor, recv: ty.Received) -> Tensor:
        """Weights given at the owner, brought to the rows."""
        plan = recv.handle.plan
        merged = Payload(merge_weights(weights, plan.first_pick), None)
        there = self.call(
            self.engine.redispatch, CachedArguments(merged, plan, recv.handle.spec, raw=True)
        )
        return weights_of_rows(there.x, plan.slots, plan.picks, recv.handle.num_rows)

    def _raw(self, recv: ty.Received, case: Case) -> None:
        """Rows in arrival order, as gradients travel: there, and back."""
        plan, spec = recv.handle.plan, spec_of(case)
        plain = replace(case, layout=FLAT, expert_alignment=1, capacity=None, quantize=None)
        flat = known(plain)
        want, rows = flat.expected[self.rank].x, flat.expert_rows[self.rank]
        there = self.call(
            self.engine.redispatch,
            CachedArguments(payload_of(case, self.rank), plan, spec, raw=True),
        ).x
        assert_same_bits(there[: len(want)], want, what="raw rows", rank=self.rank)
        assert not there[len(want) :].float().any(), "rows without a source are zeros"
        back = torch.full((there.shape[0], case.hidden), float("nan"), dtype=rows.dtype)
        back[: len(rows)] = rows
        got, _ = self.call(self.engine.combine, CombineArguments(back, plan, spec, raw=True))
        check_combined(
            got, case, self.rank, combined(flat, "plain", self.per_node)[self.rank].x, "raw"
        )


def run(scenario: Scenario, seed: int, **options: Any) -> None:
    """All rounds on all ranks, under the schedule of ``seed``."""

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        for each in scenario.rounds:
            mine.round(each)
        mine.engine.close()

    with poisoned():
        simulate(
            scenario.world_size,
            body,
            seed=seed,
            **{"max_steps": MOST_STEPS, "strict": True, **options},
        )


def check_seed(world_size: int, seed: int) -> None:
    """The scenario of ``seed`` passes."""
    run(draw(world_size, seed), seed)


def check_pushed(world_size: int, seed: int) -> None:
    """The scenario of ``seed`` passes with a receive buffer."""
    run(draw_pushed(world_size, seed), seed)


def check_in_place(world_size: int, seed: int) -> None:
    """The scenario of ``seed`` passes with sums in place."""
    run(draw_in_place(world_size, seed), seed)


def first_seed_that_finds(mutation: str, seeds: Sequence[int]) -> tuple[int, str]:
    """The first of ``seeds`` whose rehearsal fails with a bug planted (see
    ``nvlink_mutations.py``), and how; -1 if all pass.
    """
    part, fits = MUTATIONS[mutation].part, False
    try:
        with planted(mutation):
            fits = True
            for seed in seeds:
                run(rehearsal(part, seed), seed, max_steps=50_000, skew=SKEWS[part])
    except (SimulationError, AssertionError) as error:
        return seed if fits else -1, f"{type(error).__name__}: {error}"
    return -1, "not found"


def passes_unchanged(part: str, seed: int) -> None:
    """A rehearsal passes with copies of the kernels in which nothing was changed."""
    with planted(""):
        run(rehearsal(part, seed), seed, max_steps=50_000, skew=SKEWS[part])


def check_lines(seed: int) -> None:
    """Rows whose slots are longer than they pass."""
    run(rehearsal("lines", seed), seed, skew=SKEWS["lines"])


def rows_and_slots(part: str, seed: int) -> tuple[int, int]:
    """The most rows that one ring must take in the first call of a rehearsal, and its slots."""
    scenario = rehearsal(part, seed)
    case = scenario.rounds[0].case
    slots: list[int] = []

    def body(ranks: SimulatedRank) -> None:
        engine = RankRun(ranks, scenario).engine
        row_layout = row_layout_of(
            payload_of(case, 0), None, meta_words(case.num_topk, experts=False, weighted=True)
        )
        slots.append(engine._workspace.slots(row_layout))

    simulate(scenario.world_size, body, seed=seed)
    first = case.num_experts // 2  # of rank 1
    rows = (case.picks[0][0] >= first).any(1)
    share = -(-rows.numel() // scenario.channels)
    return max(int(part.sum()) for part in rows.split(share)), slots[0]


def shared_body(
    module: str, name: str, arguments: dict[str, Any], world_size: int, seed: int
) -> None:
    """A test body of ``module``, which GPUs or other engines run too."""
    run_in_simulator(
        getattr(getattr(import_module(module), name), BODY), "nvlink", arguments, world_size, seed
    )


if __name__ == "__main__":
    print(draw(int(sys.argv[1]), int(sys.argv[2])))
    check_seed(int(sys.argv[1]), int(sys.argv[2]))
