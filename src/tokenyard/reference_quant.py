"""The oracle's quantisation to FP8 E4M3 (``docs/reference/semantics.md``)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard.types import Quantize, Quantized

_GROUP = 128  # channels that share a scale
_MX_BLOCK = 32  # the same, of MXFP8
_MX_NAN = 255
_EXPONENTS_PER_WORD = 4
_FP8_MAX = 448.0
_SMALLEST_AMAX = 1e-4
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_NOT_FINITE = 255


def quantize(x: Tensor, mode: Quantize) -> Quantized:
    """Cast ``x [T, H]`` (float32, bf16 or fp16) to E4M3: ``data [T, H]`` float8_e4m3fn and
    ``scales [T, ceil(H / 128)]`` float32, for ``FP8_UE8M0`` ``[T, ceil(H / 512)]`` int32. A group
    with NaN or infinity has the exponent byte 255 or a non-finite scale. ``MXFP8``: :func:`_to_mx`.
    """
    if mode is Quantize.MXFP8:
        return _to_mx(x)
    num_tokens, hidden = x.shape
    num_groups = -(-hidden // _GROUP)
    groups = pad(x.float(), (0, -hidden % _GROUP)).reshape(num_tokens, num_groups, _GROUP)
    amax = groups.abs().amax(dim=-1).clamp(min=_SMALLEST_AMAX)
    # Tensors on both sides: torch may turn ``448 / amax`` and ``amax / 448`` into products with a
    # rounded reciprocal.
    fp8_max = torch.full_like(amax, _FP8_MAX)
    scales = torch.div(amax, fp8_max)
    if mode is Quantize.FP8:
        return Quantized(_cast(groups, torch.div(fp8_max, amax), hidden), scales)
    exponents = _pow2_exponents(scales)
    scales = _pow2_from_exponents(exponents)
    data = _cast(groups, torch.div(torch.ones_like(scales), scales), hidden)
    return Quantized(data, _pack(exponents) if mode is Quantize.FP8_UE8M0 else scales)


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``data [..., H]`` (float8 or int8) ``* scale`` in float32, rounded once to ``dtype``.
    ``scales``: ``[..., ceil(H / 128)]`` float32, or ``[..., ceil(H / 512)]`` int32 (four exponent
    bytes each), or ``[..., ceil(H / 32)]`` float8_e8m0fnu."""
    hidden = data.shape[-1]
    if scales.dtype == torch.float8_e8m0fnu:
        exponents = scales.contiguous().view(torch.uint8).double() - 127
        powers = torch.where(exponents == _MX_NAN - 127, float("nan"), 2.0**exponents).float()
        return (data.float() * powers.repeat_interleave(_MX_BLOCK, -1)[..., :hidden]).to(dtype)
    if scales.dtype == torch.int32:
        exponents = scales.contiguous().view(torch.uint8)[..., : -(-hidden // _GROUP)]
        scales = _pow2_from_exponents(exponents)
    per_channel = scales.repeat_interleave(_GROUP, dim=-1)[..., :hidden]
    return (data.float() * per_channel).to(dtype)


def _to_mx(x: Tensor) -> Quantized:
    """OCP Microscaling Formats (MX) specification 1.0, section 6.3: per block of 32 channels
    ``X = 2 ** (floor(log2(amax)) - 8)``, elements ``e4m3(x / X)``, at most 448. X is at least
    ``2 ** -127``, also for zeros. A block with a NaN or an infinity is all NaN. ``data [T, H]``
    and ``scales [T, ceil(H / 32)]`` float8_e8m0fnu."""
    num_tokens, hidden = x.shape
    blocks = pad(x.double(), (0, -hidden % _MX_BLOCK)).reshape(
        num_tokens, -(-hidden // _MX_BLOCK), _MX_BLOCK
    )
    amax = blocks.abs().amax(dim=-1)
    finite = amax.isfinite()
    _, above = torch.frexp(amax.nan_to_num())  # amax is in [2 ** (above - 1), 2 ** above)
    exponents = torch.where(amax == 0, -127, above - 1 - 8).clamp(min=-127)
    scaled = (blocks / torch.exp2(exponents.double())[..., None]).clamp(-_FP8_MAX, _FP8_MAX)
    scaled = torch.where(finite[..., None], scaled, float("nan"))
    data = scaled.float().to(torch.float8_e4m3fn).flatten(1)[:, :hidden].contiguous()
    scales = torch.where(finite, exponents + 127, _MX_NAN).to(torch.uint8)
    return Quantized(data, scales.view(torch.float8_e8m0fnu))


def _cast(groups: Tensor, factors: Tensor, hidden: int) -> Tensor:
    """``e4m3(groups [T, G, 128] * factors [T, G])`` unpadded: ``[T, H]``. Every NaN is 0x7F."""
    scaled = groups * factors[..., None]
    # The sign of a NaN is the processor's choice.
    scaled = torch.where(scaled.isnan(), float("nan"), scaled)
    return scaled.to(torch.float8_e4m3fn).flatten(1)[:, :hidden].contiguous()


def _pow2_exponents(scales: Tensor) -> Tensor:
    """Biased exponent, int32, of the smallest power of two ``>= scales`` (positive, normal)."""
    bits = scales.view(torch.int32)
    has_fraction = (bits & _MANTISSA_MASK) != 0
    return ((bits >> _MANTISSA_BITS) + has_fraction.int()).clamp(max=_NOT_FINITE)


def _pow2_from_exponents(exponents: Tensor) -> Tensor:
    """float32 ``2 ** (exponents - 127)``; a biased exponent of 0 (padding) gives 0."""
    return (exponents.int() << _MANTISSA_BITS).view(torch.float32)


def _pack(exponents: Tensor) -> Tensor:
    """``[T, G]`` exponents to ``[T, ceil(G / 4)]`` int32: group ``4j + i`` in byte ``i``."""
    padded = pad(exponents.to(torch.uint8), (0, -exponents.shape[1] % _EXPONENTS_PER_WORD))
    return padded.contiguous().view(torch.int32)
