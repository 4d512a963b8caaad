# pyright: basic
"""Combine out of views: each token's owner reads the rows of all ranks where they lie (symmetric memory), and adds them in rank order.

Grid P, the number of writers of ``kernels/direct.py``. A piece of work is B tokens times BLOCK channels; each program takes an equal run
of them. Program 0 also greets. Example: 2 ranks, token 3 of rank 1 went to both at
places 0 and 2, rank 1's rows begin at 5 and 4: it is row 5 of rank 0's view plus row 6 of its own.

Who publishes what, who may read when:

* A rank's greeting says that its stream has come to this call, so its rows are written, by earlier kernels: a program waits for all
  greetings (acquire), and for all to name the same call, before it reads the first row.
* A program reads all its rows, then adds 1 to ``dones[me]`` at every rank (release). Program 0 waits until all P programs of every
  rank have done so in this call and all earlier ones (acquire); the kernel ends after it, so later kernels may write to the view,
  and so may peers, who wait for this rank's next greeting.

Calls into and out of views share ``dones`` and are counted together: both have P programs. Program 0 counts the call when all programs
of this rank are done, so they may read its number at any time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.greet import count_call, greeted, say_hello
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import DIRECT_CALLS, done_of, first_out, peer_base, place_of
from tokenyard.kernels.sync import ON_END, RANK, add_release, given_up, wait_for_all, words


@triton.jit
def _places(plan, t, T, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Places of tokens ``t [B]`` among this rank's rows to each rank: ``[B, RP]``, -1 where one does not go."""
    r = tl.arange(0, RP)
    table = place_of(plan, t, T, R, C)[:, None] + r[None, :]
    return tl.load(table, mask=(t < T)[:, None] & (r < R)[None, :], other=-1)


@triton.jit
def _sum_rows(
    views, plan, bias0, bias1, out, T,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, H: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
):  # fmt: skip
    """This program's pieces. Places are loaded one piece ahead, so that loads of rows need not wait for them."""
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 if ROW % 16 == 0 else DTYPE.primitive_bitwidth // 8
    PARTS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    r, b = tl.arange(0, RP), tl.arange(0, B)
    firsts = tl.load(first_out(plan, r, R, C), mask=r < R, other=0)
    starts = tl.load(words(views) + r, mask=r < R, other=0) + firsts.to(tl.int64) * ROW
    pieces = (T + B - 1) // B * PARTS
    pid, share, more = tl.program_id(0), pieces // P, pieces % P
    low = pid * share + tl.minimum(pid, more)
    high = low + share + tl.where(pid < more, 1, 0)
    places = _places(plan, low // PARTS * B + b, T, R, C, RP)
    for i in range(low, high):
        t, w = i // PARTS * B + b, i % PARTS * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((B, BLOCK), tl.float32)
        for d in tl.static_range(R):
            place = tl.sum(tl.where((r == d)[None, :], places, 0), axis=1)
            row = tl.sum(tl.where(r == d, starts, 0)) + place.to(tl.int64) * ROW
            rows = tl.multiple_of(row.to(tl.pointer_type(DTYPE))[:, None], (ALIGNED, ALIGNED))
            mask = (place >= 0)[:, None] & (w < H)[None, :]
            total = total + tl.load(rows + w[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        at = t.to(tl.int64)[:, None] * H + w[None, :]
        mask = (t < T)[:, None] & (w < H)[None, :]
        if BIAS0 is not None:
            total = total + tl.load(bias0.to(tl.pointer_type(BIAS0)) + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS1 is not None:
            total = total + tl.load(bias1.to(tl.pointer_type(BIAS1)) + at, mask=mask, other=0.0).to(tl.float32)
        to = tl.multiple_of(out.to(tl.pointer_type(DTYPE)), 16)
        tl.store(to + at, total.to(DTYPE), mask=mask, cache_modifier=".cs")
        places = _places(plan, (i + 1) // PARTS * B + b, T, R, C, RP)


@triton.jit(repr=shown_as("nvlink::combine_pull"))
def pull_kernel(
    peers, state, plan, views, bias0, bias1, out, tag, T,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, H: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
):  # fmt: skip
    """See the module. Rows ``[H]`` begin at 0 of a view. ``bias0``, ``bias1``: ``[T, H]``, dtype BIAS0, BIAS1 or none."""
    pid = tl.program_id(0)
    T = T.to(tl.int32)
    r = tl.arange(0, RP)
    if not given_up(state):
        me = tl.load(words(state) + RANK).to(tl.int32)
        calls = tl.load(words(state) + DIRECT_CALLS)
        mine = peer_base(peers, me)
        if pid == 0:
            say_hello(peers, state, tag, R, C, RP)
        if greeted(peers, state, tag, R, C, RP):
            _sum_rows(views, plan, bias0, bias1, out, T, R, C, RP, P, H, B, BLOCK, DTYPE, BIAS0, BIAS1)
            bases = tl.load(words(peers) + r, mask=r < R, other=0)
            add_release(done_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), r < R)
        if pid == 0:
            wait_for_all(done_of(mine, r, R, C), (calls + 1) * P + (r * 0), r < R, state, ON_END, r, MORE=False)
            count_call(state)
            tl.store(words(state) + DIRECT_CALLS, calls + 1)
