"""The collectives that anybody could use instead of the library, on the same inputs.

They move rows as 8-byte words where a row allows it, so that all dtypes travel on every backend and
at the same speed. They know every count beforehand and carry neither ids nor weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.cli.bench_cases import COMBINE, DISPATCH, Batch, Call, share
from tokenyard.cli.bench_inputs import QUANTIZE, Case, everything_to_everyone
from tokenyard.formats import quantize
from tokenyard.routing import host_ints, send_order, tokens_in_ranks
from tokenyard.testing.compare import assert_close, assert_same_bits
from tokenyard.types import Quantize

PLAIN_EXCHANGE, GATHER, SCATTER = "all_to_all_single", "all-gather", "reduce-scatter"
FRESH_COPIES = "index_select + a2a + copy"
KEPT_COPIES = "index_select + a2a + copy (staging kept)"

_untyped: Any = dist
# torch 2.13 renames these and warns about the old names.
all_gather = getattr(_untyped, "all_gather_single", None) or _untyped.all_gather_into_tensor
"""``all_gather(out, mine)``: ``mine [T, W]`` of every rank, in rank order."""
reduce_scatter = getattr(_untyped, "reduce_scatter_single", None) or _untyped.reduce_scatter_tensor
"""``reduce_scatter(out, rows)``: this rank's part of the sum of every rank's rows."""


def wire_words(x: Tensor, mode: Quantize | None = None) -> Tensor:
    """Rows ``x [T, H]`` as the words that cross a wire: int64 ``[T, words]``, uint8 if 8 bytes do
    not divide a row. Quantised rows hold scales behind the data.
    """
    rows = x.contiguous().view(torch.uint8)
    if mode is not None:
        sent = quantize(x, mode)
        parts = [part.contiguous().view(torch.uint8) for part in (sent.data, sent.scales)]
        rows = torch.cat(parts, dim=1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.numel() else rows


def gathered(x: Tensor) -> Tensor:
    """``x [T, W]`` of all ranks, ``[R * T, W]``. Collective."""
    mine = wire_words(x)
    out = mine.new_empty(dist.get_world_size() * mine.shape[0], mine.shape[1])
    all_gather(out, mine)
    return out.view(x.dtype)


class _Trip:
    """One input of an exchange, known beforehand.

    Attributes:
        x: words of this rank's rows. order: token of each row sent, by destination. rows: those
            rows. to_peers, from_peers: how many rows go to, and come from, each rank.
    """

    def __init__(self, batch: Batch, words: Tensor) -> None:
        size = len(batch.topk_idx)
        picks = [tokens_in_ranks(idx, batch.experts, size) for idx in batch.topk_idx]
        self.x, self.order = words, send_order(picks[batch.rank])
        self.rows = words.index_select(0, self.order)
        self.to_peers = host_ints(picks[batch.rank].sum(0))
        self.from_peers = [int(each[:, batch.rank].sum()) for each in picks]
        self.arriving = sum(self.from_peers)

    def room(self, rows: Iterable[int]) -> Tensor:
        """For the largest number of rows."""
        return self.x.new_empty(max(rows), self.x.shape[1])

    def there(self, out: Tensor, rows: Tensor) -> Tensor:
        _untyped.all_to_all_single(out, rows, self.from_peers, self.to_peers)
        return out

    def back(self, out: Tensor, rows: Tensor) -> Tensor:
        _untyped.all_to_all_single(out, rows, self.to_peers, self.from_peers)
        return out


def baselines(case: Case, batches: Sequence[Batch]) -> list[Call]:
    """All of them, of a sweep. Collective."""
    calls = exchanges(case, batches, copies=True)
    return [*calls, *(make(case, batches) for make in (exchange_back, gather, scatter))]


def exchanges(case: Case, batches: Sequence[Batch], *, copies: bool = False) -> list[Call]:
    """One ``all_to_all_single`` of the rows; ``copies``: also with those around it that a dispatch
    needs.
    """
    mode = QUANTIZE[case.quantize]
    trips = [_Trip(batch, wire_words(batch.x, mode)) for batch in batches]
    received = trips[0].room(trip.arriving for trip in trips)
    packed = trips[0].room(len(trip.order) if copies else 0 for trip in trips)
    arrived = torch.empty_like(received) if copies else packed

    def plain(number: int) -> Tensor:
        return trips[number].there(received[: trips[number].arriving], trips[number].rows)

    def fresh(number: int) -> Tensor:
        trip = trips[number]
        send = trip.x.index_select(0, trip.order)
        return trip.there(trip.room([trip.arriving]), send).clone()

    def staged(number: int) -> Tensor:
        trip = trips[number]
        send = torch.index_select(trip.x, 0, trip.order, out=packed[: len(trip.order)])
        return trip.there(arrived[: trip.arriving], send).clone()

    def check(rows: Tensor, truth: Any) -> None:
        assert_same_bits(rows, wire_words(truth.x, mode)[truth.batch.flat], what="rows")

    table: list[tuple[str, Callable[[int], Tensor], str, list[Tensor]]] = [
        (PLAIN_EXCHANGE, plain, "rows ready to send", [received]),
        (FRESH_COPIES, fresh, "every buffer fresh", []),
        (KEPT_COPIES, staged, "only the result is fresh", [packed, arrived]),
    ]
    return [
        Call(case, batches, DISPATCH, name, run, check, note=note, kept=kept)
        for name, run, note, kept in (table if copies else table[:1])
    ]


def exchange_back(case: Case, batches: Sequence[Batch]) -> Call:
    """Rows back to their owners, without the sum that combine ends with."""
    trips = [_Trip(batch, wire_words(batch.x)) for batch in batches]
    room = trips[0].room(len(trip.rows) for trip in trips)
    rows = [trip.there(trip.room([trip.arriving]), trip.rows) for trip in trips]

    def run(number: int) -> tuple[Tensor, Tensor]:
        trip = trips[number]
        return trip.back(room[: len(trip.rows)], rows[number]), trip.rows

    def check(result: tuple[Tensor, Tensor], _: Any) -> None:
        assert_same_bits(*result, what="returned rows")

    note = "rows ready, no sum"
    return Call(case, batches, COMBINE, PLAIN_EXCHANGE, run, check, note=note, kept=[room])


def gather(case: Case, batches: Sequence[Batch]) -> Call:
    """Every token to every rank instead of a dispatch."""
    mode, size = QUANTIZE[case.quantize], dist.get_world_size()
    rows = [wire_words(batch.x, mode) for batch in batches]
    everything = rows[0].new_empty(size * case.tokens, rows[0].shape[1])

    def run(number: int) -> Tensor:
        all_gather(everything, rows[number])
        return everything

    def check(result: Tensor, truth: Any) -> None:
        assert_same_bits(result, wire_words(truth.x, mode), what="gathered rows")

    known: dict[str, Any] = {"note": "all tokens to all", "kept": [everything]}
    known["crosses"] = everything_to_everyone(case.tokens, size, case.row_bytes)
    return Call(case, batches, DISPATCH, GATHER, run, check, **known)


def scatter(case: Case, batches: Sequence[Batch]) -> Call:
    """Sums of every token of every rank instead of a combine."""
    size = dist.get_world_size()
    sums = [gathered(batch.x) * share(batch.rank) for batch in batches]
    reduced = torch.empty_like(batches[0].x)

    def run(number: int) -> Tensor:
        reduce_scatter(reduced, sums[number])
        return reduced

    def check(result: Tensor, truth: Any) -> None:
        expected = truth.batch.x.float() * sum(map(share, range(size)))
        relative = 2 * torch.finfo(result.dtype).eps
        assert_close(result, expected, relative=relative, what="reduced rows")

    known: dict[str, Any] = {"note": "sums of all tokens ready", "kept": [reduced]}
    known["crosses"] = everything_to_everyone(case.tokens, size, case.combined_row_bytes)
    return Call(case, batches, COMBINE, SCATTER, run, check, **known)
