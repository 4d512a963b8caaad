"""What every rank of ``tokenyard demo`` does: run the layer expert-parallel, time it, compare it
with one process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.demo_model import (
    PER_EXPERT,
    SHARED,
    LayerShape,
    MoeLayer,
    compare,
    make_weights,
    results,
)
from tokenyard.cli.progress import Counter
from tokenyard.routing import expert_bounds, host_ints

PHASES = ("embed and route", "dispatch", "experts", "combine", "backward")


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What to run; ``layout`` of the received rows, ``seed`` of weights and gradient."""

    shape: LayerShape
    layout: ty.Layout
    engine: str
    steps: int
    seed: int


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

    def slowest(self) -> dict[str, float]:
        """Collective: per phase, the median over the steps of the slowest rank."""
        ranks = {name: gather_rows(self.seconds[name]) for name in PHASES}
        return {name: median(map(max, zip(*rows, strict=True))) for name, rows in ranks.items()}


class Problem:
    """Tokens, output gradient and weights of the whole layer, the same on every rank, and who holds
    which part. Tokens are shared out like experts: contiguous, nearly equal.
    """

    def __init__(self, config: DemoConfig, text: bytes, device: torch.device) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.shape = config.shape
        self.tokens = torch.tensor(list(text), device=device)
        generator = torch.Generator().manual_seed(config.seed + 1)
        gradient = torch.randn(len(text), self.shape.hidden, generator=generator)
        self.gradient = gradient.to(device, self.shape.dtype)
        self.weights = make_weights(self.shape, config.seed, device)
        self.split = expert_bounds(len(text), world)
        self.owned = expert_bounds(self.shape.num_experts, world)
        self.mine, self.held = (
            slice(*bounds[rank : rank + 2]) for bounds in (self.split, self.owned)
        )

    def layer(self, held: slice) -> MoeLayer:
        """The layer with a slice of the experts."""
        weights = {name: w[held] if name in PER_EXPERT else w for name, w in self.weights.items()}
        return MoeLayer(weights, self.shape.num_topk, self.shape.dtype)

    def exchange(self, engine: str, device: torch.device) -> ty.ExpertParallel:
        """Collective: what dispatches and combines this layer."""
        return ty.ExpertParallel(
            num_experts=self.shape.num_experts,
            hidden=self.shape.hidden,
            num_topk=self.shape.num_topk,
            max_tokens_per_rank=self.split[1],
            engine=engine,
            device=device,
        )

    def on_one_process(self) -> dict[str, Tensor]:
        """Results of the whole layer on all tokens, without tokenyard; the output is cut to this
        rank's tokens.
        """
        layer = self.layer(slice(None))
        y = layer(self.tokens)
        y.backward(self.gradient)
        return results(layer, y[self.mine], first_expert=0)

    def errors(self, layer: MoeLayer, y: Tensor) -> dict[str, float]:
        """Collective: relative error per tensor, of whichever rank's copy or part is worst."""
        got = results(layer, y, first_expert=self.held.start)
        for shared in SHARED:
            got[f"{shared} gradient"] = sum_over_ranks(got[f"{shared} gradient"])
        want = self.on_one_process()
        own = compare(got, want)
        ranks = gather_rows([own.get(name, 0.0) for name in want])
        return dict(zip(want, map(max, zip(*ranks, strict=True)), strict=True))


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
    flat = layout is ty.Layout.FLAT
    with clock.phase("experts"):
        if flat:
            assert recv.topk_idx is not None and recv.topk_weights is not None
            rows = layer.mixed_experts(recv.x, recv.topk_idx, recv.topk_weights)
        else:
            rows = layer.blocked_experts(recv.x, recv.tokens_per_expert_list)
    with clock.phase("combine"):
        y = ep.combine(rows, recv.handle, weighted=not flat)
    assert isinstance(y, Tensor)
    return y, recv


def sizes(bounds: list[int]) -> list[int]:
    """``[0, 2, 5]`` to ``[2, 3]``."""
    return [end - begin for begin, end in pairwise(bounds)]


def bytes_so_far(ep: ty.ExpertParallel) -> Tensor:
    """Bytes sent to and received from each peer: float64 ``[2, R]``."""
    stats = ep.stats()
    return torch.tensor([stats.bytes_sent, stats.bytes_received], dtype=torch.float64)


def run_rank(device: torch.device, config: DemoConfig, text: bytes, counter: Counter) -> DemoResult:
    """Be one rank. Every rank passes the same ``text``; rank 0 counts finished stages: start,
    warm-up, steps.
    """
    problem, clock = Problem(config, text, device), PhaseClock(device)
    layer = problem.layer(problem.held)

    def begin_stage() -> None:
        """Start together, so that no phase counts another rank's delay."""
        counter.value += dist.get_rank() == 0
        sum_over_ranks(torch.zeros(1))

    def step(ep: ty.ExpertParallel) -> tuple[Tensor, ty.Received]:
        begin_stage()
        layer.zero_grad()
        y, recv = forward(layer, ep, problem.tokens[problem.mine], config.layout, clock)
        with clock.phase("backward"):
            y.backward(problem.gradient[problem.mine])
        return y, recv

    with problem.exchange(config.engine, device) as ep:
        y, recv = step(ep)
        clock.seconds.clear()
        before = bytes_so_far(ep)
        for _ in range(config.steps):
            y, recv = step(ep)
        moved = cast(list[list[float]], ((bytes_so_far(ep) - before) / config.steps).tolist())
    begin_stage()
    counts = torch.zeros(config.shape.num_experts, dtype=torch.int64)
    counts[problem.held] = recv.tokens_per_expert.long().cpu()
    return DemoResult(
        why=ep.why,
        tokens=sizes(problem.split),
        rows=[int(n) for (n,) in gather_rows([recv.x.shape[0]])],
        sent=gather_rows(moved[0]),
        received=gather_rows(moved[1]),
        experts=sizes(problem.owned),
        load=host_ints(sum_over_ranks(counts)),
        errors=problem.errors(layer, y),
        seconds=clock.slowest(),
    )


# Numbers over ranks, without pickling anything


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Collective: the sum of every rank's tensor, on this tensor's device."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = tensor.detach().to(where, copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


def gather_rows(row: Sequence[float]) -> list[list[float]]:
    """Collective: every rank's numbers (equally many on each), in rank order."""
    table = torch.zeros(dist.get_world_size(), len(row), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(row, dtype=torch.float64)
    return cast(list[list[float]], sum_over_ranks(table).tolist())


def bytes_of_rank_zero(text: bytes) -> bytes:
    """Collective: what rank 0 passed."""
    own = text if dist.get_rank() == 0 else b""
    buffer = torch.zeros(int(sum_over_ranks(torch.tensor(len(own)))), dtype=torch.uint8)
    buffer[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    return bytes(host_ints(sum_over_ranks(buffer)))
