"""The store that torch gets while ranks map each other's memory once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from tokenyard.errors import PeerTimeout
from tokenyard.memory.meeting import wait_for


class RendezvousStore(dist.Store):
    """torch (``StoreExchange``, C++) names what ranks tell each other by how many exchanges its
    process has made: ``CUDASymmetricMemory/17/RANK``. Processes of different age would wait for
    each other's names for ever. Here the first exchange is 0, the next one 1, on every rank.

    torch calls these methods alone, from C++; its barrier adds. It gets :class:`PeerTimeout`
    through.

    Args:
        part: of the store, for this exchange of these ``ranks`` alone.
        rank: this one.
        ranks: in torch's order.
        timeout: seconds that a rank is waited for.
    """

    def __init__(self, part: dist.Store, rank: int, ranks: Sequence[int], timeout: float) -> None:
        super().__init__()
        self._part, self._rank, self._ranks, self._seconds = part, rank, ranks, timeout
        self._places: dict[str, int] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Say something."""
        self._part.set(self._here(key), value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """What was said, once it is there."""
        self.wait([key])
        return self._part.get(self._here(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """What all have said, once it is there."""
        self.wait(keys)
        return [self._part.get(self._here(key)) for key in keys]

    def add(self, key: str, value: int) -> int:
        """Count."""
        return self._part.add(self._here(key), value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all, for the seconds of this object, whatever torch's are."""
        del timeout
        deadline = time.monotonic() + self._seconds
        for key in keys:
            if not wait_for(self._part, self._here(key), deadline - time.monotonic()):
                raise self._lost(key.rsplit("/", 1)[1])

    def _lost(self, place: str) -> PeerTimeout:
        """``place``: of the rank that did not come, or what a barrier writes last."""
        peer = self._ranks[int(place)] if place.isdigit() else -1
        who = f"rank {peer}" if place.isdigit() else "all ranks"
        text = f"rank {self._rank} waited {self._seconds} s for {who} to map symmetric memory"
        return PeerTimeout(f"{text}: every rank must come (is one slow or dead?)", peer)

    def _here(self, key: str) -> str:
        """``exchange 17/RANK`` as ``0/RANK``."""
        exchange, last = key.rsplit("/", 1)
        return f"{self._places.setdefault(exchange, len(self._places))}/{last}"
