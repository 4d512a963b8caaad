"""The collectives that anybody could use instead of the library, on the same inputs.

They move rows as 8-byte words where a row allows it, so that all dtypes travel on every backend and
at the same speed. They know every count beforehand and carry neither ids nor weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.formats import quantize
from tokenyard.routing import host_ints, send_order, tokens_in_ranks
from tokenyard.testing.cases import QUANTIZE, Case, Traffic
from tokenyard.testing.checked_calls import COMBINE, DISPATCH, Batch, Call, share
from tokenyard.testing.compare import assert_close, assert_same_bits
from tokenyard.testing.timing import Timed
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
    not divide a row. Quantised rows hold scales behind the data."""
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
    """One input of an exchange, known beforehand: this rank's rows ``x``; the ``order`` (tokens)
    and ``rows`` sent, by destination; how many go to each rank, and come from each, and from all.
    """

    def __init__(self, batch: Batch, mode: Quantize | None = None) -> None:
        size = len(batch.topk_idx)
        picks = [tokens_in_ranks(idx, batch.experts, size) for idx in batch.topk_idx]
        self.x, self.order = wire_words(batch.x, mode), send_order(picks[batch.rank])
        self.rows = self.x.index_select(0, self.order)
        self.to_peers = host_ints(picks[batch.rank].sum(0))
        self.from_peers = [int(each[:, batch.rank].sum()) for each in picks]
        self.arriving = sum(self.from_peers)

    def room(self, *rows: int) -> Tensor:
        """For the largest number of rows."""
        return self.x.new_empty(max(rows), self.x.shape[1])

    def there(self, room: Tensor, rows: Tensor) -> Tensor:
        out = room[: self.arriving]
        _untyped.all_to_all_single(out, rows, self.from_peers, self.to_peers)
        return out


def _all_to_all_ranks(case: Case, row_bytes: int) -> Traffic:
    """Of every token of every rank."""
    size = dist.get_world_size()
    each = [case.tokens * (size - 1) * row_bytes] * size
    return Traffic(each, each)


def instead_of_dispatch(case: Case, batches: Sequence[Batch]) -> list[Call]:
    """The rows of a dispatch, without and with the copies that it needs; all to all. Collective."""
    mode = QUANTIZE[case.quantize]
    trips = [_Trip(batch, mode) for batch in batches]
    received = trips[0].room(*(trip.arriving for trip in trips))
    packed = trips[0].room(*(len(trip.rows) for trip in trips))
    arrived = torch.empty_like(received)
    everything = trips[0].room(dist.get_world_size() * case.tokens)

    def plain(number: int) -> Tensor:
        return trips[number].there(received, trips[number].rows)

    def fresh(number: int) -> Tensor:
        trip = trips[number]
        return trip.there(trip.room(trip.arriving), trip.x.index_select(0, trip.order)).clone()

    def staged(number: int) -> Tensor:
        trip = trips[number]
        send = torch.index_select(trip.x, 0, trip.order, out=packed[: len(trip.order)])
        return trip.there(arrived, send).clone()

    def gather(number: int) -> Tensor:
        all_gather(everything, trips[number].x)
        return everything

    def my_rows(rows: Tensor, truth: Any) -> None:
        assert_same_bits(rows, wire_words(truth.x, mode)[truth.batch.flat], what="rows")

    def all_rows(rows: Tensor, truth: Any) -> None:
        assert_same_bits(rows, wire_words(truth.x, mode), what="gathered rows")

    crosses = _all_to_all_ranks(case, case.row_bytes)
    table: list[tuple[str, Timed, str, list[Tensor]]] = [
        (PLAIN_EXCHANGE, plain, "rows ready to send", [received]),
        (FRESH_COPIES, fresh, "every buffer fresh", []),
        (KEPT_COPIES, staged, "only the result is fresh", [packed, arrived]),
    ]
    calls = [
        Call(case, batches, DISPATCH, name, run, my_rows, note, kept=kept)
        for name, run, note, kept in table
    ]
    note, kept = "all tokens to all", [everything]
    return [*calls, Call(case, batches, DISPATCH, GATHER, gather, all_rows, note, crosses, kept)]


def instead_of_combine(case: Case, batches: Sequence[Batch]) -> list[Call]:
    """Rows back to their owners, without the sum; sums of every token of every rank. Collective."""
    trips = [_Trip(batch) for batch in batches]
    rows = [trip.there(trip.room(trip.arriving), trip.rows) for trip in trips]
    room = trips[0].room(*(len(trip.rows) for trip in trips))
    sums = [gathered(batch.x) * share(batch.rank) for batch in batches]
    reduced = torch.empty_like(batches[0].x)

    def back(number: int) -> tuple[Tensor, Tensor]:
        trip = trips[number]
        out = room[: len(trip.rows)]
        _untyped.all_to_all_single(out, rows[number], trip.to_peers, trip.from_peers)
        return out, trip.rows

    def scatter(number: int) -> Tensor:
        reduce_scatter(reduced, sums[number])
        return reduced

    def same_rows(result: tuple[Tensor, Tensor], _: Any) -> None:
        assert_same_bits(*result, what="returned rows")

    def right_sums(result: Tensor, truth: Any) -> None:
        expected = truth.batch.x.float() * sum(map(share, range(dist.get_world_size())))
        relative = 2 * torch.finfo(result.dtype).eps
        assert_close(result, expected, relative=relative, what="reduced rows")

    crosses = _all_to_all_ranks(case, case.combined_row_bytes)
    table: list[tuple[str, Timed, Any, str, Traffic | None, Tensor]] = [
        (PLAIN_EXCHANGE, back, same_rows, "rows ready, no sum", None, room),
        (SCATTER, scatter, right_sums, "sums of all tokens ready", crosses, reduced),
    ]
    return [
        Call(case, batches, COMBINE, name, run, check, note, more, [kept])
        for name, run, check, note, more, kept in table
    ]
