"""What the record suites of ``tokenyard bench`` make of times and bytes, without GPUs: stand-ins
give known ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenyard.cli import bench_decode, bench_nvlink_cases, bench_twolevel
from tokenyard.cli.bench_batches import Batch
from tokenyard.cli.bench_decode import Decode, Timed
from tokenyard.cli.bench_inputs import Traffic
from tokenyard.cli.bench_nvlink import MAIN, Line, Suite, _line
from tokenyard.cli.bench_nvlink_cases import BACK, PLAIN, Library, Probe
from tokenyard.cli.bench_nvlink_report import losses
from tokenyard.cli.bench_twolevel import Crossing, TwoLevel, small_rings
from tokenyard.cli.timing import Series
from tokenyard.testing import routing

CPU = torch.device("cpu")


def batch(tokens: int = 12, ranks: int = 2, experts: int = 8, hidden: int = 256) -> Batch:
    picks = [routing("uniform", rank, ranks, tokens, 2, experts, 3) for rank in range(ranks)]
    idx, weights = (torch.stack(each) for each in zip(*picks, strict=True))
    return Batch(torch.ones(tokens, hidden, dtype=torch.bfloat16), idx, weights, 0, experts)


# nvlink


def test_a_line_has_the_floor_of_the_least_and_the_bytes_of_its_call() -> None:
    probe = Probe(
        job=Suite().job(4),
        name="gather",
        phase="dispatch",
        run=int,
        check=lambda *_: None,
        traffic=[Traffic([100, 0], [0, 900]), Traffic([300, 0], [0, 100])],
        least=[Traffic([10, 3], [3, 40])],
    )
    line = _line(MAIN, probe, 2.0, "", Series([5.0], [4.0]))
    assert (line.wire_bytes, line.floor_us) == (600.0, 0.02)
    assert (line.wall_us, line.device_us, line.ours) == ([5.0], [4.0], False)
    assert _line(MAIN, probe, None, "wrong", None).wall_us == []


def test_calls_move_rows_of_their_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        rank, engine, buffer_bytes = 0, "nvlink", 0

        def dispatch(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(handle=None, x=torch.ones(1))

    monkeypatch.setattr(bench_nvlink_cases.dist, "get_world_size", lambda: 2)
    sent, ep = batch(), Stub()
    job = replace(Suite(hidden=256, topk=2, experts=8).job(12))
    probes = Library(ep, job, [sent]).probes([PLAIN, "fp8", "fused", "major", BACK])  # pyright: ignore[reportArgumentType]
    sizes = [probe.traffic[0].busiest for probe in probes]
    rows = sizes[0] / 512
    assert rows > 0 and sizes == [512 * rows, 264 * rows, 264 * rows, 264 * rows, 512 * rows]
    assert all(probe.least == probe.traffic for probe in probes)
    there, back = probes[0].traffic[0], probes[-1].traffic[0]
    assert (back.sent, back.received) == (there.received, there.sent)


def test_whoever_is_beaten_by_any_baseline_loses() -> None:
    job = Suite().job(4)

    def line(name: str, us: float, ours: bool = False) -> Line:
        return Line(section="tokens", job=job, name=name, phase="dispatch", wall_us=[us], ours=ours)

    lines = [line("ours", 10.0, ours=True), line("quick", 8.0), line("slow", 20.0)]
    assert losses(lines, "wall") == ["- 4 tokens: ours (10.0 us) loses to quick (1.25x)"]


# low_latency


def test_a_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(
        bench_decode, "_cuda", SimpleNamespace(CUDAGraph=lambda: SimpleNamespace(replay="replay"))
    )
    monkeypatch.setattr(bench_decode, "_elapsed", lambda run: {"replay": 120.0}[run])
    assert bench_decode._graph(Decode(calls=12), calls.append)() == 10.0
    assert calls == [0, 1, 2, *range(12)]


def test_rounds_that_warm_up_do_not_count_and_the_slowest_rank_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = {"a": iter(range(100)), "b": iter(range(100, 200))}
    lines = [Timed(tokens=1, who=who, what="x") for who in turns]
    monkeypatch.setattr(bench_decode, "on_ranks", lambda *_: [0])
    monkeypatch.setattr(bench_decode, "slowest_rank", lambda times, _: 2 * times)
    probes = [(line, lambda line=line: float(next(turns[line.who]))) for line in lines]
    bench_decode._time(Decode(iterations=3, warmup=2), probes, CPU)
    assert [line.times for line in lines] == [[4.0, 6.0, 8.0], [204.0, 206.0, 208.0]]


def test_the_baseline_moves_as_many_bytes_as_fp8_rows_with_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[tuple[int, int]] = []
    suite, sent = Decode(hidden=7168), batch(hidden=7168)

    def reduce_scatter_for(out: Any, sample: Any) -> Any:
        assert (out.shape, sample.shape) == ((12, 7168), (24, 7168))
        return "", 1, lambda sums: moved.append((sums.nbytes, 0))

    monkeypatch.setattr(bench_decode.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(bench_decode, "reduce_scatter_for", reduce_scatter_for)
    monkeypatch.setattr(
        bench_decode, "all_gather", lambda out, mine: moved.append((out.nbytes, mine.nbytes))
    )
    bench_decode._nccl([sent])(0)
    row_bytes = suite.job(12).row_bytes
    assert row_bytes == 7168 + 4 * 56
    assert moved == [(2 * 12 * row_bytes, 12 * row_bytes), (2 * 12 * 2 * 7168, 0)]


# twolevel


def test_the_rate_is_of_the_rank_with_fewest_rows() -> None:
    line = Crossing(
        engine="twolevel",
        what="",
        tokens=1,
        num_sms=1,
        times=[2.0, 3.0, 1.0],
        rows=[50.0, 20.0],
        row_bytes=100,
    )
    assert (line.payload_bytes, line.network_gbs) == (2000.0, 1.0)
    assert replace(line, rows=[], planned=[30.0, 40.0]).payload_bytes == 3000.0


class Object:
    """Stands in for an ``ExpertParallel``."""

    def __init__(self, buffer_bytes: int, why: str) -> None:
        self.buffer_bytes, self.why = buffer_bytes, why


@pytest.fixture
def suite_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank of the suite; the other has everything three times."""
    monkeypatch.setattr(bench_twolevel, "on_ranks", lambda value, _: [value, 3 * value])
    return bench_twolevel._Run(suite=TwoLevel(calls=4), engine="twolevel", device=CPU, kept=None)


def test_memory_is_that_of_the_rank_with_most(
    suite_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = SimpleNamespace(rows=[4, 8], put_bytes=[40, 80], num_inputs=2)
    line = Crossing(engine="twolevel", what="", tokens=1, num_sms=1)
    held = Object(70, "NVSHMEM between nodes")
    suite_run.held = {held: 50}
    suite_run._fill(line, counted, held)
    assert (line.symmetric_bytes, line.nvshmem) == ([150, 210], True)
    assert (line.rows, line.put_bytes, line.error) == ([6.0, 18.0], [60.0, 180.0], "")

    def peak(call: Any, number: int, _: Any) -> int:
        call(number)
        return 1000

    monkeypatch.setattr(bench_twolevel, "peak_extra_bytes", peak)
    probe = SimpleNamespace(run=lambda _: torch.ones(25))
    assert suite_run._other_bytes(SimpleNamespace(probe=probe)) == 3 * (1000 - 100)


def test_times_are_of_one_call_each_on_its_own_clock(
    suite_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert suite_run._per_call([8.0, 4.0]) == [2.0, 1.0]
    said: list[Crossing] = []
    counted = SimpleNamespace(
        probe=SimpleNamespace(name="x", ep=None),
        planned=[1.0, 2.0],
        row_bytes=5,
        tree=1,
        num_inputs=1,
    )
    monkeypatch.setattr(bench_twolevel, "Counted", lambda *_: counted)
    monkeypatch.setattr(bench_twolevel._Run, "_check", lambda self, counted, batches, errors: [""])
    monkeypatch.setattr(bench_twolevel._Run, "_time", lambda self, right: [Series([80.0], [40.0])])
    monkeypatch.setattr(bench_twolevel._Run, "_say", lambda self, line: said.append(line))

    def line(**known: Any) -> Crossing:
        return Crossing(engine="twolevel", tokens=1, num_sms=24, **known)

    line.keywords = {"rings": None}  # pyright: ignore[reportFunctionMemberAccess]
    suite_run._check_and_time([counted.probe], [], line)
    assert [(each.times, each.wall, each.engine) for each in said] == [([10.0], [20.0], "NCCL")]


def test_rings_are_overfull_both_ways() -> None:
    """By the rank that puts fewest rows: here rank 1, three there and rank 0, three back."""
    suite, sent = TwoLevel(topology=(2, 1), experts=8, hidden=256, overfull=2), batch(tokens=5)
    far = torch.tensor([[[4, 5]] * 5, [[0, 1]] * 3 + [[4, 5]] * 2])
    assert small_rings(suite, [replace(sent, topk_idx=far)]) == 3 * 512 // 2
    assert (
        small_rings(suite, [replace(sent, topk_idx=far), replace(sent, topk_idx=far.flip(1))])
        == 3 * 512 // 2
    )
