"""Bodies on ranks. Bodies that must fail are called like functions, by tests that look at how they
failed.
"""

# Torch lacks types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import enum
import fcntl
import os
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist

from tokenyard.testing import RankFailure, Ranks, decorators, distributed_test
from tokenyard.testing.job import Ending, Outcome, judge
from tokenyard.testing.pool import MOST_LEFT, Pools


@distributed_test(world_size=(1, 2), engine=("collective", "other"))
def test_a_body_runs_on_every_rank(ranks: Ranks) -> None:
    total = torch.tensor([1, ranks.rank], device=ranks.device)
    dist.all_reduce(total, group=ranks.group)
    assert total.tolist() == [ranks.world_size, sum(range(ranks.world_size))]
    assert ranks.engine in ("collective", "other")
    assert ranks.device.type == os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")
    assert torch.get_num_threads() == 1


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class TestInAClass:
    def setup_method(self) -> None:
        self.made = "by setup_method"

    @pytest.mark.parametrize("colour", Colour)
    @distributed_test(world_size=(2,))
    @pytest.mark.parametrize("number", [1, 2])
    def test_self_fixtures_and_parameters_arrive(
        self, colour: Colour, ranks: Ranks, number: int, tmp_path: Path
    ) -> None:
        assert self.made == "by setup_method"
        assert colour in (Colour.RED, Colour.BLUE)
        assert number in (1, 2)
        (tmp_path / str(ranks.rank)).touch()


@distributed_test(world_size=2)
def write_pid(folder: Path, ranks: Ranks) -> None:
    (folder / str(ranks.rank)).write_text(str(os.getpid()))


@distributed_test(world_size=2)
def differ(ranks: Ranks) -> None:
    seen = [1, 2, 3]
    assert len(seen) == 3 + ranks.rank


def pids(folder: Path) -> list[str]:
    write_pid(folder)
    return [(folder / str(rank)).read_text() for rank in range(2)]


def test_workers_are_kept_until_a_body_fails(tmp_path: Path) -> None:
    first = pids(tmp_path)
    assert pids(tmp_path) == first
    with pytest.raises(RankFailure) as caught:
        differ()
    assert not set(pids(tmp_path)) & set(first)
    message = str(caught.value)
    assert message.startswith("rank 1 of 2: AssertionError: assert 3 == ")
    assert "assert len(seen) == 3 + ranks.rank" in message
    assert "where 3 = len([1, 2, 3])" in message
    assert message.endswith("--- rank 0\npassed")


@distributed_test(world_size=2)
def leave_threads(ranks: Ranks) -> None:
    for _ in range(MOST_LEFT + 1 if ranks.rank else 0):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def test_workers_end_that_have_many_threads_of_earlier_bodies(tmp_path: Path) -> None:
    first = pids(tmp_path)
    leave_threads()
    assert not set(pids(tmp_path)) & set(first)


@pytest.mark.skipif(sys.platform != "linux", reason="workers rest on Linux only")
def test_workers_rest_between_bodies(tmp_path: Path) -> None:
    workers = pids(tmp_path)
    for _ in range(600):
        states = [state(pid) for pid in workers]
        if states == ["T", "T"]:
            return
        time.sleep(0.1)  # a stop takes effect a moment after it is sent
    pytest.fail(f"workers are in states {states} 60 s after their body")


def state(pid: str) -> str:
    """Of a process, as the kernel has it: T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def verdict(*outcomes: Outcome, may_die: tuple[int, ...] = ()) -> str:
    with pytest.raises(RankFailure) as caught:
        judge(dict(enumerate(outcomes)), may_die)
    return str(caught.value)


def test_what_ranks_share_is_shown_once() -> None:
    fine, one, two = (
        Outcome(Ending.PASSED),
        *(Outcome(Ending.FAILED, f"Oh: {n}\nno", "Trace\n  here\n") for n in (1, 2)),
    )
    assert verdict(one, fine, one) == (
        "ranks 0, 2 of 3: Oh: 1\n\n--- ranks 0, 2\nTrace\n  here\nOh: 1\nno\n\n--- rank 1\npassed"
    )
    assert verdict(one, two) == (
        "rank 0 of 2: Oh: 1; rank 1 of 2: Oh: 2\n\n--- ranks 0, 1\nTrace\n  here\nrank 0: Oh: "
        "1\nno\nrank 1: Oh: 2\nno"
    )
    stuck, died = (
        Outcome(Ending.STUCK, "still running", "at\n"),
        Outcome(Ending.DIED, "exited with code 1"),
    )
    assert verdict(stuck, died, one).startswith(
        "rank 2 of 3: Oh: 1; rank 1 of 3: exited with code 1; rank 0 of 3: still"
    )
    assert verdict(stuck, died, may_die=(1,)) == (
        "rank 0 of 2: still running\n\n--- rank 0\nstill running\nat\n\n--- rank 1\nexited with "
        "code 1"
    )


@distributed_test(world_size=2, timeout=1.0)
def linger(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(1000)


def test_a_timeout_names_the_stuck_rank_and_where_it_is() -> None:
    with pytest.raises(RankFailure) as caught:
        linger()
    message = str(caught.value)
    assert message.startswith("rank 1 of 2: still running after 1.0 s\n")
    assert f'File "{__file__}"' in message
    assert "in linger" in message
    assert message.endswith("--- rank 0\npassed")


@distributed_test(world_size=2)
def leave_the_other_waiting(ranks: Ranks) -> None:
    if ranks.rank == 0:
        raise KeyError("gone")
    dist.barrier(group=ranks.group)


def test_ranks_that_wait_for_a_failed_one_are_ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenyard.testing.pool.GRACE", 0.25)
    with pytest.raises(RankFailure) as caught:
        leave_the_other_waiting()
    message = str(caught.value)
    assert message.startswith(
        "rank 0 of 2: KeyError: 'gone'; rank 1 of 2: still running 0.25 s after rank 0 failed\n"
    )
    assert "in barrier" in message


@distributed_test(world_size=2, may_die=(1,))
def exit_rightly(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os._exit(7)


@distributed_test(world_size=1)
def exit_wrongly() -> None:
    os._exit(7)


@distributed_test(world_size=2, may_die=(1,))
def crash(ranks: Ranks) -> None:
    if ranks.rank == 1:
        ctypes.string_at(0)


def test_a_rank_dies_only_where_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = pids(tmp_path)
    exit_rightly()
    assert not set(pids(tmp_path)) & set(before)
    with pytest.raises(RankFailure, match=r"^rank 0 of 1: exited with code 7\n"):
        exit_wrongly()
    with pytest.raises(RankFailure, match=r"^rank 1 of 2: died of SIGSEGV\n"):
        crash()
    assert "[rank 1] Fatal Python error: Segmentation fault" in capsys.readouterr().out


@distributed_test(world_size=2)
def skip(reason: str) -> None:
    pytest.skip(reason)


def test_a_skip_must_be_that_of_every_rank() -> None:
    with pytest.raises(SkipTest, match=r"^no such thing$"):
        skip("no such thing")
    text = verdict(Outcome(Ending.SKIPPED, "why"), Outcome(Ending.PASSED))
    assert text.startswith("rank 0 of 2: skipped (why), but not every rank did\n")


def test_misuse_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="'reason' of skip cannot be pickled"):
        skip(lambda: "")
    with pytest.raises(TypeError, match="at module or class level"):

        @distributed_test()
        def inner() -> None: ...

    with pytest.raises(ValueError, match=r"may_die has \[2\], but ranks go from 0 to 1"):
        distributed_test(world_size=2, may_die=(0, 2))
    monkeypatch.setenv("TOKENYARD_TEST_DEVICE", "tpu")
    with pytest.raises(ValueError, match="'tpu'; use one of cpu, cuda"):
        skip("")


def test_what_pytest_collects_and_reports(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_inner="""
        import pytest
        from tokenyard.testing import distributed_test

        @distributed_test(world_size=(1, 2), engine=("a", "b"))
        def test_many(ranks):
            assert ranks.engine in "ab"

        @distributed_test(world_size=2)
        def test_skipped():
            pytest.skip("not today")

        @distributed_test(world_size=2)
        def test_broken(tmp_path, ranks):
            print("printed by", ranks.rank)
            assert ranks.rank == 0, "only rank 0 is fine"
        """
    )
    result = pytester.runpytest("-v", "-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4, failed=1, skipped=1)
    names = [
        f"*test_many[[]ranks{size}-{engine}[]] PASSED*" for size, engine in ("1a", "1b", "2a", "2b")
    ]
    result.stdout.fnmatch_lines_random([*names, "*not today"])
    result.stdout.fnmatch_lines(
        [
            "E*RankFailure: rank 1 of 2: AssertionError: only rank 0 is fine",
            "*assert ranks.rank == 0*",
            "*assert 1 == 0",
            "[[]rank 0[]] printed by 0",
            "[[]rank 1[]] printed by 1",
        ]
    )
    chosen = pytester.runpytest("-k", "ranks2-b", "-p", "no:cacheprovider")
    chosen.assert_outcomes(passed=1, deselected=5)


@distributed_test(world_size=1)
def tell_where(path: str) -> None:
    about = [os.environ.get("TOKENYARD_TEST_WORD"), os.getcwd(), str(os.getsid(0) == os.getpid())]
    Path(path).write_text(" ".join(map(str, about)))


def test_workers_have_the_surroundings_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they are forks of a server that is older; and each has a session of its own."""
    report = tmp_path / "report"
    for word in ("one", "two"):
        monkeypatch.setenv("TOKENYARD_TEST_WORD", word)
        (tmp_path / word).mkdir()
        monkeypatch.chdir(tmp_path / word)
        new = Pools()
        monkeypatch.setattr(decorators, "pools", lambda new=new: new)
        tell_where(str(report))
        assert report.read_text() == f"{word} {tmp_path / word} True"
        new.close()


@distributed_test(world_size=1)
def note_process(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


@distributed_test(world_size=1, pool="of its own")
def note_own_process(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


def test_a_named_pool_shares_no_process(tmp_path: Path) -> None:
    path, seen = tmp_path / "pid", list[str]()
    for body in (note_process, note_own_process) * 2:
        body(str(path))
        seen.append(path.read_text())
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_the_server_is_whole_when_it_forks() -> None:
    """It has one thread: a fork has no other."""
    tell_where("/dev/null")
    tasks = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/task")  # type: ignore[attr-defined]
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1


SCRIPT = """
import fcntl, os, signal, sys, time
from tokenyard.testing import Ranks, distributed_test

@distributed_test(world_size=1)
def hold(path, ranks):
    global handle
    handle = open(path, "a")
    fcntl.flock(handle, fcntl.LOCK_EX)

@distributed_test(world_size=1)
def kill_and_hang(parent):
    os.kill(parent, signal.SIGKILL)
    time.sleep(1000)

if __name__ == "__main__":
    assert "pytest" not in sys.modules
    hold(sys.argv[1])
    print("held", flush=True)
    END
"""


@pytest.mark.parametrize(
    "end",
    ["kill_and_hang(os.getpid())", "os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["in a body", "between bodies"],
)
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, end: str) -> None:
    script, lock = tmp_path / "script.py", tmp_path / "lock"
    script.write_text(SCRIPT.replace("END", end))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script, lock], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-9, "held\n"), done.stderr
    with lock.open() as handle:
        for _ in range(600):
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
    pytest.fail("the worker still holds its lock 60 s after the test process was killed")


def test_importing_the_kit_starts_nothing() -> None:
    check = (
        "import sys, threading, tokenyard.testing; print('pytest' in sys.modules, "
        "threading.active_count())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "1"]
