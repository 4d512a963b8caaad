"""Compiling kernels without a GPU, and what a launch hands to the driver."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from compiling import compiled
from tokenyard.memory.kernel_launch import Processor, resident_programs, wait_until

pytestmark = pytest.mark.portable

HOPPER = Processor(registers=65536, threads=2048, shared_bytes=228 << 10)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``memory_compile.py`` found, in a process that does not interpret kernels."""
    if torch.cuda.is_available():
        pytest.skip(
            "launches into a stand-in for the driver, which a machine with GPUs has for real"
        )
    return compiled("memory_compile", str(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def launched(facts: dict[str, Any]) -> dict[str, Any]:
    if not shutil.which("cc"):
        pytest.skip("no C compiler for Triton's launcher")
    return facts["launched"]


@pytest.mark.parametrize("name", ["everybody", "double", "widths", "multiply_add", "count_up"])
def test_every_argument_is_an_int64(facts: dict[str, Any], name: str) -> None:
    known = facts[name]
    assert [kind for kind in known["signature"].values() if kind != "constexpr"] == ["i64"] * known[
        "args"
    ]
    assert known["params"] == ["u64"] * known["args"]


def test_registers_are_bounded_where_asked(facts: dict[str, Any]) -> None:
    assert facts["everybody"]["maxnreg"] == ["40"]
    assert facts["free"] == []


def test_products_are_rounded_before_sums(facts: dict[str, Any]) -> None:
    """256 lanes on 128 threads: two multiplications and two additions each, none of them fused."""
    assert facts["multiplications"] == {"FMUL": 2, "FADD": 2, "FFMA": 0}


def test_wrong_constants_and_orders_are_refused(facts: dict[str, Any]) -> None:
    assert facts["wrong constants"] == "double: constants (['V']) must be ['W']"
    assert (
        facts["wrong order"]
        == "constant_in_front: tl.constexpr parameters must come after the others"
    )


def test_a_launch_reaches_the_driver_as_it_was_meant(launched: dict[str, Any]) -> None:
    """Launches, grid, 1, threads, shared bytes, stream of device 3, function, attributes; then the
    arguments' 64 bits.
    """
    assert launched["first"] == [1, 24, 1, 256, 8, 1003, 77, 2, (1 << 47) + 1, 1, 16, (1 << 64) - 5]
    assert launched["second"] == [7, 1, 1, 256, 8, 1003, 77, 0, 2, 3, 4, 5]
    assert launched["launches"] == 6


def test_structs_are_laid_out_as_their_fields(launched: dict[str, Any]) -> None:
    """Two machine codes, as 1 and True are not the same constant in a struct either; then the
    arguments' 64 bits.
    """
    assert launched["structs"] == [2, (1 << 47) + 1, 1, (1 << 64) - 2, 3]


def test_few_programs_are_placed_in_clusters(launched: dict[str, Any]) -> None:
    """Programs and those of a cluster, on a GPU that puts 24 at most in clusters."""
    assert launched["clusters"] == {
        "1": [1, 1],
        "8": [8, 4],
        "22": [22, 1],
        "24": [24, 4],
        "28": [28, 1],
    }


def test_one_kernel_serves_all_integers_and_one_each_all_constants(
    launched: dict[str, Any],
) -> None:
    assert launched["loads"] == 1
    assert launched["loads of 1 and True"] == 2


def test_programs_are_set_up_early_in_graphs_only(
    facts: dict[str, Any], launched: dict[str, Any]
) -> None:
    assert facts["waits"] == [1, 0, 0]  # the last for sm_80, which cannot
    assert {case for case, count in launched["attributes"].items() if count} == {
        "early True, captured True"
    }


def test_a_grid_that_does_not_fit_is_refused(launched: dict[str, Any]) -> None:
    assert (
        launched["too many"]
        == "grid (101) of double must be at most 100: all programs run together"
    )


def test_profilers_hear_of_launches(launched: dict[str, Any]) -> None:
    assert launched["heard"] == ["double"]


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared", "programs"),
    [
        (32, 64, 0, 1),  # 32 x 32 x 64 registers are all there are
        (32, 65, 0, 0),  # given out by 8: 72
        (16, 64, 0, 2),
        (16, 128, 0, 1),
        (8, 255, 0, 1),
        (4, 32, 0, 16),  # 2048 threads
        (1, 16, 0, 32),  # never more programs
        (4, 32, 100 << 10, 2),
        (4, 32, 227 << 10, 1),
        (4, 32, 228 << 10, 0),
    ],
)
def test_programs_per_multiprocessor(
    num_warps: int, registers: int, shared: int, programs: int
) -> None:
    assert resident_programs(HOPPER, num_warps, registers, shared) == programs


def test_waiting_polls_until_ready_or_out_of_time() -> None:
    polls = iter([False] * 300 + [True])
    assert wait_until(lambda: next(polls), 60)
    assert next(polls, None) is None
    assert not wait_until(lambda: False, 0.02)
    assert wait_until(lambda: True, 0)
