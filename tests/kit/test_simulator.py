# ruff: noqa: E402 (Triton is imported after the check; constants of kernels are written in capitals)
"""The simulator's order, clock, deadlocks, deaths, limits and addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from simulator_kernels import TIMEOUT_SECONDS, ring_body
from tokenyard.kernels.sync import (
    STATE_WORDS,
    STATUS_WORDS,
    TIMEOUT_NS,
    now_ns,
    wait_at_least,
    wait_for_all,
    words,
)
from tokenyard.testing.simulator import (
    Deadlock,
    Livelock,
    ProgramError,
    RanksFailed,
    SimulatedRank,
    Simulator,
    simulate,
)
from tokenyard.testing.simulator.ranks import World


def zeroed_state(sim: Simulator, seconds: float = TIMEOUT_SECONDS) -> tuple[np.ndarray, np.ndarray]:
    """A rank's state for the waits of ``sync``, and its status words."""
    state, status = np.zeros(STATE_WORDS, np.int64), np.zeros(STATUS_WORDS, np.int64)
    sim.register(state, name="state")
    sim.register(status, name="status")
    state[TIMEOUT_NS.value], state[2] = int(seconds * 10**9), status.ctypes.data
    return state, status


# Order


@triton.jit
def tickets(mem, out):
    """Programs draw numbers."""
    tl.store(words(out) + tl.program_id(0), tl.atomic_add(words(mem), 1, sem="relaxed"))
    tl.store(words(out) + tl.num_programs(0) + tl.program_id(0), tl.load(words(mem)))


def draw(seed: int, gap: int = 0) -> tuple[list[int], list[int]]:
    sim = Simulator(2, seed=seed)
    other = np.zeros(gap + 1, np.uint8)  # so that memory lies elsewhere
    mem, outs = sim.allocate(16), [np.zeros(16, np.int64) for _ in range(2)]
    for rank, out in enumerate(outs):
        sim.launch(rank, tickets, 8, mem.ctypes.data, out.ctypes.data)
    sim.run()
    del other
    return sim.trace, [*outs[0].tolist(), *outs[1].tolist()]


def test_one_seed_is_one_schedule() -> None:
    runs = [draw(seed) for seed in range(10)]
    assert runs == [draw(seed, 5000 * seed) for seed in range(10)]
    assert len({tuple(trace) for trace, _ in runs}) == 10
    assert len({tuple(out) for _, out in runs}) > 5
    for _, out in runs:
        assert sorted(out[:8] + out[16:24]) == list(range(16))


def test_one_seed_is_one_schedule_with_host_code() -> None:
    def trace(seed: int) -> list[int]:
        found: list[int] = []

        def body(ranks: Any) -> None:
            ring_body(ranks, n=2, calls=1)
            found[:] = ranks.sim.trace

        simulate(2, body, seed=seed)
        return found

    assert [trace(seed) for seed in range(3)] == [trace(seed) for seed in range(3)]
    assert trace(1) != trace(2)


# Waits


@triton.jit
def meet(mem, out):
    """Each of two programs waits for the other."""
    me = tl.program_id(0)
    tl.atomic_add(words(mem) + me, 1, sem="release", scope="gpu")
    seen = tl.full((), 0, tl.int64)
    while seen < 1:
        seen = tl.atomic_add(words(mem) + 1 - me, 0, sem="acquire", scope="gpu")
    tl.store(words(out) + me, seen)


@triton.jit
def wait_kernel(counters, want, state, out):
    """Program p waits for counter p."""
    p = tl.program_id(0)
    tl.store(words(out) + p, wait_at_least(words(counters) + p, want, state, 7, p + 20, p + 40))


@triton.jit
def work_then_signal(mem, scratch, n):
    for i in range(n):
        before = tl.load(words(scratch) + i)
        tl.debug_barrier()
        tl.store(words(scratch) + i, before + 1)
    tl.debug_barrier()
    tl.atomic_add(words(mem) + 2, 1, sem="release", scope="sys")


@triton.jit
def go_round(mem, out):
    """Poll three counters in turn until the last has changed, and one of them twice per round."""
    seen = tl.full((), 0, tl.int64)
    rounds = tl.full((), 0, tl.int64)
    while seen < 1:
        tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")
        tl.load(words(mem) + 1)
        tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")
        seen = tl.atomic_add(words(mem) + 2, 0, sem="acquire", scope="sys")
        rounds += 1
    tl.store(words(out), rounds)


def test_pollers_sleep_until_something_changes() -> None:
    for seed in range(10):
        sim = Simulator(2, seed=seed, switch=0.9)
        mem, scratch, out = sim.allocate(64), np.zeros(200, np.int64), np.zeros(1, np.int64)
        sim.launch(0, work_then_signal, 1, mem.ctypes.data, scratch.ctypes.data, 200)
        sim.launch(1, go_round, 1, mem.ctypes.data, out.ctypes.data)
        sim.run()
        assert scratch.all() and 1 <= out[0] < 12


@triton.jit
def look_thrice_then_answer(mem, out):
    """Read one word three times, which looks like polling, and only then the one that has
    been set.
    """
    for _ in range(3):
        tl.load(words(mem) + 1)
    tl.store(words(out), tl.atomic_add(words(mem) + 2, 0, sem="acquire", scope="sys"))
    tl.atomic_add(words(mem) + 3, 1, sem="release", scope="sys")


@triton.jit
def store_until_answered(mem, scratch):
    seen = tl.full((), 0, tl.int64)
    while seen < 1:
        tl.store(words(scratch), seen)
        seen = tl.atomic_add(words(mem) + 3, 0, sem="acquire", scope="sys")


def test_who_fell_asleep_wrongly_wakes_beside_others_that_never_rest() -> None:
    for seed in range(4):
        sim = Simulator(2, seed=seed, max_steps=100_000)
        mem, scratch, out = sim.allocate(64), np.zeros(1, np.int64), np.zeros(1, np.int64)
        mem.view(np.int64)[2] = 5
        sim.launch(0, look_thrice_then_answer, 1, mem.ctypes.data, out.ctypes.data)
        sim.launch(1, store_until_answered, 1, mem.ctypes.data, scratch.ctypes.data)
        sim.run()
        assert out[0] == 5


@triton.jit
def read_again_and_again(mem, out, n, m):
    """Nothing changes meanwhile, and nobody else is there."""
    total = tl.full((), 0, tl.int64)
    for _ in range(n):
        total += tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")
        total += tl.load(words(mem) + 1)
    for i in range(m):
        total += tl.load(words(mem) + 2 + i % 4)
    tl.store(words(out), total)


def test_reading_the_same_again_is_no_deadlock() -> None:
    for seed in range(5):
        sim = Simulator(seed=seed)
        mem, out = sim.allocate(64), np.zeros(1, np.int64)
        mem.view(np.int64)[:] = 1
        sim.launch(0, read_again_and_again, 1, mem.ctypes.data, out.ctypes.data, 5, 60)
        sim.run()
        assert out[0] == 10 + 60


def test_a_deadlock_names_every_waiter_its_place_and_what_it_saw() -> None:
    sim = Simulator(2, seed=5)
    mem, out = sim.allocate(64, "mailbox"), np.zeros(2, np.int64)
    state, _ = zeroed_state(sim)
    mem.view(np.int64)[:2] = 3, 4
    sim.name(mem.ctypes.data + 8, 8, "tail[3, 17]")
    sim.launch(1, wait_kernel, 2, mem.ctypes.data, 9, state.ctypes.data, out.ctypes.data)
    with pytest.raises(Deadlock) as caught:
        sim.run()
    text = str(caught.value)
    assert "seed 5" in text and "timeouts=True" in text
    first, second = sorted(line for line in text.splitlines() if "waits at" in line)
    # a waiter also looks whether its rank has run out of time, so the counter stands among what it
    # polls
    assert "rank 1, wait_kernel[0], in wait_at_least" in first
    assert "mailbox + 0x0 saw 3, compared with 9" in first
    assert "rank 1, wait_kernel[1], in wait_at_least" in second
    assert "tail[3, 17] (mailbox + 0x8) saw 4, compared with 9" in second


def test_timeouts_take_simulated_time_only() -> None:
    for seed in range(5):
        sim = Simulator(1, seed=seed, timeouts=True)
        mem, out = sim.allocate(64), np.zeros(2, np.int64)
        state, status = zeroed_state(sim)
        mem.view(np.int64)[:2] = 3, 9
        sim.launch(0, wait_kernel, 2, mem.ctypes.data, 9, state.ctypes.data, out.ctypes.data)
        sim.run()
        assert out.tolist() == [3, 9]
        assert status[:6].tolist() == [1, 7, 20, 40, 9, 3]
        assert TIMEOUT_SECONDS * 10**9 <= sim.now_ns < TIMEOUT_SECONDS * 10**9 + 10**8
        assert sim.steps < 1000


def test_the_earlier_of_two_timeouts_comes_first() -> None:
    sim = Simulator(2, timeouts=True)
    mem, out = sim.allocate(64), np.zeros(2, np.int64)
    (slow, slow_status), (quick, quick_status) = zeroed_state(sim, 40), zeroed_state(sim, 39.9)
    sim.launch(0, wait_kernel, 1, mem.ctypes.data, 9, slow.ctypes.data, out.ctypes.data)
    sim.launch(1, give_and_tell, 1, mem.ctypes.data, quick.ctypes.data, out.ctypes.data)
    sim.run()
    assert out.tolist() == [9, 0]
    assert (slow_status[0], quick_status[0]) == (0, 1)


@triton.jit
def give_and_tell(mem, state, out):
    """Wait in vain, then satisfy the other rank."""
    r = tl.arange(0, 2)
    seen = wait_for_all(words(mem) + 1 + r, tl.full((2,), 5, tl.int64), r < 2, state, 7, r)
    tl.store(words(out) + 1, tl.max(seen))
    tl.debug_barrier()
    tl.atomic_add(words(mem), 9, sem="release", scope="sys")


@triton.jit
def clock(out):
    before = now_ns()
    tl.store(words(out), before)
    tl.store(words(out) + 1, now_ns() - before)


def test_the_clock_goes_on() -> None:
    sim, out = Simulator(), np.zeros(2, np.int64)
    sim.launch(0, clock, 1, out.ctypes.data)
    sim.run()
    assert 0 < out[1] < 1000 and out[0] + out[1] <= sim.now_ns


def test_a_program_that_never_ends_is_given_up() -> None:
    sim = Simulator(max_steps=500)
    mem = sim.allocate(64)
    sim.launch(0, write_for_ever, 1, mem.ctypes.data)
    with pytest.raises(Livelock, match="500"):
        sim.run()


@triton.jit
def write_for_ever(mem):
    i = tl.full((), 0, tl.int64)
    while i >= 0:
        tl.store(words(mem), i)
        i += 1


# Limits, deaths


def test_programs_wait_for_each_other_only_if_all_are_resident() -> None:
    for resident in (None, 2, 1):
        sim = Simulator(resident=resident)
        mem, out = sim.allocate(64), np.zeros(2, np.int64)
        sim.launch(0, meet, 2, mem.ctypes.data, out.ctypes.data)
        if resident == 1:
            with pytest.raises(
                Deadlock,
                match=r"1 of its 2 programs have not started, because 1 others? .*resident=1",
            ):
                sim.run()
        else:
            sim.run()
            assert out.tolist() == [1, 1]


def test_others_start_when_a_program_ends() -> None:
    sim = Simulator(resident=3)
    mem, out = sim.allocate(64), np.zeros(40, np.int64)
    sim.launch(0, tickets, 20, mem.ctypes.data, out.ctypes.data)
    sim.run()
    assert sorted(out[:20].tolist()) == list(range(20))


@pytest.mark.parametrize("step", [0, 5, 40])
def test_a_dead_rank_does_nothing_more(step: int) -> None:
    sim = Simulator(2, seed=3)
    sim.kill(1, at_step=step)
    mem, scratch, out = sim.allocate(64), np.zeros(200, np.int64), np.zeros(1, np.int64)
    sim.launch(0, go_round, 1, mem.ctypes.data, out.ctypes.data)
    sim.launch(1, work_then_signal, 1, mem.ctypes.data, scratch.ctypes.data, 200)
    with pytest.raises(Deadlock, match="rank 1 is dead"):
        sim.run()
    assert not scratch[step + 1 :].any()


@pytest.mark.parametrize("step", [0, 5, 40])
def test_a_frozen_rank_goes_on_where_it_stopped(step: int) -> None:
    """In the middle of a kernel."""
    sim = Simulator(2, seed=3, timeouts=True)
    sim.freeze(1, at_step=step)
    mem, scratch, out = sim.allocate(64), np.zeros(200, np.int64), np.zeros(1, np.int64)
    sim.launch(0, go_round, 1, mem.ctypes.data, out.ctypes.data)
    sim.launch(1, work_then_signal, 1, mem.ctypes.data, scratch.ctypes.data, 200)
    here = SimulatedRank(World(sim), 0)

    def wait_then_thaw() -> int:
        here.wait_until(lambda: False, 1.0, "waits for a second")
        done = int(scratch.sum())
        sim.thaw(1)
        return done

    done, _ = sim.run_hosts([wait_then_thaw, lambda: None])
    assert done <= step + 1
    assert (scratch == 1).all()


def test_survivors_of_a_dead_rank_time_out() -> None:
    """Rank 1 dies before it can have sent or taken all rows: its neighbours say so within the
    timeout.
    """

    def body(ranks: SimulatedRank) -> bool:
        try:
            status = ring_body(ranks, n=6)
        except AssertionError:
            return True
        return status[0] == 1

    for seed in range(4):
        assert simulate(3, body, seed=seed, kill={1: 25}, timeouts=True) == [True, None, True]


# Failures


@triton.jit
def broken(mem):
    tl.static_assert(False, "this kernel is broken")


def test_an_exception_in_a_kernel_names_the_program() -> None:
    sim = Simulator(2, seed=6)
    mem = sim.allocate(64)
    sim.launch(1, broken, 1, mem.ctypes.data)
    with pytest.raises(
        ProgramError, match=r"rank 1, broken\[0\] raised .*this kernel is broken.*seed 6"
    ) as caught:
        sim.run()
    assert isinstance(caught.value.__cause__, AssertionError)


def test_hardware_can_be_chosen() -> None:
    assert Simulator(seed=1, early=0.5, skew="rank").hardware[1::3] == (0.5, "rank")
    assert len({Simulator(seed=seed).hardware for seed in range(20)}) > 10


def test_ranks_that_fail_are_named() -> None:
    def body(ranks: Any) -> None:
        if ranks.rank:
            raise KeyError(f"from {ranks.rank}")

    with pytest.raises(
        RanksFailed,
        match=r"rank 1: KeyError: .*rank 2: KeyError.*seed 4|rank 2: .*rank 1: .*seed 4",
    ) as caught:
        simulate(3, body, seed=4)
    assert set(caught.value.errors) == {1, 2}
    assert isinstance(caught.value.__cause__, KeyError)
