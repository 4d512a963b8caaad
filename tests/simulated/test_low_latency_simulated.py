"""Engine low_latency on simulated ranks: random scenarios under random schedules and weak memory,
bit for bit against the oracle.

``TOKENYARD_SOAK_SEEDS=N`` runs N times as many. ``python tests/run.py low_latency_ranks WORLD_SIZE
SEED`` runs one seed alone.
"""

from __future__ import annotations

import pytest

from low_latency_mutations import MUTATIONS
from mutations import file_of
from nvlink_pool import SOAK, run_all, seeds, without_devices

pytestmark = without_devices

SEEDS = {1: 1, 2: 4, 3: 3, 4: 2, 8: 1} if SOAK == 1 else {1: 1, 2: 6, 3: 4, 4: 2, 8: 1, 16: 1}
"""Seeds by world size; ``make soak`` runs more."""
GRIDS = {(2, 1): 2, (2, 2): 2, (3, 1): 1, (4, 1): 1, (2, 4): 1}
GRIDS |= {(2, 1): 3, (4, 4): 1} if SOAK > 1 else {}
"""Likewise, by nodes and ranks of each."""
ONCE = {(2, 2): 3, (2, 4): 1, (3, 2): 1} | ({(2, 2): 4, (2, 4): 2, (4, 4): 1} if SOAK > 1 else {})
"""Likewise, where rows cross once per node."""
KINDS = {
    "barrier",
    "release",
    "acquire",
    "flag before data",
    "reused too early",
    "wrong epoch",
    "last token",
    "wrong rank",
    "rank twice",
}
OF_FILES = {file_of(m): name for name, m in reversed(MUTATIONS.items())}
OF_KINDS = {
    m.kind: name
    for name, m in reversed(MUTATIONS.items())
    if m.kind not in {MUTATIONS[name].kind for name in OF_FILES.values()}
}
TRIED = [name for name in MUTATIONS if SOAK > 1 or name in {*OF_FILES.values(), *OF_KINDS.values()}]
"""The first in each file, and of each kind that these lack; ``make soak`` tries all."""


@pytest.mark.parametrize("world_size", SEEDS, ids="ranks{}".format)
def test_every_schedule_gives_the_bits_of_the_oracle(world_size: int) -> None:
    run_all(
        "low_latency_ranks.check_seed",
        [(world_size, seed) for seed in range(SEEDS[world_size] * SOAK)],
    )


def test_two_rows_of_calls_alternate_like_replays_of_a_graph() -> None:
    """Sixteen calls one behind the other, odd and even ones of both kinds, with other picks each
    time.
    """
    jobs = [(seed, part) for seed in seeds(1) for part in ("rings", "far", "many")]
    run_all("low_latency_ranks.passes_unchanged", jobs)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_nodes_give_the_same_bits(grid: tuple[int, int]) -> None:
    """Ranks of other nodes get puts, through a network that is late and delivers in any order, or
    through pointers; those of the same node are stored to.
    """
    jobs = [(*grid, seed) for seed in range(GRIDS[grid] * SOAK)]
    run_all("low_latency_ranks.check_between_nodes", jobs)


@pytest.mark.parametrize("grid", ONCE, ids=lambda grid: "x".join(map(str, grid)))
def test_once_per_node_gives_the_bits_of_the_tree(grid: tuple[int, int]) -> None:
    """Rails hand rows on, and add up what their nodes made of them; rows of any size and dtype,
    any number of picks, of experts and of tokens."""
    jobs = [(*grid, seed, True) for seed in range(ONCE[grid] * SOAK)]
    run_all("low_latency_ranks.check_between_nodes", jobs)


def test_chunks_of_the_example() -> None:
    """Each is put by another program, to its place, with its own signal, and says how many rows
    there are in all."""
    run_all("low_latency_far.example", [(seed,) for seed in range(2)])


def test_two_objects_take_turns_between_nodes() -> None:
    """Through the simulated network with neighbours, and through pointers without; ``make soak``
    has the network without.
    """
    jobs = [(2, 3, 1), (4, 1, 2), *([(2, 0, 1)] if SOAK > 1 else [])]
    run_all(
        "low_latency_far.two_objects", [(n, s + 4 * i, p) for n, s, p in jobs for i in range(SOAK)]
    )


def test_fences_keep_late_messages_behind() -> None:
    """Messages that nobody waits for are late by two calls: fences keep them from turning later
    signals back, and without them it would show.
    """
    parts = ("far",) if SOAK == 1 else ("far", "rail")
    jobs = [(seed, fenced, part) for seed in seeds(1) for fenced in (True, False) for part in parts]
    for (_, fenced, _), (turned, wrong) in zip(
        jobs, run_all("low_latency_far.kept_back", jobs), strict=True
    ):
        assert (turned == 0, not wrong) == (fenced, fenced), wrong


@pytest.mark.portable
def test_waits_and_loads_are_added_up() -> None:
    run_all("low_latency_ranks.counts_and_waits", [(seed,) for seed in range(2)])


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, str]]:
    """A seed that finds each mutation (-1: none), and what it reports."""
    jobs = [(name, MUTATIONS[name].seeds()) for name in TRIED]
    return dict(zip(TRIED, run_all("low_latency_ranks.first_seed_that_finds", jobs), strict=True))


@pytest.mark.parametrize("name", TRIED)
def test_a_planted_bug_is_found(found: dict[str, tuple[int, str]], name: str) -> None:
    seed, report = found[name]
    assert seed >= 0, f"{name}: {report}, within {MUTATIONS[name].within} seeds"
    assert "ProgramError" not in report, report  # a mutation that does not even run says nothing


def test_every_kind_of_bug_is_made() -> None:
    assert {mutation.kind for mutation in MUTATIONS.values()} == KINDS
    assert len({file_of(mutation) for mutation in MUTATIONS.values()}) >= 3
