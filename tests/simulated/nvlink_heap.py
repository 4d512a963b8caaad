"""Results in a heap on simulated ranks: calls of one kind that follow each other, whose results
live on for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from torch import Tensor

import tokenyard as ty
from cases import Case, check_received
from nvlink_cases import FLAT, Round, Scenario, draw, payload_of, rehearsal
from nvlink_ranks import MOST_STEPS, RankRun, known
from tokenyard.engines.base import CachedArguments
from tokenyard.engines.signatures import Signature
from tokenyard.errors import Mismatch, PeerError
from tokenyard.kernels.sync import IN_HEAPS
from tokenyard.kernels.two_dispatch import two_dispatch_kernel
from tokenyard.rows import Payload
from tokenyard.testing import ROUTINGS, poisoned
from tokenyard.testing.simulator import SimulatedRank, simulate

CALLS = 6


@dataclass(frozen=True)
class HeapRun:
    """Rounds of one signature, and how long results are kept.

    ``keep``: results that a rank holds beside the newest one; ``hoarder``: a rank that holds all of
    them, so that it has no block in the end; -1: none.
    """

    scenario: Scenario
    keep: int
    hoarder: int


def draw_heap(world_size: int, seed: int) -> HeapRun:
    """The run of a seed."""
    random, scenario = Random(seed), draw(world_size, seed)
    first = scenario.rounds[0]
    base = replace(first.case, layout=FLAT, exact=True, expert_alignment=1, capacity=None)
    same = random.choice((base.routing, "uniform", "duplicates"))
    mixed = [random.choice(ROUTINGS) for _ in range(CALLS)]
    routings = random.choice(([same] * CALLS, [same] * CALLS, mixed))
    ways = ("plain", "cached", "cached", "bias", "raw")
    cases = [replace(base, routing=name, seed=seed + at) for at, name in enumerate(routings)]
    rounds = tuple(
        Round(
            case,
            tuple(random.choices(ways, k=random.randrange(4))),
            replace(first.cached if at % 2 else base, layout=FLAT, exact=True, expert_alignment=1,
                    capacity=None, seed=case.seed, routing=case.routing),
            refusers=(random.randrange(world_size),) if random.random() < 0.1 else (),
        )
        for at, case in enumerate(cases)
    )  # fmt: skip
    rows = world_size * scenario.max_tokens
    block = sum(256 + rows * each for each in (4 * base.hidden, 64, 96))
    heap = block // 512 * 512 * random.choice((1, 2, 3 * CALLS))
    return HeapRun(
        replace(scenario, rounds=rounds, heap_bytes=heap, receive_bytes=1 << 20),
        random.choice((0, 1, 2)),
        random.randrange(world_size) if random.random() < 0.3 else -1,
    )


class Cached:
    """Counts cached dispatches of ``engine`` that are launched to heaps: ``found`` are those whose
    rows moved there, and those that rings took."""

    def __init__(self, engine: Any) -> None:
        self.found, self._state, self._launched = [0, 0], engine._workspace.state, False
        rewrite = engine._heap.rewrite

        def watched(*given: Any) -> Any:
            self._launched = True
            return rewrite(*given)

        engine._heap.rewrite = watched

    def count(self) -> None:
        """One such call may be over, whose result is known."""
        if self._launched:
            self.found[not self._state[IN_HEAPS.value]] += 1
        self._launched = False


def run_heap(heap: HeapRun, seed: int) -> list[tuple[int, ...]]:
    """All rounds on all ranks, by rank: how many fresh results were in the heap, and through rings;
    and how many cached ones that were launched to heaps."""
    scenario = heap.scenario
    counted = [(0, 0, 0, 0)] * scenario.world_size

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        cached, kept = Cached(mine.engine), list[tuple[Case, ty.Received]]()
        for each in scenario.rounds:
            case: Case = known(each.case)
            for refuser in each.refusers:
                mine.refuse(case, refuser)
            recv = mine.dispatch(case)
            if seed % 3 == 0:
                mine._guess_closely(recv)
            kept.append((case, recv))
            if ranks.rank != heap.hoarder:
                del kept[: -1 - heap.keep]
            for way in each.ways:
                if way == "cached":
                    again = known(each.cached)
                    kept.append((again, mine.redispatch(again, recv)))
                    check_received(kept[-1][1], again, ranks.rank)
                    cached.count()
                else:
                    mine.follow(recv, each, way)
            del recv
            for then, result in kept:  # nobody has written to it
                check_received(result, then, ranks.rank)
        stats = mine.engine.stats
        counted[ranks.rank] = stats.in_heap, stats.through_rings, *cached.found
        mine.engine.close()
        for then, result in kept:
            check_received(result, then, ranks.rank)

    with poisoned():
        simulate(scenario.world_size, body, seed=seed, max_steps=MOST_STEPS, strict=True)
    return counted


def check_heap(world_size: int, seed: int) -> tuple[int, ...]:
    """The run of ``seed`` passes, and all ranks count alike: as :func:`run_heap` returns them."""
    counted = run_heap(draw_heap(world_size, seed), seed)
    assert len(set(counted)) == 1, counted
    return counted[0]


def check_lie(seed: int, further: int | None, part: str = "heap") -> list[str]:
    """What ranks raise if rank 1 says that its block is so many units of 256 bytes ``further`` on,
    or (None) that its rows begin where its heap does. ``part``: of calls that tell it in the plan,
    or ("told") in their announcements.
    """
    scenario, said = rehearsal(part, seed), [""] * 2

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        heap = mine.engine._heap
        honest, target = heap.place, heap._target

        def lie(block: Tensor | None, signature: Signature) -> int:
            place = honest(block, signature)
            return place if place <= 0 else 1 if further is None else place + further

        def lie_again(signature: Signature, **given: int) -> Any:
            there, told = target(signature, **given), "awaited" in given
            return there._replace(awaited=there.awaited + (further or 0) * told)

        if ranks.rank == 1 and part == "told":
            heap._target = lie_again
        elif ranks.rank == 1:
            heap.place = lie
        try:
            for each in scenario.rounds:
                mine.round(each)
        except PeerError as error:
            said[ranks.rank] = str(error)
        mine.engine.close()

    simulate(2, body, seed=seed, max_steps=MOST_STEPS, strict=True)
    return said


def check_short_of_memory(seed: int) -> None:
    """Rank 1 cannot make its cached dispatch, which all launch to heaps, and makes it again: it had
    launched nothing, else peers took the second for another."""
    scenario = rehearsal("told", seed)

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        case, again = known(scenario.rounds[0].case), known(scenario.rounds[0].cached)
        recv = mine.dispatch(case)
        for _ in scenario.rounds[1:]:
            mine._guess_closely(recv)
            recv = mine.dispatch(case)
        cached, memory = Cached(mine.engine), mine.engine._memory
        bind: Any = memory.bind

        def fails_once(kernel: Any, *given: Any, **options: Any) -> Any:
            if kernel is two_dispatch_kernel:
                memory.bind = bind
                raise RuntimeError("out of memory")
            return bind(kernel, *given, **options)

        if ranks.rank == 1:
            memory.bind = fails_once
            with pytest.raises(RuntimeError, match="out of memory"):
                mine.redispatch(again, recv)
        check_received(mine.redispatch(again, recv), again, ranks.rank)
        cached.count()
        assert cached.found == [1, 0]
        mine.engine.close()

    with poisoned():
        simulate(2, body, seed=seed, max_steps=MOST_STEPS, strict=True)


def check_two_handles(seed: int) -> list[str]:
    """What ranks raise if rank 1 takes a handle of the same routing whose rows went through rings;
    nobody has written to a result of before."""
    scenario, said = rehearsal("told", seed), [""] * 2

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        case, again = known(scenario.rounds[0].case), known(scenario.rounds[0].cached)
        first = recv = mine.dispatch(case)
        for _ in scenario.rounds[1:]:
            mine._guess_closely(recv)
            recv = mine.dispatch(case)
        kept, plan, spec = mine.redispatch(again, recv), recv.handle.plan, recv.handle.spec
        twice = Payload(2 * payload_of(again, ranks.rank).x, None)
        plan = first.handle.plan if ranks.rank else plan
        with pytest.raises(Mismatch) as raised:
            mine.call(mine.engine.redispatch, CachedArguments(twice, plan, spec))
        said[ranks.rank] = str(raised.value)
        mine.engine.close()
        check_received(kept, again, ranks.rank)

    with poisoned():
        simulate(2, body, seed=seed, max_steps=MOST_STEPS, strict=True)
    return said
