"""Engine ``low_latency``: small batches of static shape through fixed slots in symmetric memory, in
one launch per call, or two.

A dispatch casts, sends, and places rows; a combine sums where the experts are, sends one row per
(token, rank), and adds by rank. Nothing waits on the host, and calls are counted on the device, so
CUDA graphs hold them. A silent rank is left out. See ``docs/reference/low_latency.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.arguments import whole
from tokenyard.config import Config
from tokenyard.engines.base import (
    NO_OPTIONS,
    CallOptions,
    CombineArguments,
    DispatchArguments,
    Engine,
)
from tokenyard.engines.failures import IN_ORDER
from tokenyard.engines.known import LOW_LATENCY
from tokenyard.engines.low_latency_signatures import Launch, Signatures
from tokenyard.engines.low_latency_workspace import LowLatencyTuning, Workspace
from tokenyard.engines.rings import addresses, aligned, as_aligned, sums_for
from tokenyard.engines.waits import DeviceWaits, Source
from tokenyard.errors import Mismatch, NotSupported
from tokenyard.handle import Spec
from tokenyard.header import COMBINE
from tokenyard.kernels import low_latency_memory as memory_map
from tokenyard.kernels.low_latency_combine import CombineResult, Sent
from tokenyard.kernels.low_latency_dispatch import DispatchResult, Tokens
from tokenyard.kernels.sync import ON_COUNTS
from tokenyard.memory.aside import synchronize
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.routing import host_ints
from tokenyard.rows import Payload, address
from tokenyard.stats import Stats
from tokenyard.types import Quantize

Sums = tuple[Tensor, Tensor | None]


class _Rest(NamedTuple):
    """The rest of a call in two: the receiving launch. ``ahead()``: the result, not yet filled."""

    finish: Callable[[], Any]
    ahead: Callable[[], Any]
    held: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.finish()


def _moved(sums: Tensor, out: Tensor | None, lost: Any, told: Any) -> Sums:
    """What a combine returns. Values are copied to where the caller wants them, if elsewhere."""
    for source, target in ((lost, told), (sums, out)):
        if target is not None and target is not source:
            target.copy_(source)
    return (sums if out is None else out), None


class LowLatencyEngine(Engine):
    """Dispatch and combine for decoding. All methods that move rows are collective and run in one
    order on all ranks.

    Args:
        memory: of this rank; the engine closes it.
        kernels: equal on all ranks.
        buffer_bytes: symmetric memory; None: what rows of 2 bytes per channel need.

    Attributes:
        active: int32 ``[R]`` on the device, 0 for ranks left out. Kernels read and write it.
    """

    name = LOW_LATENCY

    def __init__(
        self,
        config: Config,
        memory: SymmetricMemory,
        stats: Stats,
        tuning: LowLatencyTuning,
        buffer_bytes: int | None,
    ) -> None:
        self.config, self.stats = config, stats
        self._memory = memory
        self._workspace = Workspace(config, memory, tuning, buffer_bytes)
        self._signatures = Signatures(config, self._workspace)
        self._status: Any = self._workspace.status.numpy()
        self._dispatches, self._nanoseconds = 0, int(config.timeout * 1e9)
        self._open = ""
        self._waits = DeviceWaits(stats, memory, self._workspace.waited, self._named)
        self.active = self._workspace.active

    @property
    def decoder(self) -> LowLatencyEngine:
        return self

    @property
    def buffer_bytes(self) -> int:
        return self._workspace.num_bytes

    # Dispatch

    def check_dispatch(
        self, payload: Payload, spec: Spec, mode: Quantize | None, cached: bool, by_column: bool
    ) -> None:
        """Raise if a dispatch cannot be made: NotSupported names the engine that can; ValueError:
        rows do not fit into slots."""
        if cached:
            self.redispatch()  # raises
        self._signatures.dispatch(payload, spec, mode, by_column)
        self._check_open()

    def dispatch(self, given: DispatchArguments) -> Any:
        """``options`` are checked."""
        payload, topk_idx, weights, spec, mode, _, options, in_two = given
        options = options or NO_OPTIONS
        signature = self._signatures.dispatch(payload, spec, mode, options.scales_by_column)
        self._check_open()
        weighted, loads, workspace = weights is not None, options.loads, self._workspace
        with self._memory.tensors():
            payload, topk_idx = aligned(payload), topk_idx.contiguous()
            weights = None if weights is None else weights.contiguous()
            self._dispatches += 1
            rows = self._signatures.results(signature, topk_idx, weighted, self._dispatches)
            out, plan, arrived = rows
            blocks = arrived.source_ranges if signature.padded else arrived.expert_offsets
            tokens = Tokens(
                picks=topk_idx.data_ptr(), weights=address(weights), rows=payload.x.data_ptr(),
                scales=address(payload.scales),
            )  # fmt: skip
            result = DispatchResult(
                rows=out.x.data_ptr(), scales=address(out.scales),
                weights=arrived.weights.data_ptr(), source=arrived.source.data_ptr(),
                slots=workspace.slots_in(plan), merged=plan.route.data_ptr(),
                first_pick=plan.first_pick.data_ptr(),
                tokens_per_expert=arrived.tokens_per_expert.data_ptr(), blocks=blocks.data_ptr(),
                overflow=arrived.overflow.data_ptr(), loads=address(loads),
                waits=address(options.waits),
            )  # fmt: skip
            arguments = (
                *workspace.addresses, tokens, result, self._limit(options),
                signature.tags[weighted], self.config.rank, topk_idx.shape[0], signature.num_rows,
                spec.expert_alignment,
            )  # fmt: skip
            wide, load_bytes = topk_idx.dtype == torch.int64, 0 if loads is None else loads.itemsize
            load = partial(signature.launch, wide, weighted, load_bytes)
            held = payload, topk_idx, weights, options
            return self._make("dispatch", in_two, load, arguments, lambda: rows, held)

    # Combine

    def check_combine(self, rows: Tensor, spec: Spec) -> None:
        """Raise if a combine cannot be made. ValueError: rows do not fit."""
        self._signatures.combine(rows, spec)
        self._check_open()

    def combine(self, given: CombineArguments) -> Any:
        """``weights`` ``[T, K]`` of the tokens' owners travel ahead. ``options`` are checked."""
        rows, plan, spec, weights, reduce_weights, bias, out, raw, _, options, in_two = given
        options = options or NO_OPTIONS
        if raw or reduce_weights is not None:
            raise NotSupported(
                "engine 'low_latency' is for inference: it has no gradients of weights and of "
                "combine; engine 'nvlink' has"
            )
        signature, workspace = self._signatures.combine(rows, spec), self._workspace
        self._check_open()
        with self._memory.tensors():
            tokens, rows = plan.first_pick.shape[0], as_aligned(rows)
            bias = tuple(map(as_aligned, bias))
            weighted = 0 if weights is None else weights.dim()
            weights = None if weights is None else as_aligned(weights)
            total = sums_for(rows, tokens, out, rows, *bias)
            lost = options.lost_weights
            if lost is not None and not lost.is_cuda:
                lost = rows.new_empty(tokens, dtype=torch.float32)
            tag = signature.tag(weighted == 2, host_ints(plan.splits)[-1])
            biases = addresses(bias)
            sent = Sent(
                rows=rows.data_ptr(), slots=workspace.slots_in(plan), weights=address(weights),
                merged=plan.route.data_ptr(), first_pick=plan.first_pick.data_ptr(),
                bias0=biases[0], bias1=biases[1],
            )  # fmt: skip
            filled = CombineResult(
                sums=total.data_ptr(), waits=address(options.waits), lost=address(lost)
            )
            arguments = (
                *workspace.addresses, sent, filled, self._limit(options), tag, self.config.rank,
                tokens,
            )  # fmt: skip
            dtypes = tuple(term.dtype for term in bias)
            load = partial(signature.launch, weighted, dtypes, lost is not None)
            result = partial(_moved, total, out, lost, options.lost_weights)
            held = rows, weights, bias, plan, options
            return self._make("combine", in_two, load, arguments, result, held)

    def redispatch(self, *_: Any, **__: Any) -> Payload:
        raise NotSupported(
            "engine 'low_latency' has no cached dispatch and no backward of combine; engine "
            "'nvlink' has"
        )

    # Both

    def _make(
        self,
        op: str,
        in_two: bool,
        load: Callable[[memory_map.Stages], Launch],
        arguments: tuple[Any, ...],
        result: Callable[[], Any],
        held: tuple[Any, ...],
    ) -> Any:
        """Make a call: ``load(stages)(*arguments)`` is a launch, ``result()`` what the call
        returns. ``held`` are tensors that launches read."""
        self._launch(load(memory_map.SEND if in_two else memory_map.BOTH), arguments)
        if not in_two:
            return self._end(op, result)
        self._open = op

        def finish() -> Any:
            with self._memory.tensors():
                self._open = ""
                self._launch(load(memory_map.RECEIVE), arguments)
                return self._end(op, result)

        return _Rest(finish, result, held)

    def _launch(self, launch: Launch, arguments: tuple[Any, ...]) -> None:
        """``launch`` is loaded already: that may wait for launches that run."""
        self._memory.gate()
        launch(*arguments)

    def _end(self, op: str, result: Callable[[], Any]) -> Any:
        self._memory.settle()
        self.stats.record_unknown(op)
        return result()

    def _check_open(self) -> None:
        if self._open:
            raise ValueError(
                f"the hook of the last {self._open} was not called: one call of an object may be "
                f"outstanding; call it first, or make two ExpertParallels for two batches"
            )

    def _limit(self, options: CallOptions) -> int:
        """Nanoseconds that silent ranks are waited for."""
        return self._nanoseconds if options.timeout is None else int(float(options.timeout) * 1e9)

    # Ranks that are left out

    def active_ranks(self) -> list[bool]:
        """Which ranks take part, as of all calls so far. Waits for the device."""
        synchronize(self._memory.device)
        return [value != 0 for value in host_ints(self.active)]

    def mask(self, rank: int, active: bool = False) -> None:
        """From the next call on, leave ``rank`` out, or (``active``) let it in; graphs hold it."""
        peer = whole(rank)
        if peer is None or not 0 <= peer < self.config.world_size or peer == self.config.rank:
            raise ValueError(
                f"rank ({rank!r}) must be one of the other ranks, 0..{self.config.world_size - 1}"
            )
        self._memory.settle()
        self.active[peer : peer + 1].fill_(int(active))
        if active:
            self._status[memory_map.SILENT_RANK] = 0

    def silent_rank(self) -> int | None:
        """A rank left out for its silence, as far as the host knows; kernels may still run."""
        silent = int(self._status[memory_map.SILENT_RANK])
        return silent - 1 if silent else None

    # The rest

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        if self._open:
            return False
        with self._memory.tensors():
            self._memory.gate()
            self._signatures.refuse(*self._workspace.addresses, self._nanoseconds)
            self._memory.settle()
            self._dispatches += op != COMBINE
        return True

    def check(self) -> None:
        """Wait for the device; raise if ids were out of range, or a rank was in another call."""
        synchronize(self._memory.device)
        at, value, other = map(int, self._status[: memory_map.SILENT_RANK])
        self._status[: memory_map.SILENT_RANK] = 0
        if at:
            raise ValueError(
                head.bad_index_text(at - 1, value, self.config.num_topk, self.config.num_experts)
            )
        if other:
            raise Mismatch(
                f"ranks {self.config.rank} and {other - 1} were in different calls, or disagreed "
                f"on dtype, layout or another option; rank {other - 1} is left out since"
            )

    def interrupt(self, text: str) -> None:
        """Nothing: the others leave out who is silent."""

    def count(self) -> None:
        self._waits.count()

    def _named(self, phase: int, rank: int) -> Source:
        """Rows come to all programs, counts to one."""
        if phase == ON_COUNTS.value:
            return Source("counts", rank, 1)
        return Source("rows", rank, self._workspace.tuning.programs)

    def close(self, why: str = IN_ORDER) -> None:
        del why  # nobody is told
        self._waits.close()
        self._memory.close()
        del self._workspace.region

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        return self._signatures.route_shape, torch.int32, self.config.padded_rows
