# ruff: noqa: N803 (constants of kernels are written in capitals)
"""Small communication kernels that are right, each with a number of ways to be wrong (``BUG``), and
what runs them simulated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenyard.kernels.sync import (
    STATE_WORDS,
    STATUS_WORDS,
    TIMEOUT_NS,
    add_release,
    given_up,
    load_acquire,
    now_ns,
    wait_at_least,
    words,
)
from tokenyard.testing.simulator import SimulatedRank

TIMEOUT_SECONDS = 30
HEADER = tl.constexpr(64)
F32 = tl.constexpr(tl.pointer_type(tl.float32))


@triton.jit
def wait_for(counter, want, state, BUG: tl.constexpr):
    """As ``wait_at_least``, or wrong."""
    if (
        BUG == "plain load"
        or BUG == "volatile load"
        or BUG == "relaxed"
        or BUG == "no barrier after acquire"
    ):
        seen = tl.full((), -1, tl.int64)
        deadline = now_ns() + tl.load(words(state) + TIMEOUT_NS)
        live = True
        while (seen < want) & live:
            if BUG == "plain load":
                seen = tl.load(counter)
            elif BUG == "volatile load":
                seen = tl.load(counter, volatile=True)
            elif BUG == "relaxed":
                seen = tl.atomic_add(counter, 0, sem="relaxed", scope="sys")
            else:
                seen = load_acquire(counter)
            live = (now_ns() < deadline) & (not given_up(state))
        if BUG != "no barrier after acquire":
            tl.debug_barrier()
        return seen
    else:
        return wait_at_least(counter, want, state, 0, 0, 0)


@triton.jit
def signal(counter, count, BUG: tl.constexpr):
    """As ``add_release`` on one counter, or wrong."""
    if BUG != "no barrier before release":
        tl.debug_barrier()
    if BUG == "gpu scope":
        tl.atomic_add(counter, count, sem="release", scope="gpu")
    elif BUG == "relaxed release":
        tl.atomic_add(counter, count, sem="relaxed", scope="sys")
    else:
        tl.atomic_add(counter, count, sem="release", scope="sys")


@triton.jit
def ring_kernel(
    mine,
    peer_after,
    peer_before,
    state,
    src,
    dst,
    n,
    base,
    SLOTS: tl.constexpr,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    BUG: tl.constexpr,
):
    """Program 0 sends n rows to the rank after this one through a ring of slots there, program 1
    receives n rows.

    ``base`` rows went before this call. A region is: tail (written by the rank before), head (by
    the rank after), slots.
    """
    o = tl.arange(0, H)
    done = tl.zeros((), tl.int64)
    live = True
    if tl.program_id(0) == 0:
        pending = 0
        slots = (peer_after + HEADER).to(F32)
        while (done < n) & live:
            head = wait_at_least(words(mine) + 1, base + done - SLOTS + 1, state, 0, 0, 0)
            live = head > base + done - SLOTS
            if live:
                if BUG == "flag before data":
                    signal(words(peer_after), 1, BUG)
                tl.store(slots + (base + done) % SLOTS * H + o, tl.load(src.to(F32) + done * H + o))
                done += 1
                pending += 1
                if (pending == CHUNK) | ((done == n) & (BUG != "last chunk dropped")):
                    if BUG != "flag before data":
                        signal(words(peer_after), pending, BUG)
                    pending = 0
    else:
        slots = (mine + HEADER).to(F32)
        while (done < n) & live:
            want = done + 1 if BUG == "wrong epoch" else base + done + 1
            live = wait_for(words(mine), want, state, BUG) >= want
            if live:
                if BUG == "credit before read":
                    signal(words(peer_before) + 1, 1, BUG)
                tl.store(dst.to(F32) + done * H + o, tl.load(slots + (base + done) % SLOTS * H + o))
                done += 1
                if BUG != "credit before read":
                    if BUG != "no barrier before credit":
                        tl.debug_barrier()
                    tl.atomic_add(words(peer_before) + 1, 1, sem="release", scope="sys")


@triton.jit
def halves_kernel(
    peers,
    state,
    src,
    dst,
    rank,
    call,
    R: tl.constexpr,
    RP: tl.constexpr,
    H: tl.constexpr,
    BUG: tl.constexpr,
):
    """Exchange a row with every peer, through halves of a region that alternate from call to call;
    one program per peer.

    Nobody enters call n + 2 before all have ended n, because its rows of n + 1 come from kernels
    behind those of n. A region is: a counter per peer, then rows [2, R, H].
    """
    peer = tl.program_id(0)
    o = tl.arange(0, H)
    half = call * 0 if BUG == "one half" else call % 2
    there = tl.load(words(peers) + peer)
    here = tl.load(words(peers) + rank)
    row = (half * R + rank) * H
    if BUG == "flag before data":
        signal(words(there) + rank, 1, BUG)
    tl.store((there + HEADER * R).to(F32) + row + o, tl.load(src.to(F32) + peer * H + o))
    if BUG != "flag before data":
        signal(words(there) + rank, 1, BUG)
    want = call if BUG == "wrong epoch" else call + 1
    if wait_for(words(here) + peer, want, state, BUG) >= want:
        tl.store(
            dst.to(F32) + peer * H + o,
            tl.load((here + HEADER * R).to(F32) + (half * R + peer) * H + o),
        )


@triton.jit
def flags_kernel(peers, state, src, dst, rank, R: tl.constexpr, RP: tl.constexpr, H: tl.constexpr):
    """One program stores a row to every peer, tells all of them by one vector of atomics, and waits
    for all one after the other.
    """
    o, r = tl.arange(0, H), tl.arange(0, RP)
    bases = tl.load(words(peers) + r, mask=r < R, other=0)
    rows = (bases + HEADER * R).to(F32) + rank * H
    tl.store(
        rows[:, None] + o[None, :],
        tl.load(src.to(F32) + r[:, None] * H + o[None, :], mask=(r < R)[:, None]),
        mask=(r < R)[:, None],
    )
    add_release(words(bases) + rank, tl.full((RP,), 1, tl.int64), r < R)
    here = tl.load(words(peers) + rank)
    for i in range(R):
        if wait_at_least(words(here) + i, tl.full((), 1, tl.int64), state, 0, 0, 0) >= 1:
            tl.store(dst.to(F32) + i * H + o, tl.load((here + HEADER * R).to(F32) + i * H + o))


class Place:
    """A rank's region and state for these kernels."""

    def __init__(self, ranks: SimulatedRank, num_bytes: int, counters: dict[str, int]) -> None:
        self.region = ranks.memory.allocate(num_bytes)
        self.bases: list[int] = self.region.addresses.tolist()
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64)
        self.state[TIMEOUT_NS.value] = TIMEOUT_SECONDS * 10**9
        self.status = ranks.memory.host_words(STATUS_WORDS)
        self.state[2] = self.status.data_ptr()
        for name, word in counters.items():
            ranks.sim.name(self.bases[ranks.rank] + 8 * word, 8, f"{name} of rank {ranks.rank}")


def payload(rank: int, call: int, *shape: int) -> torch.Tensor:
    """Rows that differ everywhere."""
    return (
        torch.arange(1, 1 + torch.Size(shape).numel()).float().view(*shape)
        + 1000 * rank
        + 100_000 * call
    )


def ring_body(
    ranks: SimulatedRank,
    bug: str = "",
    calls: int = 2,
    n: int = 5,
    slots: int = 2,
    chunk: int = 2,
    hidden: int = 16,
) -> Any:
    """Rows round a ring of ranks, in ``calls`` launches. Raises if rows are wrong."""
    place = Place(ranks, 64 + 4 * slots * hidden, {"tail": 0, "head": 1})
    after, before = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    launch = ranks.memory.bind(
        ring_kernel, 2, num_warps=4, SLOTS=slots, H=hidden, CHUNK=chunk, BUG=bug
    )
    kept = []
    for call in range(calls):
        src, dst = payload(ranks.rank, call, n, hidden), torch.full((n, hidden), -1.0)
        launch(
            place.bases[ranks.rank],
            place.bases[after],
            place.bases[before],
            place.state.data_ptr(),
            src.data_ptr(),
            dst.data_ptr(),
            n,
            call * n,
        )
        kept.append((src, dst))
    ranks.memory.settle()
    for call, (_, dst) in enumerate(kept):
        assert torch.equal(dst, payload(before, call, n, hidden)), f"wrong rows in call {call}"
    return place.status.tolist()


def halves_body(ranks: SimulatedRank, bug: str = "", calls: int = 4, hidden: int = 16) -> None:
    """``calls`` exchanges between all ranks. Raises if rows are wrong."""
    size = ranks.world_size
    place = Place(
        ranks, 64 * size + 8 * size * hidden, {f"arrived[{peer}]": peer for peer in range(size)}
    )
    launch = ranks.memory.bind(
        halves_kernel, size, num_warps=4, R=size, RP=triton.next_power_of_2(size), H=hidden, BUG=bug
    )
    kept = []
    for call in range(calls):
        src, dst = payload(ranks.rank, call, size, hidden), torch.full((size, hidden), -1.0)
        launch(
            place.region.addresses.data_ptr(),
            place.state.data_ptr(),
            src.data_ptr(),
            dst.data_ptr(),
            ranks.rank,
            call,
        )
        kept.append((src, dst))
    ranks.memory.settle()
    for call, (_, dst) in enumerate(kept):
        want = torch.stack([payload(peer, call, size, hidden)[ranks.rank] for peer in range(size)])
        assert torch.equal(dst, want), f"wrong rows in call {call}"


def flags_body(ranks: SimulatedRank, hidden: int = 8) -> None:
    """One exchange by a program per rank. Raises if rows are wrong."""
    size = ranks.world_size
    place = Place(
        ranks, 64 * size + 4 * size * hidden, {f"arrived[{peer}]": peer for peer in range(size)}
    )
    src, dst = payload(ranks.rank, 0, size, hidden), torch.full((size, hidden), -1.0)
    launch = ranks.memory.bind(
        flags_kernel, 1, num_warps=4, R=size, RP=triton.next_power_of_2(size), H=hidden
    )
    launch(
        place.region.addresses.data_ptr(),
        place.state.data_ptr(),
        src.data_ptr(),
        dst.data_ptr(),
        ranks.rank,
    )
    ranks.memory.settle()
    want = torch.stack([payload(peer, 0, size, hidden)[ranks.rank] for peer in range(size)])
    assert torch.equal(dst, want)
