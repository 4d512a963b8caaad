"""DeepEP's layout: where the tokens of one rank go. Asks nobody, and waits for no device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tokenyard.deep_ep.handles import RANKS_PER_NODE, known_picks, num_nodes, per_node
from tokenyard.engines import obstacles
from tokenyard.routing import count_keys, power_of_two_at_least, tokens_in_ranks

Layout = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Tokens per rank int32 ``[R]``, per node int32 (None for one node), per expert int32 ``[E]``;
tokens' ranks bool ``[T, R]``."""

PROGRAMS, WARPS = 64, 4
MOST_COMPARED = 4096
"""Pairs of picks and ranks that a program looks at together."""


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """From ``topk_idx [T, K]``, int64 or int32; -1 and ids out of range are nobody's, as nobody
    waits for the device here. One launch on a GPU where kernels can be made, else by torch."""
    if topk_idx.is_cuda and has_kernels(index := topk_idx.device.index):
        kind = topk_idx.shape[1], topk_idx.dtype is torch.int64
        launch = bound(index, num_experts, num_ranks, *kind)
        return fill(topk_idx, num_experts, num_ranks, launch)
    return by_torch(topk_idx, num_experts, num_ranks)


def by_torch(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    known = known_picks(topk_idx, num_experts)
    in_ranks = tokens_in_ranks(known, num_experts, num_ranks).contiguous()
    nodes = per_node(in_ranks).sum(0, dtype=torch.int32) if num_nodes(num_ranks) > 1 else None
    per_expert = count_keys(known, num_experts).to(torch.int32)
    return in_ranks.sum(0, dtype=torch.int32), nodes, per_expert, in_ranks


# By a kernel


@cache
def has_kernels(index: int) -> bool:
    """Whether kernels work on CUDA device ``index``, with the Triton that is here."""
    return not obstacles.obstacle_of(torch.device("cuda", index))


@cache
def bound(
    index: int, num_experts: int, num_ranks: int, num_topk: int, wide: bool
) -> Callable[..., None]:
    """The kernel's launch on CUDA device ``index``; compiles at the first call."""
    from tokenyard.kernels.layout import layout_kernel  # pyright: ignore[reportUnknownVariableType]
    from tokenyard.memory.kernel_launch import kernels_of, multiprocessors

    sms = multiprocessors(torch.device("cuda", index))
    named = constants(num_experts, num_ranks, num_topk, wide)
    return kernels_of(index, sms).bind(layout_kernel, min(PROGRAMS, sms), WARPS, None, named)


def constants(num_experts: int, num_ranks: int, num_topk: int, wide: bool) -> dict[str, Any]:
    from tokenyard.kernels.layout import LayoutConfig

    picks, ranks = power_of_two_at_least(num_topk), power_of_two_at_least(num_ranks)
    k = LayoutConfig(
        num_experts=num_experts,
        expert_bins=power_of_two_at_least(num_experts),
        ranks=num_ranks,
        rank_bins=ranks,
        ranks_per_node=RANKS_PER_NODE,
        topk=num_topk,
        topk_bins=picks,
        tokens=max(1, min(32, MOST_COMPARED // (picks * ranks))),
        wide=wide,
        several_nodes=num_nodes(num_ranks) > 1,
    )
    return {"k": k}


def fill(topk_idx: Tensor, num_experts: int, num_ranks: int, launch: Callable[..., None]) -> Layout:
    """Make the tensors and let ``launch`` fill them."""
    tokens, nodes, device = topk_idx.shape[0], num_nodes(num_ranks), topk_idx.device
    counts = torch.zeros(num_experts + num_ranks + nodes, dtype=torch.int32, device=device)
    in_ranks = torch.empty((tokens, num_ranks), dtype=torch.bool, device=device)
    experts_at = counts.data_ptr()
    ranks_at = experts_at + 4 * num_experts
    places = in_ranks.data_ptr(), experts_at, ranks_at, ranks_at + 4 * num_ranks
    launch(topk_idx.data_ptr(), *topk_idx.stride(), *places, tokens)
    per_expert, per_rank, per_node = counts.split_with_sizes((num_experts, num_ranks, nodes))
    return per_rank, per_node if nodes > 1 else None, per_expert, in_ranks
