# pyright: basic
"""Engine collective, combine: one launch sums the result rows of each arrival row where the experts
are, one sums what came back, at the owner. NCCL moves rows in between.

Example: token 0 went to ranks 0 and 1, where its rows are 0 and 2 of what was sent (``returns[0] =
[0, 2]``). Rank 0 has two result rows of it, 1.0 and 2.0 in the order of picks, and sends 3.0; rank
1 sends 0.5. The owner adds 0 + 3.0 + 0.5 in the order of ranks, then biases, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.combine import (
    Chunk, CombineConfig, Partials, Sums, Tiles, send_sums_chunk, store_sums, types_of,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import kernel_type, load_rows
from tokenyard.kernels.place import floats
from tokenyard.kernels.structs import RingLayout, RowConstants
from tokenyard.kernels.sync import words
from tokenyard.routing import power_of_two_at_least

LANES = 8
"""Channels of a row per thread."""
WARPS = 8


class OwnerConfig(NamedTuple):
    """What is known of the sums of an owner when their kernel is compiled."""

    row: RowConstants  # of a sum on the wire: weights follow its payload
    dtype: Any  # of rows, also on the wire
    bias0: Any  # dtype of a term that is added to sums, None: none
    bias1: Any
    width: int  # most ranks that a token went to
    picks: int  # weights that are summed too; 0: none
    block: int


@triton.jit(repr=shown_as("collective::combine_here"))
def collective_partial_kernel(parts: Partials, send, num_rows, k: tl.constexpr):
    """Sums of each arrival row's result rows into ``send``, weights to reduce behind them. ``k`` is
    a ``CombineConfig``; :func:`bind_partial` launches it."""
    num_rows = num_rows.to(tl.int32)
    share = tl.cdiv(num_rows, tl.num_programs(0))
    begin = tl.program_id(0) * share
    count = tl.minimum(share, num_rows - begin)
    send_sums_chunk(parts, send, Chunk(begin=begin, count=count, low=0, first=0), k)


@triton.jit(repr=shown_as("collective::combine"))
def collective_owner_kernel(recv, returns, sums: Sums, num_tokens, k: tl.constexpr):
    """Sums of the rows of each token, in rank order. ``k`` is an :class:`OwnerConfig`;
    :func:`bind_owner` launches it."""
    K: tl.constexpr = k.picks
    SLOT: tl.constexpr = k.row.slot_bytes
    one = tl.arange(0, 1)
    for t in range(tl.program_id(0), num_tokens.to(tl.int32), tl.num_programs(0)):
        at = words(returns) + t.to(tl.int64) * k.width + one
        for k0 in range(0, k.row.hidden, k.block):
            w = k0 + tl.arange(0, k.block)
            total = tl.zeros((1, k.block), tl.float32)
            for j in tl.static_range(k.width):  # unrolled, so that all rows are on their way
                place = tl.load(at + j)
                total = total + load_rows(recv + place * SLOT, place >= 0, w, k).to(tl.float32)
            store_sums(sums, total, t + one, one == 0, w, k)
        if K:
            pick = tl.arange(0, triton.next_power_of_2(K))
            weight = tl.zeros((1, triton.next_power_of_2(K)), tl.float32)
            for j in tl.static_range(k.width):
                place = tl.load(at + j)
                row = floats(recv + place * SLOT + k.row.scales_at)[:, None] + pick[None, :]
                mask = (place >= 0)[:, None] & (pick < K)[None, :]
                weight += tl.load(row, mask=mask, other=0.0)
            to = floats(sums.weights) + (t + one).to(tl.int64)[:, None] * K + pick[None, :]
            tl.store(to, weight, mask=(pick < K)[None, :])


# The host's side


def bind_partial(
    bind: Callable[..., Any], programs: int, row: RowConstants, dtype: Any, slots_per_row: int,
    picks: int, *, by_expert: bool, weighted: bool,
) -> Callable[..., None]:  # fmt: skip
    """The launch of sums where the experts are; arguments: those of the kernel. ``bind``: as
    ``Kernels.bind``. ``dtype``: torch's. Others: as in ``CombineConfig``."""
    block = min(power_of_two_at_least(row.hidden), 32 * WARPS * LANES)
    k = CombineConfig(
        ranks=1, plan_ranks=1, rank_bins=1, channels=1, row=row, dtype=kernel_type(dtype),
        bias0=None, bias1=None, tiles=Tiles(1, block, 1, block), stages=1,
        ring=RingLayout(0, 0, 2**31 - 1, 1), slots_per_row=slots_per_row, by_expert=by_expert,
        weighted=weighted, picks=picks,
    )  # fmt: skip
    return bind(collective_partial_kernel, programs, WARPS, None, {"k": k})


def bind_owner(
    bind: Callable[..., Any], programs: int, row: RowConstants, dtype: Any, width: int, picks: int,
    bias: tuple[Any, ...],
) -> Callable[..., None]:  # fmt: skip
    """The launch of sums at the owner: see :func:`bind_partial`. ``bias``: torch dtypes."""
    bias0, bias1 = types_of(bias)
    block = min(power_of_two_at_least(row.hidden), 32 * WARPS * LANES)
    k = OwnerConfig(row, kernel_type(dtype), bias0, bias1, width, picks, block)
    return bind(collective_owner_kernel, programs, WARPS, None, {"k": k})
