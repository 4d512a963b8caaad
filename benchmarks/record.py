"""The one writer of records: Markdown for readers, JSON for programs, pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokenyard.cli.bench_report import Measurement, facts_of, package_version, write_json
from tokenyard.testing.timing import Stats

MB = 1e6
NO_TIME = "**no time**"
T = TypeVar("T", bound=Measurement)


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
class Line(Measurement):
    """A line of a suite.

    Attributes:
        section, kind: where it belongs. bar_us: what it should at most take, None without a bar.
        network: what crosses between nodes, None if nobody counted.
    """

    section: str = ""
    kind: str = ""
    bar_us: float | None = None
    network: Network | None = None

    @classmethod
    def of(cls, line: Measurement, **known: Any) -> Line:
        """``line`` with what is known besides."""
        return cls(**{each.name: getattr(line, each.name) for each in fields(Measurement)}, **known)

    def as_json(self) -> dict[str, Any]:
        return Measurement.as_json(self) | {"network_gbs": network_gbs(self)}


def network_gbs(line: Line) -> float | None:
    """Rows to other nodes, 1e9 bytes per second; as many come in meanwhile."""
    return None if line.network is None else line.gbs(line.network.payload_bytes)


class Page(NamedTuple):
    """How a suite's lines are shown.

    ``markdown(lines, suite, facts)`` is the page; ``draw(path, lines)`` its picture.
    """

    markdown: Callable[[list[Any], Any, dict[str, Any]], str]
    draw: Callable[[Path, list[Any]], None] | None = None


def write_record(
    out: Path,
    name: str,
    lines: Sequence[Measurement],
    suite: Any,
    device: str,
    page: Page,
    ranks: int | None = None,
) -> Path:
    """Write ``<name>-<hardware>-<day>.md``, ``.json`` and, where it can be drawn, ``.png``.

    ``ranks``: GPUs that were used, if not all. Returns the path of the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    facts = facts_of(suite, device, "python -m benchmarks")
    facts["versions"]["nvshmem"] = package_version("nvidia-nvshmem-cu13") or package_version(
        "nvidia-nvshmem-cu12"
    )
    facts["devices"] = facts["devices"][:ranks]
    names: list[str] = facts["devices"]
    hardware = f"{len(names)}x{model_of(names[0])}" if device == "cuda" else "cpu"
    path = out / f"{name}-{hardware}-{facts['date'][:10].replace('-', '')}.md"
    write_json(path.with_suffix(".json"), lines, facts)
    picture = path.with_suffix(".png")
    drawn = page.draw is not None and _draw(page.draw, lines, picture)
    behind = f"\n![]({picture.name})\n" if drawn else ""
    path.write_text(page.markdown([*lines], suite, facts) + behind)
    return path


def model_of(gpu: str) -> str:
    """In the name of a GPU the first word with a digit.

    >>> model_of("NVIDIA H100 80GB HBM3")
    'h100'
    """
    words = gpu.lower().split()
    return next((word for word in words if any(map(str.isdigit, word))), words[-1])


def _draw(
    draw: Callable[[Path, list[Any]], None], lines: Sequence[Measurement], path: Path
) -> bool:
    """False if it cannot be drawn: the figures are worth more than the picture."""
    try:
        draw(path, [*lines])
    except Exception as error:
        print(f"no picture: {error}")
        return False
    return True


def head(title: str, facts: dict[str, Any]) -> list[str]:
    """The first two paragraphs: ``title`` on which devices; commit, versions, date, command."""
    devices = ", ".join(
        f"{count}x {name}" for name, count in Counter[str](facts["devices"]).items()
    )
    known = ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
    commit = facts["commit"] or "unknown"
    said = f"Commit {commit}, {known}, {facts['date'][:10]}. `{facts['command']}`"
    return [f"# {title.format(devices=devices)}", said]


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is set left, the others right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, marks, *rows))


def times(stats: Stats | None, digits: int = 1, none: str = "-") -> str:
    """**median** (min, p99)."""
    if stats is None:
        return none
    median, least, most = (f"{value:,.{digits}f}" for value in (stats.median, stats.min, stats.p99))
    return f"**{median}** ({least}, {most})"


def find(lines: Sequence[T], **wanted: Any) -> T | None:
    """The first line of which all this is true; names are those of a line or of its case."""

    def value(line: Any, name: str) -> Any:
        return getattr(line.case if name in ("tokens", "sms") else line, name)

    return next(
        (line for line in lines if all(value(line, name) == it for name, it in wanted.items())),
        None,
    )
