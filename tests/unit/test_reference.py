"""The oracle against examples worked by hand and against properties stated another way."""

from __future__ import annotations

import ast
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenyard import reference, reference_picks, reference_quant, reference_sums
from tokenyard.reference import ReferenceRows, combine, dispatch, merge_picks
from tokenyard.types import Layout

pytestmark = pytest.mark.portable

NAN = float("nan")
Batch = tuple[int, list[Tensor], list[Tensor], list[Tensor]]
EXPERT_LAYOUTS = [Layout.EXPERT_MAJOR, Layout.EXPERT_PADDED]


def column(*values: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(-1, 1)


def equal(actual: Tensor | None, expected: Any) -> bool:
    """Same shape and values; a difference is raised and shown."""
    assert actual is not None
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual.dtype), rtol=0, atol=0)
    return True


def present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def ints(tensor: Tensor) -> list[Any]:
    return cast("list[Any]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


# Two ranks with two tokens each, four experts (0, 1 | 2, 3), two picks. Hidden is 1, so that a row
# is a number.
X = [column(10, 11), column(20, 21)]
IDX = [torch.tensor([[0, 3], [1, 0]]), torch.tensor([[2, -1], [3, 1]])]
WEIGHTS = [torch.tensor([[0.5, 0.25], [0.125, 1.0]]), torch.tensor([[2.0, NAN], [3.0, 4.0]])]
T00, T01, T10, T11 = 0, 1, 1 << 32, 1 << 32 | 1


def dispatched(layout: Layout, **options: Any) -> list[ReferenceRows]:
    return dispatch(X, IDX, WEIGHTS, num_experts=4, layout=layout, **options)


@pytest.mark.parametrize("module", [reference, reference_picks, reference_quant, reference_sums])
def test_imports_only_types(module: Any) -> None:
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    own = {f"tokenyard.reference_{part}" for part in ("picks", "quant", "sums")}
    assert {name for name in imported if "tokenyard" in name} <= {"tokenyard.types", *own}


def test_flat() -> None:
    first, second = dispatched(Layout.FLAT)
    assert equal(first.x, [[10], [11], [21]])
    assert equal(first.source, [T00, T01, T11])
    assert equal(first.topk_idx, [[0, -1], [1, 0], [-1, 1]])
    assert equal(first.topk_weights, [[0.5, 0], [0.125, 1], [0, 4]])
    assert equal(first.tokens_per_expert, [2, 2])
    assert equal(second.x, [[10], [20], [21]])
    assert equal(second.source, [T00, T10, T11])
    assert equal(second.topk_idx, [[-1, 1], [0, -1], [1, -1]])
    assert equal(second.topk_weights, [[0, 0.25], [2, 0], [3, 0]])
    assert equal(second.tokens_per_expert, [1, 2])
    assert (first.row_weights, first.scales, first.expert_offsets, first.source_ranges) == (
        None,
        None,
        None,
        None,
    )


def test_dtypes() -> None:
    for layout in Layout:
        idx = [each.int() for each in IDX]
        rows = dispatch(X, idx, WEIGHTS, num_experts=4, layout=layout, max_tokens_per_rank=2)[0]
        assert (rows.x.dtype, rows.source.dtype) == (torch.bfloat16, torch.int64)
        assert rows.topk_idx is None or rows.topk_idx.dtype == torch.int32
        assert (
            present(rows.topk_weights if layout is Layout.FLAT else rows.row_weights).dtype
            == torch.float32
        )


def test_expert_major() -> None:
    first, second = dispatched(Layout.EXPERT_MAJOR)
    assert equal(first.x, [[10], [11], [11], [21]])
    assert equal(first.row_weights, [0.5, 1, 0.125, 4])
    assert equal(first.expert_offsets, [0, 2, 4])
    assert equal(second.x, [[20], [10], [21]])
    assert equal(second.row_weights, [2, 0.25, 3])
    assert equal(second.source, [T10, T00, T11])
    assert equal(second.expert_offsets, [0, 1, 3])
    assert (second.topk_idx, second.topk_weights, second.overflow) == (None, None, 0)


def test_expert_major_aligned() -> None:
    rows = dispatched(Layout.EXPERT_MAJOR, expert_alignment=4)[1]
    assert equal(rows.x, [[20], [0], [0], [0], [10], [21], [0], [0]])
    assert equal(rows.row_weights, [2, 0, 0, 0, 0.25, 3, 0, 0])
    assert equal(rows.source, [T10, -1, -1, -1, T00, T11, -1, -1])
    assert equal(rows.expert_offsets, [0, 4, 8])
    assert equal(rows.tokens_per_expert, [1, 2])
    assert equal(rows.aligned_tokens_per_expert, [4, 4])


def test_expert_without_tokens_has_an_empty_block() -> None:
    rows = dispatch(
        [column(5)],
        [torch.tensor([[2]])],
        num_experts=3,
        layout=Layout.EXPERT_MAJOR,
        expert_alignment=2,
    )
    assert equal(rows[0].expert_offsets, [0, 0, 0, 2])
    assert equal(rows[0].x, [[5], [0]])
    assert rows[0].row_weights is None


def test_capacity_drops_later_rows() -> None:
    received = dispatched(Layout.EXPERT_MAJOR, capacity=3)
    first, second = received
    assert equal(first.x, [[10], [11], [11]])
    assert equal(first.expert_offsets, [0, 2, 3])
    assert equal(first.tokens_per_expert, [2, 2])
    assert (first.overflow, second.overflow) == (1, 0)
    sums = [each.x for each in combine([each.x for each in received], received)]
    # The row of token (1, 1) on rank 0 was dropped.
    assert equal(torch.cat(sums), [[20], [22], [20], [21]])


def test_capacity_does_not_count_padding_as_overflow() -> None:
    rows = dispatched(Layout.EXPERT_MAJOR, capacity=5, expert_alignment=4)[1]
    assert equal(rows.x, [[20], [0], [0], [0], [10]])
    assert equal(rows.expert_offsets, [0, 4, 5])
    assert rows.overflow == 1
    assert dispatched(Layout.EXPERT_MAJOR, capacity=6, expert_alignment=4)[1].overflow == 0


def test_expert_padded() -> None:
    first, second = dispatched(Layout.EXPERT_PADDED, max_tokens_per_rank=3)
    assert first.x.shape == (2, 6, 1)
    assert equal(first.x[..., 0], [[10, 11, 0, 0, 0, 0], [11, 21, 0, 0, 0, 0]])
    assert equal(first.row_weights, [[0.5, 1, 0, 0, 0, 0], [0.125, 4, 0, 0, 0, 0]])
    assert equal(first.source, [[T00, T01, -1, -1, -1, -1], [T01, T11, -1, -1, -1, -1]])
    assert equal(first.source_ranges, [[[0, 2], [2, 0]], [[0, 1], [1, 1]]])
    assert equal(second.source_ranges, [[[0, 0], [0, 1]], [[0, 1], [1, 1]]])
    assert equal(second.tokens_per_expert, [1, 2])


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_merged_pick_is_one_row(layout: Layout) -> None:
    idx, weights = [torch.tensor([[1, 0, 1]])], [torch.tensor([[2.0, 3, 4]])]
    received = dispatch(
        [column(5)], idx, weights, num_experts=2, layout=layout, max_tokens_per_rank=1
    )
    assert equal(received[0].x.flatten(), [5, 5])
    assert equal(present(received[0].row_weights).flatten(), [3, 6])
    assert equal(combine([received[0].x], received)[0].x, [[10]])
    assert equal(combine([received[0].x], received, weighted=True)[0].x, [[45]])


def test_uneven_experts() -> None:
    # 5 experts on 3 ranks: 0, 1 | 2, 3 | 4.
    rows = dispatch(
        [column(v) for v in (1, 2, 3)], [torch.tensor([[0, 1, 2, 3, 4]])] * 3, num_experts=5
    )
    assert equal(rows[0].topk_idx, [[0, 1, -1, -1, -1]] * 3)
    assert equal(rows[1].topk_idx, [[-1, -1, 0, 1, -1]] * 3)
    assert equal(rows[2].topk_idx, [[-1, -1, -1, -1, 0]] * 3)
    assert equal(rows[2].tokens_per_expert, [3])


@pytest.mark.parametrize("layout", list(Layout))
def test_rank_without_experts_and_rank_without_tokens(layout: Layout) -> None:
    # 2 experts on 3 ranks: 0 | 1 | none. Rank 0 has no tokens.
    x = [column(), column(1, 2), column(3)]
    idx = [torch.zeros(0, 1, dtype=torch.int64), torch.tensor([[1], [-1]]), torch.tensor([[1]])]
    received = dispatch(x, idx, num_experts=2, layout=layout, max_tokens_per_rank=2)
    block = 6 if layout is Layout.EXPERT_PADDED else 2
    assert equal(received[1].x.flatten(), [1, 3, 0, 0, 0, 0][:block])
    assert received[2].x.shape == ((0, 6, 1) if layout is Layout.EXPERT_PADDED else (0, 1))
    assert received[2].tokens_per_expert.shape == (0,)
    sums = combine([each.x for each in received], received)
    assert sums[0].x.shape == (0, 1)
    assert equal(sums[1].x, [[1], [0]])
    assert equal(sums[2].x, [[3]])


def test_dispatch_refuses() -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_rank \(1\) must be at least 2"):
        dispatched(Layout.EXPERT_PADDED, max_tokens_per_rank=1)
    with pytest.raises(ValueError, match=r"max_tokens_per_rank \(None\)"):
        dispatched(Layout.EXPERT_PADDED)
    with pytest.raises(ValueError, match=r"capacity \(3\) belongs to EXPERT_MAJOR"):
        dispatched(Layout.FLAT, capacity=3)


def one_token(
    *experts: int, num_experts: int, num_ranks: int, **options: Any
) -> list[ReferenceRows]:
    """One token on rank 0 of ``num_ranks``."""
    idx = [torch.tensor([experts])] + [torch.zeros(0, len(experts), dtype=torch.int64)] * (
        num_ranks - 1
    )
    x = [column(1)] + [column()] * (num_ranks - 1)
    return dispatch(x, idx, num_experts=num_experts, **options)


def test_nodes_round_to_the_wire() -> None:
    received = one_token(0, 1, 2, 3, num_experts=4, num_ranks=4)
    rows = [column(256), column(1), column(1), column(1)]
    # bf16 holds even numbers only from 256 to 512; ties go to the multiple of four.
    assert equal(combine(rows, received)[0].x, [[260]])  # 259
    assert equal(combine(rows, received, ranks_per_node=2)[0].x, [[258]])  # 257 -> 256, plus 2
    assert equal(combine(rows, received, ranks_per_node=1)[0].x, [[260]])
    assert equal(combine(rows, received, ranks_per_node=2, wire_dtype=torch.float32)[0].x, [[260]])


def test_rank_rounds_to_the_wire_also_at_the_owner() -> None:
    received = one_token(0, 1, 2, num_experts=4, num_ranks=2, layout=Layout.EXPERT_MAJOR)
    rows = [column(256, 1), column(1)]
    assert equal(combine(rows, received)[0].x, [[256]])  # 257 -> 256 on rank 0, then 257 -> 256
    assert equal(combine(rows, received, wire_dtype=torch.float32)[0].x, [[258]])
    wide = [each.float() for each in rows]
    assert equal(combine(wide, received)[0].x, [[258]])
    assert equal(combine(wide, received, wire_dtype=torch.bfloat16)[0].x, [[257]])


@pytest.mark.parametrize(("experts", "expected"), [((0, 1, 2), 0), ((0, 2, 1), 1), ((2, 0, 1), 1)])
def test_rows_of_a_rank_add_in_pick_order(experts: tuple[int, int, int], expected: int) -> None:
    received = one_token(*experts, num_experts=3, num_ranks=1, layout=Layout.EXPERT_MAJOR)
    assert equal(combine([column(2**24, 1, -(2**24))], received)[0].x, [[expected]])


@pytest.mark.parametrize(
    ("values", "expected"), [((2**24, 1, -(2**24)), 0), ((2**24, -(2**24), 1), 1)]
)
def test_ranks_add_in_rank_order(values: tuple[int, int, int], expected: int) -> None:
    received = one_token(2, 1, 0, num_experts=3, num_ranks=3)
    assert equal(combine([column(value) for value in values], received)[0].x, [[expected]])
    assert equal(
        combine([column(value) for value in values], received, ranks_per_node=1)[0].x, [[expected]]
    )


def test_weighted_uses_weights_that_rode_along_or_the_owners() -> None:
    for layout in EXPERT_LAYOUTS:
        received = dispatched(layout, max_tokens_per_rank=2)
        rows = [each.x for each in received]
        sums = combine(rows, received, weighted=True)
        assert equal(sums[0].x, [[7.5], [12.375]])  # (0.5 + 0.25) * 10, (0.125 + 1) * 11
        # 2 * 20, (3 + 4) * 21: 63 on rank 1 and 84 on rank 0.
        assert equal(sums[1].x, [[40], [147]])
        owners = [torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[1, NAN], [0, 2]])]
        sums = combine(rows, received, weighted=True, topk_weights=owners)
        assert equal(sums[0].x, [[30], [77]])
        assert equal(sums[1].x, [[20], [42]])


def test_weights_of_the_owner_are_merged() -> None:
    received = one_token(1, 0, 1, num_experts=2, num_ranks=1, layout=Layout.EXPERT_MAJOR)
    sums = combine(
        [column(100, 1)], received, weighted=True, topk_weights=[torch.tensor([[2.0, 3, 4]])]
    )
    assert equal(sums[0].x, [[306]])


def test_products_are_rounded_before_they_are_added() -> None:
    received = one_token(0, 1, num_experts=2, num_ranks=1, layout=Layout.EXPERT_MAJOR)
    rows = [column(-(1 + 2**-11), 1 + 2**-12, dtype=torch.float32)]
    weights = [torch.tensor([[1, 1 + 2**-12]])]
    # Fused: 2 ** -24.
    assert equal(combine(rows, received, weighted=True, topk_weights=weights)[0].x, [[0]])


def test_bias_is_added_last_one_after_the_other() -> None:
    received = dispatch([column(1, 1)], [torch.tensor([[0], [-1]])], num_experts=1)
    rows = [column(2**24, dtype=torch.float32)]
    one, big = column(1, 1), column(-(2**24), 5)
    assert equal(combine(rows, received, bias=[one])[0].x, [[2**24], [1]])
    assert equal(combine(rows, received, bias=[(one, big)])[0].x, [[0], [6]])
    assert equal(combine(rows, received, bias=[(big, one)])[0].x, [[1], [6]])
    rounded = [column(256)]  # 256 + 1 + 1 is rounded to bf16 only at the end
    assert equal(combine(rounded, received, bias=[(one, one)])[0].x, [[258], [2]])


def test_reduce_weights_stay_float32_and_keep_every_entry() -> None:
    received = dispatched(Layout.FLAT)
    entries = [
        torch.tensor([[1.0, 2], [3, 4], [257, 6]]),
        torch.tensor([[10.0, 20], [30, 40], [1, 60]]),
    ]
    sums = combine(
        [each.x for each in received], received, reduce_weights=entries, ranks_per_node=1
    )
    assert equal(sums[0].topk_weights, [[11, 22], [3, 4]])
    assert equal(sums[1].topk_weights, [[30, 40], [258, 66]])
    assert equal(sums[1].x, [[20], [42]])
    assert combine([each.x for each in received], received)[0].topk_weights is None


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_padding_never_leaks(layout: Layout) -> None:
    received = dispatched(layout, max_tokens_per_rank=4, expert_alignment=8)
    rows = [each.x.masked_fill((each.source < 0)[..., None], NAN) for each in received]
    assert equal(combine(rows, received)[0].x, [[20], [22]])
    assert equal(combine(rows, received, weighted=True)[1].x, [[40], [147]])


def test_combine_for_some_owners() -> None:
    received = dispatched(Layout.EXPERT_MAJOR)
    rows = [each.x.float() + rank for rank, each in enumerate(received)]
    every = combine(rows, received, weighted=True)
    [second] = combine(rows, received, weighted=True, owners=[1])
    assert torch.equal(second.x, every[1].x)
    assert not torch.equal(every[0].x.sum(), every[1].x.sum())


def test_combine_refuses() -> None:
    flat, major = (
        dispatched(Layout.FLAT),
        one_token(0, num_experts=1, num_ranks=1, layout=Layout.EXPERT_MAJOR),
    )
    with pytest.raises(ValueError, match="the rows are FLAT"):
        combine([each.x for each in flat], flat, weighted=True, topk_weights=WEIGHTS)
    with pytest.raises(ValueError, match="needs weights"):
        combine([major[0].x], major, weighted=True)
    with pytest.raises(ValueError, match="needs FLAT rows"):
        combine([major[0].x], major, reduce_weights=[torch.ones(1, 1)])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """``num_experts``, then ``x`` (integers), picks (equal ones and -1 among them) and weights
    (integers) per rank.
    """
    num_experts, num_topk = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def integers(low: int, high: int, width: int) -> list[Tensor]:
        return [torch.randint(low, high, (size, width), generator=generator) for size in sizes]

    x = [each.bfloat16() for each in integers(-6, 7, 3)]
    return (
        num_experts,
        x,
        integers(-1, num_experts, num_topk),
        [each.float() for each in integers(0, 9, num_topk)],
    )


def owners(num_experts: int, num_ranks: int) -> list[int]:
    """The rank of each expert."""
    return [
        rank
        for rank, part in enumerate(torch.arange(num_experts).tensor_split(num_ranks))
        for _ in part
    ]


def counts(idx: Tensor, label: list[int]) -> Tensor:
    """``[T, 1]``: how many different labels the picks of a token have."""
    hit: list[set[int]] = [
        {label[expert] for expert in picks if expert >= 0} for picks in ints(idx)
    ]
    return column(*(len(each) for each in hit))


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(1, 5))
def test_combine_multiplies_by_the_ranks_hit(batch: Batch, ranks_per_node: int) -> None:
    num_experts, x, idx, weights = batch
    received = dispatch(x, idx, weights, num_experts=num_experts)
    entries = [present(each.topk_weights) for each in received]
    sums = combine(
        [r.x for r in received], received, reduce_weights=entries, ranks_per_node=ranks_per_node
    )
    for rank, total in enumerate(sums):
        assert equal(total.x, counts(idx[rank], owners(num_experts, len(x))) * x[rank])
        assert equal(total.topk_weights, merge_picks(idx[rank], weights[rank])[1])


@settings(deadline=None, max_examples=60)
@given(batches(), st.sampled_from(EXPERT_LAYOUTS), st.integers(1, 4))
def test_combine_multiplies_by_the_experts_hit(
    batch: Batch, layout: Layout, alignment: int
) -> None:
    num_experts, x, idx, weights = batch
    received = dispatch(
        x,
        idx,
        weights,
        num_experts=num_experts,
        layout=layout,
        expert_alignment=alignment,
        max_tokens_per_rank=5,
    )
    rows = [each.x for each in received]
    plain, weighted = combine(rows, received), combine(rows, received, weighted=True)
    for rank, tokens in enumerate(x):
        assert equal(plain[rank].x, counts(idx[rank], list(range(num_experts))) * tokens)
        total_weight = torch.where(idx[rank] < 0, 0, weights[rank]).sum(1, keepdim=True)
        assert equal(weighted[rank].x, total_weight * tokens)


@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(1, 4))
def test_every_token_and_expert_appears_once_in_order(batch: Batch, alignment: int) -> None:
    num_experts, x, idx, _ = batch
    received = dispatch(
        x, idx, num_experts=num_experts, layout=Layout.EXPERT_MAJOR, expert_alignment=alignment
    )
    found: list[list[int]] = []
    for rows in received:
        begins = ints(present(rows.expert_offsets))
        assert begins == list(accumulate(ints(rows.aligned_tokens_per_expert), initial=0))
        assert all(begin % alignment == 0 for begin in begins)
        padding = torch.ones(begins[-1], dtype=torch.bool)
        for begin, count in zip(begins, ints(rows.tokens_per_expert), strict=False):
            found.append(ints(rows.source[begin : begin + count]))
            padding[begin : begin + count] = False
        assert equal(rows.source == -1, padding)
        assert rows.x[padding].count_nonzero() == 0
    expected: list[set[int]] = [set() for _ in range(num_experts)]
    for rank, picks in enumerate(idx):
        for token, position in ints((picks >= 0).nonzero()):
            expected[int(picks[token, position])].add(rank << 32 | token)
    assert found == [sorted(each) for each in expected]


@settings(deadline=None, max_examples=60)
@given(batches())
def test_expert_blocks_are_the_flat_rows_of_the_expert(batch: Batch) -> None:
    num_experts, x, idx, weights = batch
    flat, major, padded = (
        dispatch(
            x,
            idx,
            weights,
            num_experts=num_experts,
            layout=layout,
            expert_alignment=2,
            max_tokens_per_rank=5,
        )
        for layout in Layout
    )
    for flat_rows, major_rows, padded_rows in zip(flat, major, padded, strict=True):
        for expert, count in enumerate(ints(flat_rows.tokens_per_expert)):
            is_pick = present(flat_rows.topk_idx) == expert
            has_pick = is_pick.any(1)
            begin = int(present(major_rows.expert_offsets)[expert])
            for rows in (major_rows.x[begin:], padded_rows.x[expert]):
                assert equal(rows[:count], flat_rows.x[has_pick])
            for row_weights in (
                present(major_rows.row_weights)[begin:],
                present(padded_rows.row_weights)[expert],
            ):
                assert equal(row_weights[:count], present(flat_rows.topk_weights)[is_pick])
            begins, sizes = present(padded_rows.source_ranges)[expert].T
            ranks = flat_rows.source[has_pick] >> 32
            assert equal(sizes, torch.bincount(ranks, minlength=len(x)))
            assert equal(begins, [int((ranks < rank).sum()) for rank in range(len(x))])
