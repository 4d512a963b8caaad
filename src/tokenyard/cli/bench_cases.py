"""Calls of the library that ``tokenyard bench`` times, and what their results must be.

Rows that go back are those that came, times ``2.0 ** -rank``: sums differ if a rank is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard import reference
from tokenyard.cli.bench_inputs import (
    DTYPES,
    LAYOUTS,
    QUANTIZE,
    Case,
    Sent,
    Traffic,
    all_sent,
    once_per_rank,
)
from tokenyard.engines.known import COLLECTIVE
from tokenyard.formats import quantize
from tokenyard.routing import expert_bounds
from tokenyard.testing.compare import assert_same_bits

DISPATCH, CACHED, COMBINE = PHASES = ("dispatch", "cached dispatch", "combine")
ROUTED = ("tokens_per_expert", "topk_idx", "topk_weights", "row_weights", "expert_offsets")

T = TypeVar("T", bound="Truth")
_untyped: Any = dist
# torch 2.13 renames it and warns about the old name.
all_gather = getattr(_untyped, "all_gather_single", None) or _untyped.all_gather_into_tensor
"""``all_gather(out, mine)``: ``mine [T, W]`` of every rank, in rank order."""


def share(rank: int) -> float:
    """What rank ``rank`` multiplies rows with before they go back."""
    return 2.0**-rank


def row_words(data: Tensor, scales: Tensor | None = None) -> Tensor:
    """``data [T, H]`` with ``scales`` behind it as int64 ``[T, words]``, as uint8 if 8 bytes do not
    divide a row.
    """
    rows = data.contiguous().view(torch.uint8)
    if scales is not None:
        rows = torch.cat([rows, scales.contiguous().view(torch.uint8)], dim=1)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 and rows.numel() else rows


def wire_words(x: Tensor, mode: ty.Quantize | None) -> Tensor:
    """``x [T, H]`` as the words that cross a wire; quantised rows hold scales behind the data."""
    if mode is None:
        return row_words(x)
    sent = quantize(x, mode)
    return row_words(sent.data, sent.scales)


def gathered(mine: Tensor) -> Tensor:
    """``mine [T, W]`` of all ranks, ``[R * T, W]``. Collective."""
    out = mine.new_empty(dist.get_world_size() * mine.shape[0], mine.shape[1])
    all_gather(out, mine)
    return out


@dataclass(frozen=True, slots=True)
class Batch:
    """What this rank sends in one input, and what all ranks pick. On the device.

    Attributes:
        x: ``[T, H]``; topk_idx, topk_weights: ``[R, T, K]`` int64 and float32 of all ranks.
        rank, experts: this rank, number of experts over all.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    rank: int
    experts: int

    @classmethod
    def of(cls, sent: Sequence[Sent], experts: int, device: torch.device) -> Batch:
        """This rank's part of ``sent``, which has an entry per rank."""
        rank = dist.get_rank()
        picks = [torch.stack([each[at] for each in sent]).to(device) for at in (1, 2)]
        return cls(sent[rank].x.to(device), picks[0], picks[1], rank, experts)

    @property
    def picks(self) -> tuple[Tensor, Tensor]:
        return self.topk_idx[self.rank], self.topk_weights[self.rank]

    def traffic(self, row_bytes: int, *, back: bool = False) -> Traffic:
        """What crosses the wire once per (token, rank)."""
        there = once_per_rank(list(self.topk_idx.cpu()), self.experts, row_bytes)
        return Traffic(there.received, there.sent) if back else there


@dataclass(frozen=True)
class Truth:
    """What a batch brings to this rank; ``x [R * T, H]`` is what all ranks send, in rank order."""

    batch: Batch
    x: Tensor

    @classmethod
    def of(cls: type[T], batch: Batch) -> T:
        """Collective."""
        return cls(batch, gathered(row_words(batch.x)).view(batch.x.dtype))

    @cached_property
    def _here(self) -> Tensor:
        """``[R * T, K]``: which picks are of this rank's experts."""
        return self.picks_of(self.batch.rank).flatten(0, 1)

    def picks_of(self, rank: int) -> Tensor:
        bounds = expert_bounds(self.batch.experts, self.batch.topk_idx.shape[0])
        return (self.batch.topk_idx >= bounds[rank]) & (self.batch.topk_idx < bounds[rank + 1])

    @cached_property
    def flat(self) -> Tensor:
        """Rows of ``x`` in the order of ``FLAT``: by source rank, then token."""
        return self._here.any(1).nonzero().flatten()


@dataclass(frozen=True)
class Oracle(Truth):
    """What calls must return, by the oracle: on the CPU, for small batches."""

    received: reference.ReferenceRows
    combined: Tensor

    @classmethod
    def asked(cls, case: Case, batch: Batch, sent: Sequence[Sent]) -> Oracle:
        """Every rank computes the results of all ranks, and keeps its own. Collective."""
        layout, mode = LAYOUTS[case.layout], QUANTIZE[case.quantize]
        x, idx, weights = ([each[at] for each in sent] for at in range(3))
        options: dict[str, Any] = {"max_tokens_per_rank": case.tokens, "quantize": mode}
        there = reference.dispatch(
            x, idx, weights, num_experts=case.experts, layout=layout, **options
        )
        dtype = DTYPES[case.dtype]
        plain = [
            r.x if r.scales is None else reference.dequantize(r.x, r.scales, dtype) for r in there
        ]
        rows = [each * share(rank) for rank, each in enumerate(plain)]
        back = reference.combine(rows, there, weighted=layout is not ty.Layout.FLAT)
        return cls(batch, Truth.of(batch).x, there[batch.rank], back[batch.rank].x)

    def check_rows(self, recv: ty.Received) -> None:
        check_results(recv, self.received, fields=())

    def check_routed(self, recv: ty.Received) -> None:
        check_results(recv, self.received)

    def check_combined(self, y: Tensor) -> None:
        assert_same_bits(y.cpu(), self.combined, what="combined")


def check_results(
    recv: ty.Received, want: reference.ReferenceRows, fields: Sequence[str] = ROUTED
) -> None:
    """Compare a dispatch with the oracle's, bit for bit: payload, scales, sources and ``fields``.

    Rows without a source (padding of ``EXPERT_PADDED``) may hold anything.

    Raises:
        AssertionError: a bit is wrong, a tensor is missing, or one should not be there.
    """
    padded = want.source_ranges is not None
    filled = want.source >= 0 if padded else slice(None)
    scales = ("scales",) if want.scales is not None else ()
    ranges = ("source_ranges",) if padded and fields else ()
    for name in ("source", "x", *scales, *fields, *ranges):
        got, wanted = getattr(recv, name), getattr(want, name)
        if (got is None) != (wanted is None):
            fault = "is missing" if got is None else "should not be there"
            raise AssertionError(f"{name} {fault}")
        if got is None:
            continue
        rows = name in ("x", "scales")
        source, at = (want.source[filled], filled) if rows else (None, slice(None))
        assert_same_bits(got.cpu()[at], wanted[at], what=name, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Something to time.

    Attributes:
        case, name, phase, kind: of its line. note: a sentence about it.
        run: the timed call; takes the number of the input, returns the result.
        prepare: brings that input to where ``run`` reads it, before a result is checked.
        check: compares a result with the truth about that input; raises ``AssertionError``.
        traffic: what crosses the wire, per input; least: the least that the case could do with.
        cold: the same call where nothing is kept from earlier ones, to measure memory; None where
            ``kept_bytes``, which stay allocated between calls for the sake of ``run``, tells.
        ep: the object whose call it is, None of a collective.
        bar_us: what it should at most take, in microseconds.
    """

    case: Case
    name: str
    phase: str
    run: Callable[[int], Any]
    check: Callable[[Any, Any], None]
    traffic: list[Traffic]
    least: list[Traffic]
    prepare: Callable[[int], Any] | None = None
    cold: Callable[[int], Any] | None = None
    kept_bytes: Callable[[], int] = int
    ep: ty.ExpertParallel | None = None
    kind: str = ""
    note: str = ""
    bar_us: float | None = None

    @property
    def title(self) -> str:
        return f"{self.phase} by {self.name}"

    def attempt(self, number: int, truth: Truth) -> None:
        """Call once on an input; raises ``AssertionError`` if the result is wrong."""
        if self.prepare is not None:
            self.prepare(number)
        self.check(self.run(number), truth)

    @property
    def symmetric_bytes(self) -> int:
        """Of the object by now; 0 where there is none, or no symmetric memory in it."""
        plain = self.ep is None or self.ep.engine == COLLECTIVE
        return 0 if plain or self.ep is None else self.ep.buffer_bytes


class Library:
    """Calls of one object on some batches, of one case. Collective: it dispatches every batch once.

    Args:
        another: makes an unused object like ``ep``: for memory of a first call, and for combines
            in place, which need symmetric memory that no dispatch overwrites.
    """

    def __init__(
        self,
        ep: ty.ExpertParallel,
        case: Case,
        batches: Sequence[Batch],
        another: Callable[[], ty.ExpertParallel] | None = None,
    ) -> None:
        self._ep, self._case, self._batches, self._another = ep, case, batches, another
        mode = QUANTIZE[case.quantize]
        self._mode = None if case.cast_before else mode
        self._sent: list[Any] = [each.x for each in batches]
        if case.cast_before and mode is not None:
            self._sent = [quantize(each.x, mode) for each in batches]
        self._handles = [self.fresh(number).handle for number in range(len(batches))]

    def fresh(self, number: int, ep: ty.ExpertParallel | None = None) -> ty.Received:
        more: dict[str, Any] = {"layout": LAYOUTS[self._case.layout], "quantize": self._mode}
        picks = self._batches[number].picks
        return (ep or self._ep).dispatch(self._sent[number], *picks, **more)

    def _cold(self, number: int) -> ty.Received:
        assert self._another is not None
        with self._another() as unused:
            return self.fresh(number, unused)

    def _known(self, number: int) -> ty.Received:
        known: dict[str, Any] = {"handle": self._handles[number], "quantize": self._mode}
        if self._case.in_place:
            known["in_place"] = True
        return self._ep.dispatch(self._sent[number], **known)

    def dispatch(self, *, cached: bool, **known: Any) -> Call:
        """A call with a new routing, or with one whose handle is known."""

        def check(recv: ty.Received, truth: Any) -> None:
            truth.check_rows(recv) if cached else truth.check_routed(recv)

        traffic = [each.traffic(self._case.row_bytes) for each in self._batches]
        if cached:
            return self._call(CACHED, self._known, check, traffic, **known)
        return self._call(DISPATCH, self.fresh, check, traffic, cold=self._cold, **known)

    def combine(self, **known: Any) -> Call:
        """Of the rows that came, times :func:`share`; in place, of another object."""
        ep: Any = self._ep
        options: dict[str, Any] = {"weighted": True} if self._case.layout != "flat" else {}
        handles = self._handles
        rows = [self._back(number) for number in range(len(handles))]
        if self._case.in_place:
            assert self._another is not None
            ep, options["in_place"], full = self._another(), True, rows
            handles = [ep.dispatch(each.x, *each.picks).handle for each in self._batches]
            longest = max(handles, key=lambda handle: handle.num_rows)
            view = ep.empty_for_combine(longest, in_place=True).zero_()
            rows = [view[: handle.num_rows] for handle in handles]

            def prepare(number: int) -> Any:
                return rows[number].copy_(full[number])

            known["prepare"] = prepare

        def run(number: int) -> Any:
            return ep.combine(rows[number], handles[number], **options)

        def check(y: Tensor, truth: Any) -> None:
            truth.check_combined(y)

        size = self._case.combined_row_bytes
        back = [each.traffic(size, back=True) for each in self._batches]
        return self._call(COMBINE, run, check, back, ep=ep, **known)

    def _back(self, number: int) -> Tensor:
        recv = self.fresh(number)
        plain = recv.x if recv.scales is None else recv.dequantize(DTYPES[self._case.dtype])
        return plain * share(self._ep.rank)

    def _call(self, phase: str, run: Any, check: Any, traffic: list[Traffic], **known: Any) -> Call:
        ep = self._ep
        kept = int if phase == DISPATCH else lambda: ep.buffer_bytes
        more: dict[str, Any] = {
            "name": f"tokenyard {ep.engine}",
            "kept_bytes": kept,
            "ep": ep,
            **known,
        }
        parts: dict[str, Any] = {"run": run, "check": check, "traffic": traffic, "least": traffic}
        return Call(case=self._case, phase=phase, **parts, **more)


def sweep_inputs(
    case: Case, seed: int, device: torch.device, count: int
) -> tuple[list[Batch], list[list[Sent]]]:
    """``count`` inputs of a sweep's case, for this rank on the device and for all on the CPU."""
    sent = [all_sent(case, dist.get_world_size(), number, seed) for number in range(count)]
    return [Batch.of(each, case.experts, device) for each in sent], sent
