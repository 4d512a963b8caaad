"""Tensors that the plan's launch and the rows' launch fill: the plan, and what rides along with rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.engines.kinds import Kind
from tokenyard.handle import Arrived, Plan
from tokenyard.types import Layout


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


class Tables:
    """Makes tensors on one device. What a layout lacks is one shared empty tensor (operators own theirs, see ``ops``)."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._topk, self._ranks, self._local = config.num_topk, config.world_size, config.num_local_experts
        self._device = device
        self._none = {
            kind: torch.empty(0, dtype=kind, device=device) for kind in (torch.int64, torch.int32, torch.float32)
        }
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=device)

    def counted(self, kind: Kind, tokens: int, route_words: int) -> Counted:
        """For the plan's launch."""
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

    def arrived(self, kind: Kind, counted: Counted, num_rows: int) -> Arrived:
        """For what rides along. Rows without a source say so beforehand; kernels write the others."""
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
