"""``tokenyard demo``: options, where the text comes from, how ranks are started."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape

from tokenyard.cli.demo_check import bytes_of_rank_zero
from tokenyard.cli.demo_model import LayerShape
from tokenyard.cli.demo_rank import DemoConfig, DemoResult, run_rank
from tokenyard.cli.options import check_device, check_engine, check_plot
from tokenyard.cli.progress import progress
from tokenyard.cli.report import print_result
from tokenyard.engines.known import ENGINES
from tokenyard.errors import NotSupported
from tokenyard.launch import joined_by_launcher, spawn, under_torchrun
from tokenyard.types import Layout

DTYPES = Literal["float32", "bfloat16"]

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative error (2-norm of the difference over 2-norm) that passes for rounding."""

SUFFIXES = (".png", ".svg", ".pdf")
"""Kinds of file that a figure can be written to."""

README = Path(__file__).parents[3] / "README.md"
"""The project's README, if the package runs from its repository."""

Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks to start.", show_default="4; under torchrun its own"),
]
Text = Annotated[
    Path | None,
    typer.Option(help="File whose bytes are the tokens.", show_default="the project's README"),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False, help="Draw traffic and expert load (.png, .svg, .pdf).", show_default="none"
    ),
]


def demo(
    ranks: Ranks = None,
    text: Text = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Use at most so many bytes of the text.")
    ] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Channels of a token.")] = 128,
    experts: Annotated[int, typer.Option(min=1, help="Experts, all ranks together.")] = 16,
    topk: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 2,
    ffn: Annotated[int, typer.Option(min=1, help="Channels inside an expert.")] = 256,
    dtype: Annotated[
        DTYPES, typer.Option(help="What rows travel and experts compute in.")
    ] = "float32",
    layout: Annotated[
        Literal["flat", "expert_major"], typer.Option(help="Order of the received rows.")
    ] = "flat",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the ranks compute.")
    ] = "cpu",
    engine: Annotated[str, typer.Option(help="What moves the rows.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one to warm up.")] = 5,
    plot: Plot = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the output's gradient.")] = 0,
) -> None:
    """Run an MoE layer on a real text, forward and backward, over several ranks, and compare with
    one process.

    The exit code is 1 if the output or a gradient differs. Works under torchrun too.
    """
    world, leads = _ranks(ranks)
    _check(experts, topk, device, engine)
    shape = LayerShape(hidden, ffn, experts, topk, getattr(torch, dtype))
    config = DemoConfig(shape, Layout[layout.upper()], engine, steps, seed)
    console, content, title = Console(quiet=not leads), b"", ""
    if leads:
        check_plot(plot, SUFFIXES)
        name, content = _read(text, tokens)
        title = (
            f"{len(content)} bytes of {name}, {hidden} channels, top {topk} of {experts} experts, "
            f"{dtype}, {layout}"
        )
        console.print(f"[bold]{world} ranks[/bold] on {device}: {escape(title)}", highlight=False)
    result = _run(config, content, world, device, console)
    good = print_result(console, result, LIMITS[dtype])
    if leads and plot is not None:
        from tokenyard.cli.plots import save_traffic

        save_traffic(plot, result, title)
        console.print(f"Wrote {escape(str(plot))}", highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


def _ranks(asked: int | None) -> tuple[int, bool]:
    """How many ranks there will be, and whether this process is the one that reads and prints."""
    if not under_torchrun():
        return asked or 4, True
    started = int(os.environ["WORLD_SIZE"])
    if asked not in (None, started):
        raise typer.BadParameter(
            f"{asked} ranks, but torchrun started {started}: leave it out", param_hint="--ranks"
        )
    return started, os.environ["RANK"] == "0"


def _check(experts: int, topk: int, device: str, engine: str) -> None:
    if topk > experts:
        raise typer.BadParameter(
            f"{topk} experts per token, but there are {experts}", param_hint="--topk"
        )
    check_device(device)
    if engine not in ENGINES:
        raise typer.BadParameter(
            f"{engine!r} is not one of {', '.join(ENGINES)}", param_hint="--engine"
        )
    check_engine(engine, device)


def _read(path: Path | None, most: int) -> tuple[str, bytes]:
    """A name for the text, and its first bytes. Default: the README, which an installed package
    carries as metadata.
    """
    if path is not None:
        try:
            name, content = path.name, path.read_bytes()
        except OSError as error:
            raise typer.BadParameter(
                f"cannot read {path}: {error.strerror}", param_hint="--text"
            ) from None
    elif README.is_file():
        name, content = README.name, README.read_bytes()
    else:
        try:
            name, content = (
                "tokenyard's README",
                str(metadata("tokenyard").json.get("description", "")).encode(),
            )
        except PackageNotFoundError:
            raise typer.BadParameter(
                f"there is no README at {README}: name a file", param_hint="--text"
            ) from None
    if not content:
        raise typer.BadParameter(f"{name} is empty", param_hint="--text")
    return name, content[:most]


def _run(
    config: DemoConfig, content: bytes, world: int, device: str, console: Console
) -> DemoResult:
    """Start ``world`` ranks, or be one of torchrun's; ``content`` counts on the leading process
    only.
    """
    steps = [f"step {i + 1} of {config.steps}" for i in range(config.steps)]
    with progress(
        [f"starting {world} ranks", "warming up", *steps, "comparing with one process"], console
    ) as counter:
        try:
            if not under_torchrun():
                return spawn(run_rank, world, config, content, counter, device=device)[0]
            with joined_by_launcher(device) as here:
                return run_rank(here, config, bytes_of_rank_zero(content), counter)
        except NotSupported as error:
            raise typer.BadParameter(str(error), param_hint="--engine") from None
