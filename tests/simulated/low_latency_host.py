"""What a call of engine low_latency does on the host once its signature is known. Reached through
``nvlink_pool.py``.

``python tests/run.py low_latency_host`` prints the host time of native calls, and of the drop-in's,
without a GPU (launches do nothing, tensors on the CPU): microseconds of thread time, the best of
200 rounds, so that other processes hardly count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from operations import counted
from tokenyard import deep_ep
from tokenyard.calls import Calls, DispatchRequest
from tokenyard.config import Config
from tokenyard.deep_ep import decode
from tokenyard.engines.base import CallOptions, CombineArguments, DispatchArguments
from tokenyard.engines.low_latency import LowLatencyEngine
from tokenyard.engines.low_latency_workspace import LowLatencyTuning
from tokenyard.handle import Spec
from tokenyard.memory.symmetric import Region
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Layout, Quantize
from tokenyard.validation import Validation

RANKS, TOKENS, TOP, EXPERTS, HIDDEN = 2, 4, 2, 6, 256
LOCAL, ROWS = EXPERTS // RANKS, EXPERTS // RANKS * RANKS * TOKENS


class Idle:
    """Memory whose launches do nothing."""

    rank, world_size, num_sms, device = 0, RANKS, 4, torch.device("cpu")

    early, ranks_per_node = True, 0

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


def engine_on(memory: Any) -> LowLatencyEngine:
    config = Config(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        num_topk=TOP,
        max_tokens_per_rank=TOKENS,
        rank=0,
        world_size=RANKS,
        timeout=5.0,
    )
    return LowLatencyEngine(
        config, memory, Stats.zeros(0, RANKS), LowLatencyTuning(programs=4), None
    )


def no_second_half_behind_close() -> None:
    """A hook that comes too late raises, and launches nothing into memory that is gone."""
    memory = Idle()
    engine = engine_on(memory)
    calls = Calls(engine.config, engine, memory.device)
    x, idx = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, TOP).long()
    when = Validation(calls, memory.device, 1 << 40).when(False, None, True, None, False)
    spec = Spec(layout=Layout.EXPERT_PADDED, exact=False)
    asked = DispatchRequest(Payload(x, None), idx, None, spec, None, None, False, when)
    recv = calls.dispatch(asked)
    calls.close()
    bound = memory.bound
    with pytest.raises(RuntimeError, match="this ExpertParallel is closed"):
        recv.hook()
    assert memory.bound == bound


def few_operations() -> None:
    """A call of a known signature makes the tensors of its result (one from numpy) and nothing
    else, and loads no kernel.
    """
    memory = Idle()
    engine = engine_on(memory)
    x, idx, weights = (
        torch.ones(TOKENS, HIDDEN).bfloat16(),
        torch.zeros(TOKENS, TOP).long(),
        torch.ones(TOKENS, TOP),
    )
    padded, major = (
        Spec(layout=Layout.EXPERT_PADDED, exact=False),
        Spec(layout=Layout.EXPERT_MAJOR, exact=False),
    )

    def dispatch(*arguments: Any, **options: Any) -> Any:
        return engine.dispatch(DispatchArguments(Payload(x, None), *arguments, **options))

    columns = CallOptions(scales_by_column=True)
    _, plan, _ = dispatch(idx, None, padded, Quantize.FP8)
    rows = torch.ones(ROWS, HIDDEN).bfloat16()
    calls: list[tuple[int, Callable[[], Any]]] = [
        (7, lambda: dispatch(idx, None, padded, Quantize.FP8)),
        (7, lambda: dispatch(idx.int(), weights, padded, None)),
        (7, lambda: dispatch(idx, weights, major, None)),
        (7, lambda: dispatch(idx, None, padded, Quantize.FP8, in_two=True)()),
        (6, lambda: dispatch(idx, None, padded, Quantize.FP8, options=columns)),
        (0, lambda: engine.combine(CombineArguments(rows, plan, padded, weights=weights))),
        (0, lambda: engine.combine(CombineArguments(rows, plan, padded, bias=(x,), in_two=True))()),
    ]
    for tensors, call in calls:
        call()
        loaded = memory.bound
        seen = counted(call)
        seen.pop("_to_copy", None)  # the test's own
        assert seen.pop("new_empty_strided", 0) == (tensors == 6)
        assert seen == (
            {"empty_like": tensors, "lift_fresh": 1} if tensors else {"new_empty": 1}
        ), seen
        assert memory.bound == loaded
    assert engine.stats.calls == {"dispatch": 11, "combine": 4}
    assert engine.stats.rows_sent == [0] * RANKS and all(
        wait != wait for wait in engine.stats.last_wait
    )


def shapes_and_numbers() -> None:
    """Results are dense whatever their sizes, of the mode that they are made in, and each has a
    number of its own.
    """
    engine = engine_on(Idle())
    x, idx = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, TOP).int()
    padded = Spec(layout=Layout.EXPERT_PADDED, exact=False)
    none = Spec(layout=Layout.EXPERT_MAJOR, exact=False, capacity=0)
    columns = CallOptions(scales_by_column=True)
    for mode, strides in (
        (Quantize.FP8, (2 * RANKS * TOKENS, 1, RANKS * TOKENS)),
        (Quantize.FP8_UE8M0, (RANKS * TOKENS, 1, 1)),
    ):
        rows, _, _ = engine.dispatch(
            DispatchArguments(Payload(x, None), idx, None, padded, mode, options=columns)
        )
        assert rows.scales.stride() == strides
    for inference in (True, False):
        for spec, shape in ((padded, (LOCAL, RANKS * TOKENS)), (none, (0,))):
            with torch.inference_mode(inference):
                rows, plan, arrived = engine.dispatch(
                    DispatchArguments(Payload(x, None), idx, None, spec, Quantize.FP8_UE8M0)
                )
            assert rows.x.shape == (*shape, HIDDEN) and rows.scales.shape == (*shape, 1)
            assert arrived.source.shape == shape and rows.scales.dtype == torch.int32
            for tensor in (*rows, *plan, *arrived):
                assert tensor.stride() == torch.empty(tensor.shape).stride()
                assert inference or not tensor.is_inference()
            assert not plan.returns.is_inference()  # shared by all calls
    assert int(plan.splits[-1]) == 6


def tags() -> None:
    """Ranks in unlike calls do not take each other for partners."""
    engine: Any = engine_on(Idle())
    signatures = engine._signatures
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
        for tag in signatures.dispatch(Payload(x.bfloat16(), None), spec, mode).tags
    ]
    for dtype in (torch.bfloat16, torch.float16):
        seen += [
            signatures.combine(rows.to(dtype), spec).tag(at_owner, number)
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

    def open_memory(self, timeout: float, members: Any = None) -> Any:
        return Idle()


def drop_in_adds_no_operation() -> None:
    """Of torch, beyond those of the native call; by column or not, with statistics or not, in one
    launch or in two.
    """
    buffer: Any = deep_ep.Buffer(Alone())  # pyright: ignore[reportArgumentType]
    x, idx, weights = (
        torch.ones(3, HIDDEN).bfloat16(),
        torch.zeros(3, TOP).int(),
        torch.ones(3, TOP),
    )
    counts, waits = torch.zeros(EXPERTS, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    statistics = ((None, None), (counts, None), (None, waits), (counts, waits))
    casts = {"use_fp8": False}, {}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}
    modes = None, Quantize.FP8, Quantize.FP8_POW2, Quantize.FP8_UE8M0
    for cast, mode in zip(casts, modes, strict=True):
        for loads, timed in statistics:
            for hooked in (False, True):
                _same_operations(buffer, x, idx, weights, loads, timed, hooked, cast, mode)


def _same_operations(
    buffer: Any,
    x: Any,
    idx: Any,
    weights: Any,
    loads: Any,
    waits: Any,
    hooked: bool,
    cast: dict[str, bool],
    mode: Any,
) -> None:
    """Of a dispatch and a combine, through the layer and natively."""

    def sent() -> Any:
        made = buffer.low_latency_dispatch(
            x, idx, TOKENS, EXPERTS, loads, waits, **cast, return_recv_hook=hooked
        )
        return (made[4]() if hooked else None, made)[1]

    sent()  # two objects take turns: what both work out once
    handle = sent()[2]
    ep, rows = handle.ep, buffer.get_next_low_latency_combine_buffer(handle)

    def sent_natively() -> None:
        options = CallOptions(loads=loads, waits=waits, scales_by_column=mode is not None)
        asked: Any = {
            "layout": Layout.EXPERT_PADDED,
            "exact": False,
            "quantize": mode,
            "options": options,
        }
        ep.dispatch(x, idx, **asked, return_hook=hooked).wait()

    def back(**more: Any) -> None:
        more["return_recv_hook"], more["combine_wait_recv_cost_stats"] = hooked, waits
        hook = buffer.low_latency_combine(rows, idx, weights, handle, **more)[2]
        assert (hook is not None) == hooked
        if hook is not None:
            hook()

    def back_natively(**more: Any) -> None:
        more["return_hook"], more["options"] = hooked, CallOptions(waits=waits)
        if hooked:  # to have the tensor before the hook
            more = {"out": x.new_empty(3, HIDDEN), **more}
        got: Any = ep.combine(rows, handle.native, weighted=True, topk_weights=weights, **more)
        if hooked:
            got.hook()

    assert (seen := counted(sent)) == (native := counted(sent_natively)), (
        cast,
        hooked,
        seen,
        native,
    )
    assert counted(back) == counted(lambda: back(zero_copy=True)) == counted(back_natively), hooked


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
        Alone(), num_experts=8, hidden=256, num_topk=8, max_tokens_per_rank=16, engine="low_latency"
    )
    x, idx, weights = (
        torch.ones(16, 256).bfloat16(),
        torch.arange(8).repeat(16, 1),
        torch.ones(16, 8),
    )
    asked: Any = {"layout": ty.Layout.EXPERT_PADDED, "exact": False, "quantize": ty.Quantize.FP8}
    handle, back = ep.dispatch(x, idx, **asked).handle, {"weighted": True, "topk_weights": weights}
    rows, waits = (
        torch.ones(8, 16, 256).bfloat16(),
        ty.CallOptions(waits=torch.zeros(1, dtype=torch.int64)),
    )
    buffer: Any = deep_ep.Buffer(Alone())  # pyright: ignore[reportArgumentType]
    counts = torch.zeros(8, dtype=torch.int32)
    known = buffer.low_latency_dispatch(x, idx, 16, 8)[2]

    def hooked(call: Any, *arguments: Any, **options: Any) -> None:
        call(*arguments, **options, return_hook=True).hook()

    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: ep.dispatch(x, idx, **asked),
        "dispatch, by column": lambda: ep.dispatch(x, idx, **asked, options=decode.BY_COLUMN),
        "dispatch, waits": lambda: ep.dispatch(x, idx, **asked, options=waits),
        "dispatch, hook": lambda: hooked(ep.dispatch, x, idx, **asked),
        "combine": lambda: ep.combine(rows, handle, **back),
        "combine, waits": lambda: ep.combine(rows, handle, **back, options=waits),
        "combine, hook": lambda: hooked(ep.combine, rows, handle, **back),
        "drop-in dispatch": lambda: buffer.low_latency_dispatch(x, idx, 16, 8),
        "drop-in dispatch, counts": lambda: buffer.low_latency_dispatch(x, idx, 16, 8, counts),
        "drop-in dispatch, hook": lambda: buffer.low_latency_dispatch(
            x, idx, 16, 8, return_recv_hook=True
        )[4](),
        "drop-in combine": lambda: buffer.low_latency_combine(rows, idx, weights, known),
        "drop-in combine, hook": lambda: buffer.low_latency_combine(
            rows, idx, weights, known, return_recv_hook=True
        )[2](),
    }
    with torch.no_grad():
        for name, call in calls.items():
            print(f"{name:26}{best(call):8.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
