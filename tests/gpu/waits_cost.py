"""What a call takes, on virtual ranks of one GPU: to compare two trees whose waits differ.

``python tests/run.py waits_cost`` prints, per engine and batch, the median of rounds of a static
dispatch with its combine, in microseconds. No waits are read meanwhile.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

import tokenyard as ty
from one_gpu import VirtualGroup, run_virtual_ranks

RANKS, EXPERTS, HIDDEN, TOPK = 4, 64, 4096, 8
ROUNDS, CALLS = 15, 20
SIZES = {"nvlink": (64, 2048), "twolevel": (64, 2048), "low_latency": (64,)}


def body(group: VirtualGroup, engine: str, tokens: int) -> float:
    more: dict[str, Any] = {"topology": (2, 2)} if engine == "twolevel" else {}
    ep = ty.ExpertParallel(
        group, engine=engine, num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, timeout=20.0,
        max_tokens_per_rank=tokens, **more,
    )  # fmt: skip
    layout = ty.Layout.EXPERT_PADDED if engine == "low_latency" else ty.Layout.FLAT
    random = torch.Generator().manual_seed(group.rank())
    picks = torch.rand(tokens, EXPERTS, generator=random).topk(TOPK).indices.to(group.device)
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16().to(group.device)
    weights = torch.full((tokens, TOPK), 1 / TOPK, device=group.device)
    took: list[float] = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            recv = ep.dispatch(x, picks, weights, layout=layout, exact=False)
            ep.combine(recv.x, recv.handle)
        end.record()
        ep.check()
        took.append(1e3 * begin.elapsed_time(end) / CALLS)
    ep.close()
    return median(took[2:])


def main() -> None:
    for engine, sizes in SIZES.items():
        for tokens in sizes:
            each = run_virtual_ranks(RANKS, lambda g, e=engine, t=tokens: body(g, e, t))
            print(f"{engine}, {tokens} tokens: {median(each):.1f} us", flush=True)


if __name__ == "__main__":
    main()
