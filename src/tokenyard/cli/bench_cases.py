"""What ``tokenyard bench`` times: calls of the library, and the collectives that anybody could use instead.

Baselines move rows as 8-byte words where a row allows it: all dtypes then travel on every backend, and at the same speed. They
know every count beforehand and carry neither ids nor weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
    everything_to_everyone,
    once_per_rank,
)
from tokenyard.layout import send_order, tokens_in_ranks
from tokenyard.testing.compare import assert_close, assert_same_bits

DISPATCH, CACHED, COMBINE = PHASES = ("dispatch", "cached dispatch", "combine")

# torch 2.13 renames these two and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PLAIN_EXCHANGE = "all_to_all_single"
FRESH_COPIES = "index_select + a2a + copy"
KEPT_COPIES = "index_select + a2a + copy (staging kept)"


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time.

    Attributes:
        name, phase: of its row in the table.
        run: the timed call; takes the number of the input, returns the result.
        check: compares a result with what the oracle says for that input; raises ``AssertionError``.
        traffic: what crosses the wire, one entry per input.
        cold: the same call where nothing is kept from earlier ones, to measure memory; None: ``run`` and ``kept_bytes``.
        kept_bytes: memory that stays allocated between calls for the sake of ``run``.
        symmetric_bytes: symmetric memory among them; None if the engine does not tell.
        sms: SMs that the kernels are limited to; None where that has no meaning.
        note: a sentence about it.
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


@dataclass(frozen=True, slots=True)
class Expected:
    """What the oracle says about one input, for this rank. Tensors on the CPU.

    Attributes:
        received: in the layout of the job.
        flat: one row per (token, this rank): what a plain exchange brings.
        combined: ``[T, H]``, when the received rows (as ``dtype``) are returned unchanged.
        gathered: the rows of all ranks, in rank order ``[R * T, row]``.
        reduced: ``[T, H]`` float32, the sum of :func:`_partial_sums` of all ranks.
    """

    received: reference.ReferenceRows
    flat: Tensor
    combined: Tensor
    gathered: Tensor
    reduced: Tensor


def expect(job: Job, sent: list[Sent], rank: int) -> Expected:
    """Ask the oracle. Every rank computes all ranks' results and keeps its own."""
    x, idx, weights = [s.x for s in sent], [s.topk_idx for s in sent], [s.topk_weights for s in sent]
    layout, mode = LAYOUTS[job.layout], QUANTIZE[job.quantize]
    received = reference.dispatch(
        x, idx, weights, num_experts=job.experts, layout=layout, max_tokens_per_rank=job.tokens, quantize=mode
    )
    flat = received
    if layout is not ty.Layout.FLAT:
        flat = reference.dispatch(x, idx, num_experts=job.experts, quantize=mode)
    rows = [_plain(each, DTYPES[job.dtype]) for each in received]
    combined = reference.combine(rows, received, weighted=layout is not ty.Layout.FLAT)
    factors = sum(_factor(peer) for peer in range(len(sent)))
    return Expected(
        received=received[rank],
        flat=_row_words(flat[rank].x, flat[rank].scales),
        combined=combined[rank].x,
        gathered=torch.cat([wire_rows(each.x, mode) for each in sent]),
        reduced=x[rank].float() * factors,
    )


def _plain(received: reference.ReferenceRows, dtype: torch.dtype) -> Tensor:
    return received.x if received.scales is None else reference.dequantize(received.x, received.scales, dtype)


def wire_rows(x: Tensor, mode: ty.Quantize | None) -> Tensor:
    """``x [T, H]`` as the words a baseline sends: quantised rows hold their scales behind the data."""
    if mode is None:
        return _row_words(x, None)
    quantized = reference.quantize(x, mode)
    return _row_words(quantized.data, quantized.scales)


def _row_words(data: Tensor, scales: Tensor | None) -> Tensor:
    rows = data.contiguous().view(torch.uint8)
    if scales is not None:
        rows = torch.cat([rows, scales.contiguous().view(torch.uint8)], dim=1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.numel() else rows


# Calls of the library


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

    there = _traffic(inputs, job)
    back = [each.reversed(job.row_bytes, job.combined_row_bytes) for each in there]
    name, symmetric = f"tokenyard {ep.engine}", 0 if ep.engine == "collective" else None

    def kept_bytes() -> int:
        return ep.buffer_bytes

    return [
        Case(name, DISPATCH, dispatch, check_routed, there, cold_dispatch, symmetric_bytes=symmetric, note=ep.why),
        Case(name, CACHED, cached, check_rows, there, None, kept_bytes, symmetric),
        Case(name, COMBINE, combine, check_combined, back, None, kept_bytes, symmetric),
    ]


def _dispatched(dispatch: Callable[[int], ty.Received], count: int, dtype: torch.dtype) -> tuple[list[Any], list[Tensor]]:
    """Handles of ``count`` inputs, and their rows, dequantised to ``dtype``."""
    received = [dispatch(number) for number in range(count)]
    rows = [recv.x if recv.scales is None else recv.dequantize(dtype) for recv in received]
    return [recv.handle for recv in received], rows


def _to(sent: Sent, device: torch.device) -> Sent:
    return Sent(sent.x.to(device), sent.topk_idx.to(device), sent.topk_weights.to(device))


def _traffic(inputs: list[list[Sent]], job: Job) -> list[Traffic]:
    return [once_per_rank([each.topk_idx for each in sent], job.experts, job.row_bytes) for sent in inputs]


def check_rows(recv: ty.Received, expected: Expected) -> None:
    """Payload and scales, bit for bit. Rows without a source (padding of ``EXPERT_PADDED``) may hold anything."""
    want = expected.received
    filled = want.source >= 0 if want.source_ranges is not None else ...
    assert_same_bits(recv.source.cpu(), want.source, what="source")
    assert_same_bits(recv.x.cpu()[filled], want.x[filled], what="x", source=want.source[filled])
    if want.scales is not None:
        assert recv.scales is not None, "scales are missing"
        assert_same_bits(recv.scales.cpu()[filled], want.scales[filled], what="scales", source=want.source[filled])


def check_routed(recv: ty.Received, expected: Expected) -> None:
    """Everything that a fresh dispatch returns, bit for bit."""
    check_rows(recv, expected)
    for name in ("tokens_per_expert", "topk_idx", "topk_weights", "row_weights", "expert_offsets", "source_ranges"):
        want = getattr(expected.received, name)
        if want is not None:
            assert_same_bits(getattr(recv, name).cpu(), want, what=name)


def check_combined(y: Tensor, expected: Expected) -> None:
    """The combined tokens, bit for bit."""
    assert_same_bits(y.cpu(), expected.combined, what="combined")


# Baselines


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One input of a plain exchange: everything known beforehand. Rows are words (``_row_words``)."""

    x: Tensor  # [T, words]
    order: Tensor  # [S] token of each row sent, by destination
    send: Tensor  # [S, words] those rows
    to_peers: list[int]  # rows
    from_peers: list[int]  # rows


def baseline_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """The collectives on the same inputs. ``inputs[number][rank]`` is what that rank sends."""
    return [
        *_exchange_cases(job, inputs, device),
        *_exchange_back_cases(job, inputs, device),
        *_gather_cases(job, inputs, device),
    ]


def _exchange_inputs(job: Job, inputs: list[list[Sent]], device: torch.device, mode: ty.Quantize | None) -> list[_Exchange]:
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared: list[_Exchange] = []
    for sent in inputs:
        in_ranks = [tokens_in_ranks(each.topk_idx, job.experts, size) for each in sent]
        x = wire_rows(sent[rank].x, mode).to(device)
        order = send_order(in_ranks[rank])[1].to(device)
        from_peers = [int(each[:, rank].sum()) for each in in_ranks]
        prepared.append(_Exchange(x, order, x.index_select(0, order), in_ranks[rank].sum(0).tolist(), from_peers))
    return prepared


def _room(rows: list[int], like: Tensor) -> Tensor:
    return torch.empty(max(rows), like.shape[1], dtype=like.dtype, device=like.device)


def _exchange_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """One ``all_to_all_single`` of the rows, alone and with the copies around it that the job needs."""
    prepared = _exchange_inputs(job, inputs, device, QUANTIZE[job.quantize])
    traffic = _traffic(inputs, job)
    staging = _room([each.send.shape[0] for each in prepared], prepared[0].x)
    landing = _room([sum(each.from_peers) for each in prepared], prepared[0].x)

    def plain(number: int) -> Tensor:
        each = prepared[number]
        recv = landing[: sum(each.from_peers)]
        dist.all_to_all_single(recv, each.send, each.from_peers, each.to_peers)
        return recv

    def fresh(number: int) -> Tensor:
        each = prepared[number]
        send = each.x.index_select(0, each.order)
        recv = send.new_empty(sum(each.from_peers), send.shape[1])
        dist.all_to_all_single(recv, send, each.from_peers, each.to_peers)
        return recv.clone()

    def kept(number: int) -> Tensor:
        each = prepared[number]
        send, recv = staging[: each.send.shape[0]], landing[: sum(each.from_peers)]
        torch.index_select(each.x, 0, each.order, out=send)
        dist.all_to_all_single(recv, send, each.from_peers, each.to_peers)
        return recv.clone()

    def check(recv: Tensor, expected: Expected) -> None:
        assert_same_bits(recv.cpu(), expected.flat, what="rows")

    return [
        Case(PLAIN_EXCHANGE, DISPATCH, plain, check, traffic, kept_bytes=lambda: landing.nbytes, note="rows ready to send, counts known"),
        Case(FRESH_COPIES, DISPATCH, fresh, check, traffic, note="all_to_all_single, counts known, every buffer fresh"),
        Case(KEPT_COPIES, DISPATCH, kept, check, traffic, kept_bytes=lambda: staging.nbytes + landing.nbytes, note="the same, but only the result is fresh"),
    ]


def _exchange_back_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """One ``all_to_all_single`` that takes rows back to their owners, without the sum that combine ends with."""
    prepared = _exchange_inputs(job, inputs, device, None)
    traffic = [each.reversed(job.row_bytes, job.combined_row_bytes) for each in _traffic(inputs, job)]
    landing = _room([each.send.shape[0] for each in prepared], prepared[0].x)
    rows: list[Tensor] = []
    for each in prepared:
        rows.append(each.send.new_empty(sum(each.from_peers), each.send.shape[1]))
        dist.all_to_all_single(rows[-1], each.send, each.from_peers, each.to_peers)

    def run(number: int) -> tuple[Tensor, Tensor]:
        each = prepared[number]
        recv = landing[: each.send.shape[0]]
        dist.all_to_all_single(recv, rows[number], each.to_peers, each.from_peers)
        return recv, each.send

    def check(result: tuple[Tensor, Tensor], expected: Expected) -> None:
        assert_same_bits(*result, what="returned rows")

    return [Case(PLAIN_EXCHANGE, COMBINE, run, check, traffic, kept_bytes=lambda: landing.nbytes, note="rows ready, no sum at the owner")]


def _gather_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """All-gather every token instead of dispatching, reduce-scatter sums of all tokens instead of combining."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [wire_rows(sent[rank].x, QUANTIZE[job.quantize]).to(device) for sent in inputs]
    gathered = rows[0].new_empty(size * rows[0].shape[0], rows[0].shape[1])
    sums = [_partial_sums([each.x for each in sent], rank).to(device) for sent in inputs]
    reduced = sums[0].new_empty(job.tokens, job.hidden)
    name, rounds, reduce_scatter = _reduce_scatter(reduced, sums[0])

    def gather(number: int) -> Tensor:
        _all_gather(gathered, rows[number])
        return gathered

    def check_gathered(result: Tensor, expected: Expected) -> None:
        assert_same_bits(result.cpu(), expected.gathered, what="gathered rows")

    def check_reduced(result: Tensor, expected: Expected) -> None:
        assert_close(result.cpu(), expected.reduced, relative=2 * torch.finfo(result.dtype).eps, what="reduced rows")

    there = everything_to_everyone(job.tokens, size, job.row_bytes)
    back = everything_to_everyone(job.tokens, size, job.combined_row_bytes, rounds)
    many = len(inputs)
    return [
        Case("all-gather", DISPATCH, gather, check_gathered, [there] * many, kept_bytes=lambda: gathered.nbytes, note="every token to every rank"),
        Case(
            name,
            COMBINE,
            lambda number: reduce_scatter(sums[number]),
            check_reduced,
            [back] * many,
            kept_bytes=lambda: reduced.nbytes,
            note="sums of all tokens ready, any order of addition",
        ),
    ]


def _factor(rank: int) -> float:
    return 2.0**-rank


def _partial_sums(x: list[Tensor], rank: int) -> Tensor:
    """``[R * T, H]``: what this rank adds to every token of every rank."""
    return torch.cat(x) * _factor(rank)


def _reduce_scatter(out: Tensor, sample: Tensor) -> tuple[str, int, Callable[[Tensor], Tensor]]:
    """(name, trips over the wire, call) of the best reduce-scatter that the backend has for this dtype. Collective."""

    def direct(sums: Tensor) -> Tensor:
        _reduce_scatter_sum(out, sums)
        return out

    def by_all_reduce(sums: Tensor) -> Tensor:
        total = sums.clone()
        dist.all_reduce(total)
        return total[dist.get_rank() * out.shape[0] :][: out.shape[0]].clone()

    try:
        direct(sample)
    except RuntimeError:
        return "all-reduce + slice (no reduce-scatter here)", 2, by_all_reduce
    return "reduce-scatter", 1, direct
