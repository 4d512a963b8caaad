"""``tokenyard bench``: engines beside the collectives anybody could use instead, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tokenyard as ty
from tokenyard.arguments import LARGEST
from tokenyard.cli import bench_report
from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.consoles import leads, on_all_ranks, say, table_console
from tokenyard.cli.options import Device, Ranks, bad, command, file, list_of, option, words_of
from tokenyard.engines.known import AUTO, ENGINES
from tokenyard.testing import cases
from tokenyard.testing.baselines import instead_of_combine, instead_of_dispatch
from tokenyard.testing.cases import NUM_INPUTS, NUMBERS, WORDS, Case, sweep
from tokenyard.testing.checked_calls import PHASES, Call, Oracle, check, engine_calls, sweep_inputs
from tokenyard.testing.timing import on_ranks, peak_extra_bytes, time_interleaved

NVLINK_GBS = 370.0
"""What stores by SMs reach over NVLink 4 in one direction, in GB/s, as NCCL's authors give it."""


def number(text: str) -> int:
    """A whole number from 1."""
    found = text.strip()
    if not found.isdecimal() or not 1 <= int(found) <= LARGEST:
        why = f"{found!r} must be a whole number of at least 1 (at most {LARGEST})"
        raise typer.BadParameter(why)
    return int(found)


RATE = "GB/s of a rank's link, one way."
KNOWN = "cuda: 370, NVLink; cpu: unknown"
ROUNDS = "Timed rounds; a result worth quoting has at least 20."


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does. ``link_gbs``: GB/s of a rank's link, one way; None if unknown."""

    cases: list[Case]
    engines: list[str]
    iterations: int
    warmup: int
    link_gbs: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    ranks: Ranks = 4
    device: Device = "cpu"
    engine: Annotated[Any, words_of(ENGINES)] = AUTO
    tokens: Annotated[Any, list_of(number, "Tokens per rank.")] = "2048"
    hidden: Annotated[Any, list_of(number, "Channels of a token.")] = "2048"
    topk: Annotated[Any, list_of(number, "Experts per token.")] = "8"
    experts: Annotated[Any, list_of(number, "Experts over all ranks.")] = "64"
    skew: Annotated[Any, words_of(cases.SKEWS)] = "uniform,zipf"
    dtype: Annotated[Any, words_of(cases.DTYPES)] = "bf16"
    layout: Annotated[Any, words_of(cases.LAYOUTS)] = "flat"
    quantize: Annotated[Any, words_of(cases.QUANTIZE, "Cast in dispatch: ")] = "none"
    iterations: Annotated[int, option(ROUNDS, min=1)] = 20
    warmup: Annotated[int, option("Rounds before them.", min=1)] = 3
    link_gbs: Annotated[float | None, option(RATE, KNOWN, min=0.001)] = None
    json: Annotated[Path | None, file("Write every figure and all times.")] = None
    plot: Annotated[Path | None, file("Draw the figures as a PNG.", "--plot")] = None
    seed: Annotated[int, option("Of inputs and of the order of calls.", min=0)] = 0

    @property
    def plan(self) -> Plan:
        """What ranks do, checked."""
        points = sweep(**{name: getattr(self, name) for name in (*NUMBERS, *WORDS)})
        for case in points:
            if case.topk > case.experts:
                bad("--topk", f"{case.topk} must be at most --experts {case.experts}")
        rate = NVLINK_GBS if self.link_gbs is None and self.device == "cuda" else self.link_gbs
        return Plan(points, self.engine, self.iterations, self.warmup, rate, self.seed)


# What ranks do


def run_rank(device: torch.device, plan: Plan) -> list[Measurement]:
    """Be one rank: measure every case. Collective."""
    return [line for case in plan.cases for line in run_case(case, plan, device)]


def run_case(case: Case, plan: Plan, device: torch.device) -> list[Measurement]:
    """Measure every engine and baseline on one point of the sweep."""
    say(f"{bench_report.title_of(case)}: checking")
    batches, sent = sweep_inputs(case, plan.seed, device, NUM_INPUTS)
    lines: list[Measurement] = []
    with ExitStack() as objects:
        calls: list[Call] = []
        for engine in plan.engines:
            try:
                ep = ty.ExpertParallel(**case.arguments, engine=engine, device=device)
                calls += engine_calls(objects.enter_context(ep), case, batches)
            except ty.NotSupported as error:
                known: dict[str, Any] = {"name": f"tokenyard {engine}", "error": str(error)}
                lines += [Measurement(case=case, phase=phase, **known) for phase in PHASES]
        calls += [*instead_of_dispatch(case, batches), *instead_of_combine(case, batches)]

        def truth(number: int) -> Oracle:
            return Oracle.asked(case, batches[number], sent[number])

        lines += measure(calls, truth, plan, device)
    return [line for phase in PHASES for line in lines if line.phase == phase]


def measure(
    calls: Sequence[Call], truth: Callable[[int], Any], plan: Plan, device: torch.device
) -> list[Measurement]:
    """Check every call, then measure memory and time of those that were right. Collective."""
    errors = check(calls, truth, NUM_INPUTS, device)
    say("measuring memory and time")
    right = [None if error else call for call, error in zip(calls, errors, strict=True)]
    peaks = [
        call and on_ranks(peak_extra_bytes(call.run, 0, device) + call.kept_bytes, device)
        for call in right
    ]
    times = time_interleaved(
        [call and call.run for call in right],
        iterations=plan.iterations,
        warmup=plan.warmup,
        num_inputs=NUM_INPUTS,
        device=device,
        seed=plan.seed,
    )
    return [
        bench_report.line_of(call, error, series, plan.link_gbs, peaks=peak)
        for call, error, series, peak in zip(calls, errors, times, peaks, strict=True)
    ]


@command(Options)
def bench(options: Options) -> None:
    """Time dispatch and combine beside plain collectives: same process group, same run,
    interleaved, checked first.

    The project's own suites and their bars are `python -m benchmarks`, in its repository.

    The exit code is 1 if any row has no time because its result was wrong or its engine could not
    do what was asked.
    """
    plan = options.plan
    rows = on_all_ranks(run_rank, options.ranks, options.device, plan)
    if leads():
        bench_report.print_report(rows, table_console())
        if options.json is not None:
            facts = bench_report.facts_of(plan, options.device)
            bench_report.write_json(options.json, rows, facts)
        if options.plot is not None:
            from tokenyard.cli.plots import save_bench  # matplotlib is an extra

            save_bench(options.plot, rows)
    raise typer.Exit(int(any(row.error for row in rows)))
