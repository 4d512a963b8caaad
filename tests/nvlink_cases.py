"""Scenarios for the nvlink engine on simulated ranks: a few calls of one object each, drawn from a seed and checked bit for bit.

Kernels are interpreted here, so tests reach this module through ``nvlink_pool.py``. ``python tests/nvlink_cases.py 4 17`` runs
the scenario of 4 ranks and seed 17.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

import tokenyard as ty
from cases import PLAIN, QUANTIZED, Case, check_combined, check_received, rows_to_combine
from nvlink_plants import PLANTS, planted
from simulated_tensors import OwnTensors
from tokenyard import reference
from tokenyard.calls import in_arrival_order
from tokenyard.config import Config
from tokenyard.engines.arrival import weights_of_rows
from tokenyard.engines.nvlink import NvlinkEngine
from tokenyard.engines.rings import Cut, Shape, form_of, meta_words
from tokenyard.errors import PeerError
from tokenyard.handle import Arrived, Handle, Plan, Spec
from tokenyard.header import DISPATCH
from tokenyard.layout import merge_weights
from tokenyard.results import received_fields
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.testing import ROUTINGS, poisoned
from tokenyard.testing.simulator import SimulatedRank, SimulationError, simulate

MOST_STEPS = 400_000
"""A scenario takes some thousands."""

FLAT, MAJOR, PADDED = ty.Layout
WAYS = {
    FLAT: ("plain", "bias", "two biases", "reduce", "cached", "raw"),
    MAJOR: ("plain", "bias", "weighted", "weighted by the owner", "cached", "raw"),
    PADDED: ("plain", "two biases", "weighted", "weighted by the owner", "cached", "raw"),
}
"""What may follow a dispatch."""


@dataclass(frozen=True)
class Round:
    """One dispatch and what follows; before it, the ranks ``refusers`` refuse one call each."""

    case: Case
    ways: tuple[str, ...]
    cached: Case  # the same picks, another payload
    in_place: bool = False
    refusers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """Calls of one object. ``slots``: rows of the largest form that a ring holds at least, besides those it needs."""

    world_size: int
    num_experts: int
    num_topk: int
    max_tokens: int
    channels: int
    chunk: int
    rows: int
    slots: int
    rounds: tuple[Round, ...]

    @property
    def shape(self) -> Shape:
        whole = Cut(rows=self.rows, block=1024, chunk=self.chunk)
        part = Cut(rows=self.rows, block=32, chunk=self.chunk)  # a row takes several of its blocks
        return Shape(
            channels=self.channels, dispatch=whole, send=whole, reduce=part, direct=part, writers=self.channels
        )

    @property
    def buffer_bytes(self) -> int:
        """Rings that hold few rows of the largest form and wrap around again and again."""
        slot = max(largest_slot(case, self.num_topk) for each in self.rounds for case in (each.case, each.cached))
        ring = (2 * self.chunk + self.slots) * slot
        return self.world_size * self.channels * (-(-ring // 256) * 256)

    def config(self, rank: int, timeout: float = 5.0) -> Config:
        return Config(
            num_experts=self.num_experts,
            hidden=8,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens,
            rank=rank,
            world_size=self.world_size,
            timeout=timeout,
        )


def payload_of(case: Case, rank: int) -> Payload:
    """What ``rank`` brings."""
    x = case.x[rank]
    return Payload(x.data, x.scales) if isinstance(x, ty.Quantized) else Payload(x, None)


def spec_of(case: Case) -> Spec:
    return Spec(layout=case.layout, exact=case.exact, expert_alignment=case.expert_alignment)


def largest_slot(case: Case, num_topk: int) -> int:
    """Bytes of the largest row that any call of a round moves."""
    there = form_of(payload_of(case, 0), case.quantize, meta_words(num_topk, experts=True, weighted=True))
    back = form_of(
        Payload(torch.empty(0, case.hidden, dtype=case.expert_rows[0].dtype), None), None, -(-num_topk // 4) * 4
    )
    return max(there.slot_bytes, back.slot_bytes)


# Drawing


def draw(world_size: int, seed: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(seed)
    few = world_size > 4
    experts = random.choice((world_size, world_size + 1, 2 * world_size, 2 * world_size + 1, 1 if few else 3))
    scenario = Scenario(
        world_size=world_size,
        num_experts=experts,
        num_topk=random.choice((1, 2, 3, 4)),
        max_tokens=random.choice((3, 4) if few else (4, 6, 9)),
        channels=1 if few else random.choice({2: (1, 2, 2, 3), 3: (1, 2), 4: (1, 1, 2)}[world_size]),
        chunk=random.choice((1, 1, 2)),
        rows=random.choice((1, 1, 2)),
        slots=random.choice((0, 0, 1, 3)),
        rounds=(),
    )
    number = 1 if few else random.choice((1, 2))
    return replace(scenario, rounds=tuple(_draw_round(scenario, random, seed, few) for _ in range(number)))


def _draw_round(scenario: Scenario, random: Random, seed: int, few: bool) -> Round:
    layout, exact = random.choice(tuple(ty.Layout)), random.random() < 0.6
    bounded = not exact or layout is PADDED
    case = Case(
        scenario.world_size,
        routing=random.choice(ROUTINGS),
        num_tokens=scenario.max_tokens if bounded else random.choice((1, 3, scenario.max_tokens)),
        num_topk=scenario.num_topk,
        num_experts=scenario.num_experts,
        layout=layout,
        exact=exact,
        expert_alignment=random.choice((1, 1, 2, 4)) if layout is MAJOR else 1,
        seed=seed,
        **_draw_payload(random),
    )
    cached = replace(case, **_draw_payload(random, other_than=case.hidden))
    ways = tuple(random.sample(WAYS[layout], 1 if few else random.choice((1, 1, 1, 2))))
    in_place = layout is FLAT and random.random() < 0.4
    return Round(case, ways, cached, in_place, (random.randrange(scenario.world_size),) if random.random() < 0.1 else ())


def _draw_payload(random: Random, other_than: int = 0) -> dict[str, Any]:
    mode = random.choice((None, None, None, *ty.Quantize))
    if mode is not None:
        hidden = random.choice([hidden for hidden in (8, 24, 24, 132) if hidden != other_than])
        return {"dtype": random.choice(PLAIN), "hidden": hidden, "quantize": mode}
    hidden = random.choice([hidden for hidden in (8, 16, 17, 24, 40) if hidden != other_than])
    return {"dtype": random.choice((*PLAIN, *QUANTIZED)), "hidden": hidden, "quantize": None}


def rehearsal(part: str, seed: int) -> Scenario:
    """Two ranks whose calls follow each other closely, with rows of other sizes each time.

    ``rings``: fresh, cached and back, again and again, through rings of two or four slots. ``views``: fresh and cached into views.
    ``greetings``: calls of one token. ``plans``: refusals, so that plan follows plan.
    """
    random = Random(seed)
    base = Case(2, num_tokens=9, num_topk=2, num_experts=4, hidden=40, seed=seed)
    tiny = replace(base, num_tokens=1, hidden=8)
    cached = replace(base, hidden=24, dtype=torch.float32)
    back_and_forth = ("cached", "plain", "cached", "plain")
    rounds = {
        "rings": (Round(base, back_and_forth, cached),),
        "views": (Round(base, ("cached", "plain"), cached, in_place=True), Round(base, (), cached, in_place=True)),
        "greetings": (Round(tiny, back_and_forth, replace(tiny, hidden=16)),),
        "plans": (Round(tiny, (), tiny, refusers=(0, 0, 0)), Round(tiny, (), tiny, refusers=(1, 1, 1))),
    }
    return Scenario(
        world_size=2,
        num_experts=4,
        num_topk=2,
        max_tokens=9,
        channels=2,
        chunk=random.choice((1, 2)),
        rows=1,
        slots=0,
        rounds=rounds[part],
    )


SKEWS = {"rings": "program", "views": "rank", "greetings": "program", "plans": "rank"}
"""Which hardware shows most in a rehearsal."""


# Running


class RankRun:
    """One rank's side of a scenario."""

    def __init__(self, ranks: SimulatedRank, scenario: Scenario, timeout: float = 5.0) -> None:
        self.rank, self.memory = ranks.rank, ranks.memory
        self.config = scenario.config(ranks.rank, timeout)
        stats = Stats.zeros(ranks.rank, ranks.world_size)
        self.engine = NvlinkEngine(self.config, ranks.memory, stats, scenario.shape, scenario.buffer_bytes)

    def round(self, each: Round) -> None:
        """All calls of a round, checked."""
        for refuser in each.refusers:
            self.refuse(each.case, refuser)
        recv = self.dispatch(each.case, each.in_place)
        check_received(recv, each.case, self.rank)
        for way in each.ways:
            self.follow(recv, each, way)

    def dispatch(self, case: Case, in_place: bool = False) -> ty.Received:
        idx, weights = case.picks[self.rank]
        payload, spec = payload_of(case, self.rank), spec_of(case)
        rows, plan, arrived = self.engine.dispatch(payload, idx, weights, spec, case.quantize, in_place=in_place)
        self.engine.check()
        return self._received(case, rows, plan, arrived)

    def redispatch(self, case: Case, recv: ty.Received, in_place: bool = False) -> ty.Received:
        plan, arrived = recv.handle.plan, recv.handle.arrived
        payload = payload_of(case, self.rank)
        rows = self.engine.redispatch(payload, plan, spec_of(case), mode=case.quantize, in_place=in_place)
        self.engine.check()
        return self._received(case, rows, plan, arrived)

    def _received(self, case: Case, rows: Payload, plan: Plan, arrived: Arrived) -> ty.Received:
        handle = Handle(
            owner=0,
            spec=spec_of(case),
            num_tokens=len(case.picks[self.rank][0]),
            num_rows=rows.x.shape[0],
            has_weights=True,
            index_dtype=torch.int64,
            plan=plan,
            arrived=arrived,
        )
        config = self.config
        shape = (config.num_local_experts, config.padded_rows) if case.layout is PADDED else (handle.num_rows,)
        recv = ty.Received(lambda: received_fields(rows.x, rows.scales, handle, shape))
        recv.wait()
        return recv

    def combine(self, rows: Tensor, recv: ty.Received, **options: Any) -> tuple[Tensor, Tensor | None]:
        combined = self.engine.combine(rows, recv.handle.plan, recv.handle.spec, **options)
        self.engine.check()
        return combined

    def refuse(self, case: Case, refuser: int) -> None:
        """One rank refuses an exact dispatch: everybody learns it, and the object goes on."""
        if self.rank == refuser:
            assert self.engine.refuse(DISPATCH, True, "x is wrong")
            return
        try:
            self.dispatch(replace(case, layout=FLAT, exact=True, expert_alignment=1))
        except PeerError as error:
            assert f"rank {refuser} refused its side of this call: x is wrong" in str(error)
        else:
            raise AssertionError(f"rank {refuser} refused, but the call went on")

    def follow(self, recv: ty.Received, each: Round, way: str) -> None:
        """One call along the routing of ``recv``."""
        case, rank = each.case, self.rank
        if way == "cached":
            again = self.redispatch(each.cached, recv, each.in_place)
            check_received(again, each.cached, rank)
            unused = (again.source < 0).flatten()
            assert each.in_place or not again.x.flatten(0, -2)[unused].float().any(), "rows without a source are zeros"
        elif way == "raw":
            self._raw(recv, case)
        elif way == "reduce":
            self._reduce(recv, case)
        else:
            self._combine(recv, case, way)

    def _combine(self, recv: ty.Received, case: Case, way: str) -> None:
        rows, own = rows_to_combine(recv, case, self.rank).flatten(0, -2), [weights for _, weights in case.picks]
        given: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        if way in ("bias", "two biases"):
            terms = [_terms(case, r, rows.dtype)[: 1 + (way == "two biases")] for r in range(case.world_size)]
            given["bias"], expected["bias"] = terms[self.rank], [term if len(term) > 1 else term[0] for term in terms]
        elif way == "weighted":
            given["weights"], expected["weighted"] = recv.handle.arrived.weights, True
        elif way == "weighted by the owner":
            doubled = [2 * weights for weights in own]
            given["weights"] = self._weights_of_rows(doubled[self.rank], recv)
            expected |= {"weighted": True, "topk_weights": doubled}
        want = reference.combine(case.expert_rows, case.expected, **expected)[self.rank]
        out = torch.empty_like(want.x) if case.seed % 2 else None
        got, _ = self.combine(rows, recv, out=out, **given)
        assert out is None or got is out
        check_combined(got, case, self.rank, want.x, way)

    def _weights_of_rows(self, weights: Tensor, recv: ty.Received) -> Tensor:
        """Weights given at the owner, brought to the rows."""
        plan = recv.handle.plan
        merged = Payload(merge_weights(weights, plan.first_pick), None)
        there = self.engine.redispatch(merged, plan, recv.handle.spec, raw=True)
        return weights_of_rows(there.x, plan.slots, plan.picks, recv.handle.num_rows)

    def _reduce(self, recv: ty.Received, case: Case) -> None:
        reduce = [row.topk_weights + 0.5 for row in case.expected]
        want = reference.combine(case.expert_rows, case.expected, reduce_weights=reduce)[self.rank]
        mine = torch.full(recv.topk_weights.shape, float("nan"))
        mine[: len(reduce[self.rank])] = reduce[self.rank]
        rows = rows_to_combine(recv, case, self.rank)
        got = self.combine(rows, recv, reduce_weights=in_arrival_order(mine, recv.handle))
        check_combined(got[0], case, self.rank, want.x, "beside reduced weights")
        check_combined(got[1], case, self.rank, want.topk_weights, "reduced weights")

    def _raw(self, recv: ty.Received, case: Case) -> None:
        """Rows in arrival order, as gradients travel: there, and back."""
        plan, spec = recv.handle.plan, spec_of(case)
        flat = replace(case, layout=FLAT, expert_alignment=1, quantize=None)
        want = flat.expected[self.rank]
        num = want.x.shape[0]
        there = self.engine.redispatch(payload_of(case, self.rank), plan, spec, raw=True)
        check_combined_rows(there.x[:num], want.x, self.rank)
        assert not there.x[num:].float().any(), "rows without a source are zeros"
        rows = torch.full((there.x.shape[0], case.hidden), float("nan"), dtype=flat.expert_rows[self.rank].dtype)
        rows[:num] = flat.expert_rows[self.rank]
        back, _ = self.engine.combine(rows, plan, spec, raw=True)
        self.engine.check()
        check_combined(back, case, self.rank, reference.combine(flat.expert_rows, flat.expected)[self.rank].x, "raw")


def check_combined_rows(got: Tensor, want: Tensor, rank: int) -> None:
    ty.testing.assert_same_bits(got, want, what="raw rows", rank=rank)


def _terms(case: Case, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    shape = case.tokens_of(rank) if case.routing != "empty_ranks" or rank % 2 == 0 else 0, case.hidden
    return torch.randn(*shape, generator=random).to(dtype), torch.randn(*shape, generator=random)


def run(scenario: Scenario, seed: int, **options: Any) -> None:
    """All rounds on all ranks, under the schedule of ``seed``."""
    inputs = [tensor for each in scenario.rounds for tensor in inputs_of(each.case) + inputs_of(each.cached)]

    def body(ranks: SimulatedRank) -> None:
        with OwnTensors(ranks, inputs):
            mine = RankRun(ranks, scenario)
            for each in scenario.rounds:
                mine.round(each)
            mine.engine.close()

    with poisoned():
        simulate(scenario.world_size, body, seed=seed, **{"max_steps": MOST_STEPS, "strict": True, **options})


def inputs_of(case: Case) -> list[Tensor]:
    """What all ranks bring; also makes all that the oracle knows of the case."""
    assert len(case.expected) == len(case.expert_rows)
    picks = [tensor for pair in case.picks for tensor in pair]
    return picks + [x for rank in range(case.world_size) for x in payload_of(case, rank) if x is not None]


def check_seed(world_size: int, seed: int) -> None:
    """The scenario of ``seed`` passes."""
    run(draw(world_size, seed), seed)


def first_seed_that_finds(plant: str, seeds: Sequence[int]) -> tuple[int, str]:
    """The first of ``seeds`` whose rehearsal fails with a bug planted (see ``nvlink_plants.py``), and how; -1 if all pass."""
    with planted(plant):
        for seed in seeds:
            try:
                part = PLANTS[plant].part
                run(rehearsal(part, seed), seed, max_steps=50_000, skew=SKEWS[part])
            except (SimulationError, AssertionError) as error:
                return seed, f"{type(error).__name__}: {error}"
    return -1, "not found"


if __name__ == "__main__":
    print(draw(int(sys.argv[1]), int(sys.argv[2])))
    check_seed(int(sys.argv[1]), int(sys.argv[2]))
