"""Low-latency mode: one block of ``R * M`` rows per local expert, static shapes, weights applied on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isnan
from typing import Any

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.deep_ep.config import RING_BYTES
from tokenyard.deep_ep.handles import LowLatencyHandle
from tokenyard.deep_ep.natives import LOW_LATENCY, LOW_LATENCY_OBJECTS, Natives, Sizes
from tokenyard.engines.low_latency_options import CallOptions
from tokenyard.results import by_column
from tokenyard.types import Layout, Quantize

MOST_PICKS = 16
"""Picks per token that the size hint leaves room for."""

PADDED = Layout.EXPERT_PADDED
"""The layout of this mode."""

BY_COLUMN = CallOptions(scales_by_column=True)
"""Of a dispatch that was asked for no statistics."""

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


def mode_of(round_scale: bool, use_ue8m0: bool) -> Quantize:
    """The cast in the send."""
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
    if stats is not None:
        _check_stats("cumulative_local_expert_recv_stats", stats, torch.int32, ep.config.num_local_experts)
    if waits is not None:
        waits = _checked_waits("dispatch_wait_recv_cost_stats", ep, waits)
    if ep.engine != LOW_LATENCY:
        return *_dispatch_elsewhere(ep, x, topk_idx, mode, stats, waits), nothing_left if hooked else None
    options = None if mode is None else BY_COLUMN
    if stats is not None or waits is not None:
        options = CallOptions(waits=waits, loads=stats, scales_by_column=mode is not None)
    recv = ep.dispatch(x, topk_idx, layout=PADDED, exact=False, quantize=mode, return_hook=hooked, options=options)
    seen, hook = recv, None
    if hooked:
        seen, hook = recv.ahead, recv.wait
        seen.wait()  # sooner than by reading
    rows = seen.x if mode is None else (seen.x, seen.scales)
    return rows, seen.tokens_per_expert, LowLatencyHandle.of(ep, seen.handle), hook


def _dispatch_elsewhere(
    ep: ExpertParallel, x: Tensor, topk_idx: Tensor, mode: Quantize | None, stats: Tensor | None, waits: Tensor | None
) -> tuple[Rows, Tensor, LowLatencyHandle]:
    """On other engines statistics are added, and scales transposed, behind the call."""
    recv = ep.dispatch(x, topk_idx, layout=PADDED, exact=False, quantize=mode)
    counts, scales = recv.tokens_per_expert, recv.scales
    if stats is not None:
        stats.add_(counts)
    if waits is not None:
        _add_waits(ep, waits)
    rows = recv.x if scales is None else (recv.x, by_column(scales))
    return rows, counts, LowLatencyHandle.of(ep, recv.handle)


def combine(
    x: Tensor,
    handle: LowLatencyHandle,
    topk_weights: Tensor,
    out: Tensor | None,
    waits: Tensor | None,
    hooked: bool,
) -> tuple[Tensor, Hook | None]:
    """The weighted sum of each token's rows, and a hook if asked for. Waiting times are added to ``waits``."""
    ep, native = handle.ep, handle.native
    waits = None if waits is None else _checked_waits("combine_wait_recv_cost_stats", ep, waits)
    low = ep.engine == LOW_LATENCY
    options = CallOptions(waits=waits) if low and waits is not None else None
    in_two = hooked and low
    if in_two and out is None:
        out = x.new_empty(native.num_tokens, x.shape[-1])
    combined: Any = ep.combine(
        x, native, weighted=True, topk_weights=topk_weights, out=out, return_hook=in_two, options=options
    )
    if in_two and out is not None:
        return out, combined.wait
    if waits is not None and not low:
        _add_waits(ep, waits)
    return combined, nothing_left if hooked else None


def next_buffer(handle: LowLatencyHandle) -> Tensor:
    """Where the experts may write what combine is to send: bf16 ``[L, R * M, H]``, one per handle."""
    if handle.next_buffer is None:
        handle.next_buffer = handle.ep.empty_for_combine(handle.native)
    return handle.next_buffer


def written_buffer(handle: LowLatencyHandle) -> Tensor:
    """What :func:`next_buffer` gave out.

    Raises:
        ValueError: nobody asked for it.
    """
    if handle.next_buffer is None:
        raise ValueError(
            "zero_copy=True reads what get_next_low_latency_combine_buffer(handle) gave out, but nobody asked for it: "
            "write the experts' output there first, or leave zero_copy out"
        )
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


# Statistics


def _add_waits(ep: ExpertParallel, waits: Tensor) -> None:
    """Add the nanoseconds that the last call waited for each rank, where an engine can tell."""
    last = [0 if isnan(seconds) else int(seconds * 1e9) for seconds in ep.stats().last_wait]
    if any(last):
        waits.add_(torch.tensor(last, dtype=torch.int64, device="cpu").to(waits.device))


def _checked_waits(name: str, ep: ExpertParallel, waits: Tensor) -> Tensor:
    """This rank's part of a vector ``[R]``, or of a table ``[R, R]``."""
    mine = waits[ep.rank] if waits.dim() == 2 else waits
    _check_stats(name, mine, torch.int64, ep.world_size)
    return mine


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
