"""Checks of what callers pass, in DeepEP's names. Messages name argument, limit, value, remedy."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.arguments import LARGEST, MOST_EXPERTS, MOST_PICKS
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.handles import KeptHandle, of_items
from tokenyard.dense import check_dense
from tokenyard.errors import NotSupported
from tokenyard.formats import SCALE_DTYPES
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.types import FLOAT_DTYPES, INDEX_DTYPES, QUANTIZED_DTYPES

REFUSED = (ValueError, TypeError, NotSupported)
"""What checks raise."""

Guess = tuple[Any, Any, Any, Any, Any]
"""Sizes of a native object (``natives.py``), as far as they can be told; None for the rest."""


class Asked:
    """The arguments of a call, by name, as given. (Dynamo does not know ``SimpleNamespace``.)"""

    def __init__(self, /, **given: Any) -> None:
        self.__dict__.update(given)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Any:
    """A size that is equal to any: checks of good tensors compare shapes, and no more."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # pyright: ignore[reportAssignmentType]


ANY: Any = _Any()
TABLE = (ANY, ANY)

Known = TypeVar("Known", bound=KeptHandle)


# Plain values: whole numbers as ``operator.index`` knows them, and flags


def whole(name: str, value: Any, least: int = 0, most: int = LARGEST, remedy: str = "") -> int:
    """A whole number of any kind (NumPy's, too), no bool, in ``least .. most``. Else ValueError."""
    if type(value) is int and least <= value <= most:  # nearly always
        return value
    try:
        number = None if _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or not least <= number <= most:
        raise ValueError(
            f"{name} ({_short(value)}) must be a whole number from {least} to {most}{remedy}"
        )
    return number


def likely(
    name: str, value: Any, error: Exception, most: int = LARGEST, least: int = 1
) -> int | None:
    """``value`` if other ranks are likely to have it: ``error`` is not about it, it is in order."""
    try:
        return None if name in str(error) else whole(name, value, least, most)
    except ValueError:
        return None


def flag(name: str, value: Any) -> bool:
    """On or off: a bool (NumPy's, too), 0 or 1; None is off, as in DeepEP. Else ValueError."""
    if value is False or value is True:
        return value
    if value is None:
        return False
    if _is_bool(value) and not isinstance(value, Tensor) and getattr(value, "shape", ()) == ():
        return bool(value)
    try:
        return bool(whole(name, value, 0, 1))
    except ValueError:
        raise ValueError(f"{name} ({_short(value)}) must be True or False") from None


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", str(torch.bool))


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Events, groups and tensors


def check_group(group: Any) -> None:
    """A group that this process is a member of."""
    if isinstance(group, MemoryGroup):
        return
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not a member of the group: make Buffer on its members only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group ({group!r}) must be a torch.distributed.ProcessGroup, such as new_group() "
            f"returns"
        )


def check_when(
    previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any = False
) -> bool:
    """What a call waits for, and who waits for it; returns whether it is asynchronous."""
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        given = repr(previous_event)
        if isinstance(previous_event, EventHandle):
            given = "an EventHandle, such as capture() of DeepEP V2 returns"
        raise ValueError(
            f"previous_event ({given}) must be an EventOverlap, such as Buffer.capture() of DeepEP "
            f"V1 returns, or None"
        )
    flag("allocate_on_comm_stream", allocate_on_comm_stream)
    return flag("async_finish", async_finish)


def array(
    name: str,
    value: Any,
    meaning: str,
    shape: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    like: str = "x",
) -> Tensor:
    """A dense tensor of ``shape`` and ``dtypes``, on the device of ``like`` (None: any)."""
    check_dense(name, value, f" {meaning}")
    if value.shape != shape:
        if value.dim() == len(shape):
            pairs = zip(value.shape, shape, strict=True)
            shape = tuple(size if want is ANY else want for size, want in pairs)
        sizes = "" if any(size is ANY for size in shape) else f" = {list(shape)}"
        raise ValueError(f"{name} has shape {list(value.shape)}, but must be {meaning}{sizes}")
    if value.dtype not in dtypes:
        names = " or ".join(map(_bare, dtypes))
        raise ValueError(f"{name} is {_bare(value.dtype)}, but must be {names}: cast it")
    if device is not None and value.device != device:
        raise ValueError(
            f"{name} is on {value.device}, but must be on {device}, as {like} is: move it there"
        )
    return value


def check_dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype ({dtype!r}) must be a torch.dtype")
    return dtype


def check_contiguous(name: str, value: Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, but has strides {list(value.stride())}: use .contiguous()"
        )


def _bare(value: Any) -> str:
    return str(value).removeprefix("torch.")


def check_rows(x: Any) -> tuple[Tensor, Tensor | None]:
    """Rows to dispatch, and their scales: a tensor ``[T, H]``, or a pair of FP8 data and scales."""
    if isinstance(x, Tensor):
        if x.dtype in QUANTIZED_DTYPES:
            raise ValueError(
                f"x is {_bare(x.dtype)} without scales: pass the pair (data [T, H], scales [T, S]) "
                f"(ones [T, 1] if its rows have none)"
            )
        array("x", x, "[T, H]", TABLE, FLOAT_DTYPES)
        _check_place("x", x)
        return x, None
    given: Any = x
    if not isinstance(x, (tuple, list)) or len(given) != 2:
        many = f"a {type(given).__name__} of {len(given)}" if isinstance(x, (tuple, list)) else ""
        raise ValueError(
            f"x must be a tensor [T, H], or a pair (data [T, H], scales [T, S]), not "
            f"{many or type(given).__name__}"
        )
    first, second = given
    data = array("x[0]", first, "[T, H]", TABLE, QUANTIZED_DTYPES)
    _check_place("x[0]", data)
    shape, meaning = (data.shape[0], ANY), "[T, S], a row for each of x[0]"
    scales = array("x[1]", second, meaning, shape, SCALE_DTYPES, data.device)
    if not scales.shape[1]:
        raise ValueError(
            f"x[1] has shape {list(scales.shape)}, but must be [T, S] with S of at least 1"
        )
    return data, scales


def check_tokens(x: Tensor, name: str, most: int) -> None:
    """No more tokens than the bound called ``name``."""
    if x.shape[0] > most:
        raise ValueError(
            f"x has {x.shape[0]} tokens, but {name} is {most}: raise it on all ranks alike, or "
            f"split the batch"
        )


def columns(value: Any) -> int | None:
    """Of a tensor with two dimensions; None if it has none."""
    return value.shape[1] or None if isinstance(value, Tensor) and value.dim() == 2 else None


def place(value: Any) -> torch.device | None:
    """Where a tensor lies that can be moved."""
    return value.device if isinstance(value, Tensor) and (value.is_cpu or value.is_cuda) else None


def guess(
    error: Exception, x: Any, picks: tuple[Any, ...], experts: tuple[str, Any], most: int | None
) -> Guess:
    """Sizes of a dispatch that raised ``error``, from rows (a tensor or a pair), tensors of picks,
    experts by name and value, and tokens per rank."""
    given: Any = x
    data = given[0] if isinstance(x, (tuple, list)) and x else given
    num_topk = next(filter(None, map(columns, picks)), None)
    return columns(data), likely(*experts, error, MOST_EXPERTS), num_topk, most, place(data)


def _check_place(name: str, x: Tensor) -> None:
    """Rows have channels, in memory that they can travel from."""
    if not x.shape[1]:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but must be [T, H] with H of at least 1"
        )
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(
            f"{name} is on {x.device}, but rows travel from CPU or CUDA memory: move it to one of "
            f"them"
        )


def check_picks(topk_idx: Any, topk_weights: Any, x: Tensor) -> None:
    """Picks of the tokens of ``x``, and their weights (or None)."""
    shape, meaning = (x.shape[0], ANY), "[T, K], a row for each of x"
    array("topk_idx", topk_idx, meaning, shape, INDEX_DTYPES, x.device)
    if not 1 <= topk_idx.shape[1] <= MOST_PICKS:
        raise ValueError(
            f"topk_idx has shape {list(topk_idx.shape)}, but must be [T, K] with K from 1 to "
            f"{MOST_PICKS}"
        )
    if topk_weights is not None:
        meaning = "[T, K], as topk_idx"
        array("topk_weights", topk_weights, meaning, topk_idx.shape, FLOAT_DTYPES, x.device)


def check_handle(handle: Any, kind: type[Known], group: Any) -> Known:
    """A handle of this ``kind``, also if only its items are given. It is good for any buffer of its
    group, as long as the one that made it is not destroyed."""
    handle = of_items(handle)
    if not isinstance(handle, kind):
        raise ValueError(f"handle must be {kind.wanted.format(kind.source)}, not {told(handle)}")
    ep = handle.ep
    calls: Any = ep._calls  # pyright: ignore[reportPrivateUsage]
    if calls.inherited:  # of a process that this one is a fork of
        calls.check_open()
    if calls.closed:
        raise RuntimeError(
            "the Buffer that made this handle was destroyed: destroy it after the last use of its "
            "handles, backward included"
        )
    if not of_group(ep, group):
        raise ValueError(
            f"handle belongs to a Buffer of other ranks ({_members(ep.group)}), but this one is of "
            f"{_members(group)}: use a Buffer of the group that dispatched"
        )
    return handle


def check_rows_again(name: str, data: Tensor, handle: KeptHandle) -> None:
    """Rows of a dispatch along the routing of a ``handle``."""
    native = handle.native
    shape, device = (native.num_tokens, handle.ep.config.hidden), native.plan.returns.device
    meaning = "the shape [T, H] that the handle was made for, of one H"
    array(name, data, meaning, shape, (data.dtype,), device, "the handle")


def check_rows_back(name: str, rows: Any, handle: KeptHandle, num_rows: int) -> None:
    """Rows of a combine."""
    shape, device = (num_rows, handle.ep.config.hidden), handle.native.plan.returns.device
    meaning = "the rows [N, H] that the dispatch brought, of one H"
    array(name, rows, meaning, shape, FLOAT_DTYPES, device, "the handle")


def told(handle: Any) -> str:
    """What was given for a handle, and if it is one, or items of one, whose."""
    with suppress(ValueError):
        handle = of_items(handle)
    source = getattr(handle, "source", "")
    return type(handle).__name__ + (f" of {source}" if source else "")


def of_group(ep: ExpertParallel, group: Any) -> bool:
    """Whether a native object is of the ranks of ``group``."""
    return ep.group is group or _members(ep.group) == _members(group)


def _members(group: Any) -> list[int]:
    if isinstance(group, MemoryGroup):
        return list(range(group.size()))
    return dist.get_process_group_ranks(group)


# Arguments that DeepEP's forks and older versions have: taken where they change nothing, refused by
# name where they do

_EAGER = {
    "eager_support": "an eager mode: leave it out",
    "use_eager": "an eager mode: leave it out",
}
CONSTRUCTOR = _EAGER | dict.fromkeys(
    ("allow_nvlink_for_normal_mode", "num_nvl_peers", "use_default_stream_as_comm_stream"), ""
)
LOW_LATENCY_DISPATCH = _EAGER | {
    "use_nvfp4": "NVFP4 rows: use_fp8 or BF16",
    "use_ue8m0_for_sf": "scales of NVFP4 rows: use_fp8, with round_scale and use_ue8m0",
    "x_global_scale": "",
    "topk_weights": "",
}
_SIGNALS = "packed_recv_count comp_signal block_m threshold src_signals src_signal_expect_value"
LOW_LATENCY_COMBINE = _EAGER | dict.fromkeys(("overlap", "num_sms", *_SIGNALS.split()), "")
"""Name by what it would switch on; empty: means nothing by itself."""


def check_fork(call: str, given: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Look at the arguments of ``call`` that DeepEP itself does not have. TypeError: nobody has
    one. NotSupported: it switches on something that is missing here."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if known[name] and flag(name, value):
            raise NotSupported(f"{call}({name}={value!r}) asks for {known[name]}")
