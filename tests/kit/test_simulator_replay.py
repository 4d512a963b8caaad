"""One seed is one schedule, wherever the allocator puts tensors: what fails in a long run can be
replayed alone.
"""

from __future__ import annotations

from random import Random
from unittest import mock

import torch

import nvlink_ranks
import twolevel_ranks
from nvlink_pool import SOAK, run_all, without_devices
from tokenyard.testing.simulator import Simulator

pytestmark = without_devices
RUNS = 4 if SOAK > 1 else 3


def run_one(name: str, seed: int) -> None:
    if name == "twolevel":
        twolevel_ranks.check_seed(2, 2, seed)
    else:
        nvlink_ranks.check_seed(3, seed)


def scattered(random: Random) -> list[torch.Tensor]:
    """Some tensors to keep, with holes between them."""
    return [torch.empty(random.randrange(1, 3000)) for _ in range(100)][:: random.randrange(2, 4)]


def schedules(name: str, seed: int) -> list[tuple[int, list[int]]]:
    """Steps and trace of the same simulation, again and again."""
    ran: list[Simulator] = []
    run, random, kept = Simulator.run, Random(seed), list[list[torch.Tensor]]()

    def noted(sim: Simulator) -> None:
        ran.append(sim)
        run(sim)

    with mock.patch.object(Simulator, "run", noted):
        for _ in range(RUNS):
            kept.append(scattered(random))
            run_one(name, seed)
    return [(sim.steps, sim.trace) for sim in ran]


def test_a_seed_is_the_same_schedule_wherever_memory_lies() -> None:
    jobs = [("nvlink", seed) for seed in range(1, 2 * SOAK + (SOAK > 1))]
    jobs += [("twolevel", seed) for seed in range(SOAK)]
    for job, runs in zip(jobs, run_all("test_simulator_replay.schedules", jobs), strict=True):
        assert len(runs) == RUNS and runs[0][0] > 500
        assert all(other == runs[0] for other in runs[1:]), job
