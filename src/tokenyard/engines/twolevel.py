"""Engine ``twolevel``: ranks form nodes. Rows cross the network once per node, and are handed on
inside (``docs/reference/twolevel.md``). Engine ``nvlink`` is its case of one node."""

from __future__ import annotations

from typing import Any, cast

import torch

from tokenyard.engines.known import NVLINK, TWOLEVEL
from tokenyard.engines.ring_engine import RingEngine
from tokenyard.engines.status import StatusMonitor
from tokenyard.handle import Spec
from tokenyard.header import COMBINE
from tokenyard.kernels import region, sync, two_region
from tokenyard.routing import host_ints

_ROOMS, _PARTS = cast("int", two_region.ON_ROOMS.value), cast("int", two_region.ON_PARTS.value)


class TwolevelMonitor(StatusMonitor):
    """Rings inside are named after the source or owner of their rows
    (``docs/reference/twolevel.md``), network rings after the node."""

    def _named(self, phase: int, peer: int, counter: int) -> tuple[int, str, str]:
        grid, me = self._workspace.grid, self._config.rank
        home, local, channels = grid.node_of(me), grid.local_of(me), self._workspace.tuning.channels
        tails, heads = f"tails[{peer}, {counter}]", f"heads[{peer}, {counter}]"
        if phase == two_region.ON_BOTH.value:  # a reducer: ranks of its node, then nodes
            if peer < grid.world_size:
                return peer, "its rows", f"{tails} (reducer)"
            node = peer - grid.world_size
            name = f"network tails[{node}, {counter}] (reducer)"
            return grid.rank_at(node, local), "its node's sums", name
        if phase == two_region.ON_NET_ROWS.value:
            return grid.rank_at(peer, local), "its rows", f"network {tails} (forwarder)"
        if phase == two_region.ON_NET_ROOM.value:
            role = "combiner" if self._now.op == COMBINE else "network sender"
            return grid.rank_at(peer, local), "room for rows", f"network {heads} ({role})"
        if phase in (_ROOMS, _PARTS):  # peer: of my node; counter: which node's ring
            node, channel = divmod(counter, channels)
            ring, other = grid.rank_at(node, peer), grid.rank_at(home, peer)
            if phase == _ROOMS:
                return other, "room for rows", f"heads[{ring}, {channel}] (forwarder)"
            return other, "its rows", f"tails[{ring}, {channel}] (combiner)"
        # An inner ring: who is at its other end, and whose rows it takes if they are another's.
        other = grid.rank_at(home, grid.local_of(peer))
        whose = "" if other == peer else f" of rank {peer}"
        if phase == sync.ON_ROWS.value:
            return other, f"rows{whose}" if whose else "its rows", f"{tails} (receiver)"
        if phase == sync.ON_ROOM.value:
            return other, f"room for rows{whose}", f"{heads} (sender)"
        return super()._named(phase, peer, counter)


class TwolevelEngine(RingEngine):
    """:class:`RingEngine` in two hops, for ranks that form a grid."""

    name, _pulls = TWOLEVEL, True
    _monitor_type = TwolevelMonitor

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
