"""``tokenyard doctor``: what this machine has, which engine it would get, whether dispatch and
combine work on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from tokenyard.cli.consoles import table_console
from tokenyard.cli.doctor_engine import Engine, Layout, Workload, likely_engine, need
from tokenyard.cli.doctor_facts import Facts, SelfTest
from tokenyard.cli.doctor_findings import RULES, of_memory, of_self_test
from tokenyard.cli.doctor_guard import Asker
from tokenyard.cli.doctor_probes import gather
from tokenyard.cli.doctor_report import Diagnosis, as_json, print_diagnosis
from tokenyard.cli.options import bad, command, option
from tokenyard.engines.known import COLLECTIVE
from tokenyard.launch import under_torchrun

Say = Callable[[str], object]

CPU_RANKS = 2
"""Of the self-test."""

CPU_WORKLOAD_RANKS = 4
SIZES = {"tokens": 4096, "hidden": 7168, "experts": 256, "topk": 8}
"""Of the workload, where nobody gives others."""


def _size(name: str, text: str) -> Any:
    return option(text, min=1, show_default=str(SIZES.get(name, "one per GPU, or 4")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``tokenyard doctor``."""

    tokens: Annotated[int | None, _size("tokens", "Tokens per rank to make room for.")] = None
    hidden: Annotated[int | None, _size("hidden", "Channels of a token.")] = None
    experts: Annotated[int | None, _size("experts", "Experts over all ranks.")] = None
    topk: Annotated[int | None, _size("topk", "Experts per token.")] = None
    ranks: Annotated[int | None, _size("ranks", "Ranks of the workload.")] = None
    layout: Annotated[Layout, option("Order of its received rows.")] = "flat"
    self_test: Annotated[bool, option("Dispatch and combine on real ranks.")] = True
    timeout: Annotated[float, option("Seconds to wait for each answer.", min=0.1, max=86_400)] = (
        60.0
    )
    json: Annotated[bool, option("Print one JSON document, and nothing else.")] = False

    @property
    def sizes(self) -> dict[str, int]:
        """Those of the workload, defaults included."""
        return {name: getattr(self, name) or SIZES[name] for name in SIZES}

    @property
    def asked(self) -> bool:
        """Whether a size was given."""
        return any(getattr(self, name) is not None for name in (*SIZES, "ranks"))


@command(Options)
def doctor(options: Options) -> None:
    """Look at this machine: GPUs, links, libraries, limits; which engine it gets; whether dispatch
    and combine work.

    The exit code is 0 if it is healthy (with or without GPUs, warnings allowed) and 1 if not;
    reasons and remedies come last. Under torchrun the first process of each host looks.
    """
    if under_torchrun() and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    sizes = options.sizes
    if sizes["topk"] > sizes["experts"]:
        bad("--topk", f"{sizes['topk']} experts per token, but there are {sizes['experts']}")
    asker = Asker(options.timeout)
    with Console(stderr=True).status("") as spinner:  # silent where nobody watches
        facts = gather(asker, say=spinner.update)
        ranks = options.ranks or len(facts.gpus or []) or CPU_WORKLOAD_RANKS
        workload = Workload(**sizes, ranks=ranks, layout=options.layout)
        tests = run_self_tests(asker, facts, spinner.update) if options.self_test else []
    diagnosis = diagnose(facts, workload, tests, options.asked, asker)
    if options.json:
        typer.echo(json.dumps(as_json(diagnosis), indent=1))
    else:
        print_diagnosis(table_console(), diagnosis)
    raise typer.Exit(0 if diagnosis.healthy else 1)


def run_self_tests(asker: Asker, facts: Facts, say: Say) -> list[SelfTest]:
    """Ranks on the CPU over gloo in any case, and one rank per GPU with the engine that is likely
    here.
    """
    plans = [("cpu", CPU_RANKS, COLLECTIVE)]
    if facts.gpus:
        plans.append(("cuda", len(facts.gpus), likely_engine(facts).name))
    tests: list[SelfTest] = []
    for device, ranks, engine in plans:
        say(f"self-test on {ranks} {device} ranks")
        words = ("self-test", device, str(ranks), engine, str(asker.timeout / 2))
        answers, errors = asker.process(["self-test"], *words)
        told = {"engine": engine, "error": errors.get("self-test", "")}
        told |= answers.get("self-test", {})
        tests.append(SelfTest(device=device, ranks=ranks, **told))
    return tests


def diagnose(
    facts: Facts, workload: Workload, tests: list[SelfTest], asked: bool, asker: Asker
) -> Diagnosis:
    """What the facts mean. A rule that raises becomes something that could not be told, too."""
    unknown = Engine(COLLECTIVE, "could not tell why")
    engine = asker.ask("engine", lambda: likely_engine(facts, workload.ranks)) or unknown
    needs = need(workload, engine.name, facts)
    findings = [
        finding
        for rule in RULES
        for finding in asker.ask(f"rule {rule.__name__}", lambda rule=rule: list(rule(facts))) or []
    ]
    findings += of_memory(needs, asked)
    findings += [finding for test in tests for finding in of_self_test(test, facts)]
    return Diagnosis(
        facts=facts,
        workload=workload,
        engine=engine,
        need=needs,
        tests=tests,
        findings=findings,
        untold=dict(asker.untold),
    )
