"""Engine nvlink with real concurrency: ranks and programs are processes over shared memory, kernels
are interpreted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

import pytest

from nvlink_pool import SOAK
from run import command

pytest.importorskip("triton")

TIMEOUT = 15.0
"""Of ``memory_nvlink.py``, where a rank dies."""


GOOD = ["flat_there_and_back_in_place_too", "cast_rows_by_expert_of_static_shapes"][:SOAK]
OTHERS = ["a_rank_dies_before_its_combine", "results_outlive_their_object"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """What every rank of each scenario in ``memory_nvlink.py`` returned or raised."""
    line = command("memory_nvlink", *GOOD, *OTHERS)
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", GOOD)
def test_results_have_the_bits_of_the_oracle(
    outcomes: dict[str, dict[str, Any]], name: str
) -> None:
    assert outcomes[name] == {"ranks": {"0": "fine", "1": "fine"}, "left": []}


def test_a_rank_that_dies_is_named(outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes["a_rank_dies_before_its_combine"]
    (said, rank), dead = found["ranks"]["0"], found["ranks"]["1"]
    assert (rank, dead, found["left"]) == (1, "killed", [])
    assert re.match(
        rf"rank 1 did not send its (barrier signal|rows) to rank 0 within {TIMEOUT} s "
        rf"\(combine #1, waiting for ",
        said,
    )


def test_results_outlive_their_object(outcomes: dict[str, dict[str, Any]]) -> None:
    """A view that nobody overwrites keeps its memory; a torch that can forbid to use it says why
    instead.
    """
    found = outcomes["results_outlive_their_object"]["ranks"]["0"]
    assert found["dropped"] in (
        "fine",
        "RuntimeError: this view of symmetric memory ended with its object",
    )
    assert found["closed"] == "fine" or "its ExpertParallel is closed" in found["closed"]
