"""Router scores for test programs: DeepEP's ``deep_ep.utils.gate``."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.errors import NotSupported

_STEPS, _MOST = 20, 100.0


def get_scores_by_factor(
    num_tokens: int, num_experts: int, num_ranks: int, factor: float
) -> Tensor:
    """float32 ``[T, E]``: uniform up to 1, up to ``factor`` for the experts of rank 0."""
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """float32 ``[T, E]`` by whose top ``num_topk`` about ``ratio`` times as many tokens go to rank
    0 as to another rank on average. NotSupported: ``precise``.
    """
    if precise:
        raise NotSupported(
            "get_unbalanced_scores(precise=True): pass False, which comes near the ratio"
        )
    low, high = 1.0, 1.0 if ratio == 1.0 else _MOST
    for _ in range(_STEPS if low < high else 0):
        middle = (low + high) / 2
        scores = get_scores_by_factor(num_tokens, num_experts, num_ranks, middle)
        ranks = scores.topk(num_topk, dim=1).indices // (num_experts // num_ranks)
        tokens = [float((ranks == rank).any(1).sum()) for rank in range(num_ranks)]
        if tokens[0] > ratio * sum(tokens[1:]) / max(1, num_ranks - 1):
            high = middle
        else:
            low = middle
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, low)
