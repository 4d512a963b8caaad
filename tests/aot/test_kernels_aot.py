"""Kernels of engine nvlink as sm_90 machine code: wide accesses, fences, no fused sums, programs
that fit together.

Compiled ahead of time, without a GPU, with the constants that the engine uses for rows of 7168
channels on 4 ranks. ``make soak`` (``TOKENYARD_SOAK_SEEDS``) compiles every variant.

A few variants keep a few words of a thread in local memory (:data:`SPILLS`): a program has 1024
threads of 64 registers or 512 of 128, and what casts a row, or has eight rows on their way at once,
holds more. That is accepted: those words stay in the first-level cache beside rows that come over a
link, and where engine twolevel's tilings with and without were both timed, those without were no
faster (``docs/benchmarks/experiments-twolevel.md``). What is called most spills nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compiling import compiled
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices

Facts = dict[str, dict[str, Any]]

SPILLS = {
    "plan_kernel FLAT exact fresh bf16 @8": 6,
    "two_direct_kernel FLAT exact fresh in place bf16 @24": 16,
    "two_direct_kernel FLAT exact fresh in place bf16 @8": 18,
    "two_direct_kernel FLAT exact fresh in a heap bf16 @24": 19,
    "two_direct_kernel FLAT exact fresh in a heap bf16 @8": 21,
    "two_direct_kernel FLAT exact fresh in place fp8 @132": 20,
    "two_direct_kernel FLAT exact fresh in a heap fp8 @132": 3,
    "two_direct_kernel FLAT exact fresh in place fp8 @24": 118,  # eight rows and their metadata
    "two_direct_kernel FLAT exact fresh in place fp8 @8": 118,
    "two_direct_kernel FLAT exact fresh in a heap fp8 @24": 107,
    "two_direct_kernel FLAT exact fresh in a heap fp8 @8": 107,
    "two_direct_kernel FLAT exact cached in place fp8 @24": 54,
    "two_direct_kernel FLAT exact cached in place fp8 @8": 54,
    "two_direct_kernel FLAT exact cached in a heap fp8 @24": 23,
    "two_direct_kernel FLAT exact cached in a heap fp8 @8": 23,
    "two_dispatch_kernel EXPERT_MAJOR exact fresh fp8 @24 of 2 ranks": 33,
    "two_dispatch_kernel EXPERT_MAJOR exact fresh fp8 @24": 31,
    "two_dispatch_kernel EXPERT_MAJOR exact fresh fp8 @8": 31,
    "fresh in a heap FP8": 95,
    "fresh in a heap MXFP8": 97,
    "FP8": 94,  # a row that is cast is held in registers
    "two_combine_kernel FLAT exact back @132": 2,
    "two_combine_kernel FLAT exact back float32 @132": 16,
    "two_combine_kernel FLAT exact back reducing weights @132": 20,
    "two_combine_kernel FLAT exact back @24": 12,
    "two_combine_kernel FLAT exact back @8": 12,
    "two_combine_kernel EXPERT_MAJOR exact back float32 @132": 25,
    "two_combine_kernel EXPERT_MAJOR exact back weighted @132": 5,
    "two_combine_kernel EXPERT_MAJOR exact back with two biases @132": 5,
    "two_combine_kernel EXPERT_MAJOR exact back @24": 5,
    "two_combine_kernel EXPERT_MAJOR exact back @8": 5,
}
"""Most local loads and stores where there may be some, by words of the name. All others have none.
"""


@pytest.fixture(scope="module")
def facts() -> Facts:
    return compiled("nvlink_compile", *(["all"] if SOAK > 1 else []))


@pytest.fixture
def real(facts: Facts) -> Facts:
    """Without the planted one."""
    return {name: each for name, each in facts.items() if name != "planted"}


def wrong(
    facts: Facts, is_fine: Callable[[str, dict[str, Any]], bool]
) -> list[tuple[str, dict[str, Any]]]:
    return [(name, each) for name, each in facts.items() if not is_fine(name, each)]


def test_all_programs_of_a_launch_fit_on_the_device(real: Facts) -> None:
    """They wait for each other, so all must be resident."""
    assert not wrong(real, lambda _, each: 0 < each["grid"] <= each["most"])


def test_rows_move_16_bytes_at_a_time(real: Facts) -> None:
    moving = {
        name: each
        for name, each in real.items()
        if name.startswith(
            (
                "two_dispatch_kernel",
                "two_direct_kernel",
                "push_kernel FLAT",
                "two_combine_kernel FLAT",
            )
        )
    }
    assert len(moving) > 10
    # a dispatch in place has one row of 16 KiB in flight, which is 2 loads of 512 threads
    least = {name: 2 if name.startswith("two_direct") else 3 for name in moving}
    assert not wrong(
        moving,
        lambda name, each: (
            each["loads 128"] + each["copies 128"] >= least[name] and each["stores 128"] >= 4
        ),
    )
    copied = {
        name: each for name, each in moving.items() if "FLAT" in name and "FP8" not in name
    }  # no padding, not cast
    assert len(copied) > 10 and not wrong(
        copied, lambda _, each: each["cached loads"] == each["kept stores"] == 0
    )


def test_pushers_and_those_who_sum_both_do_so(real: Facts) -> None:
    """Four and more accesses of a row at once, two of each rank's in sums; with few programs these
    go through shared memory. So do two rounds of sums by expert: eight result rows of a pusher's
    arrival row, eight and each rank's row of those who sum.
    """
    pushing = {name: each for name, each in real.items() if name.startswith("push_kernel")}
    summed = {name: each for name, each in pushing.items() if "EXPERT" in name}
    pushing = {name: each for name, each in pushing.items() if name not in summed}
    assert len(pushing) >= 3 and summed
    assert not wrong(
        pushing,
        lambda _, each: each["loads 128"] >= 4 and each["loads 128"] + each["copies 128"] >= 12,
    )
    few = {name: each for name, each in pushing.items() if not name.endswith("@132")}
    assert not wrong(few, lambda _, each: each["copies 128"] >= 8)
    assert not wrong(
        summed, lambda _, each: each["copies 128"] >= 2 * (8 + 8 + 4) and each["stores 128"] >= 2
    )


def test_next_channels_are_copied_while_others_are_summed(real: Facts) -> None:
    """Through shared memory, 16 bytes at a time; not of results by expert, where a row is the sum
    of several.
    """
    copying = {
        name: each
        for name, each in real.items()
        if name.startswith("two_combine_kernel FLAT exact back")
    }
    assert len(copying) >= 3
    assert not wrong(copying, lambda _, each: each["copies 128"] >= 4)


def test_shared_memory_suffices(real: Facts) -> None:
    """227 KiB of a multiprocessor, for all its programs if they spread over as many as the engine
    may use.
    """

    def fits(name: str, each: dict[str, Any]) -> bool:
        programs = -(-each["grid"] // int(name.split("@")[1].split()[0]))
        return programs * (each["shared"] + 1024) <= 227 << 10 and programs <= each["fit"]

    assert not wrong(real, fits)


def test_every_wait_acquires(real: Facts) -> None:
    """A load (or, for several counters, an atomic) with system scope, after which no old line of
    the cache is believed.
    """
    idle = tuple(name for name in real if name.startswith(("unpack_kernel", "join_")))
    waiting = {name: each for name, each in real.items() if name not in idle}
    assert len(waiting) > 10 and sum(name.startswith("join_") for name in idle) == 2
    assert not wrong(
        waiting, lambda _, each: each["acquires"] > 0 and each["invalidations"] >= each["acquires"]
    )
    rings = {
        name: each
        for name, each in real.items()
        if name.startswith(("two_dispatch_kernel", "two_combine_kernel"))
    }
    assert not wrong(rings, lambda _, each: each["strong loads"] > 0)


def test_every_release_has_its_barrier_and_its_fence(real: Facts) -> None:
    releasing = {name: each for name, each in real.items() if not name.startswith("unpack_kernel")}
    assert not wrong(
        releasing, lambda _, each: each["releases"] > 0 and each["releases without barrier"] == 0
    )
    assert not wrong(releasing, lambda _, each: each["fences"] >= each["releases"])


def test_a_missing_barrier_would_show(facts: Facts) -> None:
    assert facts["planted"]["releases without barrier"] > 0


def test_products_are_rounded_before_sums(real: Facts) -> None:
    """Sums have the same bits as torch's. (A cast divides, which takes fused steps.)"""
    sums = {name: each for name, each in real.items() if "FP8" not in name}
    assert any("weighted" in name for name in sums)
    assert not wrong(sums, lambda _, each: each["fused"] == 0)


def test_registers_suffice(real: Facts) -> None:
    """Nothing is spilled to local memory, but for what :data:`SPILLS` lists."""

    def allowed(name: str) -> int:
        return next((most for words, most in SPILLS.items() if words in name), 0)

    assert not wrong(real, lambda name, each: each["spills"] <= allowed(name))
    main = (
        "two_dispatch_kernel FLAT exact fresh bf16",
        "two_dispatch_kernel FLAT exact cached fp8",
        "push_kernel FLAT exact back in place @",
    )
    assert all(any(name.startswith(words) and not allowed(name) for name in real) for words in main)
