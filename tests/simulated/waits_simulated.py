"""A late rank shows in what the others have waited for, with all engines on kernels, on simulated
ranks. Reached through ``nvlink_pool.py``: kernels are interpreted here.

``python tests/run.py waits_simulated late nvlink 7``: seed 7.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

import tokenyard as ty
from cases import Case, check_received, rows_to_combine
from nvlink_pool import little_patience
from recover_simulated import HIDDEN, TOKENS, make, rounds, until_lost
from tokenyard.kernels.sync import (
    ON_CALL_BARRIER,
    ON_ROWS,
    STATE_WORDS,
    TIMEOUT_NS,
    WAITED,
    lacking,
    look_at_all,
    note_look,
    now_ns,
    still_time,
    wait_at_least,
    wait_for_all,
    words,
)  # fmt: skip
from tokenyard.testing import poisoned
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

LATE = 0.008
"""Simulated seconds."""


def be_late(here: SimulatedRank) -> None:
    """The clock jumps when all wait."""
    here.wait_until(lambda: False, LATE, "is late")


def call(ep: ty.ExpertParallel, number: int, before: Callable[[], None] = lambda: None) -> None:
    """A dispatch and a combine, ``before`` each; through rings and in place by turns."""
    exact = ep.engine != "low_latency"
    case = Case(
        ep.world_size, seed=number, exact=exact, num_tokens=TOKENS, hidden=HIDDEN,
        layout=ty.Layout.FLAT if exact else ty.Layout.EXPERT_PADDED,
        num_experts=ep.config.num_experts,
    )  # fmt: skip
    (idx, weights), in_place = case.picks[ep.rank], exact and number % 2 == 1
    before()
    recv = ep.dispatch(case.x[ep.rank], idx, weights, **case.options, in_place=in_place)
    ep.check()
    check_received(recv, case, ep.rank)
    rows = rows_to_combine(recv, case, ep.rank)
    before()
    ep.combine(rows, recv.handle, in_place=in_place)
    ep.check()


def of_engine(here: SimulatedRank, engine: str) -> ty.ExpertParallel:
    if engine != "low_latency":
        return make(here, engine)
    size = here.world_size
    return ty.ExpertParallel(
        SimulatedGroup(here), engine=engine, max_tokens_per_rank=TOKENS, num_experts=2 * size,
        hidden=HIDDEN, num_topk=3, num_sms=size, timeout=1.0,
    )  # fmt: skip


@triton.jit
def look_for_all(counters, wants, mask, state):
    """As ``wait_for_all``, in turns as those of engine twolevel."""
    r, matrix = tl.arange(0, 4), tl.load(words(state) + WAITED)
    deadline = now_ns() + tl.load(words(state) + TIMEOUT_NS)
    short, live = 1, True
    while (short > 0) & live:
        seen = look_at_all(counters, mask)
        note_look(matrix, ON_CALL_BARRIER, r, words(matrix) - 1 - r, seen < wants, mask)
        short = lacking(seen, wants, mask)
        live = still_time(state, deadline)
        tl.debug_barrier()


@triton.jit
def timed_waits(counters, state, looks: tl.constexpr):
    """For counters of peers 0, 1 and 2 together; then for peer 1 once more; then for one that is
    there."""
    r = tl.arange(0, 4)
    wants = tl.full((4,), 5, tl.int64)
    if looks:
        look_for_all(words(counters) + r, wants, r < 3, state)
    else:
        wait_for_all(words(counters) + r, wants, r < 3, state, ON_CALL_BARRIER, r)
    wait_at_least(words(counters) + 1, 7, state, ON_ROWS, 1, 1)
    wait_at_least(words(counters) + 2, 5, state, ON_ROWS, 2, 2)


@triton.jit
def put(counters, at, value):
    tl.atomic_max(words(counters) + at, value, sem="release", scope="sys")


def one_by_one(looks: bool, seed: int) -> None:
    """Counter 0 is there, 2 comes after 1 ms, 1 after 3 ms, and once more after 6. Steps are few:
    if a look in vain stored something, the clock would go 10 ns with each, and not jump."""

    def body(here: SimulatedRank) -> None:
        region = here.memory.allocate(64)
        if here.rank:
            there = int(region.addresses[0])
            for after, at, value in ((0, 0, 5), (1, 2, 5), (2, 1, 5), (3, 1, 7)):
                here.wait_until(lambda: False, after * 1e-3, "sleeps")
                here.memory.bind(put, 1, num_warps=1)(there, at, value)
            here.memory.settle()
            return
        here.wait_until(lambda: bool(region.local.view(torch.int64)[0] == 5), 1.0, "waits for it")
        state, noted = here.memory.host_words(STATE_WORDS), here.memory.host_words(4 + 4 * 16)
        waits = noted[4:].view(4, 16)
        state[TIMEOUT_NS.value], state[WAITED.value] = 10**9, waits.data_ptr()
        launch = here.memory.bind(timed_waits, 1, num_warps=1, looks=looks)
        launch(int(region.addresses[0]), state.data_ptr())
        here.memory.settle()
        assert not noted[:4].any(), noted  # it waits for nobody
        assert waits[:, ON_ROWS.value].count_nonzero() == 1, waits
        assert waits.count_nonzero() == 3, waits
        call, rows = waits[:, ON_CALL_BARRIER.value], waits[1, ON_ROWS.value]
        assert 0.7e6 < call[2] < 1.5e6 < 2.7e6 < call[1] < 3.5e6, waits
        assert 2.5e6 < rows < 3.5e6, waits

    simulate(2, body, seed=seed, timeouts=True, max_steps=20_000)


def told(ep: ty.ExpertParallel, before: dict[str, list[float]]) -> dict[str, list[float]]:
    """What was waited since ``before``."""
    none = [0.0] * ep.world_size
    return {
        what: [now - then for now, then in zip(seconds, before.get(what, none), strict=True)]
        for what, seconds in ep.stats().waits.items()
    }


def late(engine: str, seed: int) -> None:
    """Rank 1 is late for four calls: it shows under its name, others do not, nor does it in
    another object. Whether a rank ever waits for rows, or for itself, is up to the schedule."""
    for_rows = list[float]()

    def body(here: SimulatedRank) -> None:
        ep, other = of_engine(here, engine), of_engine(here, engine)
        for number in range(2):
            call(ep, number)
        call(other, 0)
        before, beside = ep.stats().waits, other.stats().waits
        for_rows.extend(before.get("rows", []))
        for number in range(2):
            call(ep, number, lambda: be_late(here) if here.rank == 1 else None)
        waits = told(ep, before)
        came = [
            sum(waits[what][rank] for what in waits if what in ("counts", "call"))
            for rank in range(ep.world_size)
        ]
        if here.rank == 1:
            assert max(came) < LATE, waits
        else:
            assert came[1] >= LATE * 3.2, waits
            assert engine == "low_latency" or waits["call"][1] >= LATE * 1.6, waits
            assert all(s < LATE / 2 for rank, s in enumerate(came) if rank != 1), waits
        assert told(other, beside) == {what: [0.0] * ep.world_size for what in beside}
        text = ep.stats().prometheus()
        named = f'seconds_total{{rank="{here.rank}",for="counts",source="1"}}' in text
        assert named or here.rank == 1, text
        ep.close()
        assert told(ep, before) == waits  # it is closed, and says the same
        other.close()

    with poisoned(), little_patience():
        simulate(
            4 if engine == "twolevel" else 3, body, seed=seed, timeouts=True, max_steps=3_000_000
        )
    assert engine == "low_latency" or max(for_rows) > 0, for_rows


def recovered(seed: int) -> None:
    """Totals go on where they were, and who is gone is not waited for any more."""

    def body(here: SimulatedRank) -> None:
        ep = make(here)
        if here.rank == 1:
            here.sim.kill(1, here.sim.steps + 3000)
        until_lost(ep)
        before: Any = ep.stats().waits
        ep.recover()
        since = told(ep, before)
        assert all(s >= 0 for seconds in since.values() for s in seconds), since
        middle = ep.stats().waits
        for number in range(2):
            if here.rank == 2:
                be_late(here)
            rounds(ep, (1,), 2 * number, 1)
        waits = told(ep, middle)
        assert all(seconds[1] == 0.0 for seconds in waits.values()), waits
        assert here.rank == 2 or waits["counts"][2] >= LATE * 1.8, waits
        ep.close()

    with poisoned():
        simulate(3, body, seed=seed, timeouts=True, max_steps=3_000_000)


if __name__ == "__main__":
    numbers = [int(each) if each.isdigit() else each for each in sys.argv[2:]]
    print(globals()[sys.argv[1]](*numbers))
