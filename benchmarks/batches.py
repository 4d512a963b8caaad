"""Large inputs made on the device, and what must come of them, bit for bit, from a few torch
operations there. The oracle would take minutes for batches of this size; tests hold
:class:`DeviceTruth` against it on small ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.formats import quantize
from tokenyard.reference_sums import sum_ranks
from tokenyard.routing import expert_bounds
from tokenyard.testing.baselines import gathered
from tokenyard.testing.cases import DTYPES, NUM_INPUTS, Case
from tokenyard.testing.checked_calls import Batch, share
from tokenyard.testing.compare import assert_same_bits
from tokenyard.testing.routings import routing


def make_batches(case: Case, device: torch.device, seed: int) -> list[Batch]:
    """The inputs of ``case`` that timed rounds rotate over. Collective."""
    return [_batch(case, device, seed * NUM_INPUTS + number) for number in range(NUM_INPUTS)]


def _batch(case: Case, device: torch.device, seed: int) -> Batch:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device).manual_seed(seed * size + rank)
    shape, dtype = (case.tokens, case.hidden), DTYPES[case.dtype]
    x = torch.randn(*shape, dtype=dtype, device=device, generator=generator)
    picks = routing(case.skew, rank, size, case.tokens, case.topk, case.experts, seed)
    idx, weights = (gathered(each.to(device)).view(size, *each.shape) for each in picks)
    return Batch(x, idx, weights, rank, case.experts)


@dataclass(frozen=True)
class DeviceTruth:
    """What calls on one batch must return on this rank; ``x [R * T, H]`` is what all ranks send, in
    rank order. ``per_node``: ranks of a node, which are summed first; None: all.
    """

    batch: Batch
    x: Tensor
    per_node: int | None = None

    @classmethod
    def of(cls, batch: Batch) -> DeviceTruth:
        """Collective."""
        return cls(batch, gathered(batch.x))

    @cached_property
    def _here(self) -> Tensor:
        """``[R * T, K]``: which picks are of this rank's experts."""
        return self.batch.picks_of(self.batch.rank).flatten(0, 1)

    @cached_property
    def by_expert(self) -> Tensor:
        """Rows of ``x`` in the order of ``EXPERT_MAJOR``: by expert, source rank, token."""
        expert = self.batch.topk_idx.flatten(0, 1)[self._here]
        return self._here.nonzero()[:, 0][torch.argsort(expert, stable=True)]

    @cached_property
    def quantized(self) -> ty.Quantized:
        return quantize(self.x, ty.Quantize.FP8)

    def check_rows(self, recv: ty.Received) -> None:
        """Payload, scales and sources of any dispatch."""
        rows = self.batch.flat if recv.handle.layout is ty.Layout.FLAT else self.by_expert
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
        batch, rows = self.batch, self.batch.flat
        first, end = expert_bounds(batch.experts, batch.topk_idx.shape[0])[batch.rank :][:2]
        here, idx = self._here[rows], batch.topk_idx.flatten(0, 1)[rows] - first
        assert recv.topk_idx is not None and recv.topk_weights is not None
        assert_same_bits(recv.topk_idx, torch.where(here, idx, -1), what="topk_idx")
        weights = torch.where(here, batch.topk_weights.flatten(0, 1)[rows], 0.0)
        assert_same_bits(recv.topk_weights, weights, what="topk_weights")
        counts = torch.bincount(idx[here], minlength=end - first).to(torch.int32)
        assert_same_bits(recv.tokens_per_expert, counts, what="tokens_per_expert")

    def check_combined(self, y: Tensor) -> None:
        """The sum of ``FLAT`` rows times :func:`share` of their rank, by the oracle's tree."""
        batch = self.batch
        parts: list[Tensor] = []
        for rank in range(batch.topk_idx.shape[0]):
            sent = batch.picks_of(rank)[batch.rank].any(1, keepdim=True)
            parts.append(torch.where(sent, (batch.x * share(rank)).float(), 0.0))
        wanted = sum_ranks(parts, self.per_node, y.dtype).to(y.dtype)
        assert_same_bits(y, wanted, what="combined")
