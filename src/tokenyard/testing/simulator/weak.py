"""The memory model: who sees whose stores when, on the weakest hardware that the rules allow.

A store passes four stages: *fresh* (its program only), *fenced* (behind a barrier of its program),
then by a releasing atomic with gpu scope *in a bundle* (its rank), or with sys scope in *real
memory* (everybody). The hardware may take it to real memory at any time. A program that acquires,
and then passes a barrier, has a new *view*: what it loads afterwards is at least as new as what
memory held at the acquire. A plain load may return anything the location held since then.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenyard.testing.simulator.pages import (
    PAGE,
    SHIFT,
    UNSIGNED,
    Addresses,
    ByteMap,
    Bytes,
    Index,
    Page,
    Span,
    extent,
    lay_over,
    raw,
    spans,
)

Values: TypeAlias = NDArray[np.unsignedinteger[Any]]

Written: TypeAlias = "tuple[int, int, Bytes]"
"""Part of a write: a page, the first byte in it, and 0xFF for bytes from there on that are written.
"""

_WINDOW = 4096
"""Writes that the past reaches back."""
_MOST_RECORDS = 128
_MOST_BUNDLES = 32
_MOST_READS = 4096


class Lanes(NamedTuple):
    """Lanes of a tensor of this shape (``taking``: which of its flat elements take part), which has
    one for each thread.
    """

    shape: tuple[int, ...]
    taking: Index
    addresses: Addresses

    def is_same(self, other: Lanes) -> bool:
        """Whether each thread touches the places that it touches in ``other``, and no other thread
        does.
        """
        if self.shape != other.shape or not np.array_equal(self.addresses, other.addresses):
            return False
        if isinstance(self.taking, slice) or isinstance(other.taking, slice):
            same = type(self.taking) is type(other.taking)
        else:
            same = np.array_equal(self.taking, other.taking)
        return same and np.unique(self.addresses).size == self.addresses.size


class Read(NamedTuple):
    """A load. ``lanes``: None if several threads may load the same element."""

    where: list[Span]
    size: int
    lanes: Lanes | None


class Pending:
    """One program's part of the memory model."""

    def __init__(self, rank: int, now: int) -> None:
        self.rank = rank
        self.fresh, self.fenced = ByteMap(), ByteMap()
        self.fresh_log: list[tuple[Addresses, int]] = []
        self.fenced_log: list[tuple[Addresses, int]] = []
        # Writes up to here are seen: all of them, and those of programs of the same rank (at least
        # as many)
        self.view = self.rank_view = now
        self.acquired = self.rank_acquired = now  # the same, once the program passes a barrier
        self.reads: list[
            Read
        ] = []  # since the last barrier: threads may lag behind and not have read yet
        self.exposed: list[tuple[int, Read]] = []  # those of them before a release, with its number


class Record(NamedTuple):
    """A write to a page: bytes ``have`` from ``low`` on were ``old``; ``since``: when the writer's
    rank could see it.
    """

    number: int
    since: int
    writer: Pending
    low: int
    have: Bytes
    old: Bytes


class Bundle(NamedTuple):
    """Stores that one rank may see and others may not."""

    number: int
    writer: Pending
    stores: ByteMap


class WeakMemory:
    """All ranks' memory. ``written(where)`` is called after every write to real memory.

    Args:
        stale: how likely a plain load looks into the past.
    """

    def __init__(
        self, world_size: int, rng: Random, stale: float, written: Callable[[list[Written]], None]
    ) -> None:
        self._rng, self._stale, self._written = rng, stale, written
        self.now = 0
        self._past: dict[int, list[Record]] = {}
        self._bundles: list[list[Bundle]] = [[] for _ in range(world_size)]
        self._told: dict[
            tuple[int, int], int
        ] = {}  # the newest view of the rank's programs that released at an address

    # What programs do

    def store(self, p: Pending, addresses: Addresses, where: list[Span], values: Values) -> None:
        """A plain store."""
        p.fresh.put(where, values)
        p.fresh_log.append((addresses, values.itemsize))

    def barrier(self, p: Pending) -> None:
        """All threads of the program meet: one may release for all, and all see what one has
        acquired.
        """
        if p.fresh:
            p.fenced.absorb(p.fresh)
            p.fenced_log += p.fresh_log
            p.fresh_log.clear()
        p.view, p.rank_view = max(p.view, p.acquired), max(p.rank_view, p.rank_acquired)
        p.reads.clear()
        p.exposed.clear()

    def acquire(self, p: Pending, addresses: Addresses, everywhere: bool) -> None:
        """Of an atomic, with sys scope (``everywhere``) or gpu scope."""
        p.rank_acquired = self.now
        if everywhere:
            p.acquired = self.now
        elif self._told:  # what the releasing program had seen is seen now, whoever wrote it
            told = [self._told.get((p.rank, address), 0) for address in addresses.tolist()]
            p.acquired = max(p.acquired, *told)

    def release(self, p: Pending, addresses: Addresses, everywhere: bool) -> None:
        """Of an atomic, before it is performed."""
        if p.reads:
            p.exposed += [(self.now, read) for read in p.reads]
            p.reads.clear()
        if everywhere:
            seen = max(p.rank_view, p.rank_acquired)
            self._publish_bundles(
                p.rank, lambda bundle: bundle.writer is p or bundle.number <= seen
            )
            self._write(p.fenced, p)
        else:
            self.bundle(p, p.fenced)
        p.fenced = ByteMap()
        p.fenced_log.clear()
        for address in addresses.tolist():
            self._told[p.rank, address] = max(
                p.view, p.acquired, self._told.get((p.rank, address), 0)
            )

    def load(
        self, p: Pending, where: list[Span], values: Values, lanes: Lanes | None = None
    ) -> bool:
        """Turn what real memory holds into what ``p`` loads. True if a newer value exists.
        ``lanes``: see :class:`Read`.
        """
        if len(p.reads) < _MOST_READS:
            p.reads.append(Read(where, values.itemsize, lanes))
        stale = False
        if self.now > p.view and self._rng.random() < self._stale:
            stale = self._look_back(p, where, values)
        bundles = self._bundles[p.rank]
        if bundles:
            hides = self._rng.random() < self._stale
            for bundle in bundles:
                if not bundle.stores.touches(where):
                    continue
                newer = np.array(values)
                bundle.stores.over(where, newer)
                if bundle.writer is p or bundle.number <= p.rank_view or not hides:
                    values[:] = newer
                else:
                    stale = stale or bool((newer != values).any())
        for stores in (p.fenced, p.fresh):
            if stores:
                stores.over(where, values)
        return stale

    def before_atomic(self, p: Pending, where: list[Span], size: int) -> None:
        """An atomic works on real memory: stores of its rank to the same place go there first."""
        ours = ByteMap()
        for stores in (*(bundle.stores for bundle in self._bundles[p.rank]), p.fenced, p.fresh):
            if stores.touches(where):
                stores.take(where, size, ours)
        self._write(ours, p)

    def after_atomic(self, p: Pending, where: list[Span], old: Values) -> None:
        """An atomic has changed real memory, which held ``old``."""
        before = ByteMap()
        before.put(where, old)
        self.now += 1
        for number, page in before.items():
            low, high = extent(page)
            self._remember(
                number, Record(self.now, self.now, p, low, page.have[low:high], page.data[low:high])
            )

    def overwritten(self, p: Pending) -> tuple[int, Pending] | None:
        """A place that ``p`` read without a barrier before a release, and that another program has
        written since, and which.
        """
        for number, (where, size, _) in p.exposed:
            for span in where:
                for record in reversed(self._past.get(span.page, ())):
                    if record.number <= number:
                        break
                    if record.writer is not p and _meets(record, span, size):
                        return (span.page << SHIFT) + _extent(span, size)[0], record.writer
        return None

    def rereads(
        self, p: Pending, where: list[Span], size: int, lanes: Lanes | None = None
    ) -> int | None:
        """A place among these that ``p`` has read since its last barrier: threads that lag behind
        would read what is stored now. Those that each store to what they alone have loaded
        (``lanes``, see :class:`Read`) do not."""
        stored = {span.page: span for span in where}
        for read in (*p.reads, *(read for _, read in p.exposed)):
            for span in read.where:
                mine = stored.get(span.page)
                if mine is not None and bool((_lanes(span, read.size) & _lanes(mine, size)).any()):
                    if (
                        lanes is not None
                        and read.lanes is not None
                        and read.size == size
                        and read.lanes.is_same(lanes)
                    ):
                        break
                    return (span.page << SHIFT) + _extent(mine, size)[0]
        return None

    # What hardware does

    def leak(self, p: Pending) -> None:
        """Some of the program's stores, or parts of them, become visible to all."""
        out = ByteMap()
        for _ in range(self._rng.randint(1, 3)):
            logs = [log for log in (p.fresh_log, p.fenced_log) if log]
            if not logs:
                break
            log = self._rng.choice(logs)
            picked = self._rng.randrange(len(log))
            (addresses, size), log[picked] = log[picked], log[-1]
            log.pop()
            if addresses.size > 1 and self._rng.random() < 0.5:
                cut = self._rng.randrange(1, addresses.size)
                first, second = addresses[:cut], addresses[cut:]
                addresses, rest = (first, second) if self._rng.random() < 0.5 else (second, first)
                log.append((rest, size))
            where = spans(addresses, size)
            p.fenced.take(where, size, out)
            p.fresh.take(where, size, out)
        self._write(out, p)

    def deliver(self, p: Pending, stores: ByteMap) -> None:
        """Stores of a device on behalf of ``p`` become visible to all."""
        self._write(stores, p)

    def flush(self, p: Pending) -> None:
        """All of the program's stores become visible to all."""
        p.fenced.absorb(p.fresh)
        self._write(p.fenced, p)
        p.fenced, p.fresh = ByteMap(), ByteMap()
        p.fenced_log.clear()
        p.fresh_log.clear()

    def bundle(self, p: Pending, stores: ByteMap) -> None:
        """These stores, which ``p`` gives away, become visible to its rank."""
        if not stores:
            return
        self.now += 1
        bundles = self._bundles[p.rank]
        bundles.append(Bundle(self.now, p, stores))
        if len(bundles) > _MOST_BUNDLES:
            self._publish(bundles.pop(0))

    def publish_private(self, rank: int, shared: Callable[[int, int], Bytes]) -> None:
        """Bundled stores to memory that no other rank can see go to real memory: the host may free
        it soon. ``shared(low, size)``: 0xFF for bytes that another can see."""
        for bundle in self._bundles[rank]:
            private = bundle.stores.split(lambda number: shared(number << SHIFT, PAGE))
            self._write(private, bundle.writer, bundle.number)
        self._bundles[rank] = [bundle for bundle in self._bundles[rank] if bundle.stores]

    def publish_rank(self, rank: int) -> None:
        """All bundles of a rank become visible to all."""
        self._publish_bundles(rank, lambda _: True)

    def publish_one(self, rank: int) -> None:
        """The oldest bundle of a rank becomes visible to all."""
        if self._bundles[rank]:
            self._publish(self._bundles[rank].pop(0))

    def forget_past(self) -> None:
        """No program runs that could look back."""
        self._past.clear()
        self._told.clear()

    # Inside

    def _publish_bundles(self, rank: int, which: Callable[[Bundle], bool]) -> None:
        bundles = self._bundles[rank]
        if bundles:
            going = [bundle for bundle in bundles if which(bundle)]
            self._bundles[rank] = [bundle for bundle in bundles if not which(bundle)]
            for bundle in going:
                self._publish(bundle)

    def _publish(self, bundle: Bundle) -> None:
        self._write(bundle.stores, bundle.writer, bundle.number)

    def _write(self, stores: ByteMap, writer: Pending, since: int | None = None) -> None:
        """To real memory. ``stores`` must not be changed any more."""
        if not stores:
            return
        self.now += 1
        where: list[Written] = []
        for number, page in stores.items():
            low, high = extent(page)
            if low == high:
                continue
            have = page.have[low:high]
            memory = raw((number << SHIFT) + low, high - low)
            self._remember(
                number, Record(self.now, since or self.now, writer, low, have, memory.copy())
            )
            lay_over(memory, page.data[low:high], have)
            where.append((number, low, have))
        self._written(where)
        for bundle in self._bundles[writer.rank]:  # same place, same rank: what comes later stays
            if since is None or bundle.number < since:
                bundle.stores.forget(stores)

    def _remember(self, number: int, record: Record) -> None:
        records = self._past.setdefault(number, [])
        records.append(record)
        if len(records) % _MOST_RECORDS == 0:
            records[:] = [record for record in records if record.number > self.now - _WINDOW]

    def _look_back(self, p: Pending, where: list[Span], values: Values) -> bool:
        """Put older values into some lanes."""
        oldest = max(p.view, self.now - _WINDOW)
        target = oldest if self._rng.random() < 0.5 else self._rng.randint(oldest, self.now)
        cut, first = self._rng.random(), self._rng.random()
        older = np.array(values)
        for span in where:
            records = self._past.get(span.page)
            if records and records[-1].number > target:
                ByteMap(
                    {span.page: _undo(p, records, target, _extent(span, values.itemsize))}
                ).over([span], older)
        if first < 0.5:  # torn: one part only
            middle = int(cut * values.size)
            part = slice(middle, None) if first < 0.25 else slice(0, middle)
        else:
            part = slice(0, None)
        differs = bool((older[part] != values[part]).any())
        values[part] = older[part]
        return differs


def _extent(span: Span, size: int) -> tuple[int, int]:
    """First byte of a span in its page, and the end of its last."""
    if isinstance(span.cells, slice):
        return span.cells.start * size, span.cells.stop * size
    return int(span.cells.min()) * size, (int(span.cells.max()) + 1) * size


def _meets(record: Record, span: Span, size: int) -> bool:
    """Whether a write has hit lanes of a span."""
    return bool(
        (_lanes(span, size)[record.low : record.low + record.have.size] & record.have).any()
    )


def _lanes(span: Span, size: int) -> Bytes:
    """0xFF for the bytes of a span in its page."""
    have = np.zeros(PAGE, np.uint8)
    have.view(UNSIGNED[size])[span.cells] = ~UNSIGNED[size](0)
    return have


def _undo(p: Pending, records: list[Record], target: int, extent: tuple[int, int]) -> Page:
    """What bytes ``extent`` of a page held after write ``target``, where that was something else
    and ``p`` may still see it.
    """
    low, high = extent
    past = Page()
    seen = np.zeros_like(past.have)
    for record in reversed(records):
        if record.number <= target:
            break
        if record.low >= high or record.low + record.have.size <= low:
            continue
        part = slice(record.low, record.low + record.have.size)
        have = record.have & ~seen[part]
        if record.writer is p or (record.writer.rank == p.rank and record.since <= p.rank_view):
            seen[part] |= have
        else:
            lay_over(past.data[part], record.old, have)
            past.have[part] |= have
    return past
