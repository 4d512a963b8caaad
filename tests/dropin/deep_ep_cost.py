"""Host time that ``tokenyard.deep_ep`` adds to a native call: ``python tests/run.py deep_ep_cost
[DEVICE]`` (default: cpu).

Each call is made through the layer and, with the same arguments, of the native object itself:
asynchronous ones beside asynchronous ones, each with the wait of the caller's stream (on a CPU,
where the layer's are over when they return, beside synchronous ones). One rank, and engines that
answer at once with what they answered first. Prints microseconds of thread time, the best of 40
rounds in which both take turns, so that other processes hardly count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard import deep_ep
from tokenyard.deep_ep import token_layout

ROUNDS, CALLS = 40, 200
EXPERTS, TOKENS, TOP, HIDDEN = 64, 2, 2, 256

Call = Callable[[], Any]


class Cost(NamedTuple):
    """Microseconds of a call through the layer, and of the native call (None: there is none)."""

    layer: float
    native: float | None


class Rest:
    """What is left of a call in two, already known."""

    def __init__(self, rest: Any) -> None:
        self._ahead, self._result = rest.ahead(), rest()

    def ahead(self) -> Any:
        return self._ahead

    def __call__(self) -> Any:
        return self._result


class Answers:
    """An engine that has one answer for each kind of call."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._known: dict[tuple[Any, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def dispatch(self, given: Any) -> Any:
        return self._answer("dispatch", given, given.in_two)

    def redispatch(self, given: Any) -> Any:
        return self._answer("redispatch", given, False)

    def combine(self, given: Any) -> Any:
        return self._answer("combine", given, given.in_two, given.reduce_weights is None)

    def _answer(self, method: str, given: Any, in_two: bool, *more: bool) -> Any:
        key = (method, given.spec, in_two, getattr(given, "raw", False), *more)
        if key not in self._known:
            result = getattr(self._real, method)(given)
            self._known[key] = Rest(result) if in_two else result
        return self._known[key]


def measure(
    calls: dict[str, tuple[Call, Call | None]], rounds: int, number: int
) -> dict[str, Cost]:
    """Best time of each call through the layer and of its native one, of ``number`` calls at a
    time.
    """
    costs: dict[str, Cost] = {}
    for name, pair in calls.items():
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for at, call in enumerate(pair):
                best[at] = (
                    best[at]
                    if call is None
                    else min(best[at], _seconds(call, number) / number * 1e6)
                )
        costs[name] = Cost(best[0], None if pair[1] is None else best[1])
    return costs


def _seconds(call: Call, number: int) -> float:
    start = time.thread_time()
    for _ in range(number):
        call()
    return time.thread_time() - start


class Bench:
    """A buffer of one rank whose native objects answer at once, and all calls that are measured."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.buffer: Any = deep_ep.Buffer(group)
        random = torch.Generator().manual_seed(0)
        self.idx = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP, 1).indices.to(device)
        self.weights = torch.rand(TOKENS, TOP, device=device)
        self.x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
        per_rank, _, per_expert, in_ranks, _ = self.buffer.get_dispatch_layout(self.idx, EXPERTS)
        self.routing = None, per_rank, None, in_ranks, per_expert, self.idx, self.weights
        self.gpu = device.type == "cuda"
        handle = self.buffer.dispatch(self.x, *self.routing)[4]
        padded = self.buffer.low_latency_dispatch(self.x, self.idx, TOKENS, EXPERTS, use_fp8=False)[
            2
        ]
        natives: Any = self.buffer._natives
        self.objects: list[Any] = [*natives._normal.values(), *natives.all_low_latency()]
        for made in self.objects:
            made._calls.engine = Answers(made._calls.engine)
        self.normal: Any = handle.ep
        self.low: Any = padded.ep
        natives._low = {
            sizes: turns._replace(turns=iter(lambda: self.low, None))
            for sizes, turns in natives._low.items()
        }

    def calls(self) -> dict[str, tuple[Call, Call | None]]:
        """By name: through the layer, and native."""
        return (
            {
                "get_dispatch_layout": (
                    lambda: self.buffer.get_dispatch_layout(self.idx, EXPERTS),
                    None,
                )
            }
            | {
                name + more: pair
                for later, more in ((False, ""), (True, ", asynchronous"))
                for name, pair in (self._normal_calls(later) | self._low_calls(later)).items()
            }
            | self._hooks()
        )

    def _normal_calls(self, later: bool) -> dict[str, tuple[Call, Call | None]]:
        buffer, ep, x, both = self.buffer, self.normal, self.x, later and self.gpu
        _, per_rank, _, in_ranks, per_expert, idx, weights = self.routing
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, *self.routing)
        native = ep.dispatch(x, idx, weights).handle

        def waited(result: Any) -> None:
            if later:
                result[-1].current_stream_wait()

        return {
            "dispatch": (
                lambda: waited(
                    buffer.dispatch(
                        x,
                        None,
                        per_rank,
                        None,
                        in_ranks,
                        per_expert,
                        idx,
                        weights,
                        async_finish=later,
                    )
                ),
                lambda: ep.dispatch(x, idx, weights, async_op=both).wait(),
            ),
            "cached dispatch": (
                lambda: waited(buffer.dispatch(x, handle, async_finish=later)),
                lambda: ep.dispatch(x, handle=native, async_op=both).wait(),
            ),
            "combine": (
                lambda: waited(buffer.combine(recv_x, handle, async_finish=later)),
                (lambda: ep.combine(recv_x, native, async_op=True).wait())
                if both
                else lambda: ep.combine(recv_x, native),
            ),
            "combine with weights": (
                lambda: waited(buffer.combine(recv_x, handle, recv_weights, async_finish=later)),
                lambda: ep.combine(
                    recv_x, native, reduce_weights=recv_weights, async_op=both
                ).wait(),
            ),
        }

    def _low_calls(self, later: bool) -> dict[str, tuple[Call, Call | None]]:
        buffer, ep, x, idx = self.buffer, self.low, self.x, self.idx
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False)
        weights, padded, both = self.weights, ty.Layout.EXPERT_PADDED, later and self.gpu
        native = ep.dispatch(x, idx, layout=padded, exact=False).handle

        def dispatch() -> None:
            event = buffer.low_latency_dispatch(
                x, idx, TOKENS, EXPERTS, use_fp8=False, async_finish=later
            )[3]
            if later:
                event.current_stream_wait()

        def combine() -> None:
            event = buffer.low_latency_combine(rows, idx, weights, handle, async_finish=later)[1]
            if later:
                event.current_stream_wait()

        def combine_native() -> None:
            result: Any = ep.combine(
                rows, native, weighted=True, topk_weights=weights, async_op=both
            )
            if both:
                result.wait()

        return {
            "low_latency_dispatch": (
                dispatch,
                lambda: ep.dispatch(x, idx, layout=padded, exact=False, async_op=both).wait(),
            ),
            "low_latency_combine": (combine, combine_native),
        }

    def _hooks(self) -> dict[str, tuple[Call, Call | None]]:
        buffer, ep, x, idx = self.buffer, self.low, self.x, self.idx
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, use_fp8=False)
        weights, padded, in_two = self.weights, ty.Layout.EXPERT_PADDED, ep.engine == "low_latency"
        native = ep.dispatch(x, idx, layout=padded, exact=False, return_hook=in_two)
        native.hook()

        def combine_native() -> None:
            out = torch.empty_like(x) if in_two else None
            result: Any = ep.combine(
                rows,
                native.handle,
                weighted=True,
                topk_weights=weights,
                out=out,
                return_hook=in_two,
            )
            if in_two:
                result.hook()

        return {
            "low_latency_dispatch, hook": (
                lambda: buffer.low_latency_dispatch(
                    x, idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
                )[4](),
                lambda: ep.dispatch(x, idx, layout=padded, exact=False, return_hook=in_two).hook(),
            ),
            "low_latency_combine, hook": (
                lambda: buffer.low_latency_combine(
                    rows, idx, weights, handle, return_recv_hook=True
                )[2](),
                combine_native,
            ),
        }

    def close(self) -> None:
        for made in self.objects:
            made.close()


def report(costs: dict[str, Cost]) -> str:
    """A line for each call."""
    return "\n".join(
        f"{name:36}{cost.layer:8.1f}"
        + (
            " " * 16
            if cost.native is None
            else f"{cost.native:8.1f}{cost.layer - cost.native:+8.1f}"
        )
        for name, cost in costs.items()
    )


def on_device(call: Call, number: int = 20) -> float:
    """Microseconds that the GPU takes for a call: ``number`` of them in a CUDA graph, the best of
    10 replays.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(number):
            call()
    best = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / number * 1e3)
    return best


def main(device: str) -> None:
    here = (
        torch.device("cuda", torch.cuda.current_device())
        if device == "cuda"
        else torch.device(device)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(dist.group.WORLD, here)
    print(
        f"engines {bench.normal.engine}, {bench.low.engine}; microseconds: through the layer, "
        f"native, added"
    )
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            times = report(measure(bench.calls(), ROUNDS, CALLS))
            print(f"autograd {'on' if grad else 'off'}\n{times}")
    bench.close()
    dist.destroy_process_group()
    if bench.gpu:
        for tokens in (128, 4096):
            idx = torch.rand(tokens, 256, device=here).topk(8, 1).indices
            kernel, plain = (
                on_device(partial(each, idx, 256, 8))
                for each in (token_layout.layout, token_layout.by_torch)
            )
            print(f"layout of {tokens} tokens on the GPU: {kernel:.1f} us, by torch {plain:.1f} us")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
