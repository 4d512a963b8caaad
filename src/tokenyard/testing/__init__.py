"""A kit to test code on several ranks: bodies for every rank, routings, comparisons."""

from __future__ import annotations

from tokenyard.testing.compare import assert_close, assert_same_bits
from tokenyard.testing.decorators import distributed_test
from tokenyard.testing.job import RankFailure, Ranks
from tokenyard.testing.poison import poisoned
from tokenyard.testing.routings import ROUTINGS, payload, routing

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
