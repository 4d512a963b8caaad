"""Low latency once per node, explored to the end for small sizes (``model_rail.py``)."""

from __future__ import annotations

import pytest

from model_explorer import explore
from model_rail import BUGS, LARGE, NODES, mortals
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices


@pytest.mark.parametrize("name", NODES | (LARGE if SOAK > 1 else {}))
def test_nothing_fails(name: str) -> None:
    for machine in (NODES | LARGE)[name](""):
        found = explore(machine)
        assert found.finals and not found.failure, str(found)


@pytest.mark.parametrize("mortal", range(4))
def test_who_waits_waits_for_the_rank_that_dies(mortal: int) -> None:
    """At every step, each of its programs and messages for itself: the source of a row, a rank that
    only takes part, the rail, or its neighbour."""
    found = explore(mortals(), mortal=(mortal,))
    assert found.finals > 1 and not found.failure, str(found)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    name, failure = BUGS[bug]
    found = [explore(machine).failure for machine in NODES[name](bug)]
    assert any(failure in each for each in found), found
