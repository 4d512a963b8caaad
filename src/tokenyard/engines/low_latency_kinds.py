"""What all calls of one kind share in engine ``low_latency``, worked out once: a call should cost
the host as little as it can.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.engines.arrival import num_result_rows
from tokenyard.engines.low_latency_ground import Ground, kept_words, meta_words
from tokenyard.engines.low_latency_launches import Launch
from tokenyard.engines.rings import Form, form_of
from tokenyard.errors import NotSupported
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import COMBINE, DISPATCH, Fingerprint, fingerprint_of
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

Rows = tuple[Payload, Plan, Arrived]


class Outlines(NamedTuple):
    """Shapes and dtypes of what a dispatch returns: views of one element, as ``empty_like`` takes
    half the time of ``empty``.
    """

    x: Tensor
    scales: Tensor | None
    scale_strides: tuple[int, ...] | None  # of scales by column, else None
    blocks: Tensor  # source_ranges or expert_offsets
    weights: Tensor
    source: Tensor
    tokens_per_expert: Tensor
    overflow: Tensor | None
    route: Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class DispatchKind:
    """One kind of dispatch.

    Attributes:
        form: of a row in a slot.
        tags: what it tells the others, without weights and with them.
        padded: whether experts have blocks of one size.
        by_column: whether scales lie column by column in these, and are more than one.
        num_rows: of the result.
        launches: once they were needed, by all that a kind has several for.
    """

    form: Form
    tags: tuple[int, int]
    padded: bool
    by_column: bool
    num_rows: int
    outlines: Outlines
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict[tuple[Any, ...], Launch])


@dataclass(slots=True, eq=False, kw_only=True)
class CombineKind:
    """One kind of combine.

    Attributes: kept: bytes of a sum before its list of picks; 0: it has none. numbers: of what it
    tells the others, which dispatch aside: without the owner's weights, and with them. launches: as
    in :class:`DispatchKind`.
    """

    kept: int
    numbers: tuple[int, int]
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict[tuple[Any, ...], Launch])

    def tag(self, at_owner: bool, number: int) -> int:
        """What a combine of dispatch ``number`` tells the others. ``at_owner``: weights travel
        ahead.
        """
        return _tag(zlib.crc32(number.to_bytes(8, "little"), self.numbers[at_owner]))


class Kinds:
    """The kinds of calls of one object, and the tensors that its dispatches return. A kind is kept
    if such calls can be made.

    Attributes: route_shape: of ``Plan.route``: ids and weights of the picks of M tokens, then
    result rows of each slot ``[R * M, K]``. slots_at: bytes before the latter.
    """

    def __init__(self, config: Config, ground: Ground) -> None:
        self._config, self._ground, self._device = config, ground, ground.memory.device
        self._dispatches: dict[tuple[Any, ...], DispatchKind] = {}
        self._combines: dict[tuple[Any, ...], CombineKind] = {}
        self._ones: dict[torch.dtype, Tensor] = {}
        # what a layout lacks, one for all results (operators own theirs, see ``ops``)
        self._floats, self._ints, self._longs = (
            torch.empty(0, dtype=dtype, device=self._device)
            for dtype in (torch.float32, torch.int32, torch.int64)
        )
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=self._device)
        self._splits: Any = np.full(2 * config.world_size + 1, -1)
        ways = 2 * config.max_tokens_per_rank
        self.route_shape = (ways + config.padded_rows, config.num_topk)
        self.slots_at = 4 * ways * config.num_topk

    def dispatch(
        self, payload: Payload, spec: Spec, mode: Quantize | None, by_column: bool = False
    ) -> DispatchKind:
        """The kind of a dispatch. ``by_column``: ``CallOptions.scales_by_column``.

        Raises: NotSupported: names the engine that can. ValueError: rows do not fit into slots, or
        have no scales in blocks.
        """
        scales = payload.scales
        given = None if scales is None else (scales.dtype, scales.shape[1])
        key = (
            payload.x.dtype,
            given,
            mode,
            spec.layout,
            spec.exact,
            spec.expert_alignment,
            spec.capacity,
            by_column,
        )
        kind = self._dispatches.get(key)
        if kind is None:
            kind = self._dispatches[key] = self._new_dispatch(payload, spec, mode, by_column)
        return kind

    def combine(self, rows: Tensor, spec: Spec) -> CombineKind:
        """The kind of a combine.

        Raises:
            ValueError: rows do not fit into slots.
        """
        key = (rows.dtype, spec.layout, spec.exact, spec.expert_alignment, spec.capacity)
        kind = self._combines.get(key)
        if kind is None:
            kind = self._combines[key] = self._new_combine(rows, spec)
        return kind

    def results(self, kind: DispatchKind, topk_idx: Tensor, weighted: bool, number: int) -> Rows:
        """What dispatch ``number`` of this object returns, still to be filled."""
        like, likes, ints = torch.empty_like, kind.outlines, self._ints
        blocks, scales = like(likes.blocks), likes.scales
        if scales is not None:
            strides = likes.scale_strides
            scales = (
                like(scales) if strides is None else scales.new_empty_strided(scales.shape, strides)
            )
        arrived = Arrived(
            topk_idx=ints,
            weights=like(likes.weights) if weighted else self._floats,
            source=like(likes.source),
            tokens_per_expert=like(likes.tokens_per_expert),
            expert_offsets=ints if kind.padded else blocks,
            source_ranges=blocks if kind.padded else ints,
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
    ) -> DispatchKind:
        if spec.exact or spec.layout is Layout.FLAT:
            asked = f"exact={spec.exact} with Layout.{spec.layout.name}"
            raise NotSupported(
                f"engine 'low_latency' has exact=False with Layout.EXPERT_PADDED or EXPERT_MAJOR "
                f"only, not {asked}; "
                "engines 'nvlink' and 'collective' have"
            )
        form = form_of(payload, mode, meta_words(self._config.num_topk))
        padded = spec.layout is Layout.EXPERT_PADDED
        if by_column and not (padded and form.scale_words):
            has = f"Layout.{spec.layout.name}" if form.scale_words else "no scales"
            raise ValueError(
                f"options.scales_by_column needs scales and Layout.EXPERT_PADDED, but this "
                f"dispatch has {has}: leave it out"
            )
        by_column = by_column and form.scale_words > 1  # see ``results.by_column``
        self._ground.check_fits(form, f"rows of {payload.x.dtype} x {payload.x.shape[1]}")
        scaled = payload.scales is not None
        prints = (
            fingerprint_of(DISPATCH, 0, payload, spec, mode, weighted, 0, scaled)
            for weighted in (False, True)
        )
        plain, weighted = (_tag(_number(each)) for each in prints)
        return DispatchKind(
            form=form,
            tags=(plain, weighted),
            padded=padded,
            by_column=by_column,
            num_rows=num_result_rows(spec, self._config, None, 0),
            outlines=self._outlines(payload, spec, mode, form, by_column),
        )

    def _outlines(
        self, payload: Payload, spec: Spec, mode: Quantize | None, form: Form, by_column: bool
    ) -> Outlines:
        config, num_rows = self._config, num_result_rows(spec, self._config, None, 0)
        local, ints = config.num_local_experts, torch.int32
        scale_dtype = torch.float32 if payload.scales is None else payload.scales.dtype
        scale_dtype = torch.int32 if mode is Quantize.FP8_UE8M0 else scale_dtype
        padded = spec.layout is Layout.EXPERT_PADDED
        # as Received has them: to view a tensor takes as long as to make one
        rows = (local, config.padded_rows) if padded else (num_rows,)
        return Outlines(
            x=self._outline(
                payload.x.dtype if mode is None else torch.float8_e4m3fn, *rows, form.hidden
            ),
            scales=self._outline(scale_dtype, *rows, form.scale_words)
            if form.scale_words
            else None,
            scale_strides=(form.scale_words * config.padded_rows, 1, config.padded_rows)
            if by_column
            else None,
            blocks=self._outline(ints, local, config.world_size, 2)
            if padded
            else self._outline(ints, local + 1),
            weights=self._outline(torch.float32, num_rows),
            source=self._outline(torch.int64, *rows),
            tokens_per_expert=self._outline(ints, local),
            overflow=None if spec.capacity is None else self._outline(ints, 1),
            route=self._outline(ints, *self.route_shape),
        )

    def _outline(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if 0 in shape:  # an expanded one would not be dense
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._ones.setdefault(
            dtype, torch.empty(1, dtype=dtype, device=self._device)
        ).expand(shape)

    def _new_combine(self, rows: Tensor, spec: Spec) -> CombineKind:
        payload = Payload(rows, None)
        form = form_of(payload, None, kept_words(self._config.num_topk, spec))
        self._ground.check_fits(form, f"rows of {rows.dtype} x {rows.shape[1]}")
        prints = (
            fingerprint_of(COMBINE, 0, payload, spec, None, False, 0, at_owner)
            for at_owner in (False, True)
        )
        here, at_owner = (_number(each) for each in prints)
        return CombineKind(
            kept=form.payload_bytes if form.meta_words else 0,
            numbers=(here, at_owner),
        )


def _number(fingerprint: Fingerprint) -> int:
    return zlib.crc32(repr(fingerprint).encode())


def _tag(number: int) -> int:
    """24 bits, not 0, that differ where calls differ."""
    return number % (2**24 - 1) + 1
