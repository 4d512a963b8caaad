"""The layer that ``tokenyard demo`` runs: byte embedding, softmax top-k router, SwiGLU experts.
Plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
"""Tokens are bytes."""

SHARED = ("embedding", "router")
"""Weights that every rank holds; their gradients are summed over ranks."""

PER_EXPERT = ("gate", "up", "down")
"""Weights with one slice per expert, held by the rank that owns the expert."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer. Weights are float32; rows and experts compute in ``dtype``."""

    hidden: int
    ffn: int
    num_experts: int
    num_topk: int
    dtype: torch.dtype


def make_weights(shape: LayerShape, seed: int, device: torch.device) -> dict[str, Tensor]:
    """The whole layer, float32, the same on every rank and device: ``embedding [256, H]``, ``router
    [E, H]``, ``gate`` and ``up [E, F, H]``, ``down [E, H, F]``."""
    generator = torch.Generator().manual_seed(seed)
    e, f, h = shape.num_experts, shape.ffn, shape.hidden

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(device)

    return {
        "embedding": normal(VOCABULARY, h),
        "router": normal(e, h, scale=h**-0.5),
        "gate": normal(e, f, h, scale=h**-0.5),
        "up": normal(e, f, h, scale=h**-0.5),
        "down": normal(e, h, f, scale=f**-0.5),
    }


class MoeLayer(nn.Module):
    """One MoE layer, whole or with a slice of the experts.

    Called on byte values ``[T]`` it runs all of its experts in one process; an expert-parallel
    caller uses the parts.

    Args:
        weights: from :func:`make_weights`, with any contiguous slice of the per-expert ones.
        num_topk: picks per token.
        dtype: of rows and of the experts' products.
    """

    def __init__(self, weights: dict[str, Tensor], num_topk: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(w.clone()) for name, w in weights.items()}
        )
        self.num_topk = num_topk
        self.dtype = dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Byte values ``[T]`` int64 to rows ``[T, H]``."""
        return functional.embedding(tokens, self.weights["embedding"]).to(self.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[T, H]`` to expert ids ``[T, K]`` int64 and weights ``[T, K]`` float32 that add up
        to 1.
        """
        scores = functional.linear(x.float(), self.weights["router"]).softmax(-1)
        top, topk_idx = scores.topk(self.num_topk)
        return topk_idx, top / top.sum(-1, keepdim=True)

    def mixed_experts(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Rows ``[N, H]`` with ids of experts held here (-1: elsewhere), each to the weighted sum
        over its experts.

        Expert by expert, and an expert takes its rows in order. Sums are float32 and rounded once.
        """
        experts = self._expert_weights()
        if not experts:
            return (
                x  # without experts there are no rows: this keeps the rank in the backward exchange
            )
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, weights in enumerate(experts):
            row, pick = (topk_idx == expert).nonzero(as_tuple=True)
            out = out.index_add(
                0, row, topk_weights[row, pick, None] * _swiglu(x[row], *weights).float()
            )
        return out.to(x.dtype)

    def blocked_experts(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Rows ``[N', H]`` sorted by expert, each to its expert's output, unweighted."""
        experts = self._expert_weights()
        if not experts:
            return x
        blocks = cast(tuple[Tensor, ...], x.split(list(tokens_per_expert)))
        return torch.cat(
            [_swiglu(block, *weights) for block, weights in zip(blocks, experts, strict=True)]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Byte values ``[T]`` to ``[T, H]``."""
        x = self.embed(tokens)
        return self.mixed_experts(x, *self.route(x))

    def _expert_weights(self) -> list[tuple[Tensor, ...]]:
        return list(
            zip(*(self.weights[name].to(self.dtype).unbind(0) for name in PER_EXPERT), strict=True)
        )


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``[N, H]`` to ``[N, H]``: ``(silu(x gate^T) * (x up^T)) down^T``."""
    return functional.linear(
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down
    )
