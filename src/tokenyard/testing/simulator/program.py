"""Launches and their programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import greenlet
import numpy as np

from tokenyard.testing.simulator.pages import Addresses, ByteMap
from tokenyard.testing.simulator.weak import Pending

Key = tuple[int, int, int, int]
"""Of a read: first address, last, lanes, bytes of an element."""

_MOST_SEEN = 4096
_NOTED_ROUNDS = 4


class Launch:
    """A kernel on one rank's stream: ``call(index)`` runs one of its ``grid`` programs, of
    ``threads`` threads each.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        call: Callable[[], Any],
    ) -> None:
        self.rank, self.name, self.grid, self.threads, self.call = rank, name, grid, threads, call
        self.size = grid[0] * grid[1] * grid[2]
        self.started = 0
        self.running: list[Program] = []
        self.left_behind: list[Program] = []  # ended, with stores that are still pending

    @property
    def over(self) -> bool:
        """Whether all programs have ended."""
        return self.started == self.size and not self.running


class Stream:
    """One rank's launches, one after the other."""

    def __init__(self) -> None:
        self.queue: deque[Launch] = deque()


class Program(Pending):
    """A coroutine, and what it has seen since anything changed for it."""

    def __init__(self, launch: Launch, number: int, serial: int, speed: float, now: int) -> None:
        super().__init__(launch.rank, now)
        self.launch, self.number, self.serial, self.speed = launch, number, serial, speed
        x, rest = number % launch.grid[0], number // launch.grid[0]
        self.index = (x, rest % launch.grid[1], rest // launch.grid[1])
        self.error: BaseException | None = None
        self._greenlet: greenlet.greenlet | None = None
        self.asleep = False
        self.nap = 0  # counts sleeps, so that old alarms are recognised
        self.patience = 0  # fruitless rounds of reads that it may still make without falling asleep
        self.notes = False  # whether it is to note what it compares with what it has read
        self.compared: dict[int, list[Any]] = {}  # address -> values, since the last read of it
        self.deadline: int | None = None
        self.reads_clock = False
        self.seen: dict[Key, bytes] = {}
        self.round: dict[Key, Addresses] = {}

    @property
    def name(self) -> str:
        """Who this is, for people."""
        return f"rank {self.rank}, {self.launch.name}[{self.number}]"

    @property
    def frame(self) -> FrameType | None:
        """Where it stands, the innermost frame; None if it does not run yet or has ended."""
        return None if self._greenlet is None else self._greenlet.gr_frame

    @property
    def takes_notes(self) -> bool:
        """Whether it is to note what it compares, and these are its last rounds."""
        return self.notes and self.patience <= _NOTED_ROUNDS

    def go_on(self) -> bool:
        """From the scheduler's thread: run until it gives way. Whether it has ended."""
        if self._greenlet is None:
            self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.switch()
        return self._greenlet.dead

    def end(self) -> None:
        """Unwind it if it has not ended."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw(greenlet.GreenletExit)

    def _run(self) -> None:
        try:
            with np.errstate(all="ignore"):
                self.launch.call()
        except Exception as error:
            self.error = error

    def advances(self) -> None:
        """It has changed something: what it saw before says nothing about what it will do."""
        self.seen.clear()
        self.round.clear()
        self.compared.clear()
        self.deadline, self.reads_clock, self.patience, self.notes = None, False, 0, False

    def observe(self, addresses: Addresses, size: int, value: bytes) -> bool | None:
        """Note a read. True: the program has come round to it and nothing it read has changed.
        None: nothing new either.
        """
        key = (int(addresses[0]), int(addresses[-1]), addresses.size, size)
        old = self.seen.get(key)
        if old is None or old != value:
            if old is not None or len(self.seen) > _MOST_SEEN:
                self.advances()
            self.seen[key] = value
            self.round.clear()
            return False
        if key in self.round:
            if self.patience > 0:
                self.patience -= key == next(iter(self.round))
                return None
            return True
        self.round[key] = addresses
        return None

    def pending(self) -> ByteMap:
        """Give away all stores that are still pending."""
        stores, self.fenced = self.fenced, ByteMap()
        stores.absorb(self.fresh)
        self.fenced_log.clear()
        self.fresh_log.clear()
        return stores
