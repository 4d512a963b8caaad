"""Who holds whom up, in which part of a call: a rank that comes late, and one that sends slowly."""

from __future__ import annotations

import time
from typing import Any

from bad_input import Inputs, make, meet
from tokenyard.testing import Ranks, distributed_test

LATE = 0.3
"""Seconds, behind the moment from which the other rank is known to wait."""


@distributed_test(world_size=2)
def test_a_late_rank_is_told_from_a_slow_way(ranks: Ranks) -> None:
    """Rank 1 does one after the other, each time once rank 0 waits for it."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        ep.warmup()
        wire: Any = ep._calls.engine._transport  # pyright: ignore
        exchange = wire.exchange

        def idle(phase: str) -> None:
            while phase not in wire._failures.elsewhere(0, here=True):
                time.sleep(0.01)
            time.sleep(LATE)

        def slow(*given: Any) -> Any:
            idle("dispatch #3, rows")
            return exchange(*given)

        meet(ranks)
        before = ep.stats()
        if ranks.rank == 1:
            idle("dispatch #2, counts")
        ep.dispatch(inputs.x, inputs.topk_idx)
        late = ep.stats()
        if ranks.rank == 1:
            wire.exchange = slow
        ep.dispatch(inputs.x, inputs.topk_idx)
        after = ep.stats()
        counts, rows = "dispatch, counts", "dispatch, rows"
        assert set(after.waits) == {counts, rows, "combine, counts"}  # no rows in warmup's
        assert after.waits[counts][ranks.rank] == after.waits[rows][ranks.rank] == 0.0
        if ranks.rank == 0:
            assert late.waits[counts][1] - before.waits[counts][1] >= LATE
            assert after.waits[rows][1] - late.waits[rows][1] >= LATE
        meet(ranks)
