"""Engine ``twolevel``: ranks form nodes. Rows cross the network once per node, and are handed on
inside (``docs/reference/twolevel.md``). Engine ``nvlink`` is its case of one node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from tokenyard.config import Config
from tokenyard.engines.known import NVLINK, TWOLEVEL
from tokenyard.engines.ring_engine import RingEngine
from tokenyard.engines.tuning import (
    Tuning,
    heap_bytes,
    most_channels,
    peer_tuning,
    receive_bytes,
    too_many,
)
from tokenyard.errors import NotSupported
from tokenyard.handle import Spec
from tokenyard.kernels import region, two_region
from tokenyard.routing import host_ints
from tokenyard.topology import Topology


class PeerChoice(NamedTuple):
    """A class of engine, and what it is made with."""

    engine: type[TwolevelEngine]
    config: Config
    tuning: Tuning
    receive_bytes: int
    heap_bytes: int


class TwolevelEngine(RingEngine):
    """:class:`RingEngine` in two hops, for ranks that form a grid."""

    name, _pulls = TWOLEVEL, True

    def check(self) -> None:
        super().check()
        if self._workspace.grid.num_nodes > 1:
            self._count_network()

    def _count_network(self) -> None:
        """Bring to the statistics what kernels counted: rows between ranks of my local index."""
        grid, channels, me = self._workspace.grid, self._workspace.tuning.channels, self.config.rank
        state, begin = self._workspace.state.cpu(), region.state_words(grid.world_size, channels)
        end = cast("int", two_region.state_at("bytes", grid.world_size, grid.num_nodes, channels))
        rows = state[begin:end].view(2, grid.num_nodes, channels).sum(2)
        sent, taken = host_ints(rows[0]), host_ints(rows[1])
        for node, peer in enumerate(grid.rail_of(me)):
            if peer != me:
                self.stats.rows_sent[peer], self.stats.rows_received[peer] = sent[node], taken[node]
                self.stats.bytes_sent[peer] = int(state[end + node])

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        if spec.exact:
            return (new_size(),), torch.int32, new_size()
        words = self._plan_words(num_tokens) + self._table_words(self.config.max_tokens_per_rank)
        return (words,), torch.int32, self.config.padded_rows


class NvlinkEngine(TwolevelEngine):
    """All ranks are one node. A combine in place pushes its rows, which may lie anywhere."""

    name, _pulls = NVLINK, False


def choose_peer(
    config: Config, num_sms: int, buffer_bytes: int, *, all_sms: bool, nodes: bool
) -> PeerChoice:
    """The engine with ``num_sms`` multiprocessors, ``all_sms`` or fewer than there are.

    ``nodes``: engine twolevel, on the grid of ``config.topology``; else nvlink, for which all ranks
    are one node.
    """
    if not nodes:
        if why := too_many(config.world_size):
            raise NotSupported(why)
        config = replace(config, topology=Topology(1, config.world_size))
    grid = config.topology
    assert grid is not None
    channels = most_channels(grid, 2 * config.hidden, buffer_bytes)
    tuning = peer_tuning(num_sms, grid, all_sms=all_sms, channels=channels)
    if nodes:
        return PeerChoice(TwolevelEngine, config, tuning, 0, 0)
    received = receive_bytes(buffer_bytes, config)
    heap = heap_bytes(buffer_bytes, config, all_sms=all_sms)
    return PeerChoice(NvlinkEngine, config, tuning, received, heap)
