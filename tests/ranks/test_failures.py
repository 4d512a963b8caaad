"""A rank that dies, sleeps, or gives up, at every point of an object's life: the others learn its
name within the timeout.

Rank 1 is always the failed rank. "Silent" means that it does nothing until the others have given
up; then it is too late for it, and it must notice that too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import tokenyard as ty
from bad_input import (
    AT_ONCE,
    CASE,
    TIMEOUT,
    Inputs,
    assert_works,
    check,
    error_of,
    make,
    make_hasty,
    meet,
)
from tokenyard import api
from tokenyard.engines.gloo_transport import GlooTransport
from tokenyard.testing import Ranks, distributed_test

FAILED_RANK = 1
LARGE = 1 << 14
"""Channels of a row, so that a block of rows fills every socket buffer."""


class Plot:
    """Runs an object's life up to ``point``, where the failed rank does ``deed`` before its
    own call.
    """

    def __init__(self, ranks: Ranks, point: str, deed: Callable[[], Any]) -> None:
        self.ranks, self.point, self.deed = ranks, point, deed
        self.ep: ty.ExpertParallel | None = None

    def at(self, point: str) -> None:
        if self.ranks.rank == FAILED_RANK and self.point == point:
            self.deed()

    def play(self) -> None:
        """Ends in the error of the call that ``point`` names, on every rank that lives."""
        hidden = LARGE if "rows" in self.point else CASE.hidden
        x = torch.ones(256 if hidden == LARGE else 5, hidden, device=self.ranks.device)
        # Only then: the first use of autograd costs a second per process.
        x.requires_grad_(self.point == "backward")
        idx = torch.arange(CASE.num_topk, device=self.ranks.device) * 3  # an expert of every rank
        idx = idx.expand(x.shape[0], -1)
        meet(self.ranks)
        self.at("construction")
        self._inside(api, "choose", before="connection")
        if self.point in ("construction", "connection"):
            ep = self.ep = make(self.ranks, hidden=hidden, timeout=TIMEOUT)
        else:
            ep = self.ep = make_hasty(self.ranks, hidden=hidden)
        self.at("dispatch")
        wire = ep._calls.engine._transport
        self._inside(wire, "exchange", before="rows of a dispatch")
        # Receives and sends of counts and of what may follow them, then of rows.
        self._inside(wire, "_post", after="middle of the rows", times=7)
        recv = ep.dispatch(x, idx)
        self.at("combine")
        y = ep.combine(recv.x, recv.handle)
        self.at("backward")
        if y.requires_grad:
            y.sum().backward()

    def _inside(
        self, owner: Any, name: str, *, before: str = "", after: str = "", times: int = 1
    ) -> None:
        """Let the deed happen in the object's own call, before or after the ``times``-th use of
        ``name``.
        """
        honest, left = getattr(owner, name), [times]

        def treacherous(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                setattr(owner, name, honest)
                self.at(before)
            result = honest(*args)
            if left[0] == 0:
                self.at(after)
            return result

        setattr(owner, name, treacherous)


PHASES = {
    "construction": "ExpertParallel(",
    "connection": "ExpertParallel(",
    "dispatch": "dispatch #0, counts",
    "rows of a dispatch": "dispatch #0, rows",
    # the latter where all its rows had come already
    "middle of the rows": "dispatch #0, rows|combine #1, counts",
    "combine": "combine #1, counts",
    "backward": "cached dispatch #2, counts",
}


def check_survivor(error: Exception | None, point: str) -> None:
    """It names the failed rank, what it waited in, and (as an attribute) the failed rank again."""
    assert isinstance(error, ty.PeerTimeout), repr(error)
    assert any(phase in str(error) for phase in PHASES[point].split("|")), str(error)
    assert re.search(rf"ranks?(\(s\))? {FAILED_RANK}\b", str(error)), str(error)
    assert error.rank == FAILED_RANK, str(error)


def check_over(ep: ty.ExpertParallel | None) -> None:
    """After that an object accepts only ``stats`` and ``close``, and refuses everything else at
    once.
    """
    if ep is None:
        return
    x = torch.zeros(1, ep.config.hidden)
    for call in (
        lambda: ep.dispatch(x, torch.zeros(1, 3).long()),
        lambda: ep.combine(x, None),
        ep.warmup,
    ):
        check(error_of(call), RuntimeError, "lost a peer", f"rank {FAILED_RANK}", "make a new one")
    assert ep.stats().rank == ep.rank
    ep.close()
    ep.close()
    assert ep.stats().rank == ep.rank
    check(error_of(lambda: ep.dispatch(x, torch.zeros(1, 3).long())), RuntimeError, "is closed")


@pytest.mark.parametrize("point", ["construction", "dispatch", "combine"])
@distributed_test(world_size=2, may_die=(FAILED_RANK,))
def test_a_rank_that_dies(ranks: Ranks, point: str) -> None:
    plot = Plot(ranks, point, lambda: os._exit(9))
    check_survivor(error_of(plot.play), point)
    check_over(plot.ep)


@distributed_test(world_size=3, may_die=(FAILED_RANK,))
def test_a_rank_that_dies_while_rows_fly(ranks: Ranks) -> None:
    point = "middle of the rows"
    plot = Plot(ranks, point, lambda: os._exit(9))
    check_survivor(error_of(plot.play), point)
    check_over(plot.ep)


@distributed_test(world_size=3, may_die=(FAILED_RANK,))
def test_a_rank_that_dies_when_its_rows_are_read_in_part(ranks: Ranks) -> None:
    """Its peers wait for the rows already, so the first of them are sent at once, as many as the
    socket takes. Everybody learns of the death from the connection, long before the timeout.
    """
    tokens, hidden = 4096, LARGE // 4
    x, idx = torch.ones(tokens, hidden), (torch.arange(CASE.num_topk) * 3).expand(tokens, -1)
    with make(ranks, hidden=hidden, max_tokens_per_rank=tokens) as ep:
        wire: Any = ep._calls.engine._transport
        honest, posts = wire._post, [0]

        def post(*args: Any) -> Any:
            posts[0] += 1
            if ranks.rank == FAILED_RANK and posts[0] == 7:  # rows to send
                time.sleep(0.5)  # until the others wait for them
                honest(*args)
                os._exit(9)
            return honest(*args)

        wire._post = post
        error = error_of(lambda: ep.dispatch(x, idx))
        assert type(error) is ty.PeerLost and error.rank == FAILED_RANK, repr(error)
        check_over(ep)


@distributed_test(world_size=3, may_die=(FAILED_RANK,))
def test_a_survivor_that_gave_up_is_not_the_culprit(ranks: Ranks) -> None:
    """Rank 0 loses rank 1 before its own rows are out; rank 2, which waits for those, still names
    rank 1.
    """
    point = "middle of the rows"
    plot = Plot(ranks, point, lambda: os._exit(9))
    if ranks.rank == 0:
        post = GlooTransport._post

        def post_all_but_rows(
            wire: GlooTransport, verb: str, messages: Any, tag: int, what: str
        ) -> Any:
            return (
                [] if verb == "send" and ", rows" in what else post(wire, verb, messages, tag, what)
            )

        with mock.patch.object(GlooTransport, "_post", post_all_but_rows):
            error = error_of(plot.play)
    else:
        error = error_of(plot.play)
    check_survivor(error, point)
    check_over(plot.ep)


@pytest.mark.parametrize(
    "point", [point for point in PHASES if point != "middle of the rows"]
)  # those are under way
@distributed_test(world_size=3)
def test_a_rank_that_sleeps(ranks: Ranks, point: str) -> None:
    plot = Plot(ranks, point, lambda: meet(ranks))
    error = error_of(plot.play)
    if ranks.rank != FAILED_RANK:
        check_survivor(error, point)
        assert type(error) is ty.PeerTimeout or "had reported" in str(error)
        assert ", counts" not in PHASES[point] or f"; ranks {2 - ranks.rank} answered" in str(error)
        check_over(plot.ep)
        meet(ranks)
    meet(ranks)
    if ranks.rank == FAILED_RANK:
        assert isinstance(error, ty.PeerTimeout), repr(error)
    with make(ranks) as ep:
        assert_works(ranks, ep)


@distributed_test(world_size=4)
def test_whoever_comes_later_names_the_same_rank(ranks: Ranks) -> None:
    """Rank 0 gives up first and tears its connections down; ranks 2 and 3 still name rank 1, not
    rank 0.
    """
    inputs = Inputs.of(ranks)
    ep = make_hasty(ranks)
    if ranks.rank == FAILED_RANK:
        meet(ranks)
        return
    time.sleep(0.4 * ranks.rank)
    error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx))
    ep.close()
    meet(ranks)
    assert isinstance(error, ty.PeerTimeout), repr(error)
    assert error.rank == FAILED_RANK, str(error)
    assert f"rank {FAILED_RANK}" in str(error)


@distributed_test(world_size=3)
def test_two_ranks_are_silent(ranks: Ranks) -> None:
    """At construction and in a call the survivor hears of one of them at least, and at construction
    of both.
    """
    if ranks.rank == 0:
        error = error_of(lambda: make(ranks, timeout=TIMEOUT))
        check(error, ty.PeerTimeout, f"{TIMEOUT} s", "rank(s) 1, 2", "ExpertParallel(")
        assert error.rank == 1
    meet(ranks)
    if ranks.rank > 0:
        error = error_of(lambda: make(ranks, timeout=TIMEOUT))
        assert isinstance(error, ty.PeerTimeout), repr(error)
    meet(ranks)


class UserError(Exception):
    """Something that happens in the experts of one rank."""


@pytest.mark.parametrize("closes", [True, False], ids=["closing", "leaving"])
@distributed_test(world_size=3)
def test_user_code_raises_between_dispatch_and_combine(ranks: Ranks, closes: bool) -> None:
    """With a ``with`` the others know at once, without one after the timeout. The user's error
    comes through unchanged.
    """
    inputs = Inputs.of(ranks)

    def layer(ep: ty.ExpertParallel) -> None:
        recv = ep.dispatch(inputs.x, inputs.topk_idx)
        if ranks.rank == FAILED_RANK:
            raise UserError
        ep.combine(recv.x, recv.handle)

    def run() -> None:
        if not closes:
            layer(held)
        with held:
            layer(held)

    held = make(ranks) if closes else make_hasty(ranks)
    error = error_of(run)
    meet(ranks)
    if ranks.rank == FAILED_RANK:
        assert type(error) is UserError
        assert not closes or isinstance(
            error_of(lambda: held.dispatch(inputs.x, inputs.topk_idx)), RuntimeError
        )
    else:
        assert isinstance(error, ty.PeerLost if closes else ty.PeerTimeout), repr(error)
        assert error.rank == FAILED_RANK
        assert "combine #1" in str(error)


@distributed_test(world_size=3)
def test_a_rank_that_closed_in_order_has_not_crashed(ranks: Ranks) -> None:
    """By itself, inside its own ``with`` too; and who closes after a failure still reports that."""
    inputs = Inputs.of(ranks)
    for way in ("close", "with"):
        ep = make(ranks)
        recv = ep.dispatch(inputs.x, inputs.topk_idx)
        if ranks.rank == FAILED_RANK:
            if way == "with":
                with ep:
                    ep.close()
            ep.close()
        else:
            error = error_of(lambda ep=ep, recv=recv: ep.combine(recv.x, recv.handle))
            ep.close()
            check(
                error,
                ty.PeerLost,
                f"rank {FAILED_RANK} had closed its ExpertParallel: every rank makes all calls",
            )
            assert error.rank == FAILED_RANK and "crashed" not in str(error)
        meet(ranks)

        def enter(ep: ty.ExpertParallel = ep) -> None:
            with ep:
                raise AssertionError("a closed object was entered")

        check(error_of(enter), RuntimeError, "ExpertParallel is closed", "make a new one")


@distributed_test(world_size=3)
def test_an_error_inside_the_with_block(ranks: Ranks) -> None:
    """Of one rank, between two calls: the others learn it, in its first words."""
    inputs, error = Inputs.of(ranks), None
    try:
        with make(ranks) as ep:
            recv = ep.dispatch(inputs.x, inputs.topk_idx)
            if ranks.rank == FAILED_RANK:
                raise KeyError("no such\nexpert" + 1000 * "!")
            ep.combine(recv.x, recv.handle)
    except (KeyError, ty.PeerTimeout) as caught:
        error = caught
    meet(ranks)
    if ranks.rank != FAILED_RANK:
        said = f"rank {FAILED_RANK} had left the with block of its ExpertParallel by KeyError: 'no"
        check(error, ty.PeerLost, said)
        assert isinstance(error, ty.PeerLost) and error.rank == FAILED_RANK
        assert len(str(error)) < 600


@distributed_test(world_size=3)
def test_a_rank_that_raises_inside_a_call(ranks: Ranks) -> None:
    """Say, out of memory after the counts went out: its own error on this rank, the timeout's on
    the others.
    """
    inputs = Inputs.of(ranks)
    with make_hasty(ranks) as ep:
        if ranks.rank == FAILED_RANK:

            def no_room(*_: object) -> None:
                raise MemoryError("no room for rows")

            ep._calls.engine._rows.buffer = no_room
        error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx))
        meet(ranks)
        if ranks.rank == FAILED_RANK:
            check(error, MemoryError, "no room for rows")
            assert isinstance(
                error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), RuntimeError
            )
        else:
            assert isinstance(error, ty.PeerTimeout), repr(error)
            assert error.rank == FAILED_RANK
            check_over(ep)


@distributed_test(world_size=3)
def test_an_asynchronous_call_fails_where_it_is_waited_for(ranks: Ranks) -> None:
    """Each time it is asked; and calls behind it fail with the same failed rank, without a timeout
    of their own.
    """
    inputs = Inputs.of(ranks)
    ep = make_hasty(ranks)
    if ranks.rank == FAILED_RANK:
        meet(ranks)
        return
    received = [ep.dispatch(inputs.x, inputs.topk_idx, async_op=True) for _ in range(4)]
    errors = [error_of(recv.wait) for recv in (*received, *received)]
    for error in errors:
        assert isinstance(error, ty.PeerTimeout), repr(error)
        assert error.rank == FAILED_RANK, str(error)
    assert [str(error) for error in errors[:4]] == [str(error) for error in errors[4:]]
    assert str(error_of(lambda: received[0].x)) == str(errors[0])
    check_over(ep)
    meet(ranks)


@distributed_test(world_size=2)
def test_a_failure_that_nobody_waited_for(ranks: Ranks) -> None:
    """The result was dropped: the object knows all the same."""
    inputs = Inputs.of(ranks)
    ep = make_hasty(ranks, AT_ONCE)
    if ranks.rank == FAILED_RANK:
        meet(ranks)
        return
    ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
    error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx))
    assert isinstance(error, RuntimeError), repr(error)
    check_over(ep)
    meet(ranks)


@distributed_test(world_size=2)
def test_bad_arguments_while_a_peer_is_silent(ranks: Ranks) -> None:
    """The rank's own error comes first, and the object knows afterwards that the peer did not
    answer.
    """
    inputs = Inputs.of(ranks)
    ep = make_hasty(ranks, AT_ONCE)
    if ranks.rank == FAILED_RANK:
        meet(ranks)
        return
    check(
        error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx, layout="flat")),
        ValueError,
        "layout ('flat')",
    )
    check_over(ep)
    meet(ranks)


@distributed_test(world_size=2)
def test_close_while_a_call_hangs(ranks: Ranks) -> None:
    """``close`` waits for what was started, for the timeout at most; the result still tells how it
    ended.
    """
    inputs = Inputs.of(ranks)
    ep = make_hasty(ranks, AT_ONCE)
    if ranks.rank == FAILED_RANK:
        meet(ranks)
        return
    recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
    ep.close()
    error = error_of(recv.wait)
    meet(ranks)
    assert isinstance(error, ty.PeerTimeout), repr(error)
    assert error.rank == FAILED_RANK
    check(error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), RuntimeError, "make a new one")


@distributed_test(world_size=3)
def test_other_objects_go_on(ranks: Ranks) -> None:
    """One object times out; another on the same group, and the group itself, do not notice."""
    inputs = Inputs.of(ranks)
    with make(ranks) as other, make_hasty(ranks) as ep:
        assert_works(ranks, other)
        if ranks.rank != FAILED_RANK:
            assert isinstance(
                error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), ty.PeerTimeout
            )
        meet(ranks)
        assert_works(ranks, other)
        with make(ranks) as new:
            assert_works(ranks, new)


@distributed_test(world_size=2)
def test_a_slow_rank_is_not_a_silent_one(ranks: Ranks) -> None:
    """Half a timeout late in a call, and more than the timeout between two calls, when nobody
    waits.
    """
    with make_hasty(ranks) as ep:
        time.sleep(0.5 * TIMEOUT * ranks.rank)
        assert_works(ranks, ep)
        time.sleep(1.1 * TIMEOUT)
        assert_works(ranks, ep)
