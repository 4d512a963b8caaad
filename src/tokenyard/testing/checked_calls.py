"""Calls of the library on known inputs, and what their results must be, bit for bit. Rows that go
back are those that came, times ``2.0 ** -rank``: sums differ if a rank is missed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard import reference
from tokenyard.engines.known import COLLECTIVE
from tokenyard.formats import quantize
from tokenyard.routing import expert_bounds
from tokenyard.testing.cases import (
    DTYPES,
    LAYOUTS,
    QUANTIZE,
    Case,
    Sent,
    Traffic,
    all_sent,
    once_per_rank,
)
from tokenyard.testing.compare import assert_same_bits
from tokenyard.testing.timing import on_ranks

DISPATCH, CACHED, COMBINE = PHASES = ("dispatch", "cached dispatch", "combine")
ROUTED = ("tokens_per_expert", "topk_idx", "topk_weights",
          "row_weights", "expert_offsets", "source_ranges")  # fmt: skip
"""What a dispatch with a new routing returns besides rows."""


def share(rank: int) -> float:
    """What rank ``rank`` multiplies rows with before they go back."""
    return 2.0**-rank


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

    @property
    def picks(self) -> tuple[Tensor, Tensor]:
        return self.topk_idx[self.rank], self.topk_weights[self.rank]

    def picks_of(self, rank: int) -> Tensor:
        """``[R, T, K]``: which picks are of that rank's experts."""
        first, end = expert_bounds(self.experts, len(self.topk_idx))[rank : rank + 2]
        return (self.topk_idx >= first) & (self.topk_idx < end)

    @property
    def flat(self) -> Tensor:
        """Rows that come here, as places in all ranks' rows, in the order of ``FLAT``."""
        return self.picks_of(self.rank).any(2).flatten().nonzero().flatten()

    def traffic(self, row_bytes: int, *, back: bool = False) -> Traffic:
        """What crosses the wire once per (token, rank)."""
        there = once_per_rank(list(self.topk_idx.cpu()), self.experts, row_bytes)
        return Traffic(there.received, there.sent) if back else there


def sweep_inputs(
    case: Case, seed: int, device: torch.device, count: int
) -> tuple[list[Batch], list[Sent]]:
    """``count`` inputs of a sweep's case, for this rank on the device and for all on the CPU."""
    rank, size, batches = dist.get_rank(), dist.get_world_size(), list[Batch]()
    sent = [all_sent(case, size, number, seed) for number in range(count)]
    for x, *picks in sent:
        idx, weights = (torch.stack(each).to(device) for each in picks)
        batches.append(Batch(x[rank].to(device), idx, weights, rank, case.experts))
    return batches, sent


@dataclass(frozen=True)
class Oracle:
    """What calls must return, by the oracle, on the CPU. ``x [R * T, H]``: all that is sent."""

    batch: Batch
    x: Tensor
    received: reference.ReferenceRows
    combined: Tensor

    @classmethod
    def asked(cls, case: Case, batch: Batch, sent: Sent) -> Oracle:
        layout, mode, dtype = LAYOUTS[case.layout], QUANTIZE[case.quantize], DTYPES[case.dtype]
        sizes = {"num_experts": case.experts, "max_tokens_per_rank": case.tokens}
        there = reference.dispatch(*sent, layout=layout, quantize=mode, **sizes)
        rows = [
            (r.x if r.scales is None else reference.dequantize(r.x, r.scales, dtype)) * share(rank)
            for rank, r in enumerate(there)
        ]
        weighted = layout is not ty.Layout.FLAT
        [back] = reference.combine(rows, there, weighted=weighted, owners=[batch.rank])
        return cls(batch, torch.cat(sent[0]).to(batch.x.device), there[batch.rank], back.x)

    def check_rows(self, recv: ty.Received, fields: Sequence[str] = ()) -> None:
        """Compare a dispatch, bit for bit: payload, scales, sources and ``fields``. Rows without a
        source (padding of ``EXPERT_PADDED``) may hold anything."""
        want = self.received
        filled = want.source >= 0
        for name in ("source", "x", "scales", *fields):
            got, wanted = getattr(recv, name), getattr(want, name)
            fault = "is missing" if got is None else "should not be there"
            assert (got is None) == (wanted is None), f"{name} {fault}"
            if got is not None:
                rows = name in ("x", "scales")
                source, at = (want.source[filled], filled) if rows else (None, slice(None))
                assert_same_bits(got.cpu()[at], wanted[at], what=name, source=source)

    def check_routed(self, recv: ty.Received) -> None:
        """Compare everything that a dispatch with a new routing returns."""
        self.check_rows(recv, ROUTED)

    def check_combined(self, y: Tensor) -> None:
        assert_same_bits(y.cpu(), self.combined, what="combined")


@dataclass(frozen=True, slots=True)
class Call:
    """Something to time, of an engine or of a collective.

    Attributes:
        case, phase, name: of its line. note: a sentence about it.
        run: the timed call; takes the number of the input, returns the result.
        check: compares a result with the truth about that input; raises ``AssertionError``.
        crosses: what crosses the wire, if that is more than :attr:`least`.
        kept: tensors that stay between calls for the sake of ``run``, besides what ``ep`` keeps.
        ep: the object whose call it is, None of a collective.
    """

    case: Case
    batches: Sequence[Batch]
    phase: str
    name: str
    run: Callable[[int], Any]
    check: Callable[[Any, Any], None]
    note: str = ""
    crosses: Traffic | None = None
    kept: Sequence[Tensor] = ()
    ep: ty.ExpertParallel | None = None

    @property
    def title(self) -> str:
        return f"{self.phase} by {self.name}"

    @property
    def least(self) -> list[Traffic]:
        """The least that the case could do with, per input: a row once per (token, rank)."""
        back = self.phase == COMBINE
        row_bytes = self.case.combined_row_bytes if back else self.case.row_bytes
        return [batch.traffic(row_bytes, back=back) for batch in self.batches]

    @property
    def kept_bytes(self) -> int:
        ours = 0 if self.ep is None else self.ep.buffer_bytes
        return ours + sum(tensor.nbytes for tensor in self.kept)

    @property
    def symmetric_bytes(self) -> int:
        """Of the object by now; 0 where there is none, or no symmetric memory in it."""
        return 0 if self.ep is None or self.ep.engine == COLLECTIVE else self.ep.buffer_bytes

    def attempt(self, number: int, truth: Any) -> None:
        """Call once on an input; raises ``AssertionError`` if the result is wrong."""
        self.check(self.run(number), truth)


def engine_calls(ep: ty.ExpertParallel, case: Case, batches: Sequence[Batch]) -> list[Call]:
    """A dispatch fresh, one cached, and a combine of what came, times :func:`share`. Collective."""
    mode, sent = QUANTIZE[case.quantize], list[Any](each.x for each in batches)
    if case.cast_before and mode is not None:
        sent, mode = [quantize(x, mode) for x in sent], None
    view: dict[str, Any] = {"in_place": True} if case.in_place else {}
    weighted: dict[str, Any] = {"weighted": True} if case.layout != "flat" else {}

    def fresh(number: int) -> ty.Received:
        more: dict[str, Any] = {"layout": LAYOUTS[case.layout], "quantize": mode}
        return ep.dispatch(sent[number], *batches[number].picks, **more)

    def cached(number: int) -> ty.Received:
        return ep.dispatch(sent[number], handle=handles[number], quantize=mode, **view)

    def combine(number: int) -> Any:
        make: Any = ep.combine
        return make(rows[number], handles[number], **weighted)

    handles, rows = list[ty.Handle](), list[Tensor]()
    for _ in range(2):  # handles of an object that has made its heap, and knows how many rows come
        fresh(0)
    for recv in map(fresh, range(len(batches))):
        plain = recv.x if recv.scales is None else recv.dequantize(DTYPES[case.dtype])
        rows.append(plain * share(ep.rank))
        handles.append(recv.handle)

    def call(phase: str, run: Callable[[int], Any], check: str, **known: Any) -> Call:
        def judge(result: Any, truth: Any) -> None:
            getattr(truth, check)(result)

        return Call(case, batches, phase, f"tokenyard {ep.engine}", run, judge, ep=ep, **known)

    return [
        call(DISPATCH, fresh, "check_routed", note=ep.why),
        call(CACHED, cached, "check_rows"),
        call(COMBINE, combine, "check_combined"),
    ]


def check(
    calls: Sequence[Any],
    truth: Callable[[int], Any],
    num_inputs: int,
    device: torch.device,
    known: Sequence[str] | None = None,
) -> list[str]:
    """What is wrong with each call on some input, "" if nothing. ``known``: errors that calls have
    already, which are left out. Collective."""
    errors = list(known or [""] * len(calls))
    for number in range(num_inputs):
        expected = truth(number)
        # The truth takes ranks unequally long, and engines wait for peers a limited time only.
        on_ranks(0, device)
        for at, call in enumerate(calls):
            if not errors[at]:
                attempt = partial(call.attempt, number, expected)
                errors[at] = failure(attempt, call.title, number, device)
    return errors


def failure(attempt: Callable[[], None], title: str, number: int, device: torch.device) -> str:
    """What is wrong, on whichever ranks; one that knows more says it on stderr. Collective."""
    what = ""
    try:
        attempt()
    except Exception as error:
        what = str(error) or type(error).__name__
        if dist.get_rank():  # what rank 0 knows stands in the report
            text = f"rank {dist.get_rank()}: {title}, input {number}: {what}"
            print(text, file=sys.stderr, flush=True)
    wrong = [rank for rank, failed in enumerate(on_ranks(int(bool(what)), device)) if failed]
    if not wrong:
        return ""
    where = f"wrong on rank {', '.join(map(str, wrong))} (input {number})"
    return f"{where}: {what}" if what else where
