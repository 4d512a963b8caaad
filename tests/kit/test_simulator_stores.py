# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""Stores at the end of a program, and stores to what the program has loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from tokenyard.kernels.sync import words
from tokenyard.testing.simulator import Race, SimulatedRank, Simulator, simulate

LANES = 8

# The last store of a program


@triton.jit
def flag_at_the_end(mem, RELEASE: tl.constexpr, LANES: tl.constexpr):
    """Each program writes a row, and then its flag: by a plain store if not RELEASE, which is
    wrong.
    """
    p = tl.program_id(0)
    row = words(mem) + 8 + p * LANES + tl.arange(0, LANES)
    tl.store(row, tl.full((LANES,), 7, tl.int64))
    tl.debug_barrier()
    if RELEASE:
        tl.atomic_xchg(words(mem) + p, 1, sem="release", scope="sys")
    else:
        tl.store(words(mem) + p, 1)


@triton.jit
def read_behind_flag(mem, out, LANES: tl.constexpr):
    """Right: each program waits for its flag, then copies its row."""
    p = tl.program_id(0)
    seen = tl.full((), 0, tl.int64)
    while seen < 1:
        seen = tl.atomic_add(words(mem) + p, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    i = p * LANES + tl.arange(0, LANES)
    tl.store(words(out) + i, tl.load(words(mem) + 8 + i))


@triton.jit
def both_sides(mem, out, RELEASE: tl.constexpr, LANES: tl.constexpr):
    """Program 0 reads in the launch that program 1 writes in."""
    if tl.program_id(0) == 0:
        read_behind_flag(mem, out, LANES)
    else:
        tl.store(words(mem) + 8 + tl.arange(0, LANES), tl.full((LANES,), 7, tl.int64))
        tl.debug_barrier()
        if RELEASE:
            tl.atomic_xchg(words(mem), 1, sem="release", scope="sys")
        else:
            tl.store(words(mem), 1)


def seeds_that_find(release: bool, grid: int) -> list[int]:
    """Of 40 seeds, those under which rows are wrong. ``grid`` 0: both sides in one launch."""
    found: list[int] = []
    for seed in range(40):
        sim = Simulator(2, seed=seed)
        mem, out = sim.allocate(512), np.zeros(4 * LANES, np.int64)
        at = (mem.ctypes.data, out.ctypes.data)
        if grid:
            sim.launch(0, flag_at_the_end, grid, at[0], RELEASE=release, LANES=LANES)
            sim.launch(1, read_behind_flag, grid, *at, LANES=LANES)
        else:
            sim.launch(0, both_sides, 2, *at, RELEASE=release, LANES=LANES)
        sim.run()
        if (out[: max(grid, 1) * LANES] != 7).any():
            found.append(seed)
    return found


@pytest.mark.parametrize("grid", [1, 4, 0])
def test_a_flag_that_is_stored_last_is_no_release(grid: int) -> None:
    assert not seeds_that_find(True, grid)
    found = seeds_that_find(False, grid)
    assert found and found[0] < 15, found


# Stores to what was loaded


@triton.jit
def add_in_place(mem, n, SHIFT: tl.constexpr, LANES: tl.constexpr, RELEASE: tl.constexpr = False):
    """Adds 1 to ``n`` numbers where they lie; with SHIFT each thread stores to what another one has
    loaded.
    """
    i = tl.arange(0, LANES)
    values = tl.load(words(mem) + 8 + i, mask=i < n)
    if RELEASE:
        tl.atomic_add(words(mem), 1, sem="release", scope="sys")
    tl.store(words(mem) + 8 + i - SHIFT, values + 1, mask=(i < n + SHIFT) & (i >= SHIFT))


def race(
    lanes: int, n: int | None = None, shift: int = 0, release: bool = False, **options: Any
) -> bool:
    """Whether it is refused; otherwise all numbers have become 1."""
    sim = Simulator(seed=0)
    mem = sim.allocate(64 + 8 * lanes)
    count = lanes if n is None else n
    sim.launch(
        0,
        add_in_place,
        1,
        mem.ctypes.data,
        count,
        SHIFT=shift,
        LANES=lanes,
        RELEASE=release,
        **options,
    )
    try:
        sim.run()
    except Race:
        return True
    assert (mem.view(np.int64)[8 : 8 + count] == 1).all() and not mem.view(np.int64)[
        8 + count :
    ].any()
    return False


def test_each_thread_may_store_to_what_it_alone_has_loaded() -> None:
    assert not race(1024)
    assert not race(1024, release=True)
    assert not race(128) and race(64)
    assert not race(64, num_warps=2) and race(128, num_warps=8)


def test_a_masked_tail_is_as_wide_as_its_tensor() -> None:
    assert not race(1024, n=5)
    assert race(64, n=5)


def test_other_threads_lanes_stay_a_race() -> None:
    assert race(1024, shift=1)
    assert race(1024, n=4, shift=4), "the same places, loaded and stored by other lanes"


@triton.jit
def add_twice_over(mem, LANES: tl.constexpr, SAME: tl.constexpr, FOLD: tl.constexpr):
    i = tl.arange(0, LANES)
    if FOLD == 1:
        values = tl.load(words(mem) + i)
    else:
        i = i % FOLD
        values = tl.load(words(mem) + i)
    if not SAME:
        values += tl.load(words(mem) + tl.arange(0, 2 * LANES) % LANES).to(tl.int64).sum() * 0
    tl.store(words(mem) + i, values + 1)


@pytest.mark.parametrize(
    ("same", "fold", "refused"), [(True, 1, False), (False, 1, True), (True, 4, True)]
)
def test_a_place_that_another_lane_has_loaded_too_stays_a_race(
    same: bool, fold: int, refused: bool
) -> None:
    sim = Simulator(seed=0)
    mem = sim.allocate(8 * 256)
    sim.launch(0, add_twice_over, 1, mem.ctypes.data, LANES=256, SAME=same, FOLD=fold)
    if refused:
        with pytest.raises(Race, match=r"add_twice_over\[0\] stores to"):
            sim.run()
    else:
        sim.run()


def test_bound_kernels_pass_their_warps_on() -> None:
    def body(ranks: SimulatedRank, num_warps: int) -> None:
        region = ranks.memory.allocate(64 + 8 * 128)
        launch = ranks.memory.bind(add_in_place, 1, num_warps=num_warps, SHIFT=0, LANES=128)
        launch(region.local.data_ptr(), 128)
        ranks.memory.settle()

    simulate(1, lambda ranks: body(ranks, 4))
    with pytest.raises(Race):
        simulate(1, lambda ranks: body(ranks, 8))
