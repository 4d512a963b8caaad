"""Names of engines. No other module spells them."""

from __future__ import annotations

AUTO, COLLECTIVE, NVLINK = "auto", "collective", "nvlink"
TWOLEVEL, LOW_LATENCY = "twolevel", "low_latency"

ENGINES = (AUTO, COLLECTIVE, NVLINK, TWOLEVEL, LOW_LATENCY)
"""What ``engine=`` takes."""

ON_KERNELS = (NVLINK, TWOLEVEL, LOW_LATENCY)
"""Engines whose kernels store to peers' memory; ranks of one process have these only."""
