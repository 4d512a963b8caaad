"""The oracle's quantisation and the engines', against scales and bytes worked by hand, and
quantised payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenyard.formats import dequantize as torch_dequantize
from tokenyard.formats import quantize as torch_quantize
from tokenyard.reference import dequantize, dispatch, quantize
from tokenyard.types import Layout, Quantize, Quantized

pytestmark = pytest.mark.portable

NAN = float("nan")
Cast = Callable[[Tensor, Quantize], Quantized]
both = pytest.mark.parametrize("cast", [quantize, torch_quantize], ids=["oracle", "engines"])


def equal(actual: Tensor | None, expected: Any) -> bool:
    """Same shape and values; a difference is raised and shown."""
    assert actual is not None
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual.dtype), rtol=0, atol=0)
    return True


@both
def test_quantize_fp8(cast: Cast) -> None:
    x = torch.zeros(1, 258)
    x[0, :3] = torch.tensor([3.0, 2.25, -1.5])
    x[0, 256:] = torch.tensor([0.0, 1e-4])
    quantized = cast(x, Quantize.FP8)
    # 3 / 448, an empty group at the floor of 1e-4, and 1e-4 in a group of two channels. 3 * (1 /
    # 448) is 0x3BDB6DB8.
    assert equal(quantized.scales.view(torch.int32), [[0x3BDB6DB7, 0x346FACAD, 0x346FACAD]])
    data = quantized.data.view(torch.uint8)[0]
    # 448, 336 (a tie: 320; 2.25 * ((1 / 3) * 448) gives 352) and -224.
    assert equal(data[:4], [0x7E, 0x7A, 0xF6, 0])
    assert equal(data[256:], [0, 0x7E])
    assert quantized.data.shape == (1, 258)


def powers_of_two() -> Tensor:
    """Five groups, the last of three channels, with amax 448, 1, 0, 896 and 449."""
    x = torch.zeros(1, 515)
    x[0, 7], x[0, 128], x[0, 511], x[0, 514] = 448, -1, 896, 449
    return x


@both
def test_quantize_powers_of_two(cast: Cast) -> None:
    plain, packed = (
        cast(powers_of_two(), Quantize.FP8_POW2),
        cast(powers_of_two(), Quantize.FP8_UE8M0),
    )
    assert equal(plain.scales, [[1, 2**-8, 2**-22, 2, 2]])
    assert equal(packed.scales.view(torch.uint8), [[127, 119, 105, 128, 128, 0, 0, 0]])
    assert equal(packed.scales, [[0x8069777F - 2**32, 128]])
    assert equal(plain.data.view(torch.uint8), packed.data.view(torch.uint8))
    data = plain.data.view(torch.uint8)[0]
    assert equal(data[[7, 128, 511, 514]], [0x7E, 0xF8, 0x7E, 0x76])  # 448, -256, 448, 224.5 -> 224
    assert data.count_nonzero() == 4


@both
@pytest.mark.parametrize("bad", [NAN, -NAN, float("inf"), float("-inf")])
def test_quantize_keeps_neighbours_of_nan(cast: Cast, bad: float) -> None:
    x = powers_of_two()
    x[0, 0] = bad
    quantized = cast(x, Quantize.FP8_UE8M0)
    assert equal(quantized.scales.view(torch.uint8)[0, :5], [255, 119, 105, 128, 128])
    assert equal(quantized.data.view(torch.uint8)[0, [0, 1, 7, 128, 511]], [0x7F, 0, 0, 0xF8, 0x7E])
    assert equal(cast(x, Quantize.FP8_POW2).scales, [[float("inf"), 2**-8, 2**-22, 2, 2]])
    assert cast(x, Quantize.FP8).scales.isfinite().tolist() == [[False, True, True, True, True]]


@both
def test_quantize_mxfp8(cast: Cast) -> None:
    """Blocks of 32 channels, the last of five: scales worked by hand."""
    x = torch.zeros(1, 165)
    x[0, :4] = torch.tensor([448.0, 449.0, 511.0, -511.0])  # beyond 448 / 2 ** 0: 448
    x[0, 32:36] = torch.tensor([1.0, 1.75, 1.9, -(2.0**-20)])
    x[0, 96:98] = torch.tensor([2.0**-130, -(2.0**-149)])  # scales end at 2 ** -127
    x[0, 128:130] = torch.tensor([3.0e38, -1.0])
    x[0, 160] = -(2.0**-118)
    quantized = cast(x, Quantize.MXFP8)
    assert quantized.scales.dtype == torch.float8_e8m0fnu
    scales = quantized.scales.contiguous().view(torch.uint8)
    assert equal(scales, [[127, 119, 0, 0, 127 + 127 - 8, 127 - 126]])
    data = quantized.data.view(torch.uint8)[0]
    assert equal(data[:5], [0x7E, 0x7E, 0x7E, 0xFE, 0])
    assert equal(data[32:37], [0x78, 0x7E, 0x7E, 0x80, 0])  # 256, 448, 486.4, -2 ** -12
    assert equal(data[96:99], [0x20, 0x80, 0])  # 2 ** -3, -2 ** -22
    assert equal(data[128:130], [0x7E, 0x80])  # 3e38 / 2 ** 119 is 451.4
    assert equal(data[160:162], [0xF8, 0])
    value = dequantize(quantized.data, quantized.scales, torch.float32)
    assert equal(value[0, [0, 3, 32, 33, 96, 160]], [448, -448, 1, 1.75, 2.0**-130, -(2.0**-118)])


@both
@pytest.mark.parametrize("bad", [NAN, -NAN, float("inf"), float("-inf")])
def test_quantize_mxfp8_spoils_one_block(cast: Cast, bad: float) -> None:
    x = torch.full((1, 96), 2.0)
    x[0, 40] = bad
    quantized = cast(x, Quantize.MXFP8)
    assert equal(quantized.scales.view(torch.uint8), [[120, 255, 120]])
    data = quantized.data.view(torch.uint8)
    assert (data[0, 32:64] == 0x7F).all() and (data[0, :32] == 0x78).all()


def test_dequantize() -> None:
    for mode in (Quantize.FP8_POW2, Quantize.FP8_UE8M0):
        quantized = quantize(powers_of_two(), mode)
        value = dequantize(quantized.data[None], quantized.scales[None], torch.float32)
        assert equal(value[0, 0, [7, 128, 511, 514]], [448, -1, 896, 448])
        assert value.shape == (1, 1, 515)
    data, scales = torch.tensor([[3]], dtype=torch.int8), torch.tensor([[1 / 3]])
    assert equal(dequantize(data, scales), [[1]])


@both
@pytest.mark.parametrize("mode", list(Quantize))
def test_quantize_no_tokens(cast: Cast, mode: Quantize) -> None:
    none, one = (cast(torch.ones(tokens, 520), mode) for tokens in (0, 1))
    assert none.data.shape == (0, 520) and none.scales.shape == (0, one.scales.shape[1])
    blocks = {Quantize.FP8: 5, Quantize.FP8_POW2: 5, Quantize.FP8_UE8M0: 2, Quantize.MXFP8: 17}
    assert one.scales.shape[1] == blocks.get(mode, one.scales.shape[1])


@pytest.mark.parametrize("mode", list(Quantize))
def test_dispatch_quantizes_first(mode: Quantize) -> None:
    x = [torch.linspace(-3, 5, 2 * 200).reshape(2, 200).bfloat16()]
    rows = dispatch(x, [torch.tensor([[0], [0]])], num_experts=1, quantize=mode)[0]
    expected = quantize(x[0].float(), mode)
    assert equal(rows.x.view(torch.uint8), expected.data.view(torch.uint8))
    assert equal(rows.scales, expected.scales)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_payload_and_scales_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).reshape(2, 128)  # every byte, NaNs among them
    scales = torch.tensor([[-1, 2**31 - 1], [3, 4]], dtype=torch.int32).T  # column major
    assert not scales.is_contiguous()
    payload = Quantized(data.view(dtype), scales)
    rows = dispatch(
        [payload], [torch.tensor([[1], [0]])], num_experts=2, layout=Layout.EXPERT_MAJOR
    )[0]
    assert rows.x.dtype == dtype
    assert equal(rows.x.view(torch.uint8), data.flip(0))
    assert equal(rows.scales, [[2**31 - 1, 4], [-1, 3]])


def test_float_payload_keeps_nan_bits() -> None:
    bits = torch.tensor([[0x7FC1, -1, 0x7F81]], dtype=torch.int16)
    rows = dispatch([bits.view(torch.bfloat16)], [torch.tensor([[0]])], num_experts=1)
    assert equal(rows[0].x.view(torch.int16), bits)


@pytest.mark.parametrize(
    "scales",
    [
        torch.ones(2, 1),
        torch.ones(2, 8),
        torch.ones(2, 2, dtype=torch.int32),
    ],
)
def test_scales_of_another_form_are_refused(scales: Tensor) -> None:
    """256 channels: two float32 scales, or one word of UE8M0."""
    with pytest.raises(ValueError, match="words per row of 256 channels"):
        torch_dequantize(torch.zeros(2, 256, dtype=torch.float8_e4m3fn), scales, torch.bfloat16)


@pytest.mark.parametrize("count", [2, 7, 12])
def test_e8m0_scales_of_another_form_are_refused(count: int) -> None:
    scales = torch.zeros(2, count, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match=rf"scales have {count} bytes .* per 32 channels is 8"):
        torch_dequantize(torch.zeros(2, 256, dtype=torch.float8_e4m3fn), scales, torch.bfloat16)
