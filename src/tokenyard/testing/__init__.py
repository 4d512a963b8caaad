"""A kit for testing code on several ranks: bodies that run on every rank, routings, comparisons that say where."""

from __future__ import annotations

from .compare import assert_close, assert_same_bits
from .decorators import distributed_test
from .failure import RankFailure
from .job import Ranks
from .poison import poisoned
from .routings import ROUTINGS, payload, routing

__all__ = [
    "ROUTINGS",
    "RankFailure",
    "Ranks",
    "assert_close",
    "assert_same_bits",
    "distributed_test",
    "payload",
    "poisoned",
    "routing",
]
