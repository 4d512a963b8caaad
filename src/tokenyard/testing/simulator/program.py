"""Launches, their programs, and what wakes programs that sleep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import greenlet
import numpy as np

from tokenyard.testing.simulator.pages import SHIFT, Addresses
from tokenyard.testing.simulator.recurrence import state_of
from tokenyard.testing.simulator.weak import Pending, Written

Key = tuple[int, int, int, int]
"""Of a read: first address, last, lanes, bytes of an element."""

_MOST_SEEN = 4096
_WORD = 8
"""Bytes of which a write to any wakes those that have read one."""


@dataclass(eq=False)
class Launch:
    """A kernel on a rank's stream: ``call()`` runs a program of ``threads`` threads of ``grid``."""

    rank: int
    name: str
    grid: tuple[int, int, int]
    threads: int
    call: Callable[[], Any]
    started: int = 0
    running: list[Program] = field(default_factory=list["Program"])
    left_behind: list[Program] = field(default_factory=list["Program"])
    """Ended, with stores that are still pending."""

    @property
    def size(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


class Program(Pending):
    """A coroutine, and what it has seen since anything changed for it."""

    def __init__(self, launch: Launch, number: int, serial: int, speed: float, now: int) -> None:
        super().__init__(launch.rank, now)
        self.launch, self.serial, self.speed = launch, serial, speed
        x, rest = number % launch.grid[0], number // launch.grid[0]
        self.index = (x, rest % launch.grid[1], rest // launch.grid[1])
        self.name = f"rank {launch.rank}, {launch.name}[{number}]"
        self.error: BaseException | None = None
        self._greenlet: greenlet.greenlet | None = None
        self.asleep = False
        self.alarms: set[int] = set()  # the words that wake it
        self.patience = 0  # fruitless rounds of reads that it may still make without falling asleep
        self.tried = False  # whether it has had the longest patience since it last saw anything new
        self.states: set[int] = set()  # of its patient rounds, see :func:`state_of`
        self.waits = False  # whether it is proved to wait, asleep: for memory, or its deadline
        self.notes = False  # whether it is to note what it compares with what it has read
        self.compared: dict[int, list[Any]] = {}  # address -> values, since the last read of it
        self.deadline: int | None = None  # the next time that it compares the clock with
        self.reads_clock = False
        self.seen: dict[Key, bytes] = {}
        self.round: dict[Key, Addresses] = {}

    @property
    def frame(self) -> FrameType | None:
        """Where it stands, the innermost frame; None if it does not run yet or has ended."""
        return None if self._greenlet is None else self._greenlet.gr_frame

    def go_on(self) -> bool:
        """From the scheduler's thread: run until it gives way. Whether it has ended."""
        if self._greenlet is None:
            self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.switch()
        return self._greenlet.dead

    def end(self) -> None:
        """Unwind it if it has not ended."""
        if self._greenlet:
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
        self.begin_round()
        self.compared.clear()
        self.deadline, self.reads_clock, self.patience = None, False, 0
        self.notes = self.tried = False

    def observe(self, addresses: Addresses, size: int, value: bytes) -> bool | None:
        """Note a read. True: the program has come round to it, all unchanged. None: nothing new."""
        key = (int(addresses[0]), int(addresses[-1]), addresses.size, size)
        old = self.seen.get(key)
        if old is None or old != value:
            if old is not None or len(self.seen) > _MOST_SEEN:
                self.advances()
            self.seen[key] = value
            self.begin_round()
            return False
        if key in self.round:
            if self.patience > 0 and not self._recurs():
                self.patience -= key == next(iter(self.round))
                return None
            return True
        self.round[key] = addresses
        return None

    def begin_round(self) -> None:
        """What it has read until now is no part of a cycle."""
        self.round.clear()
        self.states.clear()

    def _recurs(self) -> bool:
        """Whether it is in a state in which it was in this round: as nothing that it reads has
        changed, it goes in a circle, until that changes or the clock passes its deadline."""
        state = state_of(sys._getframe(1), Program._run.__code__)  # pyright: ignore[reportPrivateUsage]
        self.waits = state in self.states
        self.states.add(state)
        return self.waits

    def compares_clock(self, now: int, target: int) -> None:
        """At the time ``now`` it compares the clock with ``target``."""
        known = self.deadline
        if target >= now and (known is None or known <= now or target < known):
            self.deadline = target

    def polled(self) -> list[tuple[int, int]]:
        """Addresses that it reads round after round, and bytes of an element there."""
        return [
            (address, key[-1])
            for key, addresses in self.round.items()
            for address in addresses.tolist()
        ]


class Alarms:
    """Words of memory, each with the programs that sleep until it is written. ``wake`` is called
    for a program that is to wake; it calls :meth:`forget`."""

    def __init__(self, wake: Callable[[Program], None]) -> None:
        self._wake = wake
        self._sleepers: dict[int, set[Program]] = {}

    def set(self, p: Program) -> None:
        """Wake ``p`` when anything changes that it read in its round, or alone before."""
        p.alarms = {first // _WORD for first, _, count, _ in p.seen if count == 1}
        for addresses in p.round.values():
            p.alarms.update((addresses // np.uint64(_WORD)).tolist())
        for word in p.alarms:
            self._sleepers.setdefault(word, set()).add(p)

    def ring(self, where: list[Written]) -> None:
        """These bytes have been written. Who wakes first does not hang on where memory lies."""
        woken: set[Program] = set()
        for page, low, have in where if self._sleepers else ():
            written = ((page << SHIFT) + low + np.flatnonzero(have)) // _WORD
            for word in self._sleepers.keys() & set(written.tolist()):
                woken |= self._sleepers[word]
        for p in sorted(woken, key=lambda p: p.serial):
            self._wake(p)

    def forget(self, p: Program) -> None:
        """It sleeps no more."""
        for word in p.alarms:
            self._sleepers[word].discard(p)
            if not self._sleepers[word]:
                del self._sleepers[word]
        p.alarms = set()
