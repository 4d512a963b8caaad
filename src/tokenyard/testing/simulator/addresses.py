"""Which memory belongs to whom, and what its places are called."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenyard.testing.simulator.pages import Addresses, Bytes
from tokenyard.testing.simulator.simulation_errors import AddressError

GUARD = 4096
"""Bytes before and after a region that nobody may touch."""

_OS_PAGE = 12


class Zone(NamedTuple):
    """Addresses ``[low, high)`` of what begins at ``start``. ``ranks``: whose programs may touch
    them, None: everybody's. ``wrong``: why nobody may."""

    low: int
    high: int
    start: int
    ranks: frozenset[int] | None
    name: str
    wrong: str = ""
    shared: bool = False

    def beside(self, older: Zone) -> Zone:
        """Where both lie: whoever may touch one may touch it; what is forbidden stays so."""
        low, high = max(self.low, older.low), min(self.high, older.high)
        if older.wrong:
            return older._replace(low=low, high=high)
        ranks = None if self.ranks is None or older.ranks is None else self.ranks | older.ranks
        return self._replace(low=low, high=high, ranks=ranks, shared=self.shared or older.shared)


class AddressBook:
    """Registered buffers and names. ``strict``: programs may touch registered memory only."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._zones: list[Zone] = []
        self._lows: list[int] = []
        self._ends: dict[int, int] = {}  # of what was registered, by its first address
        self._names: list[tuple[int, int, str]] = []
        self._mapped: list[tuple[int, int]] = []

    def add(
        self, low: int, size: int, rank: int | None, name: str, guard: int = 0, shared: bool = False
    ) -> None:
        """Register a buffer; ``guard`` bytes on either side are forbidden. ``shared``: other ranks'
        programs may see it. Parts may have been registered before."""
        self._ends[low] = max(low + size, self._ends.get(low, 0))
        ranks = None if rank is None else frozenset((rank,))
        zones = [Zone(low, low + size, low, ranks, name, "", shared)]
        if guard:
            before, after = f"before the start of {name}", f"past the end of {name}"
            zones.insert(0, Zone(low - guard, low, low - guard, ranks, name, before))
            zones.append(Zone(low + size, low + size + guard, low + size, ranks, name, after))
        for zone in zones:
            self._insert(zone)

    def _insert(self, zone: Zone) -> None:
        """Zones never overlap: what is there already is cut."""
        first = bisect_right(self._lows, zone.low) - 1
        first += first < 0 or self._zones[first].high <= zone.low
        last = bisect_left(self._lows, zone.high)
        parts: list[Zone] = []
        reached = zone.low
        for old in self._zones[first:last]:
            pieces = (
                old._replace(high=zone.low),
                zone._replace(low=reached, high=old.low),
                zone.beside(old),
            )
            parts += [
                piece for piece in (*pieces, old._replace(low=zone.high)) if piece.low < piece.high
            ]
            reached = old.high
        if reached < zone.high:
            parts.append(zone._replace(low=reached))
        self._zones[first:last] = parts
        self._lows[first:last] = [part.low for part in parts]

    def close(self, low: int) -> None:
        """Nobody may touch the buffer that starts at ``low`` any more."""
        for at in range(bisect_left(self._lows, low), bisect_left(self._lows, self._ends[low])):
            zone = self._zones[at]
            self._zones[at] = zone._replace(wrong=f"in {zone.name}, which is closed")

    def name(self, low: int, size: int, name: str) -> None:
        """Call ``size`` bytes from ``low`` on ``name`` in messages."""
        insort(self._names, (low, size, name))

    def describe(self, address: int) -> str:
        """A name for an address, as good as known."""
        where = self.zone(address)
        place = (
            f"{where.name} + {address - where.start:#x}"
            if where is not None and not where.wrong
            else f"{address:#x}"
        )
        at = bisect_right(self._names, (address, sys.maxsize, "")) - 1
        if at >= 0:
            low, size, name = self._names[at]
            if address < low + size:
                inside = f" + {address - low:#x}" if address > low else ""
                return f"{name}{inside} ({place})"
        return place

    def zone(self, address: int) -> Zone | None:
        at = bisect_right(self._lows, address) - 1
        return self._zones[at] if at >= 0 and address < self._zones[at].high else None

    def shared(self, low: int, size: int) -> Bytes:
        """0xFF for those of ``size`` bytes from ``low`` on that other ranks may see."""
        found = np.zeros(size, np.uint8)
        for zone in self._zones[
            max(bisect_right(self._lows, low) - 1, 0) : bisect_right(self._lows, low + size - 1)
        ]:
            if zone.shared:
                found[max(zone.low - low, 0) : max(zone.high - low, 0)] = 0xFF
        return found

    def check(self, rank: int, addresses: Addresses, size: int) -> None:
        """Raise AddressError, which lacks who it was, unless a program of ``rank`` may touch
        elements of ``size`` bytes at all of these addresses."""
        if addresses.size == 1:  # quicker
            low = bits = int(addresses[0])
            high = low + size
        else:
            low, bits = int(addresses.min()), int(np.bitwise_or.reduce(addresses))
            high = int(addresses.max()) + size
        if bits & (size - 1):
            raise AddressError(f"{size} bytes at {self.describe(low)}: not aligned to {size}")
        if bisect_right(self._lows, low) != bisect_right(self._lows, high - 1):
            for address in addresses.tolist():
                self._check_range(rank, address, address + size)
        else:
            self._check_range(rank, low, high)
            if high - low > addresses.size * size and self.zone(low) is None:
                for page in np.unique(addresses >> np.uint64(_OS_PAGE)).tolist():
                    self._check_mapped(page)

    def _check_range(self, rank: int, low: int, high: int) -> None:
        zone = self.zone(low)
        if zone is None:
            after = bisect_right(self._lows, low)
            if after < len(self._lows) and high > self._lows[after]:
                raise AddressError(
                    f"{high - low} bytes at {low:#x} reach into {self._zones[after].name}"
                )
            if self._strict:
                raise AddressError(f"{high - low} bytes at {low:#x}, which is no registered memory")
            self._check_mapped(low >> _OS_PAGE)
            self._check_mapped((high - 1) >> _OS_PAGE)
        elif zone.wrong:
            raise AddressError(
                f"{high - low} bytes at {low:#x}, {low - zone.start} bytes into the zone "
                f"{zone.wrong}"
            )
        elif high > zone.high:
            raise AddressError(f"{high - low} bytes at {self.describe(low)} reach past its end")
        elif zone.ranks is not None and rank not in zone.ranks and not zone.shared:
            ranks = ", ".join(str(each) for each in sorted(zone.ranks))
            raise AddressError(
                f"{high - low} bytes at {self.describe(low)}, which belongs to rank {ranks}"
            )

    def _check_mapped(self, page: int) -> None:
        address = page << _OS_PAGE
        if not _holds(self._mapped, address):
            self._mapped = _mappings()
            if not _holds(self._mapped, address):
                raise AddressError(f"{address:#x} is no memory of this process")


def _holds(mappings: list[tuple[int, int]], address: int) -> bool:
    at = bisect_right(mappings, (address, sys.maxsize)) - 1
    return at >= 0 and address < mappings[at][1]


def _mappings() -> list[tuple[int, int]]:
    """Readable memory of this process, in order; everything where the system does not say."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return [(0, sys.maxsize)]
    fields = [line.split(maxsplit=2)[:2] for line in maps.read_text().splitlines()]
    bounds = [text.split("-") for text, access in fields if access.startswith("r")]
    return sorted((int(low, 16), int(high, 16)) for low, high in bounds)
