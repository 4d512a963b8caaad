"""Engine low_latency where rows cross once per node, as a small model
(``kernels/low_latency_rail.py``).

Messages between nodes are those of ``model_low_latency.py``, rows and sums in chunks, and fenced:
those from one rank to another land in the order of their calls. Inside a node ranks store, and set
flags. A row that lands at a rail has two readers, who hands it on and who places it, so it has a
cell for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import permutations, product
from typing import NamedTuple

from model_low_latency import HEADER, ROWS, WEIGHTS, Call, Chunks, Machines, Message, cut, until
from model_machine import Look, Machine, Ops, Read, Release, Store, wait
from model_rings import Bug, Kernels, Routing


class Slot(NamedTuple):
    """A slot inside a node, and its flag in one call. ``row`` 0: nothing comes."""

    cell: int
    flag: int
    row: int


class Crossing(NamedTuple):
    """Rows, or sums, from one rank to another. ``copies``: where the second reader finds rows."""

    chunks: Chunks
    copies: Sequence[int]

    @property
    def rows(self) -> list[int]:
        return [row for message in self.chunks for row in message.rows]

    def place(self, j: int) -> tuple[Message, int]:
        """The chunk of row number ``j``, and its place there; the first if there is none."""
        size = max(len(self.chunks[0].rows), 1)
        return (self.chunks[j // size], j % size) if j < len(self.rows) else (self.chunks[0], j)


class Nodes:
    """All ``calls`` of ranks in nodes of ``per_node``; chunks have ``size`` rows. ``in_turn``: a
    kernel has a program for each rank, which does its part of each step, one after the other; else
    every part is a process."""

    def __init__(
        self,
        calls: Sequence[Call],
        per_node: int,
        size: int,
        *,
        in_turn: bool = False,
        bug: str = "",
    ) -> None:
        self._ranks, self._per_node, self._bug = len(calls[0].routing), per_node, Bug(bug)
        self._size = size
        self._kernels = Kernels(self._ranks)
        self._cells: dict[tuple[object, ...], int] = {}
        self._void = self._kernels.machine.memory("nothing", 1)[0]
        self._sent = defaultdict[tuple[int, int], list[tuple[int, int, int, int]]](list)
        self._most = max(len(tokens) for call in calls for tokens in call.routing)
        self._parts: list[tuple[int, int, str, Callable[[], Ops]]] = []
        for number, call in enumerate(calls):
            (self._combine if call.combine else self._dispatch)(number, call)
            for rank, name, part in self._programs() if in_turn else self._apart():
                self._kernels.add(rank, number, name, part)
            self._parts.clear()
        self.machine = self._kernels.built()

    def _apart(self) -> Iterator[tuple[int, str, Callable[[], Ops]]]:
        for rank, _, name, part in self._parts:
            yield rank, name, part

    def _programs(self) -> Iterator[tuple[int, str, Callable[[], Ops]]]:
        for rank, pid in product(range(self._ranks), repeat=2):
            parts = [part for r, p, _, part in self._parts if (r, p) == (rank, pid)]
            yield rank, f"program {pid}", partial(_one_after_the_other, parts)

    # The grid

    def _node(self, rank: int) -> range:
        first = rank // self._per_node * self._per_node
        return range(first, first + self._per_node)

    def _near(self, me: int) -> list[int]:
        return [rank for rank in self._node(me) if rank != me]

    def _far(self, me: int) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self._node(me)]

    def _rail(self, rank: int, me: int) -> int:
        """The rank of ``me``'s node with the local index of ``rank``."""
        return self._node(me)[rank % self._per_node]

    def _handed_on(self, me: int) -> list[int]:
        """Far ranks whose rows come through a neighbour."""
        return [rank for rank in self._far(me) if self._rail(rank, me) != me]

    def _on_rail(self, me: int) -> list[int]:
        return [rank for rank in self._far(me) if self._rail(rank, me) == me]

    def _rows(self, number: int, call: Call, owner: int, to: Sequence[int]) -> list[int]:
        """The owner's rows for any of the ranks ``to``: no two in a call have the same number, nor
        in calls that follow each other."""
        first = 1 + (number % 4 * self._ranks + owner) * self._most
        tokens = call.routing[owner]
        return [first + t for t, picks in enumerate(tokens) if set(to).intersection(picks)]

    def _crossing(self, number: int, call: Call, owner: int, rail: int) -> list[int]:
        """The owner's rows that go to the node of ``rail``, by their numbers."""
        return self._rows(number, call, owner, self._node(rail))

    def _jth(self, number: int, call: Call, owner: int, to: int, j: int) -> int:
        """The ``j``-th row of those if it goes to rank ``to`` there; else 0."""
        crossing = self._crossing(number, call, owner, to)
        row = crossing[j] if j < len(crossing) else 0
        return row if row in self._rows(number, call, owner, [to]) else 0

    def _do(self, rank: int, program: int, name: str, part: Callable[[], Ops]) -> None:
        self._parts.append((rank, program % self._ranks, name, part))

    def _pid(self, me: int, to: int) -> int:
        """The program that announces to rank ``to``, and puts there."""
        return (me + self._ranks - 1 - to) % self._ranks

    # Memory

    def _cell(self, number: int, *at: object) -> int:
        key = (0 if self._bug("one half only") else number % 2, *at)
        if key not in self._cells:
            title = f"half {key[0]}, " + " ".join(map(str, at))
            self._cells[key] = self._kernels.machine.memory(title, 1)[0]
        return self._cells[key]

    def _counter(self, number: int, *at: object) -> int:
        return self._kernels.machine.counter(f"call {number}, " + " ".join(map(str, at)))

    def _slot(self, number: int, at: int, rank: int, j: int, row: int) -> Slot:
        """Slot (``rank``, j) of rank ``at``."""
        where = ("slot of", at, "for", rank, j)
        cell = self._cell(number, *where) if row else self._void
        return Slot(cell, self._counter(number, "flag", *where), row)

    def _crossing_in(
        self, number: int, a: int, b: int, rows: list[int], *, copied: bool = False
    ) -> Crossing:
        """``rows`` from ``a`` to ``b``, which are ``copied`` or not."""
        sent = [
            self._message(number, ROWS, a, b, each, c * self._size, copied=copied)
            for c, each in enumerate(cut(rows, self._size))
        ]
        return Crossing([message for message, _ in sent], [at for _, each in sent for at in each])

    def _message(
        self,
        number: int,
        kind: int,
        a: int,
        b: int,
        rows: list[int],
        first: int = 0,
        *,
        copied: bool = False,
    ) -> tuple[Message, list[int]]:
        """``rows`` from ``a`` to ``b``, from number ``first`` on, and the wire that brings them;
        where the second reader finds them, if they are ``copied``."""
        places = [
            [self._cell(number, what, kind, a, b, first + j) for j in range(len(rows))]
            for what in ("staging", "landed", *["handed on"] * copied)
        ]
        packed, posted, signal = (
            self._counter(number, what, kind, first, a, b)
            for what in ("packed", "posted", "signal")
        )
        message = Message(places[0], places[1], packed, posted, signal, rows)
        sent = self._sent[a, b]
        earlier = [other for n, _, _, other in sent if n < number]
        word = number - 2, kind, first
        same = [other for *at, other in sent if tuple(at) == word and not rows]
        sent.append((number, kind, first, signal))
        copies = places[2] if copied else []
        carried = partial(self._carry, message, copies, earlier, same)
        self._kernels.wire(a, f"wire {kind} from {first} on of call {number} to {b}", carried)
        return message, copies

    def _carry(
        self, message: Message, copies: Sequence[int], earlier: list[int], same: list[int]
    ) -> Ops:
        """The network: behind the fence, bytes, then the signal. ``same``: the message before whose
        signal has the same word."""
        yield from wait(message.posted, 1)
        for signal in earlier if not self._bug("no fence") else []:
            yield from wait(signal, 1)
        for signal in same if self._bug("no fence") else []:
            landed = yield Look(signal, 0, 1)
            if not landed:  # it will turn this one back
                yield Read(self._void, 1)
        if self._bug("signal before data"):
            yield Release(message.signal)
        for cell, row in zip(message.source, message.rows, strict=True):
            yield Read(cell, row)
        for cells in (message.target, copies):
            for cell, row in zip(cells, message.rows, strict=False):
                yield Store(cell, row)
        if not self._bug("signal before data"):
            yield Release(message.signal)

    # Kernels

    def _tags(self, number: int) -> dict[tuple[int, int], int]:
        """Everybody tells everybody that this call has begun."""
        tags: dict[tuple[int, int], int] = {}
        for a, b in permutations(range(self._ranks), 2):
            if b in self._near(a):
                tags[a, b] = posted = self._counter(number, "tag", a, b)
            else:
                message, _ = self._message(number, HEADER, a, b, [])
                tags[a, b], posted = message.signal, message.posted
            self._do(a, self._pid(a, b), f"tells {b}", partial(_release, [posted]))
        return tags

    def _dispatch(self, number: int, call: Call) -> None:
        tags, tokens = self._tags(number), range(self._most)
        sent = {
            (a, b): self._crossing_in(number, a, b, self._crossing(number, call, a, b), copied=True)
            for a in range(self._ranks)
            for b in self._on_rail(a)
        }
        near = {
            (a, b, row): self._slot(number, b, a, row, row)
            for a in range(self._ranks)
            for b in self._near(a)
            for row in self._rows(number, call, a, [b])
        }
        handed = {
            (s, b, j): self._slot(number, b, s, j, self._jth(number, call, s, b, j))
            for b, j in product(range(self._ranks), tokens)
            for s in self._handed_on(b)
        }
        for me in range(self._ranks):
            for t, row in enumerate(self._rows(number, call, me, range(self._ranks))):
                slots = [near[me, b, row] for b in self._near(me) if (me, b, row) in near]
                to = [message for b in self._on_rail(me) for message in sent[me, b].chunks]
                self._do(me, t, f"packs row {row}", partial(_pack, row, slots, to))
            for u, b, message in self._puts(me, sent):
                puts = partial(_put, message, self._bug)
                self._do(me, self._ranks - 1 - u % self._ranks, f"puts to {b}", puts)
            kept = tokens[:-1] if self._bug("last row not handed on") else tokens
            for u, (s, j) in enumerate(product(self._on_rail(me), kept)):
                slots = [handed[s, b, j] for b in self._near(me)]
                hands = partial(_hand_on, sent[s, me], j, slots, self._bug)
                self._do(me, u % (self._ranks - 1), f"hands on row {j} of {s}", hands)
            ready = self._counter(number, "ready of", me)
            self._leads(me, tags, [ready])
            takes = [partial(_take, ready, slot) for (_, b, _), slot in near.items() if b == me]
            takes += [partial(_take, ready, slot) for (_, b, _), slot in handed.items() if b == me]
            takes += [
                partial(_receive, ready, sent[s, me], j, self._bug)
                for s, j in product(self._on_rail(me), tokens)
            ]
            for u, part in enumerate(takes):
                self._do(me, u, f"receives {u}", part)

    def _combine(self, number: int, call: Call) -> None:
        tags, tokens = self._tags(number), range(self._most)
        sums = {
            (b, a): self._crossing_in(number, b, a, self._crossing(number, call, a, b))
            for a in range(self._ranks)
            for b in self._on_rail(a)
        }
        near = {
            (b, a, row): self._slot(number, a, b, row, row)
            for a in range(self._ranks)
            for b in self._near(a)
            for row in self._rows(number, call, a, [b])
        }
        back = {
            (b, s, j): self._slot(
                number, self._rail(s, b), self._rail(b, s), j, self._jth(number, call, s, b, j)
            )
            for b, j in product(range(self._ranks), tokens)
            for s in self._handed_on(b)
        }
        weights = self._weights(number, call) if call.weighted else {}
        for me in range(self._ranks):
            for u, ((b, _, row), slot) in enumerate(near.items()):
                if b == me:
                    self._do(me, u, f"sums row {row}", partial(_hand_back, slot, None, self._bug))
            kept = tokens[:-1] if self._bug("last sum not handed back") else tokens
            for u, (s, j) in enumerate(product(self._handed_on(me), kept)):
                part = partial(_hand_back, back[me, s, j], weights.get((s, me)), self._bug)
                self._do(me, u, f"hands back row {j} of {s}", part)
            for u, (s, j) in enumerate(product(self._on_rail(me), tokens)):
                if j < len(sums[me, s].rows):
                    slots = [back[b, s, j] for b in self._near(me)]
                    given = weights.get((s, me)) if self._jth(number, call, s, me, j) else None
                    part = partial(_sum_of_node, sums[me, s], j, slots, given, self._bug)
                    self._do(me, u % (self._ranks - 1), f"sums row {j} of {s}", part)
            for u, a, message in self._puts(me, sums):
                puts = partial(_put, message, self._bug)
                self._do(me, u % (self._ranks - 1), f"puts to {a}", puts)
            self._leads(me, tags, [])
            for t, row in enumerate(self._rows(number, call, me, range(self._ranks))):
                slots = [near[b, me, row] for b in self._near(me) if (b, me, row) in near]
                others = [sums[b, me] for b in self._on_rail(me)]
                self._do(me, t, f"adds row {row}", partial(_add, row, slots, others, self._bug))

    def _puts(
        self, me: int, sent: dict[tuple[int, int], Crossing]
    ) -> Iterator[tuple[int, int, Message]]:
        """Each chunk, with its number in the round of puts and where it goes."""
        for b in self._on_rail(me):
            for c, message in enumerate(sent[me, b].chunks):
                yield c * self._ranks + (b - me - 1) % self._ranks, b, message

    def _weights(self, number: int, call: Call) -> dict[tuple[int, int], Message]:
        """Of the owner, to whom each of its rows goes; to far ranks by messages of their own."""
        sent = {
            (a, b): self._message(number, WEIGHTS, a, b, self._rows(number, call, a, [b]))[0]
            for a in range(self._ranks)
            for b in self._far(a)
        }
        for a in range(self._ranks):
            for t, row in enumerate(self._rows(number, call, a, self._far(a))):
                packs = partial(_pack, row, [], [sent[a, b] for b in self._far(a)])
                self._do(a, t, f"packs weights of row {row}", packs)
            for b in self._far(a):
                puts = partial(_put, sent[a, b], self._bug)
                self._do(a, self._pid(a, b), f"puts weights to {b}", puts)
        return sent

    def _leads(self, me: int, tags: dict[tuple[int, int], int], ready: list[int]) -> None:
        """Wait for the tags of all."""
        awaited = [] if self._bug("tags not awaited") else [tags[a, b] for a, b in tags if b == me]
        self._do(me, self._ranks - 1, "leader", partial(_release, ready, awaited))


def _one_after_the_other(parts: Sequence[Callable[[], Ops]]) -> Ops:
    for part in parts:
        yield from part()


def _release(counters: Sequence[int], awaited: Sequence[int] = ()) -> Ops:
    for counter in awaited:
        yield from wait(counter, 1)
    for counter in counters:
        yield Release(counter)


def _pack(row: int, slots: Sequence[Slot], messages: Sequence[Message]) -> Ops:
    """``send_piece``: a row to neighbours, and into staging for rails."""
    here = [message for message in messages if row in message.rows]
    for slot in slots:
        yield Store(slot.cell, row)
    for message in here:
        yield Store(message.source[message.rows.index(row)], row)
    yield from _release([slot.flag for slot in slots] + [message.packed for message in here])


def _put(message: Message, bug: Bug) -> Ops:
    """``put_rows``, ``put_sums``, ``put_weights``."""
    want = len(message.rows) - bug("last row not awaited")
    yield from wait(message.packed, want, stream=True)
    yield Release(message.posted)


def _hand_on(sent: Crossing, j: int, slots: Sequence[Slot], bug: Bug) -> Ops:
    """``hand_on``: row number ``j`` to the neighbours that it goes to, and word to all."""
    yield from until(sent.chunks, sent.place(j)[0], bug)
    flags, early = [slot.flag for slot in slots], bug("flag before the row")
    if early:
        yield from _release(flags)
    if j < len(sent.rows):
        yield Read(sent.copies[j], sent.rows[j])
        for slot in slots:
            if slot.row:
                yield Store(slot.cell, slot.row)
    if not early:
        yield from _release(flags)


def _take(ready: int, slot: Slot) -> Ops:
    """``receive_slot`` of a row that a neighbour stores."""
    yield from wait(ready, 1, stream=True)
    yield from wait(slot.flag, 1)
    if slot.row:
        yield Read(slot.cell, slot.row)


def _receive(ready: int, sent: Crossing, j: int, bug: Bug) -> Ops:
    """``receive_slot`` of row number ``j`` of a far rank."""
    yield from wait(ready, 1, stream=True)
    message, at = sent.place(j)
    yield from until(sent.chunks, message, bug)
    if at < len(message.rows):
        yield Read(message.target[at], message.rows[at])


def _weigh(weights: Message | None, row: int) -> Ops:
    if weights is not None:
        yield from wait(weights.signal, 1)
        yield Read(weights.target[weights.rows.index(row)], row)


def _hand_back(slot: Slot, weights: Message | None, bug: Bug) -> Ops:
    """``hand_back``, or ``_send_sum`` to a neighbour: a sum into its slot, or word of none."""
    early = bug("flag before the sum")
    if slot.row:
        yield from _weigh(weights, slot.row)
    if early:
        yield Release(slot.flag)
    if slot.row:
        yield Store(slot.cell, slot.row)
    if not early:
        yield Release(slot.flag)


def _sum_of_node(
    sums: Crossing, j: int, slots: Sequence[Slot], weights: Message | None, bug: Bug
) -> Ops:
    """``sum_of_node``: the own sum, those of the neighbours, into staging."""
    message, at = sums.place(j)
    yield from _weigh(weights, message.rows[at])
    yield Store(message.source[at], message.rows[at])
    for slot in slots:
        if not bug("neighbours not awaited"):
            yield from wait(slot.flag, 1)
        if slot.row:
            yield Read(slot.cell, slot.row)
    yield Release(message.packed)


def _add(row: int, slots: Sequence[Slot], sums: Sequence[Crossing], bug: Bug) -> Ops:
    """``_add_rows``: what neighbours made of a row, and other nodes."""
    for slot in slots:
        yield from wait(slot.flag, 1)
        yield Read(slot.cell, row)
    for each in sums:
        if row in each.rows:
            message, at = each.place(each.rows.index(row))
            yield from until(each.chunks, message, bug)
            yield Read(message.target[at], row)


# Ranks that are left out

SOURCE, RAIL, NEIGHBOUR = range(3)
LOST = 2


Seen = Generator[Look, int, int]


class Apart:
    """Calls of a source, its rail and that one's neighbour. Each may leave out any other at any
    time. Even calls are dispatches of one row for the neighbour, odd ones their combines. Each
    rank is one process."""

    def __init__(self, calls: int, *, bug: str = "") -> None:
        self.machine, self._calls, self._bug, self._has = Machine(3), calls, Bug(bug), 0
        self.machine.leaves_out = True
        pairs = [(SOURCE, RAIL), (RAIL, NEIGHBOUR), (NEIGHBOUR, RAIL), (RAIL, SOURCE)]
        self._cells = {
            (name, *at): self.machine.memory(f"{name} {at}", 2)
            for at in pairs
            for name in (("slot",) if SOURCE not in at else ("staging", "slot"))
        }
        self._words = {
            (n, *at): self.machine.counter(f"word of call {n}, {at}")
            for n in range(calls)
            for at in pairs
        }
        self._posted = {
            (n, *at): self.machine.counter(f"posted in call {n}, {at}")
            for n in range(calls)
            for at in pairs
            if SOURCE in at
        }
        self._tags = {
            (n, *at): self.machine.counter(f"tag of call {n}, {at}")
            for n in range(calls)
            for at in permutations(range(3), 2)
        }
        lives = {SOURCE: self._source, RAIL: self._rail, NEIGHBOUR: self._neighbour}
        for me, life in lives.items():
            self.machine.add(me, ("source", "rail", "neighbour")[me], partial(self._live, me, life))
        for n, a, b in self._posted:
            self.machine.add(
                a, f"wire of call {n} to {b}", partial(self._carry, n, a, b), wire=True
            )

    def _live(self, me: int, life: Callable[[int, set[int]], Ops]) -> Ops:
        left = set[int]()
        others = [rank for rank in range(3) if rank != me]
        for n in range(self._calls):
            for b in others:
                if b not in left or self._bug("sent to ranks left out"):
                    yield Release(self._tags[n, me, b])
            yield from life(n, left)
            for a in others:
                yield from self._seen(self._tags[n, a, me], a, left)

    def _seen(self, word: int, rank: int, left: set[int], most: int = 1) -> Seen:
        """A word of ``rank``, once it is there; 0 if that is left out, now or before."""
        seen = 0
        if rank not in left:
            seen = yield Look(word, 0, most)
            if not seen:
                left.add(rank)
        return seen

    def _goes(self, to: int, left: set[int]) -> bool:
        return to not in left or self._bug("sent to ranks left out")

    def _send(self, n: int, me: int, to: int, *, far: bool) -> Ops:
        yield Store(self._cells["staging" if far else "slot", me, to][n % 2], 1 + n)
        yield Release((self._posted if far else self._words)[n, me, to])

    def _source(self, n: int, left: set[int]) -> Ops:
        if n % 2 == 0:
            if self._goes(RAIL, left):
                yield from self._send(n, SOURCE, RAIL, far=True)
        elif (yield from self._seen(self._words[n, RAIL, SOURCE], RAIL, left)):
            yield Read(self._cells["slot", RAIL, SOURCE][n % 2], 1 + n)

    def _rail(self, n: int, left: set[int]) -> Ops:
        if n % 2 == 0:
            came = yield from self._seen(self._words[n, SOURCE, RAIL], SOURCE, left)
            if came:
                yield Read(self._cells["slot", SOURCE, RAIL][n % 2], 1 + n)
            if self._goes(NEIGHBOUR, left):
                if came or self._bug("lost row told as there"):
                    if came:
                        yield Store(self._cells["slot", RAIL, NEIGHBOUR][n % 2], 1 + n)
                    yield Release(self._words[n, RAIL, NEIGHBOUR])
                else:
                    yield Release(self._words[n, RAIL, NEIGHBOUR], LOST)
            return
        back = yield from self._seen(self._words[n, NEIGHBOUR, RAIL], NEIGHBOUR, left, LOST)
        if back == 1:
            yield Read(self._cells["slot", NEIGHBOUR, RAIL][n % 2], 1 + n)
        if self._goes(SOURCE, left):
            yield from self._send(n, RAIL, SOURCE, far=True)

    def _neighbour(self, n: int, left: set[int]) -> Ops:
        if n % 2 == 0:
            self._has = yield from self._seen(self._words[n, RAIL, NEIGHBOUR], RAIL, left, LOST)
            if self._has == 1:
                yield Read(self._cells["slot", RAIL, NEIGHBOUR][n % 2], 1 + n)
        elif self._goes(RAIL, left):
            if self._has == 1:
                yield from self._send(n, NEIGHBOUR, RAIL, far=False)
            else:
                yield Release(self._words[n, NEIGHBOUR, RAIL], LOST)

    def _carry(self, n: int, a: int, b: int) -> Ops:
        yield from wait(self._posted[n, a, b], 1)
        yield Read(self._cells["staging", a, b][n % 2], 1 + n)
        yield Store(self._cells["slot", a, b][n % 2], 1 + n)
        yield Release(self._words[n, a, b])


# What is explored

_NOBODY: Routing = ((), (), (), ())
_ONE: Routing = (((2, 3),), (), (), ())
_BOTH_WAYS: Routing = (((1, 2, 3),), (), (), ((0,),))
_SEVERAL: Routing = (((2, 3), (3,)), (), (), ((0,),))
_ALL: Routing = tuple((tuple(b for b in range(4) if b != a),) for a in range(4))
_THREE_NODES: Routing = (((2,),), (), (), ((0, 1),), (), ((0, 3),))


def _there_and_back(
    routing: Routing, *, in_turn: bool = False, weighted: bool = True, size: int = 1
) -> Machines:
    """Dispatch, combine, dispatch: halves are used again. Chunks of ``size`` rows."""
    calls = [Call(routing), Call(routing, combine=True, weighted=weighted), Call(routing)]
    return lambda bug: iter([Nodes(calls, 2, size, in_turn=in_turn, bug=bug).machine])


def _again(routing: Routing, *, combine: bool) -> Machines:
    calls = [Call(routing, combine=combine)] * 3
    return lambda bug: iter([Nodes(calls, 2, 1, bug=bug).machine])


def _leave_each_other(calls: int) -> Machines:
    return lambda bug: iter([Apart(calls, bug=bug).machine])


def mortals() -> Machine:
    """A dispatch and its combine, of which a rank may die."""
    return Nodes([Call(_ONE), Call(_ONE, combine=True)], 2, 1, in_turn=True).machine


NODES = {
    "a row": _there_and_back(_ONE),
    "a row, program by program": _there_and_back(_ONE, in_turn=True),
    "both ways": _there_and_back(_BOTH_WAYS),
    "both ways, program by program": _there_and_back(_BOTH_WAYS, in_turn=True),
    "several rows": _there_and_back(_SEVERAL, size=2),
    "several chunks": _there_and_back(_SEVERAL),
    "several chunks, program by program": _there_and_back(_SEVERAL, in_turn=True),
    "all to all": _there_and_back(_ALL),
    "three nodes": _there_and_back(_THREE_NODES, weighted=False),
    "dispatches only": _again(_ONE, combine=False),
    "combines only": _again(_ONE, combine=True),
    "3 calls, ranks leave each other out": _leave_each_other(3),
}
LARGE = {
    "all to all, program by program": _there_and_back(_ALL, in_turn=True, weighted=False),
    "5 calls, ranks leave each other out": _leave_each_other(5),
}
"""What ``make soak`` explores besides."""
BUGS = {
    "signal before data": ("a row", "finds"),
    "flag before the row": ("a row", "finds"),
    "flag before the sum": ("a row", "finds"),
    "last row not awaited": ("several rows", "finds"),
    "own chunk not awaited": ("several chunks", "finds"),
    "neighbours not awaited": ("a row", "finds"),
    "last row not handed on": ("a row", "nobody can go on"),
    "last sum not handed back": ("a row", "nobody can go on"),
    "one half only": ("dispatches only", "overwrites"),
    "tags not awaited": ("combines only", "overwrites"),
    "no fence": ("combines only", "nothing"),
    "sent to ranks left out": ("3 calls, ranks leave each other out", "overwrites"),
    "lost row told as there": ("3 calls, ranks leave each other out", "finds"),
}
"""Each with machines that show it, and words of the failure."""
