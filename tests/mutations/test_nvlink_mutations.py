"""Bugs planted in the kernels of engine nvlink are found within a few seeds, and the kernels as
they are pass those seeds.

``make test`` tries :data:`TRIED`, ``make soak`` all.
"""

from __future__ import annotations

import pytest

from nvlink_mutations import MUTATIONS
from nvlink_pool import SOAK, run_all, without_devices

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

OF_FILES = {mutation.file: name for name, mutation in reversed(MUTATIONS.items())}
OF_KINDS = {
    mutation.kind: name
    for name, mutation in reversed(MUTATIONS.items())
    if mutation.kind not in {MUTATIONS[name].kind for name in OF_FILES.values()}
}
TRIED = [name for name in MUTATIONS if SOAK > 1 or name in {*OF_FILES.values(), *OF_KINDS.values()}]
"""The first in each file, and of each kind that these lack; all of them under ``make soak``."""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, str]]:
    """A seed that finds each mutation (-1: none), and what it reports."""
    jobs = [(name, MUTATIONS[name].seeds()) for name in TRIED]
    return dict(zip(TRIED, run_all("nvlink_ranks.first_seed_that_finds", jobs), strict=True))


@pytest.mark.parametrize("name", TRIED)
def test_a_planted_bug_is_found(found: dict[str, tuple[int, str]], name: str) -> None:
    seed, report = found[name]
    assert seed >= 0, f"{name}: {report}, within {MUTATIONS[name].within} seeds"
    assert "raised" not in report, report  # a mutation that does not even run says nothing


def test_the_kernels_as_they_are_pass_the_same_seeds(found: dict[str, tuple[int, str]]) -> None:
    """Through the same copying, with nothing changed."""
    where = sorted({(MUTATIONS[name].part, seed) for name, (seed, _) in found.items() if seed >= 0})
    run_all("nvlink_ranks.passes_unchanged", where)


def test_every_kind_of_bug_is_made() -> None:
    assert {mutation.kind for mutation in MUTATIONS.values()} == KINDS
    files = {
        "sync",
        "plan",
        "exchange",
        "call_barrier",
        "region",
        "two_dispatch",
        "two_combine",
        "two_scheduler",
        "two_direct",
        "direct",
        "two_in_place",
        "two_headers",
        "push",
    }
    assert {mutation.file.split("|")[0] for mutation in MUTATIONS.values()} == files
