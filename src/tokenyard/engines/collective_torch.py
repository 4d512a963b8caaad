"""What engine ``collective`` does with rows before and after they move, by torch, on any device.
``Launches`` has the same methods, for GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.base import DispatchArguments
from tokenyard.engines.plans import (
    Arrival,
    SendPlan,
    count_arrivals,
    counts_by_rank,
    localise,
    note_bad_index,
    num_result_rows,
    plan_send,
    settle,
    ways_back,
)
from tokenyard.engines.transport import RowTransport
from tokenyard.formats import cast_payload, row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import Fingerprint
from tokenyard.routing import Placement, host_ints
from tokenyard.rows import Payload, Routing, RowFormat, overlap, sum_rows
from tokenyard.topology import Topology
from tokenyard.types import Layout, Quantize


class Given(NamedTuple):
    """A fresh dispatch: ``payload`` (cast, unless kernels do that), ``row``: how it travels,
    ``kind``: of kernels that work on it."""

    payload: Payload
    topk_idx: Tensor
    weights: Tensor | None
    spec: Spec
    row: RowFormat
    kind: Any = None


class Left(NamedTuple):
    """What a fresh dispatch knows before rows move."""

    headers: Tensor | None
    route: Tensor  # the token of each row that is sent, -1 on unused places
    first_pick: Tensor
    plan: SendPlan


class TorchWork:
    """The work on one device. ``grid``: rows leave to its nodes, which relay them if they have
    several ranks. ``num_counts``: words of a header behind ``header.COUNTS``."""

    def __init__(
        self, config: Config, grid: Topology, num_counts: int, row_transport: RowTransport
    ) -> None:
        self._config, self._grid, self._num_counts = config, grid, num_counts
        self._rows = row_transport
        self._bad_index: Tensor | None = None

    def given(self, arguments: DispatchArguments) -> Given:
        payload, topk_idx, weights, spec, mode, *_ = arguments
        payload, picks = cast_payload(payload, mode), self._config.num_topk
        weighted = weights is not None
        row = replace(row_of(payload, None), picks=picks, routed=True, weighted=weighted)
        return Given(payload, topk_idx, weights, spec, row)

    def leave(self, given: Given, fingerprint: Fingerprint | None) -> Left:
        """Plan, and fill the headers. ``fingerprint``: None if there are none, as static shapes let
        the device go on alone."""
        _, topk_idx, weights, spec, *_ = given
        plan = plan_send(topk_idx, weights, spec, self._config, self._grid.ranks_per_node)
        headers = None
        if fingerprint is None:
            self._remember_bad_index(topk_idx)
        else:
            headers = self._headers(fingerprint, topk_idx, plan)
        return Left(headers, plan.token, plan.first_pick, plan)

    def _headers(self, fingerprint: Fingerprint, topk_idx: Tensor, plan: SendPlan) -> Tensor:
        config, (tokens, _) = self._config, topk_idx.shape
        header = head.blank(fingerprint, config.world_size, self._num_counts, tokens)
        header = header.to(topk_idx.device)
        head.mark_bad_index(header, topk_idx, config.num_experts)
        header[:, head.NUM_ROWS] = plan.counts
        header[:, head.ROUTING] = head.digest(plan.topk_idx)
        parts = [
            counts_by_rank(plan.topk_idx, config),
            plan.counts[: config.matrix_ranks].expand(config.world_size, -1),
        ]
        if self._grid.has_levels:
            parts.append(plan.leaving.repeat_interleave(self._grid.ranks_per_node).unsqueeze(1))
        header[:, head.COUNTS :] = torch.cat(parts, dim=1)
        return header

    def pack(self, given: Given, left: Left) -> tuple[Tensor, Tensor]:
        """Rows to send, and ``Plan.returns``."""
        payload, row, plan = given.payload, given.row, left.plan
        send = self._rows.buffer("send", row, plan.token.numel(), payload.x.device)
        row.pack(payload, plan.token, Routing(plan.topk_idx, plan.weights), send)
        return send, ways_back(plan, given.spec, self._config)

    def counts(self, left: Left) -> tuple[list[int], list[int]]:
        """Rows to each node, or rank if it is alone there, and to each rank, behind headers."""
        counts = host_ints(torch.cat([left.plan.leaving, left.plan.counts]))
        nodes = self._grid.num_nodes
        return counts[:nodes], counts[nodes:]

    def pack_again(
        self, payload: Payload, row: RowFormat, mode: Quantize | None, plan: Plan, token: Tensor,
        rows: Tensor,
    ) -> None:  # fmt: skip
        """Fill the ``rows`` of a cached dispatch, of a ``token`` each."""
        row.pack(cast_payload(payload, mode), token, None, rows)

    def arrive(
        self, given: Given, recv: Tensor, headers: Tensor | None, counts: list[int]
    ) -> tuple[Payload, Placement, Arrived]:
        """Place rows. ``headers``: all ranks', on the device, if there are any; then ``counts`` are
        rows of each local expert."""
        config, spec, row = self._config, given.spec, given.row
        ranks = torch.arange(config.world_size, device=recv.device)
        token, topk_idx, carried = row.routing(recv)
        local_idx, weights = localise(topk_idx, carried, config)
        if spec.exact and headers is not None:
            repeats, num_rows = headers[:, head.NUM_ROWS], recv.shape[0]
            source = ranks.repeat_interleave(repeats, output_size=num_rows)
        else:
            source = ranks.repeat_interleave(config.max_tokens_per_rank)
        arrival = Arrival(token=token, local_idx=local_idx, weights=weights, source_rank=source)
        if headers is None:
            rows, pairs = count_arrivals(arrival, config)
        else:
            rows = headers[:, head.NUM_ROWS]
            pairs = headers[:, head.COUNTS : head.COUNTS + config.num_local_experts]
        num_rows = num_result_rows(spec, config, counts, recv.shape[0])
        place, arrived = settle(arrival, spec, config, rows, pairs, num_rows)
        if spec.layout is Layout.EXPERT_PADDED:
            payload = row.spread(recv, place.slots, num_rows, zeros=False)
        else:
            payload = row.take(recv, place.gather if spec.placed else None)
        return payload, place, arrived

    def gather(self, row: RowFormat, recv: Tensor, plan: Plan | None, spec: Spec) -> Payload:
        """Rows of a cached dispatch in their order. ``plan``: None: as they came."""
        if plan is not None and spec.layout is Layout.EXPERT_PADDED:  # most are empty
            return row.spread(recv, plan.slots, plan.gather.numel(), zeros=True)
        return row.take(recv, None if plan is None else plan.gather)

    def sum_here(
        self, row: RowFormat, rows: Tensor, slots: Tensor | None, to: Tensor,
        weights: Tensor | None, reduce_weights: Tensor | None,
    ) -> None:  # fmt: skip
        """Sums of each arrived row's result rows, its ``slots`` (None: rows are as they came)."""
        if slots is None:
            row.payload(to).copy_(rows)
        else:
            sum_rows(rows, slots, row.payload(to), weights=weights)
        if reduce_weights is not None:
            row.weights(to).copy_(reduce_weights)

    def sum_there(
        self, row: RowFormat, recv: Tensor, returns: Tensor, bias: tuple[Tensor, ...],
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Sums of what came back, by token, and of the weights behind."""
        tokens, device = returns.shape[0], recv.device
        if out is None:
            out = torch.empty(tokens, row.hidden, dtype=row.dtype, device=device)
        bias = tuple(term.clone() if overlap(out, term) else term for term in bias)
        sum_rows(row.payload(recv), returns, out, bias=bias)
        if not row.weighted:
            return out, None
        reduced = torch.empty(tokens, row.picks, dtype=torch.float32, device=device)
        sum_rows(row.weights(recv), returns, reduced)
        return out, reduced

    def _remember_bad_index(self, topk_idx: Tensor) -> None:
        """Keep the first bad id of a static call on the device until :meth:`check` asks."""
        if self._bad_index is None:
            with torch.inference_mode(False):
                self._bad_index = torch.full((2,), -1, dtype=torch.int64, device=topk_idx.device)
        note_bad_index(self._bad_index, topk_idx, self._config.num_experts)

    def check(self) -> None:
        """Raise if a dispatch without headers had ids out of range; the host waits for them."""
        if self._bad_index is None:
            return
        at, value = host_ints(self._bad_index)
        if at >= 0:
            self._bad_index.fill_(-1)  # it stays where it is: CUDA graphs write to it
            sizes = self._config.num_topk, self._config.num_experts
            raise ValueError(head.bad_index_text(at, value, *sizes))
