"""Engine nvlink goes on without ranks that died or froze at any step, and with others in their
places, on simulated ranks: bit for bit what the oracle says. ``make soak`` runs many times as many
seeds.
"""

from __future__ import annotations

import pytest

from mutations import changed
from nvlink_mutations import STAND_IN
from nvlink_pool import SOAK, run_all, seeds, without_devices

pytestmark = without_devices

DEATHS = {2: 1, 3: 1} | ({4: 1} if SOAK > 1 else {})
"""Seeds by world size."""
BUGS = list(STAND_IN) if SOAK > 1 else list(STAND_IN)[:3]


@pytest.mark.parametrize("world_size", DEATHS, ids="ranks{}".format)
def test_ranks_die_at_any_step(world_size: int) -> None:
    """Of four (``make soak``; of engine twolevel's four below), one after the other."""
    run_all("recover_simulated.death", [(world_size, seed) for seed in seeds(DEATHS[world_size])])


def test_a_frozen_rank_wakes_and_writes_on() -> None:
    """Into the memory of an earlier epoch, among good calls of the others."""
    run_all("recover_simulated.frozen", [(3, seed) for seed in seeds(1)])


def test_a_rank_dies_while_others_recover_from_another() -> None:
    run_all("recover_simulated.death_in_recovery", [(seed,) for seed in range(SOAK)])


def test_engine_twolevel_goes_on_as_nvlink() -> None:
    """Seed 1004: a rank waits for rows that the dead one should hand on, so it votes last."""
    seeds = range(1004, 1004 + SOAK)
    run_all("recover_simulated.death", [(4, seed, "twolevel") for seed in seeds])


def test_another_takes_the_place_of_a_rank_that_is_gone() -> None:
    """And goes on without one that dies then. As twolevel began, too (``make soak``)."""
    cases = [(size, seed) for size in (3, 2)[:SOAK] for seed in range(SOAK)]
    grids = [(4, seed, "twolevel") for seed in range(SOAK - 1)]
    run_all("recover_simulated.admission", [*cases, *grids])


def test_the_example_of_a_stand_in() -> None:
    run_all("recover_simulated.example", [()])


def test_bugs_of_stand_ins_are_found() -> None:
    """And the stand-ins as they are pass, through the same copying."""
    found = run_all("recover_simulated.bug", [(name, 0) for name in ("", *BUGS)])
    assert not found[0], found[0]
    for name, report in zip(BUGS, found[1:], strict=True):
        assert report, f"{name} was not found"
        assert "raised" not in report, report  # a mutation that does not even run says nothing


def test_mutations_fit_the_kernels() -> None:
    for mutation in STAND_IN.values():
        changed(mutation)
