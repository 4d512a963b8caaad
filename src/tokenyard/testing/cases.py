"""What is measured or checked, as data: cases, their inputs, and the bytes that must cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tokenyard.formats import FORMATS
from tokenyard.routing import host_ints, tokens_in_ranks
from tokenyard.testing.routings import payload, routing
from tokenyard.types import Layout, Quantize

NUM_INPUTS = 3
"""Inputs that the timed rounds rotate over."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = {layout.name.lower(): layout for layout in Layout}
QUANTIZE = {"none": None, **{mode.name.lower(): mode for mode in Quantize}}
SKEWS = ("uniform", "zipf")
NUMBERS, WORDS = ("tokens", "hidden", "topk", "experts"), ("skew", "dtype", "layout", "quantize")
"""Fields of a case that a sweep takes lists of."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of measurement. The words are keys of the tables above.

    Attributes:
        tokens: per rank; hidden: channels; topk, experts: picks per token, experts of all ranks.
        engine: name of an engine, "" for a collective.
        sms: SMs that kernels may use, rings: bytes of rings; None for the engine's own choice.
        in_place: results lie in symmetric memory, or are taken from there.
        cast_before: the caller quantises, not the send.
        topology: nodes and ranks per node, None for one node.
    """

    tokens: int
    hidden: int
    topk: int
    experts: int
    skew: str = "uniform"
    dtype: str = "bf16"
    layout: str = "flat"
    quantize: str = "none"
    engine: str = ""
    sms: int | None = None
    rings: int | None = None
    in_place: bool = False
    cast_before: bool = False
    topology: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one dispatched row: payload and scales."""
        mode = QUANTIZE[self.quantize]
        if mode is None:
            return self.combined_row_bytes
        return self.hidden + 4 * FORMATS[mode].scale_words(self.hidden)

    @property
    def combined_row_bytes(self) -> int:
        """Bytes of one row on its way back."""
        return self.hidden * DTYPES[self.dtype].itemsize

    @property
    def arguments(self) -> dict[str, Any]:
        """What every ``ExpertParallel`` for this case is made with, besides engine and device."""
        sizes = {"num_experts": self.experts, "hidden": self.hidden, "num_topk": self.topk}
        limits = {"num_sms": self.sms, "buffer_bytes": self.rings, "topology": self.topology}
        return {**sizes, "max_tokens_per_rank": self.tokens, **limits}


def sweep(**lists: list[Any]) -> list[Case]:
    """Every combination of the lists, one per field of :class:`Case`; the last varies fastest."""
    return [Case(**dict(zip(lists, point, strict=True))) for point in product(*lists.values())]


Sent = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""What ranks send: ``x [T, H]``, ``topk_idx [T, K]`` int64, ``topk_weights [T, K]`` of each."""


def all_sent(case: Case, num_ranks: int, number: int, seed: int) -> Sent:
    """Input ``number`` of every rank, on the CPU; the same on whichever rank computes it."""
    seed, ranks, dtype = seed * NUM_INPUTS + number, range(num_ranks), DTYPES[case.dtype]
    sizes = (num_ranks, case.tokens, case.topk, case.experts, seed)
    x = [payload(rank, case.tokens, case.hidden, dtype, seed) for rank in ranks]
    idx, weights = zip(*(routing(case.skew, rank, *sizes) for rank in ranks), strict=True)
    return x, list(idx), list(weights)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that cross a wire in one call, per rank; what a rank sends to itself is left out."""

    sent: list[int]
    received: list[int]

    @property
    def busiest(self) -> int:
        """Bytes in the busier direction of the busiest rank: links work both ways at once."""
        return max(*self.sent, *self.received)

    @property
    def moved(self) -> list[int]:
        """Sent plus received, per rank."""
        return [sent + received for sent, received in zip(self.sent, self.received, strict=True)]


def once_per_rank(topk_idx: Sequence[Tensor], num_experts: int, row_bytes: int) -> Traffic:
    """Traffic of rows that cross once per (token, destination rank); ``topk_idx [T, K]`` per rank.

    >>> once_per_rank([torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 0], [3, 2]])], 4, 10)
    Traffic(sent=[10, 10], received=[10, 10])
    """
    picked = [tokens_in_ranks(idx, num_experts, len(topk_idx)).sum(0) for idx in topk_idx]
    rows = torch.stack(picked).fill_diagonal_(0) * row_bytes
    return Traffic(host_ints(rows.sum(1)), host_ints(rows.sum(0)))


def mean_busiest(traffic: Sequence[Traffic]) -> float:
    """Bytes of the busiest link, mean over the inputs."""
    return sum(each.busiest for each in traffic) / len(traffic)
