"""Engine ``low_latency``: small batches of static shape through fixed slots in symmetric memory, in
one launch per call, or two.

A dispatch casts, sends, and places rows; a combine sums where the experts are, sends one row per
(token, rank), and adds by rank. Nothing waits on the host, and calls are counted on the device, so
CUDA graphs hold them. A silent rank is left out. See ``docs/low_latency.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.low_latency_ground import Ground, Shape
from tokenyard.engines.low_latency_kinds import CombineKind, DispatchKind, Kinds
from tokenyard.engines.low_latency_launches import BOTH, RECEIVE, SEND, Launch, Launches, Parts
from tokenyard.engines.low_latency_options import NO_OPTIONS, CallOptions
from tokenyard.engines.rings import address, aligned, as_aligned, sums_for
from tokenyard.errors import Mismatch, NotSupported
from tokenyard.handle import Plan, Spec
from tokenyard.header import COMBINE
from tokenyard.kernels.low_region import BAD_AT, BAD_VALUE, OTHER_RANK, SILENT_RANK
from tokenyard.layout import host_ints
from tokenyard.memory.aside import synchronize
from tokenyard.memory.base import SymmetricMemory
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Quantize
from tokenyard.whole import whole

Sums = tuple[Tensor, Tensor | None]


class _Pending(NamedTuple):
    """A call that is ready: ``launch(parts)(*args)`` makes it, then ``result()``. ``held`` are
    tensors that launches read.
    """

    launch: Callable[[Parts], Launch]
    args: tuple[int, ...]
    result: Callable[[], Any]
    held: tuple[Any, ...]


class _Rest(NamedTuple):
    """What is left of a call in two: calling it makes the receiving launch. ``ahead()``: the
    result, still to be filled.
    """

    finish: Callable[[], Any]
    ahead: Callable[[], Any]

    def __call__(self) -> Any:
        return self.finish()


class LowLatencyEngine:
    """Dispatch and combine for decoding. All methods that move rows are collective and run in one
    order on all ranks.

    Args:
        memory: of this rank; the engine closes it.
        shape: how kernels are cut; equal on all ranks.
        buffer_bytes: symmetric memory; None: what rows of 2 bytes per channel need.

    Attributes: active: int32 ``[R]`` on the device, 0 for ranks that are left out. Kernels read and
    write it.
    """

    name = "low_latency"
    waits_on_host = False
    returns_width = hop_counts = 0

    def __init__(
        self,
        config: Config,
        memory: SymmetricMemory,
        stats: Stats,
        shape: Shape,
        buffer_bytes: int | None,
    ) -> None:
        self.config, self.stats = config, stats
        self._memory = memory
        self._ground = Ground(config, memory, shape, buffer_bytes)
        self._launches = Launches(config, self._ground)
        self._kinds = Kinds(config, self._ground)
        self._refuse = self._launches.refuse()  # so that a refusal is not late
        self._status: Any = self._ground.status.numpy()
        self._dispatches, self._nanoseconds = 0, int(config.timeout * 1e9)
        self._open = ""
        self.active = self._ground.active

    @property
    def buffer_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._ground.num_bytes

    # Dispatch

    def check_dispatch(
        self,
        payload: Payload,
        spec: Spec,
        mode: Quantize | None,
        *,
        cached: bool,
        in_place: bool,
        options: CallOptions | None,
    ) -> None:
        """Raise if a dispatch cannot be made.

        Raises: NotSupported: names the engine that can. ValueError: rows do not fit into slots,
        options are wrong.
        """
        by_column = options is not None and options.scales_by_column
        self._checked(
            payload, spec, mode, by_column, cached=cached, in_place=in_place, options=options
        )

    def _checked(
        self,
        payload: Payload,
        spec: Spec,
        mode: Quantize | None,
        by_column: bool,
        *,
        cached: bool,
        in_place: bool,
        options: CallOptions | None,
    ) -> DispatchKind:
        if cached or in_place:
            what = "cached dispatch (handle=)" if cached else "in_place=True"
            raise NotSupported(f"engine 'low_latency' has no {what}; engine 'nvlink' has")
        kind = self._kinds.dispatch(payload, spec, mode, by_column)
        self._check_open(options)
        return kind

    def dispatch(
        self,
        payload: Payload,
        topk_idx: Tensor,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        *,
        in_place: bool = False,
        options: CallOptions = NO_OPTIONS,
        in_two: bool = False,
    ) -> Any:
        """Send each token once to every rank that holds one of its experts; returns ``(rows, plan,
        arrived)``.

        ``options`` have passed :meth:`check_dispatch`. ``in_two``: make the sending launch only,
        and return a function that makes the receiving one and returns them.
        """
        by_column = options.scales_by_column
        kind = self._checked(
            payload, spec, mode, by_column, cached=False, in_place=in_place, options=None
        )
        with self._memory.tensors():
            payload = aligned(payload)
            topk_idx, weights = (
                topk_idx.contiguous(),
                None if weights is None else weights.contiguous(),
            )
            return self._make(
                self._prepare(kind, payload, topk_idx, weights, spec, mode, options),
                "dispatch",
                in_two,
            )

    def _prepare(
        self,
        kind: DispatchKind,
        payload: Payload,
        topk_idx: Tensor,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        options: CallOptions,
    ) -> _Pending:
        ground, weighted, wide = self._ground, weights is not None, topk_idx.dtype == torch.int64
        loads, waits = options.loads, options.waits
        load_bytes = 0 if loads is None else loads.itemsize
        self._dispatches += 1
        made = self._kinds.results(kind, topk_idx, weighted, self._dispatches)
        out, plan, arrived = made
        route = plan.route.data_ptr()
        blocks = arrived.source_ranges if kind.padded else arrived.expert_offsets
        args = (
            ground.peers,
            ground.state_at,
            ground.active_at,
            topk_idx.data_ptr(),
            address(weights),
            payload.x.data_ptr(),
            address(payload.scales),
            out.x.data_ptr(),
            address(out.scales),
            arrived.weights.data_ptr(),
            arrived.source.data_ptr(),
            route + self._kinds.slots_at,
            route,
            plan.first_pick.data_ptr(),
            arrived.tokens_per_expert.data_ptr(),
            blocks.data_ptr(),
            arrived.overflow.data_ptr(),
            address(loads),
            address(waits),
            self._limit(options),
            kind.tags[weighted],
            self.config.rank,
            topk_idx.shape[0],
            kind.num_rows,
            spec.expert_alignment,
        )

        def launch(parts: Parts) -> Launch:
            key = (parts, wide, weighted, load_bytes, waits is None)
            kept = kind.launches.get(key)
            if kept is None:
                kept = kind.launches[key] = self._launches.dispatch(
                    kind.form,
                    mode,
                    payload.x.dtype,
                    spec,
                    parts,
                    wide=wide,
                    weighted=weighted,
                    columns=kind.by_column,
                    loads=load_bytes,
                    timed=waits is not None,
                )
            return kept

        return _Pending(launch, args, lambda: made, (payload, topk_idx, weights, options))

    # Combine

    def check_combine(
        self, rows: Tensor, spec: Spec, num_tokens: int, options: CallOptions | None
    ) -> None:
        """Raise if a combine cannot be made.

        Raises:
            ValueError: rows do not fit into slots, options are wrong.
        """
        self._checked_sums(rows, spec, num_tokens, options)

    def _checked_sums(
        self, rows: Tensor, spec: Spec, num_tokens: int, options: CallOptions | None
    ) -> CombineKind:
        kind = self._kinds.combine(rows, spec)
        self._check_open(options, num_tokens)
        return kind

    def combine(
        self,
        rows: Tensor,
        plan: Plan,
        spec: Spec,
        *,
        weights: Tensor | None = None,
        reduce_weights: Tensor | None = None,
        bias: tuple[Tensor, ...] = (),
        out: Tensor | None = None,
        raw: bool = False,
        options: CallOptions = NO_OPTIONS,
        in_two: bool = False,
    ) -> Any:
        """Sum ``rows`` per token, on their rank, then at the token's owner; returns ``(sums,
        None)``.

        ``weights``: ``[rows]``, or ``[T, K]`` at the tokens' owners, which then travel ahead.
        ``in_two``: as in :meth:`dispatch`. ``options`` have passed :meth:`check_combine`.
        """
        if raw or reduce_weights is not None:
            raise NotSupported(
                "engine 'low_latency' is for inference: it has no gradients of weights and of "
                "combine; engine 'nvlink' has"
            )
        tokens = plan.first_pick.shape[0]
        kind = self._checked_sums(rows, spec, tokens, None)
        with self._memory.tensors():
            return self._make(
                self._prepare_sums(kind, tokens, rows, plan, weights, bias, out, options),
                "combine",
                in_two,
            )

    def _prepare_sums(
        self,
        kind: CombineKind,
        tokens: int,
        rows: Tensor,
        plan: Plan,
        weights: Tensor | None,
        bias: tuple[Tensor, ...],
        out: Tensor | None,
        options: CallOptions,
    ) -> _Pending:
        ground, rows = self._ground, as_aligned(rows)
        weights = None if weights is None else as_aligned(weights)
        terms = [as_aligned(term) for term in bias]
        total = sums_for(rows, tokens, out, rows, *terms)
        told, waits = options.lost_weights, options.waits
        lost = told if told is None or told.is_cuda else rows.new_empty(tokens, dtype=torch.float32)
        weighted, route = 0 if weights is None else weights.dim(), plan.route.data_ptr()
        args = (
            ground.peers,
            ground.state_at,
            ground.active_at,
            rows.data_ptr(),
            route + self._kinds.slots_at,
            address(weights),
            route,
            plan.first_pick.data_ptr(),
            *(term.data_ptr() for term in terms),
            *(0,) * (2 - len(terms)),
            total.data_ptr(),
            address(waits),
            address(lost),
            self._limit(options),
            kind.tag(weighted == 2, host_ints(plan.splits)[-1]),
            self.config.rank,
            tokens,
        )

        def launch(parts: Parts) -> Launch:
            dtypes = tuple(term.dtype for term in bias)
            key = (parts, weighted, dtypes, waits is None, lost is None)
            kept = kind.launches.get(key)
            if kept is None:
                kept = kind.launches[key] = self._launches.combine(
                    rows.dtype,
                    weighted,
                    dtypes,
                    parts,
                    kept=kind.kept,
                    timed=waits is not None,
                    lost=lost is not None,
                )
            return kept

        def result() -> Sums:
            if told is not None and lost is not None and lost is not told:
                told.copy_(lost)
            if out is not None and total is not out:
                out.copy_(total)
            return (total if out is None else out), None

        return _Pending(launch, args, result, (rows, weights, terms, plan, options))

    def redispatch(
        self,
        payload: Payload,
        plan: Plan,
        spec: Spec,
        *,
        mode: Quantize | None = None,
        raw: bool = False,
        in_place: bool = False,
    ) -> Payload:
        """Not with this engine."""
        raise NotSupported(
            "engine 'low_latency' has no cached dispatch and no backward of combine; engine "
            "'nvlink' has"
        )

    # Both

    def _make(self, pending: _Pending, op: str, in_two: bool) -> Any:
        if in_two:
            self._launch(pending, SEND)
            self._open = op
            return _Rest(partial(self._finish, pending, op), pending.result)
        self._launch(pending, BOTH)
        return self._end(pending, op)

    def _finish(self, pending: _Pending, op: str) -> Any:
        """The receiving launch of a call in two."""
        with self._memory.tensors():
            self._open = ""
            self._launch(pending, RECEIVE)
            return self._end(pending, op)

    def _launch(self, pending: _Pending, parts: Parts) -> None:
        launch = pending.launch(
            parts
        )  # may load a kernel, which waits for those that run: so before the gate
        self._memory.gate()
        launch(*pending.args)

    def _end(self, pending: _Pending, op: str) -> Any:
        self._memory.settle()
        self.stats.record_unknown(op)
        return pending.result()

    def _check_open(self, options: CallOptions | None, num_tokens: int | None = None) -> None:
        if self._open:
            raise ValueError(
                f"the hook of the last {self._open} was not called: one call of an object may be "
                f"outstanding; call it first, or "
                "make two ExpertParallels for two batches"
            )
        if options is not None:
            options.check(self.config, self._memory.device, num_tokens)

    def _limit(self, options: CallOptions) -> int:
        """Nanoseconds that silent ranks are waited for."""
        return self._nanoseconds if options.timeout is None else int(float(options.timeout) * 1e9)

    # Ranks that are left out

    def active_ranks(self) -> list[bool]:
        """Which ranks take part, as of all calls so far. Waits for the device."""
        synchronize(self._memory.device)
        return [value != 0 for value in host_ints(self.active)]

    def mask(self, rank: int, active: bool = False) -> None:
        """Leave ``rank`` out from the next call on, or (``active``) let it in again. Queued like a
        call, so graphs hold it.
        """
        peer = whole(rank)
        if peer is None or not 0 <= peer < self.config.world_size or peer == self.config.rank:
            raise ValueError(
                f"rank ({rank!r}) must be one of the other ranks, 0..{self.config.world_size - 1}"
            )
        self._memory.settle()
        self.active[peer : peer + 1].fill_(int(active))
        if active:
            self._status[SILENT_RANK] = 0

    def silent_rank(self) -> int | None:
        """A rank that a kernel has left out for its silence. Does not wait for kernels that still
        run.
        """
        return int(self._status[SILENT_RANK]) - 1 if self._status[SILENT_RANK] else None

    # The rest

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """Take part in a call to which this rank brings nothing."""
        if self._open:
            return False
        with self._memory.tensors():
            self._memory.gate()
            ground = self._ground
            self._refuse(ground.peers, ground.state_at, ground.active_at, self._nanoseconds)
            self._memory.settle()
            self._dispatches += op != COMBINE
        return True

    def check(self) -> None:
        """Wait for the device; raise if ids were out of range, or a rank was in another call, since
        the last check.
        """
        synchronize(self._memory.device)
        at, value, other = (int(self._status[word]) for word in (BAD_AT, BAD_VALUE, OTHER_RANK))
        self._status[:SILENT_RANK] = 0
        if at:
            raise ValueError(
                head.bad_index_text(at - 1, value, self.config.num_topk, self.config.num_experts)
            )
        if other:
            raise Mismatch(
                f"ranks {self.config.rank} and {other - 1} were in different calls, or disagreed "
                f"on dtype, layout or another "
                f"option; rank {other - 1} is left out since"
            )

    def interrupt(self, text: str) -> None:
        """Nothing: the others leave out who is silent."""

    def close(self) -> None:
        """Let go of everything held."""
        self._memory.close()
        del self._ground.region

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        """Shape and dtype of ``Plan.route``, and the number of arrival rows, for fake tensors."""
        return self._kinds.route_shape, torch.int32, self.config.padded_rows
