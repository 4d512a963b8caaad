"""Backward of dispatch and combine: against the dense layer, and exact where only copies and known
sums are involved.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe
import tokenyard as ty
from cases import Case, bounds_of, dispatch
from test_dispatch_combine import ENGINES, layouts, shapes, some_kinds
from tokenyard import reference
from tokenyard.testing import Ranks, assert_close, assert_same_bits, distributed_test

RELATIVE = 1e-6


class Layer:
    """Leaves of one rank and of the same layer on one process, equal on every rank that
    makes them.
    """

    def __init__(self, case: Case, ranks: Ranks) -> None:
        random = torch.Generator().manual_seed(case.seed)
        every = (
            torch.randn(case.num_experts, case.hidden, case.hidden, generator=random)
            / case.hidden**0.5
        )
        self.begin, self.end = bounds_of(case, ranks.rank)
        self.case, self.ranks, self.every = case, ranks, every
        idx, weights = case.picks[ranks.rank]
        self.idx = idx.to(ranks.device)
        self.x, self.weights, self.experts = (
            leaf.clone().to(ranks.device).requires_grad_()
            for leaf in (case.x[ranks.rank], weights, every[self.begin : self.end])
        )

    def dense_grads(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output and gradients of x, weights and this rank's experts, as one process would have
        them.
        """
        experts = self.every.clone().requires_grad_()
        mine: tuple[Tensor, ...] = ()
        for rank, (idx, weights) in enumerate(self.case.picks):
            x, w = self.case.x[rank].clone().requires_grad_(), weights.clone().requires_grad_()
            y = moe.dense(x, idx, w, experts)
            loss(y).backward()
            if rank == self.ranks.rank:
                mine = (y.detach(), x.grad, w.grad)
        return (*mine, experts.grad[self.begin : self.end])


def loss(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum()


def check_grads(layer: Layer, y: Tensor) -> None:
    want_y, want_x, want_w, want_experts = layer.dense_grads()
    loss(y).backward()
    named = {
        "output": (y, want_y),
        "x": (layer.x.grad, want_x),
        "weights": (layer.weights.grad, want_w),
    }
    for what, (got, want) in (named | {"experts": (layer.experts.grad, want_experts)}).items():
        assert_close(got.detach().cpu(), want, relative=RELATIVE, what=what)


@some_kinds(0, ("uniform", "dropped", "duplicates", "empty_ranks", "one_rank"))  # SOAK: all
@distributed_test(world_size=(1, 2, 4), engine=ENGINES)
def test_a_layer_equals_the_dense_one(
    ranks: Ranks, layout: ty.Layout, exact: bool, routing: str
) -> None:
    case = Case(
        ranks.world_size,
        routing=routing,
        layout=layout,
        exact=exact,
        dtype=torch.float32,
        num_experts=7,
    )
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        y = moe.run(
            ep, layer.x, layer.idx, layer.weights, layer.experts, layout=layout, exact=exact
        )
        check_grads(layer, y)


@layouts
@distributed_test(world_size=3, engine=ENGINES)
def test_weights_of_the_owner_get_their_gradient(ranks: Ranks, layout: ty.Layout) -> None:
    if layout is ty.Layout.FLAT:
        return
    case = Case(ranks.world_size, routing="duplicates", layout=layout, dtype=torch.float32)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        recv = ep.dispatch(layer.x, layer.idx, layout=layout)
        y = ep.combine(
            moe.grouped(recv, layer.experts), recv.handle, weighted=True, topk_weights=layer.weights
        )
        check_grads(layer, y)


@pytest.mark.portable
@shapes
@layouts
@distributed_test(world_size=(2, 3), engine=ENGINES)
def test_backward_of_dispatch_is_combine_bit_for_bit(
    ranks: Ranks, layout: ty.Layout, exact: bool
) -> None:
    """In bfloat16, with the gradient's rounding and order those of the oracle's combine."""
    case = Case(ranks.world_size, routing="duplicates", layout=layout, exact=exact)
    want = case.combined(ranks.rank).x
    x = case.x[ranks.rank].clone().to(ranks.device).requires_grad_()
    idx, weights = (t.to(ranks.device) for t in case.picks[ranks.rank])
    with case.make(ranks) as ep:
        recv = ep.dispatch(x, idx, weights, layout=layout, exact=exact)
        rows, valid = case.expert_rows[ranks.rank], case.expected[ranks.rank].source >= 0
        grad = torch.zeros_like(recv.x)
        if layout is ty.Layout.EXPERT_PADDED:
            grad[valid] = rows[valid].to(ranks.device)
        else:
            grad[: len(rows)] = torch.where(valid.unsqueeze(1), rows, 0.0).to(ranks.device)
        recv.x.backward(grad)
        assert_same_bits(x.grad.cpu(), want, what="gradient of x", rank=ranks.rank)


@shapes
@distributed_test(world_size=3, engine=ENGINES)
def test_gradients_of_weights_only_and_of_unused_picks(ranks: Ranks, exact: bool) -> None:
    """Every rank's copy of a weight counts where the pick is; -1 and later duplicates keep the
    gradient of their pick.
    """
    case = Case(ranks.world_size, routing="duplicates", exact=exact)
    idx, weights = case.picks[ranks.rank]
    leaf = weights.clone().to(ranks.device).requires_grad_()
    with case.make(ranks) as ep:
        recv = ep.dispatch(
            case.x[ranks.rank].to(ranks.device), idx.to(ranks.device), leaf, exact=exact
        )
        recv.topk_weights.backward(torch.ones_like(recv.topk_weights))
        assert torch.equal(leaf.grad.cpu(), (idx >= 0).float())


@distributed_test(world_size=3, engine=ENGINES)
def test_reduced_weights_and_bias_have_gradients(ranks: Ranks) -> None:
    case = Case(ranks.world_size, dtype=torch.float32)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        rows, reduce = recv.x.clone().requires_grad_(), recv.topk_weights.clone().requires_grad_()
        bias = torch.zeros(
            case.tokens_of(ranks.rank), case.hidden, device=ranks.device, requires_grad=True
        )
        got = ep.combine(rows, recv.handle, reduce_weights=reduce, bias=bias)
        scale = 1.0 + ranks.rank
        (got.x.sum() * scale + got.topk_weights.sum() * scale).backward()
        owners = 1.0 + (recv.source >> 32).unsqueeze(1).float()
        assert torch.equal(rows.grad, owners.expand_as(rows))
        assert torch.equal(reduce.grad, owners.expand_as(reduce))
        assert torch.equal(bias.grad, torch.full_like(bias, scale))


@pytest.mark.parametrize("mode", list(ty.Quantize), ids=lambda mode: mode.name.lower())
@layouts
@distributed_test(world_size=3, engine=ENGINES)
def test_quantised_dispatch_is_straight_through(
    ranks: Ranks, layout: ty.Layout, mode: ty.Quantize
) -> None:
    """The gradient of ``dequantize()`` is the combine of what arrives there, in bfloat16."""
    case = Case(ranks.world_size, layout=layout, quantize=mode)
    plain = Case(ranks.world_size, layout=layout)
    idx, weights = (t.to(ranks.device) for t in case.picks[ranks.rank])
    grads = []
    for each in (case, plain):
        x = case.x[ranks.rank].clone().to(ranks.device).requires_grad_()
        with each.make(ranks) as ep:
            recv = ep.dispatch(x, idx, weights, layout=layout, quantize=each.quantize)
            assert recv.scales is None or not recv.scales.requires_grad
            rows = recv.x if each is plain else recv.dequantize()
            assert rows.dtype == torch.bfloat16
            want = case.expected[ranks.rank]
            valid = want.source >= 0
            if each is case:
                exact = reference.dequantize(want.x[valid], want.scales[valid])
                assert_same_bits(rows.cpu()[valid], exact, what="dequantised", rank=ranks.rank)
            factor = (
                torch.randn(rows.shape, generator=torch.Generator().manual_seed(3))
                .bfloat16()
                .to(rows.device)
            )
            rows.backward(torch.where(valid.to(rows.device).unsqueeze(-1), factor, 0.0))
            grads.append(x.grad)
    assert_same_bits(grads[0], grads[1], what="straight-through gradient", rank=ranks.rank)


@distributed_test(world_size=2, engine=ENGINES)
def test_handles_serve_any_number_of_times_in_any_order(ranks: Ranks) -> None:
    """Two layers in flight, backward in reverse, and a routing used by three dispatches; all after
    other calls.
    """
    case = Case(ranks.world_size, dtype=torch.float32, routing="duplicates")
    other = Case(ranks.world_size, dtype=torch.float32, seed=5)
    first, second = Layer(case, ranks), Layer(other, ranks)
    with case.make(ranks) as ep:
        outputs = [
            moe.run(ep, layer.x, layer.idx, layer.weights, layer.experts)
            for layer in (first, second)
        ]
        handle = dispatch(ranks, ep, case).handle
        dispatch(ranks, ep, other)
        again = [ep.dispatch(first.x.detach() * factor, handle=handle).x for factor in (1, 2, 4)]
        assert torch.equal(again[0] * 4, again[2])
        assert torch.equal(again[0].cpu(), case.expected[ranks.rank].x)
        check_grads(first, outputs[0])
        check_grads(second, outputs[1])


@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_cached_dispatch_is_differentiable(ranks: Ranks, layout: ty.Layout) -> None:
    case = Case(ranks.world_size, dtype=torch.float32, layout=layout)
    with case.make(ranks) as ep:
        fresh = dispatch(ranks, ep, case)
        x = case.x[ranks.rank].clone().to(ranks.device).requires_grad_()
        again = ep.dispatch(x, handle=fresh.handle)
        valid = (case.expected[ranks.rank].source >= 0).to(ranks.device)
        assert torch.equal(again.x[valid], fresh.x[valid])
        again.x.backward(torch.where(valid.unsqueeze(-1), torch.ones_like(again.x), 0.0))
        rows = [torch.ones_like(each.x) for each in case.expected]
        want = case.combined(ranks.rank, rows).x
        assert_same_bits(x.grad.cpu(), want, what="gradient", rank=ranks.rank)


@pytest.mark.parametrize("reentrant", [True, False])
@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_activation_checkpointing(ranks: Ranks, layout: ty.Layout, reentrant: bool) -> None:
    case = Case(ranks.world_size, dtype=torch.float32, layout=layout)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:

        def body(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            return moe.run(ep, x, layer.idx, weights, experts, layout=layout)

        check_grads(
            layer, checkpoint(body, layer.x, layer.weights, layer.experts, use_reentrant=reentrant)
        )
        assert ep.stats().calls["dispatch"] == 2


@distributed_test(world_size=2, engine=ENGINES)
def test_nothing_is_differentiated_into_a_given_tensor(ranks: Ranks) -> None:
    """Also not the gradient of weights that rode along."""
    case = Case(ranks.world_size, layout=ty.Layout.EXPERT_MAJOR)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        recv = ep.dispatch(layer.x.detach(), layer.idx, layer.weights, layout=case.layout)
        out = torch.zeros_like(layer.x, requires_grad=False)
        with pytest.raises(ValueError, match="out= cannot be differentiated"):
            ep.combine(recv.x, recv.handle, weighted=True, out=out)
        with torch.no_grad():
            assert ep.combine(recv.x, recv.handle, weighted=True, out=out) is out
        assert not out.requires_grad


@pytest.mark.parametrize("mode", list(ty.Quantize), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_a_cached_dispatch_casts_what_is_differentiated(
    ranks: Ranks, layout: ty.Layout, later: bool, mode: ty.Quantize
) -> None:
    """``x`` that requires a gradient travels as FP8 too; ``dequantize()`` passes the gradient on,
    in the dtype of ``x``.
    """
    case = Case(ranks.world_size, hidden=256, dtype=torch.float32, layout=layout, quantize=mode)
    want, me = case.expected[ranks.rank], ranks.rank
    valid = want.source >= 0
    with case.make(ranks) as ep:
        handle = dispatch(ranks, ep, case).handle
        x = case.x[me].clone().to(ranks.device).requires_grad_()
        recv = ep.dispatch(x, handle=handle, quantize=mode, async_op=later)
        assert not recv.x.requires_grad
        assert_same_bits(recv.x.cpu()[valid], want.x[valid], what="data", rank=me)
        assert_same_bits(recv.scales.cpu()[valid], want.scales[valid], what="scales", rank=me)
        rows = recv.dequantize()
        rows.backward(torch.where(valid.to(rows.device).unsqueeze(-1), torch.ones_like(rows), 0.0))
        ones = [torch.ones(each.x.shape, dtype=torch.bfloat16) for each in case.expected]
        assert x.grad.dtype == torch.float32
        assert_same_bits(x.grad.cpu(), case.combined(me, ones).x.float(), what="gradient", rank=me)


@shapes
@distributed_test(world_size=2, engine=ENGINES)
def test_gradients_of_a_weighted_sum_of_bfloat16_rows(ranks: Ranks, exact: bool) -> None:
    """Dtypes are those of what they belong to, and rows without a source, here NaN, count in no
    gradient of a weight.
    """
    for layout in (ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED):
        case = Case(ranks.world_size, layout=layout, exact=exact)
        layer = Layer(case, ranks)
        with case.make(ranks) as ep:
            recv = ep.dispatch(
                layer.x.detach(), layer.idx, layer.weights, layout=layout, exact=exact
            )
            valid = (recv.source >= 0).unsqueeze(-1)
            rows = torch.where(valid, recv.x.detach(), float("nan")).requires_grad_()
            bias = torch.zeros(layer.x.shape, device=ranks.device, requires_grad=True)
            recv.handle.arrived.weights.retain_grad()
            ep.combine(rows, recv.handle, weighted=True, bias=bias).sum().backward()
            assert (rows.grad.dtype, layer.weights.grad.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(bias.grad, torch.ones_like(bias))
            assert not recv.handle.arrived.weights.grad[~valid.flatten()].any()
            weights = recv.row_weights.detach().unsqueeze(-1)
            want = torch.where(valid, weights.bfloat16().expand_as(rows), 0.0)
            assert_same_bits(
                torch.where(valid, rows.grad, 0.0), want, what="gradient of rows", rank=ranks.rank
            )
            idx, _ = case.picks[ranks.rank]
            held = torch.where(idx >= 0, case.x[ranks.rank].float().sum(1, keepdim=True), 0.0)
            assert_close(layer.weights.grad.cpu(), held, relative=1e-5, what="gradient of weights")


@distributed_test(world_size=2, engine=ENGINES)
def test_results_share_no_memory_with_arguments(ranks: Ranks) -> None:
    """So that either may be changed in place."""
    case = Case(ranks.world_size, dtype=torch.float32)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        recv = ep.dispatch(layer.x, layer.idx, layer.weights)
        again = ep.dispatch(layer.x, handle=recv.handle)
        summed = ep.combine(recv.x, recv.handle, reduce_weights=recv.topk_weights)
        tensors = (
            layer.x,
            layer.weights,
            recv.x,
            recv.topk_weights,
            again.x,
            summed.x,
            summed.topk_weights,
        )
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        assert len(set(places)) == len(places)
