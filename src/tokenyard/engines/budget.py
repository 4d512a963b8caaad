"""What engine nvlink makes of the memory it is lent. Without Triton."""

from __future__ import annotations

from tokenyard.config import Config

RECEIVE_SHARE = 4
"""Bytes of a receive buffer per byte of rings, at most. Beside rings of 128 MiB it holds a layer of
4096 tokens of 7168 channels in BF16: 411 MB where each token goes to 7 other ranks, the most that 8
picks on 8 ranks can need."""

HEAP_SHARE = 6
"""Bytes of a heap per byte of rings, at most. Beside rings of 128 MiB it holds two results of 4096
tokens of 7168 channels in BF16 on 8 ranks, the one in use and the next: 350 MB each, if 8 picks
fall on any experts."""

LEAST_BYTES = 64 << 20
"""Of the rows that a rank gets at most: smaller results go through rings, not to the heap, which is
as fast, and costs the host a launch less."""


def most_rows_there(tokens: int) -> int:
    """Rows for which a block of a heap has room at most, if all ranks together have ``tokens``:
    more than any rank guesses."""
    return tokens + tokens // 16 + 64


def most_rows_back(config: Config) -> int:
    """Rows that others send back to a rank at most, if none has more than M tokens."""
    return min(config.world_size - 1, config.num_topk) * config.max_tokens_per_rank


def receive_bytes(buffer_bytes: int, config: Config) -> int:
    """Bytes of the receive buffer beside rings of ``buffer_bytes``."""
    needed = most_rows_back(config) * config.hidden * 2 + (1 << 20)  # BF16, and flags
    return min(RECEIVE_SHARE * buffer_bytes, needed) // 256 * 256


def heap_bytes(buffer_bytes: int, config: Config, *, all_sms: bool) -> int:
    """Bytes of the heap for results of dispatches beside rings of ``buffer_bytes``: two of the
    largest, if they are no more than its share. None where rings are as fast: between two ranks
    that lend all multiprocessors."""
    if config.absent:  # ranks that are gone tell of no block
        return 0
    if all_sms and config.world_size <= 2:
        return 0
    row_bytes = config.hidden * 2 + 4 * (4 + 2 * config.num_topk)  # BF16, and metadata
    rows = config.padded_rows + config.padded_rows // 8 + 64  # what is guessed, and rounded up
    needed = 2 * rows * row_bytes + (4 << 20)
    return min(HEAP_SHARE * buffer_bytes, needed) // (2 << 20) * (2 << 20)  # as memory is mapped
