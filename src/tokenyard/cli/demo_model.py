"""The layer that ``tokenyard demo`` runs, in plain torch: byte embedding, softmax top-k router,
SwiGLU experts; and how two runs of it are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    sizes = {
        "embedding": (VOCABULARY, h),
        "router": (e, h),
        "gate": (e, f, h),
        "up": (e, f, h),
        "down": (e, h, f),
    }
    normal = {name: torch.randn(*size, generator=generator) for name, size in sizes.items()}
    scale = {name: size[-1] ** -0.5 for name, size in sizes.items()} | {"embedding": 1.0}
    return {name: (weight * scale[name]).to(device) for name, weight in normal.items()}


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
        parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        self.weights = nn.ParameterDict(parameters)
        self.num_topk, self.dtype = num_topk, dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Byte values ``[T]`` int64 to rows ``[T, H]``."""
        return functional.embedding(tokens, self.weights["embedding"]).to(self.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[T, H]`` to ids ``[T, K]`` int64 and float32 weights that add up to 1."""
        scores = functional.linear(x.float(), self.weights["router"]).softmax(-1)
        top, topk_idx = scores.topk(self.num_topk)
        return topk_idx, top / top.sum(-1, keepdim=True)

    def mixed_experts(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Rows ``[N, H]`` with ids of experts held here (-1: elsewhere), each to the weighted sum
        over its experts.

        Expert by expert, and an expert takes its rows in order. Sums are float32 and rounded once.
        """
        experts = self._expert_weights()
        if not experts:  # then there are no rows: this keeps the rank in the backward exchange
            return x
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, weights in enumerate(experts):
            row, pick = (topk_idx == expert).nonzero(as_tuple=True)
            part = topk_weights[row, pick, None] * _swiglu(x[row], *weights).float()
            out = out.index_add(0, row, part)
        return out.to(x.dtype)

    def blocked_experts(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Rows ``[N', H]`` sorted by expert, each to its expert's output, unweighted."""
        experts = self._expert_weights()
        if not experts:
            return x
        blocks = cast(tuple[Tensor, ...], x.split(list(tokens_per_expert)))
        return torch.cat([_swiglu(each, *own) for each, own in zip(blocks, experts, strict=True)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Byte values ``[T]`` to ``[T, H]``."""
        x = self.embed(tokens)
        return self.mixed_experts(x, *self.route(x))

    def _expert_weights(self) -> list[tuple[Tensor, ...]]:
        slices = (self.weights[name].to(self.dtype).unbind(0) for name in PER_EXPERT)
        return list(zip(*slices, strict=True))


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``[N, H]`` to ``[N, H]``: ``(silu(x gate^T) * (x up^T)) down^T``."""
    inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    return functional.linear(inner, down)


def results(layer: MoeLayer, y: Tensor, *, first_expert: int) -> dict[str, Tensor]:
    """The output and every gradient by name: ``output``, ``embedding gradient``, ``gate[3]
    gradient``, ...

    ``first_expert`` is the global id of the layer's first expert. A gradient that backward did not
    make counts as zero.
    """
    named = {"output": y.detach()}
    for name in (*SHARED, *PER_EXPERT):
        weight = layer.weights[name]
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if name in SHARED:
            named[f"{name} gradient"] = gradient
        else:
            parts = enumerate(gradient.unbind(0), first_expert)
            named |= {f"{name}[{expert}] gradient": part for expert, part in parts}
    return named


def _norm(x: Tensor) -> float:
    return cast(float, torch.linalg.vector_norm(x).item())


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` with 2-norms in float64; infinite if something is not finite or
    only ``want`` is 0.
    """
    difference, size = _norm(got.double() - want.double()), _norm(want.double())
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and difference < float("inf") else float("inf")


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of every tensor in ``got``. ``want`` may hold more: experts of other ranks."""
    return {name: relative_error(tensor, want[name]) for name, tensor in got.items()}
