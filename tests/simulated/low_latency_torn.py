"""A far rank that is given up just as its rows come, and is back before the combine. Reached
through ``nvlink_pool.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from low_latency_failures import TIMEOUT, WAYS, case_of, life, meet, play, sum_up, sums_of
from low_latency_ranks import RankRun
from tokenyard.testing.simulator.network import Message

PRESENT = ((0,), (1,), (0, 1), ())
"""Ranks whose parts a sum may have."""


def late_rows(seed: int) -> bool:
    """Rank 1 waits for rank 0's rows in vain. As soon as a program of it has left rank 0 out, they
    are there: others still take them. Whether some rows came, but not all.
    """
    scenario = replace(life(2, seed, 1), network=True, num_experts=2)
    case, way = case_of(scenario, seed, 0), WAYS[seed % 3]
    engines: dict[int, Any] = {}
    kept: list[Message] = []
    torn: list[bool] = []

    def hold(mine: RankRun) -> None:
        """Messages of rows wait."""
        network, sizes = mine.ranks.sim.network, mine.engine._workspace.sizes
        put = network.put_signal

        def put_signal(*args: int) -> None:
            put(*args)
            message = network.on_way[-1]
            word = (message.signal - network.regions[0][0][message.to]) // 8
            if message.to == 1 and word == sizes.region.arrivals + 4:  # half 1, rank 0, rows
                kept.append(network.on_way.pop())

        network.put_signal = put_signal

    def body(mine: RankRun) -> None:
        rank, network = mine.rank, mine.ranks.sim.network
        engines[rank] = mine.engine
        if rank == 0:
            hold(mine)
        meet(mine.ranks, "begin")
        recv = mine.dispatch(case)
        if rank == 0:
            mine.ranks.wait_until(
                lambda: not engines[1].active[0], 1000 * TIMEOUT, "waits to be given up"
            )
            del network.put_signal
            network.on_way += kept
            while any(message in network.on_way for message in kept):
                network.deliver_one()
        meet(mine.ranks, "back")
        with mine.own:
            mine.engine.mask(1 - rank, active=True)
        meet(mine.ranks, "go on")
        lost = torch.empty(recv.handle.num_tokens)
        got = sum_up(mine, recv, case, way, seed % 2 == 1, lost)
        for token, bits in enumerate(got.view(torch.int16)):
            sums = [sums_of(case, way, present)[rank] for present in PRESENT]
            assert any(
                torch.equal(bits, each.x[token].view(torch.int16))
                and lost[token] == each.lost_weights[token]
                for each in sums
            ), f"rank {rank}: token {token} is {got[token]} and lacks {lost[token]}"
        if rank == 1:
            came = [int(((each.source >> 32) == 0).sum()) for each in (recv, case.expected[1])]
            torn.append(0 < came[0] < came[1])

    play(scenario, body, seed)
    assert kept
    return torn[0]
