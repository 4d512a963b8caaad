"""What engine nvlink makes of the memory it is lent. Without Triton."""

from __future__ import annotations

from tokenyard.config import Config

RECEIVE_SHARE = 4
"""Bytes of a receive buffer per byte of rings, at most. Beside rings of 128 MiB it holds a layer of
4096 tokens of 7168 channels in BF16: 411 MB where each token goes to 7 other ranks, the most that 8
picks on 8 ranks can need."""


def most_rows_back(config: Config) -> int:
    """Rows that others send back to a rank at most, if none has more than M tokens."""
    return min(config.world_size - 1, config.num_topk) * config.max_tokens_per_rank


def receive_bytes(buffer_bytes: int, config: Config) -> int:
    """Bytes of the receive buffer beside rings of ``buffer_bytes``."""
    needed = most_rows_back(config) * config.hidden * 2 + (1 << 20)  # BF16, and flags
    return min(RECEIVE_SHARE * buffer_bytes, needed) // 256 * 256
