"""How the simulated hardware behaves: drawn from the seed, so that seeds differ in kind and not in
detail only.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Hardware(NamedTuple):
    """Likelihoods per operation of a program, and how unequal programs are."""

    switch: float
    """Another program goes on."""
    early: float
    """Some of the program's pending stores reach everybody."""
    late: float
    """Stores that ended programs left behind reach somebody (per switch)."""
    stale: float
    """A plain load looks into the past."""
    skew: str
    """Speeds: ``even``, or drawn per ``program`` or per ``rank``."""

    @classmethod
    def draw(cls, rng: Random) -> Hardware:
        """One kind of machine."""
        return cls(
            switch=rng.choice((0.1, 0.3, 0.6, 0.9)),
            early=rng.choice((0.0, 0.02, 0.1, 0.3)),
            late=rng.choice((0.0, 0.02, 0.1)),
            stale=rng.choice((0.1, 0.3, 0.6)),
            skew=rng.choice(("even", "program", "rank")),
        )

    def speeds(self, rng: Random, world_size: int) -> list[float]:
        """Of each rank, in (0, 1]."""
        return [_speed(rng) if self.skew == "rank" else 1.0 for _ in range(world_size)]

    def speed(self, rng: Random, of_rank: float) -> float:
        """Of one program."""
        return _speed(rng) if self.skew == "program" else of_rank


def _speed(rng: Random) -> float:
    return rng.choice((1.0, 0.3, 0.1, 0.02))
