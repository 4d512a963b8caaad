"""The self-test of ``tokenyard doctor``: dispatch and combine on real ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tokenyard import ExpertParallel
from tokenyard.launch import spawn
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Oracle, engine_calls, sweep_inputs

TOKENS, HIDDEN, TOPK = 24, 256, 4
"""Of each rank."""


def self_test(device: str, ranks: str, engine: str, seconds: str) -> dict[str, object]:
    """Dispatch and combine on so many local ranks of ``device`` ("cpu" or "cuda"). All are words of
    a command line; a silent rank is waited for ``seconds``. Returns the ``engine``, ``why``, and
    ``seconds`` that it took.

    Raises:
        RuntimeError: a rank raised; its traceback is the message.
    """
    begin = time.monotonic()
    name, why = spawn(check_rank, int(ranks), engine, float(seconds), device=device)[0]
    return {"engine": name, "why": why, "seconds": round(time.monotonic() - begin, 2)}


def check_rank(here: torch.device, engine: str, timeout: float) -> tuple[str, str]:
    """One rank's part: two layouts, experts that do not divide by the ranks, tokens that pick an
    expert twice. Returns the engine and why it is. AssertionError: a bit is wrong; says where."""
    known: dict[str, Any] = {"device": here if here.type == "cuda" else None, "timeout": timeout}
    cases = [
        Case(TOKENS, HIDDEN, TOPK, 3 * dist.get_world_size() + 1, "duplicates", layout=layout)
        for layout in ("flat", "expert_major")
    ]
    with ExpertParallel(**cases[0].arguments, engine=engine, **known) as ep:
        for case in cases:
            [batch], [sent] = sweep_inputs(case, 0, here, 1)
            truth = Oracle.asked(case, batch, sent)
            for call in engine_calls(ep, case, [batch]):
                try:
                    call.attempt(0, truth)
                except AssertionError as error:
                    what = f"rank {ep.rank}: {case.layout.upper()} {call.phase}"
                    raise AssertionError(f"{what}: {error}") from None
        return ep.engine, ep.why
