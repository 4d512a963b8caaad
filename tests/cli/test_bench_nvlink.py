"""The suite ``nvlink``: its quick truth against the oracle, its sections, its record;
over engine ``collective``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import tokenyard as ty
from benchmarks import __main__ as command
from benchmarks import nvlink
from benchmarks.__main__ import app
from benchmarks.batches import DeviceTruth
from benchmarks.calls import BACK, BACK_IN_PLACE, DIRECT, FRESH, KINDS, PLAIN
from benchmarks.clock import QueuedClock
from benchmarks.nvlink import BOUNDED, MAIN, SECTIONS, SMS, TOKENS, Suite, run_suite
from benchmarks.nvlink_report import losses, markdown
from benchmarks.record import Line
from tokenyard import launch, reference
from tokenyard.testing import Ranks, distributed_test, payload, routing
from tokenyard.testing.checked_calls import CACHED, COMBINE, DISPATCH, Batch, share
from tokenyard.testing.timing import time_interleaved

TINY = Suite(
    engine="collective",
    tokens=12,
    hidden=256,
    topk=2,
    experts=6,
    sms=(8, 24),
    curve=(4, 30),
    buffer_bytes=4096,
    iterations=2,
    warmup=1,
    link_gbs=2.0,
)
FACTS = {
    "date": "2026-01-02",
    "command": "c",
    "commit": None,
    "versions": {"torch": "2"},
    "devices": ["x"],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["nvlink", *arguments])


def run_alone(suite: Suite) -> list[Line]:
    """One rank, in this process, so that a test can put its hands on what is measured."""
    store = launch.local_store()
    with launch.joined(0, 1, port=store.port, name="alone") as here:
        return run_suite(here, suite)


# The truth


class Everybody:
    """What three ranks send, what the oracle and what :class:`Truth` make of it."""

    def __init__(self, skew: str) -> None:
        ranks, tokens, topk, experts, hidden = 3, 20, 3, 7, 264
        self.x = [payload(rank, tokens, hidden, torch.bfloat16, 1) for rank in range(ranks)]
        picks = [routing(skew, rank, ranks, tokens, topk, experts, 1) for rank in range(ranks)]
        self.idx, self.weights = [idx for idx, _ in picks], [weights for _, weights in picks]
        self.experts = experts
        stacked = torch.stack(self.idx), torch.stack(self.weights)
        self.truths = [
            DeviceTruth(Batch(self.x[rank], *stacked, rank, experts), torch.cat(self.x))
            for rank in range(ranks)
        ]

    def oracle(self, layout: ty.Layout, mode: ty.Quantize | None) -> list[reference.ReferenceRows]:
        return reference.dispatch(
            self.x, self.idx, self.weights, num_experts=self.experts, layout=layout, quantize=mode
        )


def as_received(rows: reference.ReferenceRows, layout: ty.Layout) -> Any:
    """A copy of the oracle's rows that looks like the library's."""
    names = ("x", "scales", "source", "topk_idx", "topk_weights", "tokens_per_expert")
    copies = {
        name: value if (value := getattr(rows, name)) is None else value.clone() for name in names
    }
    return SimpleNamespace(**copies, handle=SimpleNamespace(layout=layout))


@pytest.mark.parametrize("skew", ["uniform", "zipf", "dropped"])
@pytest.mark.parametrize("mode", [None, ty.Quantize.FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layout", [ty.Layout.FLAT, ty.Layout.EXPERT_MAJOR], ids=["flat", "major"])
def test_truth_about_rows_is_the_oracles(
    skew: str, mode: ty.Quantize | None, layout: ty.Layout
) -> None:
    everybody = Everybody(skew)
    for truth, rows in zip(everybody.truths, everybody.oracle(layout, mode), strict=True):
        truth.check_rows(as_received(rows, layout))
        for name in ("x", "source", *(["scales"] if mode else [])):
            wrong = as_received(rows, layout)
            getattr(wrong, name).view(torch.uint8).flatten()[-1] ^= 1
            with pytest.raises(AssertionError, match=f"{name}: 1 of"):
                truth.check_rows(wrong)


@pytest.mark.parametrize("skew", ["uniform", "zipf", "dropped"])
def test_truth_about_routing_is_the_oracles(skew: str) -> None:
    everybody = Everybody(skew)
    for truth, rows in zip(everybody.truths, everybody.oracle(ty.Layout.FLAT, None), strict=True):
        truth.check_routed(as_received(rows, ty.Layout.FLAT))
        for name in ("topk_idx", "topk_weights", "tokens_per_expert"):
            wrong = as_received(rows, ty.Layout.FLAT)
            getattr(wrong, name).flatten()[0] += 1
            with pytest.raises(AssertionError, match=f"{name}: 1 of"):
                truth.check_routed(wrong)


@pytest.mark.parametrize("skew", ["uniform", "zipf", "dropped"])
def test_truth_about_sums_is_the_oracles(skew: str) -> None:
    everybody = Everybody(skew)
    received = everybody.oracle(ty.Layout.FLAT, None)
    rows = [each.x * share(rank) for rank, each in enumerate(received)]
    combined = reference.combine(rows, received)
    unshared = reference.combine([each.x for each in received], received)
    for truth, each, other in zip(everybody.truths, combined, unshared, strict=True):
        truth.check_combined(each.x)
        with pytest.raises(AssertionError, match="combined"):
            truth.check_combined(other.x)


# Protocol and sizes


@distributed_test(world_size=2)
def test_head_start_is_for_gpus(ranks: Ranks) -> None:
    calls: list[int] = []
    (series,) = time_interleaved(
        [calls.append],
        iterations=4,
        warmup=1,
        num_inputs=3,
        device=ranks.device,
        clock=QueuedClock(ranks.device, 100.0),
    )
    each = 2 if ranks.device.type == "cuda" else 1
    assert calls == [turn % 3 for turn in range(-1, 4) for _ in range(each)]
    assert len(series.wall) == 4
    assert len(series.device or [0.0] * 4) == 4


def test_gpus_wait_and_meet_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def elapsed_time(self, later: Event) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(cycles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: done.append("meet"))
    clock = QueuedClock(torch.device("cpu"), 50.0, lambda: done.append("barrier"))
    clock.cuda = True
    assert clock.time_queued(done.append, 7) == 250.0
    assert done == [
        "idle",
        "meet",
        "idle",
        100_000,
        "meet",
        "barrier",
        "record",
        7,
        "record",
        "idle",
    ]


def test_overfull_means_so_many_times_more_bytes_than_the_rings_hold() -> None:
    suite = Suite()
    tokens = suite.overfull_tokens(4)
    remote = 2.71 * tokens * suite.hidden * 2
    assert 16 <= remote / suite.buffer_bytes < 16.2
    assert suite.roomy_bytes(4) > 4 * tokens * suite.hidden * 2
    assert TINY.overfull_tokens(1) > 0


# Sections


class Pretended:
    """An object of engine ``collective`` that calls itself ``nvlink``, and writes down how it was
    asked.
    """

    engine, rank, why = "nvlink", 0, "pretended"

    def __init__(self, ep: ty.ExpertParallel, calls: list[dict[str, Any]], flip: str) -> None:
        self.ep, self.calls, self.flip = ep, calls, flip
        self.buffer_bytes = 1234

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        self.ep.close()

    def dispatch(self, x: Any, *args: Any, in_place: bool = False, **options: Any) -> ty.Received:
        self.calls.append({"in_place": in_place, "fp8": isinstance(x, ty.Quantized), **options})
        recv = self.ep.dispatch(x, *args, **options)
        if self.flip == "in place" and in_place:
            recv.x.view(torch.uint8).flatten()[3] ^= 1
        return recv

    def combine(self, *args: Any, in_place: bool = False) -> torch.Tensor:
        y = self.ep.combine(*args)
        return y + 1 if self.flip == ("combine in place" if in_place else "combine") else y

    def empty_for_combine(self, handle: ty.Handle, *, in_place: bool) -> torch.Tensor:
        assert in_place
        return self.ep.empty_for_combine(handle)


def pretend(
    monkeypatch: pytest.MonkeyPatch, flip: str = ""
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(calls, options of objects made) of the suite from now on."""
    calls: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    make = ty.ExpertParallel

    def instead(*, engine: str, **options: Any) -> Pretended:
        made.append({"engine": engine, **options})
        return Pretended(make(engine="collective", **options), calls, flip)

    monkeypatch.setattr(nvlink.ty, "ExpertParallel", instead)
    return calls, made


def test_bars_are_for_four_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    lines = run_alone(replace(TINY, engine="nvlink"))
    assert {line.bar_us for line in lines} == {None}


def test_every_kind_of_call_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "BARS_RANKS", 1)
    calls, made = pretend(monkeypatch)
    lines = run_alone(replace(TINY, engine="nvlink"))
    assert [line.error for line in lines] == [""] * len(lines)
    main = {line.kind: line for line in lines if line.section == MAIN and line.ours}
    assert list(main) == list(KINDS)
    assert [main[kind].bar_us for kind in (PLAIN, BACK, BACK_IN_PLACE, FRESH)] == [
        470,
        470,
        475,
        None,
    ]
    assert {line.symmetric_bytes for line in main.values()} == {1234}
    assert len([line for line in lines if line.section == MAIN and not line.ours]) == 6
    assert {(call["in_place"], call["fp8"]) for call in calls} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    assert {call.get("quantize") for call in calls} == {None, ty.Quantize.FP8}
    over = [(line.case.sms, line.kind, line.bar_us) for line in lines if line.section == SMS]
    kinds = (DIRECT, PLAIN, FRESH, BACK, BACK_IN_PLACE)
    bars = {8: (560, None, None, None, None), 24: (490, 500, None, 560, None)}
    assert over == [
        (sms, kind, bar_us)
        for sms, each in bars.items()
        for kind, bar_us in zip(kinds, each, strict=True)
    ]
    assert [options["num_sms"] for options in made][-4:] == [8, 8, 24, 24]
    assert {options["engine"] for options in made} == {"nvlink"}
    assert [
        line.case.tokens for line in lines if line.section == TOKENS and line.kind == DIRECT
    ] == [
        4,
        30,
    ]
    rings = [line.case.rings for line in lines if line.section == BOUNDED]
    assert rings == [4096] * 2 + [TINY.roomy_bytes(1)] * 2
    assert [len(line.wall_us) for line in lines if line.section == MAIN] == [4] * len(main) + [
        4
    ] * 6
    assert {len(line.wall_us) for line in lines if line.section == BOUNDED} == {2}


@pytest.mark.parametrize(
    ("flip", "wrong"),
    [("in place", {DIRECT, "view8"}), ("combine", {BACK}), ("combine in place", {BACK_IN_PLACE})],
)
def test_wrong_bits_get_no_time(
    flip: str, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, flip)
    lines = run_alone(replace(TINY, sections=(MAIN,)))
    for line in lines:
        assert bool(line.error) == (line.kind in wrong), line.name
        assert bool(line.wall_us) != bool(line.error)
    text = markdown(lines, TINY, FACTS)
    assert text.count("**no time**") == len(wrong)
    assert "## No time" in text


def test_object_that_cannot_be_made_leaves_the_baselines() -> None:
    lines = run_alone(replace(TINY, engine="nvlink"))
    assert [line.section for line in lines if line.error] == [
        MAIN,
        "zipf",
        TOKENS,
        TOKENS,
        BOUNDED,
        BOUNDED,
        SMS,
        SMS,
    ]
    assert all("engine 'nvlink' cannot work here" in line.error for line in lines if line.error)
    assert all(not line.ours for line in lines if not line.error)


# The record


def test_two_ranks_write_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = replace(command.SUITES["nvlink"], preset={"cpu": TINY})
    monkeypatch.setitem(command.SUITES, "nvlink", entry)
    result = run(
        "--device",
        "cpu",
        "--engine",
        "collective",
        "--ranks",
        "2",
        "--iterations",
        "2",
        "--out",
        str(tmp_path),
    )
    assert result.exit_code == 0, result.output
    (text,), (content,), (picture,) = (
        list(tmp_path.glob(f"collective-cpu-*.{kind}")) for kind in ("md", "json", "png")
    )
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"![]({picture.name})" in text.read_text()
    for heading in (
        "## 12 tokens per rank",
        "## Over SMs, 12",
        "## Over tokens per rank",
        "## Bounded memory, ",
    ):
        assert heading in text.read_text()
    sms, _, _ = text.read_text().partition("## Over SMs, 12")[2].partition("\n## ")
    assert "- *all_to_all_single BF16*: **" in sms and "FP8" not in sms
    found = json.loads(content.read_text())
    assert found["suite"]["engine"] == "collective"
    assert {row["section"] for row in found["rows"]} == set(SECTIONS)
    assert all(row["wall"]["min"] > 0 and row["wire_bytes"] > 0 for row in found["rows"])
    bounded = [row for row in found["rows"] if row["section"] == BOUNDED]
    assert bounded[0]["wire_bytes"] > 14 * bounded[0]["case"]["rings"]
    assert bounded[2]["wire_bytes"] < bounded[2]["case"]["rings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "4"], "No such option: --tokens"),
        (["--topology", "2x2", "--device", "cpu"], "nvlink has no use for --topology"),
        (
            ["--engine", "nvlink,auto", "--device", "cpu"],
            "'nvlink,auto' is unknown; use one of auto,",
        ),
        (["--engine", "warp", "--device", "cpu"], "for '--engine': 'warp' is unknown"),
        (
            ["--device", "cpu"],
            "Invalid value for --engine: engine 'nvlink' cannot work here: it needs CUDA devices",
        ),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def line(section: str, name: str, device: float, phase: str = CACHED, **options: Any) -> Line:
    at = {name: options.pop(name, None) for name in ("sms", "rings")}
    case = TINY.case(options.pop("tokens", 12), **at)
    known = {"section": section, "wall_us": [device + 10], "device_us": [device], **options}
    return Line(case=case, name=name, phase=phase, wire_bytes=5120.0, **known)


def test_record_says_what_was_missed() -> None:
    lines = [
        line(MAIN, "fresh", 61.0, DISPATCH, ours=True, kind=FRESH),
        line(
            MAIN,
            "cached",
            20.0,
            ours=True,
            kind=PLAIN,
            bar_us=20.0,
            floor_us=10.0,
            symmetric_bytes=300_000_000,
        ),
        line(MAIN, "sum", 31.0, COMBINE, ours=True, kind=BACK, bar_us=30.0),
        line(SMS, "view", 30.0, ours=True, sms=8, bar_us=29.0),
        line(BOUNDED, "cached", 25.0, ours=True, kind=PLAIN, rings=1024),
        line(BOUNDED, "cached", 20.0, ours=True, kind=PLAIN, rings=9999),
    ]
    text = markdown(lines, TINY, FACTS)
    assert (
        "| cached | **20.0** (20.0, 20.0) | **30.0** (30.0, 30.0) | 0 | 50 | 20 (met) | - | 300 |"
        in text
    )
    assert "A new routing adds 41.0 us on the GPU's clock, 41.0 us end to end (bar 45)" in text
    assert "Bars missed: sum 31 (30)." in text
    assert "Bars missed: view 30 (29)." in text
    assert "| 5.00 | **25.0** (25.0, 25.0) | 2500.00 | 0.80 |" in text


def test_curves_show_the_floor_and_collectives_beside_it() -> None:
    at_8 = line(SMS, "view", 30.0, ours=True, sms=8, floor_us=24.0)
    lines = [
        line(MAIN, "cached", 20.0, ours=True),
        line(MAIN, "swap", 25.0, DISPATCH, floor_us=10.0),
        replace(line(MAIN, "swap FP8", 25.0, DISPATCH), case=replace(at_8.case, quantize="fp8")),
        at_8,
        line(SMS, "cached", 40.0, ours=True, sms=8),
        line(TOKENS, "cached", 50.0, ours=True, tokens=4, floor_us=40.0),
        line(TOKENS, "cached", 60.0, ours=True, tokens=30),
        replace(
            line(TOKENS, "swap", 0.0, tokens=30, floor_us=9.0),
            wall_us=[],
            device_us=None,
            error="lost",
        ),
    ]
    text = markdown(lines, TINY, FACTS)
    assert "## Over SMs, 12 tokens per rank (kernel us, wire GB/s, % of floor)" in text
    assert "| 8 | **30.0** (30.0, 30.0), 0, 80 % | **40.0** (40.0, 40.0), 0, - |" in text
    assert (
        "from the first table:\n\n- *swap*: **25.0** (25.0, 25.0), 0, 40 %\n\n## Over tokens"
        in text
    )
    assert "Kernel, median us (% of floor)" in text
    assert "| cached | 50.0 (80 %) | 60.0 |" in text
    assert "| cached | 60.0 (67 %) | 70.0 |" in text
    assert "| *swap* | - | - |" in text
    assert "from the first table" not in markdown(lines[3:], TINY, FACTS)
    assert "Over SMs" not in markdown(lines[:3], TINY, FACTS)


def test_losses_name_the_baseline_and_the_size() -> None:
    lines = [
        line(TOKENS, "ours", 10.0, ours=True, tokens=4),
        line(TOKENS, "ours", 10.0, ours=True, tokens=30),
        line(TOKENS, "swap", 8.0, DISPATCH, tokens=4),
        line(TOKENS, "swap", 10.0, DISPATCH, tokens=30),
        line(TOKENS, "swap back", 1.0, COMBINE, tokens=30),
    ]
    assert losses(lines, "device") == ["- 4 tokens: ours (10.0 us) loses to swap (1.25x)"]
    assert losses(lines, "wall") == ["- 4 tokens: ours (20.0 us) loses to swap (1.11x)"]
    assert losses(lines[1:2], "device") == ["No call loses to a baseline."]
