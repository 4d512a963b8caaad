"""Bugs of the models, each with machines that show it and words of the failure that it
must end in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from model_cases import Machines, both, everywhere, flat, flows, one, routings
from model_explorer import Outcome, explore
from model_grid import Grid
from model_machine import Machine
from model_rings import Call, Rings, Routing

STUCK, OVERWRITTEN, NOT_THERE, UNREAD = "nobody can go on", "overwrites", "finds", "nobody has read"


class Mutation(NamedTuple):
    """``machines(bug)``: with the bug, or "" without. ``failure``: words of what is found, if ranks
    ``mortal`` may halt.
    """

    machines: Callable[[str], Machines]
    failure: str
    mortal: tuple[int, ...] = ()


_NO: Routing = ()
_DISPATCH, _COMBINE = Call(_NO, chunk=2, batch=2), Call(_NO, combine=True, chunk=2, batch=2)
_FAR, _BACK = (call._replace(far_chunk=2, credit=2) for call in (_DISPATCH, _COMBINE))
_TWO = everywhere(2, 3)


def _nvlink(*calls: Call, cells: int = 2) -> Callable[[str], Machines]:
    return lambda bug: one(lambda: Rings(calls, cells=cells, bug=bug).machine)


def _barrier(bug: str) -> Machines:
    return one(lambda: Rings([Call(((), ()))] * 3, cells=1, barriers=True, bug=bug).machine)


def _far_barrier(bug: str) -> Machines:
    return one(
        lambda: (
            Grid(
                [Call(((), ()))] * 3, grid=(2, 1), cells=1, far_cells=1, barriers=True, bug=bug
            ).machine
        )
    )


def _resized(bug: str) -> Machines:
    """Two dispatches; slots of the second are other cells."""
    calls = [Call((((1,),) * 5, ())), Call((((1,),), ()), row=2)]
    return one(lambda: Rings(calls, cells=4, bug=bug).machine)


def _far_resized(bug: str) -> Machines:
    calls = [Call((((1,),) * 3, ())), Call((((1,),), ()), row=2)]
    return one(lambda: Grid(calls, grid=(2, 1), cells=4, far_cells=4, owners=(0,), bug=bug).machine)


def _twice_across(call: Call, tokens: int, far_cells: int) -> Callable[[str], Machines]:
    """The same call twice, for every routing of rank 0's tokens to the other node."""

    def machines(bug: str) -> Iterator[Machine]:
        for some in routings(tokens, (2,), 0, 4):
            calls = [call._replace(routing=some)] * 2
            yield Grid(
                calls, grid=(2, 2), cells=4, far_cells=far_cells, owners=(0,), bug=bug
            ).machine

    return lambda bug: lambda: machines(bug)


MUTATIONS = {
    "tail before data": Mutation(_nvlink(Call(_TWO)), NOT_THERE),
    "tail before data ": Mutation(_nvlink(Call(_TWO, combine=True)), NOT_THERE),
    "credit before read": Mutation(_nvlink(Call(_TWO)), OVERWRITTEN),
    "credit before read ": Mutation(_nvlink(Call(_TWO, combine=True)), OVERWRITTEN),
    "one slot too many": Mutation(_nvlink(*both(_TWO)), OVERWRITTEN),
    "last chunk dropped": Mutation(_nvlink(Call(_TWO)), STUCK),
    "ring not drained": Mutation(_resized, OVERWRITTEN),
    "goes on without room": Mutation(_nvlink(Call(_TWO)), OVERWRITTEN),
    "rows sent not counted": Mutation(_nvlink(Call(_TWO), Call(_TWO)), OVERWRITTEN),
    "last row not awaited": Mutation(_nvlink(Call(_TWO, combine=True)), NOT_THERE),
    "waits for all rows at once": Mutation(partial(flat, _COMBINE, 4, 3), STUCK),
    "tokens in another order": Mutation(partial(flat, _COMBINE, 4, 3), STUCK),
    "one half only": Mutation(_barrier, OVERWRITTEN),
    "signal before tag": Mutation(_barrier, NOT_THERE),
    "entered of the last call": Mutation(_barrier, NOT_THERE),
    # two levels
    "signal before data": Mutation(partial(flows, _FAR, 3, 2, 4, (2, 3)), NOT_THERE),
    "no fence": Mutation(partial(flows, _FAR, 3, 2, 4, (2, 3)), NOT_THERE),
    "no fence ": Mutation(partial(flows, _BACK, 4, 3, 4, (2,)), NOT_THERE),
    "network credit before read": Mutation(partial(flows, _FAR, 5, 2, 3, (2,)), OVERWRITTEN),
    "network credit before read ": Mutation(partial(flows, _BACK, 5, 3, 4, (2,)), OVERWRITTEN),
    "one network slot too many": Mutation(partial(flows, _FAR, 4, 2, 2, (2,)), OVERWRITTEN),
    "one network slot too many ": Mutation(partial(flows, _BACK, 5, 3, 4, (2,)), OVERWRITTEN),
    "network ring not drained": Mutation(_far_resized, NOT_THERE),
    "last credits kept": Mutation(_twice_across(_FAR, 3, 3), STUCK),
    "last credits kept ": Mutation(_twice_across(_BACK, 3, 4), STUCK),
    "tails at the end only": Mutation(partial(flows, _FAR, 3, 2, 4, (2, 3)), STUCK),
    "one destination after the other": Mutation(partial(flows, _FAR, 4, 2, 3, (2, 3)), STUCK),
    "inner credits with the put": Mutation(
        partial(flows, _BACK._replace(far_chunk=4), 5, 3, 8, (2, 3)), STUCK
    ),
    "waits for all rows at once ": Mutation(partial(flows, _BACK, 5, 3, 4, (2,)), STUCK),
    "last chunk dropped ": Mutation(partial(flows, _FAR, 3, 2, 3, (2,)), STUCK),
    "one half only ": Mutation(_far_barrier, OVERWRITTEN),
}
"""By name; a blank behind it: another machine for the same bug."""


def first_failure(
    machines: Machines, mortal: tuple[int, ...] = ()
) -> tuple[Machine, Outcome] | None:
    """The first machine that fails, and how."""
    for machine in machines():
        found = explore(machine, mortal=mortal)
        if found.failure:
            return machine, found
    return None


def shortest(name: str) -> Outcome:
    """The shortest way to the failure of a mutation.

    Raises:
        AssertionError: there is none.
    """
    mutation = MUTATIONS[name]
    failed = first_failure(mutation.machines(name.strip()), mutation.mortal)
    assert failed is not None, f"nobody finds: {name}"
    return explore(failed[0], mortal=mutation.mortal, reduced=False)
