"""Sparse byte maps over addresses, in pages: everything pending or past is kept in these.

Lanes are elements of one access: an array of addresses, each a multiple of the element's size.
:func:`spans` splits them by page once per access, for all maps.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

_native: Any = importlib.import_module("triton._C.libtriton").interpreter

SHIFT = 10
PAGE = 1 << SHIFT
_LOW = PAGE - 1

Bytes: TypeAlias = NDArray[np.uint8]
Addresses: TypeAlias = NDArray[np.uint64]
Values: TypeAlias = NDArray[np.unsignedinteger[Any]]
Index: TypeAlias = "slice | NDArray[np.intp]"

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STEPS = {size: np.arange(4096, dtype=np.uint64) * np.uint64(size) for size in UNSIGNED}


class Span(NamedTuple):
    """Lanes of one access that lie in one page, and their elements there."""

    page: int
    lanes: Index
    cells: Index

    def extent(self, size: int) -> tuple[int, int]:
        """First byte in the page, and the end of the last."""
        if isinstance(self.cells, slice):
            return self.cells.start * size, self.cells.stop * size
        return int(self.cells.min()) * size, (int(self.cells.max()) + 1) * size

    def touched(self, size: int) -> Bytes:
        """0xFF for its bytes in the page."""
        have = np.zeros(PAGE, np.uint8)
        have.view(UNSIGNED[size])[self.cells] = ~UNSIGNED[size](0)
        return have


def raw(address: int, count: int, kind: Any = np.uint8) -> Any:
    """Real memory as an array of so many elements."""
    there: Any = (ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(address)
    return np.frombuffer(there, kind)


def is_run(addresses: Addresses, size: int) -> bool:
    """Whether lanes follow each other without gaps."""
    count = addresses.size
    if count > _STEPS[size].size or int(addresses[-1]) - int(addresses[0]) != (count - 1) * size:
        return False
    # as bytes: that is the quickest comparison of short arrays
    return (addresses - addresses[0]).tobytes() == _STEPS[size][:count].tobytes()


def gather(addresses: Addresses, size: int) -> Values:
    kind: Any = UNSIGNED[size]
    if addresses.size == 1 or is_run(addresses, size):
        return raw(int(addresses[0]), addresses.size, kind).copy()
    zeros = np.zeros(addresses.size, kind)
    return _native.load(addresses, np.ones(addresses.size, bool), zeros, zeros.dtype)


def spans(addresses: Addresses, size: int) -> list[Span]:
    """Split flat, not empty ``addresses`` by page."""
    first, count = int(addresses[0]), addresses.size
    if count == 1:  # most are, so this is to be quick
        cell = (first & _LOW) // size
        return [Span(first >> SHIFT, slice(0, 1), slice(cell, cell + 1))]
    if is_run(addresses, size):
        return _run_spans(first, count, size)
    pages = (addresses >> np.uint64(SHIFT)).astype(np.int64)
    cells = ((addresses & np.uint64(_LOW)) // np.uint64(size)).astype(np.intp)
    if (pages == pages[0]).all():
        return [Span(int(pages[0]), slice(0, count), cells)]
    order = np.argsort(pages, kind="stable")
    cuts = np.flatnonzero(np.diff(pages[order])) + 1
    return [Span(int(pages[lanes[0]]), lanes, cells[lanes]) for lanes in np.split(order, cuts)]


def _run_spans(first: int, count: int, size: int) -> list[Span]:
    found: list[Span] = []
    lane = 0
    while lane < count:
        address = first + lane * size
        cell = (address & _LOW) // size
        length = min(count - lane, PAGE // size - cell)
        found.append(Span(address >> SHIFT, slice(lane, lane + length), slice(cell, cell + length)))
        lane += length
    return found


class Page:
    """``have`` is 0xFF for the bytes that are known, 0 elsewhere; ``data`` their values."""

    __slots__ = ("data", "have")

    def __init__(self) -> None:
        self.data: Bytes = np.zeros(PAGE, np.uint8)
        self.have: Bytes = np.zeros(PAGE, np.uint8)

    def known(self) -> tuple[int, Bytes, Bytes]:
        """First known byte; ``have`` and ``data`` from there to the last one."""
        have = self.have.tobytes()
        low, high = max(have.find(b"\xff"), 0), have.rfind(b"\xff") + 1
        return low, self.have[low:high], self.data[low:high]


class ByteMap(dict[int, Page]):
    """Pages by number. ``map[number]`` makes a page if need be."""

    def __missing__(self, number: int) -> Page:
        page = self[number] = Page()
        return page

    def put(self, where: list[Span], values: Values) -> None:
        """Know these lanes' values."""
        kind: Any = values.dtype.type
        ones = ~kind(0)
        for number, lanes, cells in where:
            page = self[number]
            page.data.view(kind)[cells] = values[lanes]
            page.have.view(kind)[cells] = ones

    def over(self, where: list[Span], values: Values) -> None:
        """Write what is known of these lanes over ``values``."""
        kind = values.dtype
        for number, lanes, cells in where:
            page = self.get(number)
            if page is not None:
                have = page.have.view(kind)[cells]
                values[lanes] = (values[lanes] & ~have) | (page.data.view(kind)[cells] & have)

    def forget(self, other: ByteMap) -> None:
        """Know no longer what ``other`` knows."""
        for number, page in other.items():
            mine = self.get(number)
            if mine is not None:
                mine.have &= ~page.have

    def split(self, keep: Callable[[int], Bytes]) -> ByteMap:
        """Take away what is outside ``keep(page)`` (0xFF: bytes that stay), and empty pages."""
        away = ByteMap()
        for number, page in list(self.items()):
            stays = page.have & keep(number)
            goes = page.have & ~stays
            if goes.any():
                other = away[number] = Page()
                other.data, other.have = page.data, goes
            page.have = stays
            if not stays.any():
                del self[number]
        return away

    def take(self, where: list[Span], size: int, into: ByteMap) -> None:
        """Move what is known of these lanes into ``into``."""
        kind = UNSIGNED[size]
        for number, _, cells in where:
            mine = self.get(number)
            if mine is None or b"\xff" not in (have := mine.have.view(kind)[cells]).tobytes():
                continue
            page = into[number]
            old, data = page.data.view(kind), mine.data.view(kind)
            old[cells] = (old[cells] & ~have) | (data[cells] & have)
            page.have.view(kind)[cells] |= have
            mine.have.view(kind)[cells] = 0


def lay_over(data: Bytes, newer: Bytes, have: Bytes) -> None:
    """Copy the bytes of ``newer`` for which ``have`` is 0xFF."""
    data &= ~have
    data |= newer & have
