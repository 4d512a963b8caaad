"""From checked arguments to results: autograd, waiting now or later. One per ``ExpertParallel``.

A call goes one of two ways with the same engine underneath: straight to it, or through autograd
where that, or a compiler, must see it. An asynchronous call starts on detached tensors and is
picked up by its ticket when it is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tokenyard import autograd, transforms
from tokenyard.autograd import Call
from tokenyard.call_queue import NO_TICKET, When
from tokenyard.config import Config
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments, Engine
from tokenyard.engines.plans import in_arrival_order, weights_of_rows
from tokenyard.guard import Guard
from tokenyard.handle import Arrived, Handle, Plan, Spec
from tokenyard.ops import Moved, enlist
from tokenyard.redirect import Redirect
from tokenyard.results import Combined, Later, Received, by_column, received_fields
from tokenyard.routing import merge_weights
from tokenyard.rows import Payload
from tokenyard.straight_through import dequantizer
from tokenyard.types import FLOAT_DTYPES, Layout, Quantize

Result = TypeVar("Result", Received, Combined)
Arguments = DispatchArguments | CachedArguments | CombineArguments


class DispatchRequest(NamedTuple):
    """A dispatch of checked arguments. ``known``: of a cached one, which has neither ids nor
    weights. One in place is not tracked by autograd. ``asked``: picks and weights as given, if
    picks go elsewhere."""

    payload: Payload
    topk_idx: Tensor | None
    weights: Tensor | None
    spec: Spec
    mode: Quantize | None
    known: Handle | None
    in_place: bool
    when: When
    asked: tuple[Tensor, Tensor | None] | None = None


class CombineRequest(NamedTuple):
    """A combine of checked arguments. ``weights [rows]`` are those that rode along, ``at_owner [T,
    K]`` are given instead. One in place is not tracked by autograd."""

    rows: Tensor
    handle: Handle
    weights: Tensor | None
    at_owner: Tensor | None
    reduce_weights: Tensor | None
    bias: tuple[Tensor, ...]
    out: Tensor | None
    in_place: bool
    when: When
    lost: Tensor | None = None


class Calls(Guard):
    """Makes calls on an engine in program order. ``number``: by which operators find it;
    ``earlier``: those before the object recovered; ``redirect``: of picks of ranks that are gone.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        device: torch.device | None,
        earlier: frozenset[int] = frozenset(),
        redirect: Redirect | None = None,
    ) -> None:
        super().__init__(config, engine, device)
        self.number, self.earlier, self.redirect = enlist(self), earlier, redirect
        with torch.inference_mode(False):
            self.order = torch.zeros(1, device=device or "cpu")
            self.anchor: Tensor | None = torch.zeros_like(self.order, requires_grad=True)
        self._unread: dict[int, weakref.ref[Later]] = {}
        self._padded = config.num_local_experts, config.padded_rows
        self._padded_rows = config.num_local_experts * config.padded_rows

    # Called by autograd and by operators

    def run_dispatch(self, given: DispatchArguments, ticket: int = 0) -> Moved:
        """A fresh dispatch, or the result of the one behind the ticket: flat, and no views."""
        moved, plan, arrived = self._run(ticket, "dispatch", self.engine.dispatch, given)
        scales = None if moved.scales is None else moved.scales.flatten(0, -2)
        arrived = arrived._replace(source=arrived.source.flatten(), weights=arrived.weights.data)
        return Payload(moved.x.flatten(0, -2).data, scales), plan, arrived

    def run_redispatch(self, given: CachedArguments, ticket: int = 0) -> Payload:
        """A cached dispatch, or the result of the one behind the ticket."""
        moved = self._run(ticket, "cached dispatch", self.engine.redispatch, given)
        return Payload(moved.x.data, moved.scales)

    def run_combine(self, given: CombineArguments, ticket: int = 0) -> tuple[Tensor, Tensor | None]:
        """A combine, or the result of the one behind the ticket."""
        x, reduced = self._run(ticket, "combine", self.engine.combine, given)
        return x.data, None if reduced is None else reduced.data

    def _run(self, ticket: int, op: str, send: Callable[..., Any], given: Arguments) -> Any:
        """``send(given)``, or what comes of the call behind the ticket."""
        rest = self.queue.rest_of(ticket) if ticket else None
        if ticket and rest is None:
            return self.wait(partial(self.queue.take, ticket))
        self.check_open()
        return self.make(op, send, given) if rest is None else self.make(op, rest)

    # Called by the API

    def dispatch(self, request: DispatchRequest) -> Received:
        """A fresh dispatch."""
        payload, topk_idx, weights, spec, mode, _, in_place, when, _ = request
        assert topk_idx is not None
        if self.redirect is not None:  # what was asked is the caller's to change
            asked = topk_idx.clone(), None if weights is None else weights.detach().clone()
            topk_idx = self.redirect.picks(topk_idx)
            request = request._replace(topk_idx=topk_idx, asked=asked)
        given = DispatchArguments(payload, topk_idx, weights, spec, mode, in_place, **when.extras)
        tracked = not in_place and transforms.is_tracked(payload.x, weights)
        if tracked or when.later:
            return self._dispatch_later(request, given, tracked)
        self._wait_before(when, "dispatch", spec)
        moved = self.make("dispatch", self.engine.dispatch, given)
        return Received(fields=self._fresh_fields(request, *moved))

    def _dispatch_later(
        self, request: DispatchRequest, given: DispatchArguments, tracked: bool
    ) -> Received:
        payload, when, send = request.payload, request.when, self.engine.dispatch
        weights = transforms.detached(given.weights)
        sent = Payload(payload.x.detach(), payload.scales)
        still = DispatchArguments(sent, given.topk_idx, weights, *given[3:])
        ticket = self._begin(partial(send, still), payload.x.device, when, "dispatch", given.spec)
        ahead: dict[str, Any] | None = None

        def finish() -> dict[str, Any]:
            if not tracked:
                moved = self._run(ticket, "dispatch", send, still)
                return ahead or self._fresh_fields(request, *moved)
            call = Call(self, given.spec, ticket, mode=given.mode)
            moved = autograd.dispatch(call, payload, given.topk_idx, given.weights)
            scales = moved[0].scales
            by_columns = given.options is not None and given.options.scales_by_column
            if scales is not None and by_columns:
                scales = by_column(scales.view(*self._padded, scales.shape[1]))  # it has rows
                moved = Payload(moved[0].x, scales), *moved[1:]
            return self._fresh_fields(request, *moved)

        if when.in_two and not tracked:
            ahead = self._fresh_fields(request, *self.queue.held(ticket).ahead())
        received = self._begun(Received, finish, when, ticket, tracked)
        if ahead is not None:
            received.ahead = Received(fields=ahead)
        return received

    def redispatch(self, request: DispatchRequest) -> Received:
        """A cached dispatch: the rows, with the routing that the handle knows."""
        payload, _, _, _, mode, known, in_place, when, _ = request
        assert known is not None
        plan, spec, x, send = known.plan, known.spec, payload.x, self.engine.redispatch
        given = CachedArguments(payload, plan, spec, mode, in_place=in_place)
        tracked = not in_place and transforms.is_tracked(x)
        if not (tracked or when.later):
            self._wait_before(when, "cached dispatch", spec)
            moved = self.make("cached dispatch", send, given)
            return Received(fields=self._fields(x, moved, known))
        still = CachedArguments(Payload(x.detach(), payload.scales), *given[1:])
        ticket = self._begin(partial(send, still), x.device, when, "cached dispatch", spec)

        def finish() -> dict[str, Any]:
            if in_place:
                moved = self._run(ticket, "cached dispatch", send, still)
            else:
                moved = autograd.redispatch(Call(self, spec, ticket, plan, mode), payload)
            return self._fields(x, moved, known)

        return self._begun(Received, finish, when, ticket, tracked)

    def combine(self, request: CombineRequest) -> Combined:
        """A combine."""
        rows, handle, weights, at_owner, reduce, bias, out, in_place, when, lost = request
        plan, spec, send = handle.plan, handle.spec, self.engine.combine
        if lost is not None:
            lost.copy_(self._lost_weights(request))
        if at_owner is not None:
            weights = self._fetch_weights(at_owner, handle)
        if reduce is not None:
            reduce = in_arrival_order(reduce.float(), autograd.lasting(plan), spec)
        given = CombineArguments(
            rows, plan, spec, weights, reduce, bias, out, in_place=in_place, **when.extras
        )
        tracked = not in_place and transforms.is_tracked(rows, weights, reduce, *bias)
        if not (tracked or when.later):
            self._wait_before(when, "combine", spec)
            x, reduced = self.make("combine", send, given)
            return Combined(fields={"x": x, "topk_weights": reduced})
        still = CombineArguments(
            rows.detach(), plan, spec, transforms.detached(weights), transforms.detached(reduce),
            transforms.detached(bias), out, in_place=in_place, **when.extras,
        )  # fmt: skip
        ticket = self._begin(partial(send, still), rows.device, when, "combine", spec)

        def finish() -> dict[str, Any]:
            if not tracked:
                x, reduced = self._run(ticket, "combine", send, still)
            else:
                call = Call(self, spec, ticket, plan)
                x, reduced = autograd.combine(call, rows, weights, reduce, bias)
                if out is not None and not ticket:  # a compiler's operators write to nothing given
                    x = out.copy_(x)
            return {"x": x, "topk_weights": reduced}

        return self._begun(Combined, finish, when, ticket, tracked)

    def _lost_weights(self, request: CombineRequest) -> Tensor:
        """What the picks weigh that a combine's sums lack: ``[T]`` float32."""
        asked = request.handle.asked
        if self.redirect is None or asked is None:
            return torch.zeros(())
        ids, weights = asked
        if request.at_owner is not None:
            weights = request.at_owner
        elif request.weights is None:
            weights = None  # an unweighted combine
        return self.redirect.lost_weights(ids, weights)

    def rows_in_place(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised ``[num_rows, H]`` for a combine in place (:class:`InPlace`)."""
        self.check_open()
        make, hidden = self.engine.rows_in_place, self.config.hidden
        return self.make("empty_for_combine(), after call", make, num_rows, hidden, dtype)

    def come_to_rows_in_place(self, dtype: Any) -> None:
        """Of a rank that refuses to make rows: memory may grow where the others come to."""
        if self.engine.in_place:
            self.rows_in_place(0, dtype if dtype in FLOAT_DTYPES else torch.bfloat16)

    def _fetch_weights(self, topk_weights: Tensor, handle: Handle) -> Tensor:
        """Weights given at the owner, brought to the rows: float32 ``[rows]``, differentiable."""
        if self.low is not None:  # which brings them itself
            return topk_weights
        plan = autograd.lasting(handle.plan)
        merged = merge_weights(topk_weights, plan.first_pick)
        call = Call(self, handle.spec, plan=plan, raw=True)
        there = autograd.redispatch(call, Payload(merged, None)).x
        return weights_of_rows(there, plan.slots, plan.picks, handle.num_rows)

    # Now or later

    def _wait_before(self, when: When, op: str, spec: Spec) -> None:
        """Of a call that is made now. If this raises, the other ranks hear of it."""
        if when.after is None:
            return
        try:
            when.after.wait()
        except Exception as error:
            self.queue.run(self.tell_unmade, op, spec, error)
            raise
        self.check_open()

    def _begin(
        self, call: Callable[..., Any], device: torch.device, when: When, op: str, spec: Spec
    ) -> int:
        """Start a call and return its ticket; ``NO_TICKET`` of one now, without extras."""
        if when.later and not when.in_two:
            tell = partial(self.tell_unmade, op, spec)
            return self.queue.begin(self.watched(call, op), device, when.after, tell)
        self._wait_before(when, op, spec)
        if not when.extras:
            return NO_TICKET
        made = self.make(op, call)
        return self.queue.hold(made if when.in_two else lambda: made)

    def _begun(
        self,
        kind: type[Result],
        finish: Callable[[], dict[str, Any]],
        when: When,
        ticket: int,
        tracked: bool,
    ) -> Result:
        """The result of a call that was begun, or is made here if the caller waits now."""
        if when.later:
            finish = partial(self._finish_later, ticket, tracked, finish)
        result = kind(finish, self.queue.work_of(ticket, self.wait))
        if not when.later:
            result.wait()
            return result
        result.share()
        if not when.in_two:  # nothing to drop of those
            weakref.finalize(result, self.queue.drop, ticket)
            if tracked:
                self._unread[ticket] = weakref.ref(result)
        return result

    def _finish_later(
        self, ticket: int, tracked: bool, finish: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Finish a call begun earlier, wherever and whenever its result is read: autograd sees it
        if the call was ``tracked``, and behind such calls before it, as on all other ranks."""
        if not tracked:
            with torch.no_grad():
                return finish()
        for earlier in sorted(each for each in self._unread if each <= ticket):
            unread = self._unread.pop(earlier, None)
            result = None if unread is None or earlier == ticket else unread()
            if result is not None:
                with suppress(Exception):  # who reads it gets it
                    result.wait()
        with torch.inference_mode(False), torch.enable_grad():
            return finish()

    # Results

    def _fresh_fields(
        self, request: DispatchRequest, received: Payload, plan: Plan, arrived: Arrived
    ) -> dict[str, Any]:
        spec, ids = request.spec, request.topk_idx
        assert ids is not None
        padded = spec.layout is Layout.EXPERT_PADDED
        handle = Handle(
            owner=self.number,
            rank=self.config.rank,
            spec=spec,
            num_tokens=ids.shape[0],
            num_rows=self._padded_rows if padded else received.x.shape[0],
            has_weights=request.weights is not None,
            num_ranks=self.config.world_size,
            index_dtype=ids.dtype,
            plan=plan,
            arrived=arrived,
            asked=request.asked,
        )
        return self._fields(request.payload.x, received, handle)

    def _fields(self, sent: Tensor, received: Payload, handle: Handle) -> dict[str, Any]:
        shape = self._padded if handle.spec.layout is Layout.EXPERT_PADDED else (handle.num_rows,)
        fields = received_fields(received.x, received.scales, handle, shape)
        if received.scales is not None:
            fields["_dequantize"] = dequantizer(self, sent, handle.plan, handle.spec)
        return fields
