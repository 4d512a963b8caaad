"""``Buffer``'s smaller methods of low-latency mode: its memory, and masks that leave ranks out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.deep_ep import decode, inputs
from tokenyard.deep_ep.handles import LowLatencyHandle
from tokenyard.deep_ep.inputs import flag, whole
from tokenyard.deep_ep.natives import Natives
from tokenyard.engines.known import LOW_LATENCY


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
        decode.check_sizes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Where experts may write for ``low_latency_combine(zero_copy=True)``: bf16 ``[L, R * M,
        H]``, one per handle.
        """
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
