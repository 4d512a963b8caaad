"""Low latency among far ranks, explored to the end for small sizes (``model_low_latency.py``)."""

from __future__ import annotations

import pytest

from model_explorer import explore
from model_low_latency import APART, BUGS, FAR, LARGE, MORTALS
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices


@pytest.mark.parametrize("name", FAR | APART | (LARGE if SOAK > 1 else {}))
def test_nothing_fails(name: str) -> None:
    for machine in (FAR | APART | LARGE)[name](""):
        found = explore(machine)
        assert found.finals and not found.failure, str(found)


@pytest.mark.parametrize(
    ("name", "mortal"),
    [(name, mortal) for at, name in enumerate(MORTALS) for mortal in (at, 1 - at)[:SOAK]],
)
def test_who_waits_waits_for_the_rank_that_dies(name: str, mortal: int) -> None:
    """At every step, and each of its programs and messages for itself."""
    for machine in MORTALS[name](""):
        found = explore(machine, mortal=(mortal,))
        assert found.finals > 1 and not found.failure, str(found)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    machines, failure = BUGS[bug]
    found = [explore(machine).failure for machine in machines(bug)]
    assert any(failure in each for each in found), found
