"""Normal mode: DeepEP's layout, dispatch and combine on the native calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.deep_ep.handles import NormalHandle, kind_for, num_nodes, per_node
from tokenyard.deep_ep.natives import Natives, Sizes
from tokenyard.layout import expert_bounds, host_ints, tokens_in_ranks
from tokenyard.results import Received
from tokenyard.types import Quantized

MAX_TOKENS = 128
"""Every native object has a bound of tokens; the exact shapes of normal mode do not use it."""

COUNT_WORDS = 4
"""Counts travel in rows of a multiple of so many words."""

Rows = Any
"""``[N, H]``, or the pair of FP8 data and scales."""

Dispatched = tuple[Rows, Tensor | None, Tensor | None, list[int], NormalHandle]
"""What ``Buffer.dispatch`` returns, less the event."""


class Routing(NamedTuple):
    """What a fresh dispatch is told of where tokens go."""

    topk_idx: Tensor | None
    topk_weights: Tensor | None
    in_ranks: Tensor | None
    per_expert: Tensor | None


def payload_of(x: Any) -> Tensor | Quantized:
    """``x`` as the native calls take it."""
    return x if isinstance(x, Tensor) else Quantized(*x)


def data_of(x: Any) -> Tensor:
    """The rows of ``x``, which may be a pair of FP8 data and scales."""
    data = x[0] if isinstance(x, (tuple, list)) and len(x) == 2 else x  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not isinstance(data, Tensor) or data.dim() != 2:
        raise ValueError("x must be a tensor [T, H], or a pair (data [T, H], scales [T, S])")
    return data


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Tokens per rank, per node (None for one node) and per expert, and which ranks each token goes to.

    Few operations, as this stands before every dispatch; nothing here waits for the device.
    """
    in_ranks = _in_ranks(topk_idx, num_experts, num_ranks)
    nodes = per_node(in_ranks).sum(0, dtype=torch.int32) if num_nodes(num_ranks) > 1 else None
    place = topk_idx.reshape(-1).long().remainder(num_experts + 1)  # -1 comes last
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    per_expert.scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
    return in_ranks.sum(0, dtype=torch.int32), nodes, per_expert[:num_experts], in_ranks


def _in_ranks(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    share, rest = divmod(num_experts, num_ranks)
    if rest:
        return tokens_in_ranks(topk_idx, num_experts, num_ranks).contiguous()
    owners = topk_idx.div(share, rounding_mode="floor").unsqueeze(2)
    return (owners == torch.arange(num_ranks, device=topk_idx.device)).any(1)


def dispatch(
    natives: Natives, x: Any, routing: Routing, alignment: int, num_worst_tokens: int, num_sms: int
) -> Dispatched:
    """A fresh dispatch: exact shapes, or ``num_worst_tokens`` rows without a word to the host."""
    payload, data = payload_of(x), data_of(x)
    topk_idx, weights, in_ranks, per_expert = routing
    if per_expert is None:
        raise ValueError("num_tokens_per_expert is missing: pass what get_dispatch_layout() returned, or a handle")
    num_experts, hidden = per_expert.shape[0], data.shape[1]
    if topk_idx is None:
        return _dispatch_without_picks(natives, x, routing, alignment, num_worst_tokens, num_sms)
    num_topk = topk_idx.shape[1]
    if num_worst_tokens:
        bound = -(-num_worst_tokens // natives.world_size)
        ep = natives.normal(Sizes(hidden, num_experts, num_topk, bound, data.device))
        recv = ep.dispatch(payload, topk_idx, weights, exact=False)
        rows, idx, recv_weights = _cut(recv, num_worst_tokens)
        handle = kind_for(natives.world_size).of(ep, recv.handle, num_worst_tokens, in_ranks, topk_idx, num_sms)
        return rows, idx, recv_weights, [], handle
    ep = natives.normal(Sizes(hidden, num_experts, num_topk, MAX_TOKENS, data.device))
    recv = ep.dispatch(payload, topk_idx, weights)
    handle = kind_for(natives.world_size).of(ep, recv.handle, recv.x.shape[0], in_ranks, topk_idx, num_sms)
    return _rows(recv), recv.topk_idx, recv.topk_weights, aligned(recv.tokens_per_expert_list, alignment), handle


def check_handle(handle: Any) -> NormalHandle:
    """The very tuple that a dispatch returned."""
    if not isinstance(handle, NormalHandle):
        raise ValueError(
            f"handle must be the tuple that dispatch() of this library returned, not a {type(handle).__name__}"
        )
    return handle


def check_cached(handle: Any, topk_idx: Tensor | None, topk_weights: Tensor | None) -> NormalHandle:
    """A handle that comes without picks of its own."""
    if topk_idx is not None or topk_weights is not None:
        raise ValueError(
            "topk_idx or topk_weights given together with handle: leave them out, the handle knows the routing"
        )
    return check_handle(handle)


def redispatch(x: Any, handle: NormalHandle) -> Rows:
    """The rows of ``x`` along a known routing."""
    recv = handle.ep.dispatch(payload_of(x), handle=handle.native)
    return _rows(recv) if handle.num_rows == handle.native.num_rows else _cut(recv, handle.num_rows)[0]


def combine(x: Tensor, handle: NormalHandle, topk_weights: Tensor | None, bias: Any) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and of their weights if there are any."""
    native = handle.native
    if handle.num_rows != native.num_rows:
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
    return recv.x if recv.scales is None else (recv.x, recv.scales)


def _cut(recv: Received, num_rows: int) -> tuple[Rows, Tensor | None, Tensor | None]:
    """The first ``num_rows`` rows: static shapes round the worst case up to a multiple of the ranks."""
    x, scales, idx, weights = (
        None if t is None else t[:num_rows] for t in (recv.x, recv.scales, recv.topk_idx, recv.topk_weights)
    )
    return x if scales is None else (x, scales), idx, weights


def _stretch(rows: Tensor, handle: NormalHandle) -> Tensor:
    """``rows`` with those that :func:`_cut` took away; nobody reads them. Another number of rows is the native call's to refuse."""
    if rows.shape[0] != handle.num_rows:
        return rows
    longer = rows.new_empty((handle.native.num_rows, *rows.shape[1:]))
    longer[: handle.num_rows] = rows
    return longer


# Without top-k


def _dispatch_without_picks(
    natives: Natives, x: Any, routing: Routing, alignment: int, num_worst_tokens: int, num_sms: int
) -> Dispatched:
    """Routing known per rank only: each rank counts as one expert, and the true experts' counts travel beside."""
    in_ranks, per_expert, size, data = routing.in_ranks, routing.per_expert, natives.world_size, data_of(x)
    if in_ranks is None or routing.topk_weights is not None or num_worst_tokens:
        raise ValueError(
            "topk_idx is missing: without it a dispatch needs is_token_in_rank, and takes neither topk_weights nor num_worst_tokens"
        )
    assert per_expert is not None
    ranks = torch.arange(size, device=data.device).expand(in_ranks.shape)
    ep = natives.normal(Sizes(data.shape[1], size, size, MAX_TOKENS, data.device))
    recv = ep.dispatch(payload_of(x), torch.where(in_ranks, ranks, -1))
    counts = _swap_counts(natives, per_expert)
    handle = kind_for(natives.world_size).of(ep, recv.handle, recv.x.shape[0], in_ranks, None, num_sms)
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
    ep = natives.normal(Sizes(width, size, 1, size, device))
    recv = ep.dispatch(table.view(torch.float32), torch.arange(size, device=device).unsqueeze(1))
    mine = bounds[natives.rank + 1] - bounds[natives.rank]
    return host_ints(recv.x.view(torch.int32).sum(0)[:mine])
