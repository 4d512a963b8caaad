"""Engine collective on kernels on GPUs: ``python tests/run.py collective_ranks RANKS``.

RANKS processes have a GPU each and NCCL; with more ranks than GPUs they share GPU 0 over a gloo
mesh (rows through host memory). Each compares dispatches and combines with the oracle and with
torch's way, bit for bit, and prints how many calls it made.
"""

from __future__ import annotations

import multiprocessing
import sys
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, rows_to_combine
from tokenyard.engines import collective
from tokenyard.engines.collective_torch import TorchWork
from tokenyard.testing import Ranks, assert_same_bits


def cases(ranks: int) -> list[Case]:
    """Layouts, shapes, casts and sizes."""
    found: list[Case] = []
    modes = list(ty.Quantize)
    for at, (layout, exact) in enumerate(product(ty.Layout, (True, False))):
        options: dict[str, Any] = {"layout": layout, "exact": exact}
        found += [
            Case(ranks, **options),
            Case(ranks, hidden=37, num_experts=17, seed=1, **options),
            Case(ranks, hidden=300, quantize=modes[at % 4], num_tokens=70, **options),
        ]
    found += [Case(ranks, hidden=300, quantize=mode) for mode in modes[1:]]
    found += [Case(ranks, hidden=21, dtype=torch.int8, layout=layout) for layout in ty.Layout]
    many: dict[str, Any] = {"num_tokens": 900, "num_topk": 8, "num_experts": 64}
    found += [Case(ranks, layout=layout, **many) for layout in ty.Layout]
    found.append(Case(ranks, layout=ty.Layout.EXPERT_MAJOR, expert_alignment=16))
    return found


def check(ranks: Ranks, case: Case) -> int:
    """One case; returns calls made."""
    collective.ON_GPUS = True
    with case.make(ranks) as ours:
        collective.ON_GPUS = False
        with case.make(ranks) as theirs:
            want = dispatch(ranks, theirs, case)
            collective.ON_GPUS = True
            recv = dispatch(ranks, ours, case)
            check_received(recv, case, ranks.rank)
            works = ours._calls.engine._works.values()
            assert not any(isinstance(each, TorchWork) for each in works), "kernels were not used"
            for kind in ("plan", "arrived"):
                both = getattr(recv.handle, kind), getattr(want.handle, kind)
                for name, one, other in zip(both[0]._fields, *both, strict=True):
                    assert_same_bits(one.cpu(), other.cpu(), what=f"{case}: {kind}.{name}")
            rows, rank = rows_to_combine(recv, case, ranks.rank), ranks.rank
            right = case.combined(rank).x
            check_combined(ours.combine(rows, recv.handle), case, rank, right)
            bias = torch.ones_like(right, device=rows.device)
            biases = [torch.ones(len(idx), case.hidden).to(right.dtype) for idx, _ in case.picks]
            with_bias = case.combined(rank, bias=biases).x
            check_combined(ours.combine(rows, recv.handle, bias=bias), case, rank, with_bias)
            if case.quantize is None and case.dtype is torch.bfloat16:
                again = ours.dispatch(case.x[rank].to(rows.device), handle=recv.handle)
                mine = recv.source >= 0
                assert_same_bits(again.x[mine].cpu(), recv.x[mine].cpu(), what="cached dispatch")
            return 5


def main(rank: int, size: int, port: int) -> None:
    """One rank."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    apart = size <= torch.cuda.device_count()
    device = torch.device("cuda", rank if apart else 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl" if apart else "gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks(rank, size, device, "collective", dist.group.WORLD)
    made = sum(check(ranks, case) for case in cases(size))
    torch.cuda.synchronize()
    print(f"rank {rank} of {size}: {made} calls", flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    """Of the loopback interface."""
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return int(server.port)


if __name__ == "__main__":
    number = int(sys.argv[1])
    if not torch.cuda.is_available():
        sys.exit("collective_ranks needs a CUDA device, and there is none")
    spawn, chosen = multiprocessing.get_context("spawn"), free_port()
    members = [spawn.Process(target=main, args=(rank, number, chosen)) for rank in range(number)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    sys.exit(max(abs(member.exitcode or 0) for member in members))
