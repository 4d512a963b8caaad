"""Engine ``twolevel``: ranks form nodes. Rows cross the network once per node, and are handed on
inside (``docs/reference/twolevel.md``).

All that concerns a rank alone, and ranks of one node, is engine nvlink's; kernels, memory and names
of waits are this engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.engines.known import TWOLEVEL
from tokenyard.engines.nvlink import NvlinkEngine
from tokenyard.engines.signatures import Binders, Signature
from tokenyard.engines.tables import Counted, Counts
from tokenyard.engines.twolevel_ground import TwoGround
from tokenyard.engines.twolevel_watch import TwoWatch
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import NUM_TOKENS
from tokenyard.kernels import region, two_region
from tokenyard.kernels.plan import bind_plan
from tokenyard.kernels.two_combine import bind_two_combine
from tokenyard.kernels.two_direct import bind_two_direct
from tokenyard.kernels.two_dispatch import bind_two_dispatch
from tokenyard.kernels.two_letters import bind_two_greet
from tokenyard.kernels.two_pull import bind_two_pull
from tokenyard.routing import host_ints
from tokenyard.rows import Payload


class TwolevelEngine(NvlinkEngine):
    """Dispatch and combine in two hops. As :class:`NvlinkEngine`, for ranks that form a grid;
    ``shape`` is a ``Tuning``.
    """

    name = TWOLEVEL
    _parts = (TwoGround, TwoWatch)
    binders = Binders(
        bind_plan,
        bind_two_dispatch,
        bind_two_combine,
        bind_two_direct,
        bind_two_pull,
        bind_two_greet,
    )
    _ground: TwoGround  # pyright: ignore[reportIncompatibleVariableOverride]
    _most_tokens = 0
    """Most tokens of any rank in any call so far: so many rows a forwarder's table has room for."""

    def check(self) -> None:
        super().check()
        self._count_network()

    def _count_network(self) -> None:
        """Bring what kernels have counted to the statistics: rows to and from the ranks of my local
        index on other nodes.
        """
        grid, channels, me = self._ground.grid, self._ground.shape.channels, self.config.rank
        state = self._ground.state.cpu()
        begin, end = (
            region.state_words(grid.world_size, channels),
            two_region.net_bytes_at(grid.world_size, grid.num_nodes, channels),
        )
        sent, taken = (
            host_ints(rows) for rows in state[begin:end].view(2, grid.num_nodes, channels).sum(2)
        )
        for node, peer in enumerate(grid.rail_of(me)):
            if peer != me:
                self.stats.rows_sent[peer], self.stats.rows_received[peer] = sent[node], taken[node]
                self.stats.bytes_sent[peer] = int(state[end + node])

    def _record(self, op: str, splits: list[int], kind: Signature, *, back: bool = False) -> None:
        """As its base; rows of ranks on other nodes travel otherwise: see :meth:`check`."""
        size, near = (
            self.config.world_size,
            self._ground.grid.ranks_of(self._ground.grid.node_of(self.config.rank)),
        )
        kept = [rows if at % size in near else 0 for at, rows in enumerate(splits[: 2 * size])]
        super()._record(op, kept, kind, back=back)

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        if spec.exact:
            return (new_size(),), torch.int32, new_size()
        padded = self.config.max_tokens_per_rank
        return (
            (self._plan_words(num_tokens) + self._table_words(padded),),
            torch.int32,
            self.config.padded_rows,
        )

    def _sum_in_place(self, *given: Any) -> Tensor:
        """A combine in place: see :meth:`View.read`."""
        return self._view.read(*given)

    def rows_in_place(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, hidden]`` in symmetric memory, for a combine in place.
        Collective where that has to grow.
        """
        with self._memory.tensors():
            return self._view.rows(num_rows, hidden, dtype)

    # The plan

    def _plan_words(self, num_tokens: Any) -> Any:
        grid, channels = self._ground.grid, self._ground.shape.channels
        landings = two_region.landing_words(grid.world_size, grid.num_nodes, channels)
        return (
            region.plan_words(grid.world_size + grid.num_nodes, channels, num_tokens, self._local)
            + landings
        )

    def _table_words(self, rows: int) -> int:
        """int32 words of the forwarders' table with ``rows`` rows per node."""
        return (self._ground.grid.num_nodes - 1) * rows * self._ground.grid.ranks_per_node

    def _route_words(self, num_tokens: Any) -> Any:
        return self._plan_words(num_tokens) + self._table_words(self._table_rows)

    def _count(
        self, topk_idx: Tensor, weights: Tensor | None, kind: Signature, room: int = 0
    ) -> Counted:
        self._most_tokens = max(self._most_tokens, topk_idx.shape[0])
        # In place no rank has more than the most.
        known = kind.spec.exact and not kind.fingerprint.in_place
        self._table_rows = self._most_tokens if known else self.config.max_tokens_per_rank
        return super()._count(topk_idx, weights, kind, room)

    def _learn(self, kind: Signature) -> Counts:
        counts = super()._learn(kind)
        self._most_tokens = max(self._most_tokens, int(self._headers[:, NUM_TOKENS].max()))
        return counts

    def _move(
        self,
        payload: Payload,
        counted: Counted,
        kind: Signature,
        room: tuple[int, int],
        *,
        forced: bool = False,
    ) -> tuple[Payload, Plan, Arrived]:
        if forced and self._most_tokens > self._table_rows:
            self._memory.settle()  # the plan's programs may still write to its tables
            counted = counted._replace(
                route=self._with_larger_table(counted.route, counted.first_pick.shape[0])
            )
        return super()._move(payload, counted, kind, room, forced=forced)

    def _with_larger_table(self, route: Tensor, num_tokens: int) -> Tensor:
        """``route`` with a table for as many tokens as any rank has."""
        words, grid = self._plan_words(num_tokens), self._ground.grid
        larger = torch.empty(
            words + self._table_words(self._most_tokens), dtype=route.dtype, device=route.device
        )
        larger[:words] = route[:words]
        larger[
            two_region.table_rows_at(grid.world_size, grid.num_nodes, self._ground.shape.channels)
        ] = self._most_tokens
        return larger
