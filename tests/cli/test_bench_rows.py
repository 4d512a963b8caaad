"""What ``tokenyard bench`` makes of times and bytes: each figure of its own rank, its own phase, in
its own column and unit.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tokenyard as ty
from tokenyard.cli import app, bench
from tokenyard.cli.bench import Plan
from tokenyard.cli.bench_report import Measurement, line_of, print_report
from tokenyard.testing import Ranks, checked_calls, distributed_test, timing
from tokenyard.testing.baselines import (
    FRESH_COPIES,
    KEPT_COPIES,
    PLAIN_EXCHANGE,
    instead_of_combine,
    instead_of_dispatch,
)
from tokenyard.testing.cases import (
    NUM_INPUTS,
    Case,
    Traffic,
    all_sent,
    mean_busiest,
    once_per_rank,
)
from tokenyard.testing.checked_calls import CACHED, COMBINE, DISPATCH, Call, Oracle, sweep_inputs
from tokenyard.testing.timing import Series, peak_extra_bytes, time_interleaved

CPU = torch.device("cpu")
CASE = Case(
    tokens=9,
    hidden=256,
    topk=2,
    experts=6,
    skew="uniform",
    dtype="bf16",
    layout="flat",
    quantize="fp8",
)
PLAN = Plan([CASE], ["collective"], iterations=7, warmup=2, link_gbs=4.0, seed=9)
MIB = 1 << 20


def traffic_of(inputs: list[Any], row_bytes: int, *, back: bool = False) -> list[Traffic]:
    there = [once_per_rank(each[1], CASE.experts, row_bytes) for each in inputs]
    return [Traffic(each.received, each.sent) for each in there] if back else there


class Known:
    """Stands in for a batch whose rows cross as ``there``; FP8 rows there, BF16 rows back."""

    def __init__(self, there: Traffic, back: Traffic) -> None:
        self.by_row = {
            (CASE.row_bytes, False): there,
            (CASE.combined_row_bytes, True): back,
        }

    def traffic(self, row_bytes: int, *, back: bool = False) -> Traffic:
        return self.by_row[row_bytes, back]


def call(phase: str, there: list[Traffic], back: list[Traffic] | None = None, **known: Any) -> Call:
    batches: Any = [Known(*each) for each in zip(there, back or there, strict=True)]
    known = {"run": lambda _: None, "check": lambda *_: None, **known}
    return Call(CASE, batches, phase, "x", **known)


def test_a_row_is_of_the_worst_rank_and_of_its_own_traffic() -> None:
    least = [
        Traffic([10, 3], [10, 37]),
        Traffic([70, 20], [0, 0]),
    ]  # 53.5 on average; the first moves 20 and 40
    more = Traffic([100, 0], [0, 600])
    once = Series([5.0], None)

    def row(
        peaks: list[int], rate: float | None, least: list[Traffic], **known: Any
    ) -> Measurement:
        return line_of(call(DISPATCH, least, **known), "", once, rate, peaks=peaks)

    first = row([80, 100], 2.0, least)
    assert (first.peak_bytes, first.peak_per_moved) == (100, 4.0)
    assert (first.wire_bytes, first.floor_us) == (53.5, pytest.approx(53.5 / 2e3))
    wider = row([80, 100], 2.0, least, crosses=more)
    assert (wider.wire_bytes, wider.floor_us, wider.peak_per_moved) == (600, first.floor_us, 4.0)
    turned = row([100, 80], None, least)
    assert (turned.peak_bytes, turned.peak_per_moved, turned.floor_us) == (100, 5.0, None)
    assert row([1, 2], None, [Traffic([0, 5], [0, 0])]).peak_per_moved is None


def test_what_comes_in_may_be_busiest() -> None:
    assert Traffic([1, 2], [7, 3]).busiest == Traffic([7, 3], [1, 2]).busiest == 7


def test_measuring_uses_the_plan_and_memory_of_unused_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each phase has the floor of its own rows (FP8 there, BF16 back), each peak what is kept
    between calls.
    """
    inputs = [all_sent(CASE, 2, number, 0) for number in range(NUM_INPUTS)]
    timed: list[dict[str, Any]] = []

    def time(calls: Any, **options: Any) -> list[Series | None]:
        timed.append(options)
        return [call and Series([float(at)], None) for at, call in enumerate(calls)]

    monkeypatch.setattr(bench, "check", lambda *_: ["", "wrong", "", ""])
    monkeypatch.setattr(bench, "time_interleaved", time)
    monkeypatch.setattr(bench, "on_ranks", lambda value, _: [value, 2 * value])
    monkeypatch.setattr(bench, "peak_extra_bytes", lambda call, *_: call(0))
    least = [
        traffic_of(inputs, size, back=back)
        for size, back in ((CASE.row_bytes, False), (CASE.combined_row_bytes, True))
    ]
    ep: Any = SimpleNamespace(buffer_bytes=9, engine="nvlink")
    calls = [
        call(DISPATCH, *least, run=lambda _: 1000, kept=[torch.zeros(50, dtype=torch.uint8)]),
        call(DISPATCH, *least),
        call(CACHED, *least, run=lambda _: 200, ep=ep),
        call(COMBINE, *least, run=lambda _: 300, kept=[torch.zeros(7, dtype=torch.uint8)]),
    ]
    rows = bench.measure(calls, pytest.fail, PLAN, CPU)
    assert [row.phase for row in rows] == [DISPATCH, DISPATCH, CACHED, COMBINE]
    assert [row.wall_us for row in rows] == [[0.0], [], [2.0], [3.0]]
    assert [row.error for row in rows] == ["", "wrong", "", ""]
    assert [row.peak_bytes for row in rows] == [2100, None, 418, 614]
    there, back = (mean_busiest(each) / 4e3 for each in least)  # at 4 GB/s, in us
    assert back == pytest.approx(there * 512 / 264) and there > 0
    assert [row.floor_us for row in rows] == [there, None, there, back]
    wanted = {"iterations": 7, "warmup": 2, "num_inputs": NUM_INPUTS, "device": CPU, "seed": 9}
    assert timed == [wanted]


def test_inputs_have_the_seed_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, int]] = []

    def sent(case: Case, size: int, number: int, seed: int) -> Any:
        made.append((size, number, seed))
        return all_sent(case, size, number, seed)

    monkeypatch.setattr(checked_calls.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(checked_calls, "all_sent", sent)
    monkeypatch.setattr(checked_calls.dist, "get_rank", lambda: 0)
    for phase in ("dispatch", "combine"):
        monkeypatch.setattr(bench, f"instead_of_{phase}", lambda *_: [])
    monkeypatch.setattr(bench, "measure", lambda *_: [])
    assert bench.run_case(CASE, replace(PLAN, engines=[]), CPU) == []
    assert made == [(2, number, 9) for number in range(NUM_INPUTS)]


@distributed_test(world_size=2)
def test_cases_and_baselines_tell_what_they_move_and_keep(ranks: Ranks) -> None:
    """And a wrong weight, which no row shows, is found."""
    assert timing.on_ranks(3 + ranks.rank, ranks.device) == [3, 4]
    batches, inputs = sweep_inputs(CASE, 0, ranks.device, NUM_INPUTS)
    there = traffic_of(inputs, CASE.row_bytes)
    back = traffic_of(inputs, CASE.combined_row_bytes, back=True)
    make = partial(ty.ExpertParallel, **CASE.arguments, engine="collective", device=ranks.device)
    with make() as ep:
        dispatch, cached, combine = bench.engine_calls(ep, CASE, batches)
        assert (dispatch.least, cached.least, combine.least) == (there, there, back)
        assert dispatch.crosses is cached.crosses is combine.crosses is None
        assert {each.symmetric_bytes for each in (dispatch, cached, combine)} == {0}
        kept = {each.kept_bytes for each in (dispatch, cached, combine)}
        assert kept == {ep.buffer_bytes} and ep.buffer_bytes > 0
        expected = Oracle.asked(CASE, batches[0], inputs[0])
        received = dispatch.run(0)
        dispatch.check(received, expected)
        received.topk_weights[0, 0] += 1
        with pytest.raises(AssertionError, match="topk_weights: 1 of"):
            dispatch.check(received, expected)
        others = [*instead_of_dispatch(CASE, batches), *instead_of_combine(CASE, batches)]
        found = {(each.name, each.phase): each for each in others}
    everything = CASE.tokens * CASE.row_bytes
    assert found["all-gather", DISPATCH].crosses == Traffic([everything] * 2, [everything] * 2)
    scattered = found["reduce-scatter", COMBINE].crosses
    assert scattered and scattered.busiest == CASE.tokens * CASE.combined_row_bytes
    arriving = [len(batch.flat) for batch in batches]
    sending = [each.sent[ranks.rank] // CASE.row_bytes for each in there]
    plain, kept = found[PLAIN_EXCHANGE, DISPATCH], found[KEPT_COPIES, DISPATCH]
    assert plain.kept_bytes == max(arriving) * CASE.row_bytes
    assert kept.kept_bytes >= (max(arriving) + max(sending)) * CASE.row_bytes
    for each in (kept, found[FRESH_COPIES, DISPATCH]):
        first = each.run(0)
        copy = first.clone()
        each.run(1)
        assert torch.equal(first, copy), "a result stays when the next call uses the staging"


def printed(rows: list[Measurement]) -> list[list[str]]:
    out = io.StringIO()
    print_report(rows, Console(file=out, width=200))
    return [
        line.translate({ord(bar): " " for bar in "│┃"}).split()
        for line in out.getvalue().splitlines()
    ]


def test_columns_hold_what_their_heads_say() -> None:
    case = CASE
    ours = Measurement(
        case=case,
        name="ours",
        phase=COMBINE,
        wall_us=[9.0, 8.0, 30.0],
        device_us=[4.0, 6.0, 5.0],
        wire_bytes=1000.0,
        floor_us=2.0,
        symmetric_bytes=3 * MIB,
        peak_bytes=7 * MIB,
    )
    rows = [
        Measurement(
            case=case, name=PLAIN_EXCHANGE, phase=DISPATCH, wall_us=[50.0], device_us=[40.0]
        ),
        ours,
        Measurement(
            case=case, name=PLAIN_EXCHANGE, phase=COMBINE, wall_us=[20.0], device_us=[10.0]
        ),
    ]
    lines = [" ".join(line) for line in printed(rows)]
    heads = "system end-to-end us device us wire GB/s % of floor x a2a symm. MiB peak MiB"
    at = lines.index(heads)
    assert lines[at + 2] == "combine ours 9.0 / 30.0 / 8.0 5.0 / 6.0 / 4.0 0.2 40 0.50 3 7"
    assert any(line.startswith("us: median / p99 / min of the slowest rank") for line in lines)


# The clock


class Clock:
    """Tells call by call which turn it is."""

    cuda = True

    def __init__(self, *_: Any) -> None:
        self.turns = 0

    def time(self, call: Any, number: int) -> tuple[float, float]:
        call(number)
        self.turns += 1
        return float(self.turns), 1000.0 + self.turns


def test_rounds_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(timing, "Clock", Clock)
    monkeypatch.setattr(timing, "slowest_rank", lambda times, _: times)
    [series] = time_interleaved([numbers.append], iterations=4, warmup=2, num_inputs=3, device=CPU)
    assert series == Series([3.0, 4.0, 5.0, 6.0], [1003.0, 1004.0, 1005.0, 1006.0])
    assert numbers == [1, 2, 0, 1, 2, 0]


def test_a_call_is_timed_from_the_meeting_to_its_complete_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    seconds = iter([10.0, 10.5])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def elapsed_time(self, later: Event) -> float:
            return 0.25

    def now() -> float:
        done.append("clock")
        return next(seconds)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: done.append("meet"))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=now))
    clock = timing.Clock(CPU)
    clock.cuda = True
    assert clock.time(done.append, 7) == (500_000.0, 250.0)
    assert done == ["idle", "meet", "idle", "clock", "record", 7, "record", "idle", "clock"]


def test_the_peak_on_a_gpu_is_beyond_what_lived_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    assert peak_extra_bytes(done.append, 2, torch.device("cuda")) == 700
    assert done == ["idle", "reset", 2, "idle"]


# Options


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def run(*arguments: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ([], None),
        (["--device", "cuda"], 370.0),
        (["--link-gbs", "3"], 3.0),
        (["--device", "cuda", "--link-gbs", "3"], 3.0),
    ],
)
def test_the_link_rate_is_known_for_gpus_only(
    arguments: list[str], rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(bench, "on_all_ranks", lambda *known: plans.append(known[-1]) or [])
    run("--iterations", "7", "--warmup", "2", "--seed", "9", *arguments)
    [plan] = plans
    assert plan == replace(plan, iterations=7, warmup=2, seed=9, link_gbs=rate)
