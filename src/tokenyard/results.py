"""What dispatch and combine return."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from tokenyard.call_queue import Waitable, Work
from tokenyard.engines.base import CallOptions
from tokenyard.errors import afresh
from tokenyard.formats import scales_received
from tokenyard.handle import Handle
from tokenyard.types import Layout


def _raise(error: Exception) -> dict[str, Any]:
    raise afresh(error)


class Later:
    """Attributes that come when the call is done: reading one of them waits for it."""

    _finish: Callable[[], dict[str, Any]] | None
    _turn: Any = None
    """Held by the thread that finishes the call: others wait for it."""
    _process = 0

    def __init__(
        self,
        finish: Callable[[], dict[str, Any]] | None = None,
        work: Work | None = None,
        fields: dict[str, Any] | None = None,
    ) -> None:
        """``fields``: of a call that is done; else ``finish`` brings them. ``work``: to wait for it
        without finishing it."""
        self._finish, self._work = finish, work
        if fields is not None:
            self.__dict__.update(fields)

    def share(self) -> None:
        """Let several threads read this; of a call that is not waited for at once."""
        if not torch.compiler.is_compiling():
            self._turn, self._process = RLock(), os.getpid()

    def work(self) -> Waitable:
        """What another call waits for to come behind this one; it takes no result."""
        if self._work is None or (self._finish is None and not self._work.can_be_waited_for()):
            return self
        return self._work

    def wait(self) -> None:
        """Finish the call: on the CPU wait for it, on a GPU let the current stream wait. Waiting
        again does nothing. PeerTimeout, PeerError, Mismatch, ValueError: what the call came to."""
        if self._turn is None or torch.compiler.is_compiling() or self._process != os.getpid():
            self._wait()  # a forked child has no thread that could let go
        else:
            with self._turn:
                self._wait()

    def _wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            fields = finish()
        except Exception as error:
            self._finish, self._work = partial(_raise, afresh(error)), None
            raise
        except BaseException:  # Ctrl-C: not what the call came to
            self._finish = finish
            raise
        for name, value in fields.items():  # older compilers know no update of attributes
            setattr(self, name, value)

    def hook(self) -> None:
        """Finish the receive of a call made with ``return_hook=True``; the same as :meth:`wait`."""
        self.wait()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which is of the result: one call cannot be finished twice."""
        self.wait()
        return self.__dict__ | {"_work": None, "_turn": None}

    def __repr__(self) -> str:
        """Dtypes and shapes, no values: reading these would wait for a GPU."""
        if "x" not in self.__dict__:  # another thread may be finishing it
            return f"{type(self).__name__}(under way)"
        fields = [
            f"{name}={str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            for name, value in self.__dict__.items()
            if isinstance(value, Tensor)
        ]
        return f"{type(self).__name__}({', '.join(fields)})"

    if not TYPE_CHECKING:  # who checks types knows all names

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                self.wait()
                if name in self.__dict__:
                    return self.__dict__[name]
            raise AttributeError(
                f"{type(self).__name__} has no {name!r} here: see its docstring for what each "
                f"layout and call has"
            )


class Received(Later):
    """Rows for this rank's experts. N rows; T, K, L, R, H as in ``docs/reference/semantics.md``.

    Attributes:
        x: ``[N, H]`` (``EXPERT_PADDED``: ``[L, R * M, H]``) payload, ordinary memory (with
            ``in_place=True`` symmetric memory).
        scales: ``[N, S]`` (``[L, R * M, S]``) float32, int32 or float8_e8m0fnu if the payload is
            quantised, else None. Row by row, unless ``CallOptions.scales_by_column`` asks
            otherwise.
        topk_idx: ``FLAT``: ``[N, K]`` local expert ids, -1 elsewhere, in the dtype of the argument;
            else None.
        topk_weights: ``FLAT``: ``[N, K]`` float32, 0 where the id is -1; else, and without weights,
            None. Differentiable.
        row_weights: expert layouts: ``[N]`` (``[L, R * M]``) float32, 0 on padding; else, and
            without weights, None. Differentiable.
        tokens_per_expert: ``[L]`` int32 on the device, unaligned.
        expert_offsets: ``EXPERT_MAJOR``: ``[L + 1]`` int32, cumulative aligned; else None.
        source_ranges: ``EXPERT_PADDED``: ``[L, R, 2]`` int32 (begin, count); else None.
        source: int64 per row, ``source_rank << 32 | source_token``, -1 on padding.
        overflow: ``[1]`` int32, rows dropped for want of ``capacity``; None without ``capacity``.
        handle: for combine, backward and cached dispatches.
        ahead: with ``return_hook=True`` on engine low_latency: all of these at once, tensors that
            :meth:`hook` is still to fill.
    """

    ahead: Received
    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    row_weights: Tensor | None
    tokens_per_expert: Tensor
    expert_offsets: Tensor | None
    source_ranges: Tensor | None
    source: Tensor
    overflow: Tensor | None
    handle: Handle
    _dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor]

    @property
    def tokens_per_expert_list(self) -> list[int]:
        """Rows of each local expert, unaligned, as the host learnt them. Only with exact shapes."""
        handle = self.handle
        if not handle.spec.exact:
            raise ValueError(
                "tokens_per_expert_list needs exact=True: with static shapes the counts stay on "
                "the device"
            )
        return rows_of_experts(handle)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """``x * scales`` as ``dtype``, in the shape of ``x``; differentiable straight through to
        the dispatched tensor."""
        scales = self.scales
        if scales is None:
            raise ValueError(
                "dequantize() needs a dispatch with quantize= or a Quantized payload; this one "
                "carried plain rows"
            )
        return self._dequantize(self.x, scales, dtype)


def rows_of_experts(handle: Handle) -> list[int]:
    """Rows of each local expert, unaligned, of exact shapes; the host does not wait."""
    known: list[int] = handle.plan.splits.tolist()  # pyright: ignore[reportUnknownVariableType]
    del known[: len(known) - handle.arrived.tokens_per_expert.numel()]
    return known


class CombineOptions(TypedDict, total=False):
    """Arguments of ``ExpertParallel.combine`` on which the kind of its result does not depend."""

    weighted: bool
    topk_weights: Tensor | None
    bias: Tensor | tuple[Tensor, Tensor] | None
    out: Tensor | None
    in_place: bool
    after: Waitable | None
    options: CallOptions | None


class Combined(Later):
    """A combine that was asked for more than its sum.

    Attributes:
        x: ``[T, H]``.
        topk_weights: ``[T, K]`` float32 if ``reduce_weights`` was given, else None.
    """

    x: Tensor
    topk_weights: Tensor | None


def by_column(scales: Tensor) -> Tensor:
    """Scales ``[L, R * M, S]`` copied to lie by column in a block: a view of ``[L, S, R * M]``."""
    if scales.shape[2] == 1:  # lies so: contiguous().view(torch.uint8) would not take other strides
        return scales
    return scales.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def received_fields(
    x: Tensor, scales: Tensor | None, handle: Handle, rows_shape: tuple[int, ...]
) -> dict[str, Any]:
    """The attributes of a :class:`Received`; ``x``, scales and source may have ``rows_shape``."""
    arrived, layout = handle.arrived, handle.spec.layout
    flat, source = layout is Layout.FLAT, arrived.source
    weights, ids = arrived.weights if handle.has_weights else None, arrived.topk_idx
    if flat and ids.dtype is not handle.index_dtype:
        ids = ids.to(handle.index_dtype)
    if len(rows_shape) > source.dim():
        x, source = x.view(*rows_shape, x.shape[1]), source.view(*rows_shape)
        if scales is not None and scales.dim() == 2:  # else by column: a view loses such strides
            scales = scales.view(*rows_shape, scales.shape[-1])
    if scales is not None:
        scales = scales_received(scales, x.shape[-1])
    if weights is not None and layout is Layout.EXPERT_PADDED:
        weights = weights.view(*rows_shape)
    return {
        "x": x,
        "scales": scales,
        "topk_idx": ids if flat else None,
        "topk_weights": weights if flat else None,
        "row_weights": None if flat else weights,
        "tokens_per_expert": arrived.tokens_per_expert,
        "expert_offsets": arrived.expert_offsets if layout is Layout.EXPERT_MAJOR else None,
        "source_ranges": arrived.source_ranges if layout is Layout.EXPERT_PADDED else None,
        "source": source,
        "overflow": arrived.overflow if handle.spec.capacity is not None else None,
        "handle": handle,
    }
