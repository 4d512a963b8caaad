# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""What is taken for waiting, and what is said of those who wait."""

from __future__ import annotations

import numpy as np
import pytest

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from simulator_kernels import ring_body
from tokenyard.kernels.sync import (
    STATE_WORDS,
    STATUS_WORDS,
    TIMEOUT_NS,
    load_acquire,
    now_ns,
    wait_at_least,
    wait_beside,
    wait_for_all,
    words,
)
from tokenyard.testing.simulator import Deadlock, Simulator, simulate

# Loops that end by themselves


@triton.jit
def add_up(mem, out, n, TABLE: tl.constexpr):
    """Reads entries of a table again and again, and stores nothing meanwhile."""
    total = tl.full((), 0, tl.int64)
    for i in range(n):
        total += tl.load(words(mem) + i % TABLE)
    tl.store(words(out), total)


@triton.jit
def poll_at_most(mem, out, most):
    """Looks for a flag that never comes, so many times."""
    tries = tl.full((), 0, tl.int64)
    seen = tl.full((), 0, tl.int64)
    while (seen < 1) & (tries < most):
        seen = load_acquire(words(mem))
        tries += 1
    tl.store(words(out), tries)


@pytest.mark.parametrize(("n", "table"), [(200, 1), (2000, 8), (2500, 1)])
def test_a_loop_that_reads_the_same_is_no_wait(n: int, table: int) -> None:
    for seed in range(3):
        sim = Simulator(seed=seed)
        mem, out = sim.allocate(64), np.zeros(1, np.int64)
        mem.view(np.int64)[:] = 1
        sim.launch(0, add_up, 1, mem.ctypes.data, out.ctypes.data, n, TABLE=table)
        sim.run()
        assert out[0] == n


@pytest.mark.parametrize("timeouts", [False, True])
def test_a_poll_may_count_its_rounds_beside_one_with_a_deadline(timeouts: bool) -> None:
    """The other one waits for its flag meanwhile, and must not time out."""
    for seed in range(3):
        sim = Simulator(2, seed=seed, timeouts=timeouts)
        mem, out = sim.allocate(64), np.zeros(1, np.int64)
        state, status = state_of(sim)
        sim.launch(0, poll_then_tell, 1, mem.ctypes.data, out.ctypes.data)
        sim.launch(1, wait_for_one, 1, mem.ctypes.data + 8, 1, state.ctypes.data)
        sim.run()
        assert out[0] == 200 and status[0] == 0


@triton.jit
def poll_then_tell(mem, out):
    poll_at_most(mem, out, 200)
    tl.debug_barrier()
    tl.atomic_add(words(mem) + 1, 1, sem="release", scope="sys")


def test_who_polls_without_an_end_is_still_a_deadlock() -> None:
    sim = Simulator(seed=1)
    mem, out = sim.allocate(64, "box"), np.zeros(1, np.int64)
    sim.launch(0, poll_at_most, 1, mem.ctypes.data, out.ctypes.data, 10**9)
    with pytest.raises(
        Deadlock,
        match=r"poll_at_most\[0\], in load_acquire, waits at box \+ 0x0 saw 0, compared with 1",
    ):
        sim.run()


def test_who_waits_with_a_deadline_or_beside_one_pays_no_long_patience() -> None:
    sim = Simulator(seed=1)
    mem = sim.allocate(64)
    state, _ = state_of(sim)
    sim.launch(0, wait_together, 2, mem.ctypes.data, state.ctypes.data)
    with pytest.raises(Deadlock):
        sim.run()
    assert sim.steps < 2000


@triton.jit
def tell_behind_three_deadlines(mem, ns):
    for _ in range(3):
        deadline = now_ns() + ns
        while now_ns() < deadline:
            load_acquire(words(mem) + 1)
    tl.debug_barrier()
    tl.atomic_add(words(mem), 1, sem="release", scope="sys")


def test_long_patience_is_had_once_in_a_wait() -> None:
    """Not again whenever the clock jumps for others."""
    sim = Simulator(2, seed=1, timeouts=True)
    mem, out = sim.allocate(64), np.zeros(1, np.int64)
    sim.launch(0, poll_at_most, 1, mem.ctypes.data, out.ctypes.data, 10**9)
    sim.launch(1, tell_behind_three_deadlines, 1, mem.ctypes.data, 10**9)
    sim.run()
    assert out[0] > 3000 and sim.steps < 6000


def test_who_goes_in_a_circle_sleeps_on_while_the_clock_jumps_for_others() -> None:
    """Until what it reads changes, or the clock passes its own deadline. (It took 60,000
    steps when all were woken at each jump.)"""
    sim = Simulator(seed=1, timeouts=True)
    mem = sim.allocate(1024)
    state, status = state_of(sim)
    out = mem.view(np.int64)[2:]
    sim.launch(0, wait_beside_deadlines, 10, mem.ctypes.data, state.ctypes.data)
    sim.run()
    assert status[0] == 0 and out[1:9].tolist() == [1] * 8 and sim.steps < 3000
    assert out[9] == 20 and out[10] in range(9, 12)


@triton.jit
def wait_beside_deadlines(mem, state):
    """Program 0 lets 20 deadlines pass, a second apart, then sets a flag; the last has a deadline
    of 10 s, and says how many had passed by then; the others wait for the flag."""
    pid = tl.program_id(0)
    if pid == 0:
        tell_behind_deadlines(mem, 20)
    elif pid == 9:
        deadline = now_ns() + 10 * 1000 * 1000 * 1000
        while now_ns() < deadline:
            load_acquire(words(mem) + 1)
        passed = tl.atomic_add(words(mem) + 11, 0, sem="relaxed", scope="gpu")
        tl.store(words(mem) + 12, passed)
    else:
        seen = wait_at_least(words(mem), 1, state, 0, 0, 0)
        tl.store(words(mem) + 2 + pid, (seen == 1).to(tl.int64))


@triton.jit
def tell_behind_deadlines(mem, most):
    for _ in range(most):
        deadline = now_ns() + 1000 * 1000 * 1000
        while now_ns() < deadline:
            load_acquire(words(mem) + 1)
        tl.atomic_add(words(mem) + 11, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    tl.atomic_add(words(mem), 1, sem="release", scope="sys")


# What is said


def state_of(sim: Simulator) -> tuple[np.ndarray, np.ndarray]:
    """A rank's state for the waits of ``sync``, and its status words."""
    state, status = np.zeros(STATE_WORDS, np.int64), np.zeros(STATUS_WORDS, np.int64)
    sim.register(state, name="state")
    sim.register(status, name="status")
    state[TIMEOUT_NS.value], state[2] = 30 * 10**9, status.ctypes.data
    return state, status


@triton.jit
def wait_for_one(counter, want, state):
    wait_at_least(words(counter), want, state, 0, 0, 0)


@triton.jit
def wait_in_turn(counter, want, state):
    """A role of a kernel."""
    wait_for_one(counter, want, state)


@triton.jit
def roles_kernel(counter, state):
    if tl.program_id(0) == 0:
        wait_in_turn(counter, 3, state)
    else:
        i = tl.arange(0, 4)
        wait_for_all(words(counter) + i, 5 + i.to(tl.int64), i % 2 == 1, state, 0, i)


@triton.jit
def wait_together(counter, state):
    i = tl.arange(0, 4)
    wants = tl.full((4,), 5, tl.int64)
    if tl.program_id(0) == 0:
        wait_for_all(words(counter) + i, wants, i < 3, state, 0, i)
    else:
        wait_beside(words(counter) + i, wants, i < 3, state)


def test_a_deadlock_names_role_expected_and_seen_of_the_engines_waits() -> None:
    for seed in range(4):
        sim = Simulator(seed=seed)
        mem = sim.allocate(64, "box")
        mem.view(np.int64)[:] = 1
        state, _ = state_of(sim)
        for i in range(4):
            sim.name(mem.ctypes.data + 8 * i, 8, f"tails[{i}]")
        sim.launch(0, roles_kernel, 2, mem.ctypes.data, state.ctypes.data)
        with pytest.raises(Deadlock) as caught:
            sim.run()
        first, second = sorted(
            line for line in str(caught.value).splitlines() if "waits at" in line
        )
        assert "rank 0, roles_kernel[0], in wait_in_turn > wait_for_one > wait_at_least" in first
        assert "tails[0] (box + 0x0) saw 1, compared with 3" in first
        assert "rank 0, roles_kernel[1], in wait_for_all" in second
        assert "tails[1] (box + 0x8) saw 1, compared with 6" in second
        assert "tails[3] (box + 0x18) saw 1, compared with 8" in second
        assert "tails[2]" not in second


def test_a_program_outside_of_device_functions_has_no_role() -> None:
    sim = Simulator()
    mem = sim.allocate(64, "box")
    sim.launch(0, spin_until_different, 1, mem.ctypes.data)
    with pytest.raises(
        Deadlock,
        match=r"rank 0, spin_until_different\[0\] waits at box \+ 0x0 saw 0, compared with 0$",
    ):
        sim.run()


@triton.jit
def spin_until_different(mem):
    seen = tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")
    while seen == 0:
        seen = tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")


def test_a_planted_deadlock_tells_what_its_engine_waits_for() -> None:
    with pytest.raises(
        Deadlock, match=r"in wait_for > wait_at_least.* tail of rank \d .* saw 4, compared with 5"
    ):
        simulate(2, lambda ranks: ring_body(ranks, bug="last chunk dropped"), seed=0)
