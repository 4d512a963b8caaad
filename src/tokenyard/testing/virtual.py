"""Run a test body on ranks of one process: threads that share one GPU, or coroutines of the
simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

from tokenyard.engines.known import ON_KERNELS
from tokenyard.memory.one_gpu import VirtualGroup, run_virtual_ranks
from tokenyard.testing.job import Ranks
from tokenyard.testing.worker import call_body, skip_exceptions


def run_on_virtual_ranks(
    body: Callable[..., Any],
    engine: str,
    arguments: dict[str, Any],
    world_size: int,
    timeout: float,
) -> None:
    """Run ``body`` once per rank. It gets the same :class:`Ranks`, with a group that
    ``ExpertParallel`` takes.
    """
    _skip_others(engine)
    skipped: list[str] = []

    def rank(group: VirtualGroup) -> None:
        _call(
            body, arguments, Ranks(group.rank(), world_size, group.device, engine, group), skipped
        )

    run_virtual_ranks(world_size, rank, "cuda", timeout)
    _skip_as_ranks_did(skipped, world_size)


def run_in_simulator(
    body: Callable[..., Any], engine: str, arguments: dict[str, Any], world_size: int, seed: int
) -> None:
    """The same on the CPU, under the schedule of ``seed``; kernels are interpreted."""
    _skip_others(engine)
    from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

    skipped: list[str] = []

    def rank(here: SimulatedRank) -> None:
        _call(
            body,
            arguments,
            Ranks(here.rank, world_size, here.device, engine, SimulatedGroup(here)),
            skipped,
        )

    simulate(world_size, rank, seed=seed)
    _skip_as_ranks_did(skipped, world_size)


def _call(
    body: Callable[..., Any], arguments: dict[str, Any], ranks: Ranks, skipped: list[str]
) -> None:
    """Be one rank; add to ``skipped`` why it skips."""
    try:
        call_body(body, arguments, ranks)
    except skip_exceptions() as error:
        skipped.append(str(error))


def _skip_as_ranks_did(skipped: list[str], world_size: int) -> None:
    if len(skipped) == world_size:
        raise SkipTest("; ".join(sorted(set(skipped))))
    if skipped:
        raise RuntimeError(
            f"{len(skipped)} of {world_size} ranks skipped ({skipped[0]}), but not every rank did"
        )


def _skip_others(engine: str) -> None:
    if engine not in ON_KERNELS:
        raise SkipTest(
            f"ranks of one process have engines {', '.join(ON_KERNELS)} only, not {engine!r}"
        )
