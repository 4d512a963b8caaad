"""Which rank failed first when ranks give up on each other; ranks tell it through the store."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from tokenyard.errors import PeerLost
from tokenyard.memory.aside import Aside, Begun
from tokenyard.memory.meeting import wait_for
from tokenyard.memory.store import CooperativeStore, base_of, gone

GRACE = 1.0
"""Seconds that a rank which gives up at this very moment is given to say so."""

LOOK = 0.25
"""Seconds between two looks for reports of a rank that waits."""

PATIENCE = 2.0
"""Seconds that the store is given to answer besides: the process that holds it may be stopped."""

ADVICE = (
    "If it is only slow, raise timeout= of ExpertParallel. Else see what it does: every rank must "
    "make the same calls in the same order, also of different objects"
)
"""What to do about a silent rank."""

IN_ORDER = "had closed its ExpertParallel: every rank makes all calls before it closes"

_TOKEN, _OBJECTS = secrets.token_hex(6), count()

_T = TypeVar("_T")


def _process() -> str:
    """A name of this process, other than those of its forks and of processes on other hosts."""
    return f"{os.getpid()}-{_TOKEN}"


class Report(NamedTuple):
    """Why a rank has given up."""

    rank: int
    text: str
    failed_rank: int

    def to(self, rank: int, where: str) -> PeerLost:
        """What ``rank`` raises, which is at ``where`` and cannot finish either."""
        text = f"rank {self.rank} gave up while rank {rank} was in {where}"
        return PeerLost(f"{text}; it had reported: {self.text}", self.failed_rank)


class FailureReports:
    """Reports of ranks that gave up, one per rank; whoever has none did not give up but was lost.

    The store (of this object alone) is asked on another thread, as it may block: who waits for it
    here can be interrupted. ``timeout`` of the object, in seconds, bounds the grace.
    """

    _failed_in = False
    """Whether what :meth:`waits_in` told last, of any object of this process, is of a call that has
    failed since."""

    def __init__(self, store: dist.Store, rank: int, timeout: float) -> None:
        self._store, self._rank, self._grace = store, rank, min(GRACE, timeout)
        self._base = base_of(store)  # what all objects share
        # There only one thread may run.
        self._aside = None if isinstance(self._base, CooperativeStore) else Aside()
        self._number = next(_OBJECTS)
        self._look: Begun | None = None
        self._looked, self._tells = 0.0, False
        if self._aside is not None:
            store.set(f"process/{rank}", f"{_process()} {self._number}")

    def report(self, text: str, failed_rank: int) -> None:
        """Tell the others, before letting go of anything, that this rank gave up on that one."""

        def tell() -> None:
            self._store.set(f"failure/{self._rank}", f"{failed_rank} {text}")
            self._store.compare_set("failed", "", str(self._rank))

        self._ask(tell, None, self._grace)

    def behind(self, peer: int) -> tuple[str, int]:
        """What ``peer`` said of its end (or ""), and the failed rank that reports lead to."""
        return self._ask(lambda: self._behind(peer), ("", peer), self._grace + PATIENCE)

    def heard(self) -> Report | None:
        """The report of the first rank that gave up, if known; asks every :data:`LOOK` seconds."""
        if self._aside is None:
            return None
        found = self._look.result() if self._look is not None and self._look.over else None
        now = time.monotonic()
        again = self._look is None or (self._look.over and now - self._looked >= LOOK)
        if found is None and again:
            self._looked, self._look = now, self._aside.start(self._or_else(self._first, None))
        return found

    def first(self) -> Report | None:
        """The report of the first rank that gave up, as the store has it now."""
        return self._ask(self._first, None, self._grace + PATIENCE)

    def waits_in(self, what: str) -> None:
        """Tell other ranks, whatever they wait in, that this process waits in a call ("": no)."""
        if self._aside is not None and (what or self._tells or FailureReports._failed_in):
            self._tells, FailureReports._failed_in = bool(what), False
            key, text = f"tokenyard/waits/{_process()}", f"{self._number} {what}"
            self._aside.start(self._or_else(lambda: self._base.set(key, text), None))

    def stops_waiting(self) -> None:
        """The call in which this process :meth:`waits_in` has failed. Others that fail with it may
        still ask for it, so it is told before the next call is over."""
        FailureReports._failed_in |= self._tells
        self._tells = False

    def elsewhere(self, peer: int, here: bool = False) -> str:
        """In which call of another object (``here``: this one) ``peer`` waits; "" if unknown."""
        return self._ask(lambda: self._where(peer, here), "", self._grace)

    def close(self, why: str = IN_ORDER) -> None:
        """Tell the others ``why`` this rank closes, unless it has reported a failure."""
        key, rank = f"failure/{self._rank}", self._rank
        text = f"{rank} rank {rank} {why}"
        self._ask(lambda: self._store.compare_set(key, "", text), b"", self._grace)
        if self._aside is not None:
            self._aside.close()

    def _ask(self, question: Callable[[], _T], unknown: _T, seconds: float) -> _T:
        """What the store has to say; ``unknown`` if it does not answer."""
        if self._aside is None:
            return self._or_else(question, unknown)()
        begun = self._aside.start(self._or_else(question, unknown))
        return begun.result() if begun.wait(seconds) else unknown

    def _behind(self, peer: int) -> tuple[str, int]:
        with suppress(RuntimeError):
            wait_for(self._store, f"failure/{peer}", self._grace)  # a store's own prints warnings
        report, failed_rank = self._reported_by(peer)
        attributed = [self._rank, peer]
        while failed_rank not in (-1, *attributed):
            attributed.append(failed_rank)
            failed_rank = self._reported_by(failed_rank)[1]
        return report, attributed[-1]

    def _reported_by(self, peer: int) -> tuple[str, int]:
        """What ``peer`` said, and which rank it reported (-1: nothing, nobody)."""
        with suppress(RuntimeError):
            if self._store.check([f"failure/{peer}"]):
                said = self._store.get(f"failure/{peer}").decode(errors="replace")
                failed_rank, text = said.split(" ", 1)
                return text, int(failed_rank)
        return "", -1

    def _first(self) -> Report | None:
        if not self._store.check(["failed"]):
            return None
        rank = int(self._store.get("failed"))
        text, failed_rank = self._behind(rank)
        return None if rank == self._rank else Report(rank, text, failed_rank)

    def _where(self, peer: int, here: bool) -> str:
        process, number = self._store.get(f"process/{peer}").decode().split(" ")
        key = f"tokenyard/waits/{process}"
        if not self._base.check([key]):
            return ""
        at, what = self._base.get(key).decode().split(" ", 1)
        return what if (at == number) == here else ""

    def _or_else(self, call: Callable[[], _T], unknown: _T) -> Callable[[], _T]:
        """``call``, but ``unknown`` where the store does not answer."""

        def asked() -> _T:
            if self._base not in gone:
                try:
                    return call()
                except dist.DistNetworkError:
                    gone.add(self._base)
                except RuntimeError:
                    pass
            return unknown

        return asked
