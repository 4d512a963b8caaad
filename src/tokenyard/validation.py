"""What a caller asks of a call, checked: arguments in, requests out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import checks, transforms
from tokenyard.arguments import check_after, check_flag
from tokenyard.call_queue import Waitable, When
from tokenyard.calls import Calls, CombineRequest, DispatchRequest
from tokenyard.config import Config
from tokenyard.dense import waited
from tokenyard.engines.base import CallOptions
from tokenyard.handle import Handle, Spec
from tokenyard.limits import check_result
from tokenyard.results import Later
from tokenyard.rows import Payload, flat_rows
from tokenyard.types import Quantize

_NOW = When(later=False, after=None)
"""Of a call that nobody asked more of."""
MOST_KEPT = 256
"""Calls that are known to be good: in training all are alike, in serving as many as batch sizes."""
_NO_TANGENTS = (
    "engine 'low_latency' moves none: engines 'collective', 'nvlink' and 'twolevel' do; or "
    "detach() it"
)


class _Raises(NamedTuple):
    """In place of an ``after`` that has raised: the call raises it, and tells the other ranks."""

    error: Exception

    def wait(self) -> None:
        raise self.error


class Validation:
    """Checks what is asked of the calls of one object; raises ``ValueError`` or ``NotSupported``.
    ``device``: that calls work on; None: host and CUDA tensors alike. ``most_bytes``: that a result
    may take whose size is known ahead."""

    def __init__(self, calls: Calls, device: torch.device | None, most_bytes: int) -> None:
        self._calls, self._device, self._most_bytes = calls, device, most_bytes
        self._config: Config = calls.config
        self._good: dict[Any, Spec] = {}

    def handle(self, handle: Any) -> Handle:
        """A handle of this object, on this rank."""
        calls = self._calls
        return checks.check_handle(handle, calls.number, self._config.rank, calls.earlier)

    def begin(self, handle: Any) -> None:
        """Raise if the object makes no calls any more. While a compiler traces, make the tensors of
        a handle from outside of its graph: the one break of the graph for it."""
        self._calls.check_open()
        if torch.compiler.is_compiling() and handle is not None:
            plan: Any = getattr(handle, "plan", None)
            if not getattr(plan, "whole", True):
                plan.make_whole()

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Handle | None,
        shape: tuple[Any, Any, Any, Any],
        quantize: Quantize | None,
        in_place: bool,
        when: When,
        options: CallOptions | None,
    ) -> DispatchRequest:
        """``shape``: layout, exact, expert_alignment and capacity."""
        layout, exact, expert_alignment, capacity = shape
        config, facts, known, weights = self._config, None, None, None
        if handle is not None:
            known = self.handle(handle)
        if in_place is False and options is None:
            tokens = None if known is None else known.num_tokens
            facts, spec = self._known((x, topk_idx, topk_weights), (*shape, quantize, tokens))
            if spec is not None:
                spec, payload = spec if known is None else known.spec, Payload(x, None)
                return DispatchRequest(
                    payload, topk_idx, topk_weights, spec, quantize, known, False, when
                )
        x, topk_idx, topk_weights = map(waited, (x, topk_idx, topk_weights))
        payload = checks.check_payload(x, config, quantize)
        self._check_device(payload.x)
        if known is not None:
            routing = {"topk_idx": topk_idx, "topk_weights": topk_weights}
            routing |= {"layout": layout, "capacity": capacity}
            checks.check_cached(known, payload, routing, exact, expert_alignment)
            spec = known.spec
        else:
            tokens, device = payload.x.shape[0], payload.x.device
            weights = checks.check_picks(topk_idx, topk_weights, tokens, device, config)
            spec = checks.check_spec(layout, exact, expert_alignment, capacity)
            self._check_sizes(payload, quantize, spec)
        check_flag("in_place", in_place)
        if in_place:
            engine, most = self._calls.engine, self._most_bytes
            checks.check_in_place(engine, spec, payload, topk_weights, config, most)
        request = DispatchRequest(payload, topk_idx, weights, spec, quantize, known, in_place, when)
        self._check_engine(request, options)
        if facts is not None and weights is topk_weights:
            self._keep(facts, spec)
        return request

    def _known(
        self, tensors: tuple[Any, Any, Any], options: tuple[Any, ...]
    ) -> tuple[Any, Spec | None]:
        """What :func:`checks.facts` tells of a call, if more does not matter, and the ``Spec`` of
        a good one that was the same in all of that."""
        if torch.compiler.is_compiling() or transforms.forward_level() >= 0 or self._calls.low:
            return None, None
        facts = checks.facts(tensors, options)
        try:
            return facts, self._good.get(facts)
        except TypeError:  # an option cannot be compared
            return None, None

    def _keep(self, facts: Any, spec: Spec) -> None:
        if len(self._good) >= MOST_KEPT:
            self._good.clear()
        self._good[facts] = spec

    def checked_dispatch(
        self,
        payload: Payload,
        topk_idx: Tensor | None,
        weights: Tensor | None,
        spec: Spec,
        known: Handle | None,
    ) -> DispatchRequest:
        """One whose arguments by themselves are good, as the caller has checked: what is left."""
        transforms.check(False)
        if known is None:
            self._check_sizes(payload, None, spec)
        request = DispatchRequest(payload, topk_idx, weights, spec, None, known, False, _NOW)
        self._check_engine(request, None)
        return request

    def _check_sizes(self, payload: Payload, quantize: Quantize | None, spec: Spec) -> None:
        """Of a fresh dispatch: its tokens, and what it makes of them."""
        config, by_most = self._config, self._calls.engine.counts_by_most
        checks.check_bound(payload.x.shape[0], spec, config)
        check_result(payload, quantize, spec, config, by_most, self._most_bytes)

    def combine(
        self,
        x: Any,
        handle: Handle,
        weighting: tuple[bool, Any, Any],
        bias: Any,
        out: Any,
        in_place: bool,
        when: When,
        options: CallOptions | None,
    ) -> CombineRequest:
        """``weighting``: weighted, topk_weights and reduce_weights."""
        weighted, topk_weights, reduce_weights = weighting
        check_flag("in_place", in_place)
        known = self.handle(handle)
        facts = None
        if not in_place and topk_weights is reduce_weights is bias is out is options is None:
            like = known.plan.returns.device, known.spec.layout, known.num_rows, known.has_weights
            facts, spec = self._known((x, None, None), (*like, weighted))
            if spec is not None:
                carried = known.arrived.weights if weighted else None
                rows = flat_rows(x)
                return CombineRequest(rows, known, carried, None, None, (), None, False, when)
        x, out, bias, topk_weights, reduce_weights = map(waited, (x, out, bias, *weighting[1:]))
        weighting = weighted, topk_weights, reduce_weights
        rows = checks.check_rows(x, known, self._config)
        at_owner = checks.check_weighting(known, *weighting, self._config)
        terms = checks.check_bias_and_out(bias, out, rows, known.num_tokens)
        carried = known.arrived.weights if weighted and at_owner is None else None
        checks.check_no_grad_into(out, rows, at_owner, carried, reduce_weights, *terms)
        if in_place:
            self.combine_in_place(known, reduce_weights, (rows, *terms), rows.dtype)
        lost: Tensor | None = None
        if self._calls.low is not None:
            transforms.check_tangents((rows, at_owner, carried, *terms), _NO_TANGENTS)
            self._calls.low.check_combine(rows, known.spec)
        if options is not None:
            options.check(self._config, rows.device, known.num_tokens)
            lost = options.lost_weights if self._calls.low is None else None
        if facts is not None:
            self._keep(facts, known.spec)
        return CombineRequest(
            rows, known, carried, at_owner, reduce_weights, terms, out, in_place, when, lost
        )

    def combine_in_place(
        self,
        handle: Handle,
        reduce_weights: Tensor | None,
        given: tuple[Tensor, ...],
        dtype: torch.dtype,
    ) -> None:
        """Whether rows of ``dtype`` can. ``given``: all tensors of the call."""
        engine, limits = self._calls.engine, (self._config, self._most_bytes)
        checks.check_combine_in_place(engine, handle, reduce_weights, given, dtype, *limits)

    def when(
        self,
        async_op: bool,
        after: Waitable | None,
        return_hook: bool,
        options: CallOptions | None,
        derives: bool,
    ) -> When:
        """When and how to make a call. ``derives``: it needs its arguments now, so wait here."""
        if async_op is not False or return_hook is not False:
            check_flag("async_op", async_op)
            check_flag("return_hook", return_hook)
        later = async_op or return_hook
        transforms.check(later)
        if not later and after is None and options is None:
            return _NOW
        check_after(after)
        if isinstance(after, Later):
            after = after.work()
        if after is not None and derives:
            try:
                after.wait()
                after = None
            except Exception as error:
                after = _Raises(error)
        if options is not None and not isinstance(options, CallOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"options ({options!r}) must be a tokenyard.CallOptions or None")
        if options is not None and options.need_low_latency:
            self._calls.need_low("takes no options of a call but lost_weights")
        if self._calls.low is None:
            return When(later, after)
        if async_op and return_hook:
            raise ValueError(
                "async_op and return_hook exclude each other with engine 'low_latency': give one "
                "of them"
            )
        extras: dict[str, Any] = {} if options is None else {"options": options}
        return When(later, after, return_hook, extras | ({"in_two": True} if return_hook else {}))

    def _check_engine(self, request: DispatchRequest, options: CallOptions | None) -> None:
        """Raise if tangents cannot be moved, or the engine for decoding cannot do it."""
        payload, low = request.payload, self._calls.low
        if request.mode is not None or payload.scales is not None:
            transforms.check_tangents(
                payload, "quantised rows carry none: dispatch plain rows, or x.detach()"
            )
        if low is not None:
            transforms.check_tangents((*payload, request.weights), _NO_TANGENTS)
            by_column = options is not None and options.scales_by_column
            cached = request.known is not None
            low.check_dispatch(payload, request.spec, request.mode, cached, by_column)
        if options is not None:
            options.check(self._config, payload.x.device, None)

    def _check_device(self, x: Tensor) -> None:
        if self._device is None and x.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"x is on {x.device}, but rows travel from host or CUDA memory: move x to one of "
                f"them"
            )
        if self._device is not None and x.device != self._device:
            raise ValueError(
                f"x is on {x.device}, but this object works on {self._device}: move x there, or "
                f"pass device={str(x.device)!r} to ExpertParallel"
            )
