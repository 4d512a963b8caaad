# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""The memory model: what may be seen without synchronisation is seen under some seed, what may not
is not under any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from tokenyard.kernels.sync import words
from tokenyard.testing.simulator import Race, Simulator

SEEDS = range(40)
LANES = 8


@triton.jit
def write(
    mem,
    BARRIER: tl.constexpr,
    OP: tl.constexpr,
    SEM: tl.constexpr,
    SCOPE: tl.constexpr,
    LANES: tl.constexpr,
):
    """A row of sevens behind the flag, which becomes 1."""
    tl.store(words(mem) + 8 + tl.arange(0, LANES), tl.full((LANES,), 7, tl.int64))
    if BARRIER:
        tl.debug_barrier()
    if OP == "add":
        tl.atomic_add(words(mem), 1, sem=SEM, scope=SCOPE)
    elif OP == "xchg":
        tl.atomic_xchg(words(mem), 1, sem=SEM, scope=SCOPE)
    elif OP == "max":
        tl.atomic_max(words(mem), 1, sem=SEM, scope=SCOPE)
    elif OP == "cas":
        tl.atomic_cas(
            words(mem), tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem=SEM, scope=SCOPE
        )
    elif OP == "vector":
        i = tl.arange(0, 4)
        tl.atomic_add(words(mem) + i, tl.full((4,), 1, tl.int64), mask=i < 1, sem=SEM, scope=SCOPE)


@triton.jit
def read(
    mem,
    out,
    want,
    BARRIER: tl.constexpr,
    OP: tl.constexpr,
    SCOPE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Wait for the flag, then copy the row."""
    seen = tl.full((), 0, tl.int64)
    while seen < want:
        if OP == "plain":
            seen = tl.load(words(mem))
        elif OP == "volatile":
            seen = tl.load(words(mem), volatile=True)
        elif OP == "cas":
            seen = tl.atomic_cas(
                words(mem),
                tl.full((), 9, tl.int64),
                tl.full((), 9, tl.int64),
                sem="acquire",
                scope=SCOPE,
            )
        elif OP == "vector":
            seen = tl.max(
                tl.atomic_add(words(mem) + tl.arange(0, 2), 0, sem="acquire", scope=SCOPE)
            )
        else:
            seen = tl.atomic_add(words(mem), 0, sem=OP, scope=SCOPE)
    if BARRIER:
        tl.debug_barrier()
    row = tl.load(words(mem) + 8 + tl.arange(0, LANES))
    tl.store(words(out) + tl.arange(0, LANES), row)


@triton.jit
def pass_on(mem, FROM: tl.constexpr, TO: tl.constexpr, LANES: tl.constexpr):
    """Program 0 writes and tells program 1 with one scope, which tells others with the other."""
    if tl.program_id(0) == 0:
        tl.store(words(mem) + 8 + tl.arange(0, LANES), tl.full((LANES,), 7, tl.int64))
        tl.debug_barrier()
        tl.atomic_add(words(mem) + 1, 1, sem="release", scope=FROM)
    else:
        seen = tl.full((), 0, tl.int64)
        while seen < 1:
            seen = tl.atomic_add(words(mem) + 1, 0, sem="acquire", scope=FROM)
        tl.debug_barrier()
        tl.atomic_add(words(mem), 1, sem="release", scope=TO)


def outcome(out: np.ndarray) -> str:
    return {(0,): "old", (7,): "new"}.get(tuple(np.unique(out)), "torn")


def outcomes(
    writer: dict[str, Any], reader: dict[str, Any], reading_rank: int = 1, **options: Any
) -> set[str]:
    """What the reader saw, over all seeds."""
    found: set[str] = set()
    for seed in SEEDS:
        sim = Simulator(2, seed=seed, **options)
        mem, out = sim.allocate(256), np.zeros(LANES, np.int64)
        if reading_rank == 0:
            sim.launch(
                0, both, 2, mem.ctypes.data, out.ctypes.data, LANES=LANES, SCOPE=writer["SCOPE"]
            )
        else:
            sim.launch(0, write, 1, mem.ctypes.data, LANES=LANES, **writer)
            sim.launch(1, read, 1, mem.ctypes.data, out.ctypes.data, 1, LANES=LANES, **reader)
        sim.run()
        found.add(outcome(out))
    return found


@triton.jit
def both(mem, out, LANES: tl.constexpr, SCOPE: tl.constexpr):
    if tl.program_id(0) == 0:
        write(mem, True, "add", "release", SCOPE, LANES)
    else:
        read(mem, out, 1, True, "acquire", SCOPE, LANES)


RELEASE = {"BARRIER": True, "OP": "add", "SEM": "release", "SCOPE": "sys"}
ACQUIRE = {"BARRIER": True, "OP": "acquire", "SCOPE": "sys"}


@pytest.mark.parametrize("op", ["add", "xchg", "max", "cas", "vector"])
@pytest.mark.parametrize("sem", ["release", "acq_rel"])
def test_a_release_publishes(op: str, sem: str) -> None:
    assert outcomes(RELEASE | {"OP": op, "SEM": sem}, ACQUIRE) == {"new"}


@pytest.mark.parametrize("op", ["acq_rel", "cas", "vector"])
def test_an_acquire_and_a_barrier_see_what_was_released(op: str) -> None:
    assert outcomes(RELEASE, ACQUIRE | {"OP": op}) == {"new"}


@pytest.mark.parametrize(
    "change",
    [{"SEM": "relaxed"}, {"SEM": "acquire"}, {"BARRIER": False}, {"SCOPE": "gpu"}],
    ids=str,
)
def test_without_a_release_of_the_right_kind_stores_may_stay_private_until_the_program_has_ended(
    change: dict[str, Any],
) -> None:
    """The flag is the writer's last operation: its end must not publish for it. Rows may arrive in
    parts.
    """
    assert outcomes(RELEASE | change, ACQUIRE) == {"old", "new", "torn"}


@pytest.mark.parametrize(
    "change",
    [{"OP": "plain"}, {"OP": "volatile"}, {"OP": "relaxed"}, {"BARRIER": False}, {"SCOPE": "gpu"}],
    ids=str,
)
def test_without_an_acquire_of_the_right_kind_loads_may_be_stale(change: dict[str, Any]) -> None:
    found = outcomes(RELEASE, ACQUIRE | change)
    assert {"old", "new"} <= found


def test_loads_are_never_older_than_the_last_acquire() -> None:
    """All hardware that looks back would show it."""
    assert outcomes(RELEASE, ACQUIRE, stale=1.0) == {"new"}


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_gpu_scope_is_enough_on_one_rank(scope: str) -> None:
    assert outcomes(RELEASE | {"SCOPE": scope}, ACQUIRE, reading_rank=0) == {"new"}


@pytest.mark.parametrize(
    ("first", "then", "expected"), [("gpu", "sys", {"new"}), ("gpu", "gpu", {"old", "new"})]
)
def test_who_has_acquired_publishes_for_others(first: str, then: str, expected: set[str]) -> None:
    found: set[str] = set()
    for seed in SEEDS:
        sim = Simulator(2, seed=seed)
        mem, out = sim.allocate(256), np.zeros(LANES, np.int64)
        sim.launch(0, pass_on, 2, mem.ctypes.data, FROM=first, TO=then, LANES=LANES)
        sim.launch(
            1,
            read,
            1,
            mem.ctypes.data,
            out.ctypes.data,
            1,
            BARRIER=True,
            OP="acquire",
            SCOPE="sys",
            LANES=LANES,
        )
        sim.run()
        found.add(outcome(out))
    assert found - {"torn"} == expected


@triton.jit
def read_for_another(mem, out, SCOPE: tl.constexpr, TELL: tl.constexpr, LANES: tl.constexpr):
    """Program 0 waits for another rank and tells program 1, which reads what the other rank has
    written.
    """
    seen = tl.full((), 0, tl.int64)
    if tl.program_id(0) == 0:
        while seen < 1:
            seen = tl.atomic_add(words(mem), 0, sem="acquire", scope=SCOPE)
        tl.atomic_add(words(mem) + 1, 1, sem=TELL, scope="gpu")
    else:
        while seen < 1:
            seen = tl.atomic_add(words(mem) + 1, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        tl.store(words(out) + tl.arange(0, LANES), tl.load(words(mem) + 8 + tl.arange(0, LANES)))


@pytest.mark.parametrize(
    ("scope", "tell", "expected"),
    [
        ("sys", "release", {"new"}),
        ("gpu", "release", {"old", "new"}),
        ("sys", "relaxed", {"old", "new"}),
    ],
)
def test_who_has_acquired_acquires_for_its_rank(scope: str, tell: str, expected: set[str]) -> None:
    found: set[str] = set()
    for seed in SEEDS:
        sim = Simulator(2, seed=seed, stale=0.8)
        mem, out = sim.allocate(256), np.zeros(LANES, np.int64)
        sim.launch(0, write, 1, mem.ctypes.data, LANES=LANES, **RELEASE)
        sim.launch(
            1,
            read_for_another,
            2,
            mem.ctypes.data,
            out.ctypes.data,
            SCOPE=scope,
            TELL=tell,
            LANES=LANES,
        )
        sim.run()
        found.add(outcome(out))
    assert found - {"torn"} == expected


@triton.jit
def fill(mem, value, LANES: tl.constexpr):
    """No barrier, no release. One program per row."""
    row = tl.program_id(0)
    tl.store(
        words(mem) + 8 + row * LANES + tl.arange(0, LANES), tl.full((LANES,), 0, tl.int64) + value
    )


@triton.jit
def double(mem, LANES: tl.constexpr):
    """Every program doubles the row of another program of the kernel before."""
    row = words(mem) + 8 + (tl.num_programs(0) - 1 - tl.program_id(0)) * LANES + tl.arange(0, LANES)
    values = tl.load(row)
    tl.debug_barrier()
    tl.store(row, values * 2)


@triton.jit
def tell(mem, SEM: tl.constexpr):
    tl.debug_barrier()
    tl.atomic_add(words(mem), 1, sem=SEM, scope="sys")


def test_kernels_of_a_rank_run_one_after_the_other_and_see_each_other() -> None:
    for seed in SEEDS:
        sim = Simulator(seed=seed)
        mem = sim.allocate(64 + 4 * 8 * LANES)
        sim.launch(0, fill, 4, mem.ctypes.data, 7, LANES=LANES)
        sim.launch(0, double, 4, mem.ctypes.data, LANES=LANES)
        sim.launch(0, double, 4, mem.ctypes.data, LANES=LANES)
        sim.run()
        assert (mem[64:].view(np.int64) == 28).all()


def test_the_end_of_a_kernel_does_not_publish_to_other_ranks_but_a_later_release_does() -> None:
    found: dict[str, set[str]] = {"release": set(), "relaxed": set()}
    for seed in SEEDS:
        for sem, seen in found.items():
            sim = Simulator(2, seed=seed)
            mem, out = sim.allocate(64 + 8 * LANES), np.zeros(LANES, np.int64)
            sim.launch(0, fill, 1, mem.ctypes.data, 7, LANES=LANES)
            sim.launch(0, tell, 1, mem.ctypes.data, SEM=sem)
            sim.launch(1, read, 1, mem.ctypes.data, out.ctypes.data, 1, LANES=LANES, **ACQUIRE)
            sim.run()
            seen.add(outcome(out))
    assert found["release"] == {"new"}
    assert {"old", "new"} <= found["relaxed"]


@triton.jit
def count_up(mem, n):
    for i in range(1, n + 1):
        tl.store(words(mem) + 8, i.to(tl.int64))
        if i % 3 == 0:
            tl.debug_barrier()


@triton.jit
def watch(mem, out, n):
    for i in range(n):
        tl.store(words(out) + i, tl.atomic_add(words(mem) + 8, 0, sem="relaxed", scope="sys"))


def test_stores_to_one_address_keep_their_order() -> None:
    between = 0
    for seed in SEEDS:
        sim = Simulator(2, seed=seed, early=0.4, switch=0.9)
        mem, out = sim.allocate(128), np.zeros(12, np.int64)
        sim.launch(0, count_up, 1, mem.ctypes.data, 10)
        sim.launch(1, watch, 1, mem.ctypes.data, out.ctypes.data, 12)
        sim.run()
        assert (np.diff(out) >= 0).all(), out
        assert mem[64:72].view(np.int64) == 10
        between += len(set(out.tolist())) > 2
    assert between, "nobody saw a value in between: the test shows nothing"


@triton.jit
def race_kernel(mem, out, BARRIER: tl.constexpr):
    """Program 0 reads a row and says so, program 1 overwrites it then."""
    row = words(mem) + 8 + tl.arange(0, 8)
    if tl.program_id(0) == 0:
        tl.store(words(out) + tl.arange(0, 8), tl.load(row))
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_add(words(mem), 1, sem="release", scope="sys")
    else:
        seen = tl.full((), 0, tl.int64)
        while seen < 1:
            seen = tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        tl.store(row, tl.full((8,), 1, tl.int64))


def test_a_barrier_is_needed_between_reads_and_the_release_that_lets_others_overwrite_them() -> (
    None
):
    found = [str(race) for seed in SEEDS if (race := caught(seed, barrier=False))]
    assert found
    assert all("race_kernel[0]" in text and "race_kernel[1]" in text for text in found)
    assert not any(caught(seed, barrier=True) for seed in SEEDS)


@triton.jit
def again_kernel(mem, BARRIER: tl.constexpr):
    """Adds 1 to a small tensor where it lies."""
    row = words(mem) + tl.arange(0, 8)
    values = tl.load(row)
    if BARRIER:
        tl.debug_barrier()
    tl.store(row, values + 1)


def test_a_barrier_is_needed_before_a_store_to_what_was_loaded() -> None:
    def run(barrier: bool) -> list[int]:
        sim = Simulator(seed=0)
        mem = sim.allocate(64)
        sim.launch(0, again_kernel, 1, mem.ctypes.data, BARRIER=barrier)
        sim.run()
        return mem.view(np.int64).tolist()

    assert run(True) == [1] * 8
    with pytest.raises(
        Race, match=r"again_kernel\[0\] stores to .* which it has read without a barrier"
    ):
        run(False)


def caught(seed: int, barrier: bool) -> Race | None:
    sim = Simulator(seed=seed, early=0.5)
    mem, out = sim.allocate(128), np.zeros(8, np.int64)
    sim.launch(0, race_kernel, 2, mem.ctypes.data, out.ctypes.data, BARRIER=barrier)
    try:
        sim.run()
    except Race as race:
        return race
    assert not out.any()
    return None


def test_planted_writers_and_readers_still_end_when_nothing_is_ever_released() -> None:
    """Hardware finishes its stores in the end."""
    for seed in range(10):
        sim = Simulator(2, seed=seed, early=0.0, late=0.0, stale=0.9)
        mem, out = sim.allocate(128), np.zeros(1, np.int64)
        sim.launch(0, count_up, 1, mem.ctypes.data, 1)
        sim.launch(1, read_plain, 1, mem.ctypes.data, out.ctypes.data)
        sim.run()
        assert out[0] == 1


@triton.jit
def read_plain(mem, out):
    seen = tl.full((), 0, tl.int64)
    while seen < 1:
        seen = tl.load(words(mem) + 8)
    tl.store(words(out), seen)
