"""The suite ``low_latency``: decoding. Dispatch and combine of small batches in CUDA graphs, beside
what NCCL has. The suite ``low_latency_nodes``: by puts, to GPUs that are as on another node, beside
stores to the same GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from benchmarks.batches import DeviceTruth, make_batches
from benchmarks.clock import QueuedClock
from benchmarks.record import Line
from benchmarks.twolevel_calls import NVSHMEM
from tokenyard.cli.consoles import say
from tokenyard.memory.nvshmem import PUTS_VARIABLE
from tokenyard.reference_sums import sum_ranks
from tokenyard.testing.baselines import all_gather, reduce_scatter
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Batch, failure
from tokenyard.testing.compare import assert_same_bits
from tokenyard.testing.timing import Clock, Timed, time_interleaved
from tokenyard.topology import Topology

_cuda: Any = torch.cuda

PAIR, DISPATCH, COMBINE = "dispatch and combine", "dispatch", "combine"
PARTS = ("dispatch, sending", "dispatch, receiving", "combine, sending", "combine, receiving")
NCCL = "all-gather FP8, reduce-scatter BF16"
ENGINES = ("low_latency", "nvlink")
BAR_US, BAR_TOKENS, BAR_RANKS = 40.0, 128, 4
"""What a pair may take, for so many tokens on each of so many ranks."""
PUTS_BAR_US, PUTS_BAR_GRID = 25.0, (2, 1)
"""What it may take more by puts, for as many tokens on such a grid."""
HEAD_START_US = 1000.0
"""Longer than the host takes to launch a call."""


class Way(NamedTuple):
    """An engine, and how its rows get to other nodes. ``once``: per node, or per rank; None: the
    grid has no difference.
    """

    engine: str
    puts: bool = False
    once: bool | None = None

    @property
    def name(self) -> str:
        crosses = {None: "", False: " once per rank", True: " once per node"}[self.once]
        return f"{self.engine}, puts{crosses}" if self.puts else self.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """What to measure. Defaults are the sizes of the record.

    Attributes:
        topology: of nodes between which rows are put; None: one node, and engine nvlink beside.
        replays: of a captured pair, every one compared, besides those that are timed.
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
    topology: tuple[int, int] | None = None
    replays: int = 0

    @property
    def ways(self) -> list[Way]:
        """Puts first: torch takes no memory from NVSHMEM after it has taken some from elsewhere."""
        if self.topology is None:
            return [Way(engine) for engine in ENGINES]
        levels = Topology(*self.topology).has_levels
        puts = [Way(ENGINES[0], True, once) for once in ((False, True) if levels else (None,))]
        return [*puts, Way(ENGINES[0])]

    def case(self, tokens: int, engine: str = "") -> Case:
        sizes = (tokens, self.hidden, self.topk, self.experts)
        return Case(
            *sizes, layout="expert_major", quantize="fp8", engine=engine, topology=self.topology
        )


Probe = tuple[Line, Callable[[], float]]
"""A line without times, and what takes the time of one call."""


class Calls:
    """Decoding calls of one object: static shapes, FP8 cast in the send, expert-major rows,
    weighted sums on the way back.
    """

    def __init__(
        self, ep: ty.ExpertParallel, batches: Sequence[Batch], per_node: int | None = None
    ) -> None:
        self.ep, self._batches, self._per_node = ep, batches, per_node
        self.symmetric_bytes = ep.buffer_bytes
        self._received = [self.dispatch(number) for number in range(len(batches))]
        self._rows = [recv.x.to(torch.bfloat16) for recv in self._received]

    def dispatch(self, number: int, **options: Any) -> ty.Received:
        batch = self._batches[number % len(self._batches)]
        return self._dispatched(batch.x, *batch.picks, **options)

    def _dispatched(self, *inputs: Tensor, **options: Any) -> ty.Received:
        static: dict[str, Any] = {
            "layout": ty.Layout.EXPERT_MAJOR,
            "exact": False,
            "quantize": ty.Quantize.FP8,
        }
        return self.ep.dispatch(*inputs, **static, **options)

    def combine(self, number: int, recv: ty.Received | None = None, **options: Any) -> Any:
        number %= len(self._batches)
        handle = (recv or self._received[number]).handle
        combine: Any = self.ep.combine
        return combine(self._rows[number], handle, weighted=True, **options)

    def pair(self, number: int) -> None:
        self.combine(number, self.dispatch(number))

    def there_and_back(self, *inputs: Tensor) -> tuple[ty.Received, Tensor]:
        """A pair whose combine has the rows that came."""
        recv = self._dispatched(*inputs)
        return recv, self.ep.combine(recv.x.to(torch.bfloat16), recv.handle, weighted=True)

    def _right(self, batch: Batch) -> dict[str, Tensor]:
        """Rows, scales and sums of :meth:`there_and_back`. Collective."""
        truth = DeviceTruth.of(batch)
        rows = truth.by_expert
        data: Any = truth.quantized.data.view(torch.uint8)
        sums = _summed(batch, truth, self._per_node)
        return {"x": data[rows], "scales": truth.quantized.scales[rows], "combined": sums}

    def check(self) -> None:
        """Compare a pair of each input with the truth, bit for bit; and see that no rank was left
        out: it would cost nothing.
        """
        for batch in self._batches:
            right = self._right(batch)
            recv, y = self.there_and_back(batch.x, *batch.picks)
            for what, got in _found(recv, y, len(right["x"])).items():
                assert_same_bits(got, right[what], what=what)
        if self.ep.engine == "low_latency":
            assert all(self.ep.active_ranks), f"ranks were left out: {self.ep.active_ranks}"
        self.ep.check()

    def replay(self, times: int) -> None:
        """Compare replays of one captured pair with the truth, bit for bit, each of other inputs
        than the one before.
        """
        sent = [(batch.x, *batch.picks) for batch in self._batches]
        wanted = [self._right(batch) for batch in self._batches]
        inputs = [each.clone() for each in sent[0]]
        self.there_and_back(*inputs)
        torch.cuda.synchronize()
        graph = _cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv, y = self.there_and_back(*inputs)
        wrong = torch.zeros((), dtype=torch.int64, device=y.device)
        for turn in range(times):
            number = turn % len(sent)
            for part, new in zip(inputs, sent[number], strict=True):
                part.copy_(new)
            graph.replay()
            found = _found(recv, y, len(wanted[number]["x"]))
            same = [
                (_bits(got) == _bits(wanted[number][what])).all() for what, got in found.items()
            ]
            wrong += ~torch.stack(same).all()
        assert not wrong, f"{int(wrong)} of {times} replays are wrong"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _found(recv: ty.Received, y: Tensor, num_rows: int) -> dict[str, Tensor]:
    """What a pair gave, named as what is right."""
    assert recv.scales is not None, "scales are missing"
    data: Any = recv.x.view(torch.uint8)
    return {"x": data[:num_rows], "scales": recv.scales[:num_rows], "combined": y}


def _summed(batch: Batch, truth: DeviceTruth, per_node: int | None = None) -> Tensor:
    """What a weighted combine of the FP8 payload gives: per rank in pick order, rounded, then by
    rank; if nodes add first, rounded again, then by node.
    """
    size, tokens = batch.topk_idx.shape[:2]
    rows = (
        truth.quantized.data[batch.rank * tokens : (batch.rank + 1) * tokens]
        .to(torch.bfloat16)
        .float()
    )
    idx, weights = batch.topk_idx[batch.rank], batch.topk_weights[batch.rank]
    share = batch.experts // size
    parts: list[Tensor] = []
    for rank in range(size):
        part = torch.zeros_like(rows)
        for pick in range(idx.shape[1]):
            here = (idx[:, pick] >= 0) & (idx[:, pick] // share == rank)
            part += torch.where(here[:, None], rows * weights[:, pick, None], 0.0)
        parts.append(part)
    return sum_ranks(parts, per_node, torch.bfloat16).to(torch.bfloat16)


def run_decode(device: torch.device, suite: Decode) -> list[Line]:
    """Be one rank: measure everything. Collective; the lines are the same on every rank."""
    if suite.experts % dist.get_world_size():
        raise ValueError(
            f"experts ({suite.experts}) must be a multiple of the ranks ({dist.get_world_size()})"
        )
    lines: list[Line] = []
    for tokens in suite.tokens:
        batches = make_batches(suite.case(tokens), device, suite.seed)
        lines += _size(suite, tokens, batches, device)
        torch.cuda.empty_cache()
    return lines


def _size(suite: Decode, tokens: int, batches: list[Batch], device: torch.device) -> list[Line]:
    """One batch size: every probe checked, then all timed in turn."""
    say(f"{tokens} tokens: checking and capturing")
    probes: list[Probe] = []
    wrong: list[Line] = []
    made: list[tuple[Way, Calls]] = []
    for way in suite.ways:
        case = suite.case(tokens, way.engine)
        found: list[Calls] = []
        error = failure(partial(_make, found, case, way, batches, device), way.name, 0, device)
        line = partial(line_for, case, name=way.name)
        if error:
            wrong.append(line(PAIR, error=error))
            for calls in found:
                calls.ep.close()
            continue
        [calls] = found
        made.append((way, calls))
        line = partial(line, symmetric_bytes=calls.symmetric_bytes)
        kinds = ((PAIR, calls.pair), (DISPATCH, calls.dispatch), (COMBINE, calls.combine))
        probes += [(line(what), _graph(suite, call)) for what, call in kinds]
        if way.name == ENGINES[0] and tokens == suite.parts_tokens:
            probes += [(line(what), partial(_part, calls, at)) for at, what in enumerate(PARTS)]
    probes.append((line_for(suite.case(tokens), PAIR), _graph(suite, _nccl(batches))))
    say(f"{tokens} tokens: timing")
    lines = _time(suite, probes, device)
    for way, calls in made:  # again: a rank that fell silent meanwhile would have cost nothing
        error = failure(calls.check, f"{way.name}, afterwards", 0, device)
        if suite.replays and not error:
            again = partial(calls.replay, suite.replays)
            error = failure(again, f"{way.name}, replayed", 0, device)
        if error:
            lines = [
                replace(line, device_us=None, wall_us=[], error=error)
                if line.name == way.name
                else line
                for line in lines
            ]
        calls.ep.close()
    return [*lines, *wrong]


def _make(
    found: list[Calls], case: Case, way: Way, batches: Sequence[Batch], device: torch.device
) -> None:
    """An object whose calls are right. Collective."""
    topology = case.topology
    tree = topology[1] if topology is not None and way.once else None
    forced = {PUTS_VARIABLE: str(int(way.puts))}
    with mock.patch.dict(os.environ, {} if topology is None else forced):
        ep = ty.ExpertParallel(
            **case.arguments, engine=way.engine, device=device, once_per_node=way.once
        )
    found.append(Calls(ep, batches, tree))
    assert not way.puts or NVSHMEM in ep.why, f"puts are not NVSHMEM's: {ep.why}"
    found[0].check()


def line_for(case: Case, what: str, name: str = "", **known: Any) -> Line:
    """A line of an engine (``name``: in one of several ways), or of NCCL."""
    name, ours = name or case.engine or NCCL, bool(case.engine)
    return Line(case=case, name=name, phase=what, kind=what, ours=ours, **known)


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


class Told(Clock):
    """Of probes, which take the time of one call themselves."""

    def time(self, call: Timed, number: int) -> tuple[float, float]:
        spent: Any = call(number)
        return 0.0, spent


def _time(suite: Decode, probes: Sequence[Probe], device: torch.device) -> list[Line]:
    """The lines with times: every round times each probe once, in changing order."""
    times = time_interleaved(
        [lambda _, take=take: take() for _, take in probes],
        iterations=suite.iterations,
        warmup=suite.warmup,
        num_inputs=1,
        device=device,
        seed=suite.seed,
        clock=Told(device),
    )
    found = zip(probes, times, strict=True)
    return [replace(line, device_us=series and series.device) for (line, _), series in found]
