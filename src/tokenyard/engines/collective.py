"""Engine ``collective``: an all-to-all of rows, once per (token, rank), over any
``torch.distributed`` group. On a grid of nodes: once per (token, node) to the rank there of the
same local index, and from there on (``engines/hierarchy.py``).

Life of a fresh dispatch: plan (integers), counts (one header to and from each rank), pack (one
gather), rows (one message per peer), place (one gather). A cached dispatch starts at pack; combine
goes the same way back and sums on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.agreement import Agreement
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.engines.failures import IN_ORDER
from tokenyard.engines.hierarchy import Hierarchy, Hop
from tokenyard.engines.known import COLLECTIVE
from tokenyard.engines.receive_plan import (
    Arrival,
    count_arrivals,
    localise,
    num_result_rows,
    settle,
)
from tokenyard.engines.send_plan import SendPlan, plan_send, ways_back
from tokenyard.engines.transport import RowTransport, Spans, Transport
from tokenyard.formats import cast_payload, row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH, CallKind
from tokenyard.routing import Placement, host_ints
from tokenyard.rows import Payload, Routing, RowFormat, as_bytes, overlap, sum_rows
from tokenyard.stats import Stats
from tokenyard.topology import Topology
from tokenyard.types import Layout


class CollectiveEngine(Agreement):
    """Dispatch and combine by all-to-all. All methods are collective and run one at a time."""

    name, counts_by_most = COLLECTIVE, False

    def __init__(self, config: Config, transport: Transport, stats: Stats) -> None:
        grid = config.topology
        grid = grid if grid and grid.has_levels else Topology(config.world_size, 1)
        super().__init__(config, transport, grid, relays=grid.has_levels)
        self._rows = RowTransport(transport, stats)
        self._hierarchy = Hierarchy(config, grid, self._rows) if grid.has_levels else None
        self.waits_on_host = transport.counts_on_host
        self.returns_width = min(config.num_topk, grid.num_nodes)  # destinations of a token
        self.hop_counts = self._hierarchy.num_counts if self._hierarchy else 0

    @property
    def buffer_bytes(self) -> int:
        """Host staging kept between calls. No symmetric memory."""
        return self._rows.num_bytes

    # Three collective calls

    def dispatch(self, given: DispatchArguments) -> tuple[Payload, Plan, Arrived]:
        payload, topk_idx, weights, spec, mode, *_ = given
        payload = cast_payload(payload, mode)
        with record_function("tokenyard.dispatch.plan"):
            send_plan = plan_send(topk_idx, weights, spec, self.config, self._grid.ranks_per_node)
            kind = CallKind(DISPATCH, payload, spec, mode, weights is not None)
            fingerprint = self._fingerprint(kind)
            headers = self._announce(fingerprint, topk_idx, send_plan, spec)
        with record_function("tokenyard.dispatch.pack"):
            row = self._format(payload, routed=True, weighted=weights is not None)
            send = self._rows.buffer("send", row, send_plan.token.numel(), payload.x.device)
            row.pack(payload, send_plan.token, Routing(send_plan.topk_idx, send_plan.weights), send)
        with record_function("tokenyard.dispatch.counts"):
            everybody = headers()
            sends, spans, sources = self._counts(send_plan, everybody, spec)
        with record_function("tokenyard.dispatch.rows"):
            recv = self._received(row, spans, spec, payload.x.device)
            if not spec.exact:
                row.vacate(recv)
            rows = self._rows.move(send, recv, spans, "dispatch", self._calls - 1)
            returns = ways_back(send_plan, spec, self.config)
            rows()
            route, hops = send_plan.token, list[int]()
            if self._hierarchy is not None:
                hop = self._hierarchy.plan(row.topk_idx(recv), sources, spec)
                recv = self._hierarchy.forward(row, recv, hop, "dispatch", self._calls - 1)
                route, hops = self._hierarchy.packed(route, spans, hop)
        with record_function("tokenyard.dispatch.place"):
            payload, place, arrived, experts = self._arrive(row, recv, sources, everybody, spec)
            splits = self._splits(sends, sources, everybody, spec, [*hops, *experts])
            return payload, Plan(splits, route, returns, *place, send_plan.first_pick), arrived

    def redispatch(self, given: CachedArguments) -> Payload:
        payload, plan, spec, mode, raw, _ = given
        payload = cast_payload(payload, mode)
        with record_function("tokenyard.redispatch"):
            fingerprint = self._fingerprint(CallKind(CACHED, payload, spec, mode, raw), plan)
            agreed = self._check_call(fingerprint, payload.x.shape[0])
            row = self._format(payload)
            token, spans, hop = self._known(plan, spec)
            send = self._rows.buffer("send", row, token.numel(), payload.x.device)
            row.pack(payload, token, None, send)
            recv = self._received(row, spans, spec, payload.x.device)
            agreed()
            self._rows.move(send, recv, spans, "cached dispatch", self._calls - 1)()
            if self._hierarchy is not None and hop is not None:
                recv = self._hierarchy.forward(row, recv, hop, "cached dispatch", self._calls - 1)
            if raw:
                return row.take(recv, None)
            return self._place(row, recv, plan.slots, plan.gather, spec, zeros=True)

    def combine(self, given: CombineArguments) -> tuple[Tensor, Tensor | None]:
        rows, plan, spec, _, reduce_weights, bias, out, *_ = given
        with record_function("tokenyard.combine"):
            row, agreed = self._begin_combine(given)
            token, spans, hop = self._known(plan, spec)
            send = self._partial_sums(row, given)
            agreed()
            if self._hierarchy is not None and hop is not None:
                send = self._hierarchy.join(row, send, hop, "combine", self._calls - 1)
            recv = self._rows.buffer("recv", row, token.numel(), rows.device)
            self._rows.move(send, recv, spans.reversed(), "combine", self._calls - 1)()
            shape = (plan.returns.shape[0], rows.shape[1])
            out = torch.empty(shape, dtype=rows.dtype, device=rows.device) if out is None else out
            bias = tuple(term.clone() if overlap(out, term) else term for term in bias)
            sum_rows(row.payload(recv), plan.returns, out, bias=bias)
            if reduce_weights is None:
                return out, None
            reduced = torch.empty(shape[0], row.picks, dtype=torch.float32, device=rows.device)
            sum_rows(row.weights(recv), plan.returns, reduced)
            return out, reduced

    def _begin_combine(self, given: CombineArguments) -> tuple[RowFormat, Callable[[], object]]:
        """Rows as they travel, and what waits until all ranks are known to be in this call."""
        rows, plan, spec, weights, reduce_weights, *_ = given
        width, reduces = given.width, reduce_weights is not None
        row = RowFormat(rows.shape[1], rows.dtype, picks=width, weighted=reduces)
        sent, scaled = Payload(rows, None), weights is not None
        kind = CallKind(COMBINE, sent, spec, None, width > 0, scaled)
        fingerprint = self._fingerprint(kind, plan)
        return row, self._check_call(fingerprint, plan.returns.shape[0])

    def interrupt(self, text: str) -> None:
        self._transport.interrupt(text)

    def close(self, why: str = IN_ORDER) -> None:
        self._transport.close(why)
        self._rows.close()

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        if spec.exact:
            return (new_size(),), torch.int64, new_size()
        places = self.config.padded_rows
        size = places if self._hierarchy is None else self._hierarchy.route_size()
        return (size,), torch.int64, places

    # Before rows move

    def _counts(
        self, send_plan: SendPlan, headers: Tensor | None, spec: Spec
    ) -> tuple[list[int], Spans, list[int]]:
        """Rows to each rank ``[R]``, spans of the first hop, and rows from each rank ``[R]``."""
        most, nodes = self.config.max_tokens_per_rank, self._grid.num_nodes
        if headers is None:
            everywhere = [most] * self.config.world_size
            return everywhere, self._first_hop([most] * nodes, [most] * nodes, spec), everywhere
        counts = host_ints(torch.cat([send_plan.leaving, send_plan.counts]))
        sources = host_ints(headers[:, head.NUM_ROWS])
        rail = self._grid.rail_of(self.config.rank)
        comes = sources
        if self._hierarchy is not None:
            comes = host_ints(headers[rail.start :: rail.step, -1])
        return counts[nodes:], self._first_hop(counts[:nodes], comes, spec), sources

    def _splits(
        self,
        sends: list[int],
        sources: list[int],
        headers: Any,
        spec: Spec,
        more: list[int],
    ) -> Tensor:
        """``Plan.splits``. ``headers``: all ranks', if there are any; ``more``: what only this
        engine reads, and rows of local experts."""
        routing, matrix = 0, list[int]()
        if headers is not None:
            routing = head.routing_of(headers)
            matrix = head.matrix_of(headers, self.config) if spec.exact else matrix
        numbers: Any = np.array([*sends, *sources, routing, *matrix, *more], dtype=np.int64)
        return torch.from_numpy(numbers)  # pyright: ignore[reportUnknownMemberType]

    def _first_hop(self, sends: list[int], comes: list[int], spec: Spec) -> Spans:
        """Rows to and from each node, or each rank if no node has more."""
        rail = self._grid.rail_of(self.config.rank)
        stride = None if spec.exact else self.config.max_tokens_per_rank
        return Spans.among(rail, self.config.world_size, sends, comes, stride)

    def _known(self, plan: Plan, spec: Spec) -> tuple[Tensor, Spans, Hop | None]:
        """What :meth:`_counts` and the relay's plan were: the token of each row sent, and hops."""
        size = self.config.world_size
        sends, sources = host_ints(plan.splits[:size]), host_ints(plan.splits[size : 2 * size])
        if self._hierarchy is None:
            return plan.route, self._first_hop(sends, sources, spec), None
        across, comes, _ = self._hierarchy.counts_of(plan, spec)
        token, hop = self._hierarchy.known(plan, spec, sources)
        return token, self._first_hop(across, comes, spec), hop

    def _received(self, row: RowFormat, spans: Spans, spec: Spec, device: torch.device) -> Tensor:
        """Room for the rows of the first hop."""
        static = self._grid.num_nodes * self.config.max_tokens_per_rank
        num_rows = sum(spans.recv_counts) if spec.exact else static
        return self._rows.buffer("recv", row, num_rows, device)

    # Rows

    def _format(
        self, payload: Payload, *, routed: bool = False, weighted: bool = False
    ) -> RowFormat:
        picks = self.config.num_topk if routed else 0
        return replace(row_of(payload, None), picks=picks, routed=routed, weighted=weighted)

    def _arrive(
        self, row: RowFormat, recv: Tensor, sources: list[int], headers: Tensor | None, spec: Spec
    ) -> tuple[Payload, Placement, Arrived, list[int]]:
        """Results of rows that came, and, with exact shapes, the rows of each local expert."""
        config, device = self.config, recv.device
        arrival = self._arrival(row, recv, sources, spec)
        counts: list[int] | None = None
        if headers is None:
            rows, pairs = count_arrivals(arrival, config)
        else:
            told = headers[:, head.COUNTS : head.COUNTS + config.num_local_experts]
            rows, pairs = torch.tensor(sources, device=device), told.to(device)
            counts = host_ints(told.sum(0))
        num_rows = num_result_rows(spec, config, counts, recv.shape[0])
        place, arrived = settle(arrival, spec, config, rows, pairs, num_rows)
        payload = self._place(row, recv, place.slots, place.gather, spec, zeros=False)
        return payload, place, arrived, counts if spec.exact and counts is not None else []

    def _place(
        self,
        row: RowFormat,
        recv: Tensor,
        slots: Tensor,
        gather: Tensor,
        spec: Spec,
        *,
        zeros: bool,
    ) -> Payload:
        """Arrived rows in their layout. Blocks of ``EXPERT_PADDED`` are mostly empty, so spread."""
        if spec.layout is Layout.EXPERT_PADDED:
            return row.spread(recv, slots, gather.numel(), zeros=zeros)
        return row.take(recv, gather if spec.placed else None)

    def _arrival(self, row: RowFormat, recv: Tensor, sources: list[int], spec: Spec) -> Arrival:
        ranks = torch.arange(self.config.world_size, device=recv.device)
        if spec.exact:
            repeats = torch.tensor(sources, device=recv.device)
            source = ranks.repeat_interleave(repeats, output_size=recv.shape[0])
        else:
            source = ranks.repeat_interleave(self.config.max_tokens_per_rank)
        token, topk_idx, carried = row.routing(recv)
        local_idx, weights = localise(topk_idx, carried, self.config)
        return Arrival(token=token, local_idx=local_idx, weights=weights, source_rank=source)

    def _partial_sums(self, row: RowFormat, given: CombineArguments) -> Tensor:
        """Sums of each arrived row's result rows; rows that stand as they arrived, uncopied."""
        rows, plan, spec, weights, reduce_weights, *_ = given
        placed = spec.placed and not given.raw
        if not placed and reduce_weights is None:
            return as_bytes(rows)
        arrived = plan.slots.shape[0] if placed else rows.shape[0]
        send = self._rows.buffer("send", row, arrived, rows.device)
        if placed:
            sum_rows(rows, plan.slots, row.payload(send), weights=weights)
        else:
            row.payload(send).copy_(rows)
        if reduce_weights is not None:
            row.weights(send).copy_(reduce_weights)
        return send
