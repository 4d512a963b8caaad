"""Whom engines on kernels wait for, on simulated ranks. ``make soak`` runs many times as many
seeds.
"""

from __future__ import annotations

import pytest

from nvlink_pool import SOAK, run_all, without_devices

pytestmark = without_devices


@pytest.mark.parametrize("engine", ["nvlink", "twolevel", "low_latency"])
def test_a_late_rank_shows_under_its_name(engine: str) -> None:
    """In counts or at the call barrier, and in its own object only."""
    run_all("waits_simulated.late", [(engine, seed) for seed in range(SOAK)])


def test_totals_outlast_a_recovery() -> None:
    run_all("waits_simulated.recovered", [(seed,) for seed in range(SOAK)])


@pytest.mark.parametrize("looks", [False, True], ids=["in a wait", "look by look"])
def test_each_source_counts_until_it_came(looks: bool) -> None:
    """Also that a program which looks in vain stores nothing: deadlines of simulated ranks come
    when all wait, so a death was not noticed for 500 million steps."""
    run_all(
        "waits_simulated.one_by_one", [(looks, seed) for seed in range(3 * SOAK if SOAK > 1 else 1)]
    )
