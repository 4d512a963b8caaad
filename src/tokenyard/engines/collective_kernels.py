"""Engine ``collective`` on GPUs: Triton kernels plan, pack, place and sum; the transport only moves
bytes. What they make is what :class:`CollectiveEngine` makes, which has all other devices, and
grids of nodes.

A fresh dispatch with exact shapes: plan, headers, their copy to the host, pack, rows, (count,)
place. Packing is launched before the host waits for the headers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.engines.collective import CollectiveEngine
from tokenyard.engines.transport import Transport
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan
from tokenyard.header import CACHED, DISPATCH, CallKind
from tokenyard.memory.kernel_launch import kernels_of, multiprocessors
from tokenyard.routing import host_ints
from tokenyard.rows import Payload, RowFormat, as_bytes
from tokenyard.stats import Stats

if TYPE_CHECKING:
    from tokenyard.engines.collective_launches import Launches

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


class CollectiveKernelsEngine(CollectiveEngine):
    """Dispatch and combine by all-to-all. ``obstacle_of``: why kernels cannot work on a GPU, empty
    if they can."""

    forced: Binder | None = None
    """For tests: kernels are launched so, on any device."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        obstacle_of: Callable[[torch.device], str],
        stats: Stats,
    ) -> None:
        super().__init__(config, transport, stats)
        self._obstacle_of = obstacle_of
        self._launches: dict[torch.device, Launches | None] = {}

    def _kernels(self, device: torch.device) -> Launches | None:
        """Kernels on ``device``; None: torch does it all."""
        if device not in self._launches:
            binder = self.forced
            if binder is None and ON_GPUS and device.type == "cuda" and torch.version.hip is None:
                binder = None if self._obstacle_of(device) else _on_gpu(device.index)
            found = None
            if binder is not None and self._hierarchy is None:
                from tokenyard.engines.collective_launches import Launches

                always = self._transport.counts_on_host
                found = Launches(self.config, device, *binder, self._num_counts, headers=always)
            self._launches[device] = found
        return self._launches[device]

    # Three collective calls

    def dispatch(self, given: DispatchArguments) -> tuple[Payload, Plan, Arrived]:
        payload, _, weights, spec, mode, *_ = given
        kernels = self._kernels(payload.x.device)
        if kernels is None:
            return super().dispatch(given)
        with kernels.span("tokenyard.dispatch"):
            told = self._has_headers(DISPATCH, spec.exact)
            read = kernels.given(given)
            row = read.kind.row
            sent = _no_rows(row_of(payload, mode))
            kind = CallKind(DISPATCH, sent, spec, mode, weights is not None)
            fingerprint = self._fingerprint(kind)
            left = kernels.leave(read, fingerprint if told else None)
            headers = self._swap(left.headers, fingerprint) if told else None
            kernels.pack(read, left)
            everybody: Any = headers().numpy() if headers else None
            sends = [self.config.max_tokens_per_rank] * self.config.world_size
            sources = sends
            if everybody is not None:
                sends, sources = host_ints(kernels.told), everybody[:, head.NUM_ROWS].tolist()
            spans = self._first_hop(sends, sources, spec)
            recv = self._received(row, spans, spec, payload.x.device)
            if everybody is not None and not spec.exact:
                row.vacate(recv)
            num_rows, experts = (sum(sends) if spec.exact else left.send.shape[0]), list[int]()
            self._rows.move(left.send[:num_rows], recv, spans, "dispatch", self._calls - 1)()
            if everybody is not None:
                local = slice(head.COUNTS, head.COUNTS + self.config.num_local_experts)
                experts = np.add.reduce(everybody[:, local], 0).tolist()
            came = self._transport.headers.to(recv.device) if everybody is not None else None
            out, placement, arrived = kernels.arrive(read, recv, came, experts)
            experts = experts if spec.exact else []
            splits = self._splits(sends, sources, everybody, spec, experts)
            route = left.route[:num_rows].data
            return out, Plan(splits, route, left.returns, *placement, left.first_pick), arrived

    def redispatch(self, given: CachedArguments) -> Payload:
        payload, plan, spec, mode, raw, _ = given
        kernels = self._kernels(payload.x.device)
        if kernels is None:
            return super().redispatch(given)
        with kernels.span("tokenyard.redispatch"):
            row = row_of(payload, mode)
            kind = CallKind(CACHED, _no_rows(row), spec, mode, raw)
            fingerprint = self._fingerprint(kind, plan)
            agreed = self._check_call(fingerprint, payload.x.shape[0])
            token, spans, _ = self._known(plan, spec)
            send = self._rows.buffer("send", row, token.numel(), payload.x.device)
            kernels.pack_again(payload, row, mode, plan, send)
            recv = self._received(row, spans, spec, payload.x.device)
            agreed()
            self._rows.move(send, recv, spans, "cached dispatch", self._calls - 1)()
            return kernels.gather(row, recv, plan.gather if spec.placed and not raw else None)

    def combine(self, given: CombineArguments) -> tuple[Tensor, Tensor | None]:
        rows, plan, spec, weights, reduce_weights, bias, out, *_ = given
        kernels = self._kernels(rows.device)
        if kernels is None:
            return super().combine(given)
        with kernels.span("tokenyard.combine"):
            row, agreed = self._begin_combine(given)
            token, spans, _ = self._known(plan, spec)
            placed, send = spec.placed and not given.raw, as_bytes(rows)
            if placed or row.weighted:
                arrived = plan.slots.shape[0] if placed else rows.shape[0]
                send = self._rows.buffer("send", row, arrived, rows.device)
                slots = plan.slots if placed else None
                kernels.sum_here(row, rows, slots, send, weights, reduce_weights)
            agreed()
            recv = self._rows.buffer("recv", row, token.numel(), rows.device)
            self._rows.move(send, recv, spans.reversed(), "combine", self._calls - 1)()
            return kernels.sum_there(row, recv, plan.returns, bias, out)

    def check(self) -> None:
        super().check()
        for kernels in self._launches.values():
            if kernels is not None:
                kernels.check()


def _no_rows(row: RowFormat) -> Payload:
    """Rows as they travel, none of them."""
    x = torch.empty(0, row.hidden, dtype=row.dtype, device="cpu")
    if not row.scale_words:
        return Payload(x, None)
    return Payload(x, torch.empty(0, row.num_scales, dtype=row.scale_dtype, device="cpu"))
