"""Objects from construction to the end: closing, handles, threads, groups, many objects, nothing
left behind.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from bad_input import (
    CASE,
    PATIENCE,
    SIZES,
    Inputs,
    assert_works,
    check,
    error_of,
    gloo,
    make,
    meet,
)
from cases import Case, check_received, dispatch
from tokenyard.call_queue import MAX_OUTSTANDING
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.engines import gloo_transport
from tokenyard.engines.plans import note_bad_index
from tokenyard.testing import Ranks, assert_same_bits, distributed_test

# Closing


@distributed_test(world_size=(1, 2))
def test_a_closed_object(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    ep = make(ranks)
    recv = ep.dispatch(inputs.x, inputs.topk_idx)
    ep.close()
    ep.close()
    calls: list[Callable[[], Any]] = [
        lambda: ep.dispatch(inputs.x, inputs.topk_idx),
        lambda: ep.dispatch(inputs.x, handle=recv.handle),
        lambda: ep.dispatch(inputs.x, inputs.topk_idx, async_op=True),
        lambda: ep.combine(recv.x, recv.handle),
        lambda: ep.dispatch(None),
        ep.warmup,
        ep.check,
    ]
    for call in calls:
        check(error_of(call), RuntimeError, "ExpertParallel is closed", "make a new one")
    assert ep.stats().calls == {"dispatch": 1}
    assert ep.buffer_bytes == 0
    assert recv.x.shape == (recv.source.numel(), CASE.hidden)


@pytest.mark.parametrize("kept", [True, False], ids=["object kept", "object gone"])
@distributed_test(world_size=(1, 2))
def test_a_backward_that_comes_too_late(ranks: Ranks, kept: bool) -> None:
    """The graph of a dispatch outlives its object; its backward needs the object, and says so."""
    inputs = Inputs.of(ranks)
    x = inputs.x.float().requires_grad_()
    with make(ranks) as ep:
        recv = ep.dispatch(x, inputs.topk_idx)
        y = ep.combine(recv.x, recv.handle)
        quantized = ep.dispatch(
            x.bfloat16(), inputs.topk_idx, quantize=ty.Quantize.FP8
        ).dequantize()
    if not kept:
        del ep
        gc.collect()
    for result in (recv.x, y, quantized):
        check(error_of(lambda result=result: result.sum().backward()), RuntimeError, "closed")


@distributed_test(world_size=2)
def test_with_closes_when_its_body_raises(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    ep = make(ranks)

    def body() -> None:
        with ep:
            ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
            raise KeyError("mine")

    check(error_of(body), KeyError, "mine")
    check(error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), RuntimeError, "is closed")


@distributed_test(world_size=2)
def test_closing_with_calls_outstanding(ranks: Ranks) -> None:
    """Rank 1 starts late and rank 0 closes early: both get all their rows."""
    inputs = Inputs.of(ranks)
    ep = make(ranks)
    wait = threading.Event()
    received = [
        ep.dispatch(inputs.x, inputs.topk_idx, async_op=True, after=wait if ranks.rank else None)
        for _ in range(MAX_OUTSTANDING)
    ]
    threading.Timer(0.2, wait.set).start()
    ep.close()
    for recv in received:
        assert_same_bits(recv.x, received[0].x, what="x", rank=ranks.rank)


@distributed_test(world_size=2)
def test_one_rank_closes_the_others_call(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    ep = make(ranks)
    if ranks.rank == 1:
        ep.close()
    else:
        error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx))
        assert isinstance(error, ty.PeerLost), repr(error)
        assert error.rank == 1
    meet(ranks)


# Handles


@distributed_test(world_size=2)
def test_an_old_handle(ranks: Ranks) -> None:
    """Thirty calls of other sizes, layouts and errors later it still means the same."""
    case = Case(ranks.world_size)
    with make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        want = ep.combine(recv.x, recv.handle)
        for seed in range(10):
            assert_works(ranks, ep, seed=seed % 3)
            other = Case(ranks.world_size, layout=list(ty.Layout)[seed % 3], seed=seed)
            dispatch(ranks, ep, other)
            check(error_of(lambda: ep.dispatch(None)), ValueError, "x must be")
        assert_same_bits(ep.combine(recv.x, recv.handle), want, what="combined", rank=ranks.rank)
        again = ep.dispatch(case.x[ranks.rank].to(ranks.device), handle=recv.handle)
        check_received(again, case, ranks.rank)


# Order, threads, results that nobody wants


class Gate:
    """For ``after=``: an asynchronous call does not begin before ``open``."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self) -> None:
        assert self._event.wait(PATIENCE)

    def open_soon(self) -> None:
        threading.Timer(0.2, self._event.set).start()


@distributed_test(world_size=2)
def test_a_dropped_call_keeps_its_turn(ranks: Ranks) -> None:
    """Nobody wants its result, but the other ranks are in it: what is called later comes later."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        recv = ep.dispatch(inputs.x, inputs.topk_idx)
        gate = Gate()
        ep.dispatch(inputs.x, inputs.topk_idx, async_op=True, after=gate)
        gc.collect()
        gate.open_soon()
        ep.combine(recv.x, recv.handle)
        assert list(ep.stats().calls.items()) == [("dispatch", 2), ("combine", 1)]
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_a_dropped_call_on_one_rank(ranks: Ranks) -> None:
    """The other rank keeps and waits for its part."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        gate = Gate()
        later = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True, after=gate)
        if ranks.rank == 0:
            del later
        gate.open_soon()
        recv = ep.dispatch(2 * inputs.x, inputs.topk_idx)
        if ranks.rank == 1:
            assert_same_bits(2 * later.x, recv.x, what="x", rank=1)
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_a_second_object_opens_no_connection_to_the_store(ranks: Ranks) -> None:
    """Each costs a look-up of this host's name, by torch's server, which answers nobody else
    meanwhile.
    """
    known: list[list[int]] = []
    for _ in range(2):
        with make(ranks) as ep:
            assert_works(ranks, ep)
        known.append([id(each) for idle in gloo_transport._idle.values() for each in idle])
    assert known[0] == known[1] and len(known[0]) == 1


@distributed_test(world_size=2)
def test_a_waiting_call_from_another_thread(ranks: Ranks) -> None:
    """While one thread is in a call, another one is refused and harms nothing."""
    inputs = Inputs.of(ranks)
    refused: list[Exception | None] = []
    inside, release = threading.Event(), threading.Event()
    with make(ranks) as ep:
        wire = ep._calls.engine._transport
        honest = wire.exchange

        def exchange(*args: Any) -> Any:
            inside.set()
            assert release.wait(PATIENCE)
            return honest(*args)

        def intrude() -> None:
            assert inside.wait(PATIENCE)
            calls = [
                lambda: ep.dispatch(inputs.x, inputs.topk_idx),
                lambda: ep.dispatch(inputs.x, inputs.topk_idx, async_op=True),
                lambda: ep.dispatch(None),
            ]
            refused.extend(error_of(call) for call in calls)
            release.set()

        wire.exchange = exchange
        thread = threading.Thread(target=intrude)
        thread.start()
        ep.dispatch(inputs.x, inputs.topk_idx)
        thread.join()
        wire.exchange = honest
        for error in refused:
            check(
                error,
                RuntimeError,
                "in use by another thread",
                "one object serves one thread at a time",
            )
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_objects_of_different_threads_are_independent(ranks: Ranks) -> None:
    """Four threads with an object each, made in the same order on every rank."""
    objects = [make(ranks) for _ in range(4)]
    errors: list[Exception | None] = []

    def work(at: int) -> None:
        errors.extend(
            error_of(lambda: assert_works(ranks, objects[at], seed=at % 2)) for _ in range(5)
        )

    for seed in range(2):
        assert_works(ranks, objects[0], seed=seed)  # the oracle is not made by four threads at once
    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ep in objects:
        ep.close()
    assert errors == [None] * 20


# Many objects


def footprint() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("end", ["close", "del", "refuse"])
@distributed_test(world_size=2)
def test_fifty_objects_leave_nothing_behind(ranks: Ranks, end: str) -> None:
    """Closed, dropped, or refused half of the time; with an asynchronous call each, so that there
    is a thread to end.
    """
    inputs = Inputs.of(ranks)

    def live() -> None:
        if end == "refuse" and error_of(lambda: make(ranks, hidden=40 + ranks.rank)) is None:
            raise AssertionError("accepted")
        ep = make(ranks)
        recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
        ep.combine(recv.x, recv.handle)
        if end != "del":
            ep.close()

    for _ in range(5):
        live()
    meet(ranks)
    before = footprint()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        live()
    meet(ranks)
    after = footprint()
    assert after[0] <= before[0] + 5, f"descriptors: {before[0]} before, {after[0]} after"
    assert after[1] <= before[1] + 5, f"threads: {before[1]} before, {after[1]} after"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 64 << 10, f"{grown} KiB more memory"


@distributed_test(world_size=3)
def test_objects_of_different_sizes_take_turns(ranks: Ranks) -> None:
    """Calls of two objects interleave, waiting and asynchronous; handles do not mix."""
    small, large = Case(3), Case(3, num_experts=11, hidden=64, num_topk=5, num_tokens=30, seed=1)
    with small.make(ranks) as one, large.make(ranks) as two:
        for asynchronous in (False, True):
            a = dispatch(ranks, one, small, async_op=asynchronous)
            b = dispatch(ranks, two, large, async_op=asynchronous)
            check_received(b, large, ranks.rank)
            y = one.combine(a.x, a.handle, async_op=True)
            z = two.combine(b.x, b.handle, async_op=True)
            assert z.x.shape[1] == 64
            assert y.x.shape[1] == 40
            check_received(a, small, ranks.rank)
            check(
                error_of(lambda a=a: two.combine(a.x, a.handle)),
                ValueError,
                "another ExpertParallel",
            )


# Groups


@distributed_test(world_size=4)
def test_groups_of_some_ranks(ranks: Ranks) -> None:
    """[0, 2] and [1, 3] at once, and all four beside them; ranks of the object are ranks of its
    group.
    """
    base = gloo(ranks)
    pairs = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1, 3], backend="gloo")]
    mine, theirs = pairs[ranks.rank % 2], pairs[1 - ranks.rank % 2]
    with make(ranks, mine) as ep, make(ranks, base) as everyone:
        assert (ep.rank, ep.world_size) == (ranks.rank // 2, 2)
        for seed in range(3):
            assert_works(ranks, ep, seed)
            if seed == ranks.rank % 2:
                assert_works(ranks, ep, seed)  # one pair makes a call more
            assert_works(ranks, everyone, seed)
        with pytest.raises(ValueError, match="not a member of the group"):
            make(ranks, theirs)
        check_names_ranks_of_the_group(ranks, ep)
    meet(ranks)


def check_names_ranks_of_the_group(ranks: Ranks, ep: ty.ExpertParallel) -> None:
    error = error_of(lambda: ep.dispatch(None) if ep.rank == 1 else ep.warmup())
    check(
        error, ValueError if ep.rank else ty.PeerError, "x must be" if ep.rank else "rank 1 refused"
    )


@distributed_test(world_size=3)
def test_a_group_in_another_order(ranks: Ranks) -> None:
    """Ranks of a group need not ascend with those of the world."""
    group = (
        dist.new_group([2, 0, 1], backend="gloo", sort_ranks=False)
        if _can_reorder()
        else gloo(ranks)
    )
    with make(ranks, group) as ep:
        assert ep.rank == dist.get_rank(group)
        assert_works(ranks, ep)


def _can_reorder() -> bool:
    return "sort_ranks" in dist.new_group.__code__.co_varnames


# Without torch.distributed: this runs in the test process itself


def test_copies_are_refused() -> None:
    with ty.ExpertParallel(**SIZES) as ep:
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"neither copied nor pickled.*make another one"):
                take(ep)


def test_alone() -> None:
    assert not dist.is_initialized()
    with ty.ExpertParallel(**SIZES, device="cpu") as ep:
        ranks = Ranks(0, 1, torch.device("cpu"), "collective", None)  # type: ignore[arg-type]
        assert (ep.rank, ep.world_size, ep.engine) == (0, 1, "collective")
        assert "one rank" in ep.why
        assert_works(ranks, ep)
        check(error_of(lambda: ep.dispatch(None)), ValueError, "x must be")
        assert_works(ranks, ep)


def test_a_group_without_torch_distributed() -> None:
    """A group of a process group that is gone is an error, not a world of one."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises((ValueError, RuntimeError), match="group"):
        ty.ExpertParallel(group, **SIZES)


def test_a_lost_peer_keeps_nothing() -> None:
    """Neither object nor batch, once the caller has let go of both: errors are kept without their
    frames.
    """

    class Gone:
        waits_on_host, name, counts_by_most, calls_begun = False, "gone", False, None

        def dispatch(self, *_: object, **__: object) -> None:
            raise ty.PeerTimeout("rank 1 is silent", 1)

    def lose() -> list[weakref.ref[Any]]:
        ep = ty.ExpertParallel(**SIZES, device="cpu")
        engine = Gone()
        ep._calls.engine = engine  # type: ignore[assignment]  # pyright: ignore[reportPrivateUsage]
        x = torch.zeros(3, SIZES["hidden"])
        for later in (True, False):
            with pytest.raises((ty.PeerTimeout, RuntimeError), match="rank 1 is silent"):
                ep.dispatch(
                    x, torch.zeros(3, SIZES["num_topk"], dtype=torch.int64), async_op=later
                ).wait()
        return [weakref.ref(each) for each in (ep, engine, x)]

    gc.disable()
    try:
        assert [each() for each in lose()] == [None] * 3
    finally:
        gc.enable()


def test_check_leaves_what_cuda_graphs_write_to() -> None:
    """A replay notes bad ids where the captured call did: after a check as before."""
    with ty.ExpertParallel(**SIZES, device="cpu") as ep:
        engine: Any = ep._calls.engine  # pyright: ignore[reportPrivateUsage]
        engine._has_headers = lambda op, exact: exact  # as over NCCL
        x, good = (
            torch.zeros(3, SIZES["hidden"]),
            torch.zeros(3, SIZES["num_topk"], dtype=torch.int64),
        )
        ep.dispatch(x, good, exact=False)
        ep.check()
        noted = engine._work(x.device)._bad_index
        for _ in range(2):
            note_bad_index(noted, good + SIZES["num_experts"], SIZES["num_experts"])
            with pytest.raises(ValueError, match=f"is {SIZES['num_experts']}"):
                ep.check()
            ep.check()


@distributed_test(world_size=(1, 3))
def test_objects_that_were_closed_leave_nothing_in_the_store(ranks: Ranks) -> None:
    """However many there were, and though ranks close them at different times."""
    inputs, sizes = Inputs.of(ranks), {"num_max_tokens_per_rank": 64, "hidden": SIZES["hidden"]}
    store = dist.distributed_c10d._get_default_store()
    most = store.num_keys() + 30
    for at in range(8):
        buffer = ElasticBuffer(ranks.group, **sizes)
        with make(ranks) as ep:
            ep.dispatch(inputs.x, inputs.topk_idx)
            buffer.dispatch(inputs.x, topk_idx=inputs.topk_idx, num_experts=12)
            time.sleep(0.02 * ((ranks.rank + at) % ranks.world_size))
        buffer.destroy()
    deadline = time.monotonic() + PATIENCE
    while store.num_keys() > most and time.monotonic() < deadline:
        time.sleep(0.01)  # the last rank deletes them, on a thread
    assert store.num_keys() <= most
    meet(ranks)


def test_a_result_that_a_thread_finishes_is_under_way() -> None:
    said: list[str] = []

    def finish() -> dict[str, Any]:
        said.append(repr(result))
        return {"x": torch.zeros(2, 3)}

    result = ty.Received(finish)
    result.wait()
    assert [*said, repr(result)] == ["Received(under way)", "Received(x=float32[2, 3])"]


@distributed_test(world_size=2)
def test_what_objects_say_of_themselves(ranks: Ranks) -> None:
    """Sizes, dtypes and states, and no values."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        place = f"ExpertParallel(rank {ranks.rank} of 2, engine {ep.engine!r}, num_experts="
        assert repr(ep).startswith(place) and "closed" not in repr(ep)
        recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
        assert repr(recv) == "Received(under way)"
        recv.wait()
        rows = str(recv.x.dtype).removeprefix("torch.") + str(list(recv.x.shape))
        assert f"Received(x={rows}, topk_idx=int64[" in repr(recv) and "tensor" not in repr(recv)
    assert repr(ep).endswith(", is closed)")
