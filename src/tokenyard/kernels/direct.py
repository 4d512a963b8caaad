# pyright: basic
"""Direct dispatch: every row is written once, where it stays, in the destination's view (symmetric memory for a whole batch).

Grid P: each program reads its tokens once and writes them to all their ranks; program 0 also greets. Example: 2 ranks, token 3 of rank 1
goes to both at places 0 and 2, rank 1's rows begin at 5 and 4: the row is written to row 5 of rank 0's view and row 6 of its own.

A view is ``[rows | scales | meta]`` from three offsets; meta is read by :func:`unpack_kernel` afterwards, in stream order.

Who publishes what, who may read when:

* A rank's greeting says that its stream has come to this call, so whatever read its view before has been done: a writer waits
  for all greetings (acquire), and for all to name the same call, before it writes the first row.
* A writer stores its rows, then adds 1 to ``dones[me]`` at every rank (release). Program 0 waits until all P writers of every
  rank have done so in this call and all earlier ones (acquire); the kernel ends after it, so later kernels may read the view.

Program 0 counts the call when all writers of this rank are done, so they may read its number at any time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.greet import count_call, greeted, say_hello
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words, cast, load_groups, of_each, store_cast
from tokenyard.kernels.place import unpack_flat
from tokenyard.kernels.plan import first_expert
from tokenyard.kernels.region import DIRECT_CALLS, done_of, first_in, first_out, in_bound, peer_base, place_of
from tokenyard.kernels.sync import ON_END, RANK, add_release, given_up, wait_for_all, words


@triton.jit
def _load_words(src, row, here, w, FROM: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """Words ``w [BLOCK]`` of each ``row [B]``, stride FROM."""
    mask = here[:, None] & (w < N)[None, :]
    return tl.load(as_words(src, BITS) + row.to(tl.int64)[:, None] * FROM + w[None, :], mask=mask, cache_modifier=".cg")


@triton.jit
def _store_words(v, rows, w, parts, first, N: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr):
    """Words ``w [BLOCK]`` of each token to its ``rows [B, RP]`` (-1: none) of what begins at ``parts [RP]`` in the ranks' views.

    Rank ``first`` comes first: if all began with the same, all would store to it at once, and its links be too narrow.
    """
    r = tl.arange(0, RP)
    for i in tl.static_range(R):
        d = (first + i) % R
        row = tl.sum(tl.where((r == d)[None, :], rows, 0), axis=1)
        to = as_words(tl.sum(tl.where(r == d, parts, 0)), BITS) + row.to(tl.int64)[:, None] * N + w[None, :]
        tl.store(to, v, mask=(row >= 0)[:, None] & (w < N)[None, :], cache_modifier=".cs")


@triton.jit
def _store_cast(
    values, scale, g, rows, bases, scales_at, first, H: tl.constexpr, S: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    MODE: tl.constexpr, B: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The same for tokens that were cast, groups ``g [B * GP]``, with their scales."""
    r = tl.arange(0, RP)
    for i in tl.static_range(R):
        d = (first + i) % R
        row = of_each(tl.sum(tl.where((r == d)[None, :], rows, 0), axis=1), B, GP)
        base = tl.sum(tl.where(r == d, bases, 0))
        store_cast(values, scale, base, H, base + scales_at, S * 4, row, g, row >= 0, H, MODE, S)


@triton.jit
def write_rows(
    x, scales, meta, row, here, rows, parts, scales_at, meta_at, first,
    FROM: tl.constexpr, SCALE: tl.constexpr, META: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Each ``row [B]`` of ``x``, ``scales`` and ``meta`` (strides FROM, SCALE, META words) to its ``rows [B, RP]`` of the views at ``parts [RP]``.

    All of it is read once. With MODE rows are cast on the way.
    """
    SP: tl.constexpr = triton.next_power_of_2(S if S > 0 else 1)
    MP: tl.constexpr = triton.next_power_of_2(MW if MW > 0 else 1)
    if MW:
        m = _load_words(meta, row, here, tl.arange(0, MP), META, MW, 32)
    if MODE:
        g = tl.arange(0, B * GP) % GP
        floats = tl.multiple_of(x.to(tl.pointer_type(DTYPE)), 16)
        values, scale = cast(load_groups(floats, of_each(row, B, GP), g, of_each(here, B, GP), H), g, H, MODE)
        _store_cast(values, scale, g, rows, parts, scales_at, first, H, S, R, RP, MODE, B, GP)
    else:
        if S:
            s = _load_words(scales, row, here, tl.arange(0, SP), SCALE, S, 32)
        for k0 in range(0, N, BLOCK):
            w = k0 + tl.arange(0, BLOCK)
            _store_words(_load_words(x, row, here, w, FROM, N, BITS), rows, w, parts, first, N, BITS, R, RP)
        if S:
            _store_words(s, rows, tl.arange(0, SP), parts + scales_at, first, S, 32, R, RP)
    if MW:
        _store_words(m, rows, tl.arange(0, MP), parts + meta_at, first, MW, 32, R, RP)


@triton.jit(repr=shown_as("nvlink::dispatch_direct"))
def direct_kernel(
    peers, state, plan, views, x, scales, meta, tag, T, scales_at, meta_at,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See the module. Rows begin at 0 of a view, scales and meta at ``scales_at`` and ``meta_at`` bytes. B: tokens at a time."""
    pid = tl.program_id(0)
    T = T.to(tl.int32)
    r = tl.arange(0, RP)
    if not given_up(state):
        me = tl.load(words(state) + RANK).to(tl.int32)
        calls = tl.load(words(state) + DIRECT_CALLS)
        mine = peer_base(peers, me)
        if pid == 0:
            say_hello(peers, state, tag, R, C, RP)
        firsts = tl.load(first_out(plan, r, R, C), mask=r < R, other=0)
        parts = tl.load(words(views) + r, mask=r < R, other=0)
        bases = tl.load(words(peers) + r, mask=r < R, other=0)
        if greeted(peers, state, tag, R, C, RP):
            for t0 in range(pid * B, T, P * B):
                t = t0 + tl.arange(0, B)
                here = t < T
                table = place_of(plan, t, T, R, C)[:, None] + r[None, :]
                places = tl.load(table, mask=here[:, None] & (r < R)[None, :], other=-1)
                rows = tl.where(places >= 0, places + firsts[None, :], -1)
                write_rows(
                    x, scales, meta, t, here, rows, parts, scales_at, meta_at, me + 1 + pid,
                    N, S, MW, H, N, BITS, S, MW, R, RP, B, BLOCK, MODE, GP, DTYPE,
                )  # fmt: skip
            add_release(done_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), r < R)
        if pid == 0:
            wait_for_all(done_of(mine, r, R, C), (calls + 1) * P + (r * 0), r < R, state, ON_END, r, MORE=False)
            count_call(state)
            tl.store(words(state) + DIRECT_CALLS, calls + 1)


@triton.jit(repr=shown_as("nvlink::unpack"))
def unpack_kernel(
    state, plan, meta, topk_idx, weights, source, slots, gather, E,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, MW: tl.constexpr, B: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Grid ``R * C``: ids, weights and sources of the rows of one (source, channel), out of this rank's view. No waits.

    D: destinations that plans know, which are more than ranks if these form nodes.
    """
    pid, E = tl.program_id(0), E.to(tl.int32)
    if not given_up(state):
        s, c = pid // C, pid % C
        me = tl.load(words(state) + RANK).to(tl.int32)
        first, end = first_expert(me, E, R), first_expert(me + 1, E, R)
        a0 = tl.load(first_in(plan, s, D, C))
        hi = tl.load(in_bound(plan, s, c + 1, D, C))
        for i0 in range(tl.load(in_bound(plan, s, c, D, C)), hi, B):
            i = i0 + tl.arange(0, B)
            unpack_flat(
                meta, a0 + i, a0 + i, i < hi, s, first, end, topk_idx, weights, source, slots, gather, K, KP, MW, WEIGHTED, STATIC
            )  # fmt: skip
