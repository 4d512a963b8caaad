"""What ``tokenyard demo`` runs: its options; the layer in plain torch (byte embedding, softmax
top-k router, SwiGLU experts); what a rank does: run it, time it, compare it with one process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
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
from tokenyard.cli.options import MOST_PROCESSES, option, word_of
from tokenyard.cli.progress import say
from tokenyard.engines.known import AUTO, ENGINES
from tokenyard.routing import expert_bounds, host_ints

SHARED = ("embedding", "router")
"""Modules that every rank uses; gradients of their weights are summed over ranks."""

PER_EXPERT = ("gate", "up", "down")

LOCAL = "Local processes; under torchrun its ranks count."
Ranks = Annotated[int | None, option(LOCAL, min=1, max=MOST_PROCESSES, show_default="4")]
Text = Annotated[
    Path | None, option("File whose bytes are the tokens.", show_default="the project's README")
]
Plot = Annotated[Path | None, option("Draw traffic and expert load as a PNG.", dir_okay=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``tokenyard demo``."""

    ranks: Ranks = None
    text: Text = None
    tokens: Annotated[int, option("Use at most so many bytes of the text.", min=1)] = 4096
    hidden: Annotated[int, option("Channels of a token.", min=1)] = 128
    experts: Annotated[int, option("Experts, all ranks together.", min=1)] = 16
    topk: Annotated[int, option("Experts per token.", min=1)] = 2
    device: Annotated[Literal["cpu", "cuda"], option("Where the ranks compute.")] = "cpu"
    engine: Annotated[str, option("What moves the rows.", parser=word_of(ENGINES))] = AUTO
    steps: Annotated[int, option("Timed steps, after one to warm up.", min=1)] = 5
    plot: Plot = None


class Expert(nn.Module):
    """SwiGLU with twice as many channels inside: rows ``[n, H]`` to as many."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class MoeLayer(nn.Module):
    """One MoE layer, float32, with the same weights on every rank. Called on byte values ``[T]`` it
    runs all of its experts in one process, and returns ``[T, H]``.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, options.hidden)
        self.router = nn.Linear(options.hidden, options.experts, bias=False)
        self.experts = nn.ModuleList(Expert(options.hidden) for _ in range(options.experts))
        self.num_topk = options.topk

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[T, H]`` to ids ``[T, K]`` int64 and weights that add up to 1."""
        top, topk_idx = self.router(x).softmax(-1).topk(self.num_topk)
        return topk_idx, top / top.sum(-1, keepdim=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        topk_idx, topk_weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, pick = (topk_idx == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, topk_weights[row, pick, None] * expert(x[row]))
        return out


def results(layer: MoeLayer, y: Tensor, held: slice = slice(None)) -> dict[str, Tensor]:
    """The output and every gradient by name: ``output``, ``embedding gradient``, ``gate gradient``,
    ... Those of the experts ``held`` are one behind the other. A gradient that backward did not
    make counts as zero.
    """
    modules: dict[str, list[Any]] = {name: [getattr(layer, name)] for name in SHARED}
    for name in PER_EXPERT:
        modules[name] = [getattr(expert, name) for expert in layer.experts[held]]
    named = {"output": y.detach()}
    for name, parts in modules.items():
        weights: list[Tensor] = [part.weight for part in parts]
        found = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        named[f"{name} gradient"] = torch.cat(found) if found else torch.zeros(0)
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
        self.tokens = torch.tensor(list(text), device=device)
        self.layer = MoeLayer(options).to(device)  # draws the same on every rank, and so the next
        self.gradient = torch.randn(len(text), options.hidden).to(device)
        self.seconds = defaultdict[str, list[float]](list)

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
            x = layer.embedding(self.tokens[self.mine])
            topk_idx, topk_weights = layer.route(x)
        with self.phase("dispatch"):
            recv = ep.dispatch(x, topk_idx, topk_weights, layout=ty.Layout.EXPERT_MAJOR)
        with self.phase("experts"):
            blocks = torch.split_with_sizes(recv.x, recv.tokens_per_expert_list)
            held = zip(layer.experts[self.held], blocks, strict=True)
            # Where there are no experts, no rows keep the rank in the backward exchange.
            rows = torch.cat([recv.x[:0], *(expert(block) for expert, block in held)])
        with self.phase("combine"):
            y = ep.combine(rows, recv.handle, weighted=True)
        assert isinstance(y, Tensor)
        with self.phase("backward"):
            y.backward(self.gradient[self.mine])
        return y, recv

    def errors(self, y: Tensor) -> dict[str, float]:
        """Relative errors against the whole layer on all tokens, without tokenyard. Collective."""
        got = results(self.layer, y, self.held)
        for shared in SHARED:
            got[f"{shared} gradient"] = sum_over_ranks(got[f"{shared} gradient"])
        whole = MoeLayer(self.options).to(self.device)
        wanted = whole(self.tokens)
        wanted.backward(self.gradient)
        want = results(whole, wanted[self.mine], self.held)
        return {name: relative_error(tensor, want[name]) for name, tensor in got.items()}


def run_rank(device: torch.device, options: Options, text: bytes) -> list[Part]:
    """Be one rank: what all saw, in their order. Collective."""
    share = Share(device, options, text)
    sizes = {"num_experts": options.experts, "hidden": options.hidden, "num_topk": options.topk}
    where: dict[str, Any] = {"engine": options.engine, "device": device}
    with ty.ExpertParallel(**sizes, max_tokens_per_rank=share.most_tokens, **where) as ep:
        together("warming up")
        y, recv = share.step(ep)
        share.seconds.clear()
        before = bytes_so_far(ep)
        for number in range(options.steps):
            together(f"step {number + 1} of {options.steps}")
            y, recv = share.step(ep)
        moved: Any = (bytes_so_far(ep) - before) / options.steps
    together("comparing with one process")
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


def together(what: str) -> None:
    """Start together, so that no phase counts another rank's delay. Collective."""
    say(what)
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
