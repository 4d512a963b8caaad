"""Rows that cross each kind of link, expected under a routing. Every rank has the same number of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenyard.planner.picks import popularity, reach
from tokenyard.planner.workload import Workload


class Flow(NamedTuple):
    """Rows per GPU and call: the mean over GPUs (in = out), and the busier direction of the busiest
    GPU.
    """

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
