"""The shared test body: every engine, world size, layout, payload and routing against the oracle,
bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product

import pytest
import torch

import tokenyard as ty
from cases import (
    PLAIN,
    QUANTIZED,
    Case,
    check_combined,
    check_received,
    dispatch,
    rows_to_combine,
    to,
)
from nvlink_pool import SOAK
from tokenyard import reference
from tokenyard.testing import ROUTINGS, Ranks, assert_same_bits, distributed_test, poisoned
from tokenyard.testing.decorators import DEVICE_VARIABLE

DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")
ENGINES = {
    "cpu": ("collective",),
    "cuda": ("collective", "nvlink"),
    "virtual": ("nvlink",),
    "simulated": ("nvlink",),
}[DEVICE]
ALL = DEVICE != "cpu" or SOAK > 1
OTHER_SIZES = (1, 2, 4, *([8] if ALL else []), *([5] if SOAK > 1 else []))
"""To start five processes more, or eight, takes as long as fifty tests on them: ``make soak`` has
those too; see ``test_eight_ranks``.
"""
EXPERT_LAYOUTS = (ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED)

layouts = pytest.mark.parametrize("layout", list(ty.Layout), ids=lambda layout: layout.name.lower())
shapes = pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
KINDS = list(product(ty.Layout, (True, False)))


def some_kinds(first: int, routings: Sequence[str] = tuple(ROUTINGS)) -> pytest.MarkDecorator:
    """Of a layout exact or static with a routing: each routing has an exact and a static one, and
    each of those every third routing, others by ``first``; ``make soak`` has all.
    """
    return pytest.mark.parametrize(
        ("layout", "exact", "routing"),
        [
            (*kind, routing)
            for (at, kind), (turn, routing) in product(enumerate(KINDS), enumerate(routings))
            if ALL or (at + turn) % 3 == first
        ],
        ids=lambda each: (
            {True: "exact", False: "static"}.get(each) or str(each).rpartition(".")[2].lower()
        ),
    )


def combine_all_ways(ranks: Ranks, ep: ty.ExpertParallel, recv: ty.Received, case: Case) -> None:
    """Plain; with weights that rode along and weights of the owner; with bias; with reduced
    weights.
    """
    rank, rows = ranks.rank, rows_to_combine(recv, case, ranks.rank)
    own = [weights for _, weights in case.picks]
    bias = [
        torch.randn(len(idx), case.hidden, generator=torch.Generator().manual_seed(7)).to(
            rows.dtype
        )
        for idx, _ in case.picks
    ]
    want = case.combined(rank, bias=bias)
    check_combined(
        ep.combine(rows, recv.handle, bias=bias[rank].to(ranks.device)),
        case,
        rank,
        want.x,
        "with bias",
    )
    want = case.combined(rank)
    out = torch.empty_like(want.x, device=ranks.device)
    assert ep.combine(rows, recv.handle, out=out) is out
    check_combined(out, case, rank, want.x, "out")
    if case.layout is ty.Layout.FLAT:
        reduce = [row.topk_weights + 0.5 for row in case.expected]
        want = case.combined(rank, reduce_weights=reduce)
        mine = torch.full(recv.topk_weights.shape, float("nan"))
        mine[: len(reduce[rank])] = reduce[rank]
        got = ep.combine(rows, recv.handle, reduce_weights=mine.to(ranks.device))
        check_combined(got.x, case, rank, want.x, "beside reduced weights")
        check_combined(got.topk_weights, case, rank, want.topk_weights, "reduced weights")
        return
    want = case.combined(rank, weighted=True)
    check_combined(ep.combine(rows, recv.handle, weighted=True), case, rank, want.x, "weighted")
    doubled = [2 * weights for weights in own]
    want = case.combined(rank, weighted=True, topk_weights=doubled)
    got = ep.combine(rows, recv.handle, weighted=True, topk_weights=doubled[rank].to(ranks.device))
    check_combined(got, case, rank, want.x, "weighted by the owner")


def check_all_ways(
    ranks: Ranks, layout: ty.Layout, exact: bool, routing: str, most: int | None = None
) -> None:
    """With ``most`` payloads, or all. Each routing has others of them, in turn."""
    payloads = list(enumerate((*PLAIN, *QUANTIZED)))
    first = ROUTINGS.index(routing) % len(payloads)
    for seed, dtype in (payloads[first:] + payloads[:first])[:most]:
        case = Case(
            ranks.world_size, routing=routing, layout=layout, exact=exact, dtype=dtype, seed=seed
        )
        with case.make(ranks) as ep, poisoned():
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@some_kinds(1)
@distributed_test(world_size=3, engine=ENGINES)
def test_matches_the_oracle(ranks: Ranks, layout: ty.Layout, exact: bool, routing: str) -> None:
    check_all_ways(ranks, layout, exact, routing, None if ALL else 2)


@some_kinds(0)
@distributed_test(world_size=OTHER_SIZES, engine=ENGINES)
def test_any_number_of_ranks(ranks: Ranks, layout: ty.Layout, exact: bool, routing: str) -> None:
    few = 2 if ranks.world_size < 4 else 1
    check_all_ways(ranks, layout, exact, routing, None if ALL else few)


@some_kinds(0, ROUTINGS[::2])
@distributed_test(world_size=8, engine=ENGINES)
def test_eight_ranks(ranks: Ranks, layout: ty.Layout, exact: bool, routing: str) -> None:
    """``make soak`` has all routings, above."""
    check_all_ways(ranks, layout, exact, routing, 1)


@pytest.mark.parametrize("mode", list(ty.Quantize), ids=lambda mode: mode.name.lower())
@shapes
@layouts
@distributed_test(world_size=(1, 3), engine=ENGINES)
def test_quantised_in_the_send(
    ranks: Ranks, layout: ty.Layout, exact: bool, mode: ty.Quantize
) -> None:
    turn = mode.value + list(ty.Layout).index(layout) + exact
    for dtype in PLAIN if ALL else PLAIN[turn % 3 :][:1]:
        case = Case(
            ranks.world_size, hidden=300, dtype=dtype, layout=layout, exact=exact, quantize=mode
        )
        with case.make(ranks) as ep, poisoned():
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@shapes
@layouts
@distributed_test(world_size=(1, 3), engine=ENGINES)
def test_rows_cast_by_the_caller(ranks: Ranks, layout: ty.Layout, exact: bool) -> None:
    """Blocks that do not fill the last word of scales, and blocks that do; again with the handle.
    MXFP8 in every case; besides, another in turn, or all of them in ``make soak`` and on GPUs.
    """
    others = [mode for mode in ty.Quantize if mode is not ty.Quantize.MXFP8]
    turn = 2 * list(ty.Layout).index(layout) + exact
    others = others if ALL else [others[turn % len(others)]]
    micro = ty.Quantize.MXFP8
    for hidden, mode in ((300, micro), (256, micro), *((256, mode) for mode in others)):
        case = Case(ranks.world_size, hidden=hidden, layout=layout, exact=exact)
        rows = [reference.quantize(x, mode) for x in case.x]
        case.__dict__["x"] = rows
        with case.make(ranks) as ep, poisoned():
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            again = ep.dispatch(to(rows[ranks.rank], ranks.device), handle=recv.handle)
            want = case.expected[ranks.rank]
            valid = want.source >= 0
            value = reference.dequantize(want.x[valid], want.scales[valid])
            for got in (recv, again):
                mine = recv.source.cpu() >= 0
                assert got.scales.dtype == rows[0].scales.dtype
                assert (got.scales.dtype == torch.float8_e8m0fnu) == (mode is micro)
                assert_same_bits(got.scales.cpu()[mine], want.scales[valid], what="scales")
                assert_same_bits(got.dequantize().cpu()[mine], value, what="dequantised")


@pytest.mark.portable
@shapes
@distributed_test(world_size=(2, 3), engine=ENGINES)
def test_blocks_are_aligned(ranks: Ranks, exact: bool) -> None:
    for alignment in (2, 16, 128):
        case = Case(
            ranks.world_size,
            layout=ty.Layout.EXPERT_MAJOR,
            exact=exact,
            expert_alignment=alignment,
            num_experts=11,
        )
        with case.make(ranks) as ep, poisoned():
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


SIZES = [
    {"hidden": 1},
    {"hidden": 7, "dtype": torch.float32},
    {"hidden": 129},
    {"hidden": 33, "dtype": torch.int8},
    {"num_topk": 1},
    {"num_topk": 32, "num_experts": 40},
    {"num_topk": 48, "num_experts": 48, "num_tokens": 9},
    {"num_topk": 6, "num_experts": 2},
    {"num_experts": 1, "num_topk": 2},
    {"num_experts": 7},
    {"num_experts": 300},
    {"num_tokens": 1},
    {"num_tokens": 200, "hidden": 256},
]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (layout, sizes)
        for (turn, layout), (at, sizes) in product(enumerate(ty.Layout), enumerate(SIZES))
        if ALL or (at + turn) % 3 == 0
    ],
    ids=lambda each: (
        "-".join(f"{k}{v}" for k, v in each.items())
        if isinstance(each, dict)
        else each.name.lower()
    ),
)
@distributed_test(world_size=3, engine=ENGINES)
def test_any_size(ranks: Ranks, layout: ty.Layout, sizes: dict[str, object]) -> None:
    for exact in (True, False):
        case = Case(ranks.world_size, layout=layout, exact=exact, routing="duplicates", **sizes)
        with case.make(ranks) as ep, poisoned():
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@pytest.mark.portable
@distributed_test(world_size=4, engine=ENGINES)
def test_one_object_many_calls(ranks: Ranks) -> None:
    """Sizes grow, shrink and vanish; layouts change from call to call; nothing of an earlier call
    shows.
    """
    base = Case(ranks.world_size, num_tokens=64)
    names = ("uniform", "none", "one_rank", "empty_ranks", "zipf", "dropped", "one_expert", "local")
    with base.make(ranks) as ep, poisoned():
        for seed in range(24):
            case = Case(
                ranks.world_size,
                routing=names[seed % len(names)],
                num_tokens=64,
                layout=list(ty.Layout)[seed % 3],
                exact=seed % 4 != 3,
                dtype=(*PLAIN, *QUANTIZED)[seed % 5],
                seed=seed,
            )
            check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@distributed_test(world_size=(2, 4), engine=ENGINES)
def test_int32_ids_and_16_bit_weights(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    idx, weights = (t.to(ranks.device) for t in case.picks[ranks.rank])
    x = case.x[ranks.rank].to(ranks.device)
    with case.make(ranks) as ep:
        recv = ep.dispatch(x, idx.int(), weights.bfloat16())
        assert recv.topk_idx.dtype == torch.int32
        assert torch.equal(recv.topk_idx.cpu().long(), case.expected[ranks.rank].topk_idx)
        want = torch.where(
            recv.topk_idx >= 0, case.expected[ranks.rank].topk_weights.to(ranks.device), 0.0
        )
        assert torch.equal(recv.topk_weights, want.bfloat16().float())


@distributed_test(world_size=3, engine=ENGINES)
def test_without_weights(ranks: Ranks) -> None:
    for layout in ty.Layout:
        case = Case(ranks.world_size, layout=layout)
        with case.make(ranks) as ep:
            recv = ep.dispatch(
                case.x[ranks.rank].to(ranks.device),
                case.picks[ranks.rank][0].to(ranks.device),
                layout=layout,
            )
            assert recv.topk_weights is None
            assert recv.row_weights is None
            want = case.combined(ranks.rank)
            got = ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle)
            check_combined(got, case, ranks.rank, want.x)


@distributed_test(world_size=3, engine=ENGINES)
def test_exact_shapes_take_any_number_of_tokens(ranks: Ranks) -> None:
    """``max_tokens_per_rank`` bounds static shapes only."""
    for layout in (ty.Layout.FLAT, ty.Layout.EXPERT_MAJOR):
        case = Case(ranks.world_size, num_tokens=60, layout=layout)
        small = Case(ranks.world_size, num_tokens=4)
        with small.make(ranks) as ep:
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@pytest.mark.portable
@distributed_test(world_size=3, engine=ENGINES)
def test_capacity_drops_and_counts(ranks: Ranks) -> None:
    case = Case(
        ranks.world_size,
        layout=ty.Layout.EXPERT_MAJOR,
        exact=False,
        num_tokens=30,
        expert_alignment=4,
    )
    capacity = 21
    idx, weights = zip(*case.picks, strict=True)
    want = reference.dispatch(
        case.x,
        idx,
        weights,
        num_experts=8,
        layout=case.layout,
        expert_alignment=4,
        capacity=capacity,
    )
    rows = [
        torch.randn(*each.x.shape, generator=torch.Generator().manual_seed(r)).bfloat16()
        for r, each in enumerate(want)
    ]
    with case.make(ranks) as ep, poisoned():
        recv = dispatch(ranks, ep, case, capacity=capacity)
        mine = want[ranks.rank]
        assert recv.x.shape[0] == capacity
        assert int(recv.overflow) == mine.overflow > 0
        assert torch.equal(recv.expert_offsets.cpu(), mine.expert_offsets)
        assert torch.equal(recv.tokens_per_expert.cpu(), mine.tokens_per_expert)
        assert torch.equal(recv.source.cpu(), mine.source)
        assert torch.equal(recv.x.cpu(), mine.x)
        got = ep.combine(rows[ranks.rank].to(ranks.device), recv.handle)
        sums = reference.combine(rows, want, ranks_per_node=case.ranks_per_node)
        check_combined(got, case, ranks.rank, sums[ranks.rank].x)


RANDOM_SIZE = {
    "cpu": 4,
    "cuda": max(2, min(4, torch.cuda.device_count())),
    "virtual": 4,
    "simulated": 3,
}[DEVICE]
"""As many ranks as there are GPUs, up to four."""


@pytest.mark.parametrize("part", range(8 if ALL else 4))
@distributed_test(world_size=RANDOM_SIZE, engine=ENGINES)
def test_random_configurations(ranks: Ranks, part: int) -> None:
    """Configurations drawn from a seed, the same on every rank; an eighth of them."""
    random = torch.Generator().manual_seed(2026 + part)

    def draw(*choices: object) -> object:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for seed in range(25 if ranks.engine == "nvlink" else 7):
        layout, dtype = draw(*ty.Layout), draw(*PLAIN, *QUANTIZED)
        case = Case(
            ranks.world_size,
            routing=draw(*ROUTINGS),
            num_tokens=draw(1, 2, 17, 40),
            num_topk=draw(1, 2, 5, 9),
            num_experts=draw(1, 3, 4, 9, 64),
            hidden=draw(1, 8, 24, 130),
            dtype=dtype,
            layout=layout,
            exact=draw(True, False),
            expert_alignment=draw(1, 2, 16) if layout is ty.Layout.EXPERT_MAJOR else 1,
            quantize=draw(None, *ty.Quantize) if dtype in PLAIN else None,
            seed=seed,
        )
        with case.make(ranks) as ep, poisoned():
            check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)


@distributed_test(world_size=2)
def test_a_profiler_sees_calls_and_what_a_dispatch_waits_for(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    with case.make(ranks) as ep, torch.profiler.profile() as seen:
        recv = dispatch(ranks, ep, case)
        ep.combine(recv.x, recv.handle)
    begun = sorted((each.start_ns(), each.name()) for each in seen.profiler.kineto_results.events())
    names = [name.removeprefix("tokenyard.") for _, name in begun if name.startswith("tokenyard.")]
    phases = [f"dispatch.{each}" for each in ("plan", "pack", "counts", "rows", "place")]
    assert names == ["dispatch", *phases, "combine"]
