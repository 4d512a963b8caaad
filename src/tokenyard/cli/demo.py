"""``tokenyard demo``: options, where the text comes from, how ranks are started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape

from tokenyard.cli.consoles import print_line, print_result
from tokenyard.cli.demo_model import LayerShape
from tokenyard.cli.demo_rank import DemoConfig, DemoResult, bytes_of_rank_zero, run_rank
from tokenyard.cli.options import bad, check_device, check_engine, check_plot, command, option
from tokenyard.cli.progress import progress
from tokenyard.engines.known import AUTO, ENGINES
from tokenyard.errors import NotSupported
from tokenyard.launch import joined_by_launcher, spawn, under_torchrun
from tokenyard.types import Layout

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative error (2-norm of the difference over 2-norm) that passes for rounding."""

SUFFIXES = (".png", ".svg", ".pdf")
"""Kinds of file that a figure can be written to."""

README = Path(__file__).parents[3] / "README.md"
"""The project's README, if the package runs from its repository."""

Ranks = Annotated[
    int | None, option("Ranks to start.", min=1, show_default="4; under torchrun its own")
]
Text = Annotated[
    Path | None, option("File whose bytes are the tokens.", show_default="the project's README")
]
Plot = Annotated[
    Path | None, option("Draw traffic and expert load (.png, .svg, .pdf).", dir_okay=False)
]
Layouts = Annotated[Literal["flat", "expert_major"], option("Order of the received rows.")]
Dtype = Annotated[
    Literal["float32", "bfloat16"], option("What rows travel and experts compute in.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``tokenyard demo``."""

    ranks: Ranks = None
    text: Text = None
    tokens: Annotated[int, option("Use at most so many bytes of the text.", min=1)] = 4096
    hidden: Annotated[int, option("Channels of a token.", min=1)] = 128
    experts: Annotated[int, option("Experts, all ranks together.", min=1)] = 16
    topk: Annotated[int, option("Experts per token.", min=1)] = 2
    ffn: Annotated[int, option("Channels inside an expert.", min=1)] = 256
    dtype: Dtype = "float32"
    layout: Layouts = "flat"
    device: Annotated[Literal["cpu", "cuda"], option("Where the ranks compute.")] = "cpu"
    engine: Annotated[str, option("What moves the rows.")] = AUTO
    steps: Annotated[int, option("Timed steps, after one to warm up.", min=1)] = 5
    plot: Plot = None
    seed: Annotated[int, option("Of the weights and the output's gradient.")] = 0

    @property
    def config(self) -> DemoConfig:
        """What every rank runs, checked."""
        if self.topk > self.experts:
            bad("--topk", f"{self.topk} experts per token, but there are {self.experts}")
        check_device(self.device)
        if self.engine not in ENGINES:
            bad("--engine", f"{self.engine!r} is not one of {', '.join(ENGINES)}")
        check_engine(self.engine, self.device)
        dtype = getattr(torch, self.dtype)
        shape = LayerShape(self.hidden, self.ffn, self.experts, self.topk, dtype)
        return DemoConfig(shape, Layout[self.layout.upper()], self.engine, self.steps, self.seed)


@command(Options)
def demo(options: Options) -> None:
    """Run an MoE layer on a real text, forward and backward, over several ranks, and compare with
    one process.

    The exit code is 1 if the output or a gradient differs. Works under torchrun too.
    """
    world, leads = _ranks(options.ranks)
    config = options.config
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
    result = _run(config, content, world, options.device, console)
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


def _run(
    config: DemoConfig, content: bytes, world: int, device: str, console: Console
) -> DemoResult:
    """Start ``world`` ranks, or be one of torchrun's; ``content`` counts on the leading process
    only.
    """
    steps = [f"step {i + 1} of {config.steps}" for i in range(config.steps)]
    stages = [f"starting {world} ranks", "warming up", *steps, "comparing with one process"]
    with progress(stages, console) as counter:
        try:
            if not under_torchrun():
                return spawn(run_rank, world, config, content, counter, device=device)[0]
            with joined_by_launcher(device) as here:
                return run_rank(here, config, bytes_of_rank_zero(content), counter)
        except NotSupported as error:
            bad("--engine", str(error))
