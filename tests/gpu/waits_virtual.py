"""A virtual rank on one GPU is late, and the others' statistics say so: ``python tests/run.py
waits_virtual`` prints what each rank saw as JSON.

A program of its own because CUDA must start with certain variables. ``test_waits_gpu.py`` reads
what it prints. The host of a virtual rank cannot be late alone (they launch together), so its
stream is.
"""

from __future__ import annotations

import json
from typing import Any

import torch

import tokenyard as ty
from cases import Case
from one_gpu import VirtualGroup, run_virtual_ranks

RANKS, LATE = 4, 1
TOKENS, HIDDEN = 64, 512
CALLS, CYCLES = 5, 20_000_000
ENGINES = ("nvlink", "twolevel", "low_latency")
Waits = dict[str, list[float]]


def make(group: VirtualGroup, engine: str) -> ty.ExpertParallel:
    sizes: dict[str, Any] = {"topology": (2, 2)} if engine == "twolevel" else {}
    if engine != "low_latency":
        sizes["buffer_bytes"] = 8 << 20
    return ty.ExpertParallel(
        group, engine=engine, num_experts=16, hidden=HIDDEN, num_topk=3, timeout=10.0,
        max_tokens_per_rank=TOKENS, **sizes,
    )  # fmt: skip


def since(ep: ty.ExpertParallel, before: Waits) -> Waits:
    none = [0.0] * RANKS
    return {
        what: [now - then for now, then in zip(seconds, before.get(what, none), strict=True)]
        for what, seconds in ep.stats().waits.items()
    }


def body(group: VirtualGroup, engine: str) -> Any:
    """What was waited for while rank 1 was late, seconds that it was, what was waited for while
    it was not, and whether statistics came while the rank's own call still ran.
    """
    ep, rank = make(group, engine), group.rank()
    layout = ty.Layout.EXPERT_PADDED if engine == "low_latency" else ty.Layout.FLAT
    case = Case(RANKS, num_tokens=TOKENS, hidden=HIDDEN, num_experts=16, layout=layout, exact=False)
    x, idx, weights = (each.to(group.device) for each in (case.x[rank], *case.picks[rank]))
    rows = torch.ones(1, dtype=torch.bfloat16, device=group.device)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2 * CALLS)]
    torch.cuda._sleep(1)  # pyright: ignore

    def call(late: int) -> bool:
        """Dispatch and combine; the late rank's stream sleeps before each. Whether statistics came
        before the combine was over."""
        begin, end = marks[late]
        begin.record()
        if rank == LATE and late < CALLS:
            torch.cuda._sleep(CYCLES)  # pyright: ignore
        end.record()
        recv = ep.dispatch(x, idx, weights, **case.options)
        y = rows.expand(recv.x.numel()).view_as(recv.x).contiguous()
        ep.combine(y, recv.handle)
        over = torch.cuda.Event()
        over.record()
        ep.stats()
        early = not over.query()
        ep.check()
        return early

    for _ in range(3):
        call(CALLS)
    before = ep.stats().waits
    early = [call(late) for late in range(CALLS)]
    waits, middle = since(ep, before), ep.stats().waits
    for number in range(CALLS, 2 * CALLS):
        call(number)
    slept = sum(begin.elapsed_time(end) for begin, end in marks[:CALLS]) / 1e3
    seen = [waits, slept, since(ep, middle), any(early)]
    ep.close()
    return seen


if __name__ == "__main__":
    found = {each: run_virtual_ranks(RANKS, lambda g, e=each: body(g, e)) for each in ENGINES}
    print(json.dumps(found))
