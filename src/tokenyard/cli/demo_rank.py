"""What every rank of ``tokenyard demo`` does: run the layer expert-parallel, time it, compare it
with one process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.demo_model import (
    SHARED,
    MoeLayer,
    Options,
    make_weights,
    relative_error,
    results,
)
from tokenyard.cli.progress import Counter, advance
from tokenyard.routing import expert_bounds, host_ints

PHASES = ("embed and route", "dispatch", "experts", "combine", "backward")


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
    """This rank's part of the layer and of the text; tokens are shared out like experts:
    contiguous, nearly equal. ``seconds``: by phase, one entry per step.
    """

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
        """Forward and backward on this rank's tokens ``[T]``, the experts spread over the ranks:
        output ``[T, H]``, and what came.
        """
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
        """Relative error of this rank's tensors against the whole layer on all tokens, without
        tokenyard. Collective.
        """
        got = results(self.layer, y)
        for shared in SHARED:
            got[f"{shared} gradient"] = sum_over_ranks(got[f"{shared} gradient"])
        whole = MoeLayer(self.weights, self.options)
        wanted = whole(self.tokens)
        wanted.backward(self.gradient)
        want = results(whole, wanted[self.mine], self.held)
        return {name: relative_error(tensor, want[name]) for name, tensor in got.items()}


def run_rank(device: torch.device, options: Options, text: bytes, counter: Counter) -> list[Part]:
    """Be one rank: what all ranks saw, in their order. Every rank passes the same ``text``; rank 0
    counts finished stages: start, warm-up, steps.
    """
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
