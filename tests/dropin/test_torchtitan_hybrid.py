"""torchtitan 0.3.0's own ``HybridEPTokenDispatcher`` over ``HybridEPBuffer``: as its all-to-all,
forward and backward.
"""

from __future__ import annotations

from itertools import product
from types import ModuleType

import torch.distributed as dist
from torch._library import opaque_object
from torch.distributed.device_mesh import DeviceMesh

from frameworks import lend_deep_ep, needs, own_ranks
from tokenyard.testing import Ranks, assert_close, distributed_test
from torchtitan_layers import LATEST, example

pytestmark = needs(LATEST)
__all__ = ["own_ranks"]


def operators_on_cpu() -> None:
    """torchtitan's are for CUDA only, and for a torch in which a class has another name."""
    vars(opaque_object).setdefault("CustomClassBase", opaque_object.OpaqueBase)
    from torchtitan.distributed.deepep import hybridep

    for name in ("dispatch", "combine", "dispatch_bwd", "combine_bwd"):
        operator = getattr(hybridep, f"_{name}_impl")
        operator.register_kernel("cpu")(operator._init_fn)


def check(its: ModuleType, ranks: Ranks, mesh: DeviceMesh) -> None:
    from torchtitan.models.common import token_dispatcher

    sizes = {"num_experts": its.EXPERTS, "top_k": its.TOPK}
    hybrid = {"hidden_dim": its.HIDDEN, "num_max_tokens_per_rank": its.TOKENS}
    theirs = token_dispatcher.AllToAllTokenDispatcher.Config(**sizes)
    want = its.forward_and_backward(its.routed_experts(theirs, mesh, ranks.device), ranks.device)
    for capacity, pad in product((None, 1.0), (None, 16)):
        ours = token_dispatcher.HybridEPTokenDispatcher.Config(
            **sizes, **hybrid, non_blocking_capacity_factor=capacity, pad_multiple=pad
        )
        layer = its.routed_experts(ours, mesh, ranks.device)
        got = its.forward_and_backward(layer, ranks.device)
        for name, tensor in got.items():
            assert_close(tensor, want[name], relative=2**-7, what=f"{name}, {capacity}, {pad}")


@distributed_test(world_size=2)
def test_dispatcher(ranks: Ranks) -> None:
    """Exact and static numbers of rows, padded and not."""
    lend_deep_ep("hybrid")
    its = example()
    its.set_spmd_backend("partial_dtensor")
    operators_on_cpu()
    check(its, ranks, DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("ep",)))
