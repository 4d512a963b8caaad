"""What tests of DeepEP's V2 buffers share: buffers of both generations, good calls, and what must
come of them, worked out by plain loops over :class:`World`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from deep_ep_world import World
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.deep_ep.ep_buffer import EPBuffer
from tokenyard.testing import Ranks

KINDS: tuple[Any, ...] = (ElasticBuffer, EPBuffer)
MOST = 64
"""Tokens per rank that buffers are made for; no world has more."""

Made = TypeVar("Made")


class Known(World):
    """Its answers are worked out once, as many calls are checked against them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.picks = [cast("list[list[int]]", idx.tolist()) for idx in self.idx]
        self.more = [weights + 1 for weights in self.weights]
        self._kept: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def local_idx(self, rank: int) -> Tensor:
        return self.once(("idx", rank), lambda: World.local_idx(self, rank))

    def local_weights(self, rank: int) -> Tensor:
        return self.once(("weights", rank), lambda: World.local_weights(self, rank))

    def counts(self, rank: int) -> list[int]:
        return self.once(("counts", rank), lambda: World.counts(self, rank))

    def prefix(self, rank: int) -> list[int]:
        return self.once(("prefix", rank), lambda: World.prefix(self, rank))

    def combined(self, rank: int) -> Tensor:
        return self.once(("combined", rank), lambda: World.combined(self, rank))

    def owner(self, pick: int) -> int | None:
        return next((peer for peer in range(self.size) if pick in self.experts_of(peer)), None)

    def places(self, rank: int) -> list[list[int]]:
        """Of each pick: the place of its token among those that go to the same rank, at the first
        pick there, else -1.
        """
        sent, places = [0] * self.size, list[list[int]]()
        for picks in self.picks[rank]:
            here, seen = list[int](), set[int]()
            for owner in map(self.owner, picks):
                here.append(-1 if owner is None or owner in seen else sent[owner])
                seen |= set() if owner is None else {owner}
            for owner in seen:
                sent[owner] += 1
            places.append(here)
        return places

    def blocks(self, rank: int, alignment: int) -> Blocks:
        key = "blocks", rank, alignment
        return self.once(key, lambda: Blocks(self, rank, alignment))


@lru_cache(maxsize=16)
def _known(size: int, device: Any, tokens: str, options: tuple[tuple[str, Any], ...]) -> Known:
    return Known(size, tokens, device=device, **dict(options))


def made(ranks: Ranks, kind: Any, **changes: Any) -> Any:
    """A buffer for small worlds."""
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": 128, "num_topk": 3}
    return kind(ranks.group, **{**sizes, **changes})


def world_of(ranks: Ranks, tokens: str, **options: Any) -> Known:
    """Tokens of all ranks; experts that divide by the ranks unless ``options`` say others."""
    given = {"num_experts": 3 * ranks.world_size + 3, **options}
    return _known(ranks.world_size, ranks.device, tokens, tuple(given.items()))


def fresh(buffer: Any, world: Known, **changes: Any) -> tuple[Any, ...]:
    """A dispatch of this rank's tokens, with weights."""
    rank = buffer.rank_idx
    arguments: dict[str, Any] = {
        "topk_idx": world.idx[rank],
        "topk_weights": world.weights[rank],
        "num_experts": world.num_experts,
    }
    return buffer.dispatch(changes.pop("x", world.x[rank]), **{**arguments, **changes})


def up(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class Blocks:
    """What ``do_expand`` must bring to a rank: one row per token and local expert."""

    def __init__(self, world: Known, rank: int, alignment: int) -> None:
        self.world, self.mine = world, world.experts_of(rank)
        self.of_experts = world.expert_rows(rank)
        self.counts = [len(rows) for rows in self.of_experts]
        self.aligned = [up(count, alignment) for count in self.counts]
        self.starts = [sum(self.aligned[:expert]) for expert in range(len(self.aligned))]
        self.num_rows = sum(self.aligned)
        self.psum = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        self.x, self.weights = self.rows(world.x), self.weights_of(world.weights)
        self.more = self.weights_of(world.more)
        self.slots = [self._slots(*row) for row in world.rows[rank]]

    def _all(self) -> Iterator[tuple[int, int, int, int]]:
        """Row, source rank, token, pick."""
        for number, of_expert in enumerate(self.of_experts):
            for place, (source, token) in enumerate(of_expert):
                pick = self.world.picks[source][token].index(self.mine[number])
                yield self.starts[number] + place, source, token, pick

    def rows(self, per_token: list[Tensor]) -> Tensor:
        """From what each source rank has per token; zeros on padding."""
        like = per_token[0]
        out = torch.zeros(self.num_rows, *like.shape[1:], dtype=like.dtype, device=like.device)
        for row, source, token, _ in self._all():
            out[row] = per_token[source][token]
        return out

    def weights_of(self, per_pick: list[Tensor]) -> Tensor:
        """The weight of each row."""
        out = torch.zeros(self.num_rows, device=per_pick[0].device)
        for row, source, token, pick in self._all():
            out[row] = per_pick[source][token, pick]
        return out

    def _slots(self, source: int, token: int) -> list[int]:
        """The row of each pick of a received token; -1 where it is elsewhere."""
        return [
            self.starts[pick - self.mine.start]
            + self.of_experts[pick - self.mine.start].index((source, token))
            if pick in self.mine
            else -1
            for pick in self.world.picks[source][token]
        ]

    def work(self, rows: Tensor) -> Tensor:
        """Each expert scales its rows by 1, 2 or 3."""
        out = rows.clone()
        for number, (start, count) in enumerate(zip(self.starts, self.aligned, strict=True)):
            out[start : start + count] *= self.mine[number] % 3 + 1
        return out
