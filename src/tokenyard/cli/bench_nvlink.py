"""``tokenyard bench --suite nvlink``: tables and curves by which engine ``nvlink`` is judged, in
one process group and run.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard.cli.bench_batches import Batch, Truth, make_batches
from tokenyard.cli.bench_inputs import Job, floor_us
from tokenyard.cli.bench_nvlink_cases import (
    BACK,
    BACK_IN_PLACE,
    BARS_RANKS,
    FRESH,
    KINDS,
    PLAIN,
    VIEW,
    Library,
    Probe,
    collectives,
)
from tokenyard.cli.bench_report import Row
from tokenyard.cli.bench_run import failure, on_ranks
from tokenyard.cli.progress import Counter, advance
from tokenyard.cli.timing import Series, time_interleaved

HEAD_START_US = 1000.0
"""Longer than the host takes to launch any of the calls."""

SMS_BARS_US = {8: 560.0, 24: 490.0}
"""What a dispatch in place may take with so many SMs."""

MAIN, ZIPF, TOKENS, BOUNDED, SMS = SECTIONS = ("main", "zipf", "tokens", "bounded", "sms")


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

    def job(self, tokens: int, skew: str = "uniform") -> Job:
        return Job(tokens, self.hidden, self.topk, self.experts, skew, "bf16", "flat", "none")

    @property
    def stages(self) -> list[str]:
        """What a rank does, one after the other, in words."""
        sizes = {TOKENS: [f", {tokens} tokens" for tokens in self.curve]}
        points = [section + size for section in self.sections for size in sizes.get(section, [""])]
        return [
            f"{point}: {part}" for point in points for part in ("making and checking", "timing")
        ]

    def overfull_tokens(self, num_ranks: int) -> int:
        """Tokens per rank of which ``overfull`` times more bytes reach a rank from others than all
        its rings hold.
        """
        others = self.experts - self.experts // num_ranks
        reached = 1 - math.comb(others, self.topk) / math.comb(self.experts, self.topk)
        row_bytes, peers = self.job(1).row_bytes, max(num_ranks - 1, 1)
        return (
            -(-math.ceil(self.overfull * self.buffer_bytes / (peers * reached * row_bytes)) // 64)
            * 64
        )

    def roomy_bytes(self, num_ranks: int) -> int:
        """Rings that hold a row of every token of every rank at once, however unevenly channels
        share them.
        """
        return (
            int(1.25 * num_ranks * self.overfull_tokens(num_ranks) * self.job(1).row_bytes)
            + self.buffer_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Row):
    """A row of the suite's tables.

    Attributes:
        section: one of :data:`SECTIONS`; ours, kind: see :class:`Probe`.
        rings: bytes of rings, None where there are none.
        bar_us: what it should at most take.
    """

    section: str
    ours: bool = False
    kind: str = ""
    rings: int | None = None
    bar_us: float | None = None


@dataclass(slots=True)
class _Run:
    """One rank of the suite."""

    suite: Suite
    device: torch.device
    counter: Counter | None = None
    lines: list[Line] = field(default_factory=list[Line])
    start: float = field(default_factory=time.monotonic)
    barrier: Callable[[], object] | None = None

    def measure(
        self, section: str, job: Job, batches: list[Batch], probes: Sequence[Probe]
    ) -> None:
        """Check everything, then time what was right, interleaved. Collective."""
        suite = self.suite
        errors = _check(probes, batches, self.device)
        advance(self.counter)
        right = [probe for probe, error in zip(probes, errors, strict=True) if not error]
        series = time_interleaved(
            [probe.run for probe in right],
            iterations=suite.iterations * (1 if job.tokens > suite.tokens else 2),
            warmup=suite.warmup,
            num_inputs=len(batches),
            device=self.device,
            seed=suite.seed,
            head_start_us=HEAD_START_US,
            barrier=self.barrier,
        )
        advance(self.counter)
        times = iter(series)
        for probe, error in zip(probes, errors, strict=True):
            line = _line(section, probe, suite.link_gbs, error, None if error else next(times))
            self._say(line)

    def library(
        self,
        stack: ExitStack,
        section: str,
        job: Job,
        batches: list[Batch],
        *,
        sms: int | None = None,
        rings: int | None = None,
    ) -> Library | None:
        """An object and its calls. None, and a line that says why, if it cannot be made on every
        rank. Collective.
        """
        made: list[Library] = []
        num_bytes = rings or self.suite.buffer_bytes

        def ep() -> ty.ExpertParallel:
            return stack.enter_context(_object(self.suite, job.tokens, sms, num_bytes, self.device))

        def make() -> None:
            made.append(
                Library(
                    ep(), job, batches, again=ep, sms=sms or _all_sms(self.device), rings=num_bytes
                )
            )

        name = f"ExpertParallel with num_sms={sms}, buffer_bytes={num_bytes}"
        error = failure(make, name, 0, self.device)
        if not error:
            self.barrier = self.barrier or _barrier(self.suite, self.device)
            return made[0]
        self._say(
            Line(
                section=section, job=job, name=name, phase="making", sms=sms, error=error, ours=True
            )
        )
        return None

    def _say(self, line: Line) -> None:
        """Keep a line, and show it at once: nothing is lost if a later one ends the run."""
        self.lines.append(line)
        if dist.get_rank() == 0:
            print(
                f"{time.monotonic() - self.start:6.1f} s  {_in_short(line)}",
                file=sys.stderr,
                flush=True,
            )


def run_suite(device: torch.device, suite: Suite, counter: Counter | None = None) -> list[Line]:
    """Be one rank: measure everything. Collective; the lines are the same on every rank.
    ``counter``: of ``suite.stages``.
    """
    run = _Run(suite, device, counter)
    for section in suite.sections:
        _MEASURE[section](run)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return run.lines


def _object(
    suite: Suite, max_tokens: int, sms: int | None, num_bytes: int, device: torch.device
) -> ty.ExpertParallel:
    return ty.ExpertParallel(
        num_experts=suite.experts,
        hidden=suite.hidden,
        num_topk=suite.topk,
        max_tokens_per_rank=max_tokens,
        engine=suite.engine,
        num_sms=sms,
        buffer_bytes=num_bytes,
        device=device,
    )


def _barrier(suite: Suite, device: torch.device) -> Callable[[], object] | None:
    """Torch's barrier of symmetric memory, where engine ``nvlink`` was made on several GPUs; None
    elsewhere. Collective.
    """
    if suite.engine != "nvlink" or device.type != "cuda" or dist.get_world_size() == 1:
        return None
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    return symmetric.rendezvous(symmetric.empty(1, device=device), dist.group.WORLD).barrier


def _all_sms(device: torch.device) -> int | None:
    cuda: Any = torch.cuda
    return (
        int(cuda.get_device_properties(device).multi_processor_count)
        if device.type == "cuda"
        else None
    )


# Sections


def _main(run: _Run) -> None:
    """Every kind of call at one size."""
    job = run.suite.job(run.suite.tokens)
    batches = make_batches(job, run.device, run.suite.seed)
    with ExitStack() as stack:
        ours = run.library(stack, MAIN, job, batches)
        probes = (
            ours.probes([*KINDS, BACK, BACK_IN_PLACE], bars=run.suite.engine == "nvlink")
            if ours
            else []
        )
        run.measure(MAIN, job, batches, [*probes, *collectives(job, batches, fp8=True)])


def _zipf(run: _Run) -> None:
    """The same size with a few popular experts."""
    job = run.suite.job(run.suite.tokens, "zipf")
    batches = make_batches(job, run.device, run.suite.seed)
    with ExitStack() as stack:
        ours = run.library(stack, ZIPF, job, batches)
        probes = ours.probes([PLAIN, BACK]) if ours else []
        run.measure(ZIPF, job, batches, [*probes, *collectives(job, batches, gathers=False)])


def _tokens(run: _Run) -> None:
    """A curve over tokens, with baselines."""
    for tokens in run.suite.curve:
        job = run.suite.job(tokens)
        batches = make_batches(job, run.device, run.suite.seed)
        with ExitStack() as stack:
            ours = run.library(stack, TOKENS, job, batches)
            probes = ours.probes([FRESH, PLAIN, VIEW, BACK, BACK_IN_PLACE]) if ours else []
            run.measure(TOKENS, job, batches, [*probes, *collectives(job, batches)])


def _sms(run: _Run) -> None:
    """A curve over multiprocessors."""
    job = run.suite.job(run.suite.tokens)
    batches = make_batches(job, run.device, run.suite.seed)
    with ExitStack() as stack:
        probes: list[Probe] = []
        for sms in run.suite.sms:
            if ours := run.library(stack, SMS, job, batches, sms=sms):
                bars = {VIEW: SMS_BARS_US.get(sms) if dist.get_world_size() == BARS_RANKS else None}
                probes += [
                    replace(each, bar_us=bars.get(each.kind))
                    for each in ours.probes([VIEW, PLAIN, BACK, BACK_IN_PLACE])
                ]
        run.measure(SMS, job, batches, probes)


def _bounded(run: _Run) -> None:
    """A batch that the rings hold a small part of, and rings that hold all of it."""
    size = dist.get_world_size()
    job = run.suite.job(run.suite.overfull_tokens(size))
    batches = make_batches(job, run.device, run.suite.seed)
    with ExitStack() as stack:
        probes: list[Probe] = []
        for rings in (run.suite.buffer_bytes, run.suite.roomy_bytes(size)):
            if ours := run.library(stack, BOUNDED, job, batches, rings=rings):
                probes += ours.probes([PLAIN, BACK])
        run.measure(BOUNDED, job, batches, probes)


_MEASURE: dict[str, Callable[[_Run], None]] = {
    MAIN: _main,
    ZIPF: _zipf,
    TOKENS: _tokens,
    BOUNDED: _bounded,
    SMS: _sms,
}


# One line


def _check(probes: Sequence[Probe], batches: list[Batch], device: torch.device) -> list[str]:
    """Compare every probe with the truth on every input: what is wrong with it, "" if nothing.
    Collective.
    """
    errors = [""] * len(probes)
    for number, batch in enumerate(batches):
        truth = Truth.of(batch)
        on_ranks(0, device)
        for at, probe in enumerate(probes):
            if not errors[at]:
                errors[at] = failure(
                    partial(_attempt, probe, number, truth), probe.name, number, device
                )
    return errors


def _attempt(probe: Probe, number: int, truth: Truth) -> None:
    if probe.prepare is not None:
        probe.prepare(number)
    probe.check(probe.run(number), truth)


def _line(
    section: str, probe: Probe, link_gbs: float | None, error: str, times: Series | None
) -> Line:
    line = Line(
        section=section,
        job=probe.job,
        name=probe.name,
        phase=probe.phase,
        ours=probe.ours,
        kind=probe.kind,
        error=error,
        sms=probe.sms,
        rings=probe.rings,
        bar_us=probe.bar_us,
        floor_us=None if link_gbs is None else floor_us(probe.least, link_gbs),
        wire_bytes=sum(each.busiest for each in probe.traffic) / len(probe.traffic),
        symmetric_bytes=probe.symmetric_bytes,
    )
    return line if times is None else replace(line, wall_us=times.wall, device_us=times.device)


def _in_short(line: Line) -> str:
    sms, rings = (
        f", {line.sms} SMs" if line.sms else "",
        "" if line.rings is None else f", rings {line.rings >> 20} MiB",
    )
    what = f"{line.section}: {line.job.tokens} tokens, {line.job.skew}{sms}{rings}: {line.name}"
    if line.error or line.wall is None:
        return f"{what}: NO TIME: {line.error}"
    device = "" if line.device is None else f"{line.device.median:.1f} us on the device, "
    return f"{what}: {device}{line.wall.median:.1f} us end to end"
