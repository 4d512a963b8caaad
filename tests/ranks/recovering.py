"""What the tests of recovery share: what the oracle says of the ranks that are left, ten good
calls, meetings of survivors.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from bad_input import SIZES, error_of, gloo
from cases import Case, check_combined, check_received, rows_to_combine
from tokenyard.rendezvous import group_store
from tokenyard.testing import Ranks

HIDDEN = 40


@dataclass(frozen=True)
class Left(Case):
    """A case of which the ranks ``gone`` bring nothing, and whose picks of their experts go to
    ``instead``, if they have an entry there.
    """

    gone: tuple[int, ...] = ()
    instead: tuple[tuple[int, int], ...] = ()

    def tokens_of(self, rank: int) -> int:
        return 0 if rank in self.gone else super().tokens_of(rank)

    @cached_property
    def asked(self) -> list[tuple[Tensor, Tensor]]:
        return Case.picks.func(self)  # pyright: ignore

    @cached_property
    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """Picks with replicas instead of experts that are gone."""
        kept = []
        for idx, weights in self.asked:
            idx = idx.clone()
            for expert, other in self.instead:
                idx[idx == expert] = other
            kept.append((idx, weights))
        return kept

    @cached_property
    def picks(self) -> list[tuple[Tensor, Tensor]]:  # pyright: ignore
        bounds = ty.expert_bounds(self.num_experts, self.world_size)
        picks = []
        for idx, weights in self.kept:
            idx = idx.clone()
            for rank in self.gone:
                idx[(idx >= bounds[rank]) & (idx < bounds[rank + 1])] = -1
            picks.append((idx, weights))
        return picks


def ten_good_calls(
    ranks: Ranks, ep: ty.ExpertParallel, gone: tuple[int, ...], instead: Any = (), tokens: int = 13
) -> None:
    """Dispatches in all layouts, cached, asynchronous and weighted ones, and their combines: bit
    for bit what the oracle says of the ranks that are left.
    """
    assert ep.active_ranks == [rank not in gone for rank in range(ranks.world_size)]
    for number in range(4):
        layout = list(ty.Layout)[number % 3]
        case = Left(
            ranks.world_size, seed=number, layout=layout, exact=number != 1, gone=gone,
            num_tokens=tokens, hidden=ep.config.hidden, num_experts=ep.config.num_experts,
            instead=tuple(instead),
        )  # fmt: skip
        idx, weights = (each.to(ranks.device) for each in case.asked[ranks.rank])
        x, later = case.x[ranks.rank].to(ranks.device), number == 3
        recv = ep.dispatch(x, idx, weights, **case.options, async_op=later)
        check_received(recv, case, ranks.rank)
        rows, weighted = rows_to_combine(recv, case, ranks.rank), layout is not ty.Layout.FLAT
        want = case.combined(ranks.rank, weighted=weighted)
        lost = torch.full((len(idx),), float("nan"), device=ranks.device)
        options = ty.CallOptions(lost_weights=lost)
        y = ep.combine(rows, recv.handle, weighted=weighted, options=options, async_op=later)
        check_combined(y if isinstance(y, Tensor) else y.x, case, ranks.rank, want.x)
        if layout is not ty.Layout.FLAT:
            asked = Left(
                ranks.world_size, seed=number, gone=gone, layout=layout, instead=tuple(instead),
                num_tokens=tokens, hidden=HIDDEN, num_experts=ep.config.num_experts,
            )  # fmt: skip
            object.__setattr__(asked, "picks", asked.kept)
            absent = [gone] * ranks.world_size
            right = asked.combined(ranks.rank, weighted=True, absent=absent).lost_weights
            assert torch.equal(lost.cpu(), right), (lost, right)
        if number % 2 == 0:
            again = ep.dispatch(x, handle=recv.handle)
            assert torch.equal(again.source, recv.source)
            y = ep.combine(rows, recv.handle, weighted=weighted, topk_weights=(
                weights if weighted else None
            ))  # fmt: skip
            check_combined(y, case, ranks.rank, want.x)
        if layout is ty.Layout.FLAT and ep._calls.engine.in_place:  # pyright: ignore
            recv = ep.dispatch(x, idx, weights, in_place=True)
            check_received(recv, case, ranks.rank)
            y = ep.combine(rows, recv.handle, in_place=True)
            check_combined(y, case, ranks.rank, want.x)
    ep.check()


def object_of(ranks: Ranks, timeout: float, **changes: Any) -> ty.ExpertParallel:
    """An object whose first epoch waits ``timeout`` seconds."""
    sizes = SIZES | {"hidden": HIDDEN} | changes
    ep = ty.ExpertParallel(gloo(ranks), **sizes, timeout=600.0)
    ep._calls.engine._transport.timeout = timeout  # pyright: ignore
    return ep


def set_timeout(ep: ty.ExpertParallel, timeout: float) -> None:
    """How long :meth:`recover` and later epochs wait: what is made before takes as long as it
    takes.
    """
    ep.config = replace(ep.config, timeout=timeout)


def store_of_test(ranks: Ranks) -> Any:
    store = group_store(gloo(ranks))
    assert store is not None
    return dist.PrefixStore("test", store)


def meet_left(ranks: Ranks, name: str, members: list[int]) -> None:
    """Wait for ``members``, outside of the object under test."""
    store = store_of_test(ranks)
    store.set(f"{name}/{ranks.rank}", "")
    store.wait([f"{name}/{rank}" for rank in members])


def stop() -> None:
    """Freeze this process, whose survivors wake it by :func:`wake`."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


POINTS = ("dispatch", "counts", "headers out", "rows", "middle of the rows", "between", "combine")


class Deed:
    """Does ``deed`` on rank ``who`` when one dispatch and its combine come to ``point``."""

    def __init__(self, ep: ty.ExpertParallel, point: str, deed: Callable[[], None] | None) -> None:
        self._point, self._deed = point, deed
        wire: Any = ep._calls.engine._transport  # pyright: ignore
        self._wrap(wire, "swap", before="counts")
        self._wrap(wire, "exchange", before="rows")
        # Receives and sends of counts and of what may follow them, then of rows.
        self._wrap(wire, "_post", after="headers out", times=4)
        self._wrap(wire, "_post", after="middle of the rows", times=7)

    def at(self, point: str) -> None:
        if self._deed is not None and point == self._point:
            deed, self._deed = self._deed, None
            deed()

    def _wrap(
        self, owner: Any, name: str, *, before: str = "", after: str = "", times: int = 1
    ) -> None:
        honest, left = getattr(owner, name), [times]

        def treacherous(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                self.at(before)
            result = honest(*args)
            if left[0] == 0:
                self.at(after)
            return result

        setattr(owner, name, treacherous)


def fail(
    ranks: Ranks, ep: ty.ExpertParallel, point: str, who: int, deed: Callable[[], None]
) -> Exception | None:
    """A dispatch and its combine, in which rank ``who`` does its ``deed`` at ``point``; how it
    ended.
    """
    doing = Deed(ep, point, deed if ranks.rank == who else None)
    x = torch.ones(200, ep.config.hidden)
    idx = torch.arange(ep.config.num_topk) * ep.config.num_experts // ep.config.num_topk
    idx = idx.expand(len(x), -1)

    def play() -> None:
        doing.at("dispatch")
        recv = ep.dispatch(x, idx)
        doing.at("between")
        doing.at("combine")
        ep.combine(recv.x, recv.handle)
        ep.combine(recv.x, recv.handle)  # of whoever had all rows already

    return error_of(play)
