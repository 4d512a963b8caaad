"""DeepEP's ``Config``: how its kernels cut their work. Engines here heed ``num_sms`` only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tokenyard.arguments import LARGEST
from tokenyard.deep_ep.inputs import whole

RING_BYTES = 128 << 20
"""Symmetric memory of a native object by default, if its engine has any, whatever the batch."""

USUAL_SMS = 20
"""DeepEP's choice of multiprocessors, which counts if ``Buffer.set_num_sms`` asks for it."""

MOST_SMS = 1024
"""More than any GPU has. Tables in handles have a column for two."""


@dataclass(frozen=True, slots=True)
class Config:
    """Chunk sizes of DeepEP's kernels, in tokens, and the multiprocessors they may use.

    Raises:
        ValueError: one is no whole number, or a chunk sent is not smaller than the buffer it goes
            to (RDMA: at most half of it).
    """

    num_sms: int = USUAL_SMS
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for each in fields(self):
            most = MOST_SMS if each.name == "num_sms" else LARGEST
            object.__setattr__(self, each.name, whole(each.name, getattr(self, each.name), 0, most))
        send, recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if not 0 < send < recv:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens ({send}) must be positive and below "
                f"num_max_nvl_chunked_recv_tokens ({recv})"
            )
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if not 0 < send <= recv // 2:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens ({send}) must be positive and at most half of "
                f"num_max_rdma_chunked_recv_tokens ({recv})"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes per rank of normal mode here: the same for any hidden size, ranks and batch."""
        _check_hint(hidden_bytes, num_ranks)
        return RING_BYTES

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for RDMA: none."""
        _check_hint(hidden_bytes, num_ranks)
        return 0


def _check_hint(hidden_bytes: int, num_ranks: int) -> None:
    whole("hidden_bytes", hidden_bytes, 1)
    whole("num_ranks", num_ranks, 1)


def check_config(config: Any, default: int) -> int:
    if config is None:
        return default
    if not isinstance(config, Config):
        raise ValueError(
            f"config ({config!r}) must be a deep_ep.Config, such as get_dispatch_config() returns, "
            f"or None"
        )
    return config.num_sms
