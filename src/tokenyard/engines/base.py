"""What every engine does, as ``ExpertParallel`` sees it, and how one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.arguments import real
from tokenyard.config import Config
from tokenyard.engines.failures import IN_ORDER, Report
from tokenyard.engines.known import AUTO
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.types import Quantize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallOptions:
    """Options of a dispatch or combine of engine ``low_latency``; a combine of the others takes
    ``lost_weights``. Tensors are the caller's, contiguous, on the object's device.

    Attributes:
        timeout: seconds of this call, by the device's clock, after which silent ranks are left out;
            None: the object's.
        waits: ``[R]`` int64. The nanoseconds are added that this rank waited for each rank to come
            to the call.
        loads: ``[L]`` int64 or int32 (dispatch). The rows are added that each local expert got.
        scales_by_column: scales ``[L, R * M, S]`` lie column by column in each block, a view of
            ``[L, S, R * M]``: of quantised rows, with ``EXPERT_PADDED`` (dispatch). A single column
            keeps its strides. Ranks need not agree on it.
        lost_weights: ``[T]`` float32 (combine). It is filled with the weights of the picks that
            each token's sum lacks, 0 if none; in an unweighted combine, with their number
            (``docs/reference/low_latency.md``).
    """

    timeout: float | None = None
    waits: Tensor | None = None
    loads: Tensor | None = None
    scales_by_column: bool = False
    lost_weights: Tensor | None = None

    @property
    def need_low_latency(self) -> bool:
        """Whether more is asked than every engine can tell."""
        numbers = self.timeout, self.waits, self.loads
        return self.scales_by_column or any(each is not None for each in numbers)

    def check(self, config: Config, device: torch.device | None, num_tokens: int | None) -> None:
        """Raise ValueError, which names option, limit and value, if they cannot be. ``num_tokens``:
        of a combine; None: they are those of a dispatch."""
        timeout: Any = self.timeout
        if timeout is not None and not 0 < real(timeout) < 1e9:
            limit = "must be a positive number of seconds below 1e9, or None"
            raise ValueError(f"options.timeout ({timeout!r}) {limit}")
        _check("waits", self.waits, "R", config.world_size, (torch.int64,), device)
        if num_tokens is None:
            if self.lost_weights is not None:
                what = "options.lost_weights tells what the sums of a combine lack"
                raise ValueError(f"{what}: leave it out of a dispatch")
            dtypes = torch.int64, torch.int32
            _check("loads", self.loads, "L", config.num_local_experts, dtypes, device)
            return
        if self.loads is not None:
            raise ValueError("options.loads counts rows of a dispatch: leave it out of a combine")
        if self.scales_by_column:
            what = "options.scales_by_column arranges what a dispatch brings"
            raise ValueError(f"{what}: leave it out of a combine")
        _check("lost_weights", self.lost_weights, "T", num_tokens, (torch.float32,), device)


def _check(
    name: str,
    tensor: Tensor | None,
    symbol: str,
    size: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
) -> None:
    if tensor is None:
        return
    if tensor.dtype not in dtypes or tuple(tensor.shape) != (size,) or not tensor.is_contiguous():
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(
            f"options.{name} is {tensor.dtype} {list(tensor.shape)}, but must be a contiguous "
            f"{allowed} [{size}], that is [{symbol}]"
        )
    if device is not None and tensor.device != device:
        where = f"is on {tensor.device}, but must be on {device}"
        raise ValueError(f"options.{name} {where}: move it there")


NO_OPTIONS = CallOptions()


class DispatchArguments(NamedTuple):
    """Of :meth:`Engine.dispatch`. Those of a combine have the last three too.

    Attributes:
        mode: cast plain rows on the way.
        in_place: leave the rows in symmetric memory; of engines that have ``in_place``.
        options, in_two: of :class:`LowLatency`; ``in_two``: return a function that makes the
            receiving launch.
    """

    payload: Payload
    topk_idx: Tensor
    weights: Tensor | None
    spec: Spec
    mode: Quantize | None = None
    in_place: bool = False
    options: CallOptions | None = None  # older compilers know no default of a class of our own
    in_two: bool = False


class CachedArguments(NamedTuple):
    """Of :meth:`Engine.redispatch`. ``raw``: rows come as ``[Nb, H]`` in arrival order."""

    payload: Payload
    plan: Plan
    spec: Spec
    mode: Quantize | None = None
    raw: bool = False
    in_place: bool = False


class CombineArguments(NamedTuple):
    """Of :meth:`Engine.combine`.

    Attributes:
        weights: ``[rows]`` float32, multiplied first; of :class:`LowLatency` also ``[T, K]`` of
            the tokens' owners.
        reduce_weights: ``[Nb, K]`` float32 in arrival order, summed alongside.
        bias: up to two terms ``[T, H]``, added last.
        raw: ``rows`` too are in arrival order, whatever the layout.
    """

    rows: Tensor
    plan: Plan
    spec: Spec
    weights: Tensor | None = None
    reduce_weights: Tensor | None = None
    bias: tuple[Tensor, ...] = ()
    out: Tensor | None = None
    raw: bool = False
    in_place: bool = False
    options: CallOptions | None = None  # older compilers know no default of a class of our own
    in_two: bool = False

    @property
    def width(self) -> int:
        """Weights of a row that are summed."""
        return 0 if self.reduce_weights is None else self.reduce_weights.shape[1]


class Engine(Protocol):
    """Dispatch and combine. ``dispatch``, ``redispatch``, ``combine`` and ``refuse`` are
    collective; calls of one object are made one at a time, in one order. Engines inherit from this
    class, and with it what is usual."""

    name: str
    config: Config
    in_place: bool = False
    """Whether rows can stay in symmetric memory."""
    counts_by_most: bool = True
    """Whether int32 counts ``max_tokens_per_rank`` rows of every rank for each expert always."""
    waits_on_host: bool = False
    """Whether the host waits while rows move, so that asynchronous calls need a thread."""
    returns_width: int = 0
    """Columns of ``Plan.returns``."""
    hop_counts: int = 0
    """Numbers of ``Plan.splits`` that only this engine reads."""

    @property
    def calls_begun(self) -> int | None:
        """Calls so far, the one under way among them; None if the engine does not number them."""
        return None

    @property
    def decoder(self) -> LowLatency | None:
        """This engine if it is one for decoding."""
        return None

    @property
    def buffer_bytes(self) -> int:
        """Bytes held between calls."""
        ...

    def dispatch(self, given: DispatchArguments) -> tuple[Payload, Plan, Arrived]:
        """Send each token once to every rank that holds one of its experts, with its ids and
        weights. Rows, scales and source are flat or in the shape of ``Received``."""
        ...

    def redispatch(self, given: CachedArguments) -> Payload:
        """Send a new payload along a known routing. Rows without a source are zeros, also in
        ``EXPERT_PADDED``: the backward of combine needs them so."""
        ...

    def combine(self, given: CombineArguments) -> tuple[Tensor, Tensor | None]:
        """Sum ``rows`` per token: on this rank first, then at the token's owner
        (``docs/reference/semantics.md``, Combine)."""
        ...

    def rows_in_place(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, hidden]`` for a combine in place; of engines that have
        ``in_place``. Where peers read there (``twolevel``), earlier ones end, and it is collective.
        """
        ...

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """Tell the other ranks that this one refuses the call they are in. False: it cannot."""
        ...

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        """Shape and dtype of ``Plan.route``, and the number of arrival rows, for fake tensors."""
        ...

    def awaited(self) -> int | None:
        """A rank that waits for this one in the call that it makes next, as far as it is known.
        Ranks that wait on the device do not say so."""
        return None

    def failure(self) -> Report | None:
        """The report of the first rank that gave up, if any did and it is known."""
        return None

    def count(self) -> None:
        """Bring to the statistics what calls have counted, and what kernels have waited for."""
        return

    def check(self) -> None:
        """Raise what went wrong on the device since the last check."""
        ...

    def interrupt(self, text: str) -> None:
        """This rank has left a call in the middle: tell the others why, and end their waits."""
        ...

    def drain(self) -> None:
        """A call has failed, and none follows: return when nothing of this rank's calls runs any
        more. PeerTimeout: it does not end."""
        ...

    def close(self, why: str = IN_ORDER) -> None:
        """Let go of everything held. ``why``: what other ranks are told."""
        ...


class LowLatency(Protocol):
    """What an engine for decoding has besides: see ``LowLatencyEngine``."""

    active: Tensor

    def active_ranks(self) -> list[bool]: ...

    def mask(self, rank: int, active: bool = False) -> None: ...

    def silent_rank(self) -> int | None: ...

    def check_dispatch(
        self, payload: Payload, spec: Spec, mode: Quantize | None, cached: bool, by_column: bool
    ) -> None: ...

    def check_combine(self, rows: Tensor, spec: Spec) -> None: ...


# The choice of one


class Request(NamedTuple):
    """What the caller wants; the same on every rank except ``device``."""

    engine: str = AUTO
    device: torch.device | None = None
    buffer_bytes: int | None = None
    num_sms: int | None = None
    spare_sms: int | None = None
    once_per_node: bool | None = None
    no_grid: str = ""  # why ranks form no grid; empty if they do (``Config.topology``)

    def sms(self, most_sms: int) -> tuple[int, bool]:
        """Multiprocessors for calls, and whether they are all but the spared, half at most."""
        room = most_sms - min(self.spare_sms or 0, most_sms // 2)
        num_sms = min(self.num_sms or room, room)
        return num_sms, num_sms == room


class Choice(NamedTuple):
    """An engine still to be made, its device (None: host and CUDA tensors alike), and why.

    ``again``: the same among the members of another epoch (``Config.absent``), which meet in the
    epoch's store; None if the engine cannot go on without a rank. Collective. ``request``: for
    which; of a smallest GPU with ``most_sms`` multiprocessors.
    """

    make: Callable[[Stats], Engine]
    device: torch.device | None
    why: str
    again: Callable[[Config, dist.Store], Choice] | None = None
    request: Request = Request()
    most_sms: int = 0

    def terms(self) -> dict[str, Any]:
        """What a process that joins has to know of it, as JSON can hold it."""
        return {"request": self.request._replace(device=None)._asdict(), "most_sms": self.most_sms}
