"""Dispatch and combine of DeepEP's V2 buffers on the native calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard import autograd, gradients
from tokenyard.deep_ep import native_calls, normal
from tokenyard.deep_ep.elastic_handle import CoreHandle, ReceivedIds, Shape, keep_psums, most_rows
from tokenyard.deep_ep.elastic_inputs import Routing
from tokenyard.deep_ep.handles import NormalHandle
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.normal import Rows
from tokenyard.results import Received
from tokenyard.types import Layout

SCALES_TOGETHER = 4
"""Rows of scales by column are a multiple of so many words, as copies by hardware (TMA) want."""

Dispatched = tuple[
    Rows, Tensor | None, Tensor | None, NormalHandle, CoreHandle, tuple[Tensor | None, ...]
]
"""Rows, ids, weights, what calls are made with, the handle around it, its copies of ids."""


def dispatch(
    natives: Natives,
    object_tokens: int,
    rows: tuple[Tensor, Tensor | None],
    routing: Routing,
    shape: Shape,
    by_column: bool,
    made: tuple[type[CoreHandle], bool, int],
) -> Dispatched:
    """A fresh dispatch. ``object_tokens``: ``max_tokens_per_rank`` of the native object;
    ``by_column``: lay received scales so; ``made`` of the handle: its class, whether to copy ids,
    scale-up ranks.
    """
    data, topk_idx, exact = rows[0], routing.topk_idx, shape.do_cpu_sync
    num_topk, bounded = topk_idx.shape[1], object_tokens == shape.num_max_tokens_per_rank
    sizes = data.shape[1], shape.num_experts, num_topk, object_tokens, data.device
    ep = natives.normal(sizes, bounded)
    layout, alignment, capacity = Layout.FLAT, 1, None
    if shape.do_expand:
        layout, alignment = Layout.EXPERT_MAJOR, shape.expert_alignment
        if not exact:
            tokens, local = ep.config.padded_rows, ep.config.most_local_experts
            capacity = most_rows(tokens, num_topk, local, alignment)
    wanted = layout, exact, alignment, capacity
    recv = native_calls.dispatch(ep, rows, topk_idx, routing.topk_weights, wanted)
    if routing.stats is not None:
        routing.stats.add_(recv.tokens_per_expert)
    kind, copies, scaleup = made
    kept = topk_idx.clone() if copies else topk_idx
    native = recv.handle
    ids = native.arrived.topk_idx
    if exact and ids is recv.topk_idx:
        received = ReceivedIds(ids, -1 if ids.is_inference() else ids._version, ids.clone())
    else:
        received = ReceivedIds(ids, 0, None)
    inner = NormalHandle.around(ep, native, topk_idx=kept, num_sms=shape.num_sms)
    handle = kind(inner, shape, kept, scaleup, received)
    if not exact and data.is_cuda and torch.cuda.is_current_stream_capturing():
        keep_psums(handle)
    weights = recv.row_weights if shape.do_expand else recv.topk_weights
    made_here = kept if copies else None, received.copy
    return _rows(recv, by_column), recv.topk_idx, weights, inner, handle, made_here


def redispatch(
    rows: tuple[Tensor, Tensor | None],
    inner: NormalHandle,
    weights: Tensor | None,
    received: ReceivedIds,
    by_column: bool,
) -> tuple[Rows, Tensor | None, Tensor | None]:
    """Rows along a known routing, with the ids ``received``; new weights travel by themselves."""
    ep, native = inner.ep, inner.native
    recv = native_calls.dispatch(ep, rows, known=native)
    if weights is not None:
        ids, num_rows = received.known(), native.num_rows
        weights = gradients.weights_there(native_calls.along(inner), weights.float(), ids, num_rows)
    return _rows(recv, by_column), received.again(recv.topk_idx), weights


def combine(
    x: Tensor, inner: NormalHandle, weights: Tensor | None, terms: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and its weights, of whatever layout."""
    native = inner.native
    if weights is None or native.layout is Layout.FLAT:
        return normal.combine(x, inner, weights, terms)
    reduce = gradients.by_arrival(weights.float(), native.plan, native.spec, None)
    return autograd.combine(native_calls.along(inner), x, None, reduce, terms)


def _rows(recv: Received, by_column: bool) -> Rows:
    """``by_column``: scales ``[rows, S]`` so, columns a multiple of 16 bytes apart."""
    scales = recv.scales
    if scales is None or not by_column:
        return recv.x if scales is None else (recv.x, scales)
    apart = -(-len(scales) // SCALES_TOGETHER) * SCALES_TOGETHER
    room = torch.empty_strided(scales.shape, (1, apart), dtype=scales.dtype, device=scales.device)
    return recv.x, room.copy_(scales)
