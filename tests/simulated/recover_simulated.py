"""Ranks that are left go on with engine nvlink, on simulated ranks. Reached through
``nvlink_pool.py``: kernels are interpreted here.

``python tests/run.py recover_simulated death 3 7``: three ranks, seed 7.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from random import Random
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

import tokenyard as ty
from cases import Case, check_combined, check_received, rows_to_combine
from nvlink_mutations import planted
from recovering import Left, ten_good_calls
from tokenyard import header as head
from tokenyard.engines.ring_engine import TwolevelEngine  # bugs are planted in what is imported
from tokenyard.kernels.call_barrier import CallBarrierConfig
from tokenyard.kernels.region import DIRECT_CALLS, EPOCH, TICKETS, signal_table, signal_words
from tokenyard.kernels.stand_in import join_call_kernel, join_plan_kernel
from tokenyard.kernels.sync import STATE_WORDS
from tokenyard.testing import Ranks, poisoned
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, SimulationError, simulate

TIMEOUT = 0.05
"""Simulated seconds."""
TOKENS, HIDDEN = 4, 8
FLAT, MAJOR, PADDED = ty.Layout


def make(here: SimulatedRank, engine: str = "nvlink") -> ty.ExpertParallel:
    """An object with few programs and small rings: they go round."""
    size = here.world_size
    sizes: dict[str, Any] = {"num_experts": 2 * size, "hidden": HIDDEN, "num_topk": 3}
    sizes |= {"num_sms": 2 * size, "buffer_bytes": 1 << 14, "timeout": TIMEOUT}
    if engine == "twolevel":
        sizes |= {"topology": (2, size // 2), "num_sms": 2, "buffer_bytes": 1 << 15}
        sizes["timeout"] = 1.0  # who waits for relayed rows gives up half a second later
    group = SimulatedGroup(here)
    ep = ty.ExpertParallel(group, engine=engine, max_tokens_per_rank=TOKENS, **sizes)
    assert isinstance(ep._calls.engine, TwolevelEngine)  # pyright: ignore
    return ep


def ranks_of(here: SimulatedRank, engine: str = "nvlink") -> Ranks:
    return Ranks(here.rank, here.world_size, here.device, engine, None)


def rounds(ep: ty.ExpertParallel, gone: tuple[int, ...], first: int, count: int) -> None:
    """Calls of every sort, checked."""
    tree = ep.world_size // 2 if ep.engine == "twolevel" else None
    for number in range(first, first + count):
        layout = (FLAT, MAJOR, PADDED)[number % 3]
        case = Left(
            ep.world_size, seed=number, layout=layout, exact=number % 2 == 0, gone=gone,
            num_tokens=TOKENS, hidden=HIDDEN, num_experts=ep.config.num_experts,
        )  # fmt: skip
        idx, weights = case.asked[ep.rank]
        in_place = layout is FLAT and number % 2 == 0
        recv = ep.dispatch(case.x[ep.rank], idx, weights, **case.options, in_place=in_place)
        ep.check()  # else a call that has failed on the device shows in the next one
        check_received(recv, case, ep.rank)
        rows = rows_to_combine(recv, case, ep.rank)
        y = ep.combine(rows, recv.handle, in_place=in_place)
        ep.check()
        want = case.combined(ep.rank, ranks_per_node=tree)
        check_combined(y, case, ep.rank, want.x)
        again = ep.dispatch(case.x[ep.rank], handle=recv.handle)
        ep.check()
        assert torch.equal(again.source, recv.source)


def until_lost(ep: ty.ExpertParallel, gone: tuple[int, ...] = ()) -> ty.PeerTimeout:
    """Calls until a rank is lost."""
    for number in range(1000):
        try:
            rounds(ep, gone, number, 1)
        except ty.PeerTimeout as lost:
            return lost
    raise AssertionError("no rank was lost")


def _play(body: Callable[[SimulatedRank], Any], world_size: int, seed: int) -> list[Any]:
    with poisoned():
        return simulate(world_size, body, seed=seed, timeouts=True, max_steps=3_000_000)


def death(world_size: int, seed: int, engine: str = "nvlink") -> list[Any]:
    """Ranks die at any step, one after the other while two others are left. Who is left at last, as
    each says.
    """
    random = Random(seed)
    victims = random.sample(range(world_size), max(1, world_size - 2))

    def body(here: SimulatedRank) -> list[int]:
        ep = make(here, engine)
        gone: tuple[int, ...] = ()
        for number, victim in enumerate(victims):
            if here.rank == victim:
                here.sim.kill(victim, here.sim.steps + random.randrange(4000))
            lost = until_lost(ep, gone)
            assert lost.rank in (victim, -1), lost
            left = ep.recover()
            gone = tuple(sorted((*gone, victim)))
            assert left == [rank for rank in range(world_size) if rank not in gone]
            assert ep.epoch == number + 1 and ep.engine == "nvlink", ep.why
            if number == len(victims) - 1:
                before = ep.stats()
                ten_good_calls(ranks_of(here), ep, gone, tokens=TOKENS)
                sent, came = ep.stats().rows_sent, ep.stats().rows_received
                for each in gone:  # its sink has room for no row
                    assert sent[each] == before.rows_sent[each]
                    assert came[each] == before.rows_received[each]
                assert sum(sent) > sum(before.rows_sent)
        ep.close()
        return left

    return _play(body, world_size, seed)


def admission(world_size: int, seed: int, engine: str = "nvlink") -> list[Any]:
    """A rank ends between two calls, and another takes its place, whose memory is its first. Then
    one of the others dies at any step. Who is left at last, as each says.
    """
    random = Random(seed)
    victim, other = random.sample(range(world_size), 2)
    calls, at, made = random.randrange(3), "tokenyard/invitation/here", list[int]()

    def newcomer(here: SimulatedRank) -> ty.ExpertParallel:
        here.wait_until(lambda: here.store.check([at]), 1e6, "is not born")
        here.memories = made[0]  # simulated memories are counted, torch's are not
        join = ty.ExpertParallel.join
        with pytest.raises(ValueError, match=f"that is {victim}"):
            join(SimulatedGroup(here), other, "here", timeout=TIMEOUT)
        return join(SimulatedGroup(here), victim, "here", timeout=TIMEOUT)

    def body(here: SimulatedRank) -> list[int]:
        ep, rest = make(here, engine), [rank for rank in range(world_size) if rank != victim]
        rounds(ep, (), 0, calls)
        if here.rank == victim:
            ep = newcomer(here)
        else:
            assert until_lost(ep).rank == victim
            assert ep.recover() == rest
            rounds(ep, (victim,), 0, 2)
            made.append(here.memories)
            ep.admit(victim, "here")
        assert ep.epoch == 2 and ep.engine == "nvlink"
        ten_good_calls(ranks_of(here), ep, (), tokens=TOKENS)
        if here.rank == other:
            here.sim.kill(other, here.sim.steps + random.randrange(4000))
        lost = until_lost(ep)
        assert lost.rank in (other, -1), lost
        left = ep.recover()
        rounds(ep, (other,), 0, 3)
        ep.close()
        return left

    return _play(body, world_size, seed)


def frozen(world_size: int, seed: int) -> list[Any]:
    """A rank freezes between any two of its launches, and wakes among good calls of the others. It
    writes on, into memory of the epoch that it knows, and finds itself left behind.
    """
    random = Random(seed)
    victim, left_over = random.randrange(world_size), random.randrange(3, 40)
    woken: list[bool] = []

    def freeze(here: SimulatedRank, ep: ty.ExpertParallel) -> None:
        memory: Any = ep._calls.engine._memory  # pyright: ignore
        launches = [left_over]

        def gate() -> None:
            launches[0] -= 1
            if launches[0] == 0:
                here.wait_until(lambda: bool(woken), 1e6, "is frozen")

        memory.gate = gate

    def body(here: SimulatedRank) -> list[int]:
        ep = make(here)
        if here.rank == victim:
            freeze(here, ep)
        lost = until_lost(ep)
        if here.rank == victim:
            assert woken
            with pytest.raises(ty.RankExpelled) as caught:
                ep.recover()
            return list(caught.value.survivors)
        assert lost.rank == victim, lost
        left = ep.recover()
        rounds(ep, (victim,), 0, 2)
        woken.append(True)
        here.sim.happened()
        ten_good_calls(ranks_of(here), ep, (victim,), tokens=TOKENS)
        ep.close()
        return left

    found = _play(body, world_size, seed)
    assert found == [[rank for rank in range(world_size) if rank != victim]] * world_size
    return found


def death_in_recovery(seed: int) -> list[Any]:
    """Of four ranks, 2 dies while it recovers from the death of 1: it has voted, and makes no
    memory any more. The others find out, and go on at the second attempt. What they were in when 1
    died has failed on the device only.
    """
    case = Case(4, layout=MAJOR, exact=False, num_tokens=TOKENS, hidden=HIDDEN)

    def body(here: SimulatedRank) -> list[int]:
        ep = make(here)

        def die(*_: Any) -> Any:
            here.sim.kill(2, here.sim.steps)
            here.wait_until(lambda: False, 1e6, "is dead")

        if here.rank == 2:
            ep._choice = ep._choice._replace(again=die)
        if here.rank == 1:
            here.sim.kill(1, here.sim.steps)
        ep.dispatch(case.x[here.rank], *case.picks[here.rank], **case.options)
        with pytest.raises(ty.PeerTimeout) as caught:
            ep.recover()
        assert caught.value.rank == 2
        left = ep.recover()
        assert ep.epoch == 2
        rounds(ep, (1, 2), 0, 3)
        ep.close()
        return left

    found = _play(body, 4, seed)
    assert found == [[0, 3], None, None, [0, 3]], found
    return found


def example() -> None:
    """What the docstring of ``kernels/stand_in.py`` says of rank 0 of three, where 1 is gone."""
    k = CallBarrierConfig(ranks=3, rank_bins=4, channels=2, header_words=90, writers=2)

    def body(here: SimulatedRank) -> None:
        size = 8 * signal_words(3, 2, 90)
        region, state = here.memory.allocate(size), torch.zeros(STATE_WORDS, dtype=torch.int64)
        state[TICKETS.value], state[EPOCH.value], state[DIRECT_CALLS.value] = 2 * 5, 7, 3
        said, absent = torch.arange(100, 190), torch.tensor([0, 1, 0])
        given = [each.data_ptr() for each in (region.addresses, state, absent, said)]
        table, before = signal_table(3, 2, 90), region.local.view(torch.int64).clone()
        want = dict(
            zip(table, before[: sum(table.values())].split(list(table.values())), strict=True)
        )
        here.memory.bind(join_plan_kernel, 1, num_warps=4, k=k)(*given, 77)
        here.memory.bind(join_call_kernel, 1, num_warps=4, k=k)(*given, 88)
        here.memory.settle()
        want["headers"].view(2, 3, 90)[1, 1, : head.STATUS] = said[: head.STATUS]
        want["matrix"].view(2, 3, 5)[1, 1, 3:] = torch.tensor([head.MOST_ROWS, 77])
        want["arrivals"][1], want["entered"][1], want["dones"][1] = 12, 8, 8
        want["tags"].view(2, 3)[1, 1] = 88
        assert torch.equal(region.local.view(torch.int64), before)

    simulate(1, body)


def bug(name: str, seed: int) -> str:
    """What good calls without rank 1 of three say of a stand-in with the bug ``name``."""

    def body(here: SimulatedRank) -> None:
        ep = make(here)
        if here.rank == 1:
            here.sim.kill(1, here.sim.steps)
        until_lost(ep)
        ep.recover()
        ten_good_calls(ranks_of(here), ep, (1,), tokens=TOKENS)
        ep.close()

    try:
        with planted(name):
            _play(body, 3, seed)
    except SimulationError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*map(int, sys.argv[2:])))
