"""Run as a program, in a fresh process: every kind of first call, and the modules that each of them
imports.

Arguments: rank, number of ranks, a file for the ranks to meet in, whether to warm up. Rank 0
differentiates, others do not (but in backwards, which are collective, all do).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist

import tokenyard as ty


def main(rank: int, size: int, meeting: str, warm: bool) -> None:
    if size > 1:
        store = dist.FileStore(meeting, size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100)
        )
    x, idx, weights = torch.randn(8, 128), torch.arange(16).view(8, 2) % 8, torch.rand(8, 2)
    leaf = x.clone().requires_grad_(rank == 0)
    imported: dict[str, list[str]] = {}

    def first(what: str, call: Callable[[], Any]) -> Any:
        before = set(sys.modules)
        result = call()
        imported[what] = sorted(set(sys.modules) - before)
        return result

    ep = first(
        "construction",
        lambda: ty.ExpertParallel(
            num_experts=8, hidden=128, num_topk=2, max_tokens_per_rank=8, timeout=100.0
        ),
    )
    if warm:
        first("warmup", ep.warmup)
    recv = first("differentiable dispatch", lambda: ep.dispatch(leaf, idx, weights))
    first("differentiable combine", lambda: ep.combine(recv.x, recv.handle))
    first("differentiable cached dispatch", lambda: ep.dispatch(leaf, handle=recv.handle))
    quantised = first(
        "quantised dispatch", lambda: ep.dispatch(leaf, idx, quantize=ty.Quantize.FP8)
    )
    first("dequantize", quantised.dequantize)
    leaf, heavy = x.clone().requires_grad_(), weights.clone().requires_grad_()
    for layout in ty.Layout:
        dispatch = partial(ep.dispatch, leaf, idx, heavy, layout=layout)
        recv = first(f"dispatch {layout.name}", dispatch)
        rows = torch.zeros_like(recv.x) + recv.x.sum()
        weighted = layout is not ty.Layout.FLAT
        combine = partial(ep.combine, rows, recv.handle, weighted=weighted)
        y = first(f"combine {layout.name}", combine)
        first(
            f"backward {layout.name}",
            (y.sum() + (recv.row_weights if weighted else recv.topk_weights).sum()).backward,
        )
    later = first("asynchronous dispatch", lambda: ep.dispatch(leaf, idx, async_op=True))
    first("its end", later.wait)
    recv = first("static dispatch", lambda: ep.dispatch(leaf, idx, exact=False))
    first(
        "backward of dequantize",
        ep.dispatch(leaf, idx, quantize=ty.Quantize.FP8).dequantize().sum().backward,
    )
    with fwd.dual_level():
        dual = fwd.make_dual(x, x) if rank == 0 else x
        first("dispatch of tangents", lambda: ep.dispatch(dual, idx))
    first("check", ep.check)
    first("close", ep.close)
    print(json.dumps(imported))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "warm")
