# pyright: basic
"""Once per node: a token's row crosses to each other node once (``Sizes.per_node`` ranks each).

A row for ranks of another node is put to its *rail*, the rank of the sender's local index there.
All else is as between single ranks (``kernels/low_latency_far.py``): rows for a rail are packed,
put, and numbered among the tokens that go to its node.

Example: nodes of ranks 0, 1 and 2, 3. Token 5 of rank 0 goes to ranks 2 and 3. It is row 4 for
rank 2, the rail, which stores it to slot (0, 4) of rank 3 too. In the combine rank 3 stores its sum
to slot (1, 4) of rank 2. That adds it to its own, by rank, and puts one sum back.

Who publishes what, and who may read it when:

1. One program of the rail per row that may come waits until the rows of that source are here, and
   stores the row to its neighbours that have picks in it. Each neighbour's flag of slot (source,
   row) becomes ``2 call + 1`` (release); ``2 call`` if the row does not go there, or there is none;
   ``2 call + LOST`` if the source is left out, or this rank refuses the call. Neighbours wait for
   these flags, so for the rail.
2. In the combine a neighbour stores its sum for row j of far rank s to the rail, into slot (the
   rank of s's node with the neighbour's local index, j), and sets the flag there in the same way.
   So a rank's words for a far rank that is not on its rail have one writer in dispatches and
   combines: the neighbour of that local index.
3. One program of the rail per row makes its own sum in staging, waits for the flags of its
   neighbours, adds by rank, rounds, and counts the row as packed. A sum tells which picks it has.

Nobody waits in a circle: 1 waits for sources that send, 3 for neighbours that send, and what others
wait for is sent before. Slots may be written again for the reasons that hold among neighbours.

A rail that is left out silences its pairs of source and node: its neighbours wait for it alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import count_packed, is_far
from tokenyard.kernels.low_latency_memory import (
    PIECES, ROWS, flag_of, packed_of, slot_of, staged_of,
)  # fmt: skip
from tokenyard.kernels.low_latency_sums import load_sum_of, places_of, sum_rows, weigh
from tokenyard.kernels.low_latency_waits import (
    are_active, is_active, look, tell, wait_flags, wait_row,
)  # fmt: skip
from tokenyard.kernels.payload import as_words, elements
from tokenyard.kernels.region import ints, owner_of, peer_base
from tokenyard.kernels.sync import words

LOST = tl.constexpr(2)
"""Above ``2 * call``: a flag that says that the row may exist, and does not come."""


@triton.jit
def rail_of(rank, me, sizes: tl.constexpr):
    """The rank of my node through which rows of far ``rank`` come."""
    return me // sizes.per_node * sizes.per_node + rank % sizes.per_node


@triton.jit
def source_of(u, me, sizes: tl.constexpr):
    """The far ranks on my rail are numbered from 0 on, the next node's first."""
    node = (me // sizes.per_node + 1 + u) % (sizes.ranks // sizes.per_node)
    return node * sizes.per_node + me % sizes.per_node


@triton.jit
def is_handed_on(rank, call, sizes: tl.constexpr):
    """Whether ``rank`` is far, and its rows come through a neighbour."""
    other = rank % sizes.per_node != call.rank % sizes.per_node
    return is_far(call.state, rank, sizes) & other


@triton.jit
def neighbours(r, me, sizes: tl.constexpr):
    """Which of the ranks ``r`` are others of my node."""
    return (r // sizes.per_node == me // sizes.per_node) & (r != me)


@triton.jit
def hand_on(s, t, call, k: tl.constexpr):
    """Step 1 for row number ``t`` of far rank ``s``, which is on my rail."""
    sizes: tl.constexpr = k.sizes
    P: tl.constexpr = sizes.per_node
    N: tl.constexpr = k.row.slot_bytes // 4
    block: tl.constexpr = min(triton.next_power_of_2(N), k.block)
    me, mine = call.rank, peer_base(call.regions, call.rank)
    r, pick, w = tl.arange(0, sizes.rank_bins), tl.arange(0, sizes.topk_bins), tl.arange(0, block)
    here = are_active(call.active, r, neighbours(r, me, sizes))
    bases = tl.load(words(call.regions) + r, mask=here, other=0)
    want = 2 * call.number
    seen = want - 1
    if is_active(call.active, s):
        seen = wait_row(s, t, call, k.chunk_rows, sizes)
    goes = (r * 0).to(tl.int64)
    if seen > want:
        slot = packed_of(mine, call.parity, s, t, k.row.slot_bytes, sizes)
        metadata = as_words(slot + k.row.metadata_at, 32)
        ids = tl.load(metadata + pick, mask=pick < sizes.topk, other=-1, cache_modifier=".cg")
        owner = owner_of(ids, sizes.experts, sizes.ranks)
        chosen = tl.max((owner[None, :] == r[:, None]).to(tl.int64), axis=1)
        goes = tl.where(here, chosen, 0)
        slots = slot_of(bases, call.parity, s, t, sizes)
        for w0 in range(0, N, block):
            inside = w0 + w < N
            v = tl.load(as_words(slot, 32) + w0 + w, mask=inside, cache_modifier=".cg")
            for i in tl.static_range(1, P):
                d = me // P * P + (me + i) % P
                if tl.sum(tl.where(r == d, goes, 0)) > 0:
                    to = as_words(tl.sum(tl.where(r == d, slots, 0)), 32)
                    tl.store(to + w0 + w, v, mask=inside)
    told = want + tl.where(seen < want, LOST, goes)
    told = told[:, None] + tl.zeros((sizes.rank_bins, k.pieces), tl.int64)
    flags = flag_of(bases, call.parity, s, t, sizes)[:, None] + tl.arange(0, k.pieces)[None, :]
    tl.debug_barrier()
    tl.atomic_max(flags, told, mask=here[:, None], sem="release", scope="sys")


@triton.jit
def tell_lost_rows(to, call, sizes: tl.constexpr):
    """Of a refused call: neighbour ``to`` gets nothing through this rank, and no sums from it."""
    N: tl.constexpr = sizes.tokens * PIECES
    base, i = peer_base(call.regions, to), tl.arange(0, 256)
    told = (i * 0).to(tl.int64) + 2 * call.number + LOST
    for u in range(0, sizes.ranks // sizes.per_node - 1):
        flags = flag_of(base, call.parity, source_of(u + 0, call.rank, sizes), 0, sizes)
        for j in range(0, N, 256):
            tell(flags + j + i, told, j + i < N)


@triton.jit
def hand_back(sent, s, t, call, k: tl.constexpr):
    """Step 2 for row number ``t`` of far rank ``s``, which a neighbour has handed on."""
    sizes: tl.constexpr = k.sizes
    rail = rail_of(s, call.rank, sizes)
    at = rail_of(call.rank, s, sizes)  # of s's node, with my local index
    here = is_active(call.active, rail)
    place = places_of(sent, s, t, sizes)
    ok, weight = weigh(sent, s, t, place, here & is_active(call.active, s), call, False, k)
    ok = ok & (tl.max(place) >= 0)
    base = peer_base(call.regions, rail)
    if ok:
        sum_rows(sent, slot_of(base, call.parity, at, t, sizes), place, weight, k)
    tl.debug_barrier()
    flag, told = flag_of(base, call.parity, at, t, sizes), 2 * call.number + ok.to(tl.int64)
    tl.atomic_max(flag, told, mask=here, sem="release", scope="sys")


@triton.jit
def _add_neighbours(slot, s, t, call, k: tl.constexpr):
    """Add to the own sum in ``slot`` those of the neighbours for row number ``t`` of far rank
    ``s``."""
    sizes: tl.constexpr = k.sizes
    P: tl.constexpr = sizes.per_node
    me, mine = call.rank, peer_base(call.regions, call.rank)
    r, pick = tl.arange(0, sizes.rank_bins), tl.arange(0, sizes.topk_bins)
    here = are_active(call.active, r, neighbours(r, me, sizes))
    at = rail_of(r, s, sizes)
    flags, want = flag_of(mine, call.parity, at, t, sizes), 2 * call.number
    seen = wait_flags(flags, want, here, r, call, sizes)
    got = here & (seen > want)
    got = got & (look(flags, got) == want + 1)  # not LOST
    got = got | (r == me)
    slots = tl.where(r == me, slot, slot_of(mine, call.parity, at, t, sizes))
    for w0 in range(0, k.hidden, k.added_block):
        w = w0 + tl.arange(0, k.added_block)
        total = tl.zeros((k.added_block,), tl.float32)
        for i in tl.static_range(P):
            d = me // P * P + i
            total = total + load_sum_of(r == d, slots, got.to(tl.int32), w, k)
        to = elements(slot, k.dtype)
        tl.debug_barrier()  # the own sum is read
        tl.store(to + w, total.to(k.dtype), mask=w < k.hidden)
    kept_at = ints(slots + k.kept_at)[:, None] + pick[None, :]
    there = got[:, None] & (pick < sizes.topk)[None, :]
    kept = tl.max(tl.load(kept_at, mask=there, other=0, cache_modifier=".cg"), axis=0)
    tl.debug_barrier()
    tl.store(ints(slot + k.kept_at) + pick, kept, mask=pick < sizes.topk)


@triton.jit
def sum_of_node(sent, s, t, call, k: tl.constexpr):
    """Step 3 for row number ``t`` of far rank ``s``, which is on my rail."""
    sizes: tl.constexpr = k.sizes
    pick = tl.arange(0, sizes.topk_bins)
    ok, place = s >= 0, places_of(sent, s, t, sizes)
    ok, weight = weigh(sent, s, t, place, ok & is_active(call.active, s), call, False, k)
    came = tl.sum(tl.where(pick == 0, place, 0)) != -1
    if came:
        if ok:
            mine = peer_base(call.regions, call.rank)
            slot = staged_of(mine, call.parity, s, t, k.sum_bytes, sizes)
            sum_rows(sent, slot, place, weight, k)
            tl.debug_barrier()
            _add_neighbours(slot, s, t, call, k)
        count_packed(call.state, ROWS + t // k.chunk_rows, s, came, sizes)
