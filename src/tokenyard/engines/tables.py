"""Tensors that the plan's launch and the rows' launch fill: the plan, and what rides along with rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.handle import Arrived, Plan
from tokenyard.types import Layout

if TYPE_CHECKING:
    from tokenyard.engines.kinds import Kind


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
    """What the next fresh dispatch like this one needs, made while the host waits anyway: allocations delay a launch.

    Attributes:
        where: tokens, words of the plan, stream, and whether tensors are inference tensors: the call must agree.
        room: rows that ``arrived`` has.
    """

    where: tuple[int, ...]
    room: int
    counted: Counted
    arrived: Arrived


class Tables:
    """Makes tensors on one device. What a layout lacks is one shared empty tensor (operators own theirs, see ``ops``)."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._topk, self._ranks, self._local = config.num_topk, config.world_size, config.num_local_experts
        self._device = device
        self._none = {
            kind: torch.empty(0, dtype=kind, device=device) for kind in (torch.int64, torch.int32, torch.float32)
        }
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=device)
        if device.type == "cuda":
            self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore

    def counted(self, kind: Kind, tokens: int, route_words: int) -> Counted:
        """For the plan's launch."""
        if kind.ahead is not None and kind.ahead.where == self._where(tokens, route_words):
            return kind.ahead.counted
        return self._counted(kind, tokens, route_words)

    def arrived(self, kind: Kind, counted: Counted, num_rows: int) -> Arrived:
        """For what rides along. Rows without a source say so beforehand; kernels write the others."""
        ahead, kind.ahead = kind.ahead, None
        if ahead is not None and ahead.counted is counted and ahead.room == num_rows:
            return ahead.arrived
        return self._arrived(kind, counted, num_rows)

    def make_ahead(self, kind: Kind, tokens: int, route_words: int, room: int) -> None:
        """Make the tables of a call that may follow, in the current stream, if results have ``room`` rows again."""
        with suppress(RuntimeError):  # short of memory, say: then the next call tells
            counted = self._counted(kind, tokens, route_words)
            kind.ahead = Ahead(self._where(tokens, route_words), room, counted, self._arrived(kind, counted, room))

    def _where(self, tokens: int, route_words: int) -> tuple[int, ...]:
        stream = self._stream(self._device.index) if self._device.type == "cuda" else 0
        return tokens, route_words, stream, torch.is_inference_mode_enabled()

    def _counted(self, kind: Kind, tokens: int, route_words: int) -> Counted:
        device, none, layout = self._device, self._none[torch.int32], kind.spec.layout
        return Counted(
            route=torch.empty(route_words, dtype=torch.int32, device=device),
            meta=torch.empty(tokens * kind.form.meta_words, dtype=torch.int32, device=device),
            first_pick=torch.empty(tokens, self._topk, dtype=torch.int64, device=device),
            tokens_per_expert=torch.empty(self._local, dtype=torch.int32, device=device),
            offsets=none
            if layout is not Layout.EXPERT_MAJOR
            else torch.empty(self._local + 1, dtype=torch.int32, device=device),
            ranges=none
            if layout is not Layout.EXPERT_PADDED
            else torch.empty(self._local, self._ranks, 2, dtype=torch.int32, device=device),
            overflow=none if kind.spec.capacity is None else torch.empty(1, dtype=torch.int32, device=device),
        )

    def _arrived(self, kind: Kind, counted: Counted, num_rows: int) -> Arrived:
        none, shape = self._none, (num_rows,) if kind.experts else (num_rows, self._topk)
        return Arrived(
            topk_idx=none[torch.int32] if kind.experts else self._table(torch.int64, -1, kind.holes, *shape),
            weights=self._table(torch.float32, 0, kind.holes, *shape) if kind.weighted else none[torch.float32],
            source=self._table(torch.int64, -1, kind.holes, num_rows),
            tokens_per_expert=counted.tokens_per_expert,
            expert_offsets=counted.offsets,
            source_ranges=counted.ranges,
            overflow=counted.overflow,
        )

    def plan(self, kind: Kind, counted: Counted, arrived_rows: int, num_rows: int) -> Plan:
        """The plan without its counts on the host."""
        long, static, shape = torch.int64, not kind.spec.exact, (arrived_rows, kind.width)
        placed, none = kind.spec.placed, self._none[torch.int64]
        return Plan(
            splits=self._none[long],
            route=counted.route,
            returns=self._no_returns,
            slots=self._table(long, -1, static, *shape) if placed else none,
            picks=self._table(long, 0, static, *shape) if placed else none,
            gather=self._table(long, -1, kind.holes, num_rows) if placed else none,
            first_pick=counted.first_pick,
        )

    def _table(self, dtype: torch.dtype, hole: float, holey: bool, *shape: int) -> Tensor:
        if holey:
            return torch.full(shape, hole, dtype=dtype, device=self._device)
        return torch.empty(*shape, dtype=dtype, device=self._device)
