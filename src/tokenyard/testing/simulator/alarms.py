"""Sleeping programs and the places in memory that wake them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokenyard.testing.simulator.pages import PAGE, SHIFT, Addresses
from tokenyard.testing.simulator.program import Program
from tokenyard.testing.simulator.weak import Written

_WORD = 8
_LONG = 64

_Sleepers = dict[int, list[tuple[Program, int]]]


class Alarms:
    """Words of memory (8 bytes), each with the programs that sleep until it is written.

    Args:
        wake: called once for a program that is woken.
    """

    def __init__(self, wake: Callable[[Program], None]) -> None:
        self._wake = wake
        self._pages: dict[int, _Sleepers] = {}

    def set(self, p: Program) -> None:
        """Wake ``p`` when anything changes that it read in its round, or alone before."""
        words: dict[int, None] = {}
        for addresses in p.round.values():
            words.update(dict.fromkeys((addresses >> np.uint64(3)).tolist()))
        for first, _, count, _ in p.seen:
            if count == 1:
                words[first >> 3] = None
        for word in words:
            sleepers = self._pages.setdefault(word * _WORD >> SHIFT, {}).setdefault(word, [])
            if len(sleepers) > _LONG:
                sleepers[:] = [
                    (other, nap) for other, nap in sleepers if other.asleep and other.nap == nap
                ]
            sleepers.append((p, p.nap))

    def ring(self, where: list[Written]) -> None:
        """These bytes have been written. Who wakes first does not hang on where memory lies."""
        woken: dict[int, Program] = {}
        for page, low, have in where:
            sleepers = self._pages.get(page, {})
            for word in list(sleepers):
                at = word * _WORD % PAGE - low
                if at < have.size and at + _WORD > 0 and have[max(at, 0) : at + _WORD].any():
                    woken.update(_asleep(sleepers.pop(word)))
        self._wake_all(woken)

    def ring_at(self, addresses: Addresses) -> None:
        """These places have been written."""
        woken: dict[int, Program] = {}
        for address in addresses.tolist():
            sleepers = self._pages.get(address >> SHIFT)
            if sleepers and address >> 3 in sleepers:
                woken.update(_asleep(sleepers.pop(address >> 3)))
        self._wake_all(woken)

    def _wake_all(self, programs: dict[int, Program]) -> None:
        for serial in sorted(programs):
            self._wake(programs[serial])


def _asleep(sleepers: list[tuple[Program, int]]) -> dict[int, Program]:
    """Those that still sleep, by their serial numbers."""
    return {p.serial: p for p, nap in sleepers if p.asleep and p.nap == nap}
