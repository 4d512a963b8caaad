"""torchtitan 0.3.0, unmodified, over V2 ``ElasticBuffer``: its DeepEP functions, equal to one
process's, and its dispatcher, equal to its own all-to-all; and a native dispatcher in its place.
"""

from __future__ import annotations

import sys
from itertools import product
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from deep_ep_world import World
from frameworks import lend_deep_ep, needs, own_ranks
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, assert_close, distributed_test
from torchtitan_layers import LATEST, TOKENS, check_layer, example, experts, lend_latest

pytestmark = needs(LATEST)
__all__ = ["own_ranks"]


def deepep() -> ModuleType:
    """``torchtitan.distributed.deepep.deepep``; its operators are for CUDA only, here for CPUs
    too.
    """
    name = "torchtitan.distributed.deepep.deepep"
    if name not in sys.modules:
        lend_latest()
        lend_deep_ep("2")
        from torchtitan.distributed.deepep import deepep

        for operator in ("dispatch", "combine"):
            deepep._lib.impl(operator, getattr(deepep, f"_{operator}_op_impl"), "CPU")
    return sys.modules[name]


@distributed_test(world_size=2 if SOAK == 1 else (1, 3))
def test_dispatch_and_combine(ranks: Ranks) -> None:
    """Training, recomputed and not, and the static layout of a generator; uneven and empty
    ranks.
    """
    module = deepep()
    for tokens, again in product(TOKENS, (False, True)):
        world = World.of(ranks, tokens)
        most = max(1, *map(len, world.idx))
        sizes = {"num_max_tokens_per_rank": 64, "num_topk": world.num_topk}
        module.get_buffer(ranks.group, hidden=world.hidden, **sizes)
        of_experts = (len(world.experts_of(ranks.rank)), world.num_experts)

        def dispatch(x, scores, world=world, most=most, of_experts=of_experts, static=False):
            return module.dispatch_tokens(
                *(x, world.idx[ranks.rank], scores, *of_experts),
                num_tokens_per_rank=most,
                cudagraphable=static,
            )

        check_layer(ranks, world, dispatch, module, again)
        with torch.no_grad():
            x, scores = world.x[ranks.rank], world.weights[ranks.rank]
            rows, counts, state = dispatch(x, scores, static=True)
            assert state.cudagraphable
            work = experts(world, ranks.rank, rows, counts)
            out = module.combine_tokens(work, state)
            module.sync_combine()
            assert torch.equal(out, world.layered(ranks.rank)), tokens


@distributed_test(world_size=2)
def test_dispatcher(ranks: Ranks) -> None:
    """``DeepEPTokenDispatcher`` in ``RoutedExperts``, as ``AllToAllTokenDispatcher``."""
    deepep()
    its = example()
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        DeepEPTokenDispatcher,
    )

    its.set_spmd_backend("partial_dtensor")
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("ep",))
    sizes = {"num_experts": its.EXPERTS, "top_k": its.TOPK}
    more = {"hidden_dim": its.HIDDEN, "num_max_tokens_per_rank": its.TOKENS}
    got, want = (
        its.forward_and_backward(its.routed_experts(each, mesh, ranks.device), ranks.device)
        for each in (
            DeepEPTokenDispatcher.Config(**sizes, **more),
            AllToAllTokenDispatcher.Config(**sizes),
        )
    )
    for name, tensor in got.items():
        assert_close(tensor, want[name], relative=2**-7, what=name)


@distributed_test(world_size=2)
def test_native_example(ranks: Ranks) -> None:
    """The example, and that torchtitan puts its dispatcher into a model's configuration."""
    its = example()
    its.main(ranks.device)
    from torchtitan.config.override import OverrideConfig, apply_overrides

    sizes = {"num_experts": its.EXPERTS, "top_k": its.TOPK}
    experts = its.moe.GroupedExperts.Config(dim=64, hidden_dim=32, num_experts=its.EXPERTS)
    theirs = its.AllToAllTokenDispatcher.Config(**sizes)
    model = its.moe.RoutedExperts.Config(inner_experts=experts, token_dispatcher=theirs)
    target = f"{its.__name__}.on_tokenyard", {"hidden_dim": 64}
    apply_overrides(OverrideConfig(imports=[target]), model)
    assert model.token_dispatcher == its.TokenyardTokenDispatcher.Config(**sizes, hidden_dim=64)
