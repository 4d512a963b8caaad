"""What each rank of ``tokenyard bench`` does: check all cases against the oracle, then measure
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard.cli.bench_baselines import baseline_cases
from tokenyard.cli.bench_cases import (
    COMBINE,
    PHASES,
    Case,
    Expected,
    engine_cases,
    expect,
    expert_parallel,
)
from tokenyard.cli.bench_inputs import (
    NUM_INPUTS,
    Job,
    Sent,
    Traffic,
    all_sent,
    floor_us,
    traffic_back,
    traffic_there,
)
from tokenyard.cli.bench_report import Row
from tokenyard.cli.progress import Counter, advance
from tokenyard.cli.timing import Series, peak_extra_bytes, slowest_rank, time_interleaved


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does. ``link_gbs`` is GB/s of one rank's link in one direction, None if
    unknown.
    """

    jobs: list[Job]
    engines: list[str]
    iterations: int
    warmup: int
    link_gbs: float | None
    seed: int

    @property
    def stages(self) -> list[str]:
        """What a rank does, one after the other, in words."""
        parts = ("checking", "measuring memory", "timing")
        return [
            f"{job.tokens} tokens, {job.skew}, {job.layout}: {part}"
            for job in self.jobs
            for part in parts
        ]


def run_rank(device: torch.device, plan: Plan, counter: Counter) -> list[Row]:
    """Be one rank: measure every job. Collective; the rows are the same on every rank.

    ``counter`` counts :attr:`Plan.stages`.
    """
    rows: list[Row] = []
    for job in plan.jobs:
        rows += run_job(job, plan, device, counter)
    return rows


def run_job(
    job: Job, plan: Plan, device: torch.device, counter: Counter | None = None
) -> list[Row]:
    """Measure every engine and baseline on one point of the sweep."""
    size = dist.get_world_size()
    inputs = [all_sent(job, size, number, plan.seed) for number in range(NUM_INPUTS)]
    refused: list[Row] = []
    with ExitStack() as objects:
        cases: list[Case] = []
        for engine in plan.engines:
            try:
                make = partial(expert_parallel, job, engine, device)
                cases += engine_cases(job, inputs, device, objects.enter_context(make()), make)
            except ty.NotSupported as error:
                refused += [
                    Row(job=job, name=f"tokenyard {engine}", phase=phase, error=str(error))
                    for phase in PHASES
                ]
        cases += baseline_cases(job, inputs, device)
        rows = measure(cases, job, inputs, plan, device, counter)
    return [row for phase in PHASES for row in refused + rows if row.phase == phase]


def measure(
    cases: list[Case],
    job: Job,
    inputs: list[list[Sent]],
    plan: Plan,
    device: torch.device,
    counter: Counter | None = None,
) -> list[Row]:
    """Check every case, then time those that were right. Collective."""
    errors = check(cases, job, inputs, device)
    advance(counter)
    right = [case for case, error in zip(cases, errors, strict=True) if not error]
    peaks = [
        on_ranks(peak_extra_bytes(each.cold or each.run, 0, device) + each.kept_bytes(), device)
        for each in right
    ]
    advance(counter)
    series = time_interleaved(
        [case.run for case in right],
        iterations=plan.iterations,
        warmup=plan.warmup,
        num_inputs=len(inputs),
        device=device,
        seed=plan.seed,
    )
    advance(counter)
    there, back = traffic_there(job, inputs), traffic_back(job, inputs)
    measured = iter(zip(peaks, series, strict=True))
    rows: list[Row] = []
    for case, error in zip(cases, errors, strict=True):
        if error:
            rows.append(Row(job=job, name=case.name, phase=case.phase, error=error))
        else:
            rows.append(
                _row(
                    case,
                    job,
                    *next(measured),
                    back if case.phase == COMBINE else there,
                    plan.link_gbs,
                )
            )
    return rows


def _row(
    case: Case,
    job: Job,
    peaks: list[int],
    times: Series,
    least: list[Traffic],
    link_gbs: float | None,
) -> Row:
    """``peaks`` has one entry per rank; ``least`` is the traffic that the job cannot do without,
    per input.
    """
    moved = least[0].moved
    return Row(
        job=job,
        name=case.name,
        phase=case.phase,
        note=case.note,
        wall_us=times.wall,
        device_us=times.device,
        wire_bytes=sum(each.busiest for each in case.traffic) / len(case.traffic),
        floor_us=None if link_gbs is None else floor_us(least, link_gbs),
        sms=case.sms,
        symmetric_bytes=case.symmetric_bytes,
        peak_bytes=max(peaks),
        peak_per_moved=max(peak / size for peak, size in zip(peaks, moved, strict=True))
        if all(moved)
        else None,
    )


def check(
    cases: Sequence[Case], job: Job, inputs: list[list[Sent]], device: torch.device
) -> list[str]:
    """Compare every case with the oracle on every input: what is wrong with it, "" if nothing.
    Collective.
    """
    errors = [""] * len(cases)
    for number, sent in enumerate(inputs):
        expected = expect(job, sent, dist.get_rank())
        on_ranks(
            0, device
        )  # the oracle takes ranks unequally long, and engines wait for peers a limited time only
        for at, case in enumerate(cases):
            if not errors[at]:
                errors[at] = failure(
                    partial(_attempt, case, number, expected), case.title, number, device
                )
    return errors


def _attempt(case: Case, number: int, expected: Expected) -> None:
    case.check(case.run(number), expected)


def failure(attempt: Callable[[], None], title: str, number: int, device: torch.device) -> str:
    """What is wrong with one result, on whichever ranks; a rank that knows more says it on stderr.
    Collective.
    """
    what = ""
    try:
        attempt()
    except Exception as error:
        what = str(error) or type(error).__name__
        if dist.get_rank():  # what rank 0 knows stands in the report
            print(
                f"rank {dist.get_rank()}: {title}, input {number}: {what}",
                file=sys.stderr,
                flush=True,
            )
    wrong = [rank for rank, failed in enumerate(on_ranks(int(bool(what)), device)) if failed]
    if not wrong:
        return ""
    return f"wrong on rank {', '.join(map(str, wrong))} (input {number})" + (
        f": {what}" if what else ""
    )


def on_ranks(value: int, device: torch.device) -> list[int]:
    """``value`` of every rank. Collective."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    mine[dist.get_rank()] = value
    return [int(each) for each in slowest_rank(mine, device)]
