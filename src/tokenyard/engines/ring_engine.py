"""Calls of engines ``nvlink`` and ``twolevel``: Triton kernels that store rows straight into peers'
memory, in rings of bounded size.

Life of a fresh dispatch: plan (one launch: merge, place, exchange counts), the host learns the
counts (exact shapes only), rows (one launch: send, receive, place). A cached dispatch is the second
launch alone; combine is one launch. See ``docs/reference/protocols.md``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.engines.in_place import CombineOptions
from tokenyard.engines.known import NVLINK, TWOLEVEL
from tokenyard.engines.outputs import (
    CallPlan,
    Counted,
    Known,
    known_of,
    result_of,
    sent_of,
)
from tokenyard.engines.peer import PeerEngine
from tokenyard.engines.plans import num_result_rows
from tokenyard.engines.result_heap import LACKS_BLOCK, LACKS_ROOM
from tokenyard.engines.rings import addresses, aligned, as_aligned, row_layout_of, sums_for
from tokenyard.engines.signatures import Signature
from tokenyard.engines.status import pack_routing
from tokenyard.engines.tuning import (
    Tuning,
    heap_bytes,
    most_channels,
    most_rows_there,
    peer_tuning,
    receive_bytes,
    too_many,
)
from tokenyard.errors import NotSupported
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan
from tokenyard.header import CACHED, COMBINE, DISPATCH, CallKind
from tokenyard.kernels.combine import Partials, Sums
from tokenyard.kernels.dispatch import bind_cast
from tokenyard.kernels.names import span
from tokenyard.kernels.stand_in import launch_call
from tokenyard.kernels.two_combine import bind_two_combine
from tokenyard.kernels.two_dispatch import bind_two_dispatch
from tokenyard.rows import Payload, address
from tokenyard.topology import Topology
from tokenyard.types import Layout, Quantize


class TwolevelEngine(PeerEngine):
    """Dispatch and combine by peer stores, for ranks that form a grid: rows cross the network once
    per node, and are handed on inside (``docs/reference/twolevel.md``)."""

    name, _pulls = TWOLEVEL, True

    # Three collective calls

    def dispatch(self, given: DispatchArguments) -> tuple[Payload, Plan, Arrived]:
        payload, topk_idx, weights, spec, mode, in_place, *_ = given
        with span("tokenyard.dispatch"), self._memory.tensors():
            if spec.exact and topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "exact=True lets the host learn the counts, which a CUDA graph cannot hold: "
                    "use exact=False"
                )
            topk_idx, payload = topk_idx.contiguous(), aligned(payload)
            payload, mode = self._cast_ahead(payload, mode, in_place=in_place)
            weights = None if weights is None else weights.contiguous()
            weighted = weights is not None
            kind = CallKind(DISPATCH, payload, spec, mode, weighted, in_place=in_place)
            signature = self._signature(kind)
            room = signature.room_for(topk_idx.shape[0])
            block = self._heap.take(signature, room)
            place = self._heap.place(block, signature)
            counted = self._count(topk_idx, weights, signature, room, place)
            rooms = (room, room) if spec.exact else signature.static_rows
            try:
                moved = self._move(payload, counted, signature, rooms, block) if rooms[0] else None
                if spec.exact or moved is None:
                    return self._follow(payload, counted, signature, moved, in_heap=place > 0)
                return self._finish(*moved, None, signature)
            except Exception:
                # the plan's programs write to tensors that the caller lets go
                self._memory.settle()
                self._monitor.stop_short()
                raise

    def redispatch(self, given: CachedArguments) -> Payload:
        payload, plan, spec, mode, raw, in_place = given
        with span("tokenyard.redispatch"), self._memory.tensors():
            payload, mode = self._cast_ahead(aligned(payload), mode, in_place=in_place)
            kind = CallKind(CACHED, payload, spec, mode, raw, in_place=in_place)
            signature = self._signature(kind)
            placed = signature.experts and not raw
            known, size = known_of(plan), self.config.world_size
            arrived = self.config.padded_rows
            if spec.exact:
                arrived = sum(known.counts[size : 2 * size].tolist())
            num_rows = known.num_rows if placed else arrived
            tag = signature.tag | pack_routing(int(known.counts[2 * size]))
            if in_place:
                out = self._in_place.write(sent_of(payload), plan, signature, tag, num_rows)
            else:
                zeros = not spec.exact or spec.layout is Layout.EXPERT_PADDED
                in_heap = self._heap.was_in_heap(known.counts, signature)
                block = self._heap.block(signature, num_rows) if in_heap else None
                out = self._result(payload, signature, num_rows, block, zeros=zeros)
                launch = signature.bound(("rings", in_heap), lambda: bind_two_dispatch(
                    self._workspace, self.config.num_topk, signature.row_layout, mode,
                    signature.dtype, signature.slots_per_row if placed else 1, by_expert=placed,
                    padding=placed and signature.padding and not zeros, behind_heaps=in_heap,
                ))  # fmt: skip
                sent = sent_of(payload)
                if in_heap:  # behind all that may fail on this rank alone
                    self._heap.rewrite(block, sent, known, signature, tag, num_rows)
                data = known.route_at, sent, result_of(out, plan)
                numbers = known.num_tokens, self.config.num_experts, num_rows, 0  # not forced
                launch_call(launch, self._workspace, data, tag, *numbers)
                self._memory.settle()
            signature.count(known.counts[: 2 * size])
            return out

    def combine(self, given: CombineArguments) -> tuple[Tensor, Tensor | None]:
        rows, plan, spec, weights, reduce_weights, bias, out, raw, in_place, *_ = given
        with span("tokenyard.combine"), self._memory.tensors():
            width = given.width
            payload, scaled = Payload(rows, None), weights is not None
            kind = CallKind(COMBINE, payload, spec, None, width > 0, scaled, in_place)
            signature = self._signature(kind)
            known, size = known_of(plan), self.config.world_size
            tag = signature.tag | pack_routing(int(known.counts[2 * size]))
            tokens, bias = known.num_tokens, tuple(as_aligned(term) for term in bias)
            reduced = rows.new_empty((tokens, width), dtype=torch.float32) if width else None
            if in_place and self._pulls:
                total = self._in_place.read(rows, plan, signature, tag, bias, out)
            else:
                total = sums_for(rows, tokens, out, rows, *bias)
                kept = [None if t is None else as_aligned(t) for t in (weights, reduce_weights)]
                rows = as_aligned(rows)
                parts = Partials(rows.data_ptr(), known.slots_at, *map(address, kept))
                sums = Sums(*addresses(bias), total.data_ptr(), address(reduced))
                dtypes, placed = tuple(term.dtype for term in bias), signature.experts and not raw
                how = CombineOptions(dtypes, placed, scaled, width)
                takes = self._receive.takes(
                    known.counts, signature.row_layout, width, exact=spec.exact
                )
                if in_place or takes:
                    self._receive.push(known, signature, tag, parts, sums, how, grow=not takes)
                else:
                    self._sum(known, signature, tag, parts, sums, how)
                total = total if out is None or total is out else out.copy_(total)
            signature.count(known.counts[: 2 * size])
            return total, reduced

    def _sum(
        self,
        known: Known,
        signature: Signature,
        tag: int,
        parts: Partials,
        sums: Sums,
        how: CombineOptions,
    ) -> None:
        """Launch a combine through rings."""
        row_layout = signature.row_layout
        if how.picks:
            row_layout = replace(row_layout, meta_words=-(-how.picks // 4) * 4)
        launch = signature.bound(how, lambda: bind_two_combine(
            self._workspace, row_layout, signature.dtype,
            signature.slots_per_row if how.placed else 1, how.picks, how.dtypes,
            by_expert=how.placed, weighted=how.weighted,
        ))  # fmt: skip
        data = known.route_at, parts, sums
        launch_call(launch, self._workspace, data, tag, known.num_tokens)
        self._memory.settle()

    def rows_in_place(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """As of :class:`Engine`; where rows are pushed any memory will do."""
        with self._memory.tensors():
            if self._pulls:
                return self._in_place.rows(num_rows, hidden, dtype)
            return torch.empty(num_rows, hidden, dtype=dtype, device=self._memory.device)

    # Rows

    def _cast_ahead(
        self, payload: Payload, mode: Quantize | None, *, in_place: bool
    ) -> tuple[Payload, Quantize | None]:
        """What to send, and how it is still to be cast: a row is cast once here, in sends once for
        each destination. Where multiprocessors are few, that takes longer than this launch."""
        if mode is None or in_place or not self._workspace.tuning.cast_ahead:
            return payload, mode
        x, to = payload.x, row_of(payload, mode)
        data = x.new_empty(x.shape, dtype=to.dtype)
        scales = x.new_empty((x.shape[0], to.num_scales), dtype=to.scale_dtype)
        key = mode, x.dtype, x.shape[1]
        launch = self._casts.get(key)
        if launch is None:
            row_layout = row_layout_of(payload, mode, 0)
            launch = bind_cast(self._workspace, row_layout, mode, x.dtype)
            self._casts[key] = launch
        launch(x.data_ptr(), data.data_ptr(), scales.data_ptr(), x.shape[0])
        self._memory.settle()  # ``x`` may be a copy that nobody keeps
        return Payload(data, scales), None

    def _follow(
        self,
        payload: Payload,
        counted: Counted,
        signature: Signature,
        moved: tuple[Payload, CallPlan, Arrived] | None,
        *,
        in_heap: bool,
    ) -> tuple[Payload, Plan, Arrived]:
        """Behind the plan of a fresh dispatch, and its rows if their number was guessed; whether
        they were launched to the heap."""
        if moved is None:
            self._memory.gate()
        elif not self._memory.shared_gpu:
            room = moved[1].num_rows
            self._outputs.make_ahead(signature, counted.tokens, self._table_rows, room)
        known, size = self._learn(signature), self.config.world_size
        lacks = int(self._host[2])
        if self._heap.holds(signature):
            signature.in_heap = not lacks & LACKS_BLOCK
            signature.most_rows = most_rows_there(sum(self._tokens.tolist()))
        if moved is not None and not lacks & LACKS_ROOM:
            self._memory.gate()  # every rank comes to two, whether it launches or not
        else:  # some rank guessed too little room, and no row has moved
            in_heap = False
            came, experts = sum(known[size : 2 * size].tolist()), known[len(known) - self._local :]
            num_rows = num_result_rows(signature.spec, self.config, experts.tolist(), came)
            moved = self._move(payload, counted, signature, (came, num_rows), forced=True)
        self._heap.note(known, signature, in_heap=in_heap)
        done = self._finish(*moved, known, signature)
        if self._heap.counts(signature):
            self.stats.count_result(in_heap)
            self._heap.prepare(signature)
        return done

    def _move(
        self,
        payload: Payload,
        counted: Counted,
        signature: Signature,
        room: tuple[int, int],
        block: Tensor | None = None,
        *,
        forced: bool = False,
    ) -> tuple[Payload, CallPlan, Arrived]:
        """Launch a fresh dispatch's rows. ``room``: for arrival and result rows (in ``block``)."""
        config, spec = self.config, signature.spec
        arrived_rows, num_rows = room
        if forced:
            counted = self._with_room(counted)
        plan, arrived = self._outputs.results(signature, counted, arrived_rows, num_rows)
        sent, tag = sent_of(payload, counted.meta_at), signature.tag
        if signature.fingerprint.in_place:
            out = self._in_place.write(sent, plan, signature, tag, num_rows, arrived)
            return out, plan, arrived
        out = self._result(payload, signature, num_rows, block, zeros=False)
        result = result_of(out, plan, arrived)
        if block is not None and signature.in_heap:
            self._heap.write(signature, plan, sent, result)
            return out, plan, arrived
        launch = signature.bound("rows", lambda: bind_two_dispatch(
            self._workspace, config.num_topk, signature.row_layout, signature.mode, signature.dtype,
            signature.slots_per_row, by_expert=signature.experts, padding=signature.padding,
            fresh=True, weighted=signature.weighted, static=not spec.exact,
        ))  # fmt: skip
        data = plan.route_at, sent, result
        numbers = counted.tokens, config.num_experts, num_rows, int(forced)
        launch_call(launch, self._workspace, data, tag, *numbers)
        return out, plan, arrived

    def _result(
        self, payload: Payload, signature: Signature, num_rows: int, block: Tensor | None, *,
        zeros: bool,
    ) -> Payload:  # fmt: skip
        """Memory for ``num_rows`` rows: in ``block``, or ordinary memory, as of scales always."""
        sent, like, scales = signature.sent, payload.x, None
        make = like.new_zeros if zeros else like.new_empty
        if sent.scale_words:
            scales = make((num_rows, sent.num_scales), dtype=sent.scale_dtype)
        if block is not None:
            return Payload(self._heap.rows_in(block, signature, num_rows), scales)
        return Payload(make((num_rows, sent.hidden), dtype=sent.dtype), scales)


class NvlinkEngine(TwolevelEngine):
    """All ranks are one node. A combine in place pushes its rows, which may lie anywhere."""

    name, _pulls = NVLINK, False


# The choice


class PeerChoice(NamedTuple):
    """A class of engine, and what it is made with."""

    engine: type[TwolevelEngine]
    config: Config
    tuning: Tuning
    receive_bytes: int
    heap_bytes: int


def choose_peer(
    config: Config, num_sms: int, buffer_bytes: int, *, all_sms: bool, nodes: bool
) -> PeerChoice:
    """The engine with ``num_sms`` multiprocessors, ``all_sms`` or fewer than there are.

    ``nodes``: engine twolevel, on the grid of ``config.topology``; else nvlink, for which all ranks
    are one node.
    """
    if not nodes:
        if why := too_many(config.world_size):
            raise NotSupported(why)
        config = replace(config, topology=Topology(1, config.world_size))
    grid = config.topology
    assert grid is not None
    channels = most_channels(grid, 2 * config.hidden, buffer_bytes)
    tuning = peer_tuning(num_sms, grid, all_sms=all_sms, channels=channels)
    if nodes:
        return PeerChoice(TwolevelEngine, config, tuning, 0, 0)
    received = receive_bytes(buffer_bytes, config)
    heap = heap_bytes(buffer_bytes, config, all_sms=all_sms)
    return PeerChoice(NvlinkEngine, config, tuning, received, heap)
