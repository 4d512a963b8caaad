"""Normal mode: DeepEP's layout, dispatch and combine on the native calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.arguments import MOST_EXPERTS
from tokenyard.deep_ep import inputs
from tokenyard.deep_ep.handles import NormalHandle, num_nodes
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.values import likely, whole
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.results import Received, rows_of_experts
from tokenyard.routing import expert_bounds, host_ints
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES, Quantized

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
) -> tuple[int, int]:
    """Look at all that routes ``data``; returns alignment and number of static rows."""
    alignment = whole("expert_alignment", routing.alignment, 1)
    worst = whole("num_worst_tokens", routing.worst)
    if handle is not None:
        if routing.given_picks:
            raise ValueError(
                "topk_idx or topk_weights given together with handle: leave them out, the handle "
                "knows the routing"
            )
        known = check_handle(handle, group)
        shape = known.native.num_tokens, known.ep.config.hidden
        inputs.array(
            "x", data, "the shape [T, H] that the handle was made for", shape, (data.dtype,)
        )
        _check_device("x", data, known)
        return alignment, worst
    if routing.per_expert is None:
        raise ValueError(
            "num_tokens_per_expert is missing: pass what get_dispatch_layout() returned, or a "
            "handle"
        )
    _check_layout(natives, data, routing)
    if routing.topk_idx is None:
        _check_bare(routing, worst)
    else:
        inputs.check_picks(routing.topk_idx, routing.topk_weights, data)
        tokens, size = data.shape[0], natives.world_size
        if worst and -(-worst // size) < tokens:
            raise ValueError(
                f"num_worst_tokens ({worst}) must be at least {size * tokens}, {size} ranks times "
                f"the {tokens} tokens of this "
                "one: raise it on all ranks alike, or split the batch"
            )
    return alignment, worst


def _check_layout(natives: Natives, data: Tensor, routing: Routing) -> None:
    """What ``get_dispatch_layout`` returned, as far as it was given."""
    size, device = natives.world_size, data.device
    experts, in_ranks = routing.per_expert, routing.in_ranks
    shape = (experts.numel() if isinstance(experts, Tensor) else None,)
    inputs.array("num_tokens_per_expert", experts, "[E]", shape, INDEX_DTYPES, device)
    if not 1 <= experts.numel() <= MOST_EXPERTS:
        raise ValueError(
            f"num_tokens_per_expert has {experts.numel()} experts, but must have 1 to "
            f"{MOST_EXPERTS}"
        )
    if in_ranks is not None:
        inputs.array(
            "is_token_in_rank", in_ranks, "[T, R]", (data.shape[0], size), (torch.bool,), device
        )
    if routing.per_rank is not None:
        inputs.array("num_tokens_per_rank", routing.per_rank, "[R]", (size,), INDEX_DTYPES)
    if routing.per_node is not None:
        inputs.array(
            "num_tokens_per_rdma_rank",
            routing.per_node,
            "[R / 8]",
            (num_nodes(size),),
            INDEX_DTYPES,
        )


def _check_bare(routing: Routing, worst: int) -> None:
    if routing.in_ranks is None or routing.topk_weights is not None or worst:
        raise ValueError(
            "topk_idx is missing: without it a dispatch needs is_token_in_rank, and takes neither "
            "topk_weights nor num_worst_tokens"
        )


def _check_device(name: str, rows: Tensor, handle: NormalHandle) -> None:
    device = handle.native.plan.returns.device
    if rows.device != device:
        raise ValueError(
            f"{name} is on {rows.device}, but must be on {device}, as the handle is: move it there"
        )


def check_combine(x: Any, handle: NormalHandle, topk_weights: Any, bias: Any) -> tuple[Tensor, ...]:
    """Rows, weights and bias of a combine; returns the terms of the bias."""
    config, native = handle.ep.config, handle.native
    rows = native.num_rows if handle.cut_to is None else handle.cut_to
    inputs.array(
        "x", x, "the rows [N, H] that the dispatch brought", (rows, config.hidden), FLOAT_DTYPES
    )
    _check_device("x", x, handle)
    if topk_weights is not None:
        inputs.array(
            "topk_weights", topk_weights, "[N, K]", (rows, config.num_topk), FLOAT_DTYPES, x.device
        )
    terms: tuple[Any, ...] = (bias,)
    if bias is None:
        terms = ()
    elif isinstance(bias, (tuple, list)):
        terms = tuple(bias)  # pyright: ignore
    if len(terms) > 2 or (bias is not None and not terms):
        raise ValueError(f"bias has {len(terms)} tensors, but must be one [T, H] or a pair of them")
    for term in terms:
        inputs.array(
            "bias", term, "[T, H]", (native.num_tokens, config.hidden), FLOAT_DTYPES, x.device
        )
    return terms


def check_handle(handle: Any, group: Any) -> NormalHandle:
    """The very tuple that a dispatch returned."""
    if not isinstance(handle, NormalHandle):
        raise ValueError(
            f"handle must be the tuple that dispatch() of this library returned, not a "
            f"{type(handle).__name__}"
        )
    inputs.check_same_group(handle, group)
    return handle


def refused(natives: Natives, error: Exception, x: Any, handle: Any, routing: Routing) -> Exception:
    """Tell the ranks that are in this dispatch; returns the error to raise."""
    if handle is not None:
        return natives.refused(error, whom(natives, handle), CACHED)
    size, data = natives.world_size, inputs.rows_of(x)
    experts, picks, bound = size, size, MAX_TOKENS
    if routing.given_picks:
        given = routing.per_expert.numel() if isinstance(routing.per_expert, Tensor) else None
        experts = likely("num_tokens_per_expert", given, error, MOST_EXPERTS)
        picks = inputs.columns(routing.topk_idx) or inputs.columns(routing.topk_weights)
        if type(routing.worst) is not int or routing.worst:
            worst = likely("num_worst_tokens", routing.worst, error)
            bound = None if worst is None else -(-worst // size)
    ep = natives.whom_normal((inputs.columns(data), experts, picks, bound, inputs.place(data)))
    return natives.refused(
        error, ep, DISPATCH, ep is None or ep.config.max_tokens_per_rank == MAX_TOKENS
    )


def refused_combine(natives: Natives, error: Exception, handle: Any) -> Exception:
    """The same of a combine."""
    return natives.refused(error, whom(natives, handle), COMBINE)


def whom(natives: Natives, handle: Any) -> ExpertParallel | None:
    """The object that the others of a call with a handle are likely to call."""
    return natives.whom_of(
        handle if isinstance(handle, NormalHandle) else None, natives.last_normal
    )


def fresh(
    natives: Natives,
    data: Tensor,
    scales: Tensor | None,
    routing: Routing,
    alignment: int,
    worst: int,
    num_sms: int,
) -> tuple[Callable[..., Dispatched], tuple[Any, ...]]:
    """The function for a fresh dispatch, and its arguments: all tensors that it reads are among
    them.
    """
    experts, in_ranks = routing.per_expert, routing.in_ranks
    if routing.topk_idx is None:
        return dispatch_bare, (natives, data, scales, in_ranks, experts, alignment, num_sms)
    picks, num_experts = (routing.topk_idx, routing.topk_weights, in_ranks), experts.numel()
    return dispatch, (natives, data, scales, *picks, num_experts, alignment, worst, num_sms)


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


def redispatch(data: Tensor, scales: Tensor | None, handle: NormalHandle) -> Rows:
    """Rows along a known routing."""
    payload = data if scales is None else Quantized(data, scales)
    recv = handle.ep.dispatch(payload, handle=handle.native)
    if handle.cut_to is not None:
        return _cut(recv, handle.cut_to)[0]
    return _rows(recv)


def combine(
    x: Tensor, handle: NormalHandle, topk_weights: Tensor | None, bias: Any
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and of their weights if there are any."""
    native = handle.native
    if handle.cut_to is not None:
        x, topk_weights = (
            _stretch(x, handle),
            None if topk_weights is None else _stretch(topk_weights, handle),
        )
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
    """The first ``num_rows`` rows: static shapes round the worst case up to a multiple of the
    ranks.
    """
    x, scales, idx, weights = (
        None if t is None else t[:num_rows]
        for t in (recv.x, recv.scales, recv.topk_idx, recv.topk_weights)
    )
    return x if scales is None else (x, scales), idx, weights


def _stretch(rows: Tensor, handle: NormalHandle) -> Tensor:
    """``rows`` with those that :func:`_cut` took away; nobody reads them. Another number of rows is
    the native call's to refuse.
    """
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
    """Routing known per rank only: each rank counts as one expert, and the true experts' counts
    travel beside.
    """
    size = natives.world_size
    ranks = torch.arange(size, device=data.device).expand(in_ranks.shape)
    ep = natives.normal((data.shape[1], size, size, MAX_TOKENS, data.device))
    payload = data if scales is None else Quantized(data, scales)
    recv = ep.dispatch(payload, torch.where(in_ranks, ranks, -1))
    counts = _swap_counts(natives, per_expert)
    handle = natives.kind.of(ep, recv.handle, in_ranks, None, num_sms)
    return _rows(recv), None, None, aligned(counts, alignment), handle


def _swap_counts(natives: Natives, per_expert: Tensor) -> list[int]:
    """Tokens for each of this rank's experts, from every rank's ``per_expert [E]``: one small row
    to each rank.
    """
    size, device, num_experts = natives.world_size, per_expert.device, per_expert.shape[0]
    bounds = expert_bounds(num_experts, size)
    width = -(-num_experts // size)
    width += -width % COUNT_WORDS
    table = torch.zeros(size, width, dtype=torch.int32, device=device)
    for rank in range(size):
        table[rank, : bounds[rank + 1] - bounds[rank]] = per_expert[bounds[rank] : bounds[rank + 1]]
    recv = natives.counting(width, device).dispatch(
        table.view(torch.float32), torch.arange(size, device=device).unsqueeze(1)
    )
    mine = bounds[natives.rank + 1] - bounds[natives.rank]
    return host_ints(recv.x.view(torch.int32).sum(0)[:mine])
