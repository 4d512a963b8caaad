"""DeepEP V2.5's plan of tensors that lie in one piece of memory, and its alignments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import MOST_BYTES
from tokenyard.deep_ep.inputs import whole


def get_num_allocation_alignment() -> int:
    """Bytes that buffers and planned tensors are aligned to: 2 MiB."""
    return 2 << 20


def get_num_tma_alignment() -> int:
    """Bytes of which DeepEP's copies need a multiple: 32. Copies here take any number."""
    return 32


def get_num_rdma_alignment() -> int:
    """Bytes that DeepEP aligns what crosses its network to: 64."""
    return 64


class BufferAllocator:
    """A plan of tensors, made before there is memory for them.

    Attributes:
        alignment: bytes that each tensor begins at a multiple of.
        allocations: each tensor and its offset in bytes; ``num_bytes``: of the whole plan.
        materialized: whether the tensors have memory.
    """

    def __init__(self) -> None:
        self.alignment = get_num_allocation_alignment()
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on device ``meta``, until the plan has its memory. ValueError: it has."""
        if self.materialized:
            raise ValueError(
                "allocate() after the plan was given its memory: plan all tensors, then make the "
                "buffer"
            )
        if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"dtype ({dtype!r}) must be a torch.dtype")
        given: Any = [shape] if isinstance(shape, int) else shape
        sizes = [whole("shape", each, 0, MOST_BYTES) for each in given]
        tensor = torch.empty(sizes, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        parts = -(-tensor.nbytes // self.alignment)
        self.num_bytes += parts * self.alignment
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Let the planned tensors be parts of ``storage``: uint8 ``[num_bytes]``, contiguous.

        Raises:
            ValueError: it is something else, or the plan has memory already.
        """
        if self.materialized:
            raise ValueError("the plan was given its memory already: make a plan for each buffer")
        want = storage.dtype == torch.uint8 and storage.is_contiguous() and not storage.is_meta
        if not want or storage.shape != (self.num_bytes,):
            raise ValueError(
                f"storage is {storage.dtype} of shape {list(storage.shape)} on {storage.device}, "
                f"but must be contiguous uint8 [{self.num_bytes}] in memory"
            )
        for tensor, offset in self.allocations:
            part = storage[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, part)
        self.materialized = True
