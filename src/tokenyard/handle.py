"""What links a dispatch to its combine, its backward and later dispatches with the same routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.call_queue import keep_for
from tokenyard.config import MOST_MATRIX_RANKS
from tokenyard.types import Layout


class Plan(NamedTuple):
    """The integers of one routing, computed once. Nb: rows that arrived; J: most rows that can
    belong together.

    Attributes:
        splits: int64, CPU: rows to each rank ``[R]``, from each rank ``[R]``, a number for the
            routing; if the host knows (exact shapes), rows from each rank to each rank ``[R, R]``
            (on few ranks, see ``Config.matrix_ranks``); ``Engine.hop_counts`` numbers of the
            engine's own; if the host knows, tokens per local expert ``[L]``.
        route: the engine's own: token of each row sent ``[S]`` int64 (``engines/hierarchy.py`` puts
            more behind), or the tables of ``kernels/region.py`` (nvlink), or with ``slots`` behind
            it (low_latency, ``engines/low_latency_signatures.py``).
    """

    splits: Tensor
    route: Tensor
    returns: Tensor  # [T, J] places in send order of a token's rows, by rank; then -1. Or [T, 0]
    slots: Tensor  # [Nb, J] result rows of each arrived row, in pick order; then -1. Or empty
    picks: Tensor  # [Nb, J] the pick behind each slot
    gather: Tensor  # [rows] the arrived row behind each result row, -1 on padding
    first_pick: Tensor  # [T, K] the pick that each pick was merged into


class Arrived(NamedTuple):
    """Routing of returned rows, as in :class:`tokenyard.Received`. What a layout lacks is empty."""

    topk_idx: Tensor  # FLAT [N, K]
    weights: Tensor  # FLAT [N, K], else [rows]; float32
    source: Tensor  # [rows] int64, or as ``Received.source`` is shaped
    tokens_per_expert: Tensor  # [L] int32
    expert_offsets: Tensor  # EXPERT_MAJOR [L + 1] int32
    source_ranges: Tensor  # EXPERT_PADDED [L, R, 2] int32
    overflow: Tensor  # [1] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """How a dispatch was asked for; equal on all ranks."""

    layout: Layout
    exact: bool
    expert_alignment: int = 1
    capacity: int | None = None

    @property
    def placed(self) -> bool:
        """Whether result rows stand elsewhere than they arrived."""
        return self.layout is not Layout.FLAT or not self.exact


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handle:
    """Result of one dispatch's routing: frozen, reusable any number of times and in any order,
    until its object is closed.

    Attributes:
        spec: layout and shapes of the rows.
        num_tokens: T of the dispatch, rows of the combined result.
        num_rows: rows of the dispatched result (``[L * R * M]`` for ``EXPERT_PADDED``).
        has_weights: whether weights rode along.
        num_ranks: R, also those that are gone.
        index_dtype: dtype of the ``topk_idx`` that was dispatched.
        asked: that and its weights as they were given, if picks went elsewhere (``redirect.py``).
    """

    owner: int
    rank: int
    spec: Spec
    num_tokens: int
    num_rows: int
    has_weights: bool
    num_ranks: int
    index_dtype: torch.dtype
    plan: Plan
    arrived: Arrived
    asked: tuple[Tensor, Tensor | None] | None = None

    @property
    def layout(self) -> Layout:
        return self.spec.layout

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """As ``Tensor.record_stream``, of what a GPU's calls with this handle read: needed if they
        are made on ``stream``, the dispatch was made on another, and the handle may be let go
        before they are done."""
        keep_for((*self.plan, *self.arrived), stream)

    def rows_between(self, num_ranks: int | None = None) -> Tensor | None:
        """Rows that each of the R ranks (first index) sent to each: int64 ``[R, R]`` on the CPU.
        None where the host does not know: static shapes, or more than ``MOST_MATRIX_RANKS`` ranks.
        ValueError: ``num_ranks`` is not the R of the handle."""
        if num_ranks not in (None, self.num_ranks):
            raise ValueError(
                f"num_ranks ({num_ranks!r}) must be {self.num_ranks}, the ranks of the object that "
                f"made this handle: leave it out"
            )
        num_ranks = self.num_ranks
        if not self.spec.exact or num_ranks > MOST_MATRIX_RANKS:
            return None
        return self.plan.splits[2 * num_ranks + 1 :][: num_ranks**2].view(num_ranks, num_ranks)
