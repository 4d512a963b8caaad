"""Checks of what a caller passes. Messages name the argument, the limit, the value, the remedy."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.arguments import LARGEST, check_flag, check_whole
from tokenyard.config import Config
from tokenyard.dense import check_dense
from tokenyard.engines.base import Engine
from tokenyard.errors import NotSupported
from tokenyard.formats import SCALE_DTYPES, given
from tokenyard.handle import Handle, Spec
from tokenyard.rows import Payload, flat_rows, overlaps_itself
from tokenyard.transforms import is_followed
from tokenyard.types import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    QUANTIZED_DTYPES,
    Layout,
    Quantize,
    Quantized,
)


def check_in_place(
    engine: Engine, spec: Spec, payload: Payload, topk_weights: Any, config: Config, most_bytes: int
) -> None:
    """Whether rows can be left in symmetric memory, of which they may take ``most_bytes``."""
    _check_view(engine, spec, payload.x.shape[0], payload.x.dtype, config, most_bytes)
    _check_no_grad_in_place(payload.x, topk_weights)


def check_combine_in_place(
    engine: Engine,
    handle: Handle,
    reduce_weights: Any,
    given: tuple[Tensor, ...],
    dtype: torch.dtype,
    config: Config,
    most_bytes: int,
) -> None:
    """The same of rows of ``dtype`` to combine. ``given``: all tensors of the call."""
    _check_view(engine, handle.spec, handle.num_tokens, dtype, config, most_bytes)
    if reduce_weights is not None:
        raise NotSupported(
            f"engine {engine.name!r} reduces no weights in place: use in_place=False, or combine "
            f"without reduce_weights"
        )
    if handle.num_rows > config.padded_rows:
        raise ValueError(
            f"{handle.num_rows} rows came, but in_place=True has room for {config.padded_rows}: a "
            f"rank has more tokens than max_tokens_per_rank={config.max_tokens_per_rank}; make it "
            f"larger, split the batch, or use in_place=False"
        )
    _check_no_grad_in_place(*given)


def _check_view(
    engine: Engine, spec: Spec, num_tokens: int, dtype: torch.dtype, config: Config, most_bytes: int
) -> None:
    """Whether rows of a call fit into a view of symmetric memory."""
    if not engine.in_place:
        raise NotSupported(
            f"engine {engine.name!r} has no symmetric memory for in_place=True; engines 'nvlink' "
            f"and 'twolevel' do"
        )
    if spec.layout is not Layout.FLAT:
        raise NotSupported(
            f"engine {engine.name!r} has only Layout.FLAT in place, not {spec.layout.name}: use "
            f"in_place=False, which any engine can"
        )
    if num_tokens > config.max_tokens_per_rank:
        raise ValueError(
            f"{num_tokens} tokens, but in_place=True has room for max_tokens_per_rank="
            f"{config.max_tokens_per_rank}; make it larger, split the batch, or use in_place=False"
        )
    num_bytes = config.padded_rows * config.hidden * dtype.itemsize
    if num_bytes > most_bytes:
        raise ValueError(
            f"max_tokens_per_rank ({config.max_tokens_per_rank}) x {config.world_size} ranks takes "
            f"{num_bytes} bytes for in_place=True, but it may take {most_bytes} (half of the "
            "rank's share of the memory): make it smaller, or use in_place=False"
        )


def _check_no_grad_in_place(*given: Any) -> None:
    if is_followed(*given):
        raise ValueError(
            "in_place=True cannot be differentiated: the rows would be gone in the backward; use "
            "in_place=False"
        )


class _Shape(NamedTuple):
    """A shape as errors tell it: in symbols, in numbers as far as known, and in words."""

    symbols: str
    sizes: tuple[Any, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.symbols} = [{', '.join(map(str, self.sizes))}] ({self.meaning})"


def _tensor(name: str, value: Any, shape: _Shape) -> Tensor:
    """A dense tensor with as many dimensions as ``shape``."""
    check_dense(name, value)
    if value.dim() != len(shape.sizes):
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but must have {len(shape.sizes)} dimensions: "
            f"{shape}"
        )
    return value


def _dense(
    name: str,
    value: Any,
    shape: _Shape,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    hint: str = "",
) -> Tensor:
    """A dense tensor of exactly this shape, of one of ``dtypes``, on ``device``."""
    tensor = _tensor(name, value, shape)
    _dtype(name, tensor, dtypes, hint)
    if tuple(tensor.shape) != shape.sizes:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must be {shape}")
    _device(name, tensor, device)
    return tensor


def _dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], hint: str = "") -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ValueError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, but must be one of "
            f"{names}{hint}"
        )


def _device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but must be on {device}: move it with "
            f".to({str(device)!r})"
        )


def facts(tensors: tuple[Any, Any, Any], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that checks look at of plain tensors (or None), and of options that are numbers or words,
    with types, as 1, True and 1.0 are equal. None: other tensors, which have to be looked at."""
    known: list[Any] = [options, *map(type, options)]
    for tensor in tensors:
        if tensor is None:
            known.append(None)
        elif type(tensor) is Tensor and not tensor.is_nested:
            known += tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.is_neg()
        else:
            return None
    return tuple(known)


def check_payload(x: Any, config: Config, quantize: Any) -> Payload:
    """The rows to dispatch: ``[T, hidden]``, plain or quantised by the caller."""
    if quantize is not None and not isinstance(quantize, Quantize):
        raise ValueError(f"quantize ({quantize!r}) must be a tokenyard.Quantize or None")
    if isinstance(x, Quantized):
        return _check_quantized(x, config, quantize)
    _tensor("x", x, _Shape("[T, H]", ("T", config.hidden), "tokens, hidden"))
    hint = "; wrap quantised data and its scales in tokenyard.Quantized(data, scales)"
    _dtype("x", x, FLOAT_DTYPES, hint)
    _check_hidden("x", x, config)
    return Payload(x, None)


def _check_hidden(name: str, rows: Tensor, config: Config) -> None:
    if rows.shape[1] != config.hidden:
        raise ValueError(
            f"{name} has {rows.shape[1]} channels (shape {list(rows.shape)}), but this object was "
            f"made with hidden={config.hidden}, for [T, H] = [T, {config.hidden}]: make one "
            f"ExpertParallel per hidden size"
        )


def _check_quantized(x: Quantized, config: Config, quantize: Quantize | None) -> Payload:
    if quantize is not None:
        raise ValueError(
            f"quantize={quantize} casts plain rows, but x is already Quantized: leave quantize out"
        )
    data = _tensor("x.data", x.data, _Shape("[T, H]", ("T", config.hidden), "tokens, hidden"))
    shape = _Shape("[T, S]", (data.shape[0], "S"), "rows of x.data, scales of each")
    scales = _tensor("x.scales", x.scales, shape)
    _dtype("x.data", data, QUANTIZED_DTYPES)
    _dtype("x.scales", scales, SCALE_DTYPES)
    _check_hidden("x.data", data, config)
    if scales.shape[0] != data.shape[0] or scales.shape[1] == 0:
        raise ValueError(
            f"x.scales has shape {list(scales.shape)}, but must be [T, S] = [{data.shape[0]}, S] "
            f"with S >= 1 (one row per token)"
        )
    _device("x.scales", scales, data.device)
    return given(data, scales)


def check_picks(
    topk_idx: Any, topk_weights: Any, num_tokens: int, device: torch.device, config: Config
) -> Tensor | None:
    """Routing of a fresh dispatch; returns float32 weights. Engines check values of ids."""
    shape = _Shape("[T, K]", (num_tokens, config.num_topk), "tokens of x, num_topk")
    if topk_idx is None:
        raise ValueError(
            f"topk_idx is missing: give {shape} expert ids, or handle= of an earlier dispatch"
        )
    _dense("topk_idx", topk_idx, shape, INDEX_DTYPES, device)
    if topk_weights is None:
        return None
    _dense("topk_weights", topk_weights, shape, FLOAT_DTYPES, device, ": give .float()")
    return topk_weights.float()


def is_cast(weights: Any) -> bool:
    """Whether weights are not the float32 that calls work with."""
    return isinstance(weights, Tensor) and weights.dtype != torch.float32


def is_copied(rows: Any) -> bool:
    """Whether :func:`check_rows` has to copy rows."""
    return isinstance(rows, Tensor) and rows.dim() == 3 and not rows.is_contiguous()


def check_spec(layout: Any, exact: Any, expert_alignment: Any, capacity: Any) -> Spec:
    """The wanted layout and shapes."""
    layout = Layout.FLAT if layout is None else layout
    if not isinstance(layout, Layout):
        raise ValueError(f"layout ({layout!r}) must be a tokenyard.Layout")
    check_flag("exact", exact)
    expert_alignment = check_whole("expert_alignment", expert_alignment, 1, LARGEST)
    if expert_alignment > 1 and layout is not Layout.EXPERT_MAJOR:
        raise ValueError(
            f"expert_alignment={expert_alignment} pads the blocks of EXPERT_MAJOR, but the layout "
            f"is {layout.name}"
        )
    if capacity is not None:
        if exact or layout is not Layout.EXPERT_MAJOR:
            raise ValueError(
                f"capacity={capacity} bounds static EXPERT_MAJOR rows: it needs exact=False and "
                f"Layout.EXPERT_MAJOR"
            )
        capacity = check_whole("capacity", capacity, 0, LARGEST, ", of rows")
    make = Spec if torch.compiler.is_compiling() else _spec  # Dynamo warns of caches
    return make(layout=layout, exact=exact, expert_alignment=expert_alignment, capacity=capacity)


@lru_cache(maxsize=64)
def _spec(layout: Layout, exact: bool, expert_alignment: int, capacity: int | None) -> Spec:
    """Kept, as most calls ask for what the last one did."""
    return Spec(layout=layout, exact=exact, expert_alignment=expert_alignment, capacity=capacity)


def check_bound(num_tokens: int, spec: Spec, config: Config) -> None:
    """Static shapes and ``EXPERT_PADDED`` hold at most M tokens per rank."""
    static = not spec.exact or spec.layout is Layout.EXPERT_PADDED
    if static and num_tokens > config.max_tokens_per_rank:
        what = "static shapes were" if not spec.exact else "EXPERT_PADDED was"
        raise ValueError(
            f"{num_tokens} tokens, but {what} made for "
            f"max_tokens_per_rank={config.max_tokens_per_rank}; "
            "make it larger, split the batch, or use exact=True with Layout.FLAT or EXPERT_MAJOR"
        )


def check_row_dtype(dtype: Any) -> None:
    """The dtype of rows to combine."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"dtype ({dtype!r}) must be torch.bfloat16, torch.float16 or torch.float32"
        )


def check_handle(handle: Any, owner: int, rank: int, earlier: Collection[int] = ()) -> Handle:
    """A handle of this object on this rank; it had ``earlier`` numbers before it recovered."""
    if not isinstance(handle, Handle):
        raise ValueError(f"handle must be the .handle of a dispatch, not {type(handle).__name__}")
    if handle.owner in earlier:
        raise ValueError("this handle is from before recover(): its rows are gone, dispatch again")
    if (handle.owner, handle.rank) != (owner, rank):
        whose = "another ExpertParallel" if handle.owner != owner else f"rank {handle.rank}"
        raise ValueError(
            f"this handle belongs to {whose}: combine with the object that dispatched, on its rank"
        )
    return handle


def check_cached(
    handle: Handle, payload: Payload, routing: dict[str, Any], exact: Any, expert_alignment: Any
) -> None:
    """A cached dispatch has routing, shapes and the number of tokens from the handle alone."""
    given = [name for name, value in routing.items() if value is not None]
    given += ["exact"] if exact is not True else []
    given += ["expert_alignment"] if expert_alignment != 1 else []
    if given:
        raise ValueError(
            f"{', '.join(given)} given together with handle=: a cached dispatch takes routing and "
            f"shapes from the handle; leave it out"
        )
    if payload.x.shape[0] != handle.num_tokens:
        raise ValueError(
            f"x has {payload.x.shape[0]} tokens (shape {list(payload.x.shape)}), but the handle "
            f"was made for {handle.num_tokens}: give [T, H] = [{handle.num_tokens}, "
            f"{payload.x.shape[1]}]"
        )


def check_rows(x: Any, handle: Handle, config: Config) -> Tensor:
    """Rows to combine, as ``[rows, hidden]``."""
    local, hidden, meaning = config.num_local_experts, config.hidden, "the shape of recv.x"
    shape = _Shape("[N, H]", (handle.num_rows, hidden), meaning)
    if handle.layout is Layout.EXPERT_PADDED:
        shape = _Shape("[L, R * M, H]", (local, config.padded_rows, hidden), meaning)
    hint = ": combine sums the experts' output, which is not quantised"
    _dense("x", x, shape, FLOAT_DTYPES, handle.plan.returns.device, hint)
    return flat_rows(x)


def check_weighting(
    handle: Handle, weighted: bool, topk_weights: Any, reduce_weights: Any, config: Config
) -> Tensor | None:
    """Weights for combine; returns the owner's ``topk_weights`` as float32, if given."""
    check_flag("weighted", weighted)
    flat, device = handle.layout is Layout.FLAT, handle.plan.returns.device
    if weighted and flat:
        raise ValueError(
            "weighted=True multiplies rows of one expert each, but FLAT rows are per rank: weigh "
            "them where the experts run"
        )
    if topk_weights is not None and not weighted:
        raise ValueError("topk_weights are used with weighted=True only")
    if weighted and topk_weights is None and not handle.has_weights:
        raise ValueError(
            "weighted=True needs weights: dispatch with topk_weights, or give combine "
            "topk_weights=[T, K]"
        )
    if reduce_weights is not None:
        if not flat:
            raise ValueError(
                f"reduce_weights belong to FLAT rows, but the layout is {handle.layout.name}"
            )
        sizes = handle.num_rows, config.num_topk
        shape = _Shape("[N, K]", sizes, "the shape of recv.topk_weights")
        _dense("reduce_weights", reduce_weights, shape, FLOAT_DTYPES, device)
    if topk_weights is None:
        return None
    shape = _Shape("[T, K]", (handle.num_tokens, config.num_topk), "tokens dispatched, num_topk")
    _dense("topk_weights", topk_weights, shape, FLOAT_DTYPES, device, ": give .float()")
    return topk_weights.float()


def check_bias_and_out(bias: Any, out: Any, rows: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
    """Bias as a tuple of ``[T, hidden]``; ``out`` of that shape and of the dtype of the rows."""
    given: Any = bias
    terms: tuple[Any, ...] = () if bias is None else (bias,)
    if isinstance(bias, (tuple, list)):
        terms = tuple(given)
    if len(terms) > 2:
        raise ValueError(f"bias has {len(terms)} tensors, but may be one tensor or a pair")
    shape = _Shape("[T, H]", (num_tokens, rows.shape[1]), "tokens dispatched, hidden")
    for term in terms:
        _dense("bias", term, shape, FLOAT_DTYPES, rows.device)
    if out is not None:
        _dense("out", out, shape, (rows.dtype,), rows.device)
        if overlaps_itself(out):
            raise ValueError(
                f"out has elements that share memory (shape {list(out.shape)}, strides "
                f"{list(out.stride())}): give each memory of its own"
            )
    return terms


def check_no_grad_into(out: Any, *inputs: Any) -> None:
    """``out=`` is for inference: writing into it cannot be differentiated."""
    if out is not None and is_followed(out, *inputs):
        raise ValueError(
            "out= cannot be differentiated: leave it out, or call combine under torch.no_grad()"
        )
