"""Results belong to the caller: changed in place under autograd they give what the same operation
out of place gives.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from cases import Case
from test_dispatch_combine import ENGINES, layouts, shapes
from test_gradients import Layer, loss
from tokenyard.testing import Ranks, assert_same_bits, distributed_test

CHANGES: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], Tensor]]] = {
    "mul": (lambda t: t.mul_(2.5), lambda t: t * 2.5),
    "relu": (torch.relu_, torch.relu),
    "masked_fill": (
        lambda t: t.masked_fill_(t.detach() > 0.3, 7.0),
        lambda t: t.masked_fill(t > 0.3, 7.0),
    ),
    "copy into a part": (
        lambda t: t[..., :1].mul_(3.0),
        lambda t: torch.cat([t[..., :1] * 3.0, t[..., 1:]], dim=-1),
    ),
    "add a leaf": (lambda t: t.add_(torch.ones_like(t)), lambda t: t + 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
@shapes
@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_changes_are_as_those_of_any_operator(
    ranks: Ranks, layout: ty.Layout, exact: bool, change: str
) -> None:
    """Of rows, weights, cached rows, sums and reduced weights; what was given to the calls stays as
    it was.
    """
    case = Case(
        ranks.world_size, layout=layout, exact=exact, dtype=torch.float32, routing="duplicates"
    )
    in_place, out_of_place = CHANGES[change]
    flat = layout is ty.Layout.FLAT

    def changed(tensor: Tensor, really: bool) -> Tensor:
        if really:
            in_place(tensor)
            return tensor
        return out_of_place(tensor)

    outcomes = []
    with case.make(ranks) as ep:
        for really in (False, True):
            layer = Layer(case, ranks)
            recv = ep.dispatch(layer.x, layer.idx, layer.weights, layout=layout, exact=exact)
            valid = (recv.source >= 0).unsqueeze(-1)
            rows = changed(
                torch.where(valid, recv.x, 0.0) if not really else masked(recv.x, valid), really
            )
            weights = changed(recv.topk_weights if flat else recv.row_weights, really)
            again = ep.dispatch(layer.x, handle=recv.handle)
            cached = changed(
                torch.where(valid, again.x, 0.0) if not really else masked(again.x, valid), really
            )
            y = changed(ep.combine(rows + cached, recv.handle), really)
            total = loss(y) + loss(weights)
            if flat:
                summed = ep.combine(rows * 1.0, recv.handle, reduce_weights=weights * 1.0)
                total = (
                    total
                    + loss(changed(summed.topk_weights, really))
                    + loss(changed(summed.x, really))
                )
            total.backward()
            assert torch.equal(layer.x.detach().cpu(), case.x[ranks.rank])
            outcomes.append((y.detach(), layer.x.grad, layer.weights.grad))
    for what, one, other in zip(
        ("sums", "gradient of x", "gradient of weights"), *outcomes, strict=True
    ):
        assert_same_bits(other.cpu(), one.cpu(), what=what, rank=ranks.rank)


def masked(rows: Tensor, valid: Tensor) -> Tensor:
    """Rows without a source are unspecified: zeros, in place as well."""
    return rows.masked_fill_(~valid, 0.0)


@distributed_test(world_size=2, engine=ENGINES)
def test_dequantised_rows_may_be_changed(ranks: Ranks) -> None:
    case = Case(ranks.world_size, hidden=128)
    grads = []
    with case.make(ranks) as ep:
        for really in (False, True):
            layer = Layer(case, ranks)
            rows = ep.dispatch(layer.x, layer.idx, quantize=ty.Quantize.FP8).dequantize()
            rows = rows.mul_(2) if really else rows * 2
            rows.backward(torch.ones_like(rows))
            grads.append(layer.x.grad)
    assert_same_bits(grads[1], grads[0], what="gradient", rank=ranks.rank)


@distributed_test(world_size=2, engine=ENGINES)
def test_weights_changed_in_place_weigh_rows_as_changed(ranks: Ranks) -> None:
    """``recv.row_weights`` are what ``combine(weighted=True)`` multiplies with: gradients
    follow.
    """
    for layout in (ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED):
        case = Case(ranks.world_size, layout=layout, dtype=torch.float32)
        grads = []
        with case.make(ranks) as ep:
            for factor in (1.0, 2.0):
                layer = Layer(case, ranks)
                recv = ep.dispatch(layer.x.detach(), layer.idx, layer.weights, layout=layout)
                recv.row_weights.mul_(factor)
                rows = torch.where((recv.source >= 0).unsqueeze(-1), recv.x, 0.0)
                ep.combine(rows, recv.handle, weighted=True).sum().backward()
                grads.append(layer.weights.grad)
        assert_same_bits(grads[1], grads[0] * 2, what="gradient of weights", rank=ranks.rank)


@distributed_test(world_size=2, engine=ENGINES)
def test_what_the_backward_of_a_weighted_combine_needs_is_watched(ranks: Ranks) -> None:
    """As for a product: torch notices that an operand has changed, and says so."""
    case = Case(ranks.world_size, layout=ty.Layout.EXPERT_MAJOR, dtype=torch.float32)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        recv = ep.dispatch(layer.x, layer.idx, layer.weights, layout=case.layout)
        y = ep.combine(recv.x, recv.handle, weighted=True)
        recv.x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
