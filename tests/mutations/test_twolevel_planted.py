"""Bugs planted in the kernels of engine twolevel are found within a few seeds, and the kernels as
they are pass those seeds.

``make test`` plants :data:`PLANTED`, ``make soak`` all.
"""

from __future__ import annotations

import pytest

from mutations import changed
from nvlink_pool import SOAK, run_all, without_devices
from twolevel_plants import PLANTS

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
    "wrong row",
}

SLOW = {
    "worker: published twice", "forwarder: rings not drained", "greeting: before its "
                                                               "tag", "placer: credit before read",
    "placer: views not waited for", "pulling reducer: credit before read", "pulling reducer: "
                                                                           "credit before read, "
                                                                           "mapped",
    "direct: workers without rows wait for nobody", "views: call counted before its end",
}  # fmt: skip
"""10 seconds and more each, or several seeds."""

FAST = {name: plant for name, plant in reversed(PLANTS.items()) if name not in SLOW}
OF_FILES = {plant.file: name for name, plant in FAST.items()}
OF_KINDS = {
    plant.kind: name
    for name, plant in FAST.items()
    if plant.kind not in {PLANTS[name].kind for name in OF_FILES.values()}
}
PLANTED = [name for name in PLANTS if SOAK > 1 or name in {*OF_FILES.values(), *OF_KINDS.values()}]
"""The first in each file that is not slow, and of each kind that these lack; all of them under
``make soak``.
"""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, str]]:
    """A seed that finds each plant (-1: none), and what it reports."""
    jobs = [(name, PLANTS[name].seeds()) for name in PLANTED]
    return dict(zip(PLANTED, run_all("twolevel_ranks.first_seed_that_finds", jobs), strict=True))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(found: dict[str, tuple[int, str]], name: str) -> None:
    seed, report = found[name]
    assert seed >= 0, f"{name}: {report}, within {PLANTS[name].within} seeds"
    assert "raised" not in report, report  # a plant that does not even run says nothing


def test_the_kernels_as_they_are_pass_the_same_seeds(found: dict[str, tuple[int, str]]) -> None:
    """Through the same copying, with nothing changed."""
    where = sorted({(PLANTS[name].part, seed) for name, (seed, _) in found.items() if seed >= 0})
    run_all("twolevel_ranks.passes_unchanged", where)


def test_every_kind_of_bug_is_planted() -> None:
    assert {plant.kind for plant in PLANTS.values()} == KINDS
    assert {plant.file for plant in PLANTS.values()} == {
        "sync",
        "two_net",
        "two_turns",
        "two_dispatch",
        "two_far",
        "two_forward",
        "two_combine",
        "two_direct",
        "two_pull",
        "two_views",
        "two_letters",
        "two_region",
    }


def test_plants_fit_the_kernels() -> None:
    for plant in PLANTS.values():
        changed(plant)
