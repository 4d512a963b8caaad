"""Failures of the two-level engine on simulated ranks: deaths at any step, disagreements and
refusals across nodes.

Reached through ``nvlink_pool.py``, as kernels are interpreted here. Functions return how each rank
ended: ``nvlink_failures.py``.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch

import nvlink_failures
from cases import Case
from nvlink_cases import FAILED_RANK, MAJOR, Ending, Round, Scenario
from nvlink_failures import live, play, queued
from nvlink_ranks import RankRun
from tokenyard.header import CACHED, COMBINE, DISPATCH
from twolevel_cases import REACHES
from twolevel_mutations import planted

MOST_STEPS = 300_000


def life(nodes: int, per_node: int, part: int, way: int) -> Scenario:
    """Calls of every sort, in three parts, of which the last is in place. ``way``: which of
    ``twolevel_cases.REACHES``.
    """
    ranks = nodes * per_node
    flat = Case(ranks, num_tokens=6, num_topk=2, num_experts=2 * ranks, hidden=8)
    major = replace(flat, layout=MAJOR, exact=False, hidden=16)
    cached = replace(flat, dtype=torch.float32)
    rounds = [
        (Round(flat, ("cached", "plain"), cached), Round(replace(flat, seed=1), (), cached)),
        (Round(major, ("weighted",), replace(major, hidden=8)),),
        (Round(flat, ("in place", "cached", "in place, doubled"), cached, in_place=True),),
    ]
    return Scenario(
        world_size=ranks,
        num_experts=flat.num_experts,
        num_topk=2,
        max_tokens=6,
        channels=1 + part // 2,
        chunk=1,
        rows=1,
        slots=0,
        rounds=rounds[part],
        ranks_per_node=per_node,
        **REACHES[way],
    )


STEPS = {(2, 2): (8000, 4300, 6500), (3, 2): (15000, 7500, 13000)}
"""About so many has a life without a death, by grid and part: a death may come at any of them, or,
now and then, too late.
"""


def death(nodes: int, per_node: int, seed: int, part: int) -> tuple[int, int, list[Ending | None]]:
    """A rank dies at some step of this part of its life. Which, when (of 1000), and how
    all ended.
    """
    random = Random(seed)
    way, victim = seed // 2 % 3, random.randrange(nodes * per_node)
    scenario, steps = life(nodes, per_node, part, way), STEPS[nodes, per_node][part]
    step = random.randrange(steps)
    endings, _ = play(
        scenario, lambda mine: live(mine, scenario), seed, kill={victim: step}, max_steps=MOST_STEPS
    )
    return victim, 1000 * step // steps, endings


def hurry(nodes: int, per_node: int, seed: int, part: int) -> list[Ending | None]:
    """All live, but workers give up after as long as it takes to serve them: deadlines pass as
    counters arrive.
    """
    scenario = replace(life(nodes, per_node, part, seed // 2 % 3), workers=1 + seed % 2)
    with planted("hurried"):
        return play(scenario, lambda mine: live(mine, scenario), seed, max_steps=MOST_STEPS)[0]


def queued_on(nodes: int, absent_from: int, closes: bool = False) -> list[Ending | None]:
    """See :func:`nvlink_failures.queued`; on so many ``nodes`` of 2, or 3 ranks of engine nvlink
    (0).
    """
    scenario = life(nodes, 2, 0, absent_from % 3) if nodes else nvlink_failures.life(3, 0)
    return queued(scenario, absent_from, absent_from, closes)


def absence(op: int, seed: int) -> list[Ending | None]:
    """Rank 3 of 2 x 2 does not come to a call in place whose rows fill all network rings."""
    flat = Case(4, num_tokens=60, num_topk=2, num_experts=8, hidden=8)
    each = Round(flat, (), flat, in_place=True)
    scenario = replace(life(2, 2, 2, 0), channels=1, workers=1, max_tokens=60, rounds=(each,))

    def body(mine: RankRun) -> None:
        recv = mine.dispatch(flat, in_place=True)
        rows = torch.zeros_like(recv.x)
        mine.combine(rows, recv, in_place=True)  # now all have their in-place buffers
        if mine.rank == FAILED_RANK:
            mine.engine._memory.wait_until(lambda: False, 60.0)
        elif op == CACHED:
            mine.redispatch(flat, recv, in_place=True)
        else:
            mine.combine(rows, recv, in_place=True)

    return play(scenario, body, seed, max_steps=MOST_STEPS)[0]


def disagreement(what: str, seed: int) -> list[Ending | None]:
    """The failed rank makes another call than the others, two of which are on another node."""
    case = Case(4, num_tokens=4, num_topk=2, num_experts=8, hidden=24, seed=seed)
    wide = replace(case, hidden=40)
    scenario = replace(life(2, 2, 0, seed % 3), rounds=(Round(case, (), wide),))

    def body(mine: RankRun) -> None:
        failed_rank = mine.rank == FAILED_RANK
        if what == "exact":
            mine.dispatch(wide if failed_rank else case)
            return
        if what == "exact, in place":
            mine.dispatch(case, in_place=failed_rank)
            return
        recv = mine.dispatch(case, in_place=seed % 2 == 0)  # else there is no in-place buffer yet
        if what == "cached":
            mine.redispatch(wide if failed_rank else case, recv)
        elif what == "cached, in place":
            mine.redispatch(case, recv, in_place=failed_rank)
        elif what == "cached, both in place":
            mine.redispatch(wide if failed_rank else case, recv, in_place=True)
        elif what == "combine, in place":
            mine.combine(torch.zeros_like(recv.x), recv, in_place=failed_rank)
        else:
            mine.combine(
                torch.zeros(recv.x.shape, dtype=torch.float16 if failed_rank else case.dtype), recv
            )

    return play(scenario, body, seed, max_steps=MOST_STEPS)[0]


def refusal(op: int, exact: bool, in_place: bool, seed: int) -> list[Ending | None]:
    """The failed rank refuses a call that the others make."""
    case = Case(4, num_tokens=4, num_topk=2, num_experts=8, hidden=8, seed=seed)
    scenario = replace(life(2, 2, 0, seed % 3), rounds=(Round(case, (), replace(case, hidden=16)),))

    def body(mine: RankRun) -> None:
        # Else there is no in-place buffer yet.
        recv = None if op == DISPATCH else mine.dispatch(case, in_place=in_place and seed % 2 == 0)
        if mine.rank == FAILED_RANK:
            assert mine.call(mine.engine.refuse, op, exact, "x is wrong")
        elif recv is None:
            mine.dispatch(case if exact else replace(case, exact=False), in_place=in_place)
        elif op == CACHED:
            mine.redispatch(case, recv, in_place=in_place)
        else:
            assert op == COMBINE
            mine.combine(torch.zeros_like(recv.x), recv, in_place=in_place)

    return play(scenario, body, seed, max_steps=MOST_STEPS)[0]
