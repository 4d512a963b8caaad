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

from tokenyard.testing.simulator.pages import (
    PAGE,
    SHIFT,
    Addresses,
    ByteMap,
    Bytes,
    Page,
    Span,
    Values,
    lay_over,
    raw,
    spans,
)

Written: TypeAlias = "tuple[int, int, Bytes]"
"""Part of a write: a page, the first byte in it, and 0xFF for bytes from there on that are written.
"""

_WINDOW = 4096
"""Writes that the past reaches back."""
_MOST_RECORDS = 128
_MOST_BUNDLES = 32
_MOST_READS = 4096


class Lanes(NamedTuple):
    """Lanes of a tensor of this shape (``taking``: slice or indices of those of its flat elements
    that take part), which has one for each thread."""

    shape: tuple[int, ...]
    taking: Any
    addresses: Addresses

    def is_same(self, other: Lanes) -> bool:
        """Whether each thread touches what it touches in ``other``, and no other thread does."""
        return (
            self.shape == other.shape
            and np.array_equal(self.addresses, other.addresses)
            and np.array_equal(self.taking, other.taking)
            and np.unique(self.addresses).size == self.addresses.size
        )


class Read(NamedTuple):
    """A load. ``lanes``: None if several threads may load the same element."""

    where: list[Span]
    size: int
    lanes: Lanes | None


class Stores(ByteMap):
    """Pending stores. ``log``: their lanes and bytes of an element, but for what has leaked."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Addresses, int]] = []

    def absorb(self, newer: Stores) -> None:
        """Put all of ``newer`` over this, and empty it."""
        for number, page in newer.items():
            mine = self.setdefault(number, page)
            if mine is not page:
                lay_over(mine.data, page.data, page.have)
                mine.have |= page.have
        self.log += newer.log
        newer.clear()
        newer.log.clear()


class Pending:
    """One program's part of the memory model."""

    def __init__(self, rank: int, now: int) -> None:
        self.rank = rank
        self.fresh, self.fenced = Stores(), Stores()
        # Writes up to here are seen: all of them, and those of programs of the same rank (at least
        # as many)
        self.view = self.rank_view = now
        self.acquired = self.rank_acquired = now  # the same, once the program passes a barrier
        # Since the last barrier: threads may lag behind and not have read yet
        self.reads: list[Read] = []
        self.exposed: list[tuple[int, Read]] = []  # those of them before a release, with its number

    def give_away(self) -> Stores:
        """All stores; none are pending any more."""
        self.fenced.absorb(self.fresh)
        stores, self.fenced = self.fenced, Stores()
        return stores


class Record(NamedTuple):
    """A write: bytes from ``low`` of a page were ``old``; its rank could see it ``since``."""

    number: int
    since: int
    writer: Pending
    low: int
    have: Bytes
    old: Bytes

    @property
    def part(self) -> slice:
        return slice(self.low, self.low + self.have.size)


class Bundle(NamedTuple):
    """Stores that one rank may see and others may not."""

    number: int
    writer: Pending
    stores: ByteMap


class WeakMemory:
    """All ranks' memory. ``written(where)`` is called after every write to real memory; ``stale``:
    how likely a plain load looks into the past."""

    def __init__(
        self, world_size: int, rng: Random, stale: float, written: Callable[[list[Written]], None]
    ) -> None:
        self._rng, self._stale, self._written = rng, stale, written
        self.now = 0
        self._past: dict[int, list[Record]] = {}
        self._bundles: list[list[Bundle]] = [[] for _ in range(world_size)]
        # The newest view of the rank's programs that released at an address
        self._told: dict[tuple[int, int], int] = {}

    # What programs do

    def store(self, p: Pending, addresses: Addresses, where: list[Span], values: Values) -> None:
        p.fresh.put(where, values)
        p.fresh.log.append((addresses, values.itemsize))

    def barrier(self, p: Pending) -> None:
        """All threads meet: one may release for all, and all see what one has acquired."""
        p.fenced.absorb(p.fresh)
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
        stores, p.fenced = p.fenced, Stores()
        if everywhere:
            seen = max(p.rank_view, p.rank_acquired)
            self.publish(p.rank, lambda bundle: bundle.writer is p or bundle.number <= seen)
            self.write(stores, p)
        else:
            self.bundle(p, stores)
        for place in ((p.rank, address) for address in addresses.tolist()):
            self._told[place] = max(p.view, p.acquired, self._told.get(place, 0))

    def load(
        self, p: Pending, where: list[Span], values: Values, lanes: Lanes | None = None
    ) -> bool:
        """Turn what real memory holds into what ``p`` loads. True if a newer value exists."""
        if len(p.reads) < _MOST_READS:
            p.reads.append(Read(where, values.itemsize, lanes))
        looks_back = self.now > p.view and self._rng.random() < self._stale
        stale = looks_back and self._look_back(p, where, values)
        bundles = self._bundles[p.rank]
        if bundles:
            hides = self._rng.random() < self._stale
            for bundle in bundles:
                if not any(span.page in bundle.stores for span in where):
                    continue
                newer = np.array(values)
                bundle.stores.over(where, newer)
                if bundle.writer is p or bundle.number <= p.rank_view or not hides:
                    values[:] = newer
                else:
                    stale = stale or newer.tobytes() != values.tobytes()
        for stores in (p.fenced, p.fresh):
            if stores:
                stores.over(where, values)
        return stale

    def before_atomic(self, p: Pending, where: list[Span], size: int) -> None:
        """An atomic works on real memory: stores of its rank to the same place go there first."""
        ours = ByteMap()
        for stores in (*(bundle.stores for bundle in self._bundles[p.rank]), p.fenced, p.fresh):
            stores.take(where, size, ours)
        self.write(ours, p)

    def after_atomic(self, p: Pending, where: list[Span], old: Values) -> None:
        """An atomic has changed real memory, which held ``old``."""
        before = ByteMap()
        before.put(where, old)
        self.now += 1
        self._written(
            [
                self._remember(number, Record(self.now, self.now, p, *page.known()))
                for number, page in before.items()
            ]
        )

    def overwritten(self, p: Pending) -> tuple[int, Pending] | None:
        """A place that ``p`` read without a barrier before a release, and who wrote it since."""
        for number, (where, size, _) in p.exposed:
            for span in where:
                for record in reversed(self._past.get(span.page, ())):
                    if record.number <= number:
                        break
                    if record.writer is p:
                        continue
                    if (span.touched(size)[record.part] & record.have).any():
                        return (span.page << SHIFT) + span.extent(size)[0], record.writer
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
                if mine is not None and (span.touched(read.size) & mine.touched(size)).any():
                    if lanes and read.lanes and read.size == size and lanes.is_same(read.lanes):
                        break
                    return (span.page << SHIFT) + mine.extent(size)[0]
        return None

    # What hardware does

    def leak(self, p: Pending) -> None:
        """Some of the program's stores, or parts of them, become visible to all."""
        out = ByteMap()
        for _ in range(self._rng.randint(1, 3)):
            logs = [stores.log for stores in (p.fresh, p.fenced) if stores.log]
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
        self.write(out, p)

    def bundle(self, p: Pending, stores: ByteMap) -> None:
        """These stores, which ``p`` gives away, become visible to its rank."""
        if stores:
            self.now += 1
            self._bundles[p.rank].append(Bundle(self.now, p, stores))
            if len(self._bundles[p.rank]) > _MOST_BUNDLES:
                self.publish_one(p.rank)

    def publish_private(self, rank: int, shared: Callable[[int, int], Bytes]) -> None:
        """Bundled stores to memory that no other rank can see go to real memory: the host may free
        it soon. ``shared(low, size)``: 0xFF for bytes that another can see."""
        for bundle in self._bundles[rank]:
            private = bundle.stores.split(lambda number: shared(number << SHIFT, PAGE))
            self.write(private, bundle.writer, bundle.number)
        self._bundles[rank] = [bundle for bundle in self._bundles[rank] if bundle.stores]

    def publish(self, rank: int, which: Callable[[Bundle], bool] = lambda _: True) -> None:
        """Bundles of a rank, all or some, become visible to all."""
        bundles = self._bundles[rank]
        self._bundles[rank] = [bundle for bundle in bundles if not which(bundle)]
        for bundle in bundles:
            if which(bundle):
                self.write(bundle.stores, bundle.writer, bundle.number)

    def publish_one(self, rank: int) -> None:
        oldest = [bundle.number for bundle in self._bundles[rank][:1]]
        self.publish(rank, lambda bundle: bundle.number in oldest)

    def write(self, stores: ByteMap, writer: Pending, since: int | None = None) -> None:
        """To real memory, which all see. ``stores`` must not be changed any more. ``since``: the
        number of the bundle that they were in."""
        if not stores:
            return
        self.now += 1
        where: list[Written] = []
        for number, page in stores.items():
            low, have, data = page.known()
            if have.size:
                memory = raw((number << SHIFT) + low, have.size)
                record = Record(self.now, since or self.now, writer, low, have, memory.copy())
                where.append(self._remember(number, record))
                lay_over(memory, data, have)
        self._written(where)
        for bundle in self._bundles[writer.rank]:  # same place, same rank: what comes later stays
            if since is None or bundle.number < since:
                bundle.stores.forget(stores)

    def forget_past(self) -> None:
        """No program runs that could look back."""
        self._past.clear()
        self._told.clear()

    def _remember(self, page: int, record: Record) -> Written:
        records = self._past.setdefault(page, [])
        records.append(record)
        if len(records) % _MOST_RECORDS == 0:
            records[:] = [each for each in records if each.number > self.now - _WINDOW]
        return page, record.low, record.have

    def _look_back(self, p: Pending, where: list[Span], values: Values) -> bool:
        """Put older values into some lanes."""
        oldest = max(p.view, self.now - _WINDOW)
        target = oldest if self._rng.random() < 0.5 else self._rng.randint(oldest, self.now)
        cut, first = self._rng.random(), self._rng.random()
        older = np.array(values)
        for span in where:
            records = self._past.get(span.page)
            if records and records[-1].number > target:
                past = _undo(p, records, target, *span.extent(values.itemsize))
                ByteMap({span.page: past}).over([span], older)
        if first < 0.5:  # torn: one part only
            middle = int(cut * values.size)
            part = slice(middle, None) if first < 0.25 else slice(0, middle)
        else:
            part = slice(0, None)
        differs = older[part].tobytes() != values[part].tobytes()
        values[part] = older[part]
        return differs


def _undo(p: Pending, records: list[Record], target: int, low: int, high: int) -> Page:
    """What bytes from ``low`` to ``high`` of a page held after write ``target``, where that was
    something else and ``p`` may still see it."""
    past = Page()
    seen = np.zeros_like(past.have)
    for record in reversed(records):
        if record.number <= target:
            break
        part = record.part
        if part.start >= high or part.stop <= low:
            continue
        have = record.have & ~seen[part]
        if record.writer is p or (record.writer.rank == p.rank and record.since <= p.rank_view):
            seen[part] |= have
        else:
            lay_over(past.data[part], record.old, have)
            past.have[part] |= have
    return past
