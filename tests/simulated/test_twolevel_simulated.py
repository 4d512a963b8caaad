"""Engine twolevel on simulated ranks: random scenarios under random schedules and weak memory, bit
for bit against the oracle.

As ``test_nvlink_simulated.py``, on grids of nodes and ranks. Every other seed reaches other nodes
by NVSHMEM's calls, which a simulated network carries late and out of order (every fourth for
node headers and announcements only, as where NVSHMEM maps the memory of other nodes); the others by
peer pointers. A seed that fails runs alone with ``python tests/run.py twolevel_ranks NODES
RANKS_PER_NODE SEED``. ``make soak`` runs many times as many seeds, and what says so besides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard as ty
from nvlink_pool import SOAK, run_all, without_devices
from twolevel_cases import REACHES

pytestmark = without_devices

BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("test_dispatch_combine", "test_capacity_drops_and_counts", {}),
]
"""Bodies of other tests that this engine must pass too, with arguments: of what no other test here
does.
"""
LONG: list[tuple[str, str, dict[str, Any]]] = [
    ("test_dispatch_combine", "test_without_weights", {}),
    (
        "test_gradients",
        "test_backward_of_dispatch_is_combine_bit_for_bit",
        {"layout": ty.Layout.EXPERT_MAJOR, "exact": True},
    ),
    ("test_gradients", "test_handles_serve_any_number_of_times_in_any_order", {}),
    ("test_gradients", "test_reduced_weights_and_bias_have_gradients", {}),
    ("test_async", "test_one_too_many_raises_and_harms_nothing", {}),
]
"""For ``make soak``, under several schedules: what they do with the engine, scenarios and the
object beside nvlink do too.
"""
WIDE = {(2, 8): 1, (4, 4): 1} if SOAK > 1 else {}
SEEDS = {(2, 2): 4, (3, 2): 1, (2, 4): 1, (3, 1): 1, (1, 3): 1} | WIDE
"""Seeds by nodes and ranks per node."""
SAMPLE = {(2, 2): (1, 3)} if SOAK == 1 else {}
"""Which of them ``make test`` has: by puts, and mapped. The first of other grids is by pointers."""
IN_PLACE = {(2, 2): 2, (3, 2): 1, (2, 4): 1, (1, 3): 1, (3, 1): 1} | WIDE
"""The same, of rounds whose rows are left, and summed, in place."""


@pytest.mark.parametrize(("nodes", "per_node"), SEEDS)
def test_every_schedule_gives_the_bits_of_the_oracle(nodes: int, per_node: int) -> None:
    grid = nodes, per_node
    seeds = SAMPLE.get(grid, range(SEEDS[grid] * SOAK))
    run_all("twolevel_ranks.check_seed", [(*grid, seed) for seed in seeds])


@pytest.mark.parametrize(("nodes", "per_node"), IN_PLACE)
def test_rows_in_place_have_the_bits_of_the_oracle(nodes: int, per_node: int) -> None:
    """Dispatches into in-place buffers, fresh and cached, and combines out of them, among others
    through rings.
    """
    seeds = range(IN_PLACE[nodes, per_node] * SOAK)
    run_all("twolevel_ranks.check_in_place", [(nodes, per_node, seed) for seed in seeds])


def test_calls_in_place_end_by_one_count() -> None:
    """A dispatch in place and a combine that pulls count each other's programs: with different
    numbers of them one waited for ever, or ended before rows had come.
    """
    run_all("twolevel_ranks.check_in_place", [(1, 3, seed) for seed in (2020, 2075)])


def test_slots_of_whole_lines() -> None:
    """The rows of all others are too short for them."""
    reaches = REACHES if SOAK > 1 else REACHES[1:2]
    run_all(
        "twolevel_ranks.check_lines", [(reach, seed) for reach in reaches for seed in range(SOAK)]
    )


def test_any_number_of_workers_gives_the_bits_of_the_oracle() -> None:
    """One for each task, and at the first seed one that does all, where scenarios have one to
    three; ``make soak`` has one, two and as many as tasks at all seeds.
    """
    grids = [(2, 2, 2), (2, 2, 3), (3, 1, 1), *((2, 2, 4 + seed) for seed in range(SOAK - 1))]
    jobs = [(*grid, workers) for grid in grids for workers in (0, 1, 2)]
    run_all("twolevel_ranks.check_workers", jobs if SOAK > 1 else [jobs[1], *jobs[::3]])


def test_a_batch_of_32_times_the_rings() -> None:
    """Memory does not grow with the batch."""
    grids = [(1, 0), *((2, seed) for seed in range(SOAK - 1))]
    for rows, slots, before, after in run_all("twolevel_ranks.large_batch", grids):
        assert rows >= 32 * slots
        assert before == after


@pytest.mark.parametrize("reach", REACHES, ids=["peers", "puts", "mapped"])
def test_a_token_crosses_the_network_once_per_node(reach: dict[str, bool]) -> None:
    """The engine's own counters, beside the picks: rows there and back, and every byte
    that is put.
    """
    grids = [(3, 2)] if SOAK == 1 else [(3, 2), (2, 2)]
    for counted, planned in run_all(
        "twolevel_ranks.network_rows", [(*grid, reach) for grid in grids]
    ):
        assert counted == planned


def test_the_whole_object_beside_engine_nvlink() -> None:
    """Layouts, shapes, casts, gradients, asynchronous calls."""
    run_all("twolevel_api.check", [(2, 2, seed) for seed in range(SOAK)])


def test_a_bias_inside_of_the_view() -> None:
    ways = ("over its rows", "at its end", "both") if SOAK > 1 else ("over its rows",)
    jobs = [(given, seed) for given in ways for seed in range(SOAK)]
    run_all("twolevel_api.bias_in_the_buffer", jobs)


def test_a_rank_that_cannot_make_rows_in_place() -> None:
    dtypes = {"layout": torch.float32, "handle": torch.float32, "dtype": torch.bfloat16}
    jobs = [(what, dtype, 0) for what, dtype in dtypes.items()]
    run_all("twolevel_api.refused_rows", jobs if SOAK > 1 else jobs[:1])


def test_bodies_of_other_tests() -> None:
    """Together, so that they share the processors."""
    bodies = BODIES if SOAK == 1 else BODIES + LONG
    run_all(
        "twolevel_ranks.shared_body", [(*body, seed) for body in bodies for seed in range(SOAK)]
    )
