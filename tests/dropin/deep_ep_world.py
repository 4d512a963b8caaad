"""Inputs of all ranks that every rank can compute, and what must come of them: plain loops, nothing
of the library's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tokenyard.testing import Ranks

TOKENS = {
    "even": lambda rank: 12,
    "uneven": lambda rank: 5 * rank + 3,
    "empty first": lambda rank: 9 * rank,
    "only last": lambda rank: 0,
    "few": lambda rank: 3 + rank,
}
"""Tokens by rank; of "only last" the last rank has 7."""


@dataclass
class World:
    """Tokens of all ranks, with distinct picks of which some are -1.

    ``whole``: ``x`` holds small whole numbers and weights are quarters, so that bf16 holds every
    product and sum exactly.
    """

    size: int
    tokens: str = "uneven"
    num_experts: int = 12
    num_topk: int = 3
    hidden: int = 128
    seed: int = 0
    dropped: float = 0.1
    whole: bool = True
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, ranks: Ranks, *arguments: Any, **options: Any) -> World:
        """For the ranks of a test, on their device."""
        return cls(ranks.world_size, *arguments, device=ranks.device, **options)

    def __post_init__(self) -> None:
        self.x: list[Tensor] = []
        self.idx: list[Tensor] = []
        self.weights: list[Tensor] = []
        for rank in range(self.size):
            generator = torch.Generator(device="cpu").manual_seed(1000 * self.seed + rank)
            count = (
                7
                if self.tokens == "only last" and rank == self.size - 1
                else TOKENS[self.tokens](rank)
            )
            scores = torch.rand(count, self.num_experts, generator=generator)
            idx = scores.topk(self.num_topk, dim=1).indices
            idx[torch.rand(idx.shape, generator=generator) < self.dropped] = -1
            shape = (count, self.hidden)
            x = (
                torch.randint(-8, 9, shape, generator=generator).float()
                if self.whole
                else torch.randn(shape, generator=generator)
            )
            self.x.append(x.to(self.device, torch.bfloat16))
            self.idx.append(idx.to(self.device))
            quarters = torch.randint(0, 4, idx.shape, generator=generator) / 4
            weights = quarters if self.whole else torch.rand(idx.shape, generator=generator)
            self.weights.append(weights.to(self.device))

    def experts_of(self, rank: int) -> range:
        """Global ids on a rank: contiguous, the first ranks hold one more."""
        share, extra = divmod(self.num_experts, self.size)
        first = rank * share + min(rank, extra)
        return range(first, first + share + (rank < extra))

    @cached_property
    def rows(self) -> list[list[tuple[int, int]]]:
        """(source rank, token) of each row that a rank gets, in order."""
        return [
            [
                (source, token)
                for source in range(self.size)
                for token, picks in enumerate(self.idx[source].tolist())
                if any(pick in self.experts_of(rank) for pick in picks)
            ]
            for rank in range(self.size)
        ]

    def take(self, rank: int, per_token: list[Tensor]) -> Tensor:
        """Rows of ``rank`` from what each source rank has per token."""
        taken = [per_token[source][token] for source, token in self.rows[rank]]
        return torch.stack(taken) if taken else per_token[0][:0]

    def local_idx(self, rank: int) -> Tensor:
        """``[N, K]`` local ids, -1 elsewhere."""
        mine = self.experts_of(rank)
        idx = self.take(rank, self.idx)
        return torch.where((idx >= mine.start) & (idx < mine.stop), idx - mine.start, -1)

    def local_weights(self, rank: int) -> Tensor:
        return torch.where(self.local_idx(rank) < 0, 0.0, self.take(rank, self.weights))

    def counts(self, rank: int) -> list[int]:
        """Rows of each local expert."""
        return [
            int((self.local_idx(rank) == expert).sum())
            for expert in range(len(self.experts_of(rank)))
        ]

    def prefix(self, rank: int) -> list[int]:
        """Rows that ``rank`` gets from the ranks up to each."""
        return [sum(source <= upto for source, _ in self.rows[rank]) for upto in range(self.size)]

    def ranks_of(self, rank: int, token: int) -> list[int]:
        """Ranks that a token of ``rank`` goes to."""
        return [
            peer
            for peer in range(self.size)
            if any(p in self.experts_of(peer) for p in self.idx[rank][token].tolist())
        ]

    def in_ranks(self, rank: int) -> Tensor:
        """bool ``[T, R]``."""
        goes = torch.zeros(len(self.idx[rank]), self.size, dtype=torch.bool, device=self.device)
        for token in range(len(goes)):
            goes[token, self.ranks_of(rank, token)] = True
        return goes

    def work(self, rank: int, rows: Tensor) -> Tensor:
        """What the experts of ``rank`` make of rows in normal mode."""
        return rows * (rank + 1)

    def combined(self, rank: int) -> Tensor:
        """The sum of :meth:`work` over the ranks of each token, in float32."""
        total = torch.zeros(len(self.idx[rank]), self.hidden, device=self.device)
        for token in range(len(total)):
            total[token] = (
                sum(peer + 1 for peer in self.ranks_of(rank, token)) * self.x[rank][token].float()
            )
        return total

    def coefficients(self, idx: Tensor, weights: Tensor) -> Tensor:
        """What a layer of experts that each scale by 1, 2 or 3 multiplies a row with, from global
        ids: ``[N, 1]``.
        """
        return torch.where(idx < 0, 0.0, weights * (idx % 3 + 1)).sum(1, keepdim=True)

    def layer(self, rank: int, rows: Tensor, local_idx: Tensor, weights: Tensor) -> Tensor:
        """What the experts of ``rank`` make of rows, weighted."""
        known = torch.where(local_idx < 0, -1, local_idx + self.experts_of(rank).start)
        return (rows.float() * self.coefficients(known, weights)).to(rows.dtype)

    def layered(self, rank: int) -> Tensor:
        """The whole layer for the tokens of ``rank``, in one process."""
        return (self.x[rank].float() * self.coefficients(self.idx[rank], self.weights[rank])).to(
            torch.bfloat16
        )

    def expert_rows(self, rank: int) -> list[list[tuple[int, int]]]:
        """(source rank, token) of the rows of each local expert, in order."""
        return [
            [
                (source, token)
                for source in range(self.size)
                for token, picks in enumerate(self.idx[source].tolist())
                if expert in picks
            ]
            for expert in self.experts_of(rank)
        ]

    def by_expert(self, rank: int, blocks: Tensor) -> Tensor:
        """What the experts of ``rank`` make of blocks ``[L, rows, H]``: no two neighbours the same,
        as in :meth:`layer`.
        """
        factors = torch.tensor(
            [expert % 3 + 1 for expert in self.experts_of(rank)], device=blocks.device
        )
        return (blocks * factors.view(-1, 1, 1)).to(blocks.dtype)

    def weighted(self, rank: int) -> Tensor:
        """The whole layer for the tokens of ``rank``, in float32; exact if ``whole``."""
        return self.x[rank].float() * self.coefficients(self.idx[rank], self.weights[rank])


def calc_diff(got: Tensor, want: Tensor) -> float:
    """DeepEP's measure of how far two tensors are apart: 1 - cosine of both plus one; 0 if there is
    nothing to compare.
    """
    if got.numel() == 0 == want.numel():
        return 0.0
    a, b = got.double() + 1, want.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 data and a scale per 128 channels."""
    groups = x.float().view(len(x), x.shape[1] // 128, 128)
    largest = groups.abs().amax(2).clamp(1e-4)
    return (groups * (448.0 / largest.unsqueeze(2))).to(torch.float8_e4m3fn).view(
        x.shape
    ), largest / 448.0


def from_fp8(data: Tensor, scales: Tensor) -> Tensor:
    """bf16 rows, from float32 scales or packed exponents."""
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    return (data.float() * scales.repeat_interleave(128, -1)[..., : data.shape[-1]]).to(
        torch.bfloat16
    )
