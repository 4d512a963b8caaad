"""What arrived, counted and placed by the device alone: rows that are nobody's count nowhere, and
neither do dropped ones twice.
"""

from __future__ import annotations

import torch

from tokenyard.config import Config
from tokenyard.engines.plans import (
    Arrival,
    count_arrivals,
    localise,
    num_result_rows,
    settle,
)
from tokenyard.handle import Spec
from tokenyard.types import Layout

# Rank 1 of two has experts 3 and 4 of 5. From each rank 3 places: two rows of rank 0, one of rank
# 1.
CONFIG = Config(
    num_experts=5, hidden=8, num_topk=2, max_tokens_per_rank=3, rank=1, world_size=2, timeout=1.0
)
IDS = torch.tensor([[4, 3], [0, 4], [-1, -1], [3, 2], [-1, -1], [-1, -1]], dtype=torch.int32)
WEIGHTS = torch.tensor([[0.5, 0.25], [9, 1], [9, 9], [2, 9], [9, 9], [9, 9]])


def arrived() -> Arrival:
    idx, weights = localise(IDS, WEIGHTS, CONFIG)
    token = torch.tensor([0, 2, -1, 1, -1, -1], dtype=torch.int32)
    return Arrival(
        token=token, local_idx=idx, weights=weights, source_rank=torch.tensor([0, 0, 0, 1, 1, 1])
    )


def test_ids_and_weights_as_this_rank_counts_them() -> None:
    """Also of ids that nobody has."""
    got = arrived()
    assert got.local_idx.tolist() == [[1, 0], [-1, 1], [-1, -1], [0, -1], [-1, -1], [-1, -1]]
    assert got.weights is not None
    assert got.weights.tolist() == [[0.5, 0.25], [0, 1], [0, 0], [2, 0], [0, 0], [0, 0]]
    odd = torch.tensor([[5, -2, 2**31 - 1, -(2**31), 4]], dtype=torch.int32)
    assert localise(odd, None, CONFIG)[0].tolist() == [[-1, -1, -1, -1, 1]]


def test_rows_of_nobody_are_not_counted() -> None:
    rows, pairs = count_arrivals(arrived(), CONFIG)
    assert rows.tolist() == [2, 1]
    assert pairs.tolist() == [[1, 2], [1, 0]]


def test_static_flat_rows_come_first() -> None:
    place, got = settle(
        arrived(),
        Spec(layout=Layout.FLAT, exact=False),
        CONFIG,
        *count_arrivals(arrived(), CONFIG),
        6,
    )
    assert place.gather.tolist() == [0, 1, 3, -1, -1, -1]
    assert got.source.tolist() == [0, 2, 1 << 32 | 1, -1, -1, -1]
    assert got.topk_idx.tolist() == [[1, 0], [-1, 1], [0, -1], *[[-1, -1]] * 3]
    assert got.weights.tolist() == [[0.5, 0.25], [0, 1], [2, 0], *[[0, 0]] * 3]


def test_rows_beyond_the_capacity() -> None:
    """Blocks of 2 and 2 rows, aligned to 4: places 0, 1 and 4, 5."""
    want = {0: 4, 1: 3, 2: 2, 3: 2, 4: 2, 5: 1, 6: 0, 9: 0}
    for capacity, overflow in want.items():
        spec = Spec(layout=Layout.EXPERT_MAJOR, exact=False, expert_alignment=4, capacity=capacity)
        rows = num_result_rows(spec, CONFIG, None, 6)
        assert rows == capacity
        _, got = settle(arrived(), spec, CONFIG, *count_arrivals(arrived(), CONFIG), rows)
        assert got.overflow.tolist() == [overflow]
        assert got.expert_offsets.tolist() == [0, min(4, capacity), min(8, capacity)]
        assert got.tokens_per_expert.tolist() == [2, 2]
        assert got.source.tolist() == [0, 1 << 32 | 1, -1, -1, 0, 2, -1, -1, -1][:capacity]
        assert got.weights.tolist() == [0.25, 2, 0, 0, 0.5, 1, 0, 0, 0][:capacity]


def test_how_many_rows_there_are() -> None:
    """R = 2, M = 3, K = 2, L = 2."""
    major, padded, flat = Layout.EXPERT_MAJOR, Layout.EXPERT_PADDED, Layout.FLAT
    assert num_result_rows(Spec(layout=flat, exact=True), CONFIG, None, 5) == 5
    assert num_result_rows(Spec(layout=padded, exact=True), CONFIG, [2, 2], 5) == 12
    assert (
        num_result_rows(Spec(layout=major, exact=True, expert_alignment=4), CONFIG, [5, 0], 5) == 8
    )
    assert (
        num_result_rows(Spec(layout=major, exact=False, expert_alignment=4), CONFIG, None, 6)
        == 12 + 6
    )
    few = Config(
        num_experts=2,
        hidden=8,
        num_topk=9,
        max_tokens_per_rank=3,
        rank=1,
        world_size=2,
        timeout=1.0,
    )
    assert num_result_rows(Spec(layout=major, exact=False), few, None, 6) == 6
