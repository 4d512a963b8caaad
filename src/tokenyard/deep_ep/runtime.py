"""What DeepEP's compiled object tells and holds: where a rank stands, and memory of buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import MOST_BYTES
from tokenyard.deep_ep.handles import RANKS_PER_NODE, num_nodes
from tokenyard.deep_ep.inputs import check_dtype, flag, whole
from tokenyard.deep_ep.streams import Streams


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
