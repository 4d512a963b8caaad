"""FP8 cast by torch: E4M3 with one scale per 128 channels (``docs/semantics.md``, Quantisation)."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from tokenyard.types import SCALE_GROUP, UE8M0_PER_WORD, Quantize, Quantized

FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
_EXPONENT_SHIFT = 23


def _power_of_two_at_least(scale: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two ``>= scale`` (positive normal float32): int32,
    255 for inf and NaN.
    """
    bits = scale.view(torch.int32)
    above = (bits & ((1 << _EXPONENT_SHIFT) - 1)) != 0
    return ((bits >> _EXPONENT_SHIFT) + above.to(torch.int32)).clamp(max=255)


def _pack_bytes(exponents: Tensor) -> Tensor:
    """``[T, G]`` exponents below 256 -> ``[T, ceil(G / 4)]`` int32, group 4j + i in byte i."""
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % UE8M0_PER_WORD))
    return padded.to(torch.uint8).view(torch.int32)


def quantize(x: Tensor, mode: Quantize) -> Quantized:
    """Cast ``x [T, H]`` (bf16, fp16 or fp32) to E4M3 with scales; never asks the host for
    a value.
    """
    num_tokens, hidden = x.shape
    groups = -(-hidden // SCALE_GROUP)
    values = torch.nn.functional.pad(x.float(), (0, groups * SCALE_GROUP - hidden)).view(
        num_tokens, groups, SCALE_GROUP
    )
    amax = values.abs().amax(dim=2).clamp(min=AMAX_FLOOR)
    limit = torch.full_like(
        amax, FP8_MAX
    )  # a tensor: torch divides by a number by multiplying with its reciprocal
    scales, factor = amax / limit, limit / amax
    if mode is not Quantize.FP8:
        exponent = _power_of_two_at_least(scales)
        scales = (exponent << _EXPONENT_SHIFT).view(torch.float32)
        factor = 1.0 / scales
        if mode is Quantize.FP8_UE8M0:
            scales = _pack_bytes(exponent)
    scaled = (values * factor.unsqueeze(2)).nan_to_num_(
        nan=nan
    )  # a CPU would keep NaN's sign; there is no infinity
    data = scaled.to(torch.float8_e4m3fn)
    return Quantized(data.view(num_tokens, groups * SCALE_GROUP)[:, :hidden].contiguous(), scales)


def scale_words(hidden: int, *, packed: bool) -> int:
    """Words of scales of a row: a float32 per group of channels, or (``packed``) four UE8M0 bytes
    to an int32.
    """
    return -(-hidden // (SCALE_GROUP * (UE8M0_PER_WORD if packed else 1)))


def unpack_scales(scales: Tensor, hidden: int) -> Tensor:
    """Scales as float32 ``[T, ceil(H / 128)]``, whether given so or as packed UE8M0 words."""
    if scales.dtype != torch.int32:
        return scales
    exponent = scales.contiguous().view(torch.uint8)[:, : -(-hidden // SCALE_GROUP)].to(torch.int32)
    return (exponent << _EXPONENT_SHIFT).view(torch.float32)


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale`` per group of 128 channels, in float32, rounded once to ``dtype``: ``[T,
    H]``.

    Raises:
        ValueError: there is not one scale per group.
    """
    hidden = data.shape[1]
    words = scale_words(hidden, packed=scales.dtype == torch.int32)
    if scales.shape[1] != words:
        raise ValueError(
            f"scales have {scales.shape[1]} words per row of {hidden} channels, but one scale per "
            f"{SCALE_GROUP} channels is "
            f"{words}: multiply rows by scales of another form yourself"
        )
    spread = unpack_scales(scales, hidden).repeat_interleave(SCALE_GROUP, dim=1)[:, :hidden]
    return (data.float() * spread).to(dtype)
