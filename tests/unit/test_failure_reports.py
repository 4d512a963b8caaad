"""Reports of ranks that gave up: what is asked of a store, and what is not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from tokenyard.engines import failures, gloo_transport
from tokenyard.engines.failures import FailureReports
from tokenyard.memory.store import leave


class Gone(dist.HashStore):
    """A store whose process ends while it is in use; counts the questions that it does not
    answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.unanswered = True, 0

    def _answer(self) -> None:
        if not self.alive:
            self.unanswered += 1
            raise dist.DistNetworkError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return super().check(keys)

    def set(self, key: str, value: Any) -> None:
        self._answer()
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        self._answer()
        return super().add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self._answer()
        return super().compare_set(key, expected_value, desired_value)


def test_a_store_that_is_gone_is_asked_once(monkeypatch: Any) -> None:
    """For every question torch prints a page to stderr, four a second while a rank waits."""
    monkeypatch.setattr(failures, "LOOK", 0.0)
    store = Gone()
    mine = FailureReports(store, 0, 0.5)
    store.alive = False
    until = time.monotonic() + 60
    while not store.unanswered and time.monotonic() < until:
        assert mine.heard() is None
        time.sleep(0.01)
    assert store.unanswered == 1
    for _ in range(20):
        assert mine.heard() is None
        time.sleep(0.01)
    mine.waits_in("dispatch #0")
    mine.report("rank 1 sent nothing to rank 0", 1)
    mine.close()
    leave(store, 2)
    assert store.unanswered == 1


def test_a_call_that_has_failed_is_waited_in_no_more() -> None:
    """Of an object whose call failed, so that another was made: who asks why the process is silent
    hears of the failed call until the next good one, and of nothing then."""
    base = dist.HashStore()
    old, new = (FailureReports(dist.PrefixStore(name, base), 0, 30.0) for name in "ab")
    asking = FailureReports(dist.PrefixStore("b", base), 1, 30.0)
    old.waits_in("dispatch #2, counts")
    old.stops_waiting()
    assert old.first() is None  # behind what it tells
    assert asking.elsewhere(0) == "dispatch #2, counts"
    new.waits_in("")
    assert new.first() is None
    assert asking.elsewhere(0) == ""
    for each in (old, new, asking):
        each.close()


def test_who_runs_out_of_file_descriptors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_transport.os, "listdir", lambda _: ["1"] * 1000)
    for most, peers, told in ((1024, 2, True), (1900, 252, False), (-1, 2, False)):
        monkeypatch.setattr(gloo_transport.resource, "getrlimit", lambda _, most=most: (most, most))
        text = gloo_transport._lack_of_files(peers)
        assert ("1000 of its 1024 file descriptors" in text) is told, (most, peers, text)
