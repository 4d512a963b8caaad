"""Rows that stay in symmetric memory: the in-place buffer."""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.growing import GrowingRegion
from tokenyard.engines.outputs import CallPlan, known_of, result_of, sent_of
from tokenyard.engines.rings import RowLayout, addresses, sums_for
from tokenyard.engines.signatures import Launch, Signature
from tokenyard.engines.status import StatusMonitor
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.handle import Arrived, Plan
from tokenyard.kernels.direct import bind_unpack
from tokenyard.kernels.stand_in import launch_call
from tokenyard.kernels.structs import Payload as Sent
from tokenyard.kernels.structs import Result
from tokenyard.kernels.two_direct import bind_two_direct
from tokenyard.kernels.two_pull import bind_two_pull
from tokenyard.memory.symmetric import Region, storage_over
from tokenyard.rows import Payload, overlap, padded

_PART = 256


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


def direct_launch(workspace: PeerWorkspace, signature: Signature, *, heap: bool = False) -> Launch:
    """Of rows of such calls, to in-place buffers or to blocks of a ``heap``. Ask before the gate,
    as of :func:`unpack_launch`: loading may wait for the device."""
    top = workspace.config.num_topk
    return signature.bound(("rows", heap), lambda: bind_two_direct(
        workspace, top, signature.row_layout, signature.mode, signature.dtype, heap=heap
    ))  # fmt: skip


def unpack_launch(workspace: PeerWorkspace, signature: Signature, *, heap: bool = False) -> Launch:
    """Of what follows such rows of a fresh dispatch: it unpacks their metadata, and out of a block
    of a heap their scales."""
    return signature.bound(("unpack", heap), lambda: bind_unpack(
        workspace, workspace.config.num_topk, signature.row_layout, weighted=signature.weighted,
        static=not signature.spec.exact, heap=heap,
    ))  # fmt: skip


def launch_in_place(
    launch: Launch,
    workspace: PeerWorkspace,
    target: Target,
    plan: int,
    payload: Sent,
    tag: int,
    num_tokens: int,
) -> None:
    """Launch rows to ``target`` (``launch``: :func:`direct_launch`). ``plan``: its address."""
    data, where = (plan, target.buffers, payload), target[2:]  # scales_at and what follows
    launch_call(launch, workspace, data, tag, num_tokens, *where, workspace.config.num_experts)


def launch_unpack(
    launch: Launch, workspace: PeerWorkspace, target: Target, plan: int, result: Result
) -> None:
    """Behind :func:`launch_in_place` of a fresh dispatch, :func:`unpack_launch` into ``result``."""
    launch(
        workspace.state_at, plan, target.rows + target.metadata_at, target.rows + target.scales_at,
        result.scales, result.expert_ids, result.weights, result.source, result.slots,
        result.arrivals, workspace.config.num_experts,
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

    def __init__(self, config: Config, workspace: PeerWorkspace, monitor: StatusMonitor) -> None:
        self._config, self._workspace = config, workspace
        self._memory, self._monitor = workspace.memory, monitor
        self._buffer = GrowingRegion(workspace, monitor)
        self._given: list[Any] = []
        weakref.finalize(self, _forbid, self._given, _ended("its object")).atexit = False

    @property
    def regions(self) -> list[Region]:
        return self._buffer.regions

    @property
    def num_bytes(self) -> int:
        return self._buffer.all_bytes

    def close(self, why: str) -> None:
        """End the life of all tensors given, and let go of the memory."""
        self.expire(why)
        self._buffer.regions.clear()

    def write(
        self,
        payload: Payload,
        plan: Plan | CallPlan,
        signature: Signature,
        tag: int,
        num_rows: int,
        meta_at: int = 0,
        arrived: Arrived | None = None,
    ) -> Payload:
        """Launch rows into the in-place buffer, and unpack the meta to ``arrived``. Ends earlier
        results."""
        workspace, print_, known = self._workspace, signature.fingerprint, known_of(plan)
        parts = parts_of(signature.row_layout, self._config.padded_rows)
        self.expire(_ended(f"{head.OPS[print_.op]} #{print_.call}, also in_place"))
        buffer = self._buffer.room(parts.end, tag)
        begin = buffer.local.data_ptr()
        target = Target(buffer.addresses.data_ptr(), begin, parts.scales, parts.meta)
        out = self._payload(num_rows, signature, parts)
        launch = direct_launch(workspace, signature)
        unpack = None if arrived is None else unpack_launch(workspace, signature)
        sent, tokens = sent_of(payload, meta_at), known.num_tokens
        launch_in_place(launch, workspace, target, known.route_at, sent, tag, tokens)
        if arrived is not None and unpack is not None:
            result = result_of(out, plan, arrived)
            launch_unpack(unpack, workspace, target, known.route_at, result)
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
        launch = self._bound(signature, bias)
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

    def _bound(self, signature: Signature, bias: tuple[Tensor, ...]) -> Launch:
        """The launch of a combine in place."""
        dtypes, row_layout = tuple(term.dtype for term in bias), signature.row_layout
        return signature.bound(
            dtypes, lambda: bind_two_pull(self._workspace, row_layout, signature.dtype, dtypes)
        )

    def _row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Of a buffer of rows alone."""
        return padded(self._config.padded_rows * hidden * dtype.itemsize)

    def expire(self, why: str) -> None:
        """End the life of the tensors given so far: using one, or a torch view of one, raises
        ``why``. torch has the means in its CUDA builds only; elsewhere they live on with the next
        rows."""
        _forbid(self._given, why)

    def _payload(self, num_rows: int, signature: Signature, parts: Parts) -> Payload:
        """Tensors over the rows, and over their scales if they have any."""
        sent = signature.sent
        x, scales = self._over(0, (num_rows, sent.hidden), sent.dtype), None
        if sent.scale_words:
            scales = self._over(parts.scales, (num_rows, sent.num_scales), sent.scale_dtype)
        return Payload(x, scales)

    def _over(self, at: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        buffer = self._buffer.regions[-1]
        device = buffer.local.device
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        storage = storage_over(buffer.local.data_ptr() + at, num_bytes, device)
        storage.memory = buffer.local  # lives as long as a tensor over it may be used
        self._given.append(storage)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (shape[1], 1))  # pyright: ignore
