"""Ranks meet through a store: every rank comes within the timeout, or every rank learns who did not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tokenyard.errors import PeerTimeout
from tokenyard.memory.base import MOST_BYTES

Made = TypeVar("Made")


class Meeting:
    """Numbered meetings of all ranks of one object; every rank holds them in the same order.

    The verdict on a meeting (all came, or this rank gave up first) is written once, atomically: no rank goes on while
    another gives up.

    Args:
        store: seen by exactly these ranks, or a prefix that belongs to this object.
        rank, world_size: this rank's place.
        timeout: seconds that a rank is waited for.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._number = 0

    def exchange(self, what: str, text: str = "") -> list[str]:
        """Everybody's ``text`` by rank. ``what`` says in errors what the ranks meet for.

        Raises:
            PeerTimeout: a rank did not come within the timeout, or another rank gave up before this one came.
        """
        self._number += 1
        key = f"meeting/{self._number}"
        verdict = f"{key}/verdict"
        self._store.set(f"{key}/{self._rank}", text)
        if self._store.add(f"{key}/here", 1) == self._world_size:
            self._store.compare_set(verdict, "", "all here")
        try:
            self._store.wait([verdict], timedelta(seconds=self._timeout))
        except RuntimeError:
            self._store.compare_set(verdict, "", str(self._rank))
        outcome = self._store.get(verdict).decode()
        if outcome != "all here":
            self._raise(key, what, int(outcome))
        return [self._store.get(f"{key}/{peer}").decode() for peer in range(self._world_size)]

    def attempt(self, what: str, step: Callable[[], Made], remedy: str = "") -> Made:
        """What ``step()`` returns, once it has worked on every rank. ``what`` and ``remedy`` are for errors.

        Raises:
            RuntimeError: it raised OSError or RuntimeError on a rank, which is named; where it did itself, that RuntimeError.
            PeerTimeout: a rank did not come; says what failed here, too.
        """
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
            raise PeerTimeout(f"{lost}; {what} failed on rank {self._rank}: {said}", lost.rank) from mine
        if isinstance(mine, RuntimeError):
            raise mine
        failed = {peer: text for peer, text in enumerate(texts) if text}
        if failed:
            made.clear()
            peer = self._rank if mine is not None else min(failed)
            raise RuntimeError(f"{what} failed on rank {peer}: {failed[peer]}{remedy}") from mine
        return made[0]

    def _raise(self, key: str, what: str, first: int) -> None:
        if first != self._rank:
            raise PeerTimeout(f"rank {self._rank} came to {what}, but rank {first} has given up waiting there", first)
        missing = [peer for peer in range(self._world_size) if not self._store.check([f"{key}/{peer}"])]
        names = ", ".join(map(str, missing)) or "none by now"
        raise PeerTimeout(
            f"rank {self._rank} waited {self._timeout} s at {what} for rank(s) {names}: every rank must come "
            "(is one of them slow or dead?)",
            missing[0] if missing else -1,
        )

    def same_size(self, num_bytes: int, word: str = "") -> list[str]:
        """Make sure that all ranks ask for ``num_bytes``, a positive multiple of 16. Returns everybody's ``word``.

        Raises:
            ValueError: they do not. PeerTimeout: a rank did not come.
        """
        everybody = [text.split(" ", 1) for text in self.exchange("allocating symmetric memory", f"{num_bytes} {word}")]
        check_sizes([int(size) for size, _ in everybody])
        return [word for _, word in everybody]


def check_sizes(sizes: list[int]) -> None:
    """Raise ``ValueError`` unless all ranks ask for the same positive multiple of 16 bytes, at most :data:`MOST_BYTES`."""
    for peer, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(f"ranks ask for regions of different sizes: rank 0 {sizes[0]} bytes, rank {peer} {size}")
    if sizes[0] <= 0 or sizes[0] % 16:
        raise ValueError(f"num_bytes ({sizes[0]}) must be a positive multiple of 16")
    if sizes[0] > MOST_BYTES:
        raise ValueError(f"num_bytes ({sizes[0]}) must be at most {MOST_BYTES}, which is all that can be addressed")
