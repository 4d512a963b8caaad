"""What engine nvlink makes of the multiprocessors and the memory it is lent. Without Triton."""

from __future__ import annotations

from tokenyard.config import Config
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES

FEW_SMS = 48
"""Multiprocessors up to which programs share tasks; measured with 24, and with all of 132."""
RECEIVE_BYTES = 512 << 20
"""What a receive buffer takes at most by default: a layer of 4096 tokens of 7168 channels in BF16
needs 411 MB where each token goes to 7 other ranks, the most that 8 picks on 8 ranks can need."""


def shares_tasks(num_sms: int, num_ranks: int, *, all_sms: bool) -> bool:
    """Whether programs of engine nvlink share the tasks of all roles, or have a role each."""
    return not all_sms and num_sms <= max(FEW_SMS, 2 * num_ranks)


def most_rows_back(config: Config) -> int:
    """Rows that others send back to a rank at most, if none has more than M tokens."""
    return min(config.world_size - 1, config.num_topk) * config.max_tokens_per_rank


def split_budget(buffer_bytes: int | None, config: Config, *, all_sms: bool) -> tuple[int, int]:
    """Bytes for rings, and for the receive buffer, of ``buffer_bytes`` (None: the default).

    With all multiprocessors rings are as fast, so they get it all; with fewer, all but what is more
    than their default.
    """
    rings = DEFAULT_BUFFER_BYTES if buffer_bytes is None else buffer_bytes
    if all_sms:
        return rings, 0
    most = RECEIVE_BYTES
    if buffer_bytes is not None:
        rings = min(buffer_bytes, DEFAULT_BUFFER_BYTES)
        most = buffer_bytes - rings
    needed = most_rows_back(config) * config.hidden * 2 + (1 << 20)  # BF16, and flags
    return rings, min(most, needed) // 256 * 256
