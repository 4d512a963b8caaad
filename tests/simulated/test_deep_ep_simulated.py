"""DeepEP's calls over the kernels that GPUs run, interpreted."""

from __future__ import annotations

from nvlink_pool import SOAK, run_all, without_devices


@without_devices
def test_both_modes() -> None:
    """Engine nvlink in normal mode; in low-latency mode its own, with hooks of two batches
    outstanding, and masks.
    """
    run_all("deep_ep_simulated.check", [(seed,) for seed in range(SOAK)])


@without_devices
def test_hybrid() -> None:
    """Rows by expert, and weights that go back beside them."""
    run_all("deep_ep_simulated.check_hybrid", [(seed,) for seed in range(SOAK)])


@without_devices
def test_across_nodes() -> None:
    """Engine twolevel where a program asks for it, on a grid of hosts that is found, not said."""
    run_all(
        "deep_ep_simulated.check_grid",
        [(seed, 2, per_node) for per_node in (2, 1)[:SOAK] for seed in range(SOAK)],
    )
