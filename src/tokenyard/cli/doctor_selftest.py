"""A few seconds of dispatch and combine on real ranks, every bit compared with the oracle."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import ExpertParallel, Layout, Received, reference
from tokenyard.launch import spawn
from tokenyard.testing import assert_same_bits, payload, routing

TOKENS, HIDDEN, TOPK = 24, 256, 4
"""Of each rank."""


class Report(NamedTuple):
    """What a rank says of itself after a test without an error."""

    engine: str
    why: str


class Inputs(NamedTuple):
    """What all ranks send; lists have one entry per rank."""

    x: list[Tensor]  # [T, H] bfloat16
    topk_idx: list[Tensor]  # [T, K] int64
    topk_weights: list[Tensor]  # [T, K] float32
    num_experts: int


def self_test(device: str, ranks: str, engine: str, seconds: str) -> dict[str, object]:
    """Run the test on so many local ranks of ``device`` ("cpu" or "cuda"); a silent rank is waited
    for ``seconds``.

    Arguments are words of a command line. Returns the fields of :class:`Report`, of rank 0, and
    ``seconds``.

    Raises:
        RuntimeError: a rank raised; its traceback is the message.
    """
    begin = time.monotonic()
    first: Report = spawn(check_rank, int(ranks), engine, float(seconds), device=device)[0]
    return {**first._asdict(), "seconds": round(time.monotonic() - begin, 2)}


def make_inputs(world_size: int) -> Inputs:
    """The same in every process. Experts do not divide by the ranks, and some tokens pick one
    expert twice.
    """
    experts = 3 * world_size + 1
    picks = [
        routing("duplicates", rank, world_size, TOKENS, TOPK, experts, 0)
        for rank in range(world_size)
    ]
    x = [payload(rank, TOKENS, HIDDEN, torch.bfloat16, 0) for rank in range(world_size)]
    return Inputs(x, [idx for idx, _ in picks], [weights for _, weights in picks], experts)


def check_rank(here: torch.device, engine: str, timeout: float) -> Report:
    """One rank's part: dispatch and combine in two layouts.

    Raises:
        AssertionError: a bit is wrong; says where.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = make_inputs(world)
    with ExpertParallel(
        num_experts=inputs.num_experts,
        hidden=HIDDEN,
        num_topk=TOPK,
        max_tokens_per_rank=TOKENS,
        engine=engine,
        timeout=timeout,
        device=here if here.type == "cuda" else None,
    ) as ep:
        for layout in (Layout.FLAT, Layout.EXPERT_MAJOR):
            mine = (part[rank].to(here) for part in inputs[:3])
            recv = ep.dispatch(*mine, layout=layout)
            out = ep.combine(
                _expert(recv.x, rank), recv.handle, weighted=layout is Layout.EXPERT_MAJOR
            )
            _compare(recv, out, inputs, layout, rank)
        return Report(ep.engine, ep.why)


def _expert(rows: Tensor, rank: int) -> Tensor:
    """Each rank's experts scale by a power of two of their own, which is exact in every dtype."""
    return rows * 2.0 ** (rank % 8 - 4)


def _compare(recv: Received, out: Tensor, inputs: Inputs, layout: Layout, rank: int) -> None:
    received = reference.dispatch(
        inputs.x,
        inputs.topk_idx,
        inputs.topk_weights,
        num_experts=inputs.num_experts,
        layout=layout,
    )
    rows = [_expert(each.x, peer) for peer, each in enumerate(received)]
    combined = reference.combine(rows, received, weighted=layout is Layout.EXPERT_MAJOR)
    want = received[rank]
    flat = layout is Layout.FLAT
    pairs = {
        "x": (recv.x, want.x),
        "source": (recv.source, want.source),
        "tokens_per_expert": (recv.tokens_per_expert, want.tokens_per_expert),
        "weights": (recv.topk_weights, want.topk_weights)
        if flat
        else (recv.row_weights, want.row_weights),
        "topk_idx": (recv.topk_idx, want.topk_idx),
        "expert_offsets": (recv.expert_offsets, want.expert_offsets),
    }
    for name, (got, wanted) in pairs.items():
        what = f"{layout.name} dispatch: {name}"
        if (got is None) != (wanted is None):
            raise AssertionError(
                f"rank {rank}: {what} {'is missing' if got is None else 'should not be there'}"
            )
        if got is not None and wanted is not None:
            assert_same_bits(
                got.cpu(), wanted, what=what, rank=rank, source=want.source if name == "x" else None
            )
    assert_same_bits(out.cpu(), combined[rank].x, what=f"{layout.name} combine", rank=rank)
