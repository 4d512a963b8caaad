"""Tensors that launches fill: the plan, and what rides along with rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.handle import Arrived, Plan
from tokenyard.kernels.plan import PlanOutputs
from tokenyard.kernels.structs import Payload as Sent
from tokenyard.kernels.structs import Result
from tokenyard.rows import Payload
from tokenyard.types import Layout

if TYPE_CHECKING:
    from tokenyard.engines.signatures import Signature


_PLACED = "slots", "picks", "gather"


class Counted(NamedTuple):
    """What the plan's launch fills."""

    tokens: int
    num_topk: int
    block: Tensor  # int32: the plan's tables, then first picks, then meta, each at 16 bytes
    route: Tensor  # the plan's tables are at its begin: the block, or tables that have grown
    route_words: int
    first_pick_at: int  # these two: addresses
    meta_at: int
    tokens_per_expert: Tensor
    offsets: Tensor
    ranges: Tensor
    overflow: Tensor


class Known(NamedTuple):
    """Of a plan, what the host tells kernels."""

    route_at: int
    slots_at: int
    num_tokens: int
    num_rows: int  # of results in expert blocks
    counts: Any  # ``Plan.splits`` as a numpy array


class CallPlan:
    """A :class:`Plan` whose tensors are made when somebody reads them, and :class:`Known` of it.
    Kernels need addresses only, and each tensor costs the host a third of a launch."""

    counts: Any

    def __init__(
        self, counted: Counted, placed: list[Tensor], blank: Blank | None, num_rows: int,
        returns: Tensor,
    ) -> None:  # fmt: skip
        """``placed``: slots, picks and gather, or a copy of ``blank``, which has them."""
        self.route_at, self.num_tokens = counted.route.data_ptr(), counted.tokens
        at = [each.data_ptr() for each in placed]
        if blank is not None:
            at = [at[0] + offset for offset in blank.first_bytes]
        self.slots_at, self.picks_at, self.gather_at = at
        self.num_rows, self.returns = num_rows, returns
        self._counted, self._placed, self._blank = counted, placed, blank
        self.whole = False  # whether all tensors are made

    def __getattr__(self, name: str) -> Tensor:
        if name not in Plan._fields:
            raise AttributeError(name)
        counted = self._counted
        if name == "splits":
            made = torch.from_numpy(self.counts)  # pyright: ignore[reportUnknownMemberType]
        elif name == "route":
            made = counted.route.as_strided((counted.route_words,), (1,), 0)
        elif name == "first_pick":
            at = (counted.first_pick_at - counted.block.data_ptr()) // 8
            shape = self.num_tokens, counted.num_topk
            made = counted.block.view(torch.int64).as_strided(shape, (shape[1], 1), at)
        elif self._blank is None:
            made = self._placed[_PLACED.index(name)]
        else:
            made = self._blank.output(self._placed[0], _PLACED.index(name))
        self.__dict__[name] = made
        return made

    def __iter__(self) -> Iterator[Tensor]:
        made = [getattr(self, name) for name in Plan._fields]
        if not self.whole:
            self.whole = True
        return iter(made)

    def __len__(self) -> int:
        """For compilers, which ask it of one from outside of their graph."""
        return len(Plan._fields)

    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage]
    def make_whole(self) -> None:
        """Make all tensors outside of a graph that is traced, which takes no addresses."""
        tuple(self)

    def __reduce__(self) -> tuple[type[Plan], tuple[Tensor, ...]]:
        """A copy has tensors, which may lie elsewhere than these."""
        return Plan, tuple(self)


def known_of(plan: Plan | CallPlan) -> Known:
    """What kernels are told of a plan, whoever made its tensors."""
    if isinstance(plan, CallPlan):
        return cast("Known", plan)
    addresses = plan.route.data_ptr(), plan.slots.data_ptr()
    return Known(*addresses, len(plan.first_pick), len(plan.gather), plan.splits.numpy())


def _whole(words: int) -> int:
    """int32 ``words`` and what makes them a multiple of 16 bytes."""
    return -(-words // 4) * 4


class Ahead(NamedTuple):
    """What the next fresh dispatch like this one needs, made while the host waits anyway:
    allocations delay a launch."""

    # tokens, rows of a forwarders' table, stream, whether for inference: the call must agree
    where: tuple[int, ...]
    room: int  # rows of the result
    counted: Counted
    arrived: Arrived


class Blank(NamedTuple):
    """Outputs of one signature of static calls as they begin, side by side.

    Their sizes never change, so a call copies the block and looks at it in parts: one launch.
    To fill them one by one took six, a third of the host time of the call
    (``docs/benchmarks/experiments-nvlink.md``, Host time).
    """

    words: Tensor  # of all outputs, int64
    # dtype, shape, strides and offset of each output, in its elements
    parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]]
    first_bytes: list[int]  # of the first three

    @staticmethod
    def of(outputs: list[Tensor]) -> Blank:
        """``outputs`` have elements of 4 or 8 bytes, and nothing written to them yet."""
        words: list[Tensor] = []
        parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        at = 0  # in bytes
        for output in outputs:
            size = output.dtype.itemsize
            parts.append((output.dtype, tuple(output.shape), output.stride(), at // size))
            flat = output.reshape(-1)
            flat = torch.cat([flat, flat.new_zeros(-flat.numel() * size % 8 // size)])
            words.append(flat.view(torch.int64))
            at += flat.numel() * size
        return Blank(torch.cat(words), parts, [offset * 8 for *_, offset in parts[:3]])

    def output(self, copy: Tensor, number: int) -> Tensor:
        """Output ``number`` in a ``copy`` of the words."""
        dtype, shape, stride, offset = self.parts[number]
        base = copy if dtype is torch.int64 else copy.view(dtype)
        return base.as_strided(shape, stride, offset)


def sent_of(payload: Payload, meta_at: int = 0) -> Sent:
    """Addresses of what a dispatch sends."""
    scales = 0 if payload.scales is None else payload.scales.data_ptr()
    return Sent(payload.x.data_ptr(), scales, meta_at)


def filled_of(counted: Counted) -> PlanOutputs:
    """Addresses of what the plan's launch fills, besides the plan."""
    *_, first_pick_at, meta_at, tokens_per_expert, offsets, ranges, overflow = counted
    return PlanOutputs(
        meta_at, first_pick_at, tokens_per_expert.data_ptr(), offsets.data_ptr(),
        ranges.data_ptr(), overflow.data_ptr(),
    )  # fmt: skip


def result_of(out: Payload, plan: Plan | CallPlan, arrived: Arrived | None = None) -> Result:
    """Addresses of what a dispatch fills; of a cached one, where its rows go only."""
    rows, scales = out.x.data_ptr(), 0 if out.scales is None else out.scales.data_ptr()
    if arrived is None:
        return Result(rows, scales, 0, 0, 0, 0, 0, known_of(plan).slots_at)
    made = cast("CallPlan", plan)
    return Result(
        rows=rows, scales=scales, expert_ids=arrived.topk_idx.data_ptr(), picks=made.picks_at,
        weights=arrived.weights.data_ptr(), source=arrived.source.data_ptr(),
        arrivals=made.gather_at, slots=made.slots_at,
    )  # fmt: skip


class Outputs:
    """Makes what launches fill, on one device. What a layout lacks is one shared empty tensor.
    ``route_words``: int32 words of the plan of so many tokens, with so many rows in its forwarders'
    table."""

    def __init__(
        self, config: Config, device: torch.device, route_words: Callable[[int, int], int]
    ) -> None:
        self._topk, self._ranks = config.num_topk, config.world_size
        self._local, self._device = config.num_local_experts, device
        self._route_words = route_words
        dtypes = torch.int64, torch.int32, torch.float32
        self._none = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in dtypes}
        self._no_returns = torch.empty(0, 0, dtype=torch.int64, device=device)
        if device.type == "cuda":
            self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore

    def counted(self, signature: Signature, tokens: int, table_rows: int) -> Counted:
        """For the plan's launch."""
        ahead = signature.ahead
        if ahead is not None and ahead.where == self._where(tokens, table_rows):
            return ahead.counted
        return self._counted(signature, tokens, table_rows)

    def make_ahead(self, signature: Signature, tokens: int, table_rows: int, room: int) -> None:
        """In the current stream, make what a call may fill that follows, with room for ``room``
        rows."""
        with suppress(RuntimeError):  # short of memory, say: then the next call tells
            counted = self._counted(signature, tokens, table_rows)
            arrived = self._arrived(signature, room, counted)
            where = self._where(tokens, table_rows)
            signature.ahead = Ahead(where, room, counted, arrived)

    def _where(self, tokens: int, table_rows: int) -> tuple[int, ...]:
        stream = self._stream(self._device.index) if self._device.type == "cuda" else 0
        return tokens, table_rows, stream, torch.is_inference_mode_enabled()

    def _counted(self, signature: Signature, tokens: int, table_rows: int) -> Counted:
        none, layout, local = self._none[torch.int32], signature.spec.layout, self._local
        route_words = self._route_words(tokens, table_rows)
        first_pick = _whole(route_words)
        meta = first_pick + _whole(2 * tokens * self._topk)
        words = meta + tokens * signature.row_layout.meta_words
        ints = none.new_empty
        block = ints(words)
        at = block.data_ptr()
        return Counted(
            tokens, self._topk, block, block, route_words, at + 4 * first_pick, at + 4 * meta,
            tokens_per_expert=ints(local),
            offsets=ints(local + 1) if layout is Layout.EXPERT_MAJOR else none,
            ranges=ints(local, self._ranks, 2) if layout is Layout.EXPERT_PADDED else none,
            overflow=none if signature.spec.capacity is None else ints(1),
        )  # fmt: skip

    def results(
        self, signature: Signature, counted: Counted, arrived_rows: int, num_rows: int
    ) -> tuple[CallPlan, Arrived]:
        """The plan without its counts on the host, and what rides along with rows. Rows without a
        source say so beforehand; kernels write the others."""
        ahead, signature.ahead = signature.ahead, None
        blank = signature.blank
        if blank is not None:
            placed = [copy := blank.words.clone()]
            ids, weights, source = (blank.output(copy, at) for at in (3, 4, 5))
            arrived = Arrived(ids, weights, source, *counted[-4:])
        else:
            placed = self._placed(signature, arrived_rows, num_rows)
            if ahead is not None and ahead.counted is counted and ahead.room == num_rows:
                arrived = ahead.arrived
            else:
                arrived = self._arrived(signature, num_rows, counted)
                if not signature.spec.exact and not self._captures():
                    made = [*placed, *arrived[:3]]  # a graph would fill it in replays
                    signature.blank = Blank.of(made)
        return CallPlan(counted, placed, blank, num_rows, self._no_returns), arrived

    def _placed(self, signature: Signature, arrived_rows: int, num_rows: int) -> list[Tensor]:
        """Slots, picks and the gather of a plan."""
        if not signature.spec.placed:
            return [self._none[torch.int64]] * 3
        static, shape = not signature.spec.exact, (arrived_rows, signature.width)
        return [
            self._make(torch.int64, shape, -1 if static else None),
            self._make(torch.int64, shape, 0 if static else None),
            self._make(torch.int64, (num_rows,), -1 if signature.holes else None),
        ]

    def _arrived(self, signature: Signature, num_rows: int, counted: Counted) -> Arrived:
        """Ids, weights and source tokens of result rows, and what is counted."""
        experts, rows = signature.experts, (num_rows,)
        shape = rows if experts else (num_rows, self._topk)
        hole, none = (-1, 0) if signature.holes else (None, None)
        ids, weights = self._none[torch.int32], self._none[torch.float32]
        if not experts:
            ids = self._make(torch.int64, shape, hole)
        if signature.weighted:
            weights = self._make(torch.float32, shape, none)
        return Arrived(ids, weights, self._make(torch.int64, rows, hole), *counted[-4:])

    def _make(self, dtype: torch.dtype, shape: tuple[int, ...], hole: int | None) -> Tensor:
        """``hole``: what places hold to which nothing is written; None: there are none."""
        if hole is None:
            return self._none[dtype].new_empty(shape)
        return torch.full(shape, hole, dtype=dtype, device=self._device)

    def _captures(self) -> bool:
        """Whether what is asked of the device now is kept in a CUDA graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
