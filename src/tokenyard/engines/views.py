"""Results that stay in symmetric memory: one view per object, good until its next ``in_place`` dispatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.engines.rings import Form
from tokenyard.kernels.payload import padded
from tokenyard.memory.base import Region, SymmetricMemory
from tokenyard.rows import Payload

_PART = 256


class Parts(NamedTuple):
    """Bytes at which the parts of a view begin, and its end. Rows begin at 0."""

    scales: int
    meta: int
    end: int


def parts_of(form: Form, num_rows: int) -> Parts:
    """Where rows, scales and meta of ``num_rows`` rows stand."""
    at = [0]
    for row_bytes in (form.words * form.bits // 8, 4 * form.scale_words, 4 * form.meta_words):
        at.append(-(-(at[-1] + padded(num_rows * row_bytes)) // _PART) * _PART)
    return Parts(*at[1:])


class View:
    """The view of one object. Tensors over it raise once it is written to again."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._region: Region | None = None
        self._given: list[torch.UntypedStorage] = []

    @property
    def num_bytes(self) -> int:
        return 0 if self._region is None else self._region.local.numel()

    def region(self, num_bytes: int) -> Region:
        """Memory for a view; collective when it has to grow."""
        if self._region is None or self._region.local.numel() < num_bytes:
            self._region = self._memory.allocate(num_bytes)
        return self._region

    def expire(self, why: str) -> None:
        """End the life of the tensors given so far: using one, or a view of one, raises ``why``.

        torch has the means in its CUDA builds only. Elsewhere (the simulator) the tensors live on with the next call's rows.
        """
        forbid: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)  # pyright: ignore[reportPrivateUsage]
        for storage in self._given if forbid is not None else ():
            forbid(storage._cdata, why)  # pyright: ignore
        self._given = []

    def payload(self, num_rows: int, form: Form, parts: Parts, dtype: torch.dtype, scale_dtype: torch.dtype) -> Payload:
        """Tensors over the rows, and over their scales if they have any."""
        x = self._over(0, (num_rows, form.hidden), dtype)
        return Payload(
            x, self._over(parts.scales, (num_rows, form.scale_words), scale_dtype) if form.scale_words else None
        )

    def _over(self, at: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        region = self._region
        assert region is not None
        device = region.local.device
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        make: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore
        storage: torch.UntypedStorage = make(region.local.data_ptr() + at, device, num_bytes)
        self._given.append(storage)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (shape[1], 1))  # pyright: ignore
