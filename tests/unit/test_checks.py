"""Limits of what a caller may pass, at the limit and one beyond it; the errors' words are
``test_bad_input.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from bad_input import error_of
from tokenyard import arguments, checks
from tokenyard.arguments import MOST_BYTES
from tokenyard.config import Config
from tokenyard.engines.collective import CollectiveEngine
from tokenyard.engines.low_latency import LowLatencyEngine
from tokenyard.engines.ring_engine import NvlinkEngine, TwolevelEngine
from tokenyard.handle import Spec
from tokenyard.limits import MOST_ALIGNMENT, check_result
from tokenyard.rows import Payload

FLAT, MAJOR, PADDED = ty.Layout
LARGEST = 2**31 - 1
M = 4
ENGINES: dict[str, Any] = {
    each.name: each for each in (CollectiveEngine, NvlinkEngine, TwolevelEngine, LowLatencyEngine)
}
"""What checks ask an engine, its class knows."""
NVLINK = ENGINES["nvlink"]
IN_PLACE = [torch.zeros(M, 8), torch.zeros(M, 8).bfloat16()]
INPUTS = (
    torch.ones(3, 8),
    torch.tensor([[0, 1], [1, -1], [0, 0]]),
    torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.1, 0.37]]),
)


def config(**changes: Any) -> Config:
    sizes = {
        "num_experts": 4,
        "hidden": 8,
        "num_topk": 2,
        "max_tokens_per_rank": M,
        "rank": 0,
        "world_size": 2,
    }
    return Config(**{**sizes, "timeout": 1.0, **changes})


def spec(layout: ty.Layout, exact: bool = True, alignment: int = 1) -> Spec:
    return Spec(layout=layout, exact=exact, expert_alignment=alignment)


def sizes(value: Any, timeout: Any = 1.0) -> Callable[[], object]:
    return lambda: (arguments.check_sizes({"hidden": value}), arguments.check_timeout(timeout))


def option(value: Any) -> Callable[[], object]:
    return lambda: arguments.check_optional({"buffer_bytes": value})


def asked(alignment: Any, capacity: Any = None) -> Callable[[], object]:
    return lambda: checks.check_spec(MAJOR, capacity is None, alignment, capacity)


def tokens(count: int, layout: ty.Layout, exact: bool) -> Callable[[], object]:
    return lambda: checks.check_bound(count, spec(layout, exact), config())


def blocks(alignment: int, engine: str, experts: int = 4) -> Callable[[], object]:
    payload, known = Payload(torch.zeros(3, 8), None), config(num_experts=experts)
    return lambda: check_result(
        payload,
        None,
        spec(MAJOR, True, alignment),
        known,
        ENGINES[engine].counts_by_most,
        MOST_BYTES,
    )


def rows_in_place_of(
    count: int, engine: str = "nvlink", layout: ty.Layout = FLAT
) -> Callable[[], object]:
    payload = Payload(torch.zeros(count, 8), None)
    return lambda: checks.check_in_place(
        ENGINES[engine], spec(layout), payload, None, config(), MOST_BYTES
    )


def quantized(data: Tensor, scales: Tensor) -> Callable[[], object]:
    return lambda: checks.check_payload(ty.Quantized(data, scales), config(), None)


FP8 = torch.zeros(3, 8).to(torch.float8_e4m3fn)
GOOD: dict[str, Callable[[], object]] = {
    "the largest size": sizes(LARGEST),
    "the smallest size": sizes(1),
    "the longest timeout": sizes(1, 1e9),
    "a short timeout": sizes(1, 1e-9),
    "one byte": option(1),
    "all bytes": option(MOST_BYTES),
    "no bytes said": option(None),
    "the largest alignment": asked(LARGEST),
    "no room": asked(1, 0),
    "all room": asked(1, LARGEST),
    "M tokens, static": tokens(M, FLAT, False),
    "M tokens, padded": tokens(M, PADDED, True),
    "any tokens, exact": tokens(10**6, MAJOR, True),
    "blocks as large as can be": blocks(MOST_ALIGNMENT, "collective"),
    "blocks of kernels": blocks(MOST_ALIGNMENT, "nvlink"),
    "blocks of many experts": blocks(LARGEST // 2**15 - 2 * M, "nvlink", 2**16),
    "M tokens in place": rows_in_place_of(M),
    "twolevel in place": rows_in_place_of(1, "twolevel"),
    "scales of a kind": quantized(FP8, torch.zeros(3, 1)),
    "bias in a list": lambda: checks.check_bias_and_out(IN_PLACE, None, torch.zeros(2, 8), M),
}
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "a size too large": (sizes(LARGEST + 1), "at most 2147483647"),
    "too long": (sizes(1, 1.0000001e9), "at most 1000000000"),
    "no time": (sizes(1, 0.0), "positive"),
    "0 bytes": (option(0), "at least 1"),
    "more than all bytes": (option(MOST_BYTES + 1), "at most"),
    "True bytes": (option(True), "whole"),
    "an alignment too large": (asked(LARGEST + 1), "expert_alignment"),
    "too much room": (asked(1, LARGEST + 1), "capacity"),
    "less than no room": (asked(1, -1), "capacity"),
    "too many tokens, static": (tokens(M + 1, FLAT, False), "static shapes"),
    "too many tokens, padded": (tokens(M + 1, PADDED, True), "EXPERT_PADDED"),
    "blocks too large": (blocks(LARGEST // 2 + 1, "collective"), "int32"),
    "blocks of kernels too large": (blocks(LARGEST // 2 - 2 * M + 1, "nvlink"), "int32"),
    "blocks too large for the rank with most": (blocks(LARGEST // 3 + 1, "collective", 5), "int32"),
    "blocks too large for many experts": (
        blocks(LARGEST // 2**15 - 2 * M + 1, "nvlink", 2**16),
        "int32",
    ),
    "padding beyond any use": (blocks(MOST_ALIGNMENT + 1, "collective"), "at most 65536"),
    "too many tokens in place": (rows_in_place_of(M + 1), "room for max_tokens_per_rank=4"),
    "blocks in place": (rows_in_place_of(1, "nvlink", MAJOR), "only Layout.FLAT in place"),
    "no symmetric memory": (rows_in_place_of(1, "low_latency"), "no symmetric memory"),
    "scales of other rows": (quantized(FP8, torch.zeros(2, 1)), "one row per token"),
    "scales of no columns": (quantized(FP8, torch.zeros(3, 0)), "S >= 1"),
    "scales elsewhere": (quantized(FP8, torch.zeros(3, 1, device="meta")), "on meta"),
}


@pytest.mark.parametrize("what", GOOD)
def test_what_is_still_allowed(what: str) -> None:
    GOOD[what]()


@pytest.mark.parametrize("what", BAD)
def test_what_is_one_too_many(what: str) -> None:
    call, words = BAD[what]
    error = error_of(call)
    assert isinstance(error, ValueError | ty.NotSupported) and words in str(error), repr(error)


def test_rows_that_fit_in_place() -> None:
    """R * M of them: more come only from a rank that has more tokens than M."""
    with ty.ExpertParallel(
        num_experts=2, hidden=8, num_topk=2, max_tokens_per_rank=3, device="cpu"
    ) as ep:
        two, three = (ep.dispatch(*(t[:rows] for t in INPUTS)).handle for rows in (2, 3))
    three = replace(three, num_tokens=1)  # the others are a peer's
    alone = config(max_tokens_per_rank=2, world_size=1)
    checks.check_combine_in_place(NVLINK, two, None, (), torch.float32, alone, MOST_BYTES)
    with pytest.raises(ValueError, match="3 rows came, but in_place=True has room for 2"):
        checks.check_combine_in_place(NVLINK, three, None, (), torch.float32, alone, MOST_BYTES)
    with pytest.raises(ty.NotSupported, match="reduces no weights in place"):
        checks.check_combine_in_place(
            NVLINK, two, torch.zeros(2, 2), (), torch.float32, alone, MOST_BYTES
        )


def test_weights_of_any_float_are_float32() -> None:
    """Those of a dispatch and those of a combine; ids are taken as they are."""
    x, idx, weights = INPUTS
    with ty.ExpertParallel(
        num_experts=2, hidden=8, num_topk=2, max_tokens_per_rank=3, device="cpu"
    ) as ep:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            short = weights.to(dtype)
            recv = ep.dispatch(x, idx.int(), short, layout=MAJOR)
            assert recv.row_weights.dtype == torch.float32
            want = ep.combine(recv.x, recv.handle, weighted=True)
            bare = ep.dispatch(x, idx, layout=MAJOR)
            assert torch.equal(
                ep.combine(bare.x, bare.handle, weighted=True, topk_weights=short), want
            )
            assert torch.equal(want[1], short[1, :1].float().expand(8))
            assert torch.equal(want[2], short[2].float().sum().expand(8))  # merged in float32
