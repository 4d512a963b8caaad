"""Custom operators: dispatch and combine as ``torch.compile`` and dispatch modes (selective
checkpointing, say) see them; ``autograd.py`` has their derivatives. An operator, or a graph of
autograd, knows its object by number: operators take tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments, Engine
from tokenyard.engines.plans import num_result_rows
from tokenyard.errors import NotSupported
from tokenyard.formats import row_of
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.rows import Payload, RowFormat
from tokenyard.transforms import forward_level, is_followed
from tokenyard.types import Layout, Quantize

_PLAN, _ARRIVED = len(Plan._fields), len(Arrived._fields)
_NO_TANGENTS = (
    "compiled calls move no tangents (forward-mode AD): make those calls outside of torch.compile"
)
_LIBRARY = torch.library.Library("tokenyard", "FRAGMENT")

Moved = tuple[Payload, Plan, Arrived]
"""What a fresh dispatch brings."""


class Caller(Protocol):
    """Makes the calls of one object (``calls.py``), for autograd and for operators."""

    number: int
    order: Tensor
    """The mark of the last call that a compiled graph made."""
    anchor: Tensor | None
    """What calls of a compiled graph have a gradient of: the mark of their last backward."""

    @property
    def engine(self) -> Engine: ...

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        """Tell the other ranks of an error in this rank's arguments; returns the error to raise."""
        ...

    def run_dispatch(self, given: DispatchArguments, ticket: int = 0) -> Moved:
        """``ticket``: of a call that was begun before, of which the result is wanted."""
        ...

    def run_redispatch(self, given: CachedArguments, ticket: int = 0) -> Payload: ...

    def run_combine(
        self, given: CombineArguments, ticket: int = 0
    ) -> tuple[Tensor, Tensor | None]: ...


_objects: WeakValueDictionary[int, Caller] = WeakValueDictionary()
_unused = count(1)
_recovered: set[int] = set()
"""Objects' numbers before they recovered."""


def enlist(calls: Caller) -> int:
    """A number by which ``calls`` is found while it lives."""
    number = next(_unused)
    _objects[number] = calls
    return number


def owner_of(number: int) -> Caller:
    """The object behind ``number``; a graph may outlive it."""
    if number in _recovered:
        raise RuntimeError(
            "this graph's forward was made before recover(), in an epoch whose ranks and rows are "
            "gone: make the forward again"
        )
    try:
        return _objects[number]
    except KeyError:
        raise RuntimeError(
            "the ExpertParallel of this graph is closed and gone: keep it until after the backward"
        ) from None


def retire(number: int) -> None:
    """The object has recovered, and is found by another number from now on."""
    _recovered.add(number)


Below = Callable[..., Any]
"""``below(operator, *arguments)`` calls an operator behind autograd."""


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator. ``fake``: makes its results, of tensors without data, by shape and dtype."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, torch._disable_dynamo(kernel), "CompositeExplicitAutograd")  # pyright: ignore
    torch.library.register_fake(f"tokenyard::{name}", fake, lib=_LIBRARY)  # pyright: ignore
    return getattr(torch.ops.tokenyard, name).default


def define_call(
    name: str, arguments: str, results: int, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """An operator that makes a call: of so many ``results``, and of the call's mark.

    All ranks make the same calls in the same order. But a compiler sees tensors only: it may swap
    two calls of which none needs the other's results, by sizes that differ between ranks, or leave
    one out whose results are empty here. So each takes the mark of the call before as its first
    argument, and :class:`Operators` keeps the last one in ``Caller.order``, which lasts. Backwards
    cannot, so the last mark of each is the gradient of ``Caller.anchor``, which graphs return.
    """

    def marked(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(order: Tensor, anchor: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
            return *make(*given), order.new_zeros(order.shape)

        return call

    made = ", ".join(["Tensor"] * (results + 1))
    schema = f"{name}(Tensor order, Tensor? anchor, {arguments}) -> ({made})"
    return define(schema, marked(kernel), marked(fake))


def _are_followed(arguments: Sequence[Any]) -> bool:
    """Whether a derivative by a tensor among ``arguments``, or in a list of them, is wanted."""
    lists: list[list[Any]] = [given for given in arguments if isinstance(given, list)]
    return is_followed(*arguments, *chain(*lists))


def track(op: Any, function: Callable[..., Any]) -> None:
    """Let autograd take ``function(below, *arguments)`` for ``op(*arguments)``."""

    def tracked(keyset: Any, *arguments: Any) -> Any:
        def below(op: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)  # pyright: ignore

        if forward_level() < 0 and not _are_followed(arguments[2:]):
            return below(op, *arguments)  # once more traced, it leaves the same operators
        return function(below, *arguments)

    _LIBRARY.impl(op, torch._disable_dynamo(tracked), "Autograd", with_keyset=True)  # pyright: ignore


def _called(number: int, op: int, exact: bool = True) -> Caller:
    """The object of an operator; tensors of a compiled graph come without their tangents."""
    calls = owner_of(number)
    if forward_level() >= 0:
        raise calls.refuse(op, exact, NotSupported(_NO_TANGENTS))
    return calls


def _numbers(spec: Spec) -> list[int]:
    """A ``Spec`` as an operator takes it: ``int[]``."""
    capacity = -1 if spec.capacity is None else spec.capacity
    return [spec.layout.value, int(spec.exact), spec.expert_alignment, capacity]


def spec_of(numbers: Sequence[int]) -> Spec:
    layout, exact, alignment, capacity = numbers[:4]
    bound = None if capacity < 0 else capacity
    return Spec(
        layout=Layout(layout), exact=bool(exact), expert_alignment=alignment, capacity=bound
    )


def mode_of(number: int = 0) -> Quantize | None:
    return Quantize(number) if number else None


def _new_size() -> Any:
    """A size that only the data decides."""
    return cast("Any", torch.library.get_ctx()).new_dynamic_size()


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns tensors: an empty one where there is none."""
    return torch.empty(0, device=like.device) if tensor is None else tensor


def joined(moved: Payload, plan: Plan, arrived: Arrived) -> tuple[Tensor, ...]:
    """What an operator returns of a dispatch."""
    return moved.x, or_empty(moved.scales, moved.x), *plan, *arrived


def _apart(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of results that share memory (empty ones, static tables): operators' may not."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]  # pyright: ignore[reportPrivateUsage]
    return tuple(
        tensor.clone() if not tensor.numel() or storages[at] in storages[:at] else tensor
        for at, tensor in enumerate(tensors)
    )


def _dispatch(x: Tensor, scales: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    topk_idx, weights, owner, numbers, quantize, ticket = given
    spec, mode = spec_of(numbers), mode_of(quantize)
    calls = _called(owner, DISPATCH, spec.exact)
    call = DispatchArguments(Payload(x, scales), topk_idx, weights, spec, mode)
    return _apart(joined(*calls.run_dispatch(call, ticket)))


def _dispatch_shapes(x: Tensor, scales: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    topk_idx, weights, owner, numbers, quantize, _ = given
    wanted, engine = spec_of(numbers), owner_of(owner).engine
    config = engine.config
    size, top, local = config.world_size, config.num_topk, config.num_local_experts
    route, route_dtype, arrived = engine.route_shapes(topk_idx.shape[0], wanted, _new_size)
    grows = wanted.exact and wanted.layout is Layout.EXPERT_MAJOR
    rows = _new_size() if grows else num_result_rows(wanted, config, None, arrived)
    flat, placed = wanted.layout is Layout.FLAT, wanted.placed
    width = min(top, local) if not flat else 1

    def ints(*shape: Any) -> Tensor:
        return x.new_empty(shape, dtype=torch.int64)

    def words(*shape: Any) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    def table(*shape: Any) -> Tensor:
        return ints(*shape) if placed else ints(0)

    splits = 2 * size + 1 + engine.hop_counts
    splits += config.matrix_ranks**2 + local if wanted.exact else 0
    sent = row_of(Payload(x, scales), mode_of(quantize))
    weight_shape = (0,) if weights is None else (rows, top) if flat else (rows,)
    return (
        *_rows_like(x, sent, rows),
        torch.empty(splits, dtype=torch.int64, device="cpu"),
        x.new_empty(route, dtype=route_dtype),
        ints(topk_idx.shape[0] if engine.returns_width else 0, engine.returns_width),
        table(arrived, width),
        table(arrived, width),
        table(rows),
        ints(topk_idx.shape[0], top),
        ints(rows, top) if flat else words(0),
        x.new_empty(weight_shape, dtype=torch.float32),
        ints(rows),
        words(local),
        words(local + 1) if wanted.layout is Layout.EXPERT_MAJOR else words(0),
        words(local, size, 2) if wanted.layout is Layout.EXPERT_PADDED else words(0),
        words(1) if wanted.capacity is not None else words(0),
    )


def _rows_like(x: Tensor, sent: RowFormat, rows: Any) -> tuple[Tensor, Tensor]:
    """Data and scales of ``rows`` rows."""
    scales = (rows, sent.num_scales) if sent.scale_words else (0,)
    return (
        x.new_empty((rows, sent.hidden), dtype=sent.dtype),
        x.new_empty(scales, dtype=sent.scale_dtype),
    )


dispatch_op = define_call(
    "dispatch",
    "Tensor x, Tensor? scales, Tensor topk_idx, Tensor? weights, int owner, int[] spec, "
    "int quantize, int ticket",
    2 + _PLAN + _ARRIVED,
    _dispatch,
    _dispatch_shapes,
)


def _redispatch(x: Tensor, scales: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    plan, owner, numbers, raw, ticket = given
    calls, mode = _called(owner, CACHED), mode_of(*numbers[4:])
    call = CachedArguments(Payload(x, scales), Plan(*plan), spec_of(numbers), mode, raw)
    moved = calls.run_redispatch(call, ticket)
    return moved.x, or_empty(moved.scales, x)


def _redispatch_shapes(x: Tensor, scales: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    plan, _, numbers, raw, _ = given
    known, mode = Plan(*plan), mode_of(*numbers[4:])
    place = known.slots if raw else known.gather
    rows = place.shape[0] if spec_of(numbers).placed else _new_size()
    return _rows_like(x, row_of(Payload(x, scales), mode), rows)


redispatch_op = define_call(
    "redispatch",
    "Tensor x, Tensor? scales, Tensor[] plan, int owner, int[] spec, bool raw, int ticket",
    2,
    _redispatch,
    _redispatch_shapes,
)


def _combine(rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    weights, reduce_weights, bias, plan, owner, numbers, raw, ticket = given
    calls = _called(owner, COMBINE)
    moved = rows, Plan(*plan), spec_of(numbers), weights, reduce_weights, tuple(bias)
    x, reduced = calls.run_combine(CombineArguments(*moved, raw=raw), ticket)
    return x, or_empty(reduced, rows)


def _combine_shapes(rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    _, reduce_weights, _, plan, *_ = given
    num_tokens = Plan(*plan).first_pick.shape[0]
    reduced = (0,) if reduce_weights is None else (num_tokens, reduce_weights.shape[1])
    return rows.new_empty((num_tokens, rows.shape[1])), rows.new_empty(reduced, dtype=torch.float32)


combine_op = define_call(
    "combine",
    "Tensor rows, Tensor? weights, Tensor? reduce_weights, Tensor[] bias, Tensor[] plan, "
    "int owner, int[] spec, bool raw, int ticket",
    2,
    _combine,
    _combine_shapes,
)


class Operators:
    """Makes calls as operators (:class:`Caller`), in a compiled graph each behind the mark of the
    one before (:func:`define_call`).

    A forward writes its marks to ``order``. Backwards only read it: autograd refuses a tensor that
    one graph has kept and another has written to. They begin with the forward's last mark and hand
    theirs on in an attribute of it, which lasts as long as the graph is traced.

    ``anchor``: of a forward (:func:`define_call`); ``below``: behind autograd; neither: of a
    backward. ``mark`` is that of the last call of the latter two.
    """

    mark: Tensor

    def __init__(
        self, number: int, order: Tensor, anchor: Tensor | None = None, below: Below | None = None
    ) -> None:
        self.number, self.order, self.anchor, self._below = number, order, anchor, below

    @property
    def engine(self) -> Engine:
        return owner_of(self.number).engine

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        return owner_of(self.number).refuse(op, exact, error)

    def _call(self, op: Any, *arguments: Any) -> Any:
        """The operator's results but for the mark."""
        order: Any = self.order
        if self._below is not None:
            *made, self.mark = self._below(op, order, None, *arguments)
        elif self.anchor is None:
            *made, self.mark = op(getattr(order, "last_mark", order), None, *arguments)
            if type(order) is not Tensor:  # of a graph that is traced
                order.last_mark = self.mark
        else:
            *made, mark = op(order, self.anchor_of(*arguments), *arguments)
            if torch.compiler.is_compiling():
                order.copy_(mark)
        return made

    def anchor_of(self, *arguments: Any) -> Tensor | None:
        """What a forward with these has a gradient of, if there is a backward to be anchored."""
        return self.anchor if torch.compiler.is_compiling() and _are_followed(arguments) else None

    def run_dispatch(self, given: DispatchArguments, ticket: int = 0) -> Moved:
        mode = 0 if given.mode is None else given.mode.value
        how = self.number, _numbers(given.spec), mode, ticket
        tensors = *given.payload, given.topk_idx, given.weights
        x, scales, *rest = self._call(dispatch_op, *tensors, *how)
        moved = Payload(x, scales if scales.dim() == 2 else None)
        return moved, Plan(*rest[:_PLAN]), Arrived(*rest[_PLAN:])

    def run_redispatch(self, given: CachedArguments, ticket: int = 0) -> Payload:
        how = *self.along(given.plan, given.spec, given.mode), given.raw, ticket
        x, scales = self._call(redispatch_op, *given.payload, *how)
        return Payload(x, scales if scales.dim() == 2 else None)

    def run_combine(self, given: CombineArguments, ticket: int = 0) -> tuple[Tensor, Tensor | None]:
        how = *self.along(given.plan, given.spec), given.raw, ticket
        tensors = given.rows, given.weights, given.reduce_weights, list(given.bias)
        x, reduced = self._call(combine_op, *tensors, *how)
        return x, None if given.reduce_weights is None else reduced

    def along(
        self, plan: Plan, spec: Spec, mode: Quantize | None = None
    ) -> tuple[list[Tensor], int, list[int]]:
        """The plan, the object, and the ``Spec`` with how rows are cast behind it, if they are."""
        cast = [] if mode is None else [mode.value]
        return list(plan), self.number, [*_numbers(spec), *cast]
