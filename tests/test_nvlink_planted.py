"""Bugs planted in the kernels of engine nvlink are found within a few seeds, and the kernels as
they are pass those seeds.
"""

from __future__ import annotations

import pytest

from mutations import changed
from nvlink_plants import PLANTS
from nvlink_pool import run_all, without_devices

pytestmark = without_devices

KINDS = {
    "barrier",
    "release",
    "acquire",
    "flag before data",
    "credit before read",
    "reused too early",
    "last chunk",
    "wrong epoch",
    "guess",
    "wrong row",
}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, str]]:
    """A seed that finds each plant (-1: none), and what it reports."""
    jobs = [(name, plant.seeds()) for name, plant in PLANTS.items()]
    return dict(zip(PLANTS, run_all("nvlink_ranks.first_seed_that_finds", jobs), strict=True))


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(found: dict[str, tuple[int, str]], name: str) -> None:
    seed, report = found[name]
    assert seed >= 0, f"{name}: {report}, within {PLANTS[name].within} seeds"
    assert "raised" not in report, report  # a plant that does not even run says nothing


def test_the_kernels_as_they_are_pass_the_same_seeds(found: dict[str, tuple[int, str]]) -> None:
    """Through the same copying, with nothing changed."""
    where = sorted({(PLANTS[name].part, seed) for name, (seed, _) in found.items() if seed >= 0})
    run_all("nvlink_ranks.passes_unchanged", where)


def test_every_kind_of_bug_is_planted() -> None:
    assert {plant.kind for plant in PLANTS.values()} == KINDS
    files = {"sync", "plan", "exchange", "verdict", "greet"}
    files |= {"dispatch", "combine", "direct", "push"}
    assert {plant.file for plant in PLANTS.values()} == files


def test_plants_fit_the_kernels() -> None:
    for plant in PLANTS.values():
        changed(plant)
