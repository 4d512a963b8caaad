"""Scenarios for the two-level engine: those of ``nvlink_cases.py`` on a grid of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from cases import Case
from nvlink_cases import Round, Scenario
from nvlink_cases import draw as draw_nvlink
from nvlink_cases import draw_in_place as draw_nvlink_in_place

PEERS, PUTS, MAPPED = (
    {"net": net, "mapped": mapped} for net, mapped in ((False, False), (True, False), (True, True))
)
"""How ranks reach other nodes: by pointers; by NVSHMEM, through the simulated network; node headers
by it, rows by pointers.
"""
REACHES = (PEERS, PUTS, MAPPED)


def draw(nodes: int, per_node: int, seed: int) -> Scenario:
    """The scenario of a seed. Every other one crosses the simulated network."""
    return _on_grid(draw_nvlink(nodes * per_node, seed), per_node, seed)


def draw_in_place(nodes: int, per_node: int, seed: int) -> Scenario:
    """The scenario of a seed with flat rows that ranks of a node read where they lie."""
    return _on_grid(draw_nvlink_in_place(nodes * per_node, seed), per_node, seed)


def _on_grid(scenario: Scenario, per_node: int, seed: int) -> Scenario:
    reach = (PEERS, PUTS, PEERS, MAPPED)[seed % 4]
    if scenario.bundled:  # of one node only
        scenario = replace(scenario, channels=scenario.channels // 2, bundled=False)
    return replace(scenario, ranks_per_node=per_node, workers=1 + seed // 2 % 3, **reach)


def rehearsal(part: str, seed: int) -> Scenario:
    """2 nodes of 2 ranks: fresh, cached and back, again and again, with rows of other sizes each
    time, through small rings.

    ``rings``: network rings of two slots, one row per put. ``long``: of several puts, of several
    rows each. ``peers``, ``long peers``: nodes map each other's memory. ``plans``: refusals, so
    that plan follows plan. ``lines``: rows so long that their slots are whole lines, and longer
    than they. ``in-place buffers``, ``pulls``: rows into in-place buffers, and out of them;
    ``apart``: few, and all stay at their ranks. ``channels``: two of them.
    """
    parts = part.split()
    long, apart, in_place = (
        "long" in parts,
        "apart" in parts,
        bool({"buffers", "pulls"} & set(parts)),
    )
    few, routing = 1 if "buffers" in parts else 3, "local" if apart else "uniform"
    tokens = 14 if long else few if apart else 9
    base = Case(
        4, routing, tokens, num_topk=2, num_experts=8, hidden=40, seed=3 * seed + 1 + in_place
    )
    cached = replace(base, hidden=24, dtype=torch.float32)
    tiny = replace(base, num_tokens=1, hidden=8)
    wide = replace(base, num_tokens=3, hidden=2056)
    again = 2 if apart else 1
    rounds = {
        "lines": (
            Round(wide, ("cached", "plain"), replace(wide, dtype=torch.float8_e4m3fn, hidden=4104)),
        ),
        "rings": (Round(base, ("cached", "plain", "cached", "plain"), cached),),
        "long": (Round(base, ("plain", "cached"), replace(base, hidden=16)),),
        "plans": (
            Round(tiny, (), tiny, refusers=(0, 3, 0)),
            Round(tiny, (), tiny, refusers=(2, 1, 2)),
        ),
        "buffers": (Round(base, ("cached", "cached") * again, cached, in_place=True),),
        "pulls": (Round(base, ("in place", "in place, doubled") * again, cached, in_place=True),),
    }
    return Scenario(
        world_size=4,
        num_experts=8,
        num_topk=2,
        max_tokens=base.num_tokens,
        channels=1 + ("channels" in parts),
        chunk=2 if long else 1,
        rows=1,
        slots=2 if long else 0,
        rounds=next((rounds[name] for name in reversed(parts) if name in rounds), rounds["rings"]),
        ranks_per_node=2,
        net="peers" not in part,
    )


def skew_of(part: str) -> str:
    """Which hardware shows most in a rehearsal."""
    return "rank" if {"buffers", "pulls"} & set(part.split()) else "program"


def long_batch(per_node: int, seed: int) -> Scenario:
    """2 nodes, one pick per token, many tokens through rings of two slots."""
    ranks, tokens = 2 * per_node, 240 * per_node
    case = Case(
        ranks,
        num_tokens=tokens,
        num_topk=1,
        num_experts=ranks,
        hidden=40,
        dtype=torch.float32,
        seed=seed,
    )
    base = rehearsal("rings" if seed % 2 == 0 else "peers", seed)
    rounds = (Round(case, ("plain",), case),)
    sizes = {
        "world_size": ranks,
        "ranks_per_node": per_node,
        "num_experts": ranks,
        "num_topk": 1,
        "max_tokens": tokens,
    }
    return replace(base, rounds=rounds, **sizes)


FRESH_SLOT, CACHED_SLOT = 80 + 32, 80
"""Bytes of a row of :func:`counted` with what rides along (token, two ids, two weights), and
without.
"""


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
