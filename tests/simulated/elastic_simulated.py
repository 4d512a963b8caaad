"""Calls of DeepEP's V2 buffers over the kernels of engines ``nvlink`` and ``twolevel``,
interpreted, on ranks that take turns.

``python tests/run.py elastic_simulated 3`` runs the schedule of seed 3.
"""

from __future__ import annotations

import os
import sys
from threading import get_ident
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

from elastic_calls_of import Known
from elastic_checks import by_expert, by_rank
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.deep_ep.ep_buffer import EPBuffer
from tokenyard.deep_ep.natives import ENGINE_VARIABLE
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

MOST = 8


def made(kind: Any, group: Any) -> Any:
    return kind(group, num_max_tokens_per_rank=MOST, hidden=384, num_topk=2)


def check(seed: int) -> None:
    """Two ranks, one of them nearly or quite empty."""

    def body(here: SimulatedRank) -> None:
        group: Any = SimulatedGroup(here)
        buffer = made((ElasticBuffer, EPBuffer)[seed % 2], group)
        for tokens in ("only last", "few"):
            world = Known(2, tokens, 5, 2, 384, seed)
            exact = (tokens == "few") is bool(seed % 2)
            by_rank(buffer, world, exact)
            by_expert(buffer, world, 1 if exact else 4, exact)
        engines = {ep.engine for ep in buffer._natives._normal.values()}
        assert engines == {"nvlink"}
        buffer.destroy()

    simulate(2, body, seed=seed)


def check_grid(seed: int) -> None:
    """Two hosts of two ranks, which are the scale-up groups."""
    hosts: dict[int, str] = {}  # by thread

    def body(here: SimulatedRank) -> None:
        hosts[get_ident()] = f"host {here.rank // 2}"
        group: Any = SimulatedGroup(here)
        buffer = made((EPBuffer, ElasticBuffer)[seed % 2], group)
        assert buffer.get_physical_domain_size() == (2, 2)
        buffer.num_scaleup_ranks = 4  # rows are checked rank by rank
        world = Known(4, "few", 5, 2, 384, seed)
        by_expert(buffer, world, 4, bool(seed % 2))
        engines = {ep.engine for ep in buffer._natives._normal.values()}
        assert engines == {"twolevel"}
        buffer.destroy()

    def host() -> str:
        return hosts[get_ident()]

    named = (
        patch("tokenyard.api.this_host", host),
        patch("tokenyard.deep_ep.elastic_core.this_host", host),
    )
    with named[0], named[1], patch.dict(os.environ, {ENGINE_VARIABLE: "twolevel"}):
        simulate(4, body, seed=seed)


if __name__ == "__main__":
    check(int(sys.argv[1]))
    check_grid(int(sys.argv[1]))
