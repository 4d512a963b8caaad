"""What every rank of ``tokenyard demo`` does: run the layer expert-parallel, time it, compare it
with one process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.demo_model import SHARED, MoeLayer, Options, compare, make_weights, results
from tokenyard.cli.progress import Counter, advance
from tokenyard.routing import expert_bounds, host_ints

T = TypeVar("T")
PHASES = ("embed and route", "dispatch", "experts", "combine", "backward")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the ranks saw, the same on every rank.

    Attributes:
        why: the engine that ran, and the reason for it.
        tokens, rows, experts: per rank, tokens that it owns, rows that one dispatch brings it,
            experts that it holds (rank 0 the first ones, and so on).
        sent, received: bytes per step (forward and backward) at rank ``i`` to or from rank ``j``.
        load: per expert, tokens routed to it.
        errors: relative error per compared tensor (named by :func:`results`).
        seconds: per phase, median over the steps of the slowest rank.
    """

    why: str
    tokens: list[int]
    rows: list[int]
    sent: list[list[float]]
    received: list[list[float]]
    experts: list[int]
    load: list[int]
    errors: dict[str, float]
    seconds: dict[str, float]


class PhaseClock:
    """Seconds per phase, one entry per step; on a GPU a phase ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name].append(time.perf_counter() - begin)


class Problem:
    """Tokens, output gradient and weights of the whole layer, the same on every rank, and who holds
    which part. Tokens are shared out like experts: contiguous, nearly equal.
    """

    def __init__(self, options: Options, text: bytes, device: torch.device) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.options = options
        self.tokens = torch.tensor(list(text), device=device)
        generator = torch.Generator().manual_seed(options.seed + 1)
        gradient = torch.randn(len(text), options.hidden, generator=generator)
        self.gradient = gradient.to(device, options.row_dtype)
        self.weights = make_weights(options, device)
        split, owned = expert_bounds(len(text), world), expert_bounds(options.experts, world)
        self.most_tokens = split[1]
        self.mine, self.held = slice(*split[rank : rank + 2]), slice(*owned[rank : rank + 2])

    def layer(self, held: slice) -> MoeLayer:
        """The layer with a slice of the experts."""
        weights = {name: w if name in SHARED else w[held] for name, w in self.weights.items()}
        return MoeLayer(weights, self.options)

    def errors(self, layer: MoeLayer, y: Tensor) -> dict[str, float]:
        """Collective: relative error of this rank's tensors against the whole layer on all tokens,
        without tokenyard.
        """
        got = results(layer, y, first_expert=self.held.start)
        for shared in SHARED:
            got[f"{shared} gradient"] = sum_over_ranks(got[f"{shared} gradient"])
        whole = self.layer(slice(None))
        wanted = whole(self.tokens)
        wanted.backward(self.gradient)
        return compare(got, results(whole, wanted[self.mine], first_expert=0))


def forward(
    layer: MoeLayer, ep: ty.ExpertParallel, tokens: Tensor, layout: ty.Layout, clock: PhaseClock
) -> tuple[Tensor, ty.Received]:
    """The layer on this rank's tokens ``[T]``, its experts spread over the ranks: output ``[T,
    H]``, and what came.
    """
    with clock.phase("embed and route"):
        x = layer.embed(tokens)
        topk_idx, topk_weights = layer.route(x)
    with clock.phase("dispatch"):
        recv = ep.dispatch(x, topk_idx, topk_weights, layout=layout)
    with clock.phase("experts"):
        idx, weights = recv.topk_idx, recv.topk_weights
        if idx is None or weights is None:  # sorted by expert; combine weights them
            counts = recv.tokens_per_expert.long()
            idx = torch.arange(len(counts), device=x.device).repeat_interleave(counts)[:, None]
            weights = torch.ones_like(idx, dtype=torch.float32)
        rows = layer.experts(recv.x, idx, weights)
    with clock.phase("combine"):
        y = ep.combine(rows, recv.handle, weighted=layout is not ty.Layout.FLAT)
    assert isinstance(y, Tensor)
    return y, recv


def bytes_so_far(ep: ty.ExpertParallel) -> Tensor:
    """Bytes sent to and received from each peer: float64 ``[2, R]``."""
    stats = ep.stats()
    return torch.tensor([stats.bytes_sent, stats.bytes_received], dtype=torch.float64)


def run_rank(device: torch.device, options: Options, text: bytes, counter: Counter) -> DemoResult:
    """Be one rank. Every rank passes the same ``text``; rank 0 counts finished stages: start,
    warm-up, steps.
    """
    problem, clock = Problem(options, text, device), PhaseClock(device)
    layer, layout = problem.layer(problem.held), ty.Layout[options.layout.upper()]

    def begin_stage() -> None:
        """Start together, so that no phase counts another rank's delay."""
        advance(counter)
        sum_over_ranks(torch.zeros(1))

    def step(ep: ty.ExpertParallel) -> tuple[Tensor, ty.Received]:
        begin_stage()
        layer.zero_grad()
        y, recv = forward(layer, ep, problem.tokens[problem.mine], layout, clock)
        with clock.phase("backward"):
            y.backward(problem.gradient[problem.mine])
        return y, recv

    with ty.ExpertParallel(
        num_experts=options.experts,
        hidden=options.hidden,
        num_topk=options.topk,
        max_tokens_per_rank=problem.most_tokens,
        engine=options.engine,
        device=device,
    ) as ep:
        y, recv = step(ep)
        clock.seconds.clear()
        before = bytes_so_far(ep)
        for _ in range(options.steps):
            y, recv = step(ep)
        moved = cast(list[list[float]], ((bytes_so_far(ep) - before) / options.steps).tolist())
    begin_stage()
    return DemoResult(
        why=ep.why,
        tokens=of_ranks(y.shape[0]),
        rows=of_ranks(recv.x.shape[0]),
        sent=of_ranks(moved[0]),
        received=of_ranks(moved[1]),
        experts=of_ranks(len(recv.tokens_per_expert)),
        load=list(chain.from_iterable(of_ranks(host_ints(recv.tokens_per_expert)))),
        errors=worst(of_ranks(problem.errors(layer, y))),
        seconds=slowest(of_ranks(dict(clock.seconds))),
    )


def worst(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest error of each tensor that any rank compared."""
    names = dict.fromkeys(chain.from_iterable(ranks))
    return {name: max(rank.get(name, 0.0) for rank in ranks) for name in names}


def slowest(ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
    """Per phase, the median over the steps of the slowest rank."""
    steps = {name: zip(*(rank[name] for rank in ranks), strict=True) for name in PHASES}
    return {name: median(map(max, times)) for name, times in steps.items()}


def of_ranks(mine: T) -> list[T]:
    """Collective: what every rank passes, in rank order."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Collective: the sum of every rank's tensor, on this tensor's device."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = tensor.detach().to(where, copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


def bytes_of_rank_zero(text: bytes) -> bytes:
    """Collective: what rank 0 passed."""
    both = [text]
    dist.broadcast_object_list(both)
    return both[0]
