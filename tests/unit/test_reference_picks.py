"""The oracle's picks against examples worked by hand: equal ones merged, and what those weigh that
a sum lacks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenyard.reference import ReferenceCombined, combine, dispatch, merge_picks
from tokenyard.types import Layout

NAN = float("nan")
EXPERT_LAYOUTS = [Layout.EXPERT_MAJOR, Layout.EXPERT_PADDED]

# Two ranks with two tokens each, four experts (0, 1 | 2, 3), two picks. Hidden is 1, so that a row
# is a number.
X = [torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])]
IDX = [torch.tensor([[0, 3], [1, 0]]), torch.tensor([[2, -1], [3, 1]])]
WEIGHTS = [torch.tensor([[0.5, 0.25], [0.125, 1.0]]), torch.tensor([[2.0, NAN], [3.0, 4.0]])]


def equal(actual: Tensor | None, expected: Any) -> bool:
    """Same shape and values; a difference is raised and shown."""
    assert actual is not None
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual.dtype), rtol=0, atol=0)
    return True


def lost(sums: list[ReferenceCombined]) -> list[list[float]]:
    """Of each rank."""
    return [
        [float(each) for each in mine.lost_weights]
        for mine in sums
        if mine.lost_weights is not None
    ]


def test_merge_picks() -> None:
    given, weights = (
        torch.tensor([[3, 1, 3, 3, -1, 1]], dtype=torch.int32),
        torch.tensor([[2.0**24, 5, 1, 1, NAN, 7]]),
    )
    idx, merged, first_pick = merge_picks(given, weights)
    assert equal(given, [[3, 1, 3, 3, -1, 1]]) and equal(weights[:, [0, 1, 5]], [[2.0**24, 5, 7]])
    assert equal(idx, [[3, 1, -1, -1, -1, -1]])
    assert idx.dtype == torch.int32
    # In pick order each 1 is rounded away; 1 + 1 first would not be.
    assert equal(merged, [[2.0**24, 12, 0, 0, 0, 0]])
    assert equal(first_pick, [[0, 1, 0, 0, 4, 1]])
    assert merge_picks(torch.tensor([[-1, -1]]))[1] is None


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_weights_that_are_lost(layout: Layout) -> None:
    received = dispatch(X, IDX, WEIGHTS, num_experts=4, layout=layout, max_tokens_per_rank=2)
    rows, absent = [each.x for each in received], [{1}, {0}]
    plain = combine(rows, received, absent=absent)
    assert equal(plain[0].x, [[10], [22]])
    assert equal(plain[1].x, [[20], [21]])
    assert lost(plain) == [[1, 0], [0, 1]]
    weighted = combine(rows, received, weighted=True, absent=absent)
    assert equal(weighted[0].x, [[5], [12.375]])
    assert equal(weighted[1].x, [[40], [63]])
    assert lost(weighted) == [[0.25, 0], [0, 4]]
    owners = [torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1, NAN], [0, 2]])]
    by_owner = combine(rows, received, weighted=True, topk_weights=owners, absent=absent)
    assert lost(by_owner) == [[2, 0], [0, 2]]
    assert lost(combine(rows, received)) == [[0, 0], [0, 0]]
    one_sided = combine(rows, received, weighted=True, absent=[(), {1}])
    assert lost(one_sided) == [[0, 0], [2, 3]]


@pytest.mark.parametrize(
    ("idx", "weights", "expected"),
    [
        ((4, 5, 6, 7), (2.0**24, 1, 1, 1), 2.0**24),  # each 1 is rounded away
        ((4, 5, 6, 7), (1, 1, 2.0**24, 1), 2.0**24 + 4),
        ((4, 5, 6, 0), (1, 2, 4, 8), 7),  # expert 0 is not lost
        (
            (5, 4, -1, 5),
            (1, 1, 8, 2.0**24),
            2.0**24,
        ),  # equal picks are merged first, 1 + 2 ** 24, and that is even
    ],
)
def test_lost_weights_add_in_pick_order(
    idx: tuple[int, ...], weights: tuple[float, ...], expected: float
) -> None:
    received = dispatch(
        [torch.ones(1, 1), torch.ones(0, 1)],
        [torch.tensor([idx]), torch.zeros(0, 4, dtype=torch.int64)],
        [torch.tensor([weights]), torch.zeros(0, 4)],
        num_experts=8,
        layout=Layout.EXPERT_MAJOR,
    )
    got = combine([each.x for each in received], received, weighted=True, absent=[{1}, ()])
    assert lost(got)[0] == [expected]


def test_rows_dropped_for_want_of_capacity_are_lost() -> None:
    received = dispatch(X, IDX, WEIGHTS, num_experts=4, layout=Layout.EXPERT_MAJOR, capacity=3)
    rows = [each.x for each in received]
    assert lost(combine(rows, received, weighted=True)) == [[0, 0], [0, 4]]
    assert lost(combine(rows, received)) == [[0, 0], [0, 1]]


def test_flat_rows_tell_nothing() -> None:
    received = dispatch(X, IDX, WEIGHTS, num_experts=4)
    assert combine([each.x for each in received], received)[0].lost_weights is None
