"""Whole numbers and seconds of other types than Python's are taken for what they are, and kept as
Python's.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isnan
from typing import Any

import numpy as np
import pytest
import torch

import tokenyard as ty
from bad_input import SIZES, Inputs, assert_works, check, error_of, make
from tokenyard.arguments import check_whole, real, whole
from tokenyard.config import Config
from tokenyard.handle import Spec
from tokenyard.testing import Ranks, distributed_test
from tokenyard.topology import Topology, check_topology

pytestmark = pytest.mark.portable


class Eight:
    """A type of its own that is a whole number."""

    def __repr__(self) -> str:
        return "Eight()"

    def __index__(self) -> int:
        return 8


EIGHTS: list[Any] = [8, np.int64(8), np.int8(8), np.uint64(8), np.array(8), Eight()]
NO_NUMBERS: list[Any] = [
    True,
    np.True_,
    np.array(True),
    8.0,
    np.float32(8),
    np.array([8]),
    torch.tensor(8),
    "8",
    None,
]


@pytest.mark.parametrize("value", EIGHTS, ids=repr)
def test_what_is_whole(value: Any) -> None:
    assert (whole(value), type(whole(value))) == (8, int)
    assert type(check_whole("n", value, 1, 8)) is int


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_not_whole(value: Any) -> None:
    assert whole(value) is None
    with pytest.raises(
        ValueError, match=r"n \(.*\) must be a whole number of at least 1 \(at most 8\), or None"
    ):
        check_whole("n", value, 1, 8, ", or None")


def test_seconds() -> None:
    given = (1, 0.5, np.float32(2), np.float16(3), np.int64(4), 10**400)
    assert [real(each) for each in given] == [1.0, 0.5, 2.0, 3.0, 4.0, float("inf")]
    assert {type(real(each)) for each in given} == {float}
    assert all(isnan(real(each)) for each in (True, np.True_, "1", None, torch.tensor(1.0), 1j))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16], ids=lambda kind: kind.__name__)
@distributed_test(world_size=(1, 2))
def test_arguments_of_an_object(ranks: Ranks, kind: Any) -> None:
    """Of one rank: the others, which say the same as ints, agree."""
    size, mine = ranks.world_size, kind if ranks.rank == 0 else int
    given: dict[str, Any] = {name: mine(value) for name, value in SIZES.items()}
    more = {
        "num_sms": mine(8),
        "spare_sms": mine(1),
        "timeout": np.float32(20),
        "topology": (mine(1), mine(size)),
    }
    with make(ranks, **given, **more) as ep:
        config = asdict(ep.config)
        assert {name: config[name] for name in SIZES} == SIZES
        assert {type(config[name]) for name in SIZES} == {int}
        assert type(config["timeout"]) is float
        json.dumps(config)
        assert_works(ranks, ep)


@distributed_test(world_size=(1, 2))
def test_arguments_of_a_call(ranks: Ranks) -> None:
    i, mine = Inputs.of(ranks), np.int64 if ranks.rank == 0 else int
    major = ty.Layout.EXPERT_MAJOR
    with make(ranks) as ep:
        recv = ep.dispatch(
            i.x, i.topk_idx, layout=major, exact=False, expert_alignment=mine(4), capacity=mine(50)
        )
        assert recv.handle.spec == Spec(layout=major, exact=False, expert_alignment=4, capacity=50)
        assert {type(recv.handle.spec.expert_alignment), type(recv.handle.spec.capacity)} == {int}
        assert recv.x.shape[0] == 50
        again = ep.dispatch(i.x, handle=recv.handle, expert_alignment=mine(1))
        assert again.x.shape == recv.x.shape
        check(
            error_of(
                lambda: ep.dispatch(i.x, i.topk_idx, layout=major, expert_alignment=np.float32(4))
            ),
            ValueError,
            "expert_alignment (np.float32(4.0)) must be a whole number",
        )


def test_a_grid() -> None:
    for grid in (Topology(np.int64(2), Eight()), check_topology(np.array([2, 8]), 16)):  # type: ignore[arg-type]
        assert grid == Topology(2, 8)
        assert (type(grid.num_nodes), type(grid.ranks_per_node), str(grid)) == (int, int, "2x8")
    for wrong in (True, np.True_, 2.0, torch.tensor(2), 0, np.int64(0)):
        with pytest.raises(
            ValueError,
            match=r"ranks_per_node .* of a topology must be a whole number of at least 1",
        ):
            Topology(2, wrong)


def test_seconds_of_a_call() -> None:
    config = Config(**SIZES, rank=0, world_size=1, timeout=1.0)
    for seconds in (np.float32(0.5), np.int64(3), np.float16(100)):
        ty.CallOptions(timeout=seconds).check(config, None, None)
    for wrong in (True, np.True_, "1", np.float32("nan"), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"options\.timeout"):
            ty.CallOptions(timeout=wrong).check(config, None, None)
