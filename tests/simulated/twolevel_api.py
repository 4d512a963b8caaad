"""``ExpertParallel(engine="twolevel")`` on simulated ranks, beside engine nvlink: whole numbers, so
all trees give the same bits.

``python tests/run.py twolevel_api 2 2 3``: 2 nodes of 2 ranks, seed 3.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from tokenyard.testing import assert_same_bits
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

HIDDEN, TOPK, MOST = 24, 3, 6


def inputs(rank: int, world_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of whole numbers, picks, weights that are powers of two."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(-8, 9, (MOST - rank % 2, HIDDEN), generator=random).to(torch.bfloat16)
    idx = torch.rand(len(x), 2 * world_size, generator=random).argsort(1)[:, :TOPK]
    idx[torch.rand(idx.shape, generator=random) < 0.2] = -1
    weights = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, idx.shape, generator=random)]
    return x, idx, weights


def results(ep: ty.ExpertParallel, seed: int) -> dict[str, Tensor]:
    """What calls of all sorts give, by name."""
    found: dict[str, Tensor] = {}
    x, idx, weights = inputs(ep.rank, ep.world_size, seed)

    def keep(name: str, recv: ty.Received) -> None:
        found[name] = recv.x.detach().clone()
        found[f"{name}: source"] = recv.source.clone()

    x.requires_grad_()
    weights.requires_grad_()
    recv = ep.dispatch(x, idx, weights)
    keep("flat", recv)
    out = ep.combine(recv.x * recv.topk_weights.sum(1, keepdim=True).to(recv.x.dtype), recv.handle)
    found["flat: combined"] = out.detach()
    with torch.no_grad():
        late = ep.dispatch(x, handle=recv.handle, async_op=True)
        late.wait()
        keep("cached, later", late)
        major = ep.dispatch(
            x, idx, weights.detach(), layout=ty.Layout.EXPERT_MAJOR, expert_alignment=4
        )
        keep("major", major)
        found["major: combined"] = ep.combine(major.x, major.handle, weighted=True)
        static = ep.dispatch(
            x,
            idx,
            weights.detach(),
            layout=ty.Layout.EXPERT_MAJOR,
            exact=False,
            quantize=ty.Quantize.FP8,
        )
        rows = int(static.expert_offsets[-1])
        found["static: source"] = static.source.clone()
        found["static: data"] = static.x.data[:rows].view(torch.uint8).clone()
        padded = ep.dispatch(x, idx.flip(0), layout=ty.Layout.EXPERT_PADDED, exact=False)
        found["padded: counts"] = padded.tokens_per_expert.clone()
        found["padded: combined"] = ep.combine(padded.x, padded.handle)
    # the first handle, behind calls of other kinds and of another routing
    out.float().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    found["flat: gradient of x"], found["flat: gradient of weights"] = x.grad, weights.grad
    ep.check()
    return found


def body(ranks: SimulatedRank, per_node: int, seed: int) -> None:
    group, sizes = (
        SimulatedGroup(ranks),
        {"num_experts": 2 * ranks.world_size, "hidden": HIDDEN, "num_topk": TOPK},
    )
    both: dict[str, dict[str, Tensor]] = {}
    options: dict[str, Any] = {
        "max_tokens_per_rank": MOST,
        "buffer_bytes": 64 << 10,
        "timeout": 5.0,
    }
    for engine in ("nvlink", "twolevel"):
        ep = ty.ExpertParallel(
            group,
            **sizes,
            **options,
            engine=engine,
            topology=(ranks.world_size // per_node, per_node),
        )
        assert ep.engine == engine
        both[engine] = results(ep, seed)
        assert ep.buffer_bytes > 0
        ep.close()
        assert ep.buffer_bytes == 0
    for name, want in both["nvlink"].items():
        assert_same_bits(both["twolevel"][name], want, what=name, rank=ranks.rank)


def check(nodes: int, per_node: int, seed: int) -> None:
    simulate(nodes * per_node, lambda ranks: body(ranks, per_node, seed), seed=seed)


def refused_rows(what: str, dtype: torch.dtype, seed: int) -> None:
    """One rank cannot make rows for a combine in place: it says why, and the others, which wait for
    it, go on.
    """

    def body(ranks: SimulatedRank) -> None:
        ep = ty.ExpertParallel(
            SimulatedGroup(ranks),
            num_experts=8,
            hidden=HIDDEN,
            num_topk=TOPK,
            max_tokens_per_rank=MOST,
            buffer_bytes=64 << 10,
            timeout=5.0,
            engine="twolevel",
            topology=(2, 2),
        )
        x, idx, weights = inputs(ep.rank, ep.world_size, seed)
        recv = ep.dispatch(x, idx, weights)
        other = ep.dispatch(x, idx, layout=ty.Layout.EXPERT_MAJOR) if what == "layout" else recv
        wrong: dict[str, tuple[Any, Any, str]] = {
            "layout": (other.handle, dtype, "FLAT"),
            "handle": (recv, dtype, "handle must be"),
            "dtype": (recv.handle, "bf16", "dtype .'bf16'. must be"),
        }
        if ep.rank == 3:
            handle, kind, text = wrong[what]
            with pytest.raises((ValueError, ty.NotSupported), match=text):
                ep.empty_for_combine(handle, kind, in_place=True)
            rows = recv.x.to(dtype)
        else:
            rows = ep.empty_for_combine(recv.handle, dtype, in_place=True).copy_(recv.x)
        sums = ep.combine(recv.x.to(dtype), recv.handle)
        assert_same_bits(ep.combine(rows, recv.handle, in_place=True), sums, what="sums")
        ep.close()

    simulate(4, body, seed=seed)


def bias_in_the_buffer(given: str, seed: int) -> None:
    """Terms of a sum in place may lie where its rows are copied to first: results of an earlier
    dispatch in place.
    """

    def body(ranks: SimulatedRank) -> None:
        ep = ty.ExpertParallel(
            SimulatedGroup(ranks),
            num_experts=8,
            hidden=HIDDEN,
            num_topk=2,
            max_tokens_per_rank=MOST,
            buffer_bytes=64 << 10,
            timeout=5.0,
            engine="twolevel",
            topology=(2, 2),
        )
        x, _, _ = inputs(ep.rank, ep.world_size, seed)
        # So at least as many rows come.
        mine = torch.tensor([2 * ep.rank, 2 * ((ep.rank + 1) % 4)]).expand(len(x), 2)
        recv = ep.dispatch(x, mine.contiguous(), in_place=True)
        rows = 3 * recv.x.clone()
        places = {"at its end": recv.x[-len(x) :], "over its rows": recv.x[: len(x)]}
        bias = {**places, "both": tuple(places.values())}[given]
        apart = tuple(term.clone() for term in bias) if isinstance(bias, tuple) else bias.clone()
        want = ep.combine(rows, recv.handle, bias=apart)
        got = ep.combine(rows, recv.handle, bias=bias, in_place=True)
        assert_same_bits(got, want, what="sums", rank=ranks.rank)
        ep.close()

    simulate(4, body, seed=seed)


if __name__ == "__main__":
    check(*map(int, sys.argv[1:]))
