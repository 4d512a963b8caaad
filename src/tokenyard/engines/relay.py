"""The second hop of the collective engine on a grid: inside the node.

Dispatch: a token crosses the network once per destination node, to the rank there of the same local index, which forwards it to
the ranks that hold its experts. Combine: that rank adds what they return, in rank order, and sends one row back. So a token's
rows cross the network once per node instead of once per rank, and the sums form the two-level tree of ``docs/semantics.md``.

What is forwarded follows from the ids that ride along, so only rows relayed are announced; a row is copied, never taken apart.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.engines.mover import Mover
from tokenyard.engines.wire import Spans
from tokenyard.handle import Plan, Spec
from tokenyard.layout import host_ints, return_places, send_order, send_order_static, tokens_in_ranks
from tokenyard.rows import RowFormat, as_words, sum_rows
from tokenyard.topology import Topology

INSIDE = ", inside the node"


class Leg(NamedTuple):
    """From the rank that relays to the ranks of its node, and back. Q rows are relayed here, S are forwarded, Nb arrive.

    With static shapes each (source rank, rank of this node) has M places, so Q = nodes * M and S = Nb = R * M.
    """

    spans: Spans  # rows to and from the ranks of this node
    order: Tensor  # [S] the relayed row behind each row forwarded, by destination; -1 on unused places
    joins: Tensor  # [Q, J] places among the rows forwarded of each relayed row's copies, by rank; then -1
    arrange: Tensor  # [Nb] where the rows, by source rank and token, stand as they come: by relaying rank, source node, token


class Relay:
    """Forwards rows inside this node, and brings their sums together."""

    def __init__(self, config: Config, grid: Topology, mover: Mover) -> None:
        self.config, self.grid = config, grid
        self._mover = mover
        self._peers = grid.ranks_of(grid.node_of(config.rank))
        self._room = grid.num_nodes * config.max_tokens_per_rank

    @property
    def num_counts(self) -> int:
        """Numbers that a plan holds for both hops: rows to and from each node, rows to each rank of this one."""
        return 2 * self.grid.num_nodes + self.grid.ranks_per_node

    @property
    def width(self) -> int:
        """Most ranks of a node that a token can go to."""
        return min(self.config.num_topk, self.grid.ranks_per_node)

    # The plan

    def plan(self, topk_idx: Tensor, sources: list[int], spec: Spec) -> Leg:
        """The leg of rows with global ids ``topk_idx [Q, K]``; ``sources [R]`` says how many come from each rank in the end."""
        hits = self._hits(topk_idx)
        if not spec.exact:
            return self._static_leg(hits)
        sends = host_ints(hits.sum(0))
        order, joins = send_order(hits), return_places(hits, None, self.width)
        return Leg(self._spans(sends, sources), order, joins, self._arrange(sources, hits.device))

    def _static_leg(self, hits: Tensor) -> Leg:
        """Places that depend on nothing: ``order`` is by (destination, source node, token), M places each. For CUDA graphs."""
        nodes, each, most = self.grid.num_nodes, self.grid.ranks_per_node, self.config.max_tokens_per_rank
        node = torch.arange(nodes, device=hits.device)
        from_node = node.repeat_interleave(most).unsqueeze(1) == node
        split = (hits.unsqueeze(2) & from_node.unsqueeze(1)).flatten(1)
        order, joins = send_order_static(split, most), return_places(split, most, self.width)
        spans = self._spans([self._room] * each, [most] * self.config.world_size)
        came = torch.arange(self.config.padded_rows, device=hits.device).view(each, nodes, most)
        return Leg(spans, order, joins, came.transpose(0, 1).reshape(-1))

    def _hits(self, topk_idx: Tensor) -> Tensor:
        """Which ranks of this node each relayed row goes to: bool ``[Q, ranks per node]``. Other ids count for nothing."""
        config = self.config
        first, end = config.bounds[self._peers.start], config.bounds[self._peers.stop]
        here = torch.where((topk_idx >= first) & (topk_idx < end), topk_idx, -1)
        return tokens_in_ranks(here, config.num_experts, config.world_size)[:, self._peers.start : self._peers.stop]

    def _spans(self, sends: list[int], sources: list[int]) -> Spans:
        recvs = [sum(sources[local :: self.grid.ranks_per_node]) for local in range(self.grid.ranks_per_node)]
        return Spans.among(self._peers, self.config.world_size, sends, recvs)

    def _arrange(self, sources: list[int], device: torch.device) -> Tensor:
        """Rows come by (local index of the rank that relays, source node); where those of each source rank begin there."""
        counts = torch.tensor(sources, device=device).view(self.grid.num_nodes, self.grid.ranks_per_node)
        ordered, came = counts.reshape(-1), counts.t().reshape(-1)
        begin = (came.cumsum(0) - came).view(self.grid.ranks_per_node, self.grid.num_nodes).t().reshape(-1)
        shift = begin - (ordered.cumsum(0) - ordered)
        num_rows = sum(sources)
        return shift.repeat_interleave(ordered, output_size=num_rows) + torch.arange(num_rows, device=device)

    # The plan as ``Plan`` holds it: ``route`` and some numbers in ``splits``

    def packed(self, token: Tensor, first: Spans, leg: Leg) -> tuple[Tensor, list[int]]:
        """``Plan.route`` with ``token [S of the first hop]`` in front, and numbers for ``Plan.splits``."""
        route = torch.cat([token, leg.order, leg.joins.reshape(-1), leg.arrange])
        rail = self.grid.rail_of(self.config.rank)
        across = [counts[rank] for counts in (first.send_counts, first.recv_counts) for rank in rail]
        return route, [*across, *(leg.spans.send_counts[peer] for peer in self._peers)]

    def counts_of(self, plan: Plan, spec: Spec) -> tuple[list[int], list[int], list[int]]:
        """What :meth:`packed` put into ``plan.splits``: rows to and from each node, rows to each rank of this one."""
        config, nodes = self.config, self.grid.num_nodes
        begin = 2 * config.world_size + 1 + (config.matrix_ranks**2 if spec.exact else 0)
        numbers = host_ints(plan.splits[begin : begin + self.num_counts])
        return numbers[:nodes], numbers[nodes : 2 * nodes], numbers[2 * nodes :]

    def known(self, plan: Plan, spec: Spec, sources: list[int]) -> tuple[Tensor, Leg]:
        """``token`` and the leg, as they were packed."""
        sends, recvs, forwards = self.counts_of(plan, spec)
        if spec.exact:
            left, relayed = sum(sends), sum(recvs)
        else:
            left, relayed, sources = self._room, self._room, [self.config.max_tokens_per_rank] * self.config.world_size
        sizes = [left, sum(forwards), relayed * self.width, sum(sources)]
        token, order, joins, arrange = cast("tuple[Tensor, ...]", plan.route.split(sizes))  # pyright: ignore[reportUnknownMemberType]
        return token, Leg(self._spans(forwards, sources), order, joins.view(relayed, self.width), arrange)

    def route_size(self) -> int:
        """Elements of ``Plan.route`` with static shapes."""
        return self._room * (1 + self.width) + 2 * self.config.padded_rows

    # Rows

    def forward(self, form: RowFormat, relayed: Tensor, leg: Leg, op: str, call: int) -> Tensor:
        """Send ``relayed [Q, bytes]`` on; returns what came here, ``[Nb, bytes]`` by source rank and token."""
        copies = self._mover.buffer("relay", form, leg.order.numel(), relayed.device)
        _copy_rows(relayed, leg.order.clamp(min=0), copies)
        if form.routed:
            unused = leg.order < 0
            form.token(copies).masked_fill_(unused, -1)
            form.topk_idx(copies).masked_fill_(unused.unsqueeze(1), -1)
        came = self._mover.buffer("recv", form, leg.arrange.numel(), relayed.device)
        self._mover.move(copies, came, leg.spans, op + INSIDE, call)()
        recv = self._mover.buffer("relay", form, leg.arrange.numel(), relayed.device)
        _copy_rows(came, leg.arrange, recv)
        return recv

    def join(self, form: RowFormat, rows: Tensor, leg: Leg, op: str, call: int) -> Tensor:
        """Bring ``rows [Nb, bytes]`` back to the ranks that relayed them; returns the sums, ``[Q, bytes]``."""
        back = self._mover.buffer("relay", form, leg.arrange.numel(), rows.device)
        if back.numel():
            as_words(back).index_copy_(0, leg.arrange, as_words(rows))
        copies = self._mover.buffer("recv", form, leg.order.numel(), rows.device)
        self._mover.move(back, copies, leg.spans.reversed(), op + INSIDE, call)()
        sums = self._mover.buffer("send", form, leg.joins.shape[0], rows.device)
        sum_rows(form.payload(copies), leg.joins, form.payload(sums))
        if form.weighted:
            sum_rows(form.weights(copies), leg.joins, form.weights(sums))
        return sums


def _copy_rows(rows: Tensor, order: Tensor, out: Tensor) -> None:
    """``out[i] = rows[order[i]]``, whole rows."""
    if out.numel():
        torch.index_select(as_words(rows), 0, order, out=as_words(out))
