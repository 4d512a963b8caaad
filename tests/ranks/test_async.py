"""Calls that return before they are done: results, order, gradients, hooks and the limit on how
many may be open.
"""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moe
import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, rows_to_combine
from test_dispatch_combine import ENGINES, layouts, shapes
from test_gradients import Layer, check_grads
from tokenyard.call_queue import MAX_OUTSTANDING
from tokenyard.testing import Ranks, distributed_test


@pytest.mark.parametrize("how", [{"async_op": True}, {"return_hook": True}], ids=["async", "hook"])
@shapes
@layouts
@distributed_test(world_size=(1, 3), engine=ENGINES)
def test_results_are_those_of_a_waiting_call(
    ranks: Ranks, layout: ty.Layout, exact: bool, how: dict[str, bool]
) -> None:
    case = Case(ranks.world_size, layout=layout, exact=exact)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case, **how)
        recv.hook() if "return_hook" in how else recv.wait()
        check_received(recv, case, ranks.rank)
        later = ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle, **how)
        want = case.combined(ranks.rank)
        check_combined(later.x, case, ranks.rank, want.x)  # reading waits
        later.wait()


def pickled(result: Any) -> Any:
    """What a file would give back."""
    return pickle.loads(pickle.dumps(result))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@distributed_test(world_size=2)
def test_a_copy_is_of_the_result(ranks: Ranks, copied: Any) -> None:
    """Of a result that nobody has waited for."""
    case = Case(ranks.world_size, num_tokens=20)
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case, async_op=True)
        for each in (copied(recv), recv):
            check_received(each, case, ranks.rank)
        rows = rows_to_combine(recv, case, ranks.rank)
        later = ep.combine(rows, recv.handle, async_op=True)
        want = case.combined(ranks.rank)
        for sums in (copied(later), later):
            check_combined(sums.x, case, ranks.rank, want.x)


@distributed_test(world_size=2)
def test_threads_that_read_one_result(ranks: Ranks) -> None:
    """One of them finishes the call, the others wait for that."""
    case = Case(ranks.world_size, num_tokens=20)
    with case.make(ranks) as ep, ThreadPoolExecutor(3) as pool:
        if ranks.rank:
            time.sleep(0.3)  # they wait on rank 0 by now
        recv = dispatch(ranks, ep, case, async_op=True)
        read = [pool.submit(lambda: recv.x) for _ in range(3)]
        check_received(recv, case, ranks.rank)
        assert all(each.result() is recv.x for each in read)


@distributed_test(world_size=3, engine=ENGINES)
def test_two_batches_overlap(ranks: Ranks) -> None:
    """Two dispatches in flight, then a combine of each and a waiting call between: all in program
    order on every rank.
    """
    cases = [Case(ranks.world_size, seed=seed, num_tokens=20) for seed in range(2)]
    third = Case(ranks.world_size, seed=9, num_tokens=20, routing="zipf")
    with cases[0].make(ranks) as ep:
        for _ in range(5):
            received = [dispatch(ranks, ep, case, async_op=True) for case in cases]
            check_received(dispatch(ranks, ep, third), third, ranks.rank)
            combined = []
            for recv, case in zip(received, cases, strict=True):
                check_received(recv, case, ranks.rank)
                combined.append(
                    ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle, async_op=True)
                )
            for later, case in reversed(list(zip(combined, cases, strict=True))):
                want = case.combined(ranks.rank)
                check_combined(later.x, case, ranks.rank, want.x)


@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_asynchronous_calls_are_differentiable(ranks: Ranks, layout: ty.Layout) -> None:
    case = Case(ranks.world_size, dtype=torch.float32, layout=layout)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        recv = ep.dispatch(layer.x, layer.idx, layer.weights, layout=layout, async_op=True)
        weighted = layout is not ty.Layout.FLAT
        rows = moe.grouped(recv, layer.experts) if weighted else moe.flat(recv, layer.experts)
        later = ep.combine(rows, recv.handle, weighted=weighted, async_op=True)
        check_grads(layer, later.x)


@pytest.mark.parametrize("how", ["now", "tracked", "later", "with derived arguments"])
@distributed_test(world_size=3, engine=ENGINES)
def test_others_hear_of_an_after_that_raises(ranks: Ranks, how: str) -> None:
    """The call is not made, so the other ranks raise in theirs, and all go on with the next one."""
    case = Case(ranks.world_size, dtype=torch.float32)
    later, me = how == "later", ranks.rank

    class Lost(Exception):
        pass

    class Raises:
        def wait(self) -> None:
            raise Lost("the input did not come")

    who = pytest.raises(Lost) if me == 1 else pytest.raises(ty.PeerError, match=r"rank 1 refused")
    after = Raises() if me == 1 else None
    idx, weights = (each.to(ranks.device) for each in case.picks[me])
    if how == "with derived arguments":
        weights = weights.bfloat16()  # cast to float32 by the call
    x = case.x[me].to(ranks.device).requires_grad_(how == "tracked")
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        for call in (
            lambda: ep.dispatch(x, idx, weights, async_op=later, after=after),
            lambda: ep.dispatch(x, handle=recv.handle, async_op=later, after=after),
        )[: 1 if ranks.engine == "nvlink" else 2]:  # whose rows are under way: an end of the object
            with who:
                made = call()
                made.wait()
            check_received(dispatch(ranks, ep, case), case, me)


@distributed_test(world_size=2, engine=ENGINES)
def test_after_is_waited_for(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    waited = []

    class Before:
        def wait(self) -> None:
            waited.append(True)

    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case, async_op=True, after=Before())
        check_received(recv, case, ranks.rank)
        assert waited == [True]
        dispatch(ranks, ep, case, after=Before())
        assert waited == [True, True]
        x = case.x[ranks.rank].to(ranks.device)
        for tracked in (False, True):
            leaf = x.clone().requires_grad_(tracked)
            ep.dispatch(leaf, handle=recv.handle, after=Before())
            ep.combine(recv.x.clone().requires_grad_(tracked), recv.handle, after=Before())
        assert waited == [True] * 6
        chained = ep.dispatch(x, handle=recv.handle, async_op=True, after=recv)
        assert torch.equal(chained.x, recv.x)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@distributed_test(world_size=2, engine=ENGINES)
def test_what_is_cast_or_sent_ahead_comes_after_too(ranks: Ranks, later: bool) -> None:
    """Weights that are there only when ``after`` has been waited for: in another dtype, and those
    of a combine.
    """
    case = Case(ranks.world_size, layout=ty.Layout.EXPERT_MAJOR)
    idx, weights = (t.to(ranks.device) for t in case.picks[ranks.rank])
    x = case.x[ranks.rank].to(ranks.device)
    half = weights.bfloat16()

    class Filled:
        def __init__(self, empty: torch.Tensor) -> None:
            self.empty = empty

        def wait(self) -> None:
            self.empty.copy_(half)

    with case.make(ranks) as ep:
        want = ep.dispatch(x, idx, half, layout=case.layout)
        blank = torch.zeros_like(half)
        recv = ep.dispatch(x, idx, blank, layout=case.layout, async_op=later, after=Filled(blank))
        assert torch.equal(recv.row_weights, want.row_weights)
        sums = ep.combine(want.x, want.handle, weighted=True)
        for dtype in (torch.bfloat16, torch.float32):
            blank = torch.zeros_like(half, dtype=dtype)
            got = ep.combine(
                want.x,
                want.handle,
                weighted=True,
                topk_weights=blank,
                async_op=later,
                after=Filled(blank),
            )
            assert torch.equal(got.x if isinstance(got, ty.Combined) else got, sums)
        flat = ep.dispatch(x, idx, weights)
        reduced = ep.combine(flat.x, flat.handle, reduce_weights=flat.topk_weights)
        half, blank = flat.topk_weights, torch.zeros_like(flat.topk_weights)
        got = ep.combine(
            flat.x, flat.handle, reduce_weights=blank, async_op=later, after=Filled(blank)
        )
        assert torch.equal(got.topk_weights, reduced.topk_weights)
        padded = ep.dispatch(x, idx, weights, layout=ty.Layout.EXPERT_PADDED)
        sums = ep.combine(padded.x, padded.handle)
        half, blank = (
            padded.x,
            torch.zeros_like(padded.x).transpose(0, 1).contiguous().transpose(0, 1),
        )
        got = ep.combine(blank, padded.handle, async_op=later, after=Filled(blank))
        assert torch.equal(got.x if isinstance(got, ty.Combined) else got, sums)


def test_to_come_after_a_result_does_not_take_it() -> None:
    """A result that another call waits for is still to be read: this object made both, a thread of
    its own runs them.
    """
    with ty.ExpertParallel(
        num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, device="cpu"
    ) as ep:
        x, idx = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])
        first = ep.dispatch(x, idx, async_op=True)
        assert first.work() is not first
        second = ep.dispatch(x, idx, async_op=True, after=first)
        second.wait()
        assert "x" not in first.__dict__
        assert torch.equal(first.x, second.x)
        assert torch.equal(ep.dispatch(x, idx, after=first).x, first.x)


class Slow:
    """Stands in for an engine: its calls take a while, and the second one fails."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.log = engine, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def dispatch(self, *args: Any, **more: Any) -> Any:
        self.log.append("begin")
        time.sleep(0.3)
        self.log.append("end")
        if self.log.count("begin") == 2:
            raise ValueError("the second one")
        return self._engine.dispatch(*args, **more)

    def check(self) -> None:
        self.log.append("check")


def slow_object() -> tuple[ty.ExpertParallel, Slow]:
    ep = ty.ExpertParallel(num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, device="cpu")
    ep._calls.engine = slow = Slow(ep._calls.engine)
    return ep, slow


def test_order_outlives_an_interrupt() -> None:
    """Ctrl-C ends the wait for a call, not the call: the next one still comes behind it."""
    ep, slow = slow_object()
    x, idx = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])
    first = ep.dispatch(x, idx, async_op=True)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            first.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ValueError, match="the second one"):
        ep.dispatch(x, idx)
    assert slow.log == ["begin", "end", "begin", "end"]
    ep.close()


def test_checks_and_failed_results_come_behind_their_calls() -> None:
    ep, slow = slow_object()
    x, idx = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])
    good, bad = ep.dispatch(x, idx, async_op=True), ep.dispatch(x, idx, async_op=True)
    ep.check()
    assert slow.log == ["begin", "end", "begin", "end", "check"]
    for _ in range(2):  # also when it has been read
        with pytest.raises(ValueError, match="the second one"):
            ep.dispatch(x, idx, async_op=True, after=bad).wait()
        with pytest.raises(ValueError, match="the second one"):
            bad.wait()
    assert good.x.shape == (3, 8)
    ep.close()


@distributed_test(world_size=2, engine=ENGINES)
def test_one_too_many_raises_and_harms_nothing(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    with case.make(ranks) as ep:
        open_calls = [dispatch(ranks, ep, case, async_op=True) for _ in range(MAX_OUTSTANDING)]
        with pytest.raises(
            RuntimeError, match=rf"{MAX_OUTSTANDING} asynchronous calls are outstanding"
        ):
            dispatch(ranks, ep, case, async_op=True)
        for recv in open_calls:
            check_received(recv, case, ranks.rank)
        check_received(dispatch(ranks, ep, case, async_op=True), case, ranks.rank)


@distributed_test(world_size=2, engine=ENGINES)
def test_results_that_nobody_wants_are_let_go(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    with case.make(ranks) as ep:
        for _ in range(3 * MAX_OUTSTANDING):
            dispatch(ranks, ep, case, async_op=True)
            gc.collect()
        check_received(dispatch(ranks, ep, case), case, ranks.rank)


@distributed_test(world_size=2, engine=ENGINES)
def test_close_finishes_what_was_started(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    ep = case.make(ranks)
    recv = dispatch(ranks, ep, case, async_op=True)
    ep.close()
    check_received(recv, case, ranks.rank)


@pytest.mark.parametrize("look", ["no_grad", "inference_mode"])
@distributed_test(world_size=2)
def test_where_a_result_is_read_first_decides_nothing(ranks: Ranks, look: str) -> None:
    """A log line, on one rank only, under ``no_grad``: gradients are those of the call."""
    case = Case(ranks.world_size, dtype=torch.float32, layout=ty.Layout.EXPERT_MAJOR)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        recv = ep.dispatch(layer.x, layer.idx, layer.weights, layout=case.layout, async_op=True)
        if ranks.rank == 0:
            with getattr(torch, look)():
                str(recv.tokens_per_expert)
        rows = moe.grouped(recv, layer.experts)
        combined = ep.combine(rows, recv.handle, weighted=True, async_op=True)
        if ranks.rank == 1:
            with getattr(torch, look)():
                str(combined.x.shape)
        check_grads(layer, combined.x)
        with torch.no_grad():
            again = ep.dispatch(layer.x, handle=recv.handle, async_op=True)
        assert not again.x.requires_grad


@distributed_test(world_size=2)
def test_results_may_be_read_in_any_order(ranks: Ranks) -> None:
    """Backwards along one handle run in the order of calls, not in which results were read."""
    ones = torch.ones(4, 8, device=ranks.device)
    x, y = (ones.clone().requires_grad_() for _ in range(2))
    sizes = {"num_experts": 4, "hidden": 8, "num_topk": 1, "max_tokens_per_rank": 4}
    with ty.ExpertParallel(ranks.group, **sizes, device=ranks.device) as ep:
        handle = ep.dispatch(ones, torch.arange(4, device=ranks.device)[:, None]).handle
        there, other = (ep.dispatch(each, handle=handle, async_op=True) for each in (x, y))
        if ranks.rank == 0:
            str(other.x.shape)
        (there.x.sum() + 100 * other.x.sum()).backward()
        assert torch.equal(x.grad, ones) and torch.equal(y.grad, 100 * x.grad)
