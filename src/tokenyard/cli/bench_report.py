"""What a bench says: one measurement, tables and ratios for a reader, JSON for a program."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tokenyard
from tokenyard.cli.bench_baselines import FRESH_COPIES, KEPT_COPIES, PLAIN_EXCHANGE
from tokenyard.cli.bench_cases import CACHED, COMBINE, DISPATCH
from tokenyard.cli.bench_inputs import Case
from tokenyard.cli.timing import Stats, summarise

SCHEMA = 2
"""Of the JSON. 1, without a number, is what records of before 2026-11-23 have."""

QUOTABLE_ITERATIONS = 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What one call puts to other nodes.

    Attributes:
        rows, put_bytes: per rank, rows and all bytes, mean over the inputs, as the engine counted.
        planned: rows of which the picks say so. row_bytes: payload and scales of one.
        nvshmem: whether it lies between nodes.
        held_bytes: symmetric memory of the object when it was made, of the rank with most.
        other_bytes: most bytes of tensors during a call besides its result, of the worst rank.
    """

    planned: list[float]
    row_bytes: int
    rows: list[float] = field(default_factory=list[float])
    put_bytes: list[float] = field(default_factory=list[float])
    nvshmem: bool | None = None
    held_bytes: int | None = None
    other_bytes: int | None = None

    @property
    def payload_bytes(self) -> float:
        """Bytes of rows that every rank puts to other nodes: those of the rank with fewest."""
        return min(self.rows or self.planned, default=0) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of a table. Times are microseconds of one call of the slowest rank, one per round.

    Attributes:
        name, phase: of the system or the call. section, kind: where it belongs in a suite.
        ours: a call of the library. note: about it. error: why there are no times, "" if there are.
        wall_us: the Python call until its results are complete.
        device_us: between CUDA events, None without a GPU.
        wire_bytes: in the busiest direction of the busiest rank, no self traffic, mean over inputs.
        floor_us: what the case's least traffic takes at the link's rate, None if that is unknown.
        bar_us: what it should at most take, None without a bar.
        symmetric_bytes: symmetric memory held after the calls, None if unknown.
        peak_bytes: most tensor bytes beyond the inputs, of the rank with most, kept buffers too.
        peak_per_moved: peak over bytes sent plus received, of the worst rank; None if nothing is.
        network: what crosses between nodes, None if nobody counted.
    """

    case: Case
    name: str
    phase: str
    section: str = ""
    kind: str = ""
    ours: bool = False
    note: str = ""
    error: str = ""
    wall_us: list[float] = field(default_factory=list[float])
    device_us: list[float] | None = None
    wire_bytes: float = 0.0
    floor_us: float | None = None
    bar_us: float | None = None
    symmetric_bytes: int | None = None
    peak_bytes: int | None = None
    peak_per_moved: float | None = None
    network: Network | None = None

    @property
    def wall(self) -> Stats | None:
        return summarise(self.wall_us) if self.wall_us else None

    @property
    def device(self) -> Stats | None:
        return summarise(self.device_us) if self.device_us else None

    @property
    def best(self) -> Stats | None:
        """Device time where there is one, else end-to-end time."""
        return self.device or self.wall

    @property
    def best_us(self) -> float | None:
        return None if self.best is None else self.best.median

    @property
    def wire_gbs(self) -> float | None:
        """1e9 bytes per second over the busiest link."""
        return self.wire_bytes / self.best_us / 1e3 if self.best_us and self.wire_bytes else None

    @property
    def percent_of_floor(self) -> float | None:
        """100 means as fast as the link allows."""
        return 100 * self.floor_us / self.best_us if self.best_us and self.floor_us else None

    @property
    def network_gbs(self) -> float | None:
        """Rows to other nodes, 1e9 bytes per second; as many come in meanwhile."""
        if self.network is None or not self.best_us:
            return None
        return self.network.payload_bytes / self.best_us / 1e3

    def meets(self) -> bool:
        """There is no bar, or the call takes at most what it says."""
        return self.bar_us is None or (self.best_us is not None and self.best_us <= self.bar_us)

    def as_json(self) -> dict[str, Any]:
        """Its fields with what follows from them."""
        derived = {
            "wall": self.wall and self.wall._asdict(),
            "device": self.device and self.device._asdict(),
            "wire_gbs": self.wire_gbs,
            "percent_of_floor": self.percent_of_floor,
            "network_gbs": self.network_gbs,
        }
        return asdict(self) | derived


# For a reader

LEGEND = (
    "times of the slowest rank per round; wire: busiest direction of the busiest rank, no self "
    "traffic; x a2a: beside all_to_all_single of the same rows; peak: tensors beyond the inputs, "
    "kept buffers included"
)


def print_report(rows: list[Measurement], console: Console, iterations: int) -> None:
    """A table for each point of the sweep, and under it what the table is there to show."""
    plain: dict[str, Any] = {"markup": False, "highlight": False}
    for case in dict.fromkeys(row.case.rows for row in rows):
        mine = [row for row in rows if row.case.rows == case]
        console.print(_table(case, mine))
        for row in mine:
            if row.error:
                console.print(f"NO TIME for {row.phase} by {row.name}: {row.error}", **plain)
        for line in [*verdicts(mine), ""]:
            console.print(line, **plain)
    for line in dict.fromkeys(f"{row.phase} by {row.name}: {row.note}" for row in rows if row.note):
        console.print(line, **plain)
    if iterations < QUOTABLE_ITERATIONS:
        console.print(
            f"Only {iterations} iterations: a figure worth quoting has at least "
            f"{QUOTABLE_ITERATIONS}."
        )


def _table(case: Case, rows: list[Measurement]) -> Table:
    title = (
        f"{case.tokens} tokens/rank, hidden {case.hidden}, top-{case.topk} of {case.experts}, "
        f"{case.skew} routing, {case.dtype}, {case.layout}"
        + ("" if case.quantize == "none" else f", {case.quantize} on the wire")
    )
    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, title_style="bold", caption=LEGEND, **left)
    table.add_column("system")
    three = "\n[dim]median / p99 / min[/]"
    on_device = three if any(row.device_us for row in rows) else ""
    times = ("end-to-end us" + three, "device us" + on_device)
    for heading in (*times, "wire\nGB/s", "% of\nfloor", "x a2a", "SMs", "symm.\nMiB", "peak\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    phase = ""
    for row in rows:
        if row.phase != phase:
            phase = row.phase
            table.add_section()
            table.add_row(f"[bold]{phase}[/]")
        table.add_row(f"  {row.name}", *_cells(row, rows))
    return table


def _cells(row: Measurement, rows: list[Measurement]) -> list[str]:
    if row.error:
        return ["[bold red]no time[/]"]
    beside = ratio(row, _find(rows, PLAIN_EXCHANGE, COMBINE if row.phase == COMBINE else DISPATCH))
    symmetric, peak = row.symmetric_bytes, row.peak_bytes
    return [
        *(_times(stats) for stats in (row.wall, row.device)),
        number(row.wire_gbs, ".3g", "n/a"),
        number(row.percent_of_floor, ".0f", "n/a"),
        number(beside, ".2f", "n/a"),
        number(row.case.sms, "d", "n/a"),
        number(None if symmetric is None else symmetric / MIB, ".0f", "n/a"),
        number(None if peak is None else peak / MIB, ".3g", "n/a"),
    ]


def number(value: float | None, form: str = ",.0f", none: str = "-") -> str:
    """A cell; ``none`` where nobody knows."""
    return none if value is None else format(value, form)


def _times(stats: Stats | None) -> str:
    if stats is None:
        return "n/a"
    digits = 0 if stats.min >= 1000 else 1
    return " / ".join(f"{value:,.{digits}f}" for value in (stats.median, stats.p99, stats.min))


def _find(rows: list[Measurement], name: str, phase: str) -> Measurement | None:
    return next((row for row in rows if row.name == name and row.phase == phase), None)


def ratio(row: Measurement, other: Measurement | None) -> float | None:
    """Median over median, on the clock that both have; None where either has no time."""
    return row.best_us / other.best_us if other and row.best_us and other.best_us else None


def verdicts(rows: list[Measurement]) -> list[str]:
    """Dispatch beside what copies around a plain exchange take, for each engine of one case."""
    lines: list[str] = []
    for row in rows:
        if row.phase not in (DISPATCH, CACHED) or not row.name.startswith("tokenyard") or row.error:
            continue
        what = f"{row.name}, {row.phase}"
        for name in (FRESH_COPIES, KEPT_COPIES):
            beside = ratio(row, _find(rows, name, DISPATCH))
            lines.append(f"{what}: {_times_of(beside, f'the time of {name}')}")
        if row.phase == DISPATCH:
            peak = _times_of(row.peak_per_moved, "bytes sent + received")
            lines.append(f"{what}: peak memory {peak}")
    return lines


def _times_of(value: float | None, of: str) -> str:
    """``1.25x the time of ...``."""
    return f"{of}: n/a" if value is None else f"{value:.2f}x {of}"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is set left, the others right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, marks, *rows))


# For a program


def write_json(path: Path, rows: list[Measurement], facts: dict[str, Any]) -> None:
    """Every figure with its raw times, behind :func:`facts_of` the run."""
    content = {**facts, "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def facts_of(suite: Any, device: str) -> dict[str, Any]:
    """What is needed to repeat a run of ``suite``, a dataclass, on "cpu" or "cuda"."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "devices": device_names(device),
        "suite": asdict(suite),
    }


def _program() -> list[str]:
    suites = "benchmarks" in Path(sys.argv[0]).parts
    return ["python", "-m", "benchmarks"] if suites else ["tokenyard"]


def commit() -> str | None:
    """The commit this package comes from ("-dirty" behind it if files differ), None if it is in no
    repository.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*command: str) -> str:
    here, words = Path(__file__).parent, ["git", *command]
    return subprocess.run(
        words, cwd=here, capture_output=True, text=True, check=True
    ).stdout.strip()


def versions() -> dict[str, str | None]:
    """Of everything that has a say in the times; None for what is not here."""
    cuda: Any = torch.cuda
    nccl = ".".join(map(str, cuda.nccl.version())) if cuda.is_available() else None
    found = {"tokenyard": tokenyard.__version__, "python": platform.python_version()}
    return {
        **found,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "nccl": nccl,
    }


def package_version(*names: str) -> str | None:
    """Of the first of these packages that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def device_names(device: str) -> list[str]:
    """Name of every GPU, or of the processor with its number of cores."""
    if device == "cuda":
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    from torch.utils import collect_env

    env: Any = collect_env
    found = [
        line.partition(":")[2].strip()
        for line in str(env.get_cpu_info(env.run)).splitlines()
        if line.lower().startswith("model name")
    ]
    return [f"{found[0] if found else platform.machine()}, {os.cpu_count()} cores"]
