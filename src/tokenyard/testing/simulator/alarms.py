"""Sleeping programs and the places in memory that wake them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokenyard.testing.simulator.pages import PAGE, SHIFT, Addresses, Bytes
from tokenyard.testing.simulator.program import Program

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
                sleepers[:] = [(other, nap) for other, nap in sleepers if other.asleep and other.nap == nap]
            sleepers.append((p, p.nap))

    def ring(self, page: int, low: int, have: Bytes) -> None:
        """Bytes ``have`` (0xFF) of a page, from ``low`` on, have been written."""
        sleepers = self._pages.get(page)
        if not sleepers:
            return
        for word in list(sleepers):
            at = word * _WORD % PAGE - low
            if at < have.size and at + _WORD > 0 and have[max(at, 0) : at + _WORD].any():
                self._ring_word(sleepers, word)

    def ring_at(self, addresses: Addresses) -> None:
        """These places have been written."""
        for address in addresses.tolist():
            sleepers = self._pages.get(address >> SHIFT)
            if sleepers and address >> 3 in sleepers:
                self._ring_word(sleepers, address >> 3)

    def _ring_word(self, sleepers: _Sleepers, word: int) -> None:
        for p, nap in sleepers.pop(word):
            if p.asleep and p.nap == nap:
                self._wake(p)
