"""What ``tokenyard bench --suite nvlink`` times: kinds of calls of one ``ExpertParallel``, and NCCL
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard.cli.bench_baselines import PLAIN_EXCHANGE, all_gather, reduce_scatter_for
from tokenyard.cli.bench_batches import Batch, Truth, share
from tokenyard.cli.bench_cases import CACHED, COMBINE, DISPATCH, row_words
from tokenyard.cli.bench_inputs import Job, Traffic, everything_to_everyone
from tokenyard.formats import quantize
from tokenyard.routing import host_ints, send_order, tokens_in_ranks
from tokenyard.testing.compare import assert_close, assert_same_bits

Outcome = Callable[[Any, Truth], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something to time.

    Attributes: job, name, phase: of its row. run: the timed call; takes the number of the input,
        returns the result. prepare: brings that input to where ``run`` reads it, before a result is
        checked. Timed calls find the last one there: they take as long with any rows. check:
        compares a result with the truth about that input. traffic: what crosses the wire, per
        input; least: the least that the job could do with. ep: the object whose call it is, None of
        a collective; kind: which call, a key of :data:`KINDS`. sms, rings: of that object: SMs
        asked for, bytes of rings. bar_us: what it should at most take.
    """

    job: Job
    name: str
    phase: str
    run: Callable[[int], Any]
    check: Outcome
    traffic: list[Traffic]
    least: list[Traffic]
    prepare: Callable[[int], Any] | None = None
    ep: ty.ExpertParallel | None = None
    kind: str = ""
    sms: int | None = None
    rings: int | None = None
    bar_us: float | None = None

    @property
    def ours(self) -> bool:
        return self.ep is not None

    @property
    def symmetric_bytes(self) -> int | None:
        """Of the object by now, if it has symmetric memory."""
        return (
            self.ep.buffer_bytes
            if self.ep is not None and self.ep.engine in IN_PLACE_ENGINES
            else None
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of dispatch. ``fp8`` is where the cast happens: "payload" (before the call), "wire"
    (in the send) or "".
    """

    name: str
    fp8: str = ""
    layout: ty.Layout = ty.Layout.FLAT
    cached: bool = True
    in_place: bool = False
    bar_us: float | None = None


FRESH, PLAIN, VIEW, BACK, BACK_IN_PLACE = "new routing", "bf16", "view", "combine", "pull"
KINDS = {
    FRESH: Signature("dispatch BF16, new routing", cached=False),
    PLAIN: Signature("dispatch BF16", bar_us=500),
    "fp8": Signature("dispatch FP8", fp8="payload", bar_us=270),
    "fused": Signature("dispatch BF16, FP8 on the wire", fp8="wire", bar_us=280),
    "major": Signature(
        "dispatch FP8, expert-major", fp8="payload", layout=ty.Layout.EXPERT_MAJOR, bar_us=330
    ),
    VIEW: Signature("dispatch BF16, in place", in_place=True, bar_us=465),
    "view8": Signature("dispatch FP8, in place", fp8="payload", in_place=True, bar_us=245),
}
IN_PLACE = (VIEW, "view8", BACK_IN_PLACE)
IN_PLACE_ENGINES = ("nvlink", "twolevel")
COMBINE_NAME, COMBINE_BAR_US = "combine BF16", 490.0
BACK_IN_PLACE_NAME, BACK_IN_PLACE_BAR_US = "combine BF16, in place", 475.0
NEW_ROUTING_BAR_US = 45.0
BARS_RANKS = 4
"""Bars are for the wire traffic of this many ranks; fewer move less."""
"""What a new routing may add."""


class Library:
    """Calls of one object on some batches. Making one is collective: it dispatches every batch
    once.

    ``again`` makes another such object: combines in place are its calls (``twolevel`` reads what
    dispatches in place overwrite).
    """

    def __init__(
        self,
        ep: ty.ExpertParallel,
        job: Job,
        batches: list[Batch],
        *,
        again: Callable[[], ty.ExpertParallel] | None = None,
        sms: int | None = None,
        rings: int | None = None,
    ) -> None:
        self._ep, self._job, self._batches, self._again = ep, job, batches, again
        self._sms, self._rings = sms, rings
        self._rows: list[Tensor] = []
        self._handles: list[ty.Handle] = []
        for batch in batches:
            recv = ep.dispatch(batch.x, *self._picks(batch))
            self._handles.append(recv.handle)
            self._rows.append(recv.x.mul_(share(ep.rank)))
        self._by_expert = cache(self._dispatch_by_expert)
        self._quantized = cache(lambda: [quantize(batch.x, ty.Quantize.FP8) for batch in batches])

    def probes(self, kinds: Sequence[str], *, bars: bool = False) -> list[Probe]:
        """Of ``kinds`` (:data:`KINDS`, :data:`BACK` and :data:`BACK_IN_PLACE`), those that the
        engine can do. Collective.
        """
        able = [
            kind for kind in kinds if kind not in IN_PLACE or self._ep.engine in IN_PLACE_ENGINES
        ]
        make = {BACK: self._combine, BACK_IN_PLACE: self._combine_in_place}
        probes = [make[kind]() if kind in make else self._dispatch(kind) for kind in able]
        judged = bars and dist.get_world_size() == BARS_RANKS
        return probes if judged else [replace(probe, bar_us=None) for probe in probes]

    def _picks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.topk_idx[self._ep.rank], batch.topk_weights[self._ep.rank]

    def _dispatch_by_expert(self) -> list[ty.Handle]:
        sent = zip(self._quantized(), self._batches, strict=True)
        major = ty.Layout.EXPERT_MAJOR
        return [self._ep.dispatch(x, *self._picks(batch), layout=major).handle for x, batch in sent]

    def _dispatch(self, name: str) -> Probe:
        kind = KINDS[name]
        job = replace(
            self._job, layout=kind.layout.name.lower(), quantize="fp8" if kind.fp8 else "none"
        )
        sent = self._quantized() if kind.fp8 == "payload" else [batch.x for batch in self._batches]
        mode = ty.Quantize.FP8 if kind.fp8 == "wire" else None
        handles = self._handles if kind.layout is ty.Layout.FLAT else self._by_expert()

        def fresh(number: int) -> ty.Received:
            return self._ep.dispatch(sent[number], *self._picks(self._batches[number]))

        def cached(number: int) -> ty.Received:
            return self._ep.dispatch(
                sent[number], handle=handles[number], quantize=mode, in_place=kind.in_place
            )

        def check(recv: ty.Received, truth: Truth) -> None:
            truth.check_rows(recv) if kind.cached else truth.check_routed(recv)

        traffic = [batch.traffic(job.row_bytes) for batch in self._batches]
        phase, run = (CACHED, cached) if kind.cached else (DISPATCH, fresh)
        return self._probe(job, name, kind.name, phase, run, check, traffic, kind.bar_us)

    def _combine(self) -> Probe:
        def run(number: int) -> Any:
            return self._ep.combine(self._rows[number], self._handles[number])

        return self._back(BACK, COMBINE_NAME, run, COMBINE_BAR_US)

    def _combine_in_place(self) -> Probe:
        assert self._again is not None
        ep = self._again()
        handles = [ep.dispatch(batch.x, *self._picks(batch)).handle for batch in self._batches]
        longest = max(handles, key=lambda handle: handle.num_rows)
        view = ep.empty_for_combine(longest, in_place=True).zero_()
        shown = [view[: handle.num_rows] for handle in handles]

        def run(number: int) -> Any:
            return ep.combine(shown[number], handles[number], in_place=True)

        def prepare(number: int) -> Any:
            return shown[number].copy_(self._rows[number])

        probe = self._back(BACK_IN_PLACE, BACK_IN_PLACE_NAME, run, BACK_IN_PLACE_BAR_US)
        return replace(probe, prepare=prepare, ep=ep)

    def _back(self, kind: str, name: str, run: Callable[[int], Any], bar: float) -> Probe:
        def check(y: Tensor, truth: Truth) -> None:
            truth.check_combined(y)

        back = [batch.traffic(self._job.combined_row_bytes, back=True) for batch in self._batches]
        return self._probe(self._job, kind, name, COMBINE, run, check, back, bar)

    def _probe(
        self,
        job: Job,
        kind: str,
        name: str,
        phase: str,
        run: Callable[[int], Any],
        check: Outcome,
        traffic: list[Traffic],
        bar: float | None,
    ) -> Probe:
        return Probe(
            job=job,
            name=name,
            phase=phase,
            run=run,
            check=check,
            traffic=traffic,
            least=traffic,
            ep=self._ep,
            kind=kind,
            sms=self._sms,
            rings=self._rings,
            bar_us=bar,
        )


# What anybody could use instead

EXCHANGE, GATHER = f"{PLAIN_EXCHANGE} BF16", "all-gather BF16"
EXCHANGE_BACK, SCATTER = f"{PLAIN_EXCHANGE} back BF16", "reduce-scatter BF16"


def collectives(
    job: Job, batches: list[Batch], *, fp8: bool = False, gathers: bool = True
) -> list[Probe]:
    """``all_to_all_single`` once per rank, both ways, and (``gathers``) all-gather and
    reduce-scatter. Collective.

    Counts are known and rows ready to send; nothing is summed after the way back. ``fp8``:
    dispatches of FP8 rows as well.
    """
    forms = [(job, "BF16"), *([(replace(job, quantize="fp8"), "FP8")] if fp8 else [])]
    probes: list[Probe] = []
    for each, name in forms:
        probes.append(_exchange(each, batches, f"{PLAIN_EXCHANGE} {name}"))
        if gathers:
            probes.append(_gather(each, batches, f"all-gather {name}"))
    probes.append(_exchange_back(job, batches))
    return [*probes, _scatter(job, batches)] if gathers else probes


@dataclass(frozen=True, slots=True)
class _Trip:
    """One input of an exchange: rows in the order of destinations, and how many go where."""

    rows: Tensor
    to_peers: list[int]
    from_peers: list[int]


def _words(batch: Batch, job: Job) -> Tensor:
    if job.quantize == "none":
        return row_words(batch.x, None)
    sent = quantize(batch.x, ty.Quantize.FP8)
    return row_words(sent.data, sent.scales)


def _trip(batch: Batch, job: Job) -> _Trip:
    picks = [tokens_in_ranks(idx, batch.experts, len(batch.topk_idx)) for idx in batch.topk_idx]
    rows = _words(batch, job).index_select(0, send_order(picks[batch.rank]))
    to_peers = host_ints(picks[batch.rank].sum(0))
    return _Trip(rows, to_peers, [int(each[:, batch.rank].sum()) for each in picks])


def _swap(out: Tensor, rows: Tensor, into: list[int], out_of: list[int]) -> Tensor:
    untyped: Any = dist
    untyped.all_to_all_single(out[: sum(into)], rows, into, out_of)
    return out[: sum(into)]


def _exchange(job: Job, batches: list[Batch], name: str) -> Probe:
    trips = [_trip(batch, job) for batch in batches]
    landing = trips[0].rows.new_empty(
        max(sum(trip.from_peers) for trip in trips), trips[0].rows.shape[1]
    )

    def run(number: int) -> Tensor:
        trip = trips[number]
        return _swap(landing, trip.rows, trip.from_peers, trip.to_peers)

    def check(rows: Tensor, truth: Truth) -> None:
        assert_same_bits(rows, _truth_words(truth, job)[truth.flat], what="rows")

    traffic = [batch.traffic(job.row_bytes) for batch in batches]
    return Probe(
        job=job, name=name, phase=DISPATCH, run=run, check=check, traffic=traffic, least=traffic
    )


def _truth_words(truth: Truth, job: Job) -> Tensor:
    if job.quantize == "none":
        return row_words(truth.x, None)
    return row_words(truth.quantized.data, truth.quantized.scales)


def _exchange_back(job: Job, batches: list[Batch]) -> Probe:
    trips = [_trip(batch, job) for batch in batches]
    arrived: list[Tensor] = []
    for trip in trips:
        room = trip.rows.new_empty(sum(trip.from_peers), trip.rows.shape[1])
        arrived.append(_swap(room, trip.rows, trip.from_peers, trip.to_peers))
    landing = trips[0].rows.new_empty(max(len(trip.rows) for trip in trips), trips[0].rows.shape[1])

    def run(number: int) -> tuple[int, Tensor]:
        trip = trips[number]
        return number, _swap(landing, arrived[number], trip.to_peers, trip.from_peers)

    def check(result: tuple[int, Tensor], _: Truth) -> None:
        assert_same_bits(result[1], trips[result[0]].rows, what="returned rows")

    back = [batch.traffic(job.combined_row_bytes, back=True) for batch in batches]
    return Probe(
        job=job, name=EXCHANGE_BACK, phase=COMBINE, run=run, check=check, traffic=back, least=back
    )


def _gather(job: Job, batches: list[Batch], name: str) -> Probe:
    rows = [_words(batch, job) for batch in batches]
    size = dist.get_world_size()
    gathered = rows[0].new_empty(size * job.tokens, rows[0].shape[1])

    def run(number: int) -> Tensor:
        all_gather(gathered, rows[number])
        return gathered

    def check(result: Tensor, truth: Truth) -> None:
        assert_same_bits(result, _truth_words(truth, job), what="gathered rows")

    traffic = [everything_to_everyone(job.tokens, size, job.row_bytes)] * len(batches)
    least = [batch.traffic(job.row_bytes) for batch in batches]
    return Probe(
        job=job, name=name, phase=DISPATCH, run=run, check=check, traffic=traffic, least=least
    )


def _scatter(job: Job, batches: list[Batch]) -> Probe:
    size, rank = dist.get_world_size(), dist.get_rank()
    sums = [Truth.of(batch).x * share(rank) for batch in batches]
    name, trips, reduce_scatter = reduce_scatter_for(torch.empty_like(batches[0].x), sums[0])

    def run(number: int) -> Tensor:
        return reduce_scatter(sums[number])

    def check(result: Tensor, truth: Truth) -> None:
        expected = truth.batch.x.float() * sum(map(share, range(size)))
        assert_close(
            result, expected, relative=2 * torch.finfo(result.dtype).eps, what="reduced rows"
        )

    traffic = [everything_to_everyone(job.tokens, size, job.combined_row_bytes, trips)] * len(
        batches
    )
    least = [batch.traffic(job.combined_row_bytes, back=True) for batch in batches]
    shown = SCATTER if name == "reduce-scatter" else name
    return Probe(
        job=job, name=shown, phase=COMBINE, run=run, check=check, traffic=traffic, least=least
    )
