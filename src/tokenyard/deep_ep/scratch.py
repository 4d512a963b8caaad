"""Memory that stands for DeepEP's buffers where programs read and write them. No engine uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import MOST_BYTES
from tokenyard.deep_ep.inputs import flag, whole


class Scratch:
    """``num_nvl_bytes`` and ``num_rdma_bytes`` of this rank, taken when first asked for."""

    def __init__(self, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self._num_bytes = {False: num_nvl_bytes, True: num_rdma_bytes}
        self._held: dict[bool, Tensor] = {}

    def tensor(self, dtype: Any, size: Any, offset: Any, use_rdma_buffer: Any) -> Tensor:
        """``size`` elements (None: all that follow) from element ``offset``, if there are."""
        rdma = flag("use_rdma_buffer", use_rdma_buffer)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype ({dtype!r}) must be a torch.dtype")
        num_bytes = self._num_bytes[rdma]
        room = num_bytes // dtype.itemsize
        begin = whole("offset", offset, 0, room, f", the elements of {dtype} in {num_bytes} bytes")
        shape = torch.Size([room - begin] if size is None else _checked(size))
        if shape.numel() > room - begin:
            raise ValueError(
                f"size ({list(shape)}) from offset {begin} needs {shape.numel()} elements of "
                f"{dtype}, but the {num_bytes} bytes of this buffer have {room - begin} there: "
                f"make Buffer with more {'num_rdma_bytes' if rdma else 'num_nvl_bytes'}"
            )
        held = self._held.get(rdma)
        if held is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            with torch.inference_mode(False):  # kept for writes outside of it too
                held = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._held[rdma] = held
        return held[: room * dtype.itemsize].view(dtype)[begin:][: shape.numel()].view(shape)


def _checked(size: Any) -> list[int]:
    if not isinstance(size, (tuple, list)):
        raise ValueError(f"size ({size!r}) must be a torch.Size or None")
    return [whole("size", each, 0, MOST_BYTES) for each in size]  # pyright: ignore[reportUnknownVariableType]
