"""What ``tokenyard bench`` says: a table and a few ratios for a reader, JSON for a program."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

import tokenyard
from tokenyard.cli.bench_baselines import FRESH_COPIES, KEPT_COPIES, PLAIN_EXCHANGE
from tokenyard.cli.bench_cases import CACHED, COMBINE, DISPATCH
from tokenyard.cli.bench_inputs import Job
from tokenyard.cli.timing import Stats, summarise

if TYPE_CHECKING:
    from tokenyard.cli.bench_run import Plan

QUOTABLE_ITERATIONS = 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Times are microseconds of the slowest rank, one per round.

    Attributes: job, name, phase, note: what it is about. error: why there are no times, "" if there
    are. wall_us: the Python call until its results are complete; device_us: between CUDA events
    (None without a GPU). wire_bytes: in the busiest direction of the busiest rank, no self traffic,
    mean over the inputs. floor_us: what the job's least traffic (once per rank) takes at the link's
    rate, None if that is unknown. sms: SMs that it is limited to, None where that has no meaning.
    symmetric_bytes: symmetric memory it holds, None if unknown. peak_bytes: most tensor bytes
    beyond the inputs, of the rank with most, buffers kept between calls included. peak_per_moved:
    peak over bytes sent plus received on the wire, of the worst rank; None if a rank moves nothing.
    """

    job: Job
    name: str
    phase: str
    note: str = ""
    error: str = ""
    wall_us: list[float] = field(default_factory=list[float])
    device_us: list[float] | None = None
    wire_bytes: float = 0.0
    floor_us: float | None = None
    sms: int | None = None
    symmetric_bytes: int | None = None
    peak_bytes: int | None = None
    peak_per_moved: float | None = None

    @property
    def wall(self) -> Stats | None:
        return summarise(self.wall_us) if self.wall_us else None

    @property
    def device(self) -> Stats | None:
        return summarise(self.device_us) if self.device_us else None

    @property
    def best_us(self) -> float | None:
        """Median device time where there is one, else median end-to-end time."""
        stats = self.device or self.wall
        return None if stats is None else stats.median

    @property
    def wire_gbs(self) -> float | None:
        """1e9 bytes per second over the busiest link."""
        return self.wire_bytes / self.best_us / 1e3 if self.best_us and self.wire_bytes else None

    @property
    def percent_of_floor(self) -> float | None:
        """100 means as fast as the link allows."""
        return 100 * self.floor_us / self.best_us if self.best_us and self.floor_us else None


def print_report(rows: list[Row], console: Console, iterations: int) -> None:
    """A table for each point of the sweep, and under it what the table is there to show."""
    for job in dict.fromkeys(row.job for row in rows):
        mine = [row for row in rows if row.job == job]
        console.print(_table(job, mine))
        for line in [*_errors(mine), *verdicts(mine)]:
            console.print(line, markup=False, highlight=False)
        console.print()
    for line in dict.fromkeys(f"{row.phase} by {row.name}: {row.note}" for row in rows if row.note):
        console.print(line, markup=False, highlight=False)
    if iterations < QUOTABLE_ITERATIONS:
        console.print(
            f"Only {iterations} iterations: a figure worth quoting has at least "
            f"{QUOTABLE_ITERATIONS}."
        )


def _table(job: Job, rows: list[Row]) -> Table:
    title = (
        f"{job.tokens} tokens/rank, hidden {job.hidden}, top-{job.topk} of {job.experts}, "
        f"{job.skew} routing, "
        f"{job.dtype}, {job.layout}"
        + ("" if job.quantize == "none" else f", {job.quantize} on the wire")
    )
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=_LEGEND,
        caption_justify="left",
    )
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


_LEGEND = (
    "times of the slowest rank per round; wire: busiest direction of the busiest rank, no self "
    "traffic; "
    "x a2a: beside all_to_all_single of the same rows; peak: tensors beyond the inputs, kept "
    "buffers included"
)


def _cells(row: Row, rows: list[Row]) -> list[str]:
    if row.error:
        return ["[bold red]no time[/]"]
    beside = ratio(row, _find(rows, PLAIN_EXCHANGE, COMBINE if row.phase == COMBINE else DISPATCH))
    symmetric, peak = row.symmetric_bytes, row.peak_bytes
    return [
        _times(row.wall),
        _times(row.device),
        _number(row.wire_gbs, ".3g"),
        _number(row.percent_of_floor, ".0f"),
        _number(beside, ".2f"),
        _number(row.sms, "d"),
        _number(None if symmetric is None else symmetric / MIB, ".0f"),
        _number(None if peak is None else peak / MIB, ".3g"),
    ]


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _times(stats: Stats | None) -> str:
    if stats is None:
        return "n/a"
    return " / ".join(
        f"{value:,.{0 if stats.min >= 1000 else 1}f}"
        for value in (stats.median, stats.p99, stats.min)
    )


def _find(rows: list[Row], name: str, phase: str) -> Row | None:
    return next((row for row in rows if row.name == name and row.phase == phase), None)


def ratio(row: Row, other: Row | None) -> float | None:
    """Median over median, on the clock that both have; None where either has no time."""
    if other is None or not row.best_us or not other.best_us:
        return None
    return row.best_us / other.best_us


def _errors(rows: list[Row]) -> list[str]:
    return [f"NO TIME for {row.phase} by {row.name}: {row.error}" for row in rows if row.error]


def verdicts(rows: list[Row]) -> list[str]:
    """Dispatch beside what copies around a plain exchange take, for each engine on one point of the
    sweep.
    """
    lines: list[str] = []
    for row in rows:
        if row.phase not in (DISPATCH, CACHED) or not row.name.startswith("tokenyard") or row.error:
            continue
        what = f"{row.name}, {row.phase}"
        for baseline in (FRESH_COPIES, KEPT_COPIES):
            beside = ratio(row, _find(rows, baseline, DISPATCH))
            lines.append(f"{what}: {_times_of(beside, f'the time of {baseline}')}")
        if row.phase == DISPATCH:
            lines.append(
                f"{what}: peak memory {_times_of(row.peak_per_moved, 'bytes sent + received')}"
            )
    return lines


def _times_of(value: float | None, of: str) -> str:
    """``1.25x the time of ...``."""
    return f"{of}: n/a" if value is None else f"{value:.2f}x {of}"


def write_json(path: Path, rows: list[Row], plan: Plan, device: str) -> None:
    """Every figure of ``rows`` with its raw times, and what is needed to repeat the run."""
    content = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "versions": versions(),
        "devices": device_names(device),
        "plan": asdict(plan),
        "rows": [as_json(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def command_line() -> str:
    """How this program was called."""
    return shlex.join(["tokenyard", *sys.argv[1:]])


def as_json(row: Row) -> dict[str, Any]:
    """A row with what follows from it."""
    derived = {
        "wall": None if row.wall is None else asdict(row.wall),
        "device": None if row.device is None else asdict(row.device),
        "wire_gbs": row.wire_gbs,
        "percent_of_floor": row.percent_of_floor,
    }
    return asdict(row) | derived


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
    here = Path(__file__).parent
    return subprocess.run(
        ["git", *command], cwd=here, capture_output=True, text=True, check=True
    ).stdout.strip()


def versions() -> dict[str, str | None]:
    """Of everything that has a say in the times; None for what is not here."""
    cuda: Any = torch.cuda
    nccl = ".".join(map(str, cuda.nccl.version())) if cuda.is_available() else None
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "tokenyard": tokenyard.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "nccl": nccl,
    }


def device_names(device: str) -> list[str]:
    """Name of every GPU, or of the processor with its number of cores."""
    if device == "cuda":
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [f"{_processor()}, {os.cpu_count()} cores"]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
