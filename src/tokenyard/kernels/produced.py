# pyright: basic
"""Wait, in stream order, for a grouped GEMM that runs on another stream: it counts a signal up for
each block of rows that it has written."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import ints
from tokenyard.kernels.sync import lacking, look_at_all

TILE = 64
"""Signals looked at together."""


@triton.jit(repr=shown_as("produced"))
def produced_kernel(
    signals, counts, late, experts, per_expert, block_rows, threshold, looks,
    COUNTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program. ``signals``: int32, ``per_expert`` of each expert, one for so many rows; those
    of written rows come to ``threshold``. ``counts [experts]``: int32, rows of each; not COUNTED:
    one signal of each expert counts.

    After so many ``looks`` at one tile it goes on, and says so: int64 ``late`` becomes that
    expert's number, from 1. All threads look as often, so they leave loops together.
    """
    i = tl.arange(0, TILE)
    for e in range(0, experts):
        blocks = per_expert
        if COUNTED:
            blocks = tl.cdiv(tl.load(ints(counts) + e), block_rows)
        for first in range(0, blocks, TILE):
            mask = first + i < blocks
            at = ints(signals) + e * per_expert + first + i
            short, looked = lacking(look_at_all(at, mask), threshold, mask), 0
            while (short > 0) & (looked < looks):
                short = lacking(look_at_all(at, mask), threshold, mask)
                looked += 1
            if short > 0:
                tl.store(late.to(tl.pointer_type(tl.int64)), e + 1)
    tl.debug_barrier()
