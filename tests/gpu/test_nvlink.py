"""Engine nvlink on GPUs: rings that go round, views that end, ranks that die, many calls in a row.
See ``make test-gpu``.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from bad_input import meet
from cases import Case, check_combined, check_received, dispatch, rows_to_combine, skip_without_gpus
from tokenyard import reference
from tokenyard.testing import ROUTINGS, Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu",
        reason="needs GPUs (make test-gpu); the simulator runs these kernels elsewhere",
    ),
]
processes = pytest.mark.skipif(
    DEVICE != "cuda", reason="needs ranks that are processes: make test-gpu"
)
SIZES = {"cuda": (2, 3, 4), "simulated": (2,)}.get(DEVICE, (8,))
TIMEOUT = 2.0


@pytest.mark.parametrize("layout", list(ty.Layout), ids=lambda layout: layout.name.lower())
@distributed_test(world_size=SIZES, engine="nvlink")
def test_a_batch_that_the_rings_cannot_hold(ranks: Ranks, layout: ty.Layout) -> None:
    """16 times more rows than all rings together hold; symmetric memory stays as it was."""
    case = Case(ranks.world_size, num_tokens=1500, hidden=512, num_experts=16, layout=layout)
    small = Case(ranks.world_size, num_tokens=1500, hidden=512, num_experts=16)
    smallest = 16 * (512 * 2 + 256) * ranks.world_size * 64
    with small.make(ranks, buffer_bytes=smallest // 16 * 16) as ep:
        before = ep.buffer_bytes
        check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
        want = reference.combine(case.expert_rows, case.expected)[ranks.rank]
        check_combined(
            ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle),
            case,
            ranks.rank,
            want.x,
        )
        assert ep.buffer_bytes == before


@distributed_test(world_size=SIZES, engine="nvlink")
def test_a_thousand_calls_in_a_row(ranks: Ranks) -> None:
    """Sizes, layouts and payloads change from call to call, ranks come late, and nothing of an
    earlier call shows.
    """
    picks = [
        Case(
            ranks.world_size,
            routing=ROUTINGS[seed % len(ROUTINGS)],
            num_tokens=(1, 40, 7, 120)[seed % 4],
            hidden=72,
            seed=seed,
            layout=list(ty.Layout)[seed % 3],
            exact=seed % 5 != 4,
        )
        for seed in range(20)
    ]
    biggest = Case(ranks.world_size, num_tokens=120, hidden=72)
    sent = [
        (case.x[ranks.rank].to(ranks.device), *(t.to(ranks.device) for t in case.picks[ranks.rank]))
        for case in picks
    ]
    expected: list[torch.Tensor] = []
    with biggest.make(ranks) as ep:
        for case, (x, idx, weights) in zip(picks, sent, strict=True):
            recv = ep.dispatch(x, idx, weights, layout=case.layout, exact=case.exact)
            if case.layout is ty.Layout.FLAT and case.exact:
                check_received(recv, case, ranks.rank)
            expected.append(recv.x.clone())
        torch.cuda.synchronize()
        meet(ranks)  # virtual ranks share one count of bytes: nobody allocates while one reads it
        held = torch.cuda.memory_allocated()
        meet(ranks)
        random = torch.Generator().manual_seed(ranks.rank)
        for call in range(1000):
            at = call % len(picks)
            x, idx, weights = sent[at]
            if torch.rand((), generator=random) < 0.02:
                time.sleep(0.005)
            recv = ep.dispatch(x, idx, weights, layout=picks[at].layout, exact=picks[at].exact)
            valid = recv.source.view(recv.x.shape[:-1]) >= 0
            assert torch.equal(recv.x[valid], expected[at][valid]), call
            got = ep.combine(torch.where(valid.unsqueeze(-1), recv.x, 0), recv.handle)
            again = ep.combine(recv.x, recv.handle)
            assert torch.equal(got, again), call
        ep.check()
        torch.cuda.synchronize()
        del recv, got, again, valid
        meet(ranks)
        assert torch.cuda.memory_allocated() <= held


@processes
@pytest.mark.parametrize("num_sms", [8, 20, 24])
@distributed_test(world_size=SIZES, engine="nvlink")
def test_few_multiprocessors(ranks: Ranks, num_sms: int) -> None:
    """Programs in clusters, beside work on the other multiprocessors: in place, through rings that
    go round, in a CUDA graph.
    """
    case, rank = Case(ranks.world_size, num_tokens=700, hidden=520, num_experts=16), ranks.rank
    want, stream, busy = (
        case.combined(rank).x,
        torch.cuda.Stream(),
        torch.ones(2048, 2048, device=ranks.device),
    )
    x = case.x[rank].to(ranks.device)
    with case.make(ranks, num_sms=num_sms, buffer_bytes=4 << 20) as ep:
        for call in range(6):
            with torch.cuda.stream(stream):
                busy @ busy
            check_received(recv := dispatch(ranks, ep, case, in_place=call % 2 == 0), case, rank)
            rows = rows_to_combine(recv, case, rank)
            got = ep.combine(rows, recv.handle, in_place=call % 2 == 0)
            check_combined(got, case, rank, want, f"call {call}")
            again = ep.dispatch(x, handle=recv.handle).x
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = ep.dispatch(x, handle=recv.handle).x
            back = ep.combine(rows, recv.handle, in_place=True)
        for replay in range(5):
            graph.replay()
            assert torch.equal(again.cpu(), case.expected[rank].x), replay
            check_combined(back, case, rank, want, f"replay {replay}")


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
@distributed_test(world_size=SIZES, engine="nvlink")
def test_rows_left_in_place(ranks: Ranks, exact: bool) -> None:
    for seed, mode in enumerate((None, ty.Quantize.FP8, ty.Quantize.FP8_UE8M0)):
        case = Case(
            ranks.world_size, num_tokens=50, hidden=264, quantize=mode, exact=exact, seed=seed
        )
        with case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case, in_place=True)
            check_received(recv, case, ranks.rank)
            x = case.x[ranks.rank].to(ranks.device)
            again = ep.dispatch(x, handle=recv.handle, quantize=mode, in_place=True)
            num = case.expected[ranks.rank].x.shape[0]
            assert torch.equal(
                again.x[:num].view(torch.uint8).cpu(), case.expected[ranks.rank].x.view(torch.uint8)
            )
            if ranks.device.type == "cuda":
                with pytest.raises(
                    RuntimeError,
                    match="this view of symmetric memory ended with cached dispatch #1",
                ):
                    recv.x.clone()
            again.x[:1].clone()
        if ranks.device.type == "cuda":
            with pytest.raises(RuntimeError, match="its ExpertParallel is closed"):
                again.x[:1].clone()


@distributed_test(world_size=SIZES, engine="nvlink")
def test_rows_of_one_rank_that_rings_cannot_hold(ranks: Ranks) -> None:
    """They are of another dtype, too: all ranks learn of that before a row moves, and go on
    together.
    """
    case = Case(ranks.world_size, hidden=512)
    with case.make(ranks, buffer_bytes=ranks.world_size * 2816) as ep:
        x, (idx, weights) = case.x[ranks.rank].to(ranks.device), case.picks[ranks.rank]
        last = ranks.rank == ranks.world_size - 1
        with pytest.raises(ty.Mismatch, match="dtype"):
            ep.dispatch(x.float() if last else x, idx.to(ranks.device), weights.to(ranks.device))
        check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
        rows = rows_to_combine(recv, case, ranks.rank)
        check_combined(ep.combine(rows, recv.handle), case, ranks.rank, case.combined(ranks.rank).x)
        with pytest.raises(
            ValueError,
            match=r"holds 1 rows of .* make ExpertParallel with buffer_bytes of at least",
        ):
            ep.dispatch(x.float(), idx.to(ranks.device), weights.to(ranks.device))


@distributed_test(world_size=SIZES, engine="nvlink")
def test_a_failure_is_of_the_call_it_was_in(ranks: Ranks) -> None:
    """Ranks disagree in combine #1, which the host may only learn in the next call."""
    case = Case(ranks.world_size)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        rows = torch.zeros_like(recv.x, dtype=torch.float32 if ranks.rank else None)

        def calls() -> None:
            ep.combine(rows, recv.handle)
            ep.check()
            dispatch(ranks, ep, case)

        with pytest.raises(ty.Mismatch, match=r"ranks disagree on dtype \(combine #1\)"):
            calls()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
@distributed_test(world_size=SIZES, engine="nvlink")
def test_rows_summed_in_place(ranks: Ranks, exact: bool) -> None:
    """The view of the dispatch, rows from ``empty_for_combine``, rows from elsewhere on one rank;
    all overwritten at once.
    """
    rank, device = ranks.rank, ranks.device
    for seed, mode in enumerate((None, ty.Quantize.FP8)):
        # Several rounds of a row, as long rows have.
        hidden = 2056 if device.type == "cuda" else 264
        case = Case(
            ranks.world_size, num_tokens=50, hidden=hidden, quantize=mode, exact=exact, seed=seed
        )
        want = case.combined(rank)
        terms = [
            torch.full((case.tokens_of(r), case.hidden), 0.5, dtype=torch.bfloat16)
            for r in range(ranks.world_size)
        ]
        biased = case.combined(rank, bias=terms)
        with case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case, in_place=True)
            rows = rows_to_combine(recv, case, rank)
            view = recv.x if mode is None else ep.empty_for_combine(recv.handle, in_place=True)
            for call in range(4):
                got = ep.combine(view.copy_(rows), recv.handle, in_place=True)
                view.fill_(float("nan"))  # nobody reads it any more
                check_combined(got, case, rank, want.x, f"call {call}")
            view.copy_(rows)
            out, bias = torch.empty_like(want.x, device=device), terms[rank].to(device)
            later = ep.combine(view, recv.handle, in_place=True, bias=bias, out=out, async_op=True)
            assert isinstance(later, ty.Combined)
            later.wait()
            check_combined(out, case, rank, biased.x, "with a bias, later")
            view.copy_(rows)
            mine = rows.clone() if rank == 0 else view
            check_combined(
                ep.combine(mine, recv.handle, in_place=True),
                case,
                rank,
                want.x,
                "rows of rank 0 elsewhere",
            )
            gaps = torch.zeros(len(rows), case.hidden + 3, dtype=rows.dtype, device=device)[
                :, 1:-2
            ].copy_(rows)
            check_combined(
                ep.combine(gaps, recv.handle, in_place=True), case, rank, want.x, "rows with gaps"
            )
            wide = ep.empty_for_combine(recv.handle, torch.float32, in_place=True).copy_(rows)
            got = ep.combine(wide, recv.handle, in_place=True)
            check_combined(got.bfloat16(), case, rank, want.x, "float32")
            dispatch(ranks, ep, case, in_place=True)
            assert torch.equal(wide.nan_to_num(), rows.float().nan_to_num())  # as it was
            ep.check()


@distributed_test(world_size=SIZES, engine="nvlink")
def test_sums_over_the_rows_that_are_read(ranks: Ranks) -> None:
    """``out`` in the very rows that are moved meanwhile, in the view and elsewhere; and over
    another row's term.
    """
    case = Case(ranks.world_size, num_tokens=50, hidden=264)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case, in_place=True)
        rows, tokens = rows_to_combine(recv, case, ranks.rank), case.tokens_of(ranks.rank)
        want = case.combined(ranks.rank)
        own = torch.empty(len(rows) + tokens, case.hidden, dtype=rows.dtype, device=ranks.device)
        for in_place in (True, False):
            for x in (recv.x, own[: len(rows)], own[tokens:]):
                x.copy_(rows)
                out = recv.x[:tokens] if x is recv.x else own[:tokens]
                check_combined(
                    ep.combine(x, recv.handle, in_place=in_place, out=out), case, ranks.rank, want.x
                )
            both = torch.zeros(tokens + 1, case.hidden, dtype=rows.dtype, device=ranks.device)
            got = ep.combine(rows, recv.handle, in_place=in_place, bias=both[1:], out=both[:tokens])
            check_combined(got, case, ranks.rank, want.x)


@distributed_test(world_size=SIZES, engine="nvlink")
def test_what_cannot_be_summed_in_place(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case, layout=ty.Layout.EXPERT_MAJOR)
        with pytest.raises(
            ty.NotSupported,
            match=r"only Layout\.FLAT in place, not EXPERT_MAJOR: use in_place=False",
        ):
            ep.empty_for_combine(recv.handle, in_place=True)
        with pytest.raises(
            ty.NotSupported,
            match=r"only Layout\.FLAT in place, not EXPERT_MAJOR: use in_place=False",
        ):
            ep.combine(recv.x, recv.handle, in_place=True)
    bias = case.x[ranks.rank].to(ranks.device)
    refused = [
        (
            "reduces no weights in place: use in_place=False",
            lambda recv: {"reduce_weights": recv.topk_weights},
        ),
        ("cannot be differentiated", lambda recv: {"bias": bias.clone().requires_grad_()}),
    ]
    for words, change in refused:
        with case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case)
            with pytest.raises((ty.NotSupported, ValueError), match=words):
                ep.combine(recv.x, recv.handle, in_place=True, **change(recv))
    with case.make(ranks) as ep:
        many = 1 if ranks.rank else 13 * ranks.world_size
        last = torch.full((many, case.num_topk), case.num_experts - 1, device=ranks.device)
        recv = ep.dispatch(torch.ones(many, case.hidden, device=ranks.device), last)
        lacks = {
            0: "tokens, but in_place=True has room for max_tokens",
            ranks.world_size - 1: "rows came, but in_place=True has room",
        }
        words = lacks.get(ranks.rank)
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            ep.empty_for_combine(recv.handle, in_place=True)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        extra = {"reduce_weights": recv.topk_weights} if ranks.rank == 0 else {}

        def combine() -> None:
            ep.combine(recv.x, recv.handle, in_place=True, **extra)
            ep.check()  # rows already fly: the others learn of it on the device

        with pytest.raises(
            ty.NotSupported if extra else ty.PeerError,
            match=r"in place|rank 0 refused its side of combine",
        ):
            combine()


@distributed_test(world_size=SIZES, engine="nvlink")
def test_results_of_like_calls_share_no_memory(ranks: Ranks) -> None:
    """From the third on they stand in tables that were made while the call before waited."""
    cases = [Case(ranks.world_size, num_tokens=50, seed=seed) for seed in range(5)]
    with cases[0].make(ranks) as ep:
        received = [dispatch(ranks, ep, case) for case in cases]
        for case, recv in zip(cases, received, strict=True):
            check_received(recv, case, ranks.rank)
        tables = [
            t
            for recv in received
            for t in (recv.x, recv.topk_idx, recv.topk_weights, recv.source)
            if t.numel()
        ]
        assert len({t.untyped_storage().data_ptr() for t in tables}) == len(tables)


@distributed_test(world_size=SIZES, engine="nvlink")
def test_what_cannot_be_left_in_place(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    with case.make(ranks) as ep:
        with pytest.raises(ty.NotSupported, match=r"Layout\.FLAT"):
            dispatch(ranks, ep, case, in_place=True, layout=ty.Layout.EXPERT_MAJOR)
        x = torch.ones(ranks.world_size * 13, case.hidden, device=ranks.device)
        idx = torch.zeros(x.shape[0], case.num_topk, dtype=torch.int64, device=ranks.device)
        with pytest.raises(ValueError, match="room for max_tokens_per_rank=13"):
            ep.dispatch(x, idx, in_place=True)
        check_received(dispatch(ranks, ep, case), case, ranks.rank)


@distributed_test(world_size=SIZES, engine="nvlink")
def test_ranks_in_different_calls_are_told(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    ep = case.make(ranks)
    recv = dispatch(ranks, ep, case)
    if ranks.rank == 0:
        ep.combine(recv.x, recv.handle)
    else:
        ep.dispatch(case.x[ranks.rank].to(ranks.device), handle=recv.handle)
    with pytest.raises(ty.Mismatch, match="ranks disagree on the call"):
        ep.check()
    torch.ones(3, device=ranks.device).sum().item()  # the GPU is as usable as before
    ep.close()


@processes
@pytest.mark.parametrize(
    ("victim", "moment"), [(1, "at once"), (1, "between calls"), (0, "at once"), (1, "in combine")]
)
@distributed_test(
    world_size=tuple(size for size in SIZES if size > 1), engine="nvlink", may_die=(0, 1)
)
def test_survivors_name_a_killed_rank(ranks: Ranks, victim: int, moment: str) -> None:
    """Rank 0 is the one with the store."""
    skip_without_gpus(ranks)
    case = Case(ranks.world_size)
    ep = case.make(ranks, timeout=TIMEOUT)
    check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
    ep.combine(recv.x, recv.handle)
    dist.barrier()
    torch.cuda.synchronize()
    if ranks.rank == victim:
        if moment == "between calls":
            for _ in range(20):
                dispatch(ranks, ep, case)
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        if moment == "in combine":
            ep.combine(recv.x, recv.handle)
            ep.check()
        for _ in range(1000):
            dispatch(ranks, ep, case)

    what = "its" if moment == "in combine" else "its counts"
    with pytest.raises(ty.PeerTimeout, match=f"rank {victim} did not send {what}") as caught:
        go_on()
    assert caught.value.rank == victim
    assert torch.ones(3, device=ranks.device).sum().item() == 3
    with pytest.raises(RuntimeError, match="lost a peer"):
        ep.combine(recv.x, recv.handle)
    ep.close()


@pytest.mark.skipif(DEVICE == "virtual", reason="virtual ranks meet on the host before each launch")
@distributed_test(world_size=SIZES, engine="nvlink")
def test_a_rank_that_stays_away_from_combine(ranks: Ranks) -> None:
    """The message is of that call, not of those queued behind it."""
    case = Case(ranks.world_size)
    ep = case.make(ranks, timeout=TIMEOUT)
    recv = dispatch(ranks, ep, case)

    def go_on() -> None:
        ep.combine(recv.x, recv.handle)
        for _ in range(2):
            ep.dispatch(case.x[ranks.rank].to(ranks.device), handle=recv.handle)
        dispatch(ranks, ep, case, exact=False)
        ep.check()

    if ranks.rank:
        with pytest.raises(
            ty.PeerTimeout, match=r"rank 0 did not send its .*\(combine #1, waiting for"
        ):
            go_on()
    ep.close()


@distributed_test(world_size=SIZES, engine="nvlink")
def test_num_sms_changes_no_bit(ranks: Ranks) -> None:
    case = Case(ranks.world_size, num_tokens=60)
    for num_sms in (1, 2 * ranks.world_size, 20):
        with case.make(ranks, num_sms=num_sms) as ep:
            check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
            want = reference.combine(case.expert_rows, case.expected)[ranks.rank]
            check_combined(
                ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle),
                case,
                ranks.rank,
                want.x,
            )


@pytest.mark.parametrize("layout", list(ty.Layout), ids=lambda layout: layout.name.lower())
@distributed_test(world_size=(*SIZES, 2), engine="nvlink")
def test_combines_with_few_multiprocessors(ranks: Ranks, layout: ty.Layout) -> None:
    """Rows are pushed to a receive buffer while all fit, and go through rings where a rank has more
    tokens than ``max_tokens_per_rank``; the bits are the same."""
    rank = ranks.rank
    case = Case(ranks.world_size, num_tokens=33, hidden=264, layout=layout)
    more = Case(ranks.world_size, num_tokens=40, hidden=264, seed=1)
    with case.make(ranks, num_sms=4) as ep:
        rings = ep.buffer_bytes
        for seed in range(2):
            each = Case(ranks.world_size, num_tokens=33, hidden=264, layout=layout, seed=seed)
            check_received(recv := dispatch(ranks, ep, each), each, rank)
            rows = rows_to_combine(recv, each, rank)
            want = reference.combine(each.expert_rows, each.expected)[rank]
            check_combined(ep.combine(rows, recv.handle), each, rank, want.x)
            if layout is ty.Layout.FLAT:
                given = [row.topk_weights + 0.5 for row in each.expected]
                want = reference.combine(each.expert_rows, each.expected, reduce_weights=given)
                got = ep.combine(rows, recv.handle, reduce_weights=given[rank].to(ranks.device))
                check_combined(got.topk_weights, each, rank, want[rank].topk_weights)
            else:
                want = reference.combine(each.expert_rows, each.expected, weighted=True)
                check_combined(
                    ep.combine(rows, recv.handle, weighted=True), each, rank, want[rank].x
                )
                continue
            check_received(recv := dispatch(ranks, ep, more), more, rank)
            want = reference.combine(more.expert_rows, more.expected)[rank]
            rows = rows_to_combine(recv, more, rank)
            check_combined(ep.combine(rows, recv.handle), more, rank, want.x)
        assert ep.buffer_bytes == rings
