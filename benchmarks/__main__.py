"""``python -m benchmarks SUITE``, from the repository's root: measure a suite, write its record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks import collective, low_latency_report, nvlink_report, twolevel_report
from benchmarks.low_latency import Decode, run_decode
from benchmarks.nvlink import Suite, run_suite
from benchmarks.record import Page, write_record
from benchmarks.twolevel import BAR_SMS, TwoLevel, on_both_engines
from tokenyard import launch
from tokenyard.cli.bench import NVLINK_GBS, run_rank
from tokenyard.cli.bench_report import Measurement
from tokenyard.cli.consoles import leads, on_all_ranks, table_console
from tokenyard.cli.options import bad, check_device, command, option, word_of
from tokenyard.engines.known import ENGINES, ON_KERNELS
from tokenyard.engines.obstacles import obstacle_of

NODES: dict[str, Any] = {"topology": (2, 1), "parts_tokens": 0}
SMALL: dict[str, Any] = {"hidden": 256, "iterations": 2, "warmup": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A suite: what it measures (and a tiny one, to try it), how, and its page.

    Attributes:
        preset, tiny: by device. run: one rank's part, of (device, suite).
        takes: options besides --ranks, --iterations, --warmup, --seed, --tiny and --out.
    """

    preset: Mapping[str, Any]
    tiny: Any
    run: Callable[..., Sequence[Measurement]]
    page: Page
    takes: tuple[str, ...] = ()


SUITES = {
    "nvlink": Entry(
        preset={"cuda": Suite(), "cpu": Suite()},
        tiny=Suite(tokens=12, topk=2, experts=6, sms=(8, 24), curve=(4, 30), buffer_bytes=4096,
                   **SMALL),
        run=run_suite,
        page=nvlink_report.PAGE,
        takes=("device", "engine", "link_gbs"),
    ),
    "twolevel": Entry(
        preset={"cuda": TwoLevel()},
        tiny=TwoLevel(tokens=6, experts=8, topk=3, curve=(6,), sms=(BAR_SMS,), overfull=4, calls=2,
                      **SMALL),
        run=run_rank,
        page=twolevel_report.PAGE,
        takes=("topology",),
    ),
    "low_latency": Entry(
        preset={"cuda": Decode()},
        tiny=Decode(tokens=(2, 4), topk=2, experts=4, parts_tokens=4, **SMALL),
        run=run_decode,
        page=low_latency_report.PAGE,
    ),
    "low_latency_nodes": Entry(
        preset={"cuda": Decode(**NODES, tokens=(128,), replays=10_000)},
        tiny=Decode(**NODES, tokens=(4,), topk=2, experts=4, replays=20, **SMALL),
        run=run_decode,
        page=low_latency_report.PAGE,
        takes=("topology",),
    ),
    "collective": Entry(
        preset=collective.COLLECTIVE,
        tiny=collective.plan({"tokens": [6], "hidden": [24], "topk": [2], "experts": [5]}, 2, 1),
        run=run_rank,
        page=collective.PAGE,
        takes=("device", "link_gbs"),
    ),
}  # fmt: skip

Rate = Annotated[
    float | None,
    option("GB/s of a rank's link, one way.", min=0.001, show_default="370 on cuda"),
]
WHAT = "nvlink: what is measured."
Engine = Annotated[str | None, option(WHAT, parser=word_of(ENGINES), show_default="nvlink")]
Where = Annotated[
    Literal["cpu", "cuda"] | None,
    option("nvlink, collective: where tensors live.", show_default="cuda"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``python -m benchmarks``."""

    suite: Annotated[
        Literal["nvlink", "twolevel", "low_latency", "low_latency_nodes", "collective"],
        typer.Argument(help="Which record to make."),
    ]
    ranks: Annotated[int, option("Local processes; under torchrun its ranks count.", min=1)] = 4
    device: Where = None
    engine: Engine = None
    topology: Annotated[
        str | None, option("twolevel, low_latency_nodes: NODESxRANKS.", show_default="two nodes")
    ] = None
    iterations: Annotated[
        int | None, option("Timed rounds.", min=1, show_default="the record's")
    ] = None
    warmup: Annotated[int | None, option("Rounds before them.", min=1, show_default="3")] = None
    link_gbs: Rate = None
    seed: Annotated[int, option("Of inputs and of the order of calls.", min=0)] = 0
    tiny: Annotated[bool, option("Small sizes, to try a suite.")] = False
    out: Annotated[Path, option("Where Markdown, JSON and pictures go.", file_okay=False)] = Path()

    @property
    def where(self) -> str:
        return self.device or "cuda"

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"]) if launch.under_torchrun() else self.ranks

    def preset(self) -> Any:
        """The suite with what was asked for, checked."""
        entry, given = SUITES[self.suite], asdict(self)
        special = {name for each in SUITES.values() for name in each.takes}
        if wrong := [name for name in given if name in special - {*entry.takes} and given[name]]:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise typer.BadParameter(f"{self.suite} has no use for {named}")
        if self.where == "cuda" and not torch.cuda.is_available():
            raise typer.BadParameter(f"{self.suite} needs CUDA devices, and torch sees none here")
        check_device(self.where)
        changes = {name: given[name] for name in ("iterations", "warmup") if given[name]}
        changes["seed"] = self.seed
        if "engine" in entry.takes:
            changes["engine"] = self.engine or "nvlink"
            if self.where == "cpu" and changes["engine"] in ON_KERNELS:
                why = f"engine {changes['engine']!r} cannot work here: {obstacle_of(None)}"
                bad("--engine", f"{why}; engine 'collective' can")
        if "link_gbs" in entry.takes:
            known = NVLINK_GBS if self.where == "cuda" else None
            changes["link_gbs"] = self.link_gbs or known
        if "topology" in entry.takes:
            changes["topology"] = grid(self.topology, self.world_size)
        return replace(entry.tiny if self.tiny else entry.preset[self.where], **changes)


def grid(text: str | None, ranks: int) -> tuple[int, int]:
    """``--topology``; two nodes by default."""
    asked = f"2x{ranks // 2}" if text is None else text
    nodes, _, each = asked.partition("x")
    several = nodes.isdecimal() and each.isdecimal() and int(nodes) > 1
    if several and int(nodes) * int(each) == ranks:
        return int(nodes), int(each)
    raise typer.BadParameter(
        f"--topology {asked!r} must be NODESxRANKS, of two nodes at least, for all {ranks} --ranks"
    )


def measure(suite: Any, options: Options) -> Sequence[Measurement]:
    """The lines of a suite, on the ranks of the launcher if there is one, else on processes."""
    if isinstance(suite, TwoLevel):
        return on_both_engines(suite, options.where)
    return on_all_ranks(SUITES[options.suite].run, options.ranks, options.where, suite)


@command(Options)
def main(options: Options) -> None:
    """Measure a suite of the project and write its record: `<suite>-<hardware>-<day>.md` and
    `.json`; `nvlink` and `collective` draw a picture too.

    All take --ranks, --iterations, --warmup, --seed, --tiny and --out; `nvlink` also --device,
    --engine and --link-gbs, `collective` --device and --link-gbs, `twolevel` and
    `low_latency_nodes` --topology.

    The exit code is 1 if a line has no time. A bar that is missed is no error.
    """
    suite = options.preset()
    lines = measure(suite, options)
    if leads():
        console = table_console()
        name = getattr(suite, "engine", options.suite) + ("-tiny" if options.tiny else "")
        used = options.world_size if "topology" in SUITES[options.suite].takes else None
        page = SUITES[options.suite].page
        path = write_record(options.out, name, lines, suite, options.where, page, used)
        show: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
        console.print(path.read_text(), **show)
        console.print(f"Written: {path}", **show)
    raise typer.Exit(int(any(line.error for line in lines)))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
