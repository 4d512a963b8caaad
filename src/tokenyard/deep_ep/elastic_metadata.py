"""Combine of DeepEP's V2 buffers where a caller may have changed what the handle says of rows:
``recv_src_metadata`` or ``do_expand``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import autograd
from tokenyard.deep_ep import inputs, native_calls, normal
from tokenyard.deep_ep.elastic_handle import CoreHandle
from tokenyard.rows import sum_rows, take_values
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES

_NAME = "recv_src_metadata of the handle"
_NOBODY = torch.iinfo(torch.int64).max


class Changed(NamedTuple):
    """What a handle says when combine is called: metadata that a caller has read or put there
    (None: as made), and ``do_expand``. ``arrived``: tensors of which metadata are made."""

    metadata: Tensor | None
    expands: bool
    arrived: tuple[Any, ...]


def check_combine(
    x: Any, handle: CoreHandle, expands: bool, topk_weights: Any, bias: Any
) -> tuple[tuple[Tensor, ...], Changed]:
    """Rows, weights and bias of a combine; returns the terms of the bias, and what was changed."""
    config, metadata = handle.ep.config, handle.given_metadata
    picks, device, tokens = (
        config.num_topk,
        handle.native.plan.returns.device,
        handle.num_recv_tokens,
    )
    if metadata is not None:
        shape, meaning = (None, 2 + picks), "[N, 2 + K], as the dispatch left it"
        inputs.array(_NAME, metadata, meaning, shape, INDEX_DTYPES, device, "the handle")
        tokens = len(metadata)
    rows, meaning = tokens, "[N, H], as many as recv_src_metadata has: do_expand of the handle is 0"
    if expands:
        rows, meaning = None, "[rows, H], to which recv_src_metadata points"
    shape = rows, config.hidden
    inputs.array("x", x, meaning, shape, FLOAT_DTYPES, device, "the handle")
    if expands and metadata is not None and metadata.is_cpu:
        most = int(metadata[:, 2:].max()) if metadata.numel() else -1
        if most >= len(x):
            raise ValueError(
                f"{_NAME} points to row {most}, but x has {len(x)}: its last K columns are rows of "
                f"x, or -1"
            )
    if topk_weights is not None:
        shape, meaning = ((len(x),), "[rows]") if expands else ((len(x), picks), "[N, K]")
        inputs.array("topk_weights", topk_weights, meaning, shape, FLOAT_DTYPES, device)
    changed = Changed(metadata, expands, tuple(handle.native.arrived))
    return normal.check_bias(bias, handle, device), changed


def combine(
    x: Tensor,
    handle: CoreHandle,
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
    metadata, expands, _ = changed
    made, order, native = handle.metadata_as_made(), handle.order(), handle.native
    arrived = len(native.plan.slots) if handle.was_expanded else native.num_rows
    metadata = made if metadata is None else metadata
    source = metadata[:, 0].long().contiguous()
    keys = torch.cat([made[:, 0].long(), source.new_full((1,), -1)])
    keys = torch.where(keys < 0, _NOBODY, keys)  # they ascend
    at = torch.searchsorted(keys, source)
    known = torch.where(keys[at] == source, at, -1)
    if order is not None:
        known = take_values(order, known, -1)
    to = torch.where(known < 0, arrived, known)  # this last row is nobody's
    own = torch.arange(len(source), device=x.device).unsqueeze(1)
    slots = metadata[:, 2:].long() if expands else own
    index = slots.new_full((arrived + 1, slots.shape[1]), -1).index_copy_(0, to, slots)
    rows = x.new_empty(arrived, x.shape[1])
    sum_rows(x.contiguous(), index[:arrived], rows)
    reduce = None
    if weights is not None:
        given = weights.float()
        if expands:
            given = take_values(given, slots.flatten(), 0.0).view(slots.shape)
        reduce = given.new_zeros(arrived + 1, given.shape[1]).index_copy_(0, to, given)[:arrived]
    if not handle.was_expanded:
        return native_calls.combine(rows, handle, reduce, terms)
    call = native_calls.along(handle)
    call.raw = True
    return autograd.combine(call, rows, None, reduce, terms)
