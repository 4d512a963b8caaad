"""Low-latency mode: one block of ``R * M`` rows per local expert, static shapes, weights applied on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.deep_ep.config import RING_BYTES
from tokenyard.deep_ep.handles import LowLatencyHandle
from tokenyard.deep_ep.natives import LOW_LATENCY, LOW_LATENCY_OBJECTS, Natives, Sizes
from tokenyard.engines.low_latency_options import CallOptions
from tokenyard.results import Received
from tokenyard.types import Layout, Quantize

MOST_PICKS = 16
"""Picks per token that the size hint leaves room for."""

Rows = Any
"""``[L, R * M, H]``, or the pair of FP8 data and scales, column-major, as DeepGEMM reads them."""

Hook = Callable[[], None]


def size_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of symmetric memory on one rank: rings, or (engine low_latency) two halves of a slot per token of every rank, for each
    object; whichever is more.

    >>> size_hint(128, 7168, 8, 288) // 10**6  # DeepEP: 2147
    134
    """
    slot = -(-(2 * hidden + 12 * MOST_PICKS + 16) // 128) * 128
    flags = 8 * (-(-num_experts // num_ranks) + 1 + max_tokens * (1 + MOST_PICKS))
    one = 2 * num_ranks * (flags + max_tokens * slot)
    return max(RING_BYTES, LOW_LATENCY_OBJECTS * (-(-one // 256) * 256))


def mode_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Quantize | None:
    """The cast in the send."""
    if not use_fp8:
        return None
    if use_ue8m0:
        return Quantize.FP8_UE8M0
    return Quantize.FP8_POW2 if round_scale else Quantize.FP8


def dispatch(
    natives: Natives,
    sizes: Sizes,
    x: Tensor,
    topk_idx: Tensor,
    mode: Quantize | None,
    stats: Tensor | None,
    waits: Tensor | None,
    hooked: bool,
) -> tuple[Rows, Tensor, LowLatencyHandle, Hook | None]:
    """Rows by expert, how many each expert got, the handle, and a hook if asked for.

    Counts are added to ``stats`` and waiting times to ``waits``, by the hook if there is one.
    """
    ep = natives.low_latency(sizes)
    in_two = hooked and ep.engine == LOW_LATENCY
    options = {} if waits is None else _options(ep, waits, "dispatch_wait_recv_cost_stats")
    recv = ep.dispatch(
        x, topk_idx, layout=Layout.EXPERT_PADDED, exact=False, quantize=mode, return_hook=in_two, **options
    )
    seen = recv.ahead if in_two else recv
    counts, scales = seen.tokens_per_expert, seen.scales
    by_column = None if scales is None else _by_column(scales)
    rows, handle = seen.x if scales is None else (seen.x, by_column), LowLatencyHandle.of(ep, seen.handle)
    rest = ep, recv, stats, counts, waits, scales, by_column
    if in_two:
        return rows, counts, handle, partial(_finish, *rest)
    _finish(*rest)
    return rows, counts, handle, nothing_left if hooked else None


def _finish(
    ep: ExpertParallel,
    recv: Received,
    stats: Tensor | None,
    counts: Tensor,
    waits: Tensor | None,
    scales: Tensor | None,
    by_column: Tensor | None,
) -> None:
    """The receive of a dispatch, and what follows from it."""
    recv.hook()
    if stats is not None:
        _check_stats("cumulative_local_expert_recv_stats", stats, torch.int32, counts.numel())
        stats.add_(counts)
    if waits is not None:
        _add_waits(ep, waits)
    if scales is not None and by_column is not None and by_column is not scales:
        by_column.copy_(scales)


def combine(
    x: Tensor,
    handle: LowLatencyHandle,
    topk_weights: Tensor,
    zero_copy: bool,
    out: Tensor | None,
    waits: Tensor | None,
    hooked: bool,
) -> tuple[Tensor, Hook | None]:
    """The weighted sum of each token's rows, and a hook if asked for. Waiting times are added to ``waits``."""
    if zero_copy:
        if handle.next_buffer is None:
            raise ValueError(
                "zero_copy=True reads what get_next_low_latency_combine_buffer(handle) gave out, but nobody asked for it: "
                "write the experts' output there first, or leave zero_copy out"
            )
        x = handle.next_buffer
    ep, native = handle.ep, handle.native
    options = {} if waits is None else _options(ep, waits, "combine_wait_recv_cost_stats")
    in_two = hooked and ep.engine == LOW_LATENCY
    if in_two and out is None:
        out = x.new_empty(native.num_tokens, x.shape[-1])
    combined: Any = ep.combine(
        x, native, weighted=True, topk_weights=topk_weights, out=out, return_hook=in_two, **options
    )
    if in_two and out is not None:
        return out, combined.hook
    if waits is not None:
        _add_waits(ep, waits)
    return combined, nothing_left if hooked else None


def next_buffer(handle: LowLatencyHandle) -> Tensor:
    """Where the experts may write what combine is to send: bf16 ``[L, R * M, H]``, one per handle."""
    if handle.next_buffer is None:
        handle.next_buffer = handle.ep.empty_for_combine(handle.native)
    return handle.next_buffer


def check_handle(handle: Any) -> LowLatencyHandle:
    """The very tuple that a dispatch returned."""
    if not isinstance(handle, LowLatencyHandle):
        raise ValueError(
            f"handle must be the tuple that low_latency_dispatch() of this library returned, not a {type(handle).__name__}"
        )
    return handle


def nothing_left() -> None:
    """The hook of a call whose rows are good for the current stream already."""


def _by_column(scales: Tensor) -> Tensor:
    """Room for scales ``[L, R * M, S]`` that lie column by column; themselves if one column is all there is."""
    if scales.shape[2] == 1:
        return scales
    return torch.empty_like(scales.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


# Statistics


def _options(ep: ExpertParallel, waits: Tensor, name: str) -> dict[str, Any]:
    """Let the engine for decoding measure waits on the device."""
    _check_stats(name, _mine(ep, waits), torch.int64, ep.world_size)
    return {"options": CallOptions(waits=_mine(ep, waits))} if ep.engine == LOW_LATENCY else {}


def _add_waits(ep: ExpertParallel, waits: Tensor) -> None:
    """Of other engines, add the nanoseconds that the last call waited for each rank, where they can tell."""
    if ep.engine == LOW_LATENCY:
        return
    last = [0 if isnan(seconds) else int(seconds * 1e9) for seconds in ep.stats().last_wait]
    if any(last):
        _mine(ep, waits).add_(torch.tensor(last, dtype=torch.int64, device="cpu").to(waits.device))


def _mine(ep: ExpertParallel, waits: Tensor) -> Tensor:
    """This rank's part of a vector ``[R]``, or of a table ``[R, R]``."""
    return waits[ep.rank] if waits.dim() == 2 else waits


def _check_stats(name: str, stats: Tensor, dtype: torch.dtype, length: int) -> None:
    if stats.dtype != dtype or stats.shape != (length,):
        got = f"{stats.dtype}, shape {list(stats.shape)}"
        raise ValueError(f"{name} is of {got}, but must be of {dtype}, shape [{length}]")


# Masks


def update_mask(objects: Iterable[ExpertParallel], rank: int, mask: bool) -> None:
    """Leave ``rank`` out of every object, or take it back.

    Raises:
        NotSupported: an engine cannot leave it out.
    """
    for ep in objects:
        if mask:
            ep.mask(rank)
        elif ep.engine == LOW_LATENCY:
            ep.unmask(rank)


def query_mask(objects: Iterable[ExpertParallel], status: Tensor) -> None:
    """Write 1 for each rank that some object leaves out, else 0; the host does not wait."""
    status.zero_()
    for ep in objects:
        if ep.engine == LOW_LATENCY:
            status |= ep.active_mask == 0
