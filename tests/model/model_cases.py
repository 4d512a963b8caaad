"""Configurations whose models are explored: what must hold, what must fail just outside, and bugs
that must be found.

``python tests/run.py model_cases`` (``--large``: with what ``make soak`` adds) prints
``docs/benchmarks/protocol-models.md``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from model_explorer import Outcome, explore
from model_grid import Grid
from model_machine import Machine
from model_rings import Call, Rings, Routing

Machines = Callable[[], Iterator[Machine]]


class Case(NamedTuple):
    """Machines of one kind. ``mortal``: groups of ranks that may halt together. ``reduced``: see
    :func:`explore`.
    """

    machines: Machines
    mortal: tuple[tuple[int, ...], ...] = ((),)
    reduced: bool = True

    def explored(self) -> tuple[int, Outcome]:
        """How many machines, and all states of them up to the first failure."""
        count, states, finals = 0, 0, 0
        for machine in self.machines():
            for ranks in self.mortal:
                found = explore(machine, mortal=ranks, reduced=self.reduced)
                count, states, finals = count + 1, states + found.states, finals + found.finals
                if found.failure:
                    return count, found
        return count, Outcome(states, finals)


def routings(tokens: int, to: tuple[int, ...], owner: int, ranks: int) -> Iterator[Routing]:
    """Every way in which ``tokens`` of ``owner`` go to ranks of ``to``; others have none."""
    subsets = [
        tuple(rank for i, rank in enumerate(to) if bits >> i & 1) for bits in range(1 << len(to))
    ]
    for picked in product(subsets, repeat=tokens):
        yield tuple(picked if rank == owner else () for rank in range(ranks))


def everywhere(ranks: int, tokens: int) -> Routing:
    """Every rank has ``tokens``, which go to all others but, where there are several, one that
    changes from token to token.
    """
    every: list[tuple[tuple[int, ...], ...]] = []
    for me in range(ranks):
        others = [rank for rank in range(ranks) if rank != me]
        skipped = [others[t % len(others)] if t and ranks > 2 else me for t in range(tokens)]
        every.append(tuple(tuple(rank for rank in others if rank != one) for one in skipped))
    return tuple(every)


def both(routing: Routing, chunk: int = 1, batch: int = 1, row: int = 1) -> list[Call]:
    """A dispatch, and the combine of its results."""
    return [Call(routing, combine, chunk, batch, row) for combine in (False, True)]


# Rings as small as they may be (docs/reference/protocols.md, docs/reference/twolevel.md)


def least_slots(call: Call) -> int:
    """Of a ring inside a node."""
    return call.chunk + call.batch - 1 if call.combine else call.chunk


def least_far_slots(call: Call) -> int:
    """Of a network ring."""
    return call.far_chunk + call.credit - 1 + (call.batch - 1 if call.combine else 0)


def flat(call: Call, tokens: int, slots: int, bug: str = "") -> Machines:
    """Engine nvlink: every routing of rank 0's tokens to one other rank."""

    def machines() -> Iterator[Machine]:
        for some in routings(tokens, (1,), 0, 2):
            yield Rings([call._replace(routing=some)], cells=slots, bug=bug).machine

    return machines


def flows(
    call: Call,
    tokens: int,
    slots: int,
    far_slots: int,
    to: tuple[int, ...],
    bug: str = "",
    *,
    mapped: bool = False,
) -> Machines:
    """Engine twolevel, 2x2: every routing of rank 0's tokens to ranks ``to``."""

    def machines() -> Iterator[Machine]:
        for some in routings(tokens, to, 0, 4):
            calls = [call._replace(routing=some)]
            sizes = {"cells": slots, "far_cells": far_slots}
            yield Grid(calls, grid=(2, 2), **sizes, owners=(0,), mapped=mapped, bug=bug).machine

    return machines


def bounds(limit: int) -> Iterator[Call]:
    """Sizes of calls up to ``limit``."""
    no: Routing = ()
    for chunk, batch in product(range(1, limit + 1), repeat=2):
        yield Call(no, combine=True, chunk=chunk, batch=batch)


def far_bounds(limit: int) -> Iterator[Call]:
    """Likewise for network rings."""
    no: Routing = ()
    for far_chunk, credit, batch in product(range(1, limit + 1), repeat=3):
        if batch == 1:
            yield Call(no, far_chunk=far_chunk, credit=credit)
        yield Call(no, combine=True, far_chunk=far_chunk, credit=credit, batch=batch)


def each(ranks: int) -> tuple[tuple[int, ...], ...]:
    """One rank at a time."""
    return tuple((rank,) for rank in range(ranks))


def one(machine: Callable[[], Machine]) -> Machines:
    return lambda: iter([machine()])


_TWO, _THREE, _FOUR = everywhere(2, 3), everywhere(3, 3), everywhere(4, 2)
_ALONE: Routing = (((1, 2, 3),) * 3, (), (), ())
_RESIZED = [*both(_TWO), *both(_TWO, row=2)]
_RESIZED_GRID = [Call(_FOUR), Call(_FOUR, combine=True, row=2)]

CASES = {
    "nvlink, 2 ranks, 3 tokens each, 2 slots: dispatch with barriers, every order of steps": Case(
        one(lambda: Rings([Call(_TWO)], cells=2, barriers=True).machine), reduced=False
    ),
    "nvlink, 2 ranks: dispatch, combine, both again with rows twice as large, barriers, 4 or 2 "
    "slots": Case(one(lambda: Rings(_RESIZED, cells=4, barriers=True).machine)),
    "nvlink, 3 ranks, 2 channels, 3 tokens each: dispatch and combine, chunk 2, batch 2, 3 "
    "slots": Case(one(lambda: Rings(both(_THREE, chunk=2, batch=2), cells=3, channels=2).machine)),
    "nvlink, 3 ranks: dispatch, combine, dispatch, barriers, 2 slots": Case(
        one(lambda: Rings([*both(_THREE), Call(_THREE)], cells=2, barriers=True).machine)
    ),
    "nvlink, 3 ranks: combine, every routing of 3 tokens, batch 2, 2 slots": Case(
        lambda: (
            Rings([Call(some, combine=True, batch=2)], cells=2).machine
            for some in routings(3, (1, 2), 0, 3)
        )
    ),
    "nvlink, 2 ranks, one dies: dispatch, combine, dispatch, 2 slots": Case(
        one(lambda: Rings([*both(_TWO), Call(_TWO)], cells=2).machine), mortal=each(2)
    ),
    "nvlink, 3 ranks, one dies: combine, batch 2, 2 slots": Case(
        one(lambda: Rings([Call((((1, 2),) * 3, (), ()), combine=True, batch=2)], cells=2).machine),
        mortal=each(3),
    ),
    "nvlink, 2 ranks, any program halts anywhere: dispatch, combine, 2 slots": Case(
        one(lambda: Rings(both(_TWO), cells=2).machine), mortal=((0, 1),)
    ),
    "twolevel, 2x2: dispatch of rank 0, 3 tokens to all, 2 slots, 2 network slots, every order of "
    "steps": Case(
        one(
            lambda: (
                Grid(
                    [Call((((1, 2, 3),) * 3, (), (), ()))],
                    grid=(2, 2),
                    cells=2,
                    far_cells=2,
                    owners=(0,),
                ).machine
            )
        ),
        reduced=False,
    ),
    "twolevel, 2x2: dispatch, every routing of 4 tokens across, chunk 2, network chunk 2, credit "
    "2, batch 2": Case(flows(Call((), chunk=2, far_chunk=2, credit=2, batch=2), 4, 2, 3, (2, 3))),
    "twolevel, 2x2: combine, every routing of 3 tokens, chunks 2 and 2, credit 2, batch 2": Case(
        flows(Call((), combine=True, chunk=2, far_chunk=2, credit=2, batch=2), 3, 3, 4, (1, 2, 3))
    ),
    "twolevel, 2x2: dispatch and combine of all ranks, rows twice as large, barriers, 1 and 2 "
    "slots": Case(
        one(lambda: Grid(_RESIZED_GRID, grid=(2, 2), cells=2, far_cells=2, barriers=True).machine)
    ),
    "twolevel, 2x2, 2 channels: dispatch and combine of all ranks, 2 tokens each, 1 slot": Case(
        one(lambda: Grid(both(_FOUR), grid=(2, 2), cells=1, far_cells=1, channels=2).machine)
    ),
    "twolevel, 2x2: dispatch and combine of all ranks, 3 tokens each, barriers, 1 slot": Case(
        one(
            lambda: (
                Grid(
                    both(everywhere(4, 3)), grid=(2, 2), cells=1, far_cells=1, barriers=True
                ).machine
            )
        )
    ),
    "twolevel, 3x2: dispatch and combine of all ranks, 2 tokens each, 1 slot": Case(
        one(lambda: Grid(both(everywhere(6, 2)), grid=(3, 2), cells=1, far_cells=1).machine)
    ),
    "twolevel, 3x3: dispatch of all ranks, 2 tokens each, 1 slot": Case(
        one(lambda: Grid([Call(everywhere(9, 2))], grid=(3, 3), cells=1, far_cells=1).machine)
    ),
    "twolevel, 3x3: combine for three ranks, 2 tokens each, 1 slot": Case(
        one(
            lambda: (
                Grid(
                    [Call(everywhere(9, 2), combine=True)],
                    grid=(3, 3),
                    cells=1,
                    far_cells=1,
                    owners=(0, 4, 8),
                ).machine
            )
        )
    ),
    "twolevel, 2x2 mapped: dispatch, every routing of 4 tokens across, chunk 2, network chunk 2, "
    "credit 2, batch 2": Case(
        flows(Call((), chunk=2, far_chunk=2, credit=2, batch=2), 4, 2, 3, (2, 3), mapped=True)
    ),
    "twolevel, 2x2 mapped: combine, every routing of 3 tokens, chunk 2, network chunk 2, credit 2, "
    "batch 2": Case(
        flows(
            Call((), combine=True, chunk=2, far_chunk=2, credit=2, batch=2),
            3,
            3,
            4,
            (1, 2, 3),
            mapped=True,
        )
    ),
    "twolevel, 2x2 mapped: dispatch and combine of all ranks, rows twice as large, barriers, 1 and "
    "2 slots": Case(
        one(
            lambda: (
                Grid(
                    _RESIZED_GRID, grid=(2, 2), cells=2, far_cells=2, barriers=True, mapped=True
                ).machine
            )
        )
    ),
    "twolevel, 2x2 mapped, one dies: dispatch and combine of rank 0, 3 tokens, 2 slots": Case(
        one(
            lambda: (
                Grid(
                    both(_ALONE), grid=(2, 2), cells=2, far_cells=2, owners=(0,), mapped=True
                ).machine
            )
        ),
        mortal=each(4),
    ),
    "twolevel, 2x2, one dies: dispatch and combine of rank 0, 3 tokens, 2 slots": Case(
        one(lambda: Grid(both(_ALONE), grid=(2, 2), cells=2, far_cells=2, owners=(0,)).machine),
        mortal=each(4),
    ),
    "twolevel, 2x2, any program halts anywhere: dispatch of rank 0, 3 tokens, 2 slots": Case(
        one(lambda: Grid([Call(_ALONE)], grid=(2, 2), cells=2, far_cells=2, owners=(0,)).machine),
        mortal=((0, 1, 2, 3),),
    ),
    "twolevel, 2x2, any program halts anywhere: combine for rank 0, 3 tokens, 2 slots": Case(
        one(
            lambda: (
                Grid(
                    [Call(_ALONE, combine=True)], grid=(2, 2), cells=2, far_cells=2, owners=(0,)
                ).machine
            )
        ),
        mortal=((0, 1, 2, 3),),
    ),
}
"""What must hold, by name."""


LARGE = {
    "nvlink, 3 ranks: combine, every routing of 5 tokens, chunk 2, batch 2, 3 slots": Case(
        lambda: (
            Rings([Call(some, combine=True, chunk=2, batch=2)], cells=3).machine
            for some in routings(5, (1, 2), 0, 3)
        )
    ),
    "twolevel, 2x2: combine, every routing of 4 tokens, chunks 2 and 2, credit 2, batch 2": Case(
        flows(Call((), combine=True, chunk=2, far_chunk=2, credit=2, batch=2), 4, 3, 4, (1, 2, 3))
    ),
    "twolevel, 2x2: dispatch, every routing of 6 tokens across, chunk 2, network chunk 2, credit "
    "2, batch 2": Case(flows(Call((), chunk=2, far_chunk=2, credit=2, batch=2), 6, 2, 3, (2, 3))),
    "twolevel, 2x2: dispatch and combine of all ranks, 3 tokens each, 2 slots": Case(
        one(lambda: Grid(both(everywhere(4, 3)), grid=(2, 2), cells=2, far_cells=2).machine)
    ),
    "twolevel, 2x2: dispatch and combine of rank 0, 3 tokens, 2 slots, every order of steps": Case(
        one(lambda: Grid(both(_ALONE), grid=(2, 2), cells=2, far_cells=2, owners=(0,)).machine),
        reduced=False,
    ),
}
"""What ``make soak`` explores besides."""

_NO: Routing = ()
BELOW = [
    Call(_NO, credit=2),
    Call(_NO, combine=True, batch=2),
    Call(_NO, combine=True, credit=2),
    Call(_NO, combine=True, credit=2, batch=2),
    Call(_NO, combine=True, far_chunk=2, batch=2),
    Call(_NO, combine=True, far_chunk=2, credit=2, batch=2),
]
"""Sizes whose network ring must not be one slot smaller. (Where chunks and credits fit into each
other, it may.)
"""


def _print_table() -> None:
    print("| configuration | models | states | final | seconds |\n|---|---|---|---|---|")
    for name, case in (CASES | LARGE if "--large" in sys.argv else CASES).items():
        start = time.monotonic()
        count, found = case.explored()
        took = time.monotonic() - start
        print(f"| {name} | {count} | {found.states} | {found.finals} | {took:.1f} |", flush=True)
        assert not found.failure, found


if __name__ == "__main__":
    _print_table()
