"""From checked arguments to results: order of calls, autograd, waiting now or later. One per ``ExpertParallel``.

Every call goes one of two ways with the same engine underneath: straight to it, or through a custom operator where autograd
or a compiler must see it. An asynchronous call starts on detached tensors and is picked up by its ticket when it is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tokenyard import checks, ops
from tokenyard.config import Config
from tokenyard.engines.arrival import weights_of_rows
from tokenyard.engines.base import Engine, InPlace, LowLatency
from tokenyard.engines.low_latency_options import CallOptions
from tokenyard.errors import NotSupported, PeerTimeout, afresh
from tokenyard.handle import Arrived, Handle, Plan, Spec
from tokenyard.lane import NO_TICKET, Lane, Waitable, When
from tokenyard.layout import merge_weights
from tokenyard.results import Combined, Later, Received, by_column, received_fields
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

Result = TypeVar("Result")
_PLAN = len(Plan._fields)
_NOW = When(later=False, after=None)
"""Of a call that nobody asked more of."""


class Calls:
    """Makes calls on an engine in program order."""

    def __init__(self, config: Config, engine: Engine, device: torch.device | None) -> None:
        self.config, self.engine = config, engine
        self.lane = Lane(threaded=engine.waits_on_host, device=device)
        self.low = engine if isinstance(engine, LowLatency) else None  # asked once: it looks at every attribute
        self.number = ops.enlist(self)
        self._padded = config.num_local_experts, config.padded_rows
        self._padded_rows = config.num_local_experts * config.padded_rows
        self.gone, self.closed = "", False
        self._lost: PeerTimeout | None = None

    def check_open(self) -> None:
        """Raise if this object was closed or lost a peer."""
        if self.gone:
            raise RuntimeError(f"this ExpertParallel {self.gone}: make a new one")

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        """Tell the other ranks of an error in this rank's arguments; returns the error to raise."""
        try:
            if self.lane.run(self._watched(lambda: self.engine.refuse(op, exact, str(error)))):
                return error
        except PeerTimeout:
            return error
        return type(error)(f"{error} (other ranks cannot be told: those in this call wait until their own timeout)")

    def check(self) -> None:
        """Wait for all calls so far; raise what went wrong on the device, or that this object is closed."""
        if self.closed:  # one that lost a peer says which below
            self.check_open()
        self.lane.run(self._watched(self.engine.check))

    def close(self) -> None:
        """Finish what was started and let go of the engine."""
        if not self.closed:
            self.gone, self.closed = "is closed", True
            self.lane.close()
            self.engine.close()

    # What only the engine for decoding has

    def need_low(self, lack: str) -> LowLatency:
        """The engine for decoding.

        Raises:
            NotSupported: it is another, which has this ``lack``.
        """
        if self.low is None:
            raise NotSupported(f"engine {self.engine.name!r} {lack}; engine 'low_latency' can")
        return self.low

    def when(
        self, async_op: bool, return_hook: bool, after: Waitable | None, options: CallOptions | None, derives: bool
    ) -> When:
        """When and how a call is to be made. ``derives``: it works on its arguments at once, so ``after`` is waited for here."""
        if not (async_op or return_hook) and after is None and options is None:
            return _NOW
        checks.check_after(after)
        if isinstance(after, Later):
            after = after.work()
        if after is not None and derives:
            after.wait()
            after = None
        if options is not None:
            self.need_low("takes no options of a call")
        if self.low is None:
            return When(async_op or return_hook, after)
        if async_op and return_hook:
            raise ValueError("async_op and return_hook exclude each other with engine 'low_latency': give one of them")
        extras: dict[str, Any] = {} if options is None else {"options": options}
        return When(async_op or return_hook, after, return_hook, extras | ({"in_two": True} if return_hook else {}))

    def check_dispatch(self, payload: Payload, spec: Spec, mode: Quantize | None, **more: Any) -> None:
        """Raise if the engine for decoding cannot make a dispatch; others decide themselves."""
        if self.low is not None:
            self.low.check_dispatch(payload, spec, mode, **more)

    def check_combine(self, rows: Tensor, handle: Handle, options: CallOptions | None) -> None:
        """The same for a combine."""
        if self.low is not None:
            self.low.check_combine(rows, handle.spec, handle.num_tokens, options)

    # Called by the operators

    def run_dispatch(
        self,
        payload: Payload,
        topk_idx: Tensor,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        ticket: int,
        in_place: bool = False,
        **extras: Any,
    ) -> tuple[Payload, Plan, Arrived]:
        """A fresh dispatch, or the result of the one behind ``ticket``."""
        call = partial(self.engine.dispatch, payload, topk_idx, weights, spec, mode, in_place=in_place, **extras)
        return self._run(call, ticket)

    def run_redispatch(
        self,
        payload: Payload,
        plan: Plan,
        spec: Spec,
        raw: bool,
        ticket: int,
        mode: Quantize | None = None,
        in_place: bool = False,
    ) -> Payload:
        """A cached dispatch, or the result of the one behind ``ticket``."""
        return self._run(
            lambda: self.engine.redispatch(payload, plan, spec, mode=mode, raw=raw, in_place=in_place), ticket
        )

    def run_combine(
        self, rows: Tensor, plan: Plan, spec: Spec, ticket: int, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """A combine, or the result of the one behind ``ticket``."""
        return self._run(lambda: self.engine.combine(rows, plan, spec, **options), ticket)

    def _run(self, call: Callable[[], Result], ticket: int) -> Result:
        if ticket:
            rest = self.lane.rest_of(ticket)
            if rest is None:
                return self.lane.take(ticket)
            call = rest
        self.check_open()
        return self.lane.run(self._watched(call))

    def _watched(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """``call``, unless a peer was lost before its turn; notices if one is lost in it, whoever waits for it."""

        def watched() -> Result:
            if self._lost is not None:
                raise afresh(self._lost)
            try:
                return call()
            except PeerTimeout as error:
                self._lost = afresh(error)
                self.gone = self.gone or f"lost a peer ({error})"
                raise

        return watched

    # Called by the API

    def dispatch(
        self,
        payload: Payload,
        topk_idx: Tensor,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        when: When,
        in_place: bool = False,
    ) -> Received:
        """A fresh dispatch of checked arguments. ``in_place`` ones are not tracked."""
        tracked = not in_place and _tracks(payload.x, weights)
        ticket, extras, ahead = NO_TICKET, when.extras or {}, None
        if when.later or tracked:
            still, fixed = Payload(payload.x.detach(), payload.scales), _detached(weights)
            call = partial(self.engine.dispatch, still, topk_idx, fixed, spec, mode, in_place=in_place)
            ticket, extras = self._begin(call, payload.x.device, when), {}
        elif when.after is not None:
            when.after.wait()

        def finish() -> dict[str, Any]:
            if tracked:
                quantized = 0 if mode is None else mode.value
                flat = ops.dispatch_op(
                    payload.x,
                    payload.scales,
                    topk_idx,
                    weights,
                    self.number,
                    ops.spec_numbers(spec),
                    quantized,
                    ticket,
                )
                scales = flat[1] if flat[1].dim() == 2 else None
                options: CallOptions | None = (when.extras or {}).get("options")
                if scales is not None and options is not None and options.scales_by_column:  # the operator has rows
                    scales = by_column(scales.view(*self._padded, scales.shape[1]))
                moved = Payload(flat[0], scales), Plan(*flat[2 : 2 + _PLAN]), Arrived(*flat[2 + _PLAN :])
            else:
                moved = self.run_dispatch(payload, topk_idx, weights, spec, mode, ticket, in_place, **extras)
            return ahead or fields(*moved)

        def fields(received: Payload, plan: Plan, arrived: Arrived) -> dict[str, Any]:
            handle = Handle(
                owner=self.number,
                spec=spec,
                num_tokens=payload.x.shape[0],
                num_rows=self._padded_rows if spec.layout is Layout.EXPERT_PADDED else received.x.shape[0],
                has_weights=weights is not None,
                index_dtype=topk_idx.dtype,
                plan=plan,
                arrived=arrived,
            )
            return self._fields(payload, received, handle)

        if when.in_two and not tracked:
            ahead = fields(*self.lane.held(ticket).ahead())
        received = self._received(finish, when, ticket)
        if ahead is not None:
            received.ahead = Received(lambda: ahead)
        return received

    def redispatch(
        self, payload: Payload, mode: Quantize | None, handle: Handle, when: When, in_place: bool = False
    ) -> Received:
        """A cached dispatch of checked arguments: the rows, with the routing that the handle knows."""
        plan, spec = handle.plan, handle.spec
        still = Payload(payload.x.detach(), payload.scales)
        ticket = self.lane.begin(
            self._watched(lambda: self.engine.redispatch(still, plan, spec, mode=mode, in_place=in_place)),
            payload.x.device,
            when,
        )

        def finish() -> dict[str, Any]:
            if mode is None and not in_place and _tracks(payload.x):
                x, scales = ops.redispatch_op(
                    payload.x, payload.scales, list(plan), self.number, ops.spec_numbers(spec), False, ticket
                )
                received = Payload(x, scales if scales.dim() == 2 else None)
            else:
                received = self.run_redispatch(payload, plan, spec, False, ticket, mode, in_place)
            return self._fields(payload, received, handle)

        return self._received(finish, when, ticket)

    def combine(
        self,
        rows: Tensor,
        handle: Handle,
        *,
        weights: Tensor | None,
        reduce_weights: Tensor | None,
        bias: tuple[Tensor, ...],
        out: Tensor | None,
        when: When,
        in_place: bool = False,
    ) -> Combined:
        """A combine of checked arguments, still to be waited for. ``reduce_weights`` is ``[Nb, K]``.

        ``in_place`` ones are not tracked.
        """
        plan, spec = handle.plan, handle.spec
        tracked = not in_place and _tracks(rows, weights, reduce_weights, *bias)
        options: dict[str, Any] = {"weights": weights, "reduce_weights": reduce_weights, "bias": bias}
        if in_place:
            options["in_place"] = True
        ticket, extras = NO_TICKET, when.extras or {}
        if when.later or tracked:
            still: dict[str, Any] = {name: _detached(value) for name, value in options.items()}
            call = partial(self.engine.combine, rows.detach(), plan, spec, out=out, **still)
            ticket, extras = self._begin(call, rows.device, when), {}
        elif when.after is not None:
            when.after.wait()

        def finish() -> dict[str, Any]:
            if tracked:
                numbers = ops.spec_numbers(spec)
                x, reduced = ops.combine_op(
                    rows, weights, reduce_weights, list(bias), list(plan), self.number, numbers, False, ticket
                )
                if out is not None and not ticket:  # under a compiler: operators write to nothing they are given
                    x = out.copy_(x)
            else:
                x, reduced = self.run_combine(rows, plan, spec, ticket, out=out, **options, **extras)
            return {"x": x, "topk_weights": reduced if reduce_weights is not None else None}

        combined = Combined(finish, self.lane.work_of(ticket) if ticket else None)
        if when.later and not when.in_two:
            weakref.finalize(combined, self.lane.drop, ticket)
        return combined

    def rows_in_place(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, H]`` for a combine in place, of an engine that has it (:class:`InPlace`)."""
        self.check_open()
        call = partial(cast("InPlace", self.engine).rows_in_place, num_rows, self.config.hidden, dtype)
        return self.lane.run(self._watched(call))

    def come_to_rows_in_place(self, dtype: Any) -> None:
        """Of a rank that refuses to make rows: the others come to where memory may grow, as much as their dtype asks."""
        if hasattr(self.engine, "rows_in_place"):
            self.rows_in_place(0, dtype if dtype in checks.FLOAT_DTYPES else torch.bfloat16)

    def fetch_weights(self, topk_weights: Tensor, handle: Handle) -> Tensor:
        """Weights given at the owner, brought to the rows: float32 ``[rows]``, differentiable.

        An engine for decoding brings them itself.
        """
        if self.low is not None:
            return topk_weights
        plan = handle.plan
        merged = merge_weights(topk_weights, plan.first_pick)
        if _tracks(topk_weights):
            spec = ops.spec_numbers(handle.spec)
            there, _ = ops.redispatch_op(merged, None, list(plan), self.number, spec, True, NO_TICKET)
        else:
            there = self.run_redispatch(Payload(merged, None), plan, handle.spec, True, NO_TICKET).x
        return weights_of_rows(there, plan.slots, plan.picks, handle.num_rows)

    def _begin(self, call: Callable[..., Any], device: torch.device, when: When) -> int:
        """Start a call and return its ticket; ``NO_TICKET`` if it is to be made at once, without extras."""
        if not when.extras:
            return self.lane.begin(self._watched(call), device, when)
        call = partial(call, **when.extras)
        if when.later and not when.in_two:
            return self.lane.begin(self._watched(call), device, when)
        if when.after is not None:
            when.after.wait()
        made = self.lane.run(self._watched(call))
        return self.lane.hold(made if when.in_two else lambda: made)

    def _received(self, finish: Callable[[], dict[str, Any]], when: When, ticket: int) -> Received:
        received = Received(finish, self.lane.work_of(ticket) if ticket else None)
        if not when.later:
            received.wait()
        elif not when.in_two:  # nothing to drop of those
            weakref.finalize(received, self.lane.drop, ticket)
        return received

    def _fields(self, sent: Payload, received: Payload, handle: Handle) -> dict[str, Any]:
        shape = self._padded if handle.spec.layout is Layout.EXPERT_PADDED else (handle.num_rows,)
        fields = received_fields(received.x, received.scales, handle, shape)
        if received.scales is not None:
            fields["_dequantize"] = self._dequantizer(sent.x, handle)
        return fields

    def _dequantizer(self, sent: Tensor, handle: Handle) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
        """Turns received data and scales into rows whose gradient goes to ``sent``."""

        def dequantizer(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
            rows, spread = data.reshape(-1, data.shape[-1]), scales.reshape(-1, scales.shape[-1])
            spec = ops.spec_numbers(handle.spec)
            plain = ops.dequantize_op(sent, rows, spread, list(handle.plan), self.number, spec, dtype)
            return plain.view(data.shape)

        return dequantizer


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(part) for part in value)  # pyright: ignore[reportUnknownVariableType]
    return value.detach() if isinstance(value, Tensor) else value


def _tracks(*tensors: Tensor | None) -> bool:
    """Whether autograd or a compiler must see this call."""
    if torch.compiler.is_compiling():
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:  # a generator would cost a frame for each
            if tensor is not None and tensor.requires_grad:
                return True
    return False
