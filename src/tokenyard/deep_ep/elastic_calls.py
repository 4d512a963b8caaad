"""Dispatch and combine of DeepEP's V2 buffers on the native calls: checks first (see ``inputs``),
then what is exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import autograd
from tokenyard.arguments import LARGEST, MOST_EXPERTS
from tokenyard.deep_ep import decode, inputs, native_calls, normal
from tokenyard.deep_ep.elastic_handle import CoreHandle, ReceivedIds, Shape, most_rows, version_of
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.inputs import ANY, Asked, array, flag, likely, whole
from tokenyard.deep_ep.native_calls import Rows
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.runtime import MOST_SMS
from tokenyard.header import DISPATCH
from tokenyard.results import Received
from tokenyard.rows import sum_rows, take_values
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES, Layout

_NAME = "recv_src_metadata of the handle"
_NOBODY = torch.iinfo(torch.int64).max

SCALES_TOGETHER = 4
"""Rows of scales by column are a multiple of so many words, as copies by hardware (TMA) want."""


class Changed(NamedTuple):
    """What a handle says when combine is called: metadata that a caller has read or put there
    (None: as made), and ``do_expand``. ``arrived``: tensors of which metadata are made."""

    metadata: Tensor | None
    expands: bool
    arrived: tuple[Any, ...]


def check_when(asked: Asked) -> tuple[bool, EventOverlap | None]:
    """Whether a call is asynchronous, and what it waits for."""
    flag("allocate_on_comm_stream", asked.allocate_on_comm_stream)
    later = flag("async_with_compute_stream", asked.async_with_compute_stream)
    event, name = event_of("previous_event", asked.previous_event), "previous_event_before_epilogue"
    second = event_of(name, getattr(asked, name, None))  # V2.5 has none
    if second is not None:
        event = (event or EventHandle()).with_other(second)
    return later, None if event is None else EventOverlap(event)


def event_of(name: str, given: Any) -> EventHandle | None:
    if isinstance(given, EventOverlap):
        return given.event
    if given is not None and not isinstance(given, EventHandle):
        raise ValueError(
            f"{name} ({given!r}) must be an EventHandle, such as capture() returns, an "
            f"EventOverlap, or None"
        )
    return given


def check_flags(flags: dict[str, Any], later: bool, copies_handles: bool) -> None:
    """Make each a bool; None means the default. ``later``: of an asynchronous call."""
    for name, value in flags.items():
        if value is not False and value is not True and value is not None:
            flags[name] = flag(name, value)
    if not copies_handles and flags["do_handle_copy"]:
        raise ValueError("do_handle_copy (True) must be False, as in DeepEP V2.5: clone topk_idx")
    check_deferred(flags.get("defer_epilogue"), later)


def check_deferred(defers: Any, later: bool) -> None:
    """Of a call that is to return its event alone."""
    if flag("defer_epilogue", defers) and not later:
        raise ValueError("defer_epilogue (True) needs async_with_compute_stream=True")


def check_sms(asked: Asked) -> int:
    """Multiprocessors of a call, 0 for the default; queue pairs change nothing."""
    whole("num_qps", asked.num_qps)
    return whole("num_sms", asked.num_sms, 0, MOST_SMS)


def check_fresh(natives: Natives, data: Tensor, asked: Asked, most: int) -> Shape:
    """Look at all that routes ``data``. ``most``: tokens per rank, if the call does not say."""
    num_sms = check_sms(asked)
    if asked.topk_idx is None:
        raise ValueError(
            "topk_idx is missing: pass it (and topk_weights, if there are any), or handle= of an "
            "earlier dispatch"
        )
    inputs.check_picks(asked.topk_idx, asked.topk_weights, data)
    if asked.num_experts is None:
        raise ValueError(
            "num_experts is missing: pass it, or handle= of an earlier dispatch, which knows it"
        )
    experts = whole("num_experts", asked.num_experts, 1, MOST_EXPERTS)
    given = asked.num_max_tokens_per_rank
    given = most or None if given is None else given
    if given is None:
        raise ValueError(
            "num_max_tokens_per_rank is missing: pass it here or to the constructor, the same on "
            "all ranks"
        )
    largest, why = LARGEST // natives.world_size, ": handles number tokens of all ranks in int32"
    most = whole("num_max_tokens_per_rank", given, 1, largest, why)
    inputs.check_tokens(data, "num_max_tokens_per_rank", most)
    alignment = 1 if asked.expert_alignment is None else asked.expert_alignment
    alignment = whole("expert_alignment", alignment, 1)
    decode.check_counts(natives, experts, asked.cumulative_local_expert_recv_stats, data.device)
    expands, exact = bool(asked.flags["do_expand"]), asked.flags["do_cpu_sync"] is not False
    return Shape(experts, alignment, most, num_sms, expands, exact)


def check_cached(kind: type[CoreHandle], data: Tensor, asked: Asked, group: Any) -> CoreHandle:
    """A cached dispatch: its routing from a handle of this ``kind``, perhaps new weights."""
    handle, flags = asked.handle, asked.flags
    if asked.topk_idx is not None:
        raise ValueError(
            "topk_idx given together with handle: leave it out, the handle knows the routing"
        )
    inputs.check_handle(handle, kind, group)
    check_sms(asked)
    for name in ("num_experts", "expert_alignment", "num_max_tokens_per_rank"):
        given, known = getattr(asked, name), getattr(handle, name)
        if given is not None and whole(name, given, 1) != known:
            raise ValueError(f"{name} ({given}) must be {known}, that of the handle: leave it out")
    inputs.check_rows_again("x", data, handle)
    if asked.topk_weights is not None:
        picks = data.shape[0], handle.ep.config.num_topk
        meaning = "[T, K], as the topk_idx of the handle"
        array("topk_weights", asked.topk_weights, meaning, picks, FLOAT_DTYPES, data.device)
    if flags["do_cpu_sync"]:
        raise ValueError(
            "do_cpu_sync (True) cannot be had with a handle, whose counts are known: leave it out"
        )
    if bool(flags["do_expand"]) is not handle.was_expanded:
        raise ValueError(
            f"do_expand ({bool(flags['do_expand'])}) must be {handle.was_expanded} here, as in the "
            f"dispatch that made the handle"
        )
    return handle


def check_combine(
    x: Any, handle: CoreHandle, topk_weights: Any, bias: Any
) -> tuple[tuple[Tensor, ...], Changed | None]:
    """Rows, weights and bias of a combine; returns the terms of the bias, and what a caller has
    changed of the handle, if anything."""
    expands = flag("do_expand of the handle", handle.do_expand)
    if not handle.as_dispatched(expands):
        return _check_changed(x, handle, expands, topk_weights, bias)
    if not expands:
        return normal.check_combine(x, handle, topk_weights, bias), None
    terms = normal.check_combine(x, handle, None, bias)
    if topk_weights is not None:
        meaning = "[rows], one for each of x, as do_expand returned them"
        array("topk_weights", topk_weights, meaning, (x.shape[0],), FLOAT_DTYPES, x.device)
    return terms, None


def _check_changed(
    x: Any, handle: CoreHandle, expands: bool, topk_weights: Any, bias: Any
) -> tuple[tuple[Tensor, ...], Changed]:
    """The same where a caller may have changed what the handle says of rows."""
    config, metadata, tokens = handle.ep.config, handle.given_metadata, handle.num_recv_tokens
    picks, device = config.num_topk, handle.native.plan.returns.device
    if metadata is not None:
        shape, meaning = (ANY, 2 + picks), "[N, 2 + K], as the dispatch left it"
        array(_NAME, metadata, meaning, shape, INDEX_DTYPES, device, "the handle")
        tokens = len(metadata)
    rows, meaning = tokens, "[N, H], as many as recv_src_metadata has: do_expand of the handle is 0"
    if expands:
        rows, meaning = ANY, "[rows, H], to which recv_src_metadata points"
    shape = rows, config.hidden
    array("x", x, meaning, shape, FLOAT_DTYPES, device, "the handle")
    if expands and metadata is not None and metadata.is_cpu:
        most = int(metadata[:, 2:].max()) if metadata.numel() else -1
        if most >= len(x):
            raise ValueError(
                f"{_NAME} points to row {most}, but x has {len(x)}: its last K columns are rows of "
                f"x, or -1"
            )
    if topk_weights is not None:
        shape, meaning = ((len(x),), "[rows]") if expands else ((len(x), picks), "[N, K]")
        array("topk_weights", topk_weights, meaning, shape, FLOAT_DTYPES, device)
    changed = Changed(metadata, expands, tuple(handle.native.arrived))
    return normal.check_bias(bias, handle, device), changed


# Of a rank that refuses its arguments


def refused(natives: Natives, error: Exception, asked: Asked, exact: bool, most: int) -> Exception:
    """Tell ranks in a fresh dispatch; returns the error to raise. ``most``: their likely tokens."""
    tokens: int | None = most
    if not exact:
        tokens = asked.num_max_tokens_per_rank or most
        tokens = likely("num_max_tokens_per_rank", tokens, error)
    picks, experts = (asked.topk_idx, asked.topk_weights), ("num_experts", asked.num_experts)
    guess = inputs.guess(error, asked.x, picks, experts, tokens)
    return natives.refused(error, natives.whom_normal(guess), DISPATCH, exact)


# Calls

Dispatched = tuple[Any, Tensor | None, Tensor | None, CoreHandle, tuple[Tensor | None, ...]]
"""Rows, ids, weights, the handle, its copies of ids."""


def dispatch(
    natives: Natives,
    object_tokens: int,
    rows: Rows,
    picks: tuple[Tensor, Tensor | None],
    stats: Tensor | None,
    shape: Shape,
    by_column: bool,
    made: tuple[type[CoreHandle], bool, int],
) -> Dispatched:
    """A fresh dispatch. ``object_tokens``: ``max_tokens_per_rank`` of the native object;
    ``by_column``: lay received scales so; ``made`` of the handle: its class, whether to copy ids,
    scale-up ranks."""
    data, (topk_idx, weights), exact = rows[0], picks, shape.do_cpu_sync
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
    recv = native_calls.dispatch(ep, rows, topk_idx, weights, wanted)
    if stats is not None:
        stats.add_(recv.tokens_per_expert)
    kind, copies, scaleup = made
    kept = topk_idx.clone() if copies else topk_idx
    native = recv.handle
    ids = native.arrived.topk_idx
    received = ReceivedIds(ids, 0, None)
    if exact and ids is recv.topk_idx:
        received = ReceivedIds(ids, version_of(ids), ids.clone())
    handle = kind(ep, native, shape, kept, scaleup, received)
    if not exact and data.is_cuda and torch.cuda.is_current_stream_capturing():
        handle.note_capture()
    weights = recv.row_weights if shape.do_expand else recv.topk_weights
    made_here = kept if copies else None, received.copy
    return _rows(recv, by_column), recv.topk_idx, weights, handle, made_here


def redispatch(
    rows: Rows,
    handle: CoreHandle,
    weights: Tensor | None,
    received: ReceivedIds,
    by_column: bool,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Rows along a known routing, with the ids ``received``; new weights travel by themselves."""
    recv, weights = native_calls.redispatch(handle, rows, weights, received.known())
    return _rows(recv, by_column), received.again(recv.topk_idx), weights


def combine(
    x: Tensor,
    handle: CoreHandle,
    weights: Tensor | None,
    terms: tuple[Tensor, ...],
    changed: Changed | None,
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows, and its weights, of whatever layout."""
    if changed is not None:
        return _combine_changed(x, handle, weights, terms, changed)
    return native_calls.combine(x, handle, weights, terms)


def _combine_changed(
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


def _rows(recv: Received, by_column: bool) -> Any:
    """``by_column``: scales ``[rows, S]`` so, columns a multiple of 16 bytes apart."""
    scales = recv.scales
    if scales is None or not by_column:
        return recv.x if scales is None else (recv.x, scales)
    apart = -(-len(scales) // SCALES_TOGETHER) * SCALES_TOGETHER
    room = torch.empty_strided(scales.shape, (1, apart), dtype=scales.dtype, device=scales.device)
    return recv.x, room.copy_(scales)
