"""The order in which the oracle sums rows: picks of a token on a rank, ranks of a node, nodes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def sum_rows(rows: Tensor, row_of_pick: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """Sums ``[T, W]`` float32 of the rows that one rank holds of an owner's, in pick order."""
    rows = rows.flatten(0, -2)
    total = torch.zeros(row_of_pick.shape[0], rows.shape[1])
    for position in range(row_of_pick.shape[1]):
        token = (row_of_pick[:, position] >= 0).nonzero().squeeze(1)
        row = row_of_pick[token, position]
        value = rows[row].float()
        if row_weights is not None:
            value = row_weights[row, None] * value
        total[token] = total[token] + value
    return total


def sum_ranks(rank_sums: Iterable[Tensor], ranks_per_node: int | None, wire: torch.dtype) -> Tensor:
    """Add float32 sums: ranks of a node in order, then nodes; each hop rounds to ``wire``."""
    parts = list(rank_sums)
    per_node = ranks_per_node or len(parts)
    nodes = [
        _ordered_sum(parts[begin : begin + per_node], wire)
        for begin in range(0, len(parts), per_node)
    ]
    return _ordered_sum(nodes, wire) if len(nodes) > 1 else nodes[0]


def _ordered_sum(parts: list[Tensor], wire: torch.dtype) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part.to(wire).float()
    return total
