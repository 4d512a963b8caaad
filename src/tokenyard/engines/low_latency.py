"""Engine ``low_latency``: small batches of static shape through fixed slots in symmetric memory, in one launch per call, or two.

A dispatch casts, sends, and places rows; a combine sums where the experts are, sends one row per (token, rank), and adds by rank.
Nothing waits on the host, and calls are counted on the device, so CUDA graphs hold them. A silent rank is left out. See
``docs/low_latency.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.arrival import num_result_rows
from tokenyard.engines.low_latency_ground import Ground, Shape, meta_words
from tokenyard.engines.low_latency_launches import BOTH, RECEIVE, SEND, Launches, Parts
from tokenyard.engines.low_latency_options import NO_OPTIONS, CallOptions
from tokenyard.engines.rings import Form, address, as_aligned, form_of
from tokenyard.errors import Mismatch, NotSupported
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import COMBINE, DISPATCH
from tokenyard.kernels.low_region import BAD_AT, BAD_VALUE, OTHER_RANK, SILENT_RANK
from tokenyard.layout import host_ints
from tokenyard.memory.base import SymmetricMemory
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Layout, Quantize

Rows = tuple[Payload, Plan, Arrived]
Sums = tuple[Tensor, Tensor | None]


class _Pending(NamedTuple):
    """A call whose arguments are ready: ``bind(parts)()`` launches, then ``result()``. ``held`` are tensors that launches read."""

    bind: Callable[[Parts], Callable[[], None]]
    result: Callable[[], Any]
    held: tuple[Any, ...]


class _Rest(NamedTuple):
    """What is left of a call in two: calling it makes the receiving launch. ``ahead()``: the result, still to be filled."""

    finish: Callable[[], Any]
    ahead: Callable[[], Any]

    def __call__(self) -> Any:
        return self.finish()


class LowLatencyEngine:
    """Dispatch and combine for decoding. All methods that move rows are collective and run in one order on all ranks.

    Args:
        memory: of this rank; the engine closes it.
        shape: how kernels are cut; equal on all ranks.
        buffer_bytes: symmetric memory; None: what rows of 2 bytes per channel need.

    Attributes:
        active: int32 ``[R]`` on the device, 0 for ranks that are left out. Kernels read and write it.
    """

    name = "low_latency"
    waits_on_host = False
    returns_width = hop_counts = 0

    def __init__(
        self, config: Config, memory: SymmetricMemory, stats: Stats, shape: Shape, buffer_bytes: int | None
    ) -> None:
        self.config, self.stats = config, stats
        self._memory = memory
        self._ground = Ground(config, memory, shape, buffer_bytes)
        self._launches = Launches(config, self._ground)
        self._refuse = self._launches.refuse()  # so that a refusal is not late
        self._status: Any = self._ground.status.numpy()
        self._dispatches = 0
        self._open = ""
        self.active = self._ground.active

    @property
    def buffer_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._ground.num_bytes

    # Dispatch

    def check_dispatch(
        self, payload: Payload, spec: Spec, mode: Quantize | None, *, cached: bool, in_place: bool, options: CallOptions | None
    ) -> None:  # fmt: skip
        """Raise if a dispatch cannot be made.

        Raises:
            NotSupported: names the engine that can. ValueError: rows do not fit into slots, options are wrong.
        """
        if cached or in_place:
            what = "cached dispatch (handle=)" if cached else "in_place=True"
            raise NotSupported(f"engine 'low_latency' has no {what}; engine 'nvlink' has")
        if spec.exact or spec.layout is Layout.FLAT:
            asked = f"exact={spec.exact} with Layout.{spec.layout.name}"
            raise NotSupported(
                f"engine 'low_latency' has exact=False with Layout.EXPERT_PADDED or EXPERT_MAJOR only, not {asked}; "
                "engines 'nvlink' and 'collective' have"
            )
        self._check_open(options)
        self._ground.check_fits(self._form(payload, mode), f"rows of {payload.x.dtype} x {payload.x.shape[1]}")

    def dispatch(
        self, payload: Payload, topk_idx: Tensor, weights: Tensor | None, spec: Spec, mode: Quantize | None, *,
        in_place: bool = False, options: CallOptions = NO_OPTIONS, in_two: bool = False,
    ) -> Any:  # fmt: skip
        """Send each token once to every rank that holds one of its experts; returns ``(rows, plan, arrived)``.

        ``in_two``: make the sending launch only, and return a function that makes the receiving one and returns them.
        """
        self.check_dispatch(payload, spec, mode, cached=False, in_place=in_place, options=options)
        with self._memory.tensors():
            payload = Payload(as_aligned(payload.x), None if payload.scales is None else as_aligned(payload.scales))
            topk_idx, weights = topk_idx.contiguous(), None if weights is None else weights.contiguous()
            return self._make(self._prepare(payload, topk_idx, weights, spec, mode, options), "dispatch", in_two)

    def _prepare(
        self, payload: Payload, topk_idx: Tensor, weights: Tensor | None, spec: Spec, mode: Quantize | None, options: CallOptions
    ) -> _Pending:  # fmt: skip
        config, ground, form = self.config, self._ground, self._form(payload, mode)
        num_rows, local, ranks = num_result_rows(spec, config, None, 0), config.num_local_experts, config.world_size
        padded = spec.layout is Layout.EXPERT_PADDED
        make = partial(torch.empty, device=payload.x.device)
        x = make((num_rows, form.hidden), dtype=payload.x.dtype if mode is None else torch.float8_e4m3fn)
        scale_dtype = torch.float32 if payload.scales is None else payload.scales.dtype
        scale_dtype = torch.int32 if mode is Quantize.FP8_UE8M0 else scale_dtype
        scales = make((num_rows, form.scale_words), dtype=scale_dtype) if form.scale_words else None
        blocks = make((local, ranks, 2) if padded else (local + 1,), dtype=torch.int32)
        arrived = Arrived(
            topk_idx=make(0, dtype=torch.int32),
            weights=make(0 if weights is None else num_rows, dtype=torch.float32),
            source=make(num_rows, dtype=torch.int64),
            tokens_per_expert=make(local, dtype=torch.int32),
            expert_offsets=make(0, dtype=torch.int32) if padded else blocks,
            source_ranges=blocks if padded else make(0, dtype=torch.int32),
            overflow=make(0 if spec.capacity is None else 1, dtype=torch.int32),
        )
        self._dispatches += 1
        plan = Plan(
            splits=torch.tensor([-1] * (2 * ranks) + [self._dispatches], device="cpu"),
            route=make(topk_idx.shape, dtype=torch.int32),
            returns=make((0, 0), dtype=torch.int64),
            slots=make((config.padded_rows, config.num_topk), dtype=torch.int32),
            picks=make(0, dtype=torch.int64),
            gather=make(0, dtype=torch.int64),
            first_pick=make(topk_idx.shape, dtype=torch.int64),
        )
        scaled = payload.scales is not None
        fingerprint = head.fingerprint_of(DISPATCH, 0, payload, spec, mode, weights is not None, 0, scaled)
        args = (
            ground.peers, ground.state_at, ground.active_at, topk_idx.data_ptr(), address(weights), payload.x.data_ptr(),
            address(payload.scales), x.data_ptr(), address(scales), arrived.weights.data_ptr(), arrived.source.data_ptr(),
            plan.slots.data_ptr(), plan.route.data_ptr(), plan.first_pick.data_ptr(), arrived.tokens_per_expert.data_ptr(),
            blocks.data_ptr(), arrived.overflow.data_ptr(), address(options.loads), address(options.waits),
            self._nanoseconds(options), _tag(astuple(fingerprint)), topk_idx.shape[0], num_rows, spec.expert_alignment,
        )  # fmt: skip

        def bind(parts: Parts) -> Callable[[], None]:
            kernel = self._launches.dispatch(
                form, mode, payload.x.dtype, spec, parts, wide=topk_idx.dtype == torch.int64, weighted=weights is not None,
                loads=options.loads is not None, timed=options.waits is not None,
            )  # fmt: skip
            return partial(kernel, *args)

        def result() -> Rows:
            return Payload(x, scales), plan, arrived

        return _Pending(bind, result, (payload, topk_idx, weights))

    # Combine

    def check_combine(self, rows: Tensor, options: CallOptions | None) -> None:
        """Raise if a combine cannot be made.

        Raises:
            ValueError: rows do not fit into slots, options are wrong.
        """
        self._check_open(options)
        if options is not None and options.loads is not None:
            raise ValueError("options.loads counts rows of a dispatch: leave it out of a combine")
        self._ground.check_fits(form_of(Payload(rows, None), None, 0), f"rows of {rows.dtype} x {rows.shape[1]}")

    def combine(
        self, rows: Tensor, plan: Plan, spec: Spec, *, weights: Tensor | None = None, reduce_weights: Tensor | None = None,
        bias: tuple[Tensor, ...] = (), out: Tensor | None = None, raw: bool = False, options: CallOptions = NO_OPTIONS,
        in_two: bool = False,
    ) -> Any:  # fmt: skip
        """Sum ``rows`` per token, on their rank, then at the token's owner; returns ``(sums, None)``.

        ``weights``: ``[rows]``, or ``[T, K]`` at the tokens' owners, which then travel ahead. ``in_two``: as in :meth:`dispatch`.
        """
        if raw or reduce_weights is not None:
            raise NotSupported(
                "engine 'low_latency' is for inference: it has no gradients of weights and of combine; engine 'nvlink' has"
            )
        self.check_combine(rows, options)
        with self._memory.tensors():
            pending = self._prepare_sums(rows, plan, spec, weights, bias, out, options)
            return self._make(pending, "combine", in_two)

    def _prepare_sums(
        self, rows: Tensor, plan: Plan, spec: Spec, weights: Tensor | None, bias: tuple[Tensor, ...], out: Tensor | None,
        options: CallOptions,
    ) -> _Pending:  # fmt: skip
        ground, tokens, hidden = self._ground, plan.first_pick.shape[0], self.config.hidden
        rows = as_aligned(rows)
        given = [None if t is None else as_aligned(t) for t in (weights, *bias)]
        # elsewhere than on a GPU kernels write only to tensors that were made in this context
        fits = out is not None and out.is_cuda and out.is_contiguous() and out.data_ptr() % 16 == 0
        total = out if out is not None and fits else rows.new_empty(tokens, hidden)
        weighted = 0 if weights is None else weights.dim()
        fingerprint = head.fingerprint_of(
            COMBINE, 0, Payload(rows, None), spec, None, False, host_ints(plan.splits)[-1], weighted == 2
        )
        args = (
            ground.peers, ground.state_at, ground.active_at, rows.data_ptr(), plan.slots.data_ptr(), address(given[0]),
            plan.route.data_ptr(), plan.first_pick.data_ptr(), *(address(term) for term in given[1:]), *(0,) * (3 - len(given)),
            total.data_ptr(), address(options.waits), self._nanoseconds(options), _tag(astuple(fingerprint)), tokens,
        )  # fmt: skip

        def bind(parts: Parts) -> Callable[[], None]:
            kinds = tuple(term.dtype for term in bias)
            return partial(
                self._launches.combine(rows.dtype, weighted, kinds, parts, timed=options.waits is not None), *args
            )

        def result() -> Sums:
            if out is not None and total is not out:
                out.copy_(total)
            return (total if out is None else out), None

        return _Pending(bind, result, (rows, given, plan))

    def redispatch(
        self, payload: Payload, plan: Plan, spec: Spec, *, mode: Quantize | None = None, raw: bool = False, in_place: bool = False
    ) -> Payload:  # fmt: skip
        """Not with this engine."""
        raise NotSupported(
            "engine 'low_latency' has no cached dispatch and no backward of combine; engine 'nvlink' has"
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
        launch = pending.bind(parts)  # may load a kernel, which waits for those that run: so before the gate
        self._memory.gate()
        launch()

    def _end(self, pending: _Pending, op: str) -> Any:
        self._memory.settle()
        size = self.config.world_size
        self.stats.record(op, [0] * size, [0] * size, self._ground.slot_bytes, [float("nan")] * size)
        return pending.result()

    def _check_open(self, options: CallOptions | None) -> None:
        if self._open:
            raise ValueError(
                f"the hook of the last {self._open} was not called: one call of an object may be outstanding; call it first, or "
                "make two ExpertParallels for two batches"
            )
        if options is not None:
            options.check(self.config, self._memory.device)

    def _form(self, payload: Payload, mode: Quantize | None) -> Form:
        return form_of(payload, mode, meta_words(self.config.num_topk))

    def _nanoseconds(self, options: CallOptions) -> int:
        return int((self.config.timeout if options.timeout is None else options.timeout) * 1e9)

    # Ranks that are left out

    def active_ranks(self) -> list[bool]:
        """Which ranks take part, as of all calls so far. Waits for the device."""
        return [value != 0 for value in host_ints(self.active)]

    def mask(self, rank: int, active: bool = False) -> None:
        """Leave ``rank`` out from the next call on, or (``active``) let it in again. Queued like a call, so graphs hold it."""
        if not 0 <= rank < self.config.world_size or rank == self.config.rank:
            raise ValueError(f"rank ({rank}) must be one of the other ranks, 0..{self.config.world_size - 1}")
        self._memory.settle()
        self.active[rank : rank + 1].fill_(int(active))
        if active:
            self._status[SILENT_RANK] = 0

    def silent_rank(self) -> int | None:
        """A rank that a kernel has left out for its silence. Does not wait for kernels that still run."""
        return int(self._status[SILENT_RANK]) - 1 if self._status[SILENT_RANK] else None

    # The rest

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """Take part in a call to which this rank brings nothing."""
        if self._open:
            return False
        with self._memory.tensors():
            self._memory.gate()
            ground = self._ground
            self._refuse(ground.peers, ground.state_at, ground.active_at, self._nanoseconds(NO_OPTIONS))
            self._memory.settle()
            self._dispatches += op == DISPATCH
        return True

    def check(self) -> None:
        """Wait for the device; raise if ids were out of range, or a rank was in another call, since the last check."""
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize(self._memory.device)
        at, value, other = (int(self._status[word]) for word in (BAD_AT, BAD_VALUE, OTHER_RANK))
        self._status[:SILENT_RANK] = 0
        if at:
            raise ValueError(head.bad_index_text(at - 1, value, self.config.num_topk, self.config.num_experts))
        if other:
            raise Mismatch(
                f"ranks {self.config.rank} and {other - 1} were in different calls, or disagreed on dtype, layout or another "
                f"option; rank {other - 1} is left out since"
            )

    def close(self) -> None:
        """Let go of everything held."""
        self._memory.close()
        del self._ground.region

    def route_shapes(self, num_tokens: Any, spec: Spec, new_size: Any) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        """Shape and dtype of ``Plan.route``, and the number of arrival rows, for fake tensors."""
        return (num_tokens, self.config.num_topk), torch.int32, self.config.padded_rows


def _tag(fields: tuple[int, ...]) -> int:
    """24 bits, not 0, that differ where calls differ."""
    return zlib.crc32(repr(fields).encode()) % (2**24 - 1) + 1
