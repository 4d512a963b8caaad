"""The document of ``tokenyard doctor --json`` as tables for a reader: they name things by its keys,
and what is wrong comes last.
"""

from __future__ import annotations

from typing import Any, cast

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
from tokenyard.cli.doctor_findings import PROBLEM, UNLIMITED, WARNING

HOST = ("cpus", "memory", "shm", "limits", "hostname", "infiniband", "pci", "environment")
SOFTWARE = ("python", "torch", "triton", "driver", "nccl", "nvshmem")
GPU = ("index", "name", "capability", "memory_total", "memory_free", "mig", "uuid")
TEST = ("device", "ranks", "engine", "seconds", "ok", "why")
NEED = ("routing", "rows", "results", "buffers", "total")
BYTES = ("total", "free", "memlock", "memory_total", "memory_free", "results", "buffers")


def print_document(console: Console, document: dict[str, Any]) -> None:
    """Everything."""
    facts, untold, need = (document[key] for key in ("facts", "could_not_tell", "memory"))
    for title, names in (("Host", HOST), ("Software", SOFTWARE)):
        none = {name: "?" if name in untold else "none" for name in names}
        rows = [(name, text(name, facts[name]) or none[name]) for name in names]
        print_section(console, title, plain_table("<", "<", rows=rows))
    if facts["gpus"]:
        print_section(console, "GPUs", _records(GPU, facts["gpus"]))
        title = "Links between GPUs (NV18: 18 NVLinks; a cross: no peer access)"
        print_section(console, title, _links(facts))
    else:
        seen = "?" if facts["gpus"] is None else "none that torch sees"
        print_line(console, f"\n[bold]GPUs[/bold] {seen}")
    engine = f"{document['engine']['name']}: {escape(document['engine']['why'])}"
    print_line(console, f"\n[bold]Engine[/bold] {engine}")
    title = f"Memory of a rank ({text('free', need['free']) or '?'} free on the {need['where']}): "
    cases = [{"routing": case} | need[case] for case in ("even", "most")]
    print_section(console, title + text("", need["workload"]), _records(NEED, cases))
    if document["self_tests"]:
        print_section(console, "Self-test", _records(TEST, document["self_tests"]))
    else:
        print_line(console, "\n[bold]Self-test[/bold] not run")
    print_line(console, "")
    for name, why in untold.items():
        print_line(console, f"[yellow]could not tell: {escape(name)}: {escape(why)}[/yellow]")
    _print_verdict(console, document["findings"])


def text(name: str, value: Any) -> str:
    """A value of the document called ``name`` as markup, "" if it is unknown; of a record what is
    known.
    """
    if isinstance(value, dict):
        record = cast("dict[str, Any]", value)
        known = {key: text(key, each) for key, each in record.items() if key != "gpus"}
        return ", ".join(f"{key} {told}" for key, told in known.items() if told)
    if isinstance(value, list):
        return escape(", ".join(map(str, cast("list[Any]", value))))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    if value == UNLIMITED:
        return "unlimited"
    if name == "seconds":
        return seconds_text(value)
    return bytes_text(value) if name in BYTES else escape(str(value))


def _records(keys: tuple[str, ...], records: list[dict[str, Any]]) -> Table:
    heads = (f"<{key}" if isinstance(records[0][key], str) else key for key in keys)
    rows = [[text(key, record[key]) or "?" for key in keys] for record in records]
    return plain_table(*heads, rows=rows)


def _links(facts: dict[str, Any]) -> Table:
    peers, gpus = facts["peers"], range(len(facts["gpus"]))

    def cell(a: int, b: int) -> str:
        if a == b:
            return "-"
        link = facts["links"][a][b] if facts["links"] else "reachable" if peers else "?"
        apart = peers and not (peers[a][b] and peers[b][a])
        return f"[red]{escape(link)} x[/red]" if apart else escape(link)

    rows = [(str(a), *(cell(a, b) for b in gpus)) for a in gpus]
    return plain_table("<GPU", *map(str, gpus), rows=rows)


def _print_verdict(console: Console, findings: list[dict[str, str]]) -> None:
    counts: list[str] = []
    for kind in (PROBLEM, WARNING):
        if number := sum(finding["severity"] == kind for finding in findings):
            counts.append(f"{number} {kind}{'s' if number > 1 else ''}")
    healthy = not any(finding["severity"] == PROBLEM for finding in findings)
    verdict = "[green]Healthy[/green]" if healthy else "[bold red]Not healthy[/bold red]"
    print_line(console, ": ".join([verdict, *filter(None, [" and ".join(counts)])]))
    for finding in sorted(findings, key=lambda each: each["severity"] == PROBLEM):
        colour = "bold red" if finding["severity"] == PROBLEM else "yellow"
        head = f"{finding['severity'].upper()}: {escape(finding['symptom'])}"
        print_line(console, f"[{colour}]{head}[/{colour}]")
        print_line(console, f"  cause:  {escape(finding['cause'])}")
        print_line(console, f"  remedy: {escape(finding['remedy'])}")
