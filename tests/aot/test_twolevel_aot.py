"""Kernels of engine twolevel as sm_90 machine code, as ``test_kernels_aot.py`` has nvlink's; with
NVSHMEM's calls, as PTX. ``make soak`` compiles those for few multiprocessors too.
"""

from __future__ import annotations

from typing import Any

import pytest

from compiling import compiled
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices

Facts = dict[str, dict[str, Any]]
SPILLS = {
    "two_dispatch_kernel FLAT bf16 @132": 135,
    "two_dispatch_kernel FLAT cached bf16 @132": 75,
    "two_dispatch_kernel FLAT fp8 @132": 250,
    "two_dispatch_kernel FLAT cast @132": 260,
    "two_dispatch_kernel FLAT cast MXFP8 @132": 251,
    "two_dispatch_kernel EXPERT_MAJOR bf16 @132": 85,
    "two_dispatch_kernel EXPERT_MAJOR cast @132": 120,
    "two_combine_kernel FLAT bf16 @132": 20,
    "two_combine_kernel FLAT reducing weights @132": 95,
    "two_combine_kernel EXPERT_MAJOR bf16 @132": 55,
    "two_direct_kernel FLAT bf16 @132": 80,
    "two_direct_kernel FLAT fp8 @132": 175,
    "two_direct_kernel FLAT cast @132": 187,
    "two_direct_kernel FLAT cast MXFP8 @132": 189,
    "two_direct_kernel FLAT bf16 @24": 85,
    "plan_kernel FLAT bf16 @24": 6,
    "two_dispatch_kernel FLAT bf16 @24": 133,
    "two_dispatch_kernel FLAT cached bf16 @24": 66,
    "two_combine_kernel FLAT bf16 @24": 60,
    "narrow rows, 2 x 8": 50,
}
"""Most local loads and stores where there may be some; all others have none. All roles of a kernel
share one loop, and a program has all registers of its multiprocessor. On H200s tilings without
spills were no faster, or slower (``docs/benchmarks/experiments-twolevel.md``)."""


@pytest.fixture(scope="module")
def everything() -> Facts:
    return compiled("twolevel_compile", *(["all"] if SOAK > 1 else []))


@pytest.fixture
def facts(everything: Facts) -> Facts:
    """Between peers."""
    return {name: each for name, each in everything.items() if not name.endswith("network")}


def moving(facts: Facts) -> Facts:
    kernels = ("two_dispatch", "two_combine", "two_direct", "two_pull")
    return {name: each for name, each in facts.items() if name.startswith(kernels)}


def waiting(facts: Facts) -> Facts:
    return {name: each for name, each in facts.items() if not name.startswith("unpack_kernel")}


def test_all_programs_of_a_launch_fit_on_the_device(facts: Facts) -> None:
    for name, each in facts.items():
        assert 0 < each["grid"] <= each["most"], (name, each)


def test_short_rows_compile_for_nodes_of_8(facts: Facts) -> None:
    assert facts["narrow rows, 2 x 8"]["registers"] > 0


def test_rows_move_16_bytes_at_a_time(facts: Facts) -> None:
    """Of what a combine in place reads, copies to shared memory: four at once of each of two ranks'
    rows, in both its sums, and of the other node's. It stores two kinds of sums."""
    assert len(moving(facts)) > (17 if SOAK > 1 else 5)
    for name, each in moving(facts).items():
        pulls = name.startswith("two_pull")
        assert each["copies 128"] >= 20 if pulls else each["loads 128"] >= 3, (name, each)
        assert each["stores 128"] >= (2 if pulls else 3), (name, each)
        if "MAJOR" not in name and "cast" not in name:
            assert each["cached loads"] == 0, (name, each)
            # Results.
            assert each["kept stores"] == 0 or name.startswith(("two_combine", "two_pull")), (
                name,
                each,
            )


def test_waits_acquire_and_releases_are_fenced(facts: Facts) -> None:
    for name, each in waiting(facts).items():
        assert 0 < each["acquires"] <= each["invalidations"], (name, each)
        assert 0 < each["releases"] <= each["fences"], (name, each)
        assert each["releases without barrier"] == 0, (name, each)
    for name, each in moving(facts).items():
        assert each["strong loads"] > 0, (name, each)


def test_registers_suffice_and_sums_are_not_fused(facts: Facts) -> None:
    for name, each in facts.items():
        assert each["spills"] <= SPILLS.get(name, 0), (name, each)
        # A cast divides, which takes fused steps.
        assert each["fused"] == 0 or "cast" in name, (
            name,
            each,
        )


def test_every_put_through_the_network_is_fenced(everything: Facts) -> None:
    """And kernels that talk to other nodes do make NVSHMEM's calls; mapped rows need none."""
    through = {name: each for name, each in everything.items() if name.endswith("network")}
    assert {name.split()[0] for name in waiting(through)} == {
        "plan_kernel",
        "two_call_barrier_kernel",
        "two_dispatch_kernel",
        "two_combine_kernel",
        "two_direct_kernel",
        "two_pull_kernel",
    }
    for rows in ("two_direct_kernel FLAT bf16", "two_dispatch_kernel FLAT bf16")[:SOAK]:
        assert 0 < through[f"{rows} mapped network"]["puts"] < through[f"{rows} network"]["puts"]
    for name, each in waiting(through).items():
        assert 0 < each["puts"] <= each["fences"], (name, each)
