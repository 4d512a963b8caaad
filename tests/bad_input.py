"""What the tests of bad input share: small objects that give up soon, proof that one still works,
errors as values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from cases import SMALL_RINGS, Case, check_combined, check_received, dispatch, rows_to_combine
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.rendezvous import agree
from tokenyard.testing import Ranks

PATIENCE = 600.0
"""Seconds that an object waits in tests in which nobody is silent: a busy machine must not look
like a silent rank."""
TIMEOUT = 3.0
"""Seconds after which a rank gives up in tests in which one is silent."""
AT_ONCE = 0.3
"""The same where it waits for nobody else, so that nobody can be taken for silent by mistake."""
CASE = Case(1)
SIZES = {
    "num_experts": CASE.num_experts,
    "hidden": CASE.hidden,
    "num_topk": CASE.num_topk,
    "max_tokens_per_rank": CASE.num_tokens,
}
BIG = 1 << 70
"""A whole number that no header can carry."""


@cache
def gloo(ranks: Ranks) -> Any:
    """A group on which the object itself times its peers; over NCCL the group's watchdog would."""
    if isinstance(ranks.group, MemoryGroup):
        return ranks.group
    return (
        ranks.group if dist.get_backend(ranks.group) == "gloo" else dist.new_group(backend="gloo")
    )


def meet(ranks: Ranks) -> None:
    """Wait for every rank, outside of the object under test."""
    anyone(ranks, False)


def anyone(ranks: Ranks, here: bool) -> bool:
    """Whether something is so on any rank."""
    if isinstance(ranks.group, MemoryGroup):
        store = dist.PrefixStore("outside", ranks.group.open_store())
        return "1" in agree(store, ranks.rank, ranks.world_size, {}, "", 600.0, str(int(here)))[1]
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=gloo(ranks))
    return bool(flag)


def make(ranks: Ranks, group: Any = None, **changes: Any) -> ty.ExpertParallel:
    """A small object on ``group`` (default: all ranks) that waits ``PATIENCE`` seconds."""
    same = {**SIZES, "engine": ranks.engine, "timeout": PATIENCE, "device": ranks.device}
    if ranks.engine == "nvlink":
        same["buffer_bytes"] = SMALL_RINGS
    options = {**same, "topology": Case.topology if group is None else None, **changes}
    return ty.ExpertParallel(gloo(ranks) if group is None else group, **options)


def make_hasty(ranks: Ranks, give_up: float = TIMEOUT, **changes: Any) -> ty.ExpertParallel:
    """The same, whose calls give up after so many seconds. Making it is no call: however long it
    takes, nobody is silent in it.
    """
    ep = make(ranks, **changes)
    ep._calls.engine._transport.timeout = give_up  # pyright: ignore
    meet(ranks)
    return ep


@cache
def _case(
    world_size: int, seed: int, topology: tuple[int, int] | None
) -> tuple[Case, list[Tensor]]:
    case = Case(world_size, seed=seed)
    assert case.topology == topology
    return case, [case.combined(rank).x for rank in range(world_size)]


def assert_works(ranks: Ranks, ep: ty.ExpertParallel, seed: int = 0) -> None:
    """A dispatch and a combine of all members, bit for bit."""
    case, combined = _case(ep.world_size, seed, Case.topology)
    recv = dispatch(replace(ranks, rank=ep.rank, world_size=ep.world_size), ep, case)
    check_received(recv, case, ep.rank)
    rows = rows_to_combine(recv, case, ep.rank)
    check_combined(ep.combine(rows, recv.handle), case, ep.rank, combined[ep.rank])


@dataclass(frozen=True)
class Inputs:
    """What one rank brings to a dispatch; valid."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    @staticmethod
    def of(ranks: Ranks, num_tokens: int = 5) -> Inputs:
        random = torch.Generator().manual_seed(ranks.rank)
        x = torch.randn(num_tokens, CASE.hidden, generator=random)
        picks = torch.rand(num_tokens, CASE.num_experts, generator=random).topk(CASE.num_topk)
        return Inputs(*(t.to(ranks.device) for t in (x.bfloat16(), picks.indices, picks.values)))


def error_of(call: Callable[[], Any]) -> Exception | None:
    """The error that a call ends in, at once or when it is waited for."""
    try:
        result = call()
        if isinstance(result, (ty.Received, ty.Combined)):
            result.wait()
    except Exception as error:
        return error
    return None


def complaint(error: Exception | None, kind: type[Exception] | None, words: Sequence[str]) -> str:
    """Why ``error`` is not exactly of ``kind`` (None: no error) or does not say ``words``; empty if
    it is and does.
    """
    missing = [word for word in words if word not in str(error)]
    right = error is None if kind is None else type(error) is kind
    if right and not missing:
        return ""
    wanted = (
        "no error" if kind is None else kind.__name__ + (f" that says {missing}" if missing else "")
    )
    return f"got {type(error).__name__}({str(error)[:300]!r}), wanted {wanted}"


def check(error: Exception | None, kind: type[Exception], *words: str) -> None:
    """Raise ``AssertionError`` unless ``error`` is exactly of ``kind`` and says ``words``."""
    __tracebackhide__ = True
    if why := complaint(error, kind, words):
        raise AssertionError(why) from error
