"""Random programs of calls of one ``ExpertParallel`` on simulated ranks: any layout, dtype, format
and option behind any other, along any handle, now or later; bit for bit what the oracle says.

``TOKENYARD_SOAK_SEEDS=N`` runs N times as many. ``python tests/run.py drawn_runs ENGINE RANKS
RANKS_PER_NODE SEED`` runs one alone.
"""

from __future__ import annotations

import pytest

from nvlink_pool import SOAK, run_all, without_devices

pytestmark = without_devices

WORLDS = {
    "nvlink": [(2, 0), (3, 0), (1, 0), (4, 0), (5, 0)],
    "twolevel": [(4, 2), (2, 1), (3, 1), (6, 3), (6, 2), (3, 3)],
    "low_latency": [(3, 0), (4, 2), (2, 1), (1, 0), (2, 0), (6, 3), (3, 1), (6, 2), (3, 3), (8, 0)],
}
"""Ranks, and ranks of a node (0: there are no nodes). ``make test`` has the first two."""
LOSING = [("nvlink", 3, 0), ("twolevel", 3, 1), ("nvlink", 2, 0), ("nvlink", 4, 0),
          ("twolevel", 4, 2)]  # fmt: skip


def seeds() -> range:
    return range(SOAK)


@pytest.mark.parametrize("engine", WORLDS)
def test_any_call_behind_any_other(engine: str) -> None:
    worlds = WORLDS[engine] if SOAK > 1 else WORLDS[engine][:2]
    run_all(
        "drawn_runs.check_seed", [(engine, *world, seed) for world in worlds for seed in seeds()]
    )


def test_any_call_without_a_rank_that_died() -> None:
    """Picks of its experts go to replicas or nowhere, and sums say what they lack."""
    worlds = LOSING if SOAK > 1 else LOSING[:2]
    run_all("drawn_runs.check_seed", [(*world, seed, True) for world in worlds for seed in seeds()])
