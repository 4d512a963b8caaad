"""Votes and verdicts of ranks that leave an epoch: threads on one store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tokenyard import survivors
from tokenyard.errors import RankExpelled, StoreLost
from tokenyard.survivors import Vote, admitted, settle

LONG = 600.0
FINE = Vote(1, "", "")


def together(store: dist.Store, members: list[int], votes: dict[int, Vote]) -> list[Any]:
    """What :func:`settle` returns to each voter."""
    with ThreadPoolExecutor(len(votes)) as pool:
        begun = [pool.submit(settle, store, rank, members, LONG, votes[rank]) for rank in votes]
        return [each.result() for each in begun]


def test_a_rank_that_all_take_for_dead_is_left_out() -> None:
    """Everybody reads the same, at once; whoever comes later is expelled, as often as it asks."""
    store, votes = dist.HashStore(), {0: FINE, 2: Vote(-1, "", "[[0, 1]]"), 3: FINE}
    assert together(store, [0, 1, 2, 3], votes) == [votes] * 3
    for _ in range(2):
        with pytest.raises(RankExpelled, match="ranks 0, 2, 3 have recovered without rank 1") as e:
            settle(store, 1, [0, 1, 2, 3], LONG, Vote(0, "", ""))
        assert e.value.survivors == (0, 2, 3)
    changed = settle(store, 0, [0, 1, 2, 3], LONG, Vote(2, "no", ""))
    assert changed == votes  # a vote is written once


def test_all_of_them_go_on_if_the_suspect_votes_too() -> None:
    votes = {0: Vote(1, "", ""), 1: Vote(0, "", ""), 2: FINE}
    assert together(dist.HashStore(), [0, 1, 2], votes) == [votes] * 3


def test_a_suspect_that_reported_another_is_waited_for(monkeypatch: Any) -> None:
    """Whoever gives up on somebody else lives; one that reports itself has left."""
    monkeypatch.setattr(survivors, "GRACE", 0.0)
    store = dist.HashStore()
    store.set("failure/1", "0 rank 0 sent nothing to rank 1")
    began = time.monotonic()
    assert list(settle(store, 0, [0, 1], 1.0, FINE)) == [0]
    assert time.monotonic() - began >= 1.0
    store = dist.HashStore()
    store.set("failure/1", "1 rank 1 had closed its ExpertParallel")
    assert list(settle(store, 0, [0, 1], LONG, FINE)) == [0]


def test_nobody_is_left_out_unless_a_voter_names_it(monkeypatch: Any) -> None:
    """At once, however short the timeout is; nor is a store gone that does not answer at once."""
    monkeypatch.setattr(survivors, "LEAST", 4.0)
    store = dist.HashStore()
    began = time.monotonic()
    assert list(settle(store, 0, [0, 1, 2], 0.05, FINE)) == [0]
    assert time.monotonic() - began >= 4.0  # rank 2, which nobody suspects, had all that time


def test_whoever_was_stopped_in_an_admission_is_left_behind() -> None:
    store = dist.HashStore()
    store.set("verdict", admitted([0, 1, 2]))
    with pytest.raises(RankExpelled, match="ranks 0, 2 have recovered without rank 1"):
        settle(store, 1, [0, 1], LONG, FINE)


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '["x", "", ""]', "\xff", json.dumps([1] * 9)])
def test_votes_that_cannot_be_read_are_refusals(text: str) -> None:
    store = dist.HashStore()
    store.set("vote/1", text or "null")
    assert "cannot be read" in settle(store, 0, [0, 1], LONG, FINE)[1].refusal


class Broken(dist.HashStore):
    """A store that answers a few questions and then does ``deed``."""

    def __init__(self, answers: int, deed: Callable[[], None]) -> None:
        super().__init__()
        self.left, self._deed = answers, deed

    def check(self, keys: list[str]) -> bool:
        self.left -= 1
        if self.left < 0:
            self._deed()
        return super().check(keys)


def _reset() -> None:
    raise dist.DistNetworkError("Connection reset by peer. And more")


def test_a_store_that_is_lost(monkeypatch: Any) -> None:
    monkeypatch.setattr(survivors, "LEAST", 0.3)
    for answers in (0, 1, 5):
        with pytest.raises(StoreLost, match=r"rank 0 .* the store is gone \(Connection reset by"):
            settle(Broken(answers, _reset), 0, [0, 1], LONG, FINE)
        with pytest.raises(StoreLost, match=r"it has not answered for 0.3 s.*torchrun's agent"):
            settle(Broken(answers, lambda: time.sleep(2.0)), 0, [0, 1], 0.05, FINE)
