"""Engine ``collective``: an all-to-all of rows, once per (token, rank), over any
``torch.distributed`` group. On a grid of nodes: once per (token, node) to the rank there of the
same local index, and from there on (``engines/hierarchy.py``).

Life of a fresh dispatch: plan (integers), counts (one header to and from each rank), pack (one
gather), rows (one message per peer), place (one gather). Packing begins before the host waits for
the headers. A cached dispatch starts at pack; combine goes the same way back and sums on both
sides. The transport only moves bytes; what is done on a rank is ``TorchWork``'s. On GPUs, without a
grid, Triton kernels do the same (``Launches``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.base import (
    CachedArguments,
    CombineArguments,
    DispatchArguments,
    Engine,
)
from tokenyard.engines.collective_torch import Left, TorchWork
from tokenyard.engines.failures import IN_ORDER, Report
from tokenyard.engines.hierarchy import Hierarchy, Hop
from tokenyard.engines.known import COLLECTIVE
from tokenyard.engines.obstacles import obstacle_of
from tokenyard.engines.transport import RowTransport, Spans, Transport
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH, CallKind, Fingerprint
from tokenyard.kernels.names import span
from tokenyard.memory.kernel_launch import kernels_of, multiprocessors
from tokenyard.routing import host_ints
from tokenyard.rows import Payload, RowFormat, as_bytes
from tokenyard.stats import Stats
from tokenyard.topology import Topology
from tokenyard.types import Layout

ON_GPUS = True
"""Whether kernels are used where they can be; else torch does it all."""
PER_SM = 4
"""Programs of a launch on each multiprocessor."""


class Binder(NamedTuple):
    """``bind``: as ``Kernels.bind``. ``programs``: of a launch that moves rows."""

    bind: Callable[..., Callable[..., None]]
    programs: int


@cache
def _on_gpu(index: int) -> Binder:
    sms = multiprocessors(torch.device("cuda", index))
    bind = partial(kernels_of(index, sms).bind, together=False)  # nobody waits for another
    return Binder(bind, PER_SM * sms)


class CollectiveEngine(Engine):
    """Dispatch and combine by all-to-all. All methods are collective and run one at a time."""

    name, counts_by_most = COLLECTIVE, False
    forced: Binder | None = None
    """For tests: kernels are launched so, on any device."""

    def __init__(self, config: Config, transport: Transport, stats: Stats) -> None:
        grid = config.topology
        grid = grid if grid and grid.has_levels else Topology(config.world_size, 1)
        self.config, self._transport, self._grid = config, transport, grid
        self._rows = RowTransport(transport, stats)
        self._hierarchy = Hierarchy(config, grid, self._rows) if grid.has_levels else None
        self._num_counts = config.most_local_experts + config.matrix_ranks + int(grid.has_levels)
        self._works: dict[torch.device, TorchWork] = {}
        self._calls = 0
        self.waits_on_host = transport.counts_on_host
        self.returns_width = min(config.num_topk, grid.num_nodes)  # destinations of a token
        self.hop_counts = self._hierarchy.num_counts if self._hierarchy else 0

    @property
    def calls_begun(self) -> int:
        return self._calls

    @property
    def buffer_bytes(self) -> int:
        """Host staging kept between calls. No symmetric memory."""
        return self._rows.num_bytes

    def _work(self, device: torch.device) -> TorchWork:
        """Whoever does the work on ``device``."""
        if device not in self._works:
            self._works[device] = self._make_work(device)
        return self._works[device]

    def _make_work(self, device: torch.device) -> TorchWork:
        binder = self.forced
        if binder is None and ON_GPUS and device.type == "cuda" and torch.version.hip is None:
            binder = None if obstacle_of(device) else _on_gpu(device.index)
        if binder is None or self._hierarchy is not None:
            return TorchWork(self.config, self._grid, self._num_counts, self._rows)
        from tokenyard.engines.collective_launches import Launches

        always = self._transport.counts_on_host
        launches = Launches(self.config, device, *binder, self._num_counts, headers=always)
        return cast("Any", launches)  # which has the same methods

    # Three collective calls

    def dispatch(self, given: DispatchArguments) -> tuple[Payload, Plan, Arrived]:
        payload, _, weights, spec, mode, *_ = given
        work, device = self._work(payload.x.device), payload.x.device
        with span("tokenyard.dispatch"):
            told = self._has_headers(DISPATCH, spec.exact)
            read = work.given(given)
            row, sent = read.row, _no_rows(row_of(payload, mode))
            fingerprint = self._fingerprint(
                CallKind(DISPATCH, sent, spec, mode, weights is not None)
            )
            with span("tokenyard.dispatch.plan"):
                left = work.leave(read, fingerprint if told else None)
                headers = None if left.headers is None else self._swap(left.headers, fingerprint)
            with span("tokenyard.dispatch.pack"):
                send, returns = work.pack(read, left)
            with span("tokenyard.dispatch.counts"):
                everybody: Any = headers().numpy() if headers else None
                sends, spans, sources = self._counts(work, left, everybody, spec)
            with span("tokenyard.dispatch.rows"):
                recv = self._received(row, spans, spec, device)
                if told and not spec.exact:
                    row.vacate(recv)
                num_rows = sum(spans.send_counts) if spec.exact else send.shape[0]
                self._rows.move(send[:num_rows], recv, spans, "dispatch", fingerprint.call)()
                route, hops = left.route[:num_rows].data, list[int]()
                if self._hierarchy is not None:
                    hop = self._hierarchy.plan(row.topk_idx(recv), sources, spec)
                    recv = self._hierarchy.forward(row, recv, hop, "dispatch", fingerprint.call)
                    route, hops = self._hierarchy.packed(route, spans, hop)
            with span("tokenyard.dispatch.place"):
                experts, came = list[int](), None
                if everybody is not None:
                    came = self._transport.headers.to(device)
                    local = slice(head.COUNTS, head.COUNTS + self.config.num_local_experts)
                    experts = np.add.reduce(everybody[:, local], 0).tolist()
                out, placement, arrived = work.arrive(read, recv, came, experts)
                hops += experts if spec.exact else []
                splits = self._splits(sends, sources, everybody, spec, hops)
            return out, Plan(splits, route, returns, *placement, left.first_pick), arrived

    def redispatch(self, given: CachedArguments) -> Payload:
        payload, plan, spec, mode, raw, _ = given
        work, device = self._work(payload.x.device), payload.x.device
        with span("tokenyard.redispatch"):
            row = row_of(payload, mode)
            kind = CallKind(CACHED, _no_rows(row), spec, mode, raw)
            fingerprint = self._fingerprint(kind, plan)
            agreed = self._check_call(fingerprint, payload.x.shape[0])
            token, spans, hop = self._known(plan, spec)
            send = self._rows.buffer("send", row, token.numel(), device)
            work.pack_again(payload, row, mode, plan, token, send)
            recv = self._received(row, spans, spec, device)
            agreed()
            self._rows.move(send, recv, spans, "cached dispatch", fingerprint.call)()
            if self._hierarchy is not None and hop is not None:
                recv = self._hierarchy.forward(row, recv, hop, "cached dispatch", fingerprint.call)
            return work.gather(row, recv, plan if spec.placed and not raw else None, spec)

    def combine(self, given: CombineArguments) -> tuple[Tensor, Tensor | None]:
        rows, plan, spec, weights, reduce_weights, bias, out, raw, *_ = given
        work, width = self._work(rows.device), given.width
        with span("tokenyard.combine"):
            reduces, placed = reduce_weights is not None, spec.placed and not raw
            row = RowFormat(rows.shape[1], rows.dtype, picks=width, weighted=reduces)
            payload, scaled = Payload(rows, None), weights is not None
            kind = CallKind(COMBINE, payload, spec, None, width > 0, scaled)
            fingerprint = self._fingerprint(kind, plan)
            agreed = self._check_call(fingerprint, plan.returns.shape[0])
            token, spans, hop = self._known(plan, spec)
            send = as_bytes(rows)  # as they arrived, uncopied
            if placed or reduces:
                arrived = plan.slots.shape[0] if placed else rows.shape[0]
                send = self._rows.buffer("send", row, arrived, rows.device)
                slots = plan.slots if placed else None
                work.sum_here(row, rows, slots, send, weights, reduce_weights)
            agreed()
            if self._hierarchy is not None and hop is not None:
                send = self._hierarchy.join(row, send, hop, "combine", fingerprint.call)
            recv = self._rows.buffer("recv", row, token.numel(), rows.device)
            self._rows.move(send, recv, spans.reversed(), "combine", fingerprint.call)()
            return work.sum_there(row, recv, plan.returns, bias, out)

    # The others

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        if not self._has_headers(op, exact):
            return False
        fingerprint = Fingerprint(op, self._calls, *[0] * 13)
        self._calls += 1
        header = head.blank(fingerprint, self.config.world_size, self._num_counts, 0)
        head.refuse(header, reason)
        self._transport.swap(header, f"{head.OPS[op]} #{fingerprint.call}")()
        return True

    def awaited(self) -> int | None:
        return self._transport.awaited(self._calls)

    def failure(self) -> Report | None:
        return self._transport.failure()

    def check(self) -> None:
        """Raise if a static dispatch was given ids out of range; the host waits for the device."""
        for work in self._works.values():
            work.check()

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

    # Agreement

    def _has_headers(self, op: int, exact: bool) -> bool:
        return self._transport.counts_on_host or (op == DISPATCH and exact)

    def _fingerprint(self, kind: CallKind, plan: Plan | None = None) -> Fingerprint:
        """Of the next call; ``plan``: whose routing it repeats."""
        self._calls += 1
        routing = -1 if plan is None else int(plan.splits[2 * self.config.world_size])
        return head.fingerprint_of(kind, self._calls - 1, routing)

    def _check_call(self, fingerprint: Fingerprint, num_tokens: int) -> Callable[[], object]:
        """Agree on the call ahead where headers are cheap; the function returned waits for that."""
        if not self._has_headers(fingerprint.op, False):
            return lambda: None
        size = self.config.world_size
        return self._swap(head.blank(fingerprint, size, self._num_counts, num_tokens), fingerprint)

    def _swap(self, header: Tensor, fingerprint: Fingerprint) -> Callable[[], Tensor]:
        finish = self._transport.swap(header, f"{head.OPS[fingerprint.op]} #{fingerprint.call}")
        config = self.config

        def headers() -> Tensor:
            everybody = finish()
            bounded = not fingerprint.exact or fingerprint.layout == Layout.EXPERT_PADDED.value
            most = config.max_tokens_per_rank if bounded else head.MOST_ROWS
            head.verify(everybody, config, max_rows=most)
            return everybody

        return headers

    # Before rows move

    def _counts(
        self, work: TorchWork, left: Left, headers: Any, spec: Spec
    ) -> tuple[list[int], Spans, list[int]]:
        """Rows to each rank ``[R]``, spans of the first hop, and rows from each rank ``[R]``.
        ``headers``: all ranks', if there are any."""
        most, nodes = self.config.max_tokens_per_rank, self._grid.num_nodes
        if headers is None:
            everywhere = [most] * self.config.world_size
            return everywhere, self._first_hop([most] * nodes, [most] * nodes, spec), everywhere
        leaving, sends = work.counts(left)
        sources = comes = headers[:, head.NUM_ROWS].tolist()
        if self._hierarchy is not None:
            rail = self._grid.rail_of(self.config.rank)
            comes = headers[rail.start :: rail.step, -1].tolist()
        return sends, self._first_hop(leaving, comes, spec), sources

    def _splits(
        self, sends: list[int], sources: list[int], headers: Any, spec: Spec, more: list[int]
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


def _no_rows(row: RowFormat) -> Payload:
    """Rows as they travel, none of them."""
    x = torch.empty(0, row.hidden, dtype=row.dtype, device="cpu")
    if not row.scale_words:
        return Payload(x, None)
    return Payload(x, torch.empty(0, row.num_scales, dtype=row.scale_dtype, device="cpu"))
