"""What each rank of a bench does: check all calls against the truth, then measure them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard.cli.bench_baselines import baselines
from tokenyard.cli.bench_cases import PHASES, Call, Library, Oracle, Truth, sweep_inputs
from tokenyard.cli.bench_inputs import NUM_INPUTS, Case, floor_us
from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.progress import Counter, advance
from tokenyard.cli.timing import Series, peak_extra_bytes, slowest_rank, time_interleaved


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does. ``link_gbs`` is GB/s of one rank's link in one direction, None if
    unknown.
    """

    cases: list[Case]
    engines: list[str]
    iterations: int
    warmup: int
    link_gbs: float | None
    seed: int

    @property
    def stages(self) -> list[str]:
        """What a rank does, one after the other, in words."""
        parts = ("checking", "measuring memory", "timing")
        points = [f"{case.tokens} tokens, {case.skew}, {case.layout}" for case in self.cases]
        return [f"{point}: {part}" for point in points for part in parts]


def run_rank(device: torch.device, plan: Plan, counter: Counter) -> list[Measurement]:
    """Be one rank: measure every case. Collective; the lines are the same on every rank.

    ``counter`` counts :attr:`Plan.stages`.
    """
    return [line for case in plan.cases for line in run_case(case, plan, device, counter)]


def run_case(
    case: Case, plan: Plan, device: torch.device, counter: Counter | None = None
) -> list[Measurement]:
    """Measure every engine and baseline on one point of the sweep."""
    batches, sent = sweep_inputs(case, plan.seed, device, NUM_INPUTS)
    refused: list[Measurement] = []
    with ExitStack() as objects:
        calls: list[Call] = []
        for engine in plan.engines:
            make = partial(
                ty.ExpertParallel, **case.sizes, engine=engine, num_sms=case.sms, device=device
            )
            try:
                ep = objects.enter_context(make())
                calls += engine_calls(ep, case, batches, make)
            except ty.NotSupported as error:
                name = f"tokenyard {engine}"
                refused += [
                    Measurement(case=case, name=name, phase=phase, error=str(error))
                    for phase in PHASES
                ]
        calls += baselines(case, batches, copies=True)

        def truth(number: int) -> Truth:
            return Oracle.asked(case, batches[number], sent[number])

        lines = measure(calls, truth, plan, device, counter)
    return [line for phase in PHASES for line in refused + lines if line.phase == phase]


def engine_calls(
    ep: ty.ExpertParallel, case: Case, batches: list[Any], make: Callable[[], ty.ExpertParallel]
) -> list[Call]:
    """Dispatch, cached dispatch and combine of ``ep``. Collective."""
    library = Library(ep, case, batches, make)
    fresh = library.dispatch(cached=False, note=ep.why)
    return [fresh, library.dispatch(cached=True), library.combine()]


def measure(
    calls: Sequence[Call],
    truth: Callable[[int], Truth],
    plan: Plan,
    device: torch.device,
    counter: Counter | None = None,
) -> list[Measurement]:
    """Check every call, then measure memory and time of those that were right. Collective."""
    errors = check(calls, truth, NUM_INPUTS, device)
    advance(counter)
    right = [call for call, error in zip(calls, errors, strict=True) if not error]
    peaks = [
        on_ranks(peak_extra_bytes(each.cold or each.run, 0, device) + each.kept_bytes(), device)
        for each in right
    ]
    advance(counter)
    series = time_interleaved(
        [call.run for call in right],
        iterations=plan.iterations,
        warmup=plan.warmup,
        num_inputs=NUM_INPUTS,
        device=device,
        seed=plan.seed,
    )
    advance(counter)
    measured = iter(zip(series, peaks, strict=True))
    found = [(None, None) if error else next(measured) for error in errors]
    return [
        line_of(call, error, times, plan.link_gbs, peaks=peak)
        for call, error, (times, peak) in zip(calls, errors, found, strict=True)
    ]


def line_of(
    call: Call,
    error: str,
    times: Series | None,
    link_gbs: float | None,
    *,
    peaks: list[int] | None = None,
    **known: Any,
) -> Measurement:
    """The line of a call. ``peaks``: of each rank, the most bytes of tensors beyond the inputs."""
    moved, relative = call.least[0].moved, None
    if peaks and all(moved):
        relative = max(peak / size for peak, size in zip(peaks, moved, strict=True))
    return Measurement(
        case=call.case,
        name=call.name,
        phase=call.phase,
        kind=call.kind,
        note=call.note,
        ours=call.ep is not None,
        error=error,
        wall_us=times.wall if times else [],
        device_us=times.device if times else None,
        wire_bytes=sum(each.busiest for each in call.traffic) / len(call.traffic),
        floor_us=None if error or link_gbs is None else floor_us(call.least, link_gbs),
        bar_us=call.bar_us,
        symmetric_bytes=call.symmetric_bytes,
        peak_bytes=max(peaks) if peaks else None,
        peak_per_moved=relative,
        **known,
    )


def check(
    calls: Sequence[Any],
    truth: Callable[[int], Any],
    num_inputs: int,
    device: torch.device,
    known: Sequence[str] | None = None,
) -> list[str]:
    """Compare every call with the truth on every input: what is wrong with it, "" if nothing.

    ``known``: errors that calls have already, which are left out. Collective.
    """
    errors = list(known or [""] * len(calls))
    for number in range(num_inputs):
        expected = truth(number)
        # The truth takes ranks unequally long, and engines wait for peers a limited time only.
        on_ranks(0, device)
        for at, call in enumerate(calls):
            if not errors[at]:
                attempt = partial(call.attempt, number, expected)
                errors[at] = failure(attempt, call.title, number, device)
    return errors


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
            text = f"rank {dist.get_rank()}: {title}, input {number}: {what}"
            print(text, file=sys.stderr, flush=True)
    wrong = [rank for rank, failed in enumerate(on_ranks(int(bool(what)), device)) if failed]
    if not wrong:
        return ""
    where = f"wrong on rank {', '.join(map(str, wrong))} (input {number})"
    return f"{where}: {what}" if what else where


def on_ranks(value: int, device: torch.device) -> list[int]:
    """``value`` of every rank. Collective."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    mine[dist.get_rank()] = value
    return [int(each) for each in slowest_rank(mine, device)]
