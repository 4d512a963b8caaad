"""Rows that cross each kind of link, expected under a routing. Every rank has the same number of
tokens. Exact; nothing is drawn but which experts are popular.

A token picks K distinct experts, one after the other, each among those left with a chance in
proportion to its popularity. Equivalently every expert e rings after an exponential time of rate
``popularity[e]``, and the first K are picked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tokenyard.planner.workload import Workload

SKEWS = ("uniform", "zipf")

_STEP, _EARLIEST = 0.25, -38.0
"""Of the trapezoid rule over the logarithm of time: it converges exponentially; tested to 1e-9."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Rows per GPU and call: the mean (in = out), and the busier direction of the busiest GPU."""

    mean: float
    busiest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Expected rows on their way to the experts; combine moves the same the other way. Rows to
    oneself cross nothing.

    Attributes:
        skew: name of the routing.
        ranks_reached, nodes_reached: by a token, its own included.
        nic: once per (token, node), to the GPU of the same index there. nvlink: what forwarding
            these and a token's own node then take, once per (token, rank).
        flat_nic, flat_nvlink: once per (token, rank), straight to it.
        own: rows to the rank itself.
    """

    skew: str
    ranks_reached: float
    nodes_reached: float
    nvlink: Flow
    nic: Flow
    flat_nvlink: Flow
    flat_nic: Flow
    own: Flow


def traffic(workload: Workload, skew: str, seed: int = 0) -> Traffic:
    """Expected traffic of ``workload``; ``seed`` says which experts are popular."""
    chances, bounds = popularity(skew, workload.experts, seed), workload.bounds
    ranks = reach(chances, bounds, workload.topk)
    nodes = reach(chances, bounds[:: workload.gpus_per_node], workload.topk)
    return traffic_of(ranks, nodes, workload.tokens, skew)


def traffic_of(ranks: Sequence[float], nodes: Sequence[float], tokens: int, skew: str) -> Traffic:
    """Traffic if a token reaches each rank and each node with these probabilities.

    Example: 2 nodes of 2 GPUs, one expert each, top-1: a token reaches each rank with 1/4, each
    node with 1/2. Of 8 tokens a rank sends 4 over the NIC, and 2 + 2 over NVLink (2 of its own, 2
    that came from the other node).

    >>> found = traffic_of([0.25] * 4, [0.5] * 2, 8, "uniform")
    >>> found.nic.mean, found.nvlink.mean, found.flat_nic.mean, found.flat_nvlink.mean
    (4.0, 4.0, 4.0, 2.0)
    """
    size, count = len(ranks), len(nodes)
    local = size // count
    node_of = [rank // local for rank in range(size)]
    inside = [sum(ranks[node * local : (node + 1) * local]) for node in range(count)]
    peers = [inside[node_of[rank]] - ranks[rank] for rank in range(size)]

    def flow(out: Sequence[float], into: Sequence[float]) -> Flow:
        return Flow(tokens * sum(into) / size, tokens * max(*out, *into))

    return Traffic(
        skew=skew,
        ranks_reached=sum(ranks),
        nodes_reached=sum(nodes),
        nvlink=flow(
            [count * out for out in peers], [count * (local - 1) * chance for chance in ranks]
        ),
        nic=flow(
            [sum(nodes) - nodes[node] for node in node_of],
            [(count - 1) * nodes[node] for node in node_of],
        ),
        flat_nvlink=flow(peers, [(local - 1) * chance for chance in ranks]),
        flat_nic=flow(
            [sum(ranks) - inside[node] for node in node_of],
            [(size - local) * chance for chance in ranks],
        ),
        own=flow(ranks, ranks),
    )


# How likely a token goes to a group of experts


def popularity(skew: str, experts: int, seed: int = 0) -> list[float]:
    """Chances of experts for one pick: ``uniform``, or ``zipf``: the n-th in proportion to ``1 /
    n``. ``seed``: of which expert is the n-th."""
    if skew == "uniform":
        return [1 / experts] * experts
    if skew != "zipf":
        raise ValueError(f"skew {skew!r} is unknown; use one of {', '.join(SKEWS)}")
    chances = [1 / n for n in range(1, experts + 1)]
    random.Random(seed).shuffle(chances)
    total = sum(chances)
    return [chance / total for chance in chances]


def reach(chances: Sequence[float], bounds: Sequence[int], topk: int) -> list[float]:
    """Probability that one of ``topk`` picks is among experts ``bounds[i] .. bounds[i + 1] - 1``,
    for each ``i``.

    >>> reach([0.25] * 4, [0, 1, 4], 2)
    [0.5, 1.0]
    """
    experts = len(chances)
    if min(chances) == max(chances):
        sizes = [end - begin for begin, end in pairwise(bounds)]
        return [1 - math.comb(experts - size, topk) / math.comb(experts, topk) for size in sizes]
    return _reach_weighted(torch.tensor(chances, dtype=torch.float64), bounds, topk)


def _reach_weighted(rates: Tensor, bounds: Sequence[int], topk: int) -> list[float]:
    """A group of rate W rings before K others: ``integral of W exp(-W t) P(others by t < K)``."""
    latest = math.log(80.0 / float(rates.min()))
    times = torch.arange(_EARLIEST, latest, _STEP, dtype=torch.float64).exp()
    before = _counts(rates, bounds, times, topk)
    after = _counts(rates.flip(0), [len(rates) - bound for bound in reversed(bounds)], times, topk)[
        ::-1
    ]
    reached: list[float] = []
    for group, (begin, end) in enumerate(pairwise(bounds)):
        rate = rates[begin:end].sum()
        fewer = (before[group] * after[group + 1].cumsum(1).flip(1)).sum(1)
        reached.append(float((rate * times * (-rate * times).exp() * fewer).sum() * _STEP))
    return reached


def _counts(rates: Tensor, bounds: Sequence[int], times: Tensor, most: int) -> list[Tensor]:
    """For each bound: chances ``[times, most]`` that so many of the experts before it have rung."""
    counts = torch.zeros(len(times), most, dtype=torch.float64)
    counts[:, 0] = 1
    found: list[Tensor] = []
    for begin, end in zip([0, *bounds], bounds, strict=False):
        for rate in rates[begin:end]:
            rung = -torch.expm1(-rate * times)[:, None]
            counts = counts * (1 - rung) + torch.nn.functional.pad(counts[:, :-1], (1, 0)) * rung
        found.append(counts)
    return found
