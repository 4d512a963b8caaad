"""What ``tokenyard demo`` runs: its options, and the layer in plain torch (byte embedding, softmax
top-k router, SwiGLU experts); and how two runs of it are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenyard.cli.options import MOST_PROCESSES, option
from tokenyard.engines.known import AUTO

SHARED = ("embedding", "router")
"""Weights that every rank holds; their gradients are summed over ranks."""

PER_EXPERT = ("gate", "up", "down")
"""Weights with one slice per expert, held by the rank that owns the expert."""

LOCAL = "Local processes; under torchrun its ranks count."
Ranks = Annotated[int | None, option(LOCAL, min=1, max=MOST_PROCESSES, show_default="4")]
Text = Annotated[
    Path | None, option("File whose bytes are the tokens.", show_default="the project's README")
]
Plot = Annotated[
    Path | None, option("Draw traffic and expert load (.png, .svg, .pdf).", dir_okay=False)
]
Dtype = Annotated[
    Literal["float32", "bfloat16"], option("What rows travel and experts compute in.")
]
Layouts = Annotated[Literal["flat", "expert_major"], option("Order of the received rows.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``tokenyard demo``. Weights are float32; rows and experts compute in ``dtype``."""

    ranks: Ranks = None
    text: Text = None
    tokens: Annotated[int, option("Use at most so many bytes of the text.", min=1)] = 4096
    hidden: Annotated[int, option("Channels of a token.", min=1)] = 128
    experts: Annotated[int, option("Experts, all ranks together.", min=1)] = 16
    topk: Annotated[int, option("Experts per token.", min=1)] = 2
    ffn: Annotated[int, option("Channels inside an expert.", min=1)] = 256
    dtype: Dtype = "float32"
    layout: Layouts = "flat"
    device: Annotated[Literal["cpu", "cuda"], option("Where the ranks compute.")] = "cpu"
    engine: Annotated[str, option("What moves the rows.")] = AUTO
    steps: Annotated[int, option("Timed steps, after one to warm up.", min=1)] = 5
    plot: Plot = None
    seed: Annotated[int, option("Of the weights and the output's gradient.")] = 0

    @property
    def row_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def make_weights(options: Options, device: torch.device) -> dict[str, Tensor]:
    """The whole layer, float32, the same on every rank and device: ``embedding [256, H]``, ``router
    [E, H]``, ``gate`` and ``up [E, F, H]``, ``down [E, H, F]``."""
    generator = torch.Generator().manual_seed(options.seed)
    e, f, h = options.experts, options.ffn, options.hidden
    sizes = ((256, h), (e, h), (e, f, h), (e, f, h), (e, h, f))
    made = {
        name: torch.randn(*size, generator=generator)
        * (1 if name == "embedding" else size[-1] ** -0.5)
        for name, size in zip((*SHARED, *PER_EXPERT), sizes, strict=True)
    }
    return {name: weight.to(device) for name, weight in made.items()}


class MoeLayer(nn.Module):
    """One MoE layer with weights of :func:`make_weights`, whole or with a slice of the experts.

    Called on byte values ``[T]`` it runs all of its experts in one process, and returns ``[T, H]``;
    an expert-parallel caller uses the parts.
    """

    def __init__(self, weights: Mapping[str, Tensor], options: Options) -> None:
        super().__init__()
        parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        self.weights = nn.ParameterDict(parameters)
        self.num_topk, self.dtype = options.topk, options.row_dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Byte values ``[T]`` int64 to rows ``[T, H]``."""
        return functional.embedding(tokens, self.weights["embedding"]).to(self.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[T, H]`` to ids ``[T, K]`` int64 and float32 weights that add up to 1."""
        scores = functional.linear(x.float(), self.weights["router"]).softmax(-1)
        top, topk_idx = scores.topk(self.num_topk)
        return topk_idx, top / top.sum(-1, keepdim=True)

    def experts(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Rows ``[N, H]`` with ids of experts held here (-1: elsewhere), each to the weighted sum
        over its experts. An expert takes its rows in order; sums are float32 and rounded once.
        """
        held = [self.weights[name].to(self.dtype) for name in PER_EXPERT]
        if not len(held[0]):  # then there are no rows: this keeps the rank in the backward exchange
            return x
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, (gate, up, down) in enumerate(zip(*held, strict=True)):
            row, pick = (topk_idx == expert).nonzero(as_tuple=True)
            inner = functional.silu(functional.linear(x[row], gate)) * functional.linear(x[row], up)
            part = topk_weights[row, pick, None] * functional.linear(inner, down).float()
            out = out.index_add(0, row, part)
        return out.to(x.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.experts(x, *self.route(x))


def results(layer: MoeLayer, y: Tensor, held: slice = slice(None)) -> dict[str, Tensor]:
    """The output and every gradient by name: ``output``, ``embedding gradient``, ``gate gradient``,
    ... A gradient that backward did not make counts as zero. ``held``: of weights per expert, the
    experts whose gradients are asked for.
    """
    named = {"output": y.detach()}
    for name in (*SHARED, *PER_EXPERT):
        weight = layer.weights[name]
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        named[f"{name} gradient"] = gradient[held] if name in PER_EXPERT else gradient
    return named


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` with 2-norms in float64; infinite if something is not finite or
    only ``want`` is 0.
    """
    gap = torch.dist(got.double(), want.double()).item()
    size = float(want.double().square().sum().sqrt())
    return 0.0 if gap == 0 else gap / size if size > 0 and gap < inf else inf
