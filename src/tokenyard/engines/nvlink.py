"""Engine ``nvlink``: Triton kernels that store rows straight into peers' memory, in rings of bounded size.

Life of a fresh dispatch: plan (one launch: merge, place, exchange counts), the host learns the counts (exact shapes only), rows (one
launch: send, receive, place). A cached dispatch is the second launch alone; combine is one launch. ``docs/protocols.md``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from tokenyard.config import Config
from tokenyard.engines import header as head
from tokenyard.engines.arrival import num_result_rows
from tokenyard.engines.header import CACHED, COMBINE, DISPATCH, Fingerprint
from tokenyard.engines.launches import Launches
from tokenyard.engines.rings import Form, Ground, Shape, address, as_aligned, form_of, meta_words
from tokenyard.engines.views import View, parts_of
from tokenyard.engines.watch import Watch
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.kernels import region
from tokenyard.layout import host_ints
from tokenyard.memory.base import SymmetricMemory
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Layout, Quantize


class Counted(NamedTuple):
    """What the plan's launch fills, and what the host learns (exact shapes only)."""

    route: Tensor
    meta: Tensor
    first_pick: Tensor
    tokens_per_expert: Tensor
    offsets: Tensor
    ranges: Tensor
    overflow: Tensor
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    counts: list[int]  # rows of each local expert
    routing: int


class NvlinkEngine:
    """Dispatch and combine by peer stores. All methods are collective and run in one order on all ranks.

    Args:
        memory: of this rank; the engine closes it.
        shape: how kernels are cut; equal on all ranks.
        buffer_bytes: of all rings on one rank together.
    """

    name = "nvlink"
    waits_on_host = False
    returns_width = 0

    def __init__(self, config: Config, memory: SymmetricMemory, stats: Stats, shape: Shape, buffer_bytes: int) -> None:
        self.config, self.stats = config, stats
        self._memory = memory
        self._ground = Ground(config, memory, shape, buffer_bytes)
        self._launches = Launches(config, self._ground)
        self._watch = Watch(config, self._ground)
        self._view = View(memory)
        self._calls = 0
        self._host: Any = self._ground.header_out.numpy()
        size, width = config.world_size, self._ground.header_words
        self._headers: Any = self._host[2 : 2 + size * width].reshape(size, width)
        self._sent: Any = self._host[2 + size * width :].reshape(size, size)[config.rank]
        self._nothing = {
            kind: torch.empty(0, dtype=kind, device=memory.device) for kind in (torch.int64, torch.int32, torch.float32)
        }

    @property
    def buffer_bytes(self) -> int:
        """Symmetric memory of this rank: rings, signals, and the view if there is one."""
        return self._ground.num_bytes + self._view.num_bytes

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
        with record_function("tokenyard.dispatch"), self._memory.tensors():
            fingerprint = self._fingerprint(DISPATCH, payload, spec, mode, weights is not None, in_place=in_place)
            counted = self._count(topk_idx, weights, spec, fingerprint)
            return self._move(payload, counted, weights is not None, spec, mode, fingerprint)

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
        with record_function("tokenyard.redispatch"), self._memory.tensors():
            fingerprint = self._fingerprint(CACHED, payload, spec, mode, raw, plan, in_place=in_place)
            self._watch.raise_if_failed()
            placed = spec.layout is not Layout.FLAT and not raw
            num_rows = plan.gather.numel() if placed else self._num_arrived(plan, spec)
            form = form_of(payload, mode, 0)
            if in_place:
                out = self._write_view(
                    payload, plan.route, plan.first_pick.shape[0], form, mode, fingerprint, num_rows, None
                )
            else:
                zeros = not spec.exact or spec.layout is Layout.EXPERT_PADDED
                out = self._result(payload, form, num_rows, mode, zeros=zeros)
                launch = self._launches.dispatch(
                    form, mode, payload.x.dtype, plan.slots.shape[1] if placed else 1, placed=placed,
                    padding=placed and not zeros and spec.expert_alignment > 1,
                )  # fmt: skip
                x, scales = as_aligned(payload.x), None if payload.scales is None else as_aligned(payload.scales)
                self._memory.gate()
                launch(
                    self._ground.peers, self._ground.state.data_ptr(), plan.route.data_ptr(), x.data_ptr(), address(scales),
                    0, out.x.data_ptr(), address(out.scales), 0, 0, 0, 0, 0, plan.slots.data_ptr(),
                    self._watch.tag(fingerprint), plan.first_pick.shape[0], self.config.num_experts, num_rows,
                )  # fmt: skip
                self._memory.settle()
            self._record("cached dispatch", plan, spec, form.slot_bytes)
            return out

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
        """Sum ``rows`` per token: on this rank first, then at the token's owner (``docs/semantics.md``, Combine)."""
        with record_function("tokenyard.combine"), self._memory.tensors():
            width = 0 if reduce_weights is None else reduce_weights.shape[1]
            payload = Payload(rows, None)
            fingerprint = self._fingerprint(COMBINE, payload, spec, None, width > 0, plan, weights is not None)
            self._watch.raise_if_failed()
            placed = spec.layout is not Layout.FLAT and not raw
            form = form_of(payload, None, -(-width // 4) * 4)
            kinds = tuple(term.dtype for term in bias)
            slots = plan.slots.shape[1] if placed else 1
            launch = self._launches.combine(
                form, rows.dtype, slots, width, kinds, placed=placed, weighted=weights is not None
            )
            rows, weights, reduce_weights, *terms = (
                None if t is None else as_aligned(t) for t in (rows, weights, reduce_weights, *bias, None, None)
            )
            tokens = plan.first_pick.shape[0]
            fits = (
                out is not None
                and self._memory.device.type == "cuda"
                and out.is_contiguous()
                and out.data_ptr() % 16 == 0
            )
            total = out if out is not None and fits else rows.new_empty(tokens, form.hidden)
            reduced = rows.new_empty((tokens, width), dtype=torch.float32) if width else None
            self._memory.gate()
            launch(
                self._ground.peers, self._ground.state.data_ptr(), plan.route.data_ptr(), rows.data_ptr(), plan.slots.data_ptr(),
                address(weights), address(reduce_weights), address(terms[0]), address(terms[1]), total.data_ptr(),
                address(reduced), self._watch.tag(fingerprint), tokens,
            )  # fmt: skip
            self._memory.settle()
            self._record("combine", plan, spec, form.slot_bytes, back=True)
            if out is not None and total is not out:
                out.copy_(total)
            return (total if out is None else out), reduced

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """Tell the other ranks that this one refuses the call they are in. False if there is no way to tell them."""
        if op != DISPATCH or not exact:
            return False
        self._watch.raise_if_failed()
        header = head.blank(Fingerprint(op, self._calls, *[0] * 13), 1, 0, 0)[0]
        self._calls += 1
        head.refuse(header, reason)
        nobody = torch.empty(0, self.config.num_topk, dtype=torch.int64, device=self._memory.device)
        with self._memory.tensors():
            self._plan(nobody, None, Spec(layout=Layout.FLAT, exact=True), header.numpy())
            self._memory.settle()
        return True

    def check(self) -> None:
        """Wait for the device; raise if a call failed there, or a static dispatch was given ids out of range."""
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize(self._memory.device)
        self._watch.raise_if_failed()
        self._watch.raise_if_bad_index()

    def close(self) -> None:
        self._view.expire("this view of symmetric memory is gone: its ExpertParallel is closed")
        self._memory.close()

    def route_shapes(self, num_tokens: Any, spec: Spec, new_size: Any) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        """Shape and dtype of ``Plan.route``, and the number of arrival rows, for fake tensors."""
        return (self._route_words(num_tokens),), torch.int32, new_size() if spec.exact else self.config.padded_rows

    # The plan

    def _fingerprint(
        self, op: int, payload: Payload, spec: Spec, mode: Quantize | None, weighted: bool, plan: Plan | None = None,
        scaled: bool = False, in_place: bool = False,
    ) -> Fingerprint:  # fmt: skip
        self._calls += 1
        routing = -1 if plan is None else int(plan.splits[2 * self.config.world_size])
        return head.fingerprint_of(op, self._calls - 1, payload, spec, mode, weighted, routing, scaled, in_place)

    def _route_words(self, num_tokens: Any) -> Any:
        config = self.config
        return region.plan_words(config.world_size, self._ground.shape.channels, num_tokens, config.num_local_experts)

    def _count(self, topk_idx: Tensor, weights: Tensor | None, spec: Spec, fingerprint: Fingerprint) -> Counted:
        """Launch the plan; with exact shapes wait for everybody's counts."""
        self._watch.raise_if_failed()
        if not spec.exact:
            return self._plan(topk_idx, weights, spec, None)
        counted = self._plan(topk_idx, weights, spec, head.words_of(fingerprint, topk_idx.shape[0]))
        nonce, host, config = self._calls, self._host, self.config
        self._watch.wait(lambda: host[0] == nonce, fingerprint)
        if host[1]:
            headers = torch.from_numpy(self._headers)  # pyright: ignore[reportUnknownMemberType]
            most = config.max_tokens_per_rank if spec.layout is Layout.EXPERT_PADDED else head.MOST_ROWS
            head.verify(headers, config, max_rows=most)
        counts = self._headers[:, head.COUNTS : head.COUNTS + config.num_local_experts].sum(0)
        return counted._replace(
            sent=self._sent.tolist(),
            received=self._headers[:, head.NUM_ROWS].tolist(),
            counts=counts.tolist(),
            routing=head.mixed(self._headers[:, head.ROUTING].tolist()),
        )

    def _plan(self, topk_idx: Tensor, weights: Tensor | None, spec: Spec, header: Any) -> Counted:
        config, ground = self.config, self._ground
        local, tokens, size = config.num_local_experts, topk_idx.shape[0], config.world_size
        padded, major = spec.layout is Layout.EXPERT_PADDED, spec.layout is Layout.EXPERT_MAJOR
        words = meta_words(config.num_topk, experts=padded or major, weighted=weights is not None)
        launch = self._launches.plan(spec, words, weighted=weights is not None, wide=topk_idx.dtype == torch.int64)
        topk_idx, weights = topk_idx.contiguous(), None if weights is None else weights.contiguous()
        device, none = self._memory.device, self._nothing[torch.int32]

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        counted = Counted(
            route=ints(self._route_words(tokens)),
            meta=ints(tokens * words),
            first_pick=torch.empty(tokens, config.num_topk, dtype=torch.int64, device=device),
            tokens_per_expert=ints(local),
            offsets=ints(local + 1) if major else none,
            ranges=ints(local, size, 2) if padded else none,
            overflow=ints(1) if spec.capacity is not None else none,
            sent=[], received=[], counts=[], routing=0,
        )  # fmt: skip
        most = config.max_tokens_per_rank if not spec.exact or padded else head.MOST_ROWS
        rows = head.MOST_ROWS if spec.exact else num_result_rows(spec, config, None, config.padded_rows)
        if header is not None:
            words_in: Any = ground.header_in.numpy()
            words_in[: len(header)] = header
        self._memory.gate()
        launch(
            topk_idx.data_ptr(), address(weights), ground.peers, ground.state.data_ptr(), ground.scratch.data_ptr(),
            counted.route.data_ptr(), counted.meta.data_ptr(), counted.first_pick.data_ptr(),
            counted.tokens_per_expert.data_ptr(), counted.offsets.data_ptr(), counted.ranges.data_ptr(),
            counted.overflow.data_ptr(), ground.header_in.data_ptr(), ground.header_out.data_ptr(), self._calls,
            tokens, config.num_experts, most, rows, spec.expert_alignment,
        )  # fmt: skip
        return counted

    # Rows

    def _move(
        self,
        payload: Payload,
        counted: Counted,
        weighted: bool,
        spec: Spec,
        mode: Quantize | None,
        fingerprint: Fingerprint,
    ) -> tuple[Payload, Plan, Arrived]:
        """Launch the rows of a fresh dispatch."""
        config = self.config
        experts = spec.layout is not Layout.FLAT
        form = form_of(payload, mode, meta_words(config.num_topk, experts=experts, weighted=weighted))
        arrived_rows = sum(counted.received) if spec.exact else config.padded_rows
        num_rows = num_result_rows(spec, config, counted.counts if spec.exact else None, arrived_rows)
        plan, arrived = self._tables(counted, spec, weighted, arrived_rows, num_rows)
        fingerprint.routing = counted.routing
        tokens = counted.first_pick.shape[0]
        if fingerprint.in_place:
            out = self._write_view(
                payload, counted.route, tokens, form, mode, fingerprint, num_rows, (counted.meta, plan, arrived)
            )
        else:
            out = self._result(payload, form, num_rows, mode, zeros=False)
            launch = self._launches.dispatch(
                form, mode, payload.x.dtype, plan.slots.shape[1] if experts else 1, placed=experts,
                padding=spec.layout is Layout.EXPERT_MAJOR and spec.expert_alignment > 1, fresh=True, weighted=weighted,
                static=not spec.exact,
            )  # fmt: skip
            x, scales = as_aligned(payload.x), None if payload.scales is None else as_aligned(payload.scales)
            self._memory.gate()
            launch(
                self._ground.peers, self._ground.state.data_ptr(), counted.route.data_ptr(), x.data_ptr(), address(scales),
                counted.meta.data_ptr(), out.x.data_ptr(), address(out.scales), arrived.topk_idx.data_ptr(),
                plan.picks.data_ptr(), arrived.weights.data_ptr(), arrived.source.data_ptr(), plan.gather.data_ptr(),
                plan.slots.data_ptr(), self._watch.tag(fingerprint), tokens, config.num_experts, num_rows,
            )  # fmt: skip
        self._memory.settle()
        if spec.exact:
            known = np.array([*counted.sent, *counted.received, counted.routing, *counted.counts])
            plan = plan._replace(splits=torch.from_numpy(known))  # pyright: ignore[reportUnknownMemberType]
        self._record("dispatch", plan, spec, form.slot_bytes)
        return out, plan, arrived

    def _tables(
        self, counted: Counted, spec: Spec, weighted: bool, arrived_rows: int, num_rows: int
    ) -> tuple[Plan, Arrived]:
        """Tensors for what rides along. Rows without a source say so beforehand; kernels write the others."""
        config, top, device = self.config, self.config.num_topk, self._memory.device
        experts = spec.layout is not Layout.FLAT
        holes = not spec.exact or spec.layout is Layout.EXPERT_PADDED or (experts and spec.expert_alignment > 1)

        def table(dtype: torch.dtype, hole: float, holey: bool, *shape: int) -> Tensor:
            if holey:
                return torch.full(shape, hole, dtype=dtype, device=device)
            return torch.empty(shape, dtype=dtype, device=device)

        long, word, none = torch.int64, torch.float32, self._nothing
        beside = (num_rows,) if experts else (num_rows, top)
        placed = (arrived_rows, min(top, config.num_local_experts) if experts else 1)
        arrived = Arrived(
            topk_idx=none[torch.int32] if experts else table(long, -1, holes, num_rows, top),
            weights=table(word, 0.0, holes, *beside) if weighted else none[word],
            source=table(long, -1, holes, num_rows),
            tokens_per_expert=counted.tokens_per_expert,
            expert_offsets=counted.offsets,
            source_ranges=counted.ranges,
            overflow=counted.overflow,
        )
        plan = Plan(
            splits=_UNKNOWN[: 2 * config.world_size + 1] if not spec.exact else none[long],
            route=counted.route,
            returns=none[long].view(0, 0),
            slots=table(long, -1, not spec.exact, *placed) if spec.placed else none[long],
            picks=table(long, 0, not spec.exact, *placed) if spec.placed else none[long],
            gather=table(long, -1, holes, num_rows) if spec.placed else none[long],
            first_pick=counted.first_pick,
        )
        return plan, arrived

    def _write_view(
        self, payload: Payload, route: Tensor, tokens: int, form: Form, mode: Quantize | None, fingerprint: Fingerprint, num_rows: int,
        fresh: tuple[Tensor, Plan, Arrived] | None,
    ) -> Payload:  # fmt: skip
        """Launch rows into the view, and unpack what rode along."""
        config, ground = self.config, self._ground
        parts = parts_of(form, config.padded_rows)
        self._view.expire(
            f"this view of symmetric memory ended with {head.OPS[fingerprint.op]} #{fingerprint.call}, also in_place"
        )
        view = self._view.region(parts.end)
        launch = self._launches.direct(form, mode, payload.x.dtype)
        weighted, static = bool(fingerprint.weighted), not fingerprint.exact
        unpack = self._launches.unpack(form.meta_words, weighted=weighted, static=static) if fresh else None
        kinds = (payload.x.dtype, torch.float32 if payload.scales is None else payload.scales.dtype)
        if mode is not None:
            kinds = (torch.float8_e4m3fn, torch.int32 if mode is Quantize.FP8_UE8M0 else torch.float32)
        out = self._view.payload(num_rows, form, parts, *kinds)
        x, scales = as_aligned(payload.x), None if payload.scales is None else as_aligned(payload.scales)
        self._memory.gate()
        launch(
            ground.peers, ground.state.data_ptr(), route.data_ptr(), view.addresses.data_ptr(), x.data_ptr(), address(scales),
            address(fresh[0]) if fresh else 0, self._watch.tag(fingerprint), tokens, parts.scales, parts.meta,
        )  # fmt: skip
        if fresh is not None and unpack is not None:
            _, plan, arrived = fresh
            unpack(
                ground.state.data_ptr(), route.data_ptr(), view.local.data_ptr() + parts.meta, arrived.topk_idx.data_ptr(),
                arrived.weights.data_ptr(), arrived.source.data_ptr(), plan.slots.data_ptr(), plan.gather.data_ptr(),
                config.num_experts,
            )  # fmt: skip
        self._memory.settle()
        return out

    def _result(self, payload: Payload, form: Form, num_rows: int, mode: Quantize | None, *, zeros: bool) -> Payload:
        """Ordinary memory for ``num_rows`` rows."""
        make = torch.zeros if zeros else torch.empty
        dtype = payload.x.dtype if mode is None else torch.float8_e4m3fn
        x = make(num_rows, form.hidden, dtype=dtype, device=payload.x.device)
        if not form.scale_words:
            return Payload(x, None)
        kind = torch.float32 if payload.scales is None else payload.scales.dtype
        kind = torch.int32 if mode is Quantize.FP8_UE8M0 else kind
        return Payload(x, make(num_rows, form.scale_words, dtype=kind, device=payload.x.device))

    def _num_arrived(self, plan: Plan, spec: Spec) -> int:
        size = self.config.world_size
        return sum(host_ints(plan.splits[size : 2 * size])) if spec.exact else self.config.padded_rows

    def _record(self, op: str, plan: Plan, spec: Spec, row_bytes: int, *, back: bool = False) -> None:
        """Count the call, and its rows where the host knows them."""
        size = self.config.world_size
        splits = host_ints(plan.splits[: 2 * size]) if spec.exact else [0] * (2 * size)
        out, into = splits[:size], splits[size:]
        if back:
            out, into = into, out
        self.stats.record(op, out, into, row_bytes, [float("nan")] * size)


_UNKNOWN = torch.tensor([-1] * 1024 + [0])
