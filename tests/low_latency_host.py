"""What a call of engine low_latency does on the host once its kind is known. Reached through ``nvlink_pool.py``.

``python tests/low_latency_host.py`` prints the host time of native calls without a GPU (launches do nothing, tensors on the CPU):
microseconds of thread time, the best of 200 rounds, so that other processes hardly count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import tokenyard as ty
from tokenyard.config import Config
from tokenyard.engines.low_latency import LowLatencyEngine
from tokenyard.engines.low_latency_ground import Shape
from tokenyard.handle import Spec
from tokenyard.memory.base import Region
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Layout, Quantize

RANKS, TOKENS, TOP, EXPERTS, HIDDEN = 2, 4, 2, 6, 256
LOCAL, ROWS = EXPERTS // RANKS, EXPERTS // RANKS * RANKS * TOKENS


class Idle:
    """Memory whose launches do nothing."""

    rank, world_size, num_sms, device = 0, RANKS, 4, torch.device("cpu")

    def __init__(self) -> None:
        self.bound = 0

    def allocate(self, num_bytes: int) -> Region:
        return Region(torch.empty(16, dtype=torch.uint8), torch.zeros(RANKS, dtype=torch.int64))

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def tensors(self) -> Any:
        return nullcontext()

    def bind(self, *_: Any, **__: Any) -> Callable[..., None]:
        self.bound += 1
        return lambda *_: None

    def gate(self) -> None: ...

    def settle(self) -> None: ...

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        return ready()

    def close(self) -> None: ...


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def engine_on(memory: Any) -> LowLatencyEngine:
    config = Config(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOP, max_tokens_per_rank=TOKENS, rank=0, world_size=RANKS, timeout=5.0
    )  # fmt: skip
    return LowLatencyEngine(config, memory, Stats.zeros(0, RANKS), Shape(programs=4), None)


def counted(call: Callable[[], Any]) -> dict[str, int]:
    with Operations() as operations:
        call()
    return dict(operations.seen)


def few_operations() -> None:
    """A known kind of call makes the tensors of its result (one from numpy) and nothing else, and loads no kernel."""
    memory = Idle()
    engine = engine_on(memory)
    x, idx, weights = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, TOP).long(), torch.ones(TOKENS, TOP)
    padded, major = Spec(layout=Layout.EXPERT_PADDED, exact=False), Spec(layout=Layout.EXPERT_MAJOR, exact=False)

    def dispatch(*arguments: Any, **options: Any) -> Any:
        return engine.dispatch(Payload(x, None), *arguments, **options)

    _, plan, _ = dispatch(idx, None, padded, Quantize.FP8)
    rows = torch.ones(ROWS, HIDDEN).bfloat16()
    calls: list[tuple[int, Callable[[], Any]]] = [
        (7, lambda: dispatch(idx, None, padded, Quantize.FP8)),
        (7, lambda: dispatch(idx.int(), weights, padded, None)),
        (7, lambda: dispatch(idx, weights, major, None)),
        (7, lambda: dispatch(idx, None, padded, Quantize.FP8, in_two=True)()),
        (0, lambda: engine.combine(rows, plan, padded, weights=weights)),
        (0, lambda: engine.combine(rows, plan, padded, bias=(x,), in_two=True)()),
    ]
    for tensors, call in calls:
        call()
        loaded = memory.bound
        seen = counted(call)
        seen.pop("_to_copy", None)  # the test's own
        assert seen == ({"empty_like": tensors, "lift_fresh": 1} if tensors else {"new_empty": 1}), seen
        assert memory.bound == loaded
    assert engine.stats.calls == {"dispatch": 9, "combine": 4}
    assert engine.stats.rows_sent == [0] * RANKS and all(wait != wait for wait in engine.stats.last_wait)


def shapes_and_numbers() -> None:
    """Results are dense whatever their sizes, of the mode that they are made in, and each has a number of its own."""
    engine = engine_on(Idle())
    x, idx = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, TOP).int()
    padded = Spec(layout=Layout.EXPERT_PADDED, exact=False)
    none = Spec(layout=Layout.EXPERT_MAJOR, exact=False, capacity=0)
    for inference in (True, False):
        for spec, shape in ((padded, (LOCAL, RANKS * TOKENS)), (none, (0,))):
            with torch.inference_mode(inference):
                rows, plan, arrived = engine.dispatch(Payload(x, None), idx, None, spec, Quantize.FP8_UE8M0)
            assert rows.x.shape == (*shape, HIDDEN) and rows.scales.shape == (*shape, 1)
            assert arrived.source.shape == shape and rows.scales.dtype == torch.int32
            for tensor in (*rows, *plan, *arrived):
                assert tensor.stride() == torch.empty(tensor.shape).stride()
                assert inference or not tensor.is_inference()
            assert not plan.returns.is_inference()  # shared by all calls
    assert int(plan.splits[-1]) == 4


def tags() -> None:
    """Ranks in unlike calls do not take each other for partners."""
    engine: Any = engine_on(Idle())
    kinds = engine._kinds
    x, rows = torch.ones(TOKENS, HIDDEN), torch.ones(ROWS, HIDDEN)
    specs = [Spec(layout=Layout.EXPERT_PADDED, exact=False)] + [
        Spec(layout=Layout.EXPERT_MAJOR, exact=False, expert_alignment=alignment, capacity=capacity)
        for alignment in (1, 8)
        for capacity in (None, 16)
    ]
    seen = [
        tag
        for spec in specs
        for mode in (None, *Quantize)
        for tag in kinds.dispatch(Payload(x.bfloat16(), None), spec, mode).tags
    ]
    for dtype in (torch.bfloat16, torch.float16):
        seen += [
            kinds.combine(rows.to(dtype), spec).tag(at_owner, number)
            for spec in specs
            for at_owner in (False, True)
            for number in (1, 2, 300)
        ]
    assert len(set(seen)) == len(seen) and min(seen) > 0 and max(seen) < 2**24


class Alone:
    """A group of one rank whose memory does nothing."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def open_store(self) -> dist.Store:
        return dist.HashStore()

    def open_memory(self, timeout: float) -> Any:
        return Idle()


def best(call: Callable[[], Any], rounds: int = 200, number: int = 50) -> float:
    """Microseconds of a call."""
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(number):
            call()
        seconds.append(time.thread_time() - start)
    return min(seconds) / number * 1e6


def main() -> None:
    ep: Any = ty.ExpertParallel(
        Alone(), num_experts=8, hidden=32, num_topk=8, max_tokens_per_rank=16, engine="low_latency"
    )
    x, idx, weights = torch.ones(16, 32).bfloat16(), torch.arange(8).repeat(16, 1), torch.ones(16, 8)
    asked: Any = {"layout": ty.Layout.EXPERT_PADDED, "exact": False, "quantize": ty.Quantize.FP8}
    handle, back = ep.dispatch(x, idx, **asked).handle, {"weighted": True, "topk_weights": weights}
    rows, waits = torch.ones(8, 16, 32).bfloat16(), ty.CallOptions(waits=torch.zeros(1, dtype=torch.int64))

    def hooked(call: Any, *arguments: Any, **options: Any) -> None:
        call(*arguments, **options, return_hook=True).hook()

    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: ep.dispatch(x, idx, **asked),
        "dispatch, waits": lambda: ep.dispatch(x, idx, **asked, options=waits),
        "dispatch, hook": lambda: hooked(ep.dispatch, x, idx, **asked),
        "combine": lambda: ep.combine(rows, handle, **back),
        "combine, waits": lambda: ep.combine(rows, handle, **back, options=waits),
        "combine, hook": lambda: hooked(ep.combine, rows, handle, **back),
    }
    with torch.no_grad():
        for name, call in calls.items():
            print(f"{name:20}{best(call):8.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
