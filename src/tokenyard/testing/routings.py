"""Named routings and payloads that every rank can compute for any rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from tokenyard.routing import expert_bounds

_NOBODY = -1


def routing(
    name: str,
    rank: int,
    world_size: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Picks of one rank: ``topk_idx [T, K]`` int64 and ``topk_weights [T, K]`` float32 in ``[0,
    1)``, on the CPU.

    The same arguments give the same picks in any process. ``T`` is ``num_tokens``, but 0 on the odd
    ranks of ``empty_ranks``. Picks without an expert have a weight too, which nobody may use. With
    more picks than experts to choose from, the last picks are -1.

    Args:
        name: one of :data:`ROUTINGS`.
        seed: another seed gives other picks.
    """
    if name not in _MAKERS:
        raise ValueError(f"routing {name!r} is unknown; use one of {', '.join(ROUTINGS)}")
    mine = _generator("routing", name, rank, seed)
    share = _Share(
        rank, world_size, num_tokens, num_topk, num_experts, mine, _generator("routing", name, seed)
    )
    topk_idx = _MAKERS[name](share)
    return topk_idx, torch.rand(topk_idx.shape, generator=mine)


def payload(rank: int, num_tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows ``[num_tokens, hidden]`` on the CPU, the same in any process.

    Rows of at least 8 elements begin with the digits of ``rank`` (2) and of the token (6) in base
    8, so that each says whose it is and no two are equal (up to 64 ranks and 262144 tokens). Every
    dtype holds these digits exactly.
    """
    random = _generator("payload", rank, seed)
    if dtype.is_floating_point:
        rows = torch.randn(num_tokens, hidden, generator=random)
    else:
        known = torch.iinfo(dtype)
        rows = torch.randint(known.min, known.max + 1, (num_tokens, hidden), generator=random)
    if hidden >= 8:
        numbers = rank * 8**6 + torch.arange(num_tokens)
        rows[:, :8] = numbers[:, None] // 8 ** torch.arange(7, -1, -1) % 8
    return rows.to(dtype)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank's picks are made from: random numbers, ``mine`` and ``common`` to all ranks."""

    rank: int
    world_size: int
    num_tokens: int
    num_topk: int
    num_experts: int
    mine: Generator
    common: Generator

    def nothing(self) -> Tensor:
        return torch.full((self.num_tokens, self.num_topk), _NOBODY)

    def experts_of(self, rank: int) -> slice:
        return slice(*expert_bounds(self.num_experts, self.world_size)[rank : rank + 2])

    def pick(self, popularity: Tensor) -> Tensor:
        """Distinct experts for each token, drawn by ``popularity [num_experts]``, where not 0."""
        times = torch.empty(self.num_tokens, self.num_experts).exponential_(generator=self.mine)
        width = min(self.num_topk, self.num_experts)
        first = (times / popularity).topk(width, largest=False)
        picks = self.nothing()
        picks[:, :width] = first.indices.masked_fill(first.values.isinf(), _NOBODY)
        return picks

    def pick_among(self, experts: slice) -> Tensor:
        popularity = torch.zeros(self.num_experts)
        popularity[experts] = 1.0
        return self.pick(popularity)

    def draw(self, below: int) -> int:
        """A number that is the same on every rank."""
        return int(torch.randint(below, (), generator=self.common))


def _uniform(share: _Share) -> Tensor:
    """Distinct experts, each as likely as the others."""
    return share.pick(torch.ones(share.num_experts))


def _zipf(share: _Share) -> Tensor:
    """Distinct experts, the n-th most popular with a chance of 1 / n; all ranks agree on which."""
    return share.pick(1.0 / (1.0 + torch.randperm(share.num_experts, generator=share.common)))


def _dropped(share: _Share) -> Tensor:
    """Half of the picks are -1, and every third token, from the first on, has none."""
    picks = _uniform(share)
    picks[torch.rand(picks.shape, generator=share.mine) < 0.5] = _NOBODY
    picks[::3] = _NOBODY
    return picks


def _duplicates(share: _Share) -> Tensor:
    """Drawn from half as many experts: with K > 1 every token picks one at least twice."""
    distinct = share.pick(torch.ones(share.num_experts))
    half = min((share.num_topk + 1) // 2, share.num_experts)
    return distinct.gather(1, torch.randint(half, distinct.shape, generator=share.mine))


def _one_expert(share: _Share) -> Tensor:
    """Every token of every rank picks the same expert, once, at changing positions."""
    picks = share.nothing()
    tokens = torch.arange(share.num_tokens)
    picks[tokens, tokens % share.num_topk] = share.draw(share.num_experts)
    return picks


def _one_rank(share: _Share) -> Tensor:
    """Every pick of every rank lies on the same rank."""
    return share.pick_among(share.experts_of(share.draw(min(share.world_size, share.num_experts))))


def _local(share: _Share) -> Tensor:
    """Every rank picks its own experts only."""
    return share.pick_among(share.experts_of(share.rank))


def _empty_ranks(share: _Share) -> Tensor:
    """Odd ranks have no tokens."""
    picks = _uniform(share)
    return picks[:0] if share.rank % 2 else picks


_MAKERS: dict[str, Callable[[_Share], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "dropped": _dropped,
    "duplicates": _duplicates,
    "one_expert": _one_expert,
    "one_rank": _one_rank,
    "local": _local,
    "empty_ranks": _empty_ranks,
    "none": _Share.nothing,
}

ROUTINGS = tuple(_MAKERS)
"""Names that :func:`routing` knows."""


def _generator(*key: str | int) -> Generator:
    return Generator().manual_seed(zlib.crc32(repr(key).encode()))
