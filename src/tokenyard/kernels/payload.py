# pyright: basic
"""Rows as kernels move them: whole words, 16 bytes per lane where a row allows it, several rows in
flight.

A slot of a ring is ``[payload | scales | metadata]``, each part padded to 16 bytes. Metadata goes
with rows in a fresh dispatch, in int32 words: token, ids of all picks, ranks of these picks among
the source's picks of that expert (layouts by expert), weights of all picks (if given).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenyard.formats import FORMATS, POWER_ABOVE, POWER_BELOW, WORD
from tokenyard.kernels.structs import Cast, Rows

_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_POWER_ABOVE, _POWER_BELOW = tl.constexpr(POWER_ABOVE), tl.constexpr(POWER_BELOW)
_WORD = tl.constexpr(WORD)
AT_ONCE = tl.constexpr(4096)
"""Words of scales that a program copies at once: so many that the latency of memory is no matter.
"""


@triton.jit
def elements(address, dtype: tl.constexpr):
    """``address`` (a multiple of 16) as a pointer to elements of ``dtype``."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def as_words(address, BITS: tl.constexpr):
    """The same for words of a payload."""
    return elements(address, tl.int32 if BITS == 32 else tl.int16 if BITS == 16 else tl.int8)


@triton.jit
def rows_at(address, BITS: tl.constexpr, index, stride: tl.constexpr):
    """Rows ``index`` of a table of words at ``address``, ``stride`` words from one to the next."""
    return Rows(words=as_words(address, BITS), index=index, stride=stride)


@triton.constexpr_function
def at_once(num_words: int, block: int | None) -> int:
    """Words of a row in flight: a ``block``, or all."""
    return triton.next_power_of_2(num_words) if block is None else block


@triton.jit
def copy_rows(source, target, here, num_words: tl.constexpr, block: tl.constexpr = None):
    """Copy each row of ``source`` (``Rows``) to its row of ``target`` where ``here``, ``block``
    words (None: all) of all rows at once."""
    BLOCK: tl.constexpr = at_once(num_words, block)
    for at in range(0, num_words, BLOCK):
        w = at + tl.arange(0, BLOCK)
        mask = here[:, None] & (w < num_words)[None, :]
        start = source.index.to(tl.int64)[:, None] * source.stride
        v = tl.load(source.words + start + w[None, :], mask=mask, cache_modifier=".cg")
        start = target.index.to(tl.int64)[:, None] * target.stride
        tl.store(target.words + start + w[None, :], v, mask=mask, cache_modifier=".cs")


@triton.jit
def copy_words(source, target, begin, end, block: tl.constexpr, programs: tl.constexpr):
    """``target[begin:end] = source[begin:end]``: ``block`` words at once, then those behind as many
    of each of the other ``programs`` that do so."""
    for at in range(begin, end, block * programs):
        w = at + tl.arange(0, block)
        v = tl.load(source + w, mask=w < end, cache_modifier=".cg")
        tl.store(target + w, v, mask=w < end, cache_modifier=".cs")


@triton.jit
def copy_rows_to(source, target, here, copies, num_words: tl.constexpr, block: tl.constexpr = None):
    """The same, each row to up to ``copies`` rows of ``target``, whose ``index [B]`` points to
    their numbers (int64; -1: none): one read, several writes."""
    BLOCK: tl.constexpr = at_once(num_words, block)
    for at in range(0, num_words, BLOCK):
        w = at + tl.arange(0, BLOCK)
        mask = here[:, None] & (w < num_words)[None, :]
        start = source.index.to(tl.int64)[:, None] * source.stride
        v = tl.load(source.words + start + w[None, :], mask=mask, cache_modifier=".cg")
        for j in range(0, copies):
            to = tl.load(target.index + j, mask=here, other=-1)
            start = to[:, None] * target.stride
            there = mask & (to >= 0)[:, None]
            tl.store(target.words + start + w[None, :], v, mask=there, cache_modifier=".cs")


@triton.jit
def load_rows(rows, here, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of rows at the addresses ``rows [B]``; zeros where not ``here``."""
    BITS: tl.constexpr = k.dtype.primitive_bitwidth
    ALIGNED: tl.constexpr = 16 if k.row.hidden * BITS // 8 % 16 == 0 else BITS // 8
    rows = tl.multiple_of(rows.to(tl.pointer_type(k.dtype))[:, None], (ALIGNED, ALIGNED))
    mask = here[:, None] & (w < k.row.hidden)[None, :]
    return tl.load(rows + w[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def add_term(total, terms, dtype: tl.constexpr, at, mask):
    """``total``, and the terms of ``dtype`` ``at`` their places; None: there are none."""
    if dtype is not None:
        term = tl.load(terms.to(tl.pointer_type(dtype)) + at, mask=mask, other=0.0)
        total = total + term.to(tl.float32)
    return total


@triton.jit
def copy_row_to(source, target, here, num_words: tl.constexpr, block: tl.constexpr = None):
    """Copy the one row of ``source`` to those rows of ``target`` that are ``here``: one read,
    several writes."""
    BLOCK: tl.constexpr = at_once(num_words, block)
    start = source.words + source.index.to(tl.int64) * source.stride
    for at in range(0, num_words, BLOCK):
        w = at + tl.arange(0, BLOCK)
        v = tl.load(start + w, mask=w < num_words, cache_modifier=".cg")
        to = target.words + target.index.to(tl.int64)[:, None] * target.stride + w[None, :]
        v = tl.broadcast_to(v[None, :], to.shape)
        tl.store(to, v, mask=here[:, None] & (w < num_words)[None, :], cache_modifier=".cs")


@triton.jit
def _zero_words(to, num_words: tl.constexpr, block: tl.constexpr = None):
    """``to[:num_words] = 0``."""
    BLOCK: tl.constexpr = at_once(num_words, block)
    for at in range(0, num_words, BLOCK):
        w = at + tl.arange(0, BLOCK)
        tl.store(to + w, tl.zeros((BLOCK,), to.dtype.element_ty), mask=w < num_words)


@triton.jit
def zero_row(result, number, row: tl.constexpr, block: tl.constexpr):
    """Zero a row of the ``result``, and its scales. ``row``: a ``RowConstants``."""
    at = number.to(tl.int64)
    _zero_words(as_words(result.rows, row.word_bits) + at * row.words, row.words, block)
    if row.scale_words:
        _zero_words(as_words(result.scales, 32) + at * row.scale_words, row.scale_words)


@triton.jit
def of_each(v, B: tl.constexpr, GP: tl.constexpr):
    """``v [B]``, of rows, for every group of them ``[B * GP]``."""
    return tl.reshape(tl.broadcast_to(v[:, None], (B, GP)), (B * GP,))


@triton.jit
def load_groups(src, row, g, here, H: tl.constexpr, how: tl.constexpr):
    """Groups ``g [n]`` of rows ``row [n]`` of H floats each, ``[n, how.block]``. Zeros past a row's
    end, and where not ``here``."""
    at = g[:, None] * how.block + tl.arange(0, how.block)[None, :]
    mask = here[:, None] & (at < H)
    return tl.load(src + row.to(tl.int64)[:, None] * H + at, mask=mask, other=0.0)


@triton.jit
def _scales_above(most, how: tl.constexpr):
    """Scales, as they are stored, and factors, of groups whose largest magnitudes have the bits
    ``most``."""
    # magnitudes order as their bits do; NaNs are above all
    amax = tl.maximum(most.to(tl.float32, bitcast=True), how.smallest)
    amax = tl.where(most > 0x7F800000, float("nan"), amax)
    scale = tl.div_rn(amax, tl.full(amax.shape, how.largest, tl.float32))
    factor = tl.div_rn(tl.full(amax.shape, how.largest, tl.float32), amax)
    if how.mode == _POWER_ABOVE:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        factor = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
        if how.scale_bytes != _WORD:
            scale = exponent
    return scale, factor


@triton.jit
def _scales_below(most, how: tl.constexpr):
    """The same as ``WireFormat._scales_below`` has them."""
    largest = tl.full(most.shape, how.largest, tl.float32).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum((most >> 23) - (largest - 127), 0)
    spoilt = most >= 0x7F800000
    factor = tl.where(spoilt, 0x7FC00000, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(spoilt, 255, exponent), factor


@triton.jit
def cast(floats, g, H: tl.constexpr, how: tl.constexpr):
    """Cast groups ``g [n]`` of rows of H floats, ``[n, how.block]``, to ``how.to``
    (``docs/reference/semantics.md``, Quantisation), as ``WireFormat.cast`` does. Returns them, and
    ``[n]`` what their scales are stored as.

    ``how``: a ``Cast``. Example: 128 channels of 1.0 give the scale 1 / 448 and 128 times 448.
    """
    x = floats.to(tl.float32)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if how.mode == _POWER_BELOW:
        scale, factor = _scales_below(most, how)
    else:
        scale, factor = _scales_above(most, how)
    values = (x * factor[:, None]).to(how.to)
    if how.scale_bytes == _WORD:
        return values, scale
    else:
        return values, tl.where(g * how.block < H, scale, 0).to(tl.int8)


@triton.jit
def store_cast(
    values, scale, dst, TO: tl.constexpr, scales, SCALES: tl.constexpr, row, g, here,
    H: tl.constexpr, how: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store what :func:`cast` made to rows ``row [n]`` at the addresses ``dst`` and ``scales``. TO,
    SCALES: bytes from one row to the next. S: words of scales."""
    at = g[:, None] * how.block + tl.arange(0, how.block)[None, :]
    to = elements(dst, how.to) + row.to(tl.int64)[:, None] * TO
    mask = here & (g < S * _WORD // how.scale_bytes)
    kind: tl.constexpr = tl.float32 if how.scale_bytes == _WORD else tl.int8
    scales_at = scales.to(tl.pointer_type(kind)) + row.to(tl.int64) * (SCALES // how.scale_bytes)
    tl.store(scales_at + g, scale, mask=mask)
    tl.store(to + at, values, mask=here[:, None] & (at < H))


@triton.jit
def cast_rows(x, token, target, scales, here, row: tl.constexpr, how: tl.constexpr):
    """Cast rows ``token`` of ``x`` on their way to ``target``; their scales go to ``scales``. Both
    are ``Rows``, in bytes. All rows are in flight. ``row``: a ``RowConstants``. ``how``: a
    ``Cast``."""
    num_rows: tl.constexpr = here.shape[0]
    g, there = tl.arange(0, num_rows * how.groups) % how.groups, of_each(here, num_rows, how.groups)
    source, token = elements(x, how.dtype), of_each(token, num_rows, how.groups)
    floats = load_groups(source, token, g, there, row.hidden, how)
    values, scale = cast(floats, g, row.hidden, how)
    store_cast(
        values, scale, target.words, target.stride, scales.words, scales.stride,
        of_each(target.index, num_rows, how.groups), g, there, row.hidden, how, row.scale_words,
    )  # fmt: skip


# The host's side


def kernel_type(dtype: torch.dtype) -> Any:
    """The element type of pointers to ``dtype``; integers, which kernels only copy, as bytes."""
    return _TYPES.get(dtype, tl.int8)


def cast_of(row_layout: Any, mode: Any, dtype: Any) -> Cast:
    """How rows of torch ``dtype`` are cast, with ``mode``, a ``Quantize`` or None. Groups are a
    power of two, with all bytes of the last word of scales."""
    if mode is None:
        return Cast(0, 0, 0, 0, 0.0, 0.0, kernel_type(dtype), None)
    to = FORMATS[mode]
    groups = triton.next_power_of_2(max(to.blocks(row_layout.hidden), WORD))
    return Cast(
        to.rule, to.block, groups, to.scale_bytes, to.largest, to.smallest, kernel_type(dtype),
        kernel_type(to.data),
    )  # fmt: skip


def rows_sent(config: Any, row_layout: Any, mode: Any, block: int, most: int) -> int:
    """Rows in flight, ``block`` words of each, of programs that read the input, and may cast it."""
    if mode is None:
        return config.rows_of(block, most)
    how = cast_of(row_layout, mode, None)
    return config.casts_of(how.groups * how.block, most)
