"""Engine twolevel on simulated ranks: random scenarios under random schedules and weak memory, bit for bit against the oracle.

As ``test_nvlink_simulated.py``, on grids of nodes and ranks. Every other seed reaches other nodes by NVSHMEM's calls, which a
simulated network carries late and out of order (every fourth for letters and greetings only, as where NVSHMEM maps the memory of
other nodes); the others by peer pointers. A seed that fails runs alone with
``python tests/twolevel_ranks.py NODES RANKS_PER_NODE SEED``.
"""

from __future__ import annotations

import pytest
import torch

import tokenyard as ty
from nvlink_pool import SOAK, run_all, without_devices
from twolevel_cases import REACHES

pytestmark = without_devices

BODIES = [
    ("test_dispatch_combine", "test_without_weights", {}),
    ("test_dispatch_combine", "test_capacity_drops_and_counts", {}),
    ("test_gradients", "test_handles_serve_any_number_of_times_in_any_order", {}),
    ("test_gradients", "test_reduced_weights_and_bias_have_gradients", {}),
    (
        "test_gradients",
        "test_backward_of_dispatch_is_combine_bit_for_bit",
        {"layout": ty.Layout.EXPERT_MAJOR, "exact": True},
    ),
    ("test_async", "test_one_too_many_raises_and_harms_nothing", {}),
]
"""Bodies of other tests that this engine must pass too, with arguments; ``make soak`` takes other schedules."""
SEEDS = {(2, 2): 8, (3, 2): 4, (2, 4): 4, (2, 8): 2, (4, 4): 2, (3, 1): 4, (1, 3): 4}
"""Seeds by nodes and ranks per node."""
IN_PLACE = {(2, 2): 5, (3, 2): 2, (2, 4): 2, (1, 3): 2, (3, 1): 2, (2, 8): 1, (4, 4): 1}
"""The same, of rounds whose rows are left, and summed, in place."""


@pytest.mark.timeout(600 * SOAK)
@pytest.mark.parametrize(("nodes", "per_node"), SEEDS)
def test_every_schedule_gives_the_bits_of_the_oracle(nodes: int, per_node: int) -> None:
    run_all("twolevel_ranks.check_seed", [(nodes, per_node, seed) for seed in range(SEEDS[nodes, per_node] * SOAK)])


@pytest.mark.timeout(600 * SOAK)
@pytest.mark.parametrize(("nodes", "per_node"), IN_PLACE)
def test_rows_in_place_have_the_bits_of_the_oracle(nodes: int, per_node: int) -> None:
    """Dispatches into views, fresh and cached, and combines out of them, among others through rings."""
    seeds = range(IN_PLACE[nodes, per_node] * SOAK)
    run_all("twolevel_ranks.check_in_place", [(nodes, per_node, seed) for seed in seeds])


def test_slots_of_whole_lines() -> None:
    """The rows of all others are too short for them."""
    run_all("twolevel_ranks.check_lines", [(reach, seed) for reach in REACHES for seed in range(SOAK)])


@pytest.mark.timeout(600 * SOAK)
def test_any_number_of_workers_gives_the_bits_of_the_oracle() -> None:
    """One that does all, two, one for each task; at the same seeds, so the same calls."""
    grids = [(2, 2, 2), (2, 2, 3), (3, 1, 1), *((2, 2, 4 + seed) for seed in range(SOAK - 1))]
    run_all("twolevel_ranks.check_workers", [(*grid, workers) for grid in grids for workers in (1, 2, 0)])


@pytest.mark.timeout(600 * SOAK)
def test_a_batch_of_32_times_the_rings() -> None:
    """Memory does not grow with the batch."""
    grids = [(1, 0), *((2, seed) for seed in range(SOAK - 1))]
    for rows, slots, before, after in run_all("twolevel_ranks.large_batch", grids):
        assert rows >= 32 * slots
        assert before == after


@pytest.mark.parametrize("reach", REACHES, ids=["peers", "puts", "mapped"])
def test_a_token_crosses_the_network_once_per_node(reach: dict[str, bool]) -> None:
    """The engine's own counters, beside the picks: rows there and back, and every byte that is put."""
    for counted, planned in run_all(
        "twolevel_ranks.network_rows", [(nodes, per, reach) for nodes, per in ((2, 2), (3, 2))]
    ):
        assert counted == planned


@pytest.mark.timeout(600 * SOAK)
def test_the_whole_object_beside_engine_nvlink() -> None:
    """Layouts, shapes, casts, gradients, asynchronous calls."""
    run_all("twolevel_api.check", [(2, 2, seed) for seed in range(2 * SOAK)])


def test_a_rank_that_cannot_make_rows_in_place() -> None:
    dtypes = {"layout": torch.float32, "handle": torch.float32, "dtype": torch.bfloat16}
    run_all("twolevel_api.refused_rows", [(what, dtype, 0) for what, dtype in dtypes.items()])


@pytest.mark.timeout(600 * SOAK)
def test_bodies_of_other_tests() -> None:
    """Together, so that they share the processors."""
    run_all("twolevel_ranks.shared_body", [(*body, seed) for body in BODIES for seed in range(SOAK)])
