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
def of_each(v, B: tl.constexpr, GP: tl.constexpr):
    """``v [B]``, of rows, for every group of them ``[B * GP]``."""
    return tl.reshape(tl.broadcast_to(v[:, None], (B, GP)), (B * GP,))


@triton.jit
def load_groups(src, row, g, here, H: tl.constexpr):
    """Groups ``g [n]`` of rows ``row [n]`` of H floats each, ``[n, 128]``; zeros past a row's end, and where not ``here``."""
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.load(src + row.to(tl.int64)[:, None] * H + at, mask=here[:, None] & (at < H), other=0.0)


@triton.jit
def cast(floats, g, H: tl.constexpr, MODE: tl.constexpr):
    """Groups ``g [n]`` of rows of H floats, ``[n, 128]``, as E4M3, and what their scales are stored as ``[n]`` (``docs/semantics.md``, Quantisation).

    ``MODE``: the value of a ``Quantize``. Example: 128 channels of 1.0 give the scale 1 / 448 and 128 times 448.
    """
    x = floats.to(tl.float32)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # of magnitudes, which order as their bits do; NaNs are above all
    amax = tl.maximum(most.to(tl.float32, bitcast=True), 1e-4)
    amax = tl.where(most > 0x7F800000, float("nan"), amax)
    scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    factor = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)
    if MODE != 1:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    values = (x * factor[:, None]).to(tl.float8e4nv)
    if MODE == 3:
        return values, tl.where(g * 128 < H, exponent, 0).to(tl.int8)
    else:
        return values, scale


@triton.jit
def store_cast(
    values, scale, dst, TO: tl.constexpr, scales, SCALES: tl.constexpr, row, g, here, H: tl.constexpr, MODE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Store what :func:`cast` made to rows ``row [n]`` at the addresses ``dst``, TO bytes each, and ``scales``, S 4-byte words each SCALES bytes."""
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    to = tl.multiple_of(dst.to(tl.pointer_type(tl.float8e4nv)), 16) + row.to(tl.int64)[:, None] * TO
    if MODE == 3:
        tl.store(scales.to(tl.pointer_type(tl.int8)) + row.to(tl.int64) * SCALES + g, scale, mask=here & (g < 4 * S))
    else:
        tl.store(
            scales.to(tl.pointer_type(tl.float32)) + row.to(tl.int64) * (SCALES // 4) + g, scale, mask=here & (g < S)
        )
    tl.store(to + at, values, mask=here[:, None] & (at < H))


@triton.jit
def cast_rows(
    x, token, dst, TO: tl.constexpr, scales, SCALES: tl.constexpr, row, here, H: tl.constexpr, MODE: tl.constexpr, S: tl.constexpr,
    B: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows ``token [B]`` of ``x``, cast, all in flight, to rows ``row [B]`` of ``dst`` and ``scales``: see :func:`store_cast`."""
    g, there = tl.arange(0, B * GP) % GP, of_each(here, B, GP)
    floats = load_groups(tl.multiple_of(x.to(tl.pointer_type(DTYPE)), 16), of_each(token, B, GP), g, there, H)
    values, scale = cast(floats, g, H, MODE)
    store_cast(values, scale, dst, TO, scales, SCALES, of_each(row, B, GP), g, there, H, MODE, S)
