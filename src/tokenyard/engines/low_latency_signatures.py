"""Call signatures of engine ``low_latency``. What does not depend on the data of a call is worked
out once per signature, because a call should cost the host as little as it can."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.engines.low_latency_workspace import Workspace, kept_words, metadata_words
from tokenyard.engines.plans import num_result_rows
from tokenyard.engines.rings import row_layout_of
from tokenyard.errors import NotSupported
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import COMBINE, DISPATCH, CallKind, Fingerprint, fingerprint_of
from tokenyard.kernels.low_latency_combine import bind_combine
from tokenyard.kernels.low_latency_dispatch import bind_dispatch
from tokenyard.kernels.low_latency_refuse import low_refuse_kernel  # pyright: ignore
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

Launch = Callable[..., None]
Rows = tuple[Payload, Plan, Arrived]


@dataclass(slots=True, eq=False, kw_only=True)
class DispatchSignature:
    """What dispatches of one signature share. Tensors are outlines of results, views of one
    element: ``empty_like`` takes half of ``empty``."""

    tags: tuple[int, int]  # what a call tells the other ranks, without weights and with them
    padded: bool  # whether experts have blocks of one size
    num_rows: int  # of the result
    x: Tensor
    scales: Tensor | None
    scale_strides: tuple[int, ...] | None  # of scales by column, else None
    blocks: Tensor  # source_ranges or expert_offsets
    weights: Tensor
    source: Tensor
    tokens_per_expert: Tensor
    overflow: Tensor | None
    route: Tensor
    launch: Callable[..., Launch]  # (wide, weighted, load_bytes, stages); each made once


@dataclass(slots=True, eq=False, kw_only=True)
class CombineSignature:
    """What combines of one signature share."""

    # what a call tells the other ranks, which dispatch aside: without the owner's weights, and with
    numbers: tuple[int, int]
    launch: Callable[..., Launch]  # (weighted, bias, lost, stages); each made once

    def tag(self, at_owner: bool, number: int) -> int:
        """What a combine of dispatch ``number`` tells others. ``at_owner``: weights are there."""
        return _tag(zlib.crc32(number.to_bytes(8, "little"), self.numbers[at_owner]))


class Signatures:
    """The call signatures of one object, and the tensors that its dispatches return. A signature is
    kept if such calls can be made.

    Attributes:
        refuse: the launch of a call to which this rank brings nothing; loaded now, so that it is
            not late.
        route_shape: of ``Plan.route``: ids and weights of the picks of M tokens, then result rows
            of each slot ``[R * M, K]``; if ranks are far, then the tokens' numbers for the ranks of
            their picks.
    """

    def __init__(self, config: Config, workspace: Workspace) -> None:
        self._config, self._workspace = config, workspace
        self._device = workspace.memory.device
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._ones: dict[torch.dtype, Tensor] = {}
        # what a layout lacks, one for all results (operators own theirs, see ``ops``)
        self._floats, self._ints, self._longs = (
            torch.empty(0, dtype=dtype, device=self._device)
            for dtype in (torch.float32, torch.int32, torch.int64)
        )
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=self._device)
        self._splits: Any = np.full(2 * config.world_size + 1, -1)
        tokens = (3 if workspace.sizes.far else 2) * config.max_tokens_per_rank
        self.route_shape = tokens + config.padded_rows, config.num_topk
        self.refuse = workspace.bind(low_refuse_kernel, workspace.sizes)

    def dispatch(
        self, payload: Payload, spec: Spec, mode: Quantize | None, by_column: bool = False
    ) -> DispatchSignature:
        """The signature of a dispatch. ``by_column``: ``CallOptions.scales_by_column``. Raises
        NotSupported, which names the engine that can, or ValueError: rows do not fit into slots, or
        have no scales in blocks."""
        scales = payload.scales
        given = None if scales is None else (scales.dtype, scales.shape[1])
        call = payload.x.dtype, given, mode, by_column
        key = (*call, spec.layout, spec.exact, spec.expert_alignment, spec.capacity)
        signature = self._kept.get(key)
        if signature is None:
            signature = self._kept[key] = self._new_dispatch(payload, spec, mode, by_column)
        return signature

    def combine(self, rows: Tensor, spec: Spec) -> CombineSignature:
        """The signature of a combine. ValueError: rows do not fit into slots."""
        key = (rows.dtype, spec.layout, spec.exact, spec.expert_alignment, spec.capacity)
        signature = self._kept.get(key)
        if signature is None:
            payload, workspace = Payload(rows, None), self._workspace
            words = kept_words(self._config.num_topk, spec, workspace.per_node > 0)
            row = row_layout_of(payload, None, words)
            workspace.check_fits(row, f"rows of {rows.dtype} x {rows.shape[1]}")
            here, at_owner = (
                _number(fingerprint_of(CallKind(COMBINE, payload, spec, None, False, at_owner)))
                for at_owner in (False, True)
            )
            launch = cache(partial(bind_combine, workspace, rows.dtype, row))
            signature = CombineSignature(numbers=(here, at_owner), launch=launch)
            self._kept[key] = signature
        return signature

    def results(
        self, likes: DispatchSignature, topk_idx: Tensor, weighted: bool, number: int
    ) -> Rows:
        """What dispatch ``number`` of this object returns, still to be filled."""
        like, ints = torch.empty_like, self._ints
        blocks, scales, padded = like(likes.blocks), likes.scales, likes.padded
        if scales is not None and (strides := likes.scale_strides) is not None:
            scales = scales.new_empty_strided(scales.shape, strides)
        elif scales is not None:
            scales = like(scales)
        arrived = Arrived(
            topk_idx=ints,
            weights=like(likes.weights) if weighted else self._floats,
            source=like(likes.source),
            tokens_per_expert=like(likes.tokens_per_expert),
            expert_offsets=ints if padded else blocks,
            source_ranges=blocks if padded else ints,
            overflow=ints if likes.overflow is None else like(likes.overflow),
        )
        splits = self._splits.copy()
        splits[-1] = number
        plan = Plan(
            splits=torch.from_numpy(splits),  # pyright: ignore[reportUnknownMemberType]
            route=like(likes.route),
            returns=self._no_returns,
            slots=ints,
            picks=self._longs,
            gather=self._longs,
            first_pick=like(topk_idx, dtype=torch.int64),
        )
        return Payload(like(likes.x), scales), plan, arrived

    def _new_dispatch(
        self, payload: Payload, spec: Spec, mode: Quantize | None, by_column: bool
    ) -> DispatchSignature:
        if spec.exact or spec.layout is Layout.FLAT:
            asked = f"exact={spec.exact} with Layout.{spec.layout.name}"
            raise NotSupported(
                f"engine 'low_latency' has exact=False with Layout.EXPERT_PADDED or EXPERT_MAJOR "
                f"only, not {asked}; engines 'nvlink' and 'collective' have"
            )
        config, workspace = self._config, self._workspace
        row = row_layout_of(payload, mode, metadata_words(config.num_topk, workspace.far))
        padded, dtype = spec.layout is Layout.EXPERT_PADDED, payload.x.dtype
        sent = row_of(payload, mode)
        if by_column and not (padded and sent.scale_words and sent.scale_dtype.itemsize == 4):
            has = f"Layout.{spec.layout.name} and scales of {sent.scale_dtype}"
            has = has if sent.scale_words else "no scales"
            raise ValueError(
                f"options.scales_by_column needs scales and Layout.EXPERT_PADDED, but this "
                f"dispatch has {has}: leave it out"
            )
        by_column = by_column and row.scale_words > 1  # see ``results.by_column``
        workspace.check_fits(row, f"rows of {dtype} x {payload.x.shape[1]}")
        scaled = payload.scales is not None
        plain, weighted = (
            _tag(_number(fingerprint_of(CallKind(DISPATCH, payload, spec, mode, weighted, scaled))))
            for weighted in (False, True)
        )
        local, ints, outline = config.num_local_experts, torch.int32, self._outline
        num_rows, columns = num_result_rows(spec, config, None, 0), config.padded_rows
        # as Received has them: to view a tensor takes as long as to make one
        rows = (local, columns) if padded else (num_rows,)
        return DispatchSignature(
            tags=(plain, weighted),
            padded=padded,
            num_rows=num_rows,
            x=outline(sent.dtype, *rows, sent.hidden),
            scales=outline(sent.scale_dtype, *rows, sent.num_scales) if sent.scale_words else None,
            scale_strides=(sent.scale_words * columns, 1, columns) if by_column else None,
            blocks=outline(ints, *((local, config.world_size, 2) if padded else (local + 1,))),
            weights=outline(torch.float32, num_rows),
            source=outline(torch.int64, *rows),
            tokens_per_expert=outline(ints, local),
            overflow=None if spec.capacity is None else outline(ints, 1),
            route=outline(ints, *self.route_shape),
            launch=cache(partial(bind_dispatch, workspace, row, mode, dtype, spec, by_column)),
        )

    def _outline(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if 0 in shape:  # an expanded one would not be dense
            return torch.empty(shape, dtype=dtype, device=self._device)
        one = torch.empty(1, dtype=dtype, device=self._device)
        return self._ones.setdefault(dtype, one).expand(shape)


def _number(fingerprint: Fingerprint) -> int:
    return zlib.crc32(repr(fingerprint).encode())


def _tag(number: int) -> int:
    """24 bits, not 0, that differ where calls differ."""
    return number % (2**24 - 1) + 1
