"""The words of the API: layouts, quantisation modes and quantised payloads."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor


class Layout(enum.Enum):
    """Order and shape of received rows (``docs/reference/semantics.md``)."""

    FLAT = 0
    EXPERT_MAJOR = 1
    EXPERT_PADDED = 2

    __hash__ = object.__hash__  # Enum's is a Python function, which every call would make


class Quantize(enum.Enum):
    """Cast inside the send: FP8 E4M3 with one scale per 128 channels; ``MXFP8``: per 32."""

    FP8 = 1
    FP8_POW2 = 2
    FP8_UE8M0 = 3
    MXFP8 = 4

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Quantized:
    """A payload that the caller has quantised.

    Attributes:
        data: ``[T, H]`` float8, int8 or uint8.
        scales: ``[T, S]`` float32 or int32 (opaque 4-byte words), or ``[T, ceil(H / 32)]``
            float8_e8m0fnu, as ``Quantize.MXFP8`` makes them; any strides.
    """

    data: Tensor
    scales: Tensor


QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int64, torch.int32)
