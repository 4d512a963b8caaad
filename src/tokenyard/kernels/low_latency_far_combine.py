# pyright: basic
"""What a low-latency combine puts to far ranks: weights of the owner, and sums. Who publishes what,
and who may read it when: ``kernels/low_latency_far.py``. ``k`` is a ``CombineConfig``."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import (
    is_far, numbers, of_ranks, put_far, takes_rows, via_of, wait_packed,
)  # fmt: skip
from tokenyard.kernels.low_latency_memory import (
    ROWS, TORN, WEIGHTS, arrival_of, flag_of, packed_of, staged_of, weight_of, weights_out_of,
    with_call,
)  # fmt: skip
from tokenyard.kernels.low_latency_waits import are_active, is_active, wait_flag, wait_flags
from tokenyard.kernels.region import ints, owner_of, peer_base

_BLOCK = tl.constexpr(64)
"""Tokens looked at at once."""


@triton.jit
def stage_weights(sent, t, word, owner, call, sizes: tl.constexpr):
    """Pack the weights of this rank's token ``t``, the words ``word [topk_bins]``, for the far
    ranks of its picks ``owner [topk_bins]``."""
    pick = tl.arange(0, sizes.topk_bins)
    if sizes.per_node:  # for all ranks of a node, by the numbers of its rail
        r, owner = tl.arange(0, sizes.rank_bins), via_of(owner, call.rank, sizes)
        via = via_of(r, call.rank, sizes)
        chosen = tl.max((owner[None, :] == via[:, None]).to(tl.int32), axis=1) > 0
        goes = are_active(call.active, r, is_far(call.state, r, sizes) & chosen)
        mine = peer_base(call.regions, call.rank)
        number, owner = of_ranks(numbers(sent.slots, t, sizes), owner, via), r
    else:
        goes = is_far(call.state, owner, sizes) & (owner >= 0)
        goes = are_active(call.active, owner, goes)
        mine, number = peer_base(call.regions, call.rank), numbers(sent.slots, t, sizes)
    to = weights_out_of(mine, call.parity, owner, number, sizes)[:, None] + pick[None, :]
    everywhere = word[None, :] + (owner * 0).to(tl.int64)[:, None]
    tl.store(to, everywhere, mask=goes[:, None] & (pick < sizes.topk)[None, :])


@triton.jit
def put_weights(sent, num_tokens, to, call, sizes: tl.constexpr):
    """The weights for rank ``to``, if it is far, once all are packed."""
    if is_far(call.state, to, sizes):
        pick = tl.arange(0, sizes.topk_bins)
        rows = to * 0
        for t0 in range(0, num_tokens, _BLOCK):
            t = t0 + tl.arange(0, _BLOCK)
            at = t[:, None] * sizes.topk + pick[None, :]
            inside = (t < num_tokens)[:, None] & (pick < sizes.topk)[None, :]
            ids = tl.load(ints(sent.merged) + at, mask=inside, other=-1)
            owner = owner_of(ids, sizes.experts, sizes.ranks)
            goes = via_of(owner, call.rank, sizes) == via_of(to, call.rank, sizes)
            rows += tl.sum(tl.max(goes.to(tl.int32), axis=1))
        wait_packed(call.state, WEIGHTS, to, rows, sizes)
        if is_active(call.active, to):
            mine = peer_base(call.regions, call.rank)
            there = weight_of(mine, call.parity, call.rank, 0, sizes)
            here = weights_out_of(mine, call.parity, to, 0, sizes)
            arrival = arrival_of(mine, call.parity, call.rank, WEIGHTS, sizes)
            value = with_call(call.number, rows.to(tl.int64))
            put_far(call, to, there, here, rows * (8 * sizes.topk), arrival, value, sizes)


@triton.jit
def wait_far_weights(s, call, sizes: tl.constexpr):
    """Wait for the weights of rank ``s``, if it is far."""
    if is_far(call.state, s, sizes):
        arrival = arrival_of(peer_base(call.regions, call.rank), call.parity, s, WEIGHTS, sizes)
        wait_flag(arrival, with_call(call.number, (s * 0).to(tl.int64)), s, call, 1, sizes)


@triton.jit
def put_sums(sent, to, chunk, call, k: tl.constexpr):
    """A chunk of the sums for rank ``to``, if it is far, once all of it are packed. The first also
    brings word if no rows came from there, or not all: then no sums are put."""
    sizes: tl.constexpr = k.sizes
    M: tl.constexpr = sizes.tokens
    C: tl.constexpr = k.chunk_rows
    if takes_rows(to, call, sizes):
        first, count, torn = chunk * C, to * 0, to * 0
        for j0 in range(0, M, _BLOCK):
            j = j0 + tl.arange(0, _BLOCK)
            first_pick = ints(sent.slots) + (to * M + j).to(tl.int64) * sizes.topk
            place = tl.load(first_pick, mask=j < M, other=-1)
            inside = (j >= first) & (j < first + C)
            count += tl.sum((inside & (place != -1)).to(tl.int32))
            torn += tl.sum((place == TORN).to(tl.int32))
        if count > 0:
            wait_packed(call.state, ROWS + chunk, to, count, sizes)
        count = tl.where(torn > 0, 0, count)
        if ((count > 0) | (chunk == 0)) & is_active(call.active, to):
            mine = peer_base(call.regions, call.rank)
            there = packed_of(mine, call.parity, call.rank, first, k.sum_bytes, sizes)
            here = staged_of(mine, call.parity, to, first, k.sum_bytes, sizes)
            flag = flag_of(mine, call.parity, call.rank, first, sizes)
            value = 2 * call.number + (count > 0).to(tl.int64)
            put_far(call, to, there, here, count.to(tl.int64) * k.sum_bytes, flag, value, sizes)


@triton.jit
def wait_chunks(sent, seen, t, owner, here, ranks, call, k: tl.constexpr):
    """Wait for the chunks that bring the sums of token ``t``, whose picks went to ``owner
    [topk_bins]``: those of the ``ranks`` that are ``here``, whose first chunk was ``seen``, and
    says that there are sums.

    Returns the flags of all ranks' sums, and both as :func:`wait_flags` tells it.
    """
    sizes: tl.constexpr = k.sizes
    mine, want = peer_base(call.regions, call.rank), 2 * call.number
    far = is_far(call.state, ranks, sizes)
    first = of_ranks(numbers(sent.slots, t, sizes), owner, ranks) // k.chunk_rows * k.chunk_rows
    flags = flag_of(mine, call.parity, ranks, tl.where(far, first, t), sizes)
    more = here & (seen == want + 1) & far & (first > 0)
    return flags, tl.where(more, wait_flags(flags, want, more, ranks, call, sizes), seen)
