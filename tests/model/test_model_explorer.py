"""The explorer of small models: what it must see, how it tells it, and that its reduction loses
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from model_explorer import Outcome, explore
from model_machine import Look, Machine, Ops, Read, Release, Store, Wait


def _machine(*programs: Callable[[], Ops]) -> Machine:
    """Process i is rank i's; counters ``a``, ``b``, ``c``, and three cells."""
    machine = Machine(len(programs))
    for name in "abc":
        machine.counter(name)
    machine.memory("cell", 3)
    for rank, program in enumerate(programs):
        machine.add(rank, f"rank {rank}", program)
    return machine


def _found(*programs: Callable[[], Ops], mortal: tuple[int, ...] = ()) -> Outcome:
    """With and without reduction: the same result."""
    full, reduced = (
        explore(_machine(*programs), mortal=mortal, reduced=reduced) for reduced in (False, True)
    )
    assert bool(full.failure) == bool(reduced.failure)
    assert full.failure or full.finals == reduced.finals
    return full


def test_a_message_arrives() -> None:
    def send() -> Ops:
        yield Store(0, 7)
        yield Release(0)

    def receive() -> Ops:
        yield Wait(0, 1)
        yield Read(0, 7)

    assert str(_found(send, receive)) == "4 states, 1 final: no failure"


def test_a_circle_is_told_with_what_everybody_waits_for() -> None:
    def first() -> Ops:
        yield Wait(0, 1)
        yield Release(1)

    def second() -> Ops:
        yield Wait(1, 1)
        yield Release(0)

    found = _found(first, second)
    assert (
        found.failure
        == "nobody can go on: rank 0 waits for a >= 1, which is 0; rank 1 waits for b >= 1, which "
        "is 0"
    )
    assert found.trace == ()


def test_a_row_that_is_not_published_is_not_there() -> None:
    def send() -> Ops:
        yield Release(0)
        yield Store(0, 7)
        yield Release(1)

    def receive() -> Ops:
        yield Wait(0, 1)
        yield Read(0, 7)

    found = _found(send, receive)
    assert found.trace == ("rank 0: adds 1 to a", "rank 1: sees a >= 1, reads row 7 of cell[0]")
    assert found.failure == "rank 1 wants row 7 of cell[0] and finds nothing unread"
    assert "after 2 steps" in str(found) and "  1. rank 0: adds 1 to a\n" in str(found)


def test_a_row_that_is_overwritten() -> None:
    def send() -> Ops:
        for row in (7, 8):
            yield Store(0, row)
            yield Release(0)

    def receive() -> Ops:
        for count, row in ((1, 7), (2, 8)):
            yield Wait(0, count)
            yield Read(0, row)

    found = _found(send, receive)
    assert found.failure == "rank 0 overwrites row 7 of cell[0], which nobody has read"
    assert found.trace[-1] == "rank 0: stores row 8 into cell[0]"
    assert len(found.trace) == 3


def test_a_row_that_nobody_reads() -> None:
    def send() -> Ops:
        yield Store(1, 7)
        yield Release(0)

    assert _found(send).failure == "all have ended, and nobody has read row 7 of cell[1]"


def test_what_is_seen_decides_what_follows() -> None:
    """Rank 1 ends only if it never sees 2: every value that it may see is tried."""

    def send() -> Ops:
        yield Release(0)
        yield Release(0)

    def receive() -> Ops:
        seen = yield Look(0, 1, 2)
        yield Wait(1, seen - 1)

    found = _found(send, receive)
    assert found.trace == ("rank 0: adds 1 to a", "rank 0: adds 1 to a", "rank 1: sees a = 2")
    assert found.failure == "nobody can go on: rank 1 waits for b >= 1, which is 0"


def _relay(have: int, tell: int) -> Callable[[], Ops]:
    def run() -> Ops:
        yield Wait(have, 1)
        yield Release(tell)

    return run


def _start() -> Ops:
    yield Release(0)


def test_who_waits_for_a_dead_rank_ends_and_names_it() -> None:
    assert not _found(_start, _relay(0, 1), _relay(1, 2), mortal=(1,)).failure


def test_who_waits_for_something_else_is_found() -> None:
    """Rank 2 waits for nobody at all."""
    found = _found(_start, _relay(0, 1), _relay(2, 1), mortal=(1,))
    assert "rank 2 waits for c >= 1" in found.failure


def test_a_wait_that_names_its_own_rank_is_found() -> None:
    machine = _machine(_start, _relay(0, 1))
    machine.add(1, "rank 1 again", _relay(1, 2))
    for reduced in (False, True):
        found = explore(machine, mortal=(0,), reduced=reduced)
        assert (
            found.failure == "waits name the wrong rank: rank 1 again waits for b >= 1, which is 0"
        )


def _random_program(seed: int) -> Callable[[], Ops]:
    def run() -> Ops:
        dice = random.Random(seed)
        for _ in range(dice.randint(2, 5)):
            counter, cell = dice.randrange(3), dice.randrange(3)
            kind = dice.choice(["wait", "look", "store", "read", "release", "release"])
            if kind == "wait":
                yield Wait(counter, dice.randint(1, 2))
            elif kind == "look":
                if (yield Look(counter, 1, 2)) == 2:
                    yield Release((counter + 1) % 3)
            elif kind == "store":
                yield Store(cell, 1 + cell)
            elif kind == "read":
                yield Read(cell, 1 + cell)
            else:
                yield Release(counter)
        yield Release(dice.randrange(3))

    return run


def test_reduction_keeps_every_verdict() -> None:
    """Random machines: found with reduction if and only if without, and as many final states."""
    verdicts = {"": 0}
    for seed in range(1500):
        dice = random.Random(seed)
        programs = [_random_program(dice.randrange(10**6)) for _ in range(dice.choice([2, 3, 4]))]
        found = _found(*programs, mortal=(0,) if dice.random() < 0.3 else ())
        kind = next(
            (
                word
                for word in ("nobody can", "finds", "overwrites", "nobody has")
                if word in found.failure
            ),
            "",
        )
        verdicts[kind] = verdicts.get(kind, 0) + 1
    assert min(verdicts.values()) > 30 and len(verdicts) == 5, verdicts
