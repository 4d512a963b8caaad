"""``tokenyard bench``: dispatch and combine beside the collectives anybody could use instead, timed in one run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from tokenyard import launch
from tokenyard.cli.bench_inputs import DTYPES, LAYOUTS, QUANTIZE, SKEWS, Job, sweep
from tokenyard.cli.bench_report import Row, print_report, write_json
from tokenyard.cli.bench_run import Plan, run_rank
from tokenyard.cli.progress import progress
from tokenyard.engines.select import ENGINES

NVLINK_GBS = 370.0
"""What stores by SMs reach over NVLink 4 in one direction, in GB/s, as NCCL's authors give it."""

PIPED_WIDTH = 150


def run_plan(plan: Plan, ranks: int, device: str, console: Console) -> list[Row]:
    """Run on the ranks of the launcher if there is one, else on ``ranks`` processes of our own."""
    stages = [f"{job.tokens} tokens, {job.skew}, {job.layout}" for job in plan.jobs]
    with progress(stages, console) as counter:
        if not launch.under_torchrun():
            return launch.spawn(run_rank, ranks, plan, counter, device=device)[0]
        with launch.joined_by_launcher(device) as here:
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


def _report(rows: list[Row], plan: Plan, device: str, console: Console, json: Path | None, plot: Path | None) -> None:
    print_report(rows, console, plan.iterations)
    if json is not None:
        write_json(json, rows, plan, device)
    if plot is not None:
        from tokenyard.cli.bench_plot import draw  # matplotlib is an extra

        draw(rows, plot)


def bench(
    ranks: Annotated[int, typer.Option(min=1, help="Local processes; under torchrun its ranks count.")] = 4,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where tensors live.")] = "cpu",
    engine: Annotated[list[str] | None, typer.Option(help="May be given several times.", show_default="auto")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens per rank. This and the next seven take comma lists.")] = "2048",
    hidden: Annotated[str, typer.Option(help="Channels of a token.")] = "2048",
    topk: Annotated[str, typer.Option(help="Experts per token.")] = "8",
    experts: Annotated[str, typer.Option(help="Experts over all ranks.")] = "64",
    skew: Annotated[
        str, typer.Option(help="uniform, zipf, recorded (text through a small random router).")
    ] = "uniform,zipf,recorded",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32.")] = "bf16",
    layout: Annotated[str, typer.Option(help="flat, expert_major, expert_padded.")] = "flat",
    quantize: Annotated[str, typer.Option(help="none, fp8, fp8_pow2, fp8_ue8m0: the cast in dispatch.")] = "none",
    iterations: Annotated[int, typer.Option(min=1, help="Timed rounds; a result worth quoting has at least 20.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before them.")] = 3,
    link_gbs: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB/s of a rank's link, one way.", show_default="cuda: 370, NVLink; cpu: unknown"),
    ] = None,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write every figure and all raw times.")] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the figures as a PNG.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and of the order of calls.")] = 0,
) -> None:
    """Time dispatch and combine beside plain collectives: same process group, same run, interleaved, checked first.

    The exit code is 1 if any row has no time because its result was wrong or its engine could not do what was asked.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'tokenyard[plots]'")
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
    engines = [_words(name, "--engine", ENGINES)[0] for name in engine or ["auto"]]
    rate = NVLINK_GBS if link_gbs is None and device == "cuda" else link_gbs
    plan = Plan(_check_jobs(jobs), engines, iterations, warmup, rate, seed)
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=PIPED_WIDTH)
    rows = run_plan(plan, ranks, device, console)
    if int(os.environ.get("RANK", 0)) == 0:
        _report(rows, plan, device, console, json, plot)
    raise typer.Exit(int(any(row.error for row in rows)))
