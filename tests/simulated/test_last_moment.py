# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""Waits whose deadline passes about when their counter arrives (``kernels/sync.py``): all is well,
or they end and say why.

Whoever notices that time is up tells all other waits of its rank to stop, so it must give its
reason too: nobody else will. A look that finds everything there notices nothing: it does not ask
for the time.
"""

from __future__ import annotations

import numpy as np
import pytest

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl

from tokenyard.kernels.sync import (
    EXPIRED,
    GIVEN_UP,
    STATE_WORDS,
    STATUS,
    STATUS_WORDS,
    TIMED_OUT,
    TIMEOUT_NS,
    wait_at_least,
    wait_for_all,
    words,
)
from tokenyard.testing.simulator import Simulator

WANT = 5
SEEDS = 40


@triton.jit
def brief_waits(counters, state, out, ALL: tl.constexpr):
    """Programs 0 and 1 wait, for counter 0 (ALL: and 1), until it is 5; program 2 brings it there,
    and further.
    """
    p = tl.program_id(0)
    if p == 2:
        tl.atomic_add(words(counters), 7, sem="release", scope="sys")
    elif ALL:
        r = tl.arange(0, 2)
        seen = wait_for_all(
            words(counters) + r, tl.full((2,), 5, tl.int64), r < 2, state, 7, r + 40
        )
        tl.store(words(out) + p, tl.min(seen))
    else:
        tl.store(words(out) + p, wait_at_least(words(counters), 5, state, 7, 20, 40))


def hurried(seed: int, every: bool) -> tuple[list[int], list[int], bool]:
    """What the waits returned, the status, and whether any was told to stop, if there is hardly any
    time.
    """
    sim = Simulator(1, seed=seed, timeouts=True)
    counters, state, status, out = (
        sim.allocate(64),
        np.zeros(STATE_WORDS, np.int64),
        np.zeros(STATUS_WORDS, np.int64),
        np.zeros(2, np.int64),
    )
    for name, words_of in (("state", state), ("status", status)):
        sim.register(words_of, name=name)
    counters.view(np.int64)[1] = WANT
    state[TIMEOUT_NS.value], state[STATUS.value] = 3 + seed % 8, status.ctypes.data
    sim.launch(
        0,
        brief_waits,
        3,
        counters.ctypes.data,
        state.ctypes.data,
        out.ctypes.data,
        ALL=every,
    )
    sim.run()
    return out.tolist(), status.tolist(), bool(state[EXPIRED.value] or state[GIVEN_UP.value])


@pytest.mark.parametrize("every", [False, True], ids=["one counter", "all counters"])
def test_who_tells_others_to_stop_says_why(every: bool) -> None:
    ended, at_last = 0, 0
    for seed in range(SEEDS):
        found, status, stopped = hurried(seed, every)
        if min(found) >= WANT:
            assert not stopped and not any(status), (seed, status)
            continue
        ended += 1
        assert status[:5] == [TIMED_OUT.value, 7, *((0, 40) if every else (20, 40)), WANT], (
            seed,
            status,
        )
        at_last += max(found) >= WANT or status[5] >= WANT
    assert 0 < at_last < ended < SEEDS, (at_last, ended)
