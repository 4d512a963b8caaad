"""``tokenyard doctor``: what this machine has, which engine it would get, whether dispatch and
combine work on it.

Child processes find out (``doctor_ask``, ``doctor_probes``) and run the self-test; ``Machine`` says
what follows, ``doctor_findings`` what is wrong.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape

from tokenyard import ExpertParallel
from tokenyard.cli import consoles, doctor_waits
from tokenyard.cli.consoles import bytes_text, print_line, print_table, say
from tokenyard.cli.doctor_ask import ask, gather
from tokenyard.cli.doctor_findings import PROBLEM, UNLIMITED, WARNING, findings
from tokenyard.cli.doctor_machine import Machine
from tokenyard.cli.doctor_probes import Record
from tokenyard.cli.options import bad, command, option
from tokenyard.engines.known import COLLECTIVE
from tokenyard.launch import spawn, under_torchrun
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Oracle, engine_calls, sweep_inputs
from tokenyard.version import __version__

SCHEMA = 1
"""Raised when a key of the JSON document changes its meaning or goes away; new ones may come."""

SIZES = {"tokens": 4096, "hidden": 7168, "experts": 256, "topk": 8}
"""Of the workload, where nobody gives others; without GPUs it has 4 ranks."""

TOKENS, HIDDEN, TOPK = 24, 256, 4
"""Of each rank of the self-test."""

ORDER, SECONDS = "Order of its received rows.", "Seconds to wait for each process."
WAITS = (
    "Look at no machine, but at files of ep.stats().prometheus() of each rank, or a folder of "
    "*.prom: who is waited for; may be given several times."
)
Count = int | None


def _size(name: str, text: str) -> Any:
    return option(text, str(SIZES.get(name, "one per GPU, or 4")), min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    tokens: Annotated[Count, _size("tokens", "Tokens per rank to make room for.")] = None
    hidden: Annotated[Count, _size("hidden", "Channels of a token.")] = None
    experts: Annotated[Count, _size("experts", "Experts over all ranks.")] = None
    topk: Annotated[Count, _size("topk", "Experts per token.")] = None
    ranks: Annotated[Count, _size("ranks", "Ranks of the workload.")] = None
    layout: Annotated[Literal["flat", "expert_major"], option(ORDER)] = "flat"
    self_test: Annotated[bool, option("Dispatch and combine on real ranks.")] = True
    timeout: Annotated[float, option(SECONDS, min=0.1, max=86_400)] = 60.0
    waits: Annotated[list[Path] | None, option(WAITS, exists=True)] = None
    json: Annotated[bool, option("Print one JSON document, and nothing else.")] = False


@command(Options)
def doctor(options: Options) -> None:
    """Look at this machine: GPUs, links, libraries, limits; which engine it gets; whether dispatch
    and combine work.

    The exit code is 0 if it is healthy (with or without GPUs, warnings allowed) and 1 if not;
    reasons and remedies come last. Under torchrun the first process of each host looks.
    """
    if under_torchrun() and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if options.waits:
        try:
            document, show = doctor_waits.document_of(options.waits), doctor_waits.print_document
        except (OSError, ValueError) as wrong:
            bad("--waits", str(wrong))
    else:
        document, show = diagnose(examine(options)), print_document
    if options.json:
        typer.echo(json.dumps(document, indent=1))
    else:
        show(consoles.table_console(), document)
    raise typer.Exit(0 if document.get("healthy", True) else 1)


def examine(options: Options) -> Machine:
    given = {name: getattr(options, name) for name in (*SIZES, "ranks")}
    workload: dict[str, Any] = {name: given[name] or size for name, size in SIZES.items()}
    if workload["topk"] > workload["experts"]:
        bad("--topk", f"{workload['topk']} experts per token, but there are {workload['experts']}")
    facts, untold = gather(options.timeout)
    workload |= {"ranks": options.ranks or len(facts["gpus"] or []) or 4, "layout": options.layout}
    machine = Machine(facts, untold, workload, asked=any(given.values()))
    try:
        assert machine.need
    except ValueError as wrong:  # rings that hold no two rows
        bad("--hidden", str(wrong))
    if options.self_test:
        run_self_tests(machine, options.timeout)
    return machine


def diagnose(machine: Machine) -> dict[str, Any]:
    """The document of ``--json``; see ``docs/how-to/doctor.md``."""
    found = findings(machine)
    return {
        "schema": SCHEMA,
        "tokenyard": __version__,
        "healthy": not any(finding["severity"] == PROBLEM for finding in found),
        "engine": machine.engine(machine.workload["ranks"]),
        "facts": machine.facts,
        "memory": machine.need,
        "self_tests": machine.self_tests,
        "could_not_tell": machine.untold,
        "findings": found,
    }


# The self-test


def run_self_tests(machine: Machine, timeout: float) -> None:
    """Ranks on the CPU over gloo, and one rank per GPU with the engine that is likely here."""
    plans = [("cpu", 2, COLLECTIVE)]
    if machine.gpus:
        plans.append(("cuda", machine.count, machine.engine(machine.count)["name"]))
    for device, ranks, engine in plans:
        say(f"self-test on {ranks} {device} ranks")
        words = map(str, (device, ranks, engine, timeout / 2))
        answers, errors = ask("self-test", *words, timeout=timeout)
        why = errors.get("self-test", "")
        told = {"engine": engine, "why": "", "seconds": None} | answers.get("self-test", {})
        test = {"device": device, "ranks": ranks, **told, "error": why, "ok": not why}
        machine.self_tests.append(test)


def self_test(device: str, ranks: str, engine: str, seconds: str) -> dict[str, object]:
    """Dispatch and combine on so many local ranks of ``device`` ("cpu" or "cuda"), in a process of
    its own. All are words of a command line; a silent rank is waited for ``seconds``. Returns the
    ``engine``, ``why``, and ``seconds`` that it took. RuntimeError: a rank raised; its traceback is
    the message."""
    begin = time.monotonic()
    name, why = spawn(check_rank, int(ranks), engine, float(seconds), device=device)[0]
    return {"engine": name, "why": why, "seconds": round(time.monotonic() - begin, 2)}


def check_rank(here: torch.device, engine: str, timeout: float) -> tuple[str, str]:
    """One rank's part: two layouts, experts that do not divide by the ranks, tokens that pick an
    expert twice. Returns the engine and why it is. AssertionError: a bit is wrong; says where."""
    known: dict[str, Any] = {"device": here if here.type == "cuda" else None, "timeout": timeout}
    cases = [
        Case(TOKENS, HIDDEN, TOPK, 3 * dist.get_world_size() + 1, "duplicates", layout=layout)
        for layout in ("flat", "expert_major")
    ]
    with ExpertParallel(**cases[0].arguments, engine=engine, **known) as ep:
        for case in cases:
            [batch], [sent] = sweep_inputs(case, 0, here, 1)
            truth = Oracle.asked(case, batch, sent)
            for call in engine_calls(ep, case, [batch]):
                try:
                    call.attempt(0, truth)
                except AssertionError as error:
                    what = f"rank {ep.rank}: {case.layout.upper()} {call.phase}"
                    raise AssertionError(f"{what}: {error}") from None
        return ep.engine, ep.why


# The document as tables for a reader: they name things by its keys, and what is wrong comes last

HOST = ("cpus", "memory", "shm", "limits", "hostname", "infiniband", "pci", "environment")
SOFTWARE = ("python", "torch", "triton", "driver", "nccl", "nvshmem")
TEST = ("device", "ranks", "engine", "seconds", "ok", "why")
BYTES = ("total", "free", "memlock", "memory_total", "memory_free", "results", "buffers")


def print_document(console: Console, document: dict[str, Any]) -> None:
    facts, untold, need = (document[key] for key in ("facts", "could_not_tell", "memory"))
    none = dict.fromkeys(facts, "none") | dict.fromkeys(untold, "?")
    for title, names in (("Host", HOST), ("Software", SOFTWARE)):
        rows = [(name, text(name, facts[name]) or none[name]) for name in names]
        print_table(console, title, "<|<", rows)
    unseen = "?" if facts["gpus"] is None else "none that torch sees"
    _print_records(console, "GPUs", facts["gpus"], unseen)
    if facts["links"]:
        rows = [(str(gpu), *links) for gpu, links in enumerate(facts["links"])]
        heads = "|".join(["<GPU", *(gpu for gpu, *_ in rows)])
        print_table(console, "Links between GPUs (NV18: 18 NVLinks)", heads, rows)
    engine = f"{document['engine']['name']}: {escape(document['engine']['why'])}"
    print_line(console, f"\n[bold]Engine[/bold] {engine}")
    title = f"Memory of a rank ({text('free', need['free']) or '?'} free on the {need['where']}): "
    cases = [{"routing": case} | need[case] for case in ("even", "most")]
    _print_records(console, title + text("", need["workload"]), cases)
    tests = [{key: test[key] for key in TEST} for test in document["self_tests"]]
    _print_records(console, "Self-test", tests, "not run")
    print_line(console, "")
    for name, why in untold.items():
        print_line(console, f"[yellow]could not tell: {escape(name)}: {escape(why)}[/yellow]")
    _print_verdict(console, document)


def text(name: str, value: Any) -> str:
    """A value called ``name`` as markup, "" if it is unknown; of a record what is known."""
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
        return consoles.seconds_text(value)
    return bytes_text(value) if name in BYTES else escape(str(value))


def _print_records(console: Console, title: str, records: list[Record], none: str = "") -> None:
    """A table of records of one kind; ``none``: what is said where there are none."""
    if not records:
        print_line(console, f"\n[bold]{title}[/bold] {none}")
        return
    heads = (f"<{key}" if isinstance(value, str) else key for key, value in records[0].items())
    rows = [[text(*known) or "?" for known in record.items()] for record in records]
    print_table(console, title, "|".join(heads), rows)


def _print_verdict(console: Console, document: dict[str, Any]) -> None:
    good, bad = "[green]Healthy[/green]", "[bold red]Not healthy[/bold red]"
    print_line(console, good if document["healthy"] else bad)
    for severity, colour in ((WARNING, "yellow"), (PROBLEM, "bold red")):
        for finding in document["findings"]:
            if finding["severity"] == severity:
                told = {name: escape(words) for name, words in finding.items()}
                head = f"[{colour}]{severity.upper()}: {told['symptom']}[/{colour}]"
                end = f"  cause:  {told['cause']}\n  remedy: {told['remedy']}"
                print_line(console, f"{head}\n{end}")
