"""DeepEP's ``Config``: how its kernels cut their work. Checked and echoed; the engines here cut theirs by themselves."""

from __future__ import annotations

from dataclasses import dataclass

RING_BYTES = 128 << 20
"""Symmetric memory that a native object takes by default, on engines that have any, whatever the batch and the hidden size."""


@dataclass(frozen=True, slots=True)
class Config:
    """Chunk sizes of DeepEP's kernels, in tokens, and the multiprocessors they may use.

    Raises:
        ValueError: a chunk sent is not smaller than the buffer it goes to (RDMA: at most half of it).
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        send, recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if not (self.num_sms >= 0 and 0 < send < recv):
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens ({send}) must be positive and below num_max_nvl_chunked_recv_tokens ({recv}), "
                f"and num_sms ({self.num_sms}) at least 0"
            )
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if not 0 < send <= recv // 2:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens ({send}) must be positive and at most half of "
                f"num_max_rdma_chunked_recv_tokens ({recv})"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes per rank that normal mode needs here: the same for every hidden size, number of ranks and batch."""
        return RING_BYTES

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for RDMA: none."""
        return 0


def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """DeepEP's choice for dispatch, for any number of ranks."""
    return Config(num_sms, 24 if num_ranks == 2 else 6, 256, 6, 128)


def combine_config(num_ranks: int, num_sms: int) -> Config:
    """DeepEP's choice for combine, for any number of ranks."""
    return Config(num_sms, {2: 10, 4: 9}.get(num_ranks, 4), 256, 6, 128)
