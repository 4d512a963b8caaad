"""Symmetric memory of CPU processes: flags across processes, order of launches, deaths, and nothing
left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from run import command

pytest.importorskip("triton")

Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What every rank of every scenario in ``memory_ranks.py`` returned or raised."""
    done = subprocess.run(
        command("memory_ranks"), capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ranks(outcomes: Outcomes, name: str) -> list[Any]:
    return [outcomes[name]["ranks"][rank] for rank in sorted(outcomes[name]["ranks"])]


def test_no_name_is_left_whatever_happened(outcomes: Outcomes) -> None:
    assert len(outcomes) > 10
    assert {name: each["left"] for name, each in outcomes.items() if each["left"]} == {}


def test_programs_and_ranks_wait_for_each_other_and_launches_keep_their_order(
    outcomes: Outcomes,
) -> None:
    """out[e] = sum over ranks r of 1000 r + 10 e + lane; the last launch doubles three lanes of
    out[3].
    """
    rows = [[0] * 4, *([3000 + 30 * epoch + 3 * lane for lane in range(4)] for epoch in (1, 2, 3))]
    rows.append([2 * value for value in rows[3][:3]] + [0])
    assert ranks(outcomes, "programs_wait_for_each_other") == [[True, True, rows, 0, 0]] * 3


def test_small_integers_are_int64_too(outcomes: Outcomes) -> None:
    assert ranks(outcomes, "integers_are_int64") == [[64, (1 << 40) + (1 << 50)]]


def test_atomics_of_processes_do_not_lose_each_other(outcomes: Outcomes) -> None:
    """2 ranks x 2 programs x 200 times x 16 lanes, on a counter of rank 0."""
    assert ranks(outcomes, "atomics_are_atomic") == [2 * 2 * 200 * 16, 0]


def test_survivors_of_a_dead_rank_time_out_and_name_it(outcomes: Outcomes) -> None:
    timed_out = [1, {"phase": 7, "peer": 2, "counter": 2}, 1, 0]
    assert ranks(outcomes, "a_rank_dies_before_its_launch") == [timed_out, timed_out, "killed"]


def test_allocating_without_a_rank_that_died(outcomes: Outcomes) -> None:
    survivor, dead = ranks(outcomes, "a_rank_dies_before_allocating")
    assert dead == "killed"
    assert survivor.startswith(
        "PeerTimeout: rank 0 waited 1.0 s at allocating symmetric memory for rank(s) 1:"
    )


def test_the_maker_of_a_region_dies(outcomes: Outcomes) -> None:
    dead, survivor = ranks(outcomes, "a_rank_dies_with_the_name_in_hand")
    assert dead == "killed"
    assert survivor.startswith(
        "PeerTimeout: rank 1 waited 1.0 s at making shared memory for rank(s) 0:"
    )


def test_a_rank_that_comes_too_late_is_told_at_once(outcomes: Outcomes) -> None:
    first, late = ranks(outcomes, "a_late_rank_is_told")
    assert first.startswith("PeerTimeout: rank 0 waited")
    assert (
        late == "PeerTimeout: rank 1 came to allocating symmetric memory, but rank 0 has given up "
        "waiting there"
    )


def test_sizes_are_checked_on_every_rank(outcomes: Outcomes) -> None:
    for said in ranks(outcomes, "sizes_differ"):
        assert (
            said
            == "ValueError: ranks ask for regions of different sizes: rank 0 16384 bytes, rank 1 "
            "16400"
        )
    assert ranks(outcomes, "sizes_are_odd") == [
        "ValueError: num_bytes (1000) must be a positive multiple of 16"
    ]


def test_full_memory_fails_on_every_rank(outcomes: Outcomes) -> None:
    for said in ranks(outcomes, "memory_is_short"):
        assert said.startswith(
            "RuntimeError: making shared memory failed on rank 0: [Errno 28] No space left on "
            "device"
        )
        assert "--shm-size" in said


def test_a_program_that_fails_is_named(outcomes: Outcomes) -> None:
    assert ranks(outcomes, "a_program_is_killed") == [
        "RuntimeError: program 2 of kernel fail was ended by signal 11"
    ]
    said = "program 0 of kernel fail_beside_waiting was ended by signal 11"
    assert ranks(outcomes, "a_program_is_killed_beside_others") == [[0, said]]
    (said,) = ranks(outcomes, "a_program_raises")
    assert said.startswith("RuntimeError: program 0 of kernel fail failed:")
    assert "'trap;' is not emulated" in said


def test_memory_lives_as_long_as_its_tensors(outcomes: Outcomes) -> None:
    assert ranks(outcomes, "tensors_outlive_the_object") == [[0, [0, 3]]]
