"""DeepEP's layout: by torch, and by the kernel (interpreted here, compiled with ``make test-gpu``),
against plain loops.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import need_interpreter
from tokenyard.deep_ep import token_layout
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = pytest.mark.portable

DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")
HERE = "cuda" if DEVICE == "cuda" else "cpu"

CASES = [
    (3, 2, 4, 2),
    (0, 2, 4, 2),
    (40, 1, 5, 3),
    (37, 3, 13, 4),
    (130, 8, 64, 8),
    (9, 5, 3, 2),
    (70, 9, 30, 6),
    (33, 24, 96, 5),
    (5, 64, 64, 1),
    (6, 2, 4, 0),
]
"""Tokens, ranks, experts, picks: uneven experts, ranks without any, more ranks than a node has, no
tokens, no picks.
"""


def picks(tokens: int, experts: int, top: int) -> Tensor:
    """Random ids: about a fifth -1, and some experts twice in a token."""
    random = torch.Generator().manual_seed(tokens + experts)
    return torch.randint(-1 - experts // 5, experts, (tokens, top), generator=random).clamp(min=-1)


def by_loops(
    topk_idx: Tensor, num_experts: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens per rank, per node of 8, per expert, and of each token."""
    share, extra = divmod(num_experts, num_ranks)
    owners = [rank for rank in range(num_ranks) for _ in range(share + (rank < extra))]
    per_expert = torch.zeros(num_experts, dtype=torch.int32)
    in_ranks = torch.zeros(len(topk_idx), num_ranks, dtype=torch.bool)
    for token, row in enumerate(topk_idx.tolist()):
        for expert in row:
            if expert >= 0:
                per_expert[expert] += 1
                in_ranks[token, owners[expert]] = True
    nodes = [in_ranks[:, first : first + 8].any(1).sum() for first in range(0, num_ranks, 8)]
    return in_ranks.sum(0).int(), torch.tensor(nodes, dtype=torch.int32), per_expert, in_ranks


def by_kernel(topk_idx: Tensor, num_experts: int, num_ranks: int) -> token_layout.Layout:
    """The kernel on the device at hand: three programs under the interpreter."""
    if HERE == "cuda":
        return token_layout.layout(topk_idx, num_experts, num_ranks)
    need_interpreter()
    from tokenyard.kernels.layout import layout_kernel
    from tokenyard.testing import interpreter  # repairs Triton's

    assert interpreter.is_interpreting()
    constants = token_layout.constants(
        num_experts, num_ranks, topk_idx.shape[1], topk_idx.dtype == torch.int64
    )
    return token_layout.fill(
        topk_idx, num_experts, num_ranks, lambda *args: layout_kernel[(3,)](*args, **constants)
    )


def check(got: token_layout.Layout, topk_idx: Tensor, num_experts: int, num_ranks: int) -> None:
    """Same numbers, dtypes and shapes as plain loops have; contiguous."""
    want = by_loops(topk_idx, num_experts, num_ranks)
    assert (got[1] is None) == (num_ranks <= 8)
    for mine, right in zip(got, want, strict=True):
        if mine is not None:
            assert (
                torch.equal(mine.cpu(), right)
                and mine.dtype == right.dtype
                and mine.is_contiguous()
            )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ways(case: tuple[int, int, int, int]) -> None:
    """Ids of both dtypes, of any strides."""
    tokens, ranks, experts, top = case
    plain = picks(tokens, experts, top)
    wide = plain.to(HERE)
    check(token_layout.by_torch(wide, experts, ranks), plain, experts, ranks)
    for ids in (wide, wide.int().t().contiguous().t(), wide.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(ids.cpu(), plain)
        check(by_kernel(ids, experts, ranks), plain, experts, ranks)


def test_example() -> None:
    """What the kernel's docstring says."""
    per_rank, _, per_expert, in_ranks = by_kernel(
        torch.tensor([[0, 3], [1, 1], [2, -1]], device=HERE), 4, 2
    )
    assert in_ranks.int().tolist() == [[1, 1], [1, 0], [0, 1]]
    assert per_rank.tolist() == [2, 2] and per_expert.tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("way", [token_layout.by_torch, by_kernel], ids=["torch", "kernel"])
def test_ids_out_of_range_are_nobodys(way: Any) -> None:
    """Both ways alike, as documented; a dispatch with them refuses them. No table is written
    outside of its bounds.
    """
    wrong = torch.tensor([[4, -2, 1], [1 << 32, 1 - (1 << 32), -1]], device=HERE)
    per_rank, _, per_expert, in_ranks = way(wrong, 4, 2)
    assert (per_rank.tolist(), per_expert.tolist()) == ([1, 0], [0, 1, 0, 0])
    assert in_ranks.tolist() == [[True, False], [False, False]]
    per_rank, _, per_expert, in_ranks = way(torch.tensor([[9, 3], [-1, 8]], device=HERE), 8, 2)
    assert (per_rank.tolist(), per_expert.tolist()) == ([1, 0], [0, 0, 0, 1, 0, 0, 0, 0])
    for experts, ranks in ((13, 3), (5, 9), (8, 4)):  # uneven, ranks without experts, even
        ids = picks(40, 3 * experts, 3) - experts
        known = torch.where((ids < 0) | (ids >= experts), -1, ids)
        assert not torch.equal(known, ids.clamp(min=-1))
        for dtype in (torch.int64, torch.int32):
            check(way(ids.to(HERE, dtype), experts, ranks), known, experts, ranks)
