"""Engine collective on kernels, which are interpreted here: the same bits as torch's way and as the
oracle, on ranks of which each goes its own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

import tokenyard as ty
from cases import PLAIN, QUANTIZED, Case, check_received, dispatch, on_grid
from interpreted import need_interpreter
from interpreted_collective import bind, on_kernels
from nvlink_pool import SOAK
from test_dispatch_combine import KINDS, combine_all_ways, layouts, shapes
from tokenyard.engines import select
from tokenyard.engines.collective import Binder, CollectiveEngine
from tokenyard.engines.collective_launches import FEW_TOKENS
from tokenyard.testing import ROUTINGS, Ranks, assert_same_bits, distributed_test, poisoned

need_interpreter()

SOME_KINDS = [(layout, at % 2 == 0) for at, layout in enumerate(ty.Layout)]
"""Each layout, exact or static."""


def same_plan(got: ty.Received, want: ty.Received, what: str) -> None:
    """Handles of both ways hold the same numbers."""
    for kind in ("plan", "arrived"):
        mine, theirs = getattr(got.handle, kind), getattr(want.handle, kind)
        for name, one, other in zip(mine._fields, mine, theirs, strict=True):
            assert one.dtype == other.dtype, f"{what}: {kind}.{name}"
            assert_same_bits(one, other, what=f"{what}: {kind}.{name}")


def check_both(ranks: Ranks, case: Case, **options: Any) -> None:
    """A dispatch on kernels and by torch, and its combines on kernels."""
    with on_kernels():
        ours = case.make(ranks)
    with ours, case.make(ranks) as theirs, poisoned():
        with on_kernels():
            recv = dispatch(ranks, ours, case, **options)
        want = dispatch(ranks, theirs, case, **options)
        check_received(recv, case, ranks.rank)
        same_plan(recv, want, str(case))
        with on_kernels():
            combine_all_ways(ranks, ours, recv, case)


@pytest.mark.parametrize(
    ("layout", "exact", "routing"),
    [
        (*kind, routing)
        for (at, kind), (turn, routing) in product(enumerate(KINDS), enumerate(ROUTINGS))
        if (at + turn) % (3 if SOAK > 1 else 6) == 0
    ],
)
@distributed_test(world_size=(1, 3), engine="collective")
def test_same_bits(ranks: Ranks, layout: ty.Layout, exact: bool, routing: str) -> None:
    payloads = list(enumerate((*PLAIN, *QUANTIZED)))
    first = ROUTINGS.index(routing) % len(payloads)
    for seed, dtype in (payloads + payloads)[first : first + (1 if SOAK == 1 else 5)]:
        case = Case(
            ranks.world_size, routing=routing, layout=layout, exact=exact, dtype=dtype, seed=seed
        )
        check_both(ranks, case)


@shapes
@layouts
@distributed_test(world_size=3, engine="collective")
def test_quantised_in_the_send(ranks: Ranks, layout: ty.Layout, exact: bool) -> None:
    turn = 2 * list(ty.Layout).index(layout) + exact
    for mode in ty.Quantize if SOAK > 1 else list(ty.Quantize)[turn % 4 :][:1]:
        for dtype in PLAIN if SOAK > 1 else PLAIN[mode.value % 3 :][:1]:
            case = Case(
                ranks.world_size, hidden=300, dtype=dtype, layout=layout, exact=exact, quantize=mode
            )
            check_both(ranks, case)


@contextmanager
def over_the_group() -> Iterator[None]:
    """Objects made meanwhile exchange over the user's group, as over NCCL: static calls have no
    headers.
    """
    with mock.patch.object(select, "backends_of", return_value={"cpu": "mpi"}):
        yield


@pytest.mark.parametrize(("layout", "exact"), KINDS if SOAK > 1 else SOME_KINDS)
@distributed_test(world_size=3 if SOAK == 1 else (1, 3), engine="collective")
def test_over_the_group(ranks: Ranks, layout: ty.Layout, exact: bool) -> None:
    """Rows that nobody sent come too; bad ids are found in a check."""
    case = Case(ranks.world_size, layout=layout, exact=exact)
    with over_the_group():
        check_both(ranks, case)
        with on_kernels(), case.make(ranks) as ep:
            assert "mpi" in ep.why
            ids = case.picks[ranks.rank][0].clone()
            x = torch.zeros(len(ids), case.hidden)
            ep.dispatch(x, ids, **case.options)
            ep.check()
            ids[2, 1] = 8
            if exact:
                text = r"topk_idx\[2, 1\] is 8, but there are 8 experts"
                with pytest.raises(ValueError, match=text):
                    ep.dispatch(x, ids, **case.options)
                return
            ep.dispatch(x, ids, **case.options)
            ids[4, 0] = -2
            ep.dispatch(x, ids, **case.options)
            with pytest.raises(ValueError, match=r"topk_idx\[2, 1\] is 8, but there are 8 experts"):
                ep.check()
            ep.check()


ODD: dict[str, dict[str, Any]] = {
    "odd rows": {"hidden": 37},
    "odd rows of bytes": {"hidden": 21, "dtype": torch.int8},
    "a single channel": {"hidden": 1, "dtype": torch.float32},
    "ranks without tokens": {"num_tokens": 1},
    "no tokens at all": {"num_tokens": 2, "routing": "nobody"},
    "ranks without experts": {"num_experts": 2, "num_topk": 2},
    "one pick": {"num_topk": 1},
    "aligned blocks": {"layout": ty.Layout.EXPERT_MAJOR, "expert_alignment": 16},
    "odd rows by expert": {"hidden": 37, "layout": ty.Layout.EXPERT_MAJOR},
    "ranks without experts, by expert": {
        "num_experts": 2,
        "num_topk": 2,
        "layout": ty.Layout.EXPERT_MAJOR,
    },
    "many tokens": {
        "num_tokens": FEW_TOKENS + 3,
        "num_topk": 1,
        "hidden": 8,
        "layout": ty.Layout.EXPERT_MAJOR,
    },
}


@pytest.mark.parametrize(
    ("exact", "odd"),
    [(exact, odd) for at, odd in enumerate(ODD) for exact in (at % 2 == 0, at % 2 == 1)[:SOAK]],
)
@distributed_test(world_size=3, engine="collective")
def test_odd_sizes(ranks: Ranks, exact: bool, odd: str) -> None:
    options = dict(ODD[odd])
    nobody = options.get("routing") == "nobody"
    case = Case(
        ranks.world_size, exact=exact, **options | ({"routing": "uniform"} if nobody else {})
    )
    if nobody:
        case.__dict__["picks"] = [
            (torch.full_like(idx, -1), weights) for idx, weights in case.picks
        ]
    check_both(ranks, case)


@shapes
@distributed_test(world_size=2, engine="collective")
def test_options(ranks: Ranks, exact: bool) -> None:
    """int32 ids, no weights, room for fewer rows than come, tensors that are no whole memory; all
    as torch has them.
    """
    case = Case(2, exact=exact, layout=ty.Layout.EXPERT_MAJOR)
    idx, weights = case.picks[ranks.rank]
    wide = torch.cat([case.x[ranks.rank], case.x[ranks.rank]], dim=1)
    x = wide[:, 3 : 3 + case.hidden]
    capacity = {} if exact else {"capacity": 9}
    calls: list[dict[str, Any]] = [
        {"topk_idx": idx.int(), "layout": ty.Layout.FLAT},
        {"topk_idx": idx.int(), "layout": ty.Layout.EXPERT_MAJOR, **capacity},
        {"topk_idx": idx, "topk_weights": weights, "layout": ty.Layout.EXPERT_MAJOR, **capacity},
    ]
    with on_kernels():
        ours = case.make(ranks)
    with ours, case.make(ranks) as theirs, poisoned():
        for call in calls:
            with on_kernels():
                got = ours.dispatch(x, exact=exact, **call)
            want = theirs.dispatch(x, exact=exact, **call)
            same_plan(got, want, str(call))
            assert_same_bits(got.x, want.x, what=str(call))
            with on_kernels():
                again = ours.dispatch(2 * x, handle=got.handle)
            right = theirs.dispatch(2 * x, handle=want.handle)
            assert_same_bits(again.x, right.x, what="cached")
            bias = (x.float(), torch.ones_like(x))
            with on_kernels():
                combined = ours.combine(again.x, got.handle, bias=bias)
            assert_same_bits(
                combined, theirs.combine(right.x, want.handle, bias=bias), what="combined"
            )


@layouts
@distributed_test(world_size=3, engine="collective")
def test_cached_and_backward(ranks: Ranks, layout: ty.Layout) -> None:
    """Gradients, and dispatches with a handle, in every format."""
    case = Case(ranks.world_size, layout=layout)
    idx, weights = case.picks[ranks.rank]
    with on_kernels():
        ours = case.make(ranks)
    seen: list[list[torch.Tensor]] = []
    with ours, case.make(ranks) as theirs:
        for ep, way in ((ours, on_kernels), (theirs, nullcontext)):
            x, w = case.x[ranks.rank].clone().requires_grad_(), weights.clone().requires_grad_()
            with way():
                recv = ep.dispatch(x, idx, w, layout=layout)
                valid = recv.source >= 0
                rows = torch.where(valid.unsqueeze(-1), recv.x, 0.0)
                out = ep.combine(rows * 2, recv.handle, weighted=layout is not ty.Layout.FLAT)
                (out.float() ** 2).sum().backward()
                found = [out.detach(), x.grad] + ([] if w.grad is None else [w.grad])
                for mode in (None, *ty.Quantize):
                    again = ep.dispatch(x.detach(), handle=recv.handle, quantize=mode)
                    found.append(again.x[valid])
                    found += [] if again.scales is None else [again.scales[valid]]
                seen.append(found)
    for one, other in zip(*seen, strict=True):
        assert_same_bits(one, other, what=layout.name)


@distributed_test(world_size=3, engine="collective")
def test_ranks_go_different_ways(ranks: Ranks) -> None:
    """One on kernels, the others by torch: rows on the wire are the same."""
    for layout, exact in KINDS if SOAK > 1 else SOME_KINDS:
        case = Case(ranks.world_size, layout=layout, exact=exact)
        with on_kernels() if ranks.rank == 1 else nullcontext(), case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@distributed_test(world_size=2, engine="collective")
def test_launches_of_a_call(ranks: Ranks) -> None:
    """Plan, pack, count where results are by expert, place; sums on both sides."""
    names: list[str] = []

    def noted(kernel: Any, *rest: Any) -> Any:
        launch = bind(kernel, *rest)

        def launched(*args: Any) -> None:
            names.append(kernel.__name__.removeprefix("collective_").removesuffix("_kernel"))
            launch(*args)

        return launched

    def made(call: Any) -> tuple[list[str], Any]:
        names.clear()
        result = call()
        return list(names), result

    case = Case(2)
    idx, weights = case.picks[ranks.rank]
    x = case.x[ranks.rank]
    noting = mock.patch.object(CollectiveEngine, "forced", Binder(noted, 2))
    with noting, case.make(ranks) as ep:
        fresh, flat = made(lambda: ep.dispatch(x, idx, weights))
        assert fresh == ["plan", "pack", "place"]
        major = ty.Layout.EXPERT_MAJOR
        fresh, by_expert = made(lambda: ep.dispatch(x, idx, weights, layout=major))
        assert fresh == ["plan", "pack", "count", "place"]
        assert made(lambda: ep.dispatch(x, handle=flat.handle))[0] == ["pack", "gather"]
        assert made(lambda: ep.combine(flat.x, flat.handle))[0] == ["owner"]
        back = made(lambda: ep.combine(by_expert.x, by_expert.handle))[0]
        assert back == ["partial", "owner"]


@distributed_test(world_size=4, engine="collective")
def test_grids_of_nodes_are_torchs(ranks: Ranks) -> None:
    with on_grid(2, 2), on_kernels():
        case = Case(4)
        with case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            assert recv.handle.plan.route.numel() > recv.handle.plan.splits[:4].sum()


@distributed_test(world_size=2, engine="collective")
def test_examples_of_the_kernels(ranks: Ranks) -> None:
    """Those in the docstrings of ``kernels/collective_*.py``."""
    rank, nobody = ranks.rank, torch.empty(0, 2, dtype=torch.int64)

    def made(num_topk: int, ids: torch.Tensor, **options: Any) -> tuple[Any, ty.Received]:
        with on_kernels():
            ep = Case(2, num_experts=4, num_topk=num_topk, num_tokens=3, hidden=8).make(ranks)
        return ep, ep.dispatch(torch.zeros(len(ids), 8), ids, torch.ones(ids.shape), **options)

    ids = torch.tensor([[0, 3], [1, 1], [2, -1]])
    for exact, route, returns in (
        (True, [0, 1, 0, 2], [[0, 2], [1, -1], [-1, 3]]),
        (False, [0, 1, -1, 0, 2, -1], [[0, 3], [1, -1], [-1, 4]]),
    ):
        ep, recv = made(2, ids if rank == 0 else nobody, exact=exact)
        with ep:
            if rank == 0:
                assert recv.handle.plan.route.tolist() == route
                assert recv.handle.plan.returns.tolist() == returns
    ids = torch.tensor([[0, 3], [1, -1]] if rank == 0 else [[1, 0]])
    ep, recv = made(2, ids)
    with ep:
        if rank == 0:
            assert recv.topk_idx.tolist() == [[0, -1], [1, -1], [1, 0]]
    ep, recv = made(2, ids, layout=ty.Layout.EXPERT_MAJOR)
    with ep:
        plan = recv.handle.plan
        if rank == 0:
            assert plan.slots.tolist() == [[0, -1], [2, -1], [3, 1]]
            assert plan.picks.tolist() == [[0, 0], [0, 0], [0, 1]]
            assert plan.gather.tolist() == [0, 2, 1, 2]
    ids = torch.tensor([[0, 1, 2], [0, -1, -1]]) if rank == 0 else nobody.new_empty(0, 3)
    ep, recv = made(3, ids, layout=ty.Layout.EXPERT_MAJOR)
    with ep:
        rows = torch.tensor([1.0, 8.0, 2.0] if rank == 0 else [0.5]).unsqueeze(1).expand(-1, 8)
        got = ep.combine(rows, recv.handle)
        if rank == 0:
            assert recv.handle.plan.returns[0].tolist() == [0, 2]
            assert got[:, 0].tolist() == [3.5, 8.0]
