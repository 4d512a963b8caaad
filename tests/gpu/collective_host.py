"""Engine collective over NCCL, a rank on each GPU: ``python tests/run.py collective_host
[TOKENS ...]`` (default: 128 4096).

7168 bf16 channels, top-8 of 256 experts. Rank 0 prints. Of each kind of call it prints launches
and host waits of one call, as torch.profiler counts them, and the time from the call until the
device is done: median of 20, by kernels, by torch, and beside them the least that can be done: an
all-to-all of the rows (each token to each rank), a gather of them and a copy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import tokenyard as ty
from rank_per_gpu import on_each_gpu
from tokenyard.engines import collective, group_transport
from tokenyard.memory.kernel_launch import wait_until

HIDDEN, EXPERTS, TOP, TIMES = 7168, 256, 8, 20
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call, end to end; the median."""
    seen: list[float] = []
    for turn in range(TIMES + 3):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if turn >= 3:
            seen.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(seen)


def counted(call: Callable[[], Any]) -> tuple[int, int, list[str]]:
    """Launches of one call, times that the host waits for the device, and what was launched."""
    polled: list[int] = []

    def noted(*args: Any) -> bool:
        polled.append(1)
        return wait_until(*args)

    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with (
        mock.patch.object(group_transport, "wait_until", noted),
        profile(activities=activities) as seen,
    ):
        call()
    events = list(seen.events() or ())
    waits = sum(event.name in WAITS for event in events)
    launched = [event.name for event in events if str(event.device_type).endswith("CUDA")]
    names = [name for name in launched if not name.startswith(("tokenyard.", "nccl:"))]
    return len(names), waits + len(polled), names


def baselines(tokens: int) -> dict[str, Callable[[], Any]]:
    """All-to-all of the rows, a gather and a copy."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    order = torch.arange(tokens, device="cuda").repeat(dist.get_world_size())
    packed, moved, placed = (x.new_empty(len(order), HIDDEN) for _ in range(3))

    def both() -> None:
        torch.index_select(x, 0, order, out=packed)
        dist.all_to_all_single(moved, packed)
        placed.copy_(moved)

    return {"all-to-all + gather + copy": both}


def calls(ep: ty.ExpertParallel, tokens: int) -> dict[str, Callable[[], Any]]:
    """Kinds of calls by name."""
    torch.manual_seed(ep.rank)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    picks = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP).indices
    weights = torch.rand(tokens, TOP, device="cuda")
    flat = ep.dispatch(x, picks, weights)
    major = ep.dispatch(x, picks, weights, layout=ty.Layout.EXPERT_MAJOR)
    return {
        "fresh FLAT": lambda: ep.dispatch(x, picks, weights),
        "fresh FLAT static": lambda: ep.dispatch(x, picks, weights, exact=False),
        "fresh FLAT fp8": lambda: ep.dispatch(x, picks, weights, quantize=ty.Quantize.FP8),
        "fresh EXPERT_MAJOR": lambda: ep.dispatch(x, picks, weights, layout=ty.Layout.EXPERT_MAJOR),
        "cached FLAT": lambda: ep.dispatch(x, handle=flat.handle),
        "combine FLAT": lambda: ep.combine(flat.x, flat.handle),
        "combine EXPERT_MAJOR": lambda: ep.combine(major.x, major.handle),
    }


def report(tokens: int) -> None:
    """The table for so many tokens; rank 0 prints it."""
    device, first = torch.device("cuda", torch.cuda.current_device()), dist.get_rank() == 0
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOP}
    options: dict[str, Any] = {"engine": "collective", "device": device}
    options |= {"max_tokens_per_rank": tokens, **sizes}
    rows: dict[str, list[str]] = {}
    for way in (True, False):
        collective.ON_GPUS = way
        with ty.ExpertParallel(dist.group.WORLD, **options) as ep, torch.no_grad():
            if way and first:
                print(f"{tokens} tokens, {ep.world_size} ranks; {ep.why}")
            for name, call in calls(ep, tokens).items():
                took = microseconds(call)
                launches, waits, names = counted(call)
                rows.setdefault(name, []).append(f"{took:9.1f} us {launches:4} {waits:3}")
                if way and first and name in ("fresh FLAT", "combine FLAT"):
                    print(f"  {name} launches: {', '.join(each[:40] for each in names)}")
    least = {name: microseconds(call) for name, call in baselines(tokens).items()}
    if first:
        print(f"  {'':26} {'kernels: time, launches, waits':>32} {'torch':>24}")
        for name, both in rows.items():
            print(f"  {name:26} {both[0]:>32} {both[1]:>24}")
        for name, took in least.items():
            print(f"  {name:26} {took:20.1f} us")


def main(sizes: list[int]) -> None:
    """A process per GPU."""
    if not torch.cuda.device_count():
        sys.exit("collective_host needs a CUDA device, and there is none")
    on_each_gpu(report, sizes)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [128, 4096])
