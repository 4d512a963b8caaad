"""Engine ``nvlink``: Triton kernels that store rows straight into peers' memory, in rings of
bounded size.

Life of a fresh dispatch: plan (one launch: merge, place, exchange counts), the host learns the
counts (exact shapes only), rows (one launch: send, receive, place). A cached dispatch is the second
launch alone; combine is one launch. See ``docs/protocols.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.arrival import num_result_rows
from tokenyard.engines.blame import Blame
from tokenyard.engines.kinds import Binders, Kind, kind_of
from tokenyard.engines.rings import (
    Cuts,
    Ground,
    address,
    addresses,
    aligned,
    as_aligned,
    form_of,
    sums_for,
)
from tokenyard.engines.tables import Counted, Counts, Tables, filled_of, result_of, sent_of
from tokenyard.engines.views import View
from tokenyard.engines.watch import REFUSED, Watch, pack_routing
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH, Fingerprint
from tokenyard.kernels import region
from tokenyard.kernels.combine import Partials, Sums, bind_combine, combine_rows
from tokenyard.kernels.direct import bind_direct
from tokenyard.kernels.dispatch import bind_dispatch, dispatch_rows
from tokenyard.kernels.greet import bind_greet, greet_all
from tokenyard.kernels.names import span
from tokenyard.kernels.plan import Picks, bind_plan, make_plan
from tokenyard.kernels.push import bind_push
from tokenyard.layout import host_ints
from tokenyard.memory.base import SymmetricMemory
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Layout, Quantize


class NvlinkEngine:
    """Dispatch and combine by peer stores. All methods are collective and run in one order on all
    ranks.

    Args:
        memory: of this rank; the engine closes it.
        shape: how kernels are cut; equal on all ranks.
        buffer_bytes: of all rings on one rank together.
    """

    name = "nvlink"
    waits_on_host = False
    returns_width = hop_counts = 0
    _parts: Any = (Ground, Watch)  # what makes it this engine
    binders = Binders(bind_plan, bind_dispatch, bind_combine, bind_direct, bind_push, bind_greet)
    _table_rows = 0
    """Rows of each node's part of the forwarders' table in the plan that is launched next."""

    def __init__(
        self,
        config: Config,
        memory: SymmetricMemory,
        stats: Stats,
        shape: Cuts,
        buffer_bytes: int,
        blame: Blame,
    ) -> None:
        self.config, self.stats, self._memory = config, stats, memory
        make_ground, make_watch = self._parts
        self._ground: Ground = make_ground(config, memory, shape, buffer_bytes)
        self._watch: Watch = make_watch(config, self._ground, blame)
        self._view = View(config, self._ground, self.binders, self._watch)
        self._tables, self.interrupt = Tables(config, memory.device), self._watch.interrupt
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._calls, self._no_wait = 0, [float("nan")] * config.world_size
        size, width, self._local = (
            config.world_size,
            self._ground.header_words,
            config.num_local_experts,
        )
        self._header_in: Any = self._ground.header_in.numpy()
        self._host: Any = self._ground.header_out.numpy()
        self._headers: Any = self._host[3 : 3 + size * width].reshape(size, width)
        self._rows: Any = self._host[3 + size * width :].reshape(
            size, size
        )  # from each rank to each
        self._matrix: Any = self._rows[: config.matrix_ranks].reshape(-1)

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
        """Send each token once to every rank that holds one of its experts, with its ids and
        weights.
        """
        with span("tokenyard.dispatch"), self._memory.tensors():
            if spec.exact and topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "exact=True lets the host learn the counts, which a CUDA graph cannot hold: "
                    "use exact=False"
                )
            topk_idx, weights = (
                topk_idx.contiguous(),
                None if weights is None else weights.contiguous(),
            )
            payload = aligned(payload)
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
                self._watch.stop_short()
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
        """Send a new payload along a known routing. ``raw`` returns rows as they arrive, whatever
        the layout.

        Rows without a source are zeros, also in ``EXPERT_PADDED``: the backward of combine needs
        them so.
        """
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
                launch = kind.bound(
                    "rows",
                    lambda: self.binders.dispatch(
                        self._ground,
                        self.config.num_topk,
                        kind.form,
                        mode,
                        kind.dtype,
                        kind.width if placed else 1,
                        by_expert=placed,
                        padding=placed and kind.padding and not zeros,
                    ),
                )
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
        """Sum ``rows`` per token: on this rank first, then at the token's owner
        (``docs/semantics.md``, Combine).
        """
        with span("tokenyard.combine"), self._memory.tensors():
            payload, width = (
                Payload(rows, None),
                0 if reduce_weights is None else reduce_weights.shape[1],
            )
            kind = self._kind(
                COMBINE,
                payload,
                spec,
                None,
                marked=width > 0,
                scaled=weights is not None,
                in_place=in_place,
            )
            splits = host_ints(plan.splits[: 2 * self.config.world_size + 1])
            tag, tokens = kind.tag | pack_routing(splits[-1]), plan.first_pick.shape[0]
            bias = tuple(as_aligned(term) for term in bias)
            reduced = rows.new_empty((tokens, width), dtype=torch.float32) if width else None
            if in_place:
                total = self._sum_in_place(rows, plan, kind, tag, bias, out)
            else:
                total = sums_for(rows, tokens, out, rows, *bias)
                placed = kind.experts and not raw
                dtypes = tuple(term.dtype for term in bias)
                launch = kind.bound(
                    (width, placed, dtypes),
                    lambda: self.binders.combine(
                        self._ground,
                        kind.form if width == 0 else form_of(payload, None, -(-width // 4) * 4),
                        kind.dtype,
                        kind.width if placed else 1,
                        width,
                        dtypes,
                        by_expert=placed,
                        weighted=weights is not None,
                    ),
                )
                rows = as_aligned(rows)
                given = [None if t is None else as_aligned(t) for t in (weights, reduce_weights)]
                self._memory.gate()
                combine_rows(
                    launch,
                    self._ground,
                    plan=plan.route.data_ptr(),
                    parts=Partials(rows.data_ptr(), plan.slots.data_ptr(), *map(address, given)),
                    sums=Sums(*addresses(bias), total.data_ptr(), address(reduced)),
                    tag=tag,
                    num_tokens=tokens,
                )
                self._memory.settle()
                total = total if out is None or total is out else out.copy_(total)
            self._record("combine", splits, kind, back=True)
            return total, reduced

    def _sum_in_place(self, *given: Any) -> Tensor:
        """A combine in place: see :meth:`View.push`."""
        return self._view.push(*given)

    def rows_in_place(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, hidden]`` for a combine in place: any memory will do."""
        with self._memory.tensors():
            return torch.empty(num_rows, hidden, dtype=dtype, device=self._memory.device)

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """Tell the other ranks that this one refuses the call they are in.

        With counts to exchange, everybody raises before a row moves and goes on. Otherwise rows
        already fly: the others learn of it at once, and all objects of this call are of no more
        use.
        """
        self._watch.raise_if_failed()
        self._watch.begin(fingerprint := Fingerprint(op, self._calls, *[0] * 13), REFUSED)
        self._calls += 1
        if op != DISPATCH:
            launch = self.binders.greet(self._ground)
            self._memory.gate()
            greet_all(launch, self._ground, REFUSED)
            self._memory.settle()
            return True
        nothing = Payload(
            torch.empty(0, self.config.hidden, dtype=torch.bfloat16, device="cpu"), None
        )
        spec = Spec(layout=Layout.FLAT, exact=exact)
        kind = kind_of(
            op, nothing, spec, None, self.config, marked=False, scaled=False, in_place=False
        )
        header = head.blank(fingerprint, 1, 0, 0)
        head.refuse(header, reason)
        kind.words, kind.tag = header[0].numpy(), REFUSED
        nobody = torch.empty(0, self.config.num_topk, dtype=torch.int64, device=self._memory.device)
        with self._memory.tensors():
            held = self._count(nobody, None, kind)
            if exact:
                nonce, host = self._calls, self._host
                self._watch.wait(lambda: host[0] == nonce)  # until then the kernel reads the header
            self._memory.settle()
            self._watch.stop_short()
            del held
        return True

    def check(self) -> None:
        """Wait for the device; raise if a call failed there, or a static dispatch was given ids out
        of range.
        """
        self._watch.finish()
        self._watch.raise_if_failed()
        self._watch.raise_if_bad_index()

    def close(self) -> None:
        self._view.close("this view of symmetric memory is gone: its ExpertParallel is closed")
        self._memory.close()
        self._kinds.clear()
        del self._ground.region

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        """Shape and dtype of ``Plan.route``, and the number of arrival rows, for fake tensors."""
        return (
            (self._route_words(num_tokens),),
            torch.int32,
            new_size() if spec.exact else self.config.padded_rows,
        )

    def _kind(
        self,
        op: int,
        payload: Payload,
        spec: Spec,
        mode: Quantize | None,
        *,
        marked: bool,
        scaled: bool = False,
        in_place: bool = False,
    ) -> Kind:
        """The kind of a call that begins now, unless an earlier one has failed on the device."""
        self._watch.raise_if_failed()
        scales = payload.scales
        form = None if scales is None else (scales.dtype, scales.shape[1])
        key = (op, payload.x.dtype, payload.x.shape[1], form, spec, mode, marked, scaled, in_place)
        kind = self._kinds.get(key)
        if kind is None:
            kind = kind_of(
                op,
                payload,
                spec,
                mode,
                self.config,
                marked=marked,
                scaled=scaled,
                in_place=in_place,
            )
            self._kinds[key] = kind
        kind.fingerprint.call = self._calls
        self._watch.begin(kind.fingerprint, kind.tag)
        self._calls += 1
        return kind

    # The plan

    def _route_words(self, num_tokens: Any) -> Any:
        return region.plan_words(
            self.config.world_size, self._ground.shape.channels, num_tokens, self._local
        )

    def _static_rows(self, spec: Spec) -> tuple[int, int]:
        """Arrival rows and result rows of static shapes."""
        padded = self.config.padded_rows
        return padded, num_result_rows(spec, self.config, None, padded)

    def _count(
        self, topk_idx: Tensor, weights: Tensor | None, kind: Kind, room: int = 0
    ) -> Counted:
        """Launch the plan."""
        config, ground, spec, tokens = self.config, self._ground, kind.spec, topk_idx.shape[0]
        launch = kind.bound(
            topk_idx.dtype,
            lambda: self.binders.plan(
                ground,
                config.num_topk,
                kind.form.meta_words,
                by_expert=kind.experts,
                padded=spec.layout is Layout.EXPERT_PADDED,
                exact=spec.exact,
                weighted=kind.weighted,
                wide=topk_idx.dtype == torch.int64,
            ),
        )
        counted = self._tables.counted(kind, tokens, self._route_words(tokens))
        most, rows = head.MOST_ROWS, room or head.MOST_ROWS
        if not spec.exact:
            rows = self._static_rows(spec)[1]
        if not spec.exact or spec.layout is Layout.EXPERT_PADDED:
            most = config.max_tokens_per_rank
        if spec.exact:
            kind.words[head.CALL_AT] = kind.fingerprint.call
            self._header_in[: kind.words.shape[0]] = kind.words
        self._memory.gate()
        make_plan(
            launch,
            ground,
            picks=Picks(topk_idx.data_ptr(), address(weights)),
            plan=counted.route.data_ptr(),
            tables=filled_of(counted),
            nonce=self._calls,
            tag=kind.tag,
            num_tokens=tokens,
            num_experts=config.num_experts,
            most_rows=most,
            num_rows=rows | self._table_rows << 32,
            alignment=spec.expert_alignment,
        )
        return counted

    def _learn(self, kind: Kind) -> Counts:
        """Wait on the host for everybody's counts, and check them."""
        nonce, host = self._calls, self._host
        self._watch.wait(lambda: host[0] == nonce)
        if host[1]:
            headers = torch.from_numpy(self._headers)  # pyright: ignore[reportUnknownMemberType]
            padded = kind.spec.layout is Layout.EXPERT_PADDED
            head.verify(
                headers,
                self.config,
                max_rows=self.config.max_tokens_per_rank if padded else head.MOST_ROWS,
            )
        return Counts(
            sent=self._rows[self.config.rank].tolist(),
            received=self._headers[:, head.NUM_ROWS].tolist(),
            experts=self._headers[:, head.COUNTS : head.COUNTS + self._local].sum(0),
            routing=head.mixed(self._headers[:, head.ROUTING].tolist()),
        )

    # Rows

    def _follow(
        self, payload: Payload, counted: Counted, kind: Kind, room: int
    ) -> tuple[Payload, Plan, Arrived]:
        """Behind the plan of a fresh dispatch. ``room``: rows of results guessed, 0 if nothing is
        known.
        """
        if not kind.spec.exact:
            return self._finish(
                *self._move(payload, counted, kind, self._static_rows(kind.spec)), None, kind
            )
        moved = self._move(payload, counted, kind, (room, room)) if room else self._memory.gate()
        if room and not self._memory.shared_gpu:
            self._tables.make_ahead(kind, counted.first_pick.shape[0], counted.route.shape[0], room)
        counts = self._learn(kind)
        if (
            moved is not None and not self._host[2]
        ):  # (else some rank guessed too little room, and no row has moved)
            self._memory.gate()  # every rank comes to two, whether it launches or not
        else:
            num_rows = num_result_rows(
                kind.spec, self.config, counts.experts.tolist(), sum(counts.received)
            )
            moved = self._move(
                payload, counted, kind, (sum(counts.received), num_rows), forced=True
            )
        return self._finish(*moved, counts, kind)

    def _move(
        self,
        payload: Payload,
        counted: Counted,
        kind: Kind,
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
        launch = kind.bound(
            "rows",
            lambda: self.binders.dispatch(
                self._ground,
                config.num_topk,
                kind.form,
                kind.mode,
                kind.dtype,
                kind.width,
                by_expert=kind.experts,
                padding=kind.padding,
                fresh=True,
                weighted=kind.weighted,
                static=not spec.exact,
            ),
        )
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

    def _finish(
        self, out: Payload, plan: Plan, arrived: Arrived, counts: Counts | None, kind: Kind
    ) -> tuple[Payload, Plan, Arrived]:
        """What is left to do once rows are on their way: results of their true size, counts for the
        handle.
        """
        self._memory.settle()
        if counts is None:  # the number of the call tells one routing from another
            splits = [-1] * (2 * self.config.world_size)
            known = np.array([*splits, kind.fingerprint.call])
        else:
            splits = counts.sent + counts.received
            known = np.concatenate(([*splits, counts.routing], self._matrix, counts.experts))
        plan = plan._replace(splits=torch.from_numpy(known))  # pyright: ignore[reportUnknownMemberType]
        if counts is not None and not kind.experts:
            num_rows = sum(counts.received)
            for table in (out.x, out.scales, arrived.topk_idx, arrived.weights, arrived.source):
                if table is not None and table.shape[0] > num_rows:
                    table.resize_(num_rows, *table.shape[1:])  # the storage stays as it is
            kind.learn_room(plan.first_pick.shape[0], num_rows)
        self._record("dispatch", splits, kind)
        return out, plan, arrived

    def _record(self, op: str, splits: list[int], kind: Kind, *, back: bool = False) -> None:
        """Count the call, and its rows where the host knows them."""
        size = self.config.world_size
        known = splits if kind.spec.exact else [0] * (2 * size)
        out, into = known[:size], known[size : 2 * size]
        if back:
            out, into = into, out
        self.stats.record(op, out, into, kind.form.row_bytes, self._no_wait)


def _result(payload: Payload, kind: Kind, num_rows: int, *, zeros: bool) -> Payload:
    """Ordinary memory for ``num_rows`` rows."""
    make, device, sent = torch.zeros if zeros else torch.empty, payload.x.device, kind.sent
    x = make(num_rows, sent.hidden, dtype=sent.dtype, device=device)
    if not sent.scale_words:
        return Payload(x, None)
    return Payload(x, make(num_rows, sent.num_scales, dtype=sent.scale_dtype, device=device))
