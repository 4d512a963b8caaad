"""The ring protocols, explored to the end for small sizes (``docs/reference/protocols.md``,
"Checked by exhaustion").

``make soak`` explores larger sizes too. ``python tests/run.py model_cases`` prints all of it as a
table.
"""

from __future__ import annotations

import pytest

from model_cases import (
    BELOW,
    CASES,
    LARGE,
    bounds,
    far_bounds,
    flat,
    flows,
    least_far_slots,
    least_slots,
)
from model_explorer import Search
from model_grid import Grid
from model_machine import Machine
from model_mutations import MUTATIONS, first_failure, shortest
from model_rings import Call
from model_turns import ENDS, FORGETS, TWICE, WAITS, Workers
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices


@pytest.mark.parametrize("name", CASES | (LARGE if SOAK > 1 else {}))
def test_nothing_fails(name: str) -> None:
    _, found = (CASES | LARGE)[name].explored()
    assert not found.failure, str(found)


def _name(call: Call) -> str:
    words = f"chunk{call.chunk}-batch{call.batch}-far{call.far_chunk}-credit{call.credit}"
    return f"{'combine' if call.combine else 'dispatch'}-{words}"


@pytest.mark.parametrize("call", list(bounds(3)), ids=_name)
def test_the_least_ring_is_enough(call: Call) -> None:
    """And with one slot less somebody waits forever."""
    step = call.batch
    tokens, slots = 2 * call.chunk + step + 1, least_slots(call)
    assert first_failure(flat(call, min(tokens, 8), slots)) is None
    if step > 1:
        failed = first_failure(flat(call, tokens, slots - 1))
        assert failed is not None and "nobody can go on" in failed[1].failure


@pytest.mark.parametrize("call", list(far_bounds(2)), ids=_name)
def test_the_least_network_ring_is_enough(call: Call) -> None:
    far, near = least_far_slots(call), max(2, least_slots(call))
    assert first_failure(flows(call, 6, near, far, (2,))) is None


@pytest.mark.parametrize("call", BELOW, ids=_name)
def test_a_smaller_network_ring_is_not(call: Call) -> None:
    failed = first_failure(
        flows(call, 6, max(2, least_slots(call)), least_far_slots(call) - 1, (2,))
    )
    assert failed is not None and "nobody can go on" in failed[1].failure


def _pair(combine: bool, mapped: bool) -> Machine:
    """2 nodes of 2: rank 0 has tokens for ranks 2 and 3, rank 3 has one for rank 0; rings are as
    small as they may be.
    """
    call = Call((((2,), (3,)), (), (), ((0,),)), combine)
    slots = least_slots(call), least_far_slots(call)
    return Grid(
        [call], grid=(2, 2), cells=slots[0], far_cells=slots[1], owners=(0, 3), mapped=mapped
    ).machine


@pytest.mark.parametrize("mapped", [False, True], ids=["puts", "mapped"])
@pytest.mark.parametrize("combine", [False, True], ids=["dispatch", "combine"])
def test_workers_do_what_their_tasks_can_do_and_nothing_else(combine: bool, mapped: bool) -> None:
    """So a model with a process for each task shows whatever workers may do.
    (``model_turns.py``)
    """
    machine = _pair(combine, mapped)
    tasks = Search(machine)
    assert not tasks.run().failure
    found = Workers(machine, 1).run()
    assert not found.failure and found.states < tasks.reached.keys()
    assert [
        state for state in found.states if not any(state[: len(machine.processes)])
    ]  # all have ended


def test_workers_that_defer_credits_of_reducers_do_too() -> None:
    """As combine in place has them: no rings inside nodes, network rings mapped. 2 nodes, 3 tokens
    there and 2 back.
    """
    call = Call((((1,),) * 3, ((0,),) * 2), combine=True)
    machine = Grid(
        [call], grid=(2, 1), cells=1, far_cells=least_far_slots(call), mapped=True
    ).machine
    tasks = Search(machine)
    assert not tasks.run().failure
    found = Workers(machine, 1).run()
    assert not found.failure and found.states < tasks.reached.keys()
    assert "no worker can go on" in Workers(machine, 1, FORGETS).run().failure
    assert "finds" in Workers(machine, 1, TWICE).run().failure


@pytest.mark.parametrize(
    ("bug", "combine", "failure"),
    [
        (WAITS, False, "no worker can go on"),
        (FORGETS, False, "no worker can go on"),
        (FORGETS, True, "no worker can go on"),
        (ENDS, True, "no worker can go on"),
        (TWICE, False, "finds"),
        (TWICE, True, "finds"),
    ],
)
def test_a_bug_of_workers_is_found(bug: str, combine: bool, failure: str) -> None:
    """Who waits in its turn: before it sends the row that the other waits for likewise."""
    assert failure in Workers(_pair(combine, True), 1, bug).run().failure


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    found = shortest(name)
    assert mutation.failure in found.failure, str(found)
    assert first_failure(mutation.machines(""), mutation.mortal) is None


def test_a_trace_tells_the_shortest_way() -> None:
    sender, receiver, ring = (
        "rank 0 call 0 sender to 1, channel 0",
        "rank 1 call 0 receiver from 0, channel 0",
        "(0 to 1, channel 0)",
    )
    assert str(shortest("credit before read")).splitlines() == [
        f"{sender} overwrites row 1 of ring {ring}[0], which nobody has read, after 6 steps (37 "
        f"states):",
        f"    1. {sender}: stores row 1 into ring {ring}[0]",
        f"    2. {sender}: adds 1 to tail {ring}",
        f"    3. {sender}: stores row 2 into ring {ring}[1]",
        f"    4. {sender}: adds 1 to tail {ring}",
        f"    5. {receiver}: sees tail {ring} = 2, adds 1 to head {ring}",
        f"    6. {sender}: sees head {ring} >= 1, stores row 3 into ring {ring}[0]",
    ]
