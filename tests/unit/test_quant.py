"""Both casts of every format, the engines' by torch and the oracle's, against their definition
worked in float64: every bit, on edges.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard import formats, reference
from tokenyard.types import Quantize, Quantized

CASTS = [formats.quantize, reference.quantize]
WIDENERS = [formats.dequantize, reference.dequantize]
modes = pytest.mark.parametrize("mode", list(Quantize), ids=lambda mode: mode.name.lower())
casts = pytest.mark.parametrize("cast", CASTS, ids=["engines", "oracle"])
wideners = pytest.mark.parametrize("widen", WIDENERS, ids=["engines", "oracle"])

CODES = torch.arange(127)
MAGNITUDES = torch.where(
    CODES < 8, CODES * 2.0**-9, (8 + CODES % 8) * 2.0 ** (CODES // 8 - 10.0)
).double()
"""What the E4M3 bytes 0 to 0x7E mean, exactly."""


def rounded(values: Tensor) -> Tensor:
    """float64 rounded to float32, which gives the float32 quotient or product of what were
    float32.
    """
    return values.float().double()


def e4m3(values: Tensor) -> Tensor:
    """Bytes of the nearest E4M3 numbers, of two as near the even one; NaN is 0x7F."""
    magnitude = values.abs().nan_to_num().contiguous()
    above = torch.searchsorted(MAGNITUDES, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = MAGNITUDES[above] - magnitude, magnitude - MAGNITUDES[below]
    code = torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = code + 128 * torch.signbit(values)
    return torch.where(values.isnan(), 0x7F, code).to(torch.uint8)


def by_definition(x: Tensor, mode: Quantize) -> tuple[Tensor, Tensor]:
    """``docs/reference/semantics.md``, Quantisation: bytes of the data, and scales."""
    if mode is Quantize.MXFP8:
        return microscaled(x)
    tokens, hidden = x.shape
    wide = pad(x.double(), (0, -hidden % 128)) if hidden > 128 else x.double()
    groups = wide.reshape(tokens, -(-hidden // 128), min(hidden, 128))
    amax = groups.abs().amax(2).clamp(min=float(torch.tensor(1e-4)))
    scale, factor = rounded(amax / 448), rounded(448 / amax)
    if mode is not Quantize.FP8:
        mantissa, exponent = torch.frexp(scale.nan_to_num(1.0, 1.0))  # in [0.5, 1)
        biased = torch.where(scale.isfinite(), exponent - (mantissa == 0.5).int() + 127, 255)
        scale = torch.where(biased == 255, inf, 2.0 ** (biased.double() - 127))
        factor = 1 / scale
    data = e4m3(rounded(groups * factor.unsqueeze(2))).flatten(1)[:, :hidden]
    if mode is Quantize.FP8_UE8M0:
        byte = pad(biased, (0, -biased.shape[1] % 4)).unflatten(1, (-1, 4)).long()
        word = (byte << torch.tensor([0, 8, 16, 24])).sum(2)
        return data, torch.where(word < 2**31, word, word - 2**32).int()
    return data, scale.float()


def microscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of ``MXFP8``, by the OCP MX specification: ``X = 2 ** (floor(log2(amax)) - 8)``."""
    hidden = x.shape[1]
    blocks = pad(x.double(), (0, -hidden % 32)).unflatten(1, (-1, 32))
    amax = blocks.abs().amax(2)
    powers = 2.0 ** torch.arange(-149.0, 128, dtype=torch.float64)
    floor = torch.searchsorted(powers, amax.nan_to_num(), right=True) - 150
    exponent, spoilt = (floor - 8).clamp(min=-127), ~amax.isfinite()
    scaled = rounded(blocks * (2.0 ** -exponent.double()).unsqueeze(2))
    data = e4m3(torch.where(spoilt.unsqueeze(2), nan, scaled)).flatten(1)[:, :hidden]
    scales = torch.where(spoilt, 255, exponent + 127).to(torch.uint8)
    return data, scales.view(torch.float8_e8m0fnu)


def check_cast(cast: Callable[[Tensor, Quantize], Quantized], x: Tensor, mode: Quantize) -> None:
    """Every byte of the data, and every bit of scales that are not NaN."""
    got, (data, scales) = cast(x, mode), by_definition(x, mode)
    assert got.data.dtype == torch.float8_e4m3fn and got.data.is_contiguous()
    assert torch.equal(got.data.view(torch.uint8), data)
    assert got.scales.dtype == scales.dtype
    if scales.dtype == torch.float8_e8m0fnu:
        assert torch.equal(got.scales.contiguous().view(torch.uint8), scales.view(torch.uint8))
        return
    torch.testing.assert_close(got.scales, scales, rtol=0, atol=0, equal_nan=True)


def every(dtype: torch.dtype) -> Tensor:
    """All numbers of 16 bits, in order of their bits: subnormal ones, zeros, infinities and NaN of
    either sign among them.
    """
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@modes
@casts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits(
    cast: Callable[[Tensor, Quantize], Quantized], mode: Quantize, dtype: torch.dtype
) -> None:
    """Alone in its group, among its neighbours, and among any others; in groups that are whole and
    that are not.
    """
    x = every(dtype)[:: 1 if dtype is torch.bfloat16 else 4]
    finite = x[x.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(1))]
    check_cast(cast, x.view(-1, 1), mode)
    check_cast(cast, x.view(-1, 128), mode)
    for some, hidden in ((finite, 129), (shuffled, 300), (shuffled, 515)):
        check_cast(cast, some[: len(some) // hidden * hidden].view(-1, hidden), mode)


def edges() -> Tensor:
    """Largest magnitudes of groups around which scales change: ``[n]`` float32."""
    powers = 2.0 ** torch.arange(-149.0, 128, dtype=torch.float64)
    exact = torch.cat(
        [powers, 448 * powers, 1.75 * powers, torch.tensor([1e-4, 0.0, 3.4028234663852886e38])]
    ).float()
    exact = exact[exact.isfinite()]
    return torch.cat(
        [exact, exact.nextafter(torch.tensor(inf)), exact.nextafter(torch.tensor(0.0))]
    )


@modes
@casts
def test_edges_of_scales(cast: Callable[[Tensor, Quantize], Quantized], mode: Quantize) -> None:
    """Powers of two and 448 times them, and one bit more or less: beside numbers that are halfway
    between two of E4M3.
    """
    largest = edges()
    halfway = (MAGNITUDES[1:] + MAGNITUDES[:-1]).float() / 896  # 126 of them
    group = torch.cat([torch.tensor([1.0, -1.0]), halfway])
    # A group, and three channels of another.
    x = largest.unsqueeze(1) * torch.cat([group, -group.flip(0)[:3]])
    check_cast(cast, x[x.isfinite().all(1)], mode)


@modes
@casts
def test_numbers_that_are_not_finite(
    cast: Callable[[Tensor, Quantize], Quantized], mode: Quantize
) -> None:
    """They spoil their own group, whatever their sign, and no other."""
    x = torch.full((6, 130), 3.0)
    for row, bad in enumerate((nan, -nan, inf, -inf)):
        x[row, 5] = bad
        x[row, 129] = -448
    x[4, 5:7] = torch.tensor([inf, nan])
    x[5, 128] = torch.tensor(-1).int().view(torch.float32)  # every bit
    check_cast(cast, x, mode)
    got = cast(x, mode)
    value = reference.dequantize(got.data, got.scales, torch.float32)
    block = 32 if mode is Quantize.MXFP8 else 128
    assert value[:5, :block].isnan().all() and value[5, 128:].isnan().all()
    assert (value[:5, block:128] == 3).all()
    assert (value[:4, 129] == -448).all() and value[5, :128].isfinite().all()


@modes
@casts
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 384, 515, 640])
def test_any_size_and_strides(
    cast: Callable[[Tensor, Quantize], Quantized], mode: Quantize, hidden: int
) -> None:
    wide = torch.randn(2 * hidden, 5, generator=torch.Generator().manual_seed(hidden)) * 10
    for x in (wide.t()[:, ::2], wide[:hidden].t(), wide[:hidden, :1].t(), wide[:hidden, :0].t()):
        check_cast(cast, x, mode)
        check_cast(cast, x.bfloat16(), mode)


@wideners
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_rounds_once(widen: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Every byte times scales of any bits, in float32, then in ``dtype``; scales in any strides."""
    data = torch.arange(256, dtype=torch.uint8).repeat(4, 2)[:, :390].view(torch.float8_e4m3fn)
    scales = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    scales[0] = torch.tensor([inf, nan, 2.0**-130, -0.0])
    want = (
        rounded(data.double() * scales.double().repeat_interleave(128, 1)[:, :390])
        .float()
        .to(dtype)
    )
    for strided in (scales, scales.t().contiguous().t()):
        got = widen(data, strided, dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@wideners
def test_dequantize_reads_packed_scales(widen: Callable[..., Tensor]) -> None:
    """Groups 4j + i from byte i of word j; a byte of 0 counts nothing, 255 is infinite. Words in
    any strides.
    """
    exponents = torch.arange(3 * 8, dtype=torch.uint8).view(3, 8) * 11
    exponents[2, 7] = 255
    words = exponents.view(torch.int32)
    data = torch.ones(3, 8 * 128 - 5).to(torch.int8)
    factor = torch.where(
        exponents == 255, inf, torch.where(exponents == 0, 0.0, 2.0 ** (exponents.double() - 127))
    )
    want = factor.float().repeat_interleave(128, 1)[:, : data.shape[1]]
    for strided in (words, words.t().contiguous().t(), words.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(widen(data, strided, torch.float32), want)


@wideners
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize_reads_every_e8m0(widen: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Every byte of E4M3 times every power of two; 255 is NaN. In any strides, in part of a
    block."""
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 2)[:, 100:390]
    data = data.view(torch.float8_e4m3fn)
    codes = (torch.arange(256)[:, None] + 7 * torch.arange(10)) % 256
    scales = codes.to(torch.uint8).view(torch.float8_e8m0fnu)
    powers = torch.where(codes == 255, nan, 2.0 ** (codes.double() - 127))
    spread = powers.repeat_interleave(32, 1)[:, :290]
    want = (data.double() * spread).float().to(dtype)
    wide = torch.zeros(256, 12, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wide[:, :10] = scales
    for strided in (scales, scales.t().contiguous().t(), wide[:, :10]):
        got = widen(data, strided, dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
