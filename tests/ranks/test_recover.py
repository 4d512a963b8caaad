"""Ranks that are left go on: killed and frozen ranks at every step of a call, replicas, bad input,
stores that die.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

import tokenyard as ty
from bad_input import check, error_of
from recovering import (
    die,
    fail,
    meet_left,
    object_of,
    stop,
    store_of_test,
    ten_good_calls,
)
from tokenyard.testing import Ranks, distributed_test

TIMEOUT = 3.0


@pytest.mark.parametrize(
    "points", [("dispatch", "rows"), ("counts", "between"), ("headers out", "middle of the rows")]
)
@distributed_test(world_size=4, may_die=(0, 2))
def test_two_ranks_are_killed_one_after_the_other(ranks: Ranks, points: tuple[str, str]) -> None:
    """Rank 2, then rank 0. Nobody waits for a timeout."""
    ep = object_of(ranks, 600.0)
    gone: tuple[int, ...] = ()
    for epoch, (point, who) in enumerate(zip(points, (2, 0), strict=True), start=1):
        error = fail(ranks, ep, point, who, die)
        assert isinstance(error, ty.PeerLost) and error.rank == who, repr(error)
        gone = tuple(sorted((*gone, who)))
        assert ep.recover() == [rank for rank in range(4) if rank not in gone]
        assert ep.epoch == epoch and ep.engine == "collective"
        ten_good_calls(ranks, ep, gone)
    assert "2 of 4 ranks" in ep.why
    ep.close()
