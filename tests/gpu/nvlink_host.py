"""Host time of eager calls on engine nvlink: ``python tests/run.py nvlink_host [TOKENS]`` (default:
64).

One rank, 7168 channels, top-8 of 256 experts. Prints microseconds of each kind of call, the median
and the least of 200; every 20 calls the device may catch up. Rounds of all kinds take turns, so
that a busy machine slows all of them alike. "eager loop" is a fresh dispatch and its combine, 20
times and then one wait for the device, per iteration: what the host or the device takes, whichever
is slower. On a GPU an ``all_to_all_single`` of NCCL of as many rows stands beside it, there and
back. Without a GPU nothing is launched (``recorded.py``) and rows are short: then it is the time of
the Python part, and of tensors in host memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
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
    if GPU and dist.is_nccl_available():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        out, back = torch.empty_like(x), torch.empty_like(x)

        def exchange() -> None:
            dist.all_to_all_single(out, x)
            dist.all_to_all_single(back, out)

        kinds["NCCL all_to_all_single x 2"] = exchange
    return kinds


def main(tokens: int) -> None:
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOP}
    sizes["max_tokens_per_rank"] = 4 * tokens
    ep = ty.ExpertParallel(engine="nvlink", **sizes) if GPU else recorded_object(**sizes)[0]
    with ep, torch.no_grad():
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
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, times in seen.items():
        print(f"{name:28} median {statistics.median(times):6.1f} us, least {min(times):6.1f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
