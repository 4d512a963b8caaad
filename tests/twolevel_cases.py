"""Scenarios for the two-level engine: those of ``nvlink_cases.py`` on a grid of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from cases import Case
from nvlink_cases import Round, Scenario
from nvlink_cases import draw as draw_nvlink

PEERS, PUTS, MAPPED = ({"net": net, "mapped": mapped} for net, mapped in ((False, False), (True, False), (True, True)))
"""How ranks reach other nodes: by pointers; by NVSHMEM, through the simulated network; letters by it, rows by pointers."""
REACHES = (PEERS, PUTS, MAPPED)


def draw(nodes: int, per_node: int, seed: int) -> Scenario:
    """The scenario of a seed; nothing stays in symmetric memory. Every other one crosses the simulated network."""
    scenario = draw_nvlink(nodes * per_node, seed)
    rounds = tuple(replace(each, in_place=False) for each in scenario.rounds)
    reach = (PEERS, PUTS, PEERS, MAPPED)[seed % 4]
    return replace(scenario, rounds=rounds, ranks_per_node=per_node, workers=1 + seed // 2 % 3, **reach)


def rehearsal(part: str, seed: int) -> Scenario:
    """2 nodes of 2 ranks: fresh, cached and back, again and again, with rows of other sizes each time, through small rings.

    ``rings``: network rings of two slots, one row per put. ``long``: of several puts, of several rows each. ``peers``,
    ``long peers``: nodes map each other's memory. ``plans``: refusals, so that plan follows plan. ``lines``: rows so long
    that their slots are whole lines, and longer than they.
    """
    what, long = part.split()[0], part.startswith("long")
    base = Case(4, num_tokens=14 if long else 9, num_topk=2, num_experts=8, hidden=40, seed=3 * seed + 1)
    cached = replace(base, hidden=24, dtype=torch.float32)
    tiny = replace(base, num_tokens=1, hidden=8)
    wide = replace(base, num_tokens=3, hidden=2056)
    rounds = {
        "lines": (Round(wide, ("cached", "plain"), replace(wide, dtype=torch.float8_e4m3fn, hidden=4104)),),
        "rings": (Round(base, ("cached", "plain", "cached", "plain"), cached),),
        "long": (Round(base, ("plain", "cached"), replace(base, hidden=16)),),
        "plans": (Round(tiny, (), tiny, refusers=(0, 3, 0)), Round(tiny, (), tiny, refusers=(2, 1, 2))),
    }
    return Scenario(
        world_size=4,
        num_experts=8,
        num_topk=2,
        max_tokens=base.num_tokens,
        channels=1,
        chunk=2 if long else 1,
        rows=1,
        slots=2 if long else 0,
        rounds=rounds.get(what, rounds["rings"]),
        ranks_per_node=2,
        net="peers" not in part,
    )


def long_batch(per_node: int, seed: int) -> Scenario:
    """2 nodes, one pick per token, many tokens through rings of two slots."""
    ranks, tokens = 2 * per_node, 240 * per_node
    case = Case(ranks, num_tokens=tokens, num_topk=1, num_experts=ranks, hidden=40, dtype=torch.float32, seed=seed)
    base = rehearsal("rings" if seed % 2 == 0 else "peers", seed)
    rounds = (Round(case, ("plain",), case),)
    sizes = {"world_size": ranks, "ranks_per_node": per_node, "num_experts": ranks, "num_topk": 1, "max_tokens": tokens}
    return replace(base, rounds=rounds, **sizes)


FRESH_SLOT, CACHED_SLOT = 80 + 32, 80
"""Bytes of a row of :func:`counted` with what rides along (token, two ids, two weights), and without."""


def counted(nodes: int, per_node: int, reach: dict[str, bool]) -> Scenario:
    """A dispatch, a cached one and a combine with rows of one size."""
    ranks = nodes * per_node
    case = Case(ranks, num_tokens=7, num_topk=2, num_experts=2 * ranks, hidden=40, seed=1)
    return replace(
        rehearsal("rings", 0),
        world_size=ranks,
        num_experts=2 * ranks,
        max_tokens=7,
        rounds=(Round(case, ("cached", "plain"), case),),
        ranks_per_node=per_node,
        **reach,
    )
