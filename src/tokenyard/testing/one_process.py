"""Run a test body on ranks of one process, such as coroutines of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple
from unittest import SkipTest

import torch

from tokenyard.engines.known import ON_KERNELS
from tokenyard.testing.job import Ranks
from tokenyard.testing.worker import call_body, skip_exceptions

Rank = Callable[[int, torch.device, Any], None]
"""Is one rank, given its number, its device, and a group that ``ExpertParallel`` takes."""


class BodyRun(NamedTuple):
    """A test body to run once per rank, for ``timeout`` seconds at most."""

    body: Callable[..., Any]
    engine: str
    arguments: dict[str, Any]
    world_size: int
    timeout: float = inf


def run_in_process(run: BodyRun, start: Callable[[Rank], object]) -> None:
    """``start`` calls its argument once per rank: each runs the body with its :class:`Ranks`."""
    body, engine, arguments, world_size, _ = run
    if engine not in ON_KERNELS:
        raise SkipTest(
            f"ranks of one process have engines {', '.join(ON_KERNELS)} only, not {engine!r}"
        )
    skipped: list[str] = []

    def be(rank: int, device: torch.device, group: Any) -> None:
        try:
            call_body(body, arguments, Ranks(rank, world_size, device, engine, group))
        except skip_exceptions() as error:
            skipped.append(str(error))

    start(be)
    if len(skipped) == world_size:
        raise SkipTest("; ".join(sorted(set(skipped))))
    if skipped:
        raise RuntimeError(
            f"{len(skipped)} of {world_size} ranks skipped ({skipped[0]}), but not every rank did"
        )


def run_in_simulator(
    body: Callable[..., Any], engine: str, arguments: dict[str, Any], world_size: int, seed: int
) -> None:
    """On the CPU, under the schedule of ``seed``; kernels are interpreted."""
    from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

    def start(be: Rank) -> None:
        def rank(here: SimulatedRank) -> None:
            be(here.rank, here.device, SimulatedGroup(here))

        simulate(world_size, rank, seed=seed)

    run_in_process(BodyRun(body, engine, arguments, world_size), start)
