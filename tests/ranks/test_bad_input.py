"""Every argument wrong in every way: on all ranks, and on one rank while the others call correctly.

Whoever is wrong gets a ``ValueError`` that names argument, value and remedy, the others a
``PeerError`` that names the rank and says why; nobody waits for the timeout, and the object works
on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tokenyard as ty
from bad_input import (
    BIG,
    CASE,
    SIZES,
    Inputs,
    anyone,
    assert_works,
    check,
    complaint,
    error_of,
    make,
    meet,
)
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, distributed_test

WORLD_SIZES = (1, 3) if SOAK == 1 else (1, 2, 4)
M, K, H, E = CASE.num_tokens, CASE.num_topk, CASE.hidden, CASE.num_experts
T = 5
MAJOR, PADDED = ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED
META = torch.device("meta")
FIRST_MISSING = f"cuda:{torch.cuda.device_count()}"
"""The first GPU that this machine has not: ``cuda:0`` where there is none."""


@dataclass(frozen=True)
class Bad:
    """Arguments that replace good ones, and what the error says."""

    change: Callable[[Any], dict[str, Any]]
    words: tuple[str, ...]
    kind: type[Exception] = ValueError


def bad(words: str, change: Callable[[Any], dict[str, Any]], **more: Any) -> Bad:
    return Bad(change, tuple(words.split("|")), **more)


def nested(rows: torch.Tensor, layout: torch.layout = torch.strided) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor(list(rows.split(2)), layout=layout)


def picks_with(inputs: Inputs, value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    idx = inputs.topk_idx.to(dtype, copy=True)
    idx[2, 1] = value
    return idx


def quantized(x: torch.Tensor, **parts: Any) -> ty.Quantized:
    good = {"data": x.to(torch.float8_e4m3fn), "scales": torch.ones(x.shape[0], 1, device=x.device)}
    return ty.Quantized(**{**good, **parts})


DISPATCH: dict[str, list[Bad]] = {
    "x": [
        bad("x must be|Tensor|list", lambda i: {"x": [[1.0]]}),
        bad("x must be|Tensor|NoneType", lambda i: {"x": None}),
        bad("x has shape [40]|2 dim|[T, H] = [T, 40]", lambda i: {"x": i.x[0]}),
        bad("x has shape [1, 5, 40]|2 dim|[T, H] = [T, 40]", lambda i: {"x": i.x.unsqueeze(0)}),
        bad(
            "x has 39 channels|shape [5, 39]|hidden=40|[T, H] = [T, 40]|make one",
            lambda i: {"x": i.x[:, :39]},
        ),
        bad("x is float64|bfloat16", lambda i: {"x": i.x.double()}),
        bad("x is complex64|bfloat16", lambda i: {"x": i.x.to(torch.complex64)}),
        bad("x is int8|Quantized", lambda i: {"x": i.x.to(torch.int8)}),
        bad("x is float8_e4m3fn|Quantized", lambda i: {"x": i.x.to(torch.float8_e4m3fn)}),
        bad("x is on meta", lambda i: {"x": i.x.to(META)}),
        bad("x|sparse", lambda i: {"x": i.x.to_sparse()}),
        bad("x is a nested tensor|to_padded_tensor", lambda i: {"x": nested(i.x)}),
        bad("x is a nested tensor|.values()", lambda i: {"x": nested(i.x, torch.jagged)}),
        bad("topk_idx has shape [5, 3]|[T, K] = [4, 3]|num_topk", lambda i: {"x": i.x[:4]}),
    ],
    "quantized": [
        bad("quantize ('fp8')|Quantize", lambda i: {"quantize": "fp8"}),
        bad("quantize (True)|Quantize", lambda i: {"quantize": True}),
        bad("leave quantize out", lambda i: {"x": quantized(i.x), "quantize": ty.Quantize.FP8}),
        bad("x.data must be", lambda i: {"x": quantized(i.x, data=None)}),
        bad("x.data is bfloat16|int8", lambda i: {"x": quantized(i.x, data=i.x)}),
        bad("x.data has 39|hidden=40", lambda i: {"x": quantized(i.x[:, :39])}),
        bad("x.scales must be", lambda i: {"x": quantized(i.x, scales=1.0)}),
        bad(
            "x.scales is float64|float32",
            lambda i: {"x": quantized(i.x, scales=torch.ones(T, 1).double())},
        ),
        bad(
            "x.data has shape [40]|[T, H] = [T, 40]",
            lambda i: {"x": quantized(i.x, data=i.x[0].to(torch.int8))},
        ),
        bad(
            "x.scales has shape [5]|2 dim|[T, S] = [5, S]",
            lambda i: {"x": quantized(i.x, scales=torch.ones(T))},
        ),
        bad(
            "x.scales has shape [4, 1]|[T, S] = [5, S]",
            lambda i: {"x": quantized(i.x, scales=torch.ones(4, 1))},
        ),
        bad("x.scales has shape [5, 0]", lambda i: {"x": quantized(i.x, scales=torch.ones(T, 0))}),
        bad(
            "x.scales has shape [5, 1]|float8_e8m0fnu|[T, S] = [5, 2]|one per 32",
            lambda i: {"x": quantized(i.x, scales=torch.ones(T, 1).to(torch.float8_e8m0fnu))},
        ),
        bad(
            "x.scales is uint8|float8_e8m0fnu",
            lambda i: {"x": quantized(i.x, scales=torch.ones(T, 2).to(torch.uint8))},
        ),
        bad(
            "x.scales is on meta",
            lambda i: {"x": quantized(i.x, scales=torch.ones(T, 1, device=META))},
        ),
    ],
    "topk_idx": [
        bad("topk_idx is missing|[T, K] = [5, 3]|handle=", lambda i: {"topk_idx": None}),
        bad("topk_idx must be|Tensor|list", lambda i: {"topk_idx": i.topk_idx.tolist()}),
        bad(
            "topk_idx has shape [5]|2 dim|[T, K] = [5, 3]", lambda i: {"topk_idx": i.topk_idx[:, 0]}
        ),
        bad("topk_idx has shape [5, 2]|[T, K] = [5, 3]", lambda i: {"topk_idx": i.topk_idx[:, :2]}),
        bad(
            "topk_idx has shape [6, 3]|[5, 3]",
            lambda i: {"topk_idx": i.topk_idx[[0, 0, 1, 2, 3, 4]]},
        ),
        bad("topk_idx is float32|int64", lambda i: {"topk_idx": i.topk_idx.float()}),
        bad("topk_idx is bool|int64", lambda i: {"topk_idx": i.topk_idx.bool()}),
        bad("topk_idx is int16|int32", lambda i: {"topk_idx": i.topk_idx.short()}),
        bad("topk_idx is on meta", lambda i: {"topk_idx": i.topk_idx.to(META)}),
        bad(
            'topk_idx[2, 1] is 8, but there are 8 experts (use -1 for "no expert")',
            lambda i: {"topk_idx": picks_with(i, E)},
        ),
        bad(
            "topk_idx[2, 1] is -2|8 experts",
            lambda i: {"topk_idx": picks_with(i, -2), "exact": False},
        ),
        bad(
            "topk_idx[2, 1] is 4611686018427387904",
            lambda i: {"topk_idx": picks_with(i, 2**62), "layout": MAJOR},
        ),
        bad(
            "topk_idx[2, 1] is -9223372036854775808",
            lambda i: {"topk_idx": picks_with(i, -(2**63))},
        ),
        bad(
            "topk_idx[2, 1] is -2147483648",
            lambda i: {"topk_idx": picks_with(i, -(2**31), torch.int32), "layout": PADDED},
        ),
        bad("topk_idx[2, 1] is 8", lambda i: {"topk_idx": picks_with(i, E), "async_op": True}),
        bad(
            "topk_idx[2, 1] is 8",
            lambda i: {"topk_idx": picks_with(i, E), "x": i.x.float().requires_grad_()},
        ),
    ],
    "topk_weights": [
        bad("topk_weights must be|Tensor|float", lambda i: {"topk_weights": 1.0}),
        bad(
            "topk_weights has shape [5]|2 dim|[T, K] = [5, 3]",
            lambda i: {"topk_weights": i.topk_weights[:, 0]},
        ),
        bad(
            "topk_weights has shape [5, 2]|[T, K] = [5, 3]",
            lambda i: {"topk_weights": i.topk_weights[:, :2]},
        ),
        bad("topk_weights has shape [4, 3]|[5, 3]", lambda i: {"topk_weights": i.topk_weights[:4]}),
        bad("topk_weights is int64|float32", lambda i: {"topk_weights": i.topk_idx}),
        bad("topk_weights is float64|float32", lambda i: {"topk_weights": i.topk_weights.double()}),
        bad("topk_weights is on meta", lambda i: {"topk_weights": i.topk_weights.to(META)}),
    ],
    "options": [
        bad("layout ('flat')|Layout", lambda i: {"layout": "flat"}),
        bad("layout (0)|Layout", lambda i: {"layout": 0}),
        bad("exact ('static')", lambda i: {"exact": "static"}),
        bad("in_place ('no')|True or False", lambda i: {"in_place": "no"}),
        bad("expert_alignment (True)|whole", lambda i: {"layout": MAJOR, "expert_alignment": True}),
        bad("capacity (True)|whole", lambda i: {"capacity": True, "layout": MAJOR, "exact": False}),
        bad("expert_alignment (0)|at least 1", lambda i: {"layout": MAJOR, "expert_alignment": 0}),
        bad(
            "expert_alignment (-8)|at least 1", lambda i: {"layout": MAJOR, "expert_alignment": -8}
        ),
        bad("expert_alignment (2.0)|whole", lambda i: {"layout": MAJOR, "expert_alignment": 2.0}),
        bad("expert_alignment (None)|whole", lambda i: {"layout": MAJOR, "expert_alignment": None}),
        bad(f"expert_alignment|{BIG}", lambda i: {"layout": MAJOR, "expert_alignment": BIG}),
        bad(
            "expert_alignment (2147483647)|int32|smaller",
            lambda i: {"layout": MAJOR, "expert_alignment": 2**31 - 1},
        ),
        bad("expert_alignment=16|EXPERT_MAJOR|FLAT", lambda i: {"expert_alignment": 16}),
        bad("capacity=9|exact=False|EXPERT_MAJOR", lambda i: {"capacity": 9}),
        bad("capacity=9|exact=False|EXPERT_MAJOR", lambda i: {"capacity": 9, "layout": MAJOR}),
        bad(
            "capacity=9|exact=False|EXPERT_MAJOR",
            lambda i: {"capacity": 9, "layout": PADDED, "exact": False},
        ),
        bad("capacity (-1)|whole", lambda i: {"capacity": -1, "layout": MAJOR, "exact": False}),
        bad("capacity (2.5)|whole", lambda i: {"capacity": 2.5, "layout": MAJOR, "exact": False}),
        bad(f"capacity|{BIG}", lambda i: {"capacity": BIG, "layout": MAJOR, "exact": False}),
        bad(
            "engine 'collective'|in_place|nvlink",
            lambda i: {"in_place": True},
            kind=ty.NotSupported,
        ),
        bad("after|wait()", lambda i: {"after": 7, "async_op": True}),
        bad("async_op (1)|True or False", lambda i: {"async_op": 1}),
        bad("return_hook ('no')|True or False", lambda i: {"return_hook": "no"}),
        bad("options (5)|CallOptions", lambda i: {"options": 5}),
    ],
    "too many tokens": [
        bad(
            f"{M + 1} tokens|max_tokens_per_rank={M}|larger|split|exact=True",
            lambda i: {**too_many(i), "exact": False},
        ),
        bad(
            f"{M + 1} tokens|max_tokens_per_rank={M}|FLAT",
            lambda i: {**too_many(i), "layout": PADDED},
        ),
    ],
}


def too_many(inputs: Inputs) -> dict[str, Any]:
    rows = torch.zeros(M + 1, dtype=torch.int64, device=inputs.x.device)
    return {
        "x": inputs.x[rows],
        "topk_idx": inputs.topk_idx[rows],
        "topk_weights": inputs.topk_weights[rows],
    }


@dataclass(frozen=True)
class Old:
    """An earlier dispatch of three kinds, on the object under test and on others."""

    x: torch.Tensor
    flat: ty.Received
    major: ty.Received
    padded: ty.Received
    bare: ty.Received
    foreign: ty.Received
    closed: ty.Received
    inputs: Inputs


CACHED: list[Bad] = [
    bad("handle must be|.handle", lambda o: {"handle": 3}),
    bad("handle must be|.handle|Received", lambda o: {"handle": o.flat}),
    bad("handle belongs to another ExpertParallel", lambda o: {"handle": o.foreign.handle}),
    bad("handle belongs to another ExpertParallel", lambda o: {"handle": o.closed.handle}),
    bad("topk_idx|leave it out", lambda o: {"topk_idx": o.inputs.topk_idx}),
    bad("topk_weights|leave it out", lambda o: {"topk_weights": o.inputs.topk_weights}),
    bad("layout|leave it out", lambda o: {"layout": ty.Layout.FLAT}),
    bad("capacity|leave it out", lambda o: {"capacity": 9}),
    bad("exact|leave it out", lambda o: {"exact": False}),
    bad("expert_alignment|leave it out", lambda o: {"expert_alignment": 16}),
    bad("x has 4 tokens|shape [4, 40]|[T, H] = [5, 40]", lambda o: {"x": o.x[:4]}),
    bad("x has 39 channels|hidden=40", lambda o: {"x": o.x[:, :39]}),
    bad("x is float64", lambda o: {"x": o.x.double()}),
    bad("x is on meta", lambda o: {"x": o.x.to(META)}),
]


def of_major(o: Old) -> dict[str, Any]:
    return {"x": o.major.x, "handle": o.major.handle}


def of_padded(o: Old) -> dict[str, Any]:
    return {"x": o.padded.x, "handle": o.padded.handle}


COMBINE: dict[str, list[Bad]] = {
    "x": [
        bad("x must be|Tensor|list", lambda o: {"x": []}),
        bad("x has shape [40]|2 dim|[N, H] = [|, 40]|recv.x", lambda o: {"x": o.x[0]}),
        bad("x has shape|recv.x", lambda o: {"x": torch.cat([o.flat.x, o.flat.x[:1], o.x[:1]])}),
        bad("x has shape|39]|[N, H] = [|, 40]|recv.x", lambda o: {"x": o.flat.x[:, :39]}),
        bad("x is float64|bfloat16", lambda o: {"x": o.flat.x.double()}),
        bad("x is int8|not quantised", lambda o: {"x": o.flat.x.to(torch.int8)}),
        bad("x is float8_e4m3fn|not quantised", lambda o: {"x": o.flat.x.to(torch.float8_e4m3fn)}),
        bad("x is on meta", lambda o: {"x": o.flat.x.to(META)}),
        bad("x is a view that negates|resolve_neg", lambda o: {"x": torch._neg_view(o.flat.x)}),
        bad("x|sparse", lambda o: {"x": o.flat.x.to_sparse()}),
        bad("x is a nested tensor|to_padded_tensor", lambda o: {"x": nested(o.flat.x)}),
        bad(
            "x has shape|3 dim|[L, R * M, H] = [|, 40]|recv.x",
            lambda o: {**of_padded(o), "x": o.padded.x.flatten(0, 1)},
        ),
        bad("x has shape|recv.x", lambda o: {**of_padded(o), "x": o.padded.x[:, 1:]}),
        bad("x has shape|2 dim|[N, H] = [|, 40]", lambda o: {"x": o.padded.x}),
    ],
    "handle": [
        bad("handle must be|NoneType", lambda o: {"handle": None}),
        bad("handle must be|.handle|Received", lambda o: {"handle": o.flat}),
        bad("handle belongs to another ExpertParallel", lambda o: {"handle": o.foreign.handle}),
        bad("handle belongs to another ExpertParallel", lambda o: {"handle": o.closed.handle}),
    ],
    "weights": [
        bad("weighted=True|FLAT", lambda o: {"weighted": True}),
        bad("weighted ('no')|True or False", lambda o: {"weighted": "no"}),
        bad("weighted=True only", lambda o: {**of_major(o), "topk_weights": o.inputs.topk_weights}),
        bad(
            "weighted=True needs weights",
            lambda o: {"x": o.bare.x, "handle": o.bare.handle, "weighted": True},
        ),
        bad(
            "topk_weights must be", lambda o: {**of_major(o), "weighted": True, "topk_weights": 1.0}
        ),
        bad(
            "topk_weights has shape [4, 3]|[T, K] = [5, 3]",
            lambda o: weigh(o, o.inputs.topk_weights[:4]),
        ),
        bad("topk_weights is int64", lambda o: weigh(o, o.inputs.topk_idx)),
        bad("topk_weights is on meta", lambda o: weigh(o, o.inputs.topk_weights.to(META))),
        bad(
            "reduce_weights|FLAT|EXPERT_MAJOR",
            lambda o: {**of_major(o), "reduce_weights": o.flat.topk_weights},
        ),
        bad("reduce_weights must be", lambda o: {"reduce_weights": True}),
        bad(
            "reduce_weights has shape|2]|[N, K] = [|, 3]|recv.topk_weights",
            lambda o: {"reduce_weights": o.flat.topk_weights[:, :2]},
        ),
        bad("reduce_weights is int64", lambda o: {"reduce_weights": o.flat.topk_idx}),
        bad(
            "reduce_weights is on meta", lambda o: {"reduce_weights": o.flat.topk_weights.to(META)}
        ),
    ],
    "bias and out": [
        bad("bias must be", lambda o: {"bias": 1.0}),
        bad("bias must be", lambda o: {"bias": (o.x, None)}),
        bad("bias has 3|pair", lambda o: {"bias": (o.x, o.x, o.x)}),
        bad("bias has shape [4, 40]|[T, H] = [5, 40]", lambda o: {"bias": o.x[:4]}),
        bad("bias has shape [40]|2 dim|[T, H] = [5, 40]", lambda o: {"bias": o.x[0]}),
        bad("bias is int64", lambda o: {"bias": o.x.long()}),
        bad("bias is on meta", lambda o: {"bias": o.x.to(META)}),
        bad("out must be", lambda o: {"out": 1.0}),
        bad("out has shape [200]|2 dim|[T, H] = [5, 40]", lambda o: {"out": o.x.flatten()}),
        bad("out has shape [5, 39]|[T, H] = [5, 40]", lambda o: {"out": o.x[:, :39].clone()}),
        bad("out is float32|bfloat16", lambda o: {"out": o.x.float()}),
        bad("out is on meta", lambda o: {"out": o.x.to(META)}),
        bad("out=|no_grad", lambda o: {"out": o.x.clone().requires_grad_()}),
        bad("out|memory", lambda o: {"out": o.x[:1].clone().expand(T, H)}),
        bad("out|strides [3, 1]", lambda o: {"out": o.x.clone().as_strided((T, H), (3, 1))}),
        bad(
            "engine 'collective'|in_place|nvlink",
            lambda o: {"in_place": True},
            kind=ty.NotSupported,
        ),
        bad("after|wait()", lambda o: {"after": 7, "async_op": True}),
        bad("async_op (1)|True or False", lambda o: {"async_op": 1}),
        bad("return_hook ('no')|True or False", lambda o: {"return_hook": "no"}),
        bad("options (5)|CallOptions", lambda o: {"options": 5}),
    ],
}


def weigh(o: Old, weights: torch.Tensor) -> dict[str, Any]:
    return {**of_major(o), "weighted": True, "topk_weights": weights}


Prepare = Callable[[ty.ExpertParallel], tuple[Any, Callable[..., Any], dict[str, Any]]]
"""From an object to what ``Bad.change`` is given, the method to call, and its good arguments."""


def run(ranks: Ranks, cases: list[Bad], prepare: Prepare) -> None:
    """Try every case on all ranks, then on the last one alone, on one object as long as it lives;
    raise all complaints.
    """
    complaints: list[str] = []
    ep = make(ranks)
    prepared = prepare(ep)
    for at, case in enumerate(cases):
        for alone in (False, True)[: ranks.world_size]:
            if why := trial(ranks, ep, case, alone, *prepared):
                complaints.append(
                    f"case {at} ({'|'.join(case.words)}) on "
                    f"{'one rank' if alone else 'all ranks'}: {why}"
                )
                ep.close()
                ep = make(ranks)
                prepared = prepare(ep)
    ep.close()
    assert not complaints, "\n".join(complaints)


def trial(
    ranks: Ranks,
    ep: ty.ExpertParallel,
    case: Bad,
    alone: bool,
    given: Any,
    method: Any,
    good: dict[str, Any],
) -> str:
    """What is wrong with how one bad call ends, the same verdict (if not the same words) on all
    ranks.
    """
    failed_rank = ranks.world_size - 1
    wrong = not alone or ranks.rank == failed_rank
    arguments = {**good, **case.change(given)} if wrong else good
    kind, words = (
        (case.kind, case.words) if wrong else (ty.PeerError, (f"rank {failed_rank}", *case.words))
    )
    why = complaint(error_of(lambda: method(**arguments)), kind, words)
    if anyone(ranks, bool(why)):
        return why or "other ranks complain"
    why = complaint(error_of(lambda: assert_works(ranks, ep)), None, ())
    return f"afterwards: {why or 'other ranks complain'}" if anyone(ranks, bool(why)) else ""


@pytest.mark.parametrize("argument", DISPATCH)
@distributed_test(world_size=WORLD_SIZES)
def test_dispatch(ranks: Ranks, argument: str) -> None:
    inputs = Inputs.of(ranks, T)
    good = {"x": inputs.x, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
    run(ranks, DISPATCH[argument], lambda ep: (inputs, ep.dispatch, good))


def earlier(ranks: Ranks, ep: ty.ExpertParallel) -> Old:
    """Dispatches to have handles of."""
    i = Inputs.of(ranks, T)
    routing = (i.x, i.topk_idx, i.topk_weights)
    with make(ranks) as closed:
        gone = closed.dispatch(*routing)
    other = make(ranks)
    return Old(
        x=i.x,
        flat=ep.dispatch(*routing),
        major=ep.dispatch(*routing, layout=MAJOR),
        padded=ep.dispatch(*routing, layout=PADDED),
        bare=ep.dispatch(i.x, i.topk_idx, layout=MAJOR),
        foreign=other.dispatch(*routing),
        closed=gone,
        inputs=i,
    )


@distributed_test(world_size=WORLD_SIZES)
def test_cached_dispatch(ranks: Ranks) -> None:
    def prepare(ep: ty.ExpertParallel) -> tuple[Old, Any, dict[str, Any]]:
        old = earlier(ranks, ep)
        return old, ep.dispatch, {"x": old.x, "handle": old.flat.handle}

    run(ranks, CACHED, prepare)


@pytest.mark.parametrize("argument", COMBINE)
@distributed_test(world_size=WORLD_SIZES)
def test_combine(ranks: Ranks, argument: str) -> None:
    def prepare(ep: ty.ExpertParallel) -> tuple[Old, Any, dict[str, Any]]:
        old = earlier(ranks, ep)
        return old, ep.combine, {"x": old.flat.x, "handle": old.flat.handle}

    run(ranks, COMBINE[argument], prepare)


CONSTRUCTION: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sizes": [
        *(
            (f"{name} ({value!r})|at least 1", {name: value})
            for name in SIZES
            for value in (0, -1, None)
        ),
        ("num_experts (2.5)|whole", {"num_experts": 2.5}),
        ("num_experts ('8')|whole", {"num_experts": "8"}),
        ("num_experts (True)|whole", {"num_experts": True}),
        ("num_experts (tensor(8))|whole", {"num_experts": torch.tensor(8)}),
        ("hidden|whole", {"hidden": {40}}),
        (f"num_topk|{BIG}", {"num_topk": BIG}),
        ("num_experts (65537)|at most 65536", {"num_experts": 65537}),
        ("num_topk (4097)|at most 4096", {"num_topk": 4097}),
    ],
    "timeout": [
        *(
            (f"timeout ({value!r})|seconds", {"timeout": value})
            for value in (0, -1.0, None, "30", True)
        ),
        *(
            (f"timeout ({value})|seconds", {"timeout": float(value)})
            for value in ("nan", "inf", "1e+300", "1e+20")
        ),
    ],
    "engine": [
        ("engine ('nvlinc')|'auto'|'collective'", {"engine": "nvlinc"}),
        ("engine (None)|'auto'", {"engine": None}),
        ("engine ({1})|'auto'", {"engine": {1}}),
    ],
    "device": [
        ("device|nonsense", {"device": "nonsense"}),
        ("device|3.5", {"device": 3.5}),
        ("device|meta", {"device": "meta"}),
        ("device|cuda:77", {"device": "cuda:77"}),
        (f"device ('{FIRST_MISSING}')|sees", {"device": FIRST_MISSING}),
        (
            f"device (device(type='cuda', index={FIRST_MISSING[5:]}))|sees",
            {"device": torch.device(FIRST_MISSING)},
        ),
    ],
}


@pytest.mark.parametrize("argument", CONSTRUCTION)
@distributed_test(world_size=WORLD_SIZES)
def test_construction(ranks: Ranks, argument: str) -> None:
    """A refused construction leaves nothing behind that would disturb the next one."""
    complaints: list[str] = []
    failed_rank = ranks.world_size - 1
    for text, wrong in CONSTRUCTION[argument]:
        words = text.split("|")
        for alone in (False, True)[: ranks.world_size]:
            here = not alone or ranks.rank == failed_rank
            error = error_of(lambda here=here, wrong=wrong: make(ranks, **(wrong if here else {})))
            why = (
                complaint(error, ValueError, words)
                if here
                else complaint(error, ty.PeerError, [f"rank {failed_rank}", *words])
            )
            if why:
                complaints.append(f"{text} on {'one rank' if alone else 'all ranks'}: {why}")
            meet(ranks)
    with make(ranks) as ep:
        assert_works(ranks, ep)
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("group", [5, "world", [0, 1], object], ids=repr)
@distributed_test(world_size=(1, 2))
def test_something_else_as_a_group(ranks: Ranks, group: Any) -> None:
    with pytest.raises(
        ValueError, match=r"group \(.*\) must be a torch\.distributed\.ProcessGroup"
    ):
        make(ranks, group)


@distributed_test(world_size=(1, 2))
def test_tensors_that_no_wire_can_read(ranks: Ranks) -> None:
    """An object without a device of its own takes host and CUDA tensors, and says so of others."""
    inputs = Inputs.of(ranks)
    with make(ranks, device=None) as ep:
        here = ranks.rank == ranks.world_size - 1
        arguments = [t.to(META) if here else t for t in (inputs.x, inputs.topk_idx)]
        error = error_of(lambda: ep.dispatch(*arguments))
        meet(ranks)
        check(error, ValueError if here else ty.PeerError, "x is on meta")
