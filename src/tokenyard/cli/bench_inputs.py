"""What a bench measures, as data: cases, their inputs, and the bytes that must cross."""

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
SKEWS = ("uniform", "zipf", "recorded")

ROUTER_WIDTH, ROUTER_CONTEXT = 64, 8
ROUTER_SHARPNESS, ROUTER_FADING = 1.5, 0.7
ROUTER_TEXT = b"""
the tokens leave their rank and look for the experts that the router has picked for them, a few of
many. each rank packs its rows, tells its peers how many will come, and sends them on their way. the
experts do their work, row by row, and the results go back to the rank that owns the token, where
they are added up in a fixed order. some experts are asked more often than others, because words are
not equally common in any language, and so one rank may wait for another. a bench that sends the
same number of rows to everyone will never see this: it is why we also route real text.
"""


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
    def sizes(self) -> dict[str, Any]:
        """What every ``ExpertParallel`` for this case is made with."""
        return {
            "num_experts": self.experts,
            "hidden": self.hidden,
            "num_topk": self.topk,
            "max_tokens_per_rank": self.tokens,
        }


def sweep(**lists: list[Any]) -> list[Case]:
    """Every combination of the given lists, one per field of :class:`Case`; the last list varies
    fastest.
    """
    return [Case(**dict(zip(lists, point, strict=True))) for point in product(*lists.values())]


Sent = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""What ranks send: ``x [T, H]``, ``topk_idx [T, K]`` int64, ``topk_weights [T, K]`` of each."""


def all_sent(case: Case, num_ranks: int, number: int, seed: int) -> Sent:
    """Input ``number`` of every rank, on the CPU; the same on whichever rank computes it."""
    seed, sizes = seed * NUM_INPUTS + number, (case.tokens, case.topk, case.experts)

    def picks(rank: int) -> tuple[Tensor, Tensor]:
        if case.skew == "recorded":
            return recorded_routing(*sizes, seed * num_ranks + rank)
        return routing(case.skew, rank, num_ranks, *sizes, seed)

    dtype, ranks = DTYPES[case.dtype], range(num_ranks)
    x = [payload(rank, case.tokens, case.hidden, dtype, seed) for rank in ranks]
    idx, weights = zip(*map(picks, ranks), strict=True)
    return x, list(idx), list(weights)


def recorded_routing(
    num_tokens: int, num_topk: int, num_experts: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Route text through a small softmax router whose weights are fixed random numbers.

    The text is :data:`ROUTER_TEXT` with its words drawn anew for each ``seed``. A token is one
    byte; its hidden state is the sum of embeddings of the last :data:`ROUTER_CONTEXT` bytes, older
    ones weigh less.

    Returns:
        ``topk_idx [T, K]`` int64 and ``topk_weights [T, K]`` float32, which sum to 1 per token.
    """
    fixed = torch.Generator().manual_seed(0)
    tables = torch.randn(ROUTER_CONTEXT, 256, ROUTER_WIDTH, generator=fixed)
    router = torch.randn(ROUTER_WIDTH, num_experts, generator=fixed)
    router = router * ROUTER_SHARPNESS / ROUTER_WIDTH**0.5
    words, length = ROUTER_TEXT.split(), num_tokens + ROUTER_CONTEXT - 1
    drawn = torch.randint(len(words), (length,), generator=torch.Generator().manual_seed(seed))
    text = b" ".join(words[int(at)] for at in drawn)[:length]
    context = torch.tensor(list(text)).unfold(0, ROUTER_CONTEXT, 1).flip(1)
    hidden = sum(tables[age][context[:, age]] * ROUTER_FADING**age for age in range(ROUTER_CONTEXT))
    weights, idx = torch.topk(torch.softmax(hidden @ router, dim=1), num_topk, dim=1)
    return idx, weights / weights.sum(dim=1, keepdim=True)


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


def everything_to_everyone(
    num_tokens: int, num_ranks: int, row_bytes: int, trips: int = 1
) -> Traffic:
    """Traffic of an all-gather or a reduce-scatter of ``num_tokens`` rows a rank; an all-reduce
    takes two ``trips``.
    """
    each = [num_tokens * (num_ranks - 1) * row_bytes * trips] * num_ranks
    return Traffic(each, each)


def floor_us(traffic: list[Traffic], link_gbs: float) -> float:
    """Microseconds that the busiest link needs at ``link_gbs`` GB/s (1e9 bytes) each way, mean over
    the inputs.

    >>> floor_us([Traffic([3700, 0], [0, 3700])], 370.0)
    0.01
    """
    return sum(each.busiest for each in traffic) / len(traffic) / link_gbs / 1e3
