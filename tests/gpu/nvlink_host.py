"""Host time of eager calls on engine nvlink: ``python tests/run.py nvlink_host [TOKENS]`` (default:
64).

One rank, 7168 channels, top-8 of 256 experts. Prints microseconds of each kind of call, the median
and the least of 200; every 20 calls the device may catch up. Rounds of all kinds take turns, so
that a busy machine slows all of them alike. Without a GPU nothing is launched (``recorded.py``):
then it is the time of the Python part, and of tensors in host memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

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


def main(tokens: int) -> None:
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOP}
    sizes["max_tokens_per_rank"] = 4 * tokens
    ep = ty.ExpertParallel(engine="nvlink", **sizes) if GPU else recorded_object(**sizes)[0]
    with ep, torch.no_grad():
        kinds = calls(ep, tokens)
        seen: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(ROUNDS + 1):
            for name, call in kinds.items():
                for _ in range(CALLS):
                    begin = time.perf_counter()
                    call()
                    if turn:  # the first round compiles and warms up
                        seen[name].append(1e6 * (time.perf_counter() - begin))
                if GPU:
                    torch.cuda.synchronize()
    for name, times in seen.items():
        print(f"{name:28} median {statistics.median(times):6.1f} us, least {min(times):6.1f} us")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
