"""A virtual rank on one GPU dies, and the others go on: ``python tests/run.py recover_virtual``
prints what each rank saw as JSON.

A program of its own because CUDA must start with certain variables. ``test_recover_gpu.py`` reads
what it prints.
"""

from __future__ import annotations

import json
from typing import Any

import torch

import tokenyard as ty
from cases import check_combined, check_received, rows_to_combine
from one_gpu import VirtualGroup, run_virtual_ranks
from recovering import Left

RANKS, VICTIM = 4, 2
TOKENS, HIDDEN = 200, 512
TIMEOUT = 10.0
_DEAD: list[ty.ExpertParallel] = []
"""Their memory stays, as that of processes does which others map."""


class Died(Exception):
    """Of the thread that plays a process."""


def good_calls(ep: ty.ExpertParallel, device: torch.device, gone: tuple[int, ...]) -> int:
    """Dispatches and combines, through rings that go round and in place, checked; how many."""
    for number in range(5):
        case = Left(
            ep.world_size, num_tokens=TOKENS, hidden=HIDDEN, num_experts=16, seed=number, gone=gone
        )
        idx, weights = (each.to(device) for each in case.asked[ep.rank])
        in_place = number > 2
        x = case.x[ep.rank].to(device)
        recv = ep.dispatch(x, idx, weights, in_place=in_place)
        ep.check()  # else what fails on the device shows in the next call
        check_received(recv, case, ep.rank)
        rows = rows_to_combine(recv, case, ep.rank)
        y = ep.combine(rows, recv.handle, in_place=in_place)
        ep.check()
        check_combined(y, case, ep.rank, case.combined(ep.rank).x)
    return 10


def die_at_launch(ep: ty.ExpertParallel, number: int) -> None:
    """Behind the gate, so that kernels of the others wait for this rank's."""
    memory: Any = ep._calls.engine._memory  # pyright: ignore
    honest, left = memory.gate, [number]

    def gate() -> None:
        honest()
        left[0] -= 1
        if not left[0]:
            raise Died

    memory.gate = gate


def body(group: VirtualGroup, victim: int = VICTIM, launch: int = 5) -> Any:
    """What a survivor sees: who was lost, who is left, good calls, the engine."""
    torch.set_num_threads(1)  # of each rank's thread: oracles would crowd each other out
    ep = ty.ExpertParallel(
        group, engine="nvlink", num_experts=16, hidden=HIDDEN, num_topk=3, timeout=TIMEOUT,
        max_tokens_per_rank=TOKENS, buffer_bytes=4 << 20,
    )  # fmt: skip
    if group.rank() == victim:
        die_at_launch(ep, launch)
        _DEAD.append(ep)
    lost = -1
    try:
        good_calls(ep, group.device, ())
    except Died:
        return None
    except ty.PeerTimeout as error:
        lost = error.rank
    left = ep.recover()
    seen = [lost, left, good_calls(ep, group.device, (victim,)), ep.engine]
    ep.close()
    return seen


if __name__ == "__main__":
    print(json.dumps([run_virtual_ranks(RANKS, lambda g, n=n: body(g, launch=n)) for n in (5, 12)]))
