"""What tests of DeepEP's V2 buffers share: buffers of both generations, good calls, and what must
come of them, worked out by plain loops over :class:`World`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from deep_ep_world import World
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.deep_ep.ep_buffer import EPBuffer
from tokenyard.testing import Ranks

KINDS: tuple[Any, ...] = (ElasticBuffer, EPBuffer)
MOST = 64
"""Tokens per rank that buffers are made for; no world has more."""


def made(ranks: Ranks, kind: Any, **changes: Any) -> Any:
    """A buffer for small worlds."""
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": 128, "num_topk": 3}
    return kind(ranks.group, **{**sizes, **changes})


def world_of(ranks: Ranks, tokens: str, **options: Any) -> World:
    """Tokens of all ranks; experts that divide by the ranks unless ``options`` say others."""
    return World.of(ranks, tokens, **{"num_experts": 3 * ranks.world_size + 3, **options})


def fresh(buffer: Any, world: World, **changes: Any) -> tuple[Any, ...]:
    """A dispatch of this rank's tokens, with weights."""
    rank = buffer.rank_idx
    arguments: dict[str, Any] = {
        "topk_idx": world.idx[rank],
        "topk_weights": world.weights[rank],
        "num_experts": world.num_experts,
    }
    return buffer.dispatch(changes.pop("x", world.x[rank]), **{**arguments, **changes})


def ids(idx: Tensor) -> list[list[int]]:
    """Picks of each token."""
    return cast("list[list[int]]", idx.tolist())


def up(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class Blocks:
    """What ``do_expand`` must bring to a rank: one row per token and local expert."""

    def __init__(self, world: World, rank: int, alignment: int) -> None:
        self.world, self.rank = world, rank
        self.of_experts = world.expert_rows(rank)
        self.counts = [len(rows) for rows in self.of_experts]
        self.aligned = [up(count, alignment) for count in self.counts]
        self.starts = [sum(self.aligned[:expert]) for expert in range(len(self.aligned))]
        self.num_rows = sum(self.aligned)
        self.psum = [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def rows(self, per_token: list[Tensor]) -> Tensor:
        """From what each source rank has per token; zeros on padding."""
        like = per_token[0]
        out = torch.zeros(self.num_rows, *like.shape[1:], dtype=like.dtype, device=like.device)
        for start, of_expert in zip(self.starts, self.of_experts, strict=True):
            for place, (source, token) in enumerate(of_expert):
                out[start + place] = per_token[source][token]
        return out

    def weights(self, per_pick: list[Tensor]) -> Tensor:
        """The weight of each row."""
        out = torch.zeros(self.num_rows, device=per_pick[0].device)
        for number, of_expert in enumerate(self.of_experts):
            expert = self.world.experts_of(self.rank)[number]
            for place, (source, token) in enumerate(of_expert):
                pick = ids(self.world.idx[source])[token].index(expert)
                out[self.starts[number] + place] = per_pick[source][token, pick]
        return out

    def slots(self) -> list[list[int]]:
        """The row of each pick of each received token; -1 where it is elsewhere."""
        mine = self.world.experts_of(self.rank)
        return [
            [
                self.starts[pick - mine.start]
                + self.of_experts[pick - mine.start].index((source, token))
                if pick in mine
                else -1
                for pick in ids(self.world.idx[source])[token]
            ]
            for source, token in self.world.rows[self.rank]
        ]

    def work(self, rows: Tensor) -> Tensor:
        """Each expert scales its rows by 1, 2 or 3."""
        out = rows.clone()
        for number, (start, count) in enumerate(zip(self.starts, self.aligned, strict=True)):
            out[start : start + count] *= self.world.experts_of(self.rank)[number] % 3 + 1
        return out
