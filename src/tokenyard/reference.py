"""The oracle: everything ``docs/reference/semantics.md`` states, in plain torch, in one process
that holds every rank's data. Slow and obvious on purpose, and independent of the engines.

Tensors are on the CPU. Lists of tensors have one entry per rank. Letters: T tokens on a rank, K
picks, R ranks, L experts on a rank, H hidden, M ``max_tokens_per_rank``, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from tokenyard.reference_picks import (
    Pick,
    lists,
    lost_weights,
    merge_picks,
    picks_per_expert,
    source_ranges,
)
from tokenyard.reference_quant import dequantize, quantize
from tokenyard.reference_sums import sum_ranks, sum_rows
from tokenyard.types import Layout, Quantize, Quantized

__all__ = [
    "ReferenceCombined",
    "ReferenceRows",
    "combine",
    "dequantize",
    "dispatch",
    "merge_picks",
    "quantize",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceRows:
    """What one rank receives, in exact shapes. ``EXPERT_PADDED``: ``[N]`` is ``[L, R * M]``."""

    x: Tensor  # [N, H], dtype of the payload; zeros on padding rows
    scales: Tensor | None  # [N, S] float32 or int32; zeros on padding rows
    topk_idx: Tensor | None  # FLAT: [N, K] local expert ids, dtype as given, -1 = elsewhere
    topk_weights: Tensor | None  # FLAT: [N, K] float32, 0 where the id is -1
    row_weights: Tensor | None  # expert layouts: [N] float32, 0 on padding rows
    tokens_per_expert: Tensor  # [L] int32, unaligned; counts dropped rows too
    aligned_tokens_per_expert: Tensor  # [L] int32, each up to a multiple of expert_alignment
    # EXPERT_MAJOR: [L + 1] int32, cumulative aligned counts, at most capacity.
    expert_offsets: Tensor | None
    # EXPERT_PADDED: [L, R, 2] int32, (begin, count) inside the expert's block.
    source_ranges: Tensor | None
    source: Tensor  # [N] int64, source rank << 32 | source token; -1 on padding rows
    overflow: int  # rows dropped because their place was >= capacity
    row_of_pick: tuple[Tensor, ...]  # for combine: per source rank [T, K] int64, see _row_of_pick
    owned_topk_idx: Tensor  # for combine: [T, K], the picks of this rank's own tokens, as given
    owned_topk_weights: Tensor | None  # for combine: [T, K], their weights, as given


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceCombined:
    """What combine gives back to one rank."""

    x: Tensor  # [T, H], dtype of the rows
    topk_weights: Tensor | None  # [T, K] float32, the summed reduce_weights
    # Expert layouts: [T] float32, what the picks weigh (unweighted: 1) that the sum lacks.
    lost_weights: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What all ranks send together; lists have one entry per rank."""

    data: list[Tensor]  # [T, H]
    scales: list[Tensor] | None  # [T, S]
    topk_idx: list[Tensor]  # [T, K], merged
    topk_weights: list[Tensor] | None  # [T, K] float32, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How received rows are laid out."""

    layout: Layout
    alignment: int  # EXPERT_MAJOR: a block is a multiple of this many rows
    block: int  # EXPERT_PADDED: R * M rows per expert
    capacity: int | None  # EXPERT_MAJOR: rows in all


def dispatch(
    x: Sequence[Tensor | Quantized],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    num_experts: int,
    layout: Layout = Layout.FLAT,
    expert_alignment: int = 1,
    max_tokens_per_rank: int | None = None,
    capacity: int | None = None,
    quantize: Quantize | None = None,
) -> list[ReferenceRows]:
    """Send every token to the ranks of its experts.

    Args:
        x: ``[T, H]`` of each rank, or a payload that is already quantised.
        topk_idx: ``[T, K]`` int64 or int32 global expert ids, -1 for none.
        topk_weights: ``[T, K]`` float32.
        num_experts: over all ranks.
        layout: order and shape of the received rows.
        expert_alignment: ``EXPERT_MAJOR`` pads each block to a multiple of this many rows.
        max_tokens_per_rank: M, needed by ``EXPERT_PADDED``.
        capacity: rows that a rank can hold (``EXPERT_MAJOR``); later ones are dropped.
        quantize: how to cast ``x`` first.

    ValueError: ``EXPERT_PADDED`` without M or with more tokens, or ``capacity`` elsewhere.
    """
    _check_dispatch(topk_idx, layout, max_tokens_per_rank, capacity)
    sent = _send(x, topk_idx, topk_weights, quantize)
    picks = picks_per_expert(sent.topk_idx, num_experts)
    block = len(x) * (max_tokens_per_rank or 0)
    form = _Form(layout=layout, alignment=expert_alignment, block=block, capacity=capacity)
    experts_of_ranks = _split_experts(num_experts, len(x))
    weights = [None] * len(x) if topk_weights is None else topk_weights
    return [
        _receive(sent, picks, form, *each)
        for each in zip(experts_of_ranks, topk_idx, weights, strict=True)
    ]


def _check_dispatch(
    topk_idx: Sequence[Tensor], layout: Layout, max_tokens: int | None, capacity: int | None
) -> None:
    if capacity is not None and layout is not Layout.EXPERT_MAJOR:
        raise ValueError(
            f"capacity ({capacity}) belongs to EXPERT_MAJOR, but layout is {layout.name}; leave it "
            f"out"
        )
    most = max(len(idx) for idx in topk_idx)
    if layout is Layout.EXPERT_PADDED and (max_tokens is None or most > max_tokens):
        raise ValueError(
            f"max_tokens_per_rank ({max_tokens}) must be at least {most}, the most tokens on a rank"
        )


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _send(
    x: Sequence[Tensor | Quantized],
    topk_idx: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None,
    mode: Quantize | None,
) -> _Sent:
    payloads = x
    if mode is not None:
        payloads = [each if isinstance(each, Quantized) else quantize(each, mode) for each in x]
    scales = [each.scales for each in payloads if isinstance(each, Quantized)]
    given_weights = [None] * len(topk_idx) if topk_weights is None else topk_weights
    merged = [
        merge_picks(idx, weights) for idx, weights in zip(topk_idx, given_weights, strict=True)
    ]
    return _Sent(
        data=[each.data if isinstance(each, Quantized) else each for each in payloads],
        scales=scales or None,
        topk_idx=[idx for idx, _, _ in merged],
        topk_weights=[weights for _, weights, _ in merged if weights is not None] or None,
    )


def _split_experts(num_experts: int, num_ranks: int) -> list[range]:
    """The experts of each rank, contiguous: the first ``num_experts % num_ranks`` hold more."""
    each, extra = divmod(num_experts, num_ranks)
    ends = list(accumulate((each + (rank < extra) for rank in range(num_ranks)), initial=0))
    return [range(ends[rank], ends[rank + 1]) for rank in range(num_ranks)]


def _receive(
    sent: _Sent,
    picks: list[list[Pick]],
    form: _Form,
    experts: range,
    owned_topk_idx: Tensor,
    owned_topk_weights: Tensor | None,
) -> ReferenceRows:
    """The rows of the rank that holds ``experts`` and owns the tokens of ``owned_topk_idx``."""
    local = [picks[expert] for expert in experts]
    places = _places(local, form)
    kept = places[: form.capacity]
    dropped = places[len(kept) :]
    rows = _row_of_pick(kept, sent.topk_idx)
    is_flat, is_padded = form.layout is Layout.FLAT, form.layout is Layout.EXPERT_PADDED
    shape = (len(experts), form.block) if is_padded else (len(kept),)
    counts = [len(each) for each in local]
    aligned = [-(-count // form.alignment) * form.alignment for count in counts]
    offsets = [min(end, len(kept)) for end in accumulate(aligned, initial=0)]
    sources = [-1 if pick is None else pick.source << 32 | pick.token for pick in kept]
    topk_idx, topk_weights = _flat_picks(sent, rows, experts, shape) if is_flat else (None, None)
    weights = None if is_flat else sent.topk_weights
    return ReferenceRows(
        x=_gather(sent.data, rows, shape),
        scales=None if sent.scales is None else _gather(sent.scales, rows, shape),
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        row_weights=None if weights is None else _row_weights(weights, rows, shape),
        tokens_per_expert=_int32(counts),
        aligned_tokens_per_expert=_int32(aligned),
        expert_offsets=_int32(offsets) if form.layout is Layout.EXPERT_MAJOR else None,
        source_ranges=source_ranges(local, len(rows)) if is_padded else None,
        source=torch.tensor(sources, dtype=torch.int64).reshape(shape),
        overflow=sum(pick is not None for pick in dropped),
        row_of_pick=rows,
        owned_topk_idx=owned_topk_idx,
        owned_topk_weights=owned_topk_weights,
    )


def _places(local: list[list[Pick]], form: _Form) -> list[Pick | None]:
    """The pick that each row is made for, given those of each local expert; None is padding."""
    if form.layout is Layout.FLAT:
        first_picks: dict[tuple[int, int], Pick] = {}
        for pick in sorted(chain.from_iterable(local)):
            first_picks.setdefault((pick.source, pick.token), pick)
        return list(first_picks.values())
    places: list[Pick | None] = []
    for picks in local:
        padded = form.layout is Layout.EXPERT_PADDED
        padding = form.block - len(picks) if padded else -len(picks) % form.alignment
        places += [*picks, *[None] * padding]
    return places


def _row_of_pick(places: list[Pick | None], topk_idx: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Per source rank ``[T, K]`` int64: the row made for each pick, -1 if there is none here. A
    ``FLAT`` row is entered at the first local pick of its token only: combine adds it once."""
    tables = [lists(torch.full_like(idx, -1)) for idx in topk_idx]
    for row, pick in enumerate(places):
        if pick is not None:
            tables[pick.source][pick.token][pick.position] = row
    return tuple(
        torch.tensor(table).long().reshape(idx.shape)
        for table, idx in zip(tables, topk_idx, strict=True)
    )


def _gather(sources: Sequence[Tensor], rows: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Copy ``sources``, per rank ``[T, W]``, to their rows ``[*shape, W]``; others are zeros."""
    as_bytes = [
        source.clone(memory_format=torch.contiguous_format).view(torch.uint8) for source in sources
    ]
    received = torch.zeros(math.prod(shape), as_bytes[0].shape[1], dtype=torch.uint8)
    for source, row_of_pick in zip(as_bytes, rows, strict=True):
        token, position = (row_of_pick >= 0).nonzero(as_tuple=True)
        received[row_of_pick[token, position]] = source[token]
    return received.view(sources[0].dtype).reshape(*shape, sources[0].shape[1])


def _flat_picks(
    sent: _Sent, rows: Sequence[Tensor], experts: range, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """``FLAT``: local ids and weights ``[N, K]``, -1 and 0 where a pick is elsewhere."""
    idx = _gather(sent.topk_idx, rows, shape)
    is_local = (idx >= experts.start) & (idx < experts.stop)
    local_idx = torch.where(is_local, idx - experts.start, -1)
    if sent.topk_weights is None:
        return local_idx, None
    return local_idx, torch.where(is_local, _gather(sent.topk_weights, rows, shape), 0.0)


def _row_weights(
    topk_weights: Sequence[Tensor], rows: Sequence[Tensor], shape: tuple[int, ...]
) -> Tensor:
    """Expert layouts: the merged weight of each row's pick, ``shape`` float32, 0 on padding."""
    row_weights = torch.zeros(math.prod(shape))
    for weights, row_of_pick in zip(topk_weights, rows, strict=True):
        is_here = row_of_pick >= 0
        row_weights[row_of_pick[is_here]] = weights[is_here]
    return row_weights.reshape(shape)


def combine(
    rows: Sequence[Tensor],
    received: Sequence[ReferenceRows],
    *,
    weighted: bool = False,
    topk_weights: Sequence[Tensor] | None = None,
    reduce_weights: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor | tuple[Tensor, Tensor]] | None = None,
    ranks_per_node: int | None = None,
    wire_dtype: torch.dtype | None = None,
    absent: Sequence[Collection[int]] | None = None,
    owners: Iterable[int] | None = None,
) -> list[ReferenceCombined]:
    """Sum the rows of each token at its owner, along the tree of ``docs/reference/semantics.md``.

    Args:
        rows: the experts' output, shaped as ``received[rank].x``; any float dtype.
        received: what :func:`dispatch` returned.
        weighted: multiply each row by its weight first (expert layouts).
        topk_weights: ``[T, K]`` at the owners, unmerged; used if ``weighted``, instead of those
            that rode along.
        reduce_weights: ``[N, K]`` (``FLAT``), summed back to the owners in float32.
        bias: ``[T, H]``, or two of them, added last.
        ranks_per_node: consecutive ranks that form a node; None is one node.
        wire_dtype: what partial sums are rounded to; None is the dtype of the rows.
        absent: per owner, ranks whose sums do not come to it (engine low_latency).
        owners: ranks whose sums are returned, in this order; None is all.

    ValueError: ``weighted`` with ``FLAT`` or without weights, or ``reduce_weights`` elsewhere.
    """
    _check_combine(received[0], weighted, topk_weights is not None, reduce_weights is not None)
    row_weights = _combine_weights(received, topk_weights) if weighted else [None] * len(received)
    dtype, wire = rows[0].dtype, wire_dtype or rows[0].dtype
    combined: list[ReferenceCombined] = []
    for owner in range(len(received)) if owners is None else owners:
        gone = () if absent is None else absent[owner]
        tables = [each.row_of_pick[owner] for each in received]
        for rank in gone:
            tables[rank] = torch.full_like(tables[rank], -1)
        total = sum_ranks(map(sum_rows, rows, tables, row_weights), ranks_per_node, wire)
        own_bias = () if bias is None else bias[owner]
        for addend in own_bias if isinstance(own_bias, tuple) else (own_bias,):
            total = total + addend.float()
        weights = map(sum_rows, reduce_weights or [], tables)
        reduced = sum_ranks(weights, ranks_per_node, torch.float32) if reduce_weights else None
        own = received[owner]
        given = own.owned_topk_weights if topk_weights is None else topk_weights[owner]
        lost = None
        if own.topk_idx is None:
            lost = lost_weights(own.owned_topk_idx, given if weighted else None, tables)
        sums = total.to(dtype)
        combined.append(ReferenceCombined(x=sums, topk_weights=reduced, lost_weights=lost))
    return combined


def _check_combine(
    received: ReferenceRows, weighted: bool, owners_have_weights: bool, reduces_weights: bool
) -> None:
    is_flat = received.topk_idx is not None
    if weighted and is_flat:
        raise ValueError(
            "weighted=True needs one row per expert, but the rows are FLAT; apply the weights to "
            "the rows"
        )
    if weighted and not owners_have_weights and received.row_weights is None:
        raise ValueError("weighted=True needs weights; give topk_weights to combine or to dispatch")
    if reduces_weights and not is_flat:
        raise ValueError(
            "reduce_weights needs FLAT rows, but there is one row per expert; dispatch with "
            "layout=FLAT"
        )


def _combine_weights(
    received: Sequence[ReferenceRows], topk_weights: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """The weight of every row of every rank, ``[N]`` float32."""
    if topk_weights is None:
        return [
            None if each.row_weights is None else each.row_weights.flatten() for each in received
        ]
    merged = [
        merge_picks(each.owned_topk_idx, own)[1]
        for each, own in zip(received, topk_weights, strict=True)
    ]
    given = [weights for weights in merged if weights is not None]
    return [_row_weights(given, each.row_of_pick, (each.source.numel(),)) for each in received]
