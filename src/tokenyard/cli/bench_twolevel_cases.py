"""What ``tokenyard bench --suite twolevel`` expects of a call: rows that cross between nodes, and
sums by the tree of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.bench_batches import Batch, Truth, share
from tokenyard.cli.bench_cases import COMBINE
from tokenyard.cli.bench_inputs import Traffic
from tokenyard.cli.bench_nvlink_cases import Probe
from tokenyard.routing import tokens_in_ranks
from tokenyard.stats import Traffic as Crossed
from tokenyard.testing.compare import assert_same_bits
from tokenyard.topology import Topology

NVSHMEM = "NVSHMEM between nodes"
"""What ``ExpertParallel.why`` says where it is."""


def rows_across(topk_idx: Tensor, num_experts: int, grid: Topology, *, per_node: bool) -> Traffic:
    """Rows of a dispatch, per rank, to and from ranks of other nodes. ``topk_idx [R, T, K]``.

    A row crosses once per (token, node), to the rank of the same local index (``per_node``), or
    once per (token, rank).

    >>> topk_idx = torch.tensor([[[2, 3]], [[2, 3]], [[1, 2]], [[0, -1]]])
    >>> rows_across(topk_idx, 4, Topology(2, 2), per_node=True)
    Traffic(sent=[1, 1, 1, 1], received=[1, 1, 1, 1])
    >>> rows_across(topk_idx, 4, Topology(2, 2), per_node=False)
    Traffic(sent=[2, 2, 1, 1], received=[1, 1, 2, 2])
    """
    size, nodes, each = grid.world_size, grid.num_nodes, grid.ranks_per_node
    goes = torch.stack([tokens_in_ranks(idx, num_experts, size) for idx in topk_idx]).view(
        size, -1, nodes, each
    )
    if per_node:
        same_local = torch.eye(each, dtype=torch.int64, device=goes.device).repeat(nodes, 1)
        rows = goes.any(3).sum(1).unsqueeze(2) * same_local.unsqueeze(1)  # [R, nodes, each]
    else:
        rows = goes.sum(1)
    node = torch.arange(size, device=goes.device) // each
    between = rows.reshape(size, size).masked_fill(node.unsqueeze(1) == node, 0)
    return Traffic(*([int(count) for count in between.sum(dim)] for dim in (1, 0)))


@dataclass(frozen=True)
class GridTruth(Truth):
    """A :class:`Truth` whose sums follow a tree: of nodes of ``per_node`` ranks, rounded, then of
    nodes.
    """

    per_node: int

    def check_combined(self, y: Tensor) -> None:
        x, mine = self.batch.x, self.batch.rank
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for first in range(0, self.batch.topk_idx.shape[0], self.per_node):
            part = torch.zeros_like(total)
            for rank in range(first, first + self.per_node):
                sent = self._picks_of(rank)[mine].any(1, keepdim=True)
                part += torch.where(sent, (x * share(rank)).float(), 0.0)
            total += part.to(x.dtype).float()
        assert_same_bits(y, total.to(y.dtype), what="combined")


class Counted:
    """A probe with what its calls must put to other nodes. Those of a collective count nothing.

    Attributes: tree: ranks per node in its sums. row_bytes: payload and scales of a row. rows,
    put_bytes: that this rank has put to other nodes, per input, as the engine has counted.
    """

    def __init__(self, probe: Probe, batches: Sequence[Batch], grid: Topology) -> None:
        self.probe, ep = probe, probe.ep
        back, per_node = probe.phase == COMBINE, ep is not None and ep.engine != "nvlink"
        plans = [
            rows_across(batch.topk_idx, probe.job.experts, grid, per_node=per_node)
            for batch in batches
        ]
        self._plans = [Traffic(plan.received, plan.sent) if back else plan for plan in plans]
        self.tree = grid.ranks_per_node if per_node and grid.has_levels else grid.world_size
        self.row_bytes = probe.job.combined_row_bytes if back else probe.job.row_bytes
        self.rows, self.put_bytes = [0] * len(batches), [0] * len(batches)

    @property
    def num_inputs(self) -> int:
        return len(self._plans)

    @property
    def planned(self) -> list[float]:
        """Rows that each rank has to put to other nodes in one call, mean over the inputs."""
        return [
            sum(each) / len(each) for each in zip(*(plan.sent for plan in self._plans), strict=True)
        ]

    def attempt(self, number: int, truth: Truth) -> None:
        """Call once; check the result and what has crossed.

        Raises:
            AssertionError: a bit of the result is wrong, or a row too many or too few has crossed.
        """
        if self.probe.prepare is not None:
            self.probe.prepare(number)
        ep = self.probe.ep
        if ep is None:
            self.probe.check(self.probe.run(number), truth)
            return
        before = _across(ep)
        result = self.probe.run(number)
        after = _across(ep)
        self.rows[number], self.put_bytes[number] = (
            after.rows_sent - before.rows_sent,
            after.bytes_sent - before.bytes_sent,
        )
        self.probe.check(result, truth)
        plan, rank = self._plans[number], ep.rank
        put, got = self.rows[number], after.rows_received - before.rows_received
        assert (put, got) == (plan.sent[rank], plan.received[rank]), (
            f"rank {rank} has put {put} rows to other nodes and got {got}, but by the plan it is "
            f"{plan.sent[rank]} and "
            f"{plan.received[rank]}"
        )


def _across(ep: ty.ExpertParallel) -> Crossed:
    """What has crossed between nodes so far."""
    ep.check()
    return ep.stats().across
