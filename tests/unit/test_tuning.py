# ruff: noqa: E402 (Triton is imported after the check)
"""How work of engines nvlink and twolevel is cut into programs."""

from __future__ import annotations

from itertools import chain, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from tokenyard.engines.tuning import peer_tuning
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.kernels.two_scheduler import dealt, tasks_of_worker
from tokenyard.testing import interpreter
from tokenyard.topology import Topology, num_tasks


@triton.jit
def deal(found, rounds, tasks: tl.constexpr, k: tl.constexpr):
    """``found[worker, round, 2]``: what :func:`dealt` gives of bundle 1."""
    worker = tl.program_id(0)
    for i in range(rounds):
        task, channel = dealt(worker, i + 0, 1, tasks, k)
        tl.store(found + (worker * rounds + i) * 2, task)
        tl.store(found + (worker * rounds + i) * 2 + 1, channel)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("sms", [1, 2, 3, 8, 16, 20, 24, 32, 64, 131])
def test_no_more_programs_than_multiprocessors_are_lent(sms: int, ranks: int) -> None:
    tuning = peer_tuning(sms, Topology(1, ranks), all_sms=False)
    for config in (tuning.dispatch, tuning.send, tuning.reduce, tuning.direct):
        workers = tuning.workers(config, num_tasks(ranks, 1), tuning.bundle)
        assert 1 <= workers * tuning.channels // tuning.bundle <= sms
    assert max(2, sms) >= tuning.pushers + tuning.gatherers >= 2


@pytest.mark.parametrize("bundle", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_workers_of_a_bundle_have_each_task_once(ranks: int, bundle: int) -> None:
    """In the rounds that kernels make, whether some only send or all share all tasks, of dispatch
    and of combine. Senders have sends and the call barrier: tasks 1 to R - 1, and the last, which
    does nothing but in channel 0.
    """
    channels = range(bundle, 2 * bundle)
    for tasks in (num_tasks(ranks, 1), ranks + 1):
        barrier = (tasks - 1, bundle)
        tasks_of_channels = set(product(range(tasks - 1), channels)) | {barrier}
        sends = set(product(range(1, ranks), channels)) | {barrier}
        for workers in range(1, (tasks if bundle == 1 else min(tasks * bundle, 6)) + 1):
            for senders in range(min(workers, ranks + 1)):
                rounds: int = tasks_of_worker(tasks, ranks, workers, senders, bundle)
                found = torch.full((workers, rounds, 2), -1, dtype=torch.int32)
                grid = SimpleNamespace(workers=workers, senders=senders, bundle=bundle)
                k: Any = SimpleNamespace(ranks=ranks, grid=grid)
                with interpreter.patched_language():
                    deal[(workers,)](found, rounds, tasks, k=k)
                dealt_to = [[tuple(each) for each in row if each[0] < tasks]
                            for row in found.tolist()]  # fmt: skip
                idle = set(product([tasks - 1], channels)) - {barrier}
                assert sorted(set(chain(*dealt_to)) - idle) == sorted(tasks_of_channels)
                assert len([*chain(*dealt_to)]) == len({*chain(*dealt_to)})
                if senders:
                    assert {*chain(*dealt_to[:senders])} == sends


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_calls_in_place_have_as_many_programs(nodes: int, ranks: int) -> None:
    """Those of engine ``twolevel``, whatever it may use: they end by one count of programs. Engine
    ``nvlink`` pushes in combine, so a dispatch there has all that may run, whatever the channels.
    """
    grid = Topology(nodes, ranks)
    for num_sms in (1, 8, 24, 32, 64, 132):
        for channels in (1, 8, 64):
            tuning = peer_tuning(num_sms, grid, all_sms=num_sms == 132, channels=channels)
            config = SimpleNamespace(world_size=grid.world_size)
            workspace: Any = SimpleNamespace(pulls=True, grid=grid, tuning=tuning, config=config)
            programs = cast("Any", PeerWorkspace.direct_programs).fget
            assert programs(workspace) == tuning.channels * tuning.workers(tuning.pull, nodes + 1)
            workspace.pulls = False
            if nodes == 1 and ranks > 1 and channels == 64:
                assert programs(workspace) == num_sms
            assert programs(workspace) <= num_tasks(grid.world_size, 1) * tuning.channels
