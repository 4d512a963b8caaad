"""The suite ``twolevel`` as data, and what it expects of a call: rows that cross between
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenyard as ty
from benchmarks.batches import DeviceTruth
from benchmarks.calls import BACK, BACK_IN_PLACE, DIRECT, PLAIN, SuiteCall
from tokenyard.routing import tokens_in_ranks
from tokenyard.stats import Traffic as Crossed
from tokenyard.testing.cases import Case, Traffic
from tokenyard.testing.checked_calls import COMBINE, Batch
from tokenyard.topology import Topology

NCCL = "NCCL"
BAR_GBS, BAR_SMS, BAR_GRID = 100.0, 24, "2x2"
"""Bytes of rows that every rank should put to other nodes, 1e9 a second, with so many
multiprocessors on such a grid.
"""

ALL_KINDS = (PLAIN, "fp8", "fused", BACK, DIRECT, BACK_IN_PLACE)
BOTH_WAYS = (PLAIN, BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevel:
    """What to measure. Defaults are the sizes of the record.

    Attributes:
        topology: nodes, ranks per node.
        engine: what is judged; reference: what is measured beside it, in processes of its own, as
            torch takes symmetric memory from one library only.
        tokens: per rank, over all of ``sms``; curve: tokens per rank with :data:`BAR_SMS`.
        sms: multiprocessors, None for all; each takes half a minute of compiling with NVSHMEM's
            library.
        overfull: how many times more bytes a rank puts to other nodes than all its rings hold, in
            the test of bounded memory.
        calls: behind each other in a timed round, whose time is divided by them.
    """

    topology: tuple[int, int] = (2, 2)
    engine: str = "twolevel"
    reference: str = "nvlink"
    tokens: int = 4096
    curve: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    sms: tuple[int | None, ...] = (BAR_SMS, None)
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    overfull: int = 32
    calls: int = 4
    iterations: int = 20
    warmup: int = 3
    seed: int = 0

    @property
    def grid(self) -> Topology:
        return Topology(*self.topology)

    def sizes(self, sms: int | None) -> tuple[int, ...]:
        """Tokens per rank that are measured with so many multiprocessors."""
        return self.curve if sms == BAR_SMS else (self.tokens,)

    def case(self, tokens: int, **changes: Any) -> Case:
        sizes = (self.hidden, self.topk, self.experts)
        return Case(tokens, *sizes, topology=self.topology, **changes)


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


class Counted:
    """A call with what it must put to other nodes. Those of a collective count nothing.

    Attributes:
        tree: ranks per node in its sums. row_bytes: payload and scales of a row.
        rows, put_bytes: that this rank has put to other nodes, per input, as the engine has
            counted.
    """

    def __init__(self, call: SuiteCall, batches: Sequence[Batch], grid: Topology) -> None:
        self.call, ep = call, call.ep
        back, per_node = call.phase == COMBINE, ep is not None and ep.engine != "nvlink"
        experts = call.case.experts
        plans = [rows_across(each.topk_idx, experts, grid, per_node=per_node) for each in batches]
        self._plans = [Traffic(plan.received, plan.sent) if back else plan for plan in plans]
        self.tree = grid.ranks_per_node if per_node and grid.has_levels else grid.world_size
        self.row_bytes = call.case.combined_row_bytes if back else call.case.row_bytes
        self.rows, self.put_bytes = [0] * len(batches), [0] * len(batches)
        self.title = call.name

    @property
    def num_inputs(self) -> int:
        return len(self._plans)

    @property
    def planned(self) -> list[float]:
        """Rows that each rank has to put to other nodes in one call, mean over the inputs."""
        ranks = zip(*(plan.sent for plan in self._plans), strict=True)
        return [sum(each) / len(each) for each in ranks]

    def attempt(self, number: int, truths: Mapping[int, DeviceTruth]) -> None:
        """SuiteCall once; check the result and what has crossed. ``truths``: by :attr:`tree`.

        Raises:
            AssertionError: a bit of the result is wrong, or a row too many or too few has crossed.
        """
        call, truth = self.call, truths[self.tree]
        if call.ep is None:
            call.attempt(number, truth)
            return
        if call.prepare is not None:
            call.prepare(number)
        before = _across(call.ep)
        result = call.run(number)
        after = _across(call.ep)
        put, got = after.rows_sent - before.rows_sent, after.rows_received - before.rows_received
        self.rows[number], self.put_bytes[number] = put, after.bytes_sent - before.bytes_sent
        call.check(result, truth)
        plan, rank = self._plans[number], call.ep.rank
        assert (put, got) == (plan.sent[rank], plan.received[rank]), (
            f"rank {rank} has put {put} rows to other nodes and got {got}, but by the plan it is "
            f"{plan.sent[rank]} and {plan.received[rank]}"
        )


def _across(ep: ty.ExpertParallel) -> Crossed:
    """What has crossed between nodes so far."""
    ep.check()
    return ep.stats().across
