"""Ranks meet through a store: all come within the timeout, or all learn who did not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tokenyard.arguments import MOST_BYTES
from tokenyard.errors import Mismatch, PeerTimeout
from tokenyard.memory.store import CooperativeStore, base_of

Made = TypeVar("Made")

LOOK = 0.25
"""Seconds between two looks at something else while a rank waits (:func:`looking`)."""
POLL = 0.05
"""Most seconds between two looks at a store: a rank that waits notices signals so soon."""
_ALL_HERE = "all here"
_here = threading.local()


class Round:
    """One meeting. Its verdict (all came, or this rank gave up first) is written once, atomically.
    The part of the ``store`` is for this meeting alone, seen by exactly these ``ranks``: a number
    of them, or which."""

    def __init__(self, store: dist.Store, rank: int, ranks: int | Sequence[int]) -> None:
        self._store, self._rank = store, rank
        self._ranks = range(ranks) if isinstance(ranks, int) else ranks

    def come(self, what: str, text: str, timeout: float) -> list[str]:
        """Everybody's ``text`` in rank order, once all have come. See :meth:`Meeting.exchange`."""
        try:
            self._store.set(str(self._rank), text)
            if self._store.add("here", 1) == len(self._ranks):
                self._store.compare_set("verdict", "", _ALL_HERE)
            if not wait_for(self._store, "verdict", timeout):
                self.give_up([peer for peer in self._ranks if not self.has_come(peer)])
        except BaseException:
            with suppress(RuntimeError):
                self.give_up()
            raise
        outcome = self._store.get("verdict").decode()
        if outcome != _ALL_HERE:
            if self._store.check(["mismatch"]):
                raise Mismatch(self._store.get("mismatch").decode())
            first, *missing = map(int, outcome.split())
            raise self._lost(what, timeout, first, missing)
        return [self._store.get(str(peer)).decode() for peer in self._ranks]

    def has_come(self, peer: int) -> bool:
        """Whether ``peer`` has come, whatever the verdict."""
        return self._store.check([str(peer)])

    def is_over(self) -> bool:
        """Whether there is a verdict."""
        return self._store.check(["verdict"])

    def heard(self) -> dict[int, str]:
        """Texts of those who came, by rank."""
        return {
            peer: self._store.get(str(peer)).decode() for peer in self._ranks if self.has_come(peer)
        }

    def give_up(self, missing: list[int] | None = None) -> None:
        """Fail this meeting for all, unless it has a verdict. ``missing``: who did not come."""
        self._store.compare_set("verdict", "", " ".join(map(str, [self._rank, *(missing or [])])))

    def disagree(self, text: str) -> Mismatch:
        """Fail this meeting for all, who raise what is returned."""
        self._store.set("mismatch", text)
        self.give_up()
        return Mismatch(text)

    def given_up_by(self) -> int | None:
        """The rank that gave up this meeting, if any did."""
        outcome = self._store.get("verdict").decode() if self.is_over() else _ALL_HERE
        return None if outcome == _ALL_HERE else int(outcome.split()[0])

    def forget(self) -> None:
        """Delete what this meeting left in the store."""
        for key in ("here", "verdict", "mismatch", *map(str, self._ranks)):
            self._store.delete_key(key)

    def _lost(self, what: str, timeout: float, first: int, missing: list[int]) -> PeerTimeout:
        """``first`` gave up, waiting for those who were ``missing`` then (none: it was stopped)."""
        names = ", ".join(map(str, missing))
        if first == self._rank:
            if not missing:
                why = "it was interrupted, or some came to it twice"
                return PeerTimeout(f"rank {first} has left {what}: {why}", -1)
            text = f"rank {first} waited {timeout} s at {what} for rank(s) {names}"
            text += ": every rank must come (is one of them slow or dead?)"
            return PeerTimeout(text, missing[0])
        known = bool(missing) and self._rank not in missing
        gone = f"rank {first} has given up waiting there"
        gone += f" for rank(s) {names}" if known else ""
        text = f"rank {self._rank} came to {what}, but {gone}"
        return PeerTimeout(text, missing[0] if known else first)


class Meeting:
    """Numbered meetings of all ranks of one object, in the same order on each. No rank goes on
    while another gives up (:class:`Round`). The ``store``, or its prefix, is seen by exactly these
    ``ranks`` (a number of them, or which). A rank is waited for ``timeout`` seconds."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: int | Sequence[int], timeout: float
    ) -> None:
        self._store, self._rank, self._timeout, self._number = store, rank, timeout, 0
        self._ranks = range(ranks) if isinstance(ranks, int) else ranks

    def exchange(self, what: str, text: str = "") -> list[str]:
        """Everybody's ``text`` in rank order. ``what`` says in errors what the ranks meet for.
        PeerTimeout: a rank did not come within the timeout, or gave up before this one came.
        KeyboardInterrupt: this rank was interrupted; the others learn that it has given up."""
        self._number += 1
        part = dist.PrefixStore(f"meeting/{self._number}", self._store)
        return Round(part, self._rank, self._ranks).come(what, text, self._timeout)

    def attempt(self, what: str, step: Callable[[], Made], remedy: str = "") -> Made:
        """What ``step()`` returns, once it has worked on every rank. RuntimeError: it raised it or
        OSError on a rank, which is named with ``what`` and ``remedy``; its own where it did.
        PeerTimeout: a rank did not come; says what failed here, too."""
        made: list[Made] = []
        mine: OSError | RuntimeError | None = None
        try:
            made.append(step())
        except (OSError, RuntimeError) as error:
            mine = error
        said = "" if mine is None else str(mine) or type(mine).__name__
        try:
            texts = self.exchange(what, said)
        except PeerTimeout as lost:
            made.clear()  # a traceback keeps this frame
            if mine is None:
                raise
            text = f"{lost}; {what} failed on rank {self._rank}: {said}"
            raise PeerTimeout(text, lost.rank) from mine
        if isinstance(mine, RuntimeError):
            raise mine
        failed = {peer: text for peer, text in zip(self._ranks, texts, strict=True) if text}
        if failed:
            made.clear()
            peer = self._rank if mine is not None else min(failed)
            raise RuntimeError(f"{what} failed on rank {peer}: {failed[peer]}{remedy}") from mine
        return made[0]

    def same_size(self, num_bytes: int, word: str = "") -> list[str]:
        """Everybody's ``word``. ValueError: not all ask for ``num_bytes``, a multiple of 16."""
        everybody = [
            text.split(" ", 1)
            for text in self.exchange("allocating symmetric memory", f"{num_bytes} {word}")
        ]
        check_sizes([int(size) for size, _ in everybody], self._ranks)
        return [word for _, word in everybody]


@contextmanager
def looking(look: Callable[[], object]) -> Generator[None]:
    """Call ``look`` now and then while this thread waits in a meeting; it may raise."""
    _here.look = look
    try:
        yield
    finally:
        _here.look = None


def wait_for(store: dist.Store, key: str, timeout: float) -> bool:
    """Whether ``key`` has a value within ``timeout`` seconds. Polls: signals get through."""
    if isinstance(base_of(store), CooperativeStore):  # has a clock of its own, and lets others run
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=timeout))
        return store.check([key])
    now, pause, look = time.monotonic(), 0.0005, getattr(_here, "look", None)
    deadline, next_look = now + timeout, now + LOOK
    while not store.check([key]):
        now = time.monotonic()
        left = deadline - now
        if left <= 0:
            return False
        if look is not None and now >= next_look:
            look()
            next_look = time.monotonic() + LOOK
        time.sleep(min(pause, left))
        pause = min(2 * pause, POLL)
    return True


def check_sizes(sizes: list[int], ranks: Sequence[int] | None = None) -> None:
    """ValueError: ``ranks`` (default: from 0 on) do not all ask for one multiple of 16 bytes."""
    ranks = range(len(sizes)) if ranks is None else ranks
    for peer, size in zip(ranks, sizes, strict=True):
        if size != sizes[0]:
            both = f"rank {ranks[0]} {sizes[0]} bytes, rank {peer} {size}"
            raise ValueError(f"ranks ask for regions of different sizes: {both}")
    if sizes[0] <= 0 or sizes[0] % 16:
        raise ValueError(f"num_bytes ({sizes[0]}) must be a positive multiple of 16")
    if sizes[0] > MOST_BYTES:
        limit = f"must be at most {MOST_BYTES}, which is all that can be addressed"
        raise ValueError(f"num_bytes ({sizes[0]}) {limit}")
