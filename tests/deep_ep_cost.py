"""Host time that ``tokenyard.deep_ep`` adds to a native call: ``python tests/deep_ep_cost.py [DEVICE]`` (default: cpu).

The native objects are replaced by ones that answer at once with what the real ones answered; one rank. Prints microseconds of
thread time, the best of 40 rounds, so that other processes hardly count.
"""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard import deep_ep

ROUNDS, CALLS = 40, 500


class Answers:
    """A native object that has one answer for each kind of call."""

    def __init__(self, real: ty.ExpertParallel) -> None:
        self.rank, self.world_size, self.config, self.engine = real.rank, real.world_size, real.config, real.engine
        self.real = real
        self.received: dict[ty.Layout | None, Any] = {}
        self.combined: dict[bool, Any] = {}

    def dispatch(self, x: Any, topk_idx: Any = None, weights: Any = None, *, layout: Any = None, **options: Any) -> Any:
        if layout not in self.received:
            self.received[layout] = self.real.dispatch(x, topk_idx, weights, layout=layout, **options)
        return self.received[layout]

    def combine(self, x: Any, handle: Any, *, reduce_weights: Any = None, **options: Any) -> Any:
        key = reduce_weights is not None
        if key not in self.combined:
            self.combined[key] = self.real.combine(x, handle, reduce_weights=reduce_weights, **options)
        return self.combined[key]


def microseconds(call: Callable[[], Any]) -> float:
    for _ in range(CALLS):
        call()
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS, timer=time.thread_time)) / CALLS * 1e6


def main(device: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    buffer = deep_ep.Buffer(group)
    idx, weights = torch.tensor([[0, 1], [1, -1]], device=device), torch.rand(2, 2, device=device)
    x = torch.randn(2, 256, dtype=torch.bfloat16, device=device)

    def layout() -> Any:
        return buffer.get_dispatch_layout(idx, 4)

    per_rank, _, per_expert, in_ranks, _ = layout()
    known = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_ranks, "num_tokens_per_expert": per_expert}
    known |= {"topk_idx": idx, "topk_weights": weights}
    buffer.dispatch(x, **known)
    buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
    natives: Any = buffer._natives
    for sizes, real in natives._normal.items():
        natives._normal[sizes] = Answers(real)
    low = Answers(natives.all_low_latency()[0])
    natives.low_latency = lambda sizes: low
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, **known)
    rows, _, padded, _, _ = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
    calls: dict[str, Callable[[], Any]] = {
        "get_dispatch_layout": layout,
        "dispatch": lambda: buffer.dispatch(x, **known),
        "dispatch, asynchronous": lambda: buffer.dispatch(x, **known, async_finish=True),
        "cached dispatch": lambda: buffer.dispatch(x, handle),
        "combine": lambda: buffer.combine(recv_x, handle),
        "combine with weights": lambda: buffer.combine(recv_x, handle, recv_weights),
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False),
        "low_latency_combine": lambda: buffer.low_latency_combine(rows, idx, weights, padded),
    }
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for name, call in calls.items():
                print(f"{name:24}{'autograd on' if grad else '':14}{microseconds(call):6.1f} us")
    for real in (low, *natives._normal.values()):
        real.real.close()
    natives._normal.clear()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
