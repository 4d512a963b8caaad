"""Combine of DeepEP's V2 buffers where a caller may have changed what the handle says of rows:
``recv_src_metadata`` or ``do_expand``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import autograd
from tokenyard.deep_ep import inputs, normal
from tokenyard.deep_ep.elastic_handle import CoreHandle, ReceivedIds
from tokenyard.deep_ep.handles import NormalHandle
from tokenyard.deep_ep.native_calls import along
from tokenyard.rows import sum_rows, take_values
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES

_NOBODY = torch.iinfo(torch.int64).max


def check_combine(x: Any, handle: CoreHandle, topk_weights: Any, bias: Any) -> tuple[Tensor, ...]:
    """Rows, weights and bias of a combine; returns the terms of the bias."""
    inner, picks, expands = handle.inner, handle.inner.ep.config.num_topk, bool(handle.do_expand)
    device, metadata = inner.native.plan.returns.device, handle.recv_src_metadata
    name, tokens = "recv_src_metadata of the handle", inputs.length(metadata)
    shape, meaning = (tokens, 2 + picks), "[N, 2 + K], as the dispatch left it"
    inputs.array(name, metadata, meaning, shape, INDEX_DTYPES, device)
    rows, meaning = tokens, "[N, H], as many as recv_src_metadata has: do_expand of the handle is 0"
    if expands:
        rows, meaning = inputs.length(x), "[rows, H], to which recv_src_metadata points"
    shape = rows, inner.ep.config.hidden
    inputs.array("x", x, meaning, shape, FLOAT_DTYPES, device, "the handle")
    most = int(metadata[:, 2:].max()) if expands and metadata.is_cpu and metadata.numel() else -1
    if most >= len(x):
        raise ValueError(
            f"{name} points to row {most}, but x has {len(x)}: its last K columns are rows of x, "
            f"or -1"
        )
    if topk_weights is not None:
        shape, meaning = ((rows,), "[rows]") if expands else ((rows, picks), "[N, K]")
        inputs.array("topk_weights", topk_weights, meaning, shape, FLOAT_DTYPES, device)
    return normal.check_bias(bias, inner, device)


class Changed(NamedTuple):
    """What a caller may have changed of a ``handle``, when combine was called; with the ids that
    were ``received``."""

    handle: CoreHandle
    metadata: Tensor
    expands: bool
    received: ReceivedIds


def changed(handle: CoreHandle) -> Changed:
    return Changed(handle, handle.recv_src_metadata, bool(handle.do_expand), handle.received)


def combine(
    x: Tensor,
    inner: NormalHandle,
    weights: Tensor | None,
    terms: tuple[Tensor, ...],
    changed: Changed,
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows. The metadata say whose they are (their first column), and if it
    ``expands`` where (the last K; -1: nowhere). Who is not named gets nothing.

    Example: 3 tokens came, as arrival rows 0 to 2. Metadata with the first columns of tokens 2 and
    0 and a pick each, ``[[.., 5], [.., -1]]``, send row 5 of ``x`` for token 2, and zeros for the
    others.
    """
    handle, metadata, expands, received = changed
    made, places, arrived = handle.metadata_as_made(), handle.places(), handle.num_arrived
    source = metadata[:, 0].long()
    keys = torch.where(made[:, 0] < 0, _NOBODY, made[:, 0].long())  # they ascend
    keys = torch.cat([keys, keys.new_full((1,), _NOBODY)])
    at = torch.searchsorted(keys, source)
    known = torch.where(keys[at] == source, at, -1)
    to = known if places is None else take_values(places, known, -1)
    to = torch.where(known < 0, arrived, to)  # this last row is nobody's
    own = torch.arange(len(source), device=x.device).unsqueeze(1)
    slots = metadata[:, 2:].long() if expands else own
    index = slots.new_full((arrived + 1, slots.shape[1]), -1).index_copy_(0, to, slots)
    rows = x.new_empty(arrived, x.shape[1])
    sum_rows(x.contiguous(), index[:arrived], rows)
    reduce = None
    if weights is not None:
        local = made[:, 2:] >= 0 if handle.was_expanded else received.known() >= 0
        given = weights.float()
        if expands:
            given = take_values(given, slots.flatten(), 0.0).view(slots.shape)
        given = torch.where(take_values(local, known, 0.0), given, 0.0)
        reduce = given.new_zeros(arrived + 1, given.shape[1]).index_copy_(0, to, given)[:arrived]
    if not handle.was_expanded:
        return normal.combine(rows, inner, reduce, terms)
    call = along(inner)
    call.raw = True
    return autograd.combine(call, rows, None, reduce, terms)
