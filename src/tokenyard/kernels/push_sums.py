# pyright: basic
"""Sums of the result rows of several arrival rows, whose loads are all on their way at once: of
``kernels/push.py``. Rings have ``partial_rows`` (``kernels/combine.py``), which reads the table of
result rows in each round of loads; with these they have not run on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.place import floats
from tokenyard.kernels.sync import words


class ResultRows(NamedTuple):
    """Result rows of some arrival rows, a ``[B]`` for each pick in their order, -1 behind the last,
    and their weights, if these are multiplied before sums."""

    index: Any
    weight: Any


@triton.jit
def result_rows(parts, a, here, k: tl.constexpr):
    """The result rows of arrival rows ``a [B]``, those ``here``. ``k``, also below: any struct with
    the fields that are read."""
    index, weight = (), ()
    slots = words(parts.slots) + a.to(tl.int64) * k.slots_per_row
    for j in tl.static_range(k.slots_per_row):
        row = tl.load(slots + j, mask=here, other=-1)
        index += (row,)
        if k.weighted:
            weight += (tl.load(floats(parts.weights) + row, mask=row >= 0, other=0.0),)
    return ResultRows(index=index, weight=weight)


@triton.jit
def sums_of_rows(parts, each, J: tl.constexpr, B: tl.constexpr, w, k: tl.constexpr):
    """Channels ``w [BLOCK]`` of the sums of the result rows of ``each`` of B arrival rows, which
    have J at most, rounded to the wire dtype."""
    H: tl.constexpr = k.row.hidden
    rows = tl.multiple_of(parts.rows.to(tl.pointer_type(k.dtype)), 16)
    total = tl.zeros((B, w.shape[0]), tl.float32)
    for j in tl.static_range(J):  # unrolled: all are on their way at once
        row = each.index[j]
        mask = (row >= 0)[:, None] & (w < H)[None, :]
        v = tl.load(rows + row[:, None] * H + w[None, :], mask=mask, other=0.0).to(tl.float32)
        if k.weighted:
            v = v * each.weight[j][:, None]
        total = total + v
    return total.to(k.dtype)


# The host's side


def rounds_of(
    config: Any, whole: int, rows: int, item_bytes: int, channel_bytes: int, shared: int
) -> tuple[int, int]:
    """Of ``rows``, each the sum of several: channels of each in a round of loads, and rounds under
    way at once. A lane has 16 bytes of one row. ``item_bytes``: of a channel; ``channel_bytes``:
    loaded for one. ``shared``: bytes for rounds on their way."""
    block = min(whole, 512 // item_bytes * config.num_warps // rows)
    return block, config.stages_for(rows * block * channel_bytes, shared)
