# ruff: noqa: E402 (Triton is imported after the check)
"""Planted bugs: right kernels pass under every seed, and each way to be wrong is found within a
few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from interpreted import need_interpreter

need_interpreter()

from nvlink_pool import SOAK
from simulator_kernels import flags_body, halves_body, ring_body
from tokenyard.testing.simulator import Deadlock, Race, RanksFailed, SimulatedRank, simulate

Body = Callable[..., Any]

FINDS = (RanksFailed, Deadlock, Race)
LESS = 2 if SOAK == 1 else 1
"""By how much there are fewer seeds of what is right in ``make test``."""


@pytest.mark.parametrize(("world_size", "seeds"), [(2, 50), (3, 30), (4, 22)])
def test_a_right_ring_passes(world_size: int, seeds: int) -> None:
    for seed in range(seeds // LESS):
        simulate(world_size, lambda ranks: ring_body(ranks, n=3), seed=seed)


@pytest.mark.parametrize(("world_size", "seeds"), [(2, 60), (3, 28), (4, 14)])
def test_a_right_exchange_through_halves_passes(world_size: int, seeds: int) -> None:
    for seed in range(seeds // LESS):
        simulate(world_size, lambda ranks: halves_body(ranks, calls=3), seed=seed)


@pytest.mark.parametrize(("world_size", "seeds"), [(2, 50), (3, 30), (4, 22)])
def test_a_right_exchange_by_vectors_passes(world_size: int, seeds: int) -> None:
    for seed in range(seeds // LESS):
        simulate(world_size, flags_body, seed=seed)


def first_finding(body: Body, world_size: int, seeds: int, bug: str) -> tuple[int, BaseException]:
    """The first seed that finds the bug, and how."""

    def one(ranks: SimulatedRank) -> Any:
        return body(ranks, bug=bug)

    for seed in range(seeds):
        try:
            simulate(world_size, one, seed=seed)
        except FINDS as error:
            return seed, error
    raise AssertionError(f"{seeds} seeds do not find {bug!r}")


BUGS: list[tuple[Body, str, int, type[BaseException]]] = [
    (ring_body, "no barrier before release", 3, RanksFailed),
    (ring_body, "no barrier before credit", 3, Race),
    (ring_body, "plain load", 3, RanksFailed),
    (ring_body, "volatile load", 3, RanksFailed),
    (ring_body, "relaxed", 5, RanksFailed),
    (ring_body, "relaxed release", 3, RanksFailed),
    (ring_body, "no barrier after acquire", 5, RanksFailed),
    (ring_body, "flag before data", 3, RanksFailed),
    (ring_body, "credit before read", 10, RanksFailed),
    (ring_body, "last chunk dropped", 3, Deadlock),
    (ring_body, "wrong epoch", 3, RanksFailed),
    (ring_body, "gpu scope", 3, RanksFailed),
    (halves_body, "one half", 10, RanksFailed),
    (halves_body, "wrong epoch", 5, RanksFailed),
    (halves_body, "no barrier before release", 5, RanksFailed),
    (halves_body, "plain load", 5, RanksFailed),
    (halves_body, "volatile load", 5, RanksFailed),
    (halves_body, "no barrier after acquire", 5, RanksFailed),
    (halves_body, "flag before data", 3, RanksFailed),
    (halves_body, "gpu scope", 3, RanksFailed),
]


@pytest.mark.parametrize(
    ("body", "bug", "seeds", "finding"),
    BUGS,
    ids=[f"{body.__name__}-{bug}" for body, bug, *_ in BUGS],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_planted_bug_is_found(
    body: Body, bug: str, seeds: int, finding: type[BaseException], world_size: int
) -> None:
    seed, error = first_finding(body, world_size, seeds, bug)
    assert isinstance(error, finding)
    assert f"seed {seed}" in str(error)
