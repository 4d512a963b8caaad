"""Normal mode: DeepEP's layout, dispatch and combine on the native calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.arguments import MOST_EXPERTS
from tokenyard.deep_ep import inputs, native_calls
from tokenyard.deep_ep.handles import NormalHandle, longer, num_nodes
from tokenyard.deep_ep.inputs import likely, whole
from tokenyard.deep_ep.natives import Natives
from tokenyard.header import CACHED, DISPATCH
from tokenyard.results import Received, rows_of_experts
from tokenyard.routing import expert_bounds, host_ints
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES, Layout

MAX_TOKENS = 128
"""Every native object has a bound of tokens; the exact shapes of normal mode do not use it."""

COUNT_WORDS = 4
"""Counts travel in rows of a multiple of so many words."""

Rows = Any
"""``[N, H]``, or the pair of FP8 data and scales."""

Dispatched = tuple[Rows, Tensor | None, Tensor | None, list[int], NormalHandle]
"""What ``Buffer.dispatch`` returns, less the event."""


class Routing(NamedTuple):
    """What ``Buffer.dispatch`` was given besides rows and a handle."""

    per_rank: Any
    per_node: Any
    in_ranks: Any
    per_expert: Any
    topk_idx: Any
    topk_weights: Any
    alignment: Any
    worst: Any

    @property
    def given_picks(self) -> bool:
        return self.topk_idx is not None or self.topk_weights is not None


def check_dispatch(
    natives: Natives, data: Tensor, handle: Any, routing: Routing, group: Any
) -> tuple[int, int, NormalHandle | None]:
    """Look at all that routes ``data``; returns alignment, number of static rows and the handle."""
    alignment = whole("expert_alignment", routing.alignment, 1)
    worst = whole("num_worst_tokens", routing.worst)
    if handle is not None:
        if routing.given_picks:
            raise ValueError(
                "topk_idx or topk_weights given together with handle: leave them out, the handle "
                "knows the routing"
            )
        known = inputs.check_handle(handle, NormalHandle, group)
        inputs.check_rows_again("x", data, known)
        return alignment, worst, known
    if routing.per_expert is None:
        raise ValueError(
            "num_tokens_per_expert is missing: pass what get_dispatch_layout() returned, or a "
            "handle"
        )
    _check_layout(natives, data, routing)
    if routing.topk_idx is None:
        if routing.in_ranks is None or routing.topk_weights is not None or worst:
            raise ValueError(
                "topk_idx is missing: without it a dispatch needs is_token_in_rank, and takes "
                "neither topk_weights nor num_worst_tokens"
            )
    else:
        inputs.check_picks(routing.topk_idx, routing.topk_weights, data)
        tokens, size = max(data.shape[0], 1), natives.world_size
        if worst and worst < size * tokens:
            raise ValueError(
                f"num_worst_tokens ({worst}) must be at least {size * tokens}, {size} ranks times "
                f"{tokens} (tokens of this one, or 1): raise it on all ranks alike, or split the "
                f"batch"
            )
    return alignment, worst, None


def _check_layout(natives: Natives, data: Tensor, routing: Routing) -> None:
    """What ``get_dispatch_layout`` returned, as far as it was given."""
    size, device = natives.world_size, data.device
    experts, in_ranks = routing.per_expert, routing.in_ranks
    length = experts.numel() if isinstance(experts, Tensor) else None
    inputs.array("num_tokens_per_expert", experts, "[E]", (length,), INDEX_DTYPES, device)
    if not 1 <= experts.numel() <= MOST_EXPERTS:
        raise ValueError(
            f"num_tokens_per_expert has {experts.numel()} experts, but must have 1 to "
            f"{MOST_EXPERTS}"
        )
    if in_ranks is not None:
        shape = data.shape[0], size
        inputs.array("is_token_in_rank", in_ranks, "[T, R]", shape, (torch.bool,), device)
    if routing.per_rank is not None:
        inputs.array("num_tokens_per_rank", routing.per_rank, "[R]", (size,), INDEX_DTYPES)
    if routing.per_node is not None:
        nodes = (num_nodes(size),)
        inputs.array("num_tokens_per_rdma_rank", routing.per_node, "[R / 8]", nodes, INDEX_DTYPES)


def check_combine(x: Any, handle: NormalHandle, topk_weights: Any, bias: Any) -> tuple[Tensor, ...]:
    """Rows, weights and bias of a combine; returns the terms of the bias."""
    config, native = handle.ep.config, handle.native
    rows = native.num_rows + handle.more_rows
    inputs.check_rows_back("x", x, handle, rows)
    if topk_weights is not None:
        shape = rows, config.num_topk
        inputs.array("topk_weights", topk_weights, "[N, K]", shape, FLOAT_DTYPES, x.device)
    return check_bias(bias, handle, x.device)


def check_bias(bias: Any, handle: NormalHandle, device: torch.device) -> tuple[Tensor, ...]:
    """What is added to the sums: nothing, a tensor or a pair of them; returns these."""
    terms: tuple[Any, ...] = () if bias is None else (bias,)
    if isinstance(bias, (tuple, list)):
        terms = tuple(bias)  # pyright: ignore
    if len(terms) > 2 or (bias is not None and not terms):
        raise ValueError(f"bias has {len(terms)} tensors, but must be one [T, H] or a pair of them")
    shape = handle.native.num_tokens, handle.ep.config.hidden
    for term in terms:
        inputs.array("bias", term, "[T, H]", shape, FLOAT_DTYPES, device)
    return terms


def refused(natives: Natives, error: Exception, x: Any, handle: Any, routing: Routing) -> Exception:
    """Tell the ranks that are in this dispatch; returns the error to raise."""
    if handle is not None:
        return natives.refused_with(error, handle, NormalHandle, CACHED)
    size, data = natives.world_size, inputs.rows_of(x)
    experts, picks = size, size
    worst = likely("num_worst_tokens", routing.worst, error, least=0)
    if routing.given_picks:
        given = routing.per_expert.numel() if isinstance(routing.per_expert, Tensor) else None
        experts = likely("num_tokens_per_expert", given, error, MOST_EXPERTS)
        picks = inputs.columns(routing.topk_idx) or inputs.columns(routing.topk_weights)
    bound = None if worst is None else worst // size or MAX_TOKENS
    guess = inputs.columns(data), experts, picks, bound, inputs.place(data)
    ep = natives.whom_normal(guess)
    exact = not worst
    if worst is None:
        exact = ep is None or ep.config.max_tokens_per_rank == MAX_TOKENS
    return natives.refused(error, ep, DISPATCH, exact)


def dispatch(
    natives: Natives,
    data: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor | None,
    weights: Tensor | None,
    in_ranks: Tensor | None,
    per_expert: Tensor | None,
    num_experts: int,
    alignment: int,
    worst: int,
    num_sms: int,
) -> Dispatched:
    """A fresh dispatch: exact shapes, or ``worst`` rows without a word to the host.

    Without ``topk_idx`` routing is known per rank only (``in_ranks``): each rank counts as one
    expert, and the counts of the true experts (``per_expert``) travel beside.
    """
    size, picks = natives.world_size, topk_idx
    if picks is None:
        assert in_ranks is not None
        ranks = torch.arange(size, device=data.device).expand(in_ranks.shape)
        picks, num_experts = torch.where(in_ranks, ranks, -1), size
    # Rounded down: whatever bounds ranks give that share an object, all rows have a place.
    bound = worst // size if worst else MAX_TOKENS
    sizes = data.shape[1], num_experts, picks.shape[1], bound, data.device
    ep = natives.normal(sizes, bounded=bound != MAX_TOKENS)
    shape = Layout.FLAT, not worst, 1, None
    recv = native_calls.dispatch(ep, (data, scales), picks, weights, shape)
    native = recv.handle
    more = worst - native.num_rows if worst else 0
    routed = {"in_ranks": in_ranks, "topk_idx": topk_idx, "num_sms": num_sms, "more_rows": more}
    handle: NormalHandle = natives.kind.around(ep, native, **routed)
    if worst:
        assert recv.topk_idx is not None
        idx, weights = longer(recv.topk_idx, more, -1), recv.topk_weights
        weights = None if weights is None else longer(weights, more)
        return _rows(recv, more), idx, weights, [], handle
    if topk_idx is None:
        assert per_expert is not None
        counts = aligned(_swap_counts(natives, per_expert), alignment)
        return _rows(recv), None, None, counts, handle
    counts = aligned(rows_of_experts(native), alignment)
    return _rows(recv), recv.topk_idx, recv.topk_weights, counts, handle


def redispatch(data: Tensor, scales: Tensor | None, handle: NormalHandle) -> Rows:
    recv = native_calls.dispatch(handle.ep, (data, scales), known=handle.native)
    return _rows(recv, handle.more_rows)


def combine(
    x: Tensor, handle: NormalHandle, topk_weights: Tensor | None, bias: Any
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and of their weights if there are any."""
    native = handle.native
    if handle.more_rows:
        x = x[: native.num_rows]
        topk_weights = None if topk_weights is None else topk_weights[: native.num_rows]
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


def _rows(recv: Received, more: int = 0) -> Rows:
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
