"""Normal mode: DeepEP's layout, dispatch and combine on the native calls."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tokenyard.deep_ep.handles import NormalHandle
from tokenyard.deep_ep.natives import Natives
from tokenyard.layout import expert_bounds, host_ints
from tokenyard.results import Received, rows_of_experts
from tokenyard.types import Quantized

MAX_TOKENS = 128
"""Every native object has a bound of tokens; the exact shapes of normal mode do not use it."""

COUNT_WORDS = 4
"""Counts travel in rows of a multiple of so many words."""

Rows = Any
"""``[N, H]``, or the pair of FP8 data and scales."""

Dispatched = tuple[Rows, Tensor | None, Tensor | None, list[int], NormalHandle]
"""What ``Buffer.dispatch`` returns, less the event."""


def check_pair(x: Any) -> tuple[Tensor, Tensor]:
    """A pair of FP8 data and scales.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(x, (tuple, list)) and len(x) == 2:  # pyright: ignore[reportUnknownArgumentType]
        data, scales = cast("tuple[Any, Any]", x)
        if isinstance(data, Tensor) and isinstance(scales, Tensor) and data.dim() == 2:
            return data, scales
    raise ValueError("x must be a tensor [T, H], or a pair (data [T, H], scales [T, S])")


def dispatch(
    natives: Natives,
    data: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    weights: Tensor | None,
    in_ranks: Tensor | None,
    num_experts: int,
    alignment: int,
    num_worst_tokens: int,
    num_sms: int,
) -> Dispatched:
    """A fresh dispatch: exact shapes, or ``num_worst_tokens`` rows without a word to the host."""
    worst = num_worst_tokens
    bound = -(-worst // natives.world_size) if worst else MAX_TOKENS
    ep = natives.normal((data.shape[1], num_experts, topk_idx.shape[1], bound, data.device))
    payload = data if scales is None else Quantized(data, scales)
    recv = ep.dispatch(payload, topk_idx, weights, exact=not worst)
    native = recv.handle
    handle = natives.kind.of(ep, native, in_ranks, topk_idx, num_sms)
    if worst:
        if worst != native.num_rows:
            handle.cut_to = worst
        return *_cut(recv, worst), [], handle
    counts = aligned(rows_of_experts(native), alignment)
    return _rows(recv), recv.topk_idx, recv.topk_weights, counts, handle


def check_bare(in_ranks: Tensor | None, topk_weights: Tensor | None, num_worst_tokens: int) -> Tensor:
    """``is_token_in_rank`` of a dispatch without picks.

    Raises:
        ValueError: it is missing, or came with what needs picks.
    """
    if in_ranks is None or topk_weights is not None or num_worst_tokens:
        raise ValueError(
            "topk_idx is missing: without it a dispatch needs is_token_in_rank, and takes neither topk_weights nor num_worst_tokens"
        )
    return in_ranks


def check_handle(handle: Any) -> NormalHandle:
    """The very tuple that a dispatch returned."""
    if not isinstance(handle, NormalHandle):
        raise ValueError(
            f"handle must be the tuple that dispatch() of this library returned, not a {type(handle).__name__}"
        )
    return handle


def redispatch(data: Tensor, scales: Tensor | None, handle: NormalHandle) -> Rows:
    """Rows along a known routing."""
    payload = data if scales is None else Quantized(data, scales)
    recv = handle.ep.dispatch(payload, handle=handle.native)
    if handle.cut_to is not None:
        return _cut(recv, handle.cut_to)[0]
    return _rows(recv)


def combine(x: Tensor, handle: NormalHandle, topk_weights: Tensor | None, bias: Any) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and of their weights if there are any."""
    native = handle.native
    if handle.cut_to is not None:
        x, topk_weights = _stretch(x, handle), None if topk_weights is None else _stretch(topk_weights, handle)
    if topk_weights is None:
        return handle.ep.combine(x, native, bias=bias), None
    combined: Any = handle.ep.combine(x, native, reduce_weights=topk_weights, bias=bias)
    return combined.x, combined.topk_weights


def aligned(counts: list[int], alignment: int) -> list[int]:
    """Each count rounded up to a multiple of ``alignment``.

    >>> aligned([0, 3, 8], 4)
    [0, 4, 8]
    """
    return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]


def _rows(recv: Received) -> Rows:
    x, scales = recv.x, recv.scales
    return x if scales is None else (x, scales)


def _cut(recv: Received, num_rows: int) -> tuple[Rows, Tensor | None, Tensor | None]:
    """The first ``num_rows`` rows: static shapes round the worst case up to a multiple of the ranks."""
    x, scales, idx, weights = (
        None if t is None else t[:num_rows] for t in (recv.x, recv.scales, recv.topk_idx, recv.topk_weights)
    )
    return x if scales is None else (x, scales), idx, weights


def _stretch(rows: Tensor, handle: NormalHandle) -> Tensor:
    """``rows`` with those that :func:`_cut` took away; nobody reads them. Another number of rows is the native call's to refuse."""
    if rows.shape[0] != handle.cut_to:
        return rows
    longer = rows.new_empty((handle.native.num_rows, *rows.shape[1:]))
    longer[: handle.cut_to] = rows
    return longer


# Without top-k


def dispatch_bare(
    natives: Natives,
    data: Tensor,
    scales: Tensor | None,
    in_ranks: Tensor,
    per_expert: Tensor,
    alignment: int,
    num_sms: int,
) -> Dispatched:
    """Routing known per rank only: each rank counts as one expert, and the true experts' counts travel beside."""
    size = natives.world_size
    ranks = torch.arange(size, device=data.device).expand(in_ranks.shape)
    ep = natives.normal((data.shape[1], size, size, MAX_TOKENS, data.device))
    payload = data if scales is None else Quantized(data, scales)
    recv = ep.dispatch(payload, torch.where(in_ranks, ranks, -1))
    counts = _swap_counts(natives, per_expert)
    handle = natives.kind.of(ep, recv.handle, in_ranks, None, num_sms)
    return _rows(recv), None, None, aligned(counts, alignment), handle


def _swap_counts(natives: Natives, per_expert: Tensor) -> list[int]:
    """Tokens for each of this rank's experts, from every rank's ``per_expert [E]``: one small row to each rank."""
    size, device, num_experts = natives.world_size, per_expert.device, per_expert.shape[0]
    bounds = expert_bounds(num_experts, size)
    width = -(-num_experts // size)
    width += -width % COUNT_WORDS
    table = torch.zeros(size, width, dtype=torch.int32, device=device)
    for rank in range(size):
        table[rank, : bounds[rank + 1] - bounds[rank]] = per_expert[bounds[rank] : bounds[rank + 1]]
    ep = natives.normal((width, size, 1, size, device))
    recv = ep.dispatch(table.view(torch.float32), torch.arange(size, device=device).unsqueeze(1))
    mine = bounds[natives.rank + 1] - bounds[natives.rank]
    return host_ints(recv.x.view(torch.int32).sum(0)[:mine])
