"""Sizes, FP8 casts, comparisons, router scores, values that are remembered: DeepEP's
``deep_ep.utils.math``, ``gate`` and ``semantic``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard.errors import NotSupported
from tokenyard.formats import FORMATS, dequantize
from tokenyard.types import Quantize

_FP8 = FORMATS[Quantize.FP8]
_GROUP, _LARGEST, _LEAST = _FP8.block, _FP8.largest, _FP8.smallest
_STEPS, _MOST = 20, 100.0

Value = TypeVar("Value")


def ceil_div(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x``, rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """``a / b``; 0 of nothing is 0."""
    return 0 if a == b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """How far two tensors are apart: 1 - cosine of both plus one; 0 if they are equal."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, H]`` as FP8 E4M3 of that shape, and float32 scales ``[T, ceil(H / 128)]``."""
    tokens, hidden = x.shape
    groups = pad(x, (0, -hidden % _GROUP)).float().view(tokens, ceil_div(hidden, _GROUP), _GROUP)
    largest = groups.abs().amax(2).clamp(_LEAST)
    data = (groups * (_LARGEST / largest.unsqueeze(2))).to(torch.float8_e4m3fn)
    return data.flatten(1)[:, :hidden].contiguous(), largest / _LARGEST


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """BF16 ``[T, H]`` from FP8 and its scales: float32, or int32 with four exponents each."""
    return dequantize(x_fp8, x_scales, torch.bfloat16)


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Let each row of ``x`` hold its values from 0 to ``num_slots - 1`` once, falling, then -1."""
    known = torch.where(x < 0, num_slots, x)
    found = torch.zeros(len(x), num_slots + 1, dtype=torch.bool, device=x.device)
    found.scatter_(1, known, True)
    values = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    ordered = torch.where(found[:, :num_slots], values, -1).sort(1, descending=True).values
    count = min(num_slots, x.shape[1])
    x.fill_(-1)[:, :count] = ordered[:, :count]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """``scores [T, E]``, zero outside of each token's groups ``group_idx [T, G]``."""
    in_group = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device)
    in_group.scatter_(1, group_idx, True)
    return scores * in_group.repeat_interleave(scores.shape[1] // num_groups, 1)


def hash_tensor(t: Tensor) -> int:
    """A number of the bytes of ``t``, whatever its dtype and strides."""
    flat = t.reshape(-1).contiguous().view(torch.uint8)
    return int((flat.view(torch.int32) if t.nbytes % 4 == 0 else flat).sum(dtype=torch.int64))


def hash_tensors(*tensors: Any) -> int:
    """Of all tensors, also in lists; others count nothing."""
    value = 0
    for each in _all_of(tensors):
        value ^= hash_tensor(each)
    return value


def count_bytes(*tensors: Any) -> int:
    """Of all tensors, also in lists; None has none."""
    return sum(each.nbytes for each in _all_of(tensors))


def _all_of(given: Any) -> list[Tensor]:
    """Tensors among what is given, also in lists."""
    if isinstance(given, (tuple, list)):
        return [each for part in given for each in _all_of(part)]  # pyright: ignore[reportUnknownVariableType]
    return [given] if isinstance(given, Tensor) else []


def get_scores_by_factor(
    num_tokens: int, num_experts: int, num_ranks: int, factor: float
) -> Tensor:
    """float32 ``[T, E]``: uniform up to 1, up to ``factor`` for the experts of rank 0."""
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """float32 ``[T, E]`` by whose top ``num_topk`` about ``ratio`` times as many tokens go to rank
    0 as to another rank on average. NotSupported: ``precise``."""
    if precise:
        raise NotSupported(
            "get_unbalanced_scores(precise=True): pass False, which comes near the ratio"
        )
    low, high = 1.0, 1.0 if ratio == 1.0 else _MOST
    for _ in range(_STEPS if low < high else 0):
        middle = (low + high) / 2
        scores = get_scores_by_factor(num_tokens, num_experts, num_ranks, middle)
        ranks = scores.topk(num_topk, dim=1).indices // (num_experts // num_ranks)
        tokens = [float((ranks == rank).any(1).sum()) for rank in range(num_ranks)]
        if tokens[0] > ratio * sum(tokens[1:]) / max(1, num_ranks - 1):
            high = middle
        else:
            low = middle
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, low)


def value_or(value: Value | None, default: Value) -> Value:
    """``default`` for None."""
    return default if value is None else value


def weak_lru(
    maxsize: int | None = 128, typed: bool = False
) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """``functools.lru_cache`` for methods, which does not keep their objects alive."""

    def decorate(method: Callable[..., Value]) -> Callable[..., Value]:
        @lru_cache(maxsize, typed)
        def remembered(weak: Any, *arguments: Any, **options: Any) -> Value:
            return method(weak(), *arguments, **options)

        @wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Value:
            return remembered(ref(self), *arguments, **options)

        return call

    return decorate
