"""The second hop of the collective engine on a grid: inside the node.

Dispatch: a token crosses the network once per destination node, to the rank there of the same local
index, which forwards it to the ranks that hold its experts. Combine: that rank adds what they
return, in rank order, and sends one row back. So a token's rows cross the network once per node
instead of once per rank, and the sums form the two-level tree of ``docs/reference/semantics.md``.

What is forwarded follows from the ids that ride along, so only rows relayed are announced; a row is
copied, never taken apart.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.engines.transport import RowTransport, Spans
from tokenyard.handle import Plan, Spec
from tokenyard.routing import (
    host_ints,
    return_places,
    send_order,
    send_order_static,
    tokens_in_ranks,
)
from tokenyard.rows import RowFormat, as_words, sum_rows
from tokenyard.topology import Topology

INSIDE = ", inside the node"


class Hop(NamedTuple):
    """From the rank that relays to the ranks of its node, and back. Q rows are relayed here, S are
    forwarded, Nb arrive.

    With static shapes each (source rank, rank of this node) has M places, so Q = nodes * M and S =
    Nb = R * M. If the host knows how many rows there are, those to a rank stand together, in front
    of its nodes * M places, and only they move; if not, all do.
    """

    spans: Spans  # rows to and from the ranks of this node
    # [S] the relayed row behind each row forwarded, by destination; -1 on unused places
    order: Tensor
    # [Q, J] places among the rows forwarded of each relayed row's copies, by rank; then -1
    joins: Tensor
    # [Nb] where rows, by source rank and token, come: by relaying rank, source node, token
    arrange: Tensor


class Hierarchy:
    """Forwards rows inside this node, and brings their sums together."""

    def __init__(self, config: Config, grid: Topology, row_transport: RowTransport) -> None:
        self.config, self.grid = config, grid
        self._rows = row_transport
        self._peers = grid.ranks_of(grid.node_of(config.rank))
        self._room = grid.num_nodes * config.max_tokens_per_rank

    @property
    def num_counts(self) -> int:
        """Numbers in a plan: rows to and from each node, and to each rank of this node."""
        return 2 * self.grid.num_nodes + self.grid.ranks_per_node

    @property
    def width(self) -> int:
        """Most ranks of a node that a token can go to."""
        return min(self.config.num_topk, self.grid.ranks_per_node)

    # The plan

    def plan(self, topk_idx: Tensor, sources: list[int], spec: Spec) -> Hop:
        """The hop of rows with ids ``topk_idx [Q, K]``; ``sources [R]``: rows from each rank."""
        hits = self._hits(topk_idx)
        if not spec.exact:
            return self._static_hop(hits, sources)
        sends = host_ints(hits.sum(0))
        order, joins = send_order(hits), return_places(hits, None, self.width)
        return Hop(self._spans(sends, sources), order, joins, self._arrange(sources, hits.device))

    def _static_hop(self, hits: Tensor, sources: list[int]) -> Hop:
        """For CUDA graphs, no counts on the host: M places by (destination, node, token)."""
        each, most = self.grid.ranks_per_node, self.config.max_tokens_per_rank
        if self._rows.counts_on_host:
            sends, split, stride = host_ints(hits.sum(0)), hits, self._room
            came = torch.tensor(sources, device=hits.device)
        else:  # all rooms are full; into a CUDA graph the host can copy no numbers
            came = torch.full((len(sources),), most, device=hits.device)
            node = torch.arange(self.grid.num_nodes, device=hits.device)
            from_node = node.repeat_interleave(most).unsqueeze(1) == node
            split = (hits.unsqueeze(2) & from_node.unsqueeze(1)).flatten(1)
            sends, stride = [self._room] * each, most
        order, joins = send_order_static(split, stride), return_places(split, stride, self.width)
        spans = self._spans(sends, sources, self._room)
        return Hop(spans, order, joins, self._arrange_static(came))

    def _hits(self, topk_idx: Tensor) -> Tensor:
        """To which ranks of this node each relayed row goes: bool ``[Q, ranks per node]``."""
        config = self.config
        first, end = config.bounds[self._peers.start], config.bounds[self._peers.stop]
        here = torch.where((topk_idx >= first) & (topk_idx < end), topk_idx, -1)
        hits = tokens_in_ranks(here, config.num_experts, config.world_size)
        return hits[:, self._peers.start : self._peers.stop]

    def _spans(self, sends: list[int], sources: list[int], stride: int | None = None) -> Spans:
        each = self.grid.ranks_per_node
        recvs = [sum(sources[local::each]) for local in range(each)]
        return Spans.among(self._peers, self.config.world_size, sends, recvs, stride)

    def _arrange(self, sources: list[int], device: torch.device) -> Tensor:
        """Rows come by (relaying rank, source node); where those of each source rank begin."""
        nodes, each, num_rows = self.grid.num_nodes, self.grid.ranks_per_node, sum(sources)
        ordered = torch.tensor(sources, device=device)
        came = ordered.view(nodes, each).t().reshape(-1)
        begin = (came.cumsum(0) - came).view(each, nodes).t().reshape(-1)
        shift = begin - (ordered.cumsum(0) - ordered)
        rows = torch.arange(num_rows, device=device)
        return shift.repeat_interleave(ordered, output_size=num_rows) + rows

    def _arrange_static(self, came: Tensor) -> Tensor:
        """The same with nodes * M places per relaying rank: those in use, then the others.
        ``came [R]``: rows from each rank."""
        nodes, each = self.grid.num_nodes, self.grid.ranks_per_node
        most, used = self.config.max_tokens_per_rank, came.view(nodes, each, 1)
        node, local, row = (
            torch.arange(count, device=came.device) for count in (nodes, each, most)
        )
        begin = used.cumsum(0) - used
        unused = used.sum(0) + (node * most).view(-1, 1, 1) - begin + row - used
        place = torch.where(row < used, begin + row, unused) + local.view(-1, 1) * self._room
        return place.reshape(-1)

    # The plan as ``Plan`` holds it: ``route`` and some numbers in ``splits``

    def packed(self, token: Tensor, first: Spans, hop: Hop) -> tuple[Tensor, list[int]]:
        """``Plan.route``, which begins with ``token``, and numbers for ``Plan.splits``."""
        route = torch.cat([token, hop.order, hop.joins.reshape(-1), hop.arrange])
        rail = self.grid.rail_of(self.config.rank)
        both = first.send_counts, first.recv_counts
        across = [counts[rank] for counts in both for rank in rail]
        return route, [*across, *(hop.spans.send_counts[peer] for peer in self._peers)]

    def counts_of(self, plan: Plan, spec: Spec) -> tuple[list[int], list[int], list[int]]:
        """Of ``plan.splits``: rows to and from each node, and to each rank of this node."""
        config, nodes = self.config, self.grid.num_nodes
        begin = 2 * config.world_size + 1 + (config.matrix_ranks**2 if spec.exact else 0)
        numbers = host_ints(plan.splits[begin : begin + self.num_counts])
        return numbers[:nodes], numbers[nodes : 2 * nodes], numbers[2 * nodes :]

    def known(self, plan: Plan, spec: Spec, sources: list[int]) -> tuple[Tensor, Hop]:
        """``token`` and the hop, as they were packed."""
        sends, recvs, forwards = self.counts_of(plan, spec)
        if spec.exact:
            left, relayed, stride = sum(sends), sum(recvs), None
            forwarded, came = sum(forwards), sum(sources)
        else:
            left = relayed = stride = self._room
            forwarded = came = self.config.padded_rows
        sizes = [left, forwarded, relayed * self.width, came]
        token, order, joins, arrange = cast("tuple[Tensor, ...]", plan.route.split(sizes))  # pyright: ignore[reportUnknownMemberType]
        spans = self._spans(forwards, sources, stride)
        return token, Hop(spans, order, joins.view(relayed, self.width), arrange)

    def route_size(self) -> int:
        """Elements of ``Plan.route`` with static shapes."""
        return self._room * (1 + self.width) + 2 * self.config.padded_rows

    # Rows

    def forward(self, row: RowFormat, relayed: Tensor, hop: Hop, op: str, call: int) -> Tensor:
        """Send ``relayed [Q, bytes]`` on; returns ``[Nb, bytes]`` by source rank and token."""
        copies = self._rows.buffer("relay", row, hop.order.numel(), relayed.device)
        _copy_rows(relayed, hop.order.clamp(min=0), copies)
        if row.routed:
            row.vacate(copies, hop.order < 0)
        came = self._rows.buffer("recv", row, hop.arrange.numel(), relayed.device)
        if row.routed and sum(hop.spans.recv_counts) < came.shape[0]:  # nobody sends to some
            row.vacate(came)
        self._rows.move(copies, came, hop.spans, op + INSIDE, call)()
        recv = self._rows.buffer("relay", row, hop.arrange.numel(), relayed.device)
        _copy_rows(came, hop.arrange, recv)
        return recv

    def join(self, row: RowFormat, rows: Tensor, hop: Hop, op: str, call: int) -> Tensor:
        """Bring ``rows [Nb, bytes]`` back to who relayed them; returns sums ``[Q, bytes]``."""
        back = self._rows.buffer("relay", row, hop.arrange.numel(), rows.device)
        if back.numel():
            as_words(back).index_copy_(0, hop.arrange, as_words(rows))
        copies = self._rows.buffer("recv", row, hop.order.numel(), rows.device)
        self._rows.move(back, copies, hop.spans.reversed(), op + INSIDE, call)()
        sums = self._rows.buffer("send", row, hop.joins.shape[0], rows.device)
        sum_rows(row.payload(copies), hop.joins, row.payload(sums))
        if row.weighted:
            sum_rows(row.weights(copies), hop.joins, row.weights(sums))
        return sums


def _copy_rows(rows: Tensor, order: Tensor, out: Tensor) -> None:
    """``out[i] = rows[order[i]]``, whole rows."""
    if out.numel():
        torch.index_select(as_words(rows), 0, order, out=as_words(out))
