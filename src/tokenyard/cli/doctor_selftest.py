"""A few seconds of dispatch and combine on real ranks, every bit compared with the oracle."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tokenyard import ExpertParallel
from tokenyard.launch import spawn
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Call, Oracle, engine_calls, sweep_inputs

TOKENS, HIDDEN, TOPK = 24, 256, 4
"""Of each rank."""


def self_test(device: str, ranks: str, engine: str, seconds: str) -> dict[str, object]:
    """Run the test on so many local ranks of ``device`` ("cpu" or "cuda"); a silent rank is waited
    for ``seconds``.

    Arguments are words of a command line. Returns the ``engine`` that ran, ``why``, and how many
    ``seconds`` it took.

    Raises:
        RuntimeError: a rank raised; its traceback is the message.
    """
    begin = time.monotonic()
    name, why = spawn(check_rank, int(ranks), engine, float(seconds), device=device)[0]
    return {"engine": name, "why": why, "seconds": round(time.monotonic() - begin, 2)}


def case_for(world_size: int, layout: str) -> Case:
    """Experts do not divide by the ranks, and some tokens pick one expert twice."""
    return Case(TOKENS, HIDDEN, TOPK, 3 * world_size + 1, "duplicates", layout=layout)


def check_rank(here: torch.device, engine: str, timeout: float) -> tuple[str, str]:
    """One rank's part: dispatch and combine in two layouts. Returns the engine and why it is.

    Raises:
        AssertionError: a bit is wrong; says where.
    """
    world = dist.get_world_size()
    where: dict[str, Any] = {"device": here if here.type == "cuda" else None, "timeout": timeout}
    with ExpertParallel(**case_for(world, "flat").sizes, engine=engine, **where) as ep:
        for layout in ("flat", "expert_major"):
            case = case_for(world, layout)
            [batch], [sent] = sweep_inputs(case, 0, here, 1)
            truth = Oracle.asked(case, batch, sent)
            fresh, _, combine = engine_calls(ep, case, [batch])
            for call in (fresh, combine):
                attempt(call, truth)
        return ep.engine, ep.why


def attempt(call: Call, truth: Oracle) -> None:
    """Call once and compare; says which layout and rank is wrong."""
    try:
        call.attempt(0, truth)
    except AssertionError as error:
        what = f"{call.case.layout.upper()} {call.phase}"
        raise AssertionError(f"rank {truth.batch.rank}: {what}: {error}") from None
