"""``tokenyard doctor``: the self-test, the report, exit codes and JSON, and the whole command on
this machine.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
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
    NO_GPUS,
    PCIE,
    SILENT,
    Space,
    findings,
    gpu_facts,
    machine,
    matrix,
    need,
)
from tokenyard import launch, reference
from tokenyard.cli import app, doctor, doctor_findings
from tokenyard.cli.consoles import bytes_text
from tokenyard.cli.doctor import HIDDEN, TOKENS, TOPK, check_rank, print_document
from tokenyard.cli.doctor_ask import ask
from tokenyard.cli.doctor_machine import Machine
from tokenyard.cli.doctor_probes import Record
from tokenyard.testing.cases import Case, all_sent
from tokenyard.testing.checked_calls import Batch, Oracle, share

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
    with pytest.raises(
        AssertionError, match=f"rank 0: FLAT {method}.*1 of {TOKENS} rows are wrong"
    ):
        alone(lambda here: check_rank(here, "auto", 30))


@pytest.mark.parametrize("layout", [ty.Layout.FLAT, ty.Layout.EXPERT_MAJOR])
def test_the_self_test_compares_every_result(layout: ty.Layout):
    """What is wrong, missing or there for no reason is named."""
    flat = layout is ty.Layout.FLAT
    case = Case(TOKENS, HIDDEN, TOPK, 7, "duplicates", layout=layout.name.lower())
    inputs = all_sent(case, 2, 0, 0)
    x, idx, weights = inputs
    want = reference.dispatch(x, idx, weights, num_experts=case.experts, layout=layout)
    rows = [each.x * share(rank) for rank, each in enumerate(want)]
    out = reference.combine(rows, want, weighted=not flat)[1].x
    names = ["x", "source", "tokens_per_expert"]
    names += ["topk_weights", "topk_idx"] if flat else ["row_weights", "expert_offsets"]
    batch = Batch(x[1], torch.stack(idx), torch.stack(weights), 1, case.experts)
    truth = Oracle(batch, torch.cat(x), want[1], out)

    def result(**changes: Any) -> Any:
        known = {each.name: getattr(want[1], each.name) for each in fields(want[1])}
        return SimpleNamespace(**{**known, **changes})

    truth.check_routed(result())
    truth.check_combined(out)
    for name in names:
        wrong = getattr(want[1], name).clone()
        wrong.flatten()[0] += 1
        with pytest.raises(AssertionError, match=f"{name}: 1 of"):
            truth.check_routed(result(**{name: wrong}))
        with pytest.raises(AssertionError, match=f"{name} is missing"):
            truth.check_routed(result(**{name: None}))
    odd = "expert_offsets" if flat else "topk_idx"
    with pytest.raises(AssertionError, match=f"{odd} should not be there"):
        truth.check_routed(result(**{odd: torch.zeros(1)}))
    with pytest.raises(AssertionError, match="combined"):
        truth.check_combined(out + 1)


def test_a_self_test_that_fails_in_its_process_says_why():
    told, errors = ask("self-test", "cpu", "1", "warp", "30", timeout=120)
    assert told == {}
    assert errors["self-test"].startswith(
        "rank 0 failed: ValueError: engine ('warp') must be one of"
    )


def ran(device: str = "cpu", ranks: int = 2, **known: Any) -> Record:
    """A self-test that ran well, but for what is ``known``."""
    told = {"engine": "collective", "why": "gloo", "seconds": 0.25, "error": "", **known}
    return {"device": device, "ranks": ranks, **told, "ok": not told["error"]}


def test_self_test_findings():
    assert findings(CPU_FACTS, ran()) == {}
    found = findings(CPU_FACTS, ran(error="no answer within 60 s"))["self-test-cpu"]
    assert (found["severity"], found["cause"]) == ("problem", "no answer within 60 s")
    assert "GLOO_SOCKET_IFNAME" in found["remedy"] and "--timeout" in found["remedy"]
    wrong = ran("cuda", 4, engine="nvlink", error="AssertionError: bits")
    both = findings(gpu_facts(**PCIE), ran(error="signal 9"), wrong)
    assert {"self-test-cpu", "self-test-cuda"} <= both.keys()
    found = both["self-test-cuda"]
    assert found["symptom"] == "the self-test on 4 cuda rank(s), engine nvlink failed"
    assert "NCCL_DEBUG" in found["remedy"] and "ACS" in found["remedy"]
    assert "--timeout" not in found["remedy"]


@pytest.mark.parametrize("facts", [CPU_FACTS, GPU_FACTS, gpu_facts(triton=None)])
def test_what_the_self_tests_run_on(facts: Record, monkeypatch: pytest.MonkeyPatch):
    words: list[tuple[str, ...]] = []

    def asked(*arguments: str, timeout: float) -> tuple[dict[str, Any], dict[str, str]]:
        words.append(arguments)
        told = {"engine": "collective", "why": "because", "seconds": 1.5}
        if arguments[1] == "cpu":
            return {"self-test": told}, {}
        return {}, {"self-test": "signal 11"}

    monkeypatch.setattr(doctor, "ask", asked)
    made = machine(facts)
    doctor.run_self_tests(made, 30)
    assert made.self_tests[0] == ran(why="because", seconds=1.5)
    assert words[0] == ("self-test", "cpu", "2", "collective", "15.0")
    if facts["gpus"]:
        engine = "nvlink" if facts["triton"] else "collective"
        assert words[1] == ("self-test", "cuda", "4", engine, "15.0")
        failed = ran("cuda", 4, engine=engine, why="", seconds=None, error="signal 11")
        assert made.self_tests[1] == failed
    assert len(made.self_tests) == (2 if facts["gpus"] else 1)


# The report and the command


def diagnosis(facts: Record, *tests: Record, asked: bool = False) -> dict[str, Any]:
    made = machine(facts, asked)
    made.self_tests += tests
    return doctor.diagnose(made)


def printed(document: dict[str, Any]) -> str:
    out = io.StringIO()
    print_document(Console(file=out, width=150), document)
    return out.getvalue()


def test_report_of_four_gpus():
    facts = gpu_facts(
        peers=matrix(4, True, True, _0_3=False), links=matrix(4, "NV18", "X", _0_3="SYS")
    )
    text = printed(diagnosis(facts, ran("cuda", 4, why="NCCL", seconds=3.0)))
    assert (
        "Engine collective: over NCCL, one GPU per rank; not nvlink: no peer access between GPUs "
        "0-3" in text
    )
    assert "version 2.28.9, wanted 2.28.9, paths /site/nccl/lib/libnccl.so.2" in text
    assert "version 580.159.04, cuda 13.0" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row for row in rows if row and row[0] in ("0", "3") and "NV18" in row] == [
        ["0", "X", "NV18", "NV18", "SYS"],
        ["3", "SYS", "NV18", "NV18", "X"],
    ]
    assert "Healthy\nWARNING" in text and "WARNING: no peer access between GPUs 0-3" in text


def test_columns_hold_what_their_heads_say():
    text = printed(diagnosis(gpu_facts(), ran()))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    told = {"index": "0", "name": "NVIDIA H200", "capability": "9.0", "memory_total": "151 GB"}
    told |= {"memory_free": "150 GB", "mig": "no", "uuid": "00"}
    keys = list(GPU_FACTS["gpus"][0])
    at = lines.index(" ".join(keys))
    assert lines[at + 1] == " ".join(told[key] for key in keys)
    needs = need(GPU_FACTS)
    even, most = needs["even"], needs["most"]
    assert even["rows"] < most["rows"]
    assert "routing rows results buffers total" in lines
    for name, told in (("even", even), ("most", most)):
        sizes = [bytes_text(told[key]) for key in ("results", "buffers", "total")]
        assert f"{name} {told['rows']} {' '.join(sizes)}" in lines
    assert (
        "Memory of a rank (150 GB free on the GPU): tokens 4096, hidden 7168, experts 256, topk 8, "
        "ranks 4, layout flat" in lines
    )
    assert "device ranks engine seconds ok why" in lines
    assert "cpu 2 collective 250 ms yes gloo" in lines
    failed = printed(diagnosis(gpu_facts(), ran(error="signal 9", seconds=None, why="")))
    assert "cpu 2 collective ? no ?" in [" ".join(line.split()) for line in failed.splitlines()]


def test_limits_in_words():
    facts = CPU_FACTS | {"limits": {"memlock": -1, "open_files": 512}}
    assert "memlock unlimited, open_files 512" in printed(diagnosis(facts))


def test_problems_come_last_each_with_a_remedy():
    facts = CPU_FACTS | {"shm": Space(total=64 << 20, free=1), "untold": {"pci": "Error: [gone]"}}
    result = diagnosis(facts, ran(error="AssertionError: bits"), asked=True)
    lines = printed(result).strip().splitlines()
    at = lines.index("Not healthy")
    assert "could not tell: pci: Error: [gone]" in lines[:at]
    assert [line.split()[0] for line in lines[at + 1 :]] == [
        "WARNING:",
        "cause:",
        "remedy:",
        "PROBLEM:",
        "cause:",
        "remedy:",
    ]
    assert not result["healthy"]


def test_report_where_nothing_could_be_told():
    text = printed(diagnosis(SILENT | {"untold": {"gpus": "no answer within 60 s", "cpus": "?"}}))
    assert ["cpus", "?"] in [line.split() for line in text.splitlines()]
    assert ["driver", "none"] in [line.split() for line in text.splitlines()]
    assert "GPUs ?" in text
    assert "could not tell: gpus: no answer within 60 s" in text
    assert "PROBLEM: torch does not answer" in text


def test_a_rule_that_raises_could_not_tell(monkeypatch: pytest.MonkeyPatch):
    def broken(_: Machine) -> Any:
        raise KeyError("what")

    monkeypatch.setattr(doctor_findings, "RULES", (broken, *doctor_findings.RULES))
    result = diagnosis(CPU_FACTS | {"shm": Space(total=0, free=0)})
    assert result["could_not_tell"] == {"rule broken": "KeyError: 'what'"}
    assert [finding["id"] for finding in result["findings"]] == ["small-shm"]


def invoke(
    monkeypatch: pytest.MonkeyPatch, facts: Record, *options: str, error: str = ""
) -> tuple[int, str]:
    """Exit code and stdout of the command on a made-up machine."""

    def run_self_tests(made: Machine, *_: Any) -> None:
        made.self_tests.append(ran(seconds=1.0, error=error))

    monkeypatch.setattr(doctor, "gather", lambda *_: (dict(facts), {}))
    monkeypatch.setattr(doctor, "run_self_tests", run_self_tests)
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
        (CPU_FACTS | {"memory": Space(total=2, free=1)}, [], "", 0, "end what else runs here"),
    ],
)
def test_exit_codes(
    facts: Record,
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
    assert invoke(monkeypatch, GPU_FACTS, "--hidden", "20000000")[0] == 2


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
        ("TemporaryFile", FileNotFoundError(2, "No usable temporary directory found")),
        ("subprocess.Popen", BlockingIOError(11, "Resource temporarily unavailable")),
    ],
)
def test_no_process_can_ask(name: str, error: OSError, monkeypatch: pytest.MonkeyPatch):
    """No room for files or for processes: still one document, which says so."""

    def no(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(f"tokenyard.cli.doctor_ask.{name}", no)
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
