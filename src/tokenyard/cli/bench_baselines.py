"""The collectives that anybody could use instead of the library, on the same inputs.

They move rows as 8-byte words where a row allows it, so that all dtypes travel on every backend and
at the same speed. They know every count beforehand and carry neither ids nor weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.cli.bench_cases import (
    COMBINE,
    DISPATCH,
    Batch,
    Call,
    Truth,
    all_gather,
    share,
    wire_words,
)
from tokenyard.cli.bench_inputs import QUANTIZE, Case, everything_to_everyone
from tokenyard.routing import host_ints, send_order, tokens_in_ranks
from tokenyard.testing.compare import assert_close, assert_same_bits

PLAIN_EXCHANGE, GATHER, SCATTER = "all_to_all_single", "all-gather", "reduce-scatter"
FRESH_COPIES = "index_select + a2a + copy"
KEPT_COPIES = "index_select + a2a + copy (staging kept)"

_untyped: Any = dist
_reduce_scatter_sum = (
    getattr(_untyped, "reduce_scatter_single", None) or _untyped.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class _Trip:
    """One input of an exchange, known beforehand. Rows are words (``wire_words``)."""

    x: Tensor  # [T, words]
    order: Tensor  # [S] token of each row sent, by destination
    rows: Tensor  # [S, words] those rows
    to_peers: list[int]  # rows
    from_peers: list[int]  # rows

    @classmethod
    def of(cls, batch: Batch, words: Tensor) -> _Trip:
        size = len(batch.topk_idx)
        picks = [tokens_in_ranks(idx, batch.experts, size) for idx in batch.topk_idx]
        order = send_order(picks[batch.rank])
        arriving = [int(each[:, batch.rank].sum()) for each in picks]
        leaving = host_ints(picks[batch.rank].sum(0))
        return cls(words, order, words.index_select(0, order), leaving, arriving)

    def there(self, out: Tensor, rows: Tensor) -> Tensor:
        _untyped.all_to_all_single(out, rows, self.from_peers, self.to_peers)
        return out

    def back(self, out: Tensor, rows: Tensor) -> Tensor:
        _untyped.all_to_all_single(out, rows, self.to_peers, self.from_peers)
        return out


def _room(rows: list[int], like: Tensor) -> Tensor:
    return like.new_empty(max(rows), like.shape[1])


def baselines(
    case: Case,
    batches: Sequence[Batch],
    *,
    label: str = "",
    copies: bool = False,
    gathers: bool = True,
    back: bool = True,
) -> list[Call]:
    """``all_to_all_single`` once per rank and all-gather instead of a dispatch. Collective.

    Args:
        label: behind the names, such as " BF16".
        copies: also an exchange with the copies around it that a dispatch needs.
        gathers: all-gather (and reduce-scatter). back: also the ways back.
    """
    calls = _exchanges(case, batches, label, copies)
    if back:
        calls.append(_exchange_back(case, batches, label))
    if gathers:
        calls.append(_gather(case, batches, label))
    if gathers and back:
        calls.append(_scatter(case, batches, label))
    return calls


def _words(case: Case, batch: Batch) -> Tensor:
    return wire_words(batch.x, QUANTIZE[case.quantize])


def _exchanges(case: Case, batches: Sequence[Batch], label: str, copies: bool) -> list[Call]:
    """One ``all_to_all_single`` of the rows, alone and with the copies around it."""
    trips = [_Trip.of(batch, _words(case, batch)) for batch in batches]
    arriving = [sum(trip.from_peers) for trip in trips]
    landing = _room(arriving, trips[0].x)
    traffic = [batch.traffic(case.row_bytes) for batch in batches]
    packed = arrived = landing[:0]
    if copies:
        packed = _room([trip.order.numel() for trip in trips], landing)
        arrived = torch.empty_like(landing)

    def plain(number: int) -> Tensor:
        return trips[number].there(landing[: arriving[number]], trips[number].rows)

    def fresh(number: int) -> Tensor:
        trip = trips[number]
        send = trip.x.index_select(0, trip.order)
        return trip.there(send.new_empty(arriving[number], send.shape[1]), send).clone()

    def kept(number: int) -> Tensor:
        trip = trips[number]
        send = packed[: trip.order.numel()]
        torch.index_select(trip.x, 0, trip.order, out=send)
        return trip.there(arrived[: arriving[number]], send).clone()

    def check(rows: Tensor, truth: Truth) -> None:
        want = wire_words(truth.x, QUANTIZE[case.quantize])[truth.flat]
        assert_same_bits(rows, want, what="rows")

    def call(name: str, run: Callable[[int], Any], note: str, size: int) -> Call:
        known: dict[str, Any] = {
            "check": check,
            "traffic": traffic,
            "least": traffic,
            "kept_bytes": lambda: size,
        }
        return Call(case=case, name=name + label, phase=DISPATCH, run=run, note=note, **known)

    calls = [call(PLAIN_EXCHANGE, plain, "rows ready to send", landing.nbytes)]
    if copies:
        staged = packed.nbytes + arrived.nbytes
        calls.append(call(FRESH_COPIES, fresh, "every buffer fresh", 0))
        calls.append(call(KEPT_COPIES, kept, "only the result is fresh", staged))
    return calls


def _exchange_back(case: Case, batches: Sequence[Batch], label: str) -> Call:
    """Rows back to their owners, without the sum that combine ends with."""
    trips = [_Trip.of(batch, wire_words(batch.x, None)) for batch in batches]
    room = _room([len(trip.rows) for trip in trips], trips[0].x)
    rows = [trip.there(_room([sum(trip.from_peers)], trip.x), trip.rows) for trip in trips]

    def run(number: int) -> tuple[Tensor, Tensor]:
        trip = trips[number]
        return trip.back(room[: len(trip.rows)], rows[number]), trip.rows

    def check(result: tuple[Tensor, Tensor], _: Truth) -> None:
        assert_same_bits(*result, what="returned rows")

    traffic = [batch.traffic(case.combined_row_bytes, back=True) for batch in batches]
    name = f"{PLAIN_EXCHANGE} back{label}" if label else PLAIN_EXCHANGE
    known: dict[str, Any] = {"note": "rows ready, no sum", "kept_bytes": lambda: room.nbytes}
    sizes: dict[str, Any] = {"traffic": traffic, "least": traffic}
    return Call(case=case, name=name, phase=COMBINE, run=run, check=check, **known, **sizes)


def _gather(case: Case, batches: Sequence[Batch], label: str) -> Call:
    """Every token to every rank instead of a dispatch."""
    rows, size = [_words(case, batch) for batch in batches], dist.get_world_size()
    everything = rows[0].new_empty(size * case.tokens, rows[0].shape[1])

    def run(number: int) -> Tensor:
        all_gather(everything, rows[number])
        return everything

    def check(result: Tensor, truth: Truth) -> None:
        want = wire_words(truth.x, QUANTIZE[case.quantize])
        assert_same_bits(result, want, what="gathered rows")

    sizes: dict[str, Any] = {
        "traffic": [everything_to_everyone(case.tokens, size, case.row_bytes)] * len(batches),
        "least": [batch.traffic(case.row_bytes) for batch in batches],
    }
    known: dict[str, Any] = {"note": "all tokens to all", "kept_bytes": lambda: everything.nbytes}
    name = GATHER + label
    return Call(case=case, name=name, phase=DISPATCH, run=run, check=check, **known, **sizes)


def _scatter(case: Case, batches: Sequence[Batch], label: str) -> Call:
    """Sums of every token of every rank instead of a combine."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sums = [Truth.of(batch).x * share(rank) for batch in batches]
    reduced = torch.empty_like(batches[0].x)
    name, trips, run_one = reduce_scatter_for(reduced, sums[0])

    def run(number: int) -> Tensor:
        return run_one(sums[number])

    def check(result: Tensor, truth: Truth) -> None:
        expected = truth.batch.x.float() * sum(map(share, range(size)))
        relative = 2 * torch.finfo(result.dtype).eps
        assert_close(result, expected, relative=relative, what="reduced rows")

    row_bytes = case.combined_row_bytes
    sizes: dict[str, Any] = {
        "traffic": [everything_to_everyone(case.tokens, size, row_bytes, trips)] * len(batches),
        "least": [batch.traffic(row_bytes, back=True) for batch in batches],
    }
    name += label if name == SCATTER else ""
    known: dict[str, Any] = {"note": "sums of all tokens ready"}
    known["kept_bytes"] = lambda: reduced.nbytes
    return Call(case=case, name=name, phase=COMBINE, run=run, check=check, **known, **sizes)


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
    return SCATTER, 1, direct
