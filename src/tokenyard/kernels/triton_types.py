"""torch dtypes as Triton names them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


def kernel_type(dtype: torch.dtype) -> Any:
    """The element type of pointers to ``dtype``; integers, which kernels only copy, as bytes."""
    return _TYPES.get(dtype, tl.int8)
