"""What ``tokenyard doctor`` says: tables for a reader, one JSON document for a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tokenyard.cli.doctor_engine import Engine, Need, Workload
from tokenyard.cli.doctor_facts import UNLIMITED, Facts, Record, SelfTest, gpu_pairs, unreachable
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
    both = {"even": need.even, "most": need.most}
    return {
        "schema": SCHEMA,
        "tokenyard": __version__,
        "healthy": diagnosis.healthy,
        "engine": diagnosis.engine._asdict(),
        "facts": facts,
        "memory": {
            "workload": asdict(diagnosis.workload),
            **{name: each._asdict() | {"total": each.total} for name, each in both.items()},
            "free": need.free,
            "where": need.where,
        },
        "self_tests": [asdict(test) | {"ok": not test.error} for test in diagnosis.tests],
        "could_not_tell": diagnosis.untold,
        "findings": [finding._asdict() for finding in diagnosis.findings],
    }


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
    return plain_table("<", "<", rows=[(name, escape(value)) for name, value in rows.items()])


def _size(count: int | None, text: Callable[[int], str] = bytes_text) -> str:
    return UNKNOWN if count is None else "unlimited" if count == UNLIMITED else text(count)


def _host(facts: Facts) -> dict[str, str]:
    limits, name = facts.limits or {}, facts.hostname

    def space(told: Record | None) -> str:
        return (
            f"{bytes_text(told['free'])} free of {bytes_text(told['total'])}" if told else UNKNOWN
        )

    rows = {
        "cores": _size(facts.cpus, str),
        "memory": space(facts.memory),
        "/dev/shm": space(facts.shm),
        "lockable memory": _size(limits.get("memlock")),
        "open files": _size(limits.get("open_files"), str),
        "own name": f"has {'no' if name['error'] else 'an'} address" if name else UNKNOWN,
        "InfiniBand": ", ".join(facts.infiniband or []),
        "IOMMU": ", ".join(facts.pci["iommu"] if facts.pci else []),
    }
    return {name: value for name, value in rows.items() if value} | facts.environment


def _software(facts: Facts) -> dict[str, str]:
    def library(name: str, told: Record | None) -> str:
        if told is None or not (told["version"] or told["paths"]):
            return optional(name, None)
        return f"{told['version'] or UNKNOWN}, {', '.join(told['paths']) or 'not loaded'}"

    def optional(name: str, value: str | None) -> str:
        return value or (UNKNOWN if name in facts.untold else "none")

    torch, driver, build, serves = facts.torch, facts.driver, None, None
    if torch is not None:
        gpus = f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
        made_for = f"CUDA {torch['cuda']}" if torch["cuda"] else gpus
        backends = ", ".join(torch["backends"]) or "no backend"
        build = f"{torch['version']} ({made_for}; {backends})"
    if driver is not None:
        newest = f" (serves CUDA up to {driver['cuda']})" if driver["cuda"] else ""
        serves = f"{driver['version'] or UNKNOWN}{newest}"
    return {
        "tokenyard": __version__,
        "Python": facts.python,
        "torch": build or UNKNOWN,
        "Triton": optional("triton", facts.triton),
        "NVIDIA driver": optional("driver", serves),
        "NCCL": library("nccl", facts.nccl),
        "NVSHMEM": library("nvshmem", facts.nvshmem),
    }


def _print_gpus(console: Console, facts: Facts) -> None:
    if not facts.gpus:
        told = UNKNOWN if facts.gpus is None else "none that torch sees"
        print_line(console, f"\n[bold]GPUs[/bold] {told}")
        return
    rows: list[Sequence[str]] = []
    for gpu in facts.gpus:
        mig = {True: "on", False: "off", None: "n/a"}[gpu["mig"]]
        sizes = (_size(gpu["memory_total"]), _size(gpu["memory_free"]))
        known = (gpu["capability"] or UNKNOWN, *sizes, mig, gpu["uuid"] or UNKNOWN)
        rows.append((str(gpu["index"]), escape(gpu["name"]), *known))
    heads = ("<GPU", "<Name", "Capability", "Memory", "Free", "<MIG", "<UUID")
    print_section(console, "GPUs", plain_table(*heads, rows=rows))
    if gpu_pairs(facts):
        title = "Links between GPUs (NV18: 18 NVLinks; a cross: no peer access)"
        print_section(console, title, _links(facts))


def _links(facts: Facts) -> Table:
    gpus, bad = range(len(facts.gpus or [])), set(unreachable(facts))

    def cell(a: int, b: int) -> str:
        link = escape(facts.links[a][b]) if facts.links else ""
        if a == b:
            return "-"
        if (min(a, b), max(a, b)) in bad:
            return f"[red]{link}x[/red]"
        return link or ("reachable" if facts.peers else UNKNOWN)

    rows = [(str(a), *(cell(a, b) for b in gpus)) for a in gpus]
    return plain_table("<GPU", *map(str, gpus), rows=rows)


def _memory(need: Need) -> Table:
    both, free = (need.even, need.most), _size(need.free)
    rows = [
        ("rows received", *(str(each.rows) for each in both)),
        ("results of dispatch and combine", *(bytes_text(each.results) for each in both)),
        ("buffers of the engine", *(bytes_text(each.buffers) for each in both)),
        ("together", *(bytes_text(each.total) for each in both)),
        (f"free {need.where} memory for it", free, free),
    ]
    return plain_table("<", "Even routing", "All tokens here", rows=rows)


def _tests(tests: list[SelfTest]) -> Table:
    rows: list[Sequence[str]] = []
    for test in tests:
        took = UNKNOWN if test.seconds is None else seconds_text(test.seconds)
        verdict = "[red]failed[/red]" if test.error else "[green]all equal[/green]"
        rows.append(
            (f"{test.ranks} on {test.device}", escape(test.why or test.engine), took, verdict)
        )
    return plain_table("<Ranks", "<Engine", "Time", "<Bits", rows=rows)


def _print_verdict(console: Console, diagnosis: Diagnosis) -> None:
    found = {
        kind: [f for f in diagnosis.findings if f.severity == kind] for kind in (PROBLEM, WARNING)
    }
    counts = [
        f"{len(group)} {kind}{'s' if len(group) > 1 else ''}"
        for kind, group in found.items()
        if group
    ]
    behind = f": {' and '.join(counts)}" if counts else ""
    colour, word = ("green", "Healthy") if diagnosis.healthy else ("bold red", "Not healthy")
    print_line(console, f"[{colour}]{word}{behind}[/{colour}]")
    for finding in [*found[WARNING], *found[PROBLEM]]:
        colour = "bold red" if finding.severity == PROBLEM else "yellow"
        text = f"{finding.severity.upper()}: {escape(finding.symptom)}"
        print_line(console, f"[{colour}]{text}[/{colour}]")
        print_line(console, f"  cause:  {escape(finding.cause)}")
        print_line(console, f"  remedy: {escape(finding.remedy)}")
