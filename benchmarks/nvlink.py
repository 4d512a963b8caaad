"""The suite ``nvlink``: tables and curves of engine ``nvlink``, in one process group and run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from benchmarks.batches import DeviceTruth, make_batches
from benchmarks.calls import (
    BACK,
    BACK_IN_PLACE,
    BARS_RANKS,
    DIRECT,
    FRESH,
    KINDS,
    PLAIN,
    SMS_BARS_US,
    SuiteCall,
    collectives,
    library_calls,
    rows_of,
)
from benchmarks.clock import QueuedClock
from benchmarks.record import Line
from tokenyard.cli.bench_report import line_of
from tokenyard.cli.consoles import say
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Batch, check, failure
from tokenyard.testing.timing import time_interleaved

HEAD_START_US = 1000.0
"""Longer than the host takes to launch any of the calls."""

MAIN, ZIPF, TOKENS, BOUNDED, SMS = SECTIONS = ("main", "zipf", "tokens", "bounded", "sms")
MAKING = "making"
"""Phase of a line about an object that could not be made."""

BARS = {name: kind.bar_us for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Calls that are timed in turn, on the same inputs.

    Attributes:
        section: one of :data:`SECTIONS`. cases: an object for each. kinds: calls of each.
        bars: us by kind, for one case. beside: arguments of ``collectives``, None for none.
    """

    section: str
    cases: Sequence[Case]
    kinds: Sequence[str]
    bars: Callable[[Case], Mapping[str, float | None]] = lambda _: {}
    beside: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What to measure. Defaults are the sizes of the record.

    Attributes:
        tokens, hidden, topk, experts: of the main table.
        sms: to plot over; curve: tokens per rank to plot over.
        buffer_bytes: of rings, everywhere but in the reference of bounded memory.
        overfull: how many times more rows than the rings hold come in the test of bounded memory.
        iterations: timed rounds of large batches; batches of at most ``tokens`` get twice as many.
        sections: of :data:`SECTIONS`, those to run.
    """

    engine: str = "nvlink"
    tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    sms: tuple[int, ...] = (8, 16, 24, 32, 64, 132)
    curve: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    buffer_bytes: int = 128 << 20
    overfull: int = 16
    iterations: int = 20
    warmup: int = 3
    link_gbs: float | None = None
    seed: int = 0
    sections: tuple[str, ...] = SECTIONS

    def case(self, tokens: int, skew: str = "uniform", **changes: Any) -> Case:
        changes = {"engine": self.engine, "rings": self.buffer_bytes, **changes}
        return Case(tokens, self.hidden, self.topk, self.experts, skew, **changes)

    def tables(self, num_ranks: int) -> list[Table]:
        """What is measured, in order."""
        main, many = self.case(self.tokens), self.case(self.overfull_tokens(num_ranks))
        over = [replace(main, sms=sms) for sms in self.sms]
        rings = [many, replace(many, rings=self.roomy_bytes(num_ranks))]
        curve = (FRESH, PLAIN, DIRECT, BACK, BACK_IN_PLACE)
        judged = num_ranks == BARS_RANKS and self.engine == "nvlink"

        def bars(_: Case) -> Mapping[str, float | None]:
            return BARS if judged else {}

        def few(case: Case) -> Mapping[str, float | None]:
            bars = SMS_BARS_US.items() if num_ranks == BARS_RANKS else ()
            return {kind: bar_us.get(case.sms or 0) for kind, bar_us in bars}

        found = {
            MAIN: [Table(section=MAIN, cases=[main], kinds=tuple(KINDS), bars=bars,
                         beside={"fp8": True})],
            ZIPF: [Table(section=ZIPF, cases=[self.case(self.tokens, "zipf")],
                         kinds=(PLAIN, BACK), beside={"gathers": False})],
            TOKENS: [Table(section=TOKENS, cases=[self.case(each)], kinds=curve, beside={})
                     for each in self.curve],
            BOUNDED: [Table(section=BOUNDED, cases=rings, kinds=(PLAIN, BACK))],
            SMS: [Table(section=SMS, cases=over, kinds=(DIRECT, PLAIN, FRESH, BACK, BACK_IN_PLACE),
                        bars=few)],
        }  # fmt: skip
        return [table for section in self.sections for table in found[section]]

    def overfull_tokens(self, num_ranks: int) -> int:
        """Tokens per rank of which ``overfull`` times more bytes reach a rank from others than all
        its rings hold.
        """
        others = self.experts - self.experts // num_ranks
        reached = 1 - math.comb(others, self.topk) / math.comb(self.experts, self.topk)
        per_token = max(num_ranks - 1, 1) * reached * self.case(1).row_bytes
        return -(-math.ceil(self.overfull * self.buffer_bytes / per_token) // 64) * 64

    def roomy_bytes(self, num_ranks: int) -> int:
        """Rings that hold a row of every token of every rank at once, however unevenly channels
        share them.
        """
        rows = num_ranks * self.overfull_tokens(num_ranks)
        return int(1.25 * rows * self.case(1).row_bytes) + self.buffer_bytes


@dataclass(slots=True)
class _Run:
    """One rank of the suite."""

    suite: Suite
    device: torch.device
    lines: list[Line] = field(default_factory=list[Line])
    barrier: Callable[[], object] | None = None

    def measure(self, table: Table) -> None:
        """Make the objects, check everything, then time what was right, interleaved. Collective."""
        plain = rows_of(table.cases[0])
        say(f"{table.section}, {plain.tokens} tokens: making and checking")
        batches = make_batches(plain, self.device, self.suite.seed)
        with ExitStack() as stack:
            calls: list[SuiteCall] = []
            for case in table.cases:
                calls += self._library(stack, table, case, batches)
            if table.beside is not None:
                calls += collectives(plain, batches, **table.beside)
            self._check_and_time(table.section, calls, batches)

    def _check_and_time(
        self, section: str, calls: Sequence[SuiteCall], batches: Sequence[Batch]
    ) -> None:
        suite, tokens = self.suite, batches[0].x.shape[0]
        errors = check(
            calls, lambda number: DeviceTruth.of(batches[number]), len(batches), self.device
        )
        times = time_interleaved(
            [None if error else call.run for call, error in zip(calls, errors, strict=True)],
            iterations=suite.iterations * (1 if tokens > suite.tokens else 2),
            warmup=suite.warmup,
            num_inputs=len(batches),
            device=self.device,
            seed=suite.seed,
            clock=QueuedClock(self.device, HEAD_START_US, self.barrier),
        )
        for call, error, series in zip(calls, errors, times, strict=True):
            line = line_of(call, error, series, suite.link_gbs)
            known = {"section": section, "kind": call.kind, "bar_us": call.bar_us}
            self._say(Line.of(line, **known))

    def _library(
        self, stack: ExitStack, table: Table, case: Case, batches: Sequence[Batch]
    ) -> list[SuiteCall]:
        """Calls of an object. None, and a line that says why, if it cannot be made on every rank.
        Collective.
        """
        calls: list[SuiteCall] = []
        shown = replace(case, sms=case.sms or _all_sms(self.device))

        def ep() -> ty.ExpertParallel:
            return stack.enter_context(
                ty.ExpertParallel(**case.arguments, engine=case.engine, device=self.device)
            )

        def make() -> None:
            calls.extend(library_calls(ep(), shown, batches, table.kinds, ep, table.bars(case)))

        name = f"ExpertParallel with num_sms={case.sms}, buffer_bytes={case.rings}"
        if error := failure(make, name, 0, self.device):
            known: dict[str, Any] = {"section": table.section, "error": error, "ours": True}
            self._say(Line(case=case, name=name, phase=MAKING, **known))
            return []
        self.barrier = self.barrier or _barrier(self.suite, self.device)
        return calls

    def _say(self, line: Line) -> None:
        """Keep a line, and show it at once: nothing is lost if a later one ends the run."""
        self.lines.append(line)
        say(_in_short(line))


def run_suite(device: torch.device, suite: Suite) -> list[Line]:
    """Be one rank: measure everything. Collective; the lines are the same on every rank."""
    run = _Run(suite, device)
    for table in suite.tables(dist.get_world_size()):
        run.measure(table)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return run.lines


def _barrier(suite: Suite, device: torch.device) -> Callable[[], object] | None:
    """Torch's barrier of symmetric memory, where engine ``nvlink`` was made on several GPUs; None
    elsewhere. Collective.
    """
    if suite.engine != "nvlink" or device.type != "cuda" or dist.get_world_size() == 1:
        return None
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    return symmetric.rendezvous(symmetric.empty(1, device=device), dist.group.WORLD).barrier


def _all_sms(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda
    return int(cuda.get_device_properties(device).multi_processor_count)


def _in_short(line: Line) -> str:
    case = line.case
    sms = f", {case.sms} SMs" if case.sms else ""
    rings = "" if case.rings is None else f", rings {case.rings >> 20} MiB"
    what = f"{line.section}: {case.tokens} tokens, {case.skew}{sms}{rings}: {line.name}"
    if line.error or line.wall is None:
        return f"{what}: NO TIME: {line.error}"
    device = "" if line.device is None else f"{line.device.median:.1f} us on the device, "
    return f"{what}: {device}{line.wall.median:.1f} us end to end"
