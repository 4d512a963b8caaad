"""Ranks that are left go on: killed and frozen ranks at every step of a call, replicas, bad input,
stores that die.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from bad_input import check, error_of
from nvlink_pool import SOAK
from recovering import (
    POINTS,
    die,
    fail,
    meet_left,
    object_of,
    set_timeout,
    stop,
    store_of_test,
    ten_good_calls,
)
from run import command
from tokenyard import recovery
from tokenyard.engines import select
from tokenyard.engines.gloo_transport import GlooTransport
from tokenyard.survivors import settle
from tokenyard.testing import Ranks, distributed_test

TIMEOUT = 3.0


def _deaths(seed: int) -> tuple[tuple[str, int], ...]:
    """Where two ranks of four die, one after the other."""
    random = Random(seed)
    return tuple(zip(random.choices(POINTS, k=2), random.sample(range(4), 2), strict=True))


DEATHS = [
    (("dispatch", 2), ("rows", 0)),
    (("counts", 0), ("between", 3)),
    (("headers out", 1), ("middle of the rows", 2)),
    *map(_deaths, range(SOAK - 1)),
]


@pytest.mark.parametrize("deaths", DEATHS)
@distributed_test(world_size=4, may_die=(0, 1, 2, 3))
def test_two_ranks_are_killed_one_after_the_other(
    ranks: Ranks, deaths: tuple[tuple[str, int], ...]
) -> None:
    """Nobody waits for a timeout."""
    ep = object_of(ranks, 600.0)
    gone: tuple[int, ...] = ()
    for epoch, (point, who) in enumerate(deaths, start=1):
        error = fail(ranks, ep, point, who, die)
        assert isinstance(error, ty.PeerLost) and error.rank == who, repr(error)
        gone = tuple(sorted((*gone, who)))
        assert ep.recover() == [rank for rank in range(4) if rank not in gone]
        assert ep.epoch == epoch and ep.engine == "collective"
        ten_good_calls(ranks, ep, gone)
    assert "2 of 4 ranks" in ep.why
    ep.close()


@distributed_test(world_size=3)
def test_a_rank_that_freezes_is_left_behind_at_every_step(ranks: Ranks) -> None:
    """It learns that when it wakes, and its object stays out of use. A new object of all works."""
    store, everybody = store_of_test(ranks), [0, 1, 2]
    for at, point in enumerate(POINTS if SOAK > 1 else POINTS[1::3]):
        frozen = at % 3
        left = [rank for rank in everybody if rank != frozen]
        ep = object_of(ranks, TIMEOUT)
        if ranks.rank == frozen:
            store.set(f"pid/{at}", str(os.getpid()))
        meet_left(ranks, f"made/{at}", everybody)
        error = fail(ranks, ep, point, frozen, stop)
        assert isinstance(error, ty.PeerTimeout), repr(error)
        if ranks.rank == frozen:
            for _ in range(2):
                late = error_of(ep.recover)
                check(late, ty.RankExpelled, f"without rank {frozen}", "start it anew")
                assert isinstance(late, ty.RankExpelled) and late.survivors == tuple(left)
            check(error_of(ep.warmup), RuntimeError, "left behind", "make a new one")
        else:
            assert error.rank == frozen, str(error)
            assert ep.recover() == left
            ten_good_calls(ranks, ep, (frozen,))
            meet_left(ranks, f"good/{at}", left)
            if ranks.rank == left[0]:
                os.kill(int(store.get(f"pid/{at}")), signal.SIGCONT)
        meet_left(ranks, f"over/{at}", everybody)
        ep.close()


@distributed_test(world_size=3)
def test_what_nvshmem_cannot_do_gloo_can(ranks: Ranks) -> None:
    """Engine twolevel, whose nodes NVSHMEM joins, goes on through host memory. (Here another engine
    failed.)
    """
    ep = object_of(ranks, 600.0)
    memory: Any = SimpleNamespace(ranks_per_node=1, device=torch.device("cpu"))
    others = partial(select._with_others, None, select.Request("twolevel"), memory)  # pyright: ignore
    ep._choice = ep._choice._replace(again=others)  # pyright: ignore
    if ranks.rank == 1:
        ep.close()
        return
    assert isinstance(error_of(ep.warmup), ty.PeerLost)
    assert ep.recover() == [0, 2]
    assert ep.why.startswith("collective: 2 of 3 ranks over a gloo mesh")
    assert ep.why.endswith("not twolevel: NVSHMEM cannot lose a rank")
    ten_good_calls(ranks, ep, (1,))
    meet_left(ranks, "over", [0, 2])
    ep.close()


@distributed_test(world_size=3)
def test_nobody_is_gone(ranks: Ranks) -> None:
    """A rank that its user interrupts, or that only was too slow, goes on with the others. Results
    of before stay, handles do not.
    """
    ep = object_of(ranks, 600.0)
    x = torch.randn(5, ep.config.hidden, requires_grad=True)
    idx = torch.arange(3).expand(5, -1)
    recv = ep.dispatch(x, idx)
    pending = ep.dispatch(x.detach(), idx, async_op=True)
    rows = recv.x.detach().clone()
    if ranks.rank == 1:
        pending.wait()
        with pytest.raises(KeyboardInterrupt):
            ep._calls.make("a call", interrupted)
        lost: Exception | None = None
    else:
        lost = error_of(lambda: ep.combine(rows, recv.handle))
        assert isinstance(lost, ty.PeerLost) and lost.rank == 1, repr(lost)
    assert ep.recover() == [0, 1, 2] and ep.epoch == 1
    ten_good_calls(ranks, ep, ())
    pending.wait()
    for handle in (recv.handle, pending.handle):
        check(error_of(lambda h=handle: ep.combine(rows, h)), ValueError, "before recover()")
    check(error_of(recv.x.sum().backward), RuntimeError, "before recover()", "forward again")
    y = ep.combine(ep.dispatch(x, idx).x, ep.dispatch(x, idx).handle)
    y.sum().backward()
    assert x.grad is not None
    ep.close()


def interrupted() -> None:
    raise KeyboardInterrupt


@distributed_test(world_size=3, may_die=(1,))
def test_replicas_take_the_place_of_experts_that_are_gone(ranks: Ranks) -> None:
    """Of experts 0 .. 8, three per rank: 3 has copies 0 and 7, 4 a copy on its own rank only, and 5
    none.
    """
    ep = object_of(ranks, 600.0, num_experts=9)
    fail(ranks, ep, "between", 1, die)
    table = [[7, 3, 0], [4, -1, 8], [1, 2, -1]]
    assert ep.recover(torch.tensor(table)) == [0, 2]
    ten_good_calls(ranks, ep, (1,), instead=((3, 0), (4, 8)))
    ep.close()


@distributed_test(world_size=3, may_die=(1,))
def test_bad_tables_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """The ranks agree on who is gone all the same, and can try again."""
    ep = object_of(ranks, 600.0)
    fail(ranks, ep, "combine", 1, die)
    bad = [
        ([[0, 8]], "replicas has expert 8, but there are 8 experts"),
        ([[-2, 0]], "replicas has expert -2"),
        ([[0, 3], [5, 0]], "replicas has expert 0 twice"),
        ([0, 1], r"replicas must be integers [logical experts, copies]"),
        (torch.empty(0, 2, dtype=torch.int64), "list|Tensor [0, 2]"),
        (torch.rand(2, 2), "of torch.float32"),
        ([[0, 1], [2]], "must be integers"),
        ("all", "must be integers"),
    ]
    for number, (table, text) in enumerate(bad, start=1):
        error = error_of(lambda table=table: ep.recover(table if ranks.rank == 2 else None))
        if ranks.rank == 2:
            check(error, ValueError, text.split("|")[-1])
        else:
            check(error, ty.PeerError, "rank 2 refused its side of recover()", text.split("|")[-1])
        assert ep.epoch == number
    error = error_of(lambda: ep.recover([[ranks.rank, 4]]))
    check(error, ty.Mismatch, "ranks disagree on replicas", "[[0, 4]]", "[[2, 4]]")
    assert ep.recover() == [0, 2]
    ten_good_calls(ranks, ep, (1,))
    ep.close()


@distributed_test(world_size=2)
def test_recover_needs_a_failure(ranks: Ranks) -> None:
    """On one rank or on all, of an object that works or is closed, in a capture; and again once it
    has recovered.
    """
    ep = object_of(ranks, TIMEOUT)
    for _ in range(2):
        check(error_of(ep.recover), RuntimeError, "no rank", "has reported a failure")
        meet_left(ranks, "asked", [0, 1])
        ten_good_calls(ranks, ep, ())
    if ranks.rank == 0:
        error = error_of(lambda: ep.dispatch(torch.zeros(1, 40), torch.zeros(1, 3).long()))
        assert isinstance(error, ty.PeerTimeout) and error.rank == 1
        check(error_of(ep.warmup), RuntimeError, "lost a peer", "or recover()")
    meet_left(ranks, "failed", [0, 1])
    assert ep.recover() == [0, 1]  # rank 1 only heard of it
    check(error_of(ep.recover), RuntimeError, "has reported a failure")
    ten_good_calls(ranks, ep, ())
    meet_left(ranks, "over", [0, 1])
    ep.close()
    check(error_of(ep.recover), RuntimeError, "is closed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        ep = object_of(ranks, 600.0)
        check(error_of(ep.recover), RuntimeError, "CUDA graph's capture")


@distributed_test(world_size=3)
def test_a_rank_alone_goes_on_alone(ranks: Ranks) -> None:
    """One that nobody answers within the timeout; those who come later are left behind."""
    ep = object_of(ranks, TIMEOUT)
    set_timeout(ep, TIMEOUT)
    if ranks.rank == 0:
        error = error_of(lambda: ep.dispatch(torch.zeros(1, 40), torch.zeros(1, 3).long()))
        assert isinstance(error, ty.PeerTimeout)
        assert ep.recover() == [0]
        ten_good_calls(ranks, ep, (1, 2))
        meet_left(ranks, "late", [0, 1, 2])
    else:
        meet_left(ranks, "late", [0, 1, 2])
        check(
            error_of(ep.recover),
            ty.RankExpelled,
            f"ranks 0 have recovered without rank {ranks.rank}",
        )
    ep.close()


@distributed_test(world_size=3, may_die=(0,))
def test_a_store_that_dies_with_rank_0(ranks: Ranks) -> None:
    """Its process holds the store, freezes, and is killed: the others learn that they cannot agree,
    and what to do.
    """
    port = store_of_test(ranks)
    if ranks.rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.set("pid", str(os.getpid()))
        port.set("port", str(own.port))
    else:
        own = dist.TCPStore("127.0.0.1", int(port.get("port")), is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenyard.api.group_store", lambda _: own)
        ep = object_of(ranks, TIMEOUT)
    set_timeout(ep, TIMEOUT)
    meet_left(ranks, "made", [0, 1, 2])
    if ranks.rank == 0:
        stop()
    error = error_of(lambda: ep.dispatch(torch.zeros(1, 40), torch.zeros(1, 3).long()))
    assert isinstance(error, ty.PeerTimeout), repr(error)
    texts = "the store is gone", "torchrun's agent"
    check(error_of(ep.recover), ty.StoreLost, f"not answered for {TIMEOUT} s", *texts)
    meet_left(ranks, "frozen", [1, 2])
    if ranks.rank == 1:
        os.kill(int(port.get("pid")), signal.SIGKILL)
    check(error_of(ep.recover), ty.StoreLost, *texts)
    ep.close()


@distributed_test(world_size=3, may_die=(1,))
def test_a_new_process_takes_the_place_of_a_dead_rank(ranks: Ranks) -> None:
    """After a kill, and once more after it was killed itself, by a rank that had left."""
    ep = object_of(ranks, 600.0)
    fail(ranks, ep, "rows", 1, die)
    assert ep.recover([[3, 0]]) == [0, 2]
    plain: Any = store_of_test(ranks)
    while isinstance(plain, dist.PrefixStore):
        plain = plain.underlying_store
    newcomer = None
    if ranks.rank == 0:
        line = command("newcomer", str(plain.port), "1", "layer 0", "3")
        newcomer = subprocess.Popen(line, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    ep.admit(1, "layer 0")
    assert ep.epoch == 2 and "3 ranks over" in ep.why
    ten_good_calls(ranks, ep, ())
    ep.warmup()
    lost = error_of(ep.warmup)
    assert isinstance(lost, ty.PeerLost) and lost.rank == 1, repr(lost)
    assert ep.recover() == [0, 2]
    ten_good_calls(ranks, ep, (1,), instead=((3, 0),))
    if newcomer is not None:
        assert newcomer.wait(600) == -signal.SIGKILL
    ep.close()


@distributed_test(world_size=3)
def test_admission_asks_for_the_right_words(ranks: Ranks) -> None:
    """Who is not gone, names, nobody who comes, ranks that disagree; the object goes on, and a
    process that joins late, or twice, is told.
    """
    ep = object_of(ranks, 600.0)
    check(error_of(lambda: ep.admit(1, "a")), ValueError, "rank (1)", "none is")
    if ranks.rank == 1:
        ep.close()
    else:
        assert isinstance(error_of(ep.warmup), ty.PeerLost)
        check(error_of(lambda: ep.admit(1, "a")), RuntimeError, "lost a peer", "recover()")
        assert ep.recover() == [0, 2]
        set_timeout(ep, TIMEOUT)
        for rank in (0, 3, -1, True, "1"):
            check(
                error_of(lambda rank=rank: ep.admit(rank, "a")), ValueError, "one that is gone: [1]"
            )
        for at in ("", None, 3, "a" * 201):
            check(error_of(lambda at=at: ep.admit(1, at)), ValueError, "at (", "1 to 200")
        check(error_of(lambda: ep.admit(1, "a")), ty.PeerTimeout, "admit()", "rank(s) 1")
        ten_good_calls(ranks, ep, (1,))
        meet_left(ranks, "alone", [0, 2])
        error = error_of(lambda: ep.admit(1, f"by {ranks.rank}"))
        check(error, ty.Mismatch, "ranks disagree on whom to admit()")
        meet_left(ranks, "differed", [0, 2])
        set_timeout(ep, 600.0)
    meet_left(ranks, "ready", [0, 1, 2])
    if ranks.rank == 1:
        join = ty.ExpertParallel.join
        store = store_of_test(ranks)
        check(error_of(lambda: join("store", 1, "a")), ValueError, "store ('store')")  # pyright: ignore
        check(error_of(lambda: join(store, -1, "a")), ValueError, "rank (-1)")
        check(error_of(lambda: join(store, 1, "")), ValueError, "at ('')")
        check(
            error_of(lambda: join(store, 1, "a", timeout=0.3)), ty.PeerTimeout, "invitation", "'a'"
        )
        meet_left(ranks, "refused", [0, 1])
        check(error_of(lambda: join(store, 2, "b", timeout=600.0)), ValueError, "that is 1")
        ep = join(store, 1, "b", timeout=600.0)
        check(error_of(lambda: join(store, 1, "b", timeout=0.3)), ty.PeerTimeout, "invitation")
    else:
        if ranks.rank == 0:
            meet_left(ranks, "refused", [0, 1])
        ep.admit(1, "b")
    ten_good_calls(ranks, ep, ())
    ep.close()


@pytest.mark.parametrize("moment", ["before its vote", "behind its vote", "while it connects"])
@distributed_test(world_size=4, may_die=(1, 2))
def test_a_rank_dies_while_others_recover_from_another(ranks: Ranks, moment: str) -> None:
    """They find out within the timeout, and go on at the second attempt at the latest."""
    ep = object_of(ranks, 600.0)
    fail(ranks, ep, "between", 1, die)
    set_timeout(ep, TIMEOUT)

    def vote(*given: Any) -> Any:
        if moment == "before its vote":
            die()
        votes = settle(*given)
        if moment == "behind its vote":
            die()
        return votes

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 2:
            patch.setattr(recovery, "settle", vote)
            patch.setattr(GlooTransport, "_meet", lambda *_: die())
        error = error_of(ep.recover)
    set_timeout(ep, 600.0)
    if moment == "before its vote":
        assert error is None and ep.epoch == 1, repr(error)
        ep._calls.engine._transport.timeout = 600.0  # pyright: ignore
    else:
        assert isinstance(error, ty.PeerTimeout), repr(error)
        assert re.search(r"rank\(s\) (\d, )*2\b", str(error)), str(error)
        check(error_of(ep.warmup), RuntimeError, "lost a peer", "or recover()")
        assert ep.recover() == [0, 3] and ep.epoch == 2
    ten_good_calls(ranks, ep, (1, 2))
    ep.close()


@distributed_test(world_size=3)
def test_a_rank_is_interrupted_while_it_recovers(ranks: Ranks) -> None:
    """It has voted: the others wait for it, and it comes when it tries again."""
    ep = object_of(ranks, 600.0)
    if ranks.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            ep._calls.make("a call", interrupted)

        def vote(*given: Any) -> Any:
            settle(*given)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recovery, "settle", vote)
            with pytest.raises(KeyboardInterrupt):
                ep.recover()
        assert ep.epoch == 0
    else:
        assert isinstance(error_of(ep.warmup), ty.PeerLost)
    assert ep.recover() == [0, 1, 2] and ep.epoch == 1
    ten_good_calls(ranks, ep, ())
    ep.close()


@distributed_test(world_size=2)
def test_a_member_cannot_begin_the_epoch_that_it_admits_to(ranks: Ranks) -> None:
    """Memory is short, say: it has left the last epoch, and goes on by recover()."""
    ep = object_of(ranks, 600.0)
    if ranks.rank == 1:
        ep.close()
        error = error_of(
            lambda: ty.ExpertParallel.join(store_of_test(ranks), 1, "here", timeout=600.0)
        )
        assert isinstance(error, (ty.PeerTimeout, RuntimeError)), repr(error)
        return
    assert isinstance(error_of(ep.warmup), ty.PeerLost)
    assert ep.recover() == [0]
    set_timeout(ep, TIMEOUT)

    def short(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    choice = ep._choice  # pyright: ignore
    ep._choice = choice._replace(again=short)  # pyright: ignore
    check(error_of(lambda: ep.admit(1, "here")), RuntimeError, "out of memory")
    ep._choice = choice  # pyright: ignore
    check(error_of(ep.warmup), RuntimeError, "out of memory")
    assert ep.recover() == [0] and ep.epoch == 3
    ten_good_calls(ranks, ep, (1,))
    ep.close()
