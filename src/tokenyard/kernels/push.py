# pyright: basic
"""Combine in place: rows are pushed from where they lie to the landing of their tokens' owner, who adds them in rank order.

Grid P + Q: P pushers, then Q reducers. A pusher copies CHUNK rows at a time to one owner; rows of one owner lie one behind the other, here
and there. A reducer sums B tokens x SPAN channels at a time; rows for its own tokens it reads where they lie. Program 0 also greets.
Example: 3 ranks, rank 2 sent 5 rows to rank 0 and 4 to rank 1; the third of these, row ``first_in(2) + 2`` of rank 1's ``x``, comes back
to row 5 + 2 of rank 2's landing.

Who publishes what, who may read when:

* A rank's greeting says that its stream has come to this call, so its reducers of earlier calls have read its landing: a program waits for
  all greetings (acquire), and for all to name the same call, before it stores the first row to a peer. (So do reducers, else those of
  two ranks would blame each other's pushers, which wait for a third rank.)
* A pusher stores a chunk, then raises ``landed[me, chunk]`` at the owner to the number of this call (release). A reducer waits until the
  chunks in which its rows lie show that number (acquire), then reads them. Nobody but ``me`` writes that word, once in a call.
* Every program adds 1 to ``LEFT`` (local) when it is done. The last one of P + Q counts the call, so all may read its number at any time.

Why reuse is safe: the owner of a row has a token for it, whose reducer waits for its chunk. So when the kernel of a rank ends, nobody stores
to its landing any more, before it greets again; ``x`` is read by the rank's own programs only. Numbers of calls grow, so a chunk of an
earlier call, of more or of fewer rows, is never taken for one of this call; a new landing begins with zeros, an old one (that a CUDA graph
knows) with smaller numbers. Rows begin behind all flags, wherever the form of a call puts them.

Nobody waits in a circle: all wait for greetings, which program 0 sends before it waits, and then only reducers for pushers, which come
before them in the grid: these need no reducer to be resident.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.combine import store_sums
from tokenyard.kernels.greet import count_call, greeted, say_hello
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import as_words
from tokenyard.kernels.region import (
    EPOCH, LEFT, first_back, first_in, in_bound, landed_of, landing_rows_at, out_bound, place_of,
)  # fmt: skip
from tokenyard.kernels.sync import ON_LANDING, RANK, given_up, lacking, raise_release, wait_for_all, words


@triton.jit
def _copy(src, dst, count, TILE: tl.constexpr):
    """``dst[:count] = src[:count]``, TILE words at once."""
    for at in range(0, count, TILE):
        w = at + tl.arange(0, TILE)
        v = tl.load(src + w, mask=w < count, cache_modifier=".cg")
        tl.store(dst + w, v, mask=w < count, cache_modifier=".cs")


@triton.jit
def _push_rows(
    plan, landings, x, me, call,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every P-th chunk, so that owners get theirs in order; to another owner each time, as far as there are several."""
    OTHERS: tl.constexpr = R - 1 if R > 1 else 1
    TURN: tl.constexpr = P // OTHERS if P > OTHERS else 1
    r = tl.arange(0, RP)
    others = (r < R) & (r != me)
    counts = tl.load(in_bound(plan, r, C, R, C), mask=others, other=0)
    firsts = tl.load(first_in(plan, r, R, C), mask=others, other=0)
    backs = tl.load(first_back(plan, r, R, C), mask=others, other=0)
    bases = tl.load(words(landings) + r, mask=others, other=0)
    chunks = (tl.max(counts) + CHUNK - 1) // CHUNK
    for unit in range(tl.program_id(0), chunks * OTHERS, P):
        k = unit // OTHERS
        s = (me + 1 + (unit + k // TURN) % OTHERS) % R
        n = tl.minimum(tl.sum(tl.where(r == s, counts, 0)) - k * CHUNK, CHUNK)
        if n > 0:
            base = tl.sum(tl.where(r == s, bases, 0))
            row = (tl.sum(tl.where(r == s, firsts, 0)) + k * CHUNK).to(tl.int64)
            back = (tl.sum(tl.where(r == s, backs, 0)) + k * CHUNK).to(tl.int64)
            to = as_words(base + landing_rows_at(R, CHUNKS), BITS) + back * N
            _copy(as_words(x, BITS) + row * N, to, n * N, TILE)
            raise_release(landed_of(base, me, k, CHUNKS), call)


@triton.jit
def _places(plan, t, T, R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """Places of tokens ``t [B]`` among this rank's rows to each rank: ``[B, RP]``, -1 where one does not go."""
    r = tl.arange(0, RP)
    table = place_of(plan, t, T, R, C)[:, None] + r[None, :]
    return tl.load(table, mask=(t < T)[:, None] & (r < R)[None, :], other=-1)


@triton.jit
def _landed(
    state, landing, places, me, call, RP: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Wait for the rows of other ranks at ``places [B, RP]``, which are consecutive by rank: whether they have landed."""
    EACH: tl.constexpr = triton.next_power_of_2((B + CHUNK - 2) // CHUNK + 1)
    r = tl.arange(0, RP)
    far = (places >= 0) & (r != me)[None, :]
    low = tl.min(tl.where(far, places, 1 << 30), axis=0) // CHUNK
    high = tl.max(tl.where(far, places, -CHUNK), axis=0) // CHUNK
    chunk = low[:, None] + tl.arange(0, EACH)[None, :]
    needed = tl.reshape(chunk <= high[:, None], [RP * EACH])
    flags = tl.reshape(landed_of(landing, r[:, None], chunk, CHUNKS), [RP * EACH])
    chunk = tl.reshape(chunk, [RP * EACH])
    want = call + chunk * 0
    seen = wait_for_all(flags, want, needed, state, ON_LANDING, chunk, MORE=False, EACH=EACH)
    return lacking(seen, want, needed) == 0


@triton.jit
def _sum_rows(
    state, plan, landing, x, bias0, bias1, out, T, me, call,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, DTYPE: tl.constexpr, BIAS0: tl.constexpr,
    BIAS1: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every Q-th piece of B tokens x SPAN channels, as rows land in the order of tokens; of BLOCK channels in each of STAGES rounds.

    Places are loaded one piece ahead, so that neither flags nor rows need to wait for them.
    """
    ROW: tl.constexpr = H * DTYPE.primitive_bitwidth // 8
    ALIGNED: tl.constexpr = 16 if ROW % 16 == 0 else DTYPE.primitive_bitwidth // 8
    PARTS: tl.constexpr = (H + SPAN - 1) // SPAN
    r, b = tl.arange(0, RP), tl.arange(0, B)
    sent = tl.load(out_bound(plan, r, C, R, C), mask=(r < R) & (r != me), other=0)
    starts = landing + landing_rows_at(R, CHUNKS) + (tl.cumsum(sent, 0) - sent).to(tl.int64) * ROW
    starts = tl.where(r == me, x + tl.load(first_in(plan, me, R, C)).to(tl.int64) * ROW, starts)
    pieces = (T + B - 1) // B * PARTS
    first = tl.program_id(0) - P
    places = _places(plan, first // PARTS * B + b, T, R, C, RP)
    ok = True
    for i in range(first, pieces, Q):
        t, k1 = i // PARTS * B + b, i % PARTS * SPAN
        if ok:
            ok = _landed(state, landing, places, me, call, RP, B, CHUNK, CHUNKS)
        if ok:
            for k0 in tl.range(k1, tl.minimum(k1 + SPAN, H), BLOCK, num_stages=STAGES):
                w = k0 + tl.arange(0, BLOCK)
                total = tl.zeros((B, BLOCK), tl.float32)
                for d in tl.static_range(R):
                    place = tl.sum(tl.where((r == d)[None, :], places, 0), axis=1)
                    row = tl.sum(tl.where(r == d, starts, 0)) + place.to(tl.int64) * ROW
                    rows = tl.multiple_of(row.to(tl.pointer_type(DTYPE))[:, None], (ALIGNED, ALIGNED))
                    mask = (place >= 0)[:, None] & (w < H)[None, :]
                    v = tl.load(rows + w[None, :], mask=mask, other=0.0, cache_modifier=".cg")
                    total = total + v.to(tl.float32)
                store_sums(out, total, t, t < T, w, bias0, bias1, H, DTYPE, BIAS0, BIAS1)
        places = _places(plan, (i + Q) // PARTS * B + b, T, R, C, RP)


@triton.jit
def _leave(state, PROGRAMS: tl.constexpr):
    """The last of PROGRAMS to come here counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(words(state) + LEFT, 1, sem="acq_rel", scope="gpu") % PROGRAMS == PROGRAMS - 1:
        count_call(state)


@triton.jit(repr=shown_as("nvlink::combine_push"))
def push_kernel(
    peers, state, plan, landings, x, bias0, bias1, out, tag, T,
    R: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, DTYPE: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. ``x [N, H]`` at an address that is a multiple of 16. ``bias0``, ``bias1``: ``[T, H]``, dtype BIAS0, BIAS1 or none.

    N, BITS: words of a row as pushers copy it. CHUNKS: chunks of the most rows that one rank can send back to another. P and Q are the
    same in all calls of an object.
    """
    pid = tl.program_id(0)
    T = T.to(tl.int32)
    if not given_up(state):
        me = tl.load(words(state) + RANK).to(tl.int32)
        call = tl.load(words(state) + EPOCH) + 1
        if pid == 0:
            say_hello(peers, state, tag, R, C, RP)
        if greeted(peers, state, tag, R, C, RP):
            if pid < P:
                _push_rows(plan, landings, x, me, call, R, C, RP, P, N, BITS, CHUNK, CHUNKS, TILE)
            else:
                landing = tl.load(words(landings) + me)
                _sum_rows(
                    state, plan, landing, x, bias0, bias1, out, T, me, call,
                    R, C, RP, P, Q, H, CHUNK, CHUNKS, B, BLOCK, SPAN, DTYPE, BIAS0, BIAS1, STAGES,
                )  # fmt: skip
        _leave(state, P + Q)
