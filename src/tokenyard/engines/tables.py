"""Tensors that launches fill: the plan, and what rides along with rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.handle import Arrived, Plan
from tokenyard.kernels.plan import PlanTables
from tokenyard.kernels.structs import Payload as Sent
from tokenyard.kernels.structs import Result
from tokenyard.rows import Payload
from tokenyard.types import Layout

if TYPE_CHECKING:
    from tokenyard.engines.signatures import Signature


class Counted(NamedTuple):
    """What the plan's launch fills."""

    route: Tensor
    meta: Tensor
    first_pick: Tensor
    tokens_per_expert: Tensor
    offsets: Tensor
    ranges: Tensor
    overflow: Tensor


class Counts(NamedTuple):
    """What the host learns of a dispatch with exact shapes."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    experts: Any  # rows of each local expert: a numpy array of int64
    routing: int  # digest of all ranks' routing


class Ahead(NamedTuple):
    """What the next fresh dispatch like this one needs, made while the host waits anyway:
    allocations delay a launch.
    """

    # tokens, words of the plan, stream, whether for inference: the call must agree
    where: tuple[int, ...]
    room: int  # rows that ``arrived`` has
    counted: Counted
    arrived: Arrived


class Blank(NamedTuple):
    """Tables of one kind of static call as they begin, side by side.

    Their sizes never change, so a call copies the block and looks at it in parts: one launch.
    To fill them one by one took six, a third of the host time of the call
    (``docs/benchmarks/experiments-nvlink.md``, Host time).
    """

    words: Tensor  # of all tables, int64
    # dtype, shape, strides and offset of each table, in its elements
    parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]

    @staticmethod
    def of(tables: list[Tensor]) -> Blank:
        """``tables`` have elements of 4 or 8 bytes, and nothing written to them yet."""
        words: list[Tensor] = []
        parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        at = 0  # in bytes
        for table in tables:
            size = table.dtype.itemsize
            parts.append((table.dtype, tuple(table.shape), table.stride(), at // size))
            flat = table.reshape(-1)
            flat = torch.cat([flat, flat.new_zeros(-flat.numel() * size % 8 // size)])
            words.append(flat.view(torch.int64))
            at += flat.numel() * size
        return Blank(torch.cat(words), parts)

    def copies(self) -> list[Tensor]:
        """New tables, which share memory with each other alone."""
        words = self.words.clone()
        by_dtype = {torch.int64: words}
        tables: list[Tensor] = []
        for dtype, shape, stride, offset in self.parts:
            if dtype not in by_dtype:
                by_dtype[dtype] = words.view(dtype)
            tables.append(by_dtype[dtype].as_strided(shape, stride, offset))
        return tables


class Table(NamedTuple):
    """A tensor to make, if it has a shape. ``hole``: what unwritten places hold, if ``holey``."""

    dtype: torch.dtype
    hole: int
    shape: tuple[int, ...] | None
    holey: bool = False


def sent_of(payload: Payload, meta: Tensor | None = None) -> Sent:
    """Addresses of what a dispatch sends."""
    scales = 0 if payload.scales is None else payload.scales.data_ptr()
    return Sent(payload.x.data_ptr(), scales, 0 if meta is None else meta.data_ptr())


def filled_of(counted: Counted) -> PlanTables:
    """Addresses of what the plan's launch fills, besides the plan."""
    _, *tables = counted
    return PlanTables(*(each.data_ptr() for each in tables))


def result_of(out: Payload, plan: Plan, arrived: Arrived | None = None) -> Result:
    """Addresses of what a dispatch fills; of a cached one, where its rows go only."""
    rows, scales = out.x.data_ptr(), 0 if out.scales is None else out.scales.data_ptr()
    if arrived is None:
        return Result(rows, scales, 0, 0, 0, 0, 0, plan.slots.data_ptr())
    return Result(
        rows=rows,
        scales=scales,
        expert_ids=arrived.topk_idx.data_ptr(),
        picks=plan.picks.data_ptr(),
        weights=arrived.weights.data_ptr(),
        source=arrived.source.data_ptr(),
        arrivals=plan.gather.data_ptr(),
        slots=plan.slots.data_ptr(),
    )


class Tables:
    """Makes tensors on one device. What a layout lacks is one shared empty tensor."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._topk, self._ranks = config.num_topk, config.world_size
        self._local, self._device = config.num_local_experts, device
        dtypes = torch.int64, torch.int32, torch.float32
        self._none = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in dtypes}
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=device)
        if device.type == "cuda":
            self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore

    def counted(self, kind: Signature, tokens: int, route_words: int) -> Counted:
        """For the plan's launch."""
        if kind.ahead is not None and kind.ahead.where == self._where(tokens, route_words):
            return kind.ahead.counted
        return self._counted(kind, tokens, route_words)

    def make_ahead(self, kind: Signature, tokens: int, route_words: int, room: int) -> None:
        """In the current stream, make the tables of a call that may follow, of ``room`` rows."""
        with suppress(RuntimeError):  # short of memory, say: then the next call tells
            counted = self._counted(kind, tokens, route_words)
            arrived = _with_counts(self._each(self._arrived_tables(kind, room)), counted)
            kind.ahead = Ahead(self._where(tokens, route_words), room, counted, arrived)

    def _where(self, tokens: int, route_words: int) -> tuple[int, ...]:
        stream = self._stream(self._device.index) if self._device.type == "cuda" else 0
        return tokens, route_words, stream, torch.is_inference_mode_enabled()

    def _counted(self, kind: Signature, tokens: int, route_words: int) -> Counted:
        ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        none, layout, local = self._none[torch.int32], kind.spec.layout, self._local
        return Counted(
            route=ints(route_words),
            meta=ints(tokens * kind.form.meta_words),
            first_pick=torch.empty(tokens, self._topk, dtype=torch.int64, device=self._device),
            tokens_per_expert=ints(local),
            offsets=ints(local + 1) if layout is Layout.EXPERT_MAJOR else none,
            ranges=ints(local, self._ranks, 2) if layout is Layout.EXPERT_PADDED else none,
            overflow=none if kind.spec.capacity is None else ints(1),
        )

    def results(
        self, kind: Signature, counted: Counted, arrived_rows: int, num_rows: int
    ) -> tuple[Plan, Arrived]:
        """The plan without its counts on the host, and what rides along with rows. Rows without a
        source say so beforehand; kernels write the others.
        """
        ahead, kind.ahead = kind.ahead, None
        if kind.blank is not None:
            slots, picks, gather, *rest = kind.blank.copies()
            arrived = _with_counts(rest, counted)
        elif ahead is not None and ahead.counted is counted and ahead.room == num_rows:
            slots, picks, gather = self._each(_plan_tables(kind, arrived_rows, num_rows))
            arrived = ahead.arrived
        else:
            wanted = _plan_tables(kind, arrived_rows, num_rows)
            made = self._each(wanted + self._arrived_tables(kind, num_rows))
            slots, picks, gather, *rest = made
            arrived = _with_counts(rest, counted)
            if not kind.spec.exact and not _captures(self._device):  # else filled in replays only
                kind.blank = Blank.of(made)
        return Plan(
            splits=self._none[torch.int64],
            route=counted.route,
            returns=self._no_returns,
            slots=slots,
            picks=picks,
            gather=gather,
            first_pick=counted.first_pick,
        ), arrived

    def _arrived_tables(self, kind: Signature, num_rows: int) -> list[Table]:
        """Ids, weights and source tokens of result rows."""
        shape = (num_rows,) if kind.experts else (num_rows, self._topk)
        no_ids, no_weights = kind.experts, not kind.weighted
        return [
            Table(torch.int32, 0, None) if no_ids else Table(torch.int64, -1, shape, kind.holes),
            Table(torch.float32, 0, None if no_weights else shape, kind.holes),
            Table(torch.int64, -1, (num_rows,), kind.holes),
        ]

    def _each(self, wanted: list[Table]) -> list[Tensor]:
        device = self._device
        return [
            self._none[dtype]
            if shape is None
            else torch.full(shape, hole, dtype=dtype, device=device)
            if holey
            else torch.empty(*shape, dtype=dtype, device=device)
            for dtype, hole, shape, holey in wanted
        ]


def _plan_tables(kind: Signature, arrived_rows: int, num_rows: int) -> list[Table]:
    """Slots, picks and the gather of a plan."""
    static, placed = not kind.spec.exact, kind.spec.placed
    shape = (arrived_rows, kind.width) if placed else None
    return [
        Table(torch.int64, -1, shape, static),
        Table(torch.int64, 0, shape, static),
        Table(torch.int64, -1, (num_rows,) if placed else None, kind.holes),
    ]


def _with_counts(tables: list[Tensor], counted: Counted) -> Arrived:
    topk_idx, weights, source = tables
    return Arrived(
        topk_idx=topk_idx,
        weights=weights,
        source=source,
        tokens_per_expert=counted.tokens_per_expert,
        expert_offsets=counted.offsets,
        source_ranges=counted.ranges,
        overflow=counted.overflow,
    )


def _captures(device: torch.device) -> bool:
    """Whether what is asked of ``device`` now is kept in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
