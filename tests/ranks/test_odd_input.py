"""Input that looks bad and is good: strided, expanded and empty tensors, views of leaves, extremes
of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from bad_input import CASE, Inputs, assert_works, make
from cases import Case, check_combined, dispatch, rows_to_combine
from tokenyard.testing import Ranks, assert_same_bits, distributed_test, poisoned

WORLD_SIZES = (1, 2, 4)
MAJOR = ty.Layout.EXPERT_MAJOR

layouts = pytest.mark.parametrize("layout", list(ty.Layout), ids=lambda layout: layout.name.lower())


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def every_other_column(t: Tensor) -> Tensor:
    wide = torch.full((t.shape[0], 2 * t.shape[1]), 77, dtype=torch.float32, device=t.device).to(
        t.dtype
    )
    wide[:, ::2] = t
    return wide[:, ::2]


def inside(t: Tensor) -> Tensor:
    """A window into something larger, not aligned to anything."""
    room = torch.zeros(t.shape[0] + 2, t.shape[1] + 3, dtype=t.dtype, device=t.device)
    room[1:-1, 1:-2] = t
    return room[1:-1, 1:-2]


def at_an_odd_offset(t: Tensor) -> Tensor:
    """Contiguous, and begins at no whole word of more than its own bytes."""
    line = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    line[1:] = t.flatten()
    return line[1:].view(t.shape)


def overlapping(t: Tensor) -> Tensor:
    """Rows that share all but one of their elements with the next row."""
    line = (
        torch.arange(t.shape[0] + t.shape[1], device=t.device)
        .remainder(CASE.num_experts)
        .to(t.dtype)
    )
    return line.as_strided(t.shape, (1, 1))


STRIDES: list[Callable[[Tensor], Tensor]] = [
    transposed,
    every_other_column,
    inside,
    at_an_odd_offset,
]
strides = pytest.mark.parametrize("stride", STRIDES, ids=lambda make: make.__name__)


@pytest.mark.parametrize("stride", [*STRIDES, overlapping], ids=lambda make: make.__name__)
@distributed_test(world_size=2)
def test_dispatch_of_any_strides(ranks: Ranks, stride: Callable[[Tensor], Tensor]) -> None:
    """The same bits as from contiguous copies."""
    i = Inputs.of(ranks)
    odd = [stride(t) for t in (i.x, i.topk_idx, i.topk_weights)]
    even = [t.contiguous() for t in odd]
    with make(ranks) as ep:
        for layout, exact in product(ty.Layout, (True, False)):
            got, want = (
                ep.dispatch(*tensors, layout=layout, exact=exact) for tensors in (odd, even)
            )
            assert_same_bits(got.source, want.source, what=f"source {layout}", rank=ranks.rank)
            valid = (want.source >= 0).flatten()
            for name in ("x", "topk_idx", "topk_weights", "row_weights"):
                if (right := getattr(want, name)) is not None:
                    rows, right = (
                        t.reshape(valid.numel(), -1)[valid] for t in (getattr(got, name), right)
                    )
                    assert_same_bits(rows, right, what=f"{name} {layout}", rank=ranks.rank)


@strides
@distributed_test(world_size=2)
def test_combine_of_any_strides(ranks: Ranks, stride: Callable[[Tensor], Tensor]) -> None:
    """Rows, bias, ``out`` and weights; NaN around ``out`` stay."""
    i = Inputs.of(ranks)
    with make(ranks) as ep:
        for layout, exact in product(ty.Layout, (True, False)):
            recv = ep.dispatch(i.x, i.topk_idx, i.topk_weights, layout=layout, exact=exact)
            rows = torch.randn(recv.x.shape, device=ranks.device).bfloat16()
            odd = (
                torch.stack([stride(block) for block in rows]) if rows.dim() == 3 else stride(rows)
            )
            out = stride(torch.full_like(i.x, float("nan")))
            want = ep.combine(rows, recv.handle, bias=i.x)
            assert ep.combine(odd, recv.handle, bias=stride(i.x), out=out) is out
            assert_same_bits(out, want, what=f"combined {layout}", rank=ranks.rank)
            if layout is ty.Layout.FLAT:
                reduced = (
                    ep.combine(rows, recv.handle, reduce_weights=w)
                    for w in (recv.topk_weights, stride(recv.topk_weights))
                )
                assert_same_bits(
                    *(each.topk_weights for each in reduced), what="reduced", rank=ranks.rank
                )


@distributed_test(world_size=2)
def test_expanded(ranks: Ranks) -> None:
    """Stride 0: one row, one routing and one weight for all tokens."""
    i = Inputs.of(ranks)
    x, idx, weights = (
        i.x[:1].expand(5, -1),
        i.topk_idx[:1].expand(5, -1),
        i.topk_weights[:1, :1].expand(5, 3),
    )
    with make(ranks) as ep:
        odd = ep.dispatch(x, idx, weights)
        even = ep.dispatch(x.contiguous(), idx.contiguous(), weights.contiguous())
        for name in ("x", "topk_idx", "topk_weights", "source"):
            assert_same_bits(getattr(odd, name), getattr(even, name), what=name, rank=ranks.rank)
        rows = torch.full((), 0.5, dtype=torch.bfloat16, device=ranks.device).expand(odd.x.shape)
        bias, reduce = i.x[:1].expand(5, -1), rows[:, :1].expand(-1, 3)
        got = ep.combine(rows, odd.handle, bias=bias, reduce_weights=reduce)
        want = ep.combine(
            rows.contiguous(),
            even.handle,
            bias=bias.contiguous(),
            reduce_weights=reduce.contiguous(),
        )
        assert_same_bits(got.x, want.x, what="combined", rank=ranks.rank)
        assert_same_bits(got.topk_weights, want.topk_weights, what="reduced", rank=ranks.rank)


@strides
@distributed_test(world_size=2)
def test_quantized_of_any_strides(ranks: Ranks, stride: Callable[[Tensor], Tensor]) -> None:
    i = Inputs.of(ranks)
    data, scales = i.x.to(torch.int8), torch.rand(5, 3, device=ranks.device)
    with make(ranks) as ep:
        for layout in (ty.Layout.FLAT, MAJOR):
            odd = ep.dispatch(ty.Quantized(stride(data), stride(scales)), i.topk_idx, layout=layout)
            even = ep.dispatch(ty.Quantized(data, scales), i.topk_idx, layout=layout)
            assert_same_bits(odd.x, even.x, what="data", rank=ranks.rank)
            assert_same_bits(odd.scales, even.scales, what="scales", rank=ranks.rank)


@layouts
@distributed_test(world_size=2)
def test_views_of_leaves_get_their_gradient(ranks: Ranks, layout: ty.Layout) -> None:
    """A window, a transpose and an expansion of leaves: the gradients of contiguous copies."""
    i = Inputs.of(ranks)

    def leaves() -> tuple[Tensor, Tensor]:
        wide = torch.arange(7.0 * 80, device=ranks.device).view(80, 7).remainder(13.0) - 5
        return wide.requires_grad_(), torch.ones(1, 3, device=ranks.device).requires_grad_()

    grads = []
    with make(ranks) as ep:
        for contiguous in (False, True):
            wide, weight = leaves()
            x, weights = wide.t()[1:6, ::2], weight.expand(5, -1)
            if contiguous:
                x, weights = x.contiguous(), weights.contiguous()
            recv = ep.dispatch(x, i.topk_idx, weights, layout=layout)
            shares = recv.topk_weights if layout is ty.Layout.FLAT else recv.row_weights
            rows = recv.x.nan_to_num() * (
                shares.sum(-1, keepdim=True) if layout is ty.Layout.FLAT else shares.unsqueeze(-1)
            )
            ep.combine(rows, recv.handle).square().sum().backward()
            grads.append((wide.grad, weight.grad))
    for got, want, name in zip(*grads, ("x", "weights"), strict=True):
        assert_same_bits(got, want, what=f"gradient of {name}", rank=ranks.rank)
        assert got.any()


@layouts
@distributed_test(world_size=2)
def test_rows_that_nobody_uses_have_no_gradient(ranks: Ranks, layout: ty.Layout) -> None:
    """Experts that compute on all rows of a static result must not see garbage in the backward: 0 *
    garbage may be NaN.
    """
    i = Inputs.of(ranks)
    with make(ranks) as ep, poisoned():
        recv = ep.dispatch(i.x, i.topk_idx, i.topk_weights, layout=layout, exact=False)
        for weighted in (False, True)[: 1 + (layout is not ty.Layout.FLAT)]:
            rows = torch.ones(recv.x.shape, device=ranks.device, requires_grad=True)
            ep.combine(rows, recv.handle, weighted=weighted).sum().backward()
            unused = rows.grad[recv.source < 0]
            assert_same_bits(
                unused, torch.zeros_like(unused), what="gradient of unused rows", rank=ranks.rank
            )


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
@layouts
@distributed_test(world_size=WORLD_SIZES)
def test_no_tokens_anywhere(ranks: Ranks, layout: ty.Layout, exact: bool) -> None:
    """Nobody has a token: results are empty, in shape, and gradients are too."""
    x = torch.empty(0, CASE.hidden, device=ranks.device, requires_grad=True)
    idx = torch.empty(0, CASE.num_topk, dtype=torch.int64, device=ranks.device)
    weights = torch.empty(0, CASE.num_topk, device=ranks.device, requires_grad=True)
    with make(ranks) as ep:
        for options in ({}, {"quantize": ty.Quantize.FP8}, {"async_op": True}):
            recv = ep.dispatch(x, idx, weights, layout=layout, exact=exact, **options)
            assert not recv.tokens_per_expert.any()
            assert (recv.source == -1).all()
            assert recv.x.shape[0] == 0 or not exact or layout is ty.Layout.EXPERT_PADDED
            rows = torch.full(recv.x.shape, float("nan"), device=ranks.device, requires_grad=True)
            y = ep.combine(rows, recv.handle)
            assert y.shape == (0, CASE.hidden)
            (2 * y).sum().backward()
            assert rows.grad.shape == rows.shape
        (2 * ep.dispatch(x, handle=recv.handle).x).sum().backward()
        assert x.grad.shape == x.shape
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_a_single_row_or_column_of_any_stride(ranks: Ranks) -> None:
    """Torch calls them contiguous whatever the stride of what there is one of."""
    with ty.ExpertParallel(
        ranks.group, num_experts=2, hidden=40, num_topk=1, max_tokens_per_rank=4
    ) as ep:
        wide = torch.randn(4, 43, device=ranks.device).bfloat16()
        recv = ep.dispatch(wide[1:2, :40], torch.full((1, 1), ranks.rank, device=ranks.device))
        assert torch.equal(recv.x, wide[1:2, :40])
    with ty.ExpertParallel(
        ranks.group, num_experts=2, hidden=1, num_topk=1, max_tokens_per_rank=4
    ) as ep:
        column = torch.randn(9, 4, device=ranks.device).t()[:, 3:4]  # strides (1, 4)
        recv = ep.dispatch(column, torch.full((4, 1), ranks.rank, device=ranks.device))
        rows = torch.zeros(9, 4, device=ranks.device).t()[:, 3:4].copy_(recv.x)
        assert torch.equal(ep.combine(rows, recv.handle), column)


@distributed_test(world_size=2)
def test_no_rows_and_any_strides(ranks: Ranks) -> None:
    """Torch calls every empty tensor contiguous; rank 0 has no tokens and gets no rows."""
    num_tokens = 5 * ranks.rank
    x = torch.zeros(1, 1, device=ranks.device).expand(num_tokens, CASE.hidden)
    idx = torch.full((1, 1), CASE.num_experts - 1, device=ranks.device).expand(
        num_tokens, CASE.num_topk
    )
    with make(ranks) as ep:
        recv = ep.dispatch(x, idx)
        assert recv.x.shape == (num_tokens, CASE.hidden)
        assert ep.dispatch(x, handle=recv.handle).x.shape == recv.x.shape
        y = ep.combine(torch.zeros(1, 1, device=ranks.device).expand(recv.x.shape), recv.handle)
        assert y.shape == x.shape


@distributed_test(world_size=2)
def test_extremes_of_options(ranks: Ranks) -> None:
    """No capacity at all, and a capacity beyond everything; the largest and smallest timeouts that
    make sense.
    """
    i = Inputs.of(ranks)
    with make(ranks, timeout=86400 * 365) as ep:
        none = ep.dispatch(i.x, i.topk_idx, layout=MAJOR, exact=False, capacity=0)
        assert none.x.shape == (0, CASE.hidden)
        assert int(none.overflow) == int(none.tokens_per_expert.sum()) > 0
        assert not ep.combine(none.x, none.handle).any()
        room = ep.dispatch(i.x, i.topk_idx, layout=MAJOR, exact=False, capacity=1000)
        assert int(room.overflow) == 0
        assert room.x.shape[0] == 1000
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_infinities_and_nan_travel_as_they_are(ranks: Ranks) -> None:
    """And a -0.0 or NaN of one row does not touch another."""
    i = Inputs.of(ranks)
    x = i.x.clone()
    x[0], x[1], x[2] = float("nan"), float("inf"), -0.0
    with make(ranks) as ep:
        recv = ep.dispatch(x, i.topk_idx)
        mine = (recv.source >> 32) == ranks.rank
        assert_same_bits(recv.x[mine], x[recv.source[mine] & 0xFFFFFFFF], what="x", rank=ranks.rank)
        y = ep.combine(recv.x, recv.handle)
        assert y[0].isnan().all() and (y[1] == float("inf")).all() and (y[2] == 0).all()
        assert y[3:].isfinite().all()


LARGE = {"num_tokens": 700, "hidden": 7168}
"""20 MB of float32: sums of that many are made in three blocks on a CPU."""


@distributed_test(world_size=1)
def test_sums_over_the_bias_of_other_tokens(ranks: Ranks) -> None:
    """More than one block of sums, each over the bias of the next, which may be wider than the
    sums.
    """
    tokens, hidden = LARGE.values()
    with ty.ExpertParallel(
        ranks.group, num_experts=2, hidden=hidden, num_topk=1, max_tokens_per_rank=tokens
    ) as ep:
        x = torch.randn(tokens, hidden, device=ranks.device).bfloat16()
        recv = ep.dispatch(x, torch.zeros(tokens, 1, dtype=torch.int64, device=ranks.device))
        both = torch.randn(tokens + 1, hidden, device=ranks.device).bfloat16()
        want = (x.float() + both[:-1].float()).bfloat16()
        assert torch.equal(ep.combine(recv.x, recv.handle, bias=both[:-1], out=both[1:]), want)
        wide = torch.randn(tokens, hidden, device=ranks.device)
        second_half = wide.view(torch.bfloat16).view(2 * tokens, hidden)[tokens:]
        want = (x.float() + wide).bfloat16()
        assert torch.equal(ep.combine(recv.x, recv.handle, bias=wide, out=second_half), want)


@distributed_test(world_size=2)
def test_more_than_one_block_of_sums(ranks: Ranks) -> None:
    """Of rows, on the way back and at their owner, with weights and two biases: the bits of the
    oracle.
    """
    for layout in (ty.Layout.FLAT, MAJOR):
        case = Case(2, num_experts=4, num_topk=2, routing="duplicates", layout=layout, **LARGE)
        weighted = {"weighted": layout is MAJOR}
        random = torch.Generator().manual_seed(1)
        bias = [tuple(torch.randn(2, *x.shape, generator=random)) for x in case.x]
        with case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case)
            mine = tuple(term.to(ranks.device) for term in bias[ranks.rank])
            got = ep.combine(
                rows_to_combine(recv, case, ranks.rank), recv.handle, bias=mine, **weighted
            )
            check_combined(
                got, case, ranks.rank, case.combined(ranks.rank, bias=bias, **weighted).x
            )


@distributed_test(world_size=(1, 2))
def test_sums_over_the_rows_that_are_summed(ranks: Ranks) -> None:
    """``out`` is the rows themselves, or begins in the middle of one; whoever needs the rows has
    them by then.
    """
    i = Inputs.of(ranks)
    with make(ranks) as ep:
        for layout in (ty.Layout.FLAT, MAJOR):
            recv = ep.dispatch(i.x, i.topk_idx, layout=layout)
            want = ep.combine(recv.x, recv.handle)
            room = want.numel() + CASE.hidden // 2
            memory = torch.zeros(room + recv.x.numel(), dtype=recv.x.dtype, device=ranks.device)
            for begin in (0, CASE.hidden // 2):
                rows = memory[: recv.x.numel()].view_as(recv.x).copy_(recv.x)
                out = memory[begin : begin + want.numel()].view_as(want)
                assert_same_bits(
                    ep.combine(rows, recv.handle, out=out),
                    want,
                    what=f"{layout} {begin}",
                    rank=ranks.rank,
                )


def test_what_a_layout_lacks_is_none() -> None:
    """Also what a result of another layout has; and nobody's empty tensor is another's."""
    everywhere = {"x", "source", "tokens_per_expert", "handle"}
    has = {
        ty.Layout.FLAT: {"topk_idx", "topk_weights"},
        MAJOR: {"row_weights", "expert_offsets"},
        ty.Layout.EXPERT_PADDED: {"row_weights", "source_ranges"},
    }
    names = everywhere.union(*has.values(), {"scales", "overflow"})
    x, idx, weights = torch.ones(3, 40), torch.tensor([[0, 1], [1, -1], [0, 0]]), torch.ones(3, 2)
    with ty.ExpertParallel(
        num_experts=2, hidden=40, num_topk=2, max_tokens_per_rank=4, device="cpu"
    ) as ep:
        for layout, exact in product(ty.Layout, (True, False)):
            plain, bare = (
                ep.dispatch(x, idx, each, layout=layout, exact=exact) for each in (weights, None)
            )
            assert {name for name in names if getattr(plain, name) is not None} == everywhere | has[
                layout
            ]
            weightless = everywhere | (has[layout] - {"topk_weights", "row_weights"})
            assert {name for name in names if getattr(bare, name) is not None} == weightless
            cast = ep.dispatch(x, idx, layout=layout, exact=exact, quantize=ty.Quantize.FP8)
            assert {name for name in names if getattr(cast, name) is not None} == weightless | {
                "scales"
            }
            if not exact:
                with pytest.raises(ValueError, match="tokens_per_expert_list needs exact=True"):
                    _ = plain.tokens_per_expert_list
            empty = [t for t in (*plain.handle.plan, *plain.handle.arrived) if t.numel() == 0]
            assert len({t.untyped_storage()._cdata for t in empty}) == len(empty)
        room = ep.dispatch(x, idx, weights, layout=MAJOR, exact=False, capacity=2)
        assert {name for name in names if getattr(room, name) is not None} == everywhere | has[
            MAJOR
        ] | {"overflow"}


def test_results_outlive_later_calls() -> None:
    """Whatever a call returned stays as it was while memory that is kept between calls is used
    again, and is no argument of it.
    """
    random = torch.Generator().manual_seed(2)
    idx, weights = torch.tensor([[0, 1], [1, -1], [0, 0]]), torch.rand(3, 2, generator=random)

    def calls(x: Tensor) -> list[Tensor]:
        """Every tensor that comes out of calls with ``x``."""
        found: list[Tensor] = []
        for layout, exact, payload in product(
            ty.Layout, (True, False), (x, ty.Quantized(x.to(torch.int8), x[:, :3]))
        ):
            recv = ep.dispatch(payload, idx, weights, layout=layout, exact=exact)
            again = ep.dispatch(payload, handle=recv.handle)
            reduce = recv.topk_weights if layout is ty.Layout.FLAT else None
            rows = torch.randn(recv.x.shape, generator=random)
            sums = ep.combine(rows, recv.handle, reduce_weights=reduce)
            found += [
                recv.x,
                again.x,
                recv.source,
                *(sums if isinstance(sums, Tensor) else (sums.x, sums.topk_weights)),
            ]
            found += [
                each
                for each in (recv.scales, again.scales, recv.topk_idx, reduce, recv.row_weights)
                if each is not None
            ]
            found += [*recv.handle.plan, *recv.handle.arrived]
        return found

    with ty.ExpertParallel(
        num_experts=2, hidden=40, num_topk=2, max_tokens_per_rank=4, device="cpu"
    ) as ep:
        calls(torch.randn(3, 40, generator=random))  # so that memory need not grow
        first = calls(x := torch.randn(3, 40, generator=random) * 9)
        before = [each.clone() for each in first]
        calls(torch.randn(3, 40, generator=random) * 9)
        for given in (x, idx, weights):
            given.zero_()
    for at, (got, want) in enumerate(zip(first, before, strict=True)):
        assert_same_bits(got, want, what=f"tensor {at}")
