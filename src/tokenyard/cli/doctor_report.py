"""What ``tokenyard doctor`` says: tables for a reader, one JSON document for a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.cli.consoles import (
    bytes_text,
    plain_table,
    print_line,
    print_section,
    seconds_text,
)
from tokenyard.cli.doctor_engine import Bytes, Engine, Need, Workload
from tokenyard.cli.doctor_facts import UNLIMITED, Facts, Library, SelfTest, gpu_pairs, unreachable
from tokenyard.cli.doctor_findings import PROBLEM, WARNING, Finding
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
        return not any(finding.severity == PROBLEM for finding in self.findings)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The document of ``--json``; see ``docs/how-to/doctor.md``."""
    facts, need = asdict(diagnosis.facts), diagnosis.need
    del facts["untold"]
    return {
        "schema": SCHEMA,
        "tokenyard": __version__,
        "healthy": diagnosis.healthy,
        "engine": diagnosis.engine._asdict(),
        "facts": facts,
        "memory": {
            "workload": asdict(diagnosis.workload),
            "even": _bytes(need.even),
            "most": _bytes(need.most),
            "free": need.free,
            "where": need.where,
        },
        "self_tests": [asdict(test) | {"ok": not test.error} for test in diagnosis.tests],
        "could_not_tell": diagnosis.untold,
        "findings": [finding._asdict() for finding in diagnosis.findings],
    }


def _bytes(bytes_: Bytes) -> dict[str, int]:
    return bytes_._asdict() | {"total": bytes_.total}


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Everything; what is wrong comes last."""
    facts, engine, w = diagnosis.facts, diagnosis.engine, diagnosis.workload
    print_section(console, "Host", _pairs(_host(facts)))
    print_section(console, "Software", _pairs(_software(facts)))
    _print_gpus(console, facts)
    print_line(console, f"\n[bold]Engine[/bold] {escape(engine.name)}: {escape(engine.why)}")
    title = (
        f"Memory of a rank ({w.tokens} tokens x {w.hidden} bfloat16, top {w.topk} of {w.experts} "
        f"experts, {w.layout}, {w.ranks} rank{'s' if w.ranks > 1 else ''})"
    )
    print_section(console, title, _memory(diagnosis.need))
    if diagnosis.tests:
        title = "Self-test (dispatch and combine beside the oracle)"
        print_section(console, title, _tests(diagnosis.tests))
    else:
        print_line(console, "\n[bold]Self-test[/bold] not run")
    print_line(console, "")
    for name, why in diagnosis.untold.items():
        print_line(console, f"[yellow]could not tell: {escape(name)}: {escape(why)}[/yellow]")
    _print_verdict(console, diagnosis)


def _pairs(rows: dict[str, str]) -> Table:
    table = plain_table("<", "<")
    table.show_header = False
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _size(count: int | None, text: Callable[[int], str] = bytes_text) -> str:
    return UNKNOWN if count is None else "unlimited" if count == UNLIMITED else text(count)


def _host(facts: Facts) -> dict[str, str]:
    limits, name = facts.limits, facts.hostname
    rows = {"cores": _size(facts.cpus, str)}
    for what, space in (("memory", facts.memory), ("/dev/shm", facts.shm)):
        free = UNKNOWN if space is None else bytes_text(space.free)
        rows[what] = UNKNOWN if space is None else f"{free} free of {bytes_text(space.total)}"
    rows["lockable memory"] = _size(limits and limits.memlock)
    rows["open files"] = _size(limits and limits.open_files, str)
    rows["own name"] = (
        UNKNOWN if name is None else "has no address" if name.error else "has an address"
    )
    if facts.infiniband:
        rows["InfiniBand"] = ", ".join(facts.infiniband)
    if facts.pci and facts.pci.iommu:
        rows["IOMMU"] = ", ".join(facts.pci.iommu)
    return rows | facts.environment


def _software(facts: Facts) -> dict[str, str]:
    torch, driver = facts.torch, facts.driver
    rows = {"tokenyard": __version__, "Python": facts.python, "torch": UNKNOWN}
    if torch is not None:
        gpus = f"ROCm {torch.hip}" if torch.hip else "CPU only"
        made_for = f"CUDA {torch.cuda}" if torch.cuda else gpus
        backends = ", ".join(torch.backends) or "no backend"
        rows["torch"] = f"{torch.version} ({made_for}; {backends})"
    rows["Triton"] = _optional(facts, "triton", facts.triton)
    rows["NVIDIA driver"] = _optional(facts, "driver", None)
    if driver is not None:
        serves = f" (serves CUDA up to {driver.cuda})" if driver.cuda else ""
        rows["NVIDIA driver"] = f"{driver.version or UNKNOWN}{serves}"
    rows["NCCL"] = _library(facts, "nccl", facts.nccl)
    rows["NVSHMEM"] = _library(facts, "nvshmem", facts.nvshmem)
    return rows


def _optional(facts: Facts, name: str, value: str | None) -> str:
    return value or (UNKNOWN if name in facts.untold else "none")


def _library(facts: Facts, name: str, library: Library | None) -> str:
    if library is None or not (library.version or library.paths):
        return _optional(facts, name, None)
    return f"{library.version or UNKNOWN}, {', '.join(library.paths) or 'not loaded'}"


def _print_gpus(console: Console, facts: Facts) -> None:
    if not facts.gpus:
        told = UNKNOWN if facts.gpus is None else "none that torch sees"
        print_line(console, f"\n[bold]GPUs[/bold] {told}")
        return
    table = plain_table("<GPU", "<Name", "Capability", "Memory", "Free", "<MIG", "<UUID")
    for gpu in facts.gpus:
        sizes = (_size(gpu.memory_total), _size(gpu.memory_free))
        mig = {True: "on", False: "off", None: "n/a"}[gpu.mig]
        known = (gpu.capability or UNKNOWN, *sizes, mig, gpu.uuid or UNKNOWN)
        table.add_row(str(gpu.index), escape(gpu.name), *known)
    print_section(console, "GPUs", table)
    if gpu_pairs(facts):
        title = "Links between GPUs (NV18: 18 NVLinks; a cross: no peer access)"
        print_section(console, title, _links(facts))


def _links(facts: Facts) -> Table:
    gpus, bad = range(len(facts.gpus or [])), set(unreachable(facts))
    table = plain_table("<GPU", *map(str, gpus))

    def cell(a: int, b: int) -> str:
        link = escape(facts.links[a][b]) if facts.links else ""
        if a == b:
            return "-"
        if (min(a, b), max(a, b)) in bad:
            return f"[red]{link}x[/red]"
        return link or ("reachable" if facts.peers else UNKNOWN)

    for a in gpus:
        table.add_row(str(a), *(cell(a, b) for b in gpus))
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


def _tests(tests: list[SelfTest]) -> Table:
    table = plain_table("<Ranks", "<Engine", "Time", "<Bits")
    for test in tests:
        took = UNKNOWN if test.seconds is None else seconds_text(test.seconds)
        verdict = "[red]failed[/red]" if test.error else "[green]all equal[/green]"
        ranks = f"{test.ranks} on {test.device}"
        table.add_row(ranks, escape(test.why or test.engine), took, verdict)
    return table


def _print_verdict(console: Console, diagnosis: Diagnosis) -> None:
    groups = {
        kind: [finding for finding in diagnosis.findings if finding.severity == kind]
        for kind in (PROBLEM, WARNING)
    }
    counts = [
        f"{len(group)} {kind}{'s' if len(group) > 1 else ''}"
        for kind, group in groups.items()
        if group
    ]
    behind = f": {' and '.join(counts)}" if counts else ""
    colour, word = ("green", "Healthy") if diagnosis.healthy else ("bold red", "Not healthy")
    print_line(console, f"[{colour}]{word}{behind}[/{colour}]")
    for finding in [*groups[WARNING], *groups[PROBLEM]]:
        colour = "bold red" if finding.severity == PROBLEM else "yellow"
        text = f"{finding.severity.upper()}: {escape(finding.symptom)}"
        print_line(console, f"[{colour}]{text}[/{colour}]")
        print_line(console, f"  cause:  {escape(finding.cause)}")
        print_line(console, f"  remedy: {escape(finding.remedy)}")
