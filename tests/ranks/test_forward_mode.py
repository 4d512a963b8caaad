"""Forward-mode AD, transforms of ``torch.func`` and ``torch.vmap``: tangents go where rows go, or
the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist
from torch import Tensor

import moe
import tokenyard as ty
from cases import Case, dispatch
from nvlink_pool import without_devices
from test_dispatch_combine import ENGINES, layouts, shapes
from test_gradients import Layer, loss
from tokenyard import checks, reference
from tokenyard.handle import Spec
from tokenyard.rows import Payload
from tokenyard.testing import Ranks, assert_close, assert_same_bits, distributed_test


def alone_in_process(ranks: Ranks) -> None:
    """torch keeps the level of forward mode for the process, and transforms for the thread."""
    if ranks.world_size > 1 and not isinstance(ranks.group, dist.ProcessGroup):
        pytest.skip("ranks are threads of one process: torch cannot give them levels of their own")


def tangent_of(dual: Tensor) -> Tensor:
    tangent = fwd.unpack_dual(dual).tangent
    assert tangent is not None
    return tangent


def random_like(tensor: Tensor, seed: int) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(
        tensor.device, tensor.dtype
    )


def expected_tangents(
    case: Case, x: list[Tensor], weights: list[Tensor]
) -> list[reference.ReferenceRows]:
    """Dispatch is linear, so its tangents are a dispatch of tangents."""
    return reference.dispatch(
        x,
        [idx for idx, _ in case.picks],
        weights,
        num_experts=case.num_experts,
        layout=case.layout,
        max_tokens_per_rank=case.num_tokens,
    )


@pytest.mark.parametrize("who", ["all", "rank 0", "nobody", "only weights"])
@shapes
@layouts
@distributed_test(world_size=3, engine=ENGINES)
def test_tangents_are_dispatched(ranks: Ranks, layout: ty.Layout, exact: bool, who: str) -> None:
    """Fresh and cached. Ranks without a tangent get those of others."""
    alone_in_process(ranks)
    case = Case(
        ranks.world_size, routing="duplicates", layout=layout, exact=exact, dtype=torch.float32
    )
    dx = [random_like(x, r) for r, x in enumerate(case.x)]
    dw = [random_like(w, r) for r, (_, w) in enumerate(case.picks)]
    has_x = [who == "all" or (who == "rank 0" and r == 0) for r in range(3)]
    has_w = [who in ("all", "only weights")] * 3
    dx = [t if has else torch.zeros_like(t) for t, has in zip(dx, has_x, strict=True)]
    dw = [t if has else torch.zeros_like(t) for t, has in zip(dw, has_w, strict=True)]
    want = expected_tangents(case, dx, dw)[ranks.rank]
    me, valid, num = ranks.rank, want.source >= 0, want.source.shape[0]
    idx, weights = (t.to(ranks.device) for t in case.picks[me])
    x = case.x[me].to(ranks.device)
    with case.make(ranks) as ep, fwd.dual_level():
        x = fwd.make_dual(x, dx[me].to(ranks.device)) if has_x[me] else x
        weights = fwd.make_dual(weights, dw[me].to(ranks.device)) if has_w[me] else weights
        recv = ep.dispatch(x, idx, weights, layout=layout, exact=exact)
        again = ep.dispatch(x, handle=recv.handle)
        for what, rows in (("fresh", recv.x), ("cached", again.x)):
            assert_same_bits(
                tangent_of(rows)[:num].cpu()[valid],
                want.x[valid],
                what=f"tangent of rows, {what}",
                rank=me,
            )
        got, right = recv.topk_weights, want.topk_weights
        if got is None:
            got, right = recv.row_weights, want.row_weights
            assert not tangent_of(got)[:num].cpu()[~valid].any()
        assert_same_bits(
            tangent_of(got)[:num].cpu()[valid], right[valid], what="tangent of weights", rank=me
        )
    assert torch.equal(recv.x[:num].cpu()[valid], case.expected[me].x[valid])


@pytest.mark.parametrize("who", ["all", "rank 0"])
@shapes
@layouts
@distributed_test(world_size=(1, 3), engine=ENGINES)
def test_a_layer_has_the_derivative_of_the_dense_one(
    ranks: Ranks, layout: ty.Layout, exact: bool, who: str
) -> None:
    """Along tangents of x, weights and experts."""
    alone_in_process(ranks)
    case = Case(
        ranks.world_size,
        routing="duplicates",
        layout=layout,
        exact=exact,
        dtype=torch.float32,
        num_experts=7,
    )
    layer, me = Layer(case, ranks), ranks.rank
    has = [who == "all" or r == 0 for r in range(ranks.world_size)]
    experts = layer.every
    d_experts = random_like(experts, 5) if who == "all" else torch.zeros_like(experts)
    dx = [random_like(x, r) if has[r] else torch.zeros_like(x) for r, x in enumerate(case.x)]
    dw = [
        random_like(w, 9 + r) if has[r] else torch.zeros_like(w)
        for r, (_, w) in enumerate(case.picks)
    ]
    idx, weights = case.picks[me]
    dense = lambda x, w, e: moe.dense(x, idx, w, e)  # noqa: E731
    want, want_tangent = torch.func.jvp(
        dense, (case.x[me], weights, experts), (dx[me], dw[me], d_experts)
    )
    begin, end = layer.begin, layer.end
    with case.make(ranks) as ep, fwd.dual_level():
        duals = [leaf.detach() for leaf in (layer.x, layer.weights, layer.experts)]
        if has[me]:
            tangents = (dx[me], dw[me], d_experts[begin:end])
            duals = [
                fwd.make_dual(leaf, t.to(ranks.device))
                for leaf, t in zip(duals, tangents, strict=True)
            ]
        y = moe.run(ep, duals[0], layer.idx, *duals[1:], layout=layout, exact=exact)
        assert_close(y.cpu(), want, relative=1e-6, what="output")
        assert_close(tangent_of(y).cpu(), want_tangent, relative=1e-6, what="tangent")


@distributed_test(world_size=2, engine=ENGINES)
def test_bias_and_reduced_weights_have_tangents(ranks: Ranks) -> None:
    alone_in_process(ranks)
    case = Case(ranks.world_size, dtype=torch.float32)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        bias = torch.zeros(case.tokens_of(ranks.rank), case.hidden, device=ranks.device)
        d_rows, d_reduce, d_bias = (
            random_like(t, ranks.rank) for t in (recv.x, recv.topk_weights, bias)
        )
        want = ep.combine(d_rows, recv.handle, reduce_weights=d_reduce, bias=d_bias)
        with fwd.dual_level():
            rows, reduce, bias = (
                fwd.make_dual(*pair)
                for pair in ((recv.x, d_rows), (recv.topk_weights, d_reduce), (bias, d_bias))
            )
            got = ep.combine(
                rows, recv.handle, reduce_weights=reduce, bias=bias, async_op=ranks.world_size > 1
            )
            assert_same_bits(tangent_of(got.x), want.x, what="tangent of sums", rank=ranks.rank)
            assert_same_bits(
                tangent_of(got.topk_weights),
                want.topk_weights,
                what="tangent of weights",
                rank=ranks.rank,
            )


def on_memory(send: Callable[[Any], Any], given: Any) -> Any:
    """A call of rows that have memory: kernels read it. (torch has zeros without any.)"""
    rows = given.rows if hasattr(given, "rows") else given.payload.x
    assert not rows._is_zerotensor()
    return send(given)


@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_second_derivatives_mix_both_modes(ranks: Ranks, layout: ty.Layout) -> None:
    """Forward over backward (Hessian times vector) and backward over forward, with
    torch.func too.
    """
    alone_in_process(ranks)
    case = Case(ranks.world_size, dtype=torch.float32, layout=layout)
    layer, me = Layer(case, ranks), ranks.rank
    v = random_like(layer.x, me)
    leaf = layer.x.detach()

    def through(ep: ty.ExpertParallel, x: Tensor) -> Tensor:
        return loss(
            moe.run(ep, x, layer.idx, layer.weights.detach(), layer.experts.detach(), layout=layout)
        )

    def dense(x: Tensor) -> Tensor:
        return loss(moe.dense(x, case.picks[me][0], case.picks[me][1], layer.every))

    want = torch.func.jvp(torch.func.grad(dense), (leaf.cpu(),), (v.cpu(),))[1]
    with case.make(ranks) as ep:
        engine: Any = ep._calls.engine  # pyright: ignore[reportPrivateUsage]
        for name in ("redispatch", "combine"):
            setattr(engine, name, partial(on_memory, getattr(engine, name)))
        with fwd.dual_level():
            x = fwd.make_dual(leaf.clone().requires_grad_(), v)
            (grad,) = torch.autograd.grad(through(ep, x), x, create_graph=True)
            assert_close(
                tangent_of(grad).detach().cpu(), want, relative=1e-5, what="forward over backward"
            )
        x = leaf.clone().requires_grad_()
        with fwd.dual_level():
            tangent = tangent_of(through(ep, fwd.make_dual(x, v)))
        assert_close(
            torch.autograd.grad(tangent, x)[0].cpu(),
            want,
            relative=1e-5,
            what="backward over forward",
        )
        hessian = torch.func.jvp(torch.func.grad(lambda x: through(ep, x)), (leaf,), (v,))[1]
        assert_close(hessian.cpu(), want, relative=1e-5, what="torch.func")


@shapes
@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_torch_func_differentiates_a_layer(ranks: Ranks, layout: ty.Layout, exact: bool) -> None:
    alone_in_process(ranks)
    case = Case(
        ranks.world_size, routing="duplicates", dtype=torch.float32, layout=layout, exact=exact
    )
    layer = Layer(case, ranks)
    _, *want = layer.dense_grads()
    with case.make(ranks) as ep:

        def run(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            return moe.run(ep, x, layer.idx, weights, experts, layout=layout, exact=exact)

        leaves = tuple(leaf.detach() for leaf in (layer.x, layer.weights, layer.experts))
        got = torch.func.grad(lambda *each: loss(run(*each)), argnums=(0, 1, 2))(*leaves)
        y, pull = torch.func.vjp(run, *leaves)
        again = pull(torch.autograd.grad(loss(y.requires_grad_()), y)[0])
        for what, *values, right in zip(("x", "weights", "experts"), got, again, want, strict=True):
            for value in values:
                assert_close(value.cpu(), right, relative=1e-6, what=what)


def batched(ep: ty.ExpertParallel, case: Case, ranks: Ranks, how: str) -> object:
    """A call that vmap would have to batch."""
    idx, weights = (t.to(ranks.device) for t in case.picks[ranks.rank])
    x = case.x[ranks.rank].to(ranks.device)
    if how == "dispatch":
        return torch.vmap(lambda x: ep.dispatch(x, idx, weights).x)(torch.stack([x] * 2))
    if how == "nested":
        return torch.vmap(torch.func.grad(lambda x: ep.dispatch(x, idx, weights).x.sum()))(
            torch.stack([x] * 2)
        )
    recv = ep.dispatch(x.requires_grad_(), idx, weights)
    if how == "cached":
        return torch.vmap(lambda x: ep.dispatch(x, handle=recv.handle).x)(torch.stack([x] * 2))
    if how == "combine":
        return torch.vmap(lambda rows: ep.combine(rows, recv.handle))(
            torch.stack([recv.x.detach()] * 2)
        )
    if how == "backward":
        many = torch.stack([torch.ones_like(recv.x)] * 2)
        return torch.autograd.grad(recv.x, x, many, is_grads_batched=True)
    return torch.func.jacrev(lambda rows: ep.combine(rows, recv.handle))(recv.x.detach())


@without_devices  # over NCCL others are told of fresh dispatches only
@pytest.mark.parametrize("how", ["dispatch", "nested", "cached", "combine", "backward", "jacrev"])
@distributed_test(world_size=2)
def test_vmap_is_refused_before_anything_moves(ranks: Ranks, how: str) -> None:
    """The other rank, which batches nothing, learns why."""
    case = Case(ranks.world_size, dtype=torch.float32)
    with case.make(ranks) as ep:
        if ranks.rank == 0:
            with pytest.raises(ty.NotSupported, match=r"torch\.vmap.*Loop over the batch"):
                batched(ep, case, ranks, how)
        else:
            if how not in ("dispatch", "nested"):
                recv = dispatch(ranks, ep, case)
            if how == "jacrev":
                ep.combine(recv.x, recv.handle)
            if how in ("dispatch", "nested"):
                call = partial(dispatch, ranks, ep, case)
            elif how in ("combine", "backward"):
                call = partial(ep.combine, recv.x, recv.handle)
            else:
                call = partial(ep.dispatch, case.x[1], handle=recv.handle)
            with pytest.raises(ty.PeerError, match=r"rank 0 refused .*torch\.vmap"):
                call()
        fresh = dispatch(ranks, ep, case)
        assert torch.equal(fresh.x, case.expected[ranks.rank].x)


@without_devices  # its tensors are the host's
@pytest.mark.parametrize("how", ["linearize", "functionalize"])
@distributed_test(world_size=2)
def test_traces_of_torch_func_are_refused(ranks: Ranks, how: str) -> None:
    """The other rank, which traces nothing, learns why."""
    case = Case(ranks.world_size, dtype=torch.float32)
    with case.make(ranks) as ep:

        def call(x: Tensor) -> Tensor:
            return ep.dispatch(x, *case.picks[ranks.rank]).x

        traced: dict[str, Callable[[], object]] = {
            "linearize": lambda: torch.func.linearize(call, case.x[0]),
            "functionalize": lambda: torch.func.functionalize(call)(case.x[0]),
        }
        if ranks.rank == 0:
            with pytest.raises(ty.NotSupported, match=r"linearize.*call torch\.func\.jvp"):
                traced[how]()
        else:
            if how == "linearize":
                call(case.x[1])  # which linearize makes before it traces
            with pytest.raises(ty.PeerError, match=r"rank 0 refused .*linearize"):
                call(case.x[1])
        assert torch.equal(dispatch(ranks, ep, case).x, case.expected[ranks.rank].x)


@without_devices  # over NCCL others are told of fresh dispatches only
@pytest.mark.parametrize("what", ["quantize", "cached", "scales"])
@distributed_test(world_size=2)
def test_tangents_that_would_be_dropped_are_refused(ranks: Ranks, what: str) -> None:
    """Quantised rows have none. The rank without a tangent cannot know, so it is told."""
    case = Case(ranks.world_size, hidden=128, dtype=torch.float32)
    idx, _ = case.picks[ranks.rank]
    x = case.x[ranks.rank]
    with case.make(ranks) as ep, fwd.dual_level():
        handle = ep.dispatch(x, idx).handle if what == "cached" else None
        if what == "scales":
            x = ty.Quantized(torch.zeros(len(idx), 128, dtype=torch.int8), torch.ones(len(idx), 1))
        if ranks.rank == 0:
            x = (
                ty.Quantized(x.data, fwd.make_dual(x.scales, x.scales))
                if what == "scales"
                else fwd.make_dual(x, x)
            )
        kind, message = (
            (ty.NotSupported, "tangent.*x.detach")
            if ranks.rank == 0
            else (ty.PeerError, "rank 0 refused.*tangent")
        )
        with pytest.raises(kind, match=message):
            ep.dispatch(
                x,
                idx if handle is None else None,
                handle=handle,
                quantize=None if what == "scales" else ty.Quantize.FP8,
            )


@distributed_test(world_size=2)
def test_tangents_are_not_lost_in_given_memory(ranks: Ranks) -> None:
    case = Case(ranks.world_size, dtype=torch.float32)
    with case.make(ranks) as ep, fwd.dual_level():
        recv = dispatch(ranks, ep, case)
        rows = fwd.make_dual(recv.x.detach(), torch.ones_like(recv.x))
        out = torch.empty_like(case.x[ranks.rank], device=ranks.device)
        with pytest.raises(ValueError, match="out= cannot be differentiated"):
            ep.combine(rows, recv.handle, out=out)
        engine: Any = SimpleNamespace(name="nvlink", in_place=True)
        with pytest.raises(ValueError, match="in_place=True cannot be differentiated"):
            checks.check_in_place(
                engine,
                Spec(layout=ty.Layout.FLAT, exact=True),
                Payload(rows[:1], None),
                None,
                ep.config,
                1 << 40,
            )


@without_devices  # over NCCL others are told of fresh dispatches only
@distributed_test(world_size=2)
def test_a_rank_outside_of_the_level_ends_the_call_by_name(ranks: Ranks) -> None:
    """It cannot know that others move tangents, so the ranks disagree on the next call; the message
    says what to do.
    """
    case = Case(ranks.world_size, dtype=torch.float32)
    x, topk_idx = case.x[ranks.rank].to(ranks.device), case.picks[ranks.rank][0].to(ranks.device)
    with case.make(ranks) as ep:
        if ranks.rank == 0:
            mismatch = pytest.raises(ty.Mismatch, match=r"every rank has to enter it")
            with fwd.dual_level(), mismatch:
                ep.dispatch(fwd.make_dual(x, x), topk_idx)
        else:
            recv = ep.dispatch(x, topk_idx)
            with pytest.raises(ty.Mismatch, match="disagree on the call"):
                ep.combine(recv.x, recv.handle)


@distributed_test(world_size=1)
def test_asynchronous_calls_under_torch_func_are_refused(ranks: Ranks) -> None:
    case = Case(1, dtype=torch.float32)
    with (
        case.make(ranks) as ep,
        pytest.raises(ty.NotSupported, match=r"async_op and return_hook.*torch\.func"),
    ):
        torch.func.grad(lambda x: ep.dispatch(x, case.picks[0][0], async_op=True).x.sum())(
            case.x[0]
        )
