"""Engine low_latency when ranks die, are late, refuse, or are left out: every call completes, and
says what it lacks.

``make soak`` runs many times as many seeds, and each story of a rank that comes back with two
victims at two sizes; CI has each victim and each size once.
"""

from __future__ import annotations

import pytest

from nvlink_pool import SOAK, run_all, seeds, without_devices

pytestmark = without_devices

DEATHS = {2: 3, 3: 2, 4: 1}
"""Seeds by world size."""
FAR_DEATHS = {(2, 1, False): 1, (2, 2, True): 1} | ({(2, 2, False): 1} if SOAK > 1 else {})
"""Likewise, by nodes, ranks of each, and whether rows cross once per node."""
FREEZES = [(2,)] if SOAK == 1 else [(2,), (2, 1), (4, 2, True), (3,), (4, 2)]
"""World size, ranks of a node, and whether rows cross once per node."""


@pytest.mark.parametrize("world_size", DEATHS, ids="ranks{}".format)
def test_the_others_go_on_without_a_rank_that_dies(world_size: int) -> None:
    """Each of their results is checked as it comes: rows and sums of the living are all there, of
    the dead some or none. Then they make ten good calls.
    """
    tried, marked = seeds(DEATHS[world_size]), list[bool]()
    deaths = run_all("low_latency_failures.death", [(world_size, seed) for seed in tried])
    for seed, (victim, when, endings) in zip(tried, deaths, strict=True):
        where = f"seed {seed}, rank {victim} dies after {when} of 1000: {endings}"
        for rank, ending in enumerate(endings):
            if ending is None:
                assert rank == victim, where
            elif ending[0]:
                assert ending[0] == f"absent {victim}", where  # it died before the object was made
            else:
                assert all(here for peer, here in enumerate(ending[1]) if peer != victim), (
                    f"the living are not marked: {where}"
                )
                marked.append(not ending[1][victim])
                assert marked[-1] or when > 700, where
    assert sum(marked) > 0.5 * len(marked) > 0


def test_a_rank_that_dies_in_the_first_call_takes_nobody_with_it() -> None:
    """It has no heartbeat, so it gets no longer than others: who waits for it has had no more than
    half of the time that those who wait for this waiter give."""
    [(victim, _, endings)] = run_all("low_latency_failures.death", [(3, 36)])
    living = [ending for rank, ending in enumerate(endings) if rank != victim]
    assert living == [("", [rank != victim for rank in range(3)])] * 2


@pytest.mark.parametrize("grid", FAR_DEATHS, ids=lambda grid: "x".join(map(str, grid)))
def test_the_others_go_on_between_nodes(grid: tuple[int, int, bool]) -> None:
    """The same where ranks of other nodes get puts, most of them through the simulated network:
    what a dead rank has put may still arrive.
    """
    nodes, per_node, once = grid
    jobs = [(nodes * per_node, seed, per_node, once) for seed in seeds(FAR_DEATHS[grid])]
    marked: list[bool] = []
    for victim, when, endings in run_all("low_latency_failures.death", jobs):
        for rank, ending in enumerate(endings):
            if ending is None or ending[0]:
                assert rank == victim or (ending and ending[0] == f"absent {victim}"), endings
                continue
            assert all(here for peer, here in enumerate(ending[1]) if peer != victim), endings
            marked.append(not ending[1][victim])
            assert marked[-1] or when > 700, endings
    assert any(marked)


def test_a_rank_that_freezes_is_back() -> None:
    """At any step: the others give it up, it writes on into calls that they have made without it,
    and all make ten good calls.
    """
    jobs = [(kind[0], seed, *kind[1:]) for kind in FREEZES for seed in range(SOAK)]
    frozen = run_all("low_latency_failures.freeze", jobs)
    for (world_size, *_), (_, endings) in zip(jobs, frozen, strict=True):
        assert endings == [("", [True] * world_size)] * world_size
    assert sum(given_up for given_up, _ in frozen) > 0.5 * len(frozen)


def test_what_a_sum_lacks_is_told_token_by_token() -> None:
    """A rank dies in the middle of a combine: each sum has its part or not, and the lost weight
    fits the very sum.
    """
    jobs = [(2, 1, 4), (2, 2, 3), *([(2, 1, 4, 1), (4, 2, 2, 2, True)] if SOAK > 1 else [])]
    told = run_all("low_latency_failures.deaths_in_a_combine", jobs)
    lost, kept = (
        [weights for ending in told for marked, weights in ending if marked == here]
        for here in (True, False)
    )
    assert kept and not any(any(weights) for weights in kept)
    assert any(all(weights) for weights in lost)
    assert any(any(weights) and not all(weights) for weights in lost)


def test_no_sum_lacks_a_rank_in_some_channels_only() -> None:
    """Programs that share a token see a rank die at different times, and agree. If they did not, it
    would show.
    """
    [found] = run_all("low_latency_failures.torn", [(2, 6, False)])
    assert found > 0
    agreed = [(found, found + 1, True)] if SOAK == 1 else [(0, 3 * SOAK, True)]
    assert run_all("low_latency_failures.torn", agreed) == [-1]


def test_no_sum_is_of_rows_that_came_too_late() -> None:
    """A far rank is left out, and its rows come, all or all chunks but the first: programs that
    look later take them. If it is back at once, it gets the sums of all its rows, or none, and its
    lost weights say which.
    """
    tried = 32, 25, *range(40, 39 + SOAK)
    torn = run_all("low_latency_far.late_rows", [(seed,) for seed in tried])
    assert torn[:2] == [True, True]


def test_no_number_of_a_peer_becomes_an_address_or_an_index() -> None:
    """Far ranks say how many rows there are, and whose; programs touch their own memory only, and
    rows are of tokens that can be.
    """
    jobs = [(2, 1), (2, 2)]
    seeds = range(5, 5 + 2 * SOAK) if SOAK > 1 else (5,)
    came = run_all("low_latency_far.lies", [(*job, seed) for job in jobs for seed in seeds])
    assert any(came)


@pytest.mark.parametrize(
    "story", ["left_out_and_back", "late_and_back", "refusal", "masked_by_one"]
)
def test_ranks_come_back(story: str) -> None:
    stories = (
        [(2, 0), (2, 1, 1), *([(3, 1), (4, 1, 2, True)] if story != "late_and_back" else [])]
        if SOAK == 1
        else [
            *((size, seed, node) for size in (2, 3) for seed in range(2) for node in (0, 1)),
            *((4, seed, 2, True) for seed in range(4)),
        ]
    )
    if story == "masked_by_one" and SOAK == 1:  # four ranks take half a minute
        stories = stories[:1]
    for endings in run_all(f"low_latency_failures.{story}", stories):
        assert all(ending == ("", [True] * len(endings)) for ending in endings), endings


def test_ranks_in_different_calls_go_on_apart() -> None:
    for seed, endings in enumerate(
        run_all("low_latency_failures.disagreement", [(seed,) for seed in range(3)])
    ):
        failed_rank = seed % 3
        for rank, ending in enumerate(endings):
            assert ending is not None
            assert ending[1] == [
                peer == rank or (peer != failed_rank and rank != failed_rank) for peer in range(3)
            ], (
                rank,
                endings,
            )


WIDE_STORIES = ("left_out_and_back", "refusal", "masked_by_one", "late_and_back")


def test_lives_of_any_size_layout_and_cast() -> None:
    """Rows with tails, packed or cast, ranks without experts, one pick; ``make soak`` has all
    stories on all kinds of ranks, and freezes."""
    kinds = [(2, 0), (3, 0), (2, 1), (4, 2, True), (4, 2)]
    seeds = range(1000, 1000 + SOAK)
    for story in WIDE_STORIES if SOAK > 1 else WIDE_STORIES[:2]:
        jobs = [
            (size, seed, *node) for seed in seeds for size, *node in kinds[: 5 if SOAK > 1 else 2]
        ]
        for endings in run_all(f"low_latency_failures.{story}", jobs):
            assert all(ending == ("", [True] * len(endings)) for ending in endings), endings
    if SOAK > 1:
        jobs = [(size, seed, *node) for seed in seeds for size, *node in kinds]
        for (size, *_), (_, endings) in zip(
            jobs, run_all("low_latency_failures.freeze", jobs), strict=True
        ):
            assert endings == [("", [True] * size)] * size
