"""``tokenyard doctor``: the self-test, the report, exit codes and JSON, and the whole command on
this machine.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import tokenyard as ty
from doctor_machines import (
    CPU_BUILD,
    CPU_FACTS,
    GPU_FACTS,
    LAYER,
    NO_GPUS,
    PCIE,
    Space,
    gpu_facts,
    matrix,
)
from tokenyard import launch, reference
from tokenyard.cli import app, doctor
from tokenyard.cli.consoles import bytes_text
from tokenyard.cli.doctor_engine import need
from tokenyard.cli.doctor_facts import Facts, SelfTest
from tokenyard.cli.doctor_findings import RULES, of_self_test
from tokenyard.cli.doctor_guard import Asker
from tokenyard.cli.doctor_report import Diagnosis, print_diagnosis
from tokenyard.cli.doctor_selftest import TOKENS, attempt, case_for, check_rank
from tokenyard.testing.cases import all_sent
from tokenyard.testing.checked_calls import Batch, Call, Oracle, share

# The self-test


def alone(check: Callable[[torch.device], object]) -> None:
    store = launch.local_store()
    with launch.joined(0, 1, port=store.port) as here:
        check(here)


@pytest.mark.parametrize("method", ["dispatch", "combine"])
def test_the_self_test_finds_a_wrong_bit(method: str, monkeypatch: pytest.MonkeyPatch):
    right = getattr(ty.ExpertParallel, method)

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = right(*arguments, **options)
        rows: Tensor = result.x if method == "dispatch" else result
        rows.view(torch.int16)[TOKENS // 2, 7] ^= 1
        return result

    alone(lambda here: check_rank(here, "auto", 30))
    monkeypatch.setattr(ty.ExpertParallel, method, wrong)
    with pytest.raises(AssertionError, match=f"FLAT {method}.*1 of {TOKENS} rows are wrong"):
        alone(lambda here: check_rank(here, "auto", 30))


@pytest.mark.parametrize("layout", [ty.Layout.FLAT, ty.Layout.EXPERT_MAJOR])
def test_the_self_test_compares_every_result(layout: ty.Layout):
    """What is wrong, missing or there for no reason is named."""
    case, flat = case_for(2, layout.name.lower()), layout is ty.Layout.FLAT
    inputs = all_sent(case, 2, 0, 0)
    x, idx, weights = inputs
    want = reference.dispatch(x, idx, weights, num_experts=case.experts, layout=layout)
    rows = [each.x * share(rank) for rank, each in enumerate(want)]
    out = reference.combine(rows, want, weighted=not flat)[1].x
    names = ["x", "source", "tokens_per_expert"]
    names += ["topk_weights", "topk_idx"] if flat else ["row_weights", "expert_offsets"]
    batch = Batch(x[1], torch.stack(idx), torch.stack(weights), 1, case.experts)
    truth = Oracle(batch, torch.cat(x), want[1], out)

    def tried(result: Any, phase: str = "dispatch") -> None:
        check = truth.check_combined if phase == "combine" else truth.check_routed
        known: dict[str, Any] = {"batches": [], "name": ""}
        attempt(
            Call(
                case=case, phase=phase, run=lambda _: result, check=lambda y, _: check(y), **known
            ),
            truth,
        )

    def result(**changes: Any) -> Any:
        known = {each.name: getattr(want[1], each.name) for each in fields(want[1])}
        return SimpleNamespace(**{**known, **changes})

    tried(result())
    tried(out, "combine")
    for name in names:
        wrong = getattr(want[1], name).clone()
        wrong.flatten()[0] += 1
        with pytest.raises(AssertionError, match=f"rank 1: {layout.name} dispatch: {name}: 1 of"):
            tried(result(**{name: wrong}))
        with pytest.raises(
            AssertionError, match=f"rank 1: {layout.name} dispatch: {name} is missing"
        ):
            tried(result(**{name: None}))
    odd = "expert_offsets" if flat else "topk_idx"
    with pytest.raises(
        AssertionError, match=f"rank 1: {layout.name} dispatch: {odd} should not be there"
    ):
        tried(result(**{odd: torch.zeros(1)}))
    with pytest.raises(AssertionError, match=f"rank 1: {layout.name} combine"):
        tried(out + 1, "combine")


def test_a_self_test_that_fails_in_its_process_says_why():
    answers, errors = Asker(120).process(["self-test"], "self-test", "cpu", "1", "warp", "30")
    assert answers == {}
    assert errors["self-test"].startswith(
        "rank 0 failed: ValueError: engine ('warp') must be one of"
    )


def test_self_test_findings():
    assert not list(of_self_test(SelfTest(device="cpu", ranks=2, engine="collective"), CPU_FACTS))
    slow = SelfTest(device="cpu", ranks=2, engine="collective", error="no answer within 60 s")
    [found] = of_self_test(slow, CPU_FACTS)
    assert (found.id, found.severity) == ("self-test-cpu", "problem")
    assert "GLOO_SOCKET_IFNAME" in found.remedy and "--timeout" in found.remedy
    wrong = replace(slow, device="cuda", engine="nvlink", ranks=4, error="AssertionError: bits")
    [found] = of_self_test(wrong, gpu_facts(**PCIE))
    assert found.symptom == "the self-test on 4 GPU rank(s), engine nvlink failed"
    assert (
        "NCCL_DEBUG" in found.remedy and "ACS" in found.remedy and "--timeout" not in found.remedy
    )


@pytest.mark.parametrize("facts", [CPU_FACTS, GPU_FACTS, gpu_facts(triton=None)])
def test_what_the_self_tests_run_on(facts: Facts, monkeypatch: pytest.MonkeyPatch):
    words: list[tuple[str, ...]] = []

    def process(names: list[str], *arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
        words.append(arguments)
        told = {"engine": "collective", "why": "because", "seconds": 1.5}
        return (
            ({"self-test": told}, {}) if arguments[1] == "cpu" else ({}, {"self-test": "signal 11"})
        )

    asker = Asker(30)
    monkeypatch.setattr(asker, "process", process)
    tests = doctor.run_self_tests(asker, facts, lambda _: None)
    assert tests[0] == SelfTest(
        device="cpu", ranks=2, engine="collective", why="because", seconds=1.5
    )
    assert words[0] == ("self-test", "cpu", "2", "collective", "15.0")
    if facts.gpus:
        engine = "nvlink" if facts.triton else "collective"
        assert words[1] == ("self-test", "cuda", "4", engine, "15.0")
        assert tests[1] == SelfTest(device="cuda", ranks=4, engine=engine, error="signal 11")
    assert len(tests) == (2 if facts.gpus else 1)


# The report and the command


def diagnosis(facts: Facts, *tests: SelfTest, asked: bool = False) -> Diagnosis:
    asker = Asker(1)
    asker.untold.update(facts.untold)
    return doctor.diagnose(facts, LAYER, list(tests), asked, asker)


def printed(result: Diagnosis) -> str:
    out = io.StringIO()
    print_diagnosis(Console(file=out, width=150), result)
    return out.getvalue()


def test_report_of_four_gpus():
    facts = gpu_facts(
        peers=matrix(4, True, True, _0_3=False), links=matrix(4, "NV18", "X", _0_3="SYS")
    )
    text = printed(
        diagnosis(
            facts, SelfTest(device="cuda", ranks=4, engine="collective", why="NCCL", seconds=3.0)
        )
    )
    assert (
        "Engine collective: over NCCL, one GPU per rank; not nvlink: no peer access between GPUs "
        "0-3" in text
    )
    assert "2.28.9, /site/nccl/lib/libnccl.so.2" in text
    assert "580.159.04 (serves CUDA up to 13.0)" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row for row in rows if len(row) == 5 and row[0] in ("0", "3")] == [
        ["0", "-", "NV18", "NV18", "SYSx"],
        ["3", "SYSx", "NV18", "NV18", "-"],
    ]
    assert "Healthy: 2 warnings" in text
    assert "all equal" in text


def test_columns_hold_what_their_heads_say():
    text = printed(
        diagnosis(
            gpu_facts(),
            SelfTest(device="cpu", ranks=2, engine="collective", why="gloo", seconds=0.25),
        )
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "GPU Name Capability Memory Free MIG UUID" in lines
    assert "0 NVIDIA H200 9.0 151 GB 150 GB off 00" in lines
    needs = need(LAYER, "nvlink", GPU_FACTS)
    assert needs.even.rows < needs.most.rows
    assert "Even routing All tokens here" in lines
    assert f"rows received {needs.even.rows} {needs.most.rows}" in lines
    both = [(each.results, each.buffers, each.total) for each in (needs.even, needs.most)]
    for at, name in enumerate(
        ("results of dispatch and combine", "buffers of the engine", "together")
    ):
        assert f"{name} {bytes_text(both[0][at])} {bytes_text(both[1][at])}" in lines
    assert "free GPU memory for it 150 GB 150 GB" in lines
    assert "2 on cpu gloo 250 ms all equal" in lines


def test_problems_come_last_each_with_a_remedy():
    facts = replace(CPU_FACTS, shm=Space(total=64 << 20, free=1), untold={"pci": "OSError: [gone]"})
    failed = SelfTest(device="cpu", ranks=2, engine="collective", error="AssertionError: bits")
    result = diagnosis(facts, failed, asked=True)
    lines = printed(result).strip().splitlines()
    at = lines.index("Not healthy: 1 problem and 1 warning")
    assert "could not tell: pci: OSError: [gone]" in lines[:at]
    assert [line.split()[0] for line in lines[at + 1 :]] == [
        "WARNING:",
        "cause:",
        "remedy:",
        "PROBLEM:",
        "cause:",
        "remedy:",
    ]
    assert not result.healthy


def test_report_where_nothing_could_be_told():
    text = printed(
        diagnosis(Facts(python="3", engines=["auto"], untold={"gpus": "no answer within 60 s"}))
    )
    assert "GPUs ?" in text
    assert "could not tell: gpus: no answer within 60 s" in text
    assert "PROBLEM: torch does not answer" in text


def test_a_rule_that_raises_could_not_tell(monkeypatch: pytest.MonkeyPatch):
    def broken(_: Facts) -> Any:
        raise KeyError("what")

    monkeypatch.setattr(doctor, "RULES", (broken, *RULES))
    result = diagnosis(replace(CPU_FACTS, shm=Space(total=0, free=0)))
    assert result.untold == {"rule broken": "KeyError: 'what'"}
    assert [finding.id for finding in result.findings] == ["small-shm"]


def invoke(
    monkeypatch: pytest.MonkeyPatch, facts: Facts, *options: str, error: str = ""
) -> tuple[int, str]:
    """Exit code and stdout of the command on a made-up machine."""
    test = SelfTest(device="cpu", ranks=2, engine="collective", seconds=1.0, error=error)
    monkeypatch.setattr(doctor, "gather", lambda *_, **__: facts)
    monkeypatch.setattr(doctor, "run_self_tests", lambda *_: [test])
    result = CliRunner().invoke(app, ["doctor", *options])
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("facts", "options", "error", "code", "last"),
    [
        (CPU_FACTS, [], "", 0, "Healthy"),
        (GPU_FACTS, [], "", 0, "Healthy"),
        (gpu_facts(triton=None), [], "", 0, "  remedy: pip install 'tokenyard[cuda]'"),
        (CPU_FACTS, [], "AssertionError: bits", 1, "GLOO_SOCKET_IFNAME is not set"),
        (
            gpu_facts(torch=CPU_BUILD, nccl=None, **NO_GPUS),
            [],
            "",
            1,
            "this driver serves CUDA up to 13.0",
        ),
        (CPU_FACTS, ["--tokens", "1000000"], "", 1, "end what else runs here"),
        (GPU_FACTS, ["--tokens", "100000"], "", 0, "Healthy"),
        (replace(CPU_FACTS, memory=Space(total=2, free=1)), [], "", 0, "end what else runs here"),
    ],
)
def test_exit_codes(
    facts: Facts,
    options: list[str],
    error: str,
    code: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
):
    got, out = invoke(monkeypatch, facts, *options, error=error)
    assert got == code, out
    assert out.rstrip().endswith(last)
    got, out = invoke(monkeypatch, facts, "--json", *options, error=error)
    assert got == code
    assert json.loads(out)["healthy"] == (code == 0)


def test_bad_options_are_named(monkeypatch: pytest.MonkeyPatch):
    assert invoke(monkeypatch, CPU_FACTS, "--topk", "257")[0] == 2
    assert invoke(monkeypatch, CPU_FACTS, "--experts", "7")[0] == 2
    assert invoke(monkeypatch, CPU_FACTS, "--ranks", "0")[0] == 2


def test_only_one_process_of_a_host_looks(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert invoke(monkeypatch, CPU_FACTS) == (0, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "Healthy" in invoke(monkeypatch, CPU_FACTS)[1]


KEYS = {
    "": {
        "schema",
        "tokenyard",
        "healthy",
        "engine",
        "facts",
        "memory",
        "self_tests",
        "could_not_tell",
        "findings",
    },
    "engine": {"name", "why"},
    "facts": {
        "python",
        "engines",
        "cpus",
        "memory",
        "shm",
        "limits",
        "hostname",
        "infiniband",
        "environment",
        "pci",
        "driver",
        "torch",
        "triton",
        "symmetric_memory",
        "nccl",
        "nvshmem",
        "collect_env",
        "gpus",
        "peers",
        "preflight",
        "links",
        "p2p",
    },
    "memory": {"workload", "even", "most", "free", "where"},
}


def test_json_keys(monkeypatch: pytest.MonkeyPatch):
    code, out = invoke(monkeypatch, gpu_facts(triton=None), "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == 1
    for part, keys in KEYS.items():
        assert (document[part] if part else document).keys() == keys
    assert document["memory"]["even"].keys() == {"rows", "results", "buffers", "total"}
    assert document["facts"]["gpus"][0].keys() == {
        "index",
        "name",
        "uuid",
        "capability",
        "memory_total",
        "memory_free",
        "mig",
    }
    assert document["self_tests"][0].keys() == {
        "device",
        "ranks",
        "engine",
        "why",
        "seconds",
        "error",
        "ok",
    }
    assert [finding["id"] for finding in document["findings"]] == ["no-triton"]
    assert document["findings"][0].keys() == {"id", "severity", "symptom", "cause", "remedy"}
    assert document["facts"]["links"][0][3] == "NV18"


def test_everything_hangs():
    """No probe answers in time: still one document, which says so."""
    result = CliRunner().invoke(app, ["doctor", "--json", "--timeout", "0.1"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["could_not_tell"]["torch"] == "no answer within 0.1 s"
    assert document["facts"]["gpus"] is None
    assert {"torch-silent", "self-test-cpu"} <= {finding["id"] for finding in document["findings"]}


def test_a_timeout_that_no_clock_can_wait_is_a_bad_option():
    assert CliRunner().invoke(app, ["doctor", "--no-self-test", "--timeout", "inf"]).exit_code == 2


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("TemporaryDirectory", FileNotFoundError(2, "No usable temporary directory found")),
        ("subprocess.Popen", BlockingIOError(11, "Resource temporarily unavailable")),
    ],
)
def test_no_process_can_ask(name: str, error: OSError, monkeypatch: pytest.MonkeyPatch):
    """No room for files or for processes: still one document, which says so."""

    def no(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(f"tokenyard.cli.doctor_guard.{name}", no)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not document["healthy"]
    why = f"no process to ask in: {type(error).__name__}: {error}"
    assert [document["could_not_tell"][question] for question in ("torch", "gpus")] == [why, why]
    assert document["self_tests"][0]["error"] == why
    found = {finding["id"]: finding for finding in document["findings"]}
    for each in ("torch-silent", "self-test-cpu"):
        assert found[each]["cause"] == why
        assert "TMPDIR" in found[each]["remedy"]


def test_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "tokenyard", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["healthy"] else 1)
    facts, tests = document["facts"], document["self_tests"]
    assert facts["torch"]["version"] == torch.__version__
    assert (tests[0]["device"], tests[0]["ranks"], tests[0]["ok"]) == ("cpu", 2, True), tests
    assert tests[0]["why"].startswith("collective: 2 ranks over a gloo mesh")
    assert facts["shm"]["total"] >= facts["shm"]["free"]
    assert facts["collect_env"]["torch_version"] == torch.__version__
    assert len(facts["gpus"]) == torch.cuda.device_count()
    if not torch.cuda.is_available() and facts["driver"] is None:
        assert document["healthy"], document["findings"]
        assert document["engine"] == {
            "name": "collective",
            "why": "torch sees no GPU: ranks over gloo, through host memory",
        }
