"""The suite ``low_latency``: decoding. Dispatch and combine of small batches in CUDA graphs, beside
what NCCL has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from benchmarks.batches import DeviceTruth, make_batches
from benchmarks.clock import QueuedClock
from benchmarks.record import Line
from tokenyard.cli.progress import Counter, advance
from tokenyard.testing.baselines import all_gather, reduce_scatter
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Batch, failure
from tokenyard.testing.compare import assert_same_bits
from tokenyard.testing.timing import on_ranks, slowest_rank

_cuda: Any = torch.cuda

PAIR, DISPATCH, COMBINE = "dispatch and combine", "dispatch", "combine"
PARTS = ("dispatch, sending", "dispatch, receiving", "combine, sending", "combine, receiving")
NCCL = "all-gather FP8, reduce-scatter BF16"
ENGINES = ("low_latency", "nvlink")
BAR_US, BAR_TOKENS, BAR_RANKS = 40.0, 128, 4
"""What a pair may take, for so many tokens on each of so many ranks."""
HEAD_START_US = 1000.0
"""Longer than the host takes to launch a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """What to measure. Defaults are the sizes of the record.

    Attributes:
        tokens: batch sizes per rank.
        calls: pairs, dispatches or combines in a graph; its time is divided by them.
        parts_tokens: of the calls in two launches.
    """

    tokens: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 1024)
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    calls: int = 12
    iterations: int = 20
    warmup: int = 3
    seed: int = 0
    parts_tokens: int = 128

    @property
    def stages(self) -> list[str]:
        """What a rank does, one after the other, in words."""
        return [
            f"{tokens} tokens: {part}"
            for tokens in self.tokens
            for part in ("checking and capturing", "timing")
        ]

    def case(self, tokens: int, engine: str = "") -> Case:
        sizes = (tokens, self.hidden, self.topk, self.experts)
        return Case(*sizes, layout="expert_major", quantize="fp8", engine=engine)


Probe = tuple[Line, Callable[[], float]]
"""A line without times, and what takes the time of one call."""


class Calls:
    """Decoding calls of one object: static shapes, FP8 cast in the send, expert-major rows,
    weighted sums on the way back.
    """

    def __init__(self, ep: ty.ExpertParallel, batches: Sequence[Batch]) -> None:
        self._ep, self._batches, self.symmetric_bytes = ep, batches, ep.buffer_bytes
        self._received = [self.dispatch(number) for number in range(len(batches))]
        self._rows = [recv.x.to(torch.bfloat16) for recv in self._received]

    def dispatch(self, number: int, **options: Any) -> ty.Received:
        batch = self._batches[number % len(self._batches)]
        return self._ep.dispatch(
            batch.x,
            *batch.picks,
            layout=ty.Layout.EXPERT_MAJOR,
            exact=False,
            quantize=ty.Quantize.FP8,
            **options,
        )

    def combine(self, number: int, recv: ty.Received | None = None, **options: Any) -> Any:
        number %= len(self._batches)
        handle = (recv or self._received[number]).handle
        return self._ep.combine(self._rows[number], handle, weighted=True, **options)

    def pair(self, number: int) -> None:
        self.combine(number, self.dispatch(number))

    def check(self) -> None:
        """Compare a pair of each input with the truth, bit for bit; and see that no rank was left
        out: it would cost nothing.
        """
        for number, batch in enumerate(self._batches):
            truth = DeviceTruth.of(batch)
            recv = self.dispatch(number)
            rows = truth.by_expert
            data: Any = truth.quantized.data.view(torch.uint8)
            assert_same_bits(recv.x.view(torch.uint8)[: len(rows)], data[rows], what="x")
            assert recv.scales is not None, "scales are missing"
            assert_same_bits(recv.scales[: len(rows)], truth.quantized.scales[rows], what="scales")
            y = self._ep.combine(recv.x.to(torch.bfloat16), recv.handle, weighted=True)
            assert_same_bits(y, _summed(batch, truth), what="combined")
        if self._ep.engine == "low_latency":
            assert all(self._ep.active_ranks), f"ranks were left out: {self._ep.active_ranks}"
        self._ep.check()


def _summed(batch: Batch, truth: DeviceTruth) -> Tensor:
    """What a weighted combine of the FP8 payload gives: per rank in pick order, rounded, then by
    rank.
    """
    size, tokens = batch.topk_idx.shape[:2]
    rows = (
        truth.quantized.data[batch.rank * tokens : (batch.rank + 1) * tokens]
        .to(torch.bfloat16)
        .float()
    )
    idx, weights = batch.topk_idx[batch.rank], batch.topk_weights[batch.rank]
    share = batch.experts // size
    total = torch.zeros_like(rows)
    for rank in range(size):
        part = torch.zeros_like(rows)
        for pick in range(idx.shape[1]):
            here = (idx[:, pick] >= 0) & (idx[:, pick] // share == rank)
            part += torch.where(here[:, None], rows * weights[:, pick, None], 0.0)
        total += part.to(torch.bfloat16).float()
    return total.to(torch.bfloat16)


def run_decode(device: torch.device, suite: Decode, counter: Counter | None = None) -> list[Line]:
    """Be one rank: measure everything. Collective; the lines are the same on every rank.
    ``counter``: of ``suite.stages``.
    """
    if suite.experts % dist.get_world_size():
        raise ValueError(
            f"experts ({suite.experts}) must be a multiple of the ranks ({dist.get_world_size()})"
        )
    lines: list[Line] = []
    for tokens in suite.tokens:
        batches = make_batches(suite.case(tokens), device, suite.seed)
        lines += _size(suite, tokens, batches, device, counter)
        torch.cuda.empty_cache()
    return lines


def _size(
    suite: Decode, tokens: int, batches: list[Batch], device: torch.device, counter: Counter | None
) -> list[Line]:
    """One batch size: every probe checked, then all timed in turn."""
    probes: list[Probe] = []
    wrong: list[Line] = []
    made: list[tuple[ty.ExpertParallel, Calls]] = []
    for engine in ENGINES:
        case = suite.case(tokens, engine)
        ep = ty.ExpertParallel(**case.sizes, engine=engine, device=device)
        calls = Calls(ep, batches)
        made.append((ep, calls))
        line = partial(line_for, case, symmetric_bytes=calls.symmetric_bytes)
        if error := failure(calls.check, engine, 0, device):
            wrong.append(line(PAIR, error=error))
            continue
        kinds = ((PAIR, calls.pair), (DISPATCH, calls.dispatch), (COMBINE, calls.combine))
        probes += [(line(what), _graph(suite, call)) for what, call in kinds]
        if engine == "low_latency" and tokens == suite.parts_tokens:
            probes += [(line(what), partial(_part, calls, at)) for at, what in enumerate(PARTS)]
    probes.append((line_for(suite.case(tokens), PAIR), _graph(suite, _nccl(batches))))
    advance(counter)
    lines = _time(suite, probes, device)
    advance(counter)
    for ep, calls in made:  # again: a rank that fell silent meanwhile would have cost nothing
        if error := failure(calls.check, f"{ep.engine}, afterwards", 0, device):
            lines = [
                replace(line, device_us=None, wall_us=[], error=error)
                if line.case.engine == ep.engine
                else line
                for line in lines
            ]
        ep.close()
    return [*lines, *wrong]


def line_for(case: Case, what: str, **known: Any) -> Line:
    """A line of an engine, or of NCCL."""
    return Line(
        case=case, name=case.engine or NCCL, phase=what, kind=what, ours=bool(case.engine), **known
    )


def _nccl(batches: list[Batch]) -> Callable[[int], object]:
    """Everybody's rows to everybody, and sums of everybody's rows back."""
    size = dist.get_world_size()
    tokens, hidden = batches[0].x.shape
    raw = [batch.x.view(torch.uint8) for batch in batches]
    sent = [
        torch.cat([each[:, :hidden], each[:, : hidden // 32]], 1) for each in raw
    ]  # as long as FP8 rows with their scales
    gathered = sent[0].new_empty(size * tokens, sent[0].shape[1])
    sums = [batch.x.repeat(size, 1) for batch in batches]
    reduced = torch.empty_like(batches[0].x)

    def pair(number: int) -> None:
        all_gather(gathered, sent[number % len(sent)])
        reduce_scatter(reduced, sums[number % len(sums)])

    return pair


def _graph(suite: Decode, call: Callable[[int], object]) -> Callable[[], float]:
    """Capture ``suite.calls`` calls; a function that replays them and returns microseconds of one.
    Collective.
    """
    for number in range(3):
        call(number)
    torch.cuda.synchronize()
    graph = _cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(suite.calls):
            call(number)
    return lambda: _elapsed(graph.replay) / suite.calls


def _elapsed(run: Callable[[], object]) -> float:
    """Microseconds of the GPU, ranks aligned there and launches queued before it gets to them.
    Collective.
    """
    return QueuedClock(torch.device("cuda"), HEAD_START_US).time_queued(lambda _: run(), 0)


def _part(calls: Calls, which: int) -> float:
    """Microseconds of one of the four launches of a pair in two, the bytes of its sending part
    having arrived.
    """
    recv = calls.dispatch(0, return_hook=True) if which else None
    if recv is None:
        kept: list[ty.Received] = []
        spent = _elapsed(lambda: kept.append(calls.dispatch(0, return_hook=True)))
        kept[0].hook()
        return spent
    if which == 1:
        return _elapsed(recv.hook)
    recv.hook()
    held: list[Any] = []
    spent = _elapsed(lambda: held.append(calls.combine(0, recv, return_hook=True)))
    after = _elapsed(held[0].hook)
    return spent if which == 2 else after


def _time(suite: Decode, probes: Sequence[Probe], device: torch.device) -> list[Line]:
    """The lines with times: every round times each probe once, in changing order."""
    order, shuffled = list(range(len(probes))), random.Random(suite.seed)
    times = torch.zeros(len(probes), suite.iterations, dtype=torch.float64)
    for turn in range(-suite.warmup, suite.iterations):
        shuffled.shuffle(order)
        on_ranks(0, device)
        for at in order:
            spent = probes[at][1]()
            if turn >= 0:
                times[at, turn] = spent
    slowest: Any = slowest_rank(times, device)
    found = zip(probes, slowest.tolist(), strict=True)
    return [replace(line, device_us=spent) for (line, _), spent in found]
