"""Runs scenarios of ``twolevel_cases.py`` on simulated ranks.

``python tests/run.py twolevel_ranks 2 4 17``: 2 nodes of 4 ranks, seed 17.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

from cases import on_grid
from nvlink_cases import payload_of
from nvlink_ranks import RankRun, run
from tokenyard.engines.rings import meta_words, row_layout_of
from tokenyard.kernels.two_region import node_header_words, num_tasks, short_node_header_words
from tokenyard.testing.modules import BODY
from tokenyard.testing.one_process import run_in_simulator
from tokenyard.testing.simulator import SimulatedRank, SimulationError, simulate
from tokenyard.topology import Topology
from twolevel_cases import (
    CACHED_SLOT,
    FRESH_SLOT,
    PUTS,
    counted,
    draw,
    draw_in_place,
    long_batch,
    rehearsal,
    skew_of,
)
from twolevel_mutations import MUTATIONS, planted

MOST_STEPS = 2_000_000


def check_seed(nodes: int, per_node: int, seed: int) -> None:
    """The scenario of ``seed`` passes."""
    run(draw(nodes, per_node, seed), seed, max_steps=MOST_STEPS)


def check_in_place(nodes: int, per_node: int, seed: int) -> None:
    """The scenario of ``seed`` passes with rows that ranks of a node read where they lie."""
    run(draw_in_place(nodes, per_node, seed), seed, max_steps=MOST_STEPS)


def check_workers(nodes: int, per_node: int, seed: int, workers: int) -> None:
    """The scenario of ``seed`` passes with so many programs of a channel; 0: one for each task."""
    tasks = num_tasks(nodes * per_node, nodes)
    run(replace(draw(nodes, per_node, seed), workers=workers or tasks), seed, max_steps=MOST_STEPS)


def check_lines(reach: dict[str, bool], seed: int) -> None:
    """Rows whose slots are longer than they pass."""
    run(replace(rehearsal("lines", seed), **reach), seed, max_steps=MOST_STEPS)


def large_batch(per_node: int, seed: int) -> tuple[int, int, int, int]:
    """A batch many times as large as all rings of a rank together. Rows that one rank gets, slots,
    memory before and after.
    """
    scenario = long_batch(per_node, seed)
    each, found = scenario.rounds[0], list[tuple[int, int, int, int]]()

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        workspace, before = mine.engine._workspace, mine.engine.buffer_bytes
        mine.round(each)
        row_layout = row_layout_of(
            payload_of(each.case, 0),
            None,
            meta_words(each.case.num_topk, experts=False, weighted=True),
        )
        slots = (
            scenario.world_size * workspace.slots(row_layout)
            + (workspace.grid.num_nodes - 1) * workspace.net_ring(row_layout).slots
        )
        found.append(
            (
                len(each.case.expected[mine.rank].x),
                scenario.channels * slots,
                before,
                mine.engine.buffer_bytes,
            )
        )
        mine.engine.close()

    simulate(scenario.world_size, body, seed=seed, max_steps=20_000_000)
    return min(found)


def network_rows(nodes: int, per_node: int, reach: dict[str, bool]) -> tuple[list[Any], list[Any]]:
    """What a dispatch, a cached one and a combine put to other nodes: rows (sent, received) and
    bytes to each rank, by rank.

    As the engine has counted, and as the picks say.
    """
    scenario, puts = counted(nodes, per_node, reach), reach == PUTS
    case = scenario.rounds[0].case
    grid = Topology(nodes, per_node)
    goes = [
        [set((idx[idx >= 0] // 2 // per_node).tolist()) for idx in picks] for picks, _ in case.picks
    ]

    def to_node(rank: int, node: int) -> int:
        return sum(node in token for token in goes[rank])

    planned: list[Any] = []
    for rank in range(grid.world_size):
        sent, received, num_bytes = ([0] * grid.world_size for _ in range(3))
        for peer in grid.rail_of(rank):
            if peer != rank:
                there, back = to_node(rank, grid.node_of(peer)), to_node(peer, grid.node_of(rank))
                sent[peer], received[peer] = 2 * there + back, 2 * back + there
                num_bytes[peer] = there * FRESH_SLOT + there * CACHED_SLOT + back * CACHED_SLOT
        planned.append((sent, received, num_bytes))
    found: dict[int, Any] = {}

    def body(ranks: SimulatedRank) -> None:
        mine = RankRun(ranks, scenario)
        mine.round(scenario.rounds[0])
        mine.engine.check()
        stats, workspace = mine.engine.stats, mine.engine._workspace
        far = [peer for peer in grid.rail_of(mine.rank) if peer != mine.rank]
        sizes = grid.world_size, scenario.channels, workspace.header_words
        node_headers = 8 * (
            (per_node - 1) * short_node_header_words(*sizes)
            + node_header_words(sizes[0], per_node, *sizes[1:])
        )
        control = (
            node_headers + per_node * 3 * 8
        )  # one plan, three announcements, to every rank of a node
        credits = [
            0 if not puts else stats.bytes_sent[peer] - control - planned[mine.rank][2][peer]
            for peer in far
        ]
        assert all(
            0 <= each <= 16 * (sum(planned[mine.rank][1])) and each % 16 == 0 for each in credits
        )
        num_bytes = [0] * grid.world_size
        for peer, extra in zip(far, credits, strict=True):
            num_bytes[peer] = stats.bytes_sent[peer] - control - extra
        rows = [
            [counts[peer] if peer in far else 0 for peer in range(grid.world_size)]
            for counts in (stats.rows_sent, stats.rows_received)
        ]
        found[mine.rank] = (*rows, num_bytes)
        mine.engine.close()

    simulate(scenario.world_size, body, seed=1, max_steps=MOST_STEPS)
    return [found[rank] for rank in range(grid.world_size)], planned


def shared_body(module: str, name: str, arguments: dict[str, Any], seed: int) -> None:
    """A test body that other engines share, on 2 nodes of 2 ranks."""
    body = getattr(getattr(import_module(module), name), BODY)
    with on_grid(2, 2):
        run_in_simulator(body, "twolevel", arguments, 4, seed)


def first_seed_that_finds(mutation: str, seeds: Sequence[int]) -> tuple[int, str]:
    """The first of ``seeds`` whose rehearsal fails with a bug planted (see
    ``twolevel_mutations.py``), and how; -1 if all pass.
    """
    part, fits = MUTATIONS[mutation].part, False
    try:
        with planted(mutation):
            fits = True
            for seed in seeds:
                run(rehearsal(part, seed), seed, max_steps=200_000, skew=skew_of(part))
    except (SimulationError, AssertionError) as error:
        return seed if fits else -1, f"{type(error).__name__}: {error}"
    return -1, "not found"


def passes_unchanged(part: str, seed: int) -> None:
    """A rehearsal passes with copies of the kernels in which nothing was changed."""
    with planted(""):
        run(rehearsal(part, seed), seed, max_steps=200_000, skew=skew_of(part))


if __name__ == "__main__":
    nodes, per_node, *seeds = map(int, sys.argv[1:])
    for seed in seeds:
        print(draw(nodes, per_node, seed))
        check_seed(nodes, per_node, seed)
