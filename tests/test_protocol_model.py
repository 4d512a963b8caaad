"""The ring protocols, explored to the end for small sizes (``docs/protocols.md``, "Checked by exhaustion").

``make soak`` explores larger sizes too. ``python tests/model_cases.py`` prints all of it as a table.
"""

from __future__ import annotations

import pytest

from model_cases import BELOW, CASES, LARGE, bounds, far_bounds, flat, flows, least_far_slots, least_slots
from model_plants import PLANTS, first_failure, shortest
from model_rings import Call
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices


@pytest.mark.timeout(600 * SOAK)
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
    tokens, slots = 2 * call.chunk + call.batch + 1, least_slots(call)
    assert first_failure(flat(call, min(tokens, 8), slots)) is None
    if call.batch > 1:
        failed = first_failure(flat(call, tokens, slots - 1))
        assert failed is not None and "nobody can go on" in failed[1].failure


@pytest.mark.parametrize("call", list(far_bounds(2)), ids=_name)
def test_the_least_network_ring_is_enough(call: Call) -> None:
    far, near = least_far_slots(call), max(2, least_slots(call))
    assert first_failure(flows(call, 6, near, far, (2,))) is None


@pytest.mark.parametrize("call", BELOW, ids=_name)
def test_a_smaller_network_ring_is_not(call: Call) -> None:
    failed = first_failure(flows(call, 6, max(2, least_slots(call)), least_far_slots(call) - 1, (2,)))
    assert failed is not None and "nobody can go on" in failed[1].failure


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    plant = PLANTS[name]
    found = shortest(name)
    assert plant.failure in found.failure, str(found)
    assert first_failure(plant.machines(""), plant.mortal) is None


def test_a_trace_tells_the_shortest_way() -> None:
    sender, receiver, ring = (
        "rank 0 call 0 sender to 1, channel 0",
        "rank 1 call 0 receiver from 0, channel 0",
        "(0 to 1, channel 0)",
    )
    assert str(shortest("credit before read")).splitlines() == [
        f"{sender} overwrites row 1 of ring {ring}[0], which nobody has read, after 6 steps (37 states):",
        f"    1. {sender}: stores row 1 into ring {ring}[0]",
        f"    2. {sender}: adds 1 to tail {ring}",
        f"    3. {sender}: stores row 2 into ring {ring}[1]",
        f"    4. {sender}: adds 1 to tail {ring}",
        f"    5. {receiver}: sees tail {ring} = 2, adds 1 to head {ring}",
        f"    6. {sender}: sees head {ring} >= 1, stores row 3 into ring {ring}[0]",
    ]
