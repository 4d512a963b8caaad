"""How the ranks of one ``ExpertParallel`` agree on who is left, through its store.

The life of an object is a row of *epochs*, each with its members; epoch 0 has all ranks. Every
epoch has a part of the store of its own, with the reports of who gave up in it
(``engines/failures.py``), the meeting of its connections, and, once it has failed, the votes on
the next one:

- ``vote/r``: member r has given up this epoch. It says whom it takes for dead (-1: unknown), why
  it refuses its arguments, and its table of replicas. A vote is written once.
- ``verdict``: the members of the next epoch. Written once, atomically (compare and set), by any
  voter, as the list of those whose votes it has read. A voter writes it when all members have
  voted; or when only those are missing whom a voter takes for dead, and for :data:`GRACE` seconds
  longer (not if such a rank has reported another as failed: then it lives); or when it has waited
  for its timeout, and for :data:`LEAST` seconds.

So: (1) There is one verdict per epoch, and everybody who reads one reads the same: no split brain,
whatever the ranks think of each other. Whom the store cannot be reached by goes on nowhere. (2)
Everybody in the verdict has voted, so it has left the epoch: it makes no call in it any more. (3) A
rank that votes too late, or is not seen, finds a verdict without itself: :class:`RankExpelled`. (4)
Nobody waits for longer than that, plus the time of a question to the store. (5) If a member
of the verdict dies before the new connections are made, all others notice that in making them, or
in the first call. They vote again in the new epoch's part, with fewer ranks at each turn.

A stale message is never read as a new one. Rows and headers come over the connections of an epoch,
which are made under a name that the store gives out once, by exactly its members. Nobody sends into
those of epoch n + 1 before it has voted in n and read the verdict; connections of epoch n are not
read any more. Reports and votes are under the epoch's own prefix. A rank that sleeps through the
verdict can write into epoch n only, which nobody reads who has left it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from tokenyard.errors import RankExpelled, StoreLost
from tokenyard.memory.aside import SLICE, Aside
from tokenyard.memory.meeting import POLL
from tokenyard.memory.store import clock_of

GRACE = 0.5
"""Seconds that a rank which is taken for dead is given to show that it is not."""

LEAST = 1.0
"""Seconds to wait for votes at least: who waits for rows that another hands on gives up half a
second later than that one, however short the timeout is."""


class Vote(NamedTuple):
    """What a rank says when it leaves an epoch."""

    lost: int
    refusal: str
    replicas: str

    @staticmethod
    def read(text: bytes) -> Vote:
        """Another rank's vote; one that cannot be read counts as a refusal."""
        with suppress(ValueError, TypeError):
            lost, refusal, replicas = json.loads(text)
            return Vote(int(lost), str(refusal), str(replicas))
        return Vote(-1, "its vote cannot be read; do all ranks run the same version?", "")


def store_of(part: dist.Store, epoch: int) -> dist.Store:
    """An epoch's own part of an object's ``part`` of the store."""
    return dist.PrefixStore(f"epoch/{epoch}", part) if epoch else part


def admitted(members: list[int]) -> str:
    """The verdict of an epoch whose members have admitted a rank, and go on elsewhere."""
    return " ".join(map(str, members)) + " elsewhere"


def settle(
    store: dist.Store, rank: int, members: list[int], timeout: float, vote: Vote
) -> dict[int, Vote]:
    """Leave the epoch of ``store`` with a ``vote``; the members of the next one, and their votes.
    RankExpelled: the others have gone on without this rank. StoreLost: the store does not answer.
    KeyboardInterrupt: this rank takes no further part in the verdict."""
    if clock_of(store)[2]:  # there only one thread may run
        return _vote(store, rank, members, timeout, vote, lambda: None)
    answered, ended, aside = [time.monotonic()], threading.Event(), Aside()
    patience = max(timeout, LEAST)

    def pulse() -> None:
        answered[0] = time.monotonic()
        if ended.is_set():
            raise RuntimeError("nobody waits for this verdict any more")

    begun = aside.start(partial(_vote, store, rank, members, timeout, vote, pulse))
    aside.close()  # it ends behind the call
    try:
        while not begun.wait(SLICE):
            if time.monotonic() - answered[0] > patience:
                raise _gone(rank, f"it has not answered for {patience} s")
        return begun.result()
    except dist.DistError as error:
        raise _gone(rank, str(error).split(".")[0]) from error
    finally:
        ended.set()


def _gone(rank: int, why: str) -> StoreLost:
    return StoreLost(
        f"rank {rank} cannot agree with the others on who is left: the store is gone ({why}). It "
        f"is held by rank 0's process unless it was made elsewhere: torchrun's agent holds it, or "
        f"pass init_process_group(store=) one of a process that outlives all ranks"
    )


def _vote(
    store: Any, rank: int, members: list[int], timeout: float, vote: Vote, pulse: Callable[[], None]
) -> dict[int, Vote]:
    store.compare_set(f"vote/{rank}", "", json.dumps(vote))
    votes: dict[int, Vote] = {}
    clock, sleep, _ = clock_of(store)
    deadline, silent_since, pause = clock() + max(timeout, LEAST), None, 0.0005
    while not store.check(["verdict"]):
        pulse()
        for peer in members:
            if peer not in votes and store.check([f"vote/{peer}"]):
                votes[peer] = Vote.read(store.get(f"vote/{peer}"))
        now = clock()
        missing = [peer for peer in members if peer not in votes]
        silent = _are_silent(store, missing, {each.lost for each in votes.values()})
        silent_since = (silent_since or now) if silent else None
        over = not missing or now >= deadline
        if over or (silent_since is not None and now - silent_since >= GRACE):
            store.compare_set("verdict", "", " ".join(map(str, sorted(votes))))
            continue
        sleep(pause)
        pause = min(2 * pause, POLL)
    words = store.get("verdict").decode().split()
    survivors = [peer for peer in members if str(peer) in words]
    if rank not in survivors or words[-1] == "elsewhere":
        others = tuple(int(word) for word in words if word.isdigit() and int(word) != rank)
        raise RankExpelled(
            f"ranks {', '.join(map(str, others))} have recovered without rank {rank}, which they "
            f"took for dead: it was silent for longer than their timeout ({timeout} s); start it "
            f"anew",
            others,
        )
    return {peer: Vote.read(store.get(f"vote/{peer}")) for peer in survivors}


def _are_silent(store: Any, missing: list[int], suspects: set[int]) -> bool:
    """Whether each of the ``missing`` is taken for dead, and has not said that another is."""
    for peer in missing:
        if peer not in suspects:
            return False
        key = f"failure/{peer}"
        if store.check([key]) and store.get(key).split(b" ", 1)[0] != str(peer).encode():
            return False
    return True
