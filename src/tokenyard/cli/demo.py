"""``tokenyard demo``: the command, where the text comes from, and what is printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from statistics import median

import typer
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape

from tokenyard.cli.consoles import (
    Rows,
    bytes_text,
    leading_console,
    print_line,
    print_tables,
    seconds_text,
)
from tokenyard.cli.demo_rank import Options, Part, run_rank
from tokenyard.cli.options import bad, check_device, check_engine, check_plot, command
from tokenyard.cli.progress import on_all_ranks
from tokenyard.errors import NotSupported
from tokenyard.launch import under_torchrun

LIMIT = 1e-5
"""Largest relative error (2-norm of the difference over 2-norm) that passes for rounding."""

BAR_COLOURS = ("cyan", "yellow")
"""Neighbouring ranks take turns; told apart by every kind of colour vision."""
BAR_WIDTH = 40


@command(Options)
def demo(options: Options) -> None:
    """Run an MoE layer on a real text, forward and backward, over several ranks, and compare with
    one process.

    The exit code is 1 if the output or a gradient differs. Works under torchrun too.
    """
    world = _check(options)
    leads, console = leading_console()
    if leads:
        check_plot(options.plot)
    name, text = _read(options.text, options.tokens)
    title = (
        f"{len(text)} bytes of {name}, {options.hidden} channels, top {options.topk} of "
        f"{options.experts} experts"
    )
    print_line(console, f"[bold]{world} ranks[/bold] on {options.device}: {escape(title)}")
    parts = _run(options, text, world)
    good = print_result(console, parts)
    if leads and options.plot is not None:
        from tokenyard.cli.plots import save_traffic  # matplotlib is an extra

        save_traffic(options.plot, parts, title)
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
    check_engine(options.engine, options.device)
    return started


def _read(path: Path | None, most: int) -> tuple[str, bytes]:
    """A name for the text, and its first bytes. Default: the README, which the installed package
    has with it.
    """
    name = "tokenyard's README" if path is None else path.name
    try:
        if path is not None:
            content = path.read_bytes()
        else:
            content = str(metadata("tokenyard").json.get("description", "")).encode()
    except PackageNotFoundError:
        bad("--text", "tokenyard is not installed, so its README is not at hand: name a file")
    except OSError as error:
        bad("--text", f"cannot read {path}: {error.strerror}")
    if not content:
        bad("--text", f"{name} is empty")
    return name, content[:most]


def _run(options: Options, text: bytes, world: int) -> list[Part]:
    try:
        return on_all_ranks(run_rank, world, options.device, options, text)
    except NotSupported as error:
        bad("--engine", str(error))


# What is printed


def print_result(console: Console, parts: Sequence[Part]) -> bool:
    """All that there is to say about a run; returns whether no error exceeds :data:`LIMIT`."""
    print_line(console, f"Engine {escape(parts[0].why)}")
    ranks = [
        (*map(str, counts), bytes_text(sum(part.sent)), bytes_text(sum(part.received)))
        for rank, part in enumerate(parts)
        for counts in [(rank, len(part.load), part.tokens, part.rows)]
    ]
    load = [(rank, count) for rank, part in enumerate(parts) for count in part.load]
    most, mean = max(count for _, count in load), sum(count for _, count in load) / len(load)
    experts = [
        (str(expert), str(rank), str(count), _bar(count, most, rank))
        for expert, (rank, count) in enumerate(load)
    ]
    errors = {name: max(part.errors[name] for part in parts) for name in parts[0].errors}
    verdicts = ("[red]mismatch[/red]", "[green]ok[/green]")
    compared = [
        (escape(name), f"{error:.1e}", f"{LIMIT:.0e}", verdicts[error <= LIMIT])
        for name, error in errors.items()
    ]
    sections: dict[str, tuple[str, Rows]] = {
        "Ranks (bytes over the wire per step, forward and backward)": (
            "Rank|Experts|Tokens|Rows received|Bytes sent|Bytes received",
            ranks,
        ),
        f"Expert load (the largest is {most / mean:.2f} times the mean of {mean:.3g} tokens)": (
            "Expert|Rank|Tokens|<",
            experts,
        ),
        "Time (median over the steps, slowest rank)": ("<Phase|Time|<", _phases(parts)),
        "Relative error against the same layer on one process": ("<Tensor|Error|Limit|<", compared),
    }
    print_tables(console, sections)
    print_line(console, "")
    wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
    for name, error in wrong.items():
        text = f"MISMATCH: {name}: relative error {error:.1e}, but the limit is {LIMIT:.0e}"
        print_line(console, f"[bold red]{escape(text)}[/bold red]")
    if not wrong:
        text = "The output and all gradients match; the largest relative error is"
        print_line(console, f"[green]{text} {max(errors.values()):.1e}[/green]")
    return not wrong


def _bar(value: float, most: float, rank: int = 0) -> Bar:
    return Bar(most, 0, value, width=BAR_WIDTH, color=BAR_COLOURS[rank % len(BAR_COLOURS)])


def _phases(parts: Sequence[Part]) -> Rows:
    seconds = {
        name: median(map(max, zip(*(part.seconds[name] for part in parts), strict=True)))
        for name in parts[0].seconds
    }
    most = max(seconds.values())
    yield from ((name, seconds_text(each), _bar(each, most)) for name, each in seconds.items())
    yield "sum", seconds_text(sum(seconds.values()))
