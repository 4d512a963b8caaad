"""``tokenyard plan`` as a user meets it: tables, JSON, a picture, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tokenyard.cli import app
from tokenyard.planner.prediction import plan
from tokenyard.planner.rates import HOPPER
from tokenyard.planner.workload import Workload

RECORD = Path(__file__).parents[2] / "docs" / "benchmarks" / "nvlink-2xh200-20261122.json"
DECODING = RECORD.with_name("low_latency-2xh200-20261121.json")
TWOLEVEL = RECORD.with_name("twolevel-4xh200-20261122.json")
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_tables_of_one_node() -> None:
    done = run("--gpus-per-node", "4")
    assert done.exit_code == 0, done.output
    for words in (
        "1 x 4 GPUs, 4096 tokens per rank, hidden 7168, top-8 of 256 experts. Engine nvlink would "
        "run; the others are",
        "Dispatches to results in a heap: bf16 uniform, fp8 uniform, bf16 zipf, fp8 zipf.",
        "Time (us",
        "Bytes per GPU and call",
        "Sizes of engine nvlink",
        HOPPER.source,
        "The network was never measured",
        "the Python call (100-450 us in the records",
    ):
        assert words in done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert [
        "combine",
        "bf16",
        "nvlink",
        "uniform",
        "159",
        "MB",
        "159",
        "MB",
        "0",
        "B",
        "0",
        "B",
    ] in lines
    assert [
        "bf16",
        "64",
        "NVLink",
        "256",
        "524",
        "kB",
        "36",
        "16",
        "36",
        "4",
        "848",
        "MB",
    ] in lines


def test_tables_of_several_nodes() -> None:
    done = run("--nodes", "4", "--dtype", "fp8")
    assert done.exit_code == 0, done.output
    assert (
        'Engine twolevel would run if asked for, engine="twolevel" ("auto" takes collective '
        "there); the" in done.output
    )
    lines = [line.split() for line in done.output.splitlines()]
    assert ["uniform", "7.27", "3.61", "22,324", "11,103", "50%"] in lines
    heads = [line[:4] for line in lines]
    for engine in (["twolevel", "uniform"], ["collective", "zipf"], ["flat", "exchange"]):
        assert ["dispatch", "fp8", *engine] in heads
    assert "low_latency" not in done.output
    few = run("--nodes", "4", "--tokens", "128", "--dtype", "fp8").output.splitlines()
    assert ["dispatch", "fp8", "low_latency", "uniform"] in [line.split()[:4] for line in few]
    assert not any(line[:2] == ["dispatch", "bf16"] for line in lines)


def test_a_machine_too_large_for_twolevel_is_on_paper() -> None:
    """As ``engines/select.py`` refuses it."""
    largest, larger = run("--nodes", "56").output, run("--nodes", "57").output
    assert "would run if asked for" in largest and "on paper" not in largest
    assert (
        "twolevel is on paper only (it takes at most 512 ranks and nodes together; collective "
        "would run)" in larger
    )
    slim, slimmer = (run("--nodes", nodes, "--gpus-per-node", "1").output for nodes in ("64", "65"))
    assert "would run if asked for" in slim and "on paper" not in slim
    assert "twolevel is on paper only (it takes at most 64 nodes; collective would run)" in slimmer


def test_json_is_the_plan() -> None:
    done = run(
        "--nodes", "2", "--gpus-per-node", "4", "--tokens", "128", "--experts", "64", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert set(found) == {
        "tokenyard",
        "workload",
        "rates",
        "engine",
        "engine_runs",
        "low_latency_once_per_node",
        "sizes",
        "rows",
        "calls",
    }
    assert found["workload"] == {
        "nodes": 2,
        "gpus_per_node": 4,
        "tokens": 128,
        "hidden": 7168,
        "experts": 64,
        "topk": 8,
        "sms": 132,
        "most_sms": 132,
        "buffer_bytes": 128 << 20,
    }
    assert found["rates"]["dispatch"].keys() == {"fixed_us", "link_gbs", "program_gbs"}
    assert found["rows"]["uniform"]["nic"].keys() == {"mean", "busiest"}
    assert found["engine"] == "twolevel" and set(found["sizes"]) == {"bf16", "fp8"}
    assert "if asked for" in found["engine_runs"]
    assert set(found["rows"]) == {"uniform", "zipf"}
    work = Workload(nodes=2, gpus_per_node=4, tokens=128, hidden=7168, experts=64, topk=8)
    calls = plan(work, HOPPER, skews=("uniform", "zipf")).calls
    assert len(found["calls"]) == len(calls) == 30
    for seen, call in zip(found["calls"], calls, strict=True):
        assert set(seen) == {
            "name",
            "engine",
            "dtype",
            "skew",
            "us",
            "bound",
            "terms_us",
            "links_in_turn",
            "in_heap",
            "power",
            "nvlink_bytes",
            "nic_bytes",
        }
        assert seen["us"] == call.terms.us and seen["bound"] == call.terms.bound
        assert set(seen["terms_us"]) == {"nvlink", "nic", "programs", "latency", "fill"}
        assert seen["nic_bytes"] == {"mean": call.nic.mean, "busiest": call.nic.busiest}
        assert seen["links_in_turn"] == (
            call.engine in ("collective", "low_latency, once per node")
        )


def test_one_process_of_a_launcher_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    done = run("--json")
    assert (done.exit_code, done.output) == (0, "")


def test_rates_come_from_flags_and_records() -> None:
    done = run("--rates", str(RECORD), "--nic", "100", "--latency", "2", "--json")
    assert done.exit_code == 0, done.output
    rates = json.loads(done.output)["rates"]
    assert (rates["nic_gbs"], rates["latency_us"]) == (100, 2)
    assert rates["source"].startswith(RECORD.name) and rates["source"].endswith(
        "given: nic 100, latency 2"
    )


def test_the_seed_moves_the_popular_experts() -> None:
    first, again, other = (run("--json", "--seed", seed).output for seed in ("0", "0", "1"))
    assert first == again != other


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    done = run("--gpus-per-node", "64", "--sms", "132", "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert path.read_bytes().startswith(PNG)


def test_machines_that_do_not_fit_are_not_in_the_picture(tmp_path: Path) -> None:
    """Here those of one node, whose rings are cut for all of its channels, and large ones."""
    path = tmp_path / "plan.png"
    done = run("--nodes", "2", "--hidden", "20000", "--json", "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert path.read_bytes().startswith(PNG)
    assert json.loads(done.stdout)["workload"]["nodes"] == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(
        "Not in the picture: machines of 1024 GPUs: buffer_bytes (134217728) gives each of"
    )


def test_no_machine_for_the_picture(tmp_path: Path) -> None:
    """Two nodes of 600 GPUs fit; one, the only machine of up to 1024 GPUs, has too many."""
    path = tmp_path / "plan.png"
    machine = (
        "--nodes",
        "2",
        "--gpus-per-node",
        "600",
        "--experts",
        "1200",
        "--buffer-bytes",
        str(1 << 30),
    )
    assert run(*machine).exit_code == 0
    done = run(*machine, "--plot", str(path))
    assert (done.exit_code, done.stdout) == (2, "") and not path.exists()
    assert "takes at most 512 ranks and nodes together" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "nodes (0) must be a whole number of at least 1"),
        (("--topk", "9", "--experts", "8"), "topk (9) must be at most experts (8)"),
        (("--dtype", "fp4"), "'fp4' is unknown; use one of bf16, fp8"),
        (("--nic", "0"), "nic (0.0) must be from 1e-06 to 1e+09"),
        (
            ("--latency", "inf", "--json"),
            "latency (inf) must be from 1e-06 to 1e+09: give GB/s, or us for latency",
        ),
        (("--nvlink", "nan"), "nvlink (nan) must be from"),
        (
            ("--gpus-per-node", "512", "--experts", "512"),
            "takes at most 512 ranks and nodes together, but 512 ranks and a node are 513",
        ),
        (
            ("--rates", "nowhere.json"),
            "rates (nowhere.json) must be a file of tokenyard bench --json or of suite nvlink",
        ),
        (("--rates", str(DECODING)), "must be a file of tokenyard bench --json or of suite nvlink"),
        (
            ("--rates", str(TWOLEVEL)),
            "records of other suites, such as twolevel, have no rates of links",
        ),
        (("--plot", "no/such/x.png"), "Invalid value for --plot: no/such is not a directory"),
        (("--plot", "x.bmp"), "'x.bmp' must end in .png"),
        (("--plot", "x.gif"), "'x.gif' must end in .png"),
    ],
)
def test_errors_name_limit_value_and_remedy(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    plain = " ".join(word for word in done.output.split() if word != "│")
    assert message in plain
