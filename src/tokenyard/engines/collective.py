"""Engine ``collective``: an all-to-all of rows, once per (token, rank), over any ``torch.distributed`` group.

Life of a fresh dispatch: plan (integers), counts (one header to and from each rank), pack (one gather), rows (one message per
peer), place (one gather). A cached dispatch starts at pack; combine goes the same way back and sums on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.arrival import Arrival, count_arrivals, localise, num_result_rows, settle
from tokenyard.engines.departure import Departure, cast_payload, counts_by_rank, depart, ways_back
from tokenyard.engines.wire import Spans, Wire
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH, Fingerprint
from tokenyard.layout import host_ints
from tokenyard.rows import Payload, Routing, RowFormat, as_bytes, sum_rows
from tokenyard.stats import Stats
from tokenyard.types import Layout, Quantize


class CollectiveEngine:
    """Dispatch and combine by all-to-all. All methods are collective and run one at a time."""

    name = "collective"

    def __init__(self, config: Config, wire: Wire, stats: Stats) -> None:
        self.config, self.stats = config, stats
        self._wire = wire
        self._num_counts = config.most_local_experts + config.matrix_ranks
        self._calls = 0
        self._bad_index: Tensor | None = None
        self._staging: dict[str, Tensor] = {}

    @property
    def waits_on_host(self) -> bool:
        """Whether the host waits while rows move."""
        return self._wire.counts_on_host

    @property
    def buffer_bytes(self) -> int:
        """Host staging kept between calls. No symmetric memory."""
        return sum(buffer.numel() for buffer in self._staging.values())

    @property
    def returns_width(self) -> int:
        """Most ranks that a token can go to."""
        return min(self.config.num_topk, self.config.world_size)

    # Three collective calls

    def dispatch(
        self,
        payload: Payload,
        topk_idx: Tensor,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        *,
        in_place: bool = False,
    ) -> tuple[Payload, Plan, Arrived]:
        """Send each token once to every rank that holds one of its experts, with its ids and weights."""
        payload = cast_payload(payload, mode)
        with record_function("tokenyard.dispatch.plan"):
            departure = depart(topk_idx, weights, spec, self.config)
            fingerprint = self._fingerprint(DISPATCH, payload, spec, mode, weights is not None)
            headers = self._announce(fingerprint, topk_idx, departure, spec)
        with record_function("tokenyard.dispatch.pack"):
            form = self._format(payload, routed=True, weighted=weights is not None)
            send = self._buffer("send", form, departure.token.numel(), payload.x.device)
            form.pack(payload, departure.token, Routing(departure.topk_idx, departure.weights), send)
        with record_function("tokenyard.dispatch.counts"):
            everybody = headers()
            spans, pairs = self._spans(departure, everybody, spec)
        with record_function("tokenyard.dispatch.rows"):
            recv = self._buffer("recv", form, self._num_arrived(spans, spec), payload.x.device)
            if not spec.exact:
                form.token(recv).fill_(-1)
                form.topk_idx(recv).fill_(-1)
            rows = self._exchange(send, recv, spans, "dispatch")
            returns = ways_back(departure, spec, self.config)
            rows()
        with record_function("tokenyard.dispatch.place"):
            return self._arrive(form, recv, spans, pairs, departure, returns, everybody, spec)

    def redispatch(
        self,
        payload: Payload,
        plan: Plan,
        spec: Spec,
        *,
        mode: Quantize | None = None,
        raw: bool = False,
        in_place: bool = False,
    ) -> Payload:
        """Send a new payload along a known routing. ``raw`` returns rows as they arrive, whatever the layout.

        Rows without a source are zeros, also in ``EXPERT_PADDED``: the backward of combine needs them so.
        """
        payload = cast_payload(payload, mode)
        with record_function("tokenyard.redispatch"):
            fingerprint = self._fingerprint(CACHED, payload, spec, mode, raw, plan)
            agreed = self._check_call(fingerprint, payload.x.shape[0])
            form = self._format(payload)
            spans = self._known_spans(plan, spec)
            send = self._buffer("send", form, plan.route.numel(), payload.x.device)
            form.pack(payload, plan.route, None, send)
            recv = self._buffer("recv", form, self._num_arrived(spans, spec), payload.x.device)
            agreed()
            self._exchange(send, recv, spans, "cached dispatch")()
            return form.take(recv, None) if raw else self._place(form, recv, plan.slots, plan.gather, spec, zeros=True)

    def combine(
        self,
        rows: Tensor,
        plan: Plan,
        spec: Spec,
        *,
        weights: Tensor | None = None,
        reduce_weights: Tensor | None = None,
        bias: tuple[Tensor, ...] = (),
        out: Tensor | None = None,
        raw: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum ``rows`` per token: on this rank first, then at the token's owner (``docs/semantics.md``, Combine).

        Args:
            weights: ``[rows]`` float32, multiplied first.
            reduce_weights: ``[Nb, K]`` float32 in arrival order, summed alongside.
            raw: ``rows`` too are in arrival order, whatever the layout.
        """
        with record_function("tokenyard.combine"):
            width = 0 if reduce_weights is None else reduce_weights.shape[1]
            form = RowFormat(rows.shape[1], rows.dtype, picks=width, weighted=reduce_weights is not None)
            fingerprint = self._fingerprint(
                COMBINE, Payload(rows, None), spec, None, width > 0, plan, weights is not None
            )
            agreed = self._check_call(fingerprint, plan.returns.shape[0])
            spans = self._known_spans(plan, spec).reversed()
            send = self._partial_sums(form, rows, plan, weights, reduce_weights, placed=spec.placed and not raw)
            recv = self._buffer("recv", form, plan.route.numel(), rows.device)
            agreed()
            self._exchange(send, recv, spans, "combine")()
            shape = (plan.returns.shape[0], rows.shape[1])
            out = torch.empty(shape, dtype=rows.dtype, device=rows.device) if out is None else out
            sum_rows(form.payload(recv), plan.returns, out, bias=bias)
            if reduce_weights is None:
                return out, None
            reduced = torch.empty(shape[0], width, dtype=torch.float32, device=rows.device)
            sum_rows(form.weights(recv), plan.returns, reduced)
            return out, reduced

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """Tell the other ranks that this one refuses the call they are in. False if there is no way to tell them."""
        if not self._has_headers(op, exact):
            return False
        fingerprint = Fingerprint(op, self._calls, *[0] * 13)
        self._calls += 1
        header = head.blank(fingerprint, self.config.world_size, self._num_counts, 0)
        head.refuse(header, reason)
        self._wire.swap(header, f"{head.OPS[op]} #{fingerprint.call}")()
        return True

    def check(self) -> None:
        """Raise if a static dispatch was given ids out of range; the host waits for the device."""
        if self._bad_index is None:
            return
        at, value = host_ints(self._bad_index)
        self._bad_index = None
        if at >= 0:
            raise ValueError(head.bad_index_text(at, value, self.config.num_topk, self.config.num_experts))

    def close(self) -> None:
        self._wire.close()
        self._staging.clear()

    def route_shapes(self, num_tokens: Any, spec: Spec, new_size: Any) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        """Shape and dtype of ``Plan.route``, and the number of arrival rows, for fake tensors."""
        sent, arrived = (new_size(), new_size()) if spec.exact else (self.config.padded_rows, self.config.padded_rows)
        return (sent,), torch.int64, arrived

    # Before rows move

    def _has_headers(self, op: int, exact: bool) -> bool:
        return self._wire.counts_on_host or (op == DISPATCH and exact)

    def _fingerprint(
        self,
        op: int,
        payload: Payload,
        spec: Spec,
        mode: Quantize | None,
        weighted: bool,
        plan: Plan | None = None,
        scaled: bool = False,
    ) -> Fingerprint:
        self._calls += 1
        routing = -1 if plan is None else int(plan.splits[2 * self.config.world_size])
        return head.fingerprint_of(op, self._calls - 1, payload, spec, mode, weighted, routing, scaled)

    def _check_call(self, fingerprint: Fingerprint, num_tokens: int) -> Callable[[], object]:
        """Where headers are cheap, agree on the call before any row moves; the function returned waits for the verdict."""
        if not self._has_headers(fingerprint.op, False):
            return lambda: None
        return self._swap(head.blank(fingerprint, self.config.world_size, self._num_counts, num_tokens), fingerprint)

    def _swap(self, header: Tensor, fingerprint: Fingerprint) -> Callable[[], Tensor]:
        finish = self._wire.swap(header, f"{head.OPS[fingerprint.op]} #{fingerprint.call}")
        config = self.config

        def headers() -> Tensor:
            everybody = finish()
            bounded = not fingerprint.exact or fingerprint.layout == Layout.EXPERT_PADDED.value
            head.verify(everybody, config, max_rows=config.max_tokens_per_rank if bounded else head.MOST_ROWS)
            return everybody

        return headers

    def _announce(
        self, fingerprint: Fingerprint, topk_idx: Tensor, departure: Departure, spec: Spec
    ) -> Callable[[], Tensor | None]:
        """Send headers; the function returned waits for those of all ranks, int64 ``[R, words]`` on the host.

        None instead of them where static shapes let the device go on alone.
        """
        config = self.config
        if not self._has_headers(DISPATCH, spec.exact):
            self._remember_bad_index(topk_idx)
            return lambda: None
        header = head.blank(fingerprint, config.world_size, self._num_counts, topk_idx.shape[0]).to(topk_idx.device)
        head.mark_bad_index(header, topk_idx, config.num_experts)
        header[:, head.NUM_ROWS] = departure.counts
        header[:, head.ROUTING] = head.digest(departure.topk_idx)
        sent = departure.counts[: config.matrix_ranks].expand(config.world_size, -1)
        header[:, head.COUNTS :] = torch.cat([counts_by_rank(departure.topk_idx, config), sent], dim=1)
        return self._swap(header, fingerprint)

    def _remember_bad_index(self, topk_idx: Tensor) -> None:
        """Keep the first bad id of a static call on the device until :meth:`check` asks."""
        if topk_idx.numel() == 0:
            return
        if self._bad_index is None:
            with torch.inference_mode(False):
                self._bad_index = torch.full((2,), -1, dtype=torch.int64, device=topk_idx.device)
        flat = topk_idx.reshape(-1)
        bad = (flat < -1) | (flat >= self.config.num_experts)
        at = bad.to(torch.uint8).argmax().view(1)
        seen = torch.cat([at, flat.gather(0, at).long()])
        self._bad_index.copy_(torch.where(bad.any() & (self._bad_index[:1] < 0), seen, self._bad_index))

    def _spans(self, departure: Departure, headers: Tensor | None, spec: Spec) -> tuple[Spans, Tensor | None]:
        """Where rows stand in the buffers, and rows per (rank, local expert) ``[R, L]`` if the host knows them."""
        config = self.config
        if headers is None:
            full = [config.max_tokens_per_rank] * config.world_size
            return Spans.packed(full, full), None
        pairs = headers[:, head.COUNTS : head.COUNTS + config.num_local_experts]
        sends = host_ints(departure.counts)
        recvs = host_ints(headers[:, head.NUM_ROWS])
        if spec.exact:
            return Spans.packed(sends, recvs), pairs
        return Spans.strided(config.max_tokens_per_rank, sends, recvs), pairs

    def _known_spans(self, plan: Plan, spec: Spec) -> Spans:
        size = self.config.world_size
        sends, recvs = host_ints(plan.splits[:size]), host_ints(plan.splits[size : 2 * size])
        return (
            Spans.packed(sends, recvs) if spec.exact else Spans.strided(self.config.max_tokens_per_rank, sends, recvs)
        )

    def _num_arrived(self, spans: Spans, spec: Spec) -> int:
        return sum(spans.recv_counts) if spec.exact else self.config.padded_rows

    # Rows

    def _format(self, payload: Payload, *, routed: bool = False, weighted: bool = False) -> RowFormat:
        scales = payload.scales
        return RowFormat(
            payload.x.shape[1],
            payload.x.dtype,
            scale_words=0 if scales is None else scales.shape[1],
            scale_dtype=torch.float32 if scales is None else scales.dtype,
            picks=self.config.num_topk if routed else 0,
            routed=routed,
            weighted=weighted,
        )

    def _buffer(self, name: str, form: RowFormat, num_rows: int, device: torch.device) -> Tensor:
        """Room for rows. Host memory is kept for the next call: fresh pages cost more than the copy into them."""
        if device.type != "cpu":
            return form.buffer(num_rows, device)
        need = num_rows * form.row_bytes
        held = self._staging.get(name)
        if held is None or held.numel() < need:
            self._staging.pop(name, None)
            with torch.inference_mode(False):  # kept for calls outside of it too
                held = self._staging[name] = torch.empty(need, dtype=torch.uint8, device="cpu")
        return held[:need].view(num_rows, form.row_bytes)

    def _exchange(self, send: Tensor, recv: Tensor, spans: Spans, op: str) -> Callable[[], None]:
        """Start to move rows; the function returned waits for them."""
        arrived = self._wire.exchange(send, recv, spans, f"{op} #{self._calls - 1}")

        def finish() -> None:
            arrived()
            self.stats.record(op, spans.send_counts, spans.recv_counts, send.shape[1], self._wire.last_wait)

        return finish

    def _arrive(
        self,
        form: RowFormat,
        recv: Tensor,
        spans: Spans,
        pairs: Tensor | None,
        departure: Departure,
        returns: Tensor,
        headers: Tensor | None,
        spec: Spec,
    ) -> tuple[Payload, Plan, Arrived]:
        config, device = self.config, recv.device
        arrival = self._arrival(form, recv, spans, spec)
        if pairs is None:
            rows, pairs_here = count_arrivals(arrival, config)
            counts = None
        else:
            rows, pairs_here = torch.tensor(spans.recv_counts, device=device), pairs.to(device)
            counts = pairs.sum(0)
        num_rows = num_result_rows(spec, config, None if counts is None else host_ints(counts), recv.shape[0])
        place, arrived = settle(arrival, spec, config, rows, pairs_here, num_rows)
        payload = self._place(form, recv, place.slots, place.gather, spec, zeros=False)
        routing = 0 if headers is None else head.routing_of(headers)
        splits = [torch.tensor([*spans.send_counts, *spans.recv_counts, routing], device="cpu")]
        if spec.exact and headers is not None and counts is not None:
            splits += [headers[:, head.COUNTS + config.most_local_experts :].reshape(-1), counts]
        plan = Plan(
            splits=torch.cat(splits),
            route=departure.token,
            returns=returns,
            slots=place.slots,
            picks=place.picks,
            gather=place.gather,
            first_pick=departure.first_pick,
        )
        return payload, plan, arrived

    def _place(
        self, form: RowFormat, recv: Tensor, slots: Tensor, gather: Tensor, spec: Spec, *, zeros: bool
    ) -> Payload:
        """Arrived rows where the layout wants them. Blocks of ``EXPERT_PADDED`` are mostly unspecified rows, so spread."""
        if spec.layout is Layout.EXPERT_PADDED:
            return form.spread(recv, slots, gather.numel(), zeros=zeros)
        return form.take(recv, gather if spec.placed else None)

    def _arrival(self, form: RowFormat, recv: Tensor, spans: Spans, spec: Spec) -> Arrival:
        ranks = torch.arange(self.config.world_size, device=recv.device)
        if spec.exact:
            repeats = torch.tensor(spans.recv_counts, device=recv.device)
            source = ranks.repeat_interleave(repeats, output_size=recv.shape[0])
        else:
            source = ranks.repeat_interleave(self.config.max_tokens_per_rank)
        token, topk_idx, carried = form.routing(recv)
        local_idx, weights = localise(topk_idx, carried, self.config)
        return Arrival(
            token=token,
            local_idx=local_idx,
            weights=weights,
            source_rank=source,
        )

    def _partial_sums(
        self,
        form: RowFormat,
        rows: Tensor,
        plan: Plan,
        weights: Tensor | None,
        reduce_weights: Tensor | None,
        *,
        placed: bool,
    ) -> Tensor:
        """One row per arrived row: the sum of its result rows. Rows that stand as they arrived are sent as they are."""
        if not placed and reduce_weights is None:
            return as_bytes(rows)
        arrived = plan.slots.shape[0] if placed else rows.shape[0]
        send = self._buffer("send", form, arrived, rows.device)
        if placed:
            sum_rows(rows, plan.slots, form.payload(send), weights=weights)
        else:
            form.payload(send).copy_(rows)
        if reduce_weights is not None:
            form.weights(send).copy_(reduce_weights)
        return send
