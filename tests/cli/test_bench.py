"""``tokenyard bench``: its arithmetic, its protocol, and that a wrong result gets no time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner, Result

from benchmarks.collective import verdicts
from tokenyard import launch
from tokenyard.cli import bench as bench_command
from tokenyard.cli.bench import bench
from tokenyard.cli.bench_report import Measurement, ratio
from tokenyard.cli.plots import save_bench
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.cases import (
    NUM_INPUTS,
    Case,
    Traffic,
    all_sent,
    mean_busiest,
    once_per_rank,
    sweep,
)
from tokenyard.testing.checked_calls import CACHED, COMBINE, DISPATCH, PHASES, Call
from tokenyard.testing.timing import peak_extra_bytes, slowest_rank, summarise, time_interleaved

CPU = torch.device("cpu")
CASE = Case(
    tokens=5,
    hidden=256,
    topk=2,
    experts=6,
    skew="uniform",
    dtype="bf16",
    layout="flat",
    quantize="none",
)
TINY = [
    "--tokens",
    "6",
    "--hidden",
    "24",
    "--topk",
    "2",
    "--experts",
    "5",
    "--iterations",
    "4",
    "--warmup",
    "1",
]
PNG = b"\x89PNG\r\n\x1a\n"
MIB = 1 << 20

app = typer.Typer()
app.command()(bench)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*TINY, *arguments])


def plain(result: Result) -> str:
    """What was printed, without line breaks and boxes."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, in this process, so that a test can put its hands on what is measured."""

    def here(fn: Callable[..., Any], _: int, *arguments: Any, device: str = "cpu") -> list[Any]:
        store = launch.local_store()
        with launch.joined(0, 1, device, port=store.port, name="alone") as where:
            return [fn(where, *arguments)]

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(launch, "spawn", here)


# Arithmetic


@pytest.mark.parametrize(
    ("times", "median", "p99", "least"),
    [
        ([7.0], 7.0, 7.0, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 2.5, 4.0, 1.0),
        ([float(n) for n in range(20, 0, -1)], 10.5, 20.0, 1.0),
        ([float(n) for n in range(1, 101)], 50.5, 99.0, 1.0),
        ([float(n) for n in range(1, 301)], 150.5, 297.0, 1.0),
    ],
)
def test_statistics(times: list[float], median: float, p99: float, least: float) -> None:
    stats = summarise(times)
    assert (stats.median, stats.p99, stats.min) == (median, p99, least)


def test_wire_bytes_of_a_tiny_routing() -> None:
    """Six experts on three ranks, two each. Rows of 10 bytes."""
    idx = [
        torch.tensor([[0, 1], [2, 3], [5, 0]]),  # to rank 0; to rank 1, once; to ranks 2 and 0
        torch.tensor([[2, 3], [-1, -1]]),  # to rank 1, itself; to nobody
        torch.tensor([[0, 2], [1, -1], [4, 4]]),  # to ranks 0 and 1; to rank 0; to rank 2, itself
    ]
    traffic = once_per_rank(idx, 6, 10)
    assert traffic == Traffic(sent=[20, 0, 30], received=[20, 20, 10])
    assert (traffic.busiest, traffic.moved) == (30, [40, 20, 40])


def test_the_busiest_link_is_averaged_over_inputs() -> None:
    inputs = [Traffic([20_000, 0], [0, 20_000]), Traffic([1000, 60_000], [60_000, 1000])]
    assert mean_busiest(inputs) == 40_000


@pytest.mark.parametrize(
    ("dtype", "hidden", "quantize", "there", "back"),
    [
        ("bf16", 256, "none", 512, 512),
        ("fp32", 100, "none", 400, 400),
        ("bf16", 7168, "fp8", 7168 + 4 * 56, 14336),
        ("fp16", 600, "fp8_pow2", 600 + 4 * 5, 1200),
        ("bf16", 600, "fp8_ue8m0", 600 + 4 * 2, 1200),
    ],
)
def test_row_bytes(dtype: str, hidden: int, quantize: str, there: int, back: int) -> None:
    case = replace(CASE, dtype=dtype, hidden=hidden, quantize=quantize)
    assert (case.row_bytes, case.combined_row_bytes) == (there, back)


def test_what_a_row_says() -> None:
    row = Measurement(
        case=CASE,
        name="a",
        phase=DISPATCH,
        wall_us=[4.0, 2.0, 3.0],
        wire_bytes=6000.0,
        floor_us=0.75,
    )
    assert (row.wire_gbs, row.percent_of_floor) == (2.0, 25.0)
    on_gpu = replace(row, device_us=[1.5, 1.5, 9.0])
    assert (on_gpu.wire_gbs, on_gpu.percent_of_floor) == (4.0, 50.0)
    assert ratio(on_gpu, [replace(row, device_us=[1.0])], "a", DISPATCH) == 1.5
    wrong = Measurement(case=CASE, name="a", phase=DISPATCH, error="no")
    assert (wrong.wall, wrong.wire_gbs, ratio(row, [wrong], "a", DISPATCH)) == (None, None, None)


def test_verdicts_divide_by_the_composite_baselines() -> None:
    rows = [
        Measurement(
            case=CASE,
            name="tokenyard x",
            phase=DISPATCH,
            ours=True,
            wall_us=[30.0],
            peak_per_moved=1.25,
        ),
        Measurement(case=CASE, name="index_select + a2a + copy", phase=DISPATCH, wall_us=[20.0]),
        Measurement(
            case=CASE,
            name="index_select + a2a + copy (staging kept)",
            phase=DISPATCH,
            wall_us=[25.0],
        ),
    ]
    fresh, kept, memory = verdicts(rows)
    assert fresh == "tokenyard x, dispatch: 1.50x the time of index_select + a2a + copy"
    assert (
        kept == "tokenyard x, dispatch: 1.20x the time of index_select + a2a + copy (staging kept)"
    )
    assert memory == "tokenyard x, dispatch: peak memory 1.25x bytes sent + received"


def test_inputs_differ_from_each_other_and_between_ranks() -> None:
    for skew in ("uniform", "zipf"):
        sent = [
            each
            for number in range(NUM_INPUTS)
            for each in zip(*all_sent(replace(CASE, skew=skew), 2, number, seed=0), strict=True)
        ]
        assert len({x.float().numpy().tobytes() for x, _, _ in sent}) == 2 * NUM_INPUTS
        assert all((x != 0).float().mean() > 0.9 for x, _, _ in sent)
        assert len({str(idx.tolist()) for _, idx, _ in sent}) == 2 * NUM_INPUTS


def test_sweep_is_every_combination() -> None:
    lists: dict[str, Any] = {name: [getattr(CASE, name)] for name in CASE.__dataclass_fields__}
    cases = sweep(**lists | {"tokens": [1, 2], "skew": ["zipf", "uniform"]})
    assert [(case.tokens, case.skew) for case in cases] == [
        (1, "zipf"),
        (1, "uniform"),
        (2, "zipf"),
        (2, "uniform"),
    ]


# Protocol


@distributed_test(world_size=2)
def test_slowest_rank_counts_entry_by_entry(ranks: Ranks) -> None:
    mine = (
        torch.tensor([[1.0, 5.0], [2.0, 2.0]])
        if ranks.rank
        else torch.tensor([[3.0, 4.0], [1.0, 2.5]])
    )
    assert slowest_rank(mine, ranks.device).tolist() == [[3.0, 5.0], [2.0, 2.5]]


@distributed_test(world_size=2)
def test_rounds_are_interleaved_and_inputs_rotate(ranks: Ranks) -> None:
    calls: list[tuple[str, int]] = []

    def case(name: str) -> Callable[[int], None]:
        def call(number: int) -> None:
            calls.append((name, number))
            dist.barrier()  # hangs unless both ranks take the cases in the same order

        return call

    series = time_interleaved(
        [case(n) for n in "abc"], iterations=6, warmup=2, num_inputs=3, device=ranks.device
    )
    rounds = [calls[at : at + 3] for at in range(0, len(calls), 3)]
    assert [sorted(name for name, _ in each) for each in rounds] == [["a", "b", "c"]] * 8
    assert [{number for _, number in each} for each in rounds[2:]] == [{0}, {1}, {2}] * 2
    assert len({tuple(name for name, _ in each) for each in rounds}) > 1
    assert [len(each.wall) for each in series] == [6] * 3
    assert [each.device is not None for each in series] == [ranks.device.type == "cuda"] * 3


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    def call(_: int) -> torch.Tensor:
        first = torch.ones(MIB, dtype=torch.uint8)
        second = torch.ones(2 * MIB, dtype=torch.uint8)
        del first
        third = torch.ones(4 * MIB, dtype=torch.uint8)
        del second, third
        return torch.ones(3 * MIB, dtype=torch.uint8)

    assert peak_extra_bytes(call, 0, CPU) == 6 * MIB


# A wrong result


def _flip_a_bit(x: torch.Tensor) -> None:
    x.view(torch.uint8).flatten()[3] ^= 1


def _broken(call: Call) -> Call:
    """A call with one wrong bit on every second input."""

    def wrong(number: int) -> Any:
        result = call.run(number)
        if number == 1:
            _flip_a_bit(getattr(result, "x", result))
        return result

    return replace(call, run=wrong)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", ["flat", "expert_major", "expert_padded"])
def test_wrong_bit_prints_no_time_and_fails(
    phase: str, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    honest = bench_command.engine_calls

    def one_wrong(*arguments: Any) -> list[Call]:
        return [_broken(call) if call.phase == phase else call for call in honest(*arguments)]

    monkeypatch.setattr(bench_command, "engine_calls", one_wrong)
    result = run("--skew", "uniform", "--layout", layout, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    assert (
        f"NO TIME for {phase} by tokenyard collective: wrong on rank 0 (input 1)" in result.output
    )
    assert "1 of" in result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    for row in rows:
        wrong = row["phase"] == phase and row["name"] == "tokenyard collective"
        assert bool(row["error"]) == wrong
        assert len(row["wall_us"]) == (0 if wrong else 4)


@pytest.mark.usefixtures("alone")
def test_case_that_raises_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(number: int) -> None:
        raise ValueError("this cannot be done")

    honest = bench_command.instead_of_combine

    def with_one_more(case: Case, batches: Any) -> list[Call]:
        doomed = Call(case, batches, COMBINE, "doomed", run=refuses, check=lambda *_: None)
        return [doomed, *honest(case, batches)]

    monkeypatch.setattr(bench_command, "instead_of_combine", with_one_more)
    result = run("--skew", "zipf")
    assert result.exit_code == 1
    assert (
        "NO TIME for combine by doomed: wrong on rank 0 (input 0): this cannot be done"
        in result.output
    )


# From end to end


def test_two_ranks_write_json_and_png(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run("--ranks", "2", "--skew", "uniform,zipf", "--link-gbs", "2", "--seed", "5",
                 "--json", str(out), "--plot", str(picture))  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert content["suite"]["seed"] == 5
    assert {"date", "command", "commit", "devices", "rows"} <= content.keys()
    assert Counter(row["phase"] for row in content["rows"]) == {DISPATCH: 10, CACHED: 2, COMBINE: 6}
    cases = [Case(6, 24, 2, 5, skew) for skew in ("uniform", "zipf")]
    for row in content["rows"]:
        assert row["error"] == ""
        assert len(row["wall_us"]) == 4
        assert row["wall"]["min"] == min(row["wall_us"])
        assert row["device_us"] is None
        assert row["peak_bytes"] > 0
    for case in cases:
        sent = [
            once_per_rank(all_sent(case, 2, n, seed=5)[1], 5, 48).busiest for n in range(NUM_INPUTS)
        ]
        ours = [
            r
            for r in content["rows"]
            if r["case"]["skew"] == case.skew and r["name"] == "tokenyard collective"
        ]
        assert [row["wire_bytes"] for row in ours] == [sum(sent) / NUM_INPUTS] * 3
        assert ours[0]["floor_us"] == pytest.approx(sum(sent) / NUM_INPUTS / 2000)
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--skew", "zipf,wild"], "'wild' is unknown; use one of uniform, zipf"),
        (
            ["--tokens", "4,0"],
            "Invalid value for '--tokens': '0' must be a whole number of at least 1",
        ),
        (
            ["--hidden", "2147483648"],
            "Invalid value for '--hidden': '2147483648' must be a whole number of at least 1 (at "
            "most 2147483647)",
        ),
        (["--ranks", "257"], "should be less than or equal to 256"),
        (["--topk", "9"], "Invalid value for --topk: 9 must be at most --experts 5"),
        (["--engine", "warp"], "Invalid value for '--engine': 'warp' is unknown"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in plain(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "no/such/x.json"], "Invalid value for --json: no/such is not a directory"),
        (["--plot", "no/such/x.png"], "Invalid value for --plot: no/such is not a directory"),
        (["--plot", "x.gif"], "Invalid value for --plot: 'x.gif' must end in .png"),
        (
            ["--device", "cuda"],
            "Invalid value for --device: torch sees no CUDA device here; use cpu",
        ),
    ],
)
def test_nothing_is_measured_in_vain(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_command, "on_all_ranks", pytest.fail)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in plain(result)


def test_engines_are_a_list_as_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        bench_command, "on_all_ranks", lambda *known: seen.append(known[-1].engines) or []
    )
    assert run("--engine", "collective, Auto,nvlink").exit_code == 0
    assert seen == [["collective", "auto", "nvlink"]]


def test_only_who_writes_a_file_looks_for_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bench_command, "on_all_ranks", lambda *_: [])
    assert run("--json", "no/such/x.json", "--plot", "x.gif").exit_code == 0


def test_plot_over_a_sweep_leaves_out_what_failed(tmp_path: Path) -> None:
    rows = [
        Measurement(
            case=replace(CASE, tokens=tokens),
            name=name,
            phase=phase,
            wall_us=[tokens * 1.0, tokens * 2.0],
            floor_us=0.5,
        )
        for tokens in (64, 128, 256)
        for name, phase in (
            ("tokenyard x", DISPATCH),
            ("all_to_all_single", DISPATCH),
            ("all_to_all_single", COMBINE),
        )
    ]
    broken = Measurement(case=CASE, name="broken", phase=COMBINE, error="wrong")
    save_bench(tmp_path / "lines.png", [*rows, broken])
    save_bench(tmp_path / "nothing.png", [])
    assert (tmp_path / "lines.png").read_bytes().startswith(PNG)
    assert (tmp_path / "nothing.png").read_bytes().startswith(PNG)
