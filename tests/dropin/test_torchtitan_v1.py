"""torchtitan 0.2.2, unmodified, over V1 ``Buffer``: its DeepEP functions and its MoE layer, equal
to one process's, forward and backward.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from itertools import product
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deep_ep_world import World
from frameworks import lend, lend_deep_ep, needs, own_ranks
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, assert_close, distributed_test
from torchtitan_layers import TOKENS, check_layer

FRAMEWORK = "torchtitan-0.2.2"
pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]


def deepep() -> ModuleType:
    """``torchtitan.distributed.deepep.deepep``; its operators are for CUDA only, here for CPUs
    too.
    """
    name = "torchtitan.distributed.deepep.deepep"
    if name not in sys.modules:
        lend_deep_ep("1")
        lend(FRAMEWORK, bare=("torchtitan", "torchtitan.models"), absent=("tyro",))
        from torchtitan.distributed.deepep import deepep

        for operator in ("dispatch", "combine"):
            deepep._lib.impl(operator, getattr(deepep, f"_{operator}_op_impl"), "CPU")
    return sys.modules[name]


@contextmanager
def counting() -> Generator[None]:
    """``torch.histc``, by which the router counts, takes no whole numbers on CPUs."""

    def histc(x: Tensor, bins: int, min: int, max: int) -> Tensor:
        return torch.bincount(x, minlength=bins)

    with mock.patch.object(torch, "histc", histc):
        yield


@distributed_test(world_size=3 if SOAK == 1 else (1, 3))
def test_dispatch_and_combine(ranks: Ranks) -> None:
    """Scores before and after the experts, recomputed and not, uneven and empty ranks."""
    module = deepep()
    for tokens, before, again in product(TOKENS, (False, True), (False, True)):
        world = World.of(ranks, tokens)
        of_experts = (len(world.experts_of(ranks.rank)), world.num_experts)

        def dispatch(x, scores, world=world, before=before, of_experts=of_experts):
            return module.dispatch_tokens(
                *(x, world.idx[ranks.rank], scores, *of_experts, ranks.group),
                score_before_experts=before,
            )

        check_layer(ranks, world, dispatch, module, again)


def run(layer: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradient of the input; those of weights are added up in the layer."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    return {"output": out.detach(), "gradient of input": x.grad}


@distributed_test(world_size=3)
def test_layer(ranks: Ranks) -> None:
    """``DeepEPMoE`` under ``DeepEPExpertParallel``, as ``MoE`` on one process."""
    deepep()
    from torch.distributed.tensor import DeviceMesh, DTensor
    from torchtitan.distributed.expert_parallel import DeepEPExpertParallel
    from torchtitan.models.moe.moe import MoE, MoEArgs
    from torchtitan.models.moe.moe_deepep import DeepEPMoE

    mesh = DeviceMesh.from_group(ranks.group, "cpu", mesh_dim_names=("ep",))
    for before, shared in product((False, True), (0, 1)):
        setting = MoEArgs(
            num_experts=6,
            num_shared_experts=shared,
            score_func="sigmoid" if shared else "softmax",
            score_before_experts=before,
            top_k=3,
            use_grouped_mm=False,
        )
        layers = []
        for kind in (MoE, DeepEPMoE):
            torch.manual_seed(7)
            layers.append(kind(setting, 64, 32))
            with torch.no_grad():
                layers[-1].init_weights(0.5, torch.device("cpu"))
        one, many = layers
        many.experts = DeepEPExpertParallel(before)._apply(many.experts, mesh)
        batches = torch.randn(
            ranks.world_size, 2, 2, 5, 64, generator=torch.Generator().manual_seed(1)
        )
        with counting():
            got = run(many, *batches[ranks.rank])
            wanted = [run(one, *batch) for batch in batches][ranks.rank]
        for name, weight in many.named_parameters():
            gradient, want = weight.grad, one.get_parameter(name).grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
                want = want.tensor_split(ranks.world_size)[ranks.rank]
            else:
                torch.distributed.all_reduce(gradient, group=ranks.group)
            got[name], wanted[name] = gradient, want
        for name, tensor in got.items():
            where = f"{name}, {setting}"
            assert_close(tensor, wanted[name], relative=1e-6, what=where)
