"""The suite ``twolevel``: rows beside the picks, sums beside the oracle, lines that
fail alone, and its page.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner, Result

import tokenyard as ty
from benchmarks import __main__ as command
from benchmarks import twolevel as network
from benchmarks.__main__ import app
from benchmarks.batches import DeviceTruth
from benchmarks.calls import BACK, BACK_IN_PLACE, DIRECT, KINDS, PLAIN
from benchmarks.record import Line, Network
from benchmarks.twolevel import (
    ALL_KINDS,
    BAR_SMS,
    FIRST,
    REST,
    TwoLevel,
    failed,
    run_twolevel,
)
from benchmarks.twolevel_calls import BAR_GBS, rows_across
from benchmarks.twolevel_report import judged, twolevel_markdown
from nvlink_pool import SOAK, run_all, without_devices
from tokenyard import reference
from tokenyard.cli import bench_report
from tokenyard.routing import expert_bounds, host_ints
from tokenyard.testing import Ranks, distributed_test, payload, routing
from tokenyard.testing.checked_calls import Batch, share
from tokenyard.topology import Topology

TINY = TwoLevel(
    topology=(2, 1),
    tokens=6,
    hidden=256,
    experts=8,
    topk=3,
    curve=(6,),
    sms=(BAR_SMS,),
    overfull=4,
    calls=2,
    iterations=1,
    warmup=1,
)
FACTS: dict[str, Any] = {
    "devices": ["NVIDIA H200"] * 4,
    "versions": {"torch": "2", "nvshmem": "3.4"},
    "date": "2026-11-22",
    "commit": "abc",
    "command": "tokenyard bench",
}
DISPATCH, DISPATCH_IN_PLACE = KINDS[PLAIN].name, KINDS[DIRECT].name
COMBINE_NAME, BACK_IN_PLACE_NAME = KINDS[BACK].name, KINDS[BACK_IN_PLACE].name
NAMES = [KINDS[kind].name for kind in ALL_KINDS]
KIND_OF = {kind.name: name for name, kind in KINDS.items()}
NCCL = ""
"""The engine of a collective."""
IN_PLACE_BYTES = 1000


# What must cross, and what must come


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("per_node", [True, False])
def test_rows_across_are_those_of_the_picks(nodes: int, per_node: bool) -> None:
    grid, experts = Topology(nodes, 2), 7 * nodes
    size = grid.world_size
    idx = [routing("dropped", rank, size, 11, 3, experts, 5)[0] for rank in range(size)]
    first, sent, received = expert_bounds(experts, size), [0] * size, [0] * size
    for rank, tokens in enumerate(idx):
        for picks in tokens:
            owners = {bisect_right(first, pick) - 1 for pick in host_ints(picks) if pick >= 0}
            away = {peer for peer in owners if grid.node_of(peer) != grid.node_of(rank)}
            if per_node:
                away = {grid.rank_at(grid.node_of(peer), grid.local_of(rank)) for peer in away}
            sent[rank] += len(away)
            for peer in away:
                received[peer] += 1
    rows = rows_across(torch.stack(idx), experts, grid, per_node=per_node)
    assert (rows.sent, rows.received) == (sent, received)
    assert any(sent) == (nodes > 1)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_truth_about_sums_is_the_oracles(per_node: int) -> None:
    size, tokens, experts = 4, 9, 8
    x = [payload(rank, tokens, 264, torch.bfloat16, 1) for rank in range(size)]
    picks = [routing("uniform", rank, size, tokens, 3, experts, 1) for rank in range(size)]
    idx, weights = ([pick[at] for pick in picks] for at in (0, 1))
    received = reference.dispatch(x, idx, weights, num_experts=experts)
    rows = [each.x * share(rank) for rank, each in enumerate(received)]
    tree = None if per_node == 4 else per_node
    want = reference.combine(rows, received, ranks_per_node=tree)
    other = reference.combine(rows, received, ranks_per_node=None if per_node == 2 else 2)
    truths = [
        DeviceTruth(
            Batch(x[rank], torch.stack(idx), torch.stack(weights), rank, experts),
            torch.cat(x),
            per_node,
        )
        for rank in range(size)
    ]
    for truth, each in zip(truths, want, strict=True):
        truth.check_combined(each.x)
    assert any(not torch.equal(each.x, wrong.x) for each, wrong in zip(want, other, strict=True))


@without_devices
def test_the_engines_own_count_is_the_plans() -> None:
    """Engine twolevel, simulated: results of all kinds of calls are right, and so many rows have
    crossed.
    """
    for ranks in run_all("twolevel_bench.check", [(2, 2), (2, 1)][:SOAK]):
        for counted, planned in ranks:
            assert counted == planned
            assert len(counted) == len(ALL_KINDS)
            assert all(counted)


# Lines


class Pretended:
    """An object of engine ``collective`` that calls itself another, and spoils what ``spoil`` says,
    on rank 1.
    """

    why = "twolevel: NVSHMEM between nodes of 2 GPUs"

    def __init__(self, ep: ty.ExpertParallel, engine: str, spoil: str) -> None:
        self.ep, self.engine, self.rank = ep, engine, ep.rank
        self.spoil = spoil if ep.rank == 1 else ""
        self.calls, self.view = 0, 0

    @property
    def buffer_bytes(self) -> int:
        return 4321 + self.view + (self.spoil == "memory" and self.calls > 0)

    def check(self) -> None:
        self.ep.check()

    def close(self) -> None:
        self.ep.close()

    def stats(self) -> Any:
        across = self.ep.stats().across
        late = self.spoil == "a row" and self.calls > 0
        return SimpleNamespace(across=across._replace(rows_sent=across.rows_sent + late))

    def dispatch(self, x: Any, *args: Any, in_place: bool = False, **options: Any) -> ty.Received:
        recv = self.ep.dispatch(x, *args, **options)
        if in_place:
            self.view = IN_PLACE_BYTES
            recv.x.flatten()[3] += self.spoil == "in place"
        return recv

    def empty_for_combine(self, handle: ty.Handle, *, in_place: bool) -> torch.Tensor:
        assert in_place
        self.view = IN_PLACE_BYTES
        return self.ep.empty_for_combine(handle)

    def combine(self, *args: Any, in_place: bool = False) -> torch.Tensor:
        self.calls += 1
        y = self.ep.combine(*args)
        right = {
            "later bits": 8,
            "in place": 7 if in_place else 99,
        }  # when checked first, but not when checked again
        return y + (self.calls > right.get(self.spoil, 99))


def pretend(spoil: str, made: list[int] | None = None) -> Any:
    """All objects of the suite meanwhile. ``made`` takes the tokens that each is for.

    ``spoil``: "small" refuses objects with rings of a given size, "in place" those for four tokens.
    """
    make = ty.ExpertParallel

    def instead(*, engine: str, buffer_bytes: int | None, **options: Any) -> Any:
        if spoil == "small" and buffer_bytes is not None:
            raise ValueError(f"buffer_bytes ({buffer_bytes}) holds nothing")
        if made is not None:
            made.append(options["max_tokens_per_rank"])
        if spoil == "in place" and options["max_tokens_per_rank"] == 4:
            raise ValueError("no room for a view")
        return Pretended(make(engine="collective", **options), engine, spoil)

    return mock.patch.object(network.ty, "ExpertParallel", instead)


def quick_peak(call: Any, number: int, device: torch.device) -> int:
    """Stands in for the profiler, which takes a second to start."""
    call(number)
    return 1 << 20


@distributed_test(world_size=2)
def test_lines(ranks: Ranks) -> None:
    """Of one run; then of runs with something wrong, which takes its time from one line alone."""
    with mock.patch.object(network, "peak_extra_bytes", quick_peak):
        with pretend("small"):
            *lines, refused = run_twolevel(ranks.device, TINY, "twolevel")
        assert [line.name for line in lines[:6]] == NAMES
        assert [line.case.engine for line in lines] == ["twolevel"] * 6 + [NCCL] * 2
        for line in lines:
            assert (line.error, len(line.device_us or line.wall_us), len(line.wall_us)) == (
                "",
                1,
                1,
            )
            assert min(line.device_us or line.wall_us) > 0
        for line in lines[:6]:
            counted = line.network
            assert counted is not None
            assert counted.rows == counted.planned
            assert len(counted.rows) == 2
            assert counted.put_bytes == pytest.approx(
                [rows * (-(-counted.row_bytes // 16) * 16) for rows in counted.rows]
            )
            assert (counted.nvshmem, line.case.tokens, line.case.sms) == (True, 6, BAR_SMS)
        networks = [line.network for line in lines[:6] if line.network]
        held = [each.held_bytes for each in networks]
        assert (
            list(zip(held, [line.symmetric_bytes for line in lines[:6]], strict=True))
            == [(4321, 4321)] * 4 + [(4321, 4321 + IN_PLACE_BYTES)] * 2
        )
        assert [each.row_bytes for each in networks] == [512, 264, 264, 512, 512, 512]
        assert refused.error.startswith("wrong on rank 0, 1 (input 0)")
        assert "holds nothing" in refused.error
        alone = replace(TINY, sms=())
        with pretend("later bits"):
            there, back = run_twolevel(ranks.device, alone, "twolevel")
        assert there.wall_us
        assert not back.wall_us
        assert "wrong on rank 1 (input" in back.error
        assert there.case.rings is not None and there.network is not None
        assert there.network.payload_bytes >= alone.overfull * there.case.rings
        assert there.network.other_bytes is not None
        assert 0 < there.network.other_bytes < 1 << 20
        with pretend("a row"):
            there, back = run_twolevel(ranks.device, alone, "twolevel")
        assert there.wall_us
        assert "wrong on rank 1 (input 0)" in back.error
        assert back.network is not None and back.network.rows != back.network.planned
        with pretend("memory"):
            grown = run_twolevel(ranks.device, alone, "twolevel")
        assert {line.error for line in grown} == {"memory grew from 4321 to 4322 bytes"}
        assert not any(line.wall_us for line in grown)
    (line,) = run_twolevel(ranks.device, TINY, "nvlink")
    assert "engine 'nvlink' cannot work here" in line.error


@distributed_test(world_size=2)
def test_lines_in_place(ranks: Ranks) -> None:
    """They have objects of their own, for their tokens. What is wrong with them takes the time from
    no other line.
    """
    made: list[int] = []
    with pretend("in place", made), mock.patch.object(network, "peak_extra_bytes", quick_peak):
        lines = run_twolevel(ranks.device, replace(TINY, curve=(4, 6)), "twolevel")
    assert made == [6, 4, 6, 6, 6]
    few = [line for line in lines if line.case.tokens == 4]
    assert [line.name for line in few] == ["making an object", *NAMES[:4]]
    assert "no room for a view" in few[0].error
    assert not any(line.error for line in few[1:])
    many = [line for line in lines if line.case.tokens == 6]
    assert {line.name for line in many if line.error} == {DISPATCH_IN_PLACE, BACK_IN_PLACE_NAME}
    assert all(bool(line.wall_us) != bool(line.error) for line in many)
    assert all("wrong on rank 1 (input 0)" in line.error for line in many if line.error)


def test_lines_outlive_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run came to before it died is kept, and the other engine is measured none the less."""

    def spawn(fn: Any, ranks: int, suite: TwoLevel, engine: str, kept: Path, *, device: str) -> Any:
        assert (fn, ranks, suite, device) == (run_twolevel, 2, TINY, "cuda")
        found = [line(engine, DISPATCH, 500.0), line(engine, COMBINE_NAME, 500.0)]
        if engine == "nvlink":
            return [found] * ranks
        kept.write_text(json.dumps(asdict(found[0])) + "\n")
        raise RuntimeError("rank 1 failed:\nPeerTimeout: rank 0 did not come\n")

    monkeypatch.setattr(network.launch, "spawn", spawn)
    monkeypatch.setattr(network.launch, "under_torchrun", lambda: False)
    kept, lost, *others = network.on_both_engines(TINY, "cuda")
    assert kept == line("twolevel", DISPATCH, 500.0)
    assert (lost.name, lost.error, lost.wall_us) == (REST, "PeerTimeout: rank 0 did not come", [])
    assert [each.case.engine for each in others] == ["nvlink"] * 2


# The record


def line(
    engine: str, what: str, us: float, tokens: int = 4096, sms: int | None = BAR_SMS, **options: Any
) -> Line:
    """58.7 MB to other nodes in ``us`` for 4096 tokens."""
    rows, error = [float(tokens)] * 4, options.pop("error", "")
    ours: dict[str, Any] = {}
    if engine:
        put = [14336 * 1.5 * tokens] * 4
        ours = {"rows": rows, "put_bytes": put, "nvshmem": engine == "twolevel"}
        ours["held_bytes"] = 9_000_000
    case = TwoLevel().case(tokens, engine=engine, sms=sms, rings=options.pop("rings", None))
    symmetric = options.pop("symmetric_bytes", 9_000_000 if engine else 0)
    counted = Network(**{"planned": rows, "row_bytes": 14336, **ours, **options})
    times = [] if error else [us, us + 1, us + 2]
    return Line(
        case=case,
        name=what,
        phase="",
        kind=KIND_OF.get(what, ""),
        ours=bool(engine),
        error=error,
        device_us=times or None,
        wall_us=[2 * us for us in times],
        symmetric_bytes=symmetric,
        network=counted,
    )


def lines(there_us: float, back_us: float) -> list[Line]:
    return [
        line("twolevel", DISPATCH, there_us),
        line("twolevel", COMBINE_NAME, back_us),
        line("twolevel", DISPATCH_IN_PLACE, there_us, symmetric_bytes=244_000_000),
        line("twolevel", BACK_IN_PLACE_NAME, 600.0),
        line("twolevel", DISPATCH, 2 * there_us, tokens=8192),
        line("twolevel", DISPATCH, 200.0, sms=None),
        line(
            "twolevel", DISPATCH, 4 * there_us, tokens=8192, rings=3_670_016, other_bytes=2_000_000
        ),
        line("nvlink", DISPATCH, 300.0),
        line(NCCL, "all_to_all_single BF16", 310.0, sms=None),
    ]


def page(found: list[Line], **options: Any) -> str:
    return twolevel_markdown(found, TwoLevel(**options), FACTS)


def test_the_page_says_what_was_counted_and_reached() -> None:
    text = page(lines(499.0, 585.0))
    assert "on 4x NVIDIA H200 as 2x2" in text
    assert "torch 2, nvshmem 3.4" in text
    first = (
        "| `twolevel`: dispatch BF16 | 24 | 4096 | **500.0** (499.0, 501.0) | **1,000.0** "
        "(998.0, 1,002.0) | 117.4 |"
    )
    assert f"{first} reached | 16,384.0 | 16,384.0 | 50.00 | yes | 9.0 |" in text
    assert (
        "| `twolevel`: dispatch BF16 | all | 4096 | **201.0** (200.0, 202.0) | **402.0** (400.0, "
        "404.0) | 292.1 | - |" in text
    )
    assert "| 195.1 | - | 16,384.0 | 16,384.0 | 50.00 | no | 9.0 |" in text
    assert "| *all_to_all_single BF16* | - | 4096 |" in text
    assert "| `twolevel`: dispatch BF16, in place | 24 | 4096 | **500.0** (499.0, 501.0) |" in text
    assert "| 50.00 | yes | 244.0 |" in text
    assert "4096 tokens per rank.\n" in text
    fresh = (
        "- in fresh tensors, 24 SMs: **reached** (dispatch BF16 117.4 GB/s reached; combine BF16 "
        "100.2 GB/s reached)"
    )
    assert fresh in text
    there, back = (
        "dispatch BF16, in place 117.4 GB/s reached",
        "combine BF16, in place 97.7 GB/s missed",
    )
    assert f"- in place, 24 SMs: **missed** ({there}; {back})" in text
    assert "- twolevel: combine BF16, 24 SMs, 4096 tokens: 100.2 GB/s: reached" in text
    assert (
        "| 3.670 | 32.00 | 9.000 | 9.000 | 2.000 | **1,997.0** (1,996.0, 1,998.0) | 58.8 | 0.50 |"
        in text
    )
    assert "No time" not in text
    missed = page(lines(499.0, 590.0), topology=(4, 1))
    assert "4096 tokens per rank. The project's bar is for 2x2; this is 4x1." in missed
    assert (
        "- in fresh tensors, 24 SMs: **missed** (dispatch BF16 117.4 GB/s reached; combine BF16 "
        "99.4 GB/s missed)" in missed
    )
    assert "- twolevel: combine BF16, 24 SMs, 4096 tokens: 99.4 GB/s: missed" in missed


def test_what_was_wrong_has_no_time() -> None:
    wrong = line("twolevel", COMBINE_NAME, 0.0, rows=[4095.0] * 4, error="rank 0 has put 4095 rows")
    none = failed(TwoLevel().case(4096, engine="twolevel", sms=8), FIRST, "too small")
    text = page([*lines(499.0, 585.0)[:1], wrong, none])
    assert (
        "| `twolevel`: combine BF16 | 24 | 4096 | **no time** | **no time** | - | - | 16,380.0 | "
        "16,384.0 |" in text
    )
    assert "- twolevel: combine BF16, 24 SMs, 4096 tokens: rank 0 has put 4095 rows" in text
    assert "- twolevel: first calls, 8 SMs, 4096 tokens: too small" in text
    assert (
        "- in fresh tensors, 24 SMs: **not measured** (dispatch BF16 117.4 GB/s reached; combine "
        "BF16 not measured)" in text
    )
    assert (
        "- in place, 24 SMs: **not measured** (dispatch BF16, in place not measured; combine BF16, "
        "in place not" in text
    )


def test_only_the_engine_with_few_multiprocessors_is_judged() -> None:
    found = lines(499.0, 585.0)
    assert [judged(each, TwoLevel()) for each in found] == ["reached"] * 3 + [
        "missed",
        "reached",
        "",
        "missed",
        "",
        "",
    ]


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TwoLevel]:
    """What the command wants measured; GPUs are pretended."""
    found: list[TwoLevel] = []

    def on_both_engines(suite: TwoLevel, *_: Any) -> list[Line]:
        found.append(suite)
        return lines(499.0, 585.0)

    def names(_: str) -> list[str]:
        return ["NVIDIA H200"] * 8

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "on_both_engines", on_both_engines)
    monkeypatch.setattr(command.launch, "under_torchrun", lambda: False)
    monkeypatch.setattr(bench_report, "versions", lambda: {"torch": "2"})
    monkeypatch.setattr(bench_report, "device_names", names)
    return found


def test_the_command_writes_a_record(asked: list[TwoLevel], tmp_path: Path) -> None:
    result = run("twolevel", "--iterations", "7", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "# Engine `twolevel` on 4x NVIDIA H200 as 2x2" in result.output
    (text,), (content,) = (
        list(tmp_path.glob(f"twolevel-4xh200-*.{kind}")) for kind in ("md", "json")
    )
    assert text.read_text() in result.output
    found = json.loads(content.read_text())
    assert (found["suite"]["topology"], found["suite"]["iterations"], found["suite"]["seed"]) == (
        [2, 2],
        7,
        0,
    )
    assert [row["network_gbs"] >= BAR_GBS for row in found["rows"]][:2] == [True, True]
    counted = found["rows"][0]["network"]
    assert counted["rows"] == counted["planned"]
    for arguments, grid in (
        (["--ranks", "2"], (2, 1)),
        (["--ranks", "6", "--topology", "3x2"], (3, 2)),
    ):
        assert run("twolevel", *arguments, "--out", str(tmp_path)).exit_code == 0
        assert asked[-1] == TwoLevel(topology=grid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["twolevel", "--topology", "2x3"],
            "--topology '2x3' must be NODESxRANKS, of two nodes at least, for all 4",
        ),
        (["twolevel", "--topology", "1x4"], "'1x4' must be NODESxRANKS, of two nodes"),
        (["twolevel", "--topology", "two"], "'two' must be NODESxRANKS"),
        (["twolevel", "--ranks", "3"], "--topology '2x1' must be"),
        (
            ["twolevel", "--engine", "nvlink", "--link-gbs", "3"],
            "twolevel has no use for --engine, --link-gbs",
        ),
        (
            ["twolevel", "--link-gbs", "3", "--device", "cpu"],
            "has no use for --device, --link-gbs",
        ),
        (
            ["low_latency", "--link-gbs", "3"],
            "low_latency has no use for --link-gbs",
        ),
        (["low_latency_nodes", "--topology", "1x4"], "'1x4' must be NODESxRANKS"),
        (["low_latency", "--topology", "2x2"], "low_latency has no use for --topology"),
        (["nvlink", "--topology", "2x2"], "nvlink has no use for --topology"),
        (["collective", "--topology", "2x2"], "collective has no use for --topology"),
    ],
)
def test_bad_options_are_named(asked: list[TwoLevel], arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not asked
