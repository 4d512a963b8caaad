"""Host time of eager calls on engine nvlink: ``python tests/run.py nvlink_host [TOKENS ...]``
(default: 64).

A rank on each GPU, 7168 channels, top-8 of 256 experts. Rank 0 prints microseconds of each kind of
call, the median and the least of 200; every 20 calls the device may catch up. Rounds of all kinds
take turns, so that a busy machine slows all of them alike. "eager loop" is a fresh dispatch and its
combine, 20 times and then one wait for the device, per iteration: what the host or the device
takes, whichever is slower. On GPUs an ``all_to_all_single`` of NCCL of the same rows (each token
once to each rank that it reaches, counts known) stands beside it, there and back. Without a GPU
nothing is launched (``recorded.py``) and rows are short: then it is the time of the Python part,
and of tensors in host memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from rank_per_gpu import on_each_gpu
from recorded import recorded_object

GPU = torch.cuda.is_available()
HIDDEN = 7168 if GPU else 64
EXPERTS, TOP = 256, 8
ROUNDS, CALLS = 10, 20


def calls(ep: ty.ExpertParallel, tokens: int) -> dict[str, Callable[[], Any]]:
    """Kinds of calls by name."""
    device = torch.device("cuda" if GPU else "cpu")
    torch.manual_seed(0)
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    picks = torch.rand(tokens, EXPERTS, device=device).topk(TOP).indices
    weights = torch.rand(tokens, TOP, device=device)
    known = ep.dispatch(x, picks, weights)
    kinds: dict[str, Callable[[], Any]] = {
        "cached dispatch": lambda: ep.dispatch(x, handle=known.handle),
        "combine": lambda: ep.combine(known.x, known.handle),
    }
    for layout in ty.Layout:
        for exact in (True, False):
            options: dict[str, Any] = {"layout": layout, "exact": exact}
            if not exact and layout is ty.Layout.EXPERT_MAJOR:
                options["capacity"] = tokens * TOP
            name = f"{'fresh exact' if exact else 'static'} {layout.name}"
            kinds[name] = lambda options=options: ep.dispatch(x, picks, weights, **options)
    return kinds


def loops(ep: ty.ExpertParallel, tokens: int) -> dict[str, Callable[[], Any]]:
    """Kinds of iterations by name: each a call there and one back."""
    device = torch.device("cuda" if GPU else "cpu")
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    picks = torch.rand(tokens, EXPERTS, device=device).topk(TOP).indices
    weights = torch.rand(tokens, TOP, device=device)

    def moe() -> None:
        recv = ep.dispatch(x, picks, weights)
        ep.combine(recv.x, recv.handle)

    kinds: dict[str, Callable[[], Any]] = {"eager loop": moe}
    if GPU:
        kinds["NCCL all_to_all_single x 2"] = exchanged(x, picks // (EXPERTS // ep.world_size))
    return kinds


def exchanged(x: Tensor, ranks: Tensor) -> Callable[[], None]:
    """Rows of ``x`` to the ``ranks`` (int64 ``[T, K]``) of their picks and back, by NCCL."""
    reached = torch.zeros(len(x), dist.get_world_size(), dtype=torch.bool, device=x.device)
    reached.scatter_(1, ranks, True)
    sent = reached.sum(0)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    sizes, back_sizes = sent.tolist(), came.tolist()
    rows = x[reached.t().nonzero()[:, 1]]
    out, back = x.new_empty(sum(back_sizes), HIDDEN), torch.empty_like(rows)

    def exchange() -> None:
        dist.all_to_all_single(out, rows, back_sizes, sizes)
        dist.all_to_all_single(back, out, sizes, back_sizes)

    return exchange


def measured(ep: ty.ExpertParallel, tokens: int) -> dict[str, list[float]]:
    """Microseconds by kind of call."""
    kinds, turns = calls(ep, tokens), loops(ep, tokens)
    seen: dict[str, list[float]] = {name: [] for name in (*kinds, *turns)}
    for turn in range(ROUNDS + 1):
        for name, call in kinds.items():
            for _ in range(CALLS):
                begin = time.perf_counter()
                call()
                if turn:  # the first round compiles and warms up
                    seen[name].append(1e6 * (time.perf_counter() - begin))
            if GPU:
                torch.cuda.synchronize()
        for name, call in turns.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            if GPU:
                torch.cuda.synchronize()
            if turn:
                seen[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
    return seen


def report(tokens: int) -> None:
    """The table for so many tokens; rank 0 prints it."""
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOP}
    sizes["max_tokens_per_rank"] = tokens
    ep = ty.ExpertParallel(engine="nvlink", **sizes) if GPU else recorded_object(**sizes)[0]
    with ep, torch.no_grad():
        seen = measured(ep, tokens)
    if ep.rank == 0:
        print(f"{tokens} tokens, {ep.world_size} ranks")
        for name, times in seen.items():
            print(f"{name:28} median {statistics.median(times):6.1f} us, least {min(times):6.1f}")


def main(sizes: list[int]) -> None:
    """A process per GPU; without one, this process."""
    if not GPU:
        for tokens in sizes:
            report(tokens)
        return
    on_each_gpu(report, sizes)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [64])
