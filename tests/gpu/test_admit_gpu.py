"""A new process takes the place of a rank that was killed, on GPUs, with engine nvlink: memory is
mapped by processes of different age. See ``make test-gpu``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from cases import Case, dispatch, on_grid, skip_without_gpus
from recovering import set_timeout, ten_good_calls
from run import command
from tokenyard.rendezvous import group_store
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get(DEVICE_VARIABLE, "cpu") != "cuda" or torch.cuda.device_count() < 2,
        reason="needs two GPUs, a process on each: make test-gpu",
    ),
]
STARTED = time.monotonic()


def say(ranks: Ranks, text: str) -> None:
    """Where the test is: what it prints is all there is to see if it hangs."""
    now = time.monotonic() - STARTED
    print(f"[{now:7.2f} s] rank {ranks.rank}: {text}", file=sys.stderr, flush=True)


def plain_store(ranks: Ranks) -> Any:
    """The store of all processes."""
    store: Any = group_store(ranks.group)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def until_lost(ranks: Ranks, ep: ty.ExpertParallel, case: Case) -> ty.PeerTimeout:
    for _ in range(1000):
        try:
            dispatch(ranks, ep, case)
        except ty.PeerTimeout as lost:
            return lost
    raise AssertionError("rank 1 was killed, and nobody noticed")


@distributed_test(world_size=(2, 3, 4), engine=("nvlink", "twolevel"), may_die=(1,))
def test_a_new_process_takes_the_place_of_one_that_was_killed(ranks: Ranks) -> None:
    """Twice: the second one joins a rank that has made memory three times, and it none."""
    skip_without_gpus(ranks)
    case = Case(ranks.world_size)
    with on_grid(1, ranks.world_size):
        ep = case.make(ranks, timeout=3.0)
    dispatch(ranks, ep, case)
    dist.barrier()
    torch.cuda.synchronize()
    say(ranks, f"made: {ep.why}")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert until_lost(ranks, ep, case).rank == 1
    for number, at in enumerate(("first", "second")):
        began = time.monotonic()
        assert ep.recover() == [rank for rank in range(ranks.world_size) if rank != 1]
        say(ranks, f"recovered in {time.monotonic() - began:.3f} s: {ep.why}")
        assert ep.epoch == 2 * number + 1
        ten_good_calls(ranks, ep, (1,))
        set_timeout(ep, 30.0)  # a newcomer loads its kernels in its first calls
        newcomer, store = None, plain_store(ranks)
        if ranks.rank == 0:
            words = (str(store.port), "1", at, str(ranks.world_size), str(ep.epoch + 1), "cuda:1")
            newcomer = subprocess.Popen(command("newcomer", *words))
        store.wait([f"newcomer/{at}"], timedelta(seconds=300))
        say(ranks, "the newcomer is here")
        began = time.monotonic()
        ep.admit(1, at)
        say(ranks, f"admitted in {time.monotonic() - began:.3f} s: {ep.why}")
        assert ep.epoch == 2 * number + 2 and ep.engine == "nvlink"
        ten_good_calls(ranks, ep, ())
        say(ranks, "ten good calls with the newcomer")
        ep.warmup()
        lost = until_lost(ranks, ep, case)
        say(ranks, f"the newcomer has killed itself: {lost}")
        assert lost.rank == 1
        if newcomer is not None:
            assert newcomer.wait(600) == -signal.SIGKILL
    assert ep.recover() == [rank for rank in range(ranks.world_size) if rank != 1]
    ten_good_calls(ranks, ep, (1,))
    ep.close()
