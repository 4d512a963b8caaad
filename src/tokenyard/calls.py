"""From checked arguments to results: order of calls, autograd, waiting now or later. One per
``ExpertParallel``.

Every call goes one of two ways with the same engine underneath: straight to it, or through a custom
operator where autograd or a compiler must see it. An asynchronous call starts on detached tensors
and is picked up by its ticket when it is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tokenyard import autograd, checks, forks, ops, transforms
from tokenyard.config import Config
from tokenyard.engines.arrival import weights_of_rows
from tokenyard.engines.base import Engine, InPlace, LowLatency
from tokenyard.engines.low_latency_options import CallOptions
from tokenyard.errors import NotSupported, PeerTimeout, afresh, is_from_outside
from tokenyard.handle import Arrived, Handle, Plan, Spec
from tokenyard.header import OPS
from tokenyard.lane import NO_TICKET, Lane, Waitable, When
from tokenyard.layout import merge_weights
from tokenyard.results import Combined, Later, Received, by_column, received_fields
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

Result = TypeVar("Result")
_NOW = When(later=False, after=None)
"""Of a call that nobody asked more of."""
_NO_TANGENTS = (
    "engine 'low_latency' moves none: engines 'collective', 'nvlink' and 'twolevel' do; or "
    "detach() it"
)


class Calls:
    """Makes calls on an engine in program order."""

    def __init__(self, config: Config, engine: Engine, device: torch.device | None) -> None:
        self.config, self.engine = config, engine
        self.lane = Lane(threaded=engine.waits_on_host, device=device)
        self.low = (
            engine if isinstance(engine, LowLatency) else None
        )  # asked once: it looks at every attribute
        self.number = ops.enlist(self)
        self._padded = config.num_local_experts, config.padded_rows
        self._padded_rows = config.num_local_experts * config.padded_rows
        self.gone, self.closed, self.inherited = "", False, False
        self._lost: RuntimeError | None = None
        self._doing: tuple[str, int | None] = "a call", None
        forks.watch(self)

    def check_open(self) -> None:
        """Raise if this object was closed, interrupted, or lost a peer."""
        if self.gone:
            raise RuntimeError(f"this ExpertParallel {self.gone}: make a new one")

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        """Tell the other ranks of an error in this rank's arguments; returns the error to raise."""
        try:
            with transforms.outside_functorch():
                refusing = f"{OPS[op]}, which it refused,"
                told = self._in_turn(lambda: self.engine.refuse(op, exact, str(error)), refusing)
            if told:
                return error
        except PeerTimeout:
            return error
        return type(error)(
            f"{error} (other ranks cannot be told: those in this call wait until their own timeout)"
        )

    def check(self) -> None:
        """Wait for all calls so far; raise what went wrong on the device, or that this object is
        closed.
        """
        if self.closed:  # one that lost a peer says which below
            self.check_open()
        self._in_turn(self.engine.check, "check(), after call")

    def close(self) -> None:
        """Finish what was started and let go of the engine."""
        if not self.closed:
            over, self.gone, self.closed = self._lost is not None, "is closed", True
            try:
                self._waited(partial(self.lane.close, wait=not over))
            finally:
                self.engine.close()

    def disown(self, why: str) -> None:
        """In a forked child (``forks.py``)."""
        forks.keep_for_ever(self.engine)
        self.lane.disown()
        self.gone, self.closed, self.inherited = why, True, True
        self.lane = cast("Lane", forks.Disowned(why))

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
        self,
        async_op: bool,
        return_hook: bool,
        after: Waitable | None,
        options: CallOptions | None,
        derives: bool,
    ) -> When:
        """When and how a call is to be made. ``derives``: it works on its arguments at once, so
        ``after`` is waited for here.
        """
        transforms.check(async_op or return_hook)
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
            raise ValueError(
                "async_op and return_hook exclude each other with engine 'low_latency': give one "
                "of them"
            )
        extras: dict[str, Any] = {} if options is None else {"options": options}
        return When(
            async_op or return_hook,
            after,
            return_hook,
            extras | ({"in_two": True} if return_hook else {}),
        )

    def check_dispatch(
        self,
        payload: Payload,
        weights: Tensor | None,
        spec: Spec,
        mode: Quantize | None,
        **more: Any,
    ) -> None:
        """Raise if tangents cannot be moved, or the engine for decoding cannot make a dispatch;
        others decide themselves.
        """
        if mode is not None or payload.scales is not None:
            transforms.check_tangents(
                payload, "quantised rows carry none: dispatch plain rows, or x.detach()"
            )
        if self.low is not None:
            transforms.check_tangents((*payload, weights), _NO_TANGENTS)
            self.low.check_dispatch(payload, spec, mode, **more)

    def check_combine(
        self, given: tuple[Any, ...], handle: Handle, options: CallOptions | None
    ) -> None:
        """The same for a combine. ``given``: rows, and all other tensors."""
        if self.low is not None:
            transforms.check_tangents(given, _NO_TANGENTS)
            self.low.check_combine(given[0], handle.spec, handle.num_tokens, options)

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
        call = partial(
            self.engine.dispatch,
            payload,
            topk_idx,
            weights,
            spec,
            mode,
            in_place=in_place,
            **extras,
        )
        return self._run(call, ticket, "dispatch")

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
            lambda: self.engine.redispatch(
                payload, plan, spec, mode=mode, raw=raw, in_place=in_place
            ),
            ticket,
            "cached dispatch",
        )

    def run_combine(
        self, rows: Tensor, plan: Plan, spec: Spec, ticket: int, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """A combine, or the result of the one behind ``ticket``."""
        return self._run(
            lambda: self.engine.combine(rows, plan, spec, **options), ticket, "combine"
        )

    def _run(self, call: Callable[[], Result], ticket: int, op: str) -> Result:
        if ticket:
            rest = self.lane.rest_of(ticket)
            if rest is None:
                return self._waited(partial(self.lane.take, ticket))
            call = rest
        self.check_open()
        return self._in_turn(call, op)

    def _in_turn(self, call: Callable[[], Result], op: str) -> Result:
        return self._waited(partial(self.lane.run, self._watched(call, op)))

    def _watched(self, call: Callable[[], Result], op: str) -> Callable[[], Result]:
        """``call``, unless a peer was lost before its turn; notices if one is lost in it, whoever
        waits for it.
        """

        def watched() -> Result:
            if self._lost is not None:
                raise afresh(self._lost)
            self._doing = (
                op,
                getattr(self.engine, "_calls", None),
            )  # engines that number calls count those begun so
            try:
                return call()
            except Exception as error:
                if self._lost is not None:  # whoever waited for this was interrupted
                    raise afresh(self._lost) from None
                if isinstance(error, PeerTimeout):
                    self._lost = afresh(error)
                    self.gone = self.gone or f"lost a peer ({error})"
                raise

        return partial(self._waited, watched)

    def _waited(self, wait: Callable[[], Result]) -> Result:
        """What ``wait()`` returns. If Ctrl-C ends it, this rank has left a call: it tells the
        others, and makes no more calls.

        A rank alone has left nobody, and goes on.
        """
        try:
            return wait()
        except BaseException as error:
            alone = self.config.world_size == 1 and self.engine.waits_on_host
            if is_from_outside(error) and not alone and self._lost is None:
                op, number = self._doing
                where = (
                    f"was interrupted in {op if number is None else f'{op} #{number}'} "
                    f"({type(error).__name__})"
                )
                self.gone = f"{where}, so no rank can use it any more"
                self._lost = RuntimeError(f"this ExpertParallel {self.gone}: make a new one")
                self.engine.interrupt(f"rank {self.config.rank} {where}")
            raise

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
        tracked = not in_place and autograd.is_tracked(payload.x, weights)
        ticket, extras, ahead = NO_TICKET, when.extras or {}, None
        if when.later or tracked:
            still, fixed = Payload(payload.x.detach(), payload.scales), autograd.detached(weights)
            call = partial(
                self.engine.dispatch, still, topk_idx, fixed, spec, mode, in_place=in_place
            )
            ticket, extras = self._begin(call, payload.x.device, when, "dispatch"), {}
        elif when.after is not None:
            when.after.wait()

        def finish() -> dict[str, Any]:
            if tracked:
                moved = autograd.dispatch(self, payload, topk_idx, weights, spec, mode, ticket)
                scales = moved[0].scales
                options: CallOptions | None = (when.extras or {}).get("options")
                if (
                    scales is not None and options is not None and options.scales_by_column
                ):  # the operator has rows
                    scales = by_column(scales.view(*self._padded, scales.shape[1]))
                    moved = Payload(moved[0].x, scales), *moved[1:]
            else:
                moved = self.run_dispatch(
                    payload, topk_idx, weights, spec, mode, ticket, in_place, **extras
                )
            return ahead or fields(*moved)

        def fields(received: Payload, plan: Plan, arrived: Arrived) -> dict[str, Any]:
            handle = Handle(
                owner=self.number,
                spec=spec,
                num_tokens=payload.x.shape[0],
                num_rows=self._padded_rows
                if spec.layout is Layout.EXPERT_PADDED
                else received.x.shape[0],
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
        self,
        payload: Payload,
        mode: Quantize | None,
        handle: Handle,
        when: When,
        in_place: bool = False,
    ) -> Received:
        """A cached dispatch of checked arguments: the rows, with the routing that the
        handle knows.
        """
        plan, spec = handle.plan, handle.spec
        still = Payload(payload.x.detach(), payload.scales)
        ticket = self.lane.begin(
            self._watched(
                lambda: self.engine.redispatch(still, plan, spec, mode=mode, in_place=in_place),
                "cached dispatch",
            ),
            payload.x.device,
            when,
        )

        def finish() -> dict[str, Any]:
            if in_place:
                received = self.run_redispatch(payload, plan, spec, False, ticket, mode, in_place)
            else:
                received = autograd.redispatch(self, payload, plan, spec, ticket, mode=mode)
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
        """A combine of checked arguments, still to be waited for. ``reduce_weights`` is ``[Nb,
        K]``.

        ``in_place`` ones are not tracked.
        """
        plan, spec = handle.plan, handle.spec
        tracked = not in_place and autograd.is_tracked(rows, weights, reduce_weights, *bias)
        options: dict[str, Any] = {
            "weights": weights,
            "reduce_weights": reduce_weights,
            "bias": bias,
        }
        if in_place:
            options["in_place"] = True
        ticket, extras = NO_TICKET, when.extras or {}
        if when.later or tracked:
            still: dict[str, Any] = {
                name: autograd.detached(value) for name, value in options.items()
            }
            call = partial(self.engine.combine, rows.detach(), plan, spec, out=out, **still)
            ticket, extras = self._begin(call, rows.device, when, "combine"), {}
        elif when.after is not None:
            when.after.wait()

        def finish() -> dict[str, Any]:
            if tracked:
                x, reduced = autograd.combine(self, rows, plan, spec, ticket, **options)
                if (
                    out is not None and not ticket
                ):  # under a compiler: operators write to nothing they are given
                    x = out.copy_(x)
            else:
                x, reduced = self.run_combine(
                    rows, plan, spec, ticket, out=out, **options, **extras
                )
            return {"x": x, "topk_weights": reduced if reduce_weights is not None else None}

        combined = Combined(finish, self.lane.work_of(ticket) if ticket else None)
        if when.later and not when.in_two:
            weakref.finalize(combined, self.lane.drop, ticket)
        return combined

    def rows_in_place(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, H]`` for a combine in place, of an engine that has it
        (:class:`InPlace`).
        """
        self.check_open()
        call = partial(
            cast("InPlace", self.engine).rows_in_place, num_rows, self.config.hidden, dtype
        )
        return self._in_turn(call, "empty_for_combine(), after call")

    def come_to_rows_in_place(self, dtype: Any) -> None:
        """Of a rank that refuses to make rows: the others come to where memory may grow, as much as
        their dtype asks.
        """
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
        there = autograd.redispatch(self, Payload(merged, None), plan, handle.spec, raw=True).x
        return weights_of_rows(there, plan.slots, plan.picks, handle.num_rows)

    def _begin(self, call: Callable[..., Any], device: torch.device, when: When, op: str) -> int:
        """Start a call and return its ticket; ``NO_TICKET`` if it is to be made at once, without
        extras.
        """
        if not when.extras:
            return self.lane.begin(self._watched(call, op), device, when)
        call = partial(call, **when.extras)
        if when.later and not when.in_two:
            return self.lane.begin(self._watched(call, op), device, when)
        if when.after is not None:
            when.after.wait()
        made = self._in_turn(call, op)
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
            fields["_dequantize"] = autograd.dequantizer(self, sent.x, handle.plan, handle.spec)
        return fields
