"""Constructions meet in rounds (``rendezvous.py``): what ranks did before never keeps them from the
next attempt of all.

The explorer runs ranks as threads that take turns at every operation of the store, by seed. A wait
may end at any turn, and an interrupt may strike at any operation, also while a rank is leaving.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from bad_input import assert_works, check, error_of, make, meet
from rank_threads import run_threads
from tokenyard.errors import Mismatch, PeerError, PeerTimeout
from tokenyard.memory.meeting import Round, wait_for
from tokenyard.memory.store import CooperativeStore
from tokenyard.rendezvous import agree
from tokenyard.testing import Ranks, distributed_test

PATIENCE = 600.0


def together(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """``body(rank)`` on a thread of each rank; results by rank."""
    return run_threads(world_size, body, lambda rank, why: None, 2 * PATIENCE)


class Turns:
    """Lets one of several threads run at a time: at each turn the choice says which, and whether
    something befalls it.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.hostile = True
        self._turn = threading.Condition()
        self._ready: dict[int, Callable[[], bool]] = {}
        self._ends: set[int] = set()
        self._running = world_size
        self._next: int | None = None
        self._ranks = threading.local()
        self.stuck = False

    def begin(self, rank: int) -> None:
        self._ranks.rank = rank
        self.pass_on(lambda: True)

    def pass_on(self, ready: Callable[[], bool], ends: bool = False) -> None:
        """Let others run; back when chosen, which is once ``ready()``, or if it ``ends`` when
        nobody else can go on.
        """
        with self._turn:
            me = self._ranks.rank
            self._ready[me] = ready
            if ends:
                self._ends.add(me)
            self._choose()
            self._turn.wait_for(lambda: self._next == me or self.stuck)
            del self._ready[me]
            self._ends.discard(me)
            self._next = None
            if self.stuck:
                raise AssertionError("all ranks wait for ever")

    def end(self) -> None:
        with self._turn:
            self._running -= 1
            self._choose()

    def _choose(self) -> None:
        if len(self._ready) < self._running or not self._ready:
            return
        able = [rank for rank, ready in sorted(self._ready.items()) if ready()] or sorted(
            self._ends
        )
        self.stuck = not able
        self._next = self.random.choice(able) if able else None
        self._turn.notify_all()

    @property
    def struck(self) -> bool:
        """Whether this rank was interrupted in this attempt."""
        return getattr(self._ranks, "struck", False)

    @struck.setter
    def struck(self, value: bool) -> None:
        self._ranks.struck = value

    def befalls(self, chance: float) -> bool:
        return self.hostile and self.random.random() < chance


class Explored(CooperativeStore):
    """Every operation is a turn. While the turns are hostile, waits end at any time and operations
    are interrupted.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__(lambda: None)
        self.turns = turns

    def _step(self) -> None:
        self.turns.pass_on(lambda: True)
        if self.turns.befalls(0.02) and not self.turns.struck:
            self.turns.struck = True
            raise KeyboardInterrupt

    def set(self, key: str, value: str | bytes) -> None:
        self._step()
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        self._step()
        total = int(self._values.get(key, b"0")) + value
        super().set(key, str(total))
        return total

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        self._step()
        expected = (
            expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        )
        if self._values.get(key, b"") == expected:
            super().set(key, desired_value)
        return self._values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        self._step()
        return super().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        ended = self.turns.befalls(0.3)
        self.turns.pass_on(
            lambda: ended or all(key in self._values for key in keys), ends=self.turns.hostile
        )
        if not all(key in self._values for key in keys):
            raise dist.DistStoreError("wait timeout")


def attempt(
    store: dist.Store, rank: int, world_size: int, word: str, refusal: str = ""
) -> tuple[str, Any]:
    """How an attempt ends: the part that it may work in and everybody's word, or the kind
    of error.
    """
    try:
        part, words = agree(store, rank, world_size, {"hidden": 64}, refusal, PATIENCE, word)
        if refusal:
            return "refused", ""
        return part.compare_set(
            "name", "", word
        ).decode(), words  # one name for all that have this part
    except (PeerTimeout, PeerError) as error:
        return type(error).__name__, str(error)
    except KeyboardInterrupt:
        return "interrupted", ""


@pytest.mark.parametrize("world_size", [2, 3])
def test_whatever_happened_before_the_next_attempt_of_all_works(world_size: int) -> None:
    """And whoever goes on before that does so with all others, in one round."""
    told: set[str] = set()
    for seed in range(250):
        turns = Turns(world_size, seed)
        store, met = Explored(turns), [0]

        def body(
            rank: int, turns: Turns = turns, store: Explored = store, met: list[int] = met
        ) -> list[Any]:
            turns.begin(rank)
            try:
                done: list[Any] = []
                for number in range(turns.random.randrange(4)):
                    refusal = "I refuse" if turns.befalls(0.2) else ""
                    done.append(attempt(store, rank, world_size, f"{rank}.{number}", refusal))
                met[0] += 1
                turns.pass_on(lambda: met[0] == world_size)
                turns.hostile = False
                for number in range(3):  # back to back, the fast ahead of the slow
                    done.append(attempt(store, rank, world_size, f"{rank} at last {number}"))
                return done
            finally:
                turns.end()

        ended = together(world_size, body)
        for number in (-3, -2, -1):
            last = {str(done[number]) for done in ended}
            assert len(last) == 1 and "'0 at last" in last.pop(), (seed, ended)
        parts: dict[str, list[Any]] = {}
        for done in ended:
            for kind, words in done:
                told.add(kind if isinstance(words, str) else "worked")
                if not isinstance(words, str):
                    parts.setdefault(kind, []).append(words)
        for words in parts.values():
            assert all(each == words[0] for each in words), (seed, ended)
        left = [key for key in store._values if "verdict" in key]
        assert len(left) == 1, (seed, left)  # earlier rounds are forgotten
    assert told == {"worked", "PeerTimeout", "PeerError", "interrupted", "refused"}


def test_the_example_of_the_docstring() -> None:
    """And what a round left is gone once everybody has come to a later one."""
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(
            PeerTimeout,
            match=rf"rank {rank} waited 0.05 s at ExpertParallel.*rank\(s\) {1 - rank}:",
        ):
            agree(store, rank, 2, {}, "", 0.05)
    for _ in range(3):
        made = together(2, lambda rank: agree(store, rank, 2, {}, "", PATIENCE, f"host {rank}"))
        assert [hosts for _, hosts in made] == [["host 0", "host 1"]] * 2
    made[0][0].set("mine", "")
    assert made[1][0].check(["mine"])
    assert store.compare_set("round", "", "") == b"6"
    left = [
        store.check([f"round/{number}/{key}"])
        for number in range(7)
        for key in ("verdict", "here", "0", "1")
    ]
    assert left == [False] * 20 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("patience", [0.05, PATIENCE, float("nan"), "soon", None], ids=repr)
def test_a_rank_that_refuses_alone(patience: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the others, as long as it makes sense to; they are told, and later attempts go
    their own way.
    """
    monkeypatch.setattr("tokenyard.rendezvous.REFUSAL_WAIT", 0.2)
    store = dist.HashStore()
    assert agree(store, 1, 2, {}, "E is 0", patience)[1] == []
    with pytest.raises(
        PeerTimeout, match=r"rank 1 had given up an attempt before this one: E is 0"
    ):
        agree(store, 0, 2, {}, "", 0.05)
    assert [
        hosts for _, hosts in together(2, lambda rank: agree(store, rank, 2, {}, "", PATIENCE, "h"))
    ] == [["h"] * 2] * 2
    monkeypatch.undo()

    def body(rank: int) -> Any:
        try:
            return agree(store, rank, 2, {}, "E is 0" if rank else "", PATIENCE)[1]
        except PeerError as error:
            return str(error)

    assert together(2, body) == ["rank 1 could not make its ExpertParallel: E is 0", []]


def test_who_waits_learns_at_once_that_another_has_given_up() -> None:
    """Not after its own timeout; and both name the rank that did not come."""
    store, errors = dist.HashStore(), []

    def body(rank: int) -> None:
        if rank < 2:
            with pytest.raises(PeerTimeout) as lost:
                agree(store, rank, 3, {}, "", 0.3 if rank == 0 else 1e6)
            errors.append(lost.value)

    together(3, body)
    assert [error.rank for error in errors] == [2, 2]
    assert any(str(error).startswith("rank 1 came to ExpertParallel(...), but rank 0 has given up "
                                     "waiting there for rank(s) 2")
               for error in errors)  # fmt: skip


def test_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives up when all have just come does not; and the last one to come completes nothing
    that was given up.
    """
    store = dist.HashStore()
    one, other = Round(store, 0, 2), Round(store, 1, 2)

    def too_late(*_: Any) -> bool:
        """Rank 0 has looked for the last time, and only then rank 1 comes."""
        monkeypatch.undo()
        assert other.come("the test", "b", PATIENCE) == ["a", "b"]
        return False

    monkeypatch.setattr("tokenyard.memory.meeting.wait_for", too_late)
    assert one.come("the test", "a", PATIENCE) == ["a", "b"]
    assert one.given_up_by() is None
    one.forget()
    assert store.num_keys() == 0
    with pytest.raises(PeerTimeout, match=r"rank 0 waited 0.01 s at the test for rank\(s\) 1:"):
        one.come("the test", "a", 0.01)
    with pytest.raises(
        PeerTimeout, match="rank 1 came to the test, but rank 0 has given up waiting there"
    ):
        other.come("the test", "b", PATIENCE)
    assert one.given_up_by() == 0


def test_an_interrupt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits with the interrupted rank (for rank 3) raises at once, and the next attempt
    works.
    """
    store = dist.HashStore()

    def wait(part: dist.Store, key: str, timeout: float) -> bool:
        if timeout == PATIENCE:  # of rank 2, which comes once both others wait
            assert wait_for(store, "round/1/0", PATIENCE) and wait_for(store, "round/1/1", PATIENCE)
            raise KeyboardInterrupt
        return wait_for(part, key, timeout)

    def body(rank: int) -> str:
        with pytest.raises((KeyboardInterrupt, PeerTimeout)) as stopped:
            agree(store, rank, 4, {}, "", PATIENCE if rank == 2 else 1e6)
        return repr(stopped.value)

    monkeypatch.setattr("tokenyard.memory.meeting.wait_for", wait)
    said = together(3, body)
    assert said[2] == "KeyboardInterrupt()"
    assert all("rank 2 has given up waiting there" in each for each in said[:2]), said
    monkeypatch.undo()
    assert [
        hosts for _, hosts in together(4, lambda rank: agree(store, rank, 4, {}, "", PATIENCE))
    ] == [[""] * 4] * 4


def test_a_rank_that_was_stopped_before_it_could_say_so() -> None:
    """By a second Ctrl-C, say. It finds its mark and gives that round up: nobody goes on with its
    earlier self.
    """
    store = dist.HashStore()
    store.set("round", "1")
    store.set("round/1/0", '{"refusal": "", "host": "long ago"}')
    store.add("round/1/here", 1)

    def body(rank: int) -> list[str]:
        if rank == 1:
            assert wait_for(store, "round/2/0", PATIENCE)
        return agree(store, rank, 2, {}, "", PATIENCE, "now")[1]

    assert together(2, body) == [["now", "now"]] * 2


def test_ranks_that_disagree_can_try_again() -> None:
    store = dist.HashStore()

    def body(rank: int) -> str:
        with pytest.raises(Mismatch, match="hidden: rank 0 says 0, rank 1 says 1"):
            agree(store, rank, 2, {"hidden": rank}, "", PATIENCE)
        return agree(store, rank, 2, {"hidden": 8}, "", PATIENCE, "h")[1]  # pyright: ignore

    assert together(2, body) == [["h", "h"]] * 2


def lone(ranks: Ranks, way: str) -> None:
    """One rank's attempt at an object that no other rank makes."""
    if way == "times out":
        check(
            error_of(lambda: make(ranks, timeout=0.2)),
            PeerTimeout,
            "ExpertParallel(...)",
            "every rank of the group",
        )
    elif way == "refuses":
        check(
            error_of(lambda: make(ranks, timeout=0.2, num_experts=0)), ValueError, "num_experts (0)"
        )
    else:
        alarm = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        alarm.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                make(ranks, timeout=1e6)
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "ways",
    [["times out"], ["refuses"], ["is interrupted"], ["times out", "refuses", "times out"]],
    ids=str,
)
@distributed_test(world_size=3)
def test_a_group_recovers_from_ranks_that_tried_alone(ranks: Ranks, ways: list[str]) -> None:
    """Each way, on different ranks in turn, on all ranks of a subgroup too; then all make objects,
    back to back.
    """
    pair: Any = dist.new_group([0, 2], backend="gloo")
    for at, way in enumerate(ways):
        for rank in (at % 3, 2):
            if ranks.rank == rank:
                lone(ranks, way)
            meet(ranks)
    if ranks.rank == 2:
        check(
            error_of(lambda: make(ranks, pair, timeout=0.1)),
            PeerTimeout,
            "rank 1 waited",
            "rank(s) 0",
        )
    meet(ranks)
    with make(ranks) as one, make(ranks) as two:
        assert_works(ranks, two)
        assert_works(ranks, one)
    if ranks.rank != 1:
        with make(ranks, pair, timeout=20.0) as few:
            assert_works(ranks, few)
    check(error_of(lambda: make(ranks, hidden=8 * (1 + ranks.rank))), Mismatch, "hidden")
    with make(ranks) as last:
        assert_works(ranks, last)
