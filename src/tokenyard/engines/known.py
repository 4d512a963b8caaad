"""Names of engines. No other module spells them."""

from __future__ import annotations

AUTO, COLLECTIVE, NVLINK = "auto", "collective", "nvlink"
TWOLEVEL, LOW_LATENCY = "twolevel", "low_latency"

ENGINES = (AUTO, COLLECTIVE, NVLINK, TWOLEVEL, LOW_LATENCY)
"""What ``engine=`` takes."""

ON_KERNELS = (NVLINK, TWOLEVEL, LOW_LATENCY)
"""Engines whose kernels store to peers' memory; ranks of one process have these only."""

BETWEEN_NODES = (TWOLEVEL, LOW_LATENCY)
"""Those whose ranks of different nodes need not map each other's memory."""
