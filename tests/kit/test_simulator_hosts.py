# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""Host code of simulated ranks, their memory and their store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from tokenyard.errors import Mismatch, PeerTimeout
from tokenyard.kernels.sync import words
from tokenyard.memory.store import CooperativeStore
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.rendezvous import agree
from tokenyard.testing.job import Ranks
from tokenyard.testing.one_process import run_in_simulator
from tokenyard.testing.simulator import (
    AddressError,
    Deadlock,
    RanksFailed,
    SimulatedGroup,
    SimulatedMemory,
    SimulatedRank,
    simulate,
)


@triton.jit
def add_to_all(bases, amount, R: tl.constexpr):
    tl.debug_barrier()
    for rank in range(R):
        tl.atomic_add(words(tl.load(words(bases) + rank)), amount, sem="release", scope="sys")


@triton.jit
def copy_when(mem, want, host, out):
    seen = tl.full((), 0, tl.int64)
    while seen < want:
        seen = tl.atomic_add(words(mem), 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(words(out), seen)
    tl.debug_barrier()
    tl.atomic_xchg(words(host), seen, sem="release", scope="sys")


def test_launches_memory_and_host_words() -> None:
    def body(ranks: SimulatedRank) -> tuple[int, int]:
        memory: SymmetricMemory = ranks.memory
        region, host = memory.allocate(64), memory.host_words(2)
        assert region.local.shape == (64,) and region.local.data_ptr() % 256 == 0
        assert region.addresses[ranks.rank] == region.local.data_ptr()
        with memory.tensors():
            out = torch.zeros(1, dtype=torch.int64)
        add = memory.bind(add_to_all, 2, num_warps=4, R=ranks.world_size)
        copy = memory.bind(copy_when, 1, num_warps=4)
        memory.gate()
        add(region.addresses.data_ptr(), 1 + ranks.rank)
        copy(region.local.data_ptr(), 12, host.data_ptr(), out.data_ptr())
        assert memory.wait_until(lambda: bool(host[0]), 5.0)
        seen = int(host[0])
        memory.settle()
        memory.close()
        return seen, int(out)

    for seed in range(10):
        assert simulate(3, body, seed=seed) == [(12, 12)] * 3


def test_what_was_loaded_behind_the_gate_is_not_launched_there() -> None:
    """On a GPU, ranks that load would hold up those whose programs wait for them."""

    def body(ranks: SimulatedRank) -> None:
        memory: SymmetricMemory = ranks.memory
        region = memory.allocate(64)
        with memory.tensors():
            memory.gate()
            add = memory.bind(add_to_all, 1, num_warps=4, R=1)
            with pytest.raises(AssertionError, match="add_to_all was loaded behind the gate"):
                add(region.addresses.data_ptr(), 1)
            memory.gate()
            add(region.addresses.data_ptr(), 1)
        memory.settle()

    simulate(1, body)


def test_two_memories_of_a_rank_are_different() -> None:
    def body(ranks: SimulatedRank) -> bool:
        other = SimulatedMemory(ranks)
        first, second = ranks.memory.allocate(32), other.allocate(48)
        assert second.local.numel() == 48
        return not set(first.addresses.tolist()) & set(second.addresses.tolist())

    assert simulate(2, body) == [True, True]


def test_ranks_must_ask_for_the_same_size() -> None:
    def body(ranks: SimulatedRank) -> None:
        with pytest.raises(ValueError, match="rank 0 16 bytes, rank 1 32"):
            ranks.memory.allocate(16 * (ranks.rank + 1))
        with pytest.raises(ValueError, match=r"num_bytes \(24\)"):
            ranks.memory.allocate(24)

    simulate(2, body)


def test_a_rank_that_does_not_allocate() -> None:
    def body(ranks: SimulatedRank) -> None:
        if ranks.rank != 1:
            ranks.memory.allocate(16)

    with pytest.raises(Deadlock, match=r"rank 0, host: waits for peers in allocate"):
        simulate(3, body)
    with pytest.raises(
        RanksFailed, match=r"rank 0 waited 30.0 s in allocate\(\) for rank\(s\) \[1\]"
    ) as caught:
        simulate(3, body, timeouts=True)
    assert isinstance(caught.value.__cause__, PeerTimeout)


def test_nobody_may_touch_regions_that_all_ranks_have_closed() -> None:
    """Until then peers may: they return credits to a rank that is done."""

    def body(ranks: SimulatedRank, everybody: bool) -> int:
        region = ranks.memory.allocate(64)
        launch = ranks.memory.bind(add_to_all, 1, num_warps=4, R=2)
        if ranks.rank == 1 or everybody:
            ranks.memory.close()
            ranks.memory.close()
        _meet(ranks, "closed")
        if ranks.rank == 0:
            launch(region.addresses.data_ptr(), 1)
            ranks.memory.settle()
        return int(region.local[0])

    assert simulate(2, lambda ranks: body(ranks, everybody=False))[0] == 1
    with pytest.raises(AddressError, match=r"region 1 of rank [01], which is closed"):
        simulate(2, lambda ranks: body(ranks, everybody=True))


def test_a_grid_must_fit() -> None:
    def body(ranks: SimulatedRank) -> None:
        with pytest.raises(ValueError, match=r"grid \(3\) of copy_when must be at most 2"):
            ranks.memory.bind(copy_when, 3, num_warps=4)

    simulate(1, body, resident=2)


def test_waits_on_the_host_take_simulated_time() -> None:
    def body(ranks: SimulatedRank) -> tuple[bool, float]:
        before = ranks.sim.now_ns
        came = ranks.memory.wait_until(lambda: False, 5.0 + ranks.rank)
        return came, (ranks.sim.now_ns - before) // 10**9

    assert simulate(2, body, timeouts=True) == [(False, 5), (False, 6)]


def test_what_ready_raises_comes_out_of_the_wait() -> None:
    def body(ranks: SimulatedRank) -> None:
        with pytest.raises(ZeroDivisionError):
            ranks.memory.wait_until(lambda: bool(1 // 0), 5.0)

    simulate(2, body)


def test_a_failure_that_makes_others_wait_for_ever_is_told_first() -> None:
    def body(ranks: SimulatedRank) -> None:
        if ranks.rank == 1:
            raise KeyError("the culprit")
        ranks.store.wait(["never"])

    with pytest.raises(
        RanksFailed,
        match=r"rank 1: KeyError: 'the culprit'.*\n.*rank 0, host: waits for 'never' in the store",
    ):
        simulate(2, body)


def test_host_code_is_unwound_at_the_end() -> None:
    unwound: list[int] = []

    def body(ranks: SimulatedRank) -> None:
        try:
            ranks.store.wait(["never"])
        finally:
            unwound.append(ranks.rank)

    with pytest.raises(Deadlock):
        simulate(3, body)
    assert unwound == [0, 1, 2]


class Passed(torch.autograd.Function):
    """Waits for all ranks in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: SimulatedRank, number: int) -> torch.Tensor:
        ctx.ranks, ctx.number = ranks, number
        _meet(ranks, f"forward {number}")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _meet(ctx.ranks, f"backward {ctx.number}")
        return grads[0] * 2 + ctx.ranks.rank, None, None


def _meet(ranks: SimulatedRank, what: str) -> None:
    ranks.store.set(f"{what}/{ranks.rank}", "")
    ranks.store.wait([f"{what}/{peer}" for peer in range(ranks.world_size)])


def test_torch_keeps_its_state_per_rank() -> None:
    """Gradients go on while another rank has them off, and backward passes overlap."""

    def body(ranks: SimulatedRank) -> float:
        with torch.set_grad_enabled(ranks.rank != 0):
            _meet(ranks, "start")
            assert torch.is_grad_enabled() == (ranks.rank != 0)
        x = torch.ones(3, requires_grad=True)
        y = Passed.apply(Passed.apply(x, ranks, 1), ranks, 2)
        assert y.requires_grad
        y.sum().backward()
        return float(x.grad[0])

    for seed in range(5):
        assert simulate(3, body, seed=seed) == [4.0, 7.0, 10.0]


# The store


def test_ranks_agree_through_the_store() -> None:
    def body(ranks: SimulatedRank) -> None:
        store = dist.PrefixStore("object/1", ranks.store)
        agree(store, ranks.rank, ranks.world_size, {"hidden": 64}, "", 5.0)
        with pytest.raises(Mismatch, match="rank 0 says 0, rank 1 says 1"):
            agree(
                dist.PrefixStore("2", store),
                ranks.rank,
                ranks.world_size,
                {"hidden": ranks.rank},
                "",
                5.0,
            )

    for seed in range(5):
        simulate(3, body, seed=seed)


def test_a_rank_that_stays_away_from_the_store() -> None:
    def body(ranks: SimulatedRank) -> None:
        if ranks.rank != 1:
            agree(
                dist.PrefixStore("object", ranks.store), ranks.rank, ranks.world_size, {}, "", 5.0
            )

    with pytest.raises(RanksFailed) as caught:
        simulate(3, body, timeouts=True)
    assert set(caught.value.errors) == {0, 2}
    assert all(isinstance(error, PeerTimeout) for error in caught.value.errors.values())


def test_a_rank_that_tried_alone_keeps_nobody_from_the_next_attempt() -> None:
    def body(ranks: SimulatedRank) -> list[str]:
        group = SimulatedGroup(ranks)
        if ranks.rank == 0:
            with pytest.raises(PeerTimeout):
                agree(group.open_store(), 0, 2, {}, "", 1.0)
        else:
            ranks.wait_until(lambda: False, 5.0, "waits until rank 0 has given up")
        parts = [agree(group.open_store(), ranks.rank, 2, {}, "", 60.0)[0] for _ in range(2)]
        return [part.compare_set("made by", "", f"{ranks.rank}").decode() for part in parts]

    for seed in range(5):
        one, other = simulate(2, body, seed=seed, timeouts=True)
        assert one == other


def test_the_store_is_a_store() -> None:
    now = [0.0]

    def pass_time() -> None:
        now[0] += 0.25

    plain = CooperativeStore(pass_time, lambda: now[0])
    for store in (plain, dist.PrefixStore("p", plain)):
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
        assert store.check(["a", "n"]) and not store.check(["a", "b"])
        assert (store.compare_set("c", "", "x"), store.compare_set("c", "y", "z")) == (b"x", b"x")
        assert store.compare_set("c", "x", "z") == b"z"
        assert store.delete_key("a") and not store.delete_key("a")
        before = now[0]
        with pytest.raises(RuntimeError, match="later"):
            store.wait(["c", "later"], timedelta(seconds=2))
        assert now[0] == before + 2
    assert plain.num_keys() == 4


def test_polling_host_code_lets_others_run() -> None:
    def body(ranks: SimulatedRank) -> int:
        if ranks.rank == 0:
            rounds = 0
            while not ranks.store.check(["done"]):
                ranks.yield_()
                rounds += 1
            return rounds
        ranks.memory.host_words(1)
        for _ in range(5):
            ranks.pause()
        ranks.store.set("done", "")
        return 0

    assert all(simulate(2, body, seed=seed)[0] < 20 for seed in range(5))


def test_host_code_that_polls_for_ever_is_a_deadlock() -> None:
    def body(ranks: SimulatedRank) -> None:
        while True:
            ranks.yield_()

    with pytest.raises(Deadlock, match="rank 0, host: polls"):
        simulate(2, body)


def skip_from(ranks: Ranks, first: int) -> None:
    if ranks.rank >= first:
        pytest.skip("no such grid")


def test_a_skip_must_be_that_of_every_simulated_rank() -> None:
    with pytest.raises(SkipTest, match=r"^no such grid$"):
        run_in_simulator(skip_from, "nvlink", {"first": 0}, 2, 0)
    with pytest.raises(
        RuntimeError, match=r"1 of 2 ranks skipped \(no such grid\), but not every rank did"
    ):
        run_in_simulator(skip_from, "nvlink", {"first": 1}, 2, 0)
