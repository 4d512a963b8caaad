"""Picks of experts that are gone: to a replica, or dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.routing import host_ints, merge_picks, merge_weights


def check_replicas(replicas: Any, num_experts: int) -> Tensor:
    """A table of replicas, ``[logical experts, copies]`` expert ids, as int64 on the host.
    ValueError: it is none, or an expert is in it twice."""
    try:
        table: Any = torch.as_tensor(replicas, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        table = torch.empty(0)
    if table.dim() != 2 or table.dtype not in (torch.int64, torch.int32) or not table.numel():
        raise ValueError(
            f"replicas must be integers [logical experts, copies], -1 for no copy, but is "
            f"{type(replicas).__name__} {list(table.shape)} of {table.dtype}"
        )
    ids = host_ints(table.flatten())
    outside = [each for each in ids if not -1 <= each < num_experts]
    if outside:
        raise ValueError(
            f"replicas has expert {outside[0]}, but there are {num_experts} experts: use their "
            f"numbers at construction, and -1 for no copy"
        )
    twice = [each for each, times in Counter(ids).items() if each >= 0 and times > 1]
    if twice:
        raise ValueError(
            f"replicas has expert {twice[0]} twice: each is a copy of one logical expert"
        )
    return table.long()


class Redirect:
    """Where picks go once ranks are gone (``Config.absent``): a pick of an expert that is gone goes
    to the next one in its row of ``replicas`` that is not, first behind it, then from the front."""

    def __init__(self, config: Config, replicas: Tensor | None) -> None:
        bounds = config.bounds
        self._table = torch.arange(config.num_experts, device="cpu")
        for rank in config.absent:
            self._table[bounds[rank] : bounds[rank + 1]] = -1
        left = host_ints(self._table)
        for row in () if replicas is None else replicas.unbind():
            copies = [each for each in host_ints(row) if each >= 0]
            for at, gone in enumerate(copies):
                if left[gone] < 0:
                    others = copies[at + 1 :] + copies[:at]
                    self._table[gone] = next((each for each in others if left[each] >= 0), -1)

    def picks(self, topk_idx: Tensor) -> Tensor:
        """``topk_idx [T, K]`` with experts that are there; ids out of range stay as they are."""
        if self._table.device != topk_idx.device:
            with torch.inference_mode(False):
                self._table = self._table.to(topk_idx.device)
        inside = (topk_idx >= 0) & (topk_idx < len(self._table))
        there = self._table[torch.where(inside, topk_idx, 0).long()]
        return torch.where(inside, there.to(topk_idx.dtype), topk_idx)

    def lost_weights(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Tensor:
        """What picks weigh that go nowhere (unweighted: 1 each, if merged): ``[T]`` float32."""
        merged = merge_picks(topk_idx, None, static=True)
        lacks = (merged.topk_idx >= 0) & (self.picks(merged.topk_idx) < 0)
        weights = torch.ones(lacks.shape, device=lacks.device)
        if topk_weights is not None:
            weights = merge_weights(topk_weights.detach().float(), merged.first_pick)
        lost = torch.zeros(len(lacks), device=lacks.device)
        for pick in range(lacks.shape[1]):
            lost = lost + torch.where(lacks[:, pick], weights[:, pick], 0.0)
        return lost
