"""Calls of DeepEP's V2 buffers over the kernels that GPUs run, interpreted."""

from __future__ import annotations

from nvlink_pool import SOAK, run_all, without_devices


@without_devices
def test_one_host() -> None:
    """Engine nvlink, rows per rank and per expert, exact and static."""
    run_all("elastic_simulated.check", [(seed,) for seed in range(SOAK)])


@without_devices
def test_two_hosts() -> None:
    """Engine twolevel, on a grid of hosts that is found."""
    run_all("elastic_simulated.check_grid", [(seed,) for seed in range(SOAK)])
