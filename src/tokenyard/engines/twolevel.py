"""Engine ``twolevel``: ranks form nodes. Rows cross the network once per node, and are handed on
inside (``docs/reference/twolevel.md``). Engine ``nvlink`` is its case of one node.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard.engines.known import NVLINK, TWOLEVEL
from tokenyard.engines.outputs import Counted
from tokenyard.engines.ring_engine import RingEngine
from tokenyard.engines.signatures import Signature
from tokenyard.engines.status import StatusMonitor
from tokenyard.handle import Spec
from tokenyard.header import COMBINE, NUM_TOKENS
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
    _most_tokens = 0
    """Most tokens of any rank in any call so far: so many rows a forwarder's table has room for."""

    def check(self) -> None:
        super().check()
        if self._workspace.grid.num_nodes > 1:
            self._count_network()

    def _count_network(self) -> None:
        """Bring to the statistics what kernels counted: rows between ranks of my local index."""
        grid, channels, me = self._workspace.grid, self._workspace.tuning.channels, self.config.rank
        state, begin = self._workspace.state.cpu(), region.state_words(grid.world_size, channels)
        end = two_region.net_bytes_at(grid.world_size, grid.num_nodes, channels)
        rows = state[begin:end].view(2, grid.num_nodes, channels).sum(2)
        sent, taken = host_ints(rows[0]), host_ints(rows[1])
        for node, peer in enumerate(grid.rail_of(me)):
            if peer != me:
                self.stats.rows_sent[peer], self.stats.rows_received[peer] = sent[node], taken[node]
                self.stats.bytes_sent[peer] = int(state[end + node])

    def _seen(self, rows: Any) -> Any:
        """Rows of ranks on other nodes travel otherwise: see :meth:`check`."""
        grid, near = self._workspace.grid, np.zeros(self.config.world_size, dtype=np.int64)
        near[list(grid.ranks_of(grid.node_of(self.config.rank)))] = 1
        return rows * near

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        if spec.exact:
            return (new_size(),), torch.int32, new_size()
        words = self._plan_words(num_tokens) + self._table_words(self.config.max_tokens_per_rank)
        return (words,), torch.int32, self.config.padded_rows

    # The plan

    def _plan_words(self, num_tokens: Any) -> Any:
        grid, channels = self._workspace.grid, self._workspace.tuning.channels
        destinations = grid.world_size + grid.num_nodes
        first_rows = two_region.first_forwarded_words(grid.world_size, grid.num_nodes, channels)
        return region.plan_words(destinations, channels, num_tokens, self._local) + first_rows

    def _table_words(self, rows: int) -> int:
        """int32 words of the forwarders' table with ``rows`` rows per node."""
        return (self._workspace.grid.num_nodes - 1) * rows * self._workspace.grid.ranks_per_node

    def _route_words(self, num_tokens: Any) -> Any:
        return self._plan_words(num_tokens) + self._table_words(self._table_rows)

    def _rows_of_table(self, num_tokens: int, signature: Signature) -> int:
        self._most_tokens = max(self._most_tokens, num_tokens)
        # In place no rank has more than the most.
        known = signature.spec.exact and not signature.fingerprint.in_place
        return self._most_tokens if known else self.config.max_tokens_per_rank

    def _learn(self, signature: Signature) -> Any:
        known = super()._learn(signature)
        self._most_tokens = max(self._most_tokens, int(self._headers[:, NUM_TOKENS].max()))
        return known

    def _with_room(self, counted: Counted) -> Counted:
        if self._most_tokens <= self._table_rows:
            return counted
        self._memory.settle()  # the plan's programs may still write to its outputs
        larger = self._with_larger_table(counted.route, counted.tokens)
        return counted._replace(route=larger, route_words=larger.shape[0])

    def _with_larger_table(self, route: Tensor, num_tokens: int) -> Tensor:
        """``route`` with a table for as many tokens as any rank has."""
        words, grid = self._plan_words(num_tokens), self._workspace.grid
        larger = route.new_empty(words + self._table_words(self._most_tokens))
        larger[:words] = route[:words]
        rows_at: int = two_region.table_rows_at(
            grid.world_size, grid.num_nodes, self._workspace.tuning.channels
        )
        larger[rows_at] = self._most_tokens
        return larger


class NvlinkEngine(TwolevelEngine):
    """All ranks are one node. A combine in place pushes its rows, which may lie anywhere."""

    name, _pulls = NVLINK, False
