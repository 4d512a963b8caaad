"""Progress where nobody looks at a terminal: lines on stderr, at once and again and again; stdout
stays as it is.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import low_latency, nvlink, twolevel
from benchmarks.low_latency import Decode
from benchmarks.nvlink import MAIN, TOKENS, Suite
from benchmarks.twolevel import BAR_SMS, TwoLevel
from tokenyard import launch
from tokenyard.cli import bench, progress
from tokenyard.cli.bench import Plan, run_rank
from tokenyard.testing.cases import Case

LINE = re.compile(r" *\d+ s  (.*) \((\d+) of (\d+) stages done\)")
SOON = 600.0


class Written(io.StringIO):
    """A stream that counts how often it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = threading.Semaphore(0)

    def flush(self) -> None:
        self.flushes.release()

    def wait_for(self, flushes: int) -> None:
        """As many more."""
        while self.flushes.acquire(blocking=False):
            pass
        for _ in range(flushes):
            assert self.flushes.acquire(timeout=SOON), "what takes long is told of again"


def told(text: str) -> list[tuple[str, int, int]]:
    """(stage, stages done, of how many) of each line; there is nothing else."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert None not in found, text
    return [(match[1], int(match[2]), int(match[3])) for match in found if match]


def test_a_line_comes_at_once_and_then_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), Written()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    with progress.progress(["packing", "sending"], Console(file=out)) as counter:
        assert told(err.getvalue())[0] == ("packing", 0, 2)
        err.wait_for(3)
        counter.value = 1
        err.wait_for(2)  # one of them may have been on its way
        counter.value = 7  # more than there are
        err.wait_for(2)
    lines = told(err.getvalue())
    assert len(lines) > 3 and set(lines) == {("packing", 0, 2), ("sending", 1, 2)}
    assert [done for _, done, _ in lines] == sorted(done for _, done, _ in lines)
    length = len(err.getvalue())
    threading.Event().wait(0.05)
    assert len(err.getvalue()) == length, "it ends with the block"
    assert out.getvalue() == ""
    assert progress.LINE_SECONDS <= 10


def test_a_terminal_has_a_line_that_changes_unless_ranks_print(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for live in (True, False):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", err)
        with progress.progress(["packing"], Console(file=out, force_terminal=True), live=live):
            pass
        assert ("packing" in out.getvalue(), "packing" in err.getvalue()) == (live, not live)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_quiet_console_says_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with progress.progress(
        ["packing"], Console(file=out, force_terminal=terminal, quiet=True)
    ) as counter:
        assert counter.value == 0
    assert out.getvalue() == err.getvalue() == ""


def test_a_reader_that_has_left_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with progress.progress(["packing"], Console(file=io.StringIO())) as counter:
        counter.value += 1
    assert counter.value == 1


SMALL = {
    "bench": [
        "--tokens",
        "6",
        "--hidden",
        "24",
        "--topk",
        "2",
        "--experts",
        "5",
        "--iterations",
        "2",
        "--warmup",
        "1",
    ],
    "demo": ["--hidden", "16", "--ffn", "8", "--steps", "2"],
}
FIRST = {"bench": ("6 tokens, zipf, flat: checking", 0, 3), "demo": ("starting 1 ranks", 0, 5)}


@pytest.mark.parametrize("command", list(SMALL))
def test_commands_tell_on_stderr(command: str) -> None:
    skew = ["--skew", "zipf"] if command == "bench" else []
    options = [command, "--ranks", "1", *SMALL[command], *skew]
    done = subprocess.run(
        [sys.executable, "-m", "tokenyard", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if LINE.fullmatch(line)]
    assert told("\n".join(lines))[0] == FIRST[command]
    assert "stages done" not in done.stdout and "combine" in done.stdout


def test_of_a_launchers_ranks_the_first_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' consoles are quiet, on a terminal too."""
    seen: list[bool] = []

    def run_plan(plan: Plan, ranks: int, device: str, console: Console) -> list[Any]:
        seen.append(console.quiet)
        return []

    monkeypatch.setattr(bench, "run_plan", run_plan)
    monkeypatch.setattr(bench, "_report", lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            _bench_alone()
        assert ended.value.code == 0
    assert seen == [False, True]


def _bench_alone() -> None:
    from tokenyard.cli import app

    app(["bench", *SMALL["bench"]])


# What is counted are the stages that are told of


class Steps:
    """A counter that remembers what it was set to."""

    def __init__(self) -> None:
        self.seen = [0]

    @property
    def value(self) -> int:
        return self.seen[-1]

    @value.setter
    def value(self, value: int) -> None:
        self.seen.append(value)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Be one rank, in this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        store = launch.local_store()
        with launch.joined(0, 1, port=store.port, name="alone") as here:
            return fn(here, *args, **options)

    return run


def test_a_sweep_goes_through_its_stages(alone: Callable[..., Any]) -> None:
    cases = [Case(4, 16, 2, 4, skew) for skew in ("uniform", "zipf")]
    plan, steps = Plan(cases, ["collective"], 1, 1, None, 0), Steps()
    alone(run_rank, plan, steps)
    assert steps.seen == list(range(len(plan.stages) + 1))
    assert plan.stages[:4] == [
        "4 tokens, uniform, flat: checking",
        "4 tokens, uniform, flat: measuring memory",
        "4 tokens, uniform, flat: timing",
        "4 tokens, zipf, flat: checking",
    ]


@pytest.mark.parametrize("sections", [Suite().sections, (TOKENS, MAIN)])
def test_the_record_of_nvlink_goes_through_its_stages(
    alone: Callable[..., Any], sections: tuple[str, ...]
) -> None:
    """An engine that cannot be made takes as many stages."""
    suite = Suite(
        tokens=6,
        hidden=64,
        topk=2,
        experts=4,
        sms=(8,),
        curve=(4, 5),
        buffer_bytes=4096,
        iterations=1,
        warmup=1,
        sections=sections,
    )
    steps = Steps()
    alone(nvlink.run_suite, suite, steps)
    assert steps.seen == list(range(len(suite.stages) + 1))
    assert len(suite.stages) == 2 * (len(sections) + 1)
    assert (
        f"{TOKENS}, 5 tokens: timing" in suite.stages
        and f"{MAIN}: making and checking" in suite.stages
    )


def test_the_record_of_decoding_goes_through_its_stages(
    alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: nothing is captured, and no engine made."""
    monkeypatch.setattr(low_latency, "ENGINES", ())
    monkeypatch.setattr(low_latency, "_graph", lambda *_: lambda: 1.0)
    suite, steps = (
        Decode(tokens=(2, 4), hidden=64, topk=2, experts=4, iterations=1, warmup=1),
        Steps(),
    )
    alone(low_latency.run_decode, suite, steps)
    assert steps.seen == list(range(len(suite.stages) + 1))
    assert suite.stages[1:3] == ["2 tokens: timing", "4 tokens: checking and capturing"]


def test_the_record_of_twolevel_goes_through_its_stages(alone: Callable[..., Any]) -> None:
    """Here without an engine that could be made."""
    suite = TwoLevel(
        topology=(1, 1), tokens=4, curve=(4, 6), sms=(8, BAR_SMS), hidden=64, topk=2, experts=4
    )
    for engine, count in (("twolevel", 4), ("nvlink", 1)):
        steps = Steps()
        alone(twolevel.run_twolevel, suite, engine, counter=steps)
        assert steps.seen == list(range(len(suite.stages(engine)) + 1)) == list(range(count + 1))


@pytest.mark.parametrize("suite", ["nvlink", "low_latency", "twolevel"])
def test_record_suites_tell_their_stages(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a terminal, where their ranks print lines."""
    given: list[Any] = []

    def spawn(fn: Any, ranks: int, *args: Any, device: str) -> list[Any]:
        given.append(args[-1].value)
        return [[]]

    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(launch, "spawn", spawn)
    monkeypatch.setattr(launch, "under_torchrun", lambda: False)
    console = Console(file=io.StringIO(), force_terminal=True)
    options = command.Options(suite=suite, ranks=1, device="cpu")
    command.measure(command.SUITES[suite].preset["cuda"], options, console)
    stages = {
        "nvlink": Suite().stages,
        "low_latency": Decode().stages,
        "twolevel": TwoLevel().stages("twolevel"),
    }
    assert told(err.getvalue())[0] == (stages[suite][0], 0, len(stages[suite]))
    assert given == [0] * (2 if suite == "twolevel" else 1)
