"""A small MoE layer in plain torch, dense on one process, and the same over a dispatch: what
gradients are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tokenyard as ty


def expert(rows: Tensor, weight: Tensor) -> Tensor:
    """One expert: a nonlinear map ``[n, H] -> [n, H]``."""
    return torch.tanh(rows @ weight)


def dense(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, experts: Tensor) -> Tensor:
    """``sum over picks of weight * expert(x)`` with all experts at hand: ``[T, H]``."""
    out = torch.zeros_like(x)
    for e in range(len(experts)):
        share = (topk_weights * (topk_idx == e)).sum(1, keepdim=True)
        out = out + share * torch.where(
            (topk_idx == e).any(1, keepdim=True), expert(x, experts[e]), 0.0
        )
    return out


def flat(recv: ty.Received, experts: Tensor) -> Tensor:
    """This rank's part of ``FLAT`` rows: each row's weighted sum over its experts here."""
    out = torch.zeros_like(recv.x)
    for e in range(len(experts)):
        picked = recv.topk_idx == e
        rows = picked.any(1).nonzero().squeeze(1)
        share = torch.where(picked, recv.topk_weights, 0.0).sum(1)[rows]
        out = out.index_add(0, rows, share.unsqueeze(1) * expert(recv.x[rows], experts[e]))
    return out


def grouped(recv: ty.Received, experts: Tensor) -> Tensor:
    """Rows of the expert layouts through their expert; weights are left to combine."""
    counts = recv.tokens_per_expert.tolist()
    if recv.x.dim() == 3:
        parts = [
            pad_to(expert(recv.x[e, :n], experts[e]), recv.x.shape[1]) for e, n in enumerate(counts)
        ]
        return torch.stack(parts) if parts else recv.x
    starts = recv.expert_offsets.tolist()
    parts = [expert(recv.x[starts[e] : starts[e + 1]], experts[e]) for e in range(len(counts))]
    return pad_to(torch.cat([*parts, recv.x[:0]]), recv.x.shape[0])


def pad_to(rows: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, length - rows.shape[0]))


def run(
    ep: ty.ExpertParallel,
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    experts: Tensor,
    **options: object,
) -> Tensor:
    """The layer over ``ep``; ``experts`` are those of this rank."""
    recv = ep.dispatch(x, idx, weights, **options)
    if recv.topk_idx is not None:
        return ep.combine(flat(recv, experts), recv.handle)
    return ep.combine(grouped(recv, experts), recv.handle, weighted=True)
