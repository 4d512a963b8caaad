"""HybridEP's dispatch and combine on the native calls: checks first, then what is exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.arguments import LARGEST, MOST_PICKS
from tokenyard.deep_ep import hybrid_routing as maps
from tokenyard.deep_ep import inputs, native_calls
from tokenyard.deep_ep.hybrid_routing import BufferConfig, HybridHandle, PermutedHandle
from tokenyard.deep_ep.inputs import Asked, flag, whole
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.normal import COUNT_WORDS, MAX_TOKENS, aligned
from tokenyard.header import DISPATCH
from tokenyard.limits import MOST_ALIGNMENT
from tokenyard.results import Received, rows_of_experts
from tokenyard.routing import power_of_two_at_least
from tokenyard.types import FLOAT_DTYPES, QUANTIZED_DTYPES, Layout

BYTES = torch.float8_e4m3fn
"""What rows of uint8, as DeepEP has them, are to the native calls: nobody computes with them."""


class Shape(NamedTuple):
    """How rows are asked for. ``rows``: static shapes, so many of them; ``waits``: the host wants
    their counts."""

    kind: type[HybridHandle]
    alignment: int = 1
    rows: int | None = None
    waits: bool = True


class Given(NamedTuple):
    """Checked. ``asked``: a map or picks, or neither with a handle."""

    rows: native_calls.Rows
    as_bytes: bool
    shape: Shape
    num_experts: int
    asked: Asked

    def weights(self, topk_idx: Tensor) -> Tensor | None:
        """Of the picks ``topk_idx``, from whatever says so."""
        asked, probs = self.asked, self.asked.probs
        if asked.routing_map is None and asked.topk_weights is not None:
            given = asked.topk_idx, asked.topk_weights
            probs = maps.indices_to_map(*given, self.rows[0].shape[0], self.num_experts)[1]
        return None if probs is None else maps.weights_of(probs, topk_idx)


# Checks

OTHER = {"num_dispatched_tokens": "", "use_host_meta": "", "num_of_tokens_per_rank": ""}
"""Arguments of other versions of the branch. The second is the reverse of ``non_blocking``; the
last is what ranks with fewer tokens are padded to, which nobody is here."""

SWITCHES = ("use_fp8", "non_blocking", "fuse_permute_dispatch", "fuse_unpermute_combine")


def check_switches(asked: Asked) -> bool:
    """Whether the host is to wait for the counts of a dispatch."""
    old = getattr(asked, "old", {})
    inputs.check_fork("HybridEPBuffer's call", old, OTHER)
    for name in SWITCHES:
        flag(name, getattr(asked, name, None))
    if old.get("use_host_meta") is not None:
        return flag("use_host_meta", old["use_host_meta"])
    return not getattr(asked, "non_blocking", False)


def _alignment(asked: Asked) -> int:
    given = 0 if asked.pad_multiple is None else asked.pad_multiple
    return max(whole("pad_multiple", given, 0, MOST_ALIGNMENT), 1)


def check_shape(kind: type[HybridHandle], asked: Asked) -> Shape:
    if kind is HybridHandle:
        return Shape(HybridHandle)
    waits, alignment, num_rows = check_switches(asked), _alignment(asked), asked.num_permuted_tokens
    if num_rows is None:
        if not waits:
            raise ValueError(
                "num_permuted_tokens is missing: with non_blocking=True the host does not learn "
                "how many rows come, so pass the most that may"
            )
        return Shape(PermutedHandle, alignment)
    if isinstance(num_rows, Tensor) and num_rows.numel() == 1 and not num_rows.is_floating_point():
        num_rows = int(num_rows)
    rows = whole("num_permuted_tokens", num_rows, 0, LARGEST)
    if not waits and rows % alignment:
        raise ValueError(
            f"num_permuted_tokens ({rows}) must be a multiple of pad_multiple ({alignment}) with "
            f"non_blocking=True: round it up"
        )
    return Shape(PermutedHandle, alignment, rows, waits)


def check_handle(handle: Any, kind: type[HybridHandle], group: Any) -> HybridHandle:
    """A handle of the very ``kind``: one kind is a special case of the other."""
    known = inputs.check_handle(handle, kind, group)
    if type(known) is not kind:
        raise ValueError(
            f"handle is of {known.source}, but this call takes that of {kind.source}: use "
            f"combine_with_unpermute(), or dispatch()"
        )
    return known


def check_dispatch(natives: Natives, shape: Shape, asked: Asked, config: BufferConfig) -> Given:
    rows, as_bytes = _rows(asked)
    experts = _check_routing(natives, rows[0], asked, config)
    tokens, most = rows[0].shape[0], config.max_num_of_tokens_per_rank
    if shape.rows is not None and tokens > most:
        raise ValueError(
            f"hidden has {tokens} tokens, but max_num_of_tokens_per_rank is {most}, which bounds "
            f"static shapes (num_permuted_tokens): make HybridEPBuffer with more on all ranks alike"
        )
    return Given(rows, as_bytes, shape, experts, asked)


def _rows(asked: Asked) -> tuple[native_calls.Rows, bool]:
    """:func:`inputs.check_rows` in HybridEP's names; and whether the rows came as bytes."""
    given = hidden = asked.hidden
    as_bytes = isinstance(hidden, Tensor) and hidden.dtype is torch.uint8
    if as_bytes:
        given = hidden.contiguous().view(BYTES)
    if isinstance(given, Tensor) and given.dtype in QUANTIZED_DTYPES:
        if asked.scaling_factor is None:
            raise ValueError(
                f"scaling_factor is missing: hidden is {hidden.dtype}, and travels with the scales "
                f"[T, S] of its rows"
            )
        given = given, asked.scaling_factor
    try:
        return inputs.check_rows(given), as_bytes
    except ValueError as error:
        text = str(error).replace("x[0]", "hidden").replace("x[1]", "scaling_factor")
        raise ValueError(f"hidden{text[1:]}" if text.startswith("x ") else text) from None


def _check_routing(natives: Natives, data: Tensor, asked: Asked, config: BufferConfig) -> int:
    """Returns the number of experts."""
    tokens, device, table = data.shape[0], data.device, asked.routing_map
    local, given = config.num_of_experts_per_rank, getattr(asked, "num_of_experts_per_rank", None)
    if given is not None:
        local = whole("num_of_experts_per_rank", given, 1)
    experts = local * natives.world_size
    meaning = f"[T, E], of {tokens} tokens and {experts} experts ({local} on each rank)"
    if table is not None:
        inputs.array("routing_map", table, meaning, (tokens, experts), (torch.bool,), device)
    elif asked.topk_idx is None:
        raise ValueError(
            "routing_map is missing: pass it (with probs), or topk_idx (with topk_weights), or "
            "the handle of an earlier dispatch"
        )
    else:
        number = asked.num_of_experts
        if number is None or whole("num_of_experts", number, 1) != experts:
            raise ValueError(
                f"num_of_experts ({number}) must be {experts} with topk_idx: {local} experts on "
                f"each of {natives.world_size} ranks"
            )
        inputs.check_picks(asked.topk_idx, asked.topk_weights, data)
    if asked.probs is not None:
        inputs.array("probs", asked.probs, meaning, (tokens, experts), FLOAT_DTYPES, device)
    if experts > MOST_PICKS and table is not None:
        raise ValueError(
            f"routing_map has {experts} experts, but must have at most {MOST_PICKS}: pass topk_idx"
        )
    return experts


def check_again(shape: Shape, asked: Asked, handle: HybridHandle) -> Given:
    """A dispatch along the routing of a ``handle``."""
    rows, as_bytes = _rows(asked)
    data = rows[0]
    inputs.check_rows_again("hidden", data, handle)
    _check_same(shape, handle)
    if asked.probs is not None:
        known = data.shape[0], handle.num_experts
        inputs.array("probs", asked.probs, "[T, E]", known, FLOAT_DTYPES, data.device, "hidden")
    if asked.topk_idx is not None:
        inputs.check_picks(asked.topk_idx, asked.topk_weights, data)
    return Given(rows, as_bytes, shape, handle.num_experts, asked)


def _check_same(shape: Shape, handle: HybridHandle) -> None:
    """Rows are asked for as the handle has them, or not at all."""
    rows, alignment = handle.native.num_rows, handle.native.spec.expert_alignment
    if shape.rows is not None and shape.rows != rows:
        raise ValueError(
            f"num_permuted_tokens ({shape.rows}) must be {rows}, the rows of the dispatch that "
            f"made the handle: pass that, or leave it out"
        )
    if shape.alignment not in (1, alignment):
        raise ValueError(
            f"pad_multiple ({shape.alignment}) must be {alignment}, as in the dispatch that made "
            f"the handle: pass that, or leave it out"
        )


def check_combine(asked: Asked, handle: HybridHandle) -> tuple[Tensor, Tensor | None]:
    hidden, probs, rows = asked.hidden, asked.probs, handle.native.num_rows
    inputs.check_rows_back("hidden", hidden, handle, rows)
    permuted = isinstance(handle, PermutedHandle)
    if permuted:
        _check_same(Shape(PermutedHandle, _alignment(asked)), handle)
    if probs is None:
        return hidden, None
    known, meaning = (rows,), "[N], of the rows"
    if not permuted:
        width = handle.config.num_of_experts_per_rank * handle.config.num_of_ranks_per_node
        known, meaning = (rows, width), "[N, experts of the node]"
    inputs.array("probs", probs, meaning, known, FLOAT_DTYPES, hidden.device, "hidden")
    return hidden, probs.float()


def refused(
    natives: Natives,
    error: Exception,
    shape: Shape | None,
    asked: Asked,
    config: BufferConfig,
) -> Exception:
    """Tell those in a fresh dispatch; returns the error to raise. With a map and exact shapes the
    first call is about the most picks."""
    device = inputs.place(asked.hidden) or inputs.place(asked.routing_map)
    static = shape is not None and shape.rows is not None
    if asked.topk_idx is None and not static:
        return natives.refused(error, natives.whom_counting(COUNT_WORDS, device), DISPATCH)
    experts = config.num_of_experts_per_rank * natives.world_size
    picks = experts if asked.topk_idx is None else inputs.columns(asked.topk_idx)
    guess = inputs.columns(asked.hidden), experts, picks, _bound(static, config), device
    return natives.refused(error, natives.whom_normal(guess), DISPATCH, not static)


def _bound(static: bool, config: BufferConfig) -> int:
    """Of tokens, which exact shapes do not use."""
    return max(config.max_num_of_tokens_per_rank, 1) if static else MAX_TOKENS


# Calls


def dispatch(natives: Natives, given: Given, config: BufferConfig) -> tuple[Any, ...]:
    data, shape, experts = given.rows[0], given.shape, given.num_experts
    topk_idx, table = given.asked.topk_idx, given.asked.routing_map
    static = shape.rows is not None
    if table is not None:
        top = experts if static else _agreed_picks(natives, table)
        topk_idx = maps.picks_of(table, min(top, experts))
    sizes = data.shape[1], experts, topk_idx.shape[1], _bound(static, config), data.device
    ep = natives.normal(sizes)
    layout = Layout.FLAT if shape.kind is HybridHandle else Layout.EXPERT_MAJOR
    wanted = layout, not static, shape.alignment, shape.rows
    recv = native_calls.dispatch(ep, given.rows, topk_idx, given.weights(topk_idx), wanted)
    handle = shape.kind.around(ep, recv.handle, topk_idx=topk_idx, config=config)
    probs = recv.topk_weights if layout is Layout.FLAT else recv.row_weights
    return _dispatched(given, recv, probs, handle)


def redispatch(given: Given, handle: HybridHandle) -> tuple[Any, ...]:
    """Rows, and weights if there are any, along a known routing."""
    recv, probs = native_calls.redispatch(handle, given.rows, given.weights(handle.topk_idx))
    return _dispatched(given, recv, probs, handle)


def _dispatched(
    given: Given, recv: Received, probs: Tensor | None, handle: HybridHandle
) -> tuple[Any, ...]:
    """What a dispatch returns, with permutation or without."""
    rows, native = recv.x.view(torch.uint8) if given.as_bytes else recv.x, handle.native
    if given.shape.kind is HybridHandle:
        there = None if probs is None else maps.to_node(handle, probs)
        return rows, there, recv.scales, handle
    if native.spec.exact:
        counts = aligned(rows_of_experts(native), native.spec.expert_alignment)
        padded = torch.tensor(counts, dtype=torch.int32, device="cpu")
    else:
        padded = native.arrived.expert_offsets.diff()
        padded = padded.cpu() if given.shape.waits else padded
    return rows, probs, recv.scales, padded, handle


def combine(
    hidden: Tensor, probs: Tensor | None, handle: HybridHandle
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows ``[T, H]``, and their weights at their experts ``[T, E]``."""
    flat = handle.native.layout is Layout.FLAT
    if probs is not None and flat:
        probs = maps.from_node(handle, probs)
    combined, weights = native_calls.combine(hidden, handle, probs)
    if weights is None:
        return combined, None
    if not flat:  # of an expert picked twice at both
        weights = weights.gather(1, handle.native.plan.first_pick)
    return combined, maps.spread(handle.topk_idx, weights, (len(weights), handle.num_experts))


def _agreed_picks(natives: Natives, routing_map: Tensor) -> int:
    """Picks that suffice for any token of any rank; a power of two, so that objects are few. The
    host waits."""
    mine = int(routing_map.sum(1).max()) if len(routing_map) else 0
    if natives.world_size > 1:
        shape = natives.world_size, COUNT_WORDS
        table = torch.full(shape, mine, dtype=torch.int32, device=routing_map.device)
        mine = int(natives.swap(table).max())
    return power_of_two_at_least(max(mine, 1))
