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
from tokenyard.kernels.plan import PlanOutputs
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
    """Outputs of one signature of static calls as they begin, side by side.

    Their sizes never change, so a call copies the block and looks at it in parts: one launch.
    To fill them one by one took six, a third of the host time of the call
    (``docs/benchmarks/experiments-nvlink.md``, Host time).
    """

    words: Tensor  # of all outputs, int64
    # dtype, shape, strides and offset of each output, in its elements
    parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]

    @staticmethod
    def of(outputs: list[Tensor]) -> Blank:
        """``outputs`` have elements of 4 or 8 bytes, and nothing written to them yet."""
        words: list[Tensor] = []
        parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        at = 0  # in bytes
        for output in outputs:
            size = output.dtype.itemsize
            parts.append((output.dtype, tuple(output.shape), output.stride(), at // size))
            flat = output.reshape(-1)
            flat = torch.cat([flat, flat.new_zeros(-flat.numel() * size % 8 // size)])
            words.append(flat.view(torch.int64))
            at += flat.numel() * size
        return Blank(torch.cat(words), parts)

    def copies(self) -> list[Tensor]:
        """New outputs, which share memory with each other alone."""
        words = self.words.clone()
        by_dtype = {torch.int64: words}
        outputs: list[Tensor] = []
        for dtype, shape, stride, offset in self.parts:
            if dtype not in by_dtype:
                by_dtype[dtype] = words.view(dtype)
            outputs.append(by_dtype[dtype].as_strided(shape, stride, offset))
        return outputs


class Output(NamedTuple):
    """A tensor to make, if it has a shape. ``hole``: what unwritten places hold, if ``holey``."""

    dtype: torch.dtype
    hole: int
    shape: tuple[int, ...] | None
    holey: bool = False


def sent_of(payload: Payload, meta: Tensor | None = None) -> Sent:
    """Addresses of what a dispatch sends."""
    scales = 0 if payload.scales is None else payload.scales.data_ptr()
    return Sent(payload.x.data_ptr(), scales, 0 if meta is None else meta.data_ptr())


def filled_of(counted: Counted) -> PlanOutputs:
    """Addresses of what the plan's launch fills, besides the plan."""
    _, *outputs = counted
    return PlanOutputs(*(each.data_ptr() for each in outputs))


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


class Outputs:
    """Makes tensors on one device. What a layout lacks is one shared empty tensor."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._topk, self._ranks = config.num_topk, config.world_size
        self._local, self._device = config.num_local_experts, device
        dtypes = torch.int64, torch.int32, torch.float32
        self._none = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in dtypes}
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=device)
        if device.type == "cuda":
            self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore

    def counted(self, signature: Signature, tokens: int, route_words: int) -> Counted:
        """For the plan's launch."""
        if signature.ahead is not None and signature.ahead.where == self._where(
            tokens, route_words
        ):
            return signature.ahead.counted
        return self._counted(signature, tokens, route_words)

    def make_ahead(self, signature: Signature, tokens: int, route_words: int, room: int) -> None:
        """In the current stream, make the outputs of a call that may follow, of ``room`` rows."""
        with suppress(RuntimeError):  # short of memory, say: then the next call tells
            counted = self._counted(signature, tokens, route_words)
            arrived = _with_counts(self._each(self._arrived_outputs(signature, room)), counted)
            signature.ahead = Ahead(self._where(tokens, route_words), room, counted, arrived)

    def _where(self, tokens: int, route_words: int) -> tuple[int, ...]:
        stream = self._stream(self._device.index) if self._device.type == "cuda" else 0
        return tokens, route_words, stream, torch.is_inference_mode_enabled()

    def _counted(self, signature: Signature, tokens: int, route_words: int) -> Counted:
        ints = partial(torch.empty, dtype=torch.int32, device=self._device)
        none, layout, local = self._none[torch.int32], signature.spec.layout, self._local
        return Counted(
            route=ints(route_words),
            meta=ints(tokens * signature.row_layout.meta_words),
            first_pick=torch.empty(tokens, self._topk, dtype=torch.int64, device=self._device),
            tokens_per_expert=ints(local),
            offsets=ints(local + 1) if layout is Layout.EXPERT_MAJOR else none,
            ranges=ints(local, self._ranks, 2) if layout is Layout.EXPERT_PADDED else none,
            overflow=none if signature.spec.capacity is None else ints(1),
        )

    def results(
        self, signature: Signature, counted: Counted, arrived_rows: int, num_rows: int
    ) -> tuple[Plan, Arrived]:
        """The plan without its counts on the host, and what rides along with rows. Rows without a
        source say so beforehand; kernels write the others.
        """
        ahead, signature.ahead = signature.ahead, None
        if signature.blank is not None:
            slots, picks, gather, *rest = signature.blank.copies()
            arrived = _with_counts(rest, counted)
        elif ahead is not None and ahead.counted is counted and ahead.room == num_rows:
            slots, picks, gather = self._each(_plan_outputs(signature, arrived_rows, num_rows))
            arrived = ahead.arrived
        else:
            wanted = _plan_outputs(signature, arrived_rows, num_rows)
            made = self._each(wanted + self._arrived_outputs(signature, num_rows))
            slots, picks, gather, *rest = made
            arrived = _with_counts(rest, counted)
            if not signature.spec.exact and not _captures(
                self._device
            ):  # else filled in replays only
                signature.blank = Blank.of(made)
        return Plan(
            splits=self._none[torch.int64],
            route=counted.route,
            returns=self._no_returns,
            slots=slots,
            picks=picks,
            gather=gather,
            first_pick=counted.first_pick,
        ), arrived

    def _arrived_outputs(self, signature: Signature, num_rows: int) -> list[Output]:
        """Ids, weights and source tokens of result rows."""
        shape = (num_rows,) if signature.experts else (num_rows, self._topk)
        no_ids, no_weights = signature.experts, not signature.weighted
        return [
            Output(torch.int32, 0, None)
            if no_ids
            else Output(torch.int64, -1, shape, signature.holes),
            Output(torch.float32, 0, None if no_weights else shape, signature.holes),
            Output(torch.int64, -1, (num_rows,), signature.holes),
        ]

    def _each(self, wanted: list[Output]) -> list[Tensor]:
        device = self._device
        return [
            self._none[dtype]
            if shape is None
            else torch.full(shape, hole, dtype=dtype, device=device)
            if holey
            else torch.empty(*shape, dtype=dtype, device=device)
            for dtype, hole, shape, holey in wanted
        ]


def _plan_outputs(signature: Signature, arrived_rows: int, num_rows: int) -> list[Output]:
    """Slots, picks and the gather of a plan."""
    static, placed = not signature.spec.exact, signature.spec.placed
    shape = (arrived_rows, signature.width) if placed else None
    return [
        Output(torch.int64, -1, shape, static),
        Output(torch.int64, 0, shape, static),
        Output(torch.int64, -1, (num_rows,) if placed else None, signature.holes),
    ]


def _with_counts(outputs: list[Tensor], counted: Counted) -> Arrived:
    topk_idx, weights, source = outputs
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
