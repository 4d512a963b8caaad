"""Normal mode: DeepEP's layout, dispatch and combine on the native calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import MOST_EXPERTS
from tokenyard.deep_ep import inputs, native_calls
from tokenyard.deep_ep.handles import KeptHandle, NormalHandle, kind_for, longer, num_nodes
from tokenyard.deep_ep.inputs import Asked, likely, whole
from tokenyard.deep_ep.native_calls import Rows
from tokenyard.deep_ep.natives import Natives
from tokenyard.header import CACHED, DISPATCH
from tokenyard.results import Received, rows_of_experts
from tokenyard.routing import expert_bounds, host_ints
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES, Layout

MAX_TOKENS = 128
"""Every native object has a bound of tokens; the exact shapes of normal mode do not use it."""

COUNT_WORDS = 4
"""Counts travel in rows of a multiple of so many words."""

Dispatched = tuple[Any, Tensor | None, Tensor | None, list[int], NormalHandle]
"""What ``Buffer.dispatch`` returns, less the event: first rows ``[N, H]``, or FP8 and scales."""


def check_dispatch(
    natives: Natives, data: Tensor, asked: Asked, group: Any
) -> tuple[int, int, NormalHandle | None]:
    """Returns alignment, number of static rows and the handle."""
    alignment = whole("expert_alignment", asked.expert_alignment, 1)
    worst = whole("num_worst_tokens", asked.num_worst_tokens)
    if asked.handle is not None:
        if asked.topk_idx is not None or asked.topk_weights is not None:
            raise ValueError(
                "topk_idx or topk_weights given together with handle: leave them out, the handle "
                "knows the routing"
            )
        known = inputs.check_handle(asked.handle, NormalHandle, group)
        inputs.check_rows_again("x", data, known)
        return alignment, worst, known
    if asked.num_tokens_per_expert is None:
        raise ValueError(
            "num_tokens_per_expert is missing: pass what get_dispatch_layout() returned, or a "
            "handle"
        )
    _check_layout(natives, data, asked)
    if asked.topk_idx is None:
        if asked.is_token_in_rank is None or asked.topk_weights is not None or worst:
            raise ValueError(
                "topk_idx is missing: without it a dispatch needs is_token_in_rank, and takes "
                "neither topk_weights nor num_worst_tokens"
            )
    else:
        inputs.check_picks(asked.topk_idx, asked.topk_weights, data)
        tokens, size = max(data.shape[0], 1), natives.world_size
        if worst and worst < size * tokens:
            raise ValueError(
                f"num_worst_tokens ({worst}) must be at least {size * tokens}, {size} ranks times "
                f"{tokens} (tokens of this one, or 1): raise it on all ranks alike, or split the "
                f"batch"
            )
    return alignment, worst, None


def _check_layout(natives: Natives, data: Tensor, asked: Asked) -> None:
    """What ``get_dispatch_layout`` returned, as far as it was given."""
    size, device = natives.world_size, data.device
    experts, in_ranks = asked.num_tokens_per_expert, asked.is_token_in_rank
    inputs.array("num_tokens_per_expert", experts, "[E]", (inputs.ANY,), INDEX_DTYPES, device)
    if not 1 <= experts.numel() <= MOST_EXPERTS:
        raise ValueError(
            f"num_tokens_per_expert has {experts.numel()} experts, but must have 1 to "
            f"{MOST_EXPERTS}"
        )
    if in_ranks is not None:
        shape = data.shape[0], size
        inputs.array("is_token_in_rank", in_ranks, "[T, R]", shape, (torch.bool,), device)
    per_rank, per_node = asked.num_tokens_per_rank, asked.num_tokens_per_rdma_rank
    if per_rank is not None:
        inputs.array("num_tokens_per_rank", per_rank, "[R]", (size,), INDEX_DTYPES)
    if per_node is not None:
        nodes = (num_nodes(size),)
        inputs.array("num_tokens_per_rdma_rank", per_node, "[R / 8]", nodes, INDEX_DTYPES)


def check_combine(x: Any, handle: KeptHandle, topk_weights: Any, bias: Any) -> tuple[Tensor, ...]:
    """Returns the terms of the bias."""
    config, native = handle.ep.config, handle.native
    rows = native.num_rows + handle.more_rows
    inputs.check_rows_back("x", x, handle, rows)
    if topk_weights is not None:
        shape = rows, config.num_topk
        inputs.array("topk_weights", topk_weights, "[N, K]", shape, FLOAT_DTYPES, x.device)
    return check_bias(bias, handle, x.device)


def check_bias(bias: Any, handle: KeptHandle, device: torch.device) -> tuple[Tensor, ...]:
    """Nothing, a tensor or a pair of them; returns these."""
    terms: tuple[Any, ...] = () if bias is None else (bias,)
    if isinstance(bias, (tuple, list)):
        terms = tuple(bias)  # pyright: ignore
    if len(terms) > 2 or (bias is not None and not terms):
        raise ValueError(f"bias has {len(terms)} tensors, but must be one [T, H] or a pair of them")
    shape = handle.native.num_tokens, handle.ep.config.hidden
    for term in terms:
        inputs.array("bias", term, "[T, H]", shape, FLOAT_DTYPES, device)
    return terms


def refused(natives: Natives, error: Exception, asked: Asked) -> Exception:
    """Tell the ranks that are in this dispatch; returns the error to raise."""
    if asked.handle is not None:
        return natives.refused_with(error, asked.handle, NormalHandle, CACHED)
    size, picks = natives.world_size, (asked.topk_idx, asked.topk_weights)
    worst = likely("num_worst_tokens", asked.num_worst_tokens, error, least=0)
    bound = None if worst is None else worst // size or MAX_TOKENS
    experts = asked.num_tokens_per_expert
    given = experts.numel() if isinstance(experts, Tensor) else None
    guess = inputs.guess(error, asked.x, picks, ("num_tokens_per_expert", given), bound)
    if picks[0] is picks[1] is None:  # each rank counts as one expert
        guess = guess[0], size, size, *guess[3:]
    ep, exact = natives.whom_normal(guess), not worst
    if worst is None:
        exact = ep is None or ep.config.max_tokens_per_rank == MAX_TOKENS
    return natives.refused(error, ep, DISPATCH, exact)


def dispatch(
    natives: Natives,
    rows: Rows,
    picks: tuple[Tensor | None, Tensor | None],
    by_rank: tuple[Tensor | None, Tensor | None],
    num_experts: int,
    alignment: int,
    worst: int,
    num_sms: int,
) -> Dispatched:
    """A fresh dispatch: exact shapes, or ``worst`` rows without a word to the host.

    Without ``picks`` (ids and weights) routing is known ``by_rank``: each rank counts as one
    expert, and the counts of the true experts travel beside.
    """
    size, (topk_idx, weights), (in_ranks, per_expert) = natives.world_size, picks, by_rank
    idx = topk_idx
    if idx is None:
        assert in_ranks is not None
        ranks = torch.arange(size, device=in_ranks.device).expand(in_ranks.shape)
        idx, num_experts = torch.where(in_ranks, ranks, -1), size
    # Rounded down: whatever bounds ranks give that share an object, all rows have a place.
    bound = worst // size if worst else MAX_TOKENS
    sizes = rows[0].shape[1], num_experts, idx.shape[1], bound, rows[0].device
    ep = natives.normal(sizes, bounded=bound != MAX_TOKENS)
    recv = native_calls.dispatch(ep, rows, idx, weights, (Layout.FLAT, not worst, 1, None))
    native, recv_idx, recv_weights = recv.handle, recv.topk_idx, recv.topk_weights
    more = worst - native.num_rows if worst else 0
    routed = {"in_ranks": in_ranks, "topk_idx": topk_idx, "num_sms": num_sms, "more_rows": more}
    handle: NormalHandle = kind_for(size).around(ep, native, **routed)
    if worst:
        assert recv_idx is not None
        recv_weights = None if recv_weights is None else longer(recv_weights, more)
        return _rows(recv, more), longer(recv_idx, more, -1), recv_weights, [], handle
    if topk_idx is None:
        assert per_expert is not None
        counts, recv_idx = _swap_counts(natives, per_expert), None
    else:
        counts = rows_of_experts(native)
    return _rows(recv), recv_idx, recv_weights, aligned(counts, alignment), handle


def redispatch(rows: Rows, handle: NormalHandle) -> Any:
    return _rows(native_calls.redispatch(handle, rows)[0], handle.more_rows)


def combine(
    x: Tensor, handle: NormalHandle, topk_weights: Tensor | None, bias: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    if handle.more_rows:
        x = x[: handle.native.num_rows]
        topk_weights = None if topk_weights is None else topk_weights[: handle.native.num_rows]
    return native_calls.combine(x, handle, topk_weights, bias)


def aligned(counts: list[int], alignment: int) -> list[int]:
    """Each count rounded up to a multiple of ``alignment``.

    >>> aligned([0, 3, 8], 4)
    [0, 4, 8]
    """
    return counts if alignment == 1 else [-(-count // alignment) * alignment for count in counts]


def _rows(recv: Received, more: int = 0) -> Any:
    x = longer(recv.x, more)
    return x if recv.scales is None else (x, longer(recv.scales, more))


def _swap_counts(natives: Natives, per_expert: Tensor) -> list[int]:
    """Tokens for each of this rank's experts, from all ranks' ``per_expert [E]``."""
    size, num_experts = natives.world_size, per_expert.shape[0]
    bounds = expert_bounds(num_experts, size)
    width = -(-num_experts // size)
    width += -width % COUNT_WORDS
    table = torch.zeros(size, width, dtype=torch.int32, device=per_expert.device)
    for rank in range(size):
        table[rank, : bounds[rank + 1] - bounds[rank]] = per_expert[bounds[rank] : bounds[rank + 1]]
    mine = bounds[natives.rank + 1] - bounds[natives.rank]
    return host_ints(natives.swap(table).sum(0)[:mine])
