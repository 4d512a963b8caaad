# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""Repairs of the interpreter: each test fails with Triton 3.6 as it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from interpreted import need_interpreter

pytestmark = pytest.mark.portable

need_interpreter()

import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

from tokenyard.kernels.sync import now_ns, words
from tokenyard.testing import interpreter

NARROW = [
    (tl.bfloat16, torch.bfloat16, float("inf")),
    (tl.float8e4nv, torch.float8_e4m3fn, 448.0),
    (tl.float8e5, torch.float8_e5m2, 57344.0),
]
NAMES = [str(dtype) for _, dtype, _ in NARROW]


@triton.jit
def cast(x, y, n, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x.to(tl.pointer_type(FROM)) + i, mask=i < n)
    tl.store(y.to(tl.pointer_type(TO)) + i, value.to(TO), mask=i < n)


def kernel_cast(x: torch.Tensor, source: Any, to: Any, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.numel(), dtype=dtype)
    cast[(1,)](
        x.data_ptr(),
        y.data_ptr(),
        x.numel(),
        FROM=source,
        TO=to,
        BLOCK=triton.next_power_of_2(x.numel()),
    )
    return y


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def saturated(x: torch.Tensor, largest: float) -> torch.Tensor:
    """As ``cvt.rn.satfinite`` has it; bf16 goes to infinity."""
    return x if largest == float("inf") else x.clamp(-largest, largest)


@pytest.mark.parametrize(("to", "dtype", "largest"), NARROW, ids=NAMES)
def test_narrow_floats_are_rounded_as_torch_does(
    to: Any, dtype: torch.dtype, largest: float
) -> None:
    bits = torch.randint(-(2**31), 2**31, (8192,), generator=torch.Generator().manual_seed(1))
    special = torch.tensor(
        [
            0.0,
            -0.0,
            float("inf"),
            -float("inf"),
            448.0,
            464.0,
            465.0,
            31.95,
            1e-9,
            2.0**-133,
            57344.0,
            1e38,
        ]
    )
    ties = 1.0 + torch.arange(512).float() / 512
    x = torch.cat(
        [bits.int().view(torch.float32), special, ties, -ties, ties * 2.0**-9, ties * 2.0**-16]
    )
    x = x[~x.isnan()]
    assert same_bits(kernel_cast(x, tl.float32, to, dtype), saturated(x, largest).to(dtype))
    # Two of them negative.
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -0x7FFFFF]).int().view(torch.float32)
    cast = kernel_cast(nan, tl.float32, to, dtype)
    assert nan.isnan().all() and cast.float().isnan().all()
    assert largest == float("inf") or cast.view(torch.uint8).tolist() == [0x7F] * 4


@pytest.mark.parametrize(("to", "dtype", "largest"), NARROW[1:], ids=NAMES[1:])
@pytest.mark.parametrize(
    ("source", "source_dtype"),
    [(tl.bfloat16, torch.bfloat16), (tl.float16, torch.float16)],
    ids=str,
)
def test_every_half_becomes_the_right_fp8(
    to: Any, dtype: torch.dtype, largest: float, source: Any, source_dtype: torch.dtype
) -> None:
    x = torch.arange(-(2**15), 2**15).short().view(source_dtype)
    x = x[~x.isnan()]
    assert same_bits(kernel_cast(x, source, to, dtype), saturated(x.float(), largest).to(dtype))


@pytest.mark.parametrize(("source", "dtype"), [narrow[:2] for narrow in NARROW], ids=NAMES)
def test_narrow_floats_become_wide_and_back(source: Any, dtype: torch.dtype) -> None:
    size = {1: torch.int8, 2: torch.int16}[torch.empty(0, dtype=dtype).element_size()]
    x = torch.arange(torch.iinfo(size).min, torch.iinfo(size).max + 1).to(size).view(dtype)
    wide = kernel_cast(x, source, tl.float32, torch.float32)
    assert torch.equal(wide.nan_to_num(), x.float().nan_to_num())
    finite = x[x.float().isfinite()]
    assert same_bits(kernel_cast(finite.float(), tl.float32, source, dtype), finite)


@pytest.mark.parametrize(
    ("x", "source", "to", "dtype"),
    [
        (torch.arange(-300, 300), tl.int64, tl.bfloat16, torch.bfloat16),
        (torch.arange(-300, 300).bfloat16(), tl.bfloat16, tl.int32, torch.int32),
        (torch.arange(-300, 300).double() / 7, tl.float64, tl.bfloat16, torch.bfloat16),
        (torch.arange(-300, 300).bfloat16(), tl.bfloat16, tl.float64, torch.float64),
        (torch.arange(-300, 300).half() / 7, tl.float16, tl.bfloat16, torch.bfloat16),
    ],
    ids=["int-bf16", "bf16-int", "fp64-bf16", "bf16-fp64", "fp16-bf16"],
)
def test_bf16_is_a_number_not_its_bits(
    x: torch.Tensor, source: Any, to: Any, dtype: torch.dtype
) -> None:
    assert torch.equal(kernel_cast(x, source, to, dtype), x.to(dtype))


@triton.jit
def arithmetic(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + BLOCK + i, a * b - a)
    tl.store(out + 2 * BLOCK + i, tl.where(a < b, a, b))
    tl.store(out + 3 * BLOCK + i, tl.maximum(a, b))
    tl.store(out + 4 * BLOCK + i, -a)
    tl.store(out + 5 * BLOCK + i, tl.abs(a))
    tl.store(out + 6 * BLOCK + i, tl.full((BLOCK,), 1.5, tl.bfloat16))
    tl.store(out + 7 * BLOCK + i, tl.sum(a, 0) + tl.zeros((BLOCK,), tl.bfloat16))


def test_arithmetic_of_bf16() -> None:
    x, y = (
        torch.randn(64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed in range(2)
    )
    out = torch.zeros(8, 64, dtype=torch.bfloat16)
    arithmetic[(1,)](x, y, out, BLOCK=64)
    want = [
        x + y,
        x * y - x,
        torch.minimum(x, y),
        torch.maximum(x, y),
        -x,
        x.abs(),
        torch.full((64,), 1.5).bfloat16(),
    ]
    assert torch.equal(out[:7], torch.stack(want))
    assert (out[7] - x.float().sum().bfloat16()).abs().max() < 0.1


@triton.jit
def histogram(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + i), BINS, mask=i < n))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_histograms(dtype: torch.dtype) -> None:
    x = torch.cat([torch.arange(512) % 5, torch.zeros(512)]).to(dtype)
    for n in (0, 300, 1024):
        out = torch.full((8,), -1, dtype=torch.int32)
        histogram[(1,)](x, out, n, BINS=8, BLOCK=1024)
        assert torch.equal(out, torch.bincount(x[:n].long(), minlength=8).int())


@triton.jit
def scans(x, out, A: tl.constexpr, B: tl.constexpr):
    cells = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    tile = tl.load(x + cells)
    tl.store(out + cells, tl.cumsum(tile, 0))
    tl.store(out + A * B + cells, tl.cumsum(tile, 1))
    tl.store(out + 2 * A * B + cells, tl.cumsum(tile, 1, reverse=True))
    tl.store(
        out + 3 * A * B + cells,
        tl.cumsum(tile, 1) - tile + tl.sum(tile, 0)[None, :] + tl.max(tile, 1)[:, None],
    )


def test_scans_of_tiles() -> None:
    """These were right; other engines' kernels depend on them."""
    x = torch.randint(0, 9, (4, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(4, 4, 8, dtype=torch.int32)
    scans[(1,)](x, out, A=4, B=8)
    rows = x.cumsum(1).int()
    assert torch.equal(out[0], x.cumsum(0).int()) and torch.equal(out[1], rows)
    assert torch.equal(out[2], x.flip(1).cumsum(1).flip(1).int())
    assert torch.equal(out[3], rows - x + x.sum(0).int()[None] + x.amax(1)[:, None])


@triton.jit
def masked_atomics(mem, out):
    i = tl.arange(0, 8)
    tl.store(words(out) + i, tl.atomic_add(words(mem) + i, 1, mask=i % 2 == 0, sem="relaxed"))
    tl.store(words(out) + 8 + i, tl.atomic_max(words(mem) + i, 5, mask=i < 4, sem="relaxed"))
    tl.store(
        words(out) + 16 + i,
        tl.atomic_xchg(words(mem) + i, i.to(tl.int64) * 10, mask=i > 5, sem="relaxed"),
    )


def test_masked_lanes_of_atomics_are_zeros() -> None:
    mem, out = torch.arange(1, 9), torch.full((24,), -1)
    masked_atomics[(1,)](mem.data_ptr(), out.data_ptr())
    assert mem.tolist() == [5, 5, 5, 5, 6, 6, 60, 70]
    assert out.tolist() == [1, 0, 3, 0, 5, 0, 7, 0, 2, 2, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8]


@triton.jit
def float_exchange(mem, out):
    tl.store(out, tl.atomic_xchg(mem, 2.5))


def test_floats_can_be_exchanged() -> None:
    mem, out = torch.tensor([-1.5]), torch.zeros(1)
    float_exchange[(1,)](mem, out)
    assert (mem.item(), out.item()) == (2.5, -1.5)


@triton.jit
def loops(out, n, BIG: tl.constexpr):
    """Loop variables are tensors, of the bounds' type: products of 32-bit ones overflow as they
    would when compiled.
    """
    for i in range(n):
        tl.store(words(out) + i, i.to(tl.int64))
    for i in range(3, 3 + n.to(tl.int32)):
        tl.store(words(out) + 2 + i, (i * BIG).to(tl.int64))
    for i in range(n, n + 2):
        tl.store(words(out) + 8 + i, i * BIG)
    for i in tl.static_range(2):
        tl.store(words(out) + 14 + i, tl.arange(i, i + 2).to(tl.int64).sum())


@triton.jit
def indexed(out):
    for i in range(tl.program_id(0), 3, tl.num_programs(0)):
        tl.store(words(out) + i, 1)


def test_loop_variables_are_tensors() -> None:
    out = torch.zeros(16, dtype=torch.int64)
    with interpreter.patched_language():
        upstream.interpreter_builder.grid_idx = (0, 0, 0)
        loops.rewrite()(int64(out.data_ptr()), int64(2), BIG=2**30)
    three = 3 * 2**30 - 2**32
    assert out.tolist() == [0, 1, 0, 0, 0, three, 0, 0, 0, 0, 2 * 2**30, 3 * 2**30, 0, 0, 1, 3]
    out.zero_()
    indexed[(2,)](out.data_ptr())
    assert out.tolist()[:4] == [1, 1, 1, 0]


def int64(value: int) -> Any:
    return tl.tensor(upstream.TensorHandle(np.array([value], np.int64), tl.int64), tl.int64)


@triton.jit
def null(address, out):
    tl.store(words(out), (words(address) + 2).to(tl.int64))


def test_a_small_integer_can_be_a_pointer() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    null[(1,)](0, out.data_ptr())
    assert out.item() == 16


def test_a_tensor_can_be_an_index_whatever_numpy_is() -> None:
    """numpy 2.4 refuses int(array of one element)."""
    with interpreter.patched_language():
        index = tl.tensor.__index__
        one = tl.tensor(upstream.TensorHandle(np.array([[5]], np.int32), tl.int32), tl.int32)
        assert index(one) == 5


@triton.jit
def read_clock(out):
    tl.store(words(out), now_ns())


@triton.jit
def unknown_assembly(out):
    tl.store(
        words(out),
        tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        ),
    )


def test_the_clock_can_be_exchanged() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    read_clock[(1,)](out.data_ptr())
    real = out.item()
    with interpreter.clock(lambda: 1234):
        read_clock[(1,)](out.data_ptr())
    assert real > 10**6 and out.item() == 1234
    read_clock[(1,)](out.data_ptr())
    assert out.item() >= real
    with pytest.raises(Exception, match=r"clock64.* is not emulated"):
        unknown_assembly[(1,)](out.data_ptr())


def test_the_language_is_whole_again_afterwards() -> None:
    before = tl.load, tl.tensor.__add__, tl.sum, upstream.interpreter_builder.options
    with interpreter.patched_language(), interpreter.patched_language():
        assert tl.load is not before[0]
    assert (tl.load, tl.tensor.__add__, tl.sum, upstream.interpreter_builder.options) == before


def test_blocks_keep_their_rules() -> None:
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.int32, [])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
    assert str(tl.block_type(tl.int32, [tl.constexpr(2), 4])) == "<['2', '4'], int32>"
    assert (
        tl.block_type(tl.int32, (2, 4))
        == tl.block_type(tl.int32, [2, 4])
        != tl.block_type(tl.int32, [4, 2])
    )
