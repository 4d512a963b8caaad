"""What a bench says: one measurement, tables and ratios for a reader, JSON for a program."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import tokenyard
from tokenyard.cli.consoles import print_line, print_table
from tokenyard.testing.baselines import PLAIN_EXCHANGE
from tokenyard.testing.cases import Case, mean_busiest
from tokenyard.testing.checked_calls import COMBINE, DISPATCH, Call
from tokenyard.testing.timing import Series, Stats, summarise

SCHEMA = 2
"""Of the JSON. 1, without a number, is what records of before 2026-11-23 have."""

MIB = 1 << 20
COLUMNS = "<|<system|end-to-end us|device us|wire GB/s|% of floor|x a2a|symm. MiB|peak MiB"
LEGEND = (
    "us: median / p99 / min of the slowest rank per round; wire: busiest direction of the busiest "
    "rank, no self traffic; x a2a: beside all_to_all_single of the same rows; peak: tensors beyond "
    "the inputs, kept buffers included"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of a table. Times are microseconds of one call of the slowest rank, one per round.

    Attributes:
        name, phase: of the system or the call.
        ours: a call of the library. note: about it. error: why there are no times, "" if there are.
        wall_us: the Python call until its results are complete.
        device_us: between CUDA events, None without a GPU.
        wire_bytes: in the busiest direction of the busiest rank, no self traffic, mean over inputs.
        floor_us: what the case's least traffic takes at the link's rate, None if that is unknown.
        symmetric_bytes: symmetric memory held after the calls, None if unknown.
        peak_bytes: most tensor bytes beyond the inputs, of the rank with most, kept buffers too.
        peak_per_moved: peak over bytes sent plus received, of the worst rank; None if nothing is.
    """

    case: Case
    name: str
    phase: str
    ours: bool = False
    note: str = ""
    error: str = ""
    wall_us: list[float] = field(default_factory=list[float])
    device_us: list[float] | None = None
    wire_bytes: float = 0.0
    floor_us: float | None = None
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
    def best(self) -> Stats | None:
        """Device time where there is one, else end-to-end time."""
        return self.device or self.wall

    @property
    def best_us(self) -> float | None:
        return self.best and self.best.median

    def gbs(self, num_bytes: float) -> float | None:
        """1e9 bytes per second; None without bytes or a time."""
        return num_bytes / self.best_us / 1e3 if self.best_us and num_bytes else None

    @property
    def wire_gbs(self) -> float | None:
        """Over the busiest link."""
        return self.gbs(self.wire_bytes)

    @property
    def percent_of_floor(self) -> float | None:
        """100 means as fast as the link allows."""
        return 100 * self.floor_us / self.best_us if self.best_us and self.floor_us else None

    def as_json(self) -> dict[str, Any]:
        """Its fields with what follows from them."""
        rates = {"wire_gbs": self.wire_gbs, "percent_of_floor": self.percent_of_floor}
        stats = {"wall": self.wall, "device": self.device}
        return asdict(self) | {name: s and s._asdict() for name, s in stats.items()} | rates


def line_of(
    call: Call, error: str, times: Series | None, link_gbs: float | None, *,
    peaks: list[int] | None = None,
) -> Measurement:  # fmt: skip
    """The line of a call. ``peaks``: of each rank, the most bytes of tensors beyond the inputs."""
    least = call.least
    moved = least[0].moved
    parts = zip(peaks, moved, strict=True) if peaks and all(moved) else ()
    return Measurement(
        case=call.case,
        name=call.name,
        phase=call.phase,
        note=call.note,
        ours=call.ep is not None,
        error=error,
        wall_us=times.wall if times else [],
        device_us=times.device if times else None,
        wire_bytes=mean_busiest([call.crosses] if call.crosses else least),
        floor_us=None if error or link_gbs is None else mean_busiest(least) / link_gbs / 1e3,
        symmetric_bytes=call.symmetric_bytes,
        peak_bytes=max(peaks) if peaks else None,
        peak_per_moved=max((peak / size for peak, size in parts), default=None),
    )


# For a reader


def print_report(rows: list[Measurement], console: Console) -> None:
    """A table for each point of the sweep, and under it why rows have no time."""
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        print_table(console, title_of(case), COLUMNS, [_cells(row, mine) for row in mine])
        for row in mine:
            if row.error:
                print_line(console, escape(f"NO TIME for {row.phase} by {row.name}: {row.error}"))
    notes = dict.fromkeys(f"{row.phase} by {row.name}: {row.note}" for row in rows if row.note)
    console.print("\n".join(["", LEGEND, *notes]), markup=False, highlight=False)


def title_of(case: Case) -> str:
    cast = "" if case.quantize == "none" else f", {case.quantize} on the wire"
    return (
        f"{case.tokens} tokens/rank, hidden {case.hidden}, top-{case.topk} of {case.experts}, "
        f"{case.skew} routing, {case.dtype}, {case.layout}{cast}"
    )


def _cells(row: Measurement, rows: list[Measurement]) -> list[str]:
    if row.error:
        return [row.phase, row.name, "[bold red]no time[/]"]
    phase = COMBINE if row.phase == COMBINE else DISPATCH
    symmetric, peak = row.symmetric_bytes, row.peak_bytes
    figures = (
        (row.wire_gbs, ".3g"),
        (row.percent_of_floor, ".0f"),
        (ratio(row, rows, PLAIN_EXCHANGE, phase), ".2f"),
        (None if symmetric is None else symmetric / MIB, ".0f"),
        (None if peak is None else peak / MIB, ".3g"),
    )
    times = (_times(row.wall), _times(row.device))
    return [row.phase, row.name, *times, *(number(*each, "n/a") for each in figures)]


def number(value: float | None, form: str = ",.0f", none: str = "-") -> str:
    """A cell; ``none`` where nobody knows."""
    return none if value is None else format(value, form)


def _times(stats: Stats | None) -> str:
    if stats is None:
        return "n/a"
    digits = 0 if stats.min >= 1000 else 1
    return " / ".join(f"{value:,.{digits}f}" for value in stats)


def ratio(row: Measurement, rows: list[Measurement], name: str, phase: str) -> float | None:
    """Its median over that of the row with this name and phase; None where either has no time."""
    other = next((each.best_us for each in rows if (each.name, each.phase) == (name, phase)), None)
    return row.best_us / other if row.best_us and other else None


# For a program


def write_json(path: Path, rows: Sequence[Measurement], facts: dict[str, Any]) -> None:
    """Every figure with its raw times, behind :func:`facts_of` the run."""
    content = {**facts, "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def facts_of(suite: Any, device: str, program: str = "tokenyard") -> dict[str, Any]:
    """What is needed to repeat a run of ``suite``, a dataclass, on "cpu" or "cuda"."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"{program} {shlex.join(sys.argv[1:])}",
        "commit": _commit(),
        "versions": versions(),
        "devices": device_names(device),
        "suite": asdict(suite),
    }


def _commit() -> str | None:
    """The commit of this package ("-dirty": files differ); None outside of a repository."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--dirty", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    """Of everything that has a say in the times; None for what is not here."""
    cuda: Any = torch.cuda
    return {
        "tokenyard": tokenyard.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "nccl": ".".join(map(str, cuda.nccl.version())) if cuda.is_available() else None,
    }


def package_version(name: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def device_names(device: str) -> list[str]:
    """Name of every GPU, or of the processor with its number of cores."""
    if device == "cuda":
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    told = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return [f"{told[1] if told else platform.machine()}, {os.cpu_count()} cores"]
