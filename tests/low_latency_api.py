"""``ExpertParallel(engine="low_latency")`` on simulated ranks. Reached through ``nvlink_pool.py``: kernels are interpreted here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import low_latency_bodies as bodies
from cases import Case
from low_latency_bodies import ENGINE, MAJOR, static
from tokenyard.testing import Ranks
from tokenyard.testing.simulator import SimulatedRank, simulate
from tokenyard.testing.simulator.group import SimulatedGroup

NUM_SMS = 2
"""Few programs: each is a coroutine."""


def _on_ranks(body: Callable[[Ranks, Case, int], None], case: Case, seed: int) -> None:
    def rank(here: SimulatedRank) -> None:
        body(Ranks(here.rank, case.world_size, here.device, ENGINE, SimulatedGroup(here)), case, NUM_SMS)

    simulate(case.world_size, rank, seed=seed)


def shared_body(world_size: int, seed: int, options: dict[str, Any]) -> None:
    _on_ranks(bodies.shared_body, static(world_size, seed=seed, **options), seed)


def hooks(seed: int) -> None:
    _on_ranks(bodies.hooks, static(2, seed=seed), seed)


def capacity(seed: int) -> None:
    _on_ranks(bodies.capacity, static(2, seed=seed, layout=MAJOR, expert_alignment=4, num_tokens=8), seed)


def by_column(world_size: int, options: dict[str, Any]) -> None:
    _on_ranks(bodies.by_column, static(world_size, **options), world_size)


def left_out(world_size: int, options: dict[str, Any]) -> None:
    _on_ranks(bodies.left_out, static(world_size, **options), world_size)


def refusals(seed: int) -> None:
    _on_ranks(bodies.refusals, static(2, seed=seed), seed)
