# pyright: basic
"""Low-latency combine: the experts' rows of one token are summed where they are, one row goes back
per (token, rank), and the token's owner adds by rank.

Example: token 2 of rank 1 went to ranks 0 and 1. Rank 0 writes its sum to slot (0, 2) of rank 1,
rank 1 its own to slot (1, 2); rank 1 adds slots (0, 2) and (1, 2) and rounds.

Who publishes what, and who may read it when:

1. One program per peer stores the number of the call and a tag there: this rank has come to the
   call. The word holds its call, so it needs no order.
2. With weights of the owner, one program per token stores them at all its ranks. Each word holds
   its call, so they need no order either.
3. One program per (owner, token) that has rows here sums them, stores the sum into slot (me, token)
   of the owner, and sets its flag there to ``2 * call + 1`` (release).
   (Where rows cross once per node: ``kernels/low_latency_rail.py``.)
4. One program per share of an own token's channels waits for the flags of the ranks that the token
   went to (acquire), then reads the slots. If it has to go on without one, it first agrees with the
   programs of the other shares. The last program waits for the tags of all ranks, so that a launch
   ends only when all have come to the call. If asked, the first share's program also tells what the
   sum lacks.

Why a slot may be reused: as in ``kernels/low_latency_dispatch.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import (
    count_packed, first_put, is_far, next_of, tell_or_put, via_of,
)  # fmt: skip
from tokenyard.kernels.low_latency_memory import (
    ROWS, WEIGHTS, Sizes, Stages, count_of, epoch_of, flag_of, slot_of, staged_of, weight_of,
    with_call,
)  # fmt: skip
from tokenyard.kernels.low_latency_rail import hand_back, is_handed_on, source_of, sum_of_node
from tokenyard.kernels.low_latency_sums import (
    load_sum, load_sum_of, merged_ids, owner_weights, places_of, put_sums, put_weights,
    stage_weights, sum_rows, sums_of, tell_lost, wait_chunks, weigh,
)  # fmt: skip
from tokenyard.kernels.low_latency_waits import (
    agree, are_active, is_active, next_call, tell, wait_flags, wait_for_ranks,
)  # fmt: skip
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import add_term, elements, kernel_type
from tokenyard.kernels.region import ints, owner_of, peer_base
from tokenyard.kernels.sync import follow, words
from tokenyard.routing import power_of_two_at_least


class CombineConfig(NamedTuple):
    """What is known of a combine when its kernel is compiled."""

    sizes: Sizes
    hidden: int
    shares: int  # of a token's channels
    share: int  # channels of one
    sent_block: int  # channels in flight where the rows of a token are summed
    added_block: int  # and where the sums of ranks are
    dtype: Any
    weighted: int  # 0: no; 1: by ``weights [rows]``; 2: by the owner's ``weights [T, K]``
    bias0: Any  # dtypes; None: there is none
    bias1: Any
    # bytes of a slot before int32 [K]: which of the token's picks are in the sum; 0: no capacity
    kept_at: int
    sum_bytes: int  # from one sum for a far rank to the next
    chunk_rows: int  # sums for a far rank that one program puts
    lost: bool  # told what sums lack
    stages: Stages


class Sent(NamedTuple):
    """Addresses of what a combine reads. 0: there is none."""

    rows: Any
    slots: Any  # as in ``DispatchResult``
    weights: Any
    merged: Any  # as in ``DispatchResult``
    first_pick: Any
    bias0: Any
    bias1: Any


class CombineResult(NamedTuple):
    """Addresses of what a combine fills. 0: there is none."""

    sums: Any
    waits: Any  # int64 [R]: nanoseconds waited are added
    lost: Any  # float32 [T]: the weight of the picks that each sum lacks


# Send


@triton.jit
def _send_weights(sent, t, call, sizes: tl.constexpr):
    """Step 2 for token ``t``."""
    pick, r = tl.arange(0, sizes.topk_bins), tl.arange(0, sizes.rank_bins)
    ids = merged_ids(sent, t, pick, sizes)
    weights = owner_weights(sent, t, pick, ids, sizes)
    bits = weights.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = ((call.number & 0x7FFFFFFF) << 32) | bits
    owner = owner_of(ids, sizes.experts, sizes.ranks)
    via = via_of(owner, call.rank, sizes)  # of a node all ranks get them
    goes = via[None, :] == via_of(r, call.rank, sizes)[:, None]
    chosen = tl.max(goes.to(tl.int32), axis=1) > 0
    goes = are_active(call.active, r, chosen)
    if sizes.far:
        far = is_far(call.state, r, sizes)
        stage_weights(sent, t, word, owner, via, chosen, call, sizes)
        count_packed(call.state, WEIGHTS, r, far & chosen, sizes)
        goes = goes & (far == 0)
    bases = tl.load(words(call.regions) + r, mask=goes, other=0)
    to = weight_of(bases, call.parity, call.rank, t, sizes)[:, None] + pick[None, :]
    everywhere = word[None, :] + (r * 0).to(tl.int64)[:, None]
    there = goes[:, None] & (pick < sizes.topk)[None, :]
    tl.atomic_xchg(to, everywhere, mask=there, sem="relaxed", scope="sys")


@triton.jit
def _send_sum(sent, s, t, call, k: tl.constexpr):
    """Step 3 for token ``t`` of rank ``s``, or row number ``t`` of a far one, unless that rank is
    left out."""
    sizes: tl.constexpr = k.sizes
    place = places_of(sent, s, t, sizes)
    base = peer_base(call.regions, s)
    here = is_active(call.active, s)  # meanwhile
    ok = here & (tl.max(place) >= 0)
    near = here
    if sizes.far:  # all rows of a far rank go back, so that they keep their order
        far = is_far(call.state, s, sizes)
        near = here & (far == 0)
        first = tl.sum(tl.where(tl.arange(0, sizes.topk_bins) == 0, place, 0))
        came = far & (first != -1)
        ok = ok | (here & came)
    if near & (tl.max(place) < 0) & (tl.min(place) == -2):  # no capacity, but the owner waits
        tell(flag_of(base, call.parity, call.rank, t, sizes), 2 * call.number, s >= 0)
    ok, weight = weigh(sent, s, t, place, ok, call, True, k)
    if ok:
        slot = slot_of(base, call.parity, call.rank, t, sizes)
        if sizes.far:
            mine = peer_base(call.regions, call.rank)
            slot = tl.where(far, staged_of(mine, call.parity, s, t, k.sum_bytes, sizes), slot)
        sum_rows(sent, slot, place, weight, k)
        tl.debug_barrier()
        flag = flag_of(base, call.parity, call.rank, t, sizes)
        told = near if sizes.far else None
        tl.atomic_max(flag, 2 * call.number + 1, mask=told, sem="release", scope="sys")
    if sizes.far and came:
        count_packed(call.state, ROWS + t // k.chunk_rows, s, came, sizes)


@triton.jit
def _send_in_node(sent, s, t, call, k: tl.constexpr):
    """The same where rows cross once per node, but for ranks on my rail: these get the node's
    sums, later."""
    if is_handed_on(s, call, k.sizes):
        hand_back(sent, s, t, call, k)
    elif s // k.sizes.per_node == call.rank // k.sizes.per_node:
        _send_sum(sent, s, t, call, k)


# Receive


@triton.jit
def _sum_of_nodes(sums, got, w, call, k: tl.constexpr):
    """Where rows cross once per node: sums of my node's ranks, then of nodes, each by a rail."""
    sizes: tl.constexpr = k.sizes
    P: tl.constexpr = sizes.per_node
    r, me = tl.arange(0, sizes.rank_bins), call.rank
    NODES: tl.constexpr = sizes.ranks // P
    FEW: tl.constexpr = sizes.unrolled >= NODES
    own = tl.zeros((k.added_block,), tl.float32)
    for i in tl.static_range(P):
        own = own + load_sum_of(r == me // P * P + i, sums, got, w, k)
    total, rail = tl.zeros((k.added_block,), tl.float32), -1
    for i in tl.static_range(NODES if FEW else min(NODES, sizes.topk + 1)):  # a token's, and mine
        if FEW:
            n = i
        else:
            rail = next_of(r, (r == me) | ((r // P != me // P) & (got > 0)), rail, sizes.rank_bins)
            n = rail // P
        node = own.to(k.dtype).to(tl.float32)
        if n != me // P:
            node = load_sum_of(r == n * P + me % P, sums, got, w, k)
        total = total + node
    return total


@triton.jit
def _sum_of_ranks(mine, sums, got, t, w, call, k: tl.constexpr):
    """Channels ``w`` of token ``t``: the sums of the ranks that it ``got [rank_bins]``, added.
    ``mine``: this rank's region; ``sums``: addresses, if ranks may be far."""
    R: tl.constexpr = k.sizes.ranks
    FEW: tl.constexpr = k.sizes.unrolled >= R
    r = tl.arange(0, k.sizes.rank_bins)
    total, d = tl.zeros((k.added_block,), tl.float32), -1
    for i in tl.static_range(R if FEW else min(R, k.sizes.topk)):
        if FEW:
            d, there = i, tl.sum(tl.where(r == i, got, 0)) > 0
        else:
            d = next_of(r, got > 0, d, R)
            there = d < R
        slot = slot_of(mine, call.parity, d, t, k.sizes)
        if k.sizes.far:
            slot = tl.sum(tl.where(r == d, sums, 0))
        total = total + load_sum(slot, there, w, k)
    return total


@triton.jit
def _add_rows(sent, result, t, share, num_tokens, call, k: tl.constexpr):
    """Step 4 for a share of this rank's token ``t``, ``k.share`` channels."""
    sizes: tl.constexpr = k.sizes
    H: tl.constexpr = k.hidden
    pick, r = tl.arange(0, sizes.topk_bins), tl.arange(0, sizes.rank_bins)
    mine = peer_base(call.regions, call.rank)
    merged = ints(sent.merged) + t.to(tl.int64) * sizes.topk
    ids = tl.load(merged + pick, mask=pick < sizes.topk, other=-1)
    owner = via_of(owner_of(ids, sizes.experts, sizes.ranks), call.rank, sizes)
    goes = tl.max((owner[None, :] == r[:, None]).to(tl.int32), axis=1) > 0
    here = are_active(call.active, r, goes)
    first = tl.where(is_far(call.state, r, sizes), 0, t) if sizes.far else t
    flags = flag_of(mine, call.parity, r, first, sizes)
    slots = sums_of(sent, mine, t, owner, call, k)
    want = 2 * call.number
    seen = wait_flags(flags, want, here, r, call, sizes)
    if sizes.far:
        flags, seen = wait_chunks(sent, seen, t, owner, here, r, call, k)
    got = (here & (seen == want + 1)).to(tl.int32)
    if k.shares > 1:
        doubted = goes & ((here == 0) | (seen < want))
        got = agree(flags, got, doubted, t, share, r, call, k.shares, sizes)
    for w0 in range(share * k.share, tl.minimum(share * k.share + k.share, H), k.added_block):
        w = w0 + tl.arange(0, k.added_block)
        if sizes.per_node:
            total = _sum_of_nodes(slots, got, w, call, k)
        else:
            total = _sum_of_ranks(mine, slots, got, t, w, call, k)
        at = t.to(tl.int64) * H + w
        total = add_term(total, sent.bias0, k.bias0, at, w < H)
        total = add_term(total, sent.bias1, k.bias1, at, w < H)
        sums = elements(result.sums, k.dtype)
        tl.store(sums + at, total.to(k.dtype), mask=w < H)
    if k.lost and share == 0:
        tell_lost(sent, result.lost, got, t, num_tokens, call, k)


@triton.jit(repr=shown_as("low_latency::combine"))
def low_combine_kernel(
    regions, state, active, sent: Sent, result: CombineResult, timeout, tag, rank, num_tokens,
    k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`CombineConfig`; ``timeout`` is in nanoseconds."""
    sizes: tl.constexpr = k.sizes
    R: tl.constexpr = sizes.ranks
    P: tl.constexpr = sizes.programs
    M: tl.constexpr = sizes.tokens
    pid = tl.program_id(0)
    me, num_tokens = rank.to(tl.int32), num_tokens.to(tl.int32)
    follow(sizes.early)
    call = next_call(regions, state, active, me, timeout, sizes)
    if k.stages.send:
        if pid >= P - R:
            to = (me + P - 1 - pid) % R
            if is_active(active, to):
                at = count_of(peer_base(regions, to), call.parity, me, sizes.local_experts, sizes)
                if sizes.far:
                    tell_or_put(at, to, with_call(call.number, tag), call, sizes)
                else:
                    tell(at, with_call(call.number, tag), to >= 0)
        if k.weighted == 2:
            for token in range(pid, num_tokens, P):
                _send_weights(sent, token + 0, call, sizes)
            if sizes.far and pid >= P - R:
                put_weights(sent, num_tokens, (me + P - 1 - pid) % R, call, sizes)
        for u in range(pid, R * M, P):
            if sizes.per_node:
                _send_in_node(sent, (u // M + me) % R, u % M, call, k)
            else:
                _send_sum(sent, (u // M + me) % R, u % M, call, k)
        if sizes.far and not sizes.per_node:
            for u in range(first_put(pid, sizes), R * tl.cdiv(M, k.chunk_rows), P):
                put_sums(sent, (me + 1 + u) % R, u // R, call, k)
    if k.stages.receive:
        if sizes.per_node and pid < P - 1:  # but for the leader, which waits for other ranks too
            for u in range(pid, (R // sizes.per_node - 1) * M, P - 1):
                sum_of_node(sent, source_of(u // M, me, sizes), u % M, call, k)
            for u in range(pid, R * tl.cdiv(M, k.chunk_rows), P - 1):
                put_sums(sent, (me + 1 + u) % R, u // R, call, k)
        if pid == P - 1:
            wait_for_ranks(tag, result.waits, call, sizes)
        for u in range(pid, num_tokens * k.shares, P):
            _add_rows(sent, result, u // k.shares, u % k.shares, num_tokens, call, k)
        tl.debug_barrier()
        tl.store(epoch_of(state, pid, sizes), call.number)


# The host's side


def bind_combine(
    workspace: Any, dtype: Any, row_layout: Any, weighted: int, bias: tuple[Any, ...], lost: bool,
    stages: Stages,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature. May wait for the device. Arguments: as in
    :class:`CombineConfig`, with torch dtypes; ``row_layout``: of a sum in a slot."""
    tuning, hidden = workspace.tuning, power_of_two_at_least(workspace.config.hidden)
    share = max(1, hidden // tuning.shares)
    biases = (*map(kernel_type, bias), None, None)
    k = CombineConfig(
        sizes=workspace.sizes, hidden=workspace.config.hidden, shares=tuning.shares, share=share,
        sent_block=min(hidden, tuning.sent_channels), added_block=min(share, tuning.added_channels),
        dtype=kernel_type(dtype), weighted=weighted, bias0=biases[0], bias1=biases[1],
        kept_at=row_layout.payload_bytes if row_layout.meta_words else 0,
        sum_bytes=row_layout.slot_bytes,
        chunk_rows=tuning.chunk_rows(row_layout.slot_bytes, workspace.config.max_tokens_per_rank),
        lost=lost and stages.receive, stages=stages,
    )  # fmt: skip
    return workspace.bind(low_combine_kernel, k)
