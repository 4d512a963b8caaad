"""Launches of engine ``collective`` on one device, and the memory that they fill.

Kernels are compiled at the first call of a kind: dtypes, sizes of rows, layout, options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.base import DispatchArguments
from tokenyard.engines.collective_torch import Given
from tokenyard.engines.plans import num_result_rows
from tokenyard.engines.rings import addresses, aligned, as_aligned, sums_for
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import Fingerprint
from tokenyard.kernels import collective_place as place
from tokenyard.kernels import collective_send as send
from tokenyard.kernels.collective_combine import bind_owner, bind_partial
from tokenyard.kernels.combine import Partials, Sums
from tokenyard.kernels.exchange import BAD_AT
from tokenyard.kernels.payload import cast_of
from tokenyard.kernels.plan import Picks, PlanOutputs
from tokenyard.kernels.structs import Payload as Sent
from tokenyard.kernels.structs import Result, RowConstants
from tokenyard.routing import Placement, host_ints
from tokenyard.rows import Payload, RowFormat, address
from tokenyard.types import Layout, Quantize

FEW_TOKENS = 256
"""Most tokens of a call that is planned by few programs."""
Launch = Callable[..., None]
_DTYPES = torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16


class Left(NamedTuple):
    """What is filled before rows move; ``send`` and ``route`` are as long as they may become."""

    headers: Tensor | None
    route: Tensor
    returns: Tensor
    first_pick: Tensor
    send: Tensor
    stride: int  # rows for each rank, 0: as many as there are
    tables: Tensor  # the plan's, scratch memory and metadata
    meta: int  # address of that


class Kind(NamedTuple):
    """Launches of a kind of fresh dispatches."""

    row: RowFormat
    leaving: Any  # a PlanConfig
    coming: Any  # an ArrivalConfig
    plan: Launch
    pack: Launch
    settle: Launch | None  # counts picks, where places depend on them
    place: Launch


class Launches:
    """Kernels of one object on ``device``. Methods: as of ``TorchWork``.

    Args:
        bind: as ``Kernels.bind``.
        programs: of a launch that moves rows.
        num_counts: words of a header behind ``header.COUNTS``.
        headers: whether there are any with static shapes too.
    """

    def __init__(
        self, config: Config, device: torch.device, bind: Callable[..., Launch], programs: int,
        num_counts: int, *, headers: bool,
    ) -> None:  # fmt: skip
        self.config, self.device, self._headers = config, device, headers
        self._bind, self._programs, self._words = bind, programs, head.COUNTS + num_counts
        self._kinds: dict[Any, Any] = {}
        self._said: dict[Any, Tensor] = {}
        self._width = min(config.num_topk, config.world_size)
        with torch.inference_mode(False):
            self._none = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in _DTYPES}
            self._state = torch.zeros(send.STATE_WORDS, dtype=torch.int64, device=device)
            self._told = torch.zeros(config.world_size, dtype=torch.int64, device="cpu")
            self._told = self._told.pin_memory() if device.type == "cuda" else self._told

    def check(self) -> None:
        """Raise if a dispatch without headers was given ids out of range."""
        after, value = host_ints(self._state[BAD_AT : BAD_AT + 2])
        if after:
            self._state[BAD_AT : BAD_AT + 2] = 0
            sizes = self.config.num_topk, self.config.num_experts
            raise ValueError(head.bad_index_text(after - 1, value, *sizes))

    # What leaves

    def given(self, arguments: DispatchArguments) -> Given:
        """As kernels read them; copies live as long as the call."""
        payload, topk_idx, weights, spec, mode, *_ = arguments
        x, scales = payload
        weights = None if weights is None else weights.contiguous()
        scaled = None if scales is None else (scales.dtype, scales.shape[1])
        few, wide = topk_idx.shape[0] <= FEW_TOKENS, topk_idx.dtype is torch.int64
        key = (x.dtype, x.shape[1], scaled, wide, weights is None, spec, mode, few)
        if (kind := self._kinds.get(key)) is None:
            weighted = weights is not None
            kind = self._make(payload, spec, mode, weighted=weighted, wide=wide, few=few)
            self._kinds[key] = kind
        return Given(aligned(payload), topk_idx.contiguous(), weights, spec, kind.row, kind)

    def leave(self, given: Given, fingerprint: Fingerprint | None) -> Left:
        """Launch the plan. ``fingerprint``: of the headers, if there are any."""
        config, kind, tokens = self.config, given.kind, given.topk_idx.shape[0]
        k, ranks, exact = kind.leaving, config.world_size, given.spec.exact
        stride = 0 if exact else config.max_tokens_per_rank
        most = tokens * self._width if exact else ranks * stride
        sizes = send.table_words(k, tokens), send.scratch_words(k), tokens * k.metadata_words
        tables = self._empty(torch.int32, sum(sizes))
        plan = tables.data_ptr()
        left = Left(
            headers=None if fingerprint is None else self._empty(torch.int64, ranks, self._words),
            route=self._empty(torch.int64, most),
            returns=self._empty(torch.int64, tokens, self._width),
            first_pick=self._empty(torch.int64, tokens, config.num_topk),
            send=self._empty(torch.uint8, most, kind.row.row_bytes),
            stride=stride, tables=tables, meta=plan + 4 * (sizes[0] + sizes[1]),
        )  # fmt: skip
        picks = Picks(given.topk_idx.data_ptr(), address(given.weights))
        outputs = PlanOutputs(left.meta, left.first_pick.data_ptr(), 0, 0, 0, 0)
        headers, host, said, call = 0, 0, 0, 0
        if fingerprint is not None:
            headers, host = address(left.headers), self._told.data_ptr()
            said, call = self._said_by(kind, fingerprint).data_ptr(), fingerprint.call
        kind.plan(
            picks, said, self._state.data_ptr(), plan + 4 * sizes[0], plan, outputs, headers, host,
            call, tokens, config.num_experts, stride,
        )  # fmt: skip
        return left

    def pack(self, given: Given, left: Left) -> tuple[Tensor, Tensor]:
        x, scales = given.payload
        given.kind.pack(
            Sent(x.data_ptr(), address(scales), left.meta), left.tables.data_ptr(),
            left.route.data_ptr(), left.returns.data_ptr(), left.send.data_ptr(), x.shape[0],
            left.stride,
        )  # fmt: skip
        return left.send, left.returns

    def counts(self, left: Left) -> tuple[list[int], list[int]]:
        told = host_ints(self._told)
        return told, told

    def pack_again(
        self, payload: Payload, row: RowFormat, mode: Quantize | None, plan: Plan, token: Tensor,
        rows: Tensor,
    ) -> None:  # fmt: skip
        payload = aligned(payload)
        key = ("pack", row, mode, payload.x.dtype)
        if (launch := self._kinds.get(key)) is None:
            flags = {"few": True, "weighted": False, "wide": True, "exact": True}
            k = send.plan_config(self.config, self._words, **flags)
            constants = constants_of(row)
            how = cast_of(constants, mode, payload.x.dtype)
            launch = self._kinds[key] = send.bind_pack(
                self._bind, self._programs, k, constants, how, self._width, fresh=False
            )
        sent = Sent(payload.x.data_ptr(), address(payload.scales), 0)
        launch(sent, 0, 0, plan.returns.data_ptr(), rows.data_ptr(), payload.x.shape[0], 0)

    # What comes

    def arrive(
        self, given: Given, recv: Tensor, headers: Tensor | None, counts: list[int]
    ) -> tuple[Payload, Placement, Arrived]:
        config, spec, kind = self.config, given.spec, given.kind
        came, k = recv.shape[0], kind.coming
        num_rows = num_result_rows(spec, config, counts, came)
        out, placement, arrived = self._results(kind.row, spec, came, num_rows)
        words = place.count_words(k, config.num_local_experts) if k.counted else (0, 0)
        scratch = self._empty(torch.int32, sum(words) + came * k.topk * k.by_expert)
        at = scratch.data_ptr()
        parts = place.Counts(at, at + 4 * sum(words), at + 4 * words[0])
        where, most = (config.rank, config.num_experts), config.max_tokens_per_rank
        told = address(headers)
        if kind.settle is not None:
            _, _, _, per_expert, offsets, ranges, overflow = map(address, arrived)
            kind.settle(
                recv.data_ptr(), told, self._state.data_ptr(), parts,
                PlanOutputs(0, 0, per_expert, offsets, ranges, overflow), *where, most, num_rows,
                spec.expert_alignment,
            )  # fmt: skip
        result = Result(
            rows=out.x.data_ptr(), scales=address(out.scales),
            expert_ids=arrived.topk_idx.data_ptr(), picks=placement.picks.data_ptr(),
            weights=arrived.weights.data_ptr(), source=arrived.source.data_ptr(),
            arrivals=placement.gather.data_ptr(), slots=placement.slots.data_ptr(),
        )  # fmt: skip
        per_expert = arrived.tokens_per_expert.data_ptr()
        kind.place(recv.data_ptr(), told, parts, result, per_expert, *where, came, most, num_rows)
        return out, placement, arrived

    def gather(self, row: RowFormat, recv: Tensor, plan: Plan | None, spec: Spec) -> Payload:
        gather = None if plan is None else plan.gather
        key = ("gather", row, gather is None)
        if (launch := self._kinds.get(key)) is None:
            by_expert, constants = gather is not None, constants_of(row)
            k = place.arrival_config(
                self.config, constants, 0, by_expert=by_expert, padded=False, exact=False
            )
            launch = self._kinds[key] = place.bind_gather(self._bind, self._programs, k)
        num_rows = recv.shape[0] if gather is None else gather.shape[0]
        out = self._rows(row, num_rows)
        result = Result(out.x.data_ptr(), address(out.scales), 0, 0, 0, 0, 0, 0)
        launch(recv.data_ptr(), address(gather), result, num_rows)
        return out

    # Sums

    def sum_here(
        self, row: RowFormat, rows: Tensor, slots: Tensor | None, to: Tensor,
        weights: Tensor | None, reduce_weights: Tensor | None,
    ) -> None:  # fmt: skip
        rows, width = as_aligned(rows), 0 if slots is None else slots.shape[1]
        key = ("here", row, width, slots is None, weights is None)
        if (launch := self._kinds.get(key)) is None:
            flags = {"by_expert": slots is not None, "weighted": weights is not None}
            launch = self._kinds[key] = bind_partial(
                self._bind, self._programs, constants_of(row), row.dtype, width, row.picks, **flags
            )
        given = [None if each is None else as_aligned(each) for each in (weights, reduce_weights)]
        parts = Partials(rows.data_ptr(), address(slots), *map(address, given))
        launch(parts, to.data_ptr(), to.shape[0])

    def sum_there(
        self, row: RowFormat, recv: Tensor, returns: Tensor, bias: tuple[Tensor, ...],
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        bias, (tokens, width) = tuple(map(as_aligned, bias)), returns.shape
        dtypes = tuple(term.dtype for term in bias)
        key = ("there", row, width, dtypes)
        if (launch := self._kinds.get(key)) is None:
            constants = constants_of(row)
            launch = self._kinds[key] = bind_owner(
                self._bind, self._programs, constants, row.dtype, width, row.picks, dtypes
            )
        total = sums_for(self._empty(row.dtype, 0, row.hidden), tokens, out, *bias)
        reduced = self._empty(torch.float32, tokens, row.picks) if row.weighted else None
        sums = Sums(*addresses(bias), total.data_ptr(), address(reduced))
        launch(recv.data_ptr(), returns.data_ptr(), sums, tokens)
        return total if out is None or total is out else out.copy_(total), reduced

    # Kinds of calls, and memory

    def _make(
        self, payload: Payload, spec: Spec, mode: Quantize | None, *, weighted: bool, **plan: bool
    ) -> Kind:
        """Bind the launches of a kind of fresh dispatches."""
        layout, bind = spec.layout, self._bind
        plain = row_of(payload, mode)
        row = replace(plain, picks=self.config.num_topk, routed=True, weighted=weighted)
        constants = constants_of(row)
        how = cast_of(constants, mode, payload.x.dtype)
        plan |= {"weighted": weighted, "exact": spec.exact or self._headers}
        leaving = send.plan_config(self.config, self._words, **plan)
        coming = place.arrival_config(
            self.config, constants, self._words, by_expert=layout is not Layout.FLAT,
            padded=layout is Layout.EXPERT_PADDED, exact=spec.exact, weighted=weighted,
        )  # fmt: skip
        pack = send.bind_pack(
            bind, self._programs, leaving, constants, how, self._width, fresh=True
        )
        settle = place.bind_count(bind, coming) if coming.counted else None
        rows = place.bind_place(bind, self._programs, coming)
        return Kind(row, leaving, coming, send.bind_plan(bind, leaving), pack, settle, rows)

    def _said_by(self, kind: Kind, fingerprint: Fingerprint) -> Tensor:
        """Words of a header of any call of this kind, on the device."""
        if kind.plan not in self._said:
            words = head.words_of(fingerprint, 0)
            self._said[kind.plan] = torch.tensor(words, dtype=torch.int64, device=self.device)
        return self._said[kind.plan]

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        like = self._none.get(dtype)
        if like is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return like.new_empty(shape)  # takes two thirds of the time

    def _rows(self, row: RowFormat, num_rows: int) -> Payload:
        x, scales = self._empty(row.dtype, num_rows, row.hidden), None
        if row.scale_words:
            scales = self._empty(row.scale_dtype, num_rows, row.num_scales)
        return Payload(x, scales)

    def _results(
        self, row: RowFormat, spec: Spec, came: int, num_rows: int
    ) -> tuple[Payload, Placement, Arrived]:
        """What a fresh dispatch returns. What a layout lacks is one shared empty tensor."""
        config = self.config
        local, topk, ranks = config.num_local_experts, config.num_topk, config.world_size
        flat, major = spec.layout is Layout.FLAT, spec.layout is Layout.EXPERT_MAJOR
        longs, ints, floats, empty = torch.int64, torch.int32, torch.float32, self._empty
        per_row = (num_rows, topk) if flat else (num_rows,)
        none, no_ints = self._none[longs], self._none[ints]
        placed = Placement(none, none, none)
        if spec.placed:
            slots = came, 1 if flat else min(topk, local)
            placed = Placement(empty(longs, *slots), empty(longs, *slots), empty(longs, num_rows))
        arrived = Arrived(
            topk_idx=empty(longs, *per_row) if flat else no_ints,
            weights=empty(floats, *per_row) if row.weighted else self._none[floats],
            source=empty(longs, num_rows), tokens_per_expert=empty(ints, local),
            expert_offsets=empty(ints, local + 1) if major else no_ints,
            source_ranges=no_ints if flat or major else empty(ints, local, ranks, 2),
            overflow=no_ints if spec.capacity is None else empty(ints, 1),
        )  # fmt: skip
        return self._rows(row, num_rows), placed, arrived


def constants_of(row: RowFormat) -> RowConstants:
    """A row on the wire as kernels see it."""
    num_bytes = row.payload_bytes
    bits = 32 if num_bytes % 4 == 0 else 16 if num_bytes % 2 == 0 else 8
    return RowConstants(
        hidden=row.hidden, words=num_bytes * 8 // bits, word_bits=bits, scale_words=row.scale_words,
        metadata_words=1 + row.picks * (1 + row.weighted) if row.routed else 0,
        slot_bytes=row.row_bytes, scales_at=4 * row.scales_at, metadata_at=4 * row.routing_at,
    )  # fmt: skip
