"""Engine nvlink on simulated ranks: random scenarios under random schedules and weak memory, bit
for bit against the oracle.

One seed is one scenario (sizes, layouts, payloads, calls that follow each other) and one schedule.
``TOKENYARD_SOAK_SEEDS=N`` (``make soak``) runs N times as many. A seed that fails runs alone with
``python tests/run.py nvlink_ranks WORLD_SIZE SEED``.
"""

from __future__ import annotations

import pytest

import tokenyard as ty
from nvlink_pool import SOAK, run_all, seeds, without_devices

pytestmark = without_devices

SEEDS = {2: 6, 3: 3, 4: 2, 8: 1} if SOAK == 1 else {2: 8, 3: 4, 4: 2, 8: 1, 16: 1}
"""Seeds by world size."""


@pytest.mark.parametrize("world_size", SEEDS, ids="ranks{}".format)
def test_every_schedule_gives_the_bits_of_the_oracle(world_size: int) -> None:
    run_all("nvlink_ranks.check_seed", [(world_size, seed) for seed in seeds(SEEDS[world_size])])


@pytest.mark.parametrize("world_size", SEEDS, ids="ranks{}".format)
def test_sums_in_a_receive_buffer(world_size: int) -> None:
    """Combines of all layouts push their rows, or go through rings where the buffer is too small;
    programs that share tasks and others.

    A third as many seeds as above.
    """
    third = seeds(-(-SEEDS[world_size] // 3))
    run_all("nvlink_ranks.check_pushed", [(world_size, seed) for seed in third])


@pytest.mark.parametrize("world_size", SEEDS, ids="ranks{}".format)
def test_sums_in_place(world_size: int) -> None:
    """Combine in place: rows of the dispatch's buffer and others, receive buffers that grow, rows
    that change from call to call.

    A fifth as many seeds as above.
    """
    fifth = seeds(-(-SEEDS[world_size] // 5))
    run_all("nvlink_ranks.check_in_place", [(world_size, seed) for seed in fifth])


def test_results_in_a_heap() -> None:
    """Results that live on for a while, or for ever, in a heap that holds them all or not: no call
    writes to an earlier one's, all ranks agree on who went where, and many were in the heap. Among
    them cached ones, whose blocks ranks tell each other in the call, where one may have none.
    """
    each = {2: 4, 3: 1} if SOAK == 1 else {2: 16, 3: 8, 4: 3}
    calls = [(size, seed) for size, many in each.items() for seed in range(many * SOAK)]
    found = run_all("nvlink_heap.check_heap", calls)
    fresh, through_rings, again, again_through_rings = map(sum, zip(*found, strict=True))
    assert fresh >= len(calls) < through_rings, found
    assert again > 1 < again_through_rings, found


def test_a_rank_short_of_memory_launches_nothing() -> None:
    """A cached dispatch is two launches: before the first, a rank has all that both need."""
    run_all("nvlink_heap.check_short_of_memory", [(seed,) for seed in range(SOAK)])


def test_handles_of_one_routing_that_launch_differently() -> None:
    """Ranks that take different ones are told so before a row moves: no rank waits in vain, or
    takes the place of an earlier call's block for one of this call."""
    for said in run_all("nvlink_heap.check_two_handles", [(seed,) for seed in range(SOAK)]):
        assert all("ranks disagree on the handle" in text for text in said), said


def test_a_block_outside_of_its_heap() -> None:
    """Every rank gives up before it writes there, and says who it was."""
    lies = [(0, 256), (1, 256, "told"), (1, None)]
    for said in run_all("nvlink_heap.check_lie", lies[: 1 + SOAK]):
        assert all("rank 1 announced a block" in text for text in said), said


def test_rings_go_round() -> None:
    """What the others rely on: more rows go through a ring than it has slots, so senders wait for
    credits.
    """
    found = run_all("nvlink_ranks.rows_and_slots", [("rings", seed) for seed in range(8)])
    assert sum(rows > slots for rows, slots in found) > 4, found


def test_slots_of_whole_lines() -> None:
    """The rows of all others are too short for them."""
    run_all("nvlink_ranks.check_lines", [(seed,) for seed in range(2 * SOAK)])


def test_bodies_that_gpus_run_too() -> None:
    """The whole object: rows left and read in place, refusals with and without memory made for it,
    results of like calls.
    """
    calls = [("test_rows_left_in_place", {"exact": exact}) for exact in (True, False)[:SOAK]]
    calls += [("test_rows_summed_in_place", {"exact": exact}) for exact in (False, True)[:SOAK]]
    calls += [
        (f"test_{name}", {})
        for name in (
            "sums_over_the_rows_that_are_read",
            "results_of_like_calls_share_no_memory",
            "a_failure_is_of_the_call_it_was_in",
            "rows_of_one_rank_that_rings_cannot_hold",
            "num_sms_changes_no_bit",
        )
    ]
    layouts = list(ty.Layout) if SOAK > 1 else [ty.Layout.EXPERT_MAJOR]
    calls += [("test_combines_with_few_multiprocessors", {"layout": each}) for each in layouts]
    calls += [(f"test_what_cannot_be_{what}_in_place", {}) for what in ("left", "summed")]
    run_all(
        "nvlink_ranks.shared_body",
        [
            ("test_nvlink", *call, ranks, seed)
            for call in calls
            for ranks in (2, 3)[:SOAK]
            for seed in range(SOAK)
        ],
    )


def test_a_rank_without_experts() -> None:
    """The whole object: kernels by expert have nothing to do there, and run all the same."""
    calls = [("test_uneven", "test_a_rank_without_experts", {}, 3, seed) for seed in range(SOAK)]
    run_all("nvlink_ranks.shared_body", calls)
