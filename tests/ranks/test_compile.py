"""``torch.compile`` sees dispatch and combine as operators: no graph break, same bits, gradients
included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moe
import tokenyard as ty
from cases import Case, dispatch
from nvlink_pool import SOAK, without_devices
from test_dispatch_combine import DEVICE, ENGINES
from test_gradients import Layer, check_grads
from tokenyard import reference
from tokenyard.testing import Ranks, assert_same_bits, distributed_test


def per_row(recv: ty.Received) -> Tensor:
    """Experts without a loop over counts, so that the whole layer is one graph."""
    if recv.topk_weights is not None:
        return recv.x * recv.topk_weights.sum(1, keepdim=True)
    return torch.tanh(recv.x)


def assert_same_as_eager(
    layer: Callable[..., Tensor], compiled: Callable[..., Tensor], case: Case, ranks: Ranks
) -> None:
    """Sums and gradients of a layer have the same bits, compiled and not."""
    outcomes: list[tuple[Any, ...]] = []
    for function in (layer, compiled):
        leaves = Layer(case, ranks)
        y = function(leaves.x, leaves.idx, leaves.weights)
        (y * torch.arange(y.numel(), device=y.device).view_as(y)).sum().backward()
        outcomes.append((y.detach(), leaves.x.grad, leaves.weights.grad))
    for eager, graph in zip(*outcomes, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.parametrize(
    ("layout", "exact"),
    [
        (layout, exact)
        for at, layout in enumerate(list(ty.Layout)[: 2 if DEVICE == "cpu" and SOAK == 1 else 3])
        for exact in (at % 2 == 0, at % 2 == 1)[: SOAK if DEVICE == "cpu" else 2]
    ],
)
@distributed_test(world_size=2, engine=ENGINES)
def test_compiled_layer_has_the_same_bits(ranks: Ranks, layout: ty.Layout, exact: bool) -> None:
    cases = [
        Case(ranks.world_size, num_tokens=n, dtype=torch.float32, layout=layout, exact=exact)
        for n in (24, 17, 5, 0)
    ]
    torch._dynamo.reset()  # other tests of this process have compiled the same function
    with cases[0].make(ranks) as ep:

        def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            recv = ep.dispatch(x, idx, weights, layout=layout, exact=exact)
            return ep.combine(per_row(recv), recv.handle, weighted=layout is not ty.Layout.FLAT)

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for case in cases:  # from the second size on, sizes are symbols
            assert_same_as_eager(layer, compiled, case, ranks)


@distributed_test(world_size=2, engine=ENGINES)
def test_graphs_break_only_at_calls_whose_sizes_torch_does_not_follow(ranks: Ranks) -> None:
    """Without ``fullgraph=True`` or ``capture_dynamic_output_shape_ops``: nothing of the library's
    own is compiled behind the call. (It was: 175 frames here.)"""
    cases = [Case(ranks.world_size, num_tokens=n, dtype=torch.float32) for n in (24, 17, 5)]
    torch._dynamo.reset()
    with cases[0].make(ranks) as ep:

        def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            recv = ep.dispatch(x, idx, weights)
            again = ep.dispatch(x, handle=recv.handle)
            return ep.combine(per_row(recv) + again.x, recv.handle)

        compiled = torch.compile(layer, backend="aot_eager")
        counters.clear()
        for case in cases:
            assert_same_as_eager(layer, compiled, case, ranks)
        assert counters["frames"]["total"] == counters["frames"]["ok"] <= 20, counters
        assert len(counters["graph_break"]) <= 1 and "backend" not in str(counters["graph_break"])


@distributed_test(world_size=2, engine=ENGINES)
def test_breaks_between_the_calls_are_fine(ranks: Ranks) -> None:
    """Real experts loop over counts that only the host knows."""
    case = Case(ranks.world_size, dtype=torch.float32, layout=ty.Layout.EXPERT_MAJOR)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        run = torch.compile(moe.run, backend="aot_eager")
        check_grads(
            layer, run(ep, layer.x, layer.idx, layer.weights, layer.experts, layout=case.layout)
        )


@pytest.mark.portable
@distributed_test(world_size=1, engine=ENGINES)
def test_operators_are_registered_soundly(ranks: Ranks) -> None:
    """``torch.library.opcheck``: schemas, fake kernels (shapes, dtypes) and autograd agree with the
    real ones.

    Its dynamic graph test is left out: it returns every output of an operator from one graph, and
    the partitioner has no answer to sizes that only the data decides. The test above compiles with
    symbolic sizes.
    """
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for layout in ty.Layout:
        for exact in (True, False):
            specified = not exact and layout is not ty.Layout.EXPERT_PADDED
            # it compares every bit of two runs; plans of engines with kernels have the number of
            # their call
            static = (
                ("test_aot_dispatch_static",) if specified and ranks.engine == "collective" else ()
            )
            check = partial(torch.library.opcheck, test_utils=(*utilities, *static))
            case = Case(1, dtype=torch.float32, layout=layout, exact=exact)
            leaves = Layer(case, ranks)
            with case.make(ranks) as ep:
                number, marks = ep._calls.number, (ep._calls.order, ep._calls.anchor)
                spec = [layout.value, int(exact), 1, -1]
                arguments = (*marks, leaves.x, None, leaves.idx, leaves.weights, number, spec, 0, 0)
                check(torch.ops.tokenyard.dispatch.default, arguments)
                handle = ep.dispatch(
                    leaves.x, leaves.idx, leaves.weights, layout=layout, exact=exact
                ).handle
                plan = [each.detach() for each in handle.plan]
                arguments = (*marks, leaves.x, None, plan, number, spec, False, 0)
                check(torch.ops.tokenyard.redispatch.default, arguments)
                rows = torch.randn(
                    handle.num_rows, case.hidden, device=ranks.device, requires_grad=True
                )
                weights = (
                    torch.rand(handle.num_rows, device=ranks.device)
                    if layout is not ty.Layout.FLAT
                    else None
                )
                arguments = (*marks, rows, weights, None, [], plan, number, spec, False, 0)
                check(torch.ops.tokenyard.combine.default, arguments)


def whole_numbers(ranks: Ranks, *shape: int) -> Tensor:
    """Float32 of which sums are exact."""
    numbers = torch.Generator().manual_seed(ranks.rank)
    return torch.randint(-8, 8, shape, generator=numbers).float().to(ranks.device)


def two_batches(ep: ty.ExpertParallel, x: Tensor, y: Tensor, idx: Tensor, idy: Tensor) -> Tensor:
    """Two residual layers, of which none needs the other."""
    a, b = ep.dispatch(x, idx), ep.dispatch(y, idy)
    x = x + ep.combine(2 * a.x, a.handle)
    y = y + ep.combine(3 * b.x, b.handle)
    return torch.cat([x, y])


def two_sums(ep: ty.ExpertParallel, x: Tensor, rows: Tensor, handle: ty.Handle) -> list[Tensor]:
    """Two combines along one handle, so that nobody would see that they were swapped."""
    sums = [ep.combine(torch.cumsum(rows, 0), handle), ep.combine(2 * rows, handle)]
    more = torch.cat([sums[0], rows]), torch.cat([sums[1], x, x, x])
    return [*sums, *(torch.sort(each, 0)[0].square().sum(0) for each in more)]


@distributed_test(world_size=2)
def test_inductor_keeps_the_order_of_calls(ranks: Ranks) -> None:
    """It orders what does not depend on each other by sizes, which differ between ranks, and leaves
    out what is empty: two calls in one graph, forward and backward, empty ones among them."""
    torch._dynamo.reset()
    both, small, large = torch.compile(two_batches, fullgraph=True), (4, 0), (60, 7)
    sizes = {"num_experts": 6, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 64}
    with ty.ExpertParallel(ranks.group, **sizes, device=ranks.device) as ep:
        for few, many in zip(small, large, strict=True):
            counts = (few, many) if ranks.rank else (many, few)
            given = [whole_numbers(ranks, count, 8) for count in counts]
            picks = [torch.arange(2 * n, device=ranks.device).view(-1, 2) % 6 for n in counts]
            outcomes: list[Tensor] = []
            for function in (two_batches, both):
                leaves = [each.clone().requires_grad_() for each in given]
                out = function(ep, *leaves, *picks)
                (out * whole_numbers(ranks, *out.shape)).sum().backward()
                outcomes.append(torch.cat([out.detach(), *(leaf.grad for leaf in leaves)]))
            assert torch.equal(*outcomes)
        tokens = (4, 60)[ranks.rank]
        idx = torch.tensor([[0, 1]], device=ranks.device).repeat(tokens, 1)
        idx[:2, 1] = 5
        x = whole_numbers(ranks, tokens, 8)
        recv = ep.dispatch(x, idx)
        with torch.no_grad():
            eager = two_sums(ep, x, recv.x, recv.handle)
            whole = ep.engine == "collective"  # else a handle from outside breaks the graph
            graph = torch.compile(two_sums, fullgraph=whole)(ep, x, recv.x, recv.handle)
        assert all(torch.equal(*pair) for pair in zip(eager, graph, strict=True))


def residual(ep: ty.ExpertParallel, x: Tensor, idx: Tensor) -> Tensor:
    """Of whose gradient inductor leaves out the sum where there are no tokens."""
    recv = ep.dispatch(x, idx)
    return torch.cat([3 * x + ep.combine(2 * recv.x, recv.handle), x])[: x.shape[0]]


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", True), *([("inductor", None)] if SOAK > 1 else [])]
)
@distributed_test(world_size=2)
def test_graphs_run_between_a_forward_and_its_backward(
    ranks: Ranks, backend: str, dynamic: bool | None
) -> None:
    """Two layers on one object, micro-batches, an evaluation; ranks without tokens among them."""
    torch._dynamo.reset()
    compiled = torch.compile(residual, backend=backend, fullgraph=True, dynamic=dynamic)
    sizes = {"num_experts": 6, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 8}
    with ty.ExpertParallel(ranks.group, **sizes, device=ranks.device) as ep:
        for counts in ((0, 5), (3, 4), (7, 0)):
            given = whole_numbers(ranks, counts[ranks.rank], 8)
            idx = torch.arange(2 * len(given), device=ranks.device).view(-1, 2) % 6
            outcomes: list[Tensor] = []
            for layer in (residual, compiled):
                x = given.clone().requires_grad_()
                outs = [layer(ep, layer(ep, x, idx), idx), layer(ep, 5 * x, idx)]
                with torch.no_grad():
                    layer(ep, x, idx)
                for out in outs:
                    (out * given).sum().backward()
                outcomes.append(torch.cat([*(out.detach() for out in outs), x.grad]))
            assert torch.equal(*outcomes)


@pytest.mark.portable
@distributed_test(world_size=2, engine=ENGINES)
def test_sums_go_where_they_are_asked_to(ranks: Ranks) -> None:
    case = Case(ranks.world_size, dtype=torch.float32)
    leaves = Layer(case, ranks)
    torch._dynamo.reset()
    with case.make(ranks) as ep, torch.no_grad():

        def layer(out: Tensor) -> Tensor:
            recv = ep.dispatch(leaves.x, leaves.idx, leaves.weights)
            return ep.combine(per_row(recv), recv.handle, out=out)

        eager, graph = (torch.full_like(leaves.x, -7.0) for _ in range(2))
        layer(eager)
        torch.compile(layer, backend="aot_eager")(graph)
        assert torch.equal(eager, graph)


@pytest.mark.parametrize(
    ("mode", "hidden"), [(ty.Quantize.FP8_UE8M0, 256), (ty.Quantize.MXFP8, 300)], ids=str
)
@distributed_test(world_size=2, engine=ENGINES)
def test_cached_dispatches_keep_their_cast(ranks: Ranks, mode: ty.Quantize, hidden: int) -> None:
    """Compiled in one graph and eager alike, and the gradient goes straight through."""
    case = Case(ranks.world_size, hidden=hidden)
    outcomes = []
    torch._dynamo.reset()
    with case.make(ranks) as ep:
        handle = dispatch(ranks, ep, case).handle

        def again(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            recv = ep.dispatch(x, handle=handle, quantize=mode)
            return recv.x, recv.scales, recv.dequantize()

        cast = Case(ranks.world_size, hidden=hidden, quantize=mode)
        for function in (again, torch.compile(again, backend="aot_eager", fullgraph=True)):
            leaf = case.x[ranks.rank].clone().to(ranks.device).requires_grad_()
            data, scales, rows = function(leaf)
            want = cast.expected[ranks.rank]
            assert_same_bits(data.cpu(), want.x, what="data", rank=ranks.rank)
            assert_same_bits(scales.cpu(), want.scales, what="scales", rank=ranks.rank)
            assert not data.requires_grad
            assert rows.requires_grad
            rows.backward(torch.ones_like(rows))
            outcomes.append((rows.detach(), leaf.grad))
        ones = [torch.ones(each.x.shape, dtype=torch.bfloat16) for each in cast.expected]
        for rows, grad in outcomes:
            assert_same_bits(
                rows.cpu(), reference.dequantize(want.x, want.scales), what="rows", rank=ranks.rank
            )
            assert_same_bits(
                grad.cpu(), case.combined(ranks.rank, ones).x, what="gradient", rank=ranks.rank
            )


@distributed_test(world_size=2, engine=ENGINES)
def test_selective_checkpointing_sees_operators(ranks: Ranks) -> None:
    """A policy that keeps what dispatch returns saves the second one."""
    case = Case(ranks.world_size, dtype=torch.float32)
    layer = Layer(case, ranks)
    keep = [torch.ops.tokenyard.dispatch.default]
    with case.make(ranks) as ep:

        def body(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            return moe.run(ep, x, layer.idx, weights, experts)

        kept = partial(create_selective_checkpoint_contexts, keep)
        y = checkpoint(
            body, layer.x, layer.weights, layer.experts, use_reentrant=False, context_fn=kept
        )
        check_grads(layer, y)
        assert ep.stats().calls["dispatch"] == 1


@without_devices  # over NCCL others cannot be told of a cached call
@distributed_test(world_size=2)
def test_compiled_calls_do_not_drop_tangents(ranks: Ranks) -> None:
    case = Case(ranks.world_size, dtype=torch.float32)
    torch._dynamo.reset()
    x = case.x[ranks.rank]
    with case.make(ranks) as ep:
        handle = dispatch(ranks, ep, case).handle
        moved = lambda x: ep.dispatch(x, handle=handle).x  # noqa: E731
        compiled = torch.compile(moved, backend="aot_eager", fullgraph=True)
        if ranks.rank == 0:
            with (
                fwd.dual_level(),
                pytest.raises(ty.NotSupported, match=r"tangents.*torch\.compile"),
            ):
                compiled(fwd.make_dual(x, x))
        else:
            with pytest.raises(ty.PeerError, match=r"rank 0 refused.*tangents"):
                compiled(x)
