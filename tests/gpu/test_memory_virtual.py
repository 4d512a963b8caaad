"""Many ranks on one GPU: threads with streams, kernels that wait for each other, gates."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import torch

from one_gpu import ENVIRONMENT
from run import command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
EPOCHS, LANES = 40, 16


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What the ranks of every scenario in ``memory_virtual.py`` returned or raised."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | ENVIRONMENT
    done = subprocess.run(
        command("memory_virtual"), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows(ranks: int) -> list[list[int]]:
    from memory_kernels import sums

    return [[0] * LANES, *(sums(ranks, epoch, LANES) for epoch in range(1, EPOCHS + 1))]


@pytest.mark.parametrize("ranks", [1, 3, 8, 16])
def test_kernels_of_all_ranks_run_side_by_side(outcomes: dict[str, Any], ranks: int) -> None:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count // ranks
    assert outcomes[f"exchange_{ranks}"] == [[True, rows(ranks), 0, num_sms]] * ranks


def test_two_objects_in_turns(outcomes: dict[str, Any]) -> None:
    assert outcomes["two_objects_4"] == [[rows(4), rows(4)]] * 4


def test_a_rank_that_launches_nothing_is_named(outcomes: dict[str, Any]) -> None:
    assert outcomes["a_rank_launches_nothing_3"] == [[True, 1, 0], None, [True, 1, 0]]


def test_a_rank_that_raises_ends_the_others_at_the_gate(outcomes: dict[str, Any]) -> None:
    errors = outcomes["a_rank_raises_3"]
    assert errors["2"] == "KeyError: 'of rank 2'"
    gate = "the gate before launches that wait for each other"
    for rank in ("0", "1"):
        assert (
            errors[rank]
            == f"PeerLost: rank {rank} waits at {gate}, but rank 2 failed: KeyError('of rank 2')"
        )


def test_backwards_of_all_ranks_run_at_once(outcomes: dict[str, Any]) -> None:
    assert outcomes["backwards_pass_the_gate_4"] == [[2.0] * 4] * 4


def test_every_rank_has_its_stream(outcomes: dict[str, Any]) -> None:
    streams = [stream for stream, _ in outcomes["ranks_have_streams_of_their_own_4"]]
    assert len(set(streams)) == 4
    assert 0 not in streams
    assert [values for _, values in outcomes["ranks_have_streams_of_their_own_4"]] == [[12.0]] * 4
