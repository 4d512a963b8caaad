"""Large inputs made on the device, and what must come of them, bit for bit, from a few torch
operations there.

The oracle (``reference.py``) would take minutes for batches of this size;
``tests/test_bench_nvlink.py`` holds :class:`Truth` against it on small ones. Rows that go back are
those that came, times ``2.0 ** -rank``: sums differ if a rank is missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.bench_baselines import all_gather
from tokenyard.cli.bench_cases import row_words
from tokenyard.cli.bench_inputs import NUM_INPUTS, Job, Traffic, once_per_rank
from tokenyard.formats import quantize
from tokenyard.routing import expert_bounds
from tokenyard.testing.compare import assert_same_bits
from tokenyard.testing.routings import routing


@dataclass(frozen=True, slots=True)
class Batch:
    """What this rank sends in one input, and what all ranks pick. On the device.

    Attributes:
        x: ``[T, H]`` bf16 random numbers.
        topk_idx, topk_weights: ``[R, T, K]`` int64 and float32 of all ranks.
        rank, experts: this rank, number of experts over all.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    rank: int
    experts: int

    def traffic(self, row_bytes: int, *, back: bool = False) -> Traffic:
        """What crosses the wire once per (token, rank)."""
        there = once_per_rank(list(self.topk_idx.cpu()), self.experts, row_bytes)
        return Traffic(there.received, there.sent) if back else there


def make_batches(job: Job, device: torch.device, seed: int) -> list[Batch]:
    """The inputs of ``job`` that timed rounds rotate over. Collective."""
    return [_batch(job, device, seed * NUM_INPUTS + number) for number in range(NUM_INPUTS)]


def _batch(job: Job, device: torch.device, seed: int) -> Batch:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(seed * size + rank)
    x = torch.randn(
        job.tokens, job.hidden, dtype=torch.bfloat16, device=device, generator=generator
    )
    picks = routing(job.skew, rank, size, job.tokens, job.topk, job.experts, seed)
    idx, weights = (_everybodys(each.to(device)).view(size, job.tokens, job.topk) for each in picks)
    return Batch(x, idx, weights, rank, job.experts)


def _everybodys(mine: Tensor) -> Tensor:
    """``mine [T, W]`` of all ranks ``[R * T, W]``. Collective."""
    out = mine.new_empty(dist.get_world_size() * mine.shape[0], mine.shape[1])
    all_gather(out, mine)
    return out


def share(rank: int) -> float:
    """What rank ``rank`` multiplies rows with before they go back."""
    return 2.0**-rank


@dataclass(frozen=True)
class Truth:
    """What one batch must come to on this rank. ``x [R * T, H]`` is what all ranks send, in rank
    order.
    """

    batch: Batch
    x: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Truth:
        """Collective."""
        words = _everybodys(row_words(batch.x, None))
        return cls(batch, words.view(torch.bfloat16))

    @cached_property
    def _here(self) -> Tensor:
        """``[R * T, K]``: which picks are of this rank's experts."""
        return self._picks_of(self.batch.rank).flatten(0, 1)

    def _picks_of(self, rank: int) -> Tensor:
        bounds = expert_bounds(self.batch.experts, self.batch.topk_idx.shape[0])
        return (self.batch.topk_idx >= bounds[rank]) & (self.batch.topk_idx < bounds[rank + 1])

    @cached_property
    def flat(self) -> Tensor:
        """Rows of ``x`` in the order of ``FLAT``: by source rank, then token."""
        return self._here.any(1).nonzero().flatten()

    @cached_property
    def by_expert(self) -> Tensor:
        """Rows of ``x`` in the order of ``EXPERT_MAJOR``: by expert, then source rank,
        then token.
        """
        token = self._here.nonzero()[:, 0]
        expert = self.batch.topk_idx.flatten(0, 1)[self._here]
        return token[torch.argsort(expert, stable=True)]

    @cached_property
    def quantized(self) -> ty.Quantized:
        return quantize(self.x, ty.Quantize.FP8)

    def check_rows(self, recv: ty.Received) -> None:
        """Payload, scales and sources of any dispatch."""
        rows = self.flat if recv.handle.layout is ty.Layout.FLAT else self.by_expert
        num_tokens = self.batch.x.shape[0]
        source = (rows // num_tokens << 32) | rows % num_tokens
        assert_same_bits(recv.source, source, what="source")
        if recv.x.dtype == self.x.dtype:
            assert_same_bits(recv.x, self.x[rows], what="x", source=source)
            return
        assert recv.scales is not None, "scales are missing"
        data: Any = self.quantized.data.view(torch.uint8)
        assert_same_bits(recv.x.view(torch.uint8), data[rows], what="x", source=source)
        assert_same_bits(recv.scales, self.quantized.scales[rows], what="scales", source=source)

    def check_routed(self, recv: ty.Received) -> None:
        """Everything that a fresh ``FLAT`` dispatch returns."""
        self.check_rows(recv)
        batch, rows = self.batch, self.flat
        bounds = expert_bounds(batch.experts, batch.topk_idx.shape[0])
        first, end = bounds[batch.rank], bounds[batch.rank + 1]
        here, idx = self._here[rows], batch.topk_idx.flatten(0, 1)[rows] - first
        assert recv.topk_idx is not None and recv.topk_weights is not None
        assert_same_bits(recv.topk_idx, torch.where(here, idx, -1), what="topk_idx")
        weights = torch.where(here, batch.topk_weights.flatten(0, 1)[rows], 0.0)
        assert_same_bits(recv.topk_weights, weights, what="topk_weights")
        counts = torch.bincount(idx[here], minlength=end - first).to(torch.int32)
        assert_same_bits(recv.tokens_per_expert, counts, what="tokens_per_expert")

    def check_combined(self, y: Tensor) -> None:
        """The sum of ``FLAT`` rows that every rank has multiplied by its :func:`share`, added in
        rank order.
        """
        batch = self.batch
        total = torch.zeros(batch.x.shape, dtype=torch.float32, device=batch.x.device)
        for rank in range(batch.topk_idx.shape[0]):
            sent = self._picks_of(rank)[batch.rank].any(1, keepdim=True)
            total += torch.where(sent, (batch.x * share(rank)).float(), 0.0)
        assert_same_bits(y, total.to(y.dtype), what="combined")
