# pyright: basic
"""Rows as kernels move them: whole words, 16 bytes per lane where a row allows it, several rows in flight.

A slot of a ring is ``[payload | scales | meta]``, each part padded to 16 bytes. Meta is what rides along in a fresh dispatch, in
int32 words: token, K ids, K ranks of the pick among its source's picks of that expert (expert layouts), K weights (if given).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_words(address, BITS: tl.constexpr):
    """``address`` (a multiple of 16) as a pointer to words of a payload."""
    if BITS == 32:
        p = address.to(tl.pointer_type(tl.int32))
    elif BITS == 16:
        p = address.to(tl.pointer_type(tl.int16))
    else:
        p = address.to(tl.pointer_type(tl.int8))
    return tl.multiple_of(p, 16)


@triton.jit
def copy_rows(
    src, src_row, FROM: tl.constexpr, dst, dst_row, TO: tl.constexpr, here, N: tl.constexpr, BLOCK: tl.constexpr
):
    """``dst[dst_row[i]] = src[src_row[i]]`` for the rows ``here``; N words each, strides FROM and TO, all rows in flight."""
    for at in range(0, N, BLOCK):
        w = at + tl.arange(0, BLOCK)
        mask = here[:, None] & (w < N)[None, :]
        v = tl.load(src + src_row.to(tl.int64)[:, None] * FROM + w[None, :], mask=mask, cache_modifier=".cg")
        tl.store(dst + dst_row.to(tl.int64)[:, None] * TO + w[None, :], v, mask=mask, cache_modifier=".cs")


@triton.jit
def copy_row_to(src, dst, dst_rows, here, N: tl.constexpr, BLOCK: tl.constexpr):
    """``dst[dst_rows[j]] = src`` for the rows ``here``: one read, several writes; N words each."""
    for at in range(0, N, BLOCK):
        w = at + tl.arange(0, BLOCK)
        v = tl.load(src + w, mask=w < N, cache_modifier=".cg")
        to = dst + dst_rows.to(tl.int64)[:, None] * N + w[None, :]
        v = tl.broadcast_to(v[None, :], to.shape)
        tl.store(to, v, mask=here[:, None] & (w < N)[None, :], cache_modifier=".cs")


@triton.jit
def zero_row(dst, N: tl.constexpr, BLOCK: tl.constexpr):
    """``dst[:N] = 0``."""
    for at in range(0, N, BLOCK):
        w = at + tl.arange(0, BLOCK)
        tl.store(dst + w, tl.zeros((BLOCK,), dst.dtype.element_ty), mask=w < N)


def groups_of(hidden: int) -> int:
    """Groups of 128 channels that a cast works on: a power of two, and all bytes of the last packed word."""
    return triton.next_power_of_2(max(-(-hidden // 128), 4))


@triton.jit
def cast_values(src, H: tl.constexpr, GP: tl.constexpr, MODE: tl.constexpr):
    """One row of H floats, cast: see :func:`cast`."""
    return cast(load_groups(src, H, GP), H, GP, MODE)


@triton.jit
def load_groups(src, H: tl.constexpr, GP: tl.constexpr, first=0):
    """Groups ``first`` to ``first + GP`` of a row of H floats, ``[GP, 128]``."""
    at = (first + tl.arange(0, GP))[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.load(src + at, mask=at < H, other=0.0)


@triton.jit
def cast(floats, H: tl.constexpr, GP: tl.constexpr, MODE: tl.constexpr, first=0):
    """Groups ``[GP, 128]`` of a row of H floats as E4M3, and what their scales are stored as ``[GP]`` (``docs/semantics.md``, Quantisation).

    ``MODE``: the value of a ``Quantize``. Example: 128 channels of 1.0 give the scale 1 / 448 and 128 times 448.
    """
    g, x = first + tl.arange(0, GP), floats.to(tl.float32)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # of magnitudes, which order as their bits do; NaNs are above all
    amax = tl.maximum(most.to(tl.float32, bitcast=True), 1e-4)
    amax = tl.where(most > 0x7F800000, float("nan"), amax)
    scale = tl.div_rn(amax, tl.full((GP,), 448.0, tl.float32))
    factor = tl.div_rn(tl.full((GP,), 448.0, tl.float32), amax)
    if MODE != 1:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        factor = tl.div_rn(tl.full((GP,), 1.0, tl.float32), scale)
    values = (x * factor[:, None]).to(tl.float8e4nv)
    if MODE == 3:
        return values, tl.where(g * 128 < H, exponent, 0).to(tl.int8)
    else:
        return values, scale


@triton.jit
def store_cast(
    values, scale, dst, scales, H: tl.constexpr, GP: tl.constexpr, MODE: tl.constexpr, S: tl.constexpr, first=0
):
    """Store what :func:`cast` made: to ``dst`` (pointer to float8e4nv) and S 4-byte words at the address ``scales``, of the whole row."""
    g, i = first + tl.arange(0, GP), tl.arange(0, 128)
    at = g[:, None] * 128 + i[None, :]
    if MODE == 3:
        tl.store(scales.to(tl.pointer_type(tl.int8)) + g, scale, mask=g < 4 * S)
    else:
        tl.store(scales.to(tl.pointer_type(tl.float32)) + g, scale, mask=g < S)
    tl.store(dst + at, values, mask=at < H)
