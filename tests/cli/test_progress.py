"""Progress of commands: a line on stderr for whatever begins, from one rank; stdout stays as it
is.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.nvlink import MAIN, Suite, run_suite
from tokenyard import launch
from tokenyard.cli import consoles
from tokenyard.testing import Ranks, distributed_test

LINE = re.compile(r" *\d+\.\d s  (.*)")


def told(text: str) -> list[str]:
    """What lines of progress say."""
    return [match[1] for match in map(LINE.fullmatch, text.splitlines()) if match]


def test_a_reader_that_has_left_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    consoles.say("packing")


@distributed_test(world_size=2)
def test_of_several_ranks_the_first_tells(ranks: Ranks) -> None:
    err, here = io.StringIO(), sys.stderr
    sys.stderr = err
    try:
        consoles.say("packing")
    finally:
        sys.stderr = here
    assert told(err.getvalue()) == (["packing"] if ranks.rank == 0 else [])


SMALL = {
    "bench": ["--tokens", "6", "--hidden", "24", "--topk", "2", "--experts", "5",
              "--iterations", "2", "--warmup", "1", "--skew", "zipf"],
    "demo": ["--hidden", "16", "--steps", "2"],
}  # fmt: skip
STAGES = {
    "bench": [
        "6 tokens/rank, hidden 24, top-2 of 5, zipf routing, bf16, flat: checking",
        "measuring memory and time",
    ],
    "demo": [
        "step 1 of 2: forward and backward",
        "step 2 of 2: forward and backward",
        "comparing with one process",
    ],
}


@pytest.mark.parametrize("command", list(SMALL))
def test_commands_tell_on_stderr(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenyard", command, "--ranks", "2", *SMALL[command]],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert told(done.stderr) == ["starting 2 ranks", *STAGES[command]]
    assert done.stdout and not told(done.stdout)


@pytest.mark.parametrize("command", ["--help", "plan", "plan --json", "doctor", *SMALL])
def test_output_that_finds_no_room_is_one_line(command: str, tmp_path: Path) -> None:
    waits = tmp_path / "waits.prom"
    waits.write_text('tokenyard_wait_seconds_total{rank="0",source="1",for="dispatch, rows"} 1\n')
    more = {"doctor": ["--waits", str(waits)]} | {
        name: ["--ranks", "2", *options] for name, options in SMALL.items()
    }
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tokenyard", *command.split(), *more.get(command, [])],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    of_torch = re.compile(r"\[rank\d\]:\[W")  # warnings
    lines = [line for line in done.stderr.splitlines() if not of_torch.match(line)]
    said = [line for line in lines if not LINE.fullmatch(line)]
    assert (done.returncode, said) == (1, ["tokenyard: [Errno 28] No space left on device"])


@pytest.mark.parametrize(("suite", "times"), [("nvlink", 1), ("low_latency", 1), ("twolevel", 2)])
def test_suites_tell_when_ranks_start(
    suite: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(launch, "spawn", lambda *_, **__: [[]])
    monkeypatch.setattr(launch, "under_torchrun", lambda: False)
    options = command.Options(suite=suite, ranks=4, device="cpu")
    assert command.measure(command.SUITES[suite].preset["cuda"], options) == []
    assert told(err.getvalue()) == ["starting 4 ranks"] * times


def test_a_suite_tells_each_line_as_it_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sizes = {"tokens": 6, "hidden": 256, "topk": 2, "experts": 4, "iterations": 1, "warmup": 1}
    suite = Suite(engine="collective", sections=(MAIN,), **sizes)
    store = launch.local_store()
    with launch.joined(0, 1, port=store.port, name="alone") as here:
        lines = run_suite(here, suite)
    begun, *came = told(capsys.readouterr().err)
    assert begun == "main, 6 tokens: making and checking"
    assert len(came) == len(lines) > 1
    for text, line in zip(came, lines, strict=True):
        assert re.fullmatch(rf"main: 6 tokens, .*: {re.escape(line.name)}: .* us end to end", text)
