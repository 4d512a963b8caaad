"""Symmetric memory that grows: for rows that stay there (the in-place buffer), and for those that a
combine without rings brings back (the receive buffer)."""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.arguments import LARGEST
from tokenyard.config import Config
from tokenyard.engines.outputs import CallPlan, Known, known_of, result_of
from tokenyard.engines.rings import RowLayout, addresses, sums_for
from tokenyard.engines.signatures import Signature
from tokenyard.engines.status import StatusMonitor
from tokenyard.engines.tuning import most_rows_back
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.errors import PeerTimeout
from tokenyard.handle import Arrived, Plan
from tokenyard.kernels import region
from tokenyard.kernels.combine import Partials, Sums
from tokenyard.kernels.direct import bind_unpack
from tokenyard.kernels.push import bind_push, chunks_of
from tokenyard.kernels.stand_in import launch_call
from tokenyard.kernels.structs import Payload as Sent
from tokenyard.kernels.structs import Result
from tokenyard.kernels.two_direct import bind_two_direct
from tokenyard.kernels.two_headers import bind_two_call_barrier
from tokenyard.kernels.two_pull import bind_two_pull
from tokenyard.memory.aside import wait_for
from tokenyard.memory.symmetric import Region, storage_over
from tokenyard.rows import Payload, overlap, padded

_PART = 256


class GrowingRegion:
    """The last of ``regions`` is in use; a CUDA graph may still write to a smaller one."""

    def __init__(self, workspace: PeerWorkspace, monitor: StatusMonitor) -> None:
        self._workspace, self._monitor = workspace, monitor
        self._memory = workspace.memory
        self.regions: list[Region] = []

    @property
    def num_bytes(self) -> int:
        """Of the region in use; 0: there is none."""
        return self.regions[-1].local.numel() if self.regions else 0

    @property
    def all_bytes(self) -> int:
        """Of all regions."""
        return sum(each.local.numel() for each in self.regions)

    def room(self, num_bytes: int, tag: int | None = None) -> Region:
        """A region of at least ``num_bytes``; collective when it grows, for a call of ``tag`` if
        for one."""
        if self.num_bytes < num_bytes:
            if tag is not None:
                self._meet(tag)
            try:
                self.regions.append(self._memory.allocate(num_bytes))
            except PeerTimeout as lost:
                raise self._monitor.attributed(lost) from None
        return self.regions[-1]

    def _meet(self, tag: int) -> None:
        """Pass the call barrier. A rank in another call passes it too, but never allocates."""
        launch = bind_two_call_barrier(self._workspace)
        launch_call(launch, self._workspace, (), tag)
        self._monitor.meets()
        self._memory.settle()
        if self._memory.device.type == "cuda" and self._memory.shared_gpu:
            self._monitor.finish()
        elif self._memory.device.type == "cuda":
            wait_for(torch.cuda.current_stream(self._memory.device).synchronize)
        self._monitor.raise_if_failed()


class Parts(NamedTuple):
    """Bytes at which the parts of an in-place buffer begin, and its end. Rows begin at 0."""

    scales: int
    meta: int
    end: int


def parts_of(row_layout: RowLayout, num_rows: int) -> Parts:
    """Where rows, scales and meta of ``num_rows`` rows stand."""
    row_bytes = row_layout.words * row_layout.bits // 8
    each = row_bytes, 4 * row_layout.scale_words, 4 * row_layout.meta_words
    return Parts(*accumulate(-(-num_rows * size // _PART) * _PART for size in each))


class Target(NamedTuple):
    """Where rows go without rings: an in-place buffer on every rank, or a block of its heap."""

    buffers: int  # address of the table of buffers, or of heaps
    rows: int  # address of those of this rank
    scales_at: int  # bytes from rows to scales and metadata, on every rank
    metadata_at: int
    heap_bytes: int = 0  # 0: there is none
    awaited: int = 0  # what a cached dispatch tells of this rank's block


def store_rows(
    workspace: PeerWorkspace,
    signature: Signature,
    target: Target,
    known: Known,
    sent: Sent,
    tag: int,
    result: Result | None = None,
) -> None:
    """Launch rows to ``target``. Behind those of a fresh dispatch, which has a ``result``, what
    unpacks their metadata to it, and out of a block of a heap their scales."""
    topk, row_layout = workspace.config.num_topk, signature.row_layout
    heap, unpack = target.heap_bytes > 0, None
    rows = signature.bound(("rows", heap), lambda: bind_two_direct(
        workspace, topk, row_layout, signature.mode, signature.dtype, heap=heap
    ))  # fmt: skip
    if result is not None:  # loaded before the gate, as that may wait for the device
        unpack = signature.bound(("unpack", heap), lambda: bind_unpack(
            workspace, topk, row_layout, weighted=signature.weighted,
            static=not signature.spec.exact, heap=heap,
        ))  # fmt: skip
    data, experts = (known.route_at, target.buffers, sent), workspace.config.num_experts
    launch_call(rows, workspace, data, tag, known.num_tokens, *target[2:], experts)
    if unpack is not None and result is not None:
        unpack(
            workspace.state_at, known.route_at, target.rows + target.metadata_at,
            target.rows + target.scales_at, result.scales, result.expert_ids, result.weights,
            result.source, result.slots, result.arrivals, experts,
        )  # fmt: skip


def _forbid(storages: list[Any], why: str) -> None:
    """Free ``storages``, and let tensors over them raise ``why`` from now on, where torch can."""
    forbid: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)  # pyright: ignore[reportPrivateUsage]
    if forbid is not None:
        for storage in storages:
            forbid(storage._cdata, why)
            del storage.memory
    storages.clear()


def _ended(what: str) -> str:
    return f"this view of symmetric memory ended with {what}"


class InPlaceBuffers:
    """The in-place buffer of one object. Tensors over it raise once it is rewritten."""

    def __init__(self, config: Config, workspace: PeerWorkspace, growing: GrowingRegion) -> None:
        self._config, self._workspace, self._memory = config, workspace, workspace.memory
        self._buffer = growing
        self._given: list[Any] = []
        weakref.finalize(self, _forbid, self._given, _ended("its object")).atexit = False

    def write(
        self,
        sent: Sent,
        plan: Plan | CallPlan,
        signature: Signature,
        tag: int,
        num_rows: int,
        arrived: Arrived | None = None,
    ) -> Payload:
        """Launch rows into the in-place buffer, meta to ``arrived``. Ends earlier results."""
        fingerprint, row = signature.fingerprint, signature.sent
        parts = parts_of(signature.row_layout, self._config.padded_rows)
        self.expire(_ended(f"{head.OPS[fingerprint.op]} #{fingerprint.call}, also in_place"))
        buffer = self._buffer.room(parts.end, tag)
        x, scales = self._over(0, (num_rows, row.hidden), row.dtype), None
        if row.scale_words:
            scales = self._over(parts.scales, (num_rows, row.num_scales), row.scale_dtype)
        out, known, begin = Payload(x, scales), known_of(plan), buffer.local.data_ptr()
        target = Target(buffer.addresses.data_ptr(), begin, parts.scales, parts.meta)
        result = None if arrived is None else result_of(out, plan, arrived)
        store_rows(self._workspace, signature, target, known, sent, tag, result)
        self._memory.settle()
        return out

    def rows(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, hidden]`` to :meth:`read`. Collective; ends earlier ones."""
        self.expire(_ended("empty_for_combine(in_place=True)"))
        self._buffer.room(self._row_bytes(hidden, dtype))
        return self._over(0, (num_rows, hidden), dtype)

    def read(
        self,
        rows: Tensor,
        plan: Plan,
        signature: Signature,
        tag: int,
        bias: tuple[Tensor, ...],
        out: Tensor | None,
    ) -> Tensor:
        """Launch the sums of all ranks' ``rows [N, H]``: ``[T, H]``, in ``out`` where that can be.
        ``bias``: up to two more terms. Rows that lie elsewhere than in the in-place buffer are
        copied there first, which ends the life of earlier results."""
        workspace, print_ = self._workspace, signature.fingerprint
        buffer = self._buffer.room(self._row_bytes(rows.shape[1], rows.dtype), tag)
        dtypes = tuple(term.dtype for term in bias)
        launch = signature.bound(dtypes, lambda: bind_two_pull(
            workspace, signature.row_layout, signature.dtype, dtypes
        ))  # fmt: skip
        tokens, terms = plan.first_pick.shape[0], bias
        total = sums_for(rows, tokens, out, buffer.local, *bias)  # not where peers still read
        here = rows.data_ptr() == buffer.local.data_ptr() and rows.is_contiguous()
        elsewhere = rows.numel() > 0 and not here
        if elsewhere:
            rows, *terms = (
                each.clone() if overlap(each, buffer.local) else each for each in (rows, *bias)
            )
            there = buffer.local[: rows.numel() * rows.itemsize].view(rows.dtype)
            there.view(rows.shape).copy_(rows)
        sums = *addresses(tuple(terms)), total.data_ptr()
        data = plan.route.data_ptr(), buffer.addresses.data_ptr(), *sums
        launch_call(launch, workspace, data, tag, tokens)
        self._memory.settle()
        if out is not None and total is not out:
            total = out.copy_(total)
        if elsewhere:
            self.expire(_ended(f"{head.OPS[print_.op]} #{print_.call}, in_place of other rows"))
        return total

    def _row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Of a buffer of rows alone."""
        return padded(self._config.padded_rows * hidden * dtype.itemsize)

    def expire(self, why: str) -> None:
        """End the life of the tensors given so far: using one, or a torch view of one, raises
        ``why``. torch has the means in its CUDA builds only; elsewhere they live on with the next
        rows."""
        _forbid(self._given, why)

    def _over(self, at: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        buffer = self._buffer.regions[-1]
        device = buffer.local.device
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        storage = storage_over(buffer.local.data_ptr() + at, num_bytes, device)
        storage.memory = buffer.local  # lives as long as a tensor over it may be used
        self._given.append(storage)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (shape[1], 1))  # pyright: ignore


# A combine without rings


class CombineOptions(NamedTuple):
    """What combines of one signature may differ in."""

    dtypes: tuple[torch.dtype, ...]  # of up to two terms that are added
    placed: bool  # rows are by expert,
    weighted: bool  # and multiplied by weights before they are summed
    picks: int  # weights per arrival row that are summed too; 0: none


class ReceiveBuffer:
    """The receive buffer of one object: rows are pushed there at their tokens' owner. Nobody waits
    for room or returns credits, and every program has work, so that is faster than rings. A combine
    takes it if every rank's rows fit, which all know from the plan; else rings, which hold any
    batch.

    ``num_bytes``: to begin with. Making one is collective if there are any; with none only combines
    in place use it, and make it."""

    def __init__(
        self, config: Config, workspace: PeerWorkspace, growing: GrowingRegion, num_bytes: int
    ) -> None:
        self._config, self._workspace, self._growing = config, workspace, growing
        self._always, at = num_bytes > 0, cast("Any", region).receive_rows_at
        self._rows_at: int = at(config.world_size, chunks_of(workspace))
        self.needed_at = 2 * config.world_size + 1 + config.matrix_ranks**2  # in ``Plan.splits``
        if num_bytes:
            growing.room(num_bytes)

    def needed(self, rows: Any, most_tokens: int) -> int:
        """Rows that come back to the rank that gets most, which ``Plan.splits`` keep; -1 where that
        is of no use. ``rows``: a numpy array, rows from each rank to each, of at most
        ``most_tokens`` tokens."""
        if not self._always:
            return -1
        limit = self._config.max_tokens_per_rank  # there are no flags for more
        if most_tokens > limit and rows.max() > limit:
            return LARGEST
        return max((np.add.reduce(rows, 1) - rows.diagonal()).tolist())

    def takes(self, counts: Any, row_layout: RowLayout, picks: int, *, exact: bool) -> bool:
        """Whether all ranks' rows of a combine fit, the same on all ranks. ``counts``:
        ``Plan.splits``, as a numpy array; ``picks``: weights per row that are summed too."""
        if not self._always:
            return False
        needed = int(counts[self.needed_at]) if exact else most_rows_back(self._config)
        return 0 <= needed <= self._most_rows(row_layout, picks)

    def push(
        self, known: Known, signature: Signature, tag: int, parts: Partials, sums: Sums,
        how: CombineOptions, *, grow: bool,
    ) -> None:  # fmt: skip
        """Launch rows to their owners, and the sums there.

        Args:
            parts, sums: as of a combine through rings.
            grow: make the buffer as large as any batch of M tokens per rank needs. Collective.
        """
        workspace, row_layout, picks = self._workspace, signature.row_layout, how.picks
        if grow:
            most = most_rows_back(self._config) * (row_layout.payload_bytes + 4 * picks)
            self._growing.room(self._rows_at + -(-most // 256) * 256, tag)
        weights_at = self._rows_at + self._most_rows(row_layout, picks) * row_layout.payload_bytes
        launch = signature.bound((how, picks and weights_at), lambda: bind_push(
            workspace, row_layout, signature.dtype, signature.slots_per_row if how.placed else 1,
            picks, how.dtypes, by_expert=how.placed, weighted=how.weighted, weights_at=weights_at,
        ))  # fmt: skip
        receive_buffers = self._growing.regions[-1].addresses.data_ptr()
        data = known.route_at, receive_buffers, parts, sums
        launch_call(launch, workspace, data, tag, known.num_tokens)
        workspace.memory.settle()

    def _most_rows(self, row_layout: RowLayout, picks: int) -> int:
        """Rows that the buffer holds."""
        row_bytes = row_layout.payload_bytes + 4 * picks
        return max(0, self._growing.num_bytes - self._rows_at) // row_bytes
