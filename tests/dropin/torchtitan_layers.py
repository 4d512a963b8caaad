"""Layers of torchtitan's DeepEP functions, equal to one process's, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deep_ep_world import World
from frameworks import lend
from tokenyard.testing import Ranks, assert_close

TOKENS = ("even", "uneven", "empty first", "only last")

LATEST = "torchtitan-0.3.0"
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_dispatcher.py"

Dispatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Any]]
"""From tokens and scores: rows sorted by expert, how many are each one's, and the state."""


def experts(world: World, rank: int, rows: Tensor, counts: Tensor) -> Tensor:
    """What the experts of a rank make of rows; those past the counts become nan, which nobody may
    read.
    """
    factors = torch.tensor([expert % 3 + 1.0 for expert in world.experts_of(rank)])
    each = factors.repeat_interleave(counts)
    rest = torch.full((len(rows) - len(each),), float("nan"))
    return rows * torch.cat([each, rest])[:, None].to(rows.dtype)


def check_layer(ranks: Ranks, world: World, dispatch: Dispatch, module: Any, again: bool) -> None:
    """Bits of the output and of the gradient of the input.

    Args:
        module: has ``combine_tokens`` and ``sync_combine``.
        again: dispatch again in backward (activation checkpointing).
    """

    def layer(x: Tensor, scores: Tensor) -> Tensor:
        rows, counts, state = dispatch(x, scores)
        out = module.combine_tokens(experts(world, ranks.rank, rows, counts), state)
        module.sync_combine()
        return out

    idx, want = world.idx[ranks.rank], world.layered(ranks.rank)
    x = world.x[ranks.rank].clone().requires_grad_()
    scores = world.weights[ranks.rank].clone().requires_grad_()
    out = checkpoint(layer, x, scores, use_reentrant=False) if again else layer(x, scores)
    assert torch.equal(out, want)
    out.sum().backward()
    scale = world.coefficients(idx, scores.detach())
    assert torch.equal(x.grad.float(), scale.expand_as(x))
    sums = x.detach().float().sum(1, keepdim=True)
    # A score of 0 is no pick to torchtitan.
    picked = torch.where((idx < 0) | (scores == 0), 0.0, (idx % 3 + 1) * sums)
    assert_close(scores.grad, picked, relative=2**-8, what="gradient of scores")


def lend_latest() -> None:
    """Make torchtitan 0.3.0 importable."""
    lend(LATEST, bare=("torchtitan", "torchtitan.models.common"), absent=("tyro",))


def example() -> ModuleType:
    """``examples/torchtitan_dispatcher.py``."""
    if EXAMPLE.stem not in sys.modules:
        lend_latest()
        spec = spec_from_file_location(EXAMPLE.stem, EXAMPLE)
        assert spec is not None and spec.loader is not None
        sys.modules[EXAMPLE.stem] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[EXAMPLE.stem]
