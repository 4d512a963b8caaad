"""The collectives that anybody could use instead of the library, on the same inputs.

They move rows as 8-byte words where a row allows it, so that all dtypes travel on every backend and
at the same speed. They know every count beforehand and carry neither ids nor weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.bench_cases import COMBINE, DISPATCH, Case, Expected, partial_sums, wire_rows
from tokenyard.cli.bench_inputs import (
    QUANTIZE,
    Job,
    Sent,
    everything_to_everyone,
    traffic_back,
    traffic_there,
)
from tokenyard.routing import send_order, tokens_in_ranks
from tokenyard.testing.compare import assert_close, assert_same_bits

PLAIN_EXCHANGE = "all_to_all_single"
FRESH_COPIES = "index_select + a2a + copy"
KEPT_COPIES = "index_select + a2a + copy (staging kept)"

_untyped: Any = dist
# torch 2.13 renames these two and warns about the old names.
all_gather = getattr(_untyped, "all_gather_single", None) or _untyped.all_gather_into_tensor
"""``all_gather(out, mine)``: ``mine [T, W]`` of every rank, in rank order."""
_reduce_scatter_sum = (
    getattr(_untyped, "reduce_scatter_single", None) or _untyped.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One input of a plain exchange: everything known beforehand. Rows are words
    (``row_words``).
    """

    x: Tensor  # [T, words]
    order: Tensor  # [S] token of each row sent, by destination
    send: Tensor  # [S, words] those rows
    to_peers: list[int]  # rows
    from_peers: list[int]  # rows

    @property
    def num_arriving(self) -> int:
        return sum(self.from_peers)

    def there(self, recv: Tensor, send: Tensor) -> None:
        _untyped.all_to_all_single(recv, send, self.from_peers, self.to_peers)

    def back(self, recv: Tensor, send: Tensor) -> None:
        _untyped.all_to_all_single(recv, send, self.to_peers, self.from_peers)


def baseline_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """The collectives on the same inputs. ``inputs[number][rank]`` is what that rank sends.
    Collective.
    """
    return [
        *_exchange_cases(job, inputs, device),
        _exchange_back_case(job, inputs, device),
        *_gather_cases(job, inputs, device),
    ]


def _exchanges(
    job: Job, inputs: list[list[Sent]], device: torch.device, mode: ty.Quantize | None
) -> tuple[list[_Exchange], Tensor]:
    """What to exchange, per input, and room for whatever arrives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared: list[_Exchange] = []
    for sent in inputs:
        in_ranks = [tokens_in_ranks(each.topk_idx, job.experts, size) for each in sent]
        x = wire_rows(sent[rank].x, mode).to(device)
        order = send_order(in_ranks[rank]).to(device)
        to_peers = [int(count) for count in in_ranks[rank].sum(0)]
        from_peers = [int(each[:, rank].sum()) for each in in_ranks]
        prepared.append(_Exchange(x, order, x.index_select(0, order), to_peers, from_peers))
    return prepared, _room([each.num_arriving for each in prepared], prepared[0].x)


def _room(rows: list[int], like: Tensor) -> Tensor:
    return like.new_empty(max(rows), like.shape[1])


def _exchange_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """One ``all_to_all_single`` of the rows, alone and with the copies around it that the job
    needs.
    """
    prepared, landing = _exchanges(job, inputs, device, QUANTIZE[job.quantize])
    packed, arrived = (
        _room([each.order.numel() for each in prepared], landing),
        torch.empty_like(landing),
    )
    traffic = traffic_there(job, inputs)

    def plain(number: int) -> Tensor:
        each = prepared[number]
        recv = landing[: each.num_arriving]
        each.there(recv, each.send)
        return recv

    def fresh(number: int) -> Tensor:
        each = prepared[number]
        send = each.x.index_select(0, each.order)
        recv = send.new_empty(each.num_arriving, send.shape[1])
        each.there(recv, send)
        return recv.clone()

    def kept(number: int) -> Tensor:
        each = prepared[number]
        send, recv = packed[: each.order.numel()], arrived[: each.num_arriving]
        torch.index_select(each.x, 0, each.order, out=send)
        each.there(recv, send)
        return recv.clone()

    def check(recv: Tensor, expected: Expected) -> None:
        assert_same_bits(recv.cpu(), expected.flat, what="rows")

    alone, staged = landing.nbytes, packed.nbytes + arrived.nbytes
    return [
        Case(
            PLAIN_EXCHANGE,
            DISPATCH,
            plain,
            check,
            traffic,
            kept_bytes=lambda: alone,
            note="rows ready to send",
        ),
        Case(FRESH_COPIES, DISPATCH, fresh, check, traffic, note="every buffer fresh"),
        Case(
            KEPT_COPIES,
            DISPATCH,
            kept,
            check,
            traffic,
            kept_bytes=lambda: staged,
            note="only the result is fresh",
        ),
    ]


def _exchange_back_case(job: Job, inputs: list[list[Sent]], device: torch.device) -> Case:
    """One ``all_to_all_single`` that takes rows back to their owners, without the sum that combine
    ends with.
    """
    prepared, landing = _exchanges(job, inputs, device, None)
    room = _room([each.order.numel() for each in prepared], landing)
    rows: list[Tensor] = []
    for each in prepared:
        rows.append(landing.new_empty(each.num_arriving, landing.shape[1]))
        each.there(rows[-1], each.send)

    def run(number: int) -> tuple[Tensor, Tensor]:
        each = prepared[number]
        recv = room[: each.order.numel()]
        each.back(recv, rows[number])
        return recv, each.send

    def check(result: tuple[Tensor, Tensor], _: Expected) -> None:
        assert_same_bits(*result, what="returned rows")

    traffic, size = traffic_back(job, inputs), room.nbytes
    return Case(
        PLAIN_EXCHANGE,
        COMBINE,
        run,
        check,
        traffic,
        kept_bytes=lambda: size,
        note="rows ready, no sum",
    )


def _gather_cases(job: Job, inputs: list[list[Sent]], device: torch.device) -> list[Case]:
    """All-gather every token instead of dispatching, reduce-scatter sums of all tokens instead of
    combining.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [wire_rows(sent[rank].x, QUANTIZE[job.quantize]).to(device) for sent in inputs]
    gathered = rows[0].new_empty(size * rows[0].shape[0], rows[0].shape[1])
    sums = [partial_sums([each.x for each in sent], rank).to(device) for sent in inputs]
    reduced = sums[0].new_empty(job.tokens, job.hidden)
    name, trips, reduce_scatter = reduce_scatter_for(reduced, sums[0])

    def gather(number: int) -> Tensor:
        all_gather(gathered, rows[number])
        return gathered

    def reduce(number: int) -> Tensor:
        return reduce_scatter(sums[number])

    def check_gathered(result: Tensor, expected: Expected) -> None:
        assert_same_bits(result.cpu(), expected.gathered, what="gathered rows")

    def check_reduced(result: Tensor, expected: Expected) -> None:
        assert_close(
            result.cpu(),
            expected.reduced,
            relative=2 * torch.finfo(result.dtype).eps,
            what="reduced rows",
        )

    there = [everything_to_everyone(job.tokens, size, job.row_bytes)] * len(inputs)
    back = [everything_to_everyone(job.tokens, size, job.combined_row_bytes, trips)] * len(inputs)
    many, few = gathered.nbytes, reduced.nbytes
    return [
        Case(
            "all-gather",
            DISPATCH,
            gather,
            check_gathered,
            there,
            kept_bytes=lambda: many,
            note="all tokens to all",
        ),
        Case(
            name,
            COMBINE,
            reduce,
            check_reduced,
            back,
            kept_bytes=lambda: few,
            note="sums of all tokens ready",
        ),
    ]


def reduce_scatter_for(out: Tensor, sample: Tensor) -> tuple[str, int, Callable[[Tensor], Tensor]]:
    """(name, trips over the wire, call) of the best reduce-scatter that the backend has for this
    dtype. Collective.
    """

    def direct(sums: Tensor) -> Tensor:
        _reduce_scatter_sum(out, sums)
        return out

    def by_all_reduce(sums: Tensor) -> Tensor:
        total = sums.clone()
        _untyped.all_reduce(total)
        return total[dist.get_rank() * out.shape[0] :][: out.shape[0]].clone()

    try:
        direct(sample)
    except RuntimeError:
        return "all-reduce + slice (no reduce-scatter here)", 2, by_all_reduce
    return "reduce-scatter", 1, direct
