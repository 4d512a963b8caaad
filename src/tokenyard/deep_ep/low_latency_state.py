"""``Buffer``'s methods that leave ranks out of low-latency mode."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.deep_ep import decode, inputs
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.values import flag, whole


class Masks:
    """Masks of one buffer."""

    rank: int
    group_size: int
    enable_shrink: bool
    _natives: Natives

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a dead rank out (``mask=True``), or take it back.

        Raises:
            NotSupported: the engine cannot.
            ValueError: not made with ``enable_shrink=True``, no other rank, or there was no call of
                this mode yet.
        """
        rank = whole("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if rank == self.rank:
            raise ValueError(f"rank_to_mask ({rank}) is this rank: name another one")
        decode.update_mask(self._shrinking(), rank, flag("mask", mask))

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write 1 for ranks that are left out and 0 for others into ``mask_status`` (int32
        ``[R]``).
        """
        objects = self._shrinking()
        inputs.array("mask_status", mask_status, "[R]", (self.group_size,), (torch.int32,))
        decode.query_mask(objects, mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks back."""
        for rank in set(range(self.group_size)) - {self.rank}:
            decode.update_mask(self._shrinking(), rank, False)

    def _shrinking(self) -> list[ExpertParallel]:
        self._natives.check_open()
        if not self.enable_shrink:
            raise ValueError("Shrink mode must be enabled: make Buffer with enable_shrink=True")
        return self._natives.all_low_latency()
