"""Whether rows of engine low_latency cross once per node: the engine and the planner ask here."""

from __future__ import annotations

from tokenyard.config import Config

NIC_GBS, HOP_US = 50.0, 3.0
"""Of a rank's NIC, and of a store and a flag inside a node: nominal, to choose by."""


def crosses_once(config: Config) -> bool:
    """Whether a full call of ``config`` is faster if tokens cross once per node: by bytes of rows
    on the NIC, if picks fall on any experts, against a hop each way."""
    grid = config.topology
    if grid is None or not grid.has_levels:
        return False
    nodes, ranks = grid.num_nodes, grid.world_size

    def met(places: int, near: int) -> float:
        """How many of ``places`` a token goes to, but for those that are ``near``."""
        return (places - near) * (1 - (1 - 1 / places) ** config.num_topk)

    saved = met(ranks, grid.ranks_per_node) - met(nodes, 1)
    num_bytes = config.max_tokens_per_rank * saved * 2 * config.hidden
    return num_bytes / (NIC_GBS * 1e3) > HOP_US
