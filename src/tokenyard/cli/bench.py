"""``tokenyard bench``: dispatch and combine beside the collectives anybody could use instead, timed
in one run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from tokenyard import launch
from tokenyard.arguments import LARGEST
from tokenyard.cli.bench_decode import Decode, Timed, run_decode
from tokenyard.cli.bench_decode_report import write_decode_record
from tokenyard.cli.bench_inputs import DTYPES, LAYOUTS, QUANTIZE, SKEWS, Job, sweep
from tokenyard.cli.bench_nvlink import Line, Suite, run_suite
from tokenyard.cli.bench_nvlink_report import write_record
from tokenyard.cli.bench_report import Row, print_report, write_json
from tokenyard.cli.bench_run import Plan, run_rank
from tokenyard.cli.bench_twolevel import Crossing, TwoLevel, on_all_ranks
from tokenyard.cli.bench_twolevel_report import write_twolevel_record
from tokenyard.cli.options import check_device, check_engine, check_folder, check_plot
from tokenyard.cli.progress import progress
from tokenyard.engines.known import ENGINES

NVLINK_GBS = 370.0
"""What stores by SMs reach over NVLink 4 in one direction, in GB/s, as NCCL's authors give it."""

PIPED_WIDTH = 150

SUITE = Suite()
SWEEP_OPTIONS = (
    "tokens",
    "hidden",
    "topk",
    "experts",
    "skew",
    "dtype",
    "layout",
    "quantize",
    "json",
    "plot",
)
NVLINK_OPTIONS = ("device", "engine", "link_gbs")
"""Of the suites, only ``nvlink`` has a use for them. Names are those of :func:`bench`'s parameters.
"""


def run_plan(plan: Plan, ranks: int, device: str, console: Console) -> list[Row]:
    """Run on the ranks of the launcher if there is one, else on ``ranks`` processes of our own."""
    with progress(plan.stages, console) as counter:
        if not launch.under_torchrun():
            return launch.spawn(run_rank, ranks, plan, counter, device=device)[0]
        with launch.joined_by_launcher(device) as here:
            return run_rank(here, plan, counter)


def _run_suite(suite: Suite, ranks: int, device: str, out: Path, console: Console) -> list[Line]:
    """Run the preset and write its record."""
    with progress(suite.stages, console, bar=False) as counter:
        if launch.under_torchrun():
            with launch.joined_by_launcher(device) as here:
                lines = run_suite(here, suite, counter)
        else:
            lines = launch.spawn(run_suite, ranks, suite, counter, device=device)[0]
    if int(os.environ.get("RANK", 0)) == 0:
        record = write_record(out, lines, suite, device)
        console.print(record.read_text(), markup=False, highlight=False, soft_wrap=True)
        console.print(f"Written: {record}", markup=False, highlight=False, soft_wrap=True)
    return lines


def _run_decode(suite: Decode, ranks: int, out: Path, console: Console) -> list[Timed]:
    """The same for the preset of engine low_latency."""
    with progress(suite.stages, console, bar=False) as counter:
        if launch.under_torchrun():
            with launch.joined_by_launcher("cuda") as here:
                lines = run_decode(here, suite, counter)
        else:
            lines = launch.spawn(run_decode, ranks, suite, counter, device="cuda")[0]
    if int(os.environ.get("RANK", 0)) == 0:
        record = write_decode_record(out, lines, suite, "cuda")
        console.print(record.read_text(), markup=False, highlight=False, soft_wrap=True)
    return lines


def _run_twolevel(suite: TwoLevel, out: Path, console: Console) -> list[Crossing]:
    """The same for the preset of engine twolevel."""
    lines = on_all_ranks(suite, "cuda", console)
    if int(os.environ.get("RANK", 0)) == 0:
        record = write_twolevel_record(out, lines, suite, "cuda")
        console.print(record.read_text(), markup=False, highlight=False, soft_wrap=True)
    return lines


def _grid(text: str | None, ranks: int) -> tuple[int, int]:
    """``--topology``; two nodes by default."""
    words = f"2x{ranks // 2}" if text is None else text
    nodes, _, each = words.partition("x")
    if (
        nodes.isdecimal()
        and each.isdecimal()
        and int(nodes) > 1
        and int(nodes) * int(each) == ranks
    ):
        return int(nodes), int(each)
    raise typer.BadParameter(
        f"--topology {words!r} must be NODESxRANKS, of two nodes at least, for all {ranks} --ranks"
    )


def _words(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in allowed:
            raise typer.BadParameter(
                f"{option} {word!r} is unknown; use one of {', '.join(allowed)}"
            )
    return words


def _numbers(text: str, option: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= LARGEST:
            raise typer.BadParameter(
                f"{option} {word!r} must be a whole number of at least 1 (at most {LARGEST})"
            )
    return [int(word) for word in words]


def _given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Those of the parameters ``names`` that stand on the command line, as they stand there."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _check_suite(context: typer.Context, suite: str, engines: Sequence[str], device: str) -> None:
    """A suite can run with the options that were given."""
    if given := _given(
        context, SWEEP_OPTIONS if suite == "nvlink" else (*SWEEP_OPTIONS, *NVLINK_OPTIONS)
    ):
        raise typer.BadParameter(f"--suite {suite} has no use for {', '.join(given)}")
    if len(engines) > 1:
        raise typer.BadParameter("--suite measures one --engine at a time")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--suite needs CUDA devices, and torch sees none here")
    check_engine(engines[0], device)


def _check_files(json: Path | None, plot: Path | None) -> None:
    """Where the process that writes them can, if this is the one."""
    if int(os.environ.get("RANK", 0)) == 0:
        check_folder(json, "--json")
        check_plot(plot)


def _check_jobs(jobs: list[Job]) -> list[Job]:
    for job in jobs:
        if job.topk > job.experts:
            raise typer.BadParameter(f"--topk {job.topk} must be at most --experts {job.experts}")
    return jobs


def _report(
    rows: list[Row], plan: Plan, device: str, console: Console, json: Path | None, plot: Path | None
) -> None:
    print_report(rows, console, plan.iterations)
    if json is not None:
        write_json(json, rows, plan, device)
    if plot is not None:
        from tokenyard.cli.bench_plot import draw  # matplotlib is an extra

        draw(rows, plot)


def bench(
    context: typer.Context,
    ranks: Annotated[
        int, typer.Option(min=1, help="Local processes; under torchrun its ranks count.")
    ] = 4,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Where tensors live.", show_default="cpu; with --suite cuda"),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="May be given several times (with --suite: once).",
            show_default="auto; with --suite nvlink",
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Tokens per rank. This and the next seven take comma lists.")
    ] = "2048",
    hidden: Annotated[str, typer.Option(help="Channels of a token.")] = "2048",
    topk: Annotated[str, typer.Option(help="Experts per token.")] = "8",
    experts: Annotated[str, typer.Option(help="Experts over all ranks.")] = "64",
    skew: Annotated[
        str, typer.Option(help="uniform, zipf, recorded (text through a small random router).")
    ] = "uniform,zipf,recorded",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32.")] = "bf16",
    layout: Annotated[str, typer.Option(help="flat, expert_major, expert_padded.")] = "flat",
    quantize: Annotated[
        str, typer.Option(help="none, fp8, fp8_pow2, fp8_ue8m0: the cast in dispatch.")
    ] = "none",
    iterations: Annotated[
        int, typer.Option(min=1, help="Timed rounds; a result worth quoting has at least 20.")
    ] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before them.")] = 3,
    link_gbs: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GB/s of a rank's link, one way.",
            show_default="cuda: 370, NVLink; cpu: unknown",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write every figure and all raw times.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the figures as a PNG.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and of the order of calls.")] = 0,
    suite: Annotated[
        Literal["nvlink", "low_latency", "twolevel"] | None,
        typer.Option(help="Instead of a sweep: all tables and curves of an engine's record."),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="Of --suite twolevel: NODESxRANKS.", show_default="two nodes")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Where --suite writes Markdown and JSON (nvlink: a PNG too)."
        ),
    ] = Path(),
) -> None:
    """Time dispatch and combine beside plain collectives: same process group, same run,
    interleaved, checked first.

    `--suite` goes with --ranks, --iterations, --warmup, --seed and --out; `nvlink` also with
    --device, --engine and --link-gbs, `twolevel` with --topology.

    The exit code is 1 if any row has no time because its result was wrong or its engine could not
    do what was asked.
    """
    leads = int(os.environ.get("RANK", 0)) == 0
    terminal = Console(quiet=not leads)
    console = terminal if terminal.is_terminal else Console(width=PIPED_WIDTH, quiet=not leads)
    where = device or ("cpu" if suite is None else "cuda")
    rate = NVLINK_GBS if link_gbs is None and where == "cuda" else link_gbs
    if topology is not None and suite != "twolevel":
        raise typer.BadParameter("--topology goes with --suite twolevel")
    asked = engine or ["auto" if suite is None else "nvlink"]
    engines = [word for words in asked for word in _words(words, "--engine", ENGINES)]
    if suite is not None:
        _check_suite(context, suite, engines, where)
        if suite == "low_latency":
            timed = _run_decode(
                Decode(iterations=iterations, warmup=warmup, seed=seed), ranks, out, console
            )
            raise typer.Exit(int(any(line.error for line in timed)))
        if suite == "twolevel":
            grid = _grid(
                topology, int(os.environ["WORLD_SIZE"]) if launch.under_torchrun() else ranks
            )
            network = TwoLevel(topology=grid, iterations=iterations, warmup=warmup, seed=seed)
            raise typer.Exit(int(any(line.error for line in _run_twolevel(network, out, console))))
        preset = replace(
            SUITE, engine=engines[0], iterations=iterations, warmup=warmup, link_gbs=rate, seed=seed
        )
        lines = _run_suite(preset, ranks, where, out, console)
        raise typer.Exit(int(any(line.error for line in lines)))
    if given := _given(context, ["out"]):
        raise typer.BadParameter(f"{given[0]} goes with --suite; a sweep has --json and --plot")
    check_device(where)
    _check_files(json, plot)
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
    plan = Plan(_check_jobs(jobs), engines, iterations, warmup, rate, seed)
    rows = run_plan(plan, ranks, where, console)
    if leads:
        _report(rows, plan, where, console, json, plot)
    raise typer.Exit(int(any(row.error for row in rows)))
