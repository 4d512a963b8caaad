"""``tokenyard doctor``: what this machine has, which engine it would get, whether dispatch and
combine work on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.status import Status

from tokenyard.cli.doctor_engine import Engine, Need, Workload, likely_engine, need
from tokenyard.cli.doctor_facts import Facts, SelfTest
from tokenyard.cli.doctor_findings import RULES, Finding, of_memory, of_self_test
from tokenyard.cli.doctor_guard import Asker
from tokenyard.cli.doctor_probes import gather
from tokenyard.cli.doctor_report import Diagnosis, as_json, print_diagnosis
from tokenyard.launch import under_torchrun

Say = Callable[[str], object]

TOKENS, HIDDEN, EXPERTS, TOPK = 4096, 7168, 256, 8
CPU_RANKS = 2
"""Of the self-test."""

CPU_WORKLOAD_RANKS = 4
PIPED_WIDTH = 150


def _size(default: str, text: str) -> object:
    return typer.Option(min=1, help=text, show_default=default)


def doctor(
    tokens: Annotated[
        int | None, _size(str(TOKENS), "Tokens per rank of the workload to make room for.")
    ] = None,
    hidden: Annotated[int | None, _size(str(HIDDEN), "Channels of a token.")] = None,
    experts: Annotated[int | None, _size(str(EXPERTS), "Experts over all ranks.")] = None,
    topk: Annotated[int | None, _size(str(TOPK), "Experts per token.")] = None,
    ranks: Annotated[int | None, _size("one per GPU, or 4", "Ranks of the workload.")] = None,
    layout: Annotated[
        Literal["flat", "expert_major"], typer.Option(help="Order of its received rows.")
    ] = "flat",
    self_test: Annotated[bool, typer.Option(help="Dispatch and combine on real ranks.")] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Seconds to wait for each answer.")
    ] = 60.0,
    as_document: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, and nothing else.")
    ] = False,
) -> None:
    """Look at this machine: GPUs, links, libraries, limits; which engine it gets; whether dispatch
    and combine work.

    The exit code is 0 if it is healthy (with or without GPUs, warnings allowed) and 1 if not;
    reasons and remedies come last. Under torchrun the first process of each host looks.
    """
    if under_torchrun() and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _check(experts or EXPERTS, topk or TOPK)
    asker = Asker(timeout)
    with _status() as say:
        facts = gather(asker, say=say)
        workload = Workload(
            tokens=tokens or TOKENS,
            hidden=hidden or HIDDEN,
            experts=experts or EXPERTS,
            topk=topk or TOPK,
            ranks=ranks or len(facts.gpus or []) or CPU_WORKLOAD_RANKS,
            layout=layout,
        )
        asked = any(option is not None for option in (tokens, hidden, experts, topk, ranks))
        tests = run_self_tests(asker, facts, say) if self_test else []
    diagnosis = diagnose(facts, workload, tests, asked, asker)
    if as_document:
        typer.echo(json.dumps(as_json(diagnosis), indent=1))
    else:
        terminal = Console()
        print_diagnosis(terminal if terminal.is_terminal else Console(width=PIPED_WIDTH), diagnosis)
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _check(experts: int, topk: int) -> None:
    if topk > experts:
        raise typer.BadParameter(
            f"{topk} experts per token, but there are {experts}", param_hint="--topk"
        )


def _status() -> AbstractContextManager[Say]:
    """Say on stderr what is going on, if somebody watches there."""
    console = Console(stderr=True)
    return _Spinner(console) if console.is_terminal else nullcontext(lambda _: None)


class _Spinner(AbstractContextManager[Say]):
    def __init__(self, console: Console) -> None:
        self._status = Status("", console=console)

    def __enter__(self) -> Say:
        self._status.start()
        return self._status.update

    def __exit__(self, *_: object) -> None:
        self._status.stop()


def run_self_tests(asker: Asker, facts: Facts, say: Say) -> list[SelfTest]:
    """Ranks on the CPU over gloo in any case, and one rank per GPU with the engine that is likely
    here.
    """
    plans = [("cpu", CPU_RANKS, "collective")]
    if facts.gpus:
        plans.append(("cuda", len(facts.gpus), likely_engine(facts).name))
    tests: list[SelfTest] = []
    for device, ranks, engine in plans:
        say(f"self-test on {ranks} {device} ranks")
        words = ("self-test", device, str(ranks), engine, str(asker.timeout / 2))
        answers, errors = asker.process(["self-test"], *words)
        told: dict[str, Any] = {
            "engine": engine,
            "error": errors.get("self-test", ""),
            **answers.get("self-test", {}),
        }
        tests.append(SelfTest(device=device, ranks=ranks, **told))
    return tests


def diagnose(
    facts: Facts, workload: Workload, tests: list[SelfTest], asked: bool, asker: Asker
) -> Diagnosis:
    """What the facts mean. A rule that raises becomes something that could not be told, too."""
    unknown = Engine("collective", "could not tell why")
    engine = asker.ask("engine", lambda: likely_engine(facts, workload.ranks)) or unknown
    needs = need(workload, engine.name, facts)
    findings: list[Finding] = []
    for rule in RULES:
        findings += asker.ask(f"rule {rule.__name__}", lambda rule=rule: list(rule(facts))) or []
    findings += _of_run(needs, asked, tests, facts)
    return Diagnosis(
        facts=facts,
        workload=workload,
        engine=engine,
        need=needs,
        tests=tests,
        findings=findings,
        untold=dict(asker.untold),
    )


def _of_run(needs: Need, asked: bool, tests: list[SelfTest], facts: Facts) -> Iterator[Finding]:
    yield from of_memory(needs, asked)
    for test in tests:
        yield from of_self_test(test, facts)
