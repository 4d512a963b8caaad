"""The program that kills ranks under load (``tests/gpu/kill_many.py``), on CPU ranks: it counts
what is good, and sees what is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from multiprocessing.connection import Connection
from random import Random

import pytest

from kill_many import LOADED, Options, Round, Seen, run_round, start_round, summary
from nvlink_pool import SOAK
from run import command

OPTIONS = Options("collective", "cpu", 600.0, 0.5, 7)


def says_nothing(me: int, victim: int, options: Options, port: int, pipe: Connection) -> None:
    pipe.send(LOADED)
    time.sleep(600)


def is_wrong(me: int, victim: int, options: Options, port: int, pipe: Connection) -> None:
    pipe.send(LOADED)
    pipe.send(Seen(wrong="x differs"))
    time.sleep(600)


def crashes(me: int, victim: int, options: Options, port: int, pipe: Connection) -> None:
    pipe.send(LOADED)
    if me == victim:
        time.sleep(600)
    os._exit(11)


def is_wrong_before_it_is_killed(
    me: int, victim: int, options: Options, port: int, pipe: Connection
) -> None:
    pipe.send(LOADED)
    if me == victim:
        pipe.send(Seen(wrong="y differs"))
        os._exit(2)
    time.sleep(600)


def fails_at_the_start(me: int, victim: int, options: Options, port: int, pipe: Connection) -> None:
    pipe.send(Seen(error="no GPU"))


def test_ranks_are_killed_and_the_others_go_on() -> None:
    """Of real ranks, over gloo: a rehearsal and a round, or two (``make soak``)."""
    rounds = min(SOAK, 2)
    line = command("kill_many", "--engine", "collective", "--times", f"{rounds}")
    done = subprocess.run(
        [*line, "--timeout", "600", "--device", "cpu", "--limit", "600"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[name] for name in ("rounds", "goods", "hangs", "wrongs", "errors")] == [
        rounds, rounds + 1, 0, 0, 0,
    ]  # fmt: skip
    assert 0 < found["first_good_call_median"] <= found["first_good_call_max"]


@pytest.mark.parametrize(
    ("target", "ending", "text"),
    [
        (says_nothing, "hang", "hang: after 0.5 s"),
        (is_wrong, "wrong", "wrong: x differs"),
        (crashes, "error", "error: ended with exit code 11"),
        (is_wrong_before_it_is_killed, "wrong", "wrong: y differs"),
        (fails_at_the_start, "error", "error: no GPU"),
    ],
)
def test_what_is_not_good_is_counted(
    target: object, ending: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever says nothing is killed and counted, and the next round begins."""
    monkeypatch.setattr(Random, "uniform", lambda *_: 1.0)  # the victim has ended by then
    started = start_round(1, OPTIONS, target)  # pyright: ignore[reportArgumentType]
    found = run_round(started)
    assert found.ending == ending and text in str(found)
    good = Round(0, 0, Seen(told=1.0, good=3.0, calls=5))
    told = summary(OPTIONS, [good, found, good])
    assert (told["rounds"], told["goods"], told[f"{ending}s"]) == (2, 2, 1)
    assert told["first_good_call_max"] == 2.0 and told["over_1_s"] == 1
    assert told["calls_compared"] == 10
