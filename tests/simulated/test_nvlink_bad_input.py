"""Engine nvlink, simulated, in bodies that tests of bad input and others have for engine
collective, where both must do the same.

Where they differ (``docs/reference/protocols.md``: who learns of a failure when), nvlink's own
verdicts: here of refused calls, in ``test_nvlink_failures_simulated.py`` of ranks in different
calls.
"""

from __future__ import annotations

from typing import Any

import tokenyard as ty
from nvlink_pool import SOAK, run_all, without_devices
from test_limits import ROWS

pytestmark = without_devices

FLAT, MAJOR, PADDED = ty.Layout
BODIES: list[tuple[str, str, dict[str, Any], int]] = [
    ("test_bad_input", "test_dispatch", {"argument": "topk_weights"}, 2),
    *(
        ("test_bad_input", "test_construction", {"argument": name}, 2)
        for name in ("sizes", "timeout", "engine", "device")
    ),
    ("test_uneven", "test_counters_of_a_combine_are_those_of_its_dispatch_turned_round", {}, 3),
    ("test_uneven", "test_rows_counts_and_matrix", {"layout": MAJOR}, 2),
    ("test_limits", "test_symmetric_memory_that_no_rank_has", {}, 2),
    ("test_mismatch", "test_a_rank_that_missed_calls_is_told_by_their_number", {}, 3),
    ("test_odd_input", "test_rows_that_nobody_uses_have_no_gradient", {"layout": PADDED}, 2),
    ("test_odd_input", "test_a_single_row_or_column_of_any_stride", {}, 2),
    ("test_odd_input", "test_no_rows_and_any_strides", {}, 2),
    ("test_odd_input", "test_infinities_and_nan_travel_as_they_are", {}, 2),
    ("test_lifetime", "test_a_closed_object", {}, 2),
    ("test_lifetime", "test_with_closes_when_its_body_raises", {}, 2),
    (
        "test_gradients",
        "test_backward_of_dispatch_is_combine_bit_for_bit",
        {"layout": MAJOR, "exact": True},
        3,
    ),
    ("test_async", "test_asynchronous_calls_are_differentiable", {"layout": FLAT}, 2),
]
"""Module, test, arguments and ranks."""
LONG: list[tuple[str, str, dict[str, Any], int]] = [
    *(("test_bad_input", "test_dispatch", {"argument": name}, 2) for name in ("x", "quantized")),
    ("test_odd_input", "test_expanded", {}, 2),
    ("test_odd_input", "test_extremes_of_options", {}, 2),
    ("test_odd_input", "test_no_tokens_anywhere", {"layout": FLAT, "exact": False}, 2),
    ("test_mismatch", "test_two_ranks_are_wrong_in_different_ways", {}, 4),
    ("test_odd_input", "test_views_of_leaves_get_their_gradient", {"layout": MAJOR}, 2),
    ("test_lifetime", "test_an_old_handle", {}, 2),
    ("test_lifetime", "test_a_backward_that_comes_too_late", {"kept": True}, 2),
    ("test_gradients", "test_reduced_weights_and_bias_have_gradients", {}, 2),
    ("test_lifetime", "test_objects_of_different_sizes_take_turns", {}, 3),
    ("test_async", "test_what_is_cast_or_sent_ahead_comes_after_too", {"later": True}, 2),
    ("test_gradients", "test_handles_serve_any_number_of_times_in_any_order", {}, 3),
]
"""For ``make soak``."""
REFUSED = (
    "cached: x is float64",
    "combine: x is float64",
    "combine: weighted rows of FLAT",
    "combine: a bias for other tokens",
)


def test_bodies_of_other_tests() -> None:
    """Together, so that they share the processors."""
    bodies = BODIES if SOAK == 1 else BODIES + LONG
    run_all("nvlink_ranks.shared_body", [(*body, seed) for body in bodies for seed in range(SOAK)])


def test_refused_calls_that_return_at_once() -> None:
    """Whoever is wrong gets its own ValueError there and then; all are told by ``check()``, and the
    object is finished.
    """
    names = REFUSED if SOAK > 1 else REFUSED[::3]
    run_all("nvlink_bad_input.refused", [(name, seed) for name in names for seed in range(SOAK)])


def test_results_that_one_call_makes_too_large() -> None:
    """As ``test_limits.py`` has it; but of a static call peers learn only who refused it."""
    jobs = [(at, alone) for at in range(len(ROWS)) for alone in (at % 2 == 0, at % 2 == 1)[:SOAK]]
    run_all("nvlink_bad_input.too_large", [(*job, seed) for job in jobs for seed in range(SOAK)])


def test_rings_too_small_for_a_row() -> None:
    run_all(
        "nvlink_bad_input.rings_too_small",
        [(exact, seed) for exact in (False, True) for seed in range(3 * SOAK if SOAK > 1 else 1)],
    )
