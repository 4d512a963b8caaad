"""Engine ``nvlink``: Triton kernels that store rows straight into peers' memory, in rings of
bounded size.

Life of a fresh dispatch: plan (one launch: merge, place, exchange counts), the host learns the
counts (exact shapes only), rows (one launch: send, receive, place). A cached dispatch is the second
launch alone; combine is one launch. See ``docs/reference/protocols.md``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.engines.known import NVLINK
from tokenyard.engines.peer import PeerEngine
from tokenyard.engines.receive_plan import num_result_rows
from tokenyard.engines.rings import (
    Ground,
    address,
    addresses,
    aligned,
    as_aligned,
    form_of,
    sums_for,
)
from tokenyard.engines.signatures import Binders, Signature
from tokenyard.engines.status import StatusMonitor, pack_routing
from tokenyard.engines.tables import Counted, result_of, sent_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.kernels.combine import Partials, Sums, bind_combine, combine_rows
from tokenyard.kernels.direct import bind_direct
from tokenyard.kernels.dispatch import bind_dispatch, dispatch_rows
from tokenyard.kernels.greet import bind_greet
from tokenyard.kernels.names import span
from tokenyard.kernels.plan import bind_plan
from tokenyard.kernels.push import bind_push
from tokenyard.routing import host_ints
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize


class NvlinkEngine(PeerEngine):
    """Dispatch and combine by peer stores."""

    name = NVLINK
    _parts: Any = (Ground, StatusMonitor)
    binders = Binders(bind_plan, bind_dispatch, bind_combine, bind_direct, bind_push, bind_greet)
    _pulls = False
    """Whether a combine in place reads peers' rows where they are; else they are pushed."""

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
        with span("tokenyard.dispatch"), self._memory.tensors():
            if spec.exact and topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "exact=True lets the host learn the counts, which a CUDA graph cannot hold: "
                    "use exact=False"
                )
            topk_idx, payload = topk_idx.contiguous(), aligned(payload)
            weights = None if weights is None else weights.contiguous()
            kind = self._kind(
                DISPATCH, payload, spec, mode, marked=weights is not None, in_place=in_place
            )
            room = kind.room_for(topk_idx.shape[0])
            counted = self._count(topk_idx, weights, kind, room)
            try:
                return self._follow(payload, counted, kind, room)
            except Exception:
                # the plan's programs write to tensors that the caller lets go
                self._memory.settle()
                self._monitor.stop_short()
                raise

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
        with span("tokenyard.redispatch"), self._memory.tensors():
            payload = aligned(payload)
            kind = self._kind(CACHED, payload, spec, mode, marked=raw, in_place=in_place)
            placed = kind.experts and not raw
            splits = host_ints(plan.splits[: 2 * self.config.world_size + 1])
            arrived = (
                sum(splits[self.config.world_size : -1]) if spec.exact else self.config.padded_rows
            )
            num_rows = plan.gather.shape[0] if placed else arrived
            tag = kind.tag | pack_routing(splits[-1])
            if in_place:
                out = self._view.write(payload, plan, kind, tag, num_rows)
            else:
                zeros = not spec.exact or spec.layout is Layout.EXPERT_PADDED
                out = _result(payload, kind, num_rows, zeros=zeros)
                launch = kind.bound("rows", lambda: self.binders.dispatch(
                    self._ground, self.config.num_topk, kind.form, mode, kind.dtype,
                    kind.width if placed else 1, by_expert=placed,
                    padding=placed and kind.padding and not zeros,
                ))  # fmt: skip
                self._memory.gate()
                dispatch_rows(
                    launch,
                    self._ground,
                    plan=plan.route.data_ptr(),
                    payload=sent_of(payload),
                    result=result_of(out, plan),
                    tag=tag,
                    num_tokens=plan.first_pick.shape[0],
                    num_experts=self.config.num_experts,
                    num_rows=num_rows,
                )
                self._memory.settle()
            self._record("cached dispatch", splits, kind)
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
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        with span("tokenyard.combine"), self._memory.tensors():
            width = 0 if reduce_weights is None else reduce_weights.shape[1]
            payload, marked, scaled = Payload(rows, None), width > 0, weights is not None
            kind = self._kind(
                COMBINE, payload, spec, None, marked=marked, scaled=scaled, in_place=in_place
            )
            splits = host_ints(plan.splits[: 2 * self.config.world_size + 1])
            tag, tokens = kind.tag | pack_routing(splits[-1]), plan.first_pick.shape[0]
            bias = tuple(as_aligned(term) for term in bias)
            reduced = rows.new_empty((tokens, width), dtype=torch.float32) if width else None
            if in_place:
                move = self._view.read if self._pulls else self._view.push
                total = move(rows, plan, kind, tag, bias, out)
            else:
                total = sums_for(rows, tokens, out, rows, *bias)
                given = [None if t is None else as_aligned(t) for t in (weights, reduce_weights)]
                self._sum(as_aligned(rows), plan, kind, tag, raw, bias, given, total, reduced)
                total = total if out is None or total is out else out.copy_(total)
            self._record("combine", splits, kind, back=True)
            return total, reduced

    def _sum(
        self,
        rows: Tensor,
        plan: Plan,
        kind: Signature,
        tag: int,
        raw: bool,
        bias: tuple[Tensor, ...],
        given: list[Tensor | None],
        total: Tensor,
        reduced: Tensor | None,
    ) -> None:
        """Launch a combine. ``given``: weights, and weights to reduce."""
        width, placed = 0 if reduced is None else reduced.shape[1], kind.experts and not raw
        dtypes = tuple(term.dtype for term in bias)
        launch = kind.bound(
            (width, placed, dtypes),
            lambda: self.binders.combine(
                self._ground,
                form_of(Payload(rows, None), None, -(-width // 4) * 4) if width else kind.form,
                kind.dtype,
                kind.width if placed else 1,
                width,
                dtypes,
                by_expert=placed,
                weighted=given[0] is not None,
            ),
        )
        self._memory.gate()
        combine_rows(
            launch,
            self._ground,
            plan=plan.route.data_ptr(),
            parts=Partials(rows.data_ptr(), plan.slots.data_ptr(), *map(address, given)),
            sums=Sums(*addresses(bias), total.data_ptr(), address(reduced)),
            tag=tag,
            num_tokens=plan.first_pick.shape[0],
        )
        self._memory.settle()

    def rows_in_place(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, hidden]`` for a combine in place; any memory will do where
        rows are pushed. Else it is symmetric, and collective where that has to grow.
        """
        with self._memory.tensors():
            if self._pulls:
                return self._view.rows(num_rows, hidden, dtype)
            return torch.empty(num_rows, hidden, dtype=dtype, device=self._memory.device)

    # Rows

    def _follow(
        self, payload: Payload, counted: Counted, kind: Signature, room: int
    ) -> tuple[Payload, Plan, Arrived]:
        """Behind the plan of a fresh dispatch. ``room``: rows of results guessed, 0 for none."""
        if not kind.spec.exact:
            return self._finish(*self._move(payload, counted, kind, kind.static_rows), None, kind)
        moved = self._move(payload, counted, kind, (room, room)) if room else self._memory.gate()
        if room and not self._memory.shared_gpu:
            self._tables.make_ahead(kind, counted.first_pick.shape[0], counted.route.shape[0], room)
        counts = self._learn(kind)
        if moved is not None and not self._host[2]:
            self._memory.gate()  # every rank comes to two, whether it launches or not
        else:  # some rank guessed too little room, and no row has moved
            came = sum(counts.received)
            num_rows = num_result_rows(kind.spec, self.config, counts.experts.tolist(), came)
            moved = self._move(payload, counted, kind, (came, num_rows), forced=True)
        return self._finish(*moved, counts, kind)

    def _move(
        self,
        payload: Payload,
        counted: Counted,
        kind: Signature,
        room: tuple[int, int],
        *,
        forced: bool = False,
    ) -> tuple[Payload, Plan, Arrived]:
        """Launch the rows of a fresh dispatch, with room for arrival rows and result rows."""
        config, spec = self.config, kind.spec
        arrived_rows, num_rows = room
        plan, arrived = self._tables.results(kind, counted, arrived_rows, num_rows)
        if kind.fingerprint.in_place:
            out = self._view.write(payload, plan, kind, kind.tag, num_rows, counted.meta, arrived)
            return out, plan, arrived
        out = _result(payload, kind, num_rows, zeros=False)
        launch = kind.bound("rows", lambda: self.binders.dispatch(
            self._ground, config.num_topk, kind.form, kind.mode, kind.dtype, kind.width,
            by_expert=kind.experts, padding=kind.padding, fresh=True, weighted=kind.weighted,
            static=not spec.exact,
        ))  # fmt: skip
        self._memory.gate()
        dispatch_rows(
            launch,
            self._ground,
            plan=counted.route.data_ptr(),
            payload=sent_of(payload, counted.meta),
            result=result_of(out, plan, arrived),
            tag=kind.tag,
            num_tokens=counted.first_pick.shape[0],
            num_experts=config.num_experts,
            num_rows=num_rows,
            forced=forced,
        )
        return out, plan, arrived


def _result(payload: Payload, kind: Signature, num_rows: int, *, zeros: bool) -> Payload:
    """Ordinary memory for ``num_rows`` rows."""
    make, device, sent = torch.zeros if zeros else torch.empty, payload.x.device, kind.sent
    x = make(num_rows, sent.hidden, dtype=sent.dtype, device=device)
    if not sent.scale_words:
        return Payload(x, None)
    return Payload(x, make(num_rows, sent.num_scales, dtype=sent.scale_dtype, device=device))
