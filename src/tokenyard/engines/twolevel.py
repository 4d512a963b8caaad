"""Engine ``twolevel``: ranks form nodes. Rows cross the network once per node, and are handed on
inside (``docs/reference/twolevel.md``).

All that concerns a rank alone, and ranks of one node, is engine nvlink's; kernels, memory and names
of waits are this engine's.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard.engines.known import NVLINK, TWOLEVEL
from tokenyard.engines.nvlink import NvlinkEngine
from tokenyard.engines.outputs import CallPlan, Counted
from tokenyard.engines.signatures import Binders, Signature
from tokenyard.engines.status import StatusMonitor
from tokenyard.engines.twolevel_workspace import TwolevelWorkspace
from tokenyard.handle import Arrived, Spec
from tokenyard.header import COMBINE, NUM_TOKENS
from tokenyard.kernels import region, sync, two_region
from tokenyard.kernels.plan import bind_plan
from tokenyard.kernels.push import bind_push
from tokenyard.kernels.two_combine import bind_two_combine
from tokenyard.kernels.two_direct import bind_two_direct
from tokenyard.kernels.two_dispatch import bind_two_dispatch
from tokenyard.kernels.two_headers import bind_two_call_barrier
from tokenyard.kernels.two_pull import bind_two_pull
from tokenyard.routing import host_ints
from tokenyard.rows import Payload

_ROOMS, _PARTS = cast("int", two_region.ON_ROOMS.value), cast("int", two_region.ON_PARTS.value)


class TwolevelMonitor(StatusMonitor):
    """Rings inside are named after the source or owner of their rows
    (``docs/reference/twolevel.md``), network rings after the node.
    """

    _workspace: TwolevelWorkspace

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
            return other, f"rows{whose}", f"{tails} (receiver)"
        if phase == sync.ON_ROOM.value:
            return other, f"room for rows{whose}", f"{heads} (sender)"
        return super()._named(phase, peer, counter)


class TwolevelEngine(NvlinkEngine):
    """:class:`NvlinkEngine` in two hops, for ranks that form a grid; ``tuning`` is a
    ``TwolevelTuning``."""

    name, _pulls = TWOLEVEL, True
    _parts = (TwolevelWorkspace, TwolevelMonitor)
    binders = Binders(
        bind_plan,
        bind_two_dispatch,
        bind_two_combine,
        bind_two_direct,
        bind_push,
        bind_two_pull,
        bind_two_call_barrier,
    )
    _workspace: TwolevelWorkspace  # pyright: ignore[reportIncompatibleVariableOverride]
    _most_tokens = 0
    """Most tokens of any rank in any call so far: so many rows a forwarder's table has room for."""

    def check(self) -> None:
        super().check()
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

    def _count(
        self, topk_idx: Tensor, weights: Tensor | None, signature: Signature, room: int = 0
    ) -> Counted:
        self._most_tokens = max(self._most_tokens, topk_idx.shape[0])
        # In place no rank has more than the most.
        known = signature.spec.exact and not signature.fingerprint.in_place
        self._table_rows = self._most_tokens if known else self.config.max_tokens_per_rank
        return super()._count(topk_idx, weights, signature, room)

    def _learn(self, signature: Signature) -> Any:
        known = super()._learn(signature)
        self._most_tokens = max(self._most_tokens, int(self._headers[:, NUM_TOKENS].max()))
        return known

    def _move(
        self,
        payload: Payload,
        counted: Counted,
        signature: Signature,
        room: tuple[int, int],
        *,
        forced: bool = False,
    ) -> tuple[Payload, CallPlan, Arrived]:
        if forced and self._most_tokens > self._table_rows:
            self._memory.settle()  # the plan's programs may still write to its outputs
            larger = self._with_larger_table(counted.route, counted.tokens)
            counted = counted._replace(route=larger, route_words=larger.shape[0])
        return super()._move(payload, counted, signature, room, forced=forced)

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


class TaskedNvlinkEngine(TwolevelEngine):
    """Engine nvlink where few multiprocessors are lent: all ranks are one node, and programs share
    the tasks of senders and receivers. On two H200 with 24 of 132 multiprocessors a dispatch took
    274 us so, and 324 where every role has programs of its own; with all of them 188 and 179.
    """

    name, _pulls = NVLINK, False
