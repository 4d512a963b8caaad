"""What ``tokenyard doctor`` says: tables for a reader, one JSON document for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.cli.doctor_engine import Bytes, Engine, Need, Workload
from tokenyard.cli.doctor_facts import UNLIMITED, Facts, Library, SelfTest, gpu_pairs, unreachable
from tokenyard.cli.doctor_findings import Finding
from tokenyard.cli.report import bytes_text, plain_table, print_section, seconds_text
from tokenyard.version import __version__

SCHEMA = 1
"""Raised when a key of the JSON document changes its meaning or goes away; new keys may come
without.
"""

UNKNOWN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that was found out, and what it means. ``untold``: why something could not be
    told, by its name.
    """

    facts: Facts
    workload: Workload
    engine: Engine
    need: Need
    tests: list[SelfTest]
    findings: list[Finding]
    untold: dict[str, str]

    @property
    def healthy(self) -> bool:
        """No problem. Warnings, and what could not be told, do not count."""
        return not any(finding.severity == "problem" for finding in self.findings)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The document of ``--json``; see ``docs/doctor.md``."""
    facts = asdict(diagnosis.facts)
    del facts["untold"]
    return {
        "schema": SCHEMA,
        "tokenyard": __version__,
        "healthy": diagnosis.healthy,
        "engine": diagnosis.engine._asdict(),
        "facts": facts,
        "memory": {
            "workload": asdict(diagnosis.workload),
            "even": _bytes(diagnosis.need.even),
            "most": _bytes(diagnosis.need.most),
            "free": diagnosis.need.free,
            "where": diagnosis.need.where,
        },
        "self_tests": [asdict(test) | {"ok": not test.error} for test in diagnosis.tests],
        "could_not_tell": diagnosis.untold,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }


def _bytes(bytes_: Bytes) -> dict[str, int]:
    return bytes_._asdict() | {"total": bytes_.total}


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Everything; what is wrong comes last."""
    facts = diagnosis.facts
    print_section(console, "Host", _pairs(_host(facts)))
    print_section(console, "Software", _pairs(_software(facts)))
    _print_gpus(console, facts)
    _line(
        console,
        f"\n[bold]Engine[/bold] {escape(diagnosis.engine.name)}: {escape(diagnosis.engine.why)}",
    )
    w = diagnosis.workload
    title = (
        f"Memory of a rank ({w.tokens} tokens x {w.hidden} bfloat16, top {w.topk} of {w.experts} "
        f"experts, {w.layout}, "
        f"{w.ranks} rank{'s' if w.ranks > 1 else ''})"
    )
    print_section(console, title, _memory(diagnosis.need))
    _print_tests(console, diagnosis.tests)
    _line(console, "")
    for name, why in diagnosis.untold.items():
        _line(console, f"[yellow]could not tell: {escape(name)}: {escape(why)}[/yellow]")
    _print_verdict(console, diagnosis)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = plain_table("<", "<")
    table.show_header = False
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _host(facts: Facts) -> list[tuple[str, str]]:
    limits, shm, memory = facts.limits, facts.shm, facts.memory
    name = facts.hostname
    rows = [
        ("cores", UNKNOWN if facts.cpus is None else str(facts.cpus)),
        (
            "memory",
            UNKNOWN
            if memory is None
            else f"{bytes_text(memory.free)} free of {bytes_text(memory.total)}",
        ),
        (
            "/dev/shm",
            UNKNOWN if shm is None else f"{bytes_text(shm.free)} free of {bytes_text(shm.total)}",
        ),
        ("lockable memory", UNKNOWN if limits is None else _limit(limits.memlock, bytes_text)),
        ("open files", UNKNOWN if limits is None else _limit(limits.open_files, str)),
        (
            "own name",
            UNKNOWN if name is None else ("has no address" if name.error else "has an address"),
        ),
    ]
    if facts.infiniband:
        rows.append(("InfiniBand", ", ".join(facts.infiniband)))
    if facts.pci and facts.pci.iommu:
        rows.append(("IOMMU", ", ".join(facts.pci.iommu)))
    return rows + [(name, value) for name, value in facts.environment.items()]


def _limit(value: int, text: Any) -> str:
    return "unlimited" if value == UNLIMITED else text(value)


def _software(facts: Facts) -> list[tuple[str, str]]:
    torch, driver = facts.torch, facts.driver
    rows = [("tokenyard", __version__), ("Python", facts.python)]
    if torch is None:
        rows.append(("torch", UNKNOWN))
    else:
        made_for = (
            f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
        )
        rows.append(
            ("torch", f"{torch.version} ({made_for}; {', '.join(torch.backends) or 'no backend'})")
        )
    rows.append(("Triton", _optional(facts, "triton", facts.triton)))
    if driver is None:
        rows.append(("NVIDIA driver", _optional(facts, "driver", None)))
    else:
        serves = f" (serves CUDA up to {driver.cuda})" if driver.cuda else ""
        rows.append(("NVIDIA driver", f"{driver.version or UNKNOWN}{serves}"))
    rows.append(("NCCL", _library(facts, "nccl", facts.nccl)))
    rows.append(("NVSHMEM", _library(facts, "nvshmem", facts.nvshmem)))
    return rows


def _optional(facts: Facts, name: str, value: str | None) -> str:
    return value or (UNKNOWN if name in facts.untold else "none")


def _library(facts: Facts, name: str, library: Library | None) -> str:
    if library is None or not (library.version or library.paths):
        return _optional(facts, name, None)
    loaded = ", ".join(library.paths) or "not loaded"
    return f"{library.version or UNKNOWN}, {loaded}"


def _print_gpus(console: Console, facts: Facts) -> None:
    gpus = facts.gpus
    if not gpus:
        told = UNKNOWN if gpus is None else "none that torch sees"
        _line(console, f"\n[bold]GPUs[/bold] {told}")
        return
    table = plain_table("<GPU", "<Name", "Capability", "Memory", "Free", "<MIG", "<UUID")
    for gpu in gpus:
        mig = {True: "on", False: "off", None: "n/a"}[gpu.mig]
        sizes = (_size(gpu.memory_total), _size(gpu.memory_free))
        table.add_row(
            str(gpu.index),
            escape(gpu.name),
            gpu.capability or UNKNOWN,
            *sizes,
            mig,
            gpu.uuid or UNKNOWN,
        )
    print_section(console, "GPUs", table)
    if gpu_pairs(facts):
        print_section(
            console, "Links between GPUs (NV18: 18 NVLinks; a cross: no peer access)", _links(facts)
        )


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else bytes_text(count)


def _links(facts: Facts) -> Table:
    gpus, bad = range(len(facts.gpus or [])), set(unreachable(facts))
    table = plain_table("<GPU", *map(str, gpus))
    for a in gpus:
        cells: list[str] = []
        for b in gpus:
            link = facts.links[a][b] if facts.links else ("reachable" if facts.peers else UNKNOWN)
            cross = (min(a, b), max(a, b)) in bad
            cells.append(
                "-"
                if a == b
                else f"[red]{escape(link if facts.links else '')}x[/red]"
                if cross
                else escape(link)
            )
        table.add_row(str(a), *cells)
    return table


def _memory(need: Need) -> Table:
    table = plain_table("<", "Even routing", "All tokens here")
    both = (need.even, need.most)
    table.add_row("rows received", *(str(each.rows) for each in both))
    table.add_row("results of dispatch and combine", *(bytes_text(each.results) for each in both))
    table.add_row("buffers of the engine", *(bytes_text(each.buffers) for each in both))
    table.add_row("together", *(bytes_text(each.total) for each in both))
    table.add_row(f"free {need.where} memory for it", _size(need.free), _size(need.free))
    return table


def _print_tests(console: Console, tests: list[SelfTest]) -> None:
    if not tests:
        _line(console, "\n[bold]Self-test[/bold] not run")
        return
    table = plain_table("<Ranks", "<Engine", "Time", "<Bits")
    for test in tests:
        ranks = f"{test.ranks} on {test.device}"
        took = UNKNOWN if test.seconds is None else seconds_text(test.seconds)
        verdict = "[red]failed[/red]" if test.error else "[green]all equal[/green]"
        table.add_row(ranks, escape(test.why or test.engine), took, verdict)
    print_section(console, "Self-test (dispatch and combine beside the oracle)", table)


def _print_verdict(console: Console, diagnosis: Diagnosis) -> None:
    problems = [finding for finding in diagnosis.findings if finding.severity == "problem"]
    warnings = [finding for finding in diagnosis.findings if finding.severity == "warning"]
    counts = [f"{len(group)} {name}{'s' if len(group) > 1 else ''}" for group, name in
              ((problems, "problem"), (warnings, "warning")) if group]  # fmt: skip
    behind = f": {' and '.join(counts)}" if counts else ""
    colour, word = ("green", "Healthy") if diagnosis.healthy else ("bold red", "Not healthy")
    _line(console, f"[{colour}]{word}{behind}[/{colour}]")
    for finding in [*warnings, *problems]:
        colour = "bold red" if finding.severity == "problem" else "yellow"
        _line(
            console, f"[{colour}]{finding.severity.upper()}: {escape(finding.symptom)}[/{colour}]"
        )
        _line(console, f"  cause:  {escape(finding.cause)}")
        _line(console, f"  remedy: {escape(finding.remedy)}")
