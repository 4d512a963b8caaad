"""What the suites of ``benchmarks`` make of times and bytes, without GPUs: stand-ins give known
ones.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks import __main__ as command
from benchmarks import low_latency, twolevel
from benchmarks.calls import BACK, PLAIN, library_calls, rows_of
from benchmarks.low_latency import Decode, line_for
from benchmarks.nvlink import MAIN, Suite
from benchmarks.nvlink_report import losses
from benchmarks.record import Line, Network, model_of, network_gbs
from benchmarks.twolevel import TwoLevel, small_rings
from tokenyard.cli.bench_report import line_of
from tokenyard.testing import routing, timing
from tokenyard.testing.cases import Case, Traffic
from tokenyard.testing.checked_calls import Batch, Call
from tokenyard.testing.timing import Series

CPU = torch.device("cpu")


def batch(tokens: int = 12, ranks: int = 2, experts: int = 8, hidden: int = 256) -> Batch:
    picks = [routing("uniform", rank, ranks, tokens, 2, experts, 3) for rank in range(ranks)]
    idx, weights = (torch.stack(each) for each in zip(*picks, strict=True))
    return Batch(torch.ones(tokens, hidden, dtype=torch.bfloat16), idx, weights, 0, experts)


@pytest.mark.parametrize(
    ("gpu", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA Graphics Device", "device"),
    ],
)
def test_a_record_is_named_by_the_model_of_its_gpus(gpu: str, model: str) -> None:
    assert model_of(gpu) == model


# nvlink


def test_a_line_has_the_floor_of_the_least_and_the_bytes_of_its_call() -> None:
    sent: Any = SimpleNamespace(traffic=lambda *_, **__: Traffic([10, 3], [3, 40]))
    known: dict[str, Any] = {"crosses": Traffic([100, 0], [0, 600])}
    case = rows_of(Suite().case(4))
    call = Call(case, [sent], "dispatch", "gather", run=int, check=lambda *_: None, **known)
    line = line_of(call, "", Series([5.0], [4.0]), 2.0)
    assert (line.wire_bytes, line.floor_us) == (600.0, 0.02)
    assert (line.wall_us, line.device_us, line.ours) == ([5.0], [4.0], False)
    assert line_of(call, "wrong", None, None).wall_us == []
    more: dict[str, Any] = {"section": MAIN, "kind": PLAIN, "bar_us": 3.0}
    kept = asdict(Line.of(line, **more))
    assert kept == {**asdict(line), **more, "network": None}


def test_calls_move_rows_of_their_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        rank, engine, buffer_bytes = 0, "nvlink", 0
        why = "a stub"

        def dispatch(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(handle=None, x=torch.ones(1), scales=None)

    sent, ep = batch(), Stub()
    case = Suite(hidden=256, topk=2, experts=8).case(12)
    kinds = [PLAIN, "fp8", "fused", "major", BACK]
    calls = library_calls(ep, case, [sent], kinds)  # pyright: ignore[reportArgumentType]
    sizes = [call.least[0].busiest for call in calls]
    rows = sizes[0] / 512
    assert rows > 0 and sizes == [512 * rows, 264 * rows, 264 * rows, 264 * rows, 512 * rows]
    assert all(call.crosses is None for call in calls)
    there, back = calls[0].least[0], calls[-1].least[0]
    assert (back.sent, back.received) == (there.received, there.sent)


def test_whoever_is_beaten_by_any_baseline_loses() -> None:
    case = Suite().case(4)

    def line(name: str, us: float, ours: bool = False) -> Line:
        known: dict[str, Any] = {"section": "tokens", "phase": "dispatch", "ours": ours}
        return Line(case=case, name=name, wall_us=[us], **known)

    lines = [line("ours", 10.0, ours=True), line("quick", 8.0), line("slow", 20.0)]
    assert losses(lines, "wall") == ["- 4 tokens: ours (10.0 us) loses to quick (1.25x)"]


# low_latency


def test_a_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(
        low_latency, "_cuda", SimpleNamespace(CUDAGraph=lambda: SimpleNamespace(replay="replay"))
    )
    monkeypatch.setattr(low_latency, "_elapsed", lambda run: {"replay": 120.0}[run])
    assert low_latency._graph(Decode(calls=12), calls.append)() == 10.0
    assert calls == [0, 1, 2, *range(12)]


def test_rounds_that_warm_up_do_not_count_and_the_slowest_rank_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = {"a": iter(range(100)), "b": iter(range(100, 200))}
    lines = [line_for(Case(1, 8, 1, 1, engine=who), "x") for who in turns]
    monkeypatch.setattr(low_latency.Told, "__init__", lambda clock, _: setattr(clock, "cuda", True))
    monkeypatch.setattr(timing, "slowest_rank", lambda times, _: 2 * times)
    probes = [(line, lambda line=line: float(next(turns[line.name]))) for line in lines]
    timed = low_latency._time(Decode(iterations=3, warmup=2), probes, CPU)
    assert [line.device_us for line in timed] == [[4.0, 6.0, 8.0], [204.0, 206.0, 208.0]]


def test_the_baseline_moves_as_many_bytes_as_fp8_rows_with_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[tuple[int, int]] = []
    suite, sent = Decode(hidden=7168), batch(hidden=7168)

    def reduce_scatter(out: Any, sums: Any) -> None:
        assert (out.shape, sums.shape) == ((12, 7168), (24, 7168))
        moved.append((sums.nbytes, 0))

    monkeypatch.setattr(low_latency.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(low_latency, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(
        low_latency, "all_gather", lambda out, mine: moved.append((out.nbytes, mine.nbytes))
    )
    low_latency._nccl([sent])(0)
    row_bytes = suite.case(12).row_bytes
    assert row_bytes == 7168 + 4 * 56
    assert moved == [(2 * 12 * row_bytes, 12 * row_bytes), (2 * 12 * 2 * 7168, 0)]


# twolevel


def test_the_rate_is_of_the_rank_with_fewest_rows() -> None:
    network = Network(planned=[], row_bytes=100, rows=[50.0, 20.0])
    case = TwoLevel().case(1, engine="twolevel", sms=1)
    line = Line(
        case=case, name="", phase="", device_us=[2.0, 3.0, 1.0], wall_us=[9.0], network=network
    )
    assert (network.payload_bytes, network_gbs(line)) == (2000.0, 1.0)
    assert replace(network, rows=[], planned=[30.0, 40.0]).payload_bytes == 3000.0


class Object:
    """Stands in for an ``ExpertParallel``."""

    def __init__(self, buffer_bytes: int, why: str) -> None:
        self.buffer_bytes, self.why = buffer_bytes, why


@pytest.fixture
def suite_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank of the suite; the other has everything three times."""
    monkeypatch.setattr(twolevel, "on_ranks", lambda value, _: [value, 3 * value])
    return twolevel._Run(suite=TwoLevel(calls=4), engine="twolevel", device=CPU, kept=None)


def test_memory_is_that_of_the_rank_with_most(
    suite_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Object(70, "NVSHMEM between nodes")
    case = TwoLevel().case(1, engine="twolevel", sms=1)
    call = SimpleNamespace(case=case, name="", phase="", kind="", ep=held)
    known = {"rows": [4, 8], "put_bytes": [40, 80], "num_inputs": 2}
    counted = SimpleNamespace(call=call, planned=[1.0], row_bytes=8, **known)
    suite_run.held = {held: 50}
    line = suite_run._line(counted, "")
    network = line.network
    assert (network.held_bytes, line.symmetric_bytes, network.nvshmem) == (150, 210, True)
    assert (network.rows, network.put_bytes, line.error) == ([6.0, 18.0], [60.0, 180.0], "")

    def peak(call: Any, number: int, _: Any) -> int:
        call(number)
        return 1000

    monkeypatch.setattr(twolevel, "peak_extra_bytes", peak)
    call = SimpleNamespace(run=lambda _: torch.ones(25))
    assert suite_run._other_bytes(SimpleNamespace(call=call)) == 3 * (1000 - 100)


def test_times_are_of_one_call_each_on_its_own_clock(
    suite_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert suite_run._per_call([8.0, 4.0]) == [2.0, 1.0]
    said: list[Line] = []
    case = rows_of(TwoLevel().case(1))
    counted = SimpleNamespace(
        call=SimpleNamespace(case=case, name="x", phase="", kind="", ep=None),
        planned=[1.0, 2.0],
        row_bytes=5,
        tree=1,
        num_inputs=1,
    )
    monkeypatch.setattr(twolevel, "Counted", lambda *_: counted)
    monkeypatch.setattr(twolevel._Run, "_check", lambda self, counted, batches, errors: [""])
    monkeypatch.setattr(twolevel._Run, "_time", lambda *_: [Series([80.0], [40.0])])
    monkeypatch.setattr(twolevel._Run, "_say", lambda self, line: said.append(line))
    suite_run._check_and_time([counted.call], [], case)
    assert [(each.device_us, each.wall_us, each.ours) for each in said] == [([10.0], [20.0], False)]


def test_rings_are_overfull_both_ways() -> None:
    """By the rank that puts fewest rows: here rank 1, three there and rank 0, three back."""
    suite, sent = TwoLevel(topology=(2, 1), experts=8, hidden=256, overfull=2), batch(tokens=5)
    far = torch.tensor([[[4, 5]] * 5, [[0, 1]] * 3 + [[4, 5]] * 2])
    assert small_rings(suite, [replace(sent, topk_idx=far)]) == 3 * 512 // 2
    assert (
        small_rings(suite, [replace(sent, topk_idx=far), replace(sent, topk_idx=far.flip(1))])
        == 3 * 512 // 2
    )


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command.app, [*arguments])


def plain(result: Result) -> str:
    """What was printed, without line breaks and boxes."""
    return " ".join(result.output.replace("│", " ").split())


def test_help_says_what_goes_with_suites() -> None:
    text = plain(CliRunner().invoke(command.app, ["--help"], env={"COLUMNS": "200"}))
    assert "All take --ranks, --iterations, --warmup, --seed, --tiny and --out;" in text
    assert "also --device, --engine and --link-gbs" in text
    assert "draw a picture too" in text


@pytest.mark.parametrize(
    "suite", ["nvlink", "low_latency", "low_latency_nodes", "twolevel", "collective"]
)
def test_suites_get_their_options(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.launch, "under_torchrun", lambda: False)
    monkeypatch.setattr(command, "measure", lambda suite, *_: given.append(suite) or [])
    monkeypatch.setattr(command, "write_record", lambda *_: Path(__file__))
    takes_rate = suite in ("nvlink", "collective")
    rate = ["--link-gbs", "3"] if takes_rate else []
    known = ("--iterations", "7", "--warmup", "2", "--seed", "9")
    done = run(suite, *known, *rate)
    assert done.exit_code == 0, done.output
    [preset] = given
    assert (preset.iterations, preset.warmup, preset.seed) == (7, 2, 9)
    assert getattr(preset, "link_gbs", 3.0) == 3.0
    assert run(suite).exit_code == 0
    assert getattr(given[-1], "link_gbs", 370.0) == 370.0
    assert given[-1].iterations == command.SUITES[suite].preset["cuda"].iterations


def test_two_ranks_write_the_record_of_collective(tmp_path: Path) -> None:
    """On the CPU, of tiny sizes: the suite of the record, its page, its JSON, its picture."""
    done = run("collective", "--device", "cpu", "--tiny", "--ranks", "2", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    [page], [content], [picture] = (
        list(tmp_path.glob(f"collective-tiny-cpu-*.{kind}")) for kind in ("md", "json", "png")
    )
    text = page.read_text()
    assert text in done.output and f"![]({picture.name})" in text
    for skew in ("uniform", "zipf"):
        assert f"## {skew} routing, hidden 24, top-2 of 5" in text
    assert "| dispatch: tokenyard collective | **" in text
    assert "- 6 tokens: tokenyard collective, dispatch: peak memory" in text
    found = json.loads(content.read_text())
    assert found["schema"] == 2
    assert found["suite"]["iterations"] == 2
    assert {row["case"]["skew"] for row in found["rows"]} == {"uniform", "zipf"}
    assert all(not row["error"] and len(row["wall_us"]) == 2 for row in found["rows"])


def test_sizes_of_the_records_are_kept() -> None:
    """The suites measure what the accepted records have."""
    records = Path(__file__).parents[2] / "docs" / "benchmarks"
    for name, suite, device in (
        ("nvlink-4xh200-20261122", "nvlink", "cuda"),
        ("low_latency-4xh200-20261122", "low_latency", "cuda"),
        ("twolevel-4xh200-20261122", "twolevel", "cuda"),
        ("collective-4xh200-20261121", "collective", "cuda"),
        ("collective-cpu-2core-20261121", "collective", "cpu"),
    ):
        record = json.loads((records / f"{name}.json").read_text())
        was = record.get("suite") or record["plan"]
        preset = json.loads(json.dumps(asdict(command.SUITES[suite].preset[device])))
        for each in preset.get("cases", []):
            was_jobs = was["jobs"]
            assert {key: each[key] for key in was_jobs[0]} in was_jobs
        assert len(preset.get("cases", [])) == len(was.get("jobs", []))
        known = set(was) & set(preset) - {"link_gbs"}
        assert {key: preset[key] for key in known} == {key: was[key] for key in known}
