# ruff: noqa: E402, N803, N806 (Triton is imported after the check; constants of kernels are written in capitals)
"""What a program does to memory alone is what it would do in order, whatever the hardware does
meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from tokenyard.kernels.sync import words
from tokenyard.testing.simulator import Simulator

SEEDS = range(12)
WEAKEST: dict[str, Any] = {"early": 0.4, "stale": 0.9, "switch": 0.5}


@triton.jit
def overlapping(
    mem, src, out, cut, DTYPE: tl.constexpr, BYTES: tl.constexpr, BARRIER: tl.constexpr
):
    """Loads after stores that overlap: whole rows, masked lanes, every other lane, a tile, other
    sizes, own atomics.
    """
    P = tl.pointer_type(DTYPE)
    i = tl.arange(0, 16)
    a = tl.load(src.to(P) + i)
    b = tl.load(src.to(P) + 16 + i)
    tl.store(mem.to(P) + i, a)
    if BARRIER:
        tl.debug_barrier()
    tl.store(mem.to(P) + i, b, mask=i < cut)
    tl.store(out.to(P) + i, tl.load(mem.to(P) + i))
    tl.debug_barrier()
    tl.store(mem.to(P) + 2 * tl.arange(0, 8), tl.load(src.to(P) + 32 + tl.arange(0, 8)))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out.to(P) + 16 + i, tl.load(mem.to(P) + i, mask=i >= 2, other=0.0))
    tile = tl.arange(0, 4)[:, None] + 4 * tl.arange(0, 4)[None, :]
    tl.store(
        mem.to(P) + 16 + tile,
        tl.load(mem.to(P) + 4 * tl.arange(0, 4)[:, None] + tl.arange(0, 4)[None, :]),
    )
    tl.store(out.to(P) + 32 + i, tl.load(mem.to(P) + 16 + i))
    small = tl.pointer_type(tl.int8)
    tl.debug_barrier()
    tl.store(mem.to(small) + 3, tl.full((), 77, tl.int8))
    tl.store(
        out.to(small) + 48 * BYTES + tl.arange(0, 16), tl.load(mem.to(small) + tl.arange(0, 16))
    )


DTYPES = [
    (tl.int8, torch.int8),
    (tl.int16, torch.int16),
    (tl.int32, torch.int32),
    (tl.int64, torch.int64),
    (tl.uint8, torch.uint8),
    (tl.float16, torch.float16),
    (tl.bfloat16, torch.bfloat16),
    (tl.float32, torch.float32),
    (tl.float64, torch.float64),
    (tl.float8e4nv, torch.float8_e4m3fn),
    (tl.float8e5, torch.float8_e5m2),
]


@pytest.mark.parametrize(("kernel_type", "dtype"), DTYPES, ids=[str(dtype) for _, dtype in DTYPES])
def test_a_program_sees_its_own_stores(kernel_type: Any, dtype: torch.dtype) -> None:
    src = torch.arange(1, 49).to(dtype)
    size = src.element_size()
    want = torch.zeros(48 * size + 16, dtype=torch.uint8)
    whole, mem = want[: 48 * size].view(dtype), src[:16].clone()
    mem[:5] = src[16:21]
    whole[:16] = mem
    mem[::2] = src[32:40]
    whole[16:32] = mem
    whole[16:18] = torch.zeros(2).to(dtype)
    whole[32:48] = mem.view(4, 4).T.reshape(-1)
    mem.view(torch.uint8)[3] = 77
    want[48 * size :] = torch.cat([mem, whole[32:48]]).view(torch.uint8)[:16]
    for seed in SEEDS:
        sim = Simulator(seed=seed, **WEAKEST)
        region, out = sim.allocate(32 * size), torch.zeros_like(want)
        sim.launch(
            0,
            overlapping,
            1,
            region.ctypes.data,
            src.data_ptr(),
            out.data_ptr(),
            5,
            DTYPE=kernel_type,
            BYTES=size,
            BARRIER=seed % 2 == 0,
        )
        sim.run()
        assert torch.equal(out, want)


@triton.jit
def boolean(mem, out):
    i = tl.arange(0, 8)
    tl.store(mem.to(tl.pointer_type(tl.int1)) + i, i % 3 == 0)
    tl.store(words(out) + i, tl.load(mem.to(tl.pointer_type(tl.int1)) + i).to(tl.int64))


def test_booleans() -> None:
    sim = Simulator()
    mem, out = sim.allocate(16), np.zeros(8, np.int64)
    sim.launch(0, boolean, 1, mem.ctypes.data, out.ctypes.data)
    sim.run()
    assert out.tolist() == [1, 0, 0, 1, 0, 0, 1, 0]


@triton.jit
def own_atomics(mem, out):
    """Atomics on addresses that the program has just stored to."""
    i = tl.arange(0, 8)
    tl.store(words(mem) + i, i.to(tl.int64))
    tl.store(words(out) + i, tl.atomic_add(words(mem) + i, 10, mask=i < 4, sem="relaxed"))
    tl.debug_barrier()
    tl.store(words(mem) + 1, tl.full((), 100, tl.int64))
    tl.store(
        words(out) + 8,
        tl.atomic_cas(words(mem) + 1, tl.full((), 100, tl.int64), tl.full((), 50, tl.int64)),
    )
    tl.store(
        words(out) + 9,
        tl.atomic_cas(words(mem) + 1, tl.full((), 100, tl.int64), tl.full((), 60, tl.int64)),
    )
    tl.store(words(out) + 10, tl.atomic_max(words(mem) + 2, 40))
    tl.store(words(out) + 11, tl.atomic_xchg(words(mem) + 2, 3))
    tl.store(words(out) + 16 + i, tl.load(words(mem) + i))


def test_a_programs_atomics_see_its_own_stores() -> None:
    for seed in SEEDS:
        sim = Simulator(seed=seed, **WEAKEST)
        mem, out = sim.allocate(64), np.zeros(24, np.int64)
        sim.launch(0, own_atomics, 1, mem.ctypes.data, out.ctypes.data)
        sim.run()
        assert out.tolist() == [
            0,
            1,
            2,
            3,
            0,
            0,
            0,
            0,
            100,
            50,
            12,
            40,
            *[0] * 4,
            10,
            50,
            3,
            13,
            4,
            5,
            6,
            7,
        ]


@triton.jit
def many_atomics(mem, n, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Every program, n times, two of four lanes with the same address."""
    i = tl.arange(0, 4)
    cells = mem.to(tl.pointer_type(DTYPE)) + i // 2
    for k in range(n):
        value = (i + 1 + k + tl.program_id(0)).to(DTYPE)
        if OP == "add":
            tl.atomic_add(cells, value, mask=i < 3)
        elif OP == "max":
            tl.atomic_max(cells, value, mask=i < 3)


ADDED = [tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32, tl.float64]


@pytest.mark.parametrize("kernel_type", ADDED, ids=str)
def test_no_addition_is_lost(kernel_type: Any) -> None:
    dtype = {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp64": torch.float64,
        "int32": torch.int32,
        "int64": torch.int64,
        "uint32": torch.int32,
    }[str(kernel_type)]
    for seed in range(4):
        sim = Simulator(seed=seed)
        mem = sim.allocate(32)
        sim.launch(0, many_atomics, 3, mem.ctypes.data, 2, DTYPE=kernel_type, OP="add")
        sim.run()
        # lanes 0 and 1: (1 + 2) + 2 (k + program), lane 2: 3 + k + program; six times
        assert torch.from_numpy(mem).view(dtype)[:2].double().tolist() == [6 * 3 + 2 * 9, 6 * 3 + 9]


def test_atomic_maximum() -> None:
    sim = Simulator(seed=1)
    mem = sim.allocate(16)
    sim.launch(0, many_atomics, 3, mem.ctypes.data, 2, DTYPE=tl.int32, OP="max")
    sim.run()
    assert mem.view(np.int32)[:2].tolist() == [5, 6]


@triton.jit
def exchange_floats(mem, out):
    old = tl.atomic_xchg(mem.to(tl.pointer_type(tl.float32)), 2.5)
    tl.store(out.to(tl.pointer_type(tl.float32)), old)


def test_floats_can_be_exchanged() -> None:
    sim = Simulator()
    mem, out = sim.allocate(16), np.zeros(1, np.float32)
    mem.view(np.float32)[0] = -1.5
    sim.launch(0, exchange_floats, 1, mem.ctypes.data, out.ctypes.data)
    sim.run()
    assert (mem.view(np.float32)[0], out[0]) == (2.5, -1.5)


@triton.jit
def scattered(mem, out, n, LANES: tl.constexpr):
    """A column of a big matrix, across many pages, read back in reverse."""
    i = tl.arange(0, LANES)
    tl.store(words(mem) + i * 300, i.to(tl.int64), mask=i < n)
    tl.store(
        words(out) + i,
        tl.load(words(mem) + (LANES - 1 - i) * 300, mask=LANES - 1 - i < n, other=-1),
    )


def test_columns() -> None:
    for seed in SEEDS:
        sim = Simulator(seed=seed, **WEAKEST)
        mem, out = sim.allocate(64 * 300 * 8), np.zeros(64, np.int64)
        sim.launch(0, scattered, 1, mem.ctypes.data, out.ctypes.data, 50, LANES=64)
        sim.run()
        assert out.tolist() == [-1] * 14 + list(range(49, -1, -1))
        assert mem.view(np.int64)[::300][:50].tolist() == list(range(50))
