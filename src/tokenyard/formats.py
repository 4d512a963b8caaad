"""Formats of quantised rows: elements, blocks of channels that share a scale, scales, casts.

A :class:`WireFormat` owns all of it, one for each ``Quantize``; everything else asks it
(``docs/reference/semantics.md``, Quantisation). To add a format: a name in ``Quantize``, an
instance in :data:`FORMATS`, and, if its scales follow from magnitudes in a new way, a rule: a
branch in ``WireFormat._scales`` and one in ``cast`` of ``kernels/payload.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, nan

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard.rows import Payload, RowFormat
from tokenyard.types import Quantize, Quantized

WORD = 4
"""Bytes of a word. Scales of a row travel as whole words."""

QUOTIENT, POWER_ABOVE, POWER_BELOW = 1, 2, 3
"""How a block's scale follows from its largest magnitude: that divided by the largest element; the
smallest power of two that is not less than this quotient; the largest power of two in the magnitude
divided by that in the largest element. 0 is kept for rows that are not cast."""

_EXPONENT_SHIFT = 23
"""Bits of a float32 below its exponent."""


@dataclass(frozen=True, slots=True)
class WireFormat:
    """A format of rows that are quantised.

    Attributes:
        scale: dtype of scales.
        scale_bytes: of a block: 4, a float32; or 1, the biased exponent of a power of two. Those
            of float8_e8m0fnu are filled up with zeros to whole words on the wire only.
        rule: how a cast finds the scale of a block: :data:`QUOTIENT` or another.
        block: channels that share a scale. A row's last block may be shorter.
        data: dtype of elements.
        smallest: a cast takes no block's largest magnitude for less.
    """

    scale: torch.dtype
    scale_bytes: int
    rule: int
    block: int = 128
    data: torch.dtype = torch.float8_e4m3fn
    smallest: float = 1e-4

    @property
    def largest(self) -> float:
        """The largest element, 448 for E4M3."""
        return torch.finfo(self.data).max

    def blocks(self, hidden: int) -> int:
        """Blocks of a row."""
        return -(-hidden // self.block)

    def num_scales(self, hidden: int) -> int:
        """Scales of a row, elements of their dtype."""
        return -(-self.blocks(hidden) * self.scale_bytes // self.scale.itemsize)

    def scale_words(self, hidden: int) -> int:
        """4-byte words of scales of a row."""
        return -(-self.blocks(hidden) * self.scale_bytes // WORD)

    def row(self, hidden: int) -> RowFormat:
        """A row of ``hidden`` channels on the wire."""
        return RowFormat(hidden, self.data, self.scale_words(hidden), self.scale)

    def cast(self, x: Tensor) -> Quantized:
        """``x [T, H]`` (bf16, fp16 or fp32) in this format: data ``[T, H]``, scales as they travel,
        in whole words. Never asks the host for a value."""
        num_tokens, hidden = x.shape
        shape = num_tokens, self.blocks(hidden), self.block
        values = pad(x.float(), (0, shape[1] * self.block - hidden)).view(shape)
        scales, factor = self._scales(values.abs().amax(dim=2))
        scaled = values * factor.unsqueeze(2)
        if self.rule == POWER_BELOW:  # torch saturates since 2.13
            scaled.clamp_(-self.largest, self.largest)
        # a CPU would keep NaN's sign; of a block with an infinity the factor is 0 or NaN, so none
        # is left
        scaled.nan_to_num_(nan=nan)
        data = scaled.to(self.data).flatten(1)[:, :hidden].contiguous()
        return Quantized(data, scales)

    def _scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Scales, and float32 factors to cast with, of the largest magnitudes ``[T, blocks]``."""
        if self.rule == POWER_BELOW:
            return self._scales_below(amax)
        amax = amax.clamp(min=self.smallest)
        # a tensor: torch divides by a number by multiplying with its reciprocal
        limit = torch.full_like(amax, self.largest)
        if self.rule == QUOTIENT:
            return amax / limit, limit / amax
        exponent = _power_of_two_at_least(amax / limit)
        scales = _power_of_two(exponent)
        return scales if self.scale_bytes == WORD else self._packed(exponent), 1.0 / scales

    def _scales_below(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and factors of the OCP Microscaling Formats (MX) specification 1.0, section 6.3:
        ``X = 2 ** (floor(log2(amax)) - floor(log2(largest)))``, which torchao calls ``FLOOR``.
        Exponents below -127 become -127, which is also the exponent of a block of zeros. A block
        with an infinity or a NaN has the scale NaN, byte 255, and NaN elements."""
        exponent = (amax.view(torch.int32) >> _EXPONENT_SHIFT) & 255
        below = (exponent - (frexp(self.largest)[1] - 1)).clamp(min=0)
        factor = _power_of_two(254 - below).masked_fill(exponent == 255, nan)
        return self._packed(below.masked_fill(exponent == 255, 255)), factor

    def _packed(self, exponents: Tensor) -> Tensor:
        """``[T, blocks]`` exponents below 256 as bytes of whole words: block 4j + i in byte i."""
        whole = pad(exponents, (0, -exponents.shape[1] % WORD))
        return whole.to(torch.uint8).view(self.scale)

    def factors(self, scales: Tensor, hidden: int) -> Tensor:
        """What elements are multiplied with, float32 ``[T, blocks]``."""
        if self.scale_bytes == WORD:
            return scales
        if self.scale == torch.float8_e8m0fnu:  # 2 ** -127 for 0, NaN for 255
            return scales.float()
        exponents = scales.contiguous().view(torch.uint8)[:, : self.blocks(hidden)]
        return _power_of_two(exponents.to(torch.int32))

    def dequantize(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """``data * scale`` per block, in float32, rounded once to ``dtype``: ``[T, H]``.
        ValueError: there is not one scale per block."""
        hidden = data.shape[1]
        if scales.shape[1] != self.num_scales(hidden):
            unit = "words" if self.scale.itemsize == WORD else "bytes"
            raise ValueError(
                f"scales have {scales.shape[1]} {unit} per row of {hidden} channels, but one scale "
                f"per {self.block} channels is {self.num_scales(hidden)}: multiply rows by scales "
                f"of another form yourself"
            )
        spread = self.factors(scales, hidden).repeat_interleave(self.block, dim=1)[:, :hidden]
        return (data.float() * spread).to(dtype)


def _power_of_two_at_least(scale: Tensor) -> Tensor:
    """Biased exponent, int32, of the smallest power of two ``>= scale``; 255 of inf and NaN."""
    bits = scale.view(torch.int32)
    above = (bits & ((1 << _EXPONENT_SHIFT) - 1)) != 0
    return ((bits >> _EXPONENT_SHIFT) + above.to(torch.int32)).clamp(max=255)


def _power_of_two(exponent: Tensor) -> Tensor:
    """float32 of biased exponents, int32; 0 for 0, inf for 255."""
    return (exponent << _EXPONENT_SHIFT).view(torch.float32)


FORMATS = {
    Quantize.FP8: WireFormat(torch.float32, WORD, QUOTIENT),
    Quantize.FP8_POW2: WireFormat(torch.float32, WORD, POWER_ABOVE),
    Quantize.FP8_UE8M0: WireFormat(torch.int32, 1, POWER_ABOVE),
    Quantize.MXFP8: WireFormat(torch.float8_e8m0fnu, 1, POWER_BELOW, block=32, smallest=0.0),
}
"""How a dispatch with ``quantize=`` sends rows."""

BY_SCALE = {wire_format.scale: wire_format for wire_format in reversed(FORMATS.values())}
"""What scales of a dtype belong to, where elements and their number do not tell."""

SCALE_DTYPES = tuple(dict.fromkeys(wire_format.scale for wire_format in FORMATS.values()))


def row_of(payload: Payload, mode: Quantize | None) -> RowFormat:
    """A row of ``payload`` on the wire, cast on the way if ``mode`` says so, without routing."""
    hidden, scales = payload.x.shape[1], payload.scales
    if mode is not None:
        return FORMATS[mode].row(hidden)
    if scales is None:
        return RowFormat(hidden, payload.x.dtype)
    words = scales.shape[1] * scales.dtype.itemsize // WORD
    return RowFormat(hidden, payload.x.dtype, words, scales.dtype)


def given(data: Tensor, scales: Tensor) -> Payload:
    """Rows that the caller has quantised, as they travel: scales in whole words. ValueError: those
    of single bytes are not one per block."""
    wire_format, num_scales = BY_SCALE[scales.dtype], scales.shape[1]
    if scales.dtype.itemsize < WORD and num_scales != wire_format.num_scales(data.shape[1]):
        raise ValueError(
            f"x.scales has shape {list(scales.shape)}, but {scales.dtype} scales of "
            f"{data.shape[1]} channels must be [T, S] = "
            f"{[scales.shape[0], wire_format.num_scales(data.shape[1])]}: one per "
            f"{wire_format.block} channels"
        )
    missing = -num_scales * scales.dtype.itemsize % WORD
    if missing:
        scales = pad(scales.contiguous().view(torch.uint8), (0, missing)).view(scales.dtype)
    return Payload(data, scales)


def scales_received(scales: Tensor, hidden: int) -> Tensor:
    """Scales ``[..., S]`` of rows of ``hidden`` channels, without what makes their words whole."""
    wire_format = BY_SCALE[scales.dtype]
    whole = wire_format.scale.itemsize == WORD or scales.shape[-1] == wire_format.num_scales(hidden)
    return scales if whole else scales[..., : wire_format.num_scales(hidden)]


def cast_payload(payload: Payload, mode: Quantize | None) -> Payload:
    """``payload`` as it travels: plain rows are cast as ``mode`` says, if it says anything."""
    if mode is None:
        return payload
    cast = FORMATS[mode].cast(payload.x)
    return Payload(cast.data, cast.scales)


def quantize(x: Tensor, mode: Quantize) -> Quantized:
    """Cast ``x [T, H]`` (bf16, fp16 or fp32) as a dispatch with ``quantize=mode`` does."""
    cast = FORMATS[mode].cast(x)
    return Quantized(cast.data, scales_received(cast.scales, x.shape[1]))


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``data [T, H] * scales``: ``[T, H]``. In the format with elements and scales of these dtypes
    and as many scales; without such a one, in that with scales of this dtype. ValueError: there is
    not one scale per block."""
    found = data.dtype, scales.dtype, scales.shape[1]
    for each in FORMATS.values():
        if (each.data, each.scale, each.num_scales(data.shape[1])) == found:
            return each.dequantize(data, scales, dtype)
    return BY_SCALE[scales.dtype].dequantize(data, scales, dtype)
