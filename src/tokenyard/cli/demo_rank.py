"""What ``tokenyard demo`` runs: its options; the layer in plain torch (byte embedding, softmax
top-k router, SwiGLU experts); what a rank does: run it, time it, compare it with one process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import tokenyard as ty
from tokenyard.cli.options import MOST_PROCESSES, option
from tokenyard.cli.progress import Counter, advance
from tokenyard.engines.known import AUTO
from tokenyard.routing import expert_bounds, host_ints

PHASES = ("embed and route", "dispatch", "experts", "combine", "backward")
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
    Called on byte values ``[T]`` it runs all of its experts in one process, and returns ``[T, H]``.
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
    """``|got - want| / |want|`` (2-norms, float64); infinite: not finite, or only ``want`` is 0."""
    gap = torch.dist(got.double(), want.double()).item()
    size = float(want.double().square().sum().sqrt())
    return 0.0 if gap == 0 else gap / size if size > 0 and gap < inf else inf


# What a rank does


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank saw.

    Attributes:
        why: the engine that ran, and the reason for it.
        tokens, rows: that it owns, that one dispatch brings it.
        sent, received: bytes per step (forward and backward) to and from each rank.
        load: tokens routed to each expert that it holds; rank 0 has the first ones, and so on.
        errors: relative error of each tensor of :func:`results`.
        seconds: by phase, one entry per step.
    """

    why: str
    tokens: int
    rows: int
    sent: list[float]
    received: list[float]
    load: list[int]
    errors: dict[str, float]
    seconds: dict[str, list[float]]


class Share:
    """This rank's part of layer and text; tokens are shared out like experts: contiguous."""

    def __init__(self, device: torch.device, options: Options, text: bytes) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        split, owned = expert_bounds(len(text), world), expert_bounds(options.experts, world)
        self.mine, self.held = slice(*split[rank : rank + 2]), slice(*owned[rank : rank + 2])
        self.device, self.options, self.most_tokens = device, options, split[1]
        self.layout = ty.Layout[options.layout.upper()]
        self.tokens = torch.tensor(list(text), device=device)
        generator = torch.Generator().manual_seed(options.seed + 1)
        gradient = torch.randn(len(text), options.hidden, generator=generator)
        self.gradient = gradient.to(device, options.row_dtype)
        self.weights = make_weights(options, device)
        here = {name: w if name in SHARED else w[self.held] for name, w in self.weights.items()}
        self.layer, self.seconds = MoeLayer(here, options), defaultdict[str, list[float]](list)

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Time it; on a GPU it ends when its kernels have."""
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name].append(time.perf_counter() - begin)

    def step(self, ep: ty.ExpertParallel) -> tuple[Tensor, ty.Received]:
        """Forward and backward on this rank's tokens ``[T]``: output ``[T, H]``, and what came."""
        layer = self.layer
        layer.zero_grad()
        with self.phase("embed and route"):
            x = layer.embed(self.tokens[self.mine])
            topk_idx, topk_weights = layer.route(x)
        with self.phase("dispatch"):
            recv = ep.dispatch(x, topk_idx, topk_weights, layout=self.layout)
        with self.phase("experts"):
            idx, weights = recv.topk_idx, recv.topk_weights
            if idx is None or weights is None:  # sorted by expert; combine weights them
                counts = recv.tokens_per_expert.long()
                idx = torch.arange(len(counts), device=x.device).repeat_interleave(counts)[:, None]
                weights = torch.ones_like(idx, dtype=torch.float32)
            rows = layer.experts(recv.x, idx, weights)
        with self.phase("combine"):
            y = ep.combine(rows, recv.handle, weighted=self.layout is not ty.Layout.FLAT)
        assert isinstance(y, Tensor)
        with self.phase("backward"):
            y.backward(self.gradient[self.mine])
        return y, recv

    def errors(self, y: Tensor) -> dict[str, float]:
        """Relative errors against the whole layer on all tokens, without tokenyard. Collective."""
        got = results(self.layer, y)
        for shared in SHARED:
            got[f"{shared} gradient"] = sum_over_ranks(got[f"{shared} gradient"])
        whole = MoeLayer(self.weights, self.options)
        wanted = whole(self.tokens)
        wanted.backward(self.gradient)
        want = results(whole, wanted[self.mine], self.held)
        return {name: relative_error(tensor, want[name]) for name, tensor in got.items()}


def run_rank(device: torch.device, options: Options, text: bytes, counter: Counter) -> list[Part]:
    """Be one rank: what all saw, in their order. ``counter``: of start, warm-up and steps."""
    share = Share(device, options, text)
    sizes = {"num_experts": options.experts, "hidden": options.hidden, "num_topk": options.topk}
    where: dict[str, Any] = {"engine": options.engine, "device": device}
    with ty.ExpertParallel(**sizes, max_tokens_per_rank=share.most_tokens, **where) as ep:
        begin_stage(counter)
        y, recv = share.step(ep)
        share.seconds.clear()
        before = bytes_so_far(ep)
        for _ in range(options.steps):
            begin_stage(counter)
            y, recv = share.step(ep)
        moved: Any = (bytes_so_far(ep) - before) / options.steps
    begin_stage(counter)
    mine = Part(
        why=ep.why,
        tokens=y.shape[0],
        rows=recv.x.shape[0],
        sent=moved[0].tolist(),
        received=moved[1].tolist(),
        load=host_ints(recv.tokens_per_expert),
        errors=share.errors(y),
        seconds=dict(share.seconds),
    )
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def begin_stage(counter: Counter) -> None:
    """Start together, so that no phase counts another rank's delay. Collective."""
    advance(counter)
    sum_over_ranks(torch.zeros(1))


def bytes_so_far(ep: ty.ExpertParallel) -> Tensor:
    """Bytes sent to and received from each peer: float64 ``[2, R]``."""
    stats = ep.stats()
    return torch.tensor([stats.bytes_sent, stats.bytes_received], dtype=torch.float64)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of every rank's tensor, on this tensor's device. Collective."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = tensor.detach().to(where, copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)
