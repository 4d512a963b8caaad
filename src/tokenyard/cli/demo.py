"""``tokenyard demo``: the command, where the text comes from, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import typer
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.markup import escape

from tokenyard.cli.consoles import (
    bytes_text,
    leading_console,
    print_line,
    print_tables,
    seconds_text,
)
from tokenyard.cli.demo_model import Options
from tokenyard.cli.demo_rank import DemoResult, run_rank
from tokenyard.cli.options import (
    bad,
    check_device,
    check_engine,
    check_plot,
    check_words,
    command,
)
from tokenyard.cli.progress import on_all_ranks, progress
from tokenyard.engines.known import ENGINES
from tokenyard.errors import NotSupported
from tokenyard.launch import under_torchrun

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative error (2-norm of the difference over 2-norm) that passes for rounding."""

SUFFIXES = (".png", ".svg", ".pdf")
README = Path(__file__).parents[3] / "README.md"
"""The project's README, if the package runs from its repository."""

BAR_COLOURS = ("cyan", "yellow")
"""Neighbouring ranks take turns; told apart by every kind of colour vision."""
BAR_WIDTH = 40
MOST_BARS = 32
"""Experts shown; of more, the busiest."""


@command(Options)
def demo(options: Options) -> None:
    """Run an MoE layer on a real text, forward and backward, over several ranks, and compare with
    one process.

    The exit code is 1 if the output or a gradient differs. Works under torchrun too.
    """
    world = _check(options)
    leads, console = leading_console()
    if leads:
        check_plot(options.plot, SUFFIXES)
    name, text = _read(options.text, options.tokens)
    title = (
        f"{len(text)} bytes of {name}, {options.hidden} channels, top {options.topk} of "
        f"{options.experts} experts, {options.dtype}, {options.layout}"
    )
    print_line(console, f"[bold]{world} ranks[/bold] on {options.device}: {escape(title)}")
    result = _run(options, text, world, console)
    good = print_result(console, result, LIMITS[options.dtype])
    if leads and options.plot is not None:
        from tokenyard.cli.plots import save_traffic  # matplotlib is an extra

        save_traffic(options.plot, result, title)
        print_line(console, f"Wrote {escape(str(options.plot))}")
    raise typer.Exit(int(not good))


def _check(options: Options) -> int:
    """The options fit each other and this machine. Returns how many ranks there will be."""
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else options.ranks or 4
    if options.ranks not in (None, started):
        bad("--ranks", f"{options.ranks} ranks, but torchrun started {started}: leave it out")
    if options.topk > options.experts:
        bad("--topk", f"{options.topk} experts per token, but there are {options.experts}")
    check_device(options.device)
    check_words("--engine", [options.engine], ENGINES)
    check_engine(options.engine, options.device)
    return started


def _read(path: Path | None, most: int) -> tuple[str, bytes]:
    """A name for the text, and its first bytes. Default: the README, which an installed package
    carries as metadata.
    """
    if path is not None or README.is_file():
        file = path or README
        name = file.name
        try:
            content = file.read_bytes()
        except OSError as error:
            bad("--text", f"cannot read {file}: {error.strerror}")
    else:
        name = "tokenyard's README"
        try:
            content = str(metadata("tokenyard").json.get("description", "")).encode()
        except PackageNotFoundError:
            bad("--text", f"there is no README at {README}: name a file")
    if not content:
        bad("--text", f"{name} is empty")
    return name, content[:most]


def _run(options: Options, text: bytes, world: int, console: Console) -> DemoResult:
    steps = [f"step {i + 1} of {options.steps}" for i in range(options.steps)]
    stages = [f"starting {world} ranks", "warming up", *steps, "comparing with one process"]
    with progress(stages, console) as counter:
        try:
            return on_all_ranks(run_rank, world, options.device, options, text, counter)
        except NotSupported as error:
            bad("--engine", str(error))


# What is printed


def print_result(console: Console, result: DemoResult, limit: float) -> bool:
    """Everything that there is to say about a run; returns whether every error is within
    ``limit``.
    """
    errors, worst = result.errors, worst_of_each_kind(result.errors)
    print_line(console, f"Engine {escape(result.why)}")
    counts = (map(str, each) for each in (result.experts, result.tokens, result.rows))
    moved = (map(bytes_text, map(sum, each)) for each in (result.sent, result.received))
    ranks = zip(map(str, range(len(result.rows))), *counts, *moved, strict=True)
    verdicts = ("[red]mismatch[/red]", "[green]ok[/green]")
    compared = [
        (escape(name), f"{errors[name]:.1e}", f"{limit:.0e}", verdicts[errors[name] <= limit])
        for name in worst
    ]
    sections: dict[str, tuple[str, Iterable[Sequence[RenderableType]]]] = {
        "Ranks (bytes over the wire per step, forward and backward)": (
            "Rank|Experts|Tokens|Rows received|Bytes sent|Bytes received",
            ranks,
        ),
        f"Expert load ({_imbalance(result.load)})": ("Expert|Rank|Tokens|<", _load(result)),
        "Time (median over the steps, slowest rank)": ("<Phase|Time|<", _phases(result.seconds)),
        "Relative error against the same layer on one process": (
            "<Tensor (of its kind the worst)|Error|Limit|<",
            compared,
        ),
    }
    print_tables(console, sections)
    print_line(console, "")
    wrong = [name for name in worst if not errors[name] <= limit]
    for name in wrong:
        text = f"MISMATCH: {name}: relative error {errors[name]:.1e}, but the limit is {limit:.0e}"
        print_line(console, f"[bold red]{escape(text)}[/bold red]")
    if not wrong:
        text = f"The output and all {len(errors) - 1} gradients match; the largest relative error"
        print_line(console, f"[green]{text} is {max(errors.values()):.1e}[/green]")
    return not wrong


def worst_of_each_kind(errors: Mapping[str, float]) -> list[str]:
    """Of ``gate[0] gradient``, ``gate[1] gradient``, ... only the one with the largest error."""
    worst: dict[str, str] = {}
    for name in sorted(errors, key=lambda name: errors[name]):
        worst[name.partition("[")[0]] = name
    return [name for name in errors if name in worst.values()]


def _imbalance(load: Sequence[int]) -> str:
    mean = sum(load) / len(load)
    shown = f"{MOST_BARS} busiest of {len(load)}; " if len(load) > MOST_BARS else ""
    return f"{shown}the largest is {max(load) / mean:.2f} times the mean of {mean:.3g} tokens"


def _bar(value: float, most: float, rank: int = 0) -> Bar:
    return Bar(most, 0, value, width=BAR_WIDTH, color=BAR_COLOURS[rank % len(BAR_COLOURS)])


def _load(result: DemoResult) -> list[Sequence[RenderableType]]:
    load, most = result.load, max(result.load)
    owners = [rank for rank, held in enumerate(result.experts) for _ in range(held)]
    busiest = sorted(range(len(owners)), key=lambda expert: -load[expert])[:MOST_BARS]
    return [
        (str(at), str(owners[at]), str(load[at]), _bar(load[at], most, owners[at]))
        for at in sorted(busiest)
    ]


def _phases(seconds: Mapping[str, float]) -> list[Sequence[RenderableType]]:
    most, total = max(seconds.values()), sum(seconds.values())
    bars = [(name, seconds_text(each), _bar(each, most)) for name, each in seconds.items()]
    return [*bars, ("sum", seconds_text(total))]
