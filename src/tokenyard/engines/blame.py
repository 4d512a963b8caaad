"""Who is to blame when ranks give up on each other: ranks tell it through the store, whatever carries the rows."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

GRACE = 1.0
"""Seconds that a rank which gives up at this very moment is given to say so."""


class Blame:
    """Reports of ranks that gave up, one per rank; whoever has none did not give up but was lost.

    Args:
        store: of this object alone.
        timeout: of the object, in seconds; it bounds the grace.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: float) -> None:
        self._store, self._rank = store, rank
        self._grace = timedelta(seconds=min(GRACE, timeout))

    def report(self, text: str, culprit: int) -> None:
        """Tell the others that this rank has given up on ``culprit``; before it lets go of anything they wait for."""
        with suppress(RuntimeError):
            self._store.set(f"failure/{self._rank}", f"{culprit} {text}")

    def behind(self, peer: int) -> tuple[str, int]:
        """What ``peer`` said of its end ("" if nothing), and the culprit: the last of those who blame one another."""
        with suppress(RuntimeError):
            self._store.wait([f"failure/{peer}"], self._grace)
        report, culprit = self._reported_by(peer)
        blamed = [self._rank, peer]
        while culprit not in (-1, *blamed):
            blamed.append(culprit)
            culprit = self._reported_by(culprit)[1]
        return report, blamed[-1]

    def _reported_by(self, peer: int) -> tuple[str, int]:
        """What ``peer`` said, and whom it blamed (-1: nothing, nobody)."""
        with suppress(RuntimeError):
            if self._store.check([f"failure/{peer}"]):
                culprit, text = self._store.get(f"failure/{peer}").decode(errors="replace").split(" ", 1)
                return text, int(culprit)
        return "", -1
