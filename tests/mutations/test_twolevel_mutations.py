"""Bugs planted in the kernels of engine twolevel are found within a few seeds, and the kernels as
they are pass those seeds.

``make test`` tries :data:`TRIED`, ``make soak`` all.
"""

from __future__ import annotations

import pytest

import nvlink_mutations
from nvlink_pool import SOAK, run_all, without_devices
from twolevel_mutations import MUTATIONS

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
    "worker: published twice", "forwarder: rings not drained", "call barrier: before its "
                                                               "tag", "placer: credit before read",
    "placer: buffers not waited for", "pulling reducer: credit before read", "pulling reducer: "
                                                                           "credit before read, "
                                                                           "mapped",
    "direct: workers without rows wait for nobody",
}  # fmt: skip
"""10 seconds and more each, or several seeds."""

FAST = {name: mutation for name, mutation in reversed(MUTATIONS.items()) if name not in SLOW}
OTHERS = {mutation.file for mutation in nvlink_mutations.MUTATIONS.values()}
OF_FILES = {mutation.file: name for name, mutation in FAST.items() if mutation.file not in OTHERS}
TRIED = [name for name in MUTATIONS if SOAK > 1 or name in OF_FILES.values()]
"""The first that is not slow in each file where ``test_nvlink_mutations.py``, which has all kinds,
has none; all of them under ``make soak``.
"""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, str]]:
    """A seed that finds each mutation (-1: none), and what it reports."""
    jobs = [(name, MUTATIONS[name].seeds()) for name in TRIED]
    return dict(zip(TRIED, run_all("twolevel_ranks.first_seed_that_finds", jobs), strict=True))


@pytest.mark.parametrize("name", TRIED)
def test_a_planted_bug_is_found(found: dict[str, tuple[int, str]], name: str) -> None:
    seed, report = found[name]
    assert seed >= 0, f"{name}: {report}, within {MUTATIONS[name].within} seeds"
    assert "raised" not in report, report  # a mutation that does not even run says nothing


def test_the_kernels_as_they_are_pass_the_same_seeds(found: dict[str, tuple[int, str]]) -> None:
    """Through the same copying, with nothing changed."""
    where = sorted({(MUTATIONS[name].part, seed) for name, (seed, _) in found.items() if seed >= 0})
    run_all("twolevel_ranks.passes_unchanged", where)


def test_every_kind_of_bug_is_made() -> None:
    assert {mutation.kind for mutation in MUTATIONS.values()} == KINDS
    assert {mutation.file for mutation in MUTATIONS.values()} == {
        "sync",
        "two_net",
        "two_scheduler",
        "two_dispatch",
        "two_far",
        "two_forward",
        "two_combine",
        "two_direct",
        "two_pull",
        "two_in_place",
        "two_headers",
        "two_region",
    }
