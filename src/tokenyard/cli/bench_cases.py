"""What ``tokenyard bench`` times, and what the results must be. Here are the calls of the library
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenyard as ty
from tokenyard import reference
from tokenyard.cli.bench_inputs import (
    DTYPES,
    LAYOUTS,
    QUANTIZE,
    Job,
    Sent,
    Traffic,
    traffic_back,
    traffic_there,
)
from tokenyard.testing.compare import assert_same_bits

DISPATCH, CACHED, COMBINE = PHASES = ("dispatch", "cached dispatch", "combine")


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time.

    Attributes: name, phase: of its row in the table. run: the timed call; takes the number of the
    input, returns the result. check: compares a result with what the oracle says for that input;
    raises ``AssertionError``. traffic: what crosses the wire, one entry per input. cold: the same
    call where nothing is kept from earlier ones, to measure memory; None where ``kept_bytes``
    tells. kept_bytes: memory that stays allocated between calls for the sake of ``run``.
    symmetric_bytes: symmetric memory among them; None if the engine does not tell. sms: SMs that
    the kernels are limited to; None where that has no meaning. note: a sentence about it.
    """

    name: str
    phase: str
    run: Callable[[int], Any]
    check: Callable[[Any, Expected], None]
    traffic: list[Traffic]
    cold: Callable[[int], Any] | None = None
    kept_bytes: Callable[[], int] = int
    symmetric_bytes: int | None = 0
    sms: int | None = None
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.phase} by {self.name}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What the oracle says about one input, for this rank. Tensors on the CPU.

    Attributes:
        received: in the layout of the job.
        flat: one row per (token, this rank): what a plain exchange brings.
        combined: ``[T, H]``, when the received rows (as ``dtype``) are returned unchanged.
        gathered: the rows of all ranks, in rank order ``[R * T, row]``.
        reduced: ``[T, H]`` float32, the sum of :func:`partial_sums` of all ranks.
    """

    received: reference.ReferenceRows
    flat: Tensor
    combined: Tensor
    gathered: Tensor
    reduced: Tensor


def expect(job: Job, sent: list[Sent], rank: int) -> Expected:
    """Ask the oracle. Every rank computes all ranks' results and keeps its own."""
    x, idx, weights = (
        [s.x for s in sent],
        [s.topk_idx for s in sent],
        [s.topk_weights for s in sent],
    )
    layout, mode = LAYOUTS[job.layout], QUANTIZE[job.quantize]
    received = reference.dispatch(
        x,
        idx,
        weights,
        num_experts=job.experts,
        layout=layout,
        max_tokens_per_rank=job.tokens,
        quantize=mode,
    )
    flat = received
    if layout is not ty.Layout.FLAT:
        flat = reference.dispatch(x, idx, num_experts=job.experts, quantize=mode)
    rows = [_plain(each, DTYPES[job.dtype]) for each in received]
    combined = reference.combine(rows, received, weighted=layout is not ty.Layout.FLAT)
    shares = sum(_share(peer) for peer in range(len(sent)))
    return Expected(
        received=received[rank],
        flat=row_words(flat[rank].x, flat[rank].scales),
        combined=combined[rank].x,
        gathered=torch.cat([wire_rows(each.x, mode) for each in sent]),
        reduced=x[rank].float() * shares,
    )


def _share(rank: int) -> float:
    return 2.0**-rank


def partial_sums(x: list[Tensor], rank: int) -> Tensor:
    """``[R * T, H]``: what this rank adds to every token of every rank."""
    return torch.cat(x) * _share(rank)


def _plain(received: reference.ReferenceRows, dtype: torch.dtype) -> Tensor:
    return (
        received.x
        if received.scales is None
        else reference.dequantize(received.x, received.scales, dtype)
    )


def wire_rows(x: Tensor, mode: ty.Quantize | None) -> Tensor:
    """``x [T, H]`` as the words a baseline sends: quantised rows hold their scales behind
    the data.
    """
    if mode is None:
        return row_words(x, None)
    quantized = reference.quantize(x, mode)
    return row_words(quantized.data, quantized.scales)


def row_words(data: Tensor, scales: Tensor | None) -> Tensor:
    """``data [T, H]`` with ``scales`` behind it as int64 ``[T, words]``, as uint8 if 8 bytes do not
    divide a row.
    """
    rows = data.contiguous().view(torch.uint8)
    if scales is not None:
        rows = torch.cat([rows, scales.contiguous().view(torch.uint8)], dim=1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.numel() else rows


def expert_parallel(job: Job, engine: str, device: torch.device) -> ty.ExpertParallel:
    """The library's object for one point of the sweep. Collective.

    Raises:
        NotSupported: the engine cannot work here.
    """
    return ty.ExpertParallel(
        num_experts=job.experts,
        hidden=job.hidden,
        num_topk=job.topk,
        max_tokens_per_rank=job.tokens,
        engine=engine,
        device=device,
    )


def engine_cases(
    job: Job,
    inputs: list[list[Sent]],
    device: torch.device,
    ep: ty.ExpertParallel,
    another: Callable[[], ty.ExpertParallel],
) -> list[Case]:
    """Dispatch, cached dispatch and combine of ``ep``. Collective: makes a handle for every input.

    Args:
        inputs: ``inputs[number][rank]`` is what that rank sends.
        another: makes an object like ``ep`` that has not been used yet.
    """
    layout, mode = LAYOUTS[job.layout], QUANTIZE[job.quantize]
    mine = [_to(sent[ep.rank], device) for sent in inputs]

    def dispatch(number: int, by: ty.ExpertParallel = ep) -> ty.Received:
        sent = mine[number]
        return by.dispatch(sent.x, sent.topk_idx, sent.topk_weights, layout=layout, quantize=mode)

    def cold_dispatch(number: int) -> ty.Received:
        with another() as unused:
            return dispatch(number, unused)

    handles, rows = _dispatched(dispatch, len(mine), DTYPES[job.dtype])

    def cached(number: int) -> ty.Received:
        return ep.dispatch(mine[number].x, handle=handles[number], quantize=mode)

    def combine(number: int) -> Any:
        return ep.combine(rows[number], handles[number], weighted=layout is not ty.Layout.FLAT)

    there, back = traffic_there(job, inputs), traffic_back(job, inputs)
    name, symmetric = f"tokenyard {ep.engine}", 0 if ep.engine == "collective" else ep.buffer_bytes

    def kept_bytes() -> int:
        return ep.buffer_bytes

    return [
        Case(
            name,
            DISPATCH,
            dispatch,
            check_routed,
            there,
            cold_dispatch,
            symmetric_bytes=symmetric,
            note=ep.why,
        ),
        Case(name, CACHED, cached, check_rows, there, None, kept_bytes, symmetric),
        Case(name, COMBINE, combine, check_combined, back, None, kept_bytes, symmetric),
    ]


def _dispatched(
    dispatch: Callable[[int], ty.Received], count: int, dtype: torch.dtype
) -> tuple[list[ty.Handle], list[Tensor]]:
    """Handles of ``count`` inputs, and their rows, dequantised to ``dtype``."""
    received = [dispatch(number) for number in range(count)]
    rows = [recv.x if recv.scales is None else recv.dequantize(dtype) for recv in received]
    return [recv.handle for recv in received], rows


def _to(sent: Sent, device: torch.device) -> Sent:
    return Sent(sent.x.to(device), sent.topk_idx.to(device), sent.topk_weights.to(device))


def check_rows(recv: ty.Received, expected: Expected) -> None:
    """Payload and scales, bit for bit. Rows without a source (padding of ``EXPERT_PADDED``) may
    hold anything.
    """
    want = expected.received
    filled = want.source >= 0 if want.source_ranges is not None else ...
    assert_same_bits(recv.source.cpu(), want.source, what="source")
    assert_same_bits(recv.x.cpu()[filled], want.x[filled], what="x", source=want.source[filled])
    if want.scales is not None:
        assert recv.scales is not None, "scales are missing"
        assert_same_bits(
            recv.scales.cpu()[filled],
            want.scales[filled],
            what="scales",
            source=want.source[filled],
        )


def check_routed(recv: ty.Received, expected: Expected) -> None:
    """Everything that a fresh dispatch returns, bit for bit."""
    check_rows(recv, expected)
    for name in (
        "tokens_per_expert",
        "topk_idx",
        "topk_weights",
        "row_weights",
        "expert_offsets",
        "source_ranges",
    ):
        want = getattr(expected.received, name)
        if want is not None:
            assert_same_bits(getattr(recv, name).cpu(), want, what=name)


def check_combined(y: Tensor, expected: Expected) -> None:
    """The combined tokens, bit for bit."""
    assert_same_bits(y.cpu(), expected.combined, what="combined")
