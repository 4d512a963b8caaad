"""Engine nvlink goes on without a dead rank on GPUs. See ``make test-gpu``."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from cases import Case, dispatch, skip_without_gpus
from one_gpu import ENVIRONMENT
from recovering import ten_good_calls
from run import command
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
processes = pytest.mark.skipif(
    os.environ.get(DEVICE_VARIABLE, "cpu") != "cuda",
    reason="needs ranks that are processes: make test-gpu",
)


def test_virtual_ranks_go_on_without_one_that_died() -> None:
    """In a plan, and in a combine; then ten good calls, through rings and in place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command("recover_virtual"), capture_output=True, text=True, check=False,
        env=environment | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for seen in json.loads(done.stdout.splitlines()[-1]):
        assert seen == [[2, [0, 1, 3], 10, "nvlink"] if rank != 2 else None for rank in range(4)]


@processes
@distributed_test(world_size=(2, 3, 4), engine="nvlink", may_die=(1,))
def test_processes_go_on_without_one_that_was_killed(ranks: Ranks) -> None:
    """In mid-life. From three on, the others map each other's memory anew without a group."""
    skip_without_gpus(ranks)
    case = Case(ranks.world_size)
    ep = case.make(ranks, timeout=3.0)
    dispatch(ranks, ep, case)
    dist.barrier()
    torch.cuda.synchronize()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        for _ in range(1000):
            dispatch(ranks, ep, case)

    with pytest.raises(ty.PeerTimeout) as caught:
        go_on()
    assert caught.value.rank == 1
    assert ep.recover() == [rank for rank in range(ranks.world_size) if rank != 1]
    ten_good_calls(ranks, ep, (1,))
    ep.close()
