"""Backwards of the calls of ``drawn_runs.py``: bit for bit what the oracle says, but for sums of
products over channels, which are in no stated order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tokenyard as ty
from cases import check_combined
from drawn_programs import FLAT, PADDED, Back, Fresh
from tokenyard import reference
from tokenyard.testing import assert_close, assert_same_bits


def placed(rows: Tensor, recv: ty.Received, case: Fresh, rank: int) -> Tensor:
    """``rows`` of the oracle in the shape of a result; NaN where it has none."""
    out = torch.full((*recv.x.shape[:-1], rows.shape[-1]), float("nan"), dtype=rows.dtype)
    valid = case.expected[rank].source >= 0
    there = out if case.layout is PADDED else out[: len(valid)]
    there[valid] = rows[valid]
    return out


def backward_of_dispatch(
    recv: ty.Received, case: Fresh, rank: int, x: Tensor, weights: Tensor | None
) -> None:
    """An unweighted combine; weights of rows go back to all picks that were merged."""
    gradients = [
        torch.randn(each.x.shape, generator=torch.Generator().manual_seed(r)).to(case.dtype)
        for r, each in enumerate(case.expected)
    ]
    results: list[Any] = [recv.x]
    given = [placed(gradients[rank], recv, case, rank)]
    if weights is not None:
        results.append(recv.topk_weights if case.layout is FLAT else recv.row_weights)
        given.append(_numbers(results[1].shape, rank))
    torch.autograd.backward(results, given)
    assert x.grad is not None and case.sizes is not None
    want = case.combined(rank, gradients, ranks_per_node=case.sizes.tree).x
    check_combined(x.grad, case, rank, want, "gradient of x")
    if weights is not None:
        top = (case.num_topk,) if case.layout is FLAT else ()
        numbers = [_numbers((*each.source.shape, *top), r) for r, each in enumerate(case.expected)]
        right = _of_picks(numbers, case, rank).to(weights.dtype)
        check_combined(weights.grad, case, rank, right, "gradient of weights")


def backward_of_combine(
    y: Tensor, recv: ty.Received, each: Back, rank: int, rows: Tensor, weights: Tensor | None
) -> None:
    """A cached dispatch, times ``weights`` of the owner; these have the product of rows."""
    case, idx = each.case, [idx for idx, _ in each.case.picks]
    gradients = [
        torch.randn(len(picks), case.hidden, generator=each.random(r)).to(each.dtype)
        for r, picks in enumerate(idx)
    ]
    y.backward(gradients[rank])
    there = reference.dispatch(
        gradients, idx, each.weights, num_experts=case.num_experts, layout=case.layout,
        expert_alignment=case.expert_alignment, capacity=case.capacity,
        max_tokens_per_rank=case.num_tokens,
    )  # fmt: skip
    want, valid = there[rank].x, there[rank].source >= 0
    assert rows.grad is not None and not rows.grad[recv.source < 0].any()
    got = rows.grad if case.layout is PADDED else rows.grad[: len(valid)]
    if weights is not None:
        factors = there[rank].row_weights
        assert weights.grad is not None and factors is not None
        want = (factors.unsqueeze(-1) * want.float()).to(each.dtype)
        pairs = zip(each.rows, there, strict=True)
        products = [(mine.float() * at.x.float()).sum(-1) for mine, at in pairs]
        right = _of_picks(products, case, rank)
        assert_close(weights.grad, right, relative=1e-3, what="gradient of weights")
    assert_same_bits(got[valid], want[valid], what="gradient of rows", rank=rank)


def _numbers(shape: Any, rank: int) -> Tensor:
    """A gradient of weights; rows past the last have one, too, which goes nowhere."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).float() + 1000 * rank + 1).view(shape)


def _of_picks(gradients: list[Tensor], case: Fresh, owner: int) -> Tensor:
    """What of ``gradients`` of rows' weights, by rank, each pick ``[T, K]`` of the ``owner`` has: 0
    without a row."""
    merged, _, first = reference.merge_picks(case.picks[owner][0])
    bounds, total = ty.expert_bounds(case.num_experts, case.world_size), torch.zeros(merged.shape)
    for rank, each in enumerate(case.expected):
        rows = each.row_of_pick[owner]
        if case.layout is FLAT:  # a row has the weights of all its picks there
            here = (merged >= bounds[rank]) & (merged < bounds[rank + 1])
            for token, pick in here.nonzero().tolist():
                total[token, pick] = gradients[rank][rows[token].max(), pick]
        else:
            for token, pick in (rows >= 0).nonzero().tolist():
                total[token, pick] = gradients[rank].flatten()[rows[token, pick]]
    return total.gather(1, first)
