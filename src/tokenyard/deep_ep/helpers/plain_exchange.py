"""A dispatch and a combine by torch alone, to compare with: DeepEP's ``deep_ep.utils.refs``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.deep_ep.helpers.environment import get_global_seed


def dispatch(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Any, Tensor, Tensor | None, Tensor, Tensor]:
    """Send each token of ``x [T, H]`` (or of FP8 data and scales) to the ranks of its experts
    ``topk_idx [T, K]`` (-1: none), over all ranks of the default group. Collective.

    Returns:
        Rows by source rank, then token; local expert ids ``[N, K]``, -1 elsewhere; their weights
            (of every pick), or None; int32 ``[N]``: source rank times ``num_max_tokens_per_rank``
            plus token; int32 ``[R]`` rows by source rank, on the CPU.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = topk_idx.div(num_experts // size, rounding_mode="floor")
    chosen = [(ranks == peer).any(1).nonzero().flatten() for peer in range(size)]
    order, go = torch.cat(chosen), [len(tokens) for tokens in chosen]
    counts = torch.empty(size, dtype=torch.int32, device=topk_idx.device)
    dist.all_to_all_single(counts, torch.tensor(go, dtype=torch.int32, device=topk_idx.device))
    come: list[int] = counts.tolist()  # pyright: ignore[reportUnknownVariableType]

    def move(values: Tensor) -> Tensor:
        given = values[order].contiguous()
        taken = given.new_empty(sum(come), *given.shape[1:])
        width = given.element_size() * (given[0].numel() if len(given.shape) > 1 else 1)
        taken_sizes, given_sizes = ([count * width for count in each] for each in (come, go))
        room, sent = (each.view(-1).view(torch.uint8) for each in (taken, given))
        dist.all_to_all_single(room, sent, taken_sizes, given_sizes)
        return taken

    rows = tuple(map(move, x)) if isinstance(x, tuple) else move(x)
    tokens = torch.arange(len(topk_idx), dtype=torch.int32, device=topk_idx.device)
    sources = move(tokens + rank * num_max_tokens_per_rank)
    local = move(topk_idx) - rank * (num_experts // size)
    local[(local < 0) | (local >= num_experts // size)] = -1
    weights = None if topk_weights is None else move(topk_weights)
    return rows, local, weights, sources, counts.cpu()


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """BF16 ``[N, K, H]``: what experts make of picks, as any rank can work out for any token."""
    device = src_token_global_idx.device
    picks = src_token_global_idx.long()[:, None] * num_topk + torch.arange(num_topk, device=device)
    channels = torch.arange(hidden, device=device) * 30011 + get_global_seed()
    return ((picks[..., None] * 40503 + channels) % 2039 / 1024 - 1).to(torch.bfloat16)


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """The sum of ``data [N, K, H]`` over picks, one after the other in float32, in its dtype."""
    total = torch.zeros_like(data[:, 0], dtype=torch.float32)
    if initial_value is not None:
        total += initial_value
    for pick in range(data.shape[1]):
        total += data[:, pick].float()
    return total.to(data.dtype)


def _reduced(y: Tensor, groups: Tensor) -> Tensor:
    """The picks of a group summed in their order, at the place of the last; zero elsewhere."""
    sums = torch.zeros_like(y)
    for last in range(y.shape[1]):
        group = groups[:, last : last + 1]
        mine = groups[:, : last + 1] == group
        ends = ~(groups[:, last + 1 :] == group).any(1, keepdim=True)
        total = ordered_accumulate(torch.where(mine[..., None], y[:, : last + 1], 0))
        sums[:, last] = torch.where(ends, total, 0)
    return sums


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """What a token gets back of its picks ``y [T, K, H]``: summed on each rank and rounded
    (``reduce_in_local``), then in each domain of ranks and rounded (``reduce_in_scaleup``), then
    all, bias first. Asks nobody."""
    local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _reduced(y, topk_idx.div(local, rounding_mode="floor"))
    if reduce_in_scaleup:
        y = _reduced(y, topk_idx.div(local * num_scaleup_ranks, rounding_mode="floor"))
    first = bias[0].float() + bias[1].float() if isinstance(bias, tuple) else bias
    return ordered_accumulate(y, first)
