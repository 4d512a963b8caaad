"""What DeepEP's compiled module has: ``Config``, how its kernels cut their work (engines here heed
``num_sms`` only); where a rank stands; memory of buffers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import LARGEST, MOST_BYTES
from tokenyard.deep_ep.handles import RANKS_PER_NODE, num_nodes
from tokenyard.deep_ep.inputs import check_dtype, flag, whole
from tokenyard.deep_ep.streams import Streams

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


class Runtime:
    """``Buffer.runtime``. Place of ``rank`` among ``num_ranks``, counted in nodes of 8."""

    def __init__(self, rank: int, num_ranks: int, streams: Streams) -> None:
        self._rank, self._num_ranks, self._streams = rank, num_ranks, streams

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return num_nodes(self._num_ranks)

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return self._rank // RANKS_PER_NODE

    def get_root_rdma_rank(self, global_: bool) -> int:
        """First rank that stands at the same place in its node, or (``global_``) its number."""
        return self._rank % RANKS_PER_NODE if global_ else 0

    def get_local_device_id(self) -> int:
        """CUDA device, -1 without."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_comm_stream(self) -> Any:
        return self._streams.comm()


class Scratch:
    """``num_nvl_bytes`` and ``num_rdma_bytes`` that programs read and write, taken when first asked
    for. No engine uses them."""

    def __init__(self, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self._num_bytes = {False: num_nvl_bytes, True: num_rdma_bytes}
        self._held: dict[bool, Tensor] = {}

    def tensor(self, dtype: Any, size: Any, offset: Any, use_rdma_buffer: Any) -> Tensor:
        """``size`` elements (None: all that follow) from element ``offset``, if there are."""
        rdma = flag("use_rdma_buffer", use_rdma_buffer)
        num_bytes = self._num_bytes[rdma]
        room = num_bytes // check_dtype(dtype).itemsize
        begin = whole("offset", offset, 0, room, f", the elements of {dtype} in {num_bytes} bytes")
        wanted: Any = [room - begin] if size is None else size
        if not isinstance(wanted, (tuple, list)):
            raise ValueError(f"size ({size!r}) must be a torch.Size or None")
        shape = torch.Size([whole("size", each, 0, MOST_BYTES) for each in wanted])  # pyright: ignore[reportUnknownVariableType]
        if shape.numel() > room - begin:
            raise ValueError(
                f"size ({list(shape)}) from offset {begin} needs {shape.numel()} elements of "
                f"{dtype}, but the {num_bytes} bytes of this buffer have {room - begin} there: "
                f"make Buffer with more {'num_rdma_bytes' if rdma else 'num_nvl_bytes'}"
            )
        if rdma not in self._held:
            self._held[rdma] = memory(num_bytes)
        elements = self._held[rdma][: room * dtype.itemsize].view(dtype)
        return elements[begin : begin + shape.numel()].view(shape)


def memory(num_bytes: int) -> Tensor:
    """Zeros, uint8 ``[num_bytes]``, on the current GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode(False):  # kept for writes outside of it too
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
