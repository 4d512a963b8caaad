# ruff: noqa: E402 (Triton is imported after the check)
"""The cast that senders' kernels make, interpreted, against the oracle: every bit, in every format,
of every number of 16 bits and of float32 around the edges of blocks' scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from interpreted import need_interpreter

pytestmark = pytest.mark.portable

need_interpreter()

from tokenyard import formats, reference
from tokenyard.engines.rings import row_layout_of
from tokenyard.kernels.dispatch import CastConfig, cast_kernel
from tokenyard.kernels.payload import cast_of
from tokenyard.kernels.structs import row_constants
from tokenyard.rows import Payload
from tokenyard.testing import interpreter
from tokenyard.types import Quantize

ROWS = 64
"""Rows cast at once."""


def kernel_cast(x: Tensor, mode: Quantize) -> tuple[Tensor, Tensor]:
    """Bytes of the data, and of scales in whole words."""
    row_layout = row_layout_of(Payload(x, None), mode, 0)
    data = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.full((x.shape[0], 4 * row_layout.scale_words), 0xAB, dtype=torch.uint8)
    row, cast = row_constants(row_layout), cast_of(row_layout, mode, x.dtype)
    k: Any = CastConfig(programs=2, row=row, cast=cast, rows=ROWS)
    with interpreter.patched_language(), np.errstate(all="ignore"):
        cast_kernel[(2,)](x.data_ptr(), data.data_ptr(), scales.data_ptr(), x.shape[0], k=k)
    return data, scales


def check(x: Tensor, mode: Quantize) -> None:
    x = x.contiguous()
    data, scales = kernel_cast(x, mode)
    want = reference.quantize(x, mode)
    assert torch.equal(data, want.data.view(torch.uint8)), mode
    if mode is Quantize.FP8:  # a NaN has any bits
        got = scales.view(torch.float32)
        torch.testing.assert_close(got, want.scales, rtol=0, atol=0, equal_nan=True)
        return
    whole = want.scales.view(torch.uint8)
    assert torch.equal(scales, pad(whole, (0, scales.shape[1] - whole.shape[1])))


modes = pytest.mark.parametrize("mode", list(Quantize), ids=lambda mode: mode.name.lower())


@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits(mode: Quantize, dtype: torch.dtype) -> None:
    """Among its neighbours, and among any others; in blocks that are whole and that are not."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = x[x.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(1))]
    check(x.view(-1, 128), mode)
    check(x.view(-1, 8), mode)
    for some, hidden in ((finite, 36), (shuffled, 300), (shuffled, 1032)):
        check(some[: len(some) // hidden * hidden].view(-1, hidden), mode)


@modes
def test_float32_of_any_bits(mode: Quantize) -> None:
    """Also alone in a row that is zeros otherwise, which its block's scale fits best."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(2))
    powers = 2.0 ** torch.arange(-149.0, 128, dtype=torch.float64)
    edges = torch.cat([powers, 1.75 * powers, 448 * powers, torch.tensor([0.0, 1e-4])]).float()
    some = torch.cat([bits.to(torch.int32).view(torch.float32), edges[edges.isfinite()]])
    alone = torch.zeros(len(some), 40)
    alone[:, 33] = some
    check(alone, mode)
    check(some[: len(some) // 100 * 100].view(-1, 100), mode)


def test_a_format_of_other_elements_is_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """E5M2 in blocks of 64 with float32 scales: nothing is written for it but the instance. The
    kernels' cast is torch's, and that is the definition; rows are dequantised by what they are,
    though other formats have scales of that dtype.
    """
    mode: Any = "E5M2 in blocks of 64"
    wide = formats.WireFormat(
        torch.float32, formats.WORD, formats.QUOTIENT, block=64, data=torch.float8_e5m2
    )
    monkeypatch.setitem(formats.FORMATS, mode, wide)
    x = torch.randn(60, 320, generator=torch.Generator().manual_seed(3)) * 3.0
    x[7, 64:128] = 0.0
    data, scales = kernel_cast(x, mode)
    got = formats.quantize(x, mode)
    assert got.data.dtype == torch.float8_e5m2 and got.scales.shape == (60, 5)
    assert torch.equal(data, got.data.view(torch.uint8))
    assert torch.equal(scales, got.scales.view(torch.uint8))
    blocks = x.unflatten(1, (5, 64))
    amax = blocks.abs().amax(2).clamp(min=1e-4)
    assert torch.equal(got.scales, torch.div(amax, torch.full_like(amax, 57344.0)))
    factor = torch.div(torch.full_like(amax, 57344.0), amax)
    want = (blocks * factor[..., None]).to(torch.float8_e5m2).flatten(1)
    assert torch.equal(data, want.view(torch.uint8))
    value = got.data.float() * got.scales.repeat_interleave(64, dim=1)
    assert torch.equal(formats.dequantize(got.data, got.scales, torch.float32), value)
    per_128 = torch.rand(60, 3)
    value = got.data.float() * per_128.repeat_interleave(128, dim=1)[:, :320]
    assert torch.equal(formats.dequantize(got.data, per_128, torch.float32), value)
