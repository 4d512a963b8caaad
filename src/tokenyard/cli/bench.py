"""``tokenyard bench``: dispatch and combine beside the collectives anybody could use instead, timed in one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

import tokenyard as ty
from tokenyard import launch
from tokenyard.cli import bench_cases
from tokenyard.cli.bench_cases import COMBINE, PHASES, Case, expect
from tokenyard.cli.bench_inputs import (
    DTYPES,
    LAYOUTS,
    NUM_INPUTS,
    QUANTIZE,
    SKEWS,
    Job,
    Sent,
    Traffic,
    all_sent,
    floor_us,
    once_per_rank,
    sweep,
)
from tokenyard.cli.bench_report import Row, print_report, write_json
from tokenyard.cli.progress import Counter, progress
from tokenyard.cli.timing import Series, peak_extra_bytes, slowest_rank, time_interleaved

NVLINK_GBS = 370.0
"""What stores by SMs reach over NVLink 4 in one direction, in GB/s, as NCCL's authors give it."""

PIPED_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does. ``link_gbs`` is GB/s of one rank's link in one direction, None if unknown."""

    jobs: list[Job]
    engines: list[str]
    iterations: int
    warmup: int
    link_gbs: float | None
    seed: int


def run_rank(device: torch.device, plan: Plan, counter: Counter) -> list[Row]:
    """Be one rank: measure every job. Collective; the rows are the same on every rank."""
    rows: list[Row] = []
    for job in plan.jobs:
        rows += run_job(job, plan, device)
        counter.value += dist.get_rank() == 0
    return rows


def run_job(job: Job, plan: Plan, device: torch.device) -> list[Row]:
    """Measure every engine and baseline on one point of the sweep."""
    size = dist.get_world_size()
    inputs = [all_sent(job, size, number, plan.seed) for number in range(NUM_INPUTS)]
    refused: list[Row] = []
    with ExitStack() as objects:
        cases: list[Case] = []
        for engine in plan.engines:
            try:
                make = partial(bench_cases.expert_parallel, job, engine, device)
                cases += bench_cases.engine_cases(job, inputs, device, objects.enter_context(make()), make)
            except ty.NotSupported as error:
                refused += [Row(job=job, name=f"tokenyard {engine}", phase=phase, error=str(error)) for phase in PHASES]
        cases += bench_cases.baseline_cases(job, inputs, device)
        rows = measure(cases, job, inputs, plan, device)
    return [row for phase in PHASES for row in refused + rows if row.phase == phase]


def measure(cases: list[Case], job: Job, inputs: list[list[Sent]], plan: Plan, device: torch.device) -> list[Row]:
    """Check every case, then time those that were right. Collective."""
    errors = check(cases, job, inputs, device)
    right = [case for case, error in zip(cases, errors, strict=True) if not error]
    peaks = [_on_ranks(peak_extra_bytes(case.cold or case.run, 0, device) + case.kept_bytes(), device) for case in right]
    series = time_interleaved(
        [case.run for case in right],
        iterations=plan.iterations,
        warmup=plan.warmup,
        num_inputs=len(inputs),
        device=device,
        seed=plan.seed,
    )
    least = [once_per_rank([sent.topk_idx for sent in each], job.experts, job.row_bytes) for each in inputs]
    rows = [Row(job=job, name=c.name, phase=c.phase, error=e, note=c.note) for c, e in zip(cases, errors, strict=True) if e]
    for case, peak, times in zip(right, peaks, series, strict=True):
        back = [each.reversed(job.row_bytes, job.combined_row_bytes) for each in least]
        rows.append(_row(case, job, times, peak, back if case.phase == COMBINE else least, plan.link_gbs))
    return sorted(rows, key=lambda row: [case.name for case in cases].index(row.name))


def _row(case: Case, job: Job, times: Series, peaks: list[int], least: list[Traffic], link_gbs: float | None) -> Row:
    """``peaks`` has one entry per rank; ``least`` is the traffic that the job cannot do without, per input."""
    moved = [sent + received for sent, received in zip(least[0].sent, least[0].received, strict=True)]
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
        peak_per_moved=max(peak / size for peak, size in zip(peaks, moved, strict=True)) if all(moved) else None,
    )


def check(cases: Sequence[Case], job: Job, inputs: list[list[Sent]], device: torch.device) -> list[str]:
    """Compare every case with the oracle on every input: what is wrong with it, "" if nothing. Collective."""
    errors = [""] * len(cases)
    for number, sent in enumerate(inputs):
        expected = expect(job, sent, dist.get_rank())
        _on_ranks(0, device)  # the oracle takes ranks unequally long, and engines wait for peers a limited time only
        for at, case in enumerate(cases):
            if not errors[at]:
                errors[at] = _failure(case, number, expected, device)
    return errors


def _failure(case: Case, number: int, expected: bench_cases.Expected, device: torch.device) -> str:
    """What is wrong with one result, on whichever ranks; a rank that knows more says it on stderr."""
    what = ""
    try:
        case.check(case.run(number), expected)
    except Exception as error:
        what = str(error) or type(error).__name__
        if dist.get_rank():  # what rank 0 knows stands in the report
            print(f"rank {dist.get_rank()}: {case.phase} by {case.name}, input {number}: {what}", file=sys.stderr, flush=True)
    wrong = [rank for rank, failed in enumerate(_on_ranks(int(bool(what)), device)) if failed]
    if not wrong:
        return ""
    return f"wrong on rank {', '.join(map(str, wrong))} (input {number})" + (f": {what}" if what else "")


def _on_ranks(value: int, device: torch.device) -> list[int]:
    """``value`` of every rank. Collective."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    mine[dist.get_rank()] = value
    return [int(each) for each in slowest_rank(mine, device).tolist()]


def run_plan(plan: Plan, ranks: int, device: str, console: Console) -> list[Row]:
    """Run on the ranks of the launcher if there is one, else on ``ranks`` processes of our own."""
    stages = [f"{job.tokens} tokens, {job.skew}, {job.layout}" for job in plan.jobs]
    with progress(stages, console) as counter:
        if not launch.under_torchrun():
            return launch.spawn(run_rank, ranks, plan, counter, device=device)[0]
        with launch.joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device) as here:
            return run_rank(here, plan, counter)


def _words(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in allowed:
            raise typer.BadParameter(f"{option} {word!r} is unknown; use one of {', '.join(allowed)}")
    return words


def _numbers(text: str, option: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise typer.BadParameter(f"{option} {word!r} must be a whole number of at least 1")
    return [int(word) for word in words]


def _check_jobs(jobs: list[Job]) -> list[Job]:
    for job in jobs:
        if job.topk > job.experts:
            raise typer.BadParameter(f"--topk {job.topk} must be at most --experts {job.experts}")
    return jobs


def bench(
    ranks: Annotated[int, typer.Option(min=1, help="Local processes; under torchrun its ranks count.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    engine: Annotated[list[str] | None, typer.Option(help="May be given several times.", show_default="auto")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens per rank. This and the next seven take comma lists.")] = "2048",
    hidden: Annotated[str, typer.Option(help="Channels of a token.")] = "2048",
    topk: Annotated[str, typer.Option(help="Experts per token.")] = "8",
    experts: Annotated[str, typer.Option(help="Experts over all ranks.")] = "64",
    skew: Annotated[str, typer.Option(help="uniform, zipf, recorded (text through a small random router).")] = "uniform,zipf",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32.")] = "bf16",
    layout: Annotated[str, typer.Option(help="flat, expert_major, expert_padded.")] = "flat",
    quantize: Annotated[str, typer.Option(help="none, fp8, fp8_pow2, fp8_ue8m0: the cast in dispatch.")] = "none",
    iterations: Annotated[int, typer.Option(min=1, help="Timed rounds; a result worth quoting has at least 20.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before them.")] = 3,
    link_gbs: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB/s of a rank's link, one direction.", show_default="370 on cuda (NVLink), unknown on cpu"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure, the raw times among them.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures as a PNG.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and of the order of calls.")] = 0,
) -> None:
    """Time dispatch and combine beside plain collectives: same process group, same run, interleaved, checked first.

    The exit code is 1 if any row has no time because its result was wrong or its engine could not do what was asked.
    """
    known = _words(device, "--device", ("cpu", "cuda"))[0]
    jobs = sweep(
        tokens=_numbers(tokens, "--tokens"),
        hidden=_numbers(hidden, "--hidden"),
        topk=_numbers(topk, "--topk"),
        experts=_numbers(experts, "--experts"),
        skew=_words(skew, "--skew", SKEWS),
        dtype=_words(dtype, "--dtype", tuple(DTYPES)),
        layout=_words(layout, "--layout", tuple(LAYOUTS)),
        quantize=_words(quantize, "--quantize", tuple(QUANTIZE)),
    )
    rate = NVLINK_GBS if link_gbs is None and known == "cuda" else link_gbs
    plan = Plan(_check_jobs(jobs), engine or ["auto"], iterations, warmup, rate, seed)
    plain = Console()
    console = plain if plain.is_terminal else Console(width=PIPED_WIDTH)
    rows = run_plan(plan, ranks, known, console)
    if os.environ.get("RANK", "0") == "0":
        print_report(rows, console, iterations)
        if json is not None:
            write_json(json, rows, plan, known)
        if plot is not None:
            from tokenyard.cli.bench_plot import draw  # matplotlib is an extra

            draw(rows, plot)
    raise typer.Exit(int(any(row.error for row in rows)))
