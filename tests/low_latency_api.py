"""``ExpertParallel(engine="low_latency")`` on simulated ranks. Reached through ``nvlink_pool.py``: kernels are interpreted here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, rows_to_combine
from test_dispatch_combine import combine_all_ways
from tokenyard import reference
from tokenyard.errors import NotSupported
from tokenyard.testing import Ranks
from tokenyard.testing.simulator import SimulatedRank, simulate
from tokenyard.testing.simulator.group import SimulatedGroup

ENGINE = "low_latency"
MAJOR, PADDED = ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED
ROOM = 1 << 20
"""Bytes of slots that hold rows of float32."""


def on_ranks(world_size: int, seed: int, body: Callable[[Ranks], None]) -> None:
    """Run a test body on simulated ranks."""

    def rank(here: SimulatedRank) -> None:
        body(Ranks(here.rank, world_size, here.device, ENGINE, SimulatedGroup(here)))

    simulate(world_size, rank, seed=seed)


def static(world_size: int, **options: Any) -> Case:
    return Case(world_size, **{"num_tokens": 5, "layout": PADDED, "exact": False, **options})


def shared_body(world_size: int, seed: int, options: dict[str, Any]) -> None:
    """What ``test_dispatch_combine.py`` does with every engine."""
    case = static(world_size, seed=seed, **options)

    def body(ranks: Ranks) -> None:
        with case.make(ranks, buffer_bytes=ROOM, num_sms=2) as ep:
            assert (ep.engine, ep.why.split(":")[0]) == (ENGINE, ENGINE)
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            combine_all_ways(ranks, ep, recv, case)

    on_ranks(world_size, seed, body)


def hooks(seed: int) -> None:
    """A call in two: nothing else may begin before its hook."""
    case = static(2, seed=seed)

    def body(ranks: Ranks) -> None:
        want = reference.combine(case.expert_rows, case.expected, weighted=True)[ranks.rank].x
        with case.make(ranks, num_sms=2) as ep:
            ep.warmup()
            for _ in range(2):
                recv = dispatch(ranks, ep, case, return_hook=True)
                recv.hook()
                check_received(recv, case, ranks.rank)
                rows = rows_to_combine(recv, case, ranks.rank)
                back = ep.combine(rows, recv.handle, weighted=True, return_hook=True)
                with pytest.raises(ValueError, match="the hook of the last combine was not called"):
                    dispatch(ranks, ep, case)
                back.hook()
                check_combined(back.x, case, ranks.rank, want)
            later = dispatch(ranks, ep, case, async_op=True, options=ty.CallOptions(timeout=1.0))
            check_received(later, case, ranks.rank)

    on_ranks(2, seed, body)


def capacity(seed: int) -> None:
    """Rows past the capacity are dropped, counted, and absent from the sums."""
    case, room = static(2, seed=seed, layout=MAJOR, expert_alignment=4, num_tokens=8), 13
    idx = [picks for picks, _ in case.picks]
    want = reference.dispatch(case.x, idx, num_experts=8, layout=MAJOR, expert_alignment=4, capacity=room)
    rows = [
        torch.randn(*each.x.shape, generator=torch.Generator().manual_seed(r)).bfloat16() for r, each in enumerate(want)
    ]

    def body(ranks: Ranks) -> None:
        mine = want[ranks.rank]
        with case.make(ranks, num_sms=2) as ep:
            recv = dispatch(ranks, ep, case, capacity=room)
            assert int(recv.overflow) == mine.overflow > 0
            for name in ("x", "source", "expert_offsets", "tokens_per_expert"):
                assert torch.equal(getattr(recv, name), getattr(mine, name)), name
            got = ep.combine(rows[ranks.rank], recv.handle)
            check_combined(got, case, ranks.rank, reference.combine(rows, want)[ranks.rank].x)

    on_ranks(2, seed, body)


def refusals(seed: int) -> None:
    """What the engine cannot do, and arguments that cannot be; calls go on after each."""
    case = static(2, seed=seed)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotSupported, "not exact=True with Layout.EXPERT_PADDED; engines 'nvlink' and 'collective' have", {"exact": True}),
        (NotSupported, "not exact=False with Layout.FLAT", {"layout": ty.Layout.FLAT}),
        (NotSupported, "engine 'low_latency' has no symmetric memory for in_place=True", {"in_place": True}),
        (ValueError, r"options.waits is torch.int64 \[3\], but must be a contiguous torch.int64 \[2\]",
         {"options": ty.CallOptions(waits=torch.zeros(3, dtype=torch.int64))}),
        (ValueError, "options.timeout", {"options": ty.CallOptions(timeout=-1.0)}),
        (ValueError, "async_op and return_hook", {"async_op": True, "return_hook": True}),
    ]  # fmt: skip

    def body(ranks: Ranks) -> None:
        with case.make(ranks, num_sms=2) as ep:
            for kind, text, options in bad:
                with pytest.raises(kind, match=text):
                    dispatch(ranks, ep, case, **options)
            recv = dispatch(ranks, ep, case)
            check_received(recv, case, ranks.rank)
            with pytest.raises(NotSupported, match="no cached dispatch"):
                ep.dispatch(case.x[ranks.rank], handle=recv.handle)
            rows = rows_to_combine(recv, case, ranks.rank)
            with pytest.raises(ValueError, match=r"do not fit into slots of .* buffer_bytes of at least"):
                ep.combine(rows.float(), recv.handle)
            with pytest.raises(ValueError, match="loads counts rows of a dispatch"):
                ep.combine(rows, recv.handle, options=ty.CallOptions(loads=torch.zeros(4, dtype=torch.int64)))
            combine_all_ways(ranks, ep, recv, case)
            idx = case.picks[ranks.rank][0].clone()
            idx[-1, 0] = 99 if ranks.rank == 1 else idx[-1, 0]
            ep.dispatch(case.x[ranks.rank], idx, layout=PADDED, exact=False)
            if ranks.rank == 1:
                with pytest.raises(ValueError, match=r"topk_idx\[3, 0\] is 99, but there are 8 experts"):
                    ep.check()
            ep.check()
            with pytest.raises(ValueError, match=r"rank \(2\) must be one of the other ranks"):
                ep.mask(2)
            ep.mask(1 - ranks.rank)
            assert ep.active_ranks == [rank == ranks.rank for rank in range(2)]
            assert ep.active_mask.tolist() == [int(rank == ranks.rank) for rank in range(2)]
            ep.unmask(1 - ranks.rank)
            assert ep.active_ranks == [True, True]

    on_ranks(2, seed, body)
