"""Failures of engine nvlink on simulated ranks: deaths at any step, ranks in different calls,
refusals, lies.

Reached through ``nvlink_pool.py``, as kernels are interpreted here. Every function returns how each
rank ended, by rank: the exception's type and text, or "" and "" if all its calls were fine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import torch

from cases import Case
from nvlink_cases import (
    FAILED_RANK,
    FINE,
    FLAT,
    MAJOR,
    TIMEOUT,
    Ending,
    Round,
    Scenario,
    payload_of,
    spec_of,
)
from nvlink_mutations import planted
from nvlink_pool import little_patience
from nvlink_ranks import MOST_STEPS, RankRun
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.errors import PeerTimeout
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.kernels.sync import TIMEOUT_NS
from tokenyard.testing import poisoned
from tokenyard.testing.simulator import SimulatedRank, simulate
from tokenyard.types import Quantize

Body = Callable[[RankRun], None]


def play(
    scenario: Scenario, body: Body, seed: int, **options: Any
) -> tuple[list[Ending | None], int]:
    """Run ``body`` on every rank and close. How each ended (None: it died), and the steps that it
    took.
    """
    steps: list[int] = []

    def guarded(ranks: SimulatedRank) -> Ending:
        try:
            mine = RankRun(ranks, scenario, TIMEOUT)
        except PeerTimeout as error:
            return _ending(error)
        try:
            body(mine)
            return FINE
        except AssertionError:
            raise
        except Exception as error:
            return _ending(error)
        finally:
            mine.engine.close()
            steps.append(ranks.sim.steps)

    with poisoned(), little_patience():
        options = {"max_steps": MOST_STEPS, "strict": True, "timeouts": True, **options}
        return simulate(scenario.world_size, guarded, seed=seed, **options), max(steps, default=0)


def _ending(error: Exception) -> Ending:
    return type(error).__name__, str(error), getattr(error, "rank", -1)


# A rank dies


def life(world_size: int, part: int) -> Scenario:
    """Calls of every sort, in two parts."""
    flat = Case(world_size, num_tokens=4, num_topk=2, num_experts=2 * world_size, hidden=8)
    major = replace(flat, layout=MAJOR, exact=False, hidden=16)
    cached = replace(flat, dtype=torch.float32)
    rounds = [
        (Round(flat, ("cached", "plain"), cached), Round(replace(flat, seed=1), (), cached)),
        (
            Round(major, ("weighted",), replace(major, hidden=8)),
            Round(flat, ("in place",), cached, in_place=True),
        ),
    ]
    return Scenario(
        world_size=world_size,
        num_experts=flat.num_experts,
        num_topk=2,
        max_tokens=4,
        channels=1 + part,  # with two, a plan has a judge besides who completes it
        chunk=1,
        rows=1,
        slots=0,
        rounds=rounds[part],
    )


def hurried(seed: int) -> list[bool]:
    """A plan whose waits hardly have time. Whether each rank's call returned; if so, the plan is
    complete.
    """
    case = Case(2, num_tokens=4, num_topk=2, num_experts=4, hidden=8, layout=MAJOR)
    scenario = replace(life(2, 1), rounds=(Round(case, (), case),))

    def body(ranks: SimulatedRank) -> bool:
        mine = RankRun(ranks, scenario, TIMEOUT)
        mine.engine._workspace.state[TIMEOUT_NS.value] = 60 + 137 * (seed % 16)
        payload, (idx, weights), spec = (
            payload_of(case, mine.rank),
            case.picks[mine.rank],
            spec_of(case),
        )
        mine.own.adopt((payload, idx, weights, spec, None), {})
        try:
            with mine.own:
                _, _, arrived = mine.engine.dispatch(
                    DispatchArguments(payload, idx, weights, spec, None)
                )
        except PeerTimeout:
            return False
        finally:
            mine.engine.close()
        assert torch.equal(arrived.tokens_per_expert, case.expected[mine.rank].tokens_per_expert)
        return True

    with poisoned():
        return simulate(2, body, seed=seed, skew="rank", timeouts=True, strict=True)


def live(mine: RankRun, scenario: Scenario) -> None:
    for each in scenario.rounds:
        mine.round(each)


@cache
def length(world_size: int, part: int) -> int:
    """Steps of a life without a death."""
    scenario = life(world_size, part)
    endings, steps = play(scenario, lambda mine: live(mine, scenario), 0)
    assert endings == [FINE] * world_size
    return steps


def death(world_size: int, seed: int) -> tuple[int, int, list[Ending | None]]:
    """A rank dies at some step of its life. Which, when (of 1000), and how all ended."""
    random = Random(seed)
    part, victim = seed % 2, random.randrange(world_size)
    scenario, steps = life(world_size, part), length(world_size, part)
    step = random.randrange(steps)
    endings, _ = play(scenario, lambda mine: live(mine, scenario), seed, kill={victim: step})
    return victim, 1000 * step // steps, endings


QUEUE = (COMBINE, CACHED, DISPATCH, CACHED, DISPATCH, COMBINE)
"""Behind a dispatch and a cached one in place; fresh ones are static."""


def queued(
    scenario: Scenario, absent_from: int, seed: int, closes: bool = False
) -> list[Ending | None]:
    """The failed rank does not come to the call of this number, or ``closes`` its object then; the
    others have queued calls before and behind it, as on a GPU."""
    case = scenario.rounds[0].case

    def body(mine: RankRun) -> None:
        recv, engine, memory = mine.dispatch(case), mine.engine, mine.engine._memory
        mine.redispatch(case, recv, in_place=True)  # the ranks meet once more, for memory
        plan, spec, payload, settle = (
            recv.handle.plan,
            recv.handle.spec,
            payload_of(case, mine.rank),
            memory.settle,
        )
        rows = torch.zeros_like(recv.x)
        mine.own.adopt(payload, rows, case.picks[mine.rank])
        # The allocator of a GPU's stream keeps what calls let go.
        memory.settle = mine.own.sweep = lambda: None
        with mine.own:
            for number, op in enumerate(QUEUE, 2):
                if mine.rank == FAILED_RANK and number == absent_from:
                    if not closes:
                        memory.wait_until(lambda: False, 60.0)
                    break
                if op == COMBINE:
                    engine.combine(CombineArguments(rows, plan, spec))
                elif op == CACHED:
                    engine.redispatch(CachedArguments(payload, plan, spec))
                else:
                    engine.dispatch(
                        DispatchArguments(
                            payload, *case.picks[mine.rank], replace(spec, exact=False), None
                        )
                    )
            settle()
            engine.check()

    return play(scenario, body, seed, max_steps=MOST_STEPS)[0]


# Ranks in different calls


def disagreement(name: str, seed: int) -> list[Ending | None]:
    """The failed rank makes another call than the others."""
    where, _, what = name.partition(": ")
    case = Case(
        3,
        num_tokens=4,
        num_topk=2,
        num_experts=6,
        hidden=24,
        seed=seed,
        exact="static" not in where,
    )
    changes: dict[str, Any] = {
        "hidden": {"hidden": 40},
        "dtype": {"dtype": torch.float16},
        "cast": {"quantize": Quantize.FP8},
        "layout": {"layout": MAJOR},
    }
    other = replace(
        case, **changes.get(what, {"exact": not case.exact} if "among static" in where else {})
    )
    next_case = replace(case, seed=seed + 1)
    wide = replace(case, hidden=40)
    scenario = replace(life(3, 0), rounds=(Round(case, (), wide),))

    def body(mine: RankRun) -> None:
        failed_rank = mine.rank == FAILED_RANK
        if where in ("exact", "static", "exact among static"):
            mine.dispatch(other if failed_rank else case)
            return
        again = (
            what == "in place" and seed % 2 == 1
        )  # else there is no in-place buffer or receive buffer yet
        recv = mine.dispatch(case, in_place=again)
        if again and where == "combine":
            mine.combine(torch.zeros_like(recv.x), recv, in_place=True)
        if where == "another handle":
            second = mine.dispatch(next_case)
            recv = second if failed_rank else recv
        if where == "cached":
            mine.redispatch(
                other if failed_rank else case, recv, in_place=failed_rank and what == "in place"
            )
        elif where == "combine among cached dispatches" and not failed_rank:
            mine.redispatch(case, recv)
        else:
            rows = torch.zeros(recv.x.shape, dtype=(other if failed_rank else case).dtype)
            mine.combine(rows, recv, in_place=failed_rank and what == "in place")

    return play(scenario, body, seed)[0]


def disagreement_and_on(seed: int) -> list[Ending | None]:
    """After ranks disagreed in an exact dispatch, which moves no rows, the object works."""
    case = Case(3, num_tokens=4, num_topk=2, num_experts=6, hidden=24, seed=seed)
    wide = replace(case, hidden=40)
    scenario = replace(life(3, 0), rounds=(Round(case, ("plain",), wide),))

    def body(mine: RankRun) -> None:
        try:
            mine.dispatch(wide if mine.rank == FAILED_RANK else case)
        except ValueError:
            live(mine, scenario)

    return play(scenario, body, seed)[0]


# Refusals and lies


def refusal(op: int, exact: bool, seed: int) -> list[Ending | None]:
    """The failed rank refuses a call that the others make."""
    case = Case(3, num_tokens=4, num_topk=2, num_experts=6, hidden=8, seed=seed)
    static = replace(case, exact=False)
    scenario = replace(life(3, 0), rounds=(Round(case, (), replace(case, hidden=16)),))

    def body(mine: RankRun) -> None:
        recv = None if op == DISPATCH else mine.dispatch(case)
        if mine.rank == FAILED_RANK:
            assert mine.call(mine.engine.refuse, op, exact, "x is wrong")
        elif recv is None:
            mine.dispatch(case if exact else static)
        elif op == CACHED:
            mine.redispatch(case, recv)
        else:
            assert op == COMBINE
            mine.combine(torch.zeros_like(recv.x), recv)

    return play(scenario, body, seed)[0]


def impossible_counts(exact: bool, seed: int) -> list[Ending | None]:
    """The failed rank announces one row more than it has; with static shapes, rows of more tokens
    than there may be.
    """
    case = Case(3, num_tokens=4, num_topk=3, num_experts=3, hidden=8, seed=seed, exact=exact)
    scenario = replace(life(3, 0), num_experts=3, num_topk=3, rounds=(Round(case, (), case),))
    more = replace(case, num_tokens=7, seed=1)

    def body(mine: RankRun) -> None:
        if exact or mine.rank != FAILED_RANK:
            mine.dispatch(case)
            return
        everywhere = torch.arange(3).expand(6, 3).contiguous()
        mine.call(
            mine.engine.dispatch,
            DispatchArguments(
                payload_of(more, FAILED_RANK), everywhere, torch.ones(6, 3), spec_of(case), None
            ),
        )

    with planted("a row too many" if exact else ""):
        return play(scenario, body, seed)[0]


def bad_index(exact: bool, seed: int) -> list[Ending | None]:
    """The failed rank picks an expert that is not there; all make the call again afterwards, which
    must work.
    """
    case = Case(
        3, num_tokens=4, num_topk=2, num_experts=6, hidden=8, seed=seed, exact=exact, layout=FLAT
    )
    scenario = replace(life(3, 0), rounds=(Round(case, ("plain",), replace(case, hidden=16)),))

    def body(mine: RankRun) -> None:
        idx, weights = case.picks[mine.rank]
        if mine.rank == FAILED_RANK:
            idx = idx.clone()
            idx[1, 0] = 6
        wrong: Exception | None = None
        try:
            mine.call(
                mine.engine.dispatch,
                DispatchArguments(payload_of(case, mine.rank), idx, weights, spec_of(case), None),
            )
        except (ValueError, RuntimeError) as error:
            wrong = error
        live(mine, scenario)
        if wrong is not None:
            raise wrong

    return play(scenario, body, seed)[0]
