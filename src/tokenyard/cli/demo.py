"""``tokenyard demo``: the command, where the text comes from, how ranks are started."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from tokenyard.cli.consoles import print_line
from tokenyard.cli.demo_model import Options
from tokenyard.cli.demo_rank import DemoResult, bytes_of_rank_zero, run_rank
from tokenyard.cli.demo_report import print_result
from tokenyard.cli.options import bad, check_device, check_engine, check_plot, command
from tokenyard.cli.progress import progress
from tokenyard.engines.known import ENGINES
from tokenyard.errors import NotSupported
from tokenyard.launch import joined_by_launcher, spawn, under_torchrun

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative error (2-norm of the difference over 2-norm) that passes for rounding."""

SUFFIXES = (".png", ".svg", ".pdf")
"""Kinds of file that a figure can be written to."""

README = Path(__file__).parents[3] / "README.md"
"""The project's README, if the package runs from its repository."""


@command(Options)
def demo(options: Options) -> None:
    """Run an MoE layer on a real text, forward and backward, over several ranks, and compare with
    one process.

    The exit code is 1 if the output or a gradient differs. Works under torchrun too.
    """
    world, leads = _ranks(options.ranks)
    _check(options)
    console, content, title = Console(quiet=not leads), b"", ""
    if leads:
        check_plot(options.plot, SUFFIXES)
        name, content = _read(options.text, options.tokens)
        title = (
            f"{len(content)} bytes of {name}, {options.hidden} channels, top {options.topk} of "
            f"{options.experts} experts, {options.dtype}, {options.layout}"
        )
        text = f"[bold]{world} ranks[/bold] on {options.device}: {escape(title)}"
        console.print(text, highlight=False)
    result = _run(options, content, world, console)
    good = print_result(console, result, LIMITS[options.dtype])
    if leads and options.plot is not None:
        from tokenyard.cli.plots import save_traffic

        save_traffic(options.plot, result, title)
        print_line(console, f"Wrote {escape(str(options.plot))}")
    if not good:
        raise typer.Exit(1)


def _ranks(asked: int | None) -> tuple[int, bool]:
    """How many ranks there will be, and whether this process is the one that reads and prints."""
    if not under_torchrun():
        return asked or 4, True
    started = int(os.environ["WORLD_SIZE"])
    if asked not in (None, started):
        bad("--ranks", f"{asked} ranks, but torchrun started {started}: leave it out")
    return started, os.environ["RANK"] == "0"


def _check(options: Options) -> None:
    """The options fit each other and this machine."""
    if options.topk > options.experts:
        bad("--topk", f"{options.topk} experts per token, but there are {options.experts}")
    check_device(options.device)
    if options.engine not in ENGINES:
        bad("--engine", f"{options.engine!r} is not one of {', '.join(ENGINES)}")
    check_engine(options.engine, options.device)


def _read(path: Path | None, most: int) -> tuple[str, bytes]:
    """A name for the text, and its first bytes. Default: the README, which an installed package
    carries as metadata.
    """
    name, content = "tokenyard's README", b""
    if path is not None or README.is_file():
        file = path or README
        name = file.name
        try:
            content = file.read_bytes()
        except OSError as error:
            bad("--text", f"cannot read {file}: {error.strerror}")
    else:
        try:
            content = str(metadata("tokenyard").json.get("description", "")).encode()
        except PackageNotFoundError:
            bad("--text", f"there is no README at {README}: name a file")
    if not content:
        bad("--text", f"{name} is empty")
    return name, content[:most]


def _run(options: Options, content: bytes, world: int, console: Console) -> DemoResult:
    """Start ``world`` ranks, or be one of torchrun's; ``content`` counts on the leading process
    only.
    """
    steps = [f"step {i + 1} of {options.steps}" for i in range(options.steps)]
    stages = [f"starting {world} ranks", "warming up", *steps, "comparing with one process"]
    with progress(stages, console) as counter:
        try:
            if not under_torchrun():
                return spawn(run_rank, world, options, content, counter, device=options.device)[0]
            with joined_by_launcher(options.device) as here:
                return run_rank(here, options, bytes_of_rank_zero(content), counter)
        except NotSupported as error:
            bad("--engine", str(error))
