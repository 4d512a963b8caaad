"""Test bodies of engine low_latency: simulated ranks run them (``low_latency_api.py``), and GPUs
(``test_low_latency_gpu.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, rows_to_combine
from test_dispatch_combine import combine_all_ways
from tokenyard import reference
from tokenyard.errors import NotSupported
from tokenyard.testing import Ranks

ENGINE = "low_latency"
MAJOR, PADDED = ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED
ROOM = 1 << 20
"""Bytes of slots that hold rows of float32."""


def static(world_size: int, **options: Any) -> Case:
    return Case(world_size, **{"num_tokens": 5, "layout": PADDED, "exact": False, **options})


def shared_body(ranks: Ranks, case: Case, num_sms: int | None) -> None:
    """What ``test_dispatch_combine.py`` does with every engine."""
    with case.make(ranks, buffer_bytes=ROOM * ranks.world_size, num_sms=num_sms) as ep:
        assert (ep.engine, ep.why.split(":")[0]) == (ENGINE, ENGINE)
        recv = dispatch(ranks, ep, case)
        check_received(recv, case, ranks.rank)
        combine_all_ways(ranks, ep, recv, case)


def hooks(ranks: Ranks, case: Case, num_sms: int | None) -> None:
    """A call in two: nothing else may begin before its hook."""
    want = case.combined(ranks.rank, weighted=True).x
    with case.make(ranks, num_sms=num_sms) as ep:
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
        later = dispatch(ranks, ep, case, async_op=True, options=ty.CallOptions(timeout=5.0))
        check_received(later, case, ranks.rank)


def capacity(ranks: Ranks, case: Case, num_sms: int | None) -> None:
    """Rows past the capacity are dropped, counted, and absent from the sums. ``case`` has blocks of
    4, and over 13 rows a rank.
    """
    room, idx = 13, [picks for picks, _ in case.picks]
    weights = [given for _, given in case.picks]
    want = reference.dispatch(
        case.x, idx, weights, num_experts=8, layout=MAJOR, expert_alignment=4, capacity=room
    )
    rows = [
        torch.randn(*each.x.shape, generator=torch.Generator().manual_seed(r)).bfloat16()
        for r, each in enumerate(want)
    ]
    mine = want[ranks.rank]
    with case.make(ranks, num_sms=num_sms) as ep:
        recv = dispatch(ranks, ep, case, capacity=room)
        assert int(recv.overflow) == mine.overflow > 0
        for name in ("x", "source", "expert_offsets", "tokens_per_expert"):
            assert torch.equal(getattr(recv, name).cpu(), getattr(mine, name)), name
        got, tree = ep.combine(rows[ranks.rank].to(ranks.device), recv.handle), case.ranks_per_node
        sums = reference.combine(rows, want, ranks_per_node=tree)
        check_combined(got, case, ranks.rank, sums[ranks.rank].x)
        for way in ways_of(case):
            sums = reference.combine(rows, want, ranks_per_node=tree, **way)
            assert any(each.lost_weights.any() for each in sums)
            check_lost(ranks, ep, recv, rows[ranks.rank], case, way, sums[ranks.rank])


def ways_of(case: Case) -> list[dict[str, Any]]:
    """Sums without weights, with those that rode along, and with others of the owners, as the
    oracle takes them.
    """
    return [
        {},
        {"weighted": True},
        {"weighted": True, "topk_weights": [2 * weights for _, weights in case.picks]},
    ]


def check_lost(
    ranks: Ranks,
    ep: ty.ExpertParallel,
    recv: ty.Received,
    rows: torch.Tensor,
    case: Case,
    way: dict[str, Any],
    want: reference.ReferenceCombined,
    *,
    in_two: bool = False,
) -> None:
    """Combine, and see what the sums are and what they lack."""
    here, lost = ranks.device, torch.full((recv.handle.num_tokens,), torch.nan, device=ranks.device)
    given = {
        name: each[ranks.rank].to(here) if name == "topk_weights" else each
        for name, each in way.items()
    }
    options = ty.CallOptions(lost_weights=lost)
    got: Any = ep.combine(rows.to(here), recv.handle, return_hook=in_two, options=options, **given)
    if in_two:
        got.hook()
    check_combined(got.x if in_two else got, case, ranks.rank, want.x)
    check_combined(lost, case, ranks.rank, want.lost_weights, "lost weights")


def by_column(ranks: Ranks, case: Case, num_sms: int | None) -> None:
    """Scales by column, in one launch and in two, and where autograd looks on; the others of a
    group need not ask for them.
    """
    rank, here, options = ranks.rank, ranks.device, ty.CallOptions(scales_by_column=True)
    local, rows = case.expected[rank].tokens_per_expert.numel(), ranks.world_size * case.num_tokens
    with case.make(ranks, num_sms=num_sms) as ep:

        def check(recv: ty.Received) -> None:
            check_received(recv, case, rank)
            scales = recv.scales
            assert (
                scales is not None
                and scales.shape[:2] == (local, rows)
                and scales.transpose(1, 2).is_contiguous()
            )
            columns = scales.shape[2]
            assert scales.stride() == (columns * rows, 1, rows) or columns == 1
            if rows and recv.x.dtype is torch.float8_e4m3fn and scales.dtype is torch.float32:
                valid = recv.source >= 0
                by_row = ty.formats.dequantize(
                    recv.x[valid], scales[valid].contiguous(), torch.float32
                )
                assert torch.equal(recv.dequantize(torch.float32)[valid], by_row)

        check(dispatch(ranks, ep, case, options=options))
        hooked = dispatch(ranks, ep, case, return_hook=True, options=options)
        ahead = hooked.ahead.scales
        hooked.hook()
        assert hooked.scales is ahead
        check(hooked)
        recv = dispatch(ranks, ep, case, **({"options": options} if rank % 2 else {}))
        check_received(recv, case, rank)
        assert recv.scales is not None and (rank % 2 or recv.scales.is_contiguous())
        if case.quantize is not None:
            x = case.x[rank].to(here).requires_grad_()
            idx, weights = (each.to(here) for each in case.picks[rank])
            for later in (False, True):
                check(ep.dispatch(x, idx, weights, **case.options, async_op=later, options=options))
        for peer in set(range(ranks.world_size)) - {rank}:
            ep.mask(peer)
        alone, by_row = dispatch(ranks, ep, case, options=options), dispatch(ranks, ep, case)
        valid = by_row.source >= 0
        assert (
            torch.equal(alone.source, by_row.source) and (by_row.source[valid] >> 32 == rank).all()
        )
        assert alone.scales is not None and by_row.scales is not None
        assert torch.equal(alone.scales[valid], by_row.scales[valid])


def left_out(ranks: Ranks, case: Case, num_sms: int | None) -> None:
    """Sums lack nothing; then what a rank would have added that is left out by hand, before a
    combine, and before a dispatch.
    """
    rank, size, tree = ranks.rank, ranks.world_size, case.ranks_per_node
    gone = [{size - 1} if owner < size - 1 else set(range(size - 1)) for owner in range(size)]
    last = set(range(size - (tree or 1), size))  # the node without a rail for those on it
    railed = {peer for peer in set(range(size)) - last if tree and (peer + 1) % tree == 0}
    silent = [last if owner in railed else gone[owner] for owner in range(size)]
    rows = [each.x for each in case.expected]  # experts that change nothing
    with case.make(ranks, num_sms=num_sms) as ep:
        recv = dispatch(ranks, ep, case)

        def back(recv: ty.Received, absent: list[set[int]], in_two: int) -> None:
            for at, way in enumerate(ways_of(case)):
                given = {"absent": absent, "ranks_per_node": tree, **way}
                want = reference.combine(rows, case.expected, **given)
                assert any(each.lost_weights.any() for each in want) == (absent is silent)
                check_lost(ranks, ep, recv, recv.x, case, way, want[rank], in_two=at == in_two)

        back(recv, [set()] * size, 1)
        for peer in gone[rank]:
            ep.mask(peer)
        back(recv, silent, 1)
        recv = dispatch(ranks, ep, case)
        came = {source >> 32 for source in recv.source.flatten().tolist() if source >= 0}
        assert not came & (gone[rank] | (railed if rank in last else set()))
        back(recv, silent, 2)


def refusals(ranks: Ranks, case: Case, num_sms: int | None) -> None:
    """What the engine cannot do, and arguments that cannot be; calls go on after each. Two
    ranks.
    """
    here = ranks.device
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (
            NotSupported,
            "not exact=True with Layout.EXPERT_PADDED; engines 'nvlink' and 'collective' have",
            {"exact": True},
        ),
        (NotSupported, "not exact=False with Layout.FLAT", {"layout": ty.Layout.FLAT}),
        (
            NotSupported,
            "engine 'low_latency' has no symmetric memory for in_place=True",
            {"in_place": True},
        ),
        (
            ValueError,
            r"options.waits is torch.int64 \[3\], but must be a contiguous torch.int64 "
            r"\[2\]",
            {"options": ty.CallOptions(waits=torch.zeros(3, dtype=torch.int64, device=here))},
        ),
        (ValueError, "options.timeout", {"options": ty.CallOptions(timeout=-1.0)}),
        (
            ValueError,
            "options.lost_weights tells what the sums of a combine lack: leave it out of "
            "a dispatch",
            {"options": ty.CallOptions(lost_weights=torch.zeros(5, device=here))},
        ),
        (
            ValueError,
            "needs scales and Layout.EXPERT_PADDED, but this dispatch has no scales",
            {"options": ty.CallOptions(scales_by_column=True)},
        ),
        (
            ValueError,
            "needs scales and Layout.EXPERT_PADDED, but this dispatch has Layout.EXPERT_MAJOR",
            {
                "options": ty.CallOptions(scales_by_column=True),
                "layout": MAJOR,
                "quantize": ty.Quantize.FP8,
            },
        ),
        (
            ValueError,
            "but this dispatch has Layout.EXPERT_PADDED and scales of torch.float8_e8m0fnu",
            {
                "options": ty.CallOptions(scales_by_column=True),
                "quantize": ty.Quantize.MXFP8,
            },
        ),
        (
            ValueError,
            r"options.loads is torch.float32 \[4\], but must be a contiguous torch.int64 "
            r"or torch.int32 \[4\]",
            {"options": ty.CallOptions(loads=torch.zeros(4, device=here))},
        ),
        (ValueError, "async_op and return_hook", {"async_op": True, "return_hook": True}),
    ]
    with case.make(ranks, num_sms=num_sms) as ep:
        for kind, text, options in bad:
            with pytest.raises(kind, match=text):
                dispatch(ranks, ep, case, **options)
        recv = dispatch(ranks, ep, case)
        check_received(recv, case, ranks.rank)
        with pytest.raises(NotSupported, match="no cached dispatch"):
            ep.dispatch(case.x[ranks.rank].to(here), handle=recv.handle)
        rows = rows_to_combine(recv, case, ranks.rank)
        with pytest.raises(
            ValueError, match=r"do not fit into slots of .* buffer_bytes of at least"
        ):
            ep.combine(rows.float(), recv.handle)
        loads = torch.zeros(4, dtype=torch.int64, device=here)
        with pytest.raises(ValueError, match="loads counts rows of a dispatch"):
            ep.combine(rows, recv.handle, options=ty.CallOptions(loads=loads))
        with pytest.raises(ValueError, match="scales_by_column arranges what a dispatch brings"):
            ep.combine(rows, recv.handle, options=ty.CallOptions(scales_by_column=True))
        lost = torch.zeros(recv.handle.num_tokens + 1, device=here)
        with pytest.raises(
            ValueError,
            match=r"options.lost_weights is torch.float32 \[\d\], but must be a contiguous",
        ):
            ep.combine(rows, recv.handle, options=ty.CallOptions(lost_weights=lost))
        combine_all_ways(ranks, ep, recv, case)
        idx = case.picks[ranks.rank][0].clone()
        idx[-1, 0] = 99 if ranks.rank == 1 else idx[-1, 0]
        ep.dispatch(case.x[ranks.rank].to(here), idx.to(here), layout=PADDED, exact=False)
        if ranks.rank == 1:
            with pytest.raises(
                ValueError, match=r"topk_idx\[3, 0\] is 99, but there are 8 experts"
            ):
                ep.check()
        ep.check()
        with pytest.raises(ValueError, match=r"rank \(2\) must be one of the other ranks"):
            ep.mask(2)
        for wrong in (
            True,
            float(1 - ranks.rank),
            str(1 - ranks.rank),
            torch.tensor(1 - ranks.rank),
        ):
            with pytest.raises(
                ValueError, match=r"rank \(.*\) must be one of the other ranks, 0\.\.1"
            ):
                ep.mask(wrong)
        ep.mask(np.int64(1 - ranks.rank))
        assert ep.active_ranks == [rank == ranks.rank for rank in range(2)]
        assert ep.active_mask.tolist() == [int(rank == ranks.rank) for rank in range(2)]
        ep.unmask(1 - ranks.rank)
        assert ep.active_ranks == [True, True]
