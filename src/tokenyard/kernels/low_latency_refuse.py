# pyright: basic
"""A call that this rank refuses. It tells all peers that it brings nothing, so that none waits for
it, and waits until all have come to the call.

Grid ``programs``, as in every low-latency launch. Counts are 0 and carry the tag 0, which fits
every call; all flags become ``2 * call``; weights are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_memory import (
    PIECES,
    RANK,
    Sizes,
    count_of,
    epoch_of,
    flag_of,
    weight_of,
    with_call,
)
from tokenyard.kernels.low_latency_waits import (
    Call,
    are_active,
    is_active,
    leave_out,
    tell,
    wait_counts,
)
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import peer_base
from tokenyard.kernels.sync import follow, words

_PIECES = tl.constexpr(PIECES)


class RefuseConfig(NamedTuple):
    """What is known of a refusal when its kernel is compiled."""

    sizes: Sizes
    early: bool  # programs may be set up while the launch before still runs


@triton.jit(repr=shown_as("low_latency::refuse"))
def low_refuse_kernel(regions, state, active, timeout, k: tl.constexpr):
    """See the module. ``k`` is a :class:`RefuseConfig`."""
    sizes: tl.constexpr = k.sizes
    M: tl.constexpr = sizes.tokens
    pid = tl.program_id(0)
    follow(k.early)
    number = tl.load(epoch_of(state, pid, sizes)) + 1
    parity = (number % 2).to(tl.int32)
    me = tl.load(words(state) + RANK).to(tl.int32)
    call = Call(
        regions=regions, state=state, active=active, number=number, parity=parity, rank=me,
        timeout=timeout,
    )  # fmt: skip
    to = (me + sizes.programs - 1 - pid) % sizes.ranks
    i = tl.arange(0, 256)
    if (pid >= sizes.programs - sizes.ranks) & is_active(active, to):
        base = peer_base(regions, to)
        for e in range(0, sizes.local_experts + 1, 256):
            at = count_of(base, parity, me, e + i, sizes)
            tell(at, with_call(number, (i * 0).to(tl.int64)), e + i <= sizes.local_experts)
        for j in range(0, M * _PIECES, 256):
            none = (i * 0).to(tl.int64) + 2 * number
            tell(flag_of(base, parity, me, 0, sizes) + j + i, none, j + i < M * _PIECES)
        for j in range(0, M * sizes.topk, 256):
            zero = (i * 0).to(tl.int64) + ((number & 0x7FFFFFFF) << 32)
            to_weights = weight_of(base, parity, me, 0, sizes) + j + i
            inside = j + i < M * sizes.topk
            tl.atomic_xchg(to_weights, zero, mask=inside, sem="relaxed", scope="sys")
    if pid == sizes.programs - 1:
        r = tl.arange(0, sizes.rank_bins)
        here = are_active(active, r, r < sizes.ranks)
        at = count_of(peer_base(regions, me), parity, r, sizes.local_experts, sizes)
        _, _, there = wait_counts(at[:, None], here[:, None], at, here, r, 0, call, False, sizes)
        leave_out(active, r, here & (there == 0))
    tl.debug_barrier()
    tl.store(epoch_of(state, pid, sizes), number)


# The host's side


def bind_refuse(workspace: Any) -> Callable[..., None]:
    """Compile and load the kernel, a function of ``workspace.addresses`` and the timeout (ns). May
    wait for the device."""
    k = RefuseConfig(sizes=workspace.sizes, early=workspace.memory.early)
    return workspace.bind(low_refuse_kernel, k)
