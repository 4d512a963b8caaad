"""What the suite ``twolevel`` checks before and after it times, on simulated ranks of that engine.

``python tests/run.py twolevel_bench 2 2``: 2 nodes of 2 ranks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

import tokenyard as ty
from benchmarks.batches import DeviceTruth
from benchmarks.calls import library_calls
from benchmarks.twolevel import ALL_KINDS, TwoLevel
from benchmarks.twolevel_calls import Counted
from tokenyard.testing import payload, routing
from tokenyard.testing.checked_calls import Batch
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate
from tokenyard.topology import Topology


def check(nodes: int, per_node: int) -> list[tuple[list[int], list[int]]]:
    """Rows that each rank has put to other nodes, by kind of call, as counted and as planned. Every
    result was right.
    """
    grid = Topology(nodes, per_node)
    size, found = grid.world_size, dict[int, tuple[list[int], list[int]]]()
    case = TwoLevel(hidden=128, topk=2, experts=2 * size).case(5, engine="twolevel")
    x = [payload(rank, case.tokens, case.hidden, torch.bfloat16, 1) for rank in range(size)]
    picks = [
        routing("uniform", rank, size, case.tokens, case.topk, case.experts, 1)
        for rank in range(size)
    ]
    idx, weights = (torch.stack(each) for each in zip(*picks, strict=True))

    def body(ranks: SimulatedRank) -> None:
        group = SimulatedGroup(ranks)
        small = replace(case, rings=64 << 10, topology=(nodes, per_node))
        make = partial(ty.ExpertParallel, group, **small.arguments, engine="twolevel")
        ep, other = make(), make()
        batch = Batch(x[ep.rank], idx, weights, ep.rank, case.experts)
        calls = library_calls(ep, case, [batch], ALL_KINDS, lambda: other)
        counted = [Counted(call, [batch], grid) for call in calls]
        for each in counted:
            each.attempt(0, {each.tree: DeviceTruth(batch, torch.cat(x), each.tree)})
        found[ep.rank] = (
            [each.rows[0] for each in counted],
            [int(each.planned[ep.rank]) for each in counted],
        )
        ep.close()
        other.close()

    simulate(size, body, seed=0, max_steps=2_000_000)
    return [found[rank] for rank in range(size)]


if __name__ == "__main__":
    print(check(*map(int, sys.argv[1:])))
