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
from tokenyard.kernels.payload import as_words, cast_values, store_cast
from tokenyard.kernels.place import unpack_flat
from tokenyard.kernels.plan import first_expert
from tokenyard.kernels.region import DIRECT_CALLS, done_of, first_in, first_out, in_bound, peer_base, place_of
from tokenyard.kernels.sync import ON_END, RANK, add_release, given_up, wait_for_all, words


@triton.jit
def _write_words(src, t, here, plan, views, T, at, N: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                 B: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Words of tokens ``t [B]`` from ``src`` to part ``at`` of the views of all ranks that they go to."""
    for k0 in range(0, N, BLOCK):
        w = k0 + tl.arange(0, BLOCK)
        mask = here[:, None] & (w < N)[None, :]
        v = tl.load(as_words(src, BITS) + t.to(tl.int64)[:, None] * N + w[None, :], mask=mask, cache_modifier=".cg")
        for d in tl.static_range(R):
            place = tl.load(place_of(plan, t, T, R, C) + d, mask=here, other=-1)
            row = (tl.load(first_out(plan, d, R, C)) + place).to(tl.int64)
            to = as_words(peer_base(views, d) + at, BITS) + row[:, None] * N + w[None, :]
            tl.store(to, v, mask=mask & (place >= 0)[:, None], cache_modifier=".cs")


@triton.jit
def _write_cast(x, t, plan, views, T, rows_at, scales_at, H: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The same for one token that is cast on the way."""
    values, scale = cast_values(tl.multiple_of(x.to(tl.pointer_type(DTYPE)), 16) + t.to(tl.int64) * H, H, GP, MODE)
    for d in tl.static_range(R):
        place = tl.load(place_of(plan, t, T, R, C) + d)
        if place >= 0:
            row = (tl.load(first_out(plan, d, R, C)) + place).to(tl.int64)
            base = peer_base(views, d)
            to = tl.multiple_of((base + rows_at).to(tl.pointer_type(tl.float8e4nv)), 16) + row * H
            store_cast(values, scale, to, base + scales_at + row * (S * 4), H, GP, MODE, S)


@triton.jit(repr=shown_as("nvlink::dispatch_direct"))
def direct_kernel(
    peers, state, plan, views, x, scales, meta, tag, T, scales_at, meta_at,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr,
    S: tl.constexpr, MW: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, GP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See the module. Rows begin at 0 of a view, scales and meta at ``scales_at`` and ``meta_at`` bytes."""
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
            for t0 in range(pid * B, T, P * B):
                t = t0 + tl.arange(0, B)
                here = t < T
                if MODE:
                    for i in range(t0, tl.minimum(t0 + B, T)):
                        _write_cast(x, i + 0, plan, views, T, 0, scales_at, H, S, R, C, MODE, GP, DTYPE)
                else:
                    _write_words(x, t, here, plan, views, T, 0, N, BITS, R, C, B, BLOCK)
                    if S:
                        _write_words(
                            scales, t, here, plan, views, T, scales_at, S, 32, R, C, B, triton.next_power_of_2(S)
                        )
                if MW:
                    _write_words(meta, t, here, plan, views, T, meta_at, MW, 32, R, C, B, triton.next_power_of_2(MW))
            bases = tl.load(words(peers) + r, mask=r < R, other=0)
            add_release(done_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), r < R)
        if pid == 0:
            wait_for_all(done_of(mine, r, R, C), (calls + 1) * P + (r * 0), r < R, state, ON_END, r)
            count_call(state)
            tl.store(words(state) + DIRECT_CALLS, calls + 1)


@triton.jit(repr=shown_as("nvlink::unpack"))
def unpack_kernel(
    state, plan, meta, topk_idx, weights, source, slots, gather, E,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, MW: tl.constexpr, B: tl.constexpr,
    WEIGHTED: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Grid ``R * C``: ids, weights and sources of the rows of one (source, channel), out of this rank's view. No waits."""
    pid, E = tl.program_id(0), E.to(tl.int32)
    if not given_up(state):
        s, c = pid // C, pid % C
        me = tl.load(words(state) + RANK).to(tl.int32)
        first, end = first_expert(me, E, R), first_expert(me + 1, E, R)
        a0 = tl.load(first_in(plan, s, R, C))
        hi = tl.load(in_bound(plan, s, c + 1, R, C))
        for i0 in range(tl.load(in_bound(plan, s, c, R, C)), hi, B):
            i = i0 + tl.arange(0, B)
            unpack_flat(
                meta,
                a0 + i,
                a0 + i,
                i < hi,
                s,
                first,
                end,
                topk_idx,
                weights,
                source,
                slots,
                gather,
                K,
                KP,
                MW,
                WEIGHTED,
                STATIC,
            )
