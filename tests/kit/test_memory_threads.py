"""Ranks as threads meet, hand over values, give up together, and end."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from one_gpu import ENVIRONMENT, run_virtual_ranks, virtual_environment
from rank_threads import Gate, ThreadsFailed, run_threads
from tokenyard.errors import PeerLost, PeerTimeout
from tokenyard.memory.meeting import Meeting, check_sizes


def together(world_size: int, body: Callable[[int, Gate], Any], timeout: float = 20.0) -> list[Any]:
    gate = Gate(world_size)
    return run_threads(world_size, lambda rank: body(rank, gate), gate.lose, timeout)


def test_values_pass_the_gate_many_times() -> None:
    def body(rank: int, gate: Gate) -> list[list[int]]:
        return [gate.meet(rank, "the test", 10, 100 * turn + rank) for turn in range(200)]

    expected = [[100 * turn + rank for rank in range(3)] for turn in range(200)]
    assert together(3, body) == [expected] * 3


def test_who_is_late_is_named_and_all_give_up() -> None:
    """Rank 2 comes after rank 0 has given up, and learns it at once; rank 1, which would wait
    longer, too.
    """
    gave_up = threading.Event()

    def body(rank: int, gate: Gate) -> str:
        if rank == 2:
            gave_up.wait(10)
        try:
            gate.meet(rank, "the test", 0.05 if rank == 0 else 10)
        except PeerTimeout as error:
            return f"{type(error).__name__} {error.rank}: {error}"
        finally:
            if rank == 0:
                gave_up.set()
        return "passed"

    first, patient, late = together(3, body)
    assert first.startswith("PeerTimeout ")
    assert "rank 0 waited 0.05 s at the test for rank(s)" in first
    assert late == "PeerTimeout 0: rank 2 came to the test, but rank 0 has given up waiting there"
    assert patient.endswith("came to the test, but rank 0 has given up waiting there")


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    def body(rank: int, gate: Gate) -> None:
        gate.meet(rank, "the first", 600)
        if rank == 1:
            raise KeyError("of rank 1")
        gate.meet(rank, "the second", 600)

    with pytest.raises(ThreadsFailed, match="2 rank\\(s\\) failed") as failed:
        together(2, body)
    errors = failed.value.errors
    assert list(errors) == [1, 0]
    assert isinstance(errors[1], KeyError)
    assert isinstance(errors[0], PeerLost)
    assert errors[0].rank == 1
    assert str(errors[0]) == "rank 0 waits at the second, but rank 1 failed: KeyError('of rank 1')"


def test_a_rank_that_passed_and_ended_is_not_missed() -> None:
    def body(rank: int, gate: Gate) -> list[int]:
        return gate.meet(rank, "the only gate", 10, rank)

    for _ in range(50):
        assert together(4, body) == [[0, 1, 2, 3]] * 4


def test_a_stuck_rank_is_shown_not_waited_for() -> None:
    release = threading.Event()

    def body(rank: int, gate: Gate) -> None:
        if rank == 1:
            release.wait(30)

    try:
        with pytest.raises(
            ThreadsFailed, match=r"rank 1 still runs after 0.05 s:(?s:.)*release\.wait"
        ) as failed:
            together(2, body, timeout=0.05)
        assert failed.value.errors == {}
    finally:
        release.set()


def test_members_of_more_ranks_meet() -> None:
    """Nobody waits for rank 1; errors name ranks, not places."""
    store, gate = dist.HashStore(), Gate(3, [0, 2])

    def body(rank: int, _: Gate) -> list[Any]:
        if rank == 1:
            return []
        meeting = Meeting(store, rank, [0, 2], 10.0)
        found: list[Any] = [meeting.exchange("the test", str(rank))]
        found.append(gate.meet(rank, "the test", 10, 10 * rank))
        for call in (
            lambda: meeting.same_size(16 + 16 * rank),
            lambda: meeting.attempt("making it", fail if rank == 2 else int),
        ):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                call()
            found.append(str(caught.value))
        if rank == 0:
            with pytest.raises(PeerTimeout) as late:
                gate.meet(0, "the end", 0.05)
            found.append(late.value.rank)
        return found

    def fail() -> int:
        raise OSError("no room")

    sizes = "ranks ask for regions of different sizes: rank 0 16 bytes, rank 2 48"
    failed = "making it failed on rank 2: no room"
    want = [["0", "2"], [0, None, 20], sizes, failed]
    assert together(3, body) == [[*want, 2], [], want]


def test_meetings_through_a_store() -> None:
    store = dist.HashStore()

    def body(rank: int, gate: Gate) -> list[list[str]]:
        meeting = Meeting(store, rank, 3, 10.0)
        words = [meeting.exchange("the test", f"{turn} {rank}") for turn in range(20)]
        return [*words, meeting.same_size(32, "spaces stay " * rank)]

    expected = [[f"{turn} {rank}" for rank in range(3)] for turn in range(20)]
    assert together(3, body) == [[*expected, ["spaces stay " * rank for rank in range(3)]]] * 3


def test_a_meeting_that_fails_fails_for_all() -> None:
    store, gave_up = dist.HashStore(), threading.Event()

    def body(rank: int, gate: Gate) -> str:
        if rank == 1:
            gave_up.wait(10)
        try:
            Meeting(store, rank, 2, 0.05).exchange("the test")
        except PeerTimeout as error:
            return f"{error.rank}: {error}"
        finally:
            gave_up.set()
        return "passed"

    first, late = together(2, body)
    assert first.startswith("1: rank 0 waited 0.05 s at the test for rank(s) 1:")
    assert late == "0: rank 1 came to the test, but rank 0 has given up waiting there"


def test_what_fails_on_one_rank_fails_on_all() -> None:
    store = dist.HashStore()

    def body(rank: int, gate: Gate) -> list[str]:
        meeting = Meeting(store, rank, 3, 10.0)
        said: list[str] = []
        for failed in (torch.OutOfMemoryError("none left"), OSError("no space"), RuntimeError()):

            def step(failed: Exception = failed) -> str:
                if rank == 1:
                    raise failed
                return "made"

            try:
                said.append(meeting.attempt("making it", step, ". Do this"))
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")
        return [*said, meeting.attempt("making it", lambda: f"made by {rank}")]

    elsewhere = [
        f"RuntimeError: making it failed on rank 1: {text}. Do this"
        for text in ("none left", "no space", "RuntimeError")
    ]
    here = ["OutOfMemoryError: none left", elsewhere[1], "RuntimeError: "]
    expected = [elsewhere, here, elsewhere]
    assert together(3, body) == [[*each, f"made by {rank}"] for rank, each in enumerate(expected)]


def test_what_failed_here_is_told_with_who_is_missing() -> None:
    """And what was made is let go of, though somebody keeps the error."""
    store, kept = dist.HashStore(), []

    class Thing: ...

    def body(rank: int, gate: Gate) -> str:
        if rank == 2:
            return "dead"

        def step() -> Thing:
            if rank == 0:
                raise RuntimeError("none left")
            kept.append(weakref.ref(thing := Thing()))
            return thing

        try:
            Meeting(store, rank, 3, 1.0).attempt("making it", step)
        except PeerTimeout as error:
            assert rank == 0 or kept[0]() is None
            return str(error)
        return "passed"

    failed, fine, _ = together(3, body)
    assert failed.endswith("; making it failed on rank 0: none left")
    assert "making it" in fine and "none left" not in fine


def test_sizes() -> None:
    check_sizes([16, 16])
    with pytest.raises(ValueError, match="rank 0 16 bytes, rank 2 32"):
        check_sizes([16, 16, 32])
    for size in (0, -16, 24):
        with pytest.raises(
            ValueError, match=rf"num_bytes \({size}\) must be a positive multiple of 16"
        ):
            check_sizes([size])


def test_virtual_ranks_need_their_environment_before_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        RuntimeError, match="CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER"
    ):
        virtual_environment()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    with pytest.raises(RuntimeError, match="without CUDA_DEVICE_MAX_CONNECTIONS=32, so"):
        virtual_environment()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    virtual_environment()
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    virtual_environment()


@pytest.mark.parametrize("world_size", [0, 33])
def test_virtual_ranks_are_as_many_as_streams(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size \({world_size}\) must be in 1\.\.32"):
        run_virtual_ranks(world_size, lambda group: None)
