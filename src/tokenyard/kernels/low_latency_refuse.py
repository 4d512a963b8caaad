# pyright: basic
"""A call that this rank refuses. It tells all peers that it brings nothing, so that none waits for
it, and waits until all have come to the call.

Counts are 0 and carry the tag 0, which fits every call; all flags become ``2 * call``; weights are
zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import is_far, put_far, takes_rows
from tokenyard.kernels.low_latency_memory import (
    PIECES, ROWS, WEIGHTS, arrival_of, count_of, counts_out_of, epoch_of, flag_of, weight_of,
    weights_out_of, with_call,
)  # fmt: skip
from tokenyard.kernels.low_latency_rail import tell_lost_rows
from tokenyard.kernels.low_latency_waits import is_active, next_call, tell, wait_for_ranks
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import peer_base
from tokenyard.kernels.sync import follow


@triton.jit
def _tell_nothing(to, call, sizes: tl.constexpr):
    """What this rank brings to rank ``to``."""
    M: tl.constexpr = sizes.tokens
    number, parity, me, i = call.number, call.parity, call.rank, tl.arange(0, 256)
    base = peer_base(call.regions, to)
    for e in range(0, sizes.local_experts + 1, 256):
        at = count_of(base, parity, me, e + i, sizes)
        tell(at, with_call(number, (i * 0).to(tl.int64)), e + i <= sizes.local_experts)
    for j in range(0, M * PIECES, 256):
        none = (i * 0).to(tl.int64) + 2 * number
        tell(flag_of(base, parity, me, 0, sizes) + j + i, none, j + i < M * PIECES)
    for j in range(0, M * sizes.topk, 256):
        to_weights = weight_of(base, parity, me, 0, sizes) + j + i
        inside = j + i < M * sizes.topk
        none = _zero_weights(number, i)
        tl.atomic_xchg(to_weights, none, mask=inside, sem="relaxed", scope="sys")
    if sizes.per_node and to != me:
        tell_lost_rows(to, call, sizes)


@triton.jit
def _zero_weights(number, i):
    """Words of weights, all 0, as many as ``i`` are."""
    return (i * 0).to(tl.int64) + ((number & 0x7FFFFFFF) << 32)


@triton.jit
def _put_nothing(to, call, sizes: tl.constexpr):
    """The same if ``to`` is far (``kernels/low_latency_far.py``)."""
    L: tl.constexpr = sizes.local_experts
    N: tl.constexpr = sizes.tokens * sizes.topk
    number, parity, me, i = call.number, call.parity, call.rank, tl.arange(0, 256)
    mine, none = peer_base(call.regions, me), with_call(number, (to * 0).to(tl.int64))
    counts = counts_out_of(mine, parity, to, 0, sizes)
    weights = weights_out_of(mine, parity, to, 0, sizes)
    for e in range(0, L, 256):
        tl.store(counts + e + i, with_call(number, (i * 0).to(tl.int64)), mask=e + i < L)
    for j in range(0, N, 256):
        tl.store(weights + j + i, _zero_weights(number, i), mask=j + i < N)
    there = count_of(mine, parity, me, 0, sizes)
    put_far(call, to, there, counts, to * 0 + 8 * L, there + L, none, sizes)
    there, rest = weight_of(mine, parity, me, 0, sizes), to * 0
    arrival = arrival_of(mine, parity, me, WEIGHTS, sizes)
    put_far(call, to, there, weights, rest + 8 * N, arrival, none, sizes)
    if not sizes.per_node or takes_rows(to, call, sizes):
        arrival = arrival_of(mine, parity, me, ROWS, sizes)
        put_far(call, to, arrival, arrival, rest, arrival, none, sizes)
        flag = flag_of(mine, parity, me, 0, sizes)
        put_far(call, to, flag, flag, rest, flag, 2 * number, sizes)


@triton.jit(repr=shown_as("low_latency::refuse"))
def low_refuse_kernel(regions, state, active, timeout, k: tl.constexpr):
    """See the module. ``k``: :class:`Sizes`; ``timeout`` is in nanoseconds."""
    pid = tl.program_id(0)
    follow(k.early)
    call = next_call(regions, state, active, None, timeout, k)
    to = (call.rank + k.programs - 1 - pid) % k.ranks
    if (pid >= k.programs - k.ranks) & is_active(active, to):
        if k.far and is_far(state, to, k):
            _put_nothing(to, call, k)
        else:
            _tell_nothing(to, call, k)
    if pid == k.programs - 1:
        wait_for_ranks(None, call.number * 0, call, k)
    tl.debug_barrier()
    tl.store(epoch_of(state, pid, k), call.number)
