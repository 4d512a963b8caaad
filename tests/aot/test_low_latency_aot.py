"""Kernels of engine low_latency as sm_90 machine code, with the constants of 128 tokens x 7168,
top-8 of 256, on 4 ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from compiling import compiled
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices

Facts = dict[str, dict[str, Any]]
SPILLS = {
    "low_dispatch_kernel None": 2,
    "low_dispatch_kernel None, between nodes": 6,
    "low_dispatch_kernel FP8, between nodes": 2,
    "low_dispatch_kernel None, once per node": 4,
}
"""Most local loads and stores where there may be some."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return compiled("low_latency_compile", *(["all"] if SOAK > 1 else []))


@pytest.fixture
def real(found: dict[str, Any]) -> Facts:
    """Without the planted one, and those that call NVSHMEM."""
    facts: Facts = found["facts"]
    return {
        name: each
        for name, each in facts.items()
        if name != "planted" and not name.endswith("network")
    }


def part(facts: Facts, *words: str, but: str = "none") -> Facts:
    chosen = {
        name: each
        for name, each in facts.items()
        if any(word in name for word in words) and but not in name
    }
    assert chosen
    return chosen


def test_symmetric_memory_is_small(found: dict[str, Any]) -> None:
    assert found["bytes"] <= 15e6
    assert found["far bytes"] <= 31e6


def test_all_programs_of_a_launch_fit_on_the_device(real: Facts) -> None:
    assert {name: each for name, each in real.items() if not 0 < each["grid"] <= each["most"]} == {}


def test_rows_move_16_bytes_at_a_time(real: Facts) -> None:
    for name, each in part(real, "low_dispatch", "low_combine").items():
        assert each["loads 128"] >= 2, (name, each)
        assert each["stores 128"] >= 1, (name, each)
        casts = name.startswith("low_dispatch") and not name.endswith("None")
        assert casts or each["cached loads"] == 0, (name, each)


def test_every_wait_acquires(real: Facts) -> None:
    for name, each in part(real, "low_dispatch", "low_combine", but="send").items():
        assert 0 < each["acquires"] <= each["invalidations"], (name, each)
    for name, each in part(real, "low_dispatch", but="send").items():
        assert each["strong loads"] > 0, (name, each)


def test_every_release_has_its_barrier_and_its_fence(real: Facts) -> None:
    for name, each in part(real, "low_dispatch", "low_combine", but="receive").items():
        assert 0 < each["releases"] <= each["fences"], (name, each)
        assert each["releases without barrier"] == 0, (name, each)


def test_a_missing_barrier_would_show(found: dict[str, Any]) -> None:
    assert found["facts"]["planted"]["releases without barrier"] > 0


def test_products_are_rounded_before_sums(real: Facts) -> None:
    assert all(each["fused"] == 0 for each in part(real, "low_combine").values())


def test_nothing_is_spilled(real: Facts) -> None:
    """But one word where rows are sent as they are, and a few where ranks may be far."""
    for name, each in real.items():
        assert each["spills"] <= SPILLS.get(name, 0), (name, each)


def test_every_put_through_the_network_is_fenced(found: dict[str, Any]) -> None:
    """Whatever waits tells ranks that it is alive; a dispatch puts counts and rows besides, a
    combine tags, weights and sums.
    """
    through = part(found["facts"], "network")
    assert {name.split()[0] for name in through} == {
        "low_dispatch_kernel",
        "low_combine_kernel",
        "low_refuse_kernel",
    }
    for name, each in through.items():
        assert 0 < each["puts"] <= each["fences"], (name, each)
