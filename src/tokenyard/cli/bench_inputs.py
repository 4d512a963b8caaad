"""What ``tokenyard bench`` sends: the points of a sweep, their inputs, and the bytes that must
cross the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

import torch
from torch import Tensor

from tokenyard.formats import FORMATS
from tokenyard.routing import tokens_in_ranks
from tokenyard.testing.routings import payload, routing
from tokenyard.types import Layout, Quantize

NUM_INPUTS = 3
"""Inputs that the timed rounds rotate over."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = {layout.name.lower(): layout for layout in Layout}
QUANTIZE = {"none": None, **{mode.name.lower(): mode for mode in Quantize}}
SKEWS = ("uniform", "zipf", "recorded")

ROUTER_WIDTH = 64
ROUTER_CONTEXT = 8
ROUTER_SHARPNESS = 1.5
ROUTER_FADING = 0.7
ROUTER_TEXT = (
    b"\n"
    b"the tokens leave their rank and look for the experts that the router has picked for "
    b"them, a few of many. each rank\n"
    b"packs its rows, tells its peers how many will come, and sends them on their way. the "
    b"experts do their work, row by\n"
    b"row, and the results go back to the rank that owns the token, where they are added "
    b"up in a fixed order. some experts\n"
    b"are asked more often than others, because words are not equally common in any "
    b"language, and so one rank may wait for\n"
    b"another. a bench that sends the same number of rows to everyone will never see this: "
    b"it is why we also route real\n"
    b"text.\n"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One point of a sweep. ``tokens`` is per rank; the words are keys of the tables above."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    skew: str
    dtype: str
    layout: str
    quantize: str

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


def sweep(**lists: list[int] | list[str]) -> list[Job]:
    """Every combination of the given lists, one per field of :class:`Job`."""
    names = [field.name for field in fields(Job)]
    return [Job(*point) for point in product(*(lists[name] for name in names))]  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends in one input, on the CPU.

    Attributes:
        x: ``[T, H]`` random numbers.
        topk_idx: ``[T, K]`` int64.
        topk_weights: ``[T, K]`` float32.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def all_sent(job: Job, num_ranks: int, number: int, seed: int) -> list[Sent]:
    """Input ``number`` of every rank; the same on whichever rank computes it."""
    return [_sent(job, rank, num_ranks, seed * NUM_INPUTS + number) for rank in range(num_ranks)]


def _sent(job: Job, rank: int, num_ranks: int, seed: int) -> Sent:
    x = payload(rank, job.tokens, job.hidden, DTYPES[job.dtype], seed)
    if job.skew == "recorded":
        return Sent(
            x, *recorded_routing(job.tokens, job.topk, job.experts, seed * num_ranks + rank)
        )
    return Sent(x, *routing(job.skew, rank, num_ranks, job.tokens, job.topk, job.experts, seed))


def recorded_routing(
    num_tokens: int, num_topk: int, num_experts: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Route text through a small softmax router whose weights are fixed random numbers (no trained
    model).

    The text is :data:`ROUTER_TEXT` with its words drawn anew for each ``seed``. A token is one
    byte; its hidden state is the sum of embeddings of the last :data:`ROUTER_CONTEXT` bytes, older
    ones weigh less.

    Returns: ``topk_idx [T, K]`` int64 and ``topk_weights [T, K]`` float32: the largest
    probabilities, made to sum to 1.
    """
    fixed = torch.Generator().manual_seed(0)
    tables = torch.randn(ROUTER_CONTEXT, 256, ROUTER_WIDTH, generator=fixed)
    router = (
        torch.randn(ROUTER_WIDTH, num_experts, generator=fixed)
        * ROUTER_SHARPNESS
        / ROUTER_WIDTH**0.5
    )
    text = torch.tensor(list(_text(num_tokens + ROUTER_CONTEXT - 1, seed)))
    context = text.unfold(0, ROUTER_CONTEXT, 1).flip(1)
    hidden = sum(tables[age][context[:, age]] * ROUTER_FADING**age for age in range(ROUTER_CONTEXT))
    weights, idx = torch.topk(torch.softmax(hidden @ router, dim=1), num_topk, dim=1)
    return idx, weights / weights.sum(dim=1, keepdim=True)


def _text(num_bytes: int, seed: int) -> bytes:
    words = ROUTER_TEXT.split()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(words), (num_bytes,), generator=generator)
    return b" ".join(words[int(at)] for at in drawn)[:num_bytes]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that cross a wire in one call, per rank; what a rank sends to itself is left out."""

    sent: list[int]
    received: list[int]

    @property
    def busiest(self) -> int:
        """Bytes in the busier direction of the busiest rank: what bounds the time if links work
        both ways at once.
        """
        return max(*self.sent, *self.received)

    @property
    def moved(self) -> list[int]:
        """Sent plus received, per rank."""
        return [sent + received for sent, received in zip(self.sent, self.received, strict=True)]


def once_per_rank(topk_idx: list[Tensor], num_experts: int, row_bytes: int) -> Traffic:
    """Traffic of rows that cross once per (token, destination rank). ``topk_idx`` has ``[T, K]`` of
    each rank.

    >>> once_per_rank([torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 0], [3, 2]])], 4, 10)
    Traffic(sent=[10, 10], received=[10, 10])
    """
    rows = torch.stack(
        [tokens_in_ranks(idx, num_experts, len(topk_idx)).sum(0) for idx in topk_idx]
    )
    rows.fill_diagonal_(0)
    sent, received = rows.sum(1) * row_bytes, rows.sum(0) * row_bytes
    return Traffic([int(size) for size in sent], [int(size) for size in received])


def traffic_there(job: Job, inputs: list[list[Sent]]) -> list[Traffic]:
    """The least that dispatch has to move, per input."""
    return [
        once_per_rank([sent.topk_idx for sent in each], job.experts, job.row_bytes)
        for each in inputs
    ]


def traffic_back(job: Job, inputs: list[list[Sent]]) -> list[Traffic]:
    """The least that combine has to move, per input."""
    there = [
        once_per_rank([sent.topk_idx for sent in each], job.experts, job.combined_row_bytes)
        for each in inputs
    ]
    return [Traffic(sent=each.received, received=each.sent) for each in there]


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
