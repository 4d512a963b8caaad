# pyright: basic
"""A call that this rank refuses: it tells all peers that it brings nothing, so that none waits for it, and waits until all have come.

Grid P, as every low-latency launch. Notes carry the tag 0, which fits every call; all flags say ``2 * call``; weights are zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_region import PIECES, RANK, epoch_of, flag_of, note, note_of, weight_of
from tokenyard.kernels.low_wait import are_active, is_active, leave_out, tell, wait_notes
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import peer_base
from tokenyard.kernels.sync import follow, words

_PIECES = tl.constexpr(PIECES)


@triton.jit(repr=shown_as("low_latency::refuse"))
def low_refuse_kernel(
    peers, state, active, timeout,
    R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, LC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """See the module."""
    pid = tl.program_id(0)
    follow(EARLY)
    call = tl.load(epoch_of(state, pid)) + 1
    half = (call % 2).to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    to = (me + P - 1 - pid) % R
    i = tl.arange(0, 256)
    if (pid >= P - R) & is_active(active, to):
        base = peer_base(peers, to)
        for e in range(0, LC + 1, 256):
            at = note_of(base, half, me, e + i, R, LC)
            tell(at, note(call, (i * 0).to(tl.int64)), e + i <= LC)
        for j in range(0, M * _PIECES, 256):
            none = (i * 0).to(tl.int64) + 2 * call
            tell(flag_of(base, half, me, 0, R, M, LC) + j + i, none, j + i < M * _PIECES)
        for j in range(0, M * K, 256):
            zero = (i * 0).to(tl.int64) + ((call & 0x7FFFFFFF) << 32)
            to_weights = weight_of(base, half, me, 0, R, M, K, LC) + j + i
            tl.atomic_xchg(to_weights, zero, mask=j + i < M * K, sem="relaxed", scope="sys")
    if pid == P - 1:
        r = tl.arange(0, RP)
        here = are_active(active, r, r < R)
        tags = note_of(peer_base(peers, me), half, r, LC, R, LC)
        _, _, there = wait_notes(
            tags[:, None], here[:, None], tags, peers, call, here, active, r, 0, state,
            timeout, R, P, M, K, LC, False,
        )  # fmt: skip
        leave_out(active, r, here & (there == 0))
    tl.debug_barrier()
    tl.store(epoch_of(state, pid), call)
