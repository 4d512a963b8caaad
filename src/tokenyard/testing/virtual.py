"""Run a test body on ranks of one process: threads that share one GPU, or coroutines of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

from tokenyard.memory.virtual import VirtualGroup, run_virtual_ranks
from tokenyard.testing.job import Ranks
from tokenyard.testing.worker import call_body

ON_KERNELS = ("nvlink", "twolevel", "low_latency")
"""Engines that ranks of one process have."""


def run_on_virtual_ranks(
    body: Callable[..., Any], engine: str, arguments: dict[str, Any], world_size: int, timeout: float
) -> None:
    """Run ``body`` once per rank. It gets the same :class:`Ranks`, with a group that ``ExpertParallel`` takes."""
    _skip_others(engine)

    def rank(group: VirtualGroup) -> None:
        call_body(body, arguments, Ranks(group.rank(), world_size, group.device, engine, group))

    run_virtual_ranks(world_size, rank, "cuda", timeout)


def run_in_simulator(
    body: Callable[..., Any], engine: str, arguments: dict[str, Any], world_size: int, seed: int
) -> None:
    """The same on the CPU, under the schedule of ``seed``; kernels are interpreted."""
    _skip_others(engine)
    from tokenyard.testing.simulator import SimulatedRank, simulate
    from tokenyard.testing.simulator.group import SimulatedGroup

    def rank(here: SimulatedRank) -> None:
        call_body(body, arguments, Ranks(here.rank, world_size, here.device, engine, SimulatedGroup(here)))

    simulate(world_size, rank, seed=seed)


def _skip_others(engine: str) -> None:
    if engine not in ON_KERNELS:
        raise SkipTest(f"ranks of one process have engines {', '.join(ON_KERNELS)} only, not {engine!r}")
