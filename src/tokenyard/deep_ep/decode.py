"""Low-latency mode: blocks of ``R * M`` rows per local expert; combine applies the weights."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.arguments import LARGEST, MOST_EXPERTS
from tokenyard.deep_ep import inputs
from tokenyard.deep_ep.handles import LowLatencyHandle
from tokenyard.deep_ep.inputs import Asked, flag, likely, whole
from tokenyard.deep_ep.natives import LOW_LATENCY, LOW_LATENCY_OBJECTS, Natives, Sizes
from tokenyard.deep_ep.overlap import Overlap, hook_of
from tokenyard.deep_ep.overlap import wait as wait_for
from tokenyard.deep_ep.runtime import RING_BYTES
from tokenyard.engines.base import CallOptions
from tokenyard.header import DISPATCH
from tokenyard.results import by_column
from tokenyard.routing import expert_bounds
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES, QUANTIZED_DTYPES, Layout, Quantize

MOST_PICKS = 16
"""Picks per token that the size hint leaves room for."""

BY_COLUMN = CallOptions(scales_by_column=True)
"""Of a dispatch that was asked for no statistics."""

Hook = Callable[[], None]


def size_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of symmetric memory on a rank: rings, or two slots per token of every rank in each
    object of engine low_latency; whichever is more.

    >>> size_hint(128, 7168, 8, 288) // 10**6  # DeepEP: 2147
    134
    """
    given = max_tokens, hidden, num_experts, num_ranks
    max_tokens, hidden, num_experts, num_ranks = check_sizes(*given)
    slot = -(-(2 * hidden + 12 * MOST_PICKS + 16) // 128) * 128
    flags = 8 * (-(-num_experts // num_ranks) + 1 + max_tokens * (1 + MOST_PICKS))
    one = 2 * num_ranks * (flags + max_tokens * slot)
    return max(RING_BYTES, LOW_LATENCY_OBJECTS * (-(-one // 256) * 256))


def mode_of(use_fp8: Any, round_scale: Any, use_ue8m0: Any) -> Quantize | None:
    """The cast in the send."""
    scales = Quantize.FP8_POW2 if flag("round_scale", round_scale) else Quantize.FP8
    scales = Quantize.FP8_UE8M0 if flag("use_ue8m0", use_ue8m0) else scales
    return scales if flag("use_fp8", use_fp8) else None


def check_ways(async_finish: Any, return_recv_hook: Any) -> tuple[bool, bool]:
    """How a call is waited for: by an event, by a hook, or not at all."""
    later, hooked = flag("async_finish", async_finish), flag("return_recv_hook", return_recv_hook)
    if later and hooked:
        raise ValueError(
            "async_finish and return_recv_hook exclude each other: wait by an event or by a hook"
        )
    return later, hooked


def check_sizes(
    max_tokens: Any, hidden: Any, num_experts: Any, num_ranks: Any = 1
) -> tuple[int, int, int, int]:
    """Sizes that tokens are exchanged with, as whole numbers."""
    return (
        whole("num_max_dispatch_tokens_per_rank", max_tokens, 1),
        whole("hidden", hidden, 1),
        whole("num_experts", num_experts, 1, MOST_EXPERTS),
        whole("num_ranks", num_ranks, 1),
    )


def check_dispatch(
    natives: Natives, x: Any, topk_idx: Any, max_tokens: Any, num_experts: Any
) -> Sizes:
    """Look at rows and picks; returns the sizes of the call."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a torch.Tensor [T, H], not {type(x).__name__}")
    if x.dtype in QUANTIZED_DTYPES:
        raise ValueError(
            f"x is {x.dtype}, but must be bfloat16, float16 or float32: use_fp8=True casts it in "
            f"the send"
        )
    inputs.check_rows(x)
    most = whole("num_max_dispatch_tokens_per_rank", max_tokens, 1)
    experts = whole("num_experts", num_experts, 1, MOST_EXPERTS)
    inputs.check_picks(topk_idx, None, x)
    inputs.check_tokens(x, "num_max_dispatch_tokens_per_rank", most)
    size = natives.world_size
    if most * size * -(-experts // size) > LARGEST:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank ({most}) x {size} ranks x {-(-experts // size)} "
            f"local experts makes more rows than int32 counts ({LARGEST}): lower it on all ranks "
            f"alike"
        )
    return x.shape[1], experts, topk_idx.shape[1], most, x.device


def check_counts(natives: Natives, num_experts: int, stats: Any, device: torch.device) -> None:
    """Statistics of received rows, if there are any."""
    if stats is not None:
        bounds = expert_bounds(num_experts, natives.world_size)
        local = bounds[natives.rank + 1] - bounds[natives.rank]
        name = "cumulative_local_expert_recv_stats"
        inputs.array(name, stats, "[L]", (local,), (torch.int32,), device)
        inputs.check_contiguous(name, stats)


def check_waits(name: str, rank: int, size: int, waits: Any, device: torch.device) -> Tensor | None:
    """This rank's part of a vector ``[R]``, or of a table ``[R, R]``."""
    if waits is None:
        return None
    is_table, meaning = isinstance(waits, Tensor) and waits.dim() == 2, "[R] or [R, R]"
    shape = (size, size) if is_table else (size,)
    inputs.array(name, waits, meaning, shape, (torch.int64,), device)
    mine = waits[rank] if is_table else waits
    inputs.check_contiguous(name, mine)
    return mine


def check_combine(
    x: Any, handle: LowLatencyHandle, topk_idx: Any, topk_weights: Any, out: Any, waits: Any
) -> Tensor | None:
    """Tensors of a combine; returns this rank's waits."""
    ep, config, tokens = handle.ep, handle.ep.config, handle.native.num_tokens
    device = handle.native.arrived.tokens_per_expert.device
    blocks = config.num_local_experts, config.padded_rows, config.hidden
    picks = tokens, config.num_topk
    meaning = "[L, R * M, H], the blocks that the dispatch brought"
    inputs.array("x", x, meaning, blocks, FLOAT_DTYPES, device)
    inputs.array("topk_idx", topk_idx, "[T, K], that of the dispatch", picks, INDEX_DTYPES, device)
    inputs.array("topk_weights", topk_weights, "[T, K]", picks, FLOAT_DTYPES, device)
    if out is not None:
        inputs.array("out", out, "[T, H]", (tokens, config.hidden), (x.dtype,), device)
    return check_waits("combine_wait_recv_cost_stats", ep.rank, ep.world_size, waits, device)


def refused(natives: Natives, error: Exception, asked: Asked) -> Exception:
    """Tell the ranks that are in this dispatch; returns the error to raise."""
    name, experts = "num_max_dispatch_tokens_per_rank", ("num_experts", asked.num_experts)
    most = likely(name, getattr(asked, name), error)
    guess = inputs.guess(error, asked.x, (asked.topk_idx,), experts, most)
    return natives.refused(error, natives.whom_low_latency(guess), DISPATCH, False)


def dispatch(
    natives: Natives,
    sizes: Sizes,
    x: Tensor,
    topk_idx: Tensor,
    mode: Quantize | None,
    stats: Tensor | None,
    waits: Tensor | None,
    hooked: bool,
) -> tuple[Any, Tensor, LowLatencyHandle, Hook | None]:
    """Rows by expert (of FP8 with scales by column, as DeepGEMM reads them), counts, the handle,
    and a hook, if asked for, that adds the statistics."""
    ep = natives.low_latency(sizes)
    low = ep.engine == LOW_LATENCY
    options = BY_COLUMN if low and mode is not None else None
    if low and (stats is not None or waits is not None):
        options = CallOptions(waits=waits, loads=stats, scales_by_column=mode is not None)
    in_two = hooked and low
    recv = ep.dispatch(
        x,
        topk_idx,
        layout=Layout.EXPERT_PADDED,
        exact=False,
        quantize=mode,
        return_hook=in_two,
        options=options,
    )
    seen, hook = recv, nothing_left if hooked else None
    if in_two:
        seen, hook = recv.ahead, recv.wait
        seen.wait()  # sooner than by reading
    counts, scales = seen.tokens_per_expert, seen.scales
    if not low:  # other engines have no such options
        if stats is not None:
            stats.add_(counts)
        _add_waits(ep, waits)
        scales = None if scales is None else by_column(scales)
    rows = seen.x if scales is None else (seen.x, scales)
    return rows, counts, LowLatencyHandle.around(ep, seen.handle), hook


def combine(
    x: Tensor,
    handle: LowLatencyHandle,
    topk_weights: Tensor,
    out: Tensor | None,
    waits: Tensor | None,
    experts: Overlap | None,
    hooked: bool,
) -> tuple[Tensor, Hook | None]:
    """The weighted sum of each token's rows behind the ``experts``, and a hook if asked for."""
    wait_for(experts)
    ep, native = handle.ep, handle.native
    low = ep.engine == LOW_LATENCY
    options = CallOptions(waits=waits) if low and waits is not None else None
    in_two = hooked and low
    if in_two and out is None:
        out = x.new_empty(native.num_tokens, x.shape[-1])
    call: Any = ep.combine
    how = {"out": out, "return_hook": in_two, "options": options}
    combined = call(x, native, weighted=True, topk_weights=topk_weights, **how)
    if in_two and out is not None:
        return out, hook_of(experts, combined.wait)
    if not low:
        _add_waits(ep, waits)
    return combined, nothing_left if hooked else None


def written_buffer(handle: LowLatencyHandle) -> Tensor:
    """What ``get_next_low_latency_combine_buffer`` gave out."""
    if handle.next_buffer is None:
        raise ValueError(
            "zero_copy=True reads what get_next_low_latency_combine_buffer(handle) gave out, but "
            "nobody asked for it: write the experts' output there first, or leave zero_copy out"
        )
    return handle.next_buffer


def nothing_left() -> None:
    """The hook of a call whose rows are good for the current stream already."""


# Between calls


class LowLatencyState:
    """A buffer's objects of low-latency mode between calls; all have the same masks."""

    group: Any
    rank: int
    group_size: int
    enable_shrink: bool
    _natives: Natives

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing: the two modes share no memory."""
        self._natives.check_open()
        check_sizes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Where experts may write for ``low_latency_combine(zero_copy=True)``: bf16 ``[L, R * M,
        H]``, one per handle."""
        self._natives.check_open()
        known = inputs.check_handle(handle, LowLatencyHandle, self.group)
        if known.next_buffer is None:
            known.next_buffer = known.ep.empty_for_combine(known.native)
        return known.next_buffer

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a dead rank out (``mask=True``), or take it back.

        Raises:
            NotSupported: the engine cannot.
            ValueError: no ``enable_shrink=True``, no other rank, or no call of this mode yet.
        """
        rank = whole("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if rank == self.rank:
            raise ValueError(f"rank_to_mask ({rank}) is this rank: name another one")
        objects, out = self._shrinking(), flag("mask", mask)
        if out and not objects:
            raise ValueError(
                f"rank {rank} cannot be left out yet: the first low-latency call connects all "
                f"ranks, so make one before"
            )
        for ep in objects:
            if out:
                ep.mask(rank)
            elif ep.engine == LOW_LATENCY:
                ep.unmask(rank)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for masked ranks, else 0, into ``mask_status`` (int32 ``[R]``); no wait."""
        objects = self._shrinking()
        inputs.array("mask_status", mask_status, "[R]", (self.group_size,), (torch.int32,))
        mask_status.zero_()
        for ep in objects:
            if ep.engine == LOW_LATENCY:
                mask_status |= ep.active_mask == 0

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks back."""
        for rank in set(range(self.group_size)) - {self.rank}:
            self.low_latency_update_mask_buffer(rank)

    def _shrinking(self) -> list[ExpertParallel]:
        self._natives.check_open()
        if not self.enable_shrink:
            raise ValueError("Shrink mode must be enabled: make Buffer with enable_shrink=True")
        return self._natives.all_low_latency()


def _add_waits(ep: ExpertParallel, waits: Tensor | None) -> None:
    """Add the nanoseconds that the last call waited for each rank, where an engine can tell."""
    if waits is None:
        return
    last = [0 if isnan(seconds) else int(seconds * 1e9) for seconds in ep.stats().last_wait]
    if any(last):
        waits.add_(torch.tensor(last, dtype=torch.int64, device="cpu").to(waits.device))
