"""Arguments that ``tokenyard.deep_ep`` refuses, by method: what is changed in a good call, and
words of the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tokenyard import deep_ep

Change = Callable[[Any], Any]
"""From the good value to the bad one."""

Cases = list[tuple[str, Change, tuple[str, ...]]]
"""Argument, how it is changed, words of the error."""


def to(value: Any) -> Change:
    return lambda _: value


WHOLE: list[Any] = [
    True,
    np.bool_(True),
    1.0,
    np.float64(2),
    "2",
    None,
    [1],
    (1,),
    float("nan"),
    1 << 70,
    -(1 << 70),
]
"""No whole numbers, or none that fits anywhere."""

FLAGS: list[Any] = ["no", "", 2, -1, 0.0, [], torch.tensor(True), np.array([True, False])]

NO_TENSOR: list[Any] = ["x", 5, [[1, 2]], np.zeros((2, 2)), object()]

EVENTS: list[Any] = [5, "now", True, object(), torch.zeros(1)]


def wholes(name: str, *more: Any) -> Cases:
    return [(name, to(value), (name,)) for value in (*WHOLE, *more)]


def flags(*names: str) -> Cases:
    return [(name, to(value), (name, "True or False")) for name in names for value in FLAGS]


def tensors(name: str, *dtypes: torch.dtype, said: str = "") -> Cases:
    """No tensors, ones of another dtype, shape, device or memory layout than allowed."""
    words = (said or name,)
    others: list[tuple[Change, tuple[str, ...]]] = [
        (lambda t: t[:-1], (*words, "shape")),
        (lambda t: t.unsqueeze(0), (*words, "shape")),
        (lambda t: t.flatten() if t.dim() > 1 else t.sum(), (*words, "shape")),
        (lambda t: t.to("meta"), (*words, "meta")),
        (lambda t: t.to_sparse(), (*words, "dense")),
        *(
            (lambda t, dtype=dtype: t.to(dtype), (*words, str(dtype).removeprefix("torch.")))
            for dtype in dtypes
        ),
    ]
    return [(name, to(value), words) for value in NO_TENSOR] + [
        (name, change, said) for change, said in others
    ]


WHEN: Cases = [
    *(("previous_event", to(value), ("previous_event", "EventOverlap")) for value in EVENTS),
    ("previous_event", to(deep_ep.EventHandle()), ("an EventHandle", "V2", "must be an EventOv")),
    *flags("async_finish", "allocate_on_comm_stream"),
]

CONFIG = [
    ("config", to(value), ("config", "deep_ep.Config"))
    for value in ("x", 5, {}, (20, 6, 256), True)
]

DISPATCH: Cases = [
    *WHEN,
    *CONFIG,
    *wholes("expert_alignment", 0, -1),
    *wholes("num_worst_tokens", -1, np.int64(-3), 1 << 31),
    ("num_worst_tokens", to(3), ("num_worst_tokens (3)", "at least")),
    *(("x", to(value), ("x must be",)) for value in NO_TENSOR),
    ("x", to(None), ("x must be",)),
    ("x", lambda x: x[0], ("x has shape", "[T, H]")),
    ("x", lambda x: x[None], ("x has shape", "[T, H]")),
    ("x", lambda x: x[:, :0], ("x has shape", "[T, H]")),
    ("x", lambda x: x.to("meta"), ("x is on meta",)),
    ("x", lambda x: x.to_sparse(), ("x is sparse", "dense")),
    ("x", lambda x: x.double(), ("x is float64", "bfloat16")),
    ("x", lambda x: x.to(torch.float8_e4m3fn), ("x is float8_e4m3fn without scales", "pair")),
    ("x", lambda x: (x,), ("x must be", "pair")),
    ("x", lambda x: (x, x, x), ("x must be", "pair")),
    ("x", lambda x: (x, x.float()), ("x[0] is bfloat16",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), None), ("x[1] must be",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.double()), ("x[1] is float64",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.float()[:-1]), ("x[1] has shape",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.float()[:, :0]), ("x[1] has shape",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.float()[0]), ("x[1] has shape",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.float().to("meta")), ("x[1] is on meta",)),
    *tensors("topk_idx", torch.int16, torch.bool, torch.float32),
    ("topk_idx", lambda t: t[:, :0], ("topk_idx has shape", "K from 1")),
    *tensors("topk_weights", torch.int64, torch.float64),
    ("topk_weights", lambda t: t[:, :-1], ("topk_weights has shape",)),
    *tensors("is_token_in_rank", torch.int64, torch.uint8),
    ("is_token_in_rank", lambda t: t[:, :-1], ("is_token_in_rank has shape",)),
    *(("num_tokens_per_rank", to(value), ("num_tokens_per_rank",)) for value in NO_TENSOR),
    ("num_tokens_per_rank", lambda t: t[:-1], ("num_tokens_per_rank has shape",)),
    ("num_tokens_per_rank", lambda t: t.float(), ("num_tokens_per_rank is float32",)),
    *(
        ("num_tokens_per_rdma_rank", to(value), ("num_tokens_per_rdma_rank",))
        for value in NO_TENSOR
    ),
    (
        "num_tokens_per_rdma_rank",
        to(torch.zeros(3, dtype=torch.int32)),
        ("num_tokens_per_rdma_rank has shape",),
    ),
    *(("num_tokens_per_expert", to(value), ("num_tokens_per_expert",)) for value in NO_TENSOR),
    (
        "num_tokens_per_expert",
        to(None),
        ("num_tokens_per_expert is missing", "get_dispatch_layout"),
    ),
    ("num_tokens_per_expert", lambda t: t[:0], ("num_tokens_per_expert has 0",)),
    ("num_tokens_per_expert", lambda t: t.float(), ("num_tokens_per_expert is float32",)),
    ("num_tokens_per_expert", lambda t: t[None], ("num_tokens_per_expert has shape",)),
    (
        "num_tokens_per_expert",
        lambda t: t.new_zeros(1).expand(1 << 40),
        ("num_tokens_per_expert has 1099511627776",),
    ),
    ("handle", to(5), ("topk_idx or topk_weights given together with handle",)),
    ("topk_idx", to(None), ("topk_idx is missing", "topk_weights")),
]
"""Of a fresh dispatch with picks."""

BARE: Cases = [
    *tensors("is_token_in_rank", torch.int64),
    ("is_token_in_rank", to(None), ("topk_idx is missing", "is_token_in_rank")),
    ("num_worst_tokens", to(64), ("topk_idx is missing", "num_worst_tokens")),
    *wholes("expert_alignment", 0),
]
"""Of one without."""

HANDLE: Cases = [
    *(
        ("handle", to(value), ("handle must be the tuple",))
        for value in (5, "h", (), [1], object(), torch.zeros(2))
    ),
    ("handle", lambda handle: tuple(handle)[1:], ("handle",)),
]

CACHED: Cases = [
    *WHEN,
    *CONFIG,
    *HANDLE,
    *wholes("expert_alignment", 0),
    *(("x", to(value), ("x must be",)) for value in NO_TENSOR),
    ("x", lambda x: x[:-1], ("x has shape", "handle was made for")),
    ("x", lambda x: x[:, :-1], ("x has shape", "handle was made for")),
    ("x", lambda x: x.to(torch.int64), ("x is int64",)),
    ("topk_idx", to(torch.zeros(2, 2)), ("given together with handle",)),
    ("topk_weights", to(torch.zeros(2, 2)), ("given together with handle",)),
]

COMBINE: Cases = [
    *WHEN,
    *CONFIG,
    *HANDLE,
    ("handle", to(None), ("handle must be the tuple",)),
    *tensors("x", torch.float8_e4m3fn, torch.int64, torch.float64),
    ("x", to(None), ("x must be",)),
    ("x", lambda x: x[:, :-1], ("x has shape",)),
    *tensors("topk_weights", torch.int64),
    ("topk_weights", lambda t: t[:, :-1], ("topk_weights has shape",)),
    *(
        ("bias", to(value), ("bias",))
        for value in ("b", 5, (), (None,), [1, 2, 3], (torch.zeros(1),) * 3, [[1.0]])
    ),
    ("bias", to(torch.zeros(1, 128)), ("bias has shape",)),
    ("bias", to(torch.zeros(1)), ("bias has shape",)),
]

LOW_DISPATCH: Cases = [
    *flags("async_finish", "return_recv_hook", "use_fp8", "round_scale", "use_ue8m0"),
    *wholes("num_max_dispatch_tokens_per_rank", 0, -1),
    ("num_max_dispatch_tokens_per_rank", to(1), ("num_max_dispatch_tokens_per_rank is 1",)),
    (
        "num_max_dispatch_tokens_per_rank",
        to(2**31 - 1),
        ("num_max_dispatch_tokens_per_rank", "int32"),
    ),
    *wholes("num_experts", 0, -1, 1 << 20),
    *(("x", to(value), ("x must be",)) for value in (*NO_TENSOR, None, (1, 2))),
    ("x", lambda x: x[0], ("x has shape",)),
    ("x", lambda x: x[:, :0], ("x has shape",)),
    ("x", lambda x: x.to("meta"), ("x is on meta",)),
    ("x", lambda x: x.double(), ("x is float64",)),
    ("x", lambda x: x.to(torch.float8_e4m3fn), ("x is torch.float8_e4m3fn", "use_fp8=True")),
    *tensors("topk_idx", torch.int16, torch.float32),
    ("topk_idx", to(None), ("topk_idx must be",)),
    ("topk_idx", lambda t: t[:, :0], ("topk_idx has shape",)),
    *(
        ("cumulative_local_expert_recv_stats", to(value), ("cumulative_local_expert",))
        for value in NO_TENSOR
    ),
    (
        "cumulative_local_expert_recv_stats",
        to(torch.zeros(6)),
        ("cumulative_local_expert_recv_stats is float32",),
    ),
    (
        "cumulative_local_expert_recv_stats",
        to(torch.zeros(5, dtype=torch.int32)),
        ("cumulative", "shape"),
    ),
    (
        "cumulative_local_expert_recv_stats",
        to(torch.zeros(12, dtype=torch.int32)[::2]),
        ("cumul", "contiguous"),
    ),
    (
        "cumulative_local_expert_recv_stats",
        to(torch.zeros(6, dtype=torch.int32, device="meta")),
        ("is on meta",),
    ),
    *(
        ("dispatch_wait_recv_cost_stats", to(value), ("dispatch_wait_recv_cost_stats",))
        for value in NO_TENSOR
    ),
    (
        "dispatch_wait_recv_cost_stats",
        to(torch.zeros(3, dtype=torch.int64)),
        ("dispatch_wait", "shape"),
    ),
    (
        "dispatch_wait_recv_cost_stats",
        to(torch.zeros(3, 2, dtype=torch.int64)),
        ("dispatch_wait", "shape"),
    ),
    (
        "dispatch_wait_recv_cost_stats",
        to(torch.zeros(2, dtype=torch.int32)),
        ("dispatch_wait", "int32"),
    ),
    ("use_nvfp4", to("yes"), ("use_nvfp4", "True or False")),
    ("use_nvfp4", to(True), ("use_nvfp4", "NVFP4")),
    ("colour", to(1), ("colour",)),
]

LOW_COMBINE: Cases = [
    *flags("async_finish", "return_recv_hook", "use_logfmt", "zero_copy"),
    *HANDLE,
    ("handle", to(None), ("handle must be the tuple",)),
    *tensors("x", torch.float8_e4m3fn, torch.int64),
    ("x", to(None), ("x must be",)),
    *tensors("topk_idx", torch.int16, torch.float32),
    ("topk_idx", to(None), ("topk_idx must be",)),
    *tensors("topk_weights", torch.int64),
    ("topk_weights", to(None), ("topk_weights must be",)),
    *(("out", to(value), ("out",)) for value in NO_TENSOR),
    ("out", to(torch.zeros(1, 128, dtype=torch.bfloat16)), ("out has shape",)),
    *(
        ("combine_wait_recv_cost_stats", to(value), ("combine_wait_recv_cost_stats",))
        for value in NO_TENSOR
    ),
    (
        "combine_wait_recv_cost_stats",
        to(torch.zeros(3, dtype=torch.int64)),
        ("combine_wait", "shape"),
    ),
    ("combine_wait_recv_cost_stats", to(torch.zeros(2)), ("combine_wait", "float32")),
    ("zero_copy", to(True), ("zero_copy=True", "get_next_low_latency_combine_buffer")),
    ("overlap", to(True), ("overlap",)),
    ("colour", to(1), ("colour",)),
]
